// SPDX-License-Identifier: MIT
// comm/job/start.c -- turns independently launched processes into ranks with shared memory: chooses the transport,
// finds the ranks of each node and makes its control memory. comm/job/end.c is its counterpart.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>
#include "base/env.h"
#include "base/launcher.h"
#include "base/trace.h"
#include "device/device.h"
#include "comm/job/job.h"
#include "comm/memory/arena.h"
#include "comm/memory/control.h"
#include "comm/movers/mover.h"
#include "comm/process/process.h"

// ---- nodes ----------------------------------------------------------------------------------------

// What each rank sends to all others while a job starts. ok 0: a step failed on this rank, for the reason in why.
typedef struct {
    uint64_t node, nonce, inode;
    int32_t pid, fd, ok, pad;
    char path[128], why[128];
} hello;

// Returns a hash of this rank's node. Ranks are on one node if they run on the same kernel and see each other's
// processes.
static uint64_t node_identity(int rank, int size)
{
    char text[128] = "";
    uint64_t h = MS_HASH_START;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (f) {
        if (!fgets(text, sizeof text, f)) text[0] = 0;
        fclose(f);
    }
    h = ms__hash_bytes(h, text, strlen(text));
    ssize_t n = readlink("/proc/self/ns/pid", text, sizeof text - 1);
    if (n > 0) h = ms__hash_bytes(h, text, (size_t)n);
    // For specs: simulates a number of nodes ("2"), or assigns each rank a node ("0,1,0,1").
    const char *pretend = getenv("MOONSHARD_COMM_NODES");
    if (pretend && *pretend) {
        int node = 0;
        if (strchr(pretend, ',')) {
            const char *p = pretend;
            for (int r = 0; r < rank && p; r++) {
                p = strchr(p, ',');
                if (p) p++;
            }
            node = p ? atoi(p) : 0;
        } else if (atoi(pretend) > 1) {
            node = rank * atoi(pretend) / size;
        }
        h += (uint64_t)node * 0x9e3779b97f4a7c15ull;
    }
    return h;
}

static ms_status exchange_hellos(hello *mine, hello *all)
{
    if (ms__world.transport->all_gather(mine, all, sizeof *mine) != 0)
        return ms__fail(MS_ECOMM, "dist.init: MPI_Allgather failed");
    return MS_OK;
}

static ms_status find_nodes(hello *mine, hello *all)
{
    ms_world *w = &ms__world;
    uint64_t *nodes = malloc((size_t)w->size * sizeof *nodes);
    w->node_of = malloc((size_t)w->size * sizeof *w->node_of);
    if (!nodes || !w->node_of)
        return ms__no_memory((size_t)w->size * (sizeof *nodes + sizeof *w->node_of), "dist.init", "nodes of %d ranks",
                             w->size);
    mine->node = node_identity(w->rank, w->size);
    mine->pid = (int32_t)getpid();
    MS_TRY(exchange_hellos(mine, all));
    w->nodes = 0;
    for (int r = 0; r < w->size; r++) {
        int k = 0;
        while (k < w->nodes && nodes[k] != all[r].node) k++;
        if (k == w->nodes) nodes[w->nodes++] = all[r].node;
        w->node_of[r] = k;
    }
    free(nodes);
    w->node = w->node_of[w->rank];
    w->local_rank = w->local_size = 0;
    for (int r = 0; r < w->size; r++)
        if (w->node_of[r] == w->node) {
            if (r < w->rank) w->local_rank++;
            w->local_size++;
        }
    return MS_OK;
}

static char *map_file(int fd, size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, bytes, MADV_DONTDUMP);
    return p;
}

// The first rank of a node makes the control memory: a memfd that its peers open through /proc; or, if that is not
// permitted, a file under /dev/shm or /tmp, which is unlinked as soon as all ranks have opened it.
static ms_status control_memory(hello *mine, hello *all)
{
    ms_world *w = &ms__world;
    int first = 0;
    while (w->node_of[first] != w->node) first++;
    w->ctl_bytes = ms__ctl_size();
    bool refuse = false;
    const char *pretend = getenv("MOONSHARD_COMM_MAP");
    if (pretend && strcmp(pretend, "refuse-all") == 0) refuse = true;
    int fd = -1;
    for (int way = 0; way < 3; way++) {
        mine->ok = 1;
        mine->why[0] = mine->path[0] = 0;
        if (w->ctl) {
            munmap(w->ctl, w->ctl_bytes);
            w->ctl = NULL;
        }
        if (w->rank == first) {
            static const char *const folders[] = { NULL, "/dev/shm", "/tmp" };
            if (fd >= 0) close(fd);
            if (way == 0) fd = memfd_create("moonshard-control", MFD_CLOEXEC);
            else {
                snprintf(mine->path, sizeof mine->path, "%s/" CONTROL_NAME "%d-XXXXXX", folders[way], (int)getpid());
                fd = mkostemp(mine->path, O_CLOEXEC);
            }
            // If the file system has no room for a page, writing to that page would kill the process.
            struct statvfs fs;
            bool room = way == 0 || fd < 0 || fstatvfs(fd, &fs) != 0 ||
                        (double)fs.f_bavail * (double)fs.f_frsize >= (double)w->ctl_bytes;
            if (!room) errno = ENOSPC;
            if (!room || fd < 0 || ftruncate(fd, (off_t)w->ctl_bytes) != 0 || !(w->ctl = map_file(fd, w->ctl_bytes))) {
                snprintf(mine->why, sizeof mine->why, "%s", strerror(errno));
                mine->ok = 0;
            } else {
                struct stat st;
                fstat(fd, &st);
                mine->fd = fd;
                mine->inode = (uint64_t)st.st_ino;
                if (getrandom(&mine->nonce, sizeof mine->nonce, 0) != sizeof mine->nonce)
                    mine->nonce = (uint64_t)ms__now_ns();
                ((ms_board *)w->ctl)->nonce = mine->nonce;
            }
        }
        MS_TRY(exchange_hellos(mine, all));
        const hello *h = &all[first];
        if (w->rank != first && h->ok) {
            char path[160];
            struct stat st;
            if (h->path[0]) snprintf(path, sizeof path, "%s", h->path);
            else snprintf(path, sizeof path, "/proc/%d/fd/%d", h->pid, h->fd);
            int peer = way == 0 && refuse ? -1 : open(path, O_RDWR | O_CLOEXEC);
            if (way == 0 && refuse) errno = EACCES;
            if (peer < 0 || fstat(peer, &st) != 0 || (uint64_t)st.st_ino != h->inode ||
                !(w->ctl = map_file(peer, w->ctl_bytes)) || ((ms_board *)w->ctl)->nonce != h->nonce) {
                snprintf(mine->why, sizeof mine->why, "%.60s: %s", path,
                         peer < 0 ? strerror(errno) : "not the expected file, or it cannot be mapped");
                mine->ok = 0;
            }
            if (peer >= 0) close(peer);
        }
        MS_TRY(exchange_hellos(mine, all));
        if (w->rank == first && mine->path[0]) unlink(mine->path);
        int bad = -1;
        for (int r = 0; r < w->size; r++)
            if (!all[r].ok && bad < 0) bad = r;
        if (bad < 0) {
            if (fd >= 0 && way > 0) close(fd);
            return MS_OK;
        }
        if (way == 2)
            return ms__fail(MS_ECOMM, "dist.init: rank %d cannot share memory with the ranks on its node (%s)", bad,
                            all[bad].why);
    }
    return MS_OK;
}

// Tests whether the ranks of this node can map each other's tensors. All ranks must use the same result; otherwise a
// rank would read in place what its peer stages.
static ms_status map_peers(hello *mine, hello *all)
{
    ms_world *w = &ms__world;
    const char *pretend = getenv("MOONSHARD_COMM_MAP");
    bool refuse = pretend && strncmp(pretend, "refuse", 6) == 0;
    ms__pool_share();
    ms_board_rank *me = &w->board->rank[w->rank];
    me->pid = (int)getpid();
    atomic_store(&me->engine_waits, -1);
    // Allocates a block, so that the arena exists and is entered on the board.
    ms_storage *probe;
    uint32_t arena;
    uint64_t at;
    MS_TRY(ms__storage_new(&probe, MS_CPU, 64, "dist.init"));
    w->mapped = true;
    mine->ok = ms__comm_locate(probe, probe->data, &arena, &at) && arena == 1;
    snprintf(mine->why, sizeof mine->why, "%s", mine->ok ? "" : "it cannot make memfds");
    ms__storage_release(probe);
    MS_TRY(exchange_hellos(mine, all));
    for (int r = 0; r < w->size && mine->ok; r++) {
        if (r == w->rank || w->node_of[r] != w->node || !all[r].ok) continue;
        if (refuse || !ms__comm_can_map(r)) {
            mine->ok = 0;
            snprintf(mine->why, sizeof mine->why, "%.120s", refuse ? "set by MOONSHARD_COMM_MAP" : ms_error());
        }
    }
    MS_TRY(exchange_hellos(mine, all));
    for (int r = 0; r < w->size; r++) {
        if (w->node_of[r] != w->node || all[r].ok) continue;
        w->mapped = false;
        if (w->local_rank == 0)
            fprintf(
                stderr,
                "rank %d: dist: tensors are staged, because ranks cannot map each other's memory here (rank %d: %s)\n",
                w->rank, r, all[r].why);
        break;
    }
    return MS_OK;
}

// ---- start ----------------------------------------------------------------------------------------

static ms_status join_ranks(const ms_launch *launch)
{
    ms_world *w = &ms__world;
    char text[512] = "";
    if (w->transport->init(launch, text, sizeof text) != 0) return ms__fail(MS_ECOMM, "dist.init: %s", text);
    w->rank = w->transport->rank();
    w->size = w->transport->size();
    ms__end_catch();
    // Fail here: otherwise each process would train alone.
    if (*launch->name && launch->world > w->size)
        return ms__fail(MS_ECOMM,
                        "dist.init: %s started %d ranks, but only %d connected over '%s'; use the launcher of the MPI "
                        "library that the plugin was built with",
                        launch->name, (int)launch->world, w->size, w->transport->name);
    if (w->size > RANKS)
        return ms__fail(MS_EUNSUPPORTED, "dist.init: %d ranks; at most %d are supported", w->size, RANKS);
    if (w->size == 1) return MS_OK;
    hello mine = { 0 }, *all = calloc((size_t)w->size, sizeof *all);
    if (!all) return ms__no_memory((size_t)w->size * sizeof *all, "dist.init", "%d ranks", w->size);
    ms_status status = find_nodes(&mine, all);
    if (status == MS_OK) status = ms__control_layout();
    if (status == MS_OK) status = ms__arenas_start();
    if (status == MS_OK) status = control_memory(&mine, all);
    if (status == MS_OK) {
        w->board = (ms_board *)w->ctl;
        status = map_peers(&mine, all);
        snprintf(ms__trace_key, sizeof ms__trace_key, "%llx", (unsigned long long)all[0].nonce);
    }
    if (status == MS_OK && w->nodes > 1) status = ms__clock_measure();
    if (status == MS_OK && w->nodes > 1) status = exchange_hellos(&mine, all);
    if (status == MS_OK) ms__clock_take();
    free(all);
    MS_TRY(status);
    ms__engine_waits = &ms__board_me()->engine_waits;
    MS_TRY(ms__deaths_watch());
    if (w->nodes > 1) {
        bool watches;
        MS_TRY(ms__link_open(&watches));
        if (watches) ms__deaths_watch_links();
        MS_TRY(ms__link_made());
    }
    if (w->local_rank == 0) ms__comm_clean(false);
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // so that waits can sleep for 10 us
    return MS_OK;
}

ms_status ms__comm_start(const char *backend, double timeout)
{
    ms_world *w = &ms__world;
    if (w->up) return MS_OK;
    ms_launch launch;
    const ms_transport *transport = NULL;
    ms_launcher(&launch);
    const char *preferred = getenv("MOONSHARD_BACKEND");
    if (preferred && *preferred && *launch.name && (!backend || strcmp(backend, "auto") == 0)) backend = preferred;
    MS_TRY(ms__transport_choose(&transport, backend, &launch));
    MS_TRY(ms__env_number("MOONSHARD_TIMEOUT", "a number of seconds above 0", &w->timeout));
    if (timeout > 0) w->timeout = timeout;
    MS_TRY(ms__movers_open(transport, &launch));
    w->transport = transport;
    if (transport->init) {
        ms__join_begin(w->timeout);
        ms_status status = join_ranks(&launch);
        ms__join_end(status == MS_OK);
        MS_TRY(status);
    }
    ms__state.dist_failures = 0;
    w->up = true;
    return MS_OK;
}
