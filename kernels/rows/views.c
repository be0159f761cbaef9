// SPDX-License-Identifier: MIT
// rows/views.c -- the view operators: another shape, stride and offset over the same storage. They have no
// kernel, except reshape, which copies where no view exists.
#include "cpu/cpu.h"
#include "rows/linalg/algebra.h"
#include "rows/grad.h"
#include "rows/layout.h"

// Reads a shape from i[]. One size may be -1; it is computed from the number of elements.
static ms_status wanted_shape(const ms_call *c, int *ndim, int64_t *shape)
{
    const ms_tensor *x = c->in[0];
    int unknown = -1;
    int64_t n = 1;
    if (c->n_i > MS_MAX_DIMS)
        return ms__call_fail(c, "the shape has %d dimensions; at most %d are supported", c->n_i, MS_MAX_DIMS);
    for (int d = 0; d < c->n_i; d++) {
        shape[d] = c->i[d];
        if (shape[d] == -1 && unknown < 0) unknown = d;
        else if (shape[d] >= 0 && __builtin_mul_overflow(n, shape[d], &n))
            return ms__call_fail(c, "shape %s has more than 2^63 - 1 elements, %s has %lld",
                                 ms__shape_text(c->n_i, c->i), ms__tensor_text(x), (long long)x->numel);
        else if (shape[d] < 0)
            return ms__call_fail(c, "shape %s is not valid for %s: sizes must be >= 0, one may be -1",
                                 ms__shape_text(c->n_i, c->i), ms__tensor_text(x));
    }
    if (unknown >= 0) {
        if (n == 0 || x->numel % n != 0)
            return ms__call_fail(
                c,
                "shape %s: the product of the sizes other than -1 must be positive and divide %lld, the number of "
                "elements of %s",
                ms__shape_text(c->n_i, c->i), (long long)x->numel, ms__tensor_text(x));
        shape[unknown] = x->numel / n;
    } else if (n != x->numel) {
        return ms__call_fail(c, "shape %s has %lld element%s, but %s has %lld", ms__shape_text(c->n_i, c->i),
                             (long long)n, n == 1 ? "" : "s", ms__tensor_text(x), (long long)x->numel);
    }
    *ndim = c->n_i;
    return MS_OK;
}

static ms_status check_view(ms_call *c)
{
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(wanted_shape(c, &ndim, shape));
    ms_tensor *v = ms__view_as(c->in[0], ndim, shape);
    if (!v)
        return ms__call_fail(c, "%s with strides %s cannot be viewed as %s without a copy; use reshape",
                             ms__tensor_text(c->in[0]), ms__shape_text(c->in[0]->ndim, c->in[0]->stride),
                             ms__shape_text(ndim, shape));
    return ms__call_view(c, 0, v);
}
static ms_status check_reshape(ms_call *c)
{
    int64_t shape[MS_MAX_DIMS];
    int ndim;
    MS_TRY(wanted_shape(c, &ndim, shape));
    ms_tensor *v = ms__view_as(c->in[0], ndim, shape);
    if (v) return ms__call_view(c, 0, v);
    return ms__call_out(c, 0, c->in[0]->dtype, ms__device(c->in[0]), ndim, shape);
}
// Copies the input's elements in row-major order; used where check_reshape found no view.
static ms_status run_reshape(ms_call *c)
{
    ms_tensor *o = c->out[0], *x = c->in[0];
    if (o->storage == x->storage) return MS_OK;
    ms_tensor *v = ms__view_as(o, x->ndim, x->shape);
    ms_status st = ms__copy_data(v, x);
    ms__release(v);
    return st;
}
static ms_status reshape_backward(ms_backward_call *b)
{
    return ms__reshape(&b->gin[0], b->gout[0], b->in_meta[0].ndim, b->in_meta[0].shape);
}

static ms_status check_transpose(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int a, b;
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &a));
    MS_TRY(ms__call_dim(c, c->i[1], x->ndim, &b));
    ms_tensor *v = ms__tensor_view(x, x->ndim, x->shape, x->stride, x->offset);
    if (x->ndim) {
        v->shape[a] = x->shape[b];
        v->stride[a] = x->stride[b];
        v->shape[b] = x->shape[a];
        v->stride[b] = x->stride[a];
    }
    return ms__call_view(c, 0, v);
}
static ms_status transpose_backward(ms_backward_call *b)
{
    static const ms_op *row;
    if (!row) row = ms__op_by_name("transpose");
    return ms__run_op(row, &(ms_op_args) { 1, b->gout, .n_i = 2, .i = b->i }, 1, b->gin);
}

static ms_status check_permute(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int64_t shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];
    unsigned seen = 0;
    if (c->n_i != x->ndim)
        return ms__call_fail(c, "expected each dimension of %s once (%d in all), got %d", ms__tensor_text(x), x->ndim,
                             c->n_i);
    for (int k = 0; k < x->ndim; k++) {
        int d;
        MS_TRY(ms__call_dim(c, c->i[k], x->ndim, &d));
        if (seen >> d & 1) return ms__call_fail(c, "dimension %d is named twice", d + 1);
        seen |= 1u << d;
        shape[k] = x->shape[d];
        stride[k] = x->stride[d];
    }
    return ms__call_view(c, 0, ms__tensor_view(x, x->ndim, shape, stride, x->offset));
}
static ms_status permute_backward(ms_backward_call *b)
{
    int64_t back[MS_MAX_DIMS];
    int n = b->n_i;
    for (int k = 0; k < n; k++) back[b->i[k] < 0 ? b->i[k] + n : b->i[k]] = k;
    ms_tensor *g = b->gout[0];
    int64_t shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];
    for (int k = 0; k < n; k++) {
        shape[k] = g->shape[back[k]];
        stride[k] = g->stride[back[k]];
    }
    b->gin[0] = ms__tensor_view(g, n, shape, stride, g->offset);
    return MS_OK;
}

static ms_status check_narrow(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d;
    if (x->ndim == 0) return ms__call_fail(c, "a 0-dim tensor has no dimension to narrow");
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &d));
    int64_t first = c->i[1] < 0 ? c->i[1] + x->shape[d] : c->i[1], len = c->i[2];
    if (len < 0 || first < 0 || first > x->shape[d] || len > x->shape[d] - first)
        return ms__call_fail(
            c, "a range of length %lld from position %lld (counted from 0) is not inside dimension %d of %s",
            (long long)len, (long long)c->i[1], d + 1, ms__tensor_text(x));
    return ms__call_view(c, 0, ms__part_of(x, d, first, len));
}
// Sets gin[0] to a tensor of the input's shape: g, which has part_shape, from position `first` of dimension d on, and 0
// elsewhere.
static ms_status put_back(ms_backward_call *b, int d, int64_t first, ms_tensor *g, const int64_t *part_shape)
{
    const ms_meta *m = &b->in_meta[0];
    ms_tensor *whole;
    MS_TRY(ms__zeros_of(&whole, m));
    ms_tensor *part = ms__tensor_view(whole, m->ndim, part_shape, whole->stride, first * whole->stride[d]);
    ms_status st = ms__copy(part, g);
    ms__release(part);
    if (st != MS_OK) {
        ms__release(whole);
        return st;
    }
    b->gin[0] = whole;
    return MS_OK;
}
static ms_status narrow_backward(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[0];
    int d = ms__dim_of(b->i[0], m->ndim);
    int64_t first = b->i[1] < 0 ? b->i[1] + m->shape[d] : b->i[1];
    return put_back(b, d, first, b->gout[0], b->gout[0]->shape);
}

// c->i: dimension, first, count, step. Selects `count` positions of the dimension: `first` and every step-th after it.
static ms_status check_slice(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d;
    if (x->ndim == 0) return ms__call_fail(c, "a 0-dim tensor has no dimension to slice");
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &d));
    int64_t first = c->i[1], count = c->i[2], step = c->i[3], size = x->shape[d];
    if (count < 0 || first < 0 || step < 1 || (count > 0 && (first >= size || (size - 1 - first) / step < count - 1)))
        return ms__call_fail(c,
                             "a range of length %lld from position %lld (counted from 0) in steps of %lld does not fit "
                             "dimension %d of %s",
                             (long long)count, (long long)first, (long long)step, d + 1, ms__tensor_text(x));
    ms_tensor *v = ms__part_of(x, d, count > 0 ? first : 0, count);
    if (count > 1) v->stride[d] *= step;
    return ms__call_view(c, 0, v);
}
static ms_status slice_backward(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[0];
    const ms_tensor *g = b->gout[0];
    int d = ms__dim_of(b->i[0], m->ndim);
    ms_tensor *whole;
    MS_TRY(ms__zeros_of(&whole, m));
    int64_t stride[MS_MAX_DIMS];
    memcpy(stride, whole->stride, sizeof stride);
    stride[d] *= b->i[3];
    ms_tensor *part =
        ms__tensor_view(whole, m->ndim, g->shape, stride, g->shape[d] > 0 ? b->i[1] * whole->stride[d] : 0);
    ms_status st = ms__copy(part, b->gout[0]);
    ms__release(part);
    b->gin[0] = whole;
    return ms__or_drop(st, &b->gin[0]);
}

// c->i: dimension, size, step. Makes windows of `size` elements, `step` apart; the elements of a window are the last
// dimension.
static ms_status check_unfold(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d;
    if (x->ndim == 0 || x->ndim == MS_MAX_DIMS)
        return ms__call_fail(c, "%s has %d dimensions, expected 1 to %d", ms__tensor_text(x), x->ndim, MS_MAX_DIMS - 1);
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &d));
    int64_t size = c->i[1], step = c->i[2];
    if (size < 0 || size > x->shape[d] || step < 1)
        return ms__call_fail(c,
                             "the size %lld and the step %lld do not fit dimension %d of %s: expected a size from 0 to "
                             "%lld and a step from 1",
                             (long long)size, (long long)step, d + 1, ms__tensor_text(x), (long long)x->shape[d]);
    int64_t shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    memcpy(stride, x->stride, sizeof stride);
    shape[d] = (x->shape[d] - size) / step + 1;
    stride[d] *= step;
    shape[x->ndim] = size;
    stride[x->ndim] = x->stride[d];
    return ms__call_view(c, 0, ms__tensor_view(x, x->ndim + 1, shape, stride, x->offset));
}
// Adds the gradients of all windows' first elements, then of all second ones, and so on: each of these additions writes
// no element twice, although windows may overlap.
static ms_status unfold_backward(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[0];
    ms_tensor *g = b->gout[0], *whole;
    int d = ms__dim_of(b->i[0], m->ndim);
    MS_TRY(ms__zeros_of(&whole, m));
    ms_status st = MS_OK;
    int64_t stride[MS_MAX_DIMS];
    memcpy(stride, whole->stride, sizeof stride);
    stride[d] *= b->i[2];
    for (int64_t k = 0; k < b->i[1] && st == MS_OK; k++) {
        ms_tensor *part = ms__tensor_view(whole, m->ndim, g->shape, stride, k * whole->stride[d]);
        ms_tensor *of = ms__slice_of(g, m->ndim, k), *same = NULL;
        st = ms__op2(&same, &ms__op_add_, part, of);
        ms__release(same);
        ms__release(of);
        ms__release(part);
    }
    b->gin[0] = whole;
    return ms__or_drop(st, &b->gin[0]);
}

static ms_status check_select(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d;
    if (x->ndim == 0) return ms__call_fail(c, "a 0-dim tensor has no dimension to select from");
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &d));
    int64_t at = c->i[1] < 0 ? c->i[1] + x->shape[d] : c->i[1];
    if (at < 0 || at >= x->shape[d])
        return ms__call_fail(c, "position %lld (counted from 0) is not inside dimension %d of %s", (long long)c->i[1],
                             d + 1, ms__tensor_text(x));
    return ms__call_view(c, 0, ms__slice_of(x, d, at));
}
static ms_status select_backward(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[0];
    int d = ms__dim_of(b->i[0], m->ndim);
    int64_t at = b->i[1] < 0 ? b->i[1] + m->shape[d] : b->i[1], shape[MS_MAX_DIMS];
    memcpy(shape, m->shape, sizeof shape);
    shape[d] = 1;
    ms_tensor *g;
    MS_TRY(ms__reshape(&g, b->gout[0], m->ndim, shape));
    ms_status st = put_back(b, d, at, g, shape);
    ms__release(g);
    return st;
}

static ms_status check_expand(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int lead = c->n_i - x->ndim;
    int64_t shape[MS_MAX_DIMS], stride[MS_MAX_DIMS], numel = 1;
    if (lead < 0 || c->n_i > MS_MAX_DIMS)
        return ms__call_fail(c, "shape %s has %d dimension%s, expected %d to %d for %s", ms__shape_text(c->n_i, c->i),
                             c->n_i, c->n_i == 1 ? "" : "s", x->ndim, MS_MAX_DIMS, ms__tensor_text(x));
    for (int d = 0; d < c->n_i; d++) {
        int64_t have = d < lead ? 1 : x->shape[d - lead];
        shape[d] = c->i[d] == -1 && d >= lead ? have : c->i[d];
        if (shape[d] < 0 && d < lead)
            return ms__call_fail(c, "%s does not expand to %s: dimension %d is new and needs a size",
                                 ms__tensor_text(x), ms__shape_text(c->n_i, c->i), d + 1);
        if (shape[d] < 0)
            return ms__call_fail(c, "%s does not expand to %s: sizes must be 0 or more, or -1 to keep a size",
                                 ms__tensor_text(x), ms__shape_text(c->n_i, c->i));
        if (have != 1 && shape[d] != have)
            return ms__call_fail(c, "%s does not expand to %s: its dimension %d has size %lld, and only size 1 expands",
                                 ms__tensor_text(x), ms__shape_text(c->n_i, c->i), d - lead + 1, (long long)have);
        stride[d] = d < lead || (have == 1 && shape[d] != 1) ? 0 : x->stride[d - lead];
        // A view may have more elements than memory, but their number and bytes must not overflow.
        if (__builtin_mul_overflow(numel, shape[d], &numel) || numel > (INT64_MAX >> 4))
            return ms__call_fail(c, "shape %s has too many elements for a 64-bit size", ms__shape_text(c->n_i, c->i));
    }
    return ms__call_view(c, 0, ms__tensor_view(x, c->n_i, shape, stride, x->offset));
}
static ms_status expand_backward(ms_backward_call *b)
{
    return ms__grad_to(&b->gin[0], ms__retain(b->gout[0]), &b->in_meta[0]);
}

static ms_status check_squeeze(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    unsigned drop = 0;
    for (int k = 0; k < c->n_i; k++) {
        int d;
        MS_TRY(ms__call_dim(c, c->i[k], x->ndim, &d));
        if (drop >> d & 1 && x->ndim > 0) return ms__call_fail(c, "dimension %d is named twice", d + 1);
        drop |= 1u << d;
    }
    if (c->n_i == 0) drop = ~0u;
    int64_t shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];
    int n = 0;
    for (int d = 0; d < x->ndim; d++)
        if (!(drop >> d & 1) || x->shape[d] != 1) {
            shape[n] = x->shape[d];
            stride[n++] = x->stride[d];
        }
    return ms__call_view(c, 0, ms__tensor_view(x, n, shape, stride, x->offset));
}
static ms_status check_unsqueeze(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d;
    if (x->ndim == MS_MAX_DIMS)
        return ms__call_fail(c, "%s already has %d dimensions, the most that a tensor can have", ms__tensor_text(x),
                             MS_MAX_DIMS);
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim + 1, &d));
    int64_t shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];
    for (int k = 0, n = 0; k <= x->ndim; k++) {
        if (k == d) {
            shape[k] = 1;
            stride[k] = d < x->ndim ? x->shape[d] * x->stride[d] : 1;
        } else {
            shape[k] = x->shape[n];
            stride[k] = x->stride[n++];
        }
    }
    return ms__call_view(c, 0, ms__tensor_view(x, x->ndim + 1, shape, stride, x->offset));
}

static ms_status check_split(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d;
    if (x->ndim == 0) return ms__call_fail(c, "a 0-dim tensor cannot be split");
    MS_TRY(ms__call_dim(c, c->i[0], x->ndim, &d));
    // c->i is d, size: pieces of that size; the last one may be smaller. c->i is d, size1, size2 …: pieces of those
    // sizes.
    int64_t total = x->shape[d], n = c->n_i - 1, sum = 0;
    if (n == 1) {
        if (c->i[1] <= 0)
            return ms__call_fail(c, "the size of the pieces must be positive, got %lld", (long long)c->i[1]);
        n = total == 0 ? 1 : (total + c->i[1] - 1) / c->i[1];
    } else {
        for (int k = 0; k < n; k++) {
            if (c->i[k + 1] < 0)
                return ms__call_fail(c, "size %lld of piece %d is negative", (long long)c->i[k + 1], k + 1);
            sum += c->i[k + 1];
        }
        if (sum != total)
            return ms__call_fail(c, "sizes %s add up to %lld, but dimension %d of %s has %lld",
                                 ms__shape_text((int)n, c->i + 1), (long long)sum, d + 1, ms__tensor_text(x),
                                 (long long)total);
    }
    if (n > MS_MAX_OUT)
        return ms__call_fail(c, "%lld pieces of %s; at most %d are supported", (long long)n, ms__tensor_text(x),
                             MS_MAX_OUT);
    for (int64_t k = 0, first = 0; k < n; k++) {
        int64_t len = c->n_i == 2 ? (total - first < c->i[1] ? total - first : c->i[1]) : c->i[k + 1];
        MS_TRY(ms__call_view(c, (int)k, ms__part_of(x, d, first, len)));
        first += len;
    }
    return MS_OK;
}
// If the gradients of all pieces lie one after another along dimension d of one tensor that has no other users, returns
// that tensor; otherwise NULL.
static ms_tensor *joined_gradients(const ms_backward_call *b, int d)
{
    const ms_meta *m = &b->in_meta[0];
    ms_tensor *first = b->gout[0];
    int64_t at = 0;
    for (int k = 0; k < b->n_out; k++) {
        const ms_tensor *g = b->gout[k];
        if (!g || g->refs != 1 || g->slot || g->dtype != m->dtype || g->storage != first->storage ||
            g->offset != first->offset + at * first->stride[d] ||
            memcmp(g->stride, first->stride, (size_t)m->ndim * sizeof *g->stride) != 0)
            return NULL;
        at += g->shape[d];
    }
    ms_tensor *whole = ms__tensor_view(first, m->ndim, m->shape, first->stride, first->offset);
    int order[MS_MAX_DIMS];
    ms__order_of_strides(whole, order);
    if (first->storage->refs == b->n_out + 1 && whole->storage->bytes == ms__nbytes(whole) &&
        ms__is_dense(whole, order))
        return whole;
    ms__release(whole);
    return NULL;
}

static ms_status split_backward(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[0];
    int d = ms__dim_of(b->i[0], m->ndim);
    if ((b->gin[0] = joined_gradients(b, d))) return MS_OK;
    ms_tensor *whole, *like = NULL;
    int order[MS_MAX_DIMS];
    int64_t sizes[MS_MAX_DIMS];
    for (int k = 0; k < b->n_out && !like; k++) like = b->gout[k];
    for (int e = 0; e < m->ndim; e++) order[e] = e;
    // Keep the order of strides of the pieces' gradients: those of attention heads are transposed views.
    if (like) ms__order_of_strides(like, order);
    if (like && !ms__is_dense(like, order))
        for (int e = 0; e < m->ndim; e++) order[e] = e;
    ms__in_order(m->ndim, order, m->shape, sizes);
    MS_TRY(ms__tensor_new(&whole, m->dtype, m->device, m->ndim, sizes, "split"));
    ms__lay_out(whole, order, m->shape);
    for (int64_t k = 0, first = 0; k < b->n_out; k++) {
        ms_tensor *part =
            ms__tensor_view(whole, m->ndim, b->out_meta[k].shape, whole->stride, first * whole->stride[d]);
        ms_status st = b->gout[k] ? ms__copy(part, b->gout[k]) : ms__zero(part);
        ms__release(part);
        if (st != MS_OK) {
            ms__release(whole);
            return st;
        }
        first += b->out_meta[k].shape[d];
    }
    b->gin[0] = whole;
    return MS_OK;
}

// c->i: offset, sizes, strides, in elements of x, which is contiguous.
static ms_status check_as_strided(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int n = (c->n_i - 1) / 2;
    if (c->n_i < 1 || c->n_i % 2 == 0 || n > MS_MAX_DIMS)
        return ms__call_fail(c, "%d integers, expected an offset, n sizes and n strides, n at most %d", c->n_i,
                             MS_MAX_DIMS);
    const int64_t *shape = c->i + 1, *stride = shape + n;
    if (!ms__is_contiguous(x))
        return ms__call_fail(c,
                             "%s is not contiguous, but offset and strides count elements of contiguous memory; call "
                             "contiguous() first",
                             ms__tensor_text(x));
    int64_t last = c->i[0], step;
    bool some = true, fits = last >= 0;
    for (int d = 0; d < n; d++) {
        if (shape[d] < 0 || stride[d] < 0)
            return ms__call_fail(c, "sizes %s and strides %s, expected numbers from 0", ms__shape_text(n, shape),
                                 ms__shape_text(n, stride));
        some &= shape[d] > 0;
        fits &= !__builtin_mul_overflow(shape[d] - 1, stride[d], &step) && !__builtin_add_overflow(last, step, &last);
    }
    if (some && (!fits || last >= x->numel))
        return ms__call_fail(c, "sizes %s with strides %s from element %lld are not inside %s",
                             ms__shape_text(n, shape), ms__shape_text(n, stride), (long long)c->i[0],
                             ms__tensor_text(x));
    return ms__call_view(c, 0, ms__tensor_view(x, n, shape, stride, x->offset + (some ? c->i[0] : 0)));
}
// Adds the gradient of each element of the result to the element of x at its offset; elements may share an offset.
static ms_status as_strided_backward(ms_backward_call *b)
{
    const ms_meta *m = &b->in_meta[0];
    int n = (b->n_i - 1) / 2;
    ms_algebra e = { 0 };
    ms_tensor *places = NULL, *zeros = NULL, *g = ms__a1(&e, "reshape", b->gout[0], 1, (int64_t[]) { -1 });
    if (b->gout[0]->numel == 0) {
        ms__algebra_end(&e, NULL, NULL);
        return ms__zero_gradient(b);
    }
    for (int d = 0; (d < n || d == 0) && e.st == MS_OK; d++) {
        int64_t shape[MS_MAX_DIMS] = { n ? b->i[1 + d] : 1, 1, 1, 1, 1, 1, 1, 1 };
        ms_tensor *t = NULL, *same = NULL;
        double range[2] = { d ? 0 : (double)b->i[0], n ? (double)b->i[1 + n + d] : 1 };
        e.st = ms__tensor_new(&t, MS_I64, m->device, 1, shape, "as_strided");
        if (e.st == MS_OK)
            e.st = ms__run_op(ms__op_by_name("arange_"), &(ms_op_args) { 1, &t, .n_f = 2, .f = range }, 1, &same);
        ms__release(same);
        t = ms__a1(&e, "reshape", ms__hold(&e, t), n > d ? n - d : 1, shape);
        places = places ? ms__plus(&e, places, t) : t;
    }
    int64_t numel = 1;
    for (int d = 0; d < m->ndim; d++) numel *= m->shape[d];
    if (e.st == MS_OK) e.st = ms__zeros(&zeros, m->dtype, m->device, 1, &numel);
    ms__hold(&e, zeros);
    places = ms__a1(&e, "reshape", places, 1, (int64_t[]) { -1 });
    ms_tensor *in[] = { zeros, places, g }, *sum = NULL;
    if (e.st == MS_OK)
        e.st = ms__run_op(ms__op_by_name("scatter_add_"), &(ms_op_args) { 3, in, .n_i = 1, .i = (int64_t[]) { 0 } }, 1,
                          &sum);
    ms__hold(&e, e.st == MS_OK ? sum : NULL);
    return ms__algebra_end(&e, ms__a1(&e, "reshape", sum, m->ndim, m->shape), &b->gin[0]);
}

#define VIEW(NAME, BACKWARD, TAKES, SAMPLES, DOC)                                                                    \
    static const ms_op NAME##_row =                                                                                  \
        MS_ROW(#NAME, 1, 1, .flags = MS_OP_DIFFERENTIABLE | MS_OP_VIEW, .check = check_##NAME, .backward = BACKWARD, \
               .takes = TAKES, .samples = SAMPLES, .doc = DOC);
// clang-format off
VIEW(view,      reshape_backward,   "size...", "[3,4] i=2,6;[3,4] i=-1;[2,3,4] i=6,-1;[1,1]", "t with another shape, as a view; a size of -1 is inferred.")
VIEW(transpose, transpose_backward, "dim1, dim2", "[3,4] i=0,1;[2,3,4] i=-1,0", "t with two dimensions exchanged, as a view.")
VIEW(permute,   permute_backward,   "dim...", "[2,3,4] i=2,0,1;[2,3,4] i=-1,1,0", "t with its dimensions in this order, as a view.")
VIEW(narrow,    narrow_backward,    "dim, first, length", "[5,4] i=0,1,3;[3,4] i=-1,2,2;[3,4] i=1,0,0", "length slices of a dimension, from position first, as a view.")
VIEW(slice,     slice_backward,     "dim, first, length, step", "[5,4] i=0,1,2,3;[3,4] i=-1,0,2,2;[3,4] i=1,0,0,1", "length slices of a dimension, each step after the one before, as a view.")
VIEW(unfold,    unfold_backward,    "dim, size, step", "[7,2] i=0,3,2;[2,5] i=-1,2,1;[4] i=0,4,1", "All windows of this size along a dimension, each step after the one before, in a new last dimension, as a view.")
VIEW(select,    select_backward,    "dim, position", "[5,4] i=0,3;[2,3,4] i=1,-1", "One slice of a dimension, without that dimension, as a view.")
VIEW(expand,    expand_backward,    "size...", "[3,1] i=3,4;[4] i=2,3,-1;[1,3] i=2,5,3", "t with dimensions of size 1 repeated, as a view; -1 keeps a size.")
VIEW(squeeze,   reshape_backward,   "dim...", "[1,3,1];[1,3,1] i=0;[1,3,1] i=-1;[1,3] i=1", "t without these dimensions where their size is 1 (none given: without all of size 1), as a view.")
VIEW(unsqueeze, reshape_backward,   "dim", "[3,4] i=0;[3,4] i=1;[3,4] i=-1", "t with a new dimension of size 1, as a view.")
VIEW(as_strided, as_strided_backward, "offset, size..., stride...", "[12] i=1,3,2,4,2;[3,4] i=0,5,4,2,1;[2,3] i=2;[4] i=0,2,3,0,1", "A view with this offset, these sizes and these strides into t's storage.")
VIEW(split,     split_backward,     "dim, size, size...", "[5,4] i=0,2;[5,4] i=1,1,3,0;[2,6] i=-1,3", "Views of consecutive parts of a dimension; a single size is that of every part.")
// clang-format on
static const ms_op reshape_row =
    MS_ROW("reshape", 1, 1, .takes = "size...",
           .doc = "t with another shape: a view if possible, otherwise a copy; a size of -1 is inferred.",
           .flags = MS_OP_DIFFERENTIABLE | MS_OP_VIEW, .check = check_reshape,
           .run = { [MS_CPU] = run_reshape, [MS_CUDA] = run_reshape }, .backward = reshape_backward,
           .samples = "[3,4] i=2,6;[2,3,4] i=-1,4");

MS_OPERATORS = { &view_row,   &reshape_row, &transpose_row, &permute_row,   &narrow_row, &slice_row,     &unfold_row,
                 &select_row, &expand_row,  &squeeze_row,   &unsqueeze_row, &split_row,  &as_strided_row };
