/* y = w x (+ bias, + y): numbers of w, which may lie in any way, times vectors of x, by rows of w and y, terms, and
   columns of x and y, a tile of sums in registers at a time. vectors.c stands above, and ROWS, of a product
   that is held in registers, comes before it. */

#define ROUND(features) (((features) + LANES - 1) / LANES * LANES)

enum { COLUMNS = 4 }; /* of a tile, in vectors */

enum { ALL, UP_TO_COLUMN, FROM_COLUMN, ROWS_UP_TO_COLUMN }; /* which terms, or rows, of a triangle count */

INLINE void product_tile(int rows, int columns, int from, int to, const real *w, int by_row, int by_term,
                         const vec *x, int x_row, const real *bias, vec *y, int y_row, int add)
{
    vec acc[HELD];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) {
            acc[r * columns + c] = (vec){0} + (bias ? bias[r] : 0);
            if (add) acc[r * columns + c] += y[r * y_row + c];
        }
    for (int i = from; i < to; i++)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < columns; c++)
                acc[r * columns + c] += w[r * by_row + i * by_term] * x[i * x_row + c];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) y[r * y_row + c] = acc[r * columns + c];
}

INLINE void product_columns(int columns, int first, int rows, int terms, int triangle, const real *w, int by_row,
                            int by_term, const vec *x, int x_row, const real *bias, vec *y, int y_row, int add)
{
    const int held = ROWS / COLUMNS;
    int end = (first + columns) * LANES, r = 0, from = triangle == FROM_COLUMN ? first * LANES : 0;
    int to = triangle == UP_TO_COLUMN && end < terms ? end : terms;
    int most = triangle == ROWS_UP_TO_COLUMN && end < rows ? end : rows;
    for (; r + held <= most; r += held)
        product_tile(held, columns, from, to, w + r * by_row, by_row, by_term, x + first, x_row,
                     bias ? bias + r : 0, y + r * y_row + first, y_row, add);
    if (triangle != ROWS_UP_TO_COLUMN && rows % held) {
        product_tile(rows % held, columns, from, to, w + r * by_row, by_row, by_term, x + first, x_row,
                     bias ? bias + r : 0, y + r * y_row + first, y_row, add);
        return;
    }
    for (; r < most; r++)
        product_tile(1, columns, from, to, w + r * by_row, by_row, by_term, x + first, x_row,
                     bias ? bias + r : 0, y + r * y_row + first, y_row, add);
}

INLINE void product(int rows, int columns, int terms, int triangle, const real *w, int by_row, int by_term,
                    const vec *x, int x_row, const real *bias, vec *y, int y_row, int add)
{
    int c = 0;
    for (; c + COLUMNS <= columns; c += COLUMNS)
        product_columns(COLUMNS, c, rows, terms, triangle, w, by_row, by_term, x, x_row, bias, y, y_row, add);
    if (columns % COLUMNS)
        product_columns(columns % COLUMNS, c, rows, terms, triangle, w, by_row, by_term, x, x_row, bias, y,
                        y_row, add);
}
