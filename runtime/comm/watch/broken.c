// SPDX-License-Identifier: MIT
// comm/watch/broken.c -- whether and why a group is broken, on this node, and what this rank's script has received.
//
// An error in a collective breaks its group: the first member of a node to notice claims the group's ms_broken and
// writes the reason there. Waits in the group end when they see the claim, and later calls fail at once. A break counts
// in one epoch, the number of recoveries so far (ms_dist_recover). comm/watch/break.c tells the other nodes.
#include <sched.h>
#include <stdio.h>
#include "comm/memory/board.h"
#include "comm/watch/watch.h"

ms_errors ms__errors;

bool ms__break_here(ms_group *g, uint64_t epoch, const char *text)
{
    ms_broken *b = g->broken;
    if (g == ms__meeting) return false;
    uint64_t was = atomic_load(&b->claimed);
    while (was <= epoch)
        if (atomic_compare_exchange_weak(&b->claimed, &was, epoch + 1)) {
            atomic_thread_fence(memory_order_release);  // a reader that sees words of the new text also sees the claim
            snprintf(b->text, sizeof b->text, "%s", text);
            atomic_store(&b->written, epoch + 1);
            return true;
        }
    return false;
}

// Waits for the rank that writes the reason, unless that rank was killed.
void ms__broken_reason(const ms_group *g, uint64_t epoch, char *text)
{
    const ms_broken *b = g->broken;
    for (int64_t until = ms__now_ns() + (int64_t)1e9; atomic_load(&b->written) <= epoch && ms__now_ns() < until;)
        sched_yield();
    if (atomic_load(&b->written) > epoch) snprintf(text, TEXT, "%s", b->text);
    else snprintf(text, TEXT, "a peer failed and died before it could say why");
}

ms_status ms__broken_fail(ms_coll *c)
{
    char text[TEXT];
    ms__broken_reason(c->g, c->epoch, text);
    atomic_store(&c->raised, true);
    return ms__fail(MS_ECOMM, "%s", text);
}

bool ms__comm_is_lost(const ms_group *g, uint64_t epoch)
{
    return ms__is_broken(g, epoch) && atomic_load(&ms__world.board->failing);
}

// ---- what this rank's script receives -----------------------------------------------------------------

// Records that the script receives `text`, the error of a collective.
void ms__received(const char *text)
{
    snprintf(ms__errors.reason, sizeof ms__errors.reason, "%s", text);
    ms__world.step = -1;  // the error may end the loop of steps, so ranks may be at different steps now
    ms__state.dist_failures++;
    ms__errors.failed = true;
}

void ms__group_received(ms_group *g)
{
    g->told = ms__comm_epoch() + 1;
    ms__received(ms_error());
}

ms_status ms__group_whole(ms_group *g, const char *call)
{
    uint64_t epoch = ms__comm_epoch();
    if (MS_LIKELY(!ms__is_broken(g, epoch))) return MS_OK;
    char text[TEXT], what[MEMBERS];
    ms__broken_reason(g, epoch, text);
    bool again = g->told == epoch + 1;
    g->told = epoch + 1;
    ms__received(text);
    if (!again) return ms__fail(MS_ECOMM, "%s", text);
    ms__group_text(g, what, sizeof what);
    return ms__fail(MS_ECOMM,
                    "%s: an earlier error broke the group (%s); dist.recover(), called by all ranks, makes it "
                    "whole again; the error was: %s",
                    call, what, text);
}
