// SPDX-License-Identifier: MIT
// comm/job/far_error.c -- sends published errors to the other nodes, and asks their ranks what they wait for.
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include "comm/internal.h"
#include "comm/job/message.h"

// The tags of these messages are odd; those of collectives are even (far.c). OUTBOX: number of messages in `outbox`.
enum { TAG_ERROR = 1, TAG_ASK = 3, TAG_ANSWER = 5, OUTBOX = 32 };

static pthread_mutex_t error_lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct {
    uint64_t number, backward;
    ms_resumption furthest;  // the place in the script of the rank that is ahead (ms_text)
    char text[TEXT];
} far_error;

static int first_on(int node)
{
    for (int r = 0; r < ms__world.size; r++)
        if (ms__world.node_of[r] == node) return r;
    return -1;
}

// Errors are sent from static memory, so that running out of memory can be reported. A message of this size has usually
// been sent when isend returns. If all messages of the outbox are still in flight, the error gets separate memory,
// which is not freed.
static struct {
    far_error message;
    void *req;
} outbox[OUTBOX];

static void send_error(int node, const far_error *e)
{
    far_error *m = NULL;
    void *own = NULL, **req = &own;
    for (int k = 0; k < OUTBOX && !m; k++)
        if (ms__message_test(&outbox[k].req) != 0) {
            m = &outbox[k].message;
            req = &outbox[k].req;
        }
    if (!m && !(m = calloc(1, sizeof *m))) return;
    *m = *e;
    *req = ms__message_send(m, sizeof *m, first_on(node), TAG_ERROR);
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
        if (outbox[k].req && ms__message_test(&outbox[k].req) == 0) all = false;
    return all;
}

void ms__far_error(uint64_t number, const char *text, const ms_resumption *furthest, bool backward)
{
    far_error e = { .number = number, .backward = backward };
    if (furthest) e.furthest = *furthest;
    snprintf(e.text, sizeof e.text, "%s", text);
    pthread_mutex_lock(&error_lock);
    for (int node = 0; node < ms__world.nodes; node++)
        if (node != ms__world.node) send_error(node, &e);
    // The script may not call MPI again for a long time, so this rank waits up to 20 ms here, in which MPI can connect
    // to the peers and send.
    for (int64_t until = ms__now_ns() + 20 * 1000 * 1000; !sent_errors() && ms__now_ns() < until;) sched_yield();
    pthread_mutex_unlock(&error_lock);
}

// ---- where ranks on other nodes wait ----------------------------------------------------------------

enum { WHERE = 600 };  // bytes of an answer

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

static void answer(void)
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
    pthread_mutex_lock(&error_lock);
    int from = take_message(TAG_ANSWER, text, sizeof text);
    pthread_mutex_unlock(&error_lock);
    if (from >= 0) snprintf(out, n, "%s", text);
    return from;
}

void ms__far_poll(void)
{
    static far_error m;
    int from;
    size_t n;
    // Only one thread may probe: two threads that see the same message would both wait for it.
    if (pthread_mutex_trylock(&error_lock) != 0) return;
    sent_errors();
    answer();
    int there = 0;
    if (first_on(ms__world.node) == ms__world.rank) {
        ms__transport_lock();
        there = ms__world.transport->probe(TAG_ERROR, &from, &n);
        ms__transport_unlock();
    }
    void *r = there && n == sizeof m ? ms__message_receive(&m, sizeof m, from, TAG_ERROR) : NULL;
    bool got = r != NULL;
    while (r && ms__message_test(&r) == 0) sched_yield();
    if (got) {
        if (m.backward) ms__comm_backward_failed(m.number);
        ms__comm_publish_as(m.number, m.text, &m.furthest);
    }
    pthread_mutex_unlock(&error_lock);
}
