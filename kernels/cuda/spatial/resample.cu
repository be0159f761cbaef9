// SPDX-License-Identifier: MIT
// cuda/spatial/resample.cu -- resample on the GPU: a pass over the tensor for each dimension that changes, a thread for
// each element of a pass's result. Backward gathers: a thread finds the outputs that read its element. Between passes
// half types are float32.
#include "cuda/blocks.h"
#include "rows/spatial/resample.h"

struct pass_job {
    ms_resample_pass p;
    int from_type, to_type;
    const void *x;
    void *y;
};

// The formulas by their computing type.
template <class T> struct formula;
#define FORMULA(REAL, S)                                                                                               \
    template <> struct formula<REAL> {                                                                                 \
        typedef ms_taps_##S taps;                                                                                      \
        typedef ms_readers_##S readers;                                                                                \
        static __device__ taps taps_of(const ms_resample_axis &a, int64_t o) { return ms_taps_of_##S(&a, o); }         \
        static __device__ readers readers_of(const ms_resample_axis &a, int64_t i)                                     \
        {                                                                                                              \
            return ms_readers_of_##S(&a, i);                                                                           \
        }                                                                                                              \
        static __device__ int64_t at(const ms_resample_axis &a, taps s, int64_t k) { return ms_tap_at_##S(&a, s, k); } \
        static __device__ REAL weight(const ms_resample_axis &a, taps s, int64_t k)                                    \
        {                                                                                                              \
            return ms_tap_weight_##S(&a, s, k);                                                                        \
        }                                                                                                              \
    };
FORMULA(float, f32)
FORMULA(double, f64)

// Elements of float64 are computed in double, those of other types in float.
template <class T> static __device__ inline T element(int dtype, const void *p, int64_t i)
{
    if constexpr (sizeof(T) == 8) return ((const double *)p)[i];
    else return load<T>(dtype, p, i);
}
template <class T> static __device__ inline void set_element(int dtype, void *p, int64_t i, T v)
{
    if constexpr (sizeof(T) == 8) ((double *)p)[i] = v;
    else store<T>(dtype, p, i, v);
}

template <class T> __global__ void resample_kernel(pass_job j)
{
    typedef formula<T> F;
    const ms_resample_pass &p = j.p;
    int64_t i = GLOBAL_INDEX;
    if (i >= p.outer * p.to * p.inner) return;
    int64_t row = i / p.inner, matrix = row / p.to, column = i - row * p.inner;
    typename F::taps s = F::taps_of(p.axis, row - matrix * p.to);
    T sum = 0;
    for (int64_t k = 0; k < s.count; k++) {
        int64_t from = (matrix * p.from + F::at(p.axis, s, k)) * p.inner + column;
        T v = F::weight(p.axis, s, k) * element<T>(j.from_type, j.x, from);
        sum = k == 0 ? v : sum + v;
    }
    set_element<T>(j.to_type, j.y, i, sum);
}

template <class T> __global__ void resample_backward_kernel(pass_job j)
{
    typedef formula<T> F;
    const ms_resample_pass &p = j.p;
    int64_t i = GLOBAL_INDEX;
    if (i >= p.outer * p.to * p.inner) return;
    int64_t row = i / p.inner, matrix = row / p.to, column = i - row * p.inner, here = row - matrix * p.to;
    bool stretched = p.axis.kind == MS_LINEAR_AA || p.axis.kind == MS_CUBIC_AA, some = false;
    typename F::readers r = F::readers_of(p.axis, here);
    T sum = 0;
    for (int part = 0; part < 3; part++)
        for (int64_t o = r.from[part]; o < r.to[part]; o++) {
            typename F::taps s = F::taps_of(p.axis, o);
            // The taps of an antialias filter are consecutive elements: at most one of them is `here`.
            int64_t k = stretched ? here - s.first : 0, end = stretched ? k + 1 : s.count;
            for (; k < end; k++) {
                if (k < 0 || k >= s.count || F::at(p.axis, s, k) != here) continue;
                int64_t from = (matrix * p.from + o) * p.inner + column;
                T v = F::weight(p.axis, s, k) * element<T>(j.from_type, j.x, from);
                sum = some ? sum + v : v;
                some = true;
            }
        }
    set_element<T>(j.to_type, j.y, i, sum);
}

static ms_status resample_call(ms_call *c, bool back)
{
    held_inputs h;
    scratch room[2];
    ms_resample_pass pass[3];
    ms_tensor *o = c->out[0];
    int dims = (int)c->i[MS_RESAMPLE_DIMS], wide = o->dtype == MS_F64 ? MS_F64 : MS_F32;
    if (o->numel == 0) return MS_OK;
    const int64_t *in = back ? o->shape + o->ndim - dims : c->in[0]->shape + o->ndim - dims;
    int n = ms__resample_passes(c, c->in[0], in, back, pass);
    if (n == 0) return ms__cuda_copy_tensor(o, c->in[0]);
    MS_TRY(h.hold(c, 1));
    pass_job j = { pass[0], (int)o->dtype, (int)o->dtype, ms__data(h.in[0]), NULL };
    for (int k = 0; k < n; k++) {
        int64_t numel = pass[k].outer * pass[k].to * pass[k].inner;
        j.p = pass[k];
        j.y = ms__data(o), j.to_type = (int)o->dtype;
        if (k < n - 1) {
            MS_TRY(room[k].alloc(c, ms__device(o), numel * ms__dtype_size(wide)));
            j.y = room[k].data, j.to_type = wide;
        }
        grid g = grid_of(numel);
        MS_TRY(launch(c->op->name, index_of(o),
                      back ? REAL_KERNEL(wide, resample_backward_kernel) : REAL_KERNEL(wide, resample_kernel), g.blocks,
                      g.threads, j));
        j.x = j.y, j.from_type = j.to_type;
    }
    return MS_OK;
}
static ms_status run_resample(ms_call *c) { return resample_call(c, false); }
static ms_status run_resample_backward(ms_call *c) { return resample_call(c, true); }

extern const ms_cuda_kernel ms__cuda_resample[];
const ms_cuda_kernel ms__cuda_resample[] = { { "resample", run_resample },
                                             { "resample_backward", run_resample_backward },
                                             { NULL, NULL } };
