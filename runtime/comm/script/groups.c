// SPDX-License-Identifier: MIT
// comm/script/groups.c -- groups that scripts make and free.
#include <stdio.h>
#include "base/watched.h"
#include "device/device.h"
#include "comm/movers/mover.h"

// A barrier of the world. Fails on all ranks unless all pass the same `group`, a hash.
static ms_status agree_on_group(uint64_t group, const char *site, const char *text)
{
    return ms__collective(&(ms_request) { .group = ms__group_world(),
                                          .op = MS_DIST_BARRIER,
                                          .agreed = group,
                                          .label = { .unit = text, .site = site } },
                          NULL);
}

static int compare_ranks(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

double ms_dist_new_group(int n, const int32_t *ranks, const char *site)
{
    ms_group *world = ms__group_world();
    if (!world) return -1;
    if (n < 1 || n > world->n) {
        ms__fail(MS_EINVAL, "dist.new_group: %d ranks given, expected 1 to %d, the size of the world", n, world->n);
        return -1;
    }
    if (ms__groups_grow("dist.new_group")) return -1;
    int *sorted = malloc((size_t)n * sizeof *sorted);
    if (!sorted) {
        ms__no_memory((size_t)n * sizeof *sorted, "dist.new_group", "%d ranks", n);
        return -1;
    }
    for (int k = 0; k < n; k++) sorted[k] = ranks[k];
    qsort(sorted, (size_t)n, sizeof *sorted, compare_ranks);
    char text[UNIT_NAME] = "new_group";
    uint64_t hash = MS_HASH_START;
    ms_status status = MS_OK;
    for (int k = 0; k < n && status == MS_OK; k++) {
        if (sorted[k] < 0 || sorted[k] >= world->n)
            status = ms__fail(MS_EINVAL, "dist.new_group: rank %d is not in the world of %d rank%s", sorted[k],
                              world->n, world->n == 1 ? "" : "s");
        else if (k && sorted[k] == sorted[k - 1])
            status = ms__fail(MS_EINVAL, "dist.new_group: rank %d is listed twice", sorted[k]);
        hash = ms__hash_value(hash, (uint64_t)sorted[k]);
        ms__append(text, sizeof text, k ? ", %d" : " %d", sorted[k]);
    }
    ms_group *g = status == MS_OK ? ms__group_make(n, sorted) : NULL;
    free(sorted);
    if (!g) return -1;
    // All ranks must pass the same list; otherwise all get an error. From here on nothing may fail on one rank alone,
    // because groups must have the same places in the control memory on all ranks.
    if (agree_on_group(hash ^ g->place, site, text) != MS_OK || ms__movers_join(g) != MS_OK) {
        ms__group_end(g, false);
        return -1;
    }
    return ms__group_list(g);
}

// Waits until all queued collectives of g have been retired: afterwards no worker accesses g, and the works of these
// collectives are complete.
static ms_status finish_group(ms_group *g)
{
    ms_status status = MS_OK;
    // ms__streams_join also frees collectives that have run on a GPU and that the script has not waited for. Otherwise
    // in_flight would never reach 0.
    for (ms__streams_join(); g->in_flight > 0 && status == MS_OK; ms__streams_join()) {
        for (int k = 0; k < RING; k++)
            // Tells checks for deadlocks which queue this rank waits for.
            if (atomic_load(&g->finished[k]) < g->issued[k])
                atomic_store(ms__engine_waits, g->heads[g->me].executor[k]);
        ms__nap(100 * 1000);
        status = ms__check_interrupt();
    }
    atomic_store(ms__engine_waits, -1);
    return status;
}

ms_status ms_dist_free_group(double id, const char *site)
{
    if (id == WORLD || id == SELF)
        return ms__fail(MS_EINVAL, "dist.free_group: the group of %s was not made by dist.new_group",
                        id == WORLD ? "all ranks" : "this rank alone");
    ms_group *g = ms__group_by_id(id);
    if (!g) return MS_EINVAL;
    char text[UNIT_NAME];
    snprintf(text, sizeof text, "free_group of group %.0f (ranks",
             id);  // the id distinguishes groups of the same ranks
    for (int k = 0; k < g->n; k++) ms__append(text, sizeof text, k ? ", %d" : " %d", g->ranks[k]);
    ms__append(text, sizeof text, ")");
    if (g->n > 1) MS_TRY(finish_group(g));
    MS_TRY(agree_on_group((uint64_t)id ^ g->place << 20, site, text));
    MS_TRY(ms__movers_part(g));
    ms__group_end(g, true);
    return MS_OK;
}
