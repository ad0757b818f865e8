/* Subtrees of a sum over rows (subtrees.py): the same additions in the same order, with all of them while a few numbers
   of each row are in the cache. REAL and PART, the numbers of a row at a time, stand above. No product may be joined
   with a sum (-ffp-contract=off): torch has none. */

#include <stdint.h>

typedef REAL real;

/* Of `rows` rows (of x, `row` numbers apart) at neighbouring positions from `first` on, each times its weight, if there
   are weights: the sums that stay alone, level by level, one behind another in `out`, each of `size` numbers. Without
   weights, rows that are alone from the beginning are left out. `part` is for rows / 2 times PART numbers. */
void sums(int64_t rows, int64_t first, int64_t size, const real *x, int64_t row, const real *weights, real *out,
          real *part)
{
    for (int64_t from = 0; from < size; from += PART) {
        const int64_t count = size - from < PART ? size - from : PART;
        const real *in = x + from, *factors = weights;
        real *into = out + from;
        for (int64_t position = first, n = rows, apart = row; n;) {
            const int64_t start = position & 1, stop = n - ((position + n) & 1), pairs = (stop - start) / 2;
            for (int64_t r = start ? 0 : stop; r < n; r = r < stop ? stop : r + 1) {
                if (in == x + from && !factors) continue;
                const real factor = factors ? factors[r] : 1;
                for (int64_t i = 0; i < count; i++) into[i] = in[r * apart + i] * factor;
                into += size;
            }
            for (int64_t p = 0; p < pairs; p++) {
                const int64_t l = start + 2 * p;
                const real *left = in + l * apart, *right = left + apart;
                real *sum = part + p * PART; /* where `left` lies, or before it */
                if (factors) {
                    const real a = factors[l], b = factors[l + 1];
                    for (int64_t i = 0; i < count; i++) sum[i] = left[i] * a + right[i] * b;
                } else
                    _Pragma("GCC ivdep") for (int64_t i = 0; i < count; i++) sum[i] = left[i] + right[i];
            }
            in = part, apart = PART, factors = 0;
            position = (position + start) >> 1, n = pairs;
        }
    }
}
