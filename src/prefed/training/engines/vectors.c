/* What every program begins with. REAL, WHOLE and LANES come before it. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

typedef REAL real;
typedef WHOLE whole; /* an integer as wide as a real */
typedef real vec __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real)), may_alias));
typedef whole mask __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real)), may_alias));
enum { HELD = 64 }; /* sums at a time, at most: the compiler keeps those that are used in registers */

/* LANES vectors as a square: rows become columns. */
INLINE void turn(vec *v)
{
#if defined(__GNUC__) && !defined(__clang__)
    UNROLL for (int s = 0; 1 << s < LANES; s++) {
        const int half = 1 << s;
        mask low = {0}, high = {0};
        UNROLL for (int l = 0; l < LANES; l++) {
            low[l] = l & half ? LANES + l - half : l;
            high[l] = l & half ? LANES + l : l + half;
        }
        UNROLL for (int i = 0; i < LANES; i++)
            if (!(i & half)) {
                vec a = v[i], b = v[i + half];
                v[i] = __builtin_shuffle(a, b, low);
                v[i + half] = __builtin_shuffle(a, b, high);
            }
    }
#else
    real t[LANES][LANES];
    memcpy(t, v, sizeof t);
    for (int i = 0; i < LANES; i++)
        for (int l = 0; l < LANES; l++) v[i][l] = t[l][i];
#endif
}
