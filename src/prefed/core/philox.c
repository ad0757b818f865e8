/* NumPy's generator of random bits: Philox4x64-10 (Salmon et al. 2011). */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef unsigned __int128 wide;

/* The counter becomes its four numbers. */
static inline void philox(const uint64_t *key, uint64_t *c)
{
    uint64_t k0 = key[0], k1 = key[1];
    for (int r = 0; r < 10; r++) {
        const wide a = (wide)0xD2E7470EE14C6C93u * c[0], b = (wide)0xCA5A826395121157u * c[2];
        c[0] = (uint64_t)(b >> 64) ^ c[1] ^ k0, c[1] = (uint64_t)b;
        c[2] = (uint64_t)(a >> 64) ^ c[3] ^ k1, c[3] = (uint64_t)a;
        k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
    }
}
