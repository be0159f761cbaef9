// SPDX-License-Identifier: MIT
// comm/world/message.c -- the transport's lock, and messages between nodes, from any thread.
#include <pthread.h>
#include "comm/world/message.h"
#include "comm/world/world.h"

static pthread_mutex_t transport_mutex = PTHREAD_MUTEX_INITIALIZER;
void ms__transport_lock(void) { pthread_mutex_lock(&transport_mutex); }
void ms__transport_unlock(void) { pthread_mutex_unlock(&transport_mutex); }

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

// The list keeps the memory reachable for leak checkers.
typedef struct kept {
    struct kept *next;
    void *memory;
} kept;

static struct {
    pthread_mutex_t lock;
    kept *list;
} kept_memory = { .lock = PTHREAD_MUTEX_INITIALIZER };

void ms__message_keep(void *memory)
{
    kept *k = memory ? malloc(sizeof *k) : NULL;
    if (!k) return;
    pthread_mutex_lock(&kept_memory.lock);
    *k = (kept) { kept_memory.list, memory };
    kept_memory.list = k;
    pthread_mutex_unlock(&kept_memory.lock);
}
