// SPDX-License-Identifier: MIT
// ops/parallel.c -- loops over this rank's threads.
//
// The calling thread works too; helper threads take blocks that no thread has begun. The caller only waits for blocks
// in progress, so a helper that is not scheduled on a busy machine does no harm. (OpenMP's barriers wait for every
// thread of a team: on such a machine two threads took 8 times as long as one.) Helpers spin briefly, then sleep on a
// futex.
//
// A job is open while `team.open` is set. Its fields are written before `team.open` is set, and not again until
// `inside` is 0: a helper that has incremented `inside` and sees `team.open` may read them.
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/thread.h"
#include "ops/op.h"

enum {
    PARALLEL_FROM = 32768,  // number of elements below which waking a helper costs more than it saves
    SPIN_NS = 50000,        // a helper spins longer than a script takes between two loops, such as a decoder's products
    PAUSES = 32,            // between two looks at the clock; one takes from 13 to 50 ns
    SPINS = 1000,           // pauses of the caller before it lets other processes run
    MAX_THREADS = 1024,
    LINE = 64,
};

// The blocks of one thread, [next, last). A thread that has finished its own blocks takes blocks from others.
typedef struct {
    int64_t next;
    int64_t last;
    char rest[LINE - 16];
} part;

static struct {
    ms_range_fn fn;
    void *arg;
    int64_t n, block;
    int threads, parts;
    part part[MAX_THREADS];
} job;

static struct {
    // Held by the thread whose loop uses the helpers; a loop on another thread meanwhile runs on that thread alone.
    pthread_mutex_t owner;
    int helpers;  // number of helpers started; protected by `owner`
    int sleepers;
    _Alignas(LINE) int inside;
    _Alignas(LINE) uint32_t generation;  // number of jobs begun; helpers wait for it to change
    int open;
} team = { .owner = PTHREAD_MUTEX_INITIALIZER };
static _Thread_local int thread_number;

int ms__thread_num(void) { return thread_number; }

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // waits for the pipeline; `yield` takes no time on most processors
#endif
}

static void work_on_blocks(void)
{
    int parts = job.parts, mine = thread_number % parts;
    for (int k = 0; k < parts; k++) {
        part *p = &job.part[(mine + k) % parts];
        if (__atomic_load_n(&p->next, __ATOMIC_RELAXED) >= p->last) continue;
        for (int64_t b; (b = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->last;) {
            int64_t last = (b + 1) * job.block;
            job.fn(job.arg, b * job.block, last < job.n ? last : job.n, b);
        }
    }
}

static void *helper(void *number)
{
    thread_number = (int)(intptr_t)number;
    uint32_t seen = 0;
    for (;;) {
        int64_t from = ms__now_ns();
        uint32_t now;
        for (int spins = 1; (now = __atomic_load_n(&team.generation, __ATOMIC_SEQ_CST)) == seen; spins++) {
            if (spins % PAUSES != 0 || ms__now_ns() - from < SPIN_NS) {
                pause_cpu();
                continue;
            }
            __atomic_add_fetch(&team.sleepers, 1, __ATOMIC_SEQ_CST);
            // Returns at once if the generation has already changed.
            syscall(SYS_futex, &team.generation, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
            __atomic_sub_fetch(&team.sleepers, 1, __ATOMIC_SEQ_CST);
        }
        seen = now;
        __atomic_add_fetch(&team.inside, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&team.open, __ATOMIC_SEQ_CST) && thread_number < job.threads) work_on_blocks();
        __atomic_sub_fetch(&team.inside, 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

// A forked child process has no helpers.
static void after_fork(void) { team.helpers = team.inside = team.sleepers = 0; }

// Starts the missing helpers. If the system allows fewer, loops are only slower.
static void start_helpers(int wanted)
{
    if (team.helpers >= wanted) return;
    static bool registered;
    if (!registered) registered = pthread_atfork(NULL, NULL, after_fork) == 0;
    for (pthread_t t; team.helpers < wanted; team.helpers++) {
        if (ms__thread_start(&t, helper, (void *)(intptr_t)(team.helpers + 1)) != 0) break;
        pthread_detach(t);
    }
}

// Runs the loop on all threads. Returns false if another loop uses the helpers, or if the caller is a helper.
// one_queue: all threads take blocks from one queue.
static bool shared(int64_t n, int64_t block, bool one_queue, ms_range_fn fn, void *arg)
{
    if (thread_number > 0 || pthread_mutex_trylock(&team.owner) != 0) return false;
    int threads = ms_num_threads();
    int64_t blocks = (n + block - 1) / block;
    start_helpers(threads - 1);
    job.fn = fn;
    job.arg = arg;
    job.n = n;
    job.block = block;
    job.threads = threads;
    job.parts = one_queue ? 1 : threads;
    for (int k = 0; k < job.parts; k++) {
        job.part[k].next = blocks * k / job.parts;
        job.part[k].last = blocks * (k + 1) / job.parts;
    }
    __atomic_store_n(&team.open, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&team.generation, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team.sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &team.generation, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
    work_on_blocks();
    __atomic_store_n(&team.open, 0, __ATOMIC_SEQ_CST);
    for (int spins = 0; __atomic_load_n(&team.inside, __ATOMIC_SEQ_CST); spins++)
        if (spins < SPINS) pause_cpu();
        else sched_yield();
    pthread_mutex_unlock(&team.owner);
    return true;
}

void ms__parallel(int64_t n, int64_t block, ms_range_fn fn, void *arg)
{
    if (n <= 0) return;
    int64_t blocks = (n + block - 1) / block;
    if (ms_num_threads() > 1 && blocks > 1 && n >= PARALLEL_FROM && shared(n, block, false, fn, arg)) return;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t last = (b + 1) * block;
        fn(arg, b * block, last < n ? last : n, b);
    }
}

void ms__parallel_tasks(int64_t n, ms_range_fn fn, void *arg)
{
    if (ms_num_threads() > 1 && n > 1 && shared(n, 1, true, fn, arg)) return;
    for (int64_t k = 0; k < n; k++) fn(arg, k, k + 1, k);
}
