// SPDX-License-Identifier: MIT
// comm/process/join.c -- the start of a job, from loading this library until the ranks share a board.
//
// MPI_Init blocks until every rank has called it, so a thread watches the ranks of this node meanwhile. A rank that
// dies before it has joined ends the job at once. A rank that is stopped, or that runs Lua without an engine call, ends
// the job after the timeout of collectives. A rank that computes, reads or writes does not; a message about it is
// printed after every timeout.
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "base/activity.h"
#include "base/launcher.h"
#include "comm/process/process.h"

typedef struct {
    int rank, pid, pidfd;     // pidfd -1: the process has ended
    const ms_activity *page;  // NULL: the process has not loaded the engine so far
    ms_progress seen;
} join_peer;

enum { MS = 1000000 };

static struct {
    join_peer *peers;
    // n_expected: number of ranks on this node except this one, -1: unknown; n_peers: how many of them have been found.
    int n_peers, n_expected;
    bool all_here;              // mpirun started all ranks on this node
    pid_t parent;               // the parent process of all ranks of this node
    pthread_mutex_t lock;       // protects the peers, which error reports also read
    atomic_bool over;           // dist.init has returned
    _Atomic int64_t joined_at;  // 0: the script has not called dist.init
    double limit;               // in seconds; written before joined_at
} joining = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void find_peers(void)
{
    int pids[RANKS], n = ms__launched_peers(joining.parent, pids, RANKS);
    pthread_mutex_lock(&joining.lock);
    for (int k = 0; k < n && joining.n_peers < joining.n_expected; k++) {
        bool known = pids[k] == (int)getpid();
        for (int p = 0; p < joining.n_peers && !known; p++) known = joining.peers[p].pid == pids[k];
        int rank = known ? -1 : ms__peer_rank(pids[k]);
        if (rank < 0) continue;
        int fd = (int)syscall(SYS_pidfd_open, pids[k], 0);
        if (fd >= 0) joining.peers[joining.n_peers++] = (join_peer) { .rank = rank, .pid = pids[k], .pidfd = fd };
    }
    pthread_mutex_unlock(&joining.lock);
}

static int joined_state(join_peer *p)
{
    pthread_mutex_lock(&joining.lock);
    if (!p->page) p->page = ms__peer_activity(p->pid);
    pthread_mutex_unlock(&joining.lock);
    return p->page ? __atomic_load_n(&p->page->joined, __ATOMIC_ACQUIRE) : 0;
}

// Whether this rank reports for all: it is the lowest one of this node that waits in dist.init and is not stopped.
static bool reports_for_all(void)
{
    for (int k = 0; k < joining.n_peers; k++) {
        ms_progress unused = { 0 };
        if (joining.peers[k].rank < ms__launched.rank && joining.peers[k].pidfd >= 0 &&
            joined_state(&joining.peers[k]) == 1 &&
            ms__peer_watch(joining.peers[k].pid, joining.peers[k].page, &unused) != PEER_STOPPED)
            return false;
    }
    return true;
}

static void append_peer(char *text, size_t n, const join_peer *p, const char *what)
{
    ms__append(text, n, "%srank %d (process %d) %s", *text ? "; " : "", p->rank, p->pid, what);
}

static bool lowest_seen(void)
{
    for (int k = 0; k < joining.n_peers; k++)
        if (joining.peers[k].rank < ms__launched.rank && joining.peers[k].pidfd >= 0) return false;
    return true;
}

static void peer_ended(join_peer *p)
{
    if (p->pidfd >= 0) close(p->pidfd);
    p->pidfd = -1;
    if (joined_state(p) == 2) return;  // the process had joined the job: comm/process/death.c handles its end
    char text[200] = "";
    append_peer(text, sizeof text, p,
                joined_state(p) ? "died while the job started" : "ended before it joined the job");
    // A script may end without calling dist.init. If another rank waits in dist.init, the job must end: mpirun ends it
    // only if the peer was killed or failed.
    int64_t since = ms__now_ns(), reported_at = 0;
    for (int64_t now = since;
         now - since < 1500ll * MS && (!reported_at || now - reported_at < 300ll * MS || ms__launcher_ends_job());
         now = ms__now_ns()) {
        if (atomic_load(&joining.over)) return;
        bool waits = atomic_load(&joining.joined_at), ends = ms__launcher_ends_job();
        if (!reported_at && (waits || ends) && now - since > (waits ? 20ll : 50ll) * MS) {
            reported_at = now;
            ms__fork_waker();  // needed because mpirun may kill this rank before mpirun itself exits
            bool explained = p->page && __atomic_load_n(&p->page->error, __ATOMIC_RELAXED);
            if (!explained && (waits ? reports_for_all() : lowest_seen()))
                fprintf(stderr, "rank %d: dist.init: %s\n", ms__launched.rank, text);
        }
        if (reported_at && ends) ms__wake_launcher();
        ms__nap(5 * MS);
    }
    if (reported_at) ms__exit_first(1);
}

bool ms__error_reported_by_peer(uint64_t hash)
{
    int64_t now = ms__now_ns();
    __atomic_store_n(&ms__activity->error_at, now, __ATOMIC_RELAXED);
    __atomic_store_n(&ms__activity->error, hash, __ATOMIC_SEQ_CST);
    for (int k = 0; k < joining.n_peers; k++) {
        (void)joined_state(&joining.peers[k]);
        const ms_activity *a = joining.peers[k].page;
        if (!a || __atomic_load_n(&a->error, __ATOMIC_SEQ_CST) != hash) continue;
        int64_t at = __atomic_load_n(&a->error_at, __ATOMIC_RELAXED);
        if (at < now || (at == now && joining.peers[k].rank < ms__launched.rank)) return true;
    }
    return false;
}

// Lists the ranks whose process was never found. Their numbers are known only if all ranks are on this node.
static void append_unseen(char *text, size_t n)
{
    for (int r = 0; joining.all_here && r <= joining.n_expected; r++) {
        bool seen = r == ms__launched.rank;
        for (int k = 0; k < joining.n_peers; k++) seen |= joining.peers[k].rank == r;
        if (!seen) ms__append(text, n, "%srank %d ended before it joined the job", *text ? "; " : "", r);
    }
    if (!joining.all_here)
        ms__append(text, n, "%sa rank of this node ended before it joined the job", *text ? "; " : "");
}

// Ends the job if a peer made no progress for the length of the timeout. report: a line about peers that make progress
// is due; one rank of the node prints it. Returns false if no line is due, or nothing is known about the peers yet.
static bool check_joining(int64_t since, int64_t now, bool report)
{
    char culprits[2000] = "", working[2000] = "";
    double waited = (double)(now - since) * 1e-9;
    bool undecided = false;
    for (int k = 0; k < joining.n_peers; k++) {
        join_peer *p = &joining.peers[k];
        int state = joined_state(p);
        ms_peer_state look = ms__peer_watch(p->pid, p->page, &p->seen);
        if (look != PEER_STOPPED && state) continue;
        bool late = (double)(now - (p->seen.at > since ? p->seen.at : since)) * 1e-9 > joining.limit;
        // Until the limit has passed, a peer that looks idle may be between two engine calls: say nothing about it yet.
        undecided |= look != PEER_BUSY && !late;
        if (look == PEER_BUSY)
            append_peer(working, sizeof working, p, "has not called dist.init yet, but computes, reads or writes");
        else if (late)
            append_peer(culprits, sizeof culprits, p,
                        look == PEER_STOPPED ? "is stopped" : "has not called dist.init and makes no engine call");
    }
    // A launcher starts all ranks of a node at once, so one that was not seen for so long had ended before this rank
    // looked.
    if (joining.n_peers < joining.n_expected && waited > joining.limit) append_unseen(culprits, sizeof culprits);
    if (!culprits[0]) {
        if (undecided && !working[0]) return false;
        if (report && reports_for_all())
            fprintf(stderr, "rank %d: dist.init has waited %.0f s: %s\n", ms__launched.rank, waited,
                    working[0] ? working
                               : "the ranks seen on this node have called dist.init, but MPI has not started");
        return report;
    }
    if (reports_for_all()) {
        fprintf(stderr, "rank %d: dist.init: %.1f s have passed and %s\n", ms__launched.rank, waited, culprits);
        // A peer that has not called dist.init, or that is stopped, cannot wake mpirun: kill it, and keep this process
        // alive to wake mpirun.
        for (int k = 0; k < joining.n_peers; k++) {
            ms_progress unused = { 0 };
            if (!joined_state(&joining.peers[k]) || ms__peer_watch(joining.peers[k].pid, NULL, &unused) == PEER_STOPPED)
                kill(joining.peers[k].pid, SIGKILL);
        }
    }
    ms__end_stay(1);
}

// Names the ranks that died before this thread saw them. They are known only if all ranks are on this node.
static void report_unseen(void)
{
    if (!joining.all_here) return;
    for (int r = 0; r <= joining.n_expected; r++) {
        bool seen = r == ms__launched.rank;
        for (int k = 0; k < joining.n_peers; k++) seen |= joining.peers[k].rank == r;
        if (!seen && lowest_seen())
            fprintf(stderr, "rank %d: rank %d ended before it joined the job\n", ms__launched.rank, r);
    }
}

static void *join_thread(void *unused)
{
    (void)unused;
    struct pollfd *fds = calloc((size_t)joining.n_expected, sizeof *fds);
    int64_t began = ms__now_ns(), since = 0, looked = 0, reported_at = 0, before = began;
    bool unseen = false;
    while (fds && !atomic_load(&joining.over)) {
        if (joining.n_peers < joining.n_expected) find_peers();
        for (int k = 0; k < joining.n_peers; k++)
            fds[k] = (struct pollfd) { .fd = joining.peers[k].pidfd, .events = POLLIN };
        int64_t now = ms__now_ns();
        int pause = now - began < 2000ll * MS || since ? 10 : 100;
        int ended = poll(fds, (nfds_t)joining.n_peers, pause);
        for (int k = 0; k < joining.n_peers && ended > 0; k++)
            if (fds[k].revents) peer_ended(&joining.peers[k]);
        now = ms__now_ns();
        if (joining.n_peers < joining.n_expected && now - began > 30ll * MS && now - began < 3000ll * MS) {
            if (ms__launcher_ends_job()) {
                if (!unseen) report_unseen();
                unseen = true;
                ms__wake_launcher();
            }
        }
        if (!since && (since = atomic_load(&joining.joined_at))) {
            reported_at = since;
            for (int k = 0; k < joining.n_peers; k++)
                if (joined_state(&joining.peers[k]) != 2 && joining.peers[k].pidfd < 0) peer_ended(&joining.peers[k]);
        }
        // A gap of half a second means that the whole job was probably stopped; that time does not count.
        if (since && now - before > 500ll * MS) since += now - before, reported_at += now - before;
        before = now;
        if (since && now - looked > 50ll * MS * (joining.n_expected + 1)) {
            looked = now;
            if (check_joining(since, now, (double)(now - reported_at) * 1e-9 > joining.limit)) reported_at = now;
        }
    }
    free(fds);
    return NULL;
}

void ms__join_begin(double seconds)
{
    joining.limit = seconds;
    __atomic_store_n(&ms__activity->joined, 1, __ATOMIC_RELEASE);
    atomic_store(&joining.joined_at, ms__now_ns());
}

void ms__join_end(bool through)
{
    __atomic_store_n(&ms__activity->joined, through ? 2 : 0, __ATOMIC_RELEASE);
    atomic_store(&joining.over, true);
}

void ms__join_watch(int expected, bool here)
{
    joining.n_expected = expected;
    joining.parent = getppid();
    joining.all_here = here;
    if (joining.n_expected == 0) return;
    ms__activity_share();
    if ((joining.peers = calloc((size_t)joining.n_expected, sizeof *joining.peers))) ms__comm_thread(join_thread);
}
