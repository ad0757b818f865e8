/* What a residual network has besides convolutions: GroupNorm, sums with what came in, images thinned out,
   and the mean over pixels. As in chain.c, vectors hold samples, so that a mean over pixels and channels is
   a sum of vectors.

   Images that a convolution takes have a border of one pixel, those that it gives have none. A convolution
   with stride 2 is one with stride 1, in Winograd's form, of which every second pixel is taken: that costs
   what the plain form costs for these pixels alone. */

#define ONCE static __attribute__((noinline)) void /* for all layers of a size */

INLINE vec inverse_root(vec x)
{
    for (int i = 0; i < LANES; i++) x[i] = 1 / (sizeof(real) == 8 ? sqrt(x[i]) : sqrtf(x[i]));
    return x;
}

/* y = (y - mean) / deviation over each of the groups of channels */
INLINE void group_norm(int c, int groups, int pixels, double epsilon, vec *y, vec *scale)
{
    int size = c / groups * pixels;
    for (int group = 0; group < groups; group++)
        for (int n = 0; n < N; n++) {
            vec *here = y + (int64_t)group * size * N + n, mean[4] = {{0}}, square[4] = {{0}};
            for (int i = 0; i < size; i++) mean[i % 4] += here[i * N];
            vec middle = ((mean[0] + mean[1]) + (mean[2] + mean[3])) / (real)size;
            for (int i = 0; i < size; i++) {
                here[i * N] -= middle;
                square[i % 4] += here[i * N] * here[i * N];
            }
            vec all = (square[0] + square[1]) + (square[2] + square[3]);
            vec by = scale[group * N + n] = inverse_root(all / (real)size + (real)epsilon);
            for (int i = 0; i < size; i++) here[i * N] *= by;
        }
}

/* dy, of weight y + bias, becomes that of what the norm took. */
INLINE void group_norm_back(int c, int groups, int pixels, const real *weight, const vec *y, const vec *scale,
                            vec *dy, real *g, real *g_bias, int add)
{
    int each = c / groups;
    for (int group = 0; group < groups; group++) {
        vec mean[N], along[N];
        for (int n = 0; n < N; n++) mean[n] = along[n] = (vec){0};
        for (int i = group * each; i < (group + 1) * each; i++) {
            vec all[N], all_bias[N], total = {0}, total_bias = {0};
            for (int n = 0; n < N; n++) all[n] = all_bias[n] = (vec){0};
            for (int p = i * pixels; p < (i + 1) * pixels; p++)
                UNROLL for (int n = 0; n < N; n++) {
                    all[n] += dy[p * N + n] * y[p * N + n];
                    all_bias[n] += dy[p * N + n];
                }
            for (int n = 0; n < N; n++) {
                mean[n] += weight[i] * all_bias[n];
                along[n] += weight[i] * all[n];
                total += all[n];
                total_bias += all_bias[n];
            }
            g[i] = add ? g[i] + sum(total) : sum(total);
            g_bias[i] = add ? g_bias[i] + sum(total_bias) : sum(total_bias);
        }
        for (int n = 0; n < N; n++) mean[n] /= (real)(each * pixels), along[n] /= (real)(each * pixels);
        for (int i = group * each; i < (group + 1) * each; i++)
            for (int p = i * pixels; p < (i + 1) * pixels; p++)
                UNROLL for (int n = 0; n < N; n++)
                    dy[p * N + n] = scale[group * N + n]
                                    * (weight[i] * dy[p * N + n] - mean[n] - y[p * N + n] * along[n]);
    }
}

/* into, with a border, = ReLU(weight y + bias + the shortcut): nothing, what came in, with its border, or
   another norm's weight y + bias */
INLINE void activate(int c, int h, int wd, const real *weight, const real *bias, const vec *y, const vec *came,
                     const real *weight2, const real *bias2, const vec *y2, vec *into)
{
    int H = h + 2, W = wd + 2;
    for (int i = 0; i < c; i++)
        for (int j = 0; j < H; j++) {
            vec *row = into + (i * H + j) * W * N;
            if (j == 0 || j == H - 1) {
                memset(row, 0, W * N * sizeof(vec));
                continue;
            }
            for (int n = 0; n < N; n++) row[n] = row[(W - 1) * N + n] = (vec){0};
            int place = (i * h + j - 1) * wd * N;
            for (int l = 0; l < wd * N; l++) {
                vec z = weight[i] * y[place + l] + bias[i];
                if (came) z += came[(i * H + j) * W * N + N + l];
                if (y2) z += weight2[i] * y2[place + l] + bias2[i];
                row[N + l] = (vec)((mask)z & ~(z < 0)); /* NaN stays */
            }
        }
}

/* d, with a border like the image, where this is above 0; the result has none */
INLINE void activate_back(int c, int h, int wd, const vec *image, const vec *d, vec *into)
{
    for (int i = 0; i < c; i++)
        for (int j = 0; j < h; j++)
            for (int l = 0; l < wd * N; l++) {
                int inside = ((i * (h + 2) + j + 1) * (wd + 2) + 1) * N + l;
                into[(i * h + j) * wd * N + l] = (vec)((mask)d[inside] & ~(image[inside] <= 0));
            }
}

/* Every second pixel, of rows `row` vectors apart in images `image` apart. */
INLINE void thin(int c, int h, int wd, int row, int image, const vec *x, vec *into)
{
    for (int i = 0; i < c; i++)
        for (int j = 0; j < h; j++)
            for (int l = 0; l < wd; l++)
                UNROLL for (int n = 0; n < N; n++)
                    into[((i * h + j) * wd + l) * N + n] = x[i * image + 2 * j * row + 2 * l * N + n];
}

/* The same back: added there. */
INLINE void thin_back(int c, int h, int wd, int row, int image, const vec *d, vec *into)
{
    for (int i = 0; i < c; i++)
        for (int j = 0; j < h; j++)
            for (int l = 0; l < wd; l++)
                UNROLL for (int n = 0; n < N; n++)
                    into[i * image + 2 * j * row + 2 * l * N + n] += d[((i * h + j) * wd + l) * N + n];
}

/* into, with a border, += d */
INLINE void add_inside(int c, int h, int wd, const vec *d, vec *into)
{
    for (int i = 0; i < c; i++)
        for (int j = 0; j < h; j++)
            for (int l = 0; l < wd * N; l++)
                into[((i * (h + 2) + j + 1) * (wd + 2) + 1) * N + l] += d[(i * h + j) * wd * N + l];
}

/* The mean over the pixels of images with a border. */
INLINE void means(int c, int h, int wd, const vec *x, vec *y)
{
    for (int i = 0; i < c; i++)
        for (int n = 0; n < N; n++) {
            vec all = {0};
            for (int j = 1; j <= h; j++)
                for (int l = 1; l <= wd; l++) all += x[((i * (h + 2) + j) * (wd + 2) + l) * N + n];
            y[i * N + n] = all / (real)(h * wd);
        }
}

INLINE void means_back(int c, int h, int wd, const vec *dy, vec *dx)
{
    for (int i = 0; i < c; i++)
        for (int j = 1; j <= h; j++)
            for (int l = 1; l <= wd; l++)
                UNROLL for (int n = 0; n < N; n++)
                    dx[((i * (h + 2) + j) * (wd + 2) + l) * N + n] = dy[i * N + n] / (real)(h * wd);
}
