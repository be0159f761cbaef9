// SPDX-License-Identifier: MIT
// comm/movers/gpu/memory.c -- memory and events of GPUs that the ranks of a node share.
//
// A rank lists its GPU memory and its events in a *directory*, a block of CPU memory that peers map like any other. The
// memory is listed as arenas, the driver's allocations from which the pool cuts its blocks: few, and long-lived. Peers
// map an arena at its first use and keep it mapped; a listed arena is not returned to the driver.
//
// A collective takes two events from a list, and gives them back when no stream of a peer can be made to wait for them
// any more (ms_slot.left).
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>
#include "comm/movers/gpu/memory.h"
#include "device/device.h"
#include "device/gpu_pool.h"
#include "device/move.h"
#include "comm/memory/arena.h"
#include "comm/memory/board.h"
#include "comm/movers/gpu/fd.h"

enum { LISTED = 4096, WORDS = 4 };
typedef struct {
    uint8_t handle[MS_CUDA_HANDLE];
    uint64_t bytes;  // size of the arena if peers map it by a file descriptor (fd.c); 0: they map it by `handle`
    // A bit per rank of the node. mapped: the rank has mapped this arena; refused: it has failed to map it
    _Atomic uint64_t mapped[WORDS], refused[WORDS];
} listed;
typedef struct {
    listed arena[LISTED];
    uint8_t event[GPU_EVENTS][MS_CUDA_HANDLE];
} directory;

// ---- memory and events of this rank, used by the engine thread ----

typedef _Atomic(char *) base_entry;

typedef enum { EVENT_FREE, EVENT_TAKEN, EVENT_LEAVING } event_state;
typedef struct {
    void *event;
    int index;
    event_state state;
    ms_event_use used;  // EVENT_LEAVING: the collective that used the event
} own_event;
static struct {
    directory *listed;
    ms_storage *listed_in;
    atomic_bool unshared;  // this rank cannot share GPU memory: its tensors are staged
    base_entry bases[LISTED];
    int n_bases;
    own_event events[GPU_EVENTS];
    int n_events;
} own;

// ---- memory and events of peers, used by all threads under the lock ----

typedef struct {
    directory *there;
    // Addresses of the peer's arenas in this process, by device of this rank and by arena
    char **base[MS_CUDA_DEVICES];
    void *event[GPU_EVENTS];
} peer;
static struct {
    peer **list;  // indexed by world rank
    pthread_mutex_t lock;
} of_peers = { .lock = PTHREAD_MUTEX_INITIALIZER };

static int own_bit(void) { return ms__world.local_of[ms__world.rank]; }

static bool has_bit(const _Atomic uint64_t *words, int bit)
{
    return atomic_load_explicit(&words[bit / 64], memory_order_acquire) >> (bit % 64) & 1;
}

static void stop_sharing(const char *why)
{
    own.unshared = true;
    fprintf(stderr, "moonshard: rank %d: collectives of tensors on cuda go through CPU memory: %s\n", ms__world.rank,
            why);
}

void ms__gpu_share_no_more(void) { own.unshared = true; }

// An exit handler. Waits before GPU memory is released, because peers may still read it in collectives that the script
// did not wait for. It is registered after the CUDA runtime's own exit handler, so it runs before that one.
static void wait_at_exit(int code, void *pid)
{
    if (code != 0 || getpid() != (pid_t)(intptr_t)pid || ms__world.stopped) return;
    ms__streams_drain();
    ms__gpu_stop();
}

bool ms__gpu_shares(void)
{
    uint32_t arena;
    uint64_t at;
    if (own.listed || own.unshared) return !own.unshared;
    if (ms__world.local_size > 64 * WORDS) {
        stop_sharing("more than 256 ranks are on this node");
        return false;
    }
    if (ms__storage_new(&own.listed_in, MS_CPU, sizeof *own.listed, "dist: shared memory of GPUs")) return false;
    if (!ms__comm_locate(own.listed_in, own.listed_in->data, &arena, &at)) {
        stop_sharing("the ranks of this node cannot map each other's memory");
        ms__storage_release(own.listed_in);
        return false;
    }
    own.listed = own.listed_in->data;
    on_exit(wait_at_exit, (void *)(intptr_t)getpid());
    ms_board_rank *me = &ms__world.board->rank[ms__world.rank];
    me->gpu_at = at;
    atomic_store_explicit(&me->gpu_arena, arena, memory_order_release);
    return true;
}

static char *base_of(uint32_t arena)
{
    return arena > 0 && arena <= LISTED ? atomic_load(&own.bases[arena - 1]) : NULL;
}

// Fills *a, by which peers map the driver's allocation at `base`.
static ms_status list_arena(listed *a, char *base)
{
    int fd;
    size_t bytes;
    memset(a, 0, sizeof *a);
    MS_TRY(ms__cuda()->ranks.to_fd(base, &fd, &bytes));
    if (fd < 0) return ms__cuda()->share(base, a->handle);
    close(fd);
    a->bytes = bytes;
    return ms__gpu_fd_serve(base_of);
}

bool ms__gpu_place(ms_storage *s, const void *p, ms_gpu_place *out)
{
    *out = (ms_gpu_place) { 0 };
    const ms_block *b = s ? ms__owner_of(s->block) : NULL;
    if (!b || !ms__gpu_shares()) return false;
    char *base = ms__device_base(b);
    if (!base) return false;
    int k = own.n_bases;
    while (k > 0 && own.bases[k - 1] != base) k--;
    if (k == 0) {
        if (own.n_bases == LISTED) {
            stop_sharing("this rank's GPU memory consists of more than 4096 allocations of the driver");
            return false;
        }
        if (list_arena(&own.listed->arena[own.n_bases], base)) {
            stop_sharing(ms_error());
            return false;
        }
        if (ms__gpu_keep(base)) return false;
        atomic_store(&own.bases[own.n_bases++], base);
        k = own.n_bases;
    }
    out->arena = (uint32_t)k;
    out->at = (uint64_t)((const char *)p - base);
    return true;
}

int ms__gpu_mapped(uint32_t arena, int rank)
{
    const listed *a = &own.listed->arena[arena - 1];
    int bit = ms__world.local_of[rank];
    return has_bit(a->refused, bit) ? -1 : has_bit(a->mapped, bit);
}

// ---- memory of peers ----

static ms_status open_peer(peer **out, int rank)
{
    const ms_board_rank *r = &ms__world.board->rank[rank];
    if (!of_peers.list && !(of_peers.list = calloc((size_t)ms__world.size, sizeof *of_peers.list)))
        return ms__no_memory((size_t)ms__world.size * sizeof *of_peers.list, "dist", "the GPU memory of peers");
    if (!of_peers.list[rank]) {
        peer *p = calloc(1, sizeof *p);
        if (!p) return ms__no_memory(sizeof *p, "dist", "the GPU memory of rank %d", rank);
        uint32_t arena = atomic_load_explicit(&r->gpu_arena, memory_order_acquire);
        if (!(p->there = (directory *)(void *)ms__comm_resolve(rank, arena, r->gpu_at))) {
            free(p);
            return ms__failure();
        }
        of_peers.list[rank] = p;
    }
    *out = of_peers.list[rank];
    return MS_OK;
}

typedef struct {
    int rank;
    uint32_t arena;
} peers_arena;

static ms_status open_arena(void **out, const listed *a, int index, peers_arena which)
{
    int fd;
    if (!a->bytes) return ms__cuda()->open(index, a->handle, out);
    MS_TRY(ms__gpu_fd_fetch(which.rank, which.arena, &fd));
    ms_status st = ms__cuda()->ranks.from_fd(index, fd, (size_t)a->bytes, out);
    close(fd);
    return st;
}

static ms_status map_arena_of(char **out, int index, int rank, uint32_t arena)
{
    peer *p = NULL;
    void *base;
    MS_TRY(open_peer(&p, rank));
    if (!p->base[index] && !(p->base[index] = calloc(LISTED, sizeof **p->base)))
        return ms__no_memory(LISTED * sizeof **p->base, "dist", "the addresses of GPU memory");
    listed *a = &p->there->arena[arena - 1];
    if (!(*out = p->base[index][arena - 1])) {
        if (open_arena(&base, a, index, (peers_arena) { rank, arena })) {
            atomic_fetch_or(&a->refused[own_bit() / 64], (uint64_t)1 << own_bit() % 64);
            return ms__failure();
        }
        *out = p->base[index][arena - 1] = base;
        atomic_fetch_or(&a->mapped[own_bit() / 64], (uint64_t)1 << own_bit() % 64);
    }
    return MS_OK;
}

char *ms__gpu_resolve(int index, int rank, uint32_t arena, uint64_t at)
{
    char *base = NULL;
    pthread_mutex_lock(&of_peers.lock);
    ms_status st = map_arena_of(&base, index, rank, arena);
    pthread_mutex_unlock(&of_peers.lock);
    return st == MS_OK ? base + at : NULL;
}

// ---- events ----

// Whether no peer will queue another wait for the event: all have left the collective that used it (ms_slot.left).
static bool has_left(const own_event *e)
{
    const ms_group *g = e->used.g;
    for (int k = 0; k < g->n; k++)
        if (k != g->me &&
            atomic_load_explicit(&member_slot(g, k, e->used.seq)->left, memory_order_acquire) < e->used.number)
            return false;
    return true;
}

static int find_event(int index)
{
    for (int k = 0; k < own.n_events; k++)
        if (own.events[k].state == EVENT_FREE && own.events[k].index == index) return k;
    for (int k = 0; k < own.n_events; k++)
        if (own.events[k].state == EVENT_LEAVING && own.events[k].index == index && has_left(&own.events[k])) return k;
    return -1;
}

bool ms__gpu_event_take(int index, int *number)
{
    int k = find_event(index);
    if (k < 0) return false;
    own.events[k].state = EVENT_TAKEN;
    *number = k;
    return true;
}

ms_status ms__gpu_event_make(int index, int *number)
{
    MS_TRY(ms__cuda()->ranks.event_new(index, &own.events[own.n_events].event, own.listed->event[own.n_events]));
    *number = own.n_events++;
    own.events[*number].index = index;
    own.events[*number].state = EVENT_TAKEN;
    return MS_OK;
}

int ms__gpu_events(void) { return own.n_events; }

bool ms__gpu_has_events(int index)
{
    int k;
    if (own.n_events > 0) return true;
    if (ms__gpu_event_make(index, &k) != MS_OK) {
        stop_sharing(ms_error());
        return false;
    }
    ms__gpu_event_drop(k, NULL);
    return true;
}

void ms__gpu_event_drop(int number, const ms_event_use *used)
{
    own_event *e = &own.events[number];
    e->state = used && used->g ? EVENT_LEAVING : EVENT_FREE;
    if (used) e->used = *used;
}

void ms__gpu_forget_group(const ms_group *g)
{
    for (int k = 0; k < own.n_events; k++)
        if (own.events[k].state == EVENT_LEAVING && own.events[k].used.g == g) own.events[k].state = EVENT_FREE;
}

ms_status ms__gpu_event_record(int number, int index, int stream)
{
    return ms__cuda()->ranks.event_record(index, stream, own.events[number].event);
}

ms_status ms__gpu_event_open(int index, int rank, uint32_t number, void **event)
{
    peer *p = NULL;
    pthread_mutex_lock(&of_peers.lock);
    ms_status st = open_peer(&p, rank);
    if (st == MS_OK && !p->event[number])
        st = ms__cuda()->ranks.event_open(index, p->there->event[number], &p->event[number]);
    *event = st == MS_OK ? p->event[number] : NULL;
    pthread_mutex_unlock(&of_peers.lock);
    return st;
}

ms_status ms__gpu_event_wait(int index, int stream, int rank, uint32_t number)
{
    void *event;
    MS_TRY(ms__gpu_event_open(index, rank, number, &event));
    return ms__cuda()->stream_wait(index, stream, event);
}

bool ms__gpu_event_reached(int number, int rank)
{
    void *event = NULL;
    pthread_mutex_lock(&of_peers.lock);
    if (rank == ms__world.rank) event = own.events[number].event;
    else if (of_peers.list && of_peers.list[rank]) event = of_peers.list[rank]->event[number];
    pthread_mutex_unlock(&of_peers.lock);
    return !event || ms__cuda()->done(event) != 0;
}

// ---- the end ----

static void close_peer(peer *p)
{
    for (int d = 0; d < MS_CUDA_DEVICES; d++) {
        for (int k = 0; p->base[d] && k < LISTED; k++)
            if (p->base[d][k]) ms__cuda()->close(d, p->base[d][k]);
        free(p->base[d]);
    }
    for (int k = 0; k < GPU_EVENTS; k++)
        if (p->event[k]) ms__cuda()->drop(p->event[k]);
    free(p);
}

// This rank's own events stay until the process ends: an event must not be destroyed while a peer may wait for it.
static void close_peers(void)
{
    pthread_mutex_lock(&of_peers.lock);
    for (int r = 0; of_peers.list && r < ms__world.size; r++)
        if (of_peers.list[r]) close_peer(of_peers.list[r]);
    free(of_peers.list);
    of_peers.list = NULL;
    pthread_mutex_unlock(&of_peers.lock);
}

// After a rank's own streams are idle, no peer accesses its memory: in every collective a rank's stream waits for the
// last events of all members.
void ms__gpu_stop(void)
{
    for (int k = 0; ms__cuda() && k < ms_cuda_count(); k++) {
        ms_memory m;
        ms__pool_stats(MS_CUDA | k << 8, &m);
        if (m.peak_reserved > 0 && ms__cuda_sync(MS_CUDA | k << 8, -1) != MS_OK) {
            // If a peer's GPU hangs, the wait has called ms__fail_job, whose thread ends the process during this nap.
            ms__nap(1000 * 1000000);
            return;
        }
    }
    close_peers();
}
