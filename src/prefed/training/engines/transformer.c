/* Forward and back through a transformer: blocks of attention and of two linear layers, each behind a
   LayerNorm and added to what came in, as in prefed.models.attention.

   As in chain.c a feature of a token lies beside the same feature of the other tokens, [feature][token],
   those of SEQUENCES samples of TOKENS each one behind another, WIDTH in all with zeros at the end. So a
   norm, a softmax and an activation are sums and products of whole vectors, and a linear layer and an
   attention are products of weights, or of another token's numbers, with vectors.

   Sizes are written before this file: WIDE features of a token, HEADS of EACH, HIDDEN between the two linear
   layers, CLASSES; PADDED is TOKENS up to a multiple of LANES, CAUSAL whether a token sees only those up to
   itself, EPSILON that of the norms, WIDEST the most features of a layer's input, padded too. Below it are the first and the last layers, and `pass`. */

enum { P = PADDED / LANES, HEAD = TOKENS * PADDED };

typedef struct {
    int norm1, norm1_bias, qkv, qkv_bias, out, out_bias, norm2, norm2_bias, up, up_bias, down, down_bias;
} Places; /* of the parameters of a block in w and g */

typedef struct {
    vec normed1[WIDE * N], scale1[N], qkv[3 * WIDE * N], mixed[WIDE * N], shares[SEQUENCES * HEADS * HEAD / LANES];
    vec normed2[WIDE * N], scale2[N], hidden[HIDDEN * N], slope[HIDDEN * N];
} Layer; /* what the way back needs of a block */

typedef struct { /* memory beside what is kept */
    vec a[3 * WIDE * N], b[(HIDDEN > WIDE ? HIDDEN : WIDE) * N];
    real turned[WIDTH * WIDEST]; /* the most features that a layer takes */
    vec q[EACH * P], k[EACH * P], v[EACH * P], out[EACH * P], dx[EACH * P]; /* of one head */
    vec d[TOKENS * P], shares[PADDED * P];
} Room;

/* ---- LayerNorm: normed = (x - mean) / deviation, y = weight normed + bias */

INLINE vec root(vec x)
{
    for (int i = 0; i < LANES; i++) x[i] = sizeof(real) == 8 ? sqrt(x[i]) : sqrtf(x[i]);
    return x;
}

INLINE void norm(const vec *x, vec *normed, vec *scale)
{
    for (int n = 0; n < N; n++) {
        vec mean = {0}, square = {0};
        for (int f = 0; f < WIDE; f++) mean += x[f * N + n];
        mean /= WIDE;
        for (int f = 0; f < WIDE; f++) square += (x[f * N + n] - mean) * (x[f * N + n] - mean);
        scale[n] = 1 / root(square / WIDE + (real)EPSILON);
        for (int f = 0; f < WIDE; f++) normed[f * N + n] = (x[f * N + n] - mean) * scale[n];
    }
}

INLINE void norm_output(const real *weight, const real *bias, const vec *normed, vec *y)
{
    for (int f = 0; f < WIDE; f++)
        for (int n = 0; n < N; n++) y[f * N + n] = weight[f] * normed[f * N + n] + bias[f];
}

/* The gradients of weight and bias, and of x, which is added to dx. */
INLINE void norm_back(const real *weight, const vec *normed, const vec *scale, const vec *dy, real *g,
                      real *g_bias, vec *dx, int add)
{
    vec mean[N], along[N];
    for (int n = 0; n < N; n++) mean[n] = along[n] = (vec){0};
    for (int f = 0; f < WIDE; f++) {
        vec all = {0}, all_bias = {0};
        for (int n = 0; n < N; n++) {
            vec d = dy[f * N + n], times = d * normed[f * N + n];
            all += times;
            all_bias += d;
            mean[n] += weight[f] * d;
            along[n] += weight[f] * times;
        }
        g[f] = add ? g[f] + sum(all) : sum(all);
        g_bias[f] = add ? g_bias[f] + sum(all_bias) : sum(all_bias);
    }
    for (int f = 0; f < WIDE; f++)
        for (int n = 0; n < N; n++)
            dx[f * N + n] += scale[n] * (weight[f] * dy[f * N + n] - mean[n] / WIDE
                                         - normed[f * N + n] * (along[n] / WIDE));
}

/* ---- GELU: x Phi(x), Phi the normal distribution's; and its slope */

INLINE vec error_function(vec x)
{
    if (sizeof(real) == 8) {
        for (int i = 0; i < LANES; i++) x[i] = erf(x[i]);
        return x;
    }
    vec far = (vec){0} + 4; /* there it is 1 in single precision; a quotient of polynomials up to there */
    x = choose(x > far, far, choose(x < -far, -far, x));
    vec s = x * x, p = (vec){0} + (real)-2.72614225801306e-10, q = (vec){0} + (real)-1.45660718464996e-05;
    p = p * s + (real)2.77068142495902e-08;
    p = p * s + (real)-2.10102402082508e-06;
    p = p * s + (real)-5.69250639462346e-05;
    p = p * s + (real)-7.34990630326855e-04;
    p = p * s + (real)-2.95459980854025e-03;
    p = p * s + (real)-1.60960333262415e-02;
    q = q * s + (real)-2.13374055278905e-04;
    q = q * s + (real)-1.68282697438203e-03;
    q = q * s + (real)-7.37332916720468e-03;
    q = q * s + (real)-1.42647390514189e-02;
    return x * p / q;
}

INLINE void gelu(vec *x, vec *slope)
{
    for (int i = 0; i < HIDDEN * N; i++) {
        vec z = x[i], share = (real)0.5 + (real)0.5 * error_function(z * (real)0.70710678118654752440);
        slope[i] = share + z * (real)0.39894228040143267794 * exponential((real)-0.5 * z * z);
        x[i] = z * share;
    }
}

/* ---- attention of one head on one sequence */

/* Tokens of one sequence, with zeros behind them. */
INLINE void tokens_of(int features, const real *x, vec *into)
{
    for (int f = 0; f < features; f++) {
        into[f * P + P - 1] = (vec){0};
        memcpy(into + f * P, x + f * WIDTH, TOKENS * sizeof(real));
    }
}

INLINE void tokens_back(int features, const vec *x, real *into)
{
    for (int f = 0; f < features; f++) memcpy(into + f * WIDTH, x + f * P, TOKENS * sizeof(real));
}

/* Whether tokens of vector n see token s. */
INLINE mask sees(int n, int s)
{
    mask yes;
    UNROLL for (int l = 0; l < LANES; l++) yes[l] = !CAUSAL || n * LANES + l >= s ? -1 : 0;
    return yes;
}

/* Tokens that vector n sees some of. */
INLINE int seen(int n) { return CAUSAL && (n + 1) * LANES < TOKENS ? (n + 1) * LANES : TOKENS; }

/* [token][token] becomes its transpose, the rows beyond TOKENS zero */
INLINE void transpose(const vec *x, vec *into)
{
    for (int a = 0; a < P; a++)
        for (int b = 0; b < P; b++) {
            vec square[LANES];
            UNROLL for (int i = 0; i < LANES; i++)
                square[i] = a * LANES + i < TOKENS ? x[(a * LANES + i) * P + b] : (vec){0};
            turn(square);
            UNROLL for (int i = 0; i < LANES; i++) into[(b * LANES + i) * P + a] = square[i];
        }
}

/* shares[s][t] of token s in what t sees, a softmax over s of k_s q_t / sqrt(EACH) */
INLINE void shares_of(const vec *q, const vec *k, vec *shares)
{
    const real scale = 1 / (sizeof(real) == 8 ? (real)sqrt(EACH) : sqrtf(EACH));
    memset(shares, 0, HEAD * sizeof(real));
    product(TOKENS, P, EACH, CAUSAL ? ROWS_UP_TO_COLUMN : ALL, (const real *)k, 1, PADDED, q, P, 0, shares, P, 0);
    for (int n = 0; n < P; n++) {
        vec top = shares[n], norm = {0};
        for (int s = 1; s < seen(n); s++)
            top = s < n * LANES || !CAUSAL
                      ? larger(top, shares[s * P + n])
                      : choose(sees(n, s), larger(top, shares[s * P + n]), top);
        for (int s = 0; s < seen(n); s++) {
            vec e = exponential((shares[s * P + n] - top) * scale);
            if (CAUSAL && s >= n * LANES) e = (vec)((mask)e & sees(n, s));
            norm += shares[s * P + n] = e;
        }
        norm = 1 / norm;
        for (int s = 0; s < seen(n); s++) shares[s * P + n] *= norm;
        for (int s = seen(n); s < TOKENS; s++) shares[s * P + n] = (vec){0};
    }
}

INLINE void attention(const real *qkv, vec *shares, real *mixed, Room *room)
{
    vec *q = room->q, *k = room->k, *v = room->v, *out = room->out;
    tokens_of(EACH, qkv, q);
    tokens_of(EACH, qkv + WIDE * WIDTH, k);
    tokens_of(EACH, qkv + 2 * WIDE * WIDTH, v);
    shares_of(q, k, shares);
    product(EACH, P, TOKENS, CAUSAL ? UP_TO_COLUMN : ALL, (const real *)v, PADDED, 1, shares, P, 0, out, P, 0);
    tokens_back(EACH, out, mixed);
}

INLINE void attention_back(const real *qkv, const vec *shares, const real *dmixed, real *dqkv, Room *room)
{
    vec *q = room->q, *k = room->k, *v = room->v, *dout = room->out, *dx = room->dx;
    vec *d = room->d, *turned = room->shares;
    const real scale = 1 / (sizeof(real) == 8 ? (real)sqrt(EACH) : sqrtf(EACH));
    tokens_of(EACH, qkv, q);
    tokens_of(EACH, qkv + WIDE * WIDTH, k);
    tokens_of(EACH, qkv + 2 * WIDE * WIDTH, v);
    tokens_of(EACH, dmixed, dout);
    transpose(shares, turned);
    product(EACH, P, TOKENS, CAUSAL ? FROM_COLUMN : ALL, (const real *)dout, PADDED, 1, turned, P, 0, dx, P, 0);
    tokens_back(EACH, dx, dqkv + 2 * WIDE * WIDTH);
    memset(d, 0, sizeof room->d);
    product(TOKENS, P, EACH, CAUSAL ? ROWS_UP_TO_COLUMN : ALL, (const real *)v, 1, PADDED, dout, P, 0, d, P, 0);
    for (int n = 0; n < P; n++) {
        vec along = {0};
        for (int s = 0; s < seen(n); s++) along += shares[s * P + n] * d[s * P + n];
        for (int s = 0; s < seen(n); s++) d[s * P + n] = shares[s * P + n] * (d[s * P + n] - along) * scale;
        for (int s = seen(n); s < TOKENS; s++) d[s * P + n] = (vec){0};
    }
    product(EACH, P, TOKENS, CAUSAL ? UP_TO_COLUMN : ALL, (const real *)k, PADDED, 1, d, P, 0, dx, P, 0);
    tokens_back(EACH, dx, dqkv);
    transpose(d, turned);
    product(EACH, P, TOKENS, CAUSAL ? FROM_COLUMN : ALL, (const real *)q, PADDED, 1, turned, P, 0, dx, P, 0);
    tokens_back(EACH, dx, dqkv + WIDE * WIDTH);
}

/* ---- a block */

static __attribute__((noinline)) void block(const real *w, const Places *at, vec *h, Layer *keep, Room *room,
                                            int sequences)
{
    norm(h, keep->normed1, keep->scale1);
    norm_output(w + at->norm1, w + at->norm1_bias, keep->normed1, room->a);
    product(3 * WIDE, N, WIDE, ALL, w + at->qkv, WIDE, 1, room->a, N, w + at->qkv_bias, keep->qkv, N, 0);
    memset(keep->mixed, 0, sizeof keep->mixed);
    for (int s = 0; s < sequences; s++)
        for (int i = 0; i < HEADS; i++) {
            int place = i * EACH * WIDTH + s * TOKENS;
            attention((real *)keep->qkv + place, keep->shares + (s * HEADS + i) * (HEAD / LANES),
                      (real *)keep->mixed + place, room);
        }
    product(WIDE, N, WIDE, ALL, w + at->out, WIDE, 1, keep->mixed, N, w + at->out_bias, h, N, 1);
    norm(h, keep->normed2, keep->scale2);
    norm_output(w + at->norm2, w + at->norm2_bias, keep->normed2, room->a);
    product(HIDDEN, N, WIDE, ALL, w + at->up, WIDE, 1, room->a, N, w + at->up_bias, keep->hidden, N, 0);
    gelu(keep->hidden, keep->slope);
    product(WIDE, N, HIDDEN, ALL, w + at->down, HIDDEN, 1, keep->hidden, N, w + at->down_bias, h, N, 1);
}

/* The gradient of a linear layer's weights; x is what came in. */
INLINE void weights_of(int in, int out, int tokens, const vec *dy, const vec *x, real *g, real *bias, int add,
                       Room *room)
{
    samples_first(in, ROUND(in), x, room->turned);
    linear_weight(in, out, ROUND(in), tokens, (const real *)dy, room->turned, g, bias, add);
}

static __attribute__((noinline)) void block_back(const real *w, real *g, const Places *at, vec *dh,
                                                 const Layer *keep, Room *room, int sequences, int add)
{
    int tokens = sequences * TOKENS;
    weights_of(HIDDEN, WIDE, tokens, dh, keep->hidden, g + at->down, g + at->down_bias, add, room);
    product(HIDDEN, N, WIDE, ALL, w + at->down, 1, HIDDEN, dh, N, 0, room->b, N, 0);
    for (int i = 0; i < HIDDEN * N; i++) room->b[i] *= keep->slope[i];
    norm_output(w + at->norm2, w + at->norm2_bias, keep->normed2, room->a);
    weights_of(WIDE, HIDDEN, tokens, room->b, room->a, g + at->up, g + at->up_bias, add, room);
    product(WIDE, N, HIDDEN, ALL, w + at->up, 1, WIDE, room->b, N, 0, room->a, N, 0);
    norm_back(w + at->norm2, keep->normed2, keep->scale2, room->a, g + at->norm2, g + at->norm2_bias, dh, add);
    weights_of(WIDE, WIDE, tokens, dh, keep->mixed, g + at->out, g + at->out_bias, add, room);
    product(WIDE, N, WIDE, ALL, w + at->out, 1, WIDE, dh, N, 0, room->b, N, 0);
    memset(room->a, 0, sizeof room->a);
    for (int s = 0; s < sequences; s++)
        for (int i = 0; i < HEADS; i++) {
            int place = i * EACH * WIDTH + s * TOKENS;
            attention_back((real *)keep->qkv + place, keep->shares + (s * HEADS + i) * (HEAD / LANES),
                           (real *)room->b + place, (real *)room->a + place, room);
        }
    norm_output(w + at->norm1, w + at->norm1_bias, keep->normed1, room->b);
    weights_of(WIDE, 3 * WIDE, tokens, room->a, room->b, g + at->qkv, g + at->qkv_bias, add, room);
    product(WIDE, N, 3 * WIDE, ALL, w + at->qkv, 1, WIDE, room->a, N, 0, room->b, N, 0);
    norm_back(w + at->norm1, keep->normed1, keep->scale1, room->b, g + at->norm1, g + at->norm1_bias, dh, add);
}

/* ---- first layers: h [feature][token], and the way back from dh */

/* Symbols, each with its row of the table, and positions. -3 if one is none. */
INLINE int symbols(int sequences, const real *x, const real *table, int rows, const real *positions, real *h)
{
    for (int t = 0; t < sequences * TOKENS; t++) {
        if (!(x[t] >= 0 && x[t] < rows)) return -3;
        const real *row = table + (int64_t)x[t] * WIDE, *here = positions + t % TOKENS * WIDE;
        for (int f = 0; f < WIDE; f++) h[f * WIDTH + t] = row[f] + here[f];
    }
    return 0;
}

/* `turned` is dh, [token][feature] */
INLINE void symbols_back(int sequences, const real *x, const real *turned, real *table)
{
    for (int t = 0; t < sequences * TOKENS; t++) {
        real *row = table + (int64_t)x[t] * WIDE;
        for (int f = 0; f < WIDE; f++) row[f] += turned[t * ROUND(WIDE) + f];
    }
}

INLINE void positions_back(int sequences, const real *turned, real *positions, int add)
{
    if (!add) memset(positions, 0, TOKENS * WIDE * sizeof(real));
    for (int t = 0; t < sequences * TOKENS; t++)
        for (int f = 0; f < WIDE; f++) positions[t % TOKENS * WIDE + f] += turned[t * ROUND(WIDE) + f];
}

/* Images (channels, high, wide) cut into squares of `side`: [feature][token], the first token is none. */
INLINE void patches(int sequences, int channels, int high, int wide, int side, const real *x, real *into)
{
    memset(into, 0, channels * side * side * WIDTH * sizeof(real));
    for (int s = 0; s < sequences; s++)
        for (int c = 0; c < channels; c++)
            for (int i = 0; i < high; i++)
                for (int j = 0; j < wide; j++) {
                    int feature = (c * side + i % side) * side + j % side;
                    int token = 1 + i / side * (wide / side) + j / side;
                    into[feature * WIDTH + s * TOKENS + token] = x[((s * channels + c) * high + i) * wide + j];
                }
}

/* The first token in front of the patches' vectors, positions, and zeros behind the last sequence. */
INLINE void with_first(int sequences, const real *first, const real *positions, real *h)
{
    for (int f = 0; f < WIDE; f++)
        for (int t = 0; t < WIDTH; t++) {
            int place = t % TOKENS;
            real value = place ? h[f * WIDTH + t] : first[f];
            h[f * WIDTH + t] = t < sequences * TOKENS ? value + positions[place * WIDE + f] : 0;
        }
}

/* The gradient of the first token, which is taken out of dh. */
INLINE void first_back(int sequences, real *dh, real *first, int add)
{
    for (int f = 0; f < WIDE; f++) {
        real all = add ? first[f] : 0;
        for (int s = 0; s < sequences; s++) {
            all += dh[f * WIDTH + s * TOKENS];
            dh[f * WIDTH + s * TOKENS] = 0;
        }
        first[f] = all;
    }
}

/* ---- the first token of each sequence, side by side, and back */

INLINE void first_tokens(int sequences, const real *x, real *into)
{
    memset(into, 0, WIDE * WIDTH * sizeof(real));
    for (int f = 0; f < WIDE; f++)
        for (int s = 0; s < sequences; s++) into[f * WIDTH + s] = x[f * WIDTH + s * TOKENS];
}

INLINE void first_tokens_back(int sequences, const real *d, real *into)
{
    memset(into, 0, WIDE * WIDTH * sizeof(real));
    for (int f = 0; f < WIDE; f++)
        for (int s = 0; s < sequences; s++) into[f * WIDTH + s * TOKENS] = d[f * WIDTH + s];
}
