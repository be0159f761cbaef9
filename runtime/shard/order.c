// SPDX-License-Identifier: MIT
// shard/order.c -- the order in which units run: the uses of a unit, the recorded forward order, and prefetching by it.
#include <stdio.h>

#include "shard/gather.h"
#include "shard/order.h"

// ---- uses -------------------------------------------------------------------------------------

unit *ms__unit_of_token(void *token)
{
    unit *u = ms__unit((double)(uint64_t)(uintptr_t)token);
    if (!u) ms__clear_error();
    return u;
}

int ms__unit_active(const unit *u, int64_t use)
{
    for (int k = 0; k < u->pass.n_active; k++)
        if (u->pass.active[k].use == use) return k;
    return -1;
}

ms_status ms__unit_activate(unit *u, int64_t use, ms_run *run)
{
    MS_TRY(ms__grow(&u->pass.active, &u->pass.cap_active, u->pass.n_active, sizeof *u->pass.active, "fsdp",
                    "uses of a unit"));
    u->pass.active[u->pass.n_active].use = use;
    u->pass.active[u->pass.n_active++].run = run;
    return MS_OK;
}

void ms__unit_deactivate(unit *u, int k) { u->pass.active[k] = u->pass.active[--u->pass.n_active]; }

// ---- order ------------------------------------------------------------------------------------

ms_status ms__order_push(context *c, unit *u, int64_t use, int64_t pass, bool regional)
{
    MS_TRY(ms__grow(&c->order, &c->cap_order, c->n_order, sizeof *c->order, "fsdp", "the forward order"));
    c->order[c->n_order++] = (order_entry) { .unit = u, .use = use, .pass = pass, .regional = regional };
    return MS_OK;
}

// Searches from the end, because a backward runs the passes in reverse order.
int ms__order_find(const context *c, int64_t use)
{
    int k = c->n_order - 1;
    while (k >= 0 && c->order[k].use != use) k--;
    return k;
}

// Records that this forward entered u. The next forward prefetches units in the order in which this one entered them.
void ms__order_entered(context *c, unit *u)
{
    // If there is no memory for the list, nothing is prefetched.
    if (ms__grow(&c->entered, &c->cap_entered, c->n_entered, sizeof *c->entered, "fsdp", "the forward order")) return;
    c->entered[c->n_entered++] = u;
}

// The unit that the last complete forward (c->last) entered `ahead` units after the one that this forward has just
// entered; NULL if the last forward entered another unit at this point of its order, or no more units.
static unit *forward_successor(const context *c, int ahead)
{
    int at = c->n_entered - 1;
    if (at < 0 || at + ahead >= c->n_last || c->last[at] != c->entered[at]) return NULL;
    return c->last[at + ahead];
}

// The number of u's passes that have had no backward yet.
int ms__order_passes_left(const unit *u)
{
    const context *c = u->context;
    int n = 0;
    int64_t counted = 0;
    for (int k = 0; k < c->n_order; k++) {
        if (c->order[k].unit != u || c->order[k].done || c->order[k].pass == counted) continue;
        counted = c->order[k].pass;
        n++;
    }
    return n;
}

bool ms__order_pass_waits(const context *c, int at)
{
    for (int k = 0; k < c->n_order; k++)
        if (c->order[k].pass == c->order[at].pass && !c->order[k].done) return true;
    return false;
}

// ---- prefetching ------------------------------------------------------------------------------

static ms_status prefetch(unit *u, const char *pass)
{
    MS_RANGE(MS_RANGE_FSDP, ms__trace_text("FSDP::%s_prefetch for %s", pass, u->name), NULL);
    return ms__unit_start_gather(u, true, true);
}

ms_status ms__prefetch_forward(unit *u)
{
    if (u->settings.forward_prefetch.n) {
        for (int k = 0; k < u->settings.forward_prefetch.n; k++)
            if (u->settings.forward_prefetch.units[k]->memory.n_extensions == 0)
                MS_TRY(prefetch(u->settings.forward_prefetch.units[k], "forward"));
        return MS_OK;
    }
    if (u->settings.checked || !u->settings.prefetches) return MS_OK;
    unit *next;
    for (int ahead = 1; (next = forward_successor(u->context, ahead)); ahead++) {
        if (next->memory.n_extensions == 0 && ms__unit_idle(next)) MS_TRY(prefetch(next, "forward"));
        if (u->settings.limited) break;
    }
    return MS_OK;
}

int ms_unit_prefetches(double handle, double *out, int capacity)
{
    unit *u = ms__unit(handle), *next;
    int n = 0;
    if (!u || !u->context || ms__run_recomputing()) return 0;
    for (int k = 0; k < u->settings.forward_prefetch.n && n < capacity; k++)
        if (u->settings.forward_prefetch.units[k]->memory.n_extensions)
            out[n++] = u->settings.forward_prefetch.units[k]->handle;
    if (u->settings.forward_prefetch.n || !u->settings.prefetches || !(next = forward_successor(u->context, 1)))
        return n;
    if (next->memory.n_extensions && ms__unit_idle(next) && n < capacity) out[n++] = next->handle;
    return n;
}

// Called after the optimizer's step: starts the gather of the first unit with parameters in the latest forward's order,
// if that unit may be gathered early. On the CPU the step, which ran on this thread, is complete; on a GPU the gather
// itself waits for writes to the shard.
ms_status ms_unit_gather_first(double handle)
{
    unit *u = ms__unit(handle);
    if (!u) return ms__failure();
    context *c = u->context;
    if (!c || c->opened || c->in_backward) return MS_OK;
    ms__unit_after_errors(u);
    unit *first = NULL;
    for (int k = 0; k < c->n_last && !first; k++)
        if (c->last[k]->n) first = c->last[k];
    if (!first || first->settings.checked || !first->settings.prefetches || first->memory.n_extensions ||
        !ms__unit_idle(first))
        return MS_OK;
    if (first->state.gathered || first->state.gather || first->state.fetched) return MS_OK;
    MS_TRY(prefetch(first, "forward"));
    first->state.ahead = ms__unit_versions(first) + 1;
    return MS_OK;
}

ms_status ms__prefetch_backward(unit *u, int64_t use)
{
    if (u->settings.backward_prefetch.n) {
        for (int k = 0; k < u->settings.backward_prefetch.n; k++)
            MS_TRY(prefetch(u->settings.backward_prefetch.units[k], "backward"));
        return MS_OK;
    }
    context *c = u->context;
    for (int at = ms__order_find(c, use); at > 0; at--) {
        if (c->order[at - 1].pass == c->order[at].pass) continue;
        unit *before = c->order[at - 1].unit;
        if (before->settings.unshard_in_backward) MS_TRY(prefetch(before, "backward"));
        if (u->settings.limited) break;
    }
    return MS_OK;
}

bool ms__order_extended(const context *c)
{
    for (int k = 0; k < c->n; k++)
        if (c->units[k]->memory.n_extensions) return true;
    return false;
}

// Called when a checkpoint's region that contains u runs again. The backward has then reached u's latest entry in the
// execution order that has no graph yet (`regional`); that entry gets the number `use`. With
// MS_PREFETCH_PRE, the region's next unit is prefetched, or after its last one the unit that the backward needs next.
ms_status ms__order_take_place(unit *u, int64_t use)
{
    context *c = u->context;
    int at = c->n_order - 1, last = at;
    while (at >= 0 && !(c->order[at].regional && c->order[at].unit == u)) at--;
    if (at < 0) return MS_OK;
    c->order[at].regional = false;
    c->order[at].use = use;
    if (u->options.backward_prefetch_at != MS_PREFETCH_PRE || ms__order_extended(c)) return MS_OK;
    while (last > at && !c->order[last].regional) last--;
    if (last == at) return ms__prefetch_backward(u, use);
    unit *next = c->order[at + 1].unit;
    return c->order[at + 1].regional && next->settings.unshard_in_backward ? prefetch(next, "backward") : MS_OK;
}

ms_status ms_unit_set_prefetch(double handle, int backward, int n, const double *others)
{
    unit *u = ms__unit(handle);
    if (!u) return ms__failure();
    unit **list = calloc((size_t)n + 1, sizeof *list);
    if (!list) return ms__no_memory(((size_t)n + 1) * sizeof *list, "fsdp", "a prefetch list");
    for (int k = 0; k < n; k++)
        if (!(list[k] = ms__unit(others[k]))) {
            free(list);
            return ms__failure();
        }
    unit_list *given = backward ? &u->settings.backward_prefetch : &u->settings.forward_prefetch;
    free(given->units);
    *given = (unit_list) { list, n };
    return MS_OK;
}
