// SPDX-License-Identifier: MIT
// comm/world/message.c -- the transport's lock, and messages between nodes, from any thread.
#include <pthread.h>
#include "comm/world/message.h"
#include "comm/world/world.h"

// The list keeps the memory reachable for leak checkers.
typedef struct kept {
    struct kept *next;
    void *memory;
} kept;

static struct {
    pthread_mutex_t transport, keeping;  // keeping: of `kept`
    kept *kept;
} messages = { .transport = PTHREAD_MUTEX_INITIALIZER, .keeping = PTHREAD_MUTEX_INITIALIZER };

void ms__transport_lock(void) { pthread_mutex_lock(&messages.transport); }
void ms__transport_unlock(void) { pthread_mutex_unlock(&messages.transport); }

void *ms__message_send(const void *p, size_t n, int to, int tag)
{
    ms__transport_lock();
    void *r = ms__world.transport->isend(p, n, to, tag);
    ms__transport_unlock();
    return r;
}

void *ms__message_receive(void *p, size_t n, int from, int tag)
{
    ms__transport_lock();
    void *r = ms__world.transport->irecv(p, n, from, tag);
    ms__transport_unlock();
    return r;
}

int ms__message_test(void **r)
{
    ms__transport_lock();
    int rc = ms__world.transport->test(r);
    ms__transport_unlock();
    return rc;
}

void ms__message_cancel(void *r)
{
    ms__transport_lock();
    ms__world.transport->cancel(r);
    ms__transport_unlock();
}

void ms__message_keep(void *memory)
{
    kept *k = memory ? malloc(sizeof *k) : NULL;
    if (!k) return;
    pthread_mutex_lock(&messages.keeping);
    *k = (kept) { messages.kept, memory };
    messages.kept = k;
    pthread_mutex_unlock(&messages.keeping);
}
