// SPDX-License-Identifier: MIT
// comm/memory/group.c -- the groups of ranks.
#include "comm/memory/group.h"
#include "comm/memory/control.h"

static ms_group *world_group, *self_group;
ms_group *ms__meeting;
static double next_group = FIRST_MADE;
static ms_group **other_groups;  // made by new_group, in ascending order of id
static int n_others, cap_others;

static ms_group *group_new(double id, int n, const int *ranks)
{
    ms_group *g = calloc(1, sizeof *g);
    int *copy = malloc((size_t)n * sizeof *copy);
    if (!g || !copy) {
        free(g);
        free(copy);
        ms__no_memory(sizeof *g + (size_t)n * sizeof *copy, "dist", "a group of %d ranks", n);
        return NULL;
    }
    g->id = id;
    g->n = n;
    g->me = -1;
    g->ranks = copy;
    for (int k = 0; k < n; k++) {
        copy[k] = ranks ? ranks[k] : k;
        if (copy[k] == ms__world.rank) g->me = k;
    }
    return g;
}

static void group_drop(ms_group *g)
{
    free(g->ranks);
    free(g);
}

static ms_status make_meeting(void)
{
    if (!(ms__meeting = group_new(MEETING, ms__world.size, NULL))) return MS_ENOMEM;
    return ms__group_place(ms__meeting);
}

ms_status ms__groups_start(void)
{
    if (world_group) {
        // Before dist.init the world group is this process alone. Units may hold it, so the same object becomes the
        // group of all ranks.
        if (world_group->n == ms__world.size) return MS_OK;
        ms_group *g = group_new(WORLD, ms__world.size, NULL);
        if (!g) return MS_ENOMEM;
        *world_group = *g;
        free(g);
        self_group->ranks[0] = ms__world.rank;
        MS_TRY(ms__group_place(world_group));
        return make_meeting();
    }
    int me = ms__world.rank;
    if (!self_group) self_group = group_new(SELF, 1, &me);
    ms_group *world = self_group ? group_new(WORLD, ms__world.size, NULL) : NULL;
    if (!world) return MS_ENOMEM;
    world_group = world;
    MS_TRY(ms__group_place(world_group));
    return ms__world.up ? make_meeting() : MS_OK;
}

ms_group *ms__group_world(void)
{
    if (!world_group) ms__groups_start();
    return world_group;
}

// The index in other_groups of the first group whose id is not below `id`.
static int place_of(double id)
{
    int from = 0, to = n_others;
    while (from < to) {
        int k = from + (to - from) / 2;
        if (other_groups[k]->id < id) from = k + 1;
        else to = k;
    }
    return from;
}

ms_group *ms__group_by_id(double id)
{
    if (id == WORLD) return ms__group_world();
    if (id == SELF) {
        ms__group_world();
        return self_group;
    }
    int k = place_of(id);
    if (k < n_others && other_groups[k]->id == id) return other_groups[k];
    ms__fail(MS_EINVAL,
             id >= FIRST_MADE && id < next_group ? "dist: this group was freed by dist.free_group"
                                                 : "dist: there is no group %g",
             id);
    return NULL;
}

ms_status ms__groups_grow(const char *call)
{
    return ms__grow(&other_groups, &cap_others, n_others, sizeof *other_groups, call, "groups");
}

ms_group *ms__group_make(int n, const int *ranks)
{
    ms_group *g = group_new(next_group, n, ranks);
    if (!g) return NULL;
    if (ms__group_place(g) == MS_OK) return g;
    group_drop(g);
    return NULL;
}

double ms__group_list(ms_group *g)
{
    g->epoch = ms__comm_epoch();
    other_groups[n_others++] = g;
    return next_group++;
}

void ms__group_end(ms_group *g, bool used)
{
    if (used) {
        int k = place_of(g->id);
        memmove(&other_groups[k], &other_groups[k + 1], (size_t)(--n_others - k) * sizeof *other_groups);
    }
    ms__group_unplace(g, used);
    g->freed = true;
    if (g->holders == 0) group_drop(g);
}

ms_group *ms__group_hold(ms_group *g)
{
    if (g) g->holders++;
    return g;
}

void ms__group_release(ms_group *g)
{
    if (g && --g->holders == 0 && g->freed) group_drop(g);
}

int ms__group_rank(const ms_group *g) { return g->me; }
int ms__group_size(const ms_group *g) { return g->n; }
bool ms__group_near(const ms_group *g) { return !g->far; }
bool ms__group_maps(const ms_group *g) { return !g->far && !g->communicator; }
bool ms__group_stays(const ms_group *g) { return !g->far || g->communicator; }
