// SPDX-License-Identifier: MIT
// null/table.c -- wraps the plugin's table, to know which operator runs and where its tensors are.
#include "null.h"

#include "rows/attention.h"

extern const ms_cuda_table ms_cuda_table_v1;
static const ms_cuda_engine *engine;
static ms_cuda_engine watched;

enum { OPERATORS = 1024 };
static struct {
    const char *name;
    ms_status (*run)(ms_call *c);
} operators[OPERATORS];

static int slot_of(const char *name)
{
    uint32_t h = 2166136261u;
    for (const char *s = name; *s; s++) h = (h ^ (uint8_t)*s) * 16777619u;
    int at = (int)(h % OPERATORS);
    while (operators[at].name && strcmp(operators[at].name, name) != 0) at = (at + 1) % OPERATORS;
    return at;
}

// The call that runs; NULL outside of operators.
static _Thread_local const ms_call *running;

// Attention in tiles (flash.cu, flash_backward.cu) computes its products inside its kernels, so their flops follow from
// the operator's call: a block of 64 rows passes over tiles of 64 rows, or of 32 if heads have more than 64 columns.
// Columns are padded to 64 or 128. Parts of visited tiles that no query attends to are computed, too, and count.
double ms__null_flops(const char *kernel)
{
    static const struct {
        const char *name;
        int products;
        bool keys;  // the block's own rows are keys, and it passes over queries
    } kernels[] = { { "flash_kernel", 2, false },
                    { "flash_queries_kernel", 3, false },
                    { "flash_keys_kernel", 4, true } };
    if (!running || strncmp(running->op->name, "attention", 9) != 0) return 0;
    int k = 0;
    while (k < MS_COUNT(kernels) && !strstr(kernel, kernels[k].name)) k++;
    if (k == MS_COUNT(kernels)) return 0;
    int first = running->op->name[9] ? 1 : 0;  // the inputs of attention_backward begin with the output's gradient
    const ms_tensor *q = running->in[first], *keys = running->in[first + 1];
    int64_t d = q->shape[q->ndim - 1], tq = q->shape[q->ndim - 2], tk = keys->shape[q->ndim - 2], heads = 1;
    int64_t width = d > 64 ? 128 : 64, step = d > 64 ? 32 : 64, own = kernels[k].keys ? tk : tq, tiles = 0;
    ms_span span = ms__attention_of(running, running->n_i - 3 * first, q, keys).span;
    if (kernels[k].keys) span = ms_span_turned(span);
    for (int i = 0; i < q->ndim - 2; i++) heads *= q->shape[i];
    for (int64_t i = 0; i < own; i += 64) {
        int64_t from = ms_span_first(span, i), to = ms_span_end(span, i + 63, kernels[k].keys ? tq : tk);
        if (!kernels[k].keys) from = from / step * step;
        if (from < to) tiles += (to - from + step - 1) / step;
    }
    return 2.0 * (double)(heads * tiles * 64 * step * width * kernels[k].products);
}

static ms_status run(ms_call *c)
{
    const char *before = ms__null_op;
    const ms_call *outer = running;
    ms__null_op = c->op->name;
    running = c;
    for (int k = 0; ms__null_watching && k < c->n_in; k++) ms__null_note_tensor(c->in[k]);
    for (int k = 0; ms__null_watching && k < c->n_out; k++) ms__null_note_tensor(c->out[k]);
    ms_status st = operators[slot_of(c->op->name)].run(c);
    running = outer;
    ms__null_op = before;
    return st;
}
static ms_status copy_tensor(ms_tensor *dst, const ms_tensor *src)
{
    const char *before = ms__null_op;
    ms__null_op = *ms__null_op ? ms__null_op : "copy";
    ms__null_note_tensor(dst);
    ms__null_note_tensor(src);
    ms_status st = ms_cuda_table_v1.copy_tensor(dst, src);
    ms__null_op = before;
    return st;
}
static ms_status fill_tensor(ms_tensor *t, double v)
{
    const char *before = ms__null_op;
    ms__null_op = *ms__null_op ? ms__null_op : "fill";
    ms__null_note_tensor(t);
    ms_status st = ms_cuda_table_v1.fill_tensor(t, v);
    ms__null_op = before;
    return st;
}
static ms_status optim(int index, const ms_optim_pass *p, const ms_cuda_step *reads)
{
    ms__null_op = "optimizer";
    for (int k = 0; k < p->n && ms__null_watching; k++) {
        const ms_optim_job *j = &p->jobs[k];
        int size = (int)ms__dtype_size(j->dtype), wide = size == 2 ? 4 : size;  // states of half types are float32
        ms__null_note(j->p, (size_t)j->numel * (size_t)size, size);
        ms__null_note(j->g, (size_t)j->numel * (size_t)size, size);
        for (int s = 0; s < MS_OPTIM_STATES; s++) ms__null_note(j->state[s], (size_t)j->numel * (size_t)wide, wide);
        ms__null_note(j->master, (size_t)j->numel * sizeof *j->master, sizeof *j->master);
    }
    ms_status st = ms_cuda_table_v1.optim(index, p, reads);
    ms__null_op = "";
    return st;
}
static void note_gradients(const ms_norm_job *j, const ms_norm_part *list)
{
    for (int k = 0; k < j->n; k++)
        ms__null_note(list[k].g, (size_t)list[k].numel * (size_t)ms__dtype_size(list[k].dtype),
                      (int)ms__dtype_size(list[k].dtype));
}
static ms_status norms(int index, ms_norm_job *j, ms_norm_part *list)
{
    ms__null_op = "clip_grad_norm_";
    note_gradients(j, list);
    ms_status st = ms_cuda_table_v1.gradients.norms(index, j, list);
    ms__null_op = "";
    return st;
}
static ms_status clip(int index, const ms_norm_job *j, const double *total, double max_norm, int dtype, void *out)
{
    ms__null_op = "clip_grad_norm_";
    ms_status st = ms_cuda_table_v1.gradients.clip(index, j, total, max_norm, dtype, out);
    ms__null_op = "";
    return st;
}

static ms_status unscale(int index, ms_norm_job *j, ms_norm_part *list, const float *inverse, float *found, bool stop)
{
    ms__null_op = "unscale_";
    note_gradients(j, list);
    ms_status st = ms_cuda_table_v1.gradients.unscale(index, j, list, inverse, found, stop);
    ms__null_op = "";
    return st;
}

static ms_status tensor_new(ms_tensor **out, int dtype, int device, int ndim, const int64_t *shape, const char *what)
{
    ms_status st = engine->tensor_new(out, dtype, device, ndim, shape, what);
    if (st == MS_OK) ms__null_note_tensor(*out);
    return st;
}
static ms_status tensor_like(ms_tensor **out, const ms_tensor *t, const char *what)
{
    ms_status st = engine->tensor_like(out, t, what);
    if (st == MS_OK) ms__null_note_tensor(*out);
    return st;
}
static ms_status contiguous(ms_tensor **out, ms_tensor *t)
{
    ms_status st = engine->contiguous(out, t);
    if (st == MS_OK) ms__null_note_tensor(*out);
    return st;
}
static ms_status alloc(ms_block **out, int device, size_t bytes, const char *what)
{
    ms_status st = engine->alloc(out, device, bytes, what);
    if (st == MS_OK && ms__null_watching && bytes) ms__null_note_room((*out)->data, bytes);
    return st;
}
static ms_status reduce(int index, int stream, const ms_cuda_reduction *r)
{
    int size = (int)ms__dtype_size(r->dtype);
    ms__null_op = "reduce over ranks";
    for (int k = 0; k < r->n_parts * r->n_ranks; k++)
        ms__null_note(r->src[k], (size_t)r->numel[k / r->n_ranks] * (size_t)size, size);
    for (int k = 0; k < r->n_parts * r->n_dst; k++)
        ms__null_note(r->dst[k], (size_t)r->numel[k / r->n_dst] * (size_t)size, size);
    ms_status st = ms_cuda_table_v1.ranks.reduce(index, stream, r);
    ms__null_op = "";
    return st;
}
static ms_status copy_all(int index, int stream, int n, const ms_cuda_copy *list)
{
    const char *before = ms__null_op;
    ms__null_op = *ms__null_op ? ms__null_op : "copy";
    for (int k = 0; k < n; k++) {
        int to = (int)ms__dtype_size(list[k].dst_dtype), from = (int)ms__dtype_size(list[k].src_dtype);
        ms__null_note(list[k].dst, (size_t)list[k].numel * (size_t)to, to);
        ms__null_note(list[k].src, (size_t)list[k].numel * (size_t)from, from);
    }
    ms_status st = ms_cuda_table_v1.ranks.copy_all(index, stream, n, list);
    ms__null_op = before;
    return st;
}
static int start(const ms_cuda_engine *given, char *text, size_t n)
{
    engine = given;
    watched = *given;
    watched.tensor_new = tensor_new;
    watched.tensor_like = tensor_like;
    watched.contiguous = contiguous;
    watched.alloc = alloc;
    return ms_cuda_table_v1.start(&watched, text, n);
}

EXPORT const ms_cuda_table *ms_cuda_null_table(void)
{
    static ms_cuda_table table;
    static ms_cuda_kernel rows[OPERATORS];
    static const ms_cuda_kernel *families[] = { rows, NULL };
    table = ms_cuda_table_v1;
    table.start = start;
    table.copy_tensor = copy_tensor;
    table.fill_tensor = fill_tensor;
    table.optim = optim;
    table.gradients.norms = norms;
    table.gradients.clip = clip;
    table.gradients.unscale = unscale;
    table.ranks.reduce = reduce;
    table.ranks.copy_all = copy_all;
    int n = 0;
    for (const ms_cuda_kernel *const *f = ms_cuda_table_v1.families; *f; f++)
        for (const ms_cuda_kernel *k = *f; k->op && n < OPERATORS / 2; k++) {
            int at = slot_of(k->op);
            operators[at].name = k->op;
            operators[at].run = k->run;
            rows[n++] = (ms_cuda_kernel) { k->op, run };
        }
    table.families = families;
    return &table;
}
