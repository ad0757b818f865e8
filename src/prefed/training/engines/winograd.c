/* Convolutions of 3 x 3 and 5 x 5 pixels with fewer products (Winograd 1980; Lavin and Gray 2016).

   A tile of 6 x 6 pixels of the input gives M x M of the output, 4 x 4 or 2 x 2. Both its channels and the
   weights are taken to six points in each direction, 0, 1, -1, 2, -2 and infinity, as polynomials are to be
   multiplied: there a convolution is one product for each of the 36 pairs of points, for 9 (or 25) products
   for each of 16 (or 4) pixels. With the matrices B, G and A of these points

       y = A' [(G w G') * (B' x B)] A         u = G w G', v = B' x B, * number by number

   and the way back is that of these lines: dv, du and what follows from them.

   Vectors hold samples, as in chain.c, and below this file are calls of `winograd` and `winograd_back`. */

enum { POINTS = 6, PAIRS = POINTS * POINTS };

/* t = B' x */
INLINE void to_points(const vec *x, int by, vec *t, int to)
{
    vec even = x[4 * by] - 4 * x[2 * by], odd = x[3 * by] - 4 * x[by];
    vec even2 = x[4 * by] - x[2 * by], odd2 = 2 * (x[3 * by] - x[by]);
    t[0] = 4 * x[0] - 5 * x[2 * by] + x[4 * by];
    t[to] = even + odd;
    t[2 * to] = even - odd;
    t[3 * to] = even2 + odd2;
    t[4 * to] = even2 - odd2;
    t[5 * to] = 4 * x[by] - 5 * x[3 * by] + x[5 * by];
}

/* x = B t */
INLINE void to_points_back(const vec *t, int by, vec *x, int to)
{
    vec even = t[by] + t[2 * by], odd = t[by] - t[2 * by];
    vec even2 = t[3 * by] + t[4 * by], odd2 = t[3 * by] - t[4 * by];
    x[0] = 4 * t[0];
    x[to] = 4 * (t[5 * by] - odd) - 2 * odd2;
    x[2 * to] = -5 * t[0] - 4 * even - even2;
    x[3 * to] = odd + 2 * odd2 - 5 * t[5 * by];
    x[4 * to] = t[0] + even + even2;
    x[5 * to] = t[5 * by];
}

/* y = A' t, of m pixels */
INLINE void to_pixels(int m, const vec *t, int by, vec *y, int to)
{
    vec even = t[by] + t[2 * by], odd = t[by] - t[2 * by];
    vec even2 = t[3 * by] + t[4 * by], odd2 = t[3 * by] - t[4 * by];
    y[0] = t[0] + even + even2;
    if (m == 2)
        y[to] = odd + 2 * odd2 + t[5 * by];
    else {
        y[to] = odd + 2 * odd2;
        y[2 * to] = even + 4 * even2;
        y[3 * to] = odd + 8 * odd2 + t[5 * by];
    }
}

/* t = A y */
INLINE void to_pixels_back(int m, const vec *y, int by, vec *t, int to)
{
    vec even = y[0], odd = y[by], even2 = y[0], odd2 = 2 * y[by];
    if (m == 4) even += y[2 * by], odd += y[3 * by], even2 += 4 * y[2 * by], odd2 += 8 * y[3 * by];
    t[0] = y[0];
    t[to] = even + odd;
    t[2 * to] = even - odd;
    t[3 * to] = even2 + odd2;
    t[4 * to] = even2 - odd2;
    t[5 * to] = y[(m - 1) * by];
}

/* G of the finite points, by powers of the point; the row of infinity is that of the last power. */
INLINE real power(int point, int n)
{
    static const real points[POINTS] = {0, 1, -1, 2, -2, 0};
    static const real shares[POINTS] = {(real)1 / 4, (real)-1 / 6, (real)-1 / 6, (real)1 / 24, (real)1 / 24, 0};
    real value = shares[point];
    UNROLL for (int i = 0; i < n; i++) value *= points[point];
    return value;
}

INLINE int counts(int k, int point, int n)
{
    return point == 0 ? n == 0 : point == POINTS - 1 ? n == k - 1 : 1;
}

INLINE real share(int k, int point, int n) { return point == POINTS - 1 ? n == k - 1 : power(point, n); }

/* A vector that begins with so many numbers. */
INLINE vec some(int numbers, const real *x)
{
    if (numbers == LANES) return *(const vec *)x;
    vec found = {0};
    memcpy(&found, x, numbers * sizeof(real));
    return found;
}

/* u = G w G', (pair, output, input). The weights of an output are laid out with its inputs side by side
   first, if they are not, so that vectors hold inputs. */
INLINE void weights_at_points(int ci, int co, int k, int by_c, int by_k, const real *restrict w,
                              real *restrict u)
{
    real sorted[k * k * ci];
    for (int o = 0; o < co; o++) {
        const real *here = w + o * ci * k * k;
        if (by_c != 1) {
            for (int c = 0; c < ci; c++)
                UNROLL for (int i = 0; i < k * k; i++) sorted[i * ci + c] = here[c * by_c + i * by_k];
            here = sorted;
        }
        for (int c = 0; c < ci; c += LANES) {
            const int inputs = ci - c < LANES ? ci - c : LANES;
            vec in[k * k], t[POINTS][8];
            for (int i = 0; i < k * k; i++) in[i] = some(inputs, here + i * ci + c);
            UNROLL for (int p = 0; p < POINTS; p++)
                UNROLL for (int b = 0; b < k; b++) {
                    vec all = {0};
                    UNROLL for (int a = 0; a < k; a++)
                        if (counts(k, p, a)) all += share(k, p, a) * in[a * k + b];
                    t[p][b] = all;
                }
            UNROLL for (int p = 0; p < POINTS; p++)
                UNROLL for (int q = 0; q < POINTS; q++) {
                    vec all = {0};
                    UNROLL for (int b = 0; b < k; b++)
                        if (counts(k, q, b)) all += share(k, q, b) * t[p][b];
                    memcpy(u + ((p * POINTS + q) * co + o) * ci + c, &all, inputs * sizeof(real));
                }
        }
    }
}

/* dw = G' du G */
INLINE void weights_back(int ci, int co, int k, int by_c, int by_k, const real *restrict du,
                         real *restrict g, int add)
{
    real sorted[k * k * ci];
    for (int o = 0; o < co; o++) {
        for (int c = 0; c < ci; c++) {
            real t[8][POINTS];
            UNROLL for (int a = 0; a < k; a++)
                UNROLL for (int q = 0; q < POINTS; q++) {
                    real all = 0;
                    UNROLL for (int p = 0; p < POINTS; p++)
                        if (counts(k, p, a)) all += share(k, p, a) * du[((p * POINTS + q) * co + o) * ci + c];
                    t[a][q] = all;
                }
            UNROLL for (int a = 0; a < k; a++)
                UNROLL for (int b = 0; b < k; b++) {
                    real all = 0;
                    UNROLL for (int q = 0; q < POINTS; q++)
                        if (counts(k, q, b)) all += share(k, q, b) * t[a][q];
                    sorted[(a * k + b) * ci + c] = all;
                }
        }
        for (int c = 0; c < ci; c++)
            UNROLL for (int i = 0; i < k * k; i++) {
                real *into = g + o * ci * k * k + c * by_c + i * by_k;
                *into = add ? *into + sorted[i * ci + c] : sorted[i * ci + c];
            }
    }
}

/* v = B' x B of a tile in each channel: (pair, channel), pairs `apart` vectors from each other */
INLINE void tile_at_points(int ci, int h, int wd, int apart, const vec *x, vec *v)
{
    for (int c = 0; c < ci; c++)
        for (int n = 0; n < N; n++) {
            vec t[PAIRS];
            UNROLL for (int j = 0; j < POINTS; j++)
                to_points(x + (c * h * wd + j) * N + n, wd * N, t + j, POINTS);
            UNROLL for (int i = 0; i < POINTS; i++)
                to_points(t + i * POINTS, 1, v + i * POINTS * apart + c * N + n, apart);
        }
}

/* A tile of each output from its values at the points, `rows` outputs at a time. */
INLINE void winograd_rows(int rows, int ci, int co, int m, int ow, int pixels, int apart, const real *u,
                          const real *bias, const vec *v, vec *y)
{
    vec at[PAIRS * HELD], t[4 * POINTS], out[16];
    for (int pair = 0; pair < PAIRS; pair++) {
        vec acc[HELD];
        UNROLL for (int i = 0; i < rows * N; i++) acc[i] = (vec){0};
        products(rows, ci, u + pair * co * ci, ci, 1, v + pair * apart, acc);
        UNROLL for (int i = 0; i < rows * N; i++) at[pair * rows * N + i] = acc[i];
    }
    for (int i = 0; i < rows * N; i++) {
        UNROLL for (int q = 0; q < POINTS; q++)
            to_pixels(m, at + q * rows * N + i, POINTS * rows * N, t + q, POINTS);
        UNROLL for (int a = 0; a < m; a++) to_pixels(m, t + a * POINTS, 1, out + a * m, 1);
        UNROLL for (int a = 0; a < m; a++)
            UNROLL for (int b = 0; b < m; b++)
                y[(i / N * pixels + a * ow + b) * N + i % N] = out[a * m + b] + (bias ? bias[i / N] : 0);
    }
}

/* Where a tile begins: the last ones overlap those before them. */
INLINE int tile(int i, int m, int size) { return i + m <= size ? i : size - m; }

/* y = the convolution of x; u, for the way back, and v are memory. */
INLINE void winograd(int ci, int h, int wd, int co, int k, int by_c, int by_k, int apart, const real *w,
                     const real *bias, const vec *x, vec *y, real *u, vec *v)
{
    int m = POINTS + 1 - k, oh = h - k + 1, ow = wd - k + 1;
    weights_at_points(ci, co, k, by_c, by_k, w, u);
    for (int i = 0; i < oh; i += m)
        for (int j = 0; j < ow; j += m) {
            int top = tile(i, m, oh), left = tile(j, m, ow), o = 0;
            vec *there = y + (top * ow + left) * N;
            tile_at_points(ci, h, wd, apart, x + (top * wd + left) * N, v);
            for (; o + R <= co; o += R)
                winograd_rows(R, ci, co, m, ow, oh * ow, apart, u + o * ci, bias ? bias + o : 0, v,
                              there + o * oh * ow * N);
            if (co % R)
                winograd_rows(co % R, ci, co, m, ow, oh * ow, apart, u + o * ci, bias ? bias + o : 0, v,
                              there + o * oh * ow * N);
        }
}

/* A y A' of a tile in each channel, without the pixels that the tiles before it have. */
INLINE void pixels_at_points(int co, int m, int ow, int pixels, int apart, int above, int before,
                             const vec *dy, vec *at)
{
    for (int o = 0; o < co; o++)
        for (int n = 0; n < N; n++) {
            vec t[PAIRS], in[16];
            UNROLL for (int a = 0; a < m; a++)
                UNROLL for (int b = 0; b < m; b++)
                    in[a * m + b] = a < above || b < before ? (vec){0} : dy[(o * pixels + a * ow + b) * N + n];
            UNROLL for (int b = 0; b < m; b++) to_pixels_back(m, in + b, m, t + b, m);
            UNROLL for (int p = 0; p < POINTS; p++)
                to_pixels_back(m, t + p * m, 1, at + p * POINTS * apart + o * N + n, apart);
        }
}

/* The tile's gradient of some channels of the input, added to what other tiles have. */
INLINE void winograd_input_rows(int rows, int ci, int h, int wd, int co, int apart, const real *u,
                                const vec *at, vec *dx)
{
    vec dv[PAIRS * HELD], t[PAIRS], out[PAIRS];
    for (int pair = 0; pair < PAIRS; pair++) {
        vec acc[HELD];
        UNROLL for (int i = 0; i < rows * N; i++) acc[i] = (vec){0};
        products(rows, co, u + pair * co * ci, 1, ci, at + pair * apart, acc);
        UNROLL for (int i = 0; i < rows * N; i++) dv[pair * rows * N + i] = acc[i];
    }
    for (int i = 0; i < rows * N; i++) {
        UNROLL for (int q = 0; q < POINTS; q++)
            to_points_back(dv + q * rows * N + i, POINTS * rows * N, t + q, POINTS);
        UNROLL for (int a = 0; a < POINTS; a++) to_points_back(t + a * POINTS, 1, out + a * POINTS, 1);
        UNROLL for (int a = 0; a < POINTS; a++)
            UNROLL for (int b = 0; b < POINTS; b++)
                dx[(i / N * h * wd + a * wd + b) * N + i % N] += out[a * POINTS + b];
    }
}

/* The gradients of the weights and, if there is a place for it, of the input. `wide` numbers from one
   sample to the next are room for a pair's channels. */
INLINE void winograd_back(int ci, int h, int wd, int co, int k, int by_c, int by_k, int apart, int out_apart,
                          int wide, int count, const vec *dy, const vec *x, real *g, real *bias, vec *dx,
                          int add, const real *u, vec *v, vec *at, real *turned, real *du)
{
    int m = POINTS + 1 - k, oh = h - k + 1, ow = wd - k + 1, pixels = oh * ow;
    if (dx)
        for (int i = 0; i < ci * h * wd * N; i++) dx[i] = (vec){0};
    for (int i = 0; i < oh; i += m)
        for (int j = 0; j < ow; j += m) {
            int top = tile(i, m, oh), left = tile(j, m, ow), place = top * wd + left, c = 0;
            pixels_at_points(co, m, ow, pixels, out_apart, i - top, j - left, dy + (top * ow + left) * N, at);
            if (dx) {
                for (; c + R <= ci; c += R)
                    winograd_input_rows(R, ci, h, wd, co, out_apart, u + c, at, dx + (c * h * wd + place) * N);
                if (ci % R)
                    winograd_input_rows(ci % R, ci, h, wd, co, out_apart, u + c, at,
                                        dx + (c * h * wd + place) * N);
            }
            tile_at_points(ci, h, wd, apart, x + place * N, v);
            for (int pair = 0; pair < PAIRS; pair++) {
                samples_first(ci, wide, v + pair * apart, turned);
                linear_weight(ci, co, wide, count, (const real *)(at + pair * out_apart), turned,
                              du + pair * co * ci, 0, i + j > 0);
            }
        }
    weights_back(ci, co, k, by_c, by_k, du, g, add);
    if (bias) pixel_sums(co, pixels * N, dy, bias, add);
}
