/* Forward and back through a chain of layers, for one batch of one client.

   Between layers a number of a sample lies beside the same number of the other samples:
   [feature][sample], WIDTH samples wide, N vectors of LANES numbers. So a weight is loaded once and
   multiplied with all samples, whatever the layer's shape, and ReLU and pooling need no shuffling.
   Samples of the last vectors that are none have the gradient 0.

   What is written by prefed (native_chains.py) stands below this file: the chain, as calls of these
   functions with numbers in place of sizes, so that the compiler can unroll every inner loop.
   vectors.c stands above, and WIDTH and ROWS (of a product that is held in registers, times N) come before
   it, and others that say what they are. */

enum { N = WIDTH / LANES, R = ROWS / N > 1 ? ROWS / N : 1, M = 4, RW = ROWS / M };

INLINE real sum(vec v)
{
    real t[LANES];
    memcpy(t, &v, sizeof t);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
}

INLINE vec choose(mask which, vec a, vec b) { return (vec)((which & (mask)a) | (~which & (mask)b)); }

INLINE vec larger(vec a, vec b) { return choose((b > a) | (b != b), b, a); } /* NaN stays */

/* ---- samples [sample][feature] <-> [feature][sample] */

INLINE void samples_last(int features, int count, const real *x, real *into)
{
    int f = 0;
    for (; f + LANES <= features; f += LANES)
        for (int first = 0; first < WIDTH; first += LANES) {
            vec square[LANES];
            UNROLL for (int i = 0; i < LANES; i++)
                square[i] = first + i < count ? *(const vec *)(x + (int64_t)(first + i) * features + f) : (vec){0};
            turn(square);
            UNROLL for (int i = 0; i < LANES; i++) *(vec *)(into + (f + i) * WIDTH + first) = square[i];
        }
    for (; f < features; f++)
        for (int b = 0; b < WIDTH; b++) into[f * WIDTH + b] = b < count ? x[(int64_t)b * features + f] : 0;
}

/* `stride` numbers from one sample to the next are a multiple of LANES. */
INLINE void samples_first(int features, int stride, const vec *x, real *into)
{
    for (int f = 0; f < features; f += LANES)
        for (int n = 0; n < N; n++) {
            vec square[LANES];
            UNROLL for (int i = 0; i < LANES; i++)
                square[i] = f + i < features ? x[(f + i) * N + n] : (vec){0};
            turn(square);
            UNROLL for (int b = 0; b < LANES; b++) *(vec *)(into + (n * LANES + b) * stride + f) = square[b];
        }
}

/* ---- a fully connected layer: y = W x + b */

/* acc[r] += sum over i of w[r * by_row + i * by_term] x[i] */
INLINE void products(int rows, int terms, const real *w, int by_row, int by_term, const vec *x, vec *acc)
{
    for (int i = 0; i < terms; i++)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int n = 0; n < N; n++) acc[r * N + n] += w[r * by_row + i * by_term] * x[i * N + n];
}

INLINE void linear_rows(int rows, int in, const real *w, const real *bias, const vec *x, vec *y)
{
    vec acc[HELD];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int n = 0; n < N; n++) acc[r * N + n] = (vec){0} + (bias ? bias[r] : 0);
    products(rows, in, w, in, 1, x, acc);
    UNROLL for (int i = 0; i < rows * N; i++) y[i] = acc[i];
}

INLINE void linear(int in, int out, const real *w, const real *bias, const vec *x, vec *y)
{
    int o = 0;
    for (; o + R <= out; o += R) linear_rows(R, in, w + o * in, bias ? bias + o : 0, x, y + o * N);
    if (out % R) linear_rows(out % R, in, w + o * in, bias ? bias + o : 0, x, y + o * N);
}

INLINE void linear_input_rows(int rows, int in, int out, const real *w, const vec *dy, vec *dx)
{
    vec acc[HELD];
    UNROLL for (int i = 0; i < rows * N; i++) acc[i] = (vec){0};
    products(rows, out, w, 1, in, dy, acc);
    UNROLL for (int i = 0; i < rows * N; i++) dx[i] = acc[i];
}

INLINE void linear_input(int in, int out, const real *w, const vec *dy, vec *dx)
{
    int i = 0;
    for (; i + R <= in; i += R) linear_input_rows(R, in, out, w + i, dy, dx + i * N);
    if (in % R) linear_input_rows(in % R, in, out, w + i, dy, dx + i * N);
}

/* Rows and columns of the gradient of W: sums over samples, which are rows of x here. */
INLINE void linear_weight_tile(int rows, int columns, int last, int in, int stride, int count,
                               const real *dy, const real *x, real *g, int add)
{
    vec acc[HELD];
    UNROLL for (int i = 0; i < rows * columns; i++) acc[i] = (vec){0};
    for (int b = 0; b < count; b++)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < columns; c++)
                acc[r * columns + c] += dy[r * WIDTH + b] * ((const vec *)(x + b * stride))[c];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) {
            real *into = g + (int64_t)r * in + c * LANES;
            if (c + 1 < columns || last == LANES) {
                if (add) acc[r * columns + c] += *(vec *)into;
                *(vec *)into = acc[r * columns + c];
            } else { /* the end of a row, which the next one begins behind */
                real t[LANES];
                memcpy(t, &acc[r * columns + c], sizeof t);
                for (int i = 0; i < last; i++) into[i] = add ? into[i] + t[i] : t[i];
            }
        }
}

INLINE void linear_weight_rows(int rows, int in, int stride, int count, const real *dy, const real *x,
                               real *g, int add)
{
    int vectors = (in + LANES - 1) / LANES, last = in - (vectors - 1) * LANES, c = 0;
    for (; c + M < vectors; c += M)
        linear_weight_tile(rows, M, LANES, in, stride, count, dy, x + c * LANES, g + c * LANES, add);
    linear_weight_tile(rows, vectors - (vectors - 1) / M * M, last, in, stride, count, dy,
                       x + c * LANES, g + c * LANES, add);
}

/* x [sample][feature], `stride` apart; dy [feature][sample] */
INLINE void linear_weight(int in, int out, int stride, int count, const real *dy, const real *x, real *g,
                          real *bias, int add)
{
    int o = 0;
    for (; o + RW <= out; o += RW)
        linear_weight_rows(RW, in, stride, count, dy + o * WIDTH, x, g + (int64_t)o * in, add);
    if (out % RW)
        linear_weight_rows(out % RW, in, stride, count, dy + o * WIDTH, x, g + (int64_t)o * in, add);
    if (bias)
        for (o = 0; o < out; o++) {
            vec all = ((const vec *)dy)[o * N];
            for (int n = 1; n < N; n++) all += ((const vec *)dy)[o * N + n];
            bias[o] = add ? bias[o] + sum(all) : sum(all);
        }
}

/* ---- a convolution with stride 1 of images that have their border already. Its weights are by output,
   then `by_c` apart for each input channel and `by_k` for each pixel: channels first, or last. */

INLINE void conv_at(int rows, int ci, int h, int wd, int k, int by_c, int by_k, const real *w,
                    const real *bias, const vec *x, vec *y, int step)
{
    vec acc[HELD];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int n = 0; n < N; n++) acc[r * N + n] = (vec){0} + (bias ? bias[r] : 0);
    for (int c = 0; c < ci; c++)
        for (int a = 0; a < k; a++)
            products(rows, k, w + c * by_c + a * k * by_k, ci * k * k, by_k, x + (c * h + a) * wd * N, acc);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int n = 0; n < N; n++) y[r * step + n] = acc[r * N + n];
}

INLINE void conv(int ci, int h, int wd, int co, int k, int by_c, int by_k, const real *w, const real *bias,
                 const vec *x, vec *y)
{
    int oh = h - k + 1, ow = wd - k + 1, step = oh * ow * N, each = ci * k * k;
    for (int i = 0; i < oh; i++)
        for (int j = 0; j < ow; j++) {
            const vec *here = x + (i * wd + j) * N;
            vec *there = y + (i * ow + j) * N;
            int o = 0;
            for (; o + R <= co; o += R)
                conv_at(R, ci, h, wd, k, by_c, by_k, w + o * each, bias ? bias + o : 0, here,
                        there + o * step, step);
            if (co % R)
                conv_at(co % R, ci, h, wd, k, by_c, by_k, w + o * each, bias ? bias + o : 0, here,
                        there + o * step, step);
        }
}

/* Rows of windows in some channels: each number of dy is added to the window that it came from. */
INLINE void conv_input_at(int channels, int ci, int h, int wd, int co, int k, int by_c, int by_k,
                          const real *w, const vec *dy, vec *dx)
{
    int pixels = (h - k + 1) * (wd - k + 1);
    vec acc[HELD];
    UNROLL for (int t = 0; t < channels * k * N; t++) acc[t] = (vec){0};
    for (int o = 0; o < co; o++)
        UNROLL for (int c = 0; c < channels; c++)
            UNROLL for (int b = 0; b < k; b++)
                UNROLL for (int n = 0; n < N; n++)
                    acc[(c * k + b) * N + n] +=
                        w[o * ci * k * k + c * by_c + b * by_k] * dy[o * pixels * N + n];
    UNROLL for (int c = 0; c < channels; c++)
        UNROLL for (int t = 0; t < k * N; t++) dx[c * h * wd * N + t] += acc[c * k * N + t];
}

INLINE void conv_input(int ci, int h, int wd, int co, int k, int by_c, int by_k, const real *w,
                       const vec *dy, vec *dx)
{
    int oh = h - k + 1, ow = wd - k + 1, held = ROWS / (k * N) > 1 ? ROWS / (k * N) : 1;
    for (int i = 0; i < ci * h * wd * N; i++) dx[i] = (vec){0};
    for (int i = 0; i < oh; i++)
        for (int j = 0; j < ow; j++)
            for (int a = 0; a < k; a++) {
                const real *row = w + a * k * by_k;
                const vec *from = dy + (i * ow + j) * N;
                vec *into = dx + ((i + a) * wd + j) * N;
                int c = 0;
                for (; c + held <= ci; c += held)
                    conv_input_at(held, ci, h, wd, co, k, by_c, by_k, row + c * by_c, from,
                                  into + c * h * wd * N);
                if (ci % held)
                    conv_input_at(ci % held, ci, h, wd, co, k, by_c, by_k, row + c * by_c, from,
                                  into + c * h * wd * N);
            }
}

INLINE void conv_weight_rows(int rows, int ci, int h, int wd, int k, int by_c, int by_k, int c, int a,
                             const vec *dy, const vec *x, real *g, int add)
{
    int oh = h - k + 1, ow = wd - k + 1;
    vec acc[HELD];
    UNROLL for (int t = 0; t < rows * k; t++) acc[t] = (vec){0};
    for (int i = 0; i < oh; i++) {
        const vec *row = x + ((c * h + i + a) * wd) * N, *from = dy + i * ow * N;
        for (int j = 0; j < ow * N; j++)
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int b = 0; b < k; b++) acc[r * k + b] += from[r * oh * ow * N + j] * row[j + b * N];
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int b = 0; b < k; b++) {
            real *into = g + r * ci * k * k + c * by_c + (a * k + b) * by_k;
            *into = add ? *into + sum(acc[r * k + b]) : sum(acc[r * k + b]);
        }
}

/* The gradient of the bias. */
INLINE void pixel_sums(int co, int pixels, const vec *dy, real *bias, int add)
{
    for (int o = 0; o < co; o++) {
        vec all[4] = {{0}};
        for (int i = 0; i < pixels; i++) all[i % 4] += dy[o * pixels + i];
        real total = sum((all[0] + all[1]) + (all[2] + all[3]));
        bias[o] = add ? bias[o] + total : total;
    }
}

INLINE void conv_weight(int ci, int h, int wd, int co, int k, int by_c, int by_k, const vec *dy,
                        const vec *x, real *g, real *bias, int add)
{
    int pixels = (h - k + 1) * (wd - k + 1) * N, each = ci * k * k, o = 0;
    int held = ROWS / k - 1 > 1 ? ROWS / k - 1 : 1; /* and the k vectors of x */
    for (; o + held <= co; o += held)
        for (int c = 0; c < ci; c++)
            for (int a = 0; a < k; a++)
                conv_weight_rows(held, ci, h, wd, k, by_c, by_k, c, a, dy + o * pixels, x, g + o * each, add);
    if (co % held)
        for (int c = 0; c < ci; c++)
            for (int a = 0; a < k; a++)
                conv_weight_rows(co % held, ci, h, wd, k, by_c, by_k, c, a, dy + o * pixels, x,
                                 g + o * each, add);
    if (bias) pixel_sums(co, pixels, dy, bias, add);
}

INLINE void with_border(int c, int h, int wd, int p, const vec *x, vec *into)
{
    int H = h + 2 * p, W = wd + 2 * p;
    for (int i = 0; i < c * H * W * N; i++) into[i] = (vec){0};
    for (int i = 0; i < c; i++)
        for (int j = 0; j < h; j++)
            memcpy(into + ((i * H + j + p) * W + p) * N, x + (i * h + j) * wd * N, wd * N * sizeof(vec));
}

INLINE void without_border(int c, int h, int wd, int p, const vec *x, vec *into)
{
    int H = h + 2 * p, W = wd + 2 * p;
    for (int i = 0; i < c; i++)
        for (int j = 0; j < h; j++)
            memcpy(into + (i * h + j) * wd * N, x + ((i * H + j + p) * W + p) * N, wd * N * sizeof(vec));
}

/* ---- ReLU, in place */

INLINE void relu(int features, vec *y)
{
    for (int i = 0; i < features * N; i++) y[i] = (vec)((mask)y[i] & ~(y[i] < 0)); /* NaN stays */
}

INLINE void relu_input(int features, const vec *y, vec *d)
{
    for (int i = 0; i < features * N; i++) d[i] = (vec)((mask)d[i] & ~(y[i] <= 0));
}

/* ---- max-pooling of k x k pixels that do not overlap; the first of the largest has the gradient */

INLINE void pool(int c, int h, int wd, int k, const vec *x, vec *y)
{
    int oh = h / k, ow = wd / k;
    for (int i = 0; i < c; i++)
        for (int j = 0; j < oh; j++)
            for (int l = 0; l < ow * N; l++) {
                const vec *window = x + ((i * h + j * k) * wd + l / N * k) * N + l % N;
                vec most = window[0];
                UNROLL for (int a = 0; a < k; a++)
                    UNROLL for (int b = 0; b < k; b++) most = larger(most, window[(a * wd + b) * N]);
                y[(i * oh + j) * ow * N + l] = most;
            }
}

/* dx may be x. */
INLINE void pool_input(int c, int h, int wd, int k, const vec *x, const vec *y, const vec *dy, vec *dx)
{
    int oh = h / k, ow = wd / k;
    for (int i = 0; i < c; i++) { /* what is in no window */
        vec *of = dx + i * h * wd * N;
        for (int a = oh * k; a < h; a++)
            for (int b = 0; b < wd * N; b++) of[a * wd * N + b] = (vec){0};
        for (int a = 0; a < oh * k; a++)
            for (int b = ow * k * N; b < wd * N; b++) of[a * wd * N + b] = (vec){0};
    }
    for (int i = 0; i < c; i++)
        for (int j = 0; j < oh; j++)
            for (int l = 0; l < ow * N; l++) {
                int place = ((i * h + j * k) * wd + l / N * k) * N + l % N, pixel = (i * oh + j) * ow * N + l;
                mask free = ~(mask){0};
                UNROLL for (int a = 0; a < k; a++)
                    UNROLL for (int b = 0; b < k; b++) {
                        mask is = free & (x[place + (a * wd + b) * N] == y[pixel]);
                        dx[place + (a * wd + b) * N] = (vec)(is & (mask)dy[pixel]);
                        free &= ~is;
                    }
            }
}

/* ---- cross-entropy: the sum of the losses; z becomes the gradient of their mean over `of` samples */

INLINE vec exponential(vec x)
{
    if (sizeof(real) == 8) {
        for (int i = 0; i < LANES; i++) x[i] = exp(x[i]);
        return x;
    }
    vec low = (vec){0} - 87;
    x = choose(x < low, low, x); /* x is never above 0 here */
    vec times = x * (real)1.44269504088896341 - (real)0.5;
    mask n; /* towards 0: the nearest */
    vec whole_part, r;
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 9
    for (int i = 0; i < LANES; i++) whole_part[i] = (real)(n[i] = (whole)times[i]);
#else
    n = __builtin_convertvector(times, mask);
    whole_part = __builtin_convertvector(n, vec);
#endif
    r = x - whole_part * (real)0.693359375 - whole_part * (real)-2.12194440e-4;
    vec p = (vec){0} + (real)1.9875691500e-4;
    p = p * r + (real)1.3981999507e-3;
    p = p * r + (real)8.3334519073e-3;
    p = p * r + (real)4.1665795894e-2;
    p = p * r + (real)1.6666665459e-1;
    p = p * r + (real)5.0000001201e-1;
    p = p * r * r + r + 1;
    return p * (vec)((n + 127) << 23);
}

/* -1 if a label is no class */
INLINE int cross_entropy(int classes, int count, int64_t of, const int64_t *y, vec *z, double *loss)
{
    for (int b = 0; b < count; b++)
        if (y[b] < 0 || y[b] >= classes) return -1;
    real true_z[WIDTH] = {0}, norms[WIDTH], tops[WIDTH];
    for (int b = 0; b < count; b++) true_z[b] = ((real *)z)[y[b] * WIDTH + b];
    for (int n = 0; n < N; n++) {
        vec top = z[n], norm = {0};
        for (int c = 1; c < classes; c++) top = larger(top, z[c * N + n]);
        for (int c = 0; c < classes; c++) norm += z[c * N + n] = exponential(z[c * N + n] - top);
        vec share = 1 / (norm * (real)of);
        for (int c = 0; c < classes; c++) z[c * N + n] *= share;
        memcpy(norms + n * LANES, &norm, sizeof norm);
        memcpy(tops + n * LANES, &top, sizeof top);
    }
    for (int b = 0; b < WIDTH; b++)
        if (b < count) {
            *loss += log((double)norms[b]) + (double)tops[b] - (double)true_z[b];
            ((real *)z)[y[b] * WIDTH + b] -= 1 / (real)of;
        } else
            for (int c = 0; c < classes; c++) ((real *)z)[c * WIDTH + b] = 0;
    return 0;
}

/* ---- what prefed calls: `forward` leaves the scores of some samples at SCORES, `pass` goes forward and back */

static int forward(const real *w, const real *x, int count, real *scratch);

static int pass(const real *w, real *g, const real *x, const int64_t *y, int count, int64_t of, int add,
                double *loss, real *scratch);

/* The gradient of one batch of one client, SAMPLES at a time; -1 if a label is no class, -3 if a symbol is
   none. Samples have LABELS each. */
static int gradient(const real *w, real *g, const real *x, const int64_t *y, int64_t samples, real *loss,
                    real *scratch)
{
    double total = 0;
    for (int64_t first = 0; first < samples; first += SAMPLES) {
        int count = samples - first < SAMPLES ? (int)(samples - first) : SAMPLES;
        int failed = pass(w, g, x + first * FEATURES, y + first * LABELS, count, samples * LABELS, first > 0,
                          &total, scratch);
        if (failed) return failed;
    }
    *loss += (real)(total / (double)(samples * LABELS));
    return 0;
}

/* The scores of samples, (sample, CLASSES, LABELS), each found at SCORE(c, s, l); -3 if a symbol is none. */
int outputs(int64_t samples, const real *w, const real *x, real *out, real *scratch)
{
    for (int64_t first = 0; first < samples; first += SAMPLES) {
        int count = samples - first < SAMPLES ? (int)(samples - first) : SAMPLES;
        int failed = forward(w, x + first * FEATURES, count, scratch);
        if (failed) return failed;
        const real *scores = (const real *)SCORES;
        for (int s = 0; s < count; s++)
            for (int c = 0; c < CLASSES; c++)
                for (int l = 0; l < LABELS; l++) *out++ = scores[SCORE(c, s, l)];
    }
    return 0;
}

/* Of one batch of each client: w and g are rows of (clients, SIZE), `row` apart. */
int gradients(int64_t clients, int64_t samples, const real *w, real *g, int64_t row, const real *x,
              int64_t x_row, const int64_t *y, int64_t y_row, real *losses, real *scratch)
{
    int failed = 0;
    for (int64_t c = 0; c < clients && !failed; c++)
        failed = gradient(w + c * row, g + c * row, x + c * x_row, y + c * y_row, samples, losses + c, scratch);
    return failed;
}

/* A step of a client rule on the weights and the state of one client: a program of its own (rule.c). */
typedef void Rule(real *w, const real *g, real *const *state, real lr);

enum { APART = 13 * 64 }; /* bytes; a cache line has 64 */

/* Room for the n-th vector in `*memory`, of so many numbers: at the beginning of a cache line, and not as
   far into its page as the vectors before it. It takes at most two pages more than the numbers do. */
static real *room(real **memory, int n, int64_t numbers)
{
    uintptr_t page = ((uintptr_t)*memory + PAGE - 1) / PAGE * PAGE;
    real *start = (real *)(page + n * APART % PAGE);
    *memory = start + numbers;
    return start;
}

/* The samples of these numbers, one behind another; -2 if one is none of x. */
static int gather(int64_t count, const int64_t *numbers, int64_t samples, const real *x, real *into)
{
    for (int64_t b = 0; b < count; b++) {
        if (numbers[b] < 0 || numbers[b] >= samples) return -2;
        memcpy(into + b * FEATURES, x + numbers[b] * FEATURES, FEATURES * sizeof(real));
    }
    return 0;
}

/* The vector of a client as it begins: `start`, if there is one, or what is in its row. */
static void begin(real *own, const real *row, const real *start, int64_t numbers)
{
    if (start) row = start;
    if (own != row) memcpy(own, row, numbers * sizeof(real));
}

/* All local steps of each client, one client after another, so that its vectors stay in the cache. Several threads may
   do this together: each takes the client that is `next`, in memory of its own. If it is
   large enough for them they are COPIED: a rule that walks along several vectors takes half the time where
   none of them begins within a cache line, or as far into its page as another.
   Step k takes sizes[k] samples from starts[k] on. They lie in x as they lie in y, `x_row` numbers from
   client to client; or, if there are `numbers`, these say for each of y which of the `samples` in x it is
   (then LABELS is 1). Field f of the state is rows of lengths[f]. Weights and fields begin with what is in their row, or
   with the vector firsts[0] and firsts[f + 1]; if there is firsts[0], the weights' row is how far they have moved
   from it afterwards. -2 if a number is none of x. */
int steps(int64_t clients, int64_t *next, int64_t count, const int64_t *starts, const int64_t *sizes, real *w,
          const real *x, int64_t x_row, const int64_t *numbers, int64_t samples, const int64_t *y,
          int64_t y_row, real *losses, Rule *rule, int fields, real *const *state, const int64_t *lengths,
          const real *const *firsts, double lr, double decay, real *memory, real *scratch)
{
    real *own[MOST_FIELDS], *g = room(&memory, 0, SIZE), *own_w = COPIED ? room(&memory, 1, SIZE) : 0;
    int64_t largest = 0;
    for (int64_t k = 0; k < count; k++) largest = sizes[k] > largest ? sizes[k] : largest;
    real *batch = numbers ? room(&memory, 2, largest * FEATURES) : 0;
    if (COPIED)
        for (int f = 0; f < fields; f++) own[f] = room(&memory, f + 3, lengths[f]);
    for (int64_t c; (c = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < clients;) {
        real *row = w + c * SIZE;
        if (!COPIED) own_w = row;
        begin(own_w, row, firsts[0], SIZE);
        for (int f = 0; f < fields; f++) {
            if (!COPIED) own[f] = state[f] + c * lengths[f];
            begin(own[f], state[f] + c * lengths[f], firsts[f + 1], lengths[f]);
        }
        for (int64_t k = 0; k < count; k++) {
            const int64_t *labels = y + c * y_row + starts[k] * LABELS;
            if (numbers && gather(sizes[k], numbers + c * y_row + starts[k], samples, x, batch)) return -2;
            const real *its = numbers ? batch : x + c * x_row + starts[k] * FEATURES;
            int failed = gradient(own_w, g, its, labels, sizes[k], losses + c, scratch);
            if (failed) return failed;
            if (decay != 0)
                for (int64_t i = 0; i < SIZE; i++) g[i] += (real)decay * own_w[i];
            rule(own_w, g, own, (real)lr);
        }
        if (firsts[0])
            for (int64_t i = 0; i < SIZE; i++) row[i] = own_w[i] - firsts[0][i];
        if (!COPIED) continue;
        if (!firsts[0]) memcpy(row, own_w, SIZE * sizeof(real));
        for (int f = 0; f < fields; f++)
            memcpy(state[f] + c * lengths[f], own[f], lengths[f] * sizeof(real));
    }
    return 0;
}
