// SPDX-License-Identifier: MIT
// shard/extend.c -- all-gather extensions: the script chooses the tensors that are gathered for a parameter, and builds
// the whole parameter from the gathered tensors (docs/semantics.md#extensions).
//
// An extension's inputs are appended to the unit's memory.cast and its outputs to the gather buffer, so one collective
// gathers all parameters. At the first gather the script builds the whole tensor, and the parameter becomes a view of
// it; at later gathers the script fills it again. Storages that the script passes to the unit are vacated and refilled
// together with the gather buffer.
#include <stdio.h>

#include "shard/extend.h"
#include "shard/layout/layout.h"
#include "ops/op.h"

enum { MAX_PARTS = 16, ALIGN = 64 };

typedef struct {
    int dtype, ndim;
    int64_t shape[MS_MAX_DIMS];  // shape of this rank's input, including padding
    bool like_rows;              // the input is laid out like the parameter's rows: padding is not sent
    ms_tensor *in, *out;         // the script's input for the current gather; a view of the gather buffer
    size_t cast_at;              // byte offset of the input in the unit's memory.cast
} part;

typedef struct extension {
    int n, *which;         // the extension's parameters
    int n_parts, n_given;  // n_given: inputs that the script has passed for the current gather
    bool made;             // the script has built the whole parameters
    part parts[MAX_PARTS];
    ms_storage **freed;  // the script's storages that are vacated and refilled whenever the gather buffer is
    int n_freed, cap_freed;
} extension;

static size_t align_extension(size_t n) { return (n + ALIGN - 1) & ~(size_t)(ALIGN - 1); }

static const char *name_of_extension(const unit *u, const extension *x)
{
    const char *name = u->params[x->which[0]].param->name;
    return name ? name : "?";
}

static extension *find_extension(double handle, int e, unit **u)
{
    if (!(*u = ms__unit(handle))) return NULL;
    if (e >= 0 && e < (*u)->memory.n_extensions) return &(*u)->memory.extensions[e];
    ms__fail(MS_EINVAL, "fsdp: unit '%s' has no all-gather extension %d", (*u)->name, e + 1);
    return NULL;
}

// ---- registration -------------------------------------------------------------------------------

void ms__extensions_drop(unit *u)
{
    for (int e = 0; e < u->memory.n_extensions; e++) {
        extension *x = &u->memory.extensions[e];
        for (int k = 0; k < x->n_parts; k++) {
            ms__release(x->parts[k].in);
            ms__release(x->parts[k].out);
        }
        for (int k = 0; k < x->n_freed; k++) ms__storage_release(x->freed[k]);
        free(x->freed);
        for (int k = 0; k < x->n; k++) u->params[x->which[k]].extended = false;
        free(x->which);
    }
    free(u->memory.extensions);
    u->memory.extensions = NULL;
    u->memory.n_extensions = 0;
}

static ms_status check_extended(const unit *u, const unit_param *p)
{
    const char *name = p->param->name ? p->param->name : "?";
    if (!u->layout->extends)
        return ms__fail(MS_EINVAL, "fsdp: parameter '%s' has all-gather extensions, which only fully_shard supports",
                        name);
    if (p->dim > 0)
        return ms__fail(
            MS_EUNSUPPORTED,
            "fsdp: parameter '%s' is sharded along dimension %d; all-gather extensions support only dimension 1", name,
            p->dim + 1);
    if (u->settings.post_group)
        return ms__fail(MS_EUNSUPPORTED,
                        "fsdp: parameter '%s' has all-gather extensions; with them reshard_after_forward must be true "
                        "or false, not a number",
                        name);
    return MS_OK;
}

ms_status ms__extensions_check(const unit *u, int n, const int32_t *count, const int32_t *which)
{
    int at = 0;
    for (int e = 0; e < n; e++)
        for (int k = 0; k < count[e]; k++, at++) {
            if (which[at] < 0 || which[at] >= u->n)
                return ms__fail(MS_EINVAL, "fsdp: unit '%s' has no parameter %d", u->name, which[at] + 1);
            MS_TRY(check_extended(u, &u->params[which[at]]));
        }
    return MS_OK;
}

ms_status ms__extensions_set(unit *u, int n, const int32_t *count, const int32_t *which)
{
    ms__extensions_drop(u);
    extension *list = calloc((size_t)n + 1, sizeof *list);
    if (!list) return ms__no_memory(((size_t)n + 1) * sizeof *list, "fsdp", "%d extensions", n);
    int at = 0;
    for (int e = 0; e < n; e++) {
        list[e].n = count[e];
        if (!(list[e].which = calloc((size_t)count[e] + 1, sizeof *list[e].which))) {
            size_t bytes = ((size_t)count[e] + 1) * sizeof *list[e].which;
            while (e-- > 0) free(list[e].which);
            free(list);
            return ms__no_memory(bytes, "fsdp", "an extension");
        }
        for (int k = 0; k < count[e]; k++) list[e].which[k] = which[at++];
    }
    for (int e = 0; e < n; e++)
        for (int k = 0; k < list[e].n; k++) u->params[list[e].which[k]].extended = true;
    u->memory.extensions = list;
    u->memory.n_extensions = n;
    return MS_OK;
}

// ---- inputs -----------------------------------------------------------------------------------

static bool same_shape(const ms_tensor *t, int ndim, const int64_t *shape)
{
    return t->ndim == ndim && !memcmp(t->shape, shape, (size_t)ndim * sizeof *shape);
}

static ms_status check_extended_input(const unit *u, const extension *x, int k, const ms_tensor *t, bool *like_rows)
{
    const unit_param *p = &u->params[x->which[0]];
    int64_t here[MS_MAX_DIMS], padded[MS_MAX_DIMS];
    memcpy(here, p->param->shape, sizeof here);
    memcpy(padded, p->param->shape, sizeof padded);
    here[0] = p->here;
    padded[0] = p->chunk;
    if (t->sharded || ms__is_meta(ms__device(t)))
        return ms__fail(MS_EINVAL,
                        "fsdp_pre_all_gather of '%s': returned tensor %d is %s%s; expected a plain tensor with values",
                        name_of_extension(u, x), k + 1, t->sharded ? "sharded, " : "", ms__tensor_text(t));
    *like_rows = same_shape(t, p->param->ndim, here) || same_shape(t, p->param->ndim, padded);
    if (!*like_rows && p->rows % u->world != 0)
        return ms__fail(MS_EINVAL,
                        "When a parameter is unevenly sharded by FSDP (orig size=%s, FSDP world size=%d), "
                        "fsdp_pre_all_gather must return all-gather inputs "
                        "with the padded sharded size %s but got %s",
                        ms__shape_text(p->param->ndim, p->param->shape), u->world,
                        ms__shape_text(p->param->ndim, padded), ms__shape_text(t->ndim, t->shape));
    if (!*like_rows && t->ndim == 0)
        return ms__fail(MS_EINVAL, "fsdp_pre_all_gather of '%s': returned tensor %d has no dimension to gather along",
                        name_of_extension(u, x), k + 1);
    return MS_OK;
}

ms_status ms_unit_extension_inputs(double handle, int e, int n, const ms_id *in)
{
    unit *u;
    extension *x = find_extension(handle, e, &u);
    if (!x) return ms__failure();
    if (n < 1 || n > MAX_PARTS)
        return ms__fail(MS_EINVAL, "fsdp_pre_all_gather of '%s' returned %d tensors, expected 1 to %d",
                        name_of_extension(u, x), n, MAX_PARTS);
    if (x->n_parts && n != x->n_parts)
        return ms__fail(MS_EINVAL,
                        "fsdp_pre_all_gather of '%s' returned %d tensor%s, expected %d, as at its first gather",
                        name_of_extension(u, x), n, n == 1 ? "" : "s", x->n_parts);
    bool first = x->n_parts == 0;
    const unit_param *p = &u->params[x->which[0]];
    for (int k = 0; k < n; k++) {
        ms_tensor *t = ms__tensor(in[k]);
        bool like_rows = false;
        if (!t) return ms__failure();
        MS_TRY(check_extended_input(u, x, k, t, &like_rows));
        part *q = &x->parts[k];
        int64_t shape[MS_MAX_DIMS] = { 0 };
        memcpy(shape, t->shape, sizeof shape);
        if (like_rows) shape[0] = p->chunk;
        if (!first && (t->dtype != q->dtype || !same_shape(t, q->ndim, t->shape) ||
                       memcmp(shape, q->shape, (size_t)q->ndim * sizeof *shape)))
            return ms__fail(MS_EINVAL,
                            "fsdp_pre_all_gather of '%s': returned tensor %d is %s, but was %s %s at its first gather",
                            name_of_extension(u, x), k + 1, ms__tensor_text(t), ms__dtype_name(q->dtype),
                            ms__shape_text(q->ndim, q->shape));
        q->dtype = t->dtype;
        q->ndim = t->ndim;
        q->like_rows = like_rows;
        memcpy(q->shape, shape, sizeof shape);
        ms__release(q->in);
        q->in = ms__retain(t);
    }
    if (first) x->n_parts = n;
    x->n_given = n;
    return MS_OK;
}

bool ms__extensions_given(const unit *u)
{
    for (int e = 0; e < u->memory.n_extensions; e++)
        if (u->memory.extensions[e].n_given == 0) return false;
    return true;
}

int ms__extensions_dtype(const unit *u, int dtype)
{
    for (int e = 0; e < u->memory.n_extensions; e++)
        for (int k = 0; k < u->memory.extensions[e].n_parts; k++) {
            if (dtype >= 0 && u->memory.extensions[e].parts[k].dtype != dtype) return MS_U8;
            dtype = u->memory.extensions[e].parts[k].dtype;
        }
    return dtype;
}

// ---- gathering --------------------------------------------------------------------------------

ms_status ms__extensions_place(unit *u)
{
    if (u->memory.extensions[0].parts[0].out) return MS_OK;
    int total = u->memory.n_pieces;
    for (int e = 0; e < u->memory.n_extensions; e++) total += u->memory.extensions[e].n_parts;
    ms_piece *pieces = realloc(u->memory.pieces, ((size_t)total + (size_t)u->n + 1) * sizeof *pieces);
    if (!pieces)
        return ms__no_memory(((size_t)total + (size_t)u->n + 1) * sizeof *pieces, "fsdp", "pieces of unit '%s'",
                             u->name);
    u->memory.pieces = pieces;
    for (int e = 0; e < u->memory.n_extensions; e++) {
        extension *x = &u->memory.extensions[e];
        const unit_param *p = &u->params[x->which[0]];
        for (int k = 0; k < x->n_parts; k++) {
            part *q = &x->parts[k];
            int64_t numel = 1, shape[MS_MAX_DIMS];
            for (int d = 0; d < q->ndim; d++) numel *= q->shape[d];
            memcpy(shape, q->shape, sizeof shape);
            shape[0] = q->like_rows ? p->rows : q->shape[0] * u->world;
            size_t esz = (size_t)ms__dtype_size(q->dtype), bytes = (size_t)numel * esz, all = bytes * (size_t)u->world;
            if (q->like_rows) all = (size_t)(p->rows * p->row_numel) * esz;
            q->cast_at = align_extension(u->memory.cast_bytes);
            size_t at = align_extension(u->memory.gather_bytes);
            u->memory.pieces[u->memory.n_pieces++] = (ms_piece) {
                .in_offset = q->cast_at, .out_offset = at, .out_stride = bytes, .bytes = bytes, .total = all
            };
            u->memory.cast_bytes = q->cast_at + bytes;
            u->memory.gather_bytes = at + all;
            q->out = ms__tensor_on(u->memory.gather_buffer, q->dtype, q->ndim, shape, (int64_t)(at / esz));
        }
    }
    // The storage is vacated: the gather allocates these bytes.
    u->memory.gather_buffer->bytes = u->memory.gather_bytes;
    return MS_OK;
}

ms_status ms__extensions_pack(unit *u)
{
    ms_status st = MS_OK;
    for (int e = 0; e < u->memory.n_extensions; e++) {
        extension *x = &u->memory.extensions[e];
        for (int k = 0; k < x->n_parts; k++) {
            part *q = &x->parts[k];
            if (st == MS_OK && q->in->numel > 0) {
                ms_tensor *dst = ms__tensor_on(u->memory.cast, q->dtype, q->in->ndim, q->in->shape,
                                               (int64_t)(q->cast_at / (size_t)ms__dtype_size(q->dtype)));
                st = ms__copy(dst, q->in);
                ms__release(dst);
            }
            ms__drop(&q->in);
        }
        x->n_given = 0;
    }
    return st;
}

ms_status ms__extensions_refill(unit *u)
{
    for (int e = 0; e < u->memory.n_extensions; e++)
        for (int k = 0; k < u->memory.extensions[e].n_freed; k++)
            MS_TRY(ms__storage_refill(u->memory.extensions[e].freed[k], "fsdp: output of an all-gather extension"));
    return MS_OK;
}

void ms__extensions_vacate(unit *u)
{
    for (int e = 0; e < u->memory.n_extensions; e++)
        for (int k = 0; k < u->memory.extensions[e].n_freed; k++) ms__storage_vacate(u->memory.extensions[e].freed[k]);
}

int ms_unit_extension_outputs(double handle, int e, ms_id *out, int capacity)
{
    unit *u;
    extension *x = find_extension(handle, e, &u);
    if (!x) return -1;
    for (int k = 0; k < x->n_parts && k < capacity; k++)
        if (!(out[k] = ms__name(ms__tensor_alias(x->parts[k].out)))) return -1;
    return x->n_parts;
}

// ---- whole tensors ------------------------------------------------------------------------------

static ms_status check_whole_output(const unit *u, const extension *x, const unit_param *p, const ms_tensor *t)
{
    bool fits = t->ndim == p->param->ndim && ms__is_contiguous(t) && !t->sharded && ms__device(t) == u->memory.device;
    for (int d = 0; fits && d < t->ndim; d++)
        fits = d == 0 ? t->shape[0] >= p->param->shape[0] : t->shape[d] == p->param->shape[d];
    if (fits) return MS_OK;
    return ms__fail(MS_EINVAL,
                    "fsdp_post_all_gather of '%s' returned %s, expected a contiguous tensor of shape %s (more rows are "
                    "padding) on the unit's device",
                    name_of_extension(u, x), ms__tensor_text(t), ms__shape_text(p->param->ndim, p->param->shape));
}

static ms_status free_with(unit *u, extension *x, ms_tensor *t)
{
    ms_storage *s = t->storage;
    if (s == u->memory.gather_buffer) return MS_OK;  // resharding vacates it in any case
    if (s == u->memory.shard)
        return ms__fail(MS_EINVAL,
                        "fsdp_post_all_gather of '%s': a tensor to free is a view of the shard, which must stay",
                        name_of_extension(u, x));
    for (int k = 0; k < x->n_freed; k++)
        if (x->freed[k] == s) return MS_OK;
    MS_TRY(ms__grow(&x->freed, &x->cap_freed, x->n_freed, sizeof *x->freed, "fsdp", name_of_extension(u, x)));
    x->freed[x->n_freed++] = ms__storage_retain(s);
    s->owner = u->memory.gather_buffer->owner;
    return MS_OK;
}

ms_status ms_unit_extension_whole(double handle, int e, int n_whole, const ms_id *whole, int n_free, const ms_id *freed)
{
    unit *u;
    extension *x = find_extension(handle, e, &u);
    if (!x) return ms__failure();
    if (n_whole != x->n)
        return ms__fail(MS_EINVAL, "fsdp_post_all_gather of '%s' returned %d inner tensor%s, but the parameter has %d",
                        name_of_extension(u, x), n_whole, n_whole == 1 ? "" : "s", x->n);
    for (int k = 0; k < n_whole; k++) {
        ms_tensor *t = ms__tensor(whole[k]);
        if (!t) return ms__failure();
        MS_TRY(check_whole_output(u, x, &u->params[x->which[k]], t));
        // The unit also frees memory that only the whole parameter refers to, even if the hook does not return it.
        if (t->storage->refs == 1) MS_TRY(free_with(u, x, t));
    }
    for (int k = 0; k < n_free; k++) {
        ms_tensor *t = ms__tensor(freed[k]);
        if (!t) return ms__failure();
        MS_TRY(free_with(u, x, t));
    }
    for (int k = 0; k < n_whole; k++) {
        ms_tensor *t = ms__tensor(whole[k]);
        unit_param *p = &u->params[x->which[k]];
        ms__release(p->whole);
        p->whole = ms__tensor_on(t->storage, t->dtype, p->param->ndim, p->param->shape, t->offset);
    }
    x->made = true;
    return MS_OK;
}

ms_status ms__extensions_made(const unit *u)
{
    for (int e = 0; e < u->memory.n_extensions; e++)
        if (!u->memory.extensions[e].made)
            return ms__fail(MS_ESTATE,
                            "fsdp_post_all_gather of '%s' returned nothing at the first gather; expected the whole "
                            "tensor and a list of tensors to free",
                            name_of_extension(u, &u->memory.extensions[e]));
    return MS_OK;
}
