/* Which samples clients use: draws.batches_of in C, with its numbers. philox.c stands above. */

/* `count` numbers below samples[row], uniform, for each client, by Lemire's method on 32 bits each; again[row]
   if NumPy draws one of them once more, or otherwise. */
void batches(int64_t clients, int64_t count, const uint64_t *key, uint64_t round, const uint64_t *client,
             const uint64_t *samples, int64_t *into, uint8_t *again)
{
    for (int64_t row = 0; row < clients; row++, into += count) {
        const uint64_t below = samples[row];
        again[row] = below == 0 || below >> 32;
        const uint64_t least = again[row] ? 0 : (((uint64_t)1 << 32) - below) % below;
        for (int64_t i = 0; i < count; i += 8) {
            uint64_t c[4] = {i / 8 + 1, 0, client[row], round};
            philox(key, c);
            for (int64_t j = 0; j < 8 && i + j < count; j++) {
                const uint64_t product = (c[j / 2] >> j % 2 * 32 & 0xFFFFFFFF) * below;
                into[i + j] = (int64_t)(product >> 32);
                again[row] |= (product & 0xFFFFFFFF) < least;
            }
        }
    }
}
