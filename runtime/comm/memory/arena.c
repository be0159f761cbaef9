// SPDX-License-Identifier: MIT
// comm/memory/arena.c -- maps the memory of peers on this node.
//
// A rank lists on the board the arenas that hold its tensors; peers open these arenas through /proc/PID/fd and keep
// them mapped.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
#include "comm/memory/arena.h"
#include "comm/memory/board.h"

typedef struct {
    _Atomic(char *) base[ARENAS];
} peer_maps;
static struct {
    pthread_mutex_t lock;
    peer_maps *of;  // indexed by world rank
} mapped = { .lock = PTHREAD_MUTEX_INITIALIZER };

ms_status ms__arenas_start(void)
{
    size_t bytes = (size_t)ms__world.size * sizeof *mapped.of;
    mapped.of = calloc(1, bytes);
    return mapped.of ? MS_OK : ms__no_memory(bytes, "dist.init", "the addresses of peers' memory");
}

// Finds the arena that contains p, in the storage's memory: its number on the board (from 1), and p's offset in it.
// Enters the arena on the board at its first use. False: peers cannot map the memory, so it is staged.
bool ms__comm_locate(ms_storage *s, const void *p, uint32_t *arena, uint64_t *at)
{
    int fd;
    uint64_t offset, id, bytes;
    if (!ms__world.mapped || !s || !s->block || !ms__segment_of(s->block, &fd, &offset, &id, &bytes)) return false;
    ms_board_rank *me = &ms__world.board->rank[ms__world.rank];
    int n = atomic_load_explicit(&me->n_arenas, memory_order_acquire), k = 0;
    while (k < n && me->arena[k].id != id) k++;
    if (k == n) {
        pthread_mutex_lock(&mapped.lock);
        n = atomic_load(&me->n_arenas);
        for (k = 0; k < n && me->arena[k].id != id; k++) {}
        struct stat st;
        if (k == n && n < ARENAS && fstat(fd, &st) == 0) {
            me->arena[k].id = id;
            me->arena[k].bytes = bytes;
            me->arena[k].inode = (uint64_t)st.st_ino;
            me->arena[k].fd = fd;
            atomic_store_explicit(&me->n_arenas, ++n, memory_order_release);
        }
        pthread_mutex_unlock(&mapped.lock);
        if (k == n) return false;
    }
    *arena = (uint32_t)k + 1;
    *at = offset + (uint64_t)((const char *)p - (const char *)s->block->data);
    return true;
}

static char *map_arena(int rank, int k)
{
    ms_board_rank *r = &ms__world.board->rank[rank];
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", r->pid, r->arena[k].fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return ms__null(ms__fail(MS_ECOMM, "dist: cannot open the memory of rank %d: %s", rank, strerror(errno)));
    // If the inode differs, the descriptor has been reused, or the process id belongs to another PID namespace.
    void *p = NULL;
    bool same = fstat(fd, &st) == 0 && (uint64_t)st.st_ino == r->arena[k].inode;
    if (same) p = ms__map_aligned(fd, r->arena[k].bytes);
    int error = errno;
    close(fd);
    if (!p)
        return ms__null(ms__fail(MS_ECOMM, "dist: cannot map %llu bytes of rank %d's memory: %s",
                                 (unsigned long long)r->arena[k].bytes, rank,
                                 same ? strerror(error) : "its file descriptor refers to another file"));
    return p;
}

char *ms__comm_resolve(int rank, uint32_t arena, uint64_t at)
{
    if (arena == 0) return ms__world.ctl + at;
    _Atomic(char *) *slot = &mapped.of[rank].base[arena - 1];
    char *base = atomic_load_explicit(slot, memory_order_acquire);
    if (MS_UNLIKELY(!base)) {
        pthread_mutex_lock(&mapped.lock);
        if (!(base = atomic_load(slot)) && (base = map_arena(rank, (int)arena - 1)))
            atomic_store_explicit(slot, base, memory_order_release);
        pthread_mutex_unlock(&mapped.lock);
        if (!base) return NULL;
    }
    return base + at;
}

// Whether this rank can map the first arena of `rank`; false if that rank has none on the board.
bool ms__comm_can_map(int rank)
{
    return ms__world.board->rank[rank].n_arenas > 0 && ms__comm_resolve(rank, 1, 0) != NULL;
}
