// SPDX-License-Identifier: MIT
// comm/error.c -- errors that a script survives: a failure of one rank makes the same piece of work fail on every rank.
//
// When a piece of work (usually a step) fails on one rank, its peers would wait for that rank in collectives that it
// does not join. So the rank publishes its error on the board, and every rank raises it in its current or next
// collective. Errors are numbered. A rank's epoch is the number of errors that it has met, including its own. Each
// error makes one piece of work fail on each rank, so the k-th failures of all ranks are the same error. A rank
// therefore meets published errors one at a time, and does not publish its own error while it has not met an earlier
// one. Collectives are numbered anew in each epoch, so collectives of different epochs never match.
//
// A mismatch or a refused call fails on every member of its group without a published error. If the failure ends a
// larger piece of work on one member, that member publishes the error for ranks outside the group; the members do not
// raise it again.
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "comm/internal.h"

// The following variables are used by the engine thread only.
static char met_text[TEXT];  // message of the latest published error that this rank has met
// Message of the latest call that failed on every member, up to the point where the members' texts differ; "": none.
static char raised[TEXT];
static ms_resumption raised_behind;  // if `raised` contains LATER: the place of the member at the later call
// next: the place in the script of this rank's next collective, until a collective sends it. enclosing: the place of
// the library call in progress, which may issue several collectives.
static ms_resumption next, enclosing;

static uint64_t on_board(void) { return atomic_load_explicit(&ms__world.board->epoch, memory_order_acquire); }

bool ms__comm_publish_as(uint64_t number, const char *text, const ms_resumption *furthest)
{
    if (!ms__world.board) return false;
    ms_board *b = ms__world.board;
    _Atomic uint64_t *entry = &b->error[number % ERRORS];
    static pthread_mutex_t one =
        PTHREAD_MUTEX_INITIALIZER;  // used by the engine thread, and by a worker that received another node's error
    pthread_mutex_lock(&one);
    uint64_t was = atomic_load(entry), epoch = number - 1;
    bool first = was >> 16 < number;
    if (first) {
        struct ms_text *mine = &b->rank[ms__world.rank].text[number % ERRORS];
        atomic_store(&mine->number, 0);
        atomic_thread_fence(memory_order_release);
        snprintf(mine->words, TEXT, "%s", text);
        mine->furthest = furthest ? *furthest : (ms_resumption) { 0 };
        atomic_store(&mine->number, number);
        first = atomic_compare_exchange_strong(entry, &was, number << 16 | (uint64_t)ms__world.rank);
    }
    pthread_mutex_unlock(&one);
    // Every publisher advances the epoch, because the first one may not have reached this line yet.
    atomic_compare_exchange_strong(&b->epoch, &epoch, number);
    return first;
}

// The message of the error that ended `epoch`; valid until this thread's next call. *furthest receives the place in the
// script of the rank that is ahead of the others (struct ms_text), zeros if unknown; furthest may be NULL.
static const char *error_after(uint64_t epoch, ms_resumption *furthest)
{
    static __thread char words[TEXT];
    if (furthest) *furthest = (ms_resumption) { 0 };
    uint64_t number = epoch + 1, e = atomic_load(&ms__world.board->error[number % ERRORS]);
    if (e >> 16 == number) {
        // A later error may overwrite the text during the copy: compare the text's number before and after.
        struct ms_text *t = &ms__world.board->rank[e & 0xffff].text[number % ERRORS];
        bool there = atomic_load(&t->number) == number;
        snprintf(words, TEXT, "%s", t->words);
        ms_resumption place = t->furthest;
        atomic_thread_fence(memory_order_acquire);
        if (there && atomic_load(&t->number) == number) {
            if (furthest) *furthest = place;
            return words;
        }
    }
    return "a peer failed (its error message was overwritten by later ones)";
}

bool ms__comm_error_since(uint64_t epoch) { return on_board() != epoch; }
bool ms__comm_is_lost(uint64_t epoch) { return ms__comm_error_since(epoch) && atomic_load(&ms__world.board->failing); }

void ms__comm_raised(const char *text)
{
    ms__state.dist_failures++;
    ms__comm_raised_by_peer(text);
}

void ms__comm_raised_by_peer(const char *text)
{
    snprintf(raised, sizeof raised, "%s", text);
    char *end = strstr(raised, MISMATCH);
    if (end) end[sizeof MISMATCH - 1] = 0;
}

// Returns where the latest failed call's message (`raised`) begins in text; NULL: it does not occur. Of messages with
// LATER, only the part from LATER to CAUSE is compared: members' messages may begin and end differently.
static const char *find_raised(const char *text)
{
    if (!raised[0]) return NULL;
    char *later = strstr(raised, LATER), *end = later ? strstr(later, CAUSE) : NULL;
    if (!end) return strstr(text, raised);
    *end = 0;
    const char *at = strstr(text, later);
    *end = CAUSE[0];
    return at;
}

// Records that this rank has met the error that ended `epoch`.
static void met(uint64_t epoch, const char *text)
{
    snprintf(met_text, sizeof met_text, "%s", text);
    raised[0] = 0;
    atomic_store(&ms__world.epoch, epoch + 1);
}

void ms__comm_settled(uint64_t number)
{
    met(number - 1, "an earlier line of the prompt failed");
    next = enclosing = (ms_resumption) { 0 };
}

double ms_dist_published(void) { return ms__world.board ? (double)on_board() : 0; }

const char *ms__comm_latest(void) { return raised[0] ? raised : met_text; }

bool ms__comm_repeated(void)
{
    uint64_t epoch = ms__comm_epoch();
    if (!ms__comm_error_since(epoch) || !find_raised(error_after(epoch, NULL))) return false;
    met(epoch, error_after(epoch, NULL));
    return true;
}

bool ms__comm_spared(const ms_coll *c)
{
    uint64_t epoch = ms__comm_epoch();
    ms_resumption furthest;
    if (!c->fingerprint.resumed.here || c->stream != MS_STREAM_COMPUTE || !ms__comm_error_since(epoch)) return false;
    const char *text = error_after(epoch, &furthest);
    if (!furthest.here || ms__compare_places(&c->fingerprint.resumed, &furthest, true) < 0) return false;
    met(epoch, text);
    return true;
}

void ms__comm_behind(const ms_resumption *furthest) { raised_behind = *furthest; }

void ms__comm_refused(const char *text)
{
    char whole[TEXT];
    snprintf(whole, sizeof whole, "rank %d failed: %.*s", ms__world.rank, PAYLOAD - 1, text);
    ms__comm_raised(whole);
}

void ms__comm_succeeded(void) { raised[0] = 0; }

static uint32_t hash_of(const char *place) { return (uint32_t)ms__hash_bytes(MS_HASH_START, place, strlen(place)) | 1; }

void ms_dist_resume(const ms_dist_position *p)
{
    ms_resumption *r = p->single ? &next : &enclosing;
    *r = (ms_resumption) { .here = hash_of(p->here),
                           .failed = hash_of(p->failed),
                           .caught = hash_of(p->caught),
                           .times = (uint32_t)p->times };
    memcpy(r->line, p->line, (size_t)p->n * sizeof *p->line);
    memcpy(r->count, p->count, (size_t)p->n * sizeof *p->count);
}

void ms_dist_resumed(int single) { *(single ? &next : &enclosing) = (ms_resumption) { 0 }; }

bool ms__comm_unsettled(const ms_group *g) { return g->n > 1 && (g->failed || g->epoch != ms__comm_epoch()); }

// After a failure in another group, the ranks of this group may be at different calls, too.
bool ms__comm_continues(const ms_group *g)
{
    return ms__comm_unsettled(g) || (g->n > 1 && g->id >= 0 && g->settled != ms__state.dist_failures);
}

// Members may disagree on ms__comm_continues, but not on ms__comm_unsettled. A single collective (`next`) can be
// repeated if a peer asks for its place; a call of several collectives (`enclosing`) cannot, so it sends its place only
// if the group is unsettled.
static bool is_next(const ms_group *g) { return next.here != 0 && ms__comm_continues(g); }
bool ms__comm_resumes(const ms_group *g) { return is_next(g) || (enclosing.here != 0 && ms__comm_unsettled(g)); }

ms_resumption ms__comm_resumption(const ms_group *g)
{
    ms_resumption r = { 0 };
    if (MS_LIKELY(!ms__comm_resumes(g))) return r;
    if (is_next(g)) {
        r = next;
        next = (ms_resumption) { 0 };
    } else {
        r = enclosing;  // stays set: the first collectives of other groups send this place, too
    }
    r.turns = g->turns;
    r.ahead = g->ahead;
    return r;
}

void ms__comm_publish_error(const char *text, uint64_t since, bool backward)
{
    if (!ms__world.up || ms__world.size == 1) return;
    uint64_t now = ms__comm_epoch();
    // Work that failed because of a published error is not published again. If the work was a backward, that is
    // recorded below: the rank that published the error may have been in other work.
    if (now == since || !strstr(text, met_text)) {
        const char *known = find_raised(text);  // the message that the peers' scripts have received
        char whole[TEXT];
        if (known) snprintf(whole, sizeof whole, "%s", known);
        else snprintf(whole, sizeof whole, "rank %d failed: %s", ms__world.rank, text);
        const ms_resumption *furthest = known && strncmp(known, LATER, sizeof LATER - 1) == 0 ? &raised_behind : NULL;
        if (ms__comm_publish_as(now + 1, whole, furthest) && ms__world.nodes > 1)
            ms__far_error(now + 1, whole, furthest, backward);
        met(now, text);
        ms__state.dist_failures++;
    }
    if (backward) ms__comm_backward_failed(ms__comm_epoch());
}

ms_status ms__comm_raise(ms_coll *c)
{
    atomic_store(&c->raised, true);
    return ms__fail(MS_ECOMM, "%s", error_after(c->epoch, NULL));
}

ms_status ms__comm_lost(ms_coll *c)
{
    char whole[TEXT];
    snprintf(whole, sizeof whole, "rank %d failed: %s", ms__world.rank, ms_error());
    if (ms__comm_publish_as(c->epoch + 1, whole, NULL) && ms__world.nodes > 1)
        ms__far_error(c->epoch + 1, whole, NULL, false);
    return ms__comm_raise(c);
}

uint64_t ms__comm_epoch(void) { return atomic_load_explicit(&ms__world.epoch, memory_order_relaxed); }

void ms__comm_backward_failed(uint64_t epoch)
{
    uint64_t was = atomic_load(&ms__world.board->failed_backward);
    while (was < epoch && !atomic_compare_exchange_weak(&ms__world.board->failed_backward, &was, epoch)) {}
}

// Does not count an error that this rank has not met yet: that error will make work of this rank fail later.
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
    ms__world.step = -1;  // the error may end the loop of steps, so ranks may be at different steps now
    // One error may end several collectives. This rank meets the error when it waits for the first of them.
    if (epoch != ms__comm_epoch()) return;
    if (epoch == on_board()) {
        if (text) ms__comm_raised(text);
        return;
    }
    // The message may differ from the published one, because all members detect a mismatch by themselves.
    met(epoch, text ? text : error_after(epoch, NULL));
    ms__state.dist_failures++;
}

ms_status ms__comm_meet_error(void)
{
    if (MS_LIKELY(on_board() == ms__comm_epoch()) || ms__comm_repeated()) return MS_OK;
    ms__comm_reported(ms__comm_epoch(), NULL);
    return ms__fail(MS_ECOMM, "%s", met_text);
}

__attribute__((constructor)) static void observe_streams(void)
{
    ms__stream_observer =
        (ms_stream_observer) { .epoch = ms__comm_epoch, .reported = ms__comm_reported, .check = ms__flights_check };
}
