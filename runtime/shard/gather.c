// SPDX-License-Identifier: MIT
// shard/gather.c -- makes a unit's parameters whole and shards them again. Changes that scripts make in place to whole
// parameters are copied to the shards.
#include <stdio.h>

#include "device/device.h"
#include "device/host_pins.h"
#include "shard/extend.h"
#include "shard/gather.h"
#include "shard/layout/layout.h"
#include "shard/views/views.h"
#include "ops/data.h"
#include "ops/copy.h"
#include "ops/op.h"

// ---- changes -----------------------------------------------------------------------------------

uint64_t ms__unit_shard_versions(const unit *u)
{
    uint64_t sum = u->leaves == u->params ? 0 : u->leaves->local->version->count;
    for (int j = 0; j < u->n; j++) sum += u->params[j].local->version->count;
    return sum;
}

uint64_t ms__unit_versions(const unit *u)
{
    return ms__unit_shard_versions(u) + (u->views->written ? u->views->written(u) : 0);
}

// Copies those elements of part to p's local tensor that differ from the local elements rounded to the gathered dtype.
// All other elements keep the precision of the stored dtype.
static ms_status merge_piece(unit_param *p, ms_tensor *part)
{
    int ndim = p->local->ndim, home = p->owner->memory.home;
    const int64_t *shape = p->local->shape;
    ms_tensor *t[6] = { 0 };
    enum { BEFORE, NOW, DIFFERS, WIDE, PLAIN, MERGED };
    ms_status st = ms__tensor_new(&t[BEFORE], part->dtype, home, ndim, shape, "fsdp: changed parameters");
    if (st == MS_OK) st = ms__tensor_new(&t[NOW], part->dtype, home, ndim, shape, "fsdp: changed parameters");
    if (st == MS_OK) st = ms__tensor_new(&t[WIDE], p->dtype, home, ndim, shape, "fsdp: changed parameters");
    if (st == MS_OK) st = ms__copy(t[BEFORE], p->local);
    if (st == MS_OK) st = ms__copy(t[NOW], part);
    if (st == MS_OK) st = ms__copy(t[WIDE], t[NOW]);
    if (st == MS_OK) st = ms__op2(&t[DIFFERS], ms__op_by_name("ne"), t[BEFORE], t[NOW]);
    if (st == MS_OK) {
        t[PLAIN] = ms__tensor_on(p->local->storage, p->dtype, ndim, shape, p->local->offset);
        st = ms__op3(&t[MERGED], ms__op_by_name("where"), t[DIFFERS], t[WIDE], t[PLAIN]);
    }
    if (st == MS_OK) st = ms__copy(p->local, t[MERGED]);
    for (int k = 0; k < 6; k++) ms__release(t[k]);
    return st;
}

// Copies p's change to the shard. Fails if the change cannot be kept.
static ms_status keep_parameter_whole(unit_param *p)
{
    const char *name = p->param->name ? p->param->name : "?";
    if (p->owner->state.shard_seen != ms__unit_shard_versions(p->owner))
        return ms__fail(MS_ESTATE,
                        "fsdp: parameter '%s' was changed in place while it was whole, and so was the shard that "
                        "it was gathered from: one of the changes would be lost; change one of the two, and call "
                        "reshard() before the other",
                        name);
    if (p->extended)
        return ms__fail(MS_ESTATE,
                        "fsdp: parameter '%s' was changed in place while it was whole; its whole value comes from an "
                        "all-gather extension, so the change cannot be copied back to the shard: change its local "
                        "tensor, to_local(), instead",
                        name);
    if (p->here == 0) return MS_OK;
    ms_tensor *part = p->owner->layout->part(p, p->whole);
    ms_status st = p->gather_dtype == p->dtype ? ms__copy(p->local, part) : merge_piece(p, part);
    ms__release(part);
    return st;
}

// Copies to the shard the changes that scripts made to whole parameters: called before the shard is read and before the
// whole parameters are released. These copies do not increase the shard's version, so a backward accepts the
// parameters of its forward.
void ms__unit_keep(unit *u)
{
    if (!u->state.gathered || u->memory.in_place || u->state.concealed || u->state.summoning) return;
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        if (MS_LIKELY(p->param->version->count == p->seen)) continue;
        p->seen = p->param->version->count;
        if (keep_parameter_whole(p) != MS_OK) u->state.unkept = ms__intern(ms_error());
    }
}

// ---- views of parameters ------------------------------------------------------------------------

void ms__unit_show(unit *u, bool whole)
{
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        const ms_tensor *at = whole ? p->whole : p->resting;
        ms__tensor_point(p->param, at);
        p->param->sharded = at->sharded;
        p->seen = p->param->version->count;
    }
    u->state.concealed = false;
    u->state.shard_seen = ms__unit_shard_versions(u);
}

// ---- gather ------------------------------------------------------------------------------------

// Vacates the gather buffer after waiting for its events: a copy from another device may still be writing. (Collectives
// have been waited for already.)
static void vacate_buffer(unit *u)
{
    while (MS_UNLIKELY(u->memory.gather_buffer->event || u->memory.gather_buffer->readers))
        (void)ms__storage_sync(u->memory.gather_buffer, true);
    ms__storage_vacate(u->memory.gather_buffer);
}

// Copies this rank's parts, in the gathered dtype, to a storage laid out like the shard, or (in a world of one) like
// the gather buffer. Copies to another device without conversion are asynchronous; readers wait for
// them.
static ms_status cast_shard(unit *u, ms_storage *to)
{
    ms_copies together = { 0 };
    ms_status st = MS_OK;
    for (int j = 0; j < u->n && st == MS_OK; j++) {
        unit_param *p = &u->params[j];
        if (p->local->numel == 0 || p->extended) continue;
        size_t at = to == u->memory.gather_buffer ? p->whole_at : p->cast_at;
        ms_tensor *dst = ms__tensor_on(to, p->gather_dtype, p->local->ndim, p->local->shape,
                                       (int64_t)(at / (size_t)ms__dtype_size(p->gather_dtype)));
        st = p->gather_dtype == p->dtype && to->device != u->memory.home ? ms__copy_async(dst, p->local, NULL)
                                                                         : ms__copies_add(&together, dst, p->local);
        ms__release(dst);
    }
    return ms__copies_end(&together, st);
}

void ms__unit_drop_post(unit *u)
{
    if (u->memory.post) ms__storage_release(u->memory.post);
    u->memory.post = NULL;
}

// Whether backward can gather from the slices that post_group's ranks kept after forward: false if the parameters have
// changed since. All ranks reach the same result.
static bool post_serves(unit *u)
{
    if (u->memory.post && u->memory.post_version != ms__unit_versions(u)) ms__unit_drop_post(u);
    return u->memory.post != NULL;
}

// The dtype of the gathered data; MS_U8 if it has several.
static int gathered_dtype(const unit *u)
{
    int dtype = -1;
    for (int j = 0; j < u->n; j++) {
        const unit_param *p = &u->params[j];
        if (p->extended) continue;
        if (dtype >= 0 && p->gather_dtype != dtype) return MS_U8;
        dtype = p->gather_dtype;
    }
    return u->memory.n_extensions ? ms__extensions_dtype(u, dtype) : dtype >= 0 ? dtype : MS_U8;
}

void ms__unit_pin(const unit *u, const ms_storage *s)
{
    if (u->options.pins && s->device == MS_CPU && ms__is_cuda(u->memory.device)) ms__host_pin(s->block);
}

ms_status ms__unit_check_home(const unit *u)
{
    if (MS_LIKELY(!u->options.offload || u->memory.home == MS_CPU || ms__is_meta(u->memory.home) || u->n == 0))
        return MS_OK;
    const char *where = strrchr(ms__tensor_text(u->params[0].local), ' ') + 1;
    char device[32];
    snprintf(device, sizeof device, "%s", where);
    return u->views->off_home(u, device);
}

ms_status ms__unit_start_gather(unit *u, bool early, bool prefetched)
{
    if (MS_UNLIKELY(u->state.unkept != NULL)) {
        const char *text = u->state.unkept;
        u->state.unkept = NULL;
        return ms__fail(MS_ESTATE, "%s", text);
    }
    MS_TRY(ms__unit_check_home(u));
    // Parameters that were gathered ahead of their forward and have changed since are gathered again. All ranks reach
    // the same result.
    if (MS_UNLIKELY(u->state.ahead && (u->state.gather || u->state.fetched) &&
                    u->state.ahead != ms__unit_versions(u) + 1))
        ms__unit_shard(u);
    u->state.ahead = 0;
    bool nothing = u->memory.in_place || ms__is_meta(u->memory.device);  // there is nothing to fetch
    nothing |= u->world == 1 && early && u->memory.home == u->memory.device;
    if (u->state.gathered || u->state.gather || u->state.fetched || u->n == 0 || (nothing && early)) return MS_OK;
    if (u->memory.n_extensions && !nothing) {
        if (!ms__extensions_given(u))
            return ms__fail(MS_ESTATE,
                            "fsdp: unit '%s' has all-gather extensions: only its module's forward, "
                            "unshard() and backward can gather it",
                            u->name);
        MS_TRY(ms__extensions_place(u));
    }
    ms__unit_note(u, MS_UNIT_EV_UNSHARD, prefetched);
    UNIT_RANGE(u, "all_gather");
    u->state.gathered_from = ms__unit_versions(u);
    if (nothing) return MS_OK;
    ms_storage *from = u->memory.shard;
    // A script's asynchronous call never waits for the peers.
    ms_stream_kind stream = !early       ? MS_STREAM_COMPUTE
                            : prefetched ? ms__unit_stream(u, u->group, MS_STREAM_GATHER, u->memory.gather_bytes)
                                         : MS_STREAM_GATHER;
    bool post = post_serves(u);
    ms_status st = ms__storage_sync(post ? u->memory.post : u->memory.shard, false);
    if (st == MS_OK) st = ms__storage_refill(u->memory.gather_buffer, "fsdp: gathered parameters");
    if (st == MS_OK && u->settings.fake_gather && u->world > 1) {
        u->state.fetched = true;
        return MS_OK;
    }
    if (st == MS_OK && u->world == 1 && u->memory.n_extensions == 0) {  // with one rank, the cast completes the gather
        st = cast_shard(u, u->memory.gather_buffer);
        if (st != MS_OK) vacate_buffer(u);
        else u->state.fetched = true;
        return st;
    }
    if (st == MS_OK && u->memory.casts && !post) {
        st = ms__storage_new(&u->memory.cast, u->memory.home, u->memory.cast_bytes, "fsdp: low-precision shard");
        if (st == MS_OK) ms__storage_hold(u->memory.cast, MS_MEMORY_GATHERED);
        if (st == MS_OK) ms__unit_pin(u, u->memory.cast);
        if (st == MS_OK) st = cast_shard(u, u->memory.cast);
        if (st == MS_OK && u->memory.n_extensions) st = ms__extensions_pack(u);
        from = u->memory.cast;
    }
    ms_piece slice = { .out_stride = u->memory.post_bytes,
                       .bytes = u->memory.post_bytes,
                       .total = u->memory.gather_bytes };
    ms_request r = { .group = post ? u->settings.post_group : u->group,
                     .op = MS_DIST_ALL_GATHER,
                     .stream = stream,
                     .from = post ? u->memory.post : from,
                     .to = u->memory.gather_buffer,
                     .dtype = gathered_dtype(u),
                     .n_pieces = post ? 1 : u->memory.n_pieces,
                     .pieces = post ? &slice : u->memory.pieces,
                     .label = ms__unit_label(u, u->name) };
    if (st == MS_OK) st = ms__collective(&r, &u->state.gather);
    if (u->memory.cast) {
        ms__storage_release(u->memory.cast);  // the collective holds its own reference
        u->memory.cast = NULL;
    }
    if (st != MS_OK) vacate_buffer(u);
    else u->state.fetched = !u->state.gather;  // without a work, the collective is already complete
    return st;
}

ms_status ms__unit_gather_apart(const unit *u, ms_storage *from, ms_storage *to, int dtype, const ms_piece *piece)
{
    ms_request r = { .group = u->group,
                     .op = MS_DIST_ALL_GATHER,
                     .from = from,
                     .to = to,
                     .dtype = dtype,
                     .n_pieces = 1,
                     .pieces = piece,
                     .label.unit = *u->name ? u->name : "root" };
    return ms__collective(&r, NULL);
}

// Waits for the gather in flight. A failed gather only read the shard, so later uses of the shard must not fail.
static ms_status wait_gather(unit *u)
{
    ms_status st = ms_work_wait(u->state.gather);
    ms_work_free(u->state.gather);
    u->state.gather = NULL;
    if (MS_LIKELY(st == MS_OK)) return MS_OK;
    char text[2048];
    snprintf(text, sizeof text, "%s", ms_error());
    while (u->memory.shard->event || u->memory.shard->readers) (void)ms__storage_sync(u->memory.shard, true);
    return ms__fail(st, "%s", text);
}

ms_status ms__unit_fetch(unit *u)
{
    if (u->state.gather) {
        ms_status st = wait_gather(u);
        if (st != MS_OK) {
            vacate_buffer(u);
            return st;
        }
    }
    u->state.fetched = true;
    return MS_OK;
}

ms_status ms__unit_finish_gather(unit *u)
{
    if (u->state.gathered) {
        if (u->state.concealed) ms__unit_show(u, true);
        return MS_OK;
    }
    UNIT_RANGE(u, "all_gather_copy_out");
    if (!u->state.fetched) MS_TRY(ms__unit_fetch(u));
    u->state.fetched = false;
    ms__unit_show(u, true);
    if (u->views->shown) u->views->shown(u);
    u->state.gathered = true;
    ms__unit_drop_post(u);
    return MS_OK;
}

// ---- reshard -----------------------------------------------------------------------------------

void ms__unit_shard(unit *u)
{
    if (u->state.gather) {  // peers access these bytes until the gather is complete
        (void)wait_gather(u);
        if (!u->state.gathered && !u->memory.in_place) vacate_buffer(u);
    }
    ms__unit_drop_post(u);
    if (!u->state.gathered && u->state.fetched && !u->memory.in_place) vacate_buffer(u);
    u->state.fetched = false;
    ms__extensions_vacate(u);
    if (!u->state.gathered) return;
    ms__unit_keep(u);
    if (u->n) ms__unit_note(u, MS_UNIT_EV_RESHARD, false);
    ms__unit_show(u, false);
    if (!u->memory.in_place) vacate_buffer(u);
    u->state.gathered = false;
}

// Copies this rank's slice of the gather buffer, then vacates the buffer.
ms_status ms__unit_shard_to_post(unit *u)
{
    if (!u->state.gathered || u->memory.in_place || u->n == 0) {
        ms__unit_shard(u);
        return MS_OK;
    }
    size_t begin = (size_t)ms__group_rank(u->settings.post_group) * u->memory.post_bytes,
           n = begin < u->memory.gather_bytes ? u->memory.gather_bytes - begin : 0;
    if (n > u->memory.post_bytes) n = u->memory.post_bytes;
    ms_storage *post;
    MS_TRY(ms__storage_new(&post, u->memory.device, u->memory.post_bytes, "fsdp: slice of the gathered parameters"));
    ms__storage_hold(post, MS_MEMORY_GATHERED);
    if (n > 0) {
        int64_t count = (int64_t)n;
        ms_tensor *from = ms__tensor_on(u->memory.gather_buffer, MS_U8, 1, &count, (int64_t)begin),
                  *to = ms__tensor_on(post, MS_U8, 1, &count, 0);
        ms_status st = ms__copy(to, from);
        ms__release(from);
        ms__release(to);
        if (st != MS_OK) {
            ms__storage_release(post);
            return st;
        }
    }
    ms__unit_shard(u);
    u->memory.post = post;
    u->memory.post_version = ms__unit_versions(u);
    return MS_OK;
}
