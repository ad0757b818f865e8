/* What stands before the lines of a rule (Rule.in_c). vectors.c stands above, and SIZE, the number of weights,
   comes before it. */

static inline real SQRT(real x) { return sizeof x == 8 ? sqrt(x) : sqrtf(x); }

/* A share of the way from a to b, as torch has it: with all of it, b to the bit. */
static inline real lerp(real a, real b, real share)
{
    return share < (real)0.5 ? a + share * (b - a) : b - (1 - share) * (b - a);
}

enum { SUMS = 64, TOGETHER = 4096 }; /* sums side by side, whatever the processor; numbers in each part of them */

/* What TERM makes of the numbers i, added up. */
#define ADD_UP(size, TERM)                                                 \
    double all = 0;                                                        \
    for (int64_t first = 0; first < size; first += TOGETHER) {             \
        const int64_t last = first + TOGETHER < size ? first + TOGETHER : size; \
        real t[SUMS] = {0};                                                \
        int64_t start = first;                                             \
        for (; start + SUMS <= last; start += SUMS)                        \
            for (int l = 0; l < SUMS; l++) {                               \
                const int64_t i = start + l;                               \
                t[l] += TERM;                                              \
            }                                                              \
        for (int64_t i = start; i < last; i++) t[i - start] += TERM;       \
        for (int half = SUMS / 2; half; half /= 2)                         \
            for (int l = 0; l < half; l++) t[l] += t[l + half];            \
        all += t[0];                                                       \
    }

/* The sum of some numbers. */
static inline real total(const real *x, int64_t size)
{
    ADD_UP(size, x[i])
    return (real)all;
}

/* The sum of their squares. */
static inline double squares(const real *x, int64_t size)
{
    ADD_UP(size, x[i] * x[i])
    return all;
}

/* w -= lr m / (sqrt(P) + relative * r); where r is zero, lr m / 0.001. */
static inline void along(int64_t size, real lr, const real *m, real share, const real *P, double relative, real r, real *w)
{
    for (int64_t i = 0; i < size; i++)
        w[i] -= lr * m[i] / (r > 0 ? SQRT(share * P[i]) + (real)relative * r : (real)0.001);
}
