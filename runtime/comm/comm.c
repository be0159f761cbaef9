// SPDX-License-Identifier: MIT
// comm/comm.c -- groups, issuing of collectives, works. comm/request.c makes the collectives.
//
// A collective gets its number when it is issued. Synchronous collectives run on the calling thread, others on the
// workers of the gather, reduce and copy streams; these poll independently, so none delays another. Only the engine
// thread changes reference counts: it takes references when it issues a collective and drops them when it retires the
// collective's record (device/stream.h).
#include <stdio.h>
#include "comm/internal.h"
#include "device/capture.h"
#include "base/trace.h"
#include "base/watched.h"

struct ms_work {
    int refs;
    ms_pending *event;
};

enum { WORLD, SELF, MEETING, FIRST_MADE };  // ids of groups; dist.new_group makes the groups from FIRST_MADE on
static ms_group *world_group, *self_group;
ms_group *ms__meeting;
static double next_group = FIRST_MADE;
static double delays[OPS];

// ---- groups ---------------------------------------------------------------------------------------

static ms_group *group_new(double id, int n, const int *ranks)
{
    ms_group *g = calloc(1, sizeof *g);
    int *copy = malloc((size_t)n * sizeof *copy);
    if (!g || !copy) {
        free(g);
        free(copy);
        ms__no_memory(sizeof *g + (size_t)n * sizeof *copy, "dist", "a group of %d ranks", n);
        return NULL;
    }
    g->id = id;
    g->n = n;
    g->me = -1;
    g->ranks = copy;
    for (int k = 0; k < n; k++) {
        copy[k] = ranks ? ranks[k] : k;
        if (copy[k] == ms__world.rank) g->me = k;
    }
    return g;
}

static void group_drop(ms_group *g)
{
    free(g->ranks);
    free(g);
}

static ms_status make_meeting(void)
{
    if (!(ms__meeting = group_new(MEETING, ms__world.size, NULL))) return MS_ENOMEM;
    return ms__group_place(ms__meeting);
}

static ms_status make_groups(void)
{
    if (world_group) {
        // Before dist.init the world group is this process alone. Units may hold it, so the same object becomes the
        // group of all ranks.
        if (world_group->n == ms__world.size) return MS_OK;
        ms_group *g = group_new(WORLD, ms__world.size, NULL);
        if (!g) return MS_ENOMEM;
        *world_group = *g;
        free(g);
        self_group->ranks[0] = ms__world.rank;
        MS_TRY(ms__group_place(world_group));
        return make_meeting();
    }
    int me = ms__world.rank;
    if (!self_group) self_group = group_new(SELF, 1, &me);
    ms_group *world = self_group ? group_new(WORLD, ms__world.size, NULL) : NULL;
    if (!world) return MS_ENOMEM;
    world_group = world;
    MS_TRY(ms__group_place(world_group));
    return ms__world.up ? make_meeting() : MS_OK;
}

ms_group *ms__group_world(void)
{
    if (!world_group) make_groups();
    return world_group;
}

static ms_group **other_groups;  // made by new_group, in ascending order of id
static int n_others, cap_others;

// The index in other_groups of the first group whose id is not below `id`.
static int place_of(double id)
{
    int from = 0, to = n_others;
    while (from < to) {
        int k = from + (to - from) / 2;
        if (other_groups[k]->id < id) from = k + 1;
        else to = k;
    }
    return from;
}

ms_group *ms__group_by_id(double id)
{
    if (id == WORLD) return ms__group_world();
    if (id == SELF) {
        ms__group_world();
        return self_group;
    }
    int k = place_of(id);
    if (k < n_others && other_groups[k]->id == id) return other_groups[k];
    ms__fail(MS_EINVAL,
             id >= FIRST_MADE && id < next_group ? "dist: this group was freed by dist.free_group"
                                                 : "dist: there is no group %g",
             id);
    return NULL;
}

ms_group *ms__group_hold(ms_group *g)
{
    if (g) g->holders++;
    return g;
}

void ms__group_release(ms_group *g)
{
    if (g && --g->holders == 0 && g->freed) group_drop(g);
}

int ms__group_rank(const ms_group *g) { return g->me; }
int ms__group_size(const ms_group *g) { return g->n; }
bool ms__group_near(const ms_group *g) { return !g->far; }
bool ms__group_maps(const ms_group *g) { return !g->far && !g->gpu; }
bool ms__group_stays(const ms_group *g) { return !g->far || g->gpu; }

// ---- start ----------------------------------------------------------------------------------------

ms_status ms_dist_init(const char *backend, double timeout)
{
    if (!(timeout >= 0))
        return ms__fail(MS_EINVAL, "dist.init: timeout is %g, expected a number of seconds, 0 (unchanged) or more",
                        timeout);
    bool was = ms__world.up;
    MS_TRY(ms__comm_start(backend, timeout));
    if (timeout > 0) ms__world.timeout = timeout;
    if (was) return MS_OK;
    MS_TRY(make_groups());
    return ms__native_start(world_group);
}

int ms_dist_is_initialized(void) { return ms__world.up; }
void ms_dist_finalize(void)
{
    ms__streams_drain();
    ms__gpu_stop();
    ms__comm_stop();
}
const char *ms_dist_backend(void) { return ms__world.transport->name; }
int ms_dist_local_rank(void) { return ms__world.local_rank; }

int ms_dist_rank(double group)
{
    ms_group *g = ms__group_by_id(group);
    return g ? g->me : -2;
}

int ms_dist_size(double group)
{
    ms_group *g = ms__group_by_id(group);
    return g ? g->n : -2;
}

int ms_dist_member(double group, int k)
{
    ms_group *g = ms__group_by_id(group);
    return g && k >= 0 && k < g->n ? g->ranks[k] : -1;
}

void ms_dist_set_timeout(double seconds)
{
    if (seconds > 0) ms__world.timeout = seconds;
}
void ms_dist_set_step(double step)
{
    ms__world.step = (int64_t)step;
    ms__trace_step(ms__world.step);
}

void ms_dist_set_delay(int op, double seconds)
{
    for (int k = 0; k < OPS; k++)
        if (op < 0 || op == k) delays[k] = seconds;
}
ms_status ms_dist_measure_clock(void) { return ms__world.nodes > 1 ? ms__clock_measure() : MS_OK; }
void ms_dist_take_clock(void) { ms__clock_take(); }

ms_status ms_dist_mpi_own(int op, void *out, const void *in, double count)
{
    if (!ms__world.transport->own)
        return ms__fail(MS_EUNSUPPORTED,
                        "ms_dist_mpi_own: this process is not a rank of an MPI job; use mpirun or srun");
    ms__transport_lock();
    int rc = ms__world.transport->own(op, out, in, (size_t)count);
    ms__transport_unlock();
    return rc == 0 ? MS_OK : ms__fail(MS_ECOMM, "ms_dist_mpi_own: MPI failed with error code %d", rc);
}

// ---- works ----------------------------------------------------------------------------------------

ms_pending *ms__work_event(const ms_work *w) { return w ? w->event : NULL; }
ms_status ms_work_wait(ms_work *w) { return w ? ms__event_wait(w->event) : MS_OK; }
int ms_work_done(ms_work *w) { return !w || ms__event_reached(w->event); }
void ms_work_free(ms_work *w)
{
    if (!w || --w->refs > 0) return;
    ms__event_unhold(w->event);
    ms__event_release(w->event);
    free(w);
}

// ---- issuing --------------------------------------------------------------------------------------

static ms_coll *spare;

ms_coll *ms__coll_new(int op)
{
    ms_coll *c = spare;
    if (c) spare = *(ms_coll **)c;
    else if (!(c = malloc(sizeof *c))) return ms__null(ms__no_memory(sizeof *c, ROW(op)->name, "a collective"));
    memset(c, 0, sizeof *c);
    return c;
}

void ms__coll_drop(ms_coll *c)
{
    if (c->gpu.stage) ms__coll_stage_drop(c);
    if (c->gpu.native) ms__native_drop(c);
    if (c->gpu.there) ms__gpu_drop(c);
    ms__release(c->keep[0]);
    ms__release(c->keep[1]);
    if (c->in.storage) ms__storage_release(c->in.storage);
    if (c->out.storage) ms__storage_release(c->out.storage);
    free(c->pieces);
    for (int i = 0; i < c->n_parts; i++) ms__release(c->parts[i].t);
    free(c->parts);
    if (!MS_RECYCLE) {
        free(c);
        return;
    }
    *(ms_coll **)c = spare;
    spare = c;
}

// Runs c. If its tensors were copied from a GPU to CPU memory, copies the output back afterwards.
static ms_status run(ms_coll *c)
{
    ms_status status = ms__coll_run(c);
    return status == MS_OK && c->gpu.stage ? ms__coll_unstage(c) : status;
}
static ms_status run_record(void *arg) { return run(*(ms_coll **)arg); }
static void retire_record(void *arg, ms_status result)
{
    ms_coll *c = *(ms_coll **)arg;
    c->g->in_flight--;
    if (result != MS_OK) c->g->told = c->epoch + 1;  // the script receives the error when it waits for c
    ms__coll_drop(c);
}

// Retains c's storages while c is queued.
static void attach(ms_coll *c)
{
    if (c->in.storage) ms__storage_retain(c->in.storage);
    if (c->out.storage) ms__storage_retain(c->out.storage);
}

// On the compute stream: waits until c may read its input and write its output.
static ms_status sync_storages(ms_coll *c)
{
    if (c->in.storage) MS_TRY(ms__storage_sync(c->in.storage, false));
    for (int i = 0; i < c->n_parts; i++) MS_TRY(ms__storage_sync(c->parts[i].t->storage, false));
    return c->out.storage ? ms__storage_sync(c->out.storage, true) : MS_OK;
}

// Makes c wait for e, the event of earlier work on one of c's storages. If c's tensors stay on a GPU, e may be done
// when the earlier work is only queued there. Work queued on c's own stream runs before c in any case. For other work
// ms__event_wait makes the compute stream wait for that work, and c waits for the compute stream.
static ms_status order_event(const ms_coll *c, ms_pending *e)
{
    if (c->gpu.there && !ms__event_on(e, c->stream)) return ms__event_wait(e);
    return ms__stream_wait(ms__stream(MS_CPU, c->stream), e);
}

static ms_status order_storage(const ms_coll *c, ms_storage *st, bool write)
{
    if (st->vacated) return ms__storage_sync(st, write);  // fails, with a message that names the sharded parameter
    MS_TRY(order_event(c, st->event));
    // A reader also waits for earlier readers: the storage keeps one event of readers, which must cover all of them.
    // One on the CPU that has ended needs no wait; if it has failed, that does not concern c.
    if (!c->gpu.there && ms__event_done(st->readers)) return MS_OK;
    return order_event(c, st->readers);
}

static void mark_storage(ms_storage *st, ms_pending *e, bool write)
{
    ms_pending **at = write ? &st->event : &st->readers;
    ms__event_release(*at);
    *at = ms__event_retain(e);
}

uint64_t ms__comm_issued;

// Gives c the next number of its group.
static void take_number(ms_coll *c)
{
    ms_group *g = c->g;
    ms__comm_issued++;
    c->epoch = ms__comm_epoch();
    if (g->epoch != c->epoch) {
        g->epoch = c->epoch;
        g->seq = g->refused = 0;
    }
    c->seq = g->seq++;
    c->number = (c->epoch << 32) + c->seq + 1;
    c->before = g->issued[c->seq % RING];
    g->issued[c->seq % RING] = c->number;
    g->refused += c->op == OP_REFUSED;
    c->fingerprint.refused = g->refused;
    c->hash = ms__fingerprint_hash(&c->fingerprint, c->op != OP_SEND_RECV);
    c->delay = delays[c->op];
    c->lines = atomic_load_explicit(&ms__world.board->rank[ms__world.rank].lines, memory_order_relaxed);
    g->heads[g->me].executor[c->seq % RING] = (uint8_t)c->stream;
    atomic_store_explicit(&g->heads[g->me].issued, c->number, memory_order_release);
    ms_waiting *last = &ms__world.board->rank[ms__world.rank].last;
    last->group = g->id;
    last->number = c->number;
    last->fingerprint = c->fingerprint;
    if (c->gpu.native) ms__native_line_up(c);
}

// Called when a collective that has a number cannot be run: breaks the group, and lets a later collective use its
// slots.
static void lost(ms_coll *c)
{
    c->g->issued[c->seq % RING] = c->before;
    ms__break_by_me(c->g, c->epoch, ms_error());
}

ms_status ms__coll_issue(ms_coll *c, ms_work **work)
{
    ms_group *g = c->g;
    ms_status status = MS_OK;
    ms_storage *marked = NULL;
    if (work) *work = NULL;
    ms__stream_reap();
    if (MS_UNLIKELY(ms__capturing != NULL)) {
        status = ms__capture_refuse("%s: this collective cannot be captured", ms__request_name(&c->fingerprint));
        goto drop;
    }
    if (g->freed) {
        status = ms__fail(MS_EINVAL, "%s: this group was freed by dist.free_group", ms__request_name(&c->fingerprint));
        goto drop;
    }
    if (g->me < 0) {
        status = ms__fail(MS_EINVAL, "%s: rank %d is not a member of this group", ms__request_name(&c->fingerprint),
                          ms__world.rank);
        goto drop;
    }
    if (g->n == 1) {
        status = sync_storages(c);
        if (status == MS_OK) status = ms__record_collective(c);
        if (status == MS_OK && ms__coll_on_device(c))
            status = ms__coll_alone_there(c, c->in.storage ? c->in.storage->device : MS_CPU,
                                          c->out.storage ? c->out.storage->device : MS_CPU);
        else if (status == MS_OK) status = ms__coll_alone(c);
        goto drop;
    }
    if (ms__comm_stopped()) {
        status = ms__fail(MS_ESTATE, "%s: dist.finalize has already been called", ms__request_name(&c->fingerprint));
        goto drop;
    }
    if ((status = ms__group_whole(g, ms__request_name(&c->fingerprint))) != MS_OK) goto drop;
    if (ms__coll_on_device(c)) {
        if (c->gpu.native) {
            status = sync_storages(c);
            if (status == MS_OK) status = ms__native_issue(c);
        } else {
            status = ms__gpu_take(c);
            if (status == MS_OK && !c->gpu.there) status = sync_storages(c);
            if (status == MS_OK && !c->gpu.there) status = ms__coll_stage(c, &marked);
        }
        if (status != MS_OK) goto drop;
    }
    if (c->stream == MS_STREAM_COMPUTE) {
        status = sync_storages(c);
    } else {
        if (c->in.storage) status = order_storage(c, c->in.storage, false);
        for (int i = 0; i < c->n_parts && status == MS_OK; i++)
            status = order_storage(c, c->parts[i].t->storage, false);
        if (status == MS_OK && c->out.storage) status = order_storage(c, c->out.storage, true);
    }
    if (status == MS_OK && c->gpu.there) status = ms__gpu_begin(c);
    if (status != MS_OK) goto drop;

    take_number(c);
    if ((status = ms__record_collective(c)) != MS_OK) {
        lost(c);
        goto drop;
    }
    if (c->stream == MS_STREAM_COMPUTE) {
        if ((status = run(c)) != MS_OK) {
            if (status == MS_EINTR) ms__fail(status, "interrupted (Ctrl-C)");
            ms__group_received(g);
        }
        goto drop;
    }
    // c retains its storages until it is retired; later users of the storages wait for its event.
    ms_storage *in = c->in.storage, *out = c->out.storage, *parts[MS_PARTS];
    int n_parts = c->n_parts;
    for (int i = 0; i < n_parts; i++) parts[i] = c->parts[i].t->storage;
    attach(c);
    ms_pending *event = NULL;
    status = ms__launch(ms__stream(MS_CPU, c->stream), run_record, retire_record, &c, sizeof c, &event);
    if (status != MS_OK) {
        lost(c);
        ms__coll_drop(c);
        return status;
    }
    g->in_flight++;
    if (in) mark_storage(in, event, false);
    for (int i = 0; i < n_parts; i++) mark_storage(parts[i], event, false);
    if (out) mark_storage(out, event, true);
    if (marked) mark_storage(marked, event, true);
    ms_work *w = work ? malloc(sizeof *w) : NULL;
    if (w) {
        *w = (ms_work) { .refs = 1, .event = event };
        ms__event_hold(event);
        *work = w;
    } else {
        if (work) status = ms__event_wait(event);  // there is no memory for a work: wait here
        ms__event_release(event);
    }
    return status;
drop:
    c->in.storage = c->out.storage = NULL;  // c has not retained them
    ms__coll_drop(c);
    return status;
}

// ---- members ----------------------------------------------------------------------------------------

int ms__group_member(const ms_group *g, int rank)
{
    for (int k = 0; k < g->n; k++)
        if (g->ranks[k] == rank) return k;
    return -1;
}

// A barrier of the world. Fails on all ranks unless all pass the same `group`, a hash.
static ms_status agree_on_group(uint64_t group, const char *site, const char *text)
{
    return ms__collective(&(ms_request) { .group = ms__group_world(),
                                          .op = OP_BARRIER,
                                          .agreed = group,
                                          .label = { .unit = text, .site = site } },
                          NULL);
}

static int ascending(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

double ms_dist_new_group(int n, const int32_t *ranks, const char *site)
{
    ms_group *world = ms__group_world();
    if (!world) return -1;
    if (n < 1 || n > world->n) {
        ms__fail(MS_EINVAL, "dist.new_group: %d ranks given, expected 1 to %d, the size of the world", n, world->n);
        return -1;
    }
    if (ms__grow(&other_groups, &cap_others, n_others, sizeof *other_groups, "dist.new_group", "groups")) return -1;
    int *sorted = malloc((size_t)n * sizeof *sorted);
    if (!sorted) {
        ms__no_memory((size_t)n * sizeof *sorted, "dist.new_group", "%d ranks", n);
        return -1;
    }
    for (int k = 0; k < n; k++) sorted[k] = ranks[k];
    qsort(sorted, (size_t)n, sizeof *sorted, ascending);
    char text[UNIT_NAME] = "new_group";
    uint64_t hash = MS_HASH_START;
    ms_status status = MS_OK;
    for (int k = 0; k < n && status == MS_OK; k++) {
        if (sorted[k] < 0 || sorted[k] >= world->n)
            status = ms__fail(MS_EINVAL, "dist.new_group: rank %d is not in the world of %d rank%s", sorted[k],
                              world->n, world->n == 1 ? "" : "s");
        else if (k && sorted[k] == sorted[k - 1])
            status = ms__fail(MS_EINVAL, "dist.new_group: rank %d is listed twice", sorted[k]);
        hash = ms__hash_value(hash, (uint64_t)sorted[k]);
        ms__append(text, sizeof text, k ? ", %d" : " %d", sorted[k]);
    }
    ms_group *g = status == MS_OK ? group_new(next_group, n, sorted) : NULL;
    free(sorted);
    if (!g) return -1;
    if (ms__group_place(g) != MS_OK) {
        group_drop(g);
        return -1;
    }
    // All ranks must pass the same list; otherwise all get an error. From here on nothing may fail on one rank alone,
    // because groups must have the same places in the control memory on all ranks.
    if (agree_on_group(hash ^ g->place, site, text) != MS_OK || ms__native_split(g) != MS_OK) {
        ms__group_unplace(g, false);
        group_drop(g);
        return -1;
    }
    g->epoch = ms__comm_epoch();
    other_groups[n_others++] = g;
    return next_group++;
}

// Waits until all queued collectives of g have been retired: afterwards no worker accesses g, and the works of these
// collectives are complete.
static ms_status finish_group(ms_group *g)
{
    ms_status status = MS_OK;
    // ms__streams_join also frees collectives that have run on a GPU and that the script has not waited for. Otherwise
    // in_flight would never reach 0.
    for (ms__streams_join(); g->in_flight > 0 && status == MS_OK; ms__streams_join()) {
        for (int k = 0; k < RING; k++)
            // Tells checks for deadlocks which queue this rank waits for.
            if (atomic_load(&g->finished[k]) < g->issued[k])
                atomic_store(ms__engine_waits, g->heads[g->me].executor[k]);
        ms__nap(100 * 1000);
        status = ms__check_interrupt();
    }
    atomic_store(ms__engine_waits, -1);
    return status;
}

ms_status ms_dist_free_group(double id, const char *site)
{
    if (id == WORLD || id == SELF)
        return ms__fail(MS_EINVAL, "dist.free_group: the group of %s was not made by dist.new_group",
                        id == WORLD ? "all ranks" : "this rank alone");
    ms_group *g = ms__group_by_id(id);
    if (!g) return MS_EINVAL;
    char text[UNIT_NAME];
    snprintf(text, sizeof text, "free_group of group %.0f (ranks",
             id);  // the id distinguishes groups of the same ranks
    for (int k = 0; k < g->n; k++) ms__append(text, sizeof text, k ? ", %d" : " %d", g->ranks[k]);
    ms__append(text, sizeof text, ")");
    if (g->n > 1) MS_TRY(finish_group(g));
    MS_TRY(agree_on_group((uint64_t)id ^ g->place << 20, site, text));
    MS_TRY(ms__native_leave(g));
    ms__gpu_forget_group(g);
    int k = place_of(id);
    memmove(&other_groups[k], &other_groups[k + 1], (size_t)(--n_others - k) * sizeof *other_groups);
    ms__group_unplace(g, true);
    g->freed = true;
    if (g->holders == 0) group_drop(g);
    return MS_OK;
}
