/* What stands before the lines of a rule (Rule.in_c). vectors.c stands above, and SIZE, the number of weights,
   comes before it. */

static inline real SQRT(real x) { return sizeof x == 8 ? sqrt(x) : sqrtf(x); }

/* A share of the way from a to b, as torch has it: with all of it, b to the bit. */
static inline real lerp(real a, real b, real share)
{
    return share < (real)0.5 ? a + share * (b - a) : b - (1 - share) * (b - a);
}

/* The sum of some numbers, in sixteen parts, whatever the processor. */
static inline real total(const real *x, int64_t size)
{
    double t[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int l = 0; l < 16; l++) t[l] += x[i + l];
    for (; i < size; i++) t[0] += x[i];
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++) t[l] += t[l + half];
    return (real)t[0];
}

/* The sum of their squares, likewise. */
static inline double squares(const real *x, int64_t size)
{
    double t[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int l = 0; l < 16; l++) t[l] += (double)x[i + l] * x[i + l];
    for (; i < size; i++) t[0] += (double)x[i] * x[i];
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++) t[l] += t[l + half];
    return t[0];
}

/* w -= lr m / (sqrt(P) + relative * r); where r is zero, lr m / 0.001. */
static inline void along(int64_t size, real lr, const real *m, real share, const real *P, double relative, real r, real *w)
{
    for (int64_t i = 0; i < size; i++)
        w[i] -= lr * m[i] / (r > 0 ? SQRT(share * P[i]) + (real)relative * r : (real)0.001);
}

/* w -= lr (u + own_lr x / (sqrt(P) + relative * r)); where r is zero, lr u. */
static inline void both(int64_t size, real lr, const real *u, real own_lr, const real *x, real share, const real *P,
                        double relative, real r, real *w)
{
    const real tau = (real)relative * r;
    for (int64_t i = 0; i < size; i++)
        w[i] -= lr * (r > 0 ? u[i] + own_lr * x[i] / (SQRT(share * P[i]) + tau) : u[i]);
}
