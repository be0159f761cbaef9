// SPDX-License-Identifier: MIT
// cuda/recurrent.cu -- the steps of RNN, LSTM and GRU layers (rows/layers/recurrent.h): for each step a product, and a
// launch that turns sums into gates and states, one thread for each unit of a row. The gradients of weights are one
// product over all steps. States and operands of products have the tensors' dtype; gates, cells and sums are float32
// with half types.
#include "cuda/blocks.h"
#include "cuda/product.h"
#include "rows/layers/recurrent.h"

#define REAL float
#define R(name) name##_f32
#include "formulas/recurrent.h"
#undef REAL
#undef R
#define REAL double
#define R(name) name##_f64
#include "formulas/recurrent.h"
#undef REAL
#undef R

// The formulas of both types as overloads, so that a template can select them.
#define FORMULAS(T, R)                                                                                      \
    static __device__ inline T rnn_step(T x, int relu) { return ms_rnn_step##R(x, relu); }                  \
    static __device__ inline T rnn_back(T h, int relu, T dh) { return ms_rnn_back##R(h, relu, dh); }        \
    static __device__ inline T lstm_step(T *v, T *c) { return ms_lstm_step##R(v, v + 1, v + 2, v + 3, c); } \
    static __device__ inline T lstm_back(T *v, T c, T dh, T *dc)                                            \
    {                                                                                                       \
        T h = ms_lstm_back##R(v + 3, v[1] * c + v[0] * v[2], dh, dc);                                       \
        ms_lstm_cell_back##R(v, v + 1, v + 2, c, dc);                                                       \
        return h;                                                                                           \
    }                                                                                                       \
    static __device__ inline T gru_step(T *v, T h) { return ms_gru_step##R(v, v + 1, v + 2, v[3], h); }     \
    static __device__ inline T gru_back(T *v, T h, T dh) { return ms_gru_back##R(v, v + 1, v + 2, v + 3, h, dh); }
FORMULAS(float, _f32)
FORMULAS(double, _f64)

// The pass between two steps. S: the tensors' type, T: that of sums.
template <class S> struct pass {
    typedef real_of<S> T;
    ms_step now, next;
    int64_t rows, H, P, gates;  // rows: those of the larger of the two steps
    bool relu, project;
    // Data of forward. unprojected: [N, H].
    const S *x, *bias, *h0, *c0;
    T *sums, *cs, *q;
    S *y, *hn, *cn, *hs, *unprojected;
    // Data of backward, which also reads hs, cs and q, and stores in `unprojected` the states before the projection,
    // [rows of all steps, H], unless it is NULL.
    const S *dy, *dh, *dc;
    S *dx, *da, *dh0, *dc0, *dprojected;
    T *carried;
};

// ---- forward --------------------------------------------------------------------------------------

// An element of a row with `wide` elements.
struct spot {
    int64_t row, at, wide;
};
// Stores v, an element of the state after a step: in `before`, which has the states before each step, if the row has a
// next step; otherwise in `last`, the final states.
template <class B, class L>
static __device__ inline void leave(const ms_step &next, B *before, L *last, const spot &s, real_of<L> v)
{
    if (s.row < next.n) store_one(before + (next.at + s.row) * s.wide + s.at, v);
    else store_one(last + s.row * s.wide + s.at, v);
}

template <class S, int KIND> __global__ void forward_kernel(pass<S> w)
{
    typedef real_of<S> T;
    int64_t r = GLOBAL_INDEX / w.H, j = GLOBAL_INDEX - r * w.H, H = w.H;
    if (r >= w.rows) return;
    if (r >= w.now.n) {
        if (KIND == MS_LSTM) w.cs[(w.next.at + r) * H + j] = w.c0 ? one_of(w.c0 + r * H + j) : (T)0;
        if (!w.project) store_one(w.hs + (w.next.at + r) * H + j, w.h0 ? one_of(w.h0 + r * H + j) : (T)0);
        return;
    }
    constexpr int GATES = KIND == MS_LSTM ? 4 : KIND == MS_GRU ? 3 : 1;
    int64_t row = w.now.at + r;
    const S *x = w.x + row * GATES * H + j;
    const T *sums = w.sums + r * GATES * H + j;
    T v[4], last = 0, h;
    UNROLL
    for (int g = 0; g < GATES; g++) {
        T of_x = one_of(x + g * H);
        last = sums[g * H] + (w.bias ? one_of(w.bias + g * H + j) : (T)0);
        v[g] = KIND == MS_GRU && g == 2 ? of_x : of_x + last;
    }
    if constexpr (KIND == MS_LSTM) {
        T c = w.cs[row * H + j];
        h = lstm_step(v, &c);
        leave(w.next, w.cs, w.cn, spot { r, j, H }, c);
    } else if constexpr (KIND == MS_GRU) {
        v[3] = last;
        h = gru_step(v, one_of(w.hs + row * H + j));
    } else h = rnn_step(v[0], w.relu);
    if (KIND == MS_RNN && w.q) w.q[row * H + j] = h;
    if (KIND != MS_RNN && w.q) {
        UNROLL
        for (int g = 0; g < 4; g++) w.q[(row * 4 + g) * H + j] = v[g];
    }
    if (w.project) {
        store_one(w.unprojected + r * H + j, h);
        return;
    }
    store_one(w.y + row * H + j, h);
    leave(w.next, w.hs, w.hn, spot { r, j, H }, h);
}

// Runs after the product of a projection, which has stored y. Stores the states before the next step (h_0 for rows
// whose first step it is) and the final states of rows whose last step this was.
template <class S> __global__ void leave_kernel(pass<S> w)
{
    typedef real_of<S> T;
    int64_t r = GLOBAL_INDEX / w.P, j = GLOBAL_INDEX - r * w.P;
    if (r >= w.rows) return;
    if (r < w.now.n) leave(w.next, w.hs, w.hn, spot { r, j, w.P }, one_of(w.y + (w.now.at + r) * w.P + j));
    else store_one(w.hs + (w.next.at + r) * w.P + j, w.h0 ? one_of(w.h0 + r * w.P + j) : (T)0);
}

// ---- backward -------------------------------------------------------------------------------------

// The gradient of element j of row r of the state after the next step. If the row has no next step, stores the gradient
// as that of h_0, and returns 0.
template <class S, int KIND> static __device__ inline real_of<S> state_gradient(const pass<S> &w, int64_t r, int64_t j)
{
    typedef real_of<S> T;
    T dh;
    if (r < w.now.n) {
        dh = w.sums[r * w.P + j];
        if (KIND == MS_GRU) dh += w.carried[r * w.H + j];
    } else dh = w.dh ? one_of(w.dh + r * w.P + j) : (T)0;
    if (r >= w.next.n) {
        if (w.dh0) store_one(w.dh0 + r * w.P + j, dh);
        return 0;
    }
    return w.dy ? dh + one_of(w.dy + (w.next.at + r) * w.P + j) : dh;
}

// Stores the gradients of the sums of products from which unit j of row r of the next step is computed.
template <class S, int KIND>
static __device__ inline void unit_gradient(const pass<S> &w, int64_t r, int64_t j, real_of<S> dh)
{
    typedef real_of<S> T;
    constexpr int GATES = KIND == MS_LSTM ? 4 : KIND == MS_GRU ? 3 : 1;
    int64_t H = w.H, row = w.next.at + r;
    S *dx = w.dx + row * GATES * H + j;
    if constexpr (KIND == MS_RNN) store_one(dx, rnn_back(w.q[row * H + j], w.relu, dh));
    else {
        T v[4];
        UNROLL
        for (int g = 0; g < 4; g++) v[g] = w.q[(row * 4 + g) * H + j];
        if constexpr (KIND == MS_LSTM) {
            T dc = r < w.now.n ? w.carried[r * H + j] : w.dc ? one_of(w.dc + r * H + j) : (T)0;
            T h = lstm_back(v, w.cs[row * H + j], dh, &dc);
            w.carried[r * H + j] = dc;
            if (w.unprojected) store_one(w.unprojected + row * H + j, h);
        } else {
            w.carried[r * H + j] = gru_back(v, one_of(w.hs + row * H + j), dh);
            S *da = w.da + row * GATES * H + j;
            store_one(da, v[0]);
            store_one(da + H, v[1]);
            store_one(da + 2 * H, v[3]);
        }
        UNROLL
        for (int g = 0; g < GATES; g++) store_one(dx + g * H, v[g]);
    }
}

template <class S, int KIND> __global__ void backward_kernel(pass<S> w)
{
    int64_t r = GLOBAL_INDEX / w.P, j = GLOBAL_INDEX - r * w.P;
    if (r >= w.rows) return;
    real_of<S> dh = state_gradient<S, KIND>(w, r, j);
    if (r >= w.next.n) return;
    if (w.project) store_one(w.dprojected + (w.next.at + r) * w.P + j, dh);
    else unit_gradient<S, KIND>(w, r, j, dh);
}

// Runs after the product with the projection's weight, whose results are in `sums`.
template <class S> __global__ void unproject_kernel(pass<S> w)
{
    int64_t r = GLOBAL_INDEX / w.H, j = GLOBAL_INDEX - r * w.H;
    if (r < w.next.n) unit_gradient<S, MS_LSTM>(w, r, j, w.sums[r * w.H + j]);
}

// Stores the gradient of c_0, rounded to its dtype.
template <class S> __global__ void cell_kernel(int64_t n, const real_of<S> *carried, S *dc0)
{
    if (GLOBAL_INDEX < n) store_one(dc0 + GLOBAL_INDEX, carried[GLOBAL_INDEX]);
}

// ---- passes ---------------------------------------------------------------------------------------

// What the passes of a call have in common.
struct job {
    const ms_call *c;
    int index, device, dtype;
    ms_recurrent_kind kind;
    ms_steps steps;
    const ms_tensor *w, *project;
};
static job recurrent_job_of(const ms_call *c, ms_recurrent_kind kind, const ms_tensor *like)
{
    return { c, index_of(like), ms__device(like), (int)like->dtype, kind, {}, NULL, NULL };
}

template <class S> static int sums_type() { return std::is_same_v<S, double> ? MS_F64 : MS_F32; }

// An operand of multiply, which stores the product of a [m, k] and b [k, n] in `to` [m, n]: element (i, j) is at
// i * rs + j * cs. sizes: m, n, k.
struct matrix {
    const void *data;
    int64_t rs, cs;
};
static ms_status multiply_step(const job &j, const int64_t *sizes, const matrix &a, const matrix &b, void *to,
                               int to_type)
{
    product p = product_of(j.c->op->name, j.dtype, sizes[0], sizes[1], sizes[2]);
    p.a = a.data, p.a_rs = a.rs, p.a_cs = a.cs;
    p.b = b.data, p.b_rs = b.rs, p.b_cs = b.cs;
    p.c = to;
    p.c_type = to_type;
    return ms__cuda_product(j.index, &p);
}

template <class S> static ms_status start(const job &j, void (*kernel)(pass<S>), int64_t threads, const pass<S> &w)
{
    grid n = grid_of(threads);
    return launch(j.c->op->name, j.index, kernel, n.blocks, n.threads, w);
}

template <class S, int KIND> static ms_status forward_pass(const job &j, const pass<S> &w)
{
    int64_t H = w.H, P = w.P, features = w.gates * H;
    if (w.now.n) {
        int64_t sizes[] = { w.now.n, features, P };
        MS_TRY(multiply_step(j, sizes, { w.hs + w.now.at * P, P, 1 }, { ms__data(j.w), 1, P }, w.sums, sums_type<S>()));
    }
    MS_TRY(start(j, forward_kernel<S, KIND>, w.rows * H, w));
    if (!w.project) return MS_OK;
    if (w.now.n) {
        int64_t sizes[] = { w.now.n, P, H };
        MS_TRY(multiply_step(j, sizes, { w.unprojected, H, 1 }, { ms__data(j.project), 1, H }, w.y + w.now.at * P,
                             j.dtype));
    }
    return start(j, leave_kernel<S>, w.rows * P, w);
}

template <class S, int KIND> static ms_status backward_pass(const job &j, const pass<S> &w)
{
    int64_t H = w.H, P = w.P, features = w.gates * H;
    if (w.now.n) {
        int64_t sizes[] = { w.now.n, P, features };
        MS_TRY(multiply_step(j, sizes, { w.da + w.now.at * features, features, 1 }, { ms__data(j.w), P, 1 }, w.sums,
                             sums_type<S>()));
    }
    MS_TRY(start(j, backward_kernel<S, KIND>, w.rows * P, w));
    if (!w.project || !w.next.n) return MS_OK;
    int64_t sizes[] = { w.next.n, H, P };
    MS_TRY(multiply_step(j, sizes, { w.dprojected + w.next.at * P, P, 1 }, { ms__data(j.project), H, 1 }, w.sums,
                         sums_type<S>()));
    return start(j, unproject_kernel<S>, w.next.n * H, w);
}

template <class S>
static ms_status make_cuda_passes(const job &j, pass<S> &w, bool back,
                                  ms_status (*pass_of)(const job &, const pass<S> &))
{
    w.now = {};
    w.next = ms__first_step(&j.steps, back);
    for (;;) {
        w.rows = w.now.n > w.next.n ? w.now.n : w.next.n;
        MS_TRY(pass_of(j, w));
        if (!w.next.n) return MS_OK;
        w.now = w.next;
        w.next = ms__next_step(&j.steps, w.now, back);
    }
}

template <class S> static pass<S> pass_of(const job &j, int64_t H, int64_t P, bool relu)
{
    pass<S> w = {};
    w.H = H, w.P = P, w.gates = ms__gates_of(j.kind);
    w.relu = relu;
    w.project = j.project != NULL;
    return w;
}

template <class S, int KIND> static ms_status forward(const job &j, const held_inputs &h)
{
    typedef real_of<S> T;
    const ms_call *c = j.c;
    ms_recurrent_kind kind = (ms_recurrent_kind)KIND;
    const ms_tensor *x = h.in[MS_RECURRENT_X];
    int64_t features = x->shape[x->ndim - 1], N = j.steps.n;
    pass<S> w = pass_of<S>(j, features / ms__gates_of(kind), j.w->shape[1], c->n_i > 1 && c->i[1] != 0);
    w.x = (const S *)ms__data(x);
    w.bias = (const S *)data_of(h.in[MS_RECURRENT_B]);
    w.h0 = (const S *)data_of(h.in[MS_RECURRENT_H0]);
    w.c0 = (const S *)data_of(h.in[MS_RECURRENT_C0]);
    w.y = (S *)data_of(c->out[MS_RECURRENT_Y]);
    w.hn = (S *)data_of(c->out[MS_RECURRENT_HN]);
    w.cn = (S *)data_of(ms__recurrent_out(kind, c->out, MS_RECURRENT_CN));
    w.hs = (S *)data_of(ms__recurrent_out(kind, c->out, MS_RECURRENT_HS));
    w.cs = (T *)data_of(ms__recurrent_out(kind, c->out, MS_RECURRENT_CS));
    w.q = (T *)data_of(ms__recurrent_out(kind, c->out, MS_RECURRENT_GATES));
    scratch sums, units;
    MS_TRY(sums.alloc(c, j.device, N * features * (int64_t)sizeof(T)));
    if (w.project) MS_TRY(units.alloc(c, j.device, N * w.H * (int64_t)sizeof(S)));
    w.sums = (T *)sums.data;
    w.unprojected = (S *)units.data;
    return make_cuda_passes(j, w, false, forward_pass<S, KIND>);
}

// dw [m, n] = d^T s over all rows; sums: the sums of d's columns, or NULL.
static ms_status step_weight_gradient(const job &j, const ms_tensor *d, const void *s, ms_tensor *dw, ms_tensor *sums)
{
    int64_t m = d->shape[1], n = dw ? dw->shape[1] : 0;
    bool summed = false;
    if (dw) {
        product p = product_of(j.c->op->name, j.dtype, m, n, j.steps.rows);
        p.a = ms__data(d), p.a_rs = 1, p.a_cs = m;
        p.b = s, p.b_rs = n, p.b_cs = 1;
        p.c = ms__data(dw);
        p.row_sums = data_of(sums);
        MS_TRY(ms__cuda_product(j.index, &p));
        summed = p.summed;
    }
    return sums && !summed ? ms__cuda_column_sum(d, j.steps.rows, m, sums) : MS_OK;
}

// Tensors [rows of all steps, columns] that are released at the end of the scope.
struct temporary {
    ms_tensor *t = NULL;
    ms_status make(const job &j, int64_t columns)
    {
        int64_t shape[] = { j.steps.rows, columns };
        return ms__tensor_new(&t, j.dtype, j.device, 2, shape, j.c->op->name);
    }
    // A view of an existing tensor.
    void view(const job &j, const ms_tensor *of, int64_t columns)
    {
        int64_t shape[] = { j.steps.rows, columns }, stride[] = { columns, 1 };
        t = ms__tensor_view(of, 2, shape, stride, of->offset);
    }
    ~temporary()
    {
        if (t) ms__release(t);
    }
};

template <class S, int KIND> static ms_status backward(const job &j, const held_inputs &h)
{
    typedef real_of<S> T;
    const ms_call *c = j.c;
    const ms_tensor *hs = c->in[MS_RECURRENT_BACK_HS], *cs = c->in[MS_RECURRENT_BACK_CS];
    ms_tensor *dx = ms__grad_out(c, MS_RECURRENT_X), *dw = ms__grad_out(c, MS_RECURRENT_W),
              *db = ms__grad_out(c, MS_RECURRENT_B), *dproject = ms__grad_out(c, MS_RECURRENT_PROJECT);
    int64_t P = hs->shape[hs->ndim - 1], H = cs ? cs->shape[cs->ndim - 1] : P, N = j.steps.n;
    pass<S> w = pass_of<S>(j, H, P, c->i[1] != 0);
    w.dy = (const S *)data_of(h.in[MS_RECURRENT_DY]);
    w.dh = (const S *)data_of(h.in[MS_RECURRENT_DH]);
    w.dc = (const S *)data_of(h.in[MS_RECURRENT_DC]);
    w.hs = (S *)ms__data(hs);
    w.cs = (T *)data_of(cs);
    w.q = (T *)data_of(c->in[MS_RECURRENT_BACK_GATES]);
    w.dh0 = (S *)data_of(ms__grad_out(c, MS_RECURRENT_H0));
    w.dc0 = (S *)data_of(ms__grad_out(c, MS_RECURRENT_C0));

    temporary of_x, of_state, projected, units;
    scratch sums, carried;
    if (dx) of_x.view(j, dx, w.gates * H);
    else MS_TRY(of_x.make(j, w.gates * H));
    if (KIND == MS_GRU) MS_TRY(of_state.make(j, w.gates * H));
    const ms_tensor *da = KIND == MS_GRU ? of_state.t : of_x.t;
    w.dx = (S *)ms__data(of_x.t);
    w.da = (S *)ms__data(da);
    if (w.project) MS_TRY(projected.make(j, P));
    if (dproject) MS_TRY(units.make(j, H));
    w.dprojected = (S *)data_of(projected.t);
    w.unprojected = (S *)data_of(units.t);
    MS_TRY(sums.alloc(c, j.device, N * (H > P ? H : P) * (int64_t)sizeof(T)));
    MS_TRY(carried.alloc(c, j.device, N * H * (int64_t)sizeof(T)));
    w.sums = (T *)sums.data;
    w.carried = (T *)carried.data;
    MS_TRY(make_cuda_passes(j, w, true, backward_pass<S, KIND>));
    MS_TRY(step_weight_gradient(j, da, w.hs, dw, db));
    if (dproject) MS_TRY(step_weight_gradient(j, projected.t, w.unprojected, dproject, NULL));
    if (!w.dc0) return MS_OK;
    grid n = grid_of(N * H);
    return launch(c->op->name, j.index, cell_kernel<S>, n.blocks, n.threads, N * H, (const T *)w.carried, w.dc0);
}

// ---- rows -----------------------------------------------------------------------------------------

template <int KIND> static ms_status run_forward(ms_call *c)
{
    job j = recurrent_job_of(c, (ms_recurrent_kind)KIND, c->in[MS_RECURRENT_X]);
    MS_TRY(ms__steps_of(c, c->in[MS_RECURRENT_X], ms__recurrent_in(c, MS_RECURRENT_SIZES), &j.steps));
    if (c->out[MS_RECURRENT_Y]->numel == 0) return MS_OK;
    held_inputs h;
    MS_TRY(h.hold(c, MS_RECURRENT_SIZES));
    j.w = h.in[MS_RECURRENT_W];
    j.project = h.in[MS_RECURRENT_PROJECT];
#define FORWARD(S, T) return forward<S, KIND>(j, h)
    WITH_FLOAT_TYPE(j.dtype, FORWARD)
#undef FORWARD
}

template <int KIND> static ms_status run_backward(ms_call *c)
{
    const ms_tensor *hs = c->in[MS_RECURRENT_BACK_HS];
    job j = recurrent_job_of(c, (ms_recurrent_kind)KIND, hs);
    MS_TRY(ms__steps_of(c, hs, c->in[MS_RECURRENT_BACK_SIZES], &j.steps));
    if (hs->numel == 0) {
        for (int k = 0; k < c->n_out; k++) MS_TRY(ms__cuda_fill_tensor(c->out[k], 0));
        return MS_OK;
    }
    held_inputs h;
    MS_TRY(h.hold(c, MS_RECURRENT_BACK_SIZES));
    j.w = h.in[MS_RECURRENT_BACK_W];
    j.project = h.in[MS_RECURRENT_BACK_PROJECT];
#define BACKWARD(S, T) return backward<S, KIND>(j, h)
    WITH_FLOAT_TYPE(j.dtype, BACKWARD)
#undef BACKWARD
}

extern const ms_cuda_kernel ms__cuda_recurrent[];
const ms_cuda_kernel ms__cuda_recurrent[] = {
    { "rnn", run_forward<MS_RNN> },
    { "rnn_backward", run_backward<MS_RNN> },
    { "lstm", run_forward<MS_LSTM> },
    { "lstm_backward", run_backward<MS_LSTM> },
    { "gru", run_forward<MS_GRU> },
    { "gru_backward", run_backward<MS_GRU> },
    { NULL, NULL },
};
