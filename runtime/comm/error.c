// SPDX-License-Identifier: MIT
// comm/error.c -- errors that a script survives: one rank's failure fails the same piece of work on all of them.
//
// A piece of work (a step, as a rule) that dies on one rank is dead on every rank: peers wait for it in collectives
// that it will not join. So it publishes the error on the board, and whoever is in a collective, or comes to one,
// raises it. Errors are numbered. A rank's epoch is how many it has met, its own among them, and each of them has cost
// it one piece of work: the k-th failure here belongs to the k-th failure there. So a rank meets published errors one
// by one, and one of its own that comes while there is one it has not met is that one: it adds nothing. Collectives are
// counted anew in each epoch, so what ranks do in different epochs never meets.
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "comm/internal.h"

static char met_text[TEXT];  // what the latest error that this rank met is told as here; engine thread

static uint64_t on_board(void) { return atomic_load_explicit(&ms__world.board->epoch, memory_order_acquire); }

bool ms__comm_publish_as(uint64_t number, const char *text)
{
    if (!ms__world.board) return false;
    ms_board *b = ms__world.board;
    _Atomic uint64_t *entry = &b->error[number % ERRORS];
    static pthread_mutex_t one =
        PTHREAD_MUTEX_INITIALIZER;  // a worker may bring another node's error while the engine thread has one
    pthread_mutex_lock(&one);
    uint64_t was = atomic_load(entry), epoch = number - 1;
    bool first = was >> 16 < number;
    if (first) {
        struct ms_text *mine = &b->rank[ms__world.rank].text[number % ERRORS];
        atomic_store(&mine->number, 0);
        atomic_thread_fence(memory_order_release);
        snprintf(mine->words, TEXT, "%s", text);
        atomic_store(&mine->number, number);
        first = atomic_compare_exchange_strong(entry, &was, number << 16 | (uint64_t)ms__world.rank);
    }
    pthread_mutex_unlock(&one);
    // Whoever was first may not have come to this yet.
    atomic_compare_exchange_strong(&b->epoch, &epoch, number);
    return first;
}

const char *ms__comm_error_after(uint64_t epoch)
{
    static __thread char words[TEXT];
    uint64_t number = epoch + 1, e = atomic_load(&ms__world.board->error[number % ERRORS]);
    if (e >> 16 == number) {
        // A later error's words may take the place of these while they are copied.
        struct ms_text *t = &ms__world.board->rank[e & 0xffff].text[number % ERRORS];
        bool there = atomic_load(&t->number) == number;
        snprintf(words, TEXT, "%s", t->words);
        atomic_thread_fence(memory_order_acquire);
        if (there && atomic_load(&t->number) == number) return words;
    }
    return "a peer failed (so many errors ago that its text is gone)";
}

bool ms__comm_error_since(uint64_t epoch) { return on_board() != epoch; }

void ms__comm_publish_error(const char *text, uint64_t since, bool backward)
{
    if (!ms__world.up || ms__world.size == 1) return;
    uint64_t now = ms__comm_epoch();
    // Work that dies of an error met within it has nothing to add; but it may have been a backward only here.
    if (now == since || !strstr(text, met_text)) {
        char whole[TEXT];
        snprintf(whole, sizeof whole, "rank %d failed: %s", ms__world.rank, text);
        if (ms__comm_publish_as(now + 1, whole) && ms__world.nodes > 1) ms__far_error(now + 1, whole, backward);
        snprintf(met_text, sizeof met_text, "%s", text);
        atomic_store(&ms__world.epoch, now + 1);
    }
    if (backward) ms__comm_backward_failed(ms__comm_epoch());
}

ms_status ms__comm_lost(ms_coll *c)
{
    char whole[TEXT];
    snprintf(whole, sizeof whole, "rank %d failed: %s", ms__world.rank, ms_error());
    if (ms__comm_publish_as(c->epoch + 1, whole) && ms__world.nodes > 1) ms__far_error(c->epoch + 1, whole, false);
    atomic_store(&c->raised, true);
    return ms__fail(MS_ECOMM, "%s", ms__comm_error_after(c->epoch));
}

uint64_t ms__comm_epoch(void) { return atomic_load_explicit(&ms__world.epoch, memory_order_relaxed); }

void ms__comm_backward_failed(uint64_t epoch)
{
    uint64_t was = atomic_load(&ms__world.board->failed_backward);
    while (was < epoch && !atomic_compare_exchange_weak(&ms__world.board->failed_backward, &was, epoch)) {}
}

// A peer's that is not met here yet is not counted: the work that will die of it here is still to come.
uint64_t ms__comm_failed_backward(void)
{
    static uint64_t met;
    if (!ms__world.board) return 0;
    uint64_t e = atomic_load_explicit(&ms__world.board->failed_backward, memory_order_relaxed);
    if (e <= ms__comm_epoch()) met = e;
    return met;
}

void ms__comm_reported(uint64_t epoch, const char *text)
{
    if (!ms__world.board) return;
    ms__world.step = -1;  // the loop is left by the error: ranks may be at different steps now
    // Of several collectives that one error ended, the first that is waited for meets it.
    if (epoch != ms__comm_epoch() || epoch == on_board()) return;
    // What ended it here may be no peer's telling: all members find by themselves that they ask for different things.
    snprintf(met_text, sizeof met_text, "%s", text ? text : ms__comm_error_after(epoch));
    atomic_store(&ms__world.epoch, epoch + 1);
}

ms_status ms__comm_meet_error(void)
{
    uint64_t epoch = ms__comm_epoch();
    if (MS_LIKELY(on_board() == epoch)) return MS_OK;
    ms__comm_reported(epoch, NULL);
    return ms__fail(MS_ECOMM, "%s", met_text);
}

__attribute__((constructor)) static void observe_streams(void)
{
    ms__stream_observer = (ms_stream_observer) { .epoch = ms__comm_epoch, .reported = ms__comm_reported };
}
