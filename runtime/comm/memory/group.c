// SPDX-License-Identifier: MIT
// comm/memory/group.c -- the groups of ranks.
#include "comm/memory/group.h"
#include "comm/memory/control.h"

static struct {
    ms_group *world, *self;
    double next_id;
    ms_group **others;  // made by new_group, in ascending order of id
    int n, cap;
} made = { .next_id = FIRST_MADE };
ms_group *ms__meeting;

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
    if (made.world) {
        // Before dist.init the world group is this process alone. Units may hold it, so the same object becomes the
        // group of all ranks.
        if (made.world->n == ms__world.size) return MS_OK;
        ms_group *g = group_new(WORLD, ms__world.size, NULL);
        if (!g) return MS_ENOMEM;
        *made.world = *g;
        free(g);
        made.self->ranks[0] = ms__world.rank;
        MS_TRY(ms__group_place(made.world));
        return make_meeting();
    }
    int me = ms__world.rank;
    if (!made.self) made.self = group_new(SELF, 1, &me);
    ms_group *world = made.self ? group_new(WORLD, ms__world.size, NULL) : NULL;
    if (!world) return MS_ENOMEM;
    made.world = world;
    MS_TRY(ms__group_place(made.world));
    return ms__world.up ? make_meeting() : MS_OK;
}

ms_group *ms__group_world(void)
{
    if (!made.world) ms__groups_start();
    return made.world;
}

// The index in other_groups of the first group whose id is not below `id`.
static int index_of_group(double id)
{
    int from = 0, to = made.n;
    while (from < to) {
        int k = from + (to - from) / 2;
        if (made.others[k]->id < id) from = k + 1;
        else to = k;
    }
    return from;
}

ms_group *ms__group_by_id(double id)
{
    if (id == WORLD) return ms__group_world();
    if (id == SELF) {
        ms__group_world();
        return made.self;
    }
    int k = index_of_group(id);
    if (k < made.n && made.others[k]->id == id) return made.others[k];
    ms__fail(MS_EINVAL,
             id >= FIRST_MADE && id < made.next_id ? "dist: this group was freed by dist.free_group"
                                                   : "dist: there is no group %g",
             id);
    return NULL;
}

ms_status ms__groups_grow(const char *call)
{
    return ms__grow(&made.others, &made.cap, made.n, sizeof *made.others, call, "groups");
}

ms_group *ms__group_make(int n, const int *ranks)
{
    ms_group *g = group_new(made.next_id, n, ranks);
    if (!g) return NULL;
    if (ms__group_place(g) == MS_OK) return g;
    group_drop(g);
    return NULL;
}

double ms__group_list(ms_group *g)
{
    g->epoch = ms__comm_epoch();
    made.others[made.n++] = g;
    return made.next_id++;
}

void ms__group_end(ms_group *g, bool used)
{
    if (used) {
        int k = index_of_group(g->id);
        memmove(&made.others[k], &made.others[k + 1], (size_t)(--made.n - k) * sizeof *made.others);
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
