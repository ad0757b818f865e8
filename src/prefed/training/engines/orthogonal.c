/* Steps of weight matrices whose singular values are brought near one (rules/muon.py, rules/spectral.py).
   rule.c and product.c stand above. */

enum { HIGH = ROWS / COLUMNS, TERMS = 256 }; /* rows of a tile; terms whose vectors stay in the cache */

#define UP(number, of) (((number) + (of) - 1) / (of) * (of))
/* Numbers of a matrix of whole tiles. */
#define TILED(rows, columns) (UP(rows, HIGH) * (int64_t)UP(columns, LANES))
#define SHORT(rows, columns) ((rows) < (columns) ? (rows) : (columns))
#define LONG(rows, columns) ((rows) < (columns) ? (columns) : (rows))
/* Numbers that `orthogonal` needs. */
#define ORTHOGONAL(rows, columns)                                                              \
    (2 * TILED(SHORT(rows, columns), LONG(rows, columns)) + TILED(LONG(rows, columns), SHORT(rows, columns)) + \
     4 * TILED(SHORT(rows, columns), SHORT(rows, columns)))

INLINE void tiles(int columns, int rows, int terms, const real *w, int w_row, const real *x, int x_row, real *y,
                  int y_row)
{
    vec near[TERMS * COLUMNS]; /* rows of x that lie a power of two apart would fight for places in the cache */
    for (int from = 0; from < terms; from += TERMS) {
        const int count = terms - from < TERMS ? terms - from : TERMS;
        for (int i = 0; i < count; i++)
            UNROLL for (int c = 0; c < columns; c++) near[i * columns + c] = ((const vec *)(x + (from + i) * x_row))[c];
        for (int r = 0; r < rows; r += HIGH)
            product_tile(HIGH, columns, 0, count, w + r * w_row + from, w_row, 1, near, columns, 0,
                         (vec *)(y + r * y_row), y_row / LANES, from > 0);
    }
}

/* y = w x: rows x terms, times terms x columns. Rows may be written up to the end of a tile. Of a symmetric y only
   the rows down to the diagonal are computed: `symmetric` has the others. */
static void multiply(int upper, int rows, int terms, int columns, const real *w, int w_row, const real *x, int x_row,
                     real *y, int y_row)
{
    const int vectors = UP(columns, LANES) / LANES;
    for (int c = 0; c < vectors; c += COLUMNS) {
        const int end = (c + COLUMNS) * LANES, most = upper && end < rows ? end : rows;
        const real *from = x + c * LANES;
        real *into = y + c * LANES;
        switch (vectors - c) {
        case 1: tiles(1, most, terms, w, w_row, from, x_row, into, y_row); break;
        case 2: tiles(2, most, terms, w, w_row, from, x_row, into, y_row); break;
        case 3: tiles(3, most, terms, w, w_row, from, x_row, into, y_row); break;
        default: tiles(COLUMNS, most, terms, w, w_row, from, x_row, into, y_row);
        }
    }
}

/* Of a matrix in whole vectors, into one in whole vectors; what lies beyond it is 0 in both. */
static void transpose(int rows, int columns, const real *x, int x_row, real *into, int into_row)
{
    for (int r = 0; r < rows; r += LANES)
        for (int c = 0; c < columns; c += LANES) {
            vec square[LANES];
            UNROLL for (int i = 0; i < LANES; i++)
                square[i] = r + i < rows ? *(const vec *)(x + (r + i) * x_row + c) : (vec){0};
            turn(square);
            UNROLL for (int i = 0; i < LANES; i++)
                if (c + i < columns) *(vec *)(into + (c + i) * into_row + r) = square[i];
        }
}

/* y = w x, of n rows and columns, where it is symmetric. */
static void symmetric(int n, int terms, const real *w, int w_row, const real *x, int x_row, real *y, int y_row)
{
    enum { BESIDE = COLUMNS * LANES }; /* columns that are computed down to one row */
    multiply(1, n, terms, n, w, w_row, x, x_row, y, y_row);
    for (int c = BESIDE; c < n; c += BESIDE)
        transpose(c, n - c < BESIDE ? n - c : BESIDE, y + c, y_row, y + c * y_row, y_row);
}

/* F = b A + c A A (+ a on the diagonal). */
static void polynomial(int n, int row, const real *A, real *F, double a)
{
    const real b = -4.7750, c = 2.0315;
    symmetric(n, n, A, row, A, row, F, row);
    for (int64_t i = 0; i < (int64_t)n * row; i++) F[i] = b * A[i] + c * F[i];
    for (int i = 0; i < n; i++) F[i * row + i] += (real)a;
}

/* About U V^T of x = U S V^T, a matrix of `rows` and `columns`; without an iteration, x over its norm. `memory` is
   for ORTHOGONAL(rows, columns) numbers. */
static void orthogonal(int rows, int columns, int iterations, const real *x, real *into, real *memory)
{
    const real a = 3.4445;
    const int n = SHORT(rows, columns), m = LONG(rows, columns), tall = rows > columns;
    const int N_ROW = UP(n, LANES), M_ROW = UP(m, LANES);
    real *X = memory, *Y = X + TILED(n, m), *T = Y + TILED(n, m), *A = T + TILED(m, n);
    real *F = A + TILED(n, n), *B = F + TILED(n, n), *product = B + TILED(n, n);
    const real norm = 1 / ((real)sqrt(squares(x, (int64_t)rows * columns)) + (real)1e-7);
    real *first = tall ? T : X;
    const int row = tall ? N_ROW : M_ROW;
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < columns; c++) first[r * row + c] = norm * x[r * columns + c];
        for (int c = columns; c < row; c++) first[r * row + c] = 0;
    }
    if (tall) transpose(m, n, T, N_ROW, X, M_ROW);
    else transpose(n, m, X, M_ROW, T, N_ROW);
    if (2 * m >= 3 * n && iterations) { /* X is multiplied twice in all, and not in each iteration */
        symmetric(n, m, X, M_ROW, T, N_ROW, A, N_ROW);
        polynomial(n, N_ROW, A, product, a);
        const real *newest = product;
        for (int k = 1; k < iterations; k++) { /* A = F A F, and product = F product: polynomials of A, all of them */
            symmetric(n, n, newest, N_ROW, A, N_ROW, B, N_ROW);
            symmetric(n, n, B, N_ROW, newest, N_ROW, A, N_ROW);
            polynomial(n, N_ROW, A, F, a);
            symmetric(n, n, F, N_ROW, product, N_ROW, B, N_ROW);
            memcpy(product, B, (int64_t)n * N_ROW * sizeof(real));
            newest = F;
        }
        multiply(0, n, n, m, product, N_ROW, X, M_ROW, Y, M_ROW);
        real *swap = X;
        X = Y, Y = swap;
    } else
        for (int k = 0; k < iterations; k++) { /* X = a X + (b A + c A A) X with A = X X^T */
            if (k) transpose(n, m, X, M_ROW, T, N_ROW);
            symmetric(n, m, X, M_ROW, T, N_ROW, A, N_ROW);
            polynomial(n, N_ROW, A, F, 0);
            multiply(0, n, n, m, F, N_ROW, X, M_ROW, Y, M_ROW);
            for (int64_t i = 0; i < (int64_t)n * M_ROW; i++) X[i] = a * X[i] + Y[i];
        }
    if (tall) transpose(n, m, X, M_ROW, T, N_ROW);
    const real *last = tall ? T : X;
    for (int r = 0; r < rows; r++) memcpy(into + r * columns, last + r * row, columns * sizeof(real));
}

/* u / (sqrt(P) / r + relative), r the root mean square of sqrt(P), scaled to the norm of u; `share` is what P is
   multiplied by. */
static void divided(int64_t size, double relative, real share, const real *P, real *u)
{
    const real r = SQRT(share * (total(P, size) / size)), over = r > 0 ? 1 / r : 1;
    const double before = sqrt(squares(u, size));
    for (int64_t i = 0; i < size; i++) u[i] = u[i] / (SQRT(share * P[i]) * over + (real)relative);
    const real factor = (real)(before / (sqrt(squares(u, size)) + 1e-30));
    for (int64_t i = 0; i < size; i++) u[i] *= factor;
}
