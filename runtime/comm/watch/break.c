// SPDX-License-Identifier: MIT
// comm/watch/break.c -- breaks groups, also on other nodes, and asks ranks of other nodes what they wait for.
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include "comm/memory/board.h"
#include "comm/memory/control.h"
#include "comm/watch/watch.h"
#include "comm/world/message.h"

// The tags of these messages are odd; those of collectives are even (movers/far.c). OUTBOX: number of messages in
// `outbox`.
enum { TAG_ERROR = 1, TAG_ASK = 3, TAG_ANSWER = 5, OUTBOX = 32 };

typedef struct {
    double group;    // that of dist.recover: rank `sender` waits there
    uint64_t epoch;  // in the group of dist.recover: the collective's number
    int sender;
    char text[TEXT];
} far_error;

static struct {
    pthread_mutex_t lock;
    // Errors are sent from static memory, so that running out of memory can be reported. A message of this size has
    // usually been sent when isend returns. If all messages of the outbox are still in flight, the error gets separate
    // memory, which is not freed.
    struct {
        far_error message;
        void *req;
    } outbox[OUTBOX];
} far = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void send_error(int rank, const far_error *e)
{
    far_error *m = NULL;
    void *own = NULL, **req = &own;
    for (int k = 0; k < OUTBOX && !m; k++)
        if (ms__message_test(&far.outbox[k].req) != 0) {
            m = &far.outbox[k].message;
            req = &far.outbox[k].req;
        }
    if (!m && !(m = calloc(1, sizeof *m))) return;
    *m = *e;
    *req = ms__message_send(m, sizeof *m, rank, TAG_ERROR);
    if (req != &own) return;
    ms__message_keep(own);
    ms__message_keep(m);
}

// Tests the errors in flight; returns whether all have been sent. MPI makes progress only inside its calls, and a rank
// that does not lead a group may make no other calls of MPI.
static bool sent_errors(void)
{
    bool all = true;
    for (int k = 0; k < OUTBOX; k++)
        if (far.outbox[k].req && ms__message_test(&far.outbox[k].req) == 0) all = false;
    return all;
}

static void tell_other_nodes(const ms_group *g, uint64_t epoch, const char *text)
{
    far_error e = { .group = g->id, .epoch = epoch };
    snprintf(e.text, sizeof e.text, "%s", text);
    pthread_mutex_lock(&far.lock);
    for (int k = 0; k < g->n; k++)
        if (ms__world.local_of[g->ranks[k]] < 0) send_error(g->ranks[k], &e);
    // The script may not call MPI again for a long time, so this rank waits up to 20 ms here, in which MPI can connect
    // to the peers and send.
    for (int64_t until = ms__now_ns() + 20 * 1000 * 1000; !sent_errors() && ms__now_ns() < until;) sched_yield();
    pthread_mutex_unlock(&far.lock);
}

void ms__break(ms_group *g, uint64_t epoch, const char *text)
{
    if (ms__break_here(g, epoch, text) && g->far) tell_other_nodes(g, epoch, text);
}

void ms__break_by_me(ms_group *g, uint64_t epoch, const char *why)
{
    char text[TEXT];
    snprintf(text, sizeof text, "rank %d failed: %s", ms__world.rank, why);
    ms__break(g, epoch, text);
}

void ms__coll_failed(ms_coll *c, ms_status status)
{
    // If the job is ending, the rank that knows the reason reports it.
    if (atomic_load(&c->raised) || atomic_load(&ms__world.board->failing) || ms__stream_cancelled()) return;
    ms__break_by_me(c->g, c->epoch, status == MS_EINTR ? "interrupted (Ctrl-C)" : ms_error());
}

void ms__far_recovers(const ms_coll *c)
{
    far_error e = { .group = c->g->id, .epoch = c->number, .sender = ms__world.rank };
    pthread_mutex_lock(&far.lock);
    for (int k = 0; k < c->g->n; k++)
        if (ms__world.local_of[k] < 0 && atomic_load(&member_slot(c->g, k, c->seq)->ready) < c->number)
            send_error(k, &e);
    pthread_mutex_unlock(&far.lock);
}

// ---- where ranks on other nodes wait ----------------------------------------------------------------

// Sends a copy of p, which is never freed, because MPI may still access it. Used only while the job ends.
static void send_copy(const void *p, size_t n, int to, int tag)
{
    void *copy = malloc(n);
    if (!copy) return;
    memcpy(copy, p, n);
    ms__message_keep(ms__message_send(copy, n, to, tag));
    ms__message_keep(copy);
}

// Receives a message of n bytes with this tag, if one has come, and returns its sender; -1: none has.
static int take_message(int tag, void *p, size_t n)
{
    int from = -1;
    size_t size;
    ms__transport_lock();
    int there = ms__world.transport->probe(tag, &from, &size);
    ms__transport_unlock();
    void *r = there && size == n ? ms__message_receive(p, n, from, tag) : NULL;
    if (!r) return -1;
    while (ms__message_test(&r) == 0) sched_yield();
    return from;
}

static void answer_question(void)
{
    char question, text[WHERE];
    int from = take_message(TAG_ASK, &question, 1);
    if (from < 0) return;
    ms__rank_text(ms__world.rank, text, sizeof text);
    send_copy(text, sizeof text, from, TAG_ANSWER);
}

void ms__far_ask(int rank) { send_copy("?", 1, rank, TAG_ASK); }

int ms__far_answered(char *out, size_t n)
{
    char text[WHERE];
    ms__far_poll();  // a peer may ask this rank at the same time
    pthread_mutex_lock(&far.lock);
    int from = take_message(TAG_ANSWER, text, sizeof text);
    pthread_mutex_unlock(&far.lock);
    if (from >= 0) snprintf(out, n, "%s", text);
    return from;
}

void ms__far_poll(void)
{
    static far_error came;
    // Only one thread may probe: two threads that see the same message would both wait for it.
    if (pthread_mutex_trylock(&far.lock) != 0) return;
    sent_errors();
    answer_question();
    bool got = take_message(TAG_ERROR, &came, sizeof came) >= 0;
    double group = came.group;
    uint64_t epoch = came.epoch;
    int sender = came.sender;
    char text[TEXT];
    memcpy(text, came.text, sizeof text);
    pthread_mutex_unlock(&far.lock);
    if (!got) return;
    pthread_mutex_lock(&ms__groups_lock);
    ms_group *g = ms__group_listed(group);
    if (g == ms__meeting) atomic_store(&ms__world.board->rank[sender].recovers, epoch);
    else if (g) ms__break_here(g, epoch, text);
    pthread_mutex_unlock(&ms__groups_lock);
}
