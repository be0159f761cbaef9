// SPDX-License-Identifier: MIT
// cpu/product/recurrent.c -- the steps of RNN, LSTM and GRU layers (rows/layers/recurrent.h).
//
// The recurrent weights are packed once for all steps. A pass, from one step to the next, is divided into tasks of some
// units and some rows: a task multiplies, and turns the sums into gates and states while they are in the first-level
// cache. The gradients of weights are one product over all steps, after the last pass. In forward, packing does not pay
// for a few steps: each is then an ordinary product. Half types are computed in float32 copies, and rounded at the end.
// The order of every sum depends on shapes and the CPU, not on the number of threads.
#include "rows/layers/recurrent.h"
#include "cpu/product/product.h"
#include "rows/grad.h"
#include "cpu/rows/layers.h"

enum {
    WIDEST = 48,      // columns of a block: three vectors
    MOST_ROWS = 32,   // rows of a task
    FEW_STEPS = 4,    // up to this number of time steps, forward does not pack the recurrent weight
    ALONE = 1 << 18,  // multiply-adds of a pass up to which other threads are not woken
};

// A matrix packed for products with its columns. The columns are divided into parts (one for each gate) of `columns`
// columns, and each part into blocks of `wide` columns. Every block of every part is a panel.
typedef struct panels {
    const void *from, *bias;  // bias: NULL if there is none
    // Strides of `from`, in elements. rs: between rows (the inner dimension, `depth` of them); cs: between columns
    int64_t rs, cs;
    int64_t depth, columns, parts, wide;
    char *data;
} panels;

static int64_t panel_columns_of(const panels *p, int64_t block)
{
    int64_t left = p->columns - block * p->wide;
    return left < p->wide ? left : p->wide;
}
static int64_t panel_blocks_of(const panels *p) { return (p->columns + p->wide - 1) / p->wide; }
static int64_t panel_numbers(const panels *p) { return (p->depth + 1) * p->wide; }
static int64_t packed_numbers(const panels *p) { return panel_blocks_of(p) * p->parts * panel_numbers(p); }

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// What backward reads and writes besides hs, cs, q and `unprojected` of the pass. dy, dh, dc: the gradients of the
// outputs; dx, da: the gradients of the gates' sums over the input and over the state; dh0: the gradient of h_0;
// carried: the gradient that passes from step to step elementwise; dprojected: the gradients of the projected states.
typedef struct gradients {
    const void *dy, *dh, *dc;
    void *dx, *da, *dh0, *carried, *dprojected;
} gradients;

// The work of all passes, and the steps of the current one.
typedef struct pass {
    ms_recurrent_kind kind;
    bool relu, project, packed;  // packed: the weight is packed
    int dtype;
    ms_steps steps;
    ms_step now, next;
    // H: units; P: elements of a state (H without a projection); chunk: rows of a task; chunks: tasks of a block of
    // columns
    int64_t H, P, gates, chunk, chunks;
    panels panels, projection;
    // Data of forward; backward, too, uses hs, cs, q and unprojected. product: a step's product with the weight, if the
    // weight is not packed.
    const void *x, *h0, *c0;
    void *y, *hn, *cn, *hs, *cs, *q, *unprojected, *product;
    gradients g;
    char *room;
    size_t room_bytes;  // per thread
} pass;

// Elements [unit, unit + n) of a row of a step.
typedef struct part {
    int64_t row, unit, n;
} part;

// A task of a pass: units [unit, unit + n), those of a block of columns, of rows [first, last) of a step. room: memory
// of the thread for the products.
typedef struct tile {
    int64_t block, unit, n, first, last;
    void *room;
} tile;

static tile tile_of(const pass *w, const panels *p, int64_t k)
{
    int64_t block = k / w->chunks, first = k % w->chunks * w->chunk, rows = most(w->now.n, w->next.n);
    return (tile) { .block = block,
                    .unit = block * p->wide,
                    .n = panel_columns_of(p, block),
                    .first = first,
                    .last = least(first + w->chunk, rows),
                    .room = w->room + w->room_bytes * (size_t)ms__thread_num() };
}

// Memory that is accessed after a product and prefetched during it: parts of `rows` rows of each of n matrices. The
// parts of a row are `parts` runs of `columns` adjacent elements, which begin `apart` elements apart.
typedef struct ahead {
    int64_t rows, columns;
    int n;
    struct {
        const void *from;
        int64_t parts, apart;
    } of[4];
} ahead;

#define BODY "cpu/product/recurrent_body.h"
#include "cpu/rows/rows.h"
#include "cpu/both_types.h"

#define BOTH(w, name) ((w)->dtype == MS_F64 ? name##_f64 : name##_f32)

static void run_step_tasks(pass *w, int64_t tasks, int64_t multiplications, ms_range_fn task)
{
    if (multiplications > ALONE) ms__parallel_tasks(tasks, task, w);
    else
        for (int64_t k = 0; k < tasks; k++) task(w, k, k + 1, k);
}

// Chooses the sizes of tasks: large ones need less memory traffic, but there must be enough for all threads.
static void divide_columns(pass *w, int64_t columns)
{
    int64_t threads = ms_num_threads(), enough = threads > 1 ? 4 * threads : 1, wide = WIDEST;
    w->chunk = MOST_ROWS;
#define TASKS (((columns + wide - 1) / wide) * ((w->steps.n + w->chunk - 1) / w->chunk))
    while (TASKS < enough && w->chunk > 8) w->chunk /= 2;
    while (TASKS < enough / 2 && wide > 16) wide -= 16;
#undef TASKS
    w->panels.wide = w->projection.wide = wide;
}

// Allocates memory for the packed weights, for each thread, and for n more numbers, whose address is returned.
static void *alloc_room(pass *w, ms_block **block, int64_t n, const char *what, ms_status *st)
{
    int64_t size = w->dtype == MS_F64 ? 8 : 4, a = w->packed ? packed_numbers(&w->panels) : 0,
            b = w->project ? packed_numbers(&w->projection) : 0;
    w->room_bytes = (size_t)((4 * MOST_ROWS + 4) * w->panels.wide * size);
    if ((*st = ms__alloc_scratch(block, (size_t)((a + b + n) * size) + w->room_bytes * (size_t)ms_num_threads(), what)))
        return NULL;
    w->room = (*block)->data;
    w->panels.data = w->room + w->room_bytes * (size_t)ms_num_threads();
    w->projection.data = w->panels.data + a * size;
    return w->projection.data + b * size;
}

static void pack_panels(const pass *w, panels *p)
{
    int64_t tasks = panel_blocks_of(p) * p->parts;
    ms_range_fn task = BOTH(w, pack_panel);
    if (p->depth * p->columns * p->parts > ALONE) ms__parallel_tasks(tasks, task, p);
    else
        for (int64_t k = 0; k < tasks; k++) task(p, k, k + 1, k);
}

// ---- float32 and float64 copies of tensors --------------------------------------------------------

enum { HELD = 24 };
typedef struct held {
    int dtype, n;
    struct {
        ms_tensor *t, *to;  // to: the tensor to which the result in t is converted; NULL if t is an input
    } list[HELD];
} held;

// Sets *data to an input's data, contiguous and in the computing type; h owns the tensor. NULL if there is no input.
static ms_status take_operand(held *h, ms_tensor *t, const void **data)
{
    ms_tensor *copy = NULL;
    *data = NULL;
    if (!t) return MS_OK;
    if (t->dtype == h->dtype) MS_TRY(ms__contiguous(&copy, t));
    else {
        MS_TRY(ms__tensor_new(&copy, h->dtype, MS_CPU, t->ndim, t->shape, "recurrent"));
        MS_TRY(ms__or_drop(ms__copy_data(copy, t), &copy));
    }
    h->list[h->n].to = NULL;
    h->list[h->n++].t = copy;
    *data = ms__data(copy);
    return MS_OK;
}

// Sets *data to where an output is to be written, in the computing type; release converts it to the output's dtype.
static ms_status give_result(held *h, ms_tensor *t, void **data)
{
    *data = NULL;
    if (!t) return MS_OK;
    if (t->dtype == h->dtype) {
        *data = ms__data(t);
        return MS_OK;
    }
    ms_tensor *wide;
    MS_TRY(ms__tensor_new(&wide, h->dtype, MS_CPU, t->ndim, t->shape, "recurrent"));
    h->list[h->n].to = t;
    h->list[h->n++].t = wide;
    *data = ms__data(wide);
    return MS_OK;
}

static ms_status release(held *h, ms_status st)
{
    for (int k = 0; k < h->n; k++) {
        if (st == MS_OK && h->list[k].to) st = ms__copy_data(h->list[k].to, h->list[k].t);
        ms__release(h->list[k].t);
    }
    return st;
}

static int computing_type(const ms_tensor *t) { return t->dtype == MS_F64 ? MS_F64 : MS_F32; }

// ---- forward --------------------------------------------------------------------------------------

// Computes the product of the states before a step with the weight, plus the bias, by ms__gemm, without packing.
static ms_status step_product(const pass *w, const char *what)
{
    int64_t size = w->dtype == MS_F64 ? 8 : 4, features = w->gates * w->H;
    ms_gemm g = ms__gemm_of(what, w->dtype, w->now.n, features, w->P);
    g.a = (const char *)w->hs + w->now.at * w->P * size, g.a_rs = w->P, g.a_cs = 1;
    g.b = w->panels.from, g.b_rs = 1, g.b_cs = w->P;
    g.bias = w->panels.bias;
    g.c = w->product;
    return ms__gemm(&g);
}

// Runs all passes. Each runs `first` on all blocks of columns and, with a projection, then `second`.
static ms_status make_cpu_passes(pass *w, bool back, const char *what)
{
    ms_range_fn first = back ? BOTH(w, backward_task) : BOTH(w, forward_task),
                second = back ? BOTH(w, unproject_task) : BOTH(w, project_task);
    int64_t blocks = panel_blocks_of(&w->panels), more = w->project ? panel_blocks_of(&w->projection) : 0;
    w->next = ms__first_step(&w->steps, back);
    for (;;) {
        int64_t rows = most(w->now.n, w->next.n);
        w->chunks = (rows + w->chunk - 1) / w->chunk;
        if (!w->packed && w->now.n) MS_TRY(step_product(w, what));
        run_step_tasks(w, blocks * w->chunks, rows * w->gates * w->H * w->P, first);
        if (more) run_step_tasks(w, more * w->chunks, rows * w->H * w->P, second);
        if (!w->next.n) return MS_OK;
        w->now = w->next;
        w->next = ms__next_step(&w->steps, w->now, back);
    }
}

static ms_status recurrent_forward(ms_call *c, ms_recurrent_kind kind)
{
    ms_tensor *x = c->in[MS_RECURRENT_X], *y = c->out[MS_RECURRENT_Y],
              *project = ms__recurrent_in(c, MS_RECURRENT_PROJECT);
    pass w = { .kind = kind, .relu = c->n_i > 1 && c->i[1], .project = project, .dtype = computing_type(x) };
    held h = { .dtype = w.dtype };
    ms_block *block = NULL;
    MS_TRY(ms__steps_of(c, x, ms__recurrent_in(c, MS_RECURRENT_SIZES), &w.steps));
    w.gates = ms__gates_of(kind);
    w.P = c->in[MS_RECURRENT_W]->shape[1];
    w.H = x->shape[x->ndim - 1] / w.gates;
    if (y->numel == 0) return MS_OK;

    ms_status st = take_operand(&h, x, &w.x);
    if (st == MS_OK) st = take_operand(&h, c->in[MS_RECURRENT_W], &w.panels.from);
    if (st == MS_OK) st = take_operand(&h, ms__recurrent_in(c, MS_RECURRENT_B), &w.panels.bias);
    if (st == MS_OK) st = take_operand(&h, ms__recurrent_in(c, MS_RECURRENT_H0), &w.h0);
    if (st == MS_OK) st = take_operand(&h, ms__recurrent_in(c, MS_RECURRENT_C0), &w.c0);
    if (st == MS_OK) st = take_operand(&h, project, &w.projection.from);
    void **out[] = { &w.y, &w.hn, &w.cn, &w.hs, &w.cs, &w.q };
    for (int k = 0; k < MS_COUNT(out) && st == MS_OK; k++)
        st = give_result(&h, ms__recurrent_out(kind, c->out, k), out[k]);
    if (st != MS_OK) return release(&h, st);

    divide_columns(&w, w.H);
    w.panels.rs = w.projection.rs = 1;
    w.panels.cs = w.panels.depth = w.P;
    w.panels.columns = w.projection.cs = w.projection.depth = w.H;
    w.panels.parts = w.gates;
    w.projection.columns = w.P;
    w.projection.parts = 1;
    w.packed = w.steps.t > FEW_STEPS;
    int64_t n_unit = project ? w.steps.n * w.H : 0, n_product = w.packed ? 0 : w.steps.n * w.gates * w.H;
    char *more = alloc_room(&w, &block, n_unit + n_product, c->op->name, &st);
    if (st == MS_OK) {
        w.unprojected = more;
        w.product = more + n_unit * (w.dtype == MS_F64 ? 8 : 4);
        if (w.packed) pack_panels(&w, &w.panels);
        if (project) pack_panels(&w, &w.projection);
        st = make_cpu_passes(&w, false, c->op->name);
    }
    if (block) ms__free(block);
    return release(&h, st);
}

// ---- backward -------------------------------------------------------------------------------------

// dw [m, n] = d^T [m, rows of all steps] s [rows, n]. g: a product of these sizes.
static ms_status state_weight_gradient(ms_gemm g, const void *d, const void *s, void *dw)
{
    g.a = d, g.a_rs = 1, g.a_cs = g.m;
    g.b = s, g.b_rs = g.n, g.b_cs = 1;
    g.c = dw;
    return ms__gemm(&g);
}

// Computes the gradients, from the data that backward has set in w. dw, db, dproject: NULL if not needed.
static ms_status all_gradients(pass *w, const char *what, void *dw, void *db, void *dproject)
{
    int64_t rows = w->steps.rows, features = w->gates * w->H, units = w->steps.n * w->H;
    int64_t n_dx = w->g.dx ? 0 : rows * features, n_da = w->kind == MS_GRU ? rows * features : 0,
            n_carried = w->g.carried ? 0 : units, n_state = w->project ? rows * w->P : 0,
            n_unit = dproject ? rows * w->H : 0;
    ms_status st = MS_OK;
    ms_block *block = NULL;
    char *more = alloc_room(w, &block, n_dx + n_da + n_carried + n_state + n_unit, what, &st);
    int64_t size = w->dtype == MS_F64 ? 8 : 4;
    if (st != MS_OK) return st;
    if (n_dx) w->g.dx = more;
    w->g.da = n_da ? more + n_dx * size : w->g.dx;
    if (n_carried) w->g.carried = more + (n_dx + n_da) * size;
    w->g.dprojected = more + (n_dx + n_da + n_carried) * size;
    w->unprojected = n_unit ? more + (n_dx + n_da + n_carried + n_state) * size : NULL;
    pack_panels(w, &w->panels);
    if (w->project) pack_panels(w, &w->projection);
    st = make_cpu_passes(w, true, what);
    if (st == MS_OK && dw)
        st = state_weight_gradient(ms__gemm_of(what, w->dtype, features, w->P, rows), w->g.da, w->hs, dw);
    if (st == MS_OK && dproject)
        st = state_weight_gradient(ms__gemm_of(what, w->dtype, w->P, w->H, rows), w->g.dprojected, w->unprojected,
                                   dproject);
    if (st == MS_OK && db) ms__column_sum(w->dtype, db, w->g.da, rows, features, features);
    ms__free(block);
    return st;
}

static ms_status recurrent_backward(ms_call *c, ms_recurrent_kind kind)
{
    ms_tensor *const *in = c->in, *hs = in[MS_RECURRENT_BACK_HS], *project = in[MS_RECURRENT_BACK_PROJECT];
    pass w = { .kind = kind, .relu = c->i[1], .project = project, .packed = true, .dtype = computing_type(hs) };
    held h = { .dtype = w.dtype };
    MS_TRY(ms__steps_of(c, hs, in[MS_RECURRENT_BACK_SIZES], &w.steps));
    const ms_tensor *cs = in[MS_RECURRENT_BACK_CS];
    w.gates = ms__gates_of(kind);
    w.P = hs->shape[hs->ndim - 1];
    w.H = cs ? cs->shape[cs->ndim - 1] : w.P;
    if (hs->numel == 0) {
        for (int k = 0; k < c->n_out; k++)
            if (c->out[k]->numel) memset(ms__data(c->out[k]), 0, ms__nbytes(c->out[k]));
        return MS_OK;
    }
    const void *before_h, *before_c, *q;
    void *dw, *db, *dproject;
    struct {
        ms_tensor *t;
        const void **data;
    } read[] = { { in[MS_RECURRENT_DY], &w.g.dy },        { in[MS_RECURRENT_DH], &w.g.dh },
                 { in[MS_RECURRENT_DC], &w.g.dc },        { in[MS_RECURRENT_BACK_W], &w.panels.from },
                 { project, &w.projection.from },         { hs, &before_h },
                 { in[MS_RECURRENT_BACK_CS], &before_c }, { in[MS_RECURRENT_BACK_GATES], &q } };
    void **write[] = { &w.g.dx, &dw, &db, &w.g.dh0, &w.g.carried, &dproject };
    ms_status st = MS_OK;
    for (int k = 0; k < MS_COUNT(read) && st == MS_OK; k++) st = take_operand(&h, read[k].t, read[k].data);
    for (int k = 0; k < MS_COUNT(write) && st == MS_OK; k++) st = give_result(&h, ms__grad_out(c, k), write[k]);
    if (st == MS_OK) {
        w.hs = (void *)before_h, w.cs = (void *)before_c, w.q = (void *)q;
        divide_columns(&w, w.P);
        w.panels.cs = w.projection.cs = w.panels.parts = w.projection.parts = 1;
        w.panels.rs = w.panels.columns = w.projection.depth = w.P;
        w.panels.depth = w.gates * w.H;
        w.projection.rs = w.projection.columns = w.H;
        st = all_gradients(&w, c->op->name, dw, db, dproject);
    }
    return release(&h, st);
}

ms_status ms__cpu_rnn(ms_call *c) { return recurrent_forward(c, MS_RNN); }
ms_status ms__cpu_lstm(ms_call *c) { return recurrent_forward(c, MS_LSTM); }
ms_status ms__cpu_gru(ms_call *c) { return recurrent_forward(c, MS_GRU); }
ms_status ms__cpu_rnn_backward(ms_call *c) { return recurrent_backward(c, MS_RNN); }
ms_status ms__cpu_lstm_backward(ms_call *c) { return recurrent_backward(c, MS_LSTM); }
ms_status ms__cpu_gru_backward(ms_call *c) { return recurrent_backward(c, MS_GRU); }
