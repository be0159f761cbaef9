// SPDX-License-Identifier: MIT
// comm/movers/nccl/nccl.c -- collectives of tensors on GPUs that the transport's library (NCCL) moves.
//
// The ranks agree on the CPU first (comm/agree/exchange.c), so calls that do not match fail before anything is queued.
// Then the thread that runs the collective queues it, and waits on the CPU until the GPU has completed it; meanwhile it
// watches the library's errors, the peers and the timeout as in every other wait.
//
// A rank queues its collectives in the order in which its script issued them, over all groups and streams: a GPU runs
// them in that order, and ranks with different orders would wait for each other. So a collective waits for its turn.
//
// The library adds in an order of its own. Half types are added in float32 and rounded once, as on the CPU, unless
// the script has chosen the dtype of the reduction: then the library adds them in that dtype, and also computes their
// mean. Scales and all other means are computed after the sum.
#include <pthread.h>
#include <stdio.h>
#include "device/device.h"
#include "ops/queued.h"
#include "comm/movers/mover.h"
#include "comm/process/process.h"
#include "comm/world/message.h"

typedef struct {
    void *ready;        // an event of the compute stream, after which the tensors may be read and written
    ms_storage *wide;   // half types: the input as float32, and the sum
    ms_storage *whole;  // all-gathers: blocks that are copied to the output line by line
    int n_calls, n_lines;
    ms_gpu_call *calls;
    ms_cuda_finish before, after;  // n 0: nothing to convert
    bool in_line;
    ms_coll *next;  // the next one in the line of collectives to be queued
} nccl_coll;

extern const ms_mover ms__mover_nccl;

static nccl_coll *coll_calls(const ms_coll *c) { return c->prepared; }

static const ms_transport_gpu *nccl_library(void) { return ms__world.transport->gpu; }

// ---- the line: collectives that have numbers but are not queued yet, in the order of the script ----

static struct {
    pthread_mutex_t lock;
    ms_coll *first, *last;
    int device;  // the GPU of this rank's communicators
} nccl = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void line_up(ms_coll *c)
{
    nccl_coll *n = c->prepared;
    pthread_mutex_lock(&nccl.lock);
    n->in_line = true;
    n->next = NULL;
    if (nccl.last) coll_calls(nccl.last)->next = c;
    else nccl.first = c;
    nccl.last = c;
    pthread_mutex_unlock(&nccl.lock);
}

static void step_out(ms_coll *c)
{
    pthread_mutex_lock(&nccl.lock);
    if (coll_calls(c)->in_line) {
        ms_coll *before = NULL;
        for (ms_coll *at = nccl.first; at != c; at = coll_calls(at)->next) before = at;
        ms_coll *next = coll_calls(c)->next;
        if (before) coll_calls(before)->next = next;
        else nccl.first = next;
        if (nccl.last == c) nccl.last = before;
        coll_calls(c)->in_line = false;
    }
    pthread_mutex_unlock(&nccl.lock);
}

static bool is_first(const ms_coll *c)
{
    pthread_mutex_lock(&nccl.lock);
    bool yes = nccl.first == c;
    pthread_mutex_unlock(&nccl.lock);
    return yes;
}

static bool is_empty(void) { return is_first(NULL); }

// ---- communicators --------------------------------------------------------------------------------

static ms_status nccl_open(const ms_transport *t, const ms_launch *launch)
{
    if (!t->gpu) return MS_OK;
    MS_TRY(ms__cuda_need(MS_CUDA, "dist.init: backend 'nccl'"));
    nccl.device = MS_CUDA | launch->local_rank % ms_cuda_count() << 8;
    return MS_OK;
}

enum { EXPLAINED = 300 * 1000000 };  // time in ns that the rank that caused a failure has to report it

// Waits until a call on p, which has returned r, has been carried out. g: the group that an error breaks; what: for
// messages.
static ms_status complete_call(ms_group *g, ms_gpu_group *p, ms_gpu_result r, const char *what, char *text, size_t n)
{
    int64_t since = ms__now_ns(), lost = since;
    uint64_t epoch = ms__comm_epoch();
    while (r == MS_GPU_BUSY || (r == MS_GPU_PEER && ms__now_ns() - lost < EXPLAINED)) {
        if (ms__comm_is_lost(g, epoch)) return ms__group_whole(g, what);
        MS_TRY(ms__check_interrupt());
        double waited = (double)(ms__now_ns() - since) * 1e-9;
        if (r == MS_GPU_BUSY && waited > ms__world.timeout) {
            snprintf(text, n, "%.1f s have passed and the GPUs of the ranks are not connected", waited);
            r = MS_GPU_FAILED;
            break;
        }
        ms__nap(100 * 1000);
        if (r == MS_GPU_BUSY && (r = nccl_library()->poll(p, text, n)) == MS_GPU_PEER) lost = ms__now_ns();
    }
    if (r == MS_GPU_DONE) return MS_OK;
    ms__fail(MS_ECOMM, "%s: %s", what, text);
    ms__break_by_me(g, epoch, ms_error());
    return ms__fail_job(MS_ECOMM, -1);
}

typedef struct {
    int32_t failed;
    char id[MS_GPU_ID], why[500];
} hello;

static ms_status make_communicator(ms_group *world)
{
    if (!nccl_library() || ms__world.size == 1) return MS_OK;
    hello mine = { 0 }, *all = calloc((size_t)ms__world.size, sizeof *all);
    if (!all) return ms__no_memory((size_t)ms__world.size * sizeof *all, "dist.init", "%d ranks", ms__world.size);
    if (ms__world.rank == 0) mine.failed = nccl_library()->make_id(mine.id, mine.why, sizeof mine.why) != MS_GPU_DONE;
    ms__transport_lock();
    int rc = ms__world.transport->all_gather(&mine, all, sizeof mine);
    ms__transport_unlock();
    ms_status st = rc ? ms__fail(MS_ECOMM, "dist.init: MPI_Allgather failed") : MS_OK;
    if (st == MS_OK && all[0].failed)
        st = ms__fail_job(ms__fail(MS_ECOMM, "dist.init: %s%s",
                                   ms__world.rank == 0 ? "" : "rank 0 failed: ", all[0].why),
                          -1);
    if (st == MS_OK && !ms__cuda()->ranks.native_stream(ms__index(nccl.device), MS_STREAM_GATHER)) st = ms__failure();
    if (st == MS_OK) {
        char text[WHY] = "";
        ms_gpu_result r =
            nccl_library()->join(&world->communicator, all[0].id, ms__world.rank, ms__world.size, text, sizeof text);
        st = complete_call(world, world->communicator, r, "dist.init", text, sizeof text);
    }
    free(all);
    return st;
}

static ms_status split_communicator(ms_group *g)
{
    ms_gpu_group *whole = ms__group_world()->communicator, *part = NULL;
    if (!whole || g->n == 1) return MS_OK;
    while (!is_empty()) {  // only one call at a time may use the world's communicator
        MS_TRY(ms__check_interrupt());
        ms__nap(20 * 1000);
    }
    char text[WHY] = "";
    ms_gpu_result r = nccl_library()->split(&part, whole, g->me, text, sizeof text);
    MS_TRY(complete_call(ms__group_world(), part, r, "dist.new_group", text, sizeof text));
    if (g->me >= 0) g->communicator = part;
    else nccl_library()->drop(part);
    return MS_OK;
}

static ms_status nccl_join(ms_group *g)
{
    return g == ms__group_world() ? make_communicator(g) : split_communicator(g);
}

static ms_status nccl_part(ms_group *g)
{
    ms_gpu_group *p = g->communicator;
    char text[WHY] = "";
    if (!p) return MS_OK;
    g->communicator = NULL;
    MS_TRY(complete_call(g, p, nccl_library()->leave(p, text, sizeof text), "dist.free_group", text, sizeof text));
    nccl_library()->drop(p);
    return MS_OK;
}

// ---- making collectives ----------------------------------------------------------------------------

static bool lies_here(const ms_storage *s) { return !s || s->device == nccl.device; }

// Prints once that tensors on a GPU other than the communicator's go through CPU memory.
static void note_other(const ms_storage *s)
{
    static bool said;
    if (said || !s || !ms__is_cuda(s->device)) return;
    said = true;
    fprintf(
        stderr,
        "rank %d: dist: collectives of tensors on cuda:%d go through CPU memory, because this rank's communicator is "
        "on cuda:%d\n",
        ms__world.rank, ms__index(s->device), ms__index(nccl.device));
}

// Whether the library moves c. All members must find the same, so they compare it (ms_fingerprint.native).
static bool is_for_library(const ms_coll *c)
{
    // Not moved by NCCL: gathers and scatters, whose lists of tensors are packed in CPU memory; sends and receives,
    // which two ranks may issue in different orders; barriers; reduce-scatters of parts.
    bool moved = c->op == MS_DIST_ALL_REDUCE || c->op == MS_DIST_ALL_GATHER || c->op == MS_DIST_REDUCE_SCATTER ||
                 c->op == MS_DIST_BROADCAST || c->op == MS_DIST_REDUCE || c->op == MS_DIST_ALL_TO_ALL;
    if (!moved || !c->g->communicator || c->n_parts) return false;
    if (c->reducer.dtype == MS_I16) return false;  // a type that NCCL does not have
    const ms_storage *used[] = { c->in.storage, c->out.storage };
    for (int k = 0; k < MS_COUNT(used); k++)
        if (!lies_here(used[k])) {
            note_other(used[k]);
            return false;
        }
    return true;
}

static ms_status device_room(ms_storage **out, size_t bytes, const ms_coll *c)
{
    return ms__storage_new(out, nccl.device, bytes, ROW(c->op)->name);
}

// Lists the calls of an all-gather: one all-gather for a piece whose blocks are all full and lie one after the other,
// otherwise a broadcast of each block.
static ms_status gather_calls(ms_coll *c, nccl_coll *n)
{
    int members = c->g->n, me = c->g->me;
    size_t lines = 0;
    for (int i = 0; i < c->n_pieces; i++)
        if (c->pieces[i].line) lines += (size_t)c->pieces[i].bytes * (size_t)members;
    if (lines) MS_TRY(device_room(&n->whole, lines, c));
    if (!(n->calls = calloc((size_t)c->n_pieces * (size_t)members, sizeof *n->calls)))
        return ms__no_memory((size_t)c->n_pieces * (size_t)members * sizeof *n->calls, "all_gather", "%d pieces",
                             c->n_pieces);
    char *apart = n->whole ? n->whole->data : NULL;
    for (int i = 0; i < c->n_pieces; i++) {
        const ms_piece *p = &c->pieces[i];
        char *in = c->in.data + p->in_offset, *out = c->out.data + p->out_offset;
        uint64_t stride = p->out_stride;
        if (p->line) {
            out = apart;
            stride = p->bytes;
            apart += p->bytes * (uint64_t)members;
            n->n_lines++;
        }
        if (stride == p->bytes && p->total == p->bytes * (uint64_t)members) {
            if (p->bytes)
                n->calls[n->n_calls++] = (ms_gpu_call) {
                    .op = MS_DIST_ALL_GATHER, .dtype = MS_U8, .count = (size_t)p->bytes, .in = in, .out = out
                };
            continue;
        }
        for (int k = 0; k < members; k++) {
            size_t bytes = ms__piece_bytes(p, k);
            char *at = out + (uint64_t)k * stride;
            if (bytes)
                n->calls[n->n_calls++] = (ms_gpu_call) { .op = MS_DIST_BROADCAST,
                                                         .dtype = MS_U8,
                                                         .root = k,
                                                         .count = bytes,
                                                         .in = k == me ? in : at,
                                                         .out = at };
        }
    }
    return MS_OK;
}

static ms_status other_calls(ms_coll *c, nccl_coll *n)
{
    int members = c->g->n, me = c->g->me, dtype = c->reducer.dtype, reduction = c->reducer.reduction;
    if (!(n->calls = calloc(1, sizeof *n->calls))) return ms__no_memory(sizeof *n->calls, ROW(c->op)->name, "a call");
    n->n_calls = c->count > 0;
    ms_gpu_call *call = n->calls;
    *call = (ms_gpu_call) { .op = c->op,
                            .dtype = dtype,
                            .reduction = reduction,
                            .root = c->root < 0 ? 0 : c->root,
                            .count = c->count,
                            .in = c->in.data ? c->in.data : c->out.data,
                            .out = c->out.data };
    if (!reduces(c->op) || c->count == 0) return MS_OK;
    ms_cuda_finish *after = &n->after;
    *after = (ms_cuda_finish) { .dst = c->out.data,
                                .src = c->out.data,
                                .dst_dtype = dtype,
                                .src_dtype = dtype,
                                .n = (int64_t)c->count,
                                .divisor = 1,
                                .scale = c->reducer.scale };
    bool adds = reduction == MS_SUM || reduction == MS_AVG || reduction == MS_PROD, wide = ms__is_half(dtype) && adds;
    if (reduction == MS_AVG && !(wide && c->reducer.narrow)) {
        call->reduction = MS_SUM;
        after->divisor = members;
    }
    if (wide && !c->reducer.narrow) {
        size_t blocks = c->op == MS_DIST_REDUCE_SCATTER ? (size_t)members : 1, all = blocks * c->count;
        MS_TRY(device_room(&n->wide, all * sizeof(float), c));
        char *to = n->wide->data;
        n->before = (ms_cuda_finish) { .dst = to,
                                       .src = call->in,
                                       .dst_dtype = MS_F32,
                                       .src_dtype = dtype,
                                       .n = (int64_t)all,
                                       .divisor = 1,
                                       .scale = 1 };
        call->dtype = after->src_dtype = MS_F32;
        call->in = to;
        call->out = to + (blocks > 1 ? (size_t)me * c->count * sizeof(float) : 0);
        after->src = call->out;
    } else if (!ms__is_float(dtype) || (after->divisor == 1 && after->scale == 1)) {
        after->n = 0;
    }
    if (c->op == MS_DIST_REDUCE && c->root != me) after->n = 0;
    return MS_OK;
}

static ms_status nccl_prepare(ms_coll *c)
{
    if (!is_for_library(c)) return MS_OK;
    MS_TRY(ms__coll_sync(c));
    nccl_coll *n = calloc(1, sizeof *n);
    if (!n) return ms__no_memory(sizeof *n, ROW(c->op)->name, "a collective on a GPU");
    c->mover = &ms__mover_nccl;
    c->prepared = n;
    c->final = true;
    c->fingerprint.native = 1;
    c->fingerprint.agreed = ms__hash_value(c->fingerprint.agreed, 1);  // the hash leaves out `native`
    if (c->inline_) ms__coll_not_inline(c);
    return c->op == MS_DIST_ALL_GATHER ? gather_calls(c, n) : other_calls(c, n);
}

static ms_status nccl_ready(ms_coll *c)
{
    ms__note_queued(nccl.device, ROW(c->op)->name);
    return ms__cuda()->record(ms__index(nccl.device), MS_STREAM_COMPUTE, &coll_calls(c)->ready);
}

static void nccl_drop(ms_coll *c)
{
    nccl_coll *n = c->prepared;
    step_out(c);
    if (n->ready) ms__cuda()->drop(n->ready);
    if (n->wide) ms__storage_release(n->wide);
    if (n->whole) ms__storage_release(n->whole);
    free(n->calls);
    free(n);
    c->prepared = NULL;
}

// ---- running collectives ---------------------------------------------------------------------------

// This rank alone cannot complete the collective, for the reason in `why`. Its peers may have queued it and cannot
// complete it either, so the job ends.
static ms_status fail_collective(ms_waiter *w, const char *why)
{
    ms_coll *c = w->c;
    char text[WHY];
    snprintf(text, sizeof text, "%s", why);
    ms__coll_fail(c, text);
    ms__coll_failed(c, MS_ECOMM);
    if (ms__is_broken(c->g, c->epoch)) (void)ms__broken_fail(c);  // this rank, too, raises the text that names it
    nccl_library()->abort(c->g->communicator);
    return ms__fail_job(MS_ECOMM, -1);
}

// Tells the peers when this rank's GPU has reached the collective: a report names the ranks whose GPUs have not.
static void tell_reached(const ms_coll *c)
{
    ms_slot *s = own_slot(c);
    if (atomic_load_explicit(&s->reached, memory_order_relaxed) < c->number && ms__cuda()->done(coll_calls(c)->ready))
        atomic_store_explicit(&s->reached, c->number, memory_order_release);
}

// Waits a little. Fails if the collective cannot be completed.
static ms_status pause_in(ms_waiter *w)
{
    ms_coll *c = w->c;
    tell_reached(c);
    ms_status st = ms__wait_poll(w);
    if (st == MS_OK && MS_UNLIKELY(ms__comm_is_lost(c->g, c->epoch))) st = ms__broken_fail(c);
    if (st != MS_OK) nccl_library()->abort(c->g->communicator);
    return st;
}

// Handles a result of the library. Returns MS_OK for MS_GPU_DONE, and for MS_GPU_BUSY after a pause: the caller then
// polls the library again. MS_GPU_PEER: the failed peer gets time to report its error first.
static ms_status handle_result(ms_waiter *w, ms_gpu_result r, const char *text)
{
    if (r == MS_GPU_DONE) return MS_OK;
    if (r == MS_GPU_FAILED) return fail_collective(w, text);
    if (r == MS_GPU_BUSY) return pause_in(w);
    for (int64_t until = ms__now_ns() + EXPLAINED; ms__now_ns() < until;) MS_TRY(pause_in(w));
    return fail_collective(w, text);
}

// Copies to the output the blocks of pieces that are not contiguous there (ms_piece.line).
static ms_status place_lines(ms_coll *c)
{
    const char *from = coll_calls(c)->whole->data;
    for (int i = 0; i < c->n_pieces; i++) {
        const ms_piece *p = &c->pieces[i];
        for (int k = 0; p->line && k < c->g->n; k++, from += p->bytes) {
            char *to = c->out.data + p->out_offset + (uint64_t)k * p->out_stride;
            size_t bytes = ms__piece_bytes(p, k);
            for (size_t at = 0, row = 0; at < bytes; at += p->line, row++)
                MS_TRY(ms__cuda()->copy(ms__index(nccl.device), c->stream, to + row * p->out_line, from + at,
                                        p->line < bytes - at ? (size_t)p->line : bytes - at, MS_ON_DEVICE));
        }
    }
    return MS_OK;
}

static ms_status queue_calls(ms_waiter *w, void **end)
{
    ms_coll *c = w->c;
    nccl_coll *n = c->prepared;
    const ms_cuda_table *t = ms__cuda();
    int index = ms__index(nccl.device);
    char text[WHY] = "";
    void *stream = t->ranks.native_stream(index, c->stream);
    ms_status st = stream ? t->stream_wait(index, c->stream, n->ready) : ms__failure();
    if (st == MS_OK && n->before.n) st = t->ranks.finish(index, c->stream, &n->before);
    if (st != MS_OK) return fail_collective(w, ms_error());
    if (n->n_calls) {
        ms_gpu_result r = nccl_library()->queue(c->g->communicator, n->n_calls, n->calls, stream, text, sizeof text);
        while (r != MS_GPU_DONE) {
            MS_TRY(handle_result(w, r, text));
            r = nccl_library()->poll(c->g->communicator, text, sizeof text);
        }
    }
    if (n->after.n) st = t->ranks.finish(index, c->stream, &n->after);
    if (st == MS_OK && n->n_lines) st = place_lines(c);
    if (st == MS_OK) st = t->record(index, c->stream, end);
    return st == MS_OK ? MS_OK : fail_collective(w, ms_error());
}

static ms_status nccl_move(ms_waiter *w)
{
    ms_coll *c = w->c;
    char text[WHY] = "";
    void *end = NULL;
    ms__wait_moved(w);
    while (!is_first(c)) MS_TRY(pause_in(w));
    ms_status st = queue_calls(w, &end);
    step_out(c);
    MS_TRY(st);
    int reached;
    while ((reached = ms__cuda()->done(end)) == 0 && st == MS_OK) {
        ms_gpu_result r = nccl_library()->poll(c->g->communicator, text, sizeof text);
        st = r == MS_GPU_DONE ? pause_in(w) : handle_result(w, r, text);
    }
    if (reached < 0 && st == MS_OK) st = fail_collective(w, ms_error());
    if (st == MS_OK) {  // after a peer has aborted the communicator, `end` completes although the data is incomplete
        ms_gpu_result r = nccl_library()->poll(c->g->communicator, text, sizeof text);
        if (r != MS_GPU_DONE) st = handle_result(w, r, text);
    }
    ms__cuda()->drop(end);
    return st;
}

// Peers access only what the library has copied.
static ms_status nccl_finish(ms_waiter *w, ms_status moved)
{
    ms_coll *c = w->c;
    if (moved == MS_OK) set_done(c);
    return moved;
}

static ms_status nccl_serves(ms_waiter *w, bool *yes)
{
    (void)w;
    *yes = true;
    return MS_OK;
}

// A collective that has failed is not queued any more.
static ms_status nccl_leave(ms_coll *c, ms_status status)
{
    step_out(c);
    return status;
}

const ms_mover ms__mover_nccl = { .name = "nccl",
                                  .prepare = nccl_prepare,
                                  .ready = nccl_ready,
                                  .enter = line_up,
                                  .serves = nccl_serves,
                                  .move = nccl_move,
                                  .finish = nccl_finish,
                                  .leave = nccl_leave,
                                  .drop = nccl_drop,
                                  .open = nccl_open,
                                  .join = nccl_join,
                                  .part = nccl_part };
