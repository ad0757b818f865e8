/* Forward and back through LSTM layers, between an embedding and a linear layer, as in prefed.models.chars.

   Here the features of a sample lie together, [time][sample][feature], with zeros up to a whole vector: a step of time
   has SAMPLES rows, too few to fill vectors, and all of them stay in registers while the weights pass by once. What does
   not wait for the step before, all times are taken together for: ALL_ROWS.

   A layer has `groups` of `each` outputs: four gates, or one group of scores. Written before this file are TIMES, the
   length of a sequence, LARGEST, the most weights of a layer with their zeros, and TOGETHER, the vectors of outputs that
   are summed at a time for the rows of one time step; below it are the layers, and `pass`. */

enum { ALL_ROWS = TIMES * SAMPLES, CHUNK = 64 }; /* CHUNK: rows of which the gradient of weights is summed at a time */

typedef struct {
    vec weights[LARGEST / LANES], turned[LARGEST / LANES];
} Room; /* for the weights of a layer */

/* ---- 1 / (1 + exp(-x)) and tanh(x) */

INLINE vec logistic(vec x)
{
    vec e = exponential(choose(x < 0, x, -x));
    return choose(x < 0, e, (vec){0} + 1) / (1 + e);
}

INLINE vec tangent(vec x)
{
    if (sizeof(real) == 8) {
        for (int i = 0; i < LANES; i++) x[i] = tanh(x[i]);
        return x;
    }
    vec below = choose(x < 0, x, -x), e = exponential(2 * below), far = (1 - e) / (1 + e);
    vec s = x * x, p = (vec){0} + (real)-5.70498872745e-3; /* near 0, where `far` loses digits */
    p = p * s + (real)2.06390887954e-2;
    p = p * s + (real)-5.37397155531e-2;
    p = p * s + (real)1.33314422036e-1;
    p = p * s + (real)-3.33332819422e-1;
    return choose(below > (vec){0} - (real)0.625, x + x * s * p, choose(x < 0, -far, far));
}

/* ---- symbols: x [sample][time] */

/* Each with its row of the table; -3 if one is none. */
INLINE int symbols(int count, int features, const real *x, const real *table, int rows, real *into)
{
    memset(into, 0, ALL_ROWS * ROUND(features) * sizeof(real));
    for (int b = 0; b < count; b++)
        for (int t = 0; t < TIMES; t++) {
            real symbol = x[b * TIMES + t];
            if (!(symbol >= 0 && symbol < rows)) return -3;
            memcpy(into + (t * SAMPLES + b) * ROUND(features), table + (int64_t)symbol * features,
                   features * sizeof(real));
        }
    return 0;
}

INLINE void symbols_back(int count, int features, const real *x, const real *d, real *table)
{
    for (int b = 0; b < count; b++)
        for (int t = 0; t < TIMES; t++)
            for (int f = 0; f < features; f++)
                table[(int64_t)x[b * TIMES + t] * features + f] += d[(t * SAMPLES + b) * ROUND(features) + f];
}

/* ---- linear parts of layers: w is (groups * each, in) */

/* Numbers from one row of a layer's output to the next: never as many as make rows fall on one another in the cache. */
#define APART_ROWS(groups, each) ((groups) * ROUND(each) + ((groups) > 1 ? LANES : 0))

/* w with zeros behind its rows and groups. */
INLINE void with_zeros(int groups, int each, int in, const real *w, vec *into)
{
    memset(into, 0, groups * ROUND(each) * ROUND(in) * sizeof(real));
    for (int k = 0; k < groups; k++)
        for (int j = 0; j < each; j++)
            memcpy((real *)into + (k * ROUND(each) + j) * ROUND(in), w + (int64_t)(k * each + j) * in,
                   in * sizeof(real));
}

/* The same with inputs as rows, in `turned`. */
INLINE void inputs_first(int groups, int each, int in, const real *w, Room *room)
{
    const int rows = groups * ROUND(each), wide = ROUND(in) / LANES;
    with_zeros(groups, each, in, w, room->weights);
    for (int r = 0; r < rows; r += LANES)
        for (int c = 0; c < wide; c++) {
            vec square[LANES];
            UNROLL for (int l = 0; l < LANES; l++) square[l] = room->weights[(r + l) * wide + c];
            turn(square);
            UNROLL for (int l = 0; l < LANES; l++)
                room->turned[((c * LANES + l) * rows + r) / LANES] = square[l];
        }
}

/* The other way, into the gradient of w. */
INLINE void without_zeros(int groups, int each, int in, const vec *found, real *g, int add)
{
    for (int k = 0; k < groups; k++)
        for (int j = 0; j < each; j++) {
            const real *row = (const real *)found + (k * ROUND(each) + j) * ROUND(in);
            real *into = g + (int64_t)(k * each + j) * in;
            for (int i = 0; i < in; i++) into[i] = add ? into[i] + row[i] : row[i];
        }
}

/* y = w x + bias (+ another bias), all rows */
INLINE void outputs_of(int groups, int each, int in, const real *w, const real *bias, const real *other,
                       const real *x, real *y, Room *room)
{
    const int apart = APART_ROWS(groups, each);
    memset(y, 0, apart * sizeof(real));
    for (int k = 0; k < groups; k++)
        for (int j = 0; j < each; j++)
            y[k * ROUND(each) + j] = bias[k * each + j] + (other ? other[k * each + j] : 0);
    for (int r = 1; r < ALL_ROWS; r++) memcpy(y + r * apart, y, apart * sizeof(real));
    inputs_first(groups, each, in, w, room);
    product(ALL_ROWS, groups * ROUND(each) / LANES, in, ALL, x, ROUND(in), 1, room->turned,
            groups * ROUND(each) / LANES, 0, (vec *)y, apart / LANES, 1);
}

INLINE void inputs_back(int groups, int each, int in, const real *w, const real *dy, real *dx, Room *room)
{
    with_zeros(groups, each, in, w, room->weights);
    product(ALL_ROWS, ROUND(in) / LANES, groups * ROUND(each), ALL, dy, APART_ROWS(groups, each), 1,
            room->weights, ROUND(in) / LANES, 0, (vec *)dx, ROUND(in) / LANES, 0);
}

/* The gradient of w: sums over rows, some at a time, so that they stay in the cache. */
INLINE void weights_back(int groups, int each, int in, int rows, const real *dy, const real *x, real *g,
                         int add, Room *room)
{
    const int apart = APART_ROWS(groups, each), wide = ROUND(in) / LANES;
    for (int r = 0; r + CHUNK <= rows; r += CHUNK)
        product(groups * ROUND(each), wide, CHUNK, ALL, dy + r * apart, 1, apart, (vec *)(x + r * ROUND(in)),
                wide, 0, room->weights, wide, r > 0);
    if (rows % CHUNK) {
        const int r = rows / CHUNK * CHUNK;
        product(groups * ROUND(each), wide, rows % CHUNK, ALL, dy + r * apart, 1, apart,
                (vec *)(x + r * ROUND(in)), wide, 0, room->weights, wide, r > 0);
    }
    if (!rows) memset(room->weights, 0, groups * ROUND(each) * ROUND(in) * sizeof(real));
    without_zeros(groups, each, in, room->weights, g, add);
}

INLINE void bias_back(int groups, int each, const real *dy, real *g, int add)
{
    for (int k = 0; k < groups; k++)
        for (int j = 0; j < each; j += LANES) {
            vec all = {0};
            for (int r = 0; r < ALL_ROWS; r++)
                all += *(const vec *)(dy + r * APART_ROWS(groups, each) + k * ROUND(each) + j);
            for (int l = 0; l < LANES && j + l < each; l++) {
                real *into = g + k * each + j + l;
                *into = add ? *into + all[l] : all[l];
            }
        }
}

/* y (+)= x w for the rows of one time; w [term][column]. No part of its callers, whose constants would take registers from the sums. */
static __attribute__((noinline)) void at_one_time(int columns, int terms, const real *x, int x_row,
                                                  const vec *w, vec *y, int y_row, int add)
{
    int c = 0;
    for (; c + TOGETHER <= columns; c += TOGETHER)
        product_tile(SAMPLES, TOGETHER, 0, terms, x, x_row, 1, w + c, columns, 0, y + c, y_row, add);
    if (columns % TOGETHER)
        product_tile(SAMPLES, 1, 0, terms, x, x_row, 1, w + c, columns, 0, y + c, y_row, add);
}

/* ---- an LSTM: gates for what enters, stays, is new and leaves (torch's order), each from x and the h before */

typedef struct {
    const real *x, *h, *x_bias, *h_bias;
} Weights;

/* What the way back needs of a layer stays in `gates`, `cells`, their `tangents`, and h. */
INLINE void lstm(int in, int hidden, Weights w, const real *x, real *gates, vec *cells, vec *tangents, vec *h,
                 Room *room)
{
    const int wide = ROUND(hidden) / LANES, apart = APART_ROWS(4, hidden), time = SAMPLES * wide;
    outputs_of(4, hidden, in, w.x, w.x_bias, w.h_bias, x, gates, room);
    inputs_first(4, hidden, hidden, w.h, room);
    for (int t = 0; t < TIMES; t++, gates += SAMPLES * apart, cells += time, tangents += time, h += time) {
        if (t)
            at_one_time(4 * wide, hidden, (real *)(h - time), ROUND(hidden), room->turned, (vec *)gates, apart / LANES, 1);
        for (int b = 0; b < SAMPLES; b++)
            for (int i = 0; i < wide; i++) {
                vec *enters = (vec *)(gates + b * apart) + i, *stays = enters + wide, *new = stays + wide,
                    *leaves = new + wide;
                const int c = b * wide + i;
                *enters = logistic(*enters);
                *stays = logistic(*stays);
                *new = tangent(*new);
                *leaves = logistic(*leaves);
                cells[c] = *enters * *new;
                if (t) cells[c] += *stays * cells[c - time];
                tangents[c] = tangent(cells[c]);
                h[c] = *leaves * tangents[c];
            }
    }
}

/* From dh, in d, to the gradients of the gates, in their place, and of x, in the place of dh. `later` holds what
   comes back from the next time. */
INLINE void lstm_back(int in, int hidden, Weights w, real *gates, const vec *cells, const vec *tangents, real *d,
                      vec *later, Room *room)
{
    const int wide = ROUND(hidden) / LANES, apart = APART_ROWS(4, hidden), time = SAMPLES * wide;
    vec *dh = later, *dc = later + time;
    memset(later, 0, 2 * time * sizeof(vec));
    with_zeros(4, hidden, hidden, w.h, room->weights);
    for (int t = TIMES - 1; t >= 0; t--) {
        real *its = gates + t * SAMPLES * apart;
        for (int b = 0; b < SAMPLES; b++)
            for (int i = 0; i < wide; i++) {
                vec *enters = (vec *)(its + b * apart) + i, *stays = enters + wide, *new = stays + wide,
                    *leaves = new + wide;
                const int c = b * wide + i, place = t * time + c;
                vec all = ((const vec *)d)[place] + dh[c], bent = tangents[place], before = {0};
                vec cell = dc[c] + all * *leaves * (1 - bent * bent);
                if (t) before = cells[place - time];
                dc[c] = cell * *stays;
                *leaves = all * bent * *leaves * (1 - *leaves);
                *stays = cell * before * *stays * (1 - *stays);
                vec of_new = cell * *enters * (1 - *new * *new);
                *enters = cell * *new * *enters * (1 - *enters);
                *new = of_new;
            }
        if (t) at_one_time(wide, 4 * ROUND(hidden), its, apart, room->weights, dh, wide, 0);
    }
    inputs_back(4, hidden, in, w.x, gates, d, room);
}

/* ---- the loss of all rows; z becomes its gradient. -1 if a label is no class */

INLINE int loss_of(int count, int64_t of, const int64_t *y, real *z, double *loss)
{
    for (int b = 0; b < SAMPLES; b++)
        for (int t = 0; t < TIMES; t++) {
            real *row = z + (t * SAMPLES + b) * ROUND(CLASSES), top = row[0], norm = 0;
            if (b >= count) {
                memset(row, 0, ROUND(CLASSES) * sizeof(real));
                continue;
            }
            int64_t label = y[b * TIMES + t];
            if (label < 0 || label >= CLASSES) return -1;
            for (int c = 1; c < CLASSES; c++) top = row[c] > top || row[c] != row[c] ? row[c] : top; /* NaN stays */
            double own = row[label];
            for (int n = 0; n < ROUND(CLASSES) / LANES; n++) {
                vec e = exponential(((vec *)row)[n] - choose(((vec *)row)[n] > top, ((vec *)row)[n], (vec){0} + top));
                UNROLL for (int l = 0; l < LANES; l++)
                    if (n * LANES + l >= CLASSES) e[l] = 0;
                ((vec *)row)[n] = e;
                norm += sum(e);
            }
            for (int n = 0; n < ROUND(CLASSES) / LANES; n++) ((vec *)row)[n] *= 1 / (norm * (real)of);
            *loss += log((double)norm) + (double)top - own;
            row[label] -= 1 / (real)of;
        }
    return 0;
}
