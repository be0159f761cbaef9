// SPDX-License-Identifier: MIT
// ops/op.c -- dispatch: one path for all operators, called from scripts and from C.
//
// A call is checked (inputs alive, resident, on one device unless the flags allow several; then the operator's own
// check, which makes the outputs), runs on its device, and is recorded on the tape if an input requires a gradient. On
// failure the outputs are released and the error names the operator. A call that fails for lack of memory has no
// effect, because scripts repeat it after a garbage collection (tensor/init.lua): the tape's node and the outputs' ids
// are allocated before the kernel runs, and random offsets are given back.
#define _GNU_SOURCE
#include <stdio.h>

#include "base/activity.h"
#include "base/trace.h"
#include "device/device.h"
#include "device/move.h"
#include "ops/anomaly.h"
#include "ops/captured.h"
#include "ops/op.h"
#include "ops/queued.h"

// ---- the table --------------------------------------------------------------------------------

enum { MAX_OPS = 512, HASH = 2048, ANY = INT8_MAX };
static struct {
    const ms_op *table[MAX_OPS];
    ms_op_row row[MAX_OPS];
    int16_t by_name[HASH];
    int n;
    // CUDA's kernels, once the plugin is loaded. Found by name, because some rows are not in the table.
    struct {
        const char *op;
        ms_status (*run)(ms_call *);
    } cuda_kernel[HASH];
    // The kernels by row, entered at a row's first call: looking a name up takes longer than the rest of dispatch.
    struct {
        const ms_op *op;
        ms_status (*run)(ms_call *);
    } cuda_row[HASH];
} ops;

ms_recorder ms__recorder;

// Reads "dim, keepdim?, more..." up to a semicolon or the end: the smallest and the largest number of values. Returns
// the rest.
static const char *count_values(const char *s, int8_t *least, int8_t *most)
{
    *least = *most = 0;
    while (*s && *s != ';') {
        size_t n = strcspn(s, ",;");
        bool any = n > 3 && memcmp(s + n - 3, "...", 3) == 0;
        *least += !any && !memchr(s, '?', n) && !memchr(s, '=', n);
        *most = any || *most == ANY ? ANY : *most + 1;
        s += n + strspn(s + n, ", ");
    }
    return s + strspn(s, "; ");
}

static void fill_row(ms_op_row *r, const ms_op *op)
{
    size_t n = strlen(op->name);
    *r = (ms_op_row) { op->name,
                       op->takes ? op->takes : "",
                       op->doc ? op->doc : "",
                       op->samples ? op->samples : "",
                       .flags = op->flags | (op->backward ? MS_OP_DIFFERENTIABLE : 0),
                       .inputs = op->n_in_min,
                       .most_inputs = op->n_in_max };
    const char *tensors = strchr(r->takes, '|'), *s = tensors ? tensors + 1 + strspn(tensors + 1, " ") : r->takes;
    count_values(count_values(s, &r->integers, &r->most_integers), &r->numbers, &r->most_numbers);
    if (n > 9 && strcmp(op->name + n - 9, "_backward") == 0) r->most_integers = r->most_numbers = ANY;
    for (int d = 0; d < MS_DEVICES; d++)
        if (d == MS_META || op->run[d] || op->flags & MS_OP_VIEW) r->kernels |= (uint8_t)(1 << d);
}

// The lists of all files of rows, which the linker has put side by side; 0 where it aligned one.
extern const ms_op *const __start_ms_operators[] __attribute__((visibility("hidden")));
extern const ms_op *const __stop_ms_operators[] __attribute__((visibility("hidden")));

__attribute__((constructor)) static void fill_table(void)
{
    for (const ms_op *const *op = __start_ms_operators; op < __stop_ms_operators; op++) {
        if (!*op) continue;
        if (ops.n == MAX_OPS) {
            fprintf(stderr, "moonshard: more than %d operators: increase MAX_OPS in runtime/ops/op.c\n", MAX_OPS);
            abort();
        }
        uint32_t h = ms__hash((*op)->name) & (HASH - 1);
        while (ops.by_name[h]) h = (h + 1) & (HASH - 1);
        fill_row(&ops.row[ops.n], *op);
        ops.table[ops.n++] = *op;
        ops.by_name[h] = (int16_t)ops.n;
    }
}

int ms_op_find(const char *name)
{
    for (uint32_t h = ms__hash(name) & (HASH - 1); ops.by_name[h]; h = (h + 1) & (HASH - 1))
        if (strcmp(ops.table[ops.by_name[h] - 1]->name, name) == 0) return ops.by_name[h] - 1;
    return -1;
}

const ms_op *ms__op_by_name(const char *name)
{
    int k = ms_op_find(name);
    return k < 0 ? NULL : ops.table[k];
}

static const ms_op *op_at(int op) { return op >= 0 && op < ops.n ? ops.table[op] : NULL; }

int ms_op_count(void) { return ops.n; }
const ms_op_row *ms_op_at(int op) { return op_at(op) ? &ops.row[op] : NULL; }

static int cuda_slot(const char *name)
{
    uint32_t h = ms__hash(name) & (HASH - 1);
    while (ops.cuda_kernel[h].op && strcmp(ops.cuda_kernel[h].op, name) != 0) h = (h + 1) & (HASH - 1);
    return (int)h;
}

void ms__cuda_kernel_add(const char *op, ms_status (*run)(ms_call *))
{
    int k = cuda_slot(op);
    ops.cuda_kernel[k].op = op;
    ops.cuda_kernel[k].run = run;
    int listed = ms_op_find(op);
    if (listed >= 0) ops.row[listed].kernels |= (uint8_t)(1 << MS_CUDA);
}

static __attribute__((noinline)) ms_status (*cuda_kernel_find(const ms_op *op, uint32_t slot))(ms_call *)
{
    ms_status (*run)(ms_call *) = ops.cuda_kernel[cuda_slot(op->name)].run;
    if (!run) return op->run[MS_CUDA];  // not kept: the plugin may be loaded later
    ops.cuda_row[slot].op = op;
    return ops.cuda_row[slot].run = run;
}

static ms_status (*cuda_kernel_for(const ms_op *op))(ms_call *)
{
    uint32_t h = (uint32_t)((uintptr_t)op / 32) & (HASH - 1);  // most rows are adjacent in memory
    while (ops.cuda_row[h].op && ops.cuda_row[h].op != op) h = (h + 1) & (HASH - 1);
    return MS_LIKELY(ops.cuda_row[h].op != NULL) ? ops.cuda_row[h].run : cuda_kernel_find(op, h);
}

static ms_status (*kernel_for(const ms_op *op, int device))(ms_call *)
{
    return MS_LIKELY(device != MS_CUDA) ? op->run[device] : cuda_kernel_for(op);
}

// ---- dispatch ---------------------------------------------------------------------------------

static ms_status device_differs(const ms_call *c, int k, const ms_tensor *first)
{
    return ms__call_fail(c, "tensors are on different devices: %s and, as argument %d, %s", ms__tensor_text(first),
                         k + 1, ms__tensor_text(c->in[k]));
}

static ms_status dispatch(ms_call *c, bool record);

// Begins a call on a GPU.
static ms_status begin_gpu_call(const ms_call *c, int device)
{
    ms__note_call(device, c);
    return MS_UNLIKELY(ms__results_wanted()) ? ms__results_before(c) : MS_OK;
}
// Whether MOONSHARD_CUDA_SYNC=1 is set: then a call waits for its operator on a GPU, so that an error of the kernels is
// reported by the operator that caused it.
static bool sync_each(void)
{
    static int on = -1;
    if (MS_UNLIKELY(on < 0)) {
        const char *s = getenv("MOONSHARD_CUDA_SYNC");
        on = s && strcmp(s, "1") == 0;
    }
    return on;
}
// Ends a call on a GPU. st: what its kernel returned.
static ms_status finish_call(const ms_call *c, int device, ms_status st)
{
    if (MS_UNLIKELY(st != MS_OK)) return ms__call_failed(c, st);
    if (MS_UNLIKELY(sync_each())) st = ms__cuda_sync(device, -1);
    if (MS_UNLIKELY(ms__results_wanted()) && st == MS_OK) st = ms__results_after(c);
    return MS_LIKELY(st == MS_OK) ? MS_OK : ms__call_named(c, st);
}

// Lets elementwise operators take a 0-dim CPU tensor beside tensors of another device: copies it to that device, unless
// the operator changes it in place. The tape records the copy.
static ms_status dispatch_mixed(ms_call *c, bool record, int k, const ms_tensor *first)
{
    ms_tensor *brought[MS_MAX_IN], *was[MS_MAX_IN];
    const ms_tensor *there = NULL;
    int n = 0, from = c->op->flags & MS_OP_INPLACE ? 1 : 0;
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i] && ms__device(c->in[i]) != MS_CPU) there = c->in[i];
    bool fits = c->op->flags & MS_OP_EACH && !ms__is_meta(ms__device(there));
    for (int i = 0; i < c->n_in && fits; i++)
        if (c->in[i])
            fits = ms__device(c->in[i]) == ms__device(there) ||
                   (ms__device(c->in[i]) == MS_CPU && c->in[i]->ndim == 0 && i >= from);
    if (!fits) return device_differs(c, k, first);
    memcpy(was, c->in, (size_t)c->n_in * sizeof *was);
    ms_status st = MS_OK;
    for (int i = 0; i < c->n_in && st == MS_OK; i++) {
        if (!c->in[i] || ms__device(c->in[i]) != MS_CPU) continue;
        ms_call one = { .op = ms__op_by_name("to_device"), .n_in = 1, .n_i = 1 };
        one.in[0] = c->in[i];
        one.i[0] = ms__device(there);
        if ((st = dispatch(&one, record)) == MS_OK) c->in[i] = brought[n++] = one.out[0];
    }
    if (st == MS_OK) st = dispatch(c, record);
    while (n > 0) ms__release(brought[--n]);
    memcpy(c->in, was, (size_t)c->n_in * sizeof *was);
    return st;
}

static ms_status sharded_input(const ms_call *c, const ms_tensor *t)
{
    ms__call_fail(c, "parameter '%s' is sharded; use to_local() for this rank's part or full_tensor() for the whole",
                  t->name ? t->name : "?");
    return ms__fail(MS_ESTATE, "%s", ms_error());
}

// Fails because the gradient of a view would be wrong: the tape represents a view as a function of its base's values
// when the view was made, so after a recorded change of the base the gradient would belong to the old values.
static ms_status stale_view(const ms_call *c, int k)
{
    return ms__call_fail(c,
                         "argument %d, %s, is a view made before its base was changed in place, and the change is "
                         "recorded for gradients; make the view again",
                         k + 1, ms__tensor_text(c->in[k]));
}

// Refuses in-place changes whose gradients the tape cannot represent.
static ms_status check_inplace(const ms_call *c)
{
    const ms_tensor *t = c->in[0];
    if (t->requires_grad && !t->node)
        return ms__call_fail(
            c, "a leaf that requires grad cannot be changed in place; do it under no_grad or on its detach()");
    if (t->is_view) {
        bool grad = t->requires_grad;
        for (int k = 1; k < c->n_in; k++) grad |= c->in[k] && c->in[k]->requires_grad;
        if (grad)
            return ms__call_fail(c, "an in-place change through a view cannot be recorded for gradients; "
                                    "build the whole with cat, stack or where, or do it under no_grad");
    }
    return MS_OK;
}

// The inputs' shapes for the profiler: "[4, 8] float32, [8] float32".
static const char *shapes_of(const ms_call *c)
{
    char text[400] = "";
    for (int k = 0; k < c->n_in; k++)
        if (c->in[k])
            ms__append(text, sizeof text, "%s%s %s", *text ? ", " : "", ms__shape_text(c->in[k]->ndim, c->in[k]->shape),
                       ms__dtype_name(c->in[k]->dtype));
    return *text ? ms__trace_text("%s", text) : NULL;
}

// c has changed a gradient that nn.DDP has not reduced (ms_grad_set_local) in place. Zeros, and the result of a
// collective, are the same on all ranks.
static void overwritten(ms_call *c)
{
    const char *name = c->op->name;
    if (!strcmp(name, "zero_") || (!strcmp(name, "copy_") && c->in[1]->version->collective))
        c->in[0]->rank_local = false;
}

static ms_status dispatch(ms_call *c, bool record)
{
    const ms_op *op = c->op;
    MS_BUSY;
    MS_RANGE(MS_RANGE_OP, op->name, ms__trace_shapes() ? shapes_of(c) : NULL);
    const ms_tensor *first = NULL;
    ms_node *node = NULL;
    uint64_t drawn = op->flags & MS_OP_RANDOM ? ms__rng_offset() : 0;
    bool grad = false;
    int stale = -1;
    ms_status st;

    c->n_out = 0;
    c->rng_there = NULL;
    if (MS_UNLIKELY(ms__state.interrupted)) MS_TRY(ms__check_interrupt());
    if (MS_UNLIKELY(c->n_in != op->n_in_min && op->n_in_min == op->n_in_max))
        return ms__call_fail(c, "expected %d tensor%s, got %d", op->n_in_min, op->n_in_min == 1 ? "" : "s", c->n_in);
    if (MS_UNLIKELY(c->n_in < op->n_in_min || c->n_in > op->n_in_max))
        return ms__call_fail(c, "expected %d to %d tensors, got %d", op->n_in_min, op->n_in_max, c->n_in);
    for (int k = 0; k < c->n_in; k++) {
        ms_tensor *t = c->in[k];
        if (!t) continue;
        if (MS_UNLIKELY(t->sharded)) return sharded_input(c, t);
        if (!first) first = t;
        else if (MS_UNLIKELY(ms__device(t) != ms__device(first) && !(op->flags & MS_OP_ANY_DEVICE)))
            return dispatch_mixed(c, record, k, first);
        ms_storage *s = t->storage;
        if (MS_UNLIKELY(s->vacated || s->event)) MS_TRY(ms__storage_sync(s, false));
        grad |= t->requires_grad;
        if (MS_UNLIKELY(t->is_view && t->tape != t->version->tape && t->tape != MS_OFF_TAPE)) stale = k;
    }
    if (MS_UNLIKELY(ms__recorder.meet && grad)) ms__recorder.meet(c->n_in, c->in);
    record = record && ms__state.grad_mode;
    grad = grad && record;
    if (MS_UNLIKELY(stale >= 0 && record)) return stale_view(c, stale);
    if (MS_UNLIKELY(op->flags & MS_OP_INPLACE)) {
        if (grad) MS_TRY(check_inplace(c));
        if (grad && op->backward) MS_TRY(ms__recorder.before(c));
        if (c->in[0] && c->in[0]->storage->readers) MS_TRY(ms__storage_sync(c->in[0]->storage, true));
    }

    st = op->check(c);
    if (MS_UNLIKELY(st != MS_OK)) goto failed;
    // Allocates everything that recording needs before the kernel changes anything, so that the call can be repeated.
    if (grad && op->backward && !(node = ms__recorder.node_for(c))) {
        st = MS_ENOMEM;
        goto failed;
    }

    int device = ms__device_type(c->n_out ? ms__device(c->out[0]) : first ? ms__device(first) : MS_CPU);
    if (device != MS_META) {
        ms_status (*run)(ms_call *) = kernel_for(op, device);
        if (MS_LIKELY(run != NULL)) {
            int gpu = device == MS_CUDA ? ms__device(c->n_out ? c->out[0] : first) : MS_CPU;
            if (MS_UNLIKELY(gpu != MS_CPU) && (st = begin_gpu_call(c, gpu)) != MS_OK) goto failed;
            st = MS_UNLIKELY(ms__capturing != NULL) ? ms__step_recorder.call(c, run, drawn) : run(c);
            if (MS_UNLIKELY(gpu != MS_CPU)) st = finish_call(c, gpu, st);
        } else if (!(op->flags & MS_OP_VIEW)) {
            st = ms__fail(MS_EUNSUPPORTED,
                          "%s: there is no kernel of this operator for device '%s' yet: argument 1 is %s", op->name,
                          device == MS_CUDA ? "cuda" : "cpu", first ? ms__tensor_text(first) : "absent");
        }
        if (MS_UNLIKELY(st != MS_OK)) goto failed;
    }
    if (MS_UNLIKELY(op->flags & MS_OP_INPLACE && c->in[0] && c->in[0]->rank_local)) overwritten(c);
    if (node) {
        ms__recorder.record(node, c);
        if (op->flags & MS_OP_INPLACE) c->in[0]->version->tape++;
    } else if (op->flags & MS_OP_VIEW && !record) {
        for (int k = 0; k < c->n_out; k++)
            if (c->out[k]) c->out[k]->tape = MS_OFF_TAPE;
    }
    while (op->n_shown && c->n_out > op->n_shown) ms__release(c->out[--c->n_out]);
    return MS_OK;

failed:
    if (node) ms__recorder.drop(node);
    if (op->flags & MS_OP_RANDOM) ms__rng_rewind(drawn);
    for (int k = 0; k < c->n_out; k++) ms__release(c->out[k]);
    c->n_out = 0;
    return st;
}

// Runs a call under autocast: converts floating-point inputs except float64 to the dtype that the operator's flag
// requires. The tape records the casts.
static ms_status dispatch_cast(ms_call *c)
{
    int want = c->op->flags & MS_OP_LOW ? ms__state.autocast - 1 : MS_F32;
    ms_tensor *cast[MS_MAX_IN];
    int n = 0;
    ms_status st = MS_OK;
    for (int k = 0; k < c->n_in && st == MS_OK; k++) {
        ms_tensor *t = c->in[k];
        if (!t || t->sharded || t->dtype == want || !ms__is_float(t->dtype) || t->dtype == MS_F64) continue;
        ms_call one = { .op = ms__op_by_name("cast"), .n_in = 1, .n_i = 1 };
        one.in[0] = t;
        one.i[0] = want;
        if ((st = dispatch(&one, true)) == MS_OK) c->in[k] = cast[n++] = one.out[0];
    }
    if (st == MS_OK) st = dispatch(c, true);
    while (n > 0) ms__release(cast[--n]);
    return st;
}

static ms_status dispatch_checked(ms_call *c)
{
    bool cast = ms__state.autocast && c->op->flags & (MS_OP_LOW | MS_OP_WIDE);
    MS_TRY(cast ? dispatch_cast(c) : dispatch(c, true));
    char what[96];
    snprintf(what, sizeof what, "%s: the result", ms__op_title(c->op->name));
    ms_values v = { .what = what,
                    .of_inputs = "its arguments",
                    .n_in = c->n_in,
                    .in = c->in,
                    .n_f = c->n_f,
                    .f = c->f,
                    .n_out = c->n_out,
                    .out = c->out };
    ms_status st = ms__anomaly_check(&v);
    if (st == MS_OK) return st;
    for (int k = 0; k < c->n_out; k++) ms__release(c->out[k]);
    c->n_out = 0;
    return st;
}

ms_status ms__dispatch(ms_call *c)
{
    if (MS_UNLIKELY(ms__anomaly)) return dispatch_checked(c);
    if (MS_UNLIKELY(ms__state.autocast) && c->op->flags & (MS_OP_LOW | MS_OP_WIDE)) return dispatch_cast(c);
    return dispatch(c, true);
}

// ---- calls from C -------------------------------------------------------------------------------

ms_status ms__run_op(const ms_op *op, const ms_op_args *a, int n_out, ms_tensor **out)
{
    ms_call c;
    c.op = op;
    c.n_in = a->n_in;
    c.n_i = a->n_i;
    c.n_f = a->n_f;
    for (int k = 0; k < a->n_in; k++) c.in[k] = a->in[k];
    for (int k = 0; k < a->n_i; k++) c.i[k] = a->i[k];
    for (int k = 0; k < a->n_f; k++) c.f[k] = a->f[k];
    MS_TRY(dispatch(&c, false));
    for (int k = 0; k < c.n_out; k++) {
        if (k < n_out) out[k] = c.out[k];
        else ms__release(c.out[k]);
    }
    return MS_OK;
}

ms_status ms__op1(ms_tensor **out, const ms_op *op, ms_tensor *a)
{
    return ms__run_op(op, &(ms_op_args) { .n_in = 1, .in = &a }, 1, out);
}

ms_status ms__op1f(ms_tensor **out, const ms_op *op, ms_tensor *a, double f)
{
    return ms__run_op(op, &(ms_op_args) { 1, &a, .n_f = 1, .f = &f }, 1, out);
}

ms_status ms__op2(ms_tensor **out, const ms_op *op, ms_tensor *a, ms_tensor *b)
{
    return ms__run_op(op, &(ms_op_args) { .n_in = 2, .in = (ms_tensor *[]) { a, b } }, 1, out);
}

ms_status ms__op3(ms_tensor **out, const ms_op *op, ms_tensor *a, ms_tensor *b, ms_tensor *c)
{
    return ms__run_op(op, &(ms_op_args) { .n_in = 3, .in = (ms_tensor *[]) { a, b, c } }, 1, out);
}

// ---- calls from scripts -------------------------------------------------------------------------

static ms_status bad_op(int op) { return ms__fail(MS_EINVAL, "operator is %d, expected 0 to %d", op, ops.n - 1); }

// Fails: the call has more or fewer integers or numbers than the operator takes.
static ms_status wrong_count(const ms_op_row *r, int n_i, int n_f)
{
    bool of_i = n_i < r->integers || n_i > r->most_integers;
    int n = of_i ? n_i : n_f, most = of_i ? r->most_integers : r->most_numbers;
    const char *kind = of_i ? "integer" : "number", *at = strchr(r->takes, '|'), *takes = *r->takes ? r->takes : "none";
    if (n > most)
        return ms__fail(MS_EINVAL, "%s: got %d %ss, expected at most %d; the operator takes: %s", ms__op_title(r->name),
                        n, kind, most, takes);
    at = of_i ? (at ? at + 1 : r->takes) : strchr(r->takes, ';') + 1;
    for (int k = 0; k < n; k++) at = strchr(at, ',') + 1;
    at += strspn(at, " ");
    return ms__fail(MS_EINVAL, "%s: %s %d, '%.*s', is missing; the operator takes: %s", ms__op_title(r->name), kind,
                    n + 1, (int)strcspn(at, ",;"), at, takes);
}

static inline ms_status check_counts(int op, int n_i, int n_f)
{
    const ms_op_row *r = &ops.row[op];
    bool fits = n_i >= r->integers && n_i <= r->most_integers && n_f >= r->numbers && n_f <= r->most_numbers;
    return MS_LIKELY(fits) ? MS_OK : wrong_count(r, n_i, n_f);
}

// Allocates what is needed after an operator has run, when nothing may fail: ids for n outputs, headers of views.
static ms_status reserve(const ms_op *op, int n)
{
    MS_TRY(ms__names_reserve(n, op->name));
    return ms__tensor_reserve(0, op->name);
}

static ms_id finish1(ms_call *c)
{
    if (MS_UNLIKELY(reserve(c->op, 1) != MS_OK || ms__dispatch(c) != MS_OK)) return 0;
    for (int k = 1; k < c->n_out; k++) ms__release(c->out[k]);
    return ms__name_made(c->out[0], c->op->name);
}

static ms_status released_input(const ms_op *op, int k)
{
    if (ms_error_code() == MS_ERELEASED) return MS_ERELEASED;
    return ms__fail(MS_EINVAL, "%s: argument %d: a tensor was expected, got none", op->name, k + 1);
}

ms_status ms_call_op(int op, ms_args *a)
{
    ms_call c;
    if (!(c.op = op_at(op))) return bad_op(op);
    if (a->n_in < 0 || a->n_in > MS_MAX_IN || a->n_i < 0 || a->n_i > MS_MAX_I || a->n_f < 0 || a->n_f > MS_MAX_F)
        return ms__fail(MS_EINVAL, "%s: %d tensors, %d integers, %d numbers; at most %d, %d and %d are supported",
                        c.op->name, a->n_in, a->n_i, a->n_f, MS_MAX_IN, MS_MAX_I, MS_MAX_F);
    c.n_in = a->n_in;
    c.n_i = a->n_i;
    c.n_f = a->n_f;
    for (int k = 0; k < c.n_in; k++) {
        c.in[k] = NULL;
        if (a->in[k] != 0 && !(c.in[k] = ms__tensor(a->in[k]))) return released_input(c.op, k);
        if (a->in[k] == 0 && k < c.op->n_in_min)
            return ms__fail(MS_EINVAL, "%s: tensor %d is missing", c.op->name, k + 1);
    }
    MS_TRY(check_counts(op, a->n_i, a->n_f));
    while (c.n_in > c.op->n_in_min && !c.in[c.n_in - 1]) c.n_in--;
    memcpy(c.i, a->i, (size_t)c.n_i * sizeof *c.i);
    memcpy(c.f, a->f, (size_t)c.n_f * sizeof *c.f);
    MS_TRY(reserve(c.op, MS_MAX_OUT));
    MS_TRY(ms__dispatch(&c));
    a->n_out = c.n_out;
    for (int k = 0; k < c.n_out; k++) a->out[k] = ms__name_made(c.out[k], c.op->name);
    return MS_OK;
}

// Starts a call of an operator on n tensors with n_f numbers. Returns false with the error set.
static inline bool begin_call(ms_call *c, int op, int n, const ms_id *in, int n_f)
{
    if (!(c->op = op_at(op))) return bad_op(op), false;
    for (int k = 0; k < n; k++)
        if (!(c->in[k] = ms__tensor(in[k]))) return released_input(c->op, k), false;
    c->n_in = n;
    c->n_i = 0;
    c->n_f = n_f;
    return check_counts(op, 0, n_f) == MS_OK;
}

ms_id ms_call1(int op, ms_id a)
{
    ms_call c;
    return begin_call(&c, op, 1, &a, 0) ? finish1(&c) : 0;
}

ms_id ms_call1f(int op, ms_id a, double f)
{
    ms_call c;
    if (!begin_call(&c, op, 1, &a, 1)) return 0;
    c.f[0] = f;
    return finish1(&c);
}

ms_id ms_call2(int op, ms_id a, ms_id b)
{
    ms_call c;
    return begin_call(&c, op, 2, (ms_id[]) { a, b }, 0) ? finish1(&c) : 0;
}

ms_id ms_call3(int op, ms_id a, ms_id b, ms_id d)
{
    ms_call c;
    return begin_call(&c, op, d != 0 ? 3 : 2, (ms_id[]) { a, b, d }, 0) ? finish1(&c) : 0;
}
