/* What becomes of vectors that are sent (Blockwise.send), a block of numbers after another: its draws, then the
   codec's own lines (Blockwise.in_c), which stand below this file as the function `block`. They round as
   torch's operations do, one after another: it is compiled with -ffp-contract=off. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 512, DRAWS = BLOCK / 16 };

typedef unsigned __int128 wide;

static const float TINY = 0x1p-126f, HUGE_ = 0x1.fffffep127f;

static inline int32_t bits_of(float x) { int32_t i; memcpy(&i, &x, sizeof i); return i; }
static inline float of_bits(int32_t i) { float x; memcpy(&x, &i, sizeof x); return x; }

/* NaN stays. */
static inline float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

/* As `uniform` beside it. */
static inline float uniform(int16_t noise) { return ((float)noise + 32768.5f) / 65536.0f; }

static void fill(float *x, int n, float value)
{
    for (int i = 0; i < n; i++) x[i] = value;
}

/* The largest magnitude; NaN if there is one. Magnitudes are ordered as their bits are, NaN above all. */
static float largest(const float *x, int n)
{
    int32_t found = 0;
    for (int i = 0; i < n; i++) {
        const int32_t own = bits_of(x[i]) & 0x7fffffff;
        found = own > found ? own : found;
    }
    return of_bits(found);
}

/* Philox4x64-10 as NumPy has it: sixteen numbers of 16 bits for each value of its counter, from `first` + 1 on. */
static void draw(const uint64_t *key, uint64_t first, uint64_t client, uint64_t round, int16_t *noise)
{
    enum { SIDE_BY_SIDE = 4 }; /* a multiplication waits for the one before it, but for no other counter's */
    for (int d = 0; d < DRAWS; d += SIDE_BY_SIDE) {
        uint64_t c[SIDE_BY_SIDE][4], k0 = key[0], k1 = key[1];
        for (int s = 0; s < SIDE_BY_SIDE; s++)
            c[s][0] = first + d + s + 1, c[s][1] = 0, c[s][2] = client, c[s][3] = round;
        for (int r = 0; r < 10; r++) {
            for (int s = 0; s < SIDE_BY_SIDE; s++) {
                const wide a = (wide)0xD2E7470EE14C6C93u * c[s][0], b = (wide)0xCA5A826395121157u * c[s][2];
                const uint64_t high = (uint64_t)(b >> 64) ^ c[s][1] ^ k0, low = (uint64_t)(a >> 64) ^ c[s][3] ^ k1;
                c[s][0] = high, c[s][1] = (uint64_t)b, c[s][2] = low, c[s][3] = (uint64_t)a;
            }
            k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
        }
        for (int w = 0; w < 4 * SIDE_BY_SIDE; w++)
            for (int part = 0; part < 4; part++)
                noise[16 * d + 4 * w + part] = (int16_t)(c[w / 4][w % 4] >> 16 * part);
    }
}

static void block(float *restrict x, const int16_t *restrict noise);

/* The rows of x, one of each client. */
void sent(int64_t rows, int64_t size, float *x, int64_t stride, const uint64_t *key, uint64_t round,
          const uint64_t *clients)
{
    for (int64_t row = 0; row < rows; row++, x += stride)
        for (int64_t at = 0; at < size; at += BLOCK) {
            int16_t noise[BLOCK];
            draw(key, at / 16, clients[row], round, noise);
            if (size - at >= BLOCK) {
                block(x + at, noise);
                continue;
            }
            float last[BLOCK] = {0};
            memcpy(last, x + at, (size - at) * sizeof(float));
            block(last, noise);
            memcpy(x + at, last, (size - at) * sizeof(float));
        }
}
