// SPDX-License-Identifier: MIT
// comm/script/recover.c -- refused calls, and recovery from broken groups (comm/watch/broken.c).
//
// ms_dist_recover makes all ranks meet in a group of their own, which never breaks, and begin the next epoch, in which
// collectives are numbered from 1.
//
// A call that a rank refuses takes the number of the collective that it stands for. A peer that makes that collective
// finds the refusal in the slot and breaks the group; if all members refuse, nobody reads it. The number of refused
// calls is part of a request, so that later collectives do not match either, while one in the background has not found
// it yet.
#include <stdio.h>
#include "device/capture.h"
#include "comm/issue/issue.h"
#include "comm/issue/make.h"
#include "comm/memory/board.h"
#include "comm/memory/control.h"
#include "comm/recover.h"
#include "comm/watch/watch.h"

static struct {  // engine thread only
    ms_failures failures;
    const char *text;        // of failed work while it takes a number in each group
    int culprit;             // the rank that failed; -1: `text` says which
    char latest[TEXT];       // the error of the latest failed work
    uint64_t latest_issued;  // ms__comm_issued after it
    int in_flight;           // collectives, as last counted
} now;

ms_failures ms__comm_failures(void) { return now.failures; }

// ---- refused calls ------------------------------------------------------------------------------------

static bool has_peers(void) { return ms__world.up && ms__world.size > 1 && !ms__world.stopped; }

// Takes the next number of g for a call that failed because of an error of rank `culprit`; -1: `text` says whose.
static void refuse_call(ms_group *g, const char *text, int culprit, const char *site)
{
    uint64_t epoch = ms__comm_epoch();
    if (g->me < 0 || g->n == 1 || g->freed || g == ms__meeting || ms__is_broken(g, epoch)) return;
    ms_request r = { .group = g, .op = OP_REFUSED, .refusal = text, .root = culprit, .label = { .site = site } };
    ms_coll *c = NULL;
    if ((ms__coll_make(&r, &c) == MS_OK && ms__coll_issue(c, NULL) == MS_OK) || ms__is_broken(g, epoch)) return;
    if (culprit < 0) ms__break(g, epoch, text);
    else ms__break_by_me(g, epoch, text);
}

void ms_dist_refused(double group, const char *text, const char *site, double since)
{
    // If dist_failures has grown, the call has failed in a collective, which has broken its group.
    if (!has_peers() || ms__state.dist_failures != (int32_t)since) return;
    ms_group *g = group < 0 ? ms__pair_by_id(group) : ms__group_by_id(group);
    if (!g) return;
    ms_captured *recording = ms__capture_suspend();
    refuse_call(g, text, ms__world.rank, site);
    ms__capture_resume(recording);
    ms__state.dist_failures++;
    ms__errors.failed = true;
}

static void refuse_in(ms_group *g)
{
    if (g->id >= 0) refuse_call(g, now.text, now.culprit, NULL);
}

void ms__comm_failed(const char *text, bool backward)
{
    now.failures.work++;
    now.failures.backwards += backward;
    if (!has_peers()) return;
    ms__errors.backward |= backward;
    ms__errors.failed = true;
    ms__state.dist_failures++;
    ms_status code = ms__failure();  // the caller's error is kept
    char kept[4096], whole[TEXT];
    snprintf(kept, sizeof kept, "%s", ms_error());
    bool known = ms__errors.reason[0] && strstr(text, ms__errors.reason);
    snprintf(whole, sizeof whole, "%s", known ? ms__errors.reason : text);
    // Outer work fails with the error of its inner work, which has taken the number already.
    if (now.latest_issued == ms__comm_issued && now.latest[0] && strstr(whole, now.latest)) return;
    snprintf(now.latest, sizeof now.latest, "%s", whole);
    now.text = whole;
    now.culprit = known ? -1 : ms__world.rank;
    ms_captured *recording = ms__capture_suspend();
    ms__each_group(refuse_in);
    ms__capture_resume(recording);
    now.latest_issued = ms__comm_issued;
    if (code != MS_OK) ms__fail(code, "%s", kept);
}

void ms_dist_failed(const char *text) { ms__comm_failed(text, false); }

// ---- recovery -----------------------------------------------------------------------------------------

static void count_in_flight(ms_group *g) { now.in_flight += g->in_flight; }
static int count_flights(void)
{
    ms__streams_join();
    now.in_flight = 0;
    ms__each_group(count_in_flight);
    return now.in_flight;
}
static void note_broken(ms_group *g) { ms__errors.failed |= g->n > 1 && ms__is_broken(g, ms__comm_epoch()); }
static void end_flights(ms_group *g)
{
    if (g->n > 1) ms__break_here(g, ms__comm_epoch(), "dist.recover ended this collective");
}
static void begin_anew(ms_group *g)
{
    g->epoch = ms__comm_epoch();
    g->seq = g->refused = 0;
}

// Makes all ranks meet. Returns whether one of them has an error to recover from, and whether a backward has failed.
static ms_status meet_ranks(const char *site, bool *failed, bool *backward)
{
    ms_tensor *t = NULL;
    int64_t n = 2;
    MS_TRY(ms__tensor_new(&t, MS_U8, MS_CPU, 1, &n, "dist.recover"));
    uint8_t *flags = ms__data(t);
    flags[0] = ms__errors.failed;
    flags[1] = ms__errors.backward;
    ms_request r = { .group = ms__meeting,
                     .op = MS_DIST_ALL_REDUCE,
                     .reduction = MS_MAX,
                     .out = t,
                     .label = { .site = site, .alias = RECOVER } };
    ms_status status = ms__collective(&r, NULL);
    *failed = flags[0];
    *backward = flags[1];
    ms__release(t);
    return status;
}

ms_status ms_dist_recover(const char *site, int background)
{
    bool failed, backward;
    if (!has_peers()) return MS_OK;
    if (ms__recording) return ms__capture_refuse("dist.recover cannot be captured");
    if (ms__state.run_depth)
        return ms__fail(MS_ESTATE, "dist.recover: it cannot be called inside a backward or its hooks");
    ms_dist_set_step(-1);
    ms__each_group(note_broken);
    if (count_flights() && background) ms__errors.failed = true;
    MS_TRY(meet_ranks(site, &failed, &backward));
    if (!failed) return MS_OK;
    ms__each_group(end_flights);
    for (int64_t since = ms__now_ns(); count_flights(); ms__nap(100 * 1000))
        if ((double)(ms__now_ns() - since) * 1e-9 > ms__world.timeout)
            return ms__fail(MS_ECOMM, "dist.recover: %d collective%s in the background did not end within %g s",
                            now.in_flight, now.in_flight == 1 ? "" : "s", ms__world.timeout);
    atomic_fetch_add(&ms__world.epoch, 1);
    ms__each_group(begin_anew);
    now.failures.work++;
    now.failures.backwards += backward;
    ms__state.dist_failures++;
    ms__errors.failed = ms__errors.backward = false;
    ms__errors.reason[0] = now.latest[0] = 0;
    return MS_OK;
}

void ms_dist_set_lines(double ended)
{
    if (ms__world.board) atomic_store(&ms__world.board->rank[ms__world.rank].lines, (int64_t)ended);
}
