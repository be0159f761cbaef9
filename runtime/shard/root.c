// SPDX-License-Identifier: MIT
// shard/root.c -- the context that all units of a root share. Lazy initialisation makes it, errors reset it, and a unit
// leaves it when the unit's module is collected or the unit gets a new root.
#include <stdio.h>

#include "shard/gather.h"
#include "shard/root.h"
#include "shard/views/views.h"

static context *contexts;

context *ms__contexts(void) { return contexts; }

// Whether an initialised unit may get a new root, because a script has wrapped a module around it again; roots may not.
static bool may_change_root(const unit *u)
{
    const context *c = u->context;
    return u->views->rewraps && c->root != u && ms__unit_idle(u) && !c->in_backward && !c->reducing.owner;
}

ms_status ms_unit_lazy_init(double root_handle, int n, const double *handles)
{
    unit *root = ms__unit(root_handle);
    if (!root) return ms__failure();
    context *c = calloc(1, sizeof *c);
    if (c) c->units = calloc((size_t)n + 1, sizeof *c->units);
    if (!c || !c->units) {
        free(c);
        return ms__no_memory(sizeof *c + ((size_t)n + 1) * sizeof *c->units, "fsdp", "lazy initialisation of %d units",
                             n);
    }
    ms_status st = MS_OK;
    char names[1024] = "";
    for (int k = 0; k < n && st == MS_OK; k++) {
        unit *u = c->units[k] = ms__unit(handles[k]);
        if (!u) {
            st = ms__failure();
        } else if (u->context && !may_change_root(u)) {
            st = ms__fail(MS_ESTATE,
                          "FSDP state has already been lazily initialized for %s\nFSDP requires running forward "
                          "through the root module first",
                          u->name);
        } else if ((st = ms__unit_check_home(u)) != MS_OK) {
            break;
        } else if (ms__is_meta(u->memory.device) && !names[0]) {
            ms__unit_list(u, NULL, names, sizeof names);
        }
    }
    if (st == MS_OK && names[0])
        st = ms__fail(MS_ESTATE,
                      "FSDP parameters should be materialized from meta device before training, but the following were "
                      "still on meta device: [%s]\n"
                      "For example, call module.to_empty(device) to materialize to device and call "
                      "module.reset_parameters() on each module to initialize values.",
                      names);
    if (st != MS_OK) {
        free(c->units);
        free(c);
        return st;
    }
    for (int k = 0; k < n; k++)
        if (c->units[k]->context) ms__context_leave(c->units[k]);
    c->root = root;
    c->n = n;
    c->is_last_backward = true;
    c->failures = ms__comm_failures();
    c->next = contexts;
    contexts = c;
    for (int k = 0; k < n; k++) {
        c->units[k]->context = c;
        c->units[k]->model = root->serial;
        if (c->units[k]->settings.reshard_after_forward < 0) {
            c->units[k]->settings.reshard_after_forward = c->units[k] != root;
            c->units[k]->settings.by_rule = c->units[k] == root;
        }
    }
    return MS_OK;
}

static void forget_unit(unit_list *list, const unit *u)
{
    for (int k = list->n; k-- > 0;)
        if (list->units[k] == u) list->units[k] = list->units[--list->n];
}

void ms__context_leave(unit *u)
{
    context *c = u->context;
    if (!c) return;
    if (c->reducing.owner == u) ms__reduction_drop(&c->reducing);
    int n = 0;
    for (int k = 0; k < c->n; k++)
        if (c->units[k] != u) c->units[n++] = c->units[k];
    c->n = n;
    c->n_last = c->n_order = c->n_entered = 0;
    if (c->opened == u) c->opened = NULL;
    if (c->root == u) c->root = NULL;
    for (int k = 0; k < c->n; k++) {
        forget_unit(&c->units[k]->settings.forward_prefetch, u);
        forget_unit(&c->units[k]->settings.backward_prefetch, u);
    }
    if (c->n == 0) {
        context **at = &contexts;
        while (*at != c) at = &(*at)->next;
        *at = c->next;
        free(c->units);
        free(c->order);
        free(c->last);
        free(c->entered);
        free(c);
    }
}

// ---- errors ------------------------------------------------------------------------------------

void ms__unit_drop_pending(context *c)
{
    for (int k = 0; k < c->n; k++) {
        unit *u = c->units[k];
        for (int j = 0; j < u->n; j++) ms__drop(&u->params[j].pending);
        u->views->drop_waiting(u);
        u->gradients.lost |= u->gradients.accumulated;
        u->gradients.accumulated = false;
    }
}

ms_status ms_unit_drop_saved_grad(ms_id id)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return ms__failure();
    unit_param *p = t->unit_param;
    if (!p && t->leaf && t->leaf->grad) t->leaf->grad->rank_local = false;
    if (!p || (p->owner->context && p->owner->context->in_backward)) return MS_OK;
    unit *u = p->owner;
    ms__drop(&p->saved);
    u->gradients.lost = false;
    if (!u->gradients.accumulated || u->gradients.failures == ms__state.dist_failures) return MS_OK;
    ms__drop(&p->pending);
    if (u->views->clear_waiting) u->views->clear_waiting(p);
    u->gradients.accumulated = u->gradients.partial != NULL;
    for (int j = 0; j < u->n; j++) u->gradients.accumulated |= u->params[j].pending != NULL;
    return MS_OK;
}

// After an error of any rank, makes the state of units equal on all ranks: reshards idle units and discards the records
// of passes and of the order in which forwards entered units. (An error ends work at different points on different
// ranks, so a unit may be whole on one and sharded on another.) After a failed backward also drops pending gradients,
// because some ranks have reduced theirs already.
void ms__unit_after_errors(unit *u)
{
    context *c = u->context;
    if (!c) return;
    ms_failures now = ms__comm_failures();
    if (MS_LIKELY(c->failures.work == now.work)) return;
    if (c->failures.backwards != now.backwards) ms__unit_drop_pending(c);
    c->failures = now;
    for (int k = 0; k < c->n; k++) {
        if (!ms__unit_idle(c->units[k])) continue;
        ms__unit_shard(c->units[k]);
        ms__unit_drop_post(c->units[k]);
    }
    c->n_order = c->n_last = c->n_entered = 0;
}
