// SPDX-License-Identifier: MIT
// cpu/product/conv_depthwise_body.h -- part of conv_depthwise.c, included once per computing type.

// Copies channel `number` of a tensor into a plane, whose other places get zeros.
MS_INLINE void R(fill_plane)(const depthwise *j, const void *from, int64_t number, REAL *plane, REAL *room)
{
    const correlation *k = &j->k;
    int64_t s = k->stride[2], w = k->in[2], pad = k->pad[2], spread = k->spread[2], each = j->each;
    for (int64_t r = 0; r < j->rows[0] * j->rows[1]; r++) {
        REAL *restrict to = plane + r * j->row;
        int64_t z = r / j->rows[1] - k->pad[0], y = r % j->rows[1] - k->pad[1];
        for (int64_t i = 0; i < j->row; i++) to[i] = 0;
        if (z < 0 || z % k->spread[0] || z / k->spread[0] >= k->in[0]) continue;
        if (y < 0 || y % k->spread[1] || y / k->spread[1] >= k->in[1]) continue;
        int64_t row = (number * k->in[0] + z / k->spread[0]) * k->in[1] + y / k->spread[1];
        const REAL *restrict x = ROW_IN(j->c->dtype, from, row * w, 1, w, room);
        if (spread > 1)
            for (int64_t i = 0; i < w; i++) {
                if (i * spread + pad >= 0 && i * spread + pad < each) to[i * spread + pad] = x[i];
            }
        else
            for (int64_t p = 0; p < s; p++) {
                // Place i of phase p is element i * s + p - pad.
                int64_t first = pad > p ? (pad - p + s - 1) / s : 0, end = w + pad > p ? (w + pad - p + s - 1) / s : 0;
                if (end > each) end = each;
                if (s == 1)
                    for (int64_t i = first; i < end; i++) to[i] = x[i - pad];
                else
                    for (int64_t i = first; i < end; i++) to[p * each + i] = x[i * s + p - pad];
            }
    }
}

// Correlates a plane with a kernel: a channel of the result, `number`, gets `start` plus the sums; or, if `add` is set,
// is added to.
MS_INLINE void R(correlate)(const depthwise *j, REAL *plane, const REAL *w, REAL start, int64_t number, bool add)
{
    REAL *room = plane + j->rows[0] * j->rows[1] * j->row;
    int64_t n = j->k.out[2], rows = j->k.out[0] * j->k.out[1], elements = j->elements;
    const int64_t *offset = j->offset;
    void *out = j->c->operands[j->c->result];
    for (int64_t r = 0; r < rows; r++) {
        const REAL *base = plane + j->start[r];
        int64_t at = (number * rows + r) * n;
        for (int64_t o = 0; o < n; o += 16) {
            REAL sum[16];
            MS_LANES(16, l) sum[l] = start;
            int64_t e = 0;
            // GCC 12 keeps the sums in memory between elements: 8 at a time.
#define X(k) w[e + k] * (base + offset[e + k] + o)[l]
            for (; e + 8 <= elements; e += 8)
                MS_LANES(16, l) sum[l] = sum[l] + X(0) + X(1) + X(2) + X(3) + X(4) + X(5) + X(6) + X(7);
            for (; e < elements; e++) MS_LANES(16, l) sum[l] += X(0);
#undef X
            MS_LANES(16, l) room[o + l] = sum[l];
        }
        REAL *to = ROW_AT(j->c->dtype, out, at, 1, room);
        if (add)
            for (int64_t i = 0; i < n; i++) to[i] += room[i];
        else if (to != room)
            for (int64_t i = 0; i < n; i++) to[i] = room[i];
        ROW_OUT(j->c->dtype, out, at, 1, n, to);
    }
}

// Channels of the output, or of the image's gradient.
static MS_KERNEL void R(channels)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const depthwise *j = arg;
    const ms_conv_work *c = j->c;
    REAL *plane = (REAL *)(j->room + j->room_bytes * (size_t)ms__thread_num()),
         *room = plane + j->rows[0] * j->rows[1] * j->row, *in = room + (j->k.out[2] + 15) / 16 * 16,
         *w = in + j->k.in[2], *reversed = w + j->elements;
    int64_t M = j->outputs, elements = j->elements;
    (void)block;
    for (int64_t channel = first / j->task; channel < last / j->task; channel++) {
        if (c->result == MS_CONV_OUTPUT) R(fill_plane)(j, c->operands[MS_CONV_IMAGE], channel, plane, in);
        for (int64_t m = 0; m < M; m++) {
            int64_t group = channel % c->v->groups * M + m;
            const REAL *kernel = ROW_IN(c->dtype, c->operands[MS_CONV_WEIGHT], group * elements, 1, elements, w);
            if (c->result == MS_CONV_OUTPUT) {
                REAL one, bias = c->bias ? *ROW_IN(c->dtype, c->bias, group, 1, 1, &one) : 0;
                R(correlate)(j, plane, kernel, bias, channel * M + m, false);
            } else {
                R(fill_plane)(j, c->operands[MS_CONV_OUTPUT], channel * M + m, plane, in);
                for (int64_t e = 0; e < elements; e++) reversed[e] = kernel[elements - 1 - e];
                R(correlate)(j, plane, reversed, 0, channel, m > 0);
            }
        }
    }
}

// The gradient of the kernels of channels [first, last) / task: sums over an image in 16 lanes, then over images.
static MS_KERNEL void R(kernels)(void *arg, int64_t first, int64_t last, int64_t block)
{
    const depthwise *j = arg;
    const ms_conv_work *c = j->c;
    REAL *plane = (REAL *)(j->room + j->room_bytes * (size_t)ms__thread_num()),
         *in = plane + j->rows[0] * j->rows[1] * j->row;
    int64_t M = j->outputs, elements = j->elements, rows = j->k.out[0] * j->k.out[1], n = j->k.out[2];
    (void)block;
    for (int64_t channel = first / j->task; channel < last / j->task; channel++) {
        REAL *dw = (REAL *)c->operands[MS_CONV_WEIGHT] + channel * M * elements;
        for (int64_t e = 0; e < M * elements; e++) dw[e] = 0;
        for (int64_t image = 0; image < c->v->n; image++) {
            int64_t number = image * c->v->in + channel;
            R(fill_plane)(j, c->operands[MS_CONV_IMAGE], number, plane, in);
            const REAL *g = (const REAL *)c->operands[MS_CONV_OUTPUT] + number * M * rows * n;
            for (int64_t e = 0; e < M * elements; e++) {
                REAL lane[16] = { 0 };
                const REAL *base = plane + j->offset[e % elements], *y = g + e / elements * rows * n;
                int64_t r = 0;
#define X(k) y[(r + k) * n + i + l] * (base + j->start[r + k])[i + l]
                for (; r + 4 <= rows; r += 4) {
                    int64_t i = 0;
                    for (; i + 16 <= n; i += 16) MS_LANES(16, l) lane[l] = lane[l] + X(0) + X(1) + X(2) + X(3);
                    for (int64_t l = 0; i + l < n; l++) lane[l] = lane[l] + X(0) + X(1) + X(2) + X(3);
                }
                for (; r < rows; r++)
                    for (int64_t i = 0; i < n; i += 16)
                        for (int64_t l = 0; l < 16 && i + l < n; l++) lane[l] += X(0);
#undef X
                dw[e] += R(ms__fold)(lane);
            }
        }
    }
}
