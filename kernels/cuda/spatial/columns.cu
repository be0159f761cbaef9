// SPDX-License-Identifier: MIT
// cuda/spatial/columns.cu -- images unfolded to matrices and folded back; the operators im2col and col2im.
#include "cuda/spatial/columns.h"

#include "cuda/blocks.h"
#include "rows/spatial/columns.h"

// A thread computes WIDE columns of a row. If they lie in one row of the output, their pixels are adjacent in the image
// (stride 1), or every second one of twice as many adjacent pixels (stride 2).
template <class S>
__global__ void __launch_bounds__(BLOCK, sizeof(S) == 8 ? 4 : 5)
    unfold_kernel(ms_conv v, images some, int64_t rows, const S *x, S *cols)
{
    typedef real_of<S> T;
    int64_t L = ms__conv_positions(&v), packs = (L + WIDE - 1) / WIDE, i = GLOBAL_INDEX, kernel = ms__conv_kernel(&v);
    if (i >= some.count * rows * packs) return;
    int64_t row = i / packs, l = (i - row * packs) * WIDE, n = row / rows, r = row - n * rows, c = r / kernel;
    int64_t ky = (r - c * kernel) / v.kw, kx = r % v.kw, oy = l / v.ow, ox = l - oy * v.ow, C = v.in / v.groups;
    int64_t kz = 0, oz = 0;
    if (kernel > v.kh * v.kw || v.od > 1) {  // images without a depth need no divisions for it
        kz = ky / v.kh, ky -= kz * v.kh;
        oz = oy / v.oh, oy -= oz * v.oh;
    }
    int64_t d = oz * v.sd - v.front + kz * v.dd, h = oy * v.sh - v.top + ky * v.dh, w = ox * v.sw - v.left + kx * v.dw;
    auto inside = [&] { return c < C && in_range(d, v.d) && in_range(h, v.h); };  // whether the line is in the image
    T out[WIDE];
    x += ((some.first + n) * v.in + some.group * C + c) * v.d * v.h * v.w;
    const S *line = x + (d * v.h + h) * v.w;
    if (c < C && v.sw == 1 && ox + WIDE <= v.ow) {
        read_pack(line, w, inside() ? v.w : 0, (T)0, out);
    } else if (c < C && v.sw == 2 && ox + WIDE <= v.ow) {
        T low[WIDE], high[WIDE];
        read_pack(line, w, inside() ? v.w : 0, (T)0, low);
        read_pack(line, w + WIDE, inside() ? v.w : 0, (T)0, high);
        UNROLL
        for (int e = 0; e < WIDE / 2; e++) out[e] = low[2 * e], out[e + WIDE / 2] = high[2 * e];
    } else {
        int64_t width = inside() ? v.w : 0;
        UNROLL
        for (int p = 0; p < WIDE; p++) {
            out[p] = in_range(w, width) ? one_of(line + w) : c < C ? 0 : 1;
            w += v.sw;
            if (++ox < v.ow) continue;
            ox = 0, h += v.sh, w = kx * v.dw - v.left;
            if (++oy == v.oh) oy = 0, d += v.sd, h = ky * v.dh - v.top;
            line = x + (d * v.h + h) * v.w, width = inside() ? v.w : 0;
        }
    }
    write_pack(cols + row * L, l, L, out);
}

// As unfold_kernel, for column strides (sw) above 2 and images whose lines have at most LINE_BYTES bytes. A block
// computes the columns of `lines` rows of the output, for the kernel elements of one row of the kernel: it copies the
// image's lines that these read to shared memory, from which each row of cols takes every sw-th element. tiles: number
// of blocks for all rows of the output.
enum { LINE_BYTES = 16 << 10 };
struct line_tiles {
    int64_t lines, tiles;
};
template <class S>
__global__ void __launch_bounds__(BLOCK, sizeof(S) == 2 ? 5 : 4)
    unfold_lines_kernel(ms_conv v, images some, int64_t rows, line_tiles t, const S *x, S *cols)
{
    typedef real_of<S> T;
    alignas(16) __shared__ S line[LINE_BYTES / sizeof(S)];
    int64_t C = v.in / v.groups, kernel_rows = v.kd * v.kh, units = C * kernel_rows + (rows > C * ms__conv_kernel(&v));
    int64_t i = blockIdx.x, tile = i % t.tiles, plane = i / t.tiles, oz = plane % v.od, unit = plane / v.od % units,
            n = plane / v.od / units, c = unit / kernel_rows, k = unit - c * kernel_rows, kz = k / v.kh,
            ky = k - kz * v.kh;
    int64_t first = tile * t.lines, d = oz * v.sd - v.front + kz * v.dd, L = ms__conv_positions(&v);
    int count = (int)(v.oh - first < t.lines ? v.oh - first : t.lines), width = (int)v.w, ow = (int)v.ow;
    int packs = (width + WIDE - 1) / WIDE, places = count * ow, sw = (int)v.sw, left = (int)v.left;
    x += (((some.first + n) * v.in + some.group * C + c) * v.d + d) * v.h * v.w;
    for (int p = threadIdx.x; p < count * packs; p += BLOCK) {
        int l = p / packs, w = (p - l * packs) * WIDE;
        int64_t h = (first + l) * v.sh - v.top + ky * v.dh;
        S *to = line + l * width + w;
        if (c < C && in_range(d, v.d) && in_range(h, v.h)) move_pack<true>(to, x + h * width + w, width - w);
        else
            for (int e = 0; e < WIDE && w + e < width; e++) store_one(to + e, (T)0);
    }
    __syncthreads();
    cols += (n * rows + unit * v.kw) * L + (oz * v.oh + first) * ow;
    packs = (places + WIDE - 1) / WIDE;
    int total = (c < C ? (int)v.kw : 1) * packs;
    for (int p = threadIdx.x; p < total; p += BLOCK) {
        int kx = p / packs, at = (p - kx * packs) * WIDE, l = at / ow, ox = at - l * ow, begin = kx * (int)v.dw - left;
        int w = ox * sw + begin;
        T out[WIDE];
        UNROLL
        for (int e = 0; e < WIDE; e++) {
            bool inside = in_range(w, width) && (e == 0 || at + e < places);
            out[e] = c == C ? (T)1 : inside ? one_of(line + l * width + w) : (T)0;
            w += sw;
            if (++ox == ow) ox = 0, l++, w = begin;
        }
        write_pack(cols + kx * L, at, places, out);
    }
}

// A thread computes a strip of adjacent elements of a row of an image: WIDE, or twice as many where cols is of a half
// type, so that enough bytes are in flight. If the column stride sw is 1 or 2, a kernel element's contributions to
// the strip are adjacent in cols; if sw is above 2, only every sw-th kernel column reads an element (without dilation).
template <class C> constexpr int STRIP = sizeof(C) == 2 ? 2 * WIDE : WIDE;
template <int N, class C>
static __device__ __forceinline__ void read_strip(const C *row, int64_t j, int64_t n, real_of<C> *v)
{
    if (j >= 0 && j + N <= n && is_wide(row + j)) {
        UNROLL
        for (int e = 0; e < N; e += WIDE) load_wide(row + j + e, v + e);
    } else {
        UNROLL
        for (int e = 0; e < N; e += WIDE) read_pack(row, j + e, n, (real_of<C>)0, v + e);
    }
}
template <class S, class C>
__global__ void __launch_bounds__(BLOCK, sizeof(C) == 8 ? 1 : 3)
    fold_kernel(ms_conv v, images some, const C *cols, const S *b, S *dx)
{
    typedef real_of<S> T;
    constexpr int N = STRIP<C>;
    int64_t strips = (v.w + N - 1) / N, i = GLOBAL_INDEX, channels = v.in / v.groups;
    if (i >= some.count * channels * v.d * v.h * strips) return;
    int64_t row = i / strips, w = (i - row * strips) * N, at = row / v.h, h = row - at * v.h, plane = at / v.d,
            d = at - plane * v.d, n = plane / channels;
    T sum[N] = {}, part[N];
    int64_t L = ms__conv_positions(&v), last = (w + v.left) / v.sw, begin = w + v.left - last * v.sw;
    bool sparse = v.sw > 2 && v.dw == 1 && w + v.left >= 0;
    cols += plane * ms__conv_kernel(&v) * L;
    for (int64_t k = 0; k < v.kd * v.kh; k++) {
        int64_t kz = k / v.kh, ky = k - kz * v.kh, z = d + v.front - kz * v.dd, oz = z / v.sd,
                y = h + v.top - ky * v.dh, oy = y / v.sh;
        if (z < 0 || oz * v.sd != z || oz >= v.od || y < 0 || oy * v.sh != y || oy >= v.oh) continue;
        if (sparse) {
            const C *from = cols + k * v.kw * L + (oz * v.oh + oy) * v.ow;
            int64_t past = begin, most = last;
            ROLLED
            for (int e = 0; e < N; e++) {
                T all = 0;
                UNROLL
                for (int i = 0; i < N; i++) all = i == e ? sum[i] : all;  // keeps sum in registers
                for (int64_t kx = past, ox = most; kx < v.kw && ox >= 0; kx += v.sw, ox--)
                    if (ox < v.ow) all += one_of(from + kx * L + ox);
                UNROLL
                for (int i = 0; i < N; i++) sum[i] = i == e ? all : sum[i];
                if (++past == v.sw) past = 0, most++;
            }
            continue;
        }
        for (int64_t kx = 0; kx < v.kw; kx++) {
            const C *from = cols + (((k * v.kw + kx) * v.od + oz) * v.oh + oy) * v.ow;
            int64_t x = w + v.left - kx * v.dw;
            if (v.sw == 1) {
                read_strip<N>(from, x, v.ow, part);
                UNROLL
                for (int e = 0; e < N; e++) sum[e] += part[e];
                continue;
            }
            int64_t ox = x / v.sw, past = x - ox * v.sw;
            if (past < 0) ox--, past += v.sw;
            if (v.sw == 2) {
                read_pack(from, ox + past, v.ow, (T)0, part);
                UNROLL
                for (int e = 0; e < N / 2; e++) {
                    if (past) sum[2 * e + 1] += part[e];
                    else sum[2 * e] += part[e];
                }
                continue;
            }
            UNROLL
            for (int e = 0; e < N; e++) {
                if (past == 0 && in_range(ox, v.ow)) sum[e] += one_of(from + ox);
                if (++past == v.sw) past = 0, ox++;
            }
        }
    }
    if (b) {
        T more = one_of(b + some.group * channels + plane - n * channels);
        UNROLL
        for (int e = 0; e < N; e++) sum[e] += more;
    }
    plane += n * (v.in - channels) + some.first * v.in + some.group * channels;
    dx += ((plane * v.d + d) * v.h + h) * v.w;
    UNROLL
    for (int e = 0; e < N; e += WIDE) write_pack(dx, w + e, v.w, sum + e);
}

ms_status ms__cuda_unfold(const unfolding *u, const images &some, int64_t rows, const void *x, void *cols)
{
    const ms_conv &v = u->v;
    int64_t C = v.in / v.groups, K = C * ms__conv_kernel(&v);
    int64_t line = v.w * ms__dtype_size(u->dtype), units = C * v.kd * v.kh + (rows > K);
    line_tiles t = { line > LINE_BYTES ? 0 : LINE_BYTES / line < v.oh ? LINE_BYTES / line : v.oh, 0 };
    if (v.sw > 2 && t.lines > 0) {
        t.tiles = up(v.oh, t.lines);
#define UNFOLD(S, T)                                                                                               \
    return launch_blocks(u->what, u->index, unfold_lines_kernel<S>, some.count * units * v.od * t.tiles, BLOCK, v, \
                         some, rows, t, (const S *)x, (S *)cols)
        WITH_FLOAT_TYPE(u->dtype, UNFOLD)
#undef UNFOLD
    }
    grid n = grid_of(some.count * rows * up(ms__conv_positions(&v), WIDE));
#define UNFOLD(S, T) \
    return launch(u->what, u->index, unfold_kernel<S>, n.blocks, n.threads, u->v, some, rows, (const S *)x, (S *)cols)
    WITH_FLOAT_TYPE(u->dtype, UNFOLD)
#undef UNFOLD
}

template <class S, class C>
static ms_status fold_from(const unfolding *u, const images &some, const C *cols, const S *bias, S *dx)
{
    const ms_conv &v = u->v;
    grid n = grid_of(some.count * (v.in / v.groups) * v.d * v.h * up(v.w, STRIP<C>));
    return launch(u->what, u->index, fold_kernel<S, C>, n.blocks, n.threads, v, some, cols, bias, dx);
}
ms_status ms__cuda_fold(const unfolding *u, const images &some, int cols_dtype, const void *cols, const void *bias,
                        void *dx)
{
#define FOLD(S, T)                                                                                      \
    return cols_dtype == u->dtype ? fold_from<S, S>(u, some, (const S *)cols, (const S *)bias, (S *)dx) \
                                  : fold_from<S, T>(u, some, (const T *)cols, (const S *)bias, (S *)dx)
    WITH_FLOAT_TYPE(u->dtype, FOLD)
#undef FOLD
}

// ---- the operators im2col and col2im ----

// The convolution whose kernel reads the same elements of an image as the windows of im2col and col2im.
static unfolding unfolding_of(const ms_call *c, const ms_tensor *image)
{
    ms_columns z = ms__columns_of(1, c->i, image->shape[2], image->shape[3]);
    ms_conv v = {};
    v.n = image->shape[0], v.in = image->shape[1], v.groups = 1;
    v.d = 1, v.h = z.h.in, v.w = z.w.in;
    v.od = 1, v.oh = z.h.out, v.ow = z.w.out;
    v.kd = 1, v.kh = z.h.kernel, v.kw = z.w.kernel;
    v.sd = 1, v.sh = z.h.stride, v.sw = z.w.stride;
    v.top = z.h.pad, v.left = z.w.pad;
    v.dd = 1, v.dh = z.h.dilation, v.dw = z.w.dilation;
    return { c->op->name, index_of(image), (int)image->dtype, v };
}

static ms_status run_im2col(ms_call *c)
{
    held_inputs h;
    unfolding u = unfolding_of(c, c->in[0]);
    if (c->out[0]->numel == 0) return MS_OK;
    MS_TRY(h.hold(c));
    return ms__cuda_unfold(&u, { 0, 0, u.v.n, true }, u.v.in * ms__conv_kernel(&u.v), ms__data(h.in[0]),
                           ms__data(c->out[0]));
}

static ms_status run_col2im(ms_call *c)
{
    held_inputs h;
    unfolding u = unfolding_of(c, c->out[0]);
    if (c->out[0]->numel == 0) return MS_OK;
    MS_TRY(h.hold(c));
    return ms__cuda_fold(&u, { 0, 0, u.v.n, true }, u.dtype, ms__data(h.in[0]), NULL, ms__data(c->out[0]));
}

extern const ms_cuda_kernel ms__cuda_columns[];
const ms_cuda_kernel ms__cuda_columns[] = { { "im2col", run_im2col }, { "col2im", run_col2im }, { NULL, NULL } };
