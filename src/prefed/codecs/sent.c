/* What becomes of vectors that are sent (Blockwise.send), a block of numbers after another: its draws, then the
   codec's own lines (Blockwise.in_c), which stand below this file as the function `block`; philox.c stands above. They round as
   torch's operations do, one after another: it is compiled with -ffp-contract=off. */

enum { BLOCK = 512, DRAWS = BLOCK / 16 };

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

/* Sixteen numbers of 16 bits for each value of Philox's counter, from `first` + 1 on. */
static void draw(const uint64_t *key, uint64_t first, uint64_t client, uint64_t round, int16_t *noise)
{
    for (int d = 0; d < DRAWS; d++) {
        uint64_t c[4] = {first + d + 1, 0, client, round};
        philox(key, c);
        memcpy(noise + 16 * d, c, sizeof c);
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
