// SPDX-License-Identifier: MIT
// autograd/saved.c -- what nodes have saved: checks before backward reads it, and inputs that backward computes again
// because the node did not keep them.
#include "autograd/graph.h"
#include "autograd/owner.h"

ms_status ms__used_up(const ms_node *n)
{
    return ms__fail(MS_ESTATE,
                    "backward: this part of the graph was used by an earlier backward, which freed what %s had saved; "
                    "give the first one { retain_graph = true } to go through it again",
                    n->op                           ? n->op->name
                    : n->kind == MS_NODE_CHECKPOINT ? "a checkpoint"
                                                    : "a Function");
}

// Fails if a saved tensor was modified after it was saved.
static ms_status check_versions(const char *op, const char *role, int n, ms_tensor *const *saved,
                                const uint32_t *version)
{
    for (int k = 0; k < n; k++) {
        const ms_tensor *t = saved[k];
        if (MS_LIKELY(!t || t->version->count == version[k])) continue;
        const char *quote = t->name ? "'" : "";
        return ms__fail(MS_ESTATE,
                        "backward: %s %d of %s, %s%s%s%s%s%s, was changed in place after it was saved for backward: it "
                        "is at version %u, saved at version %u",
                        role, k + 1, op, ms__tensor_text(t), t->name ? " (" : "", quote, t->name ? t->name : "", quote,
                        t->name ? ")" : "", t->version->count, version[k]);
    }
    return MS_OK;
}

ms_status ms__check_saved(const ms_node *n)
{
    MS_TRY(check_versions(n->op->name, "input", n->n_in, n->in, n->in_version));
    return check_versions(n->op->name, "output", n->n_out, n->out, n->out_version);
}

// ---- inputs computed again ----------------------------------------------------------------------

ms_status ms_recompute(ms_id id)
{
    const ms_tensor *t = ms__tensor(id);
    if (!t) return ms__failure();
    ms_node *n = t->node;
    if (!n) return MS_OK;
    bool kept =
        n->kind == MS_NODE_OP && n->n_out == 1 && !n->out[0] && !(n->op->flags & (MS_OP_INPLACE | MS_OP_RANDOM));
    for (int k = 0; k < n->n_in && kept; k++) kept = !n->in_meta[k].present || n->in[k] || n->in_version[k] == MS_AGAIN;
    if (!kept)
        return ms__fail(
            MS_EINVAL,
            "recompute: %s was made by %s, expected an operator with one output that keeps all of its inputs "
            "and not its output for backward, and is neither in place nor random",
            ms__tensor_text(t), n->op ? ms__op_title(n->op->name) : "a function, checkpoint or module");
    n->use |= 1;
    return MS_OK;
}

void ms__drop_again(ms_node *n)
{
    for (int k = 0; k < n->n_in; k++)
        if (n->in_version[k] == MS_AGAIN) ms__drop(&n->in[k]);
}

ms_status ms__compute_again(ms_node *n)
{
    ms_status st = MS_OK;
    for (int k = 0; k < n->n_in && st == MS_OK; k++) {
        if (n->in_version[k] != MS_AGAIN) continue;
        ms_node *made_by = n->edges[k].node;
        if (made_by->freed) return ms__used_up(made_by);
        st = ms__check_saved(made_by);
        if (st == MS_OK) st = ms__compute_again(made_by);
        const ms_op_args a = { made_by->n_in, made_by->in, made_by->n_i, made_by->i, made_by->n_f, made_by->f };
        if (st == MS_OK) st = ms__run_op(made_by->op, &a, 1, &n->in[k]);
        ms__drop_again(made_by);
    }
    return st;
}

ms_status ms__read_parameters(ms_run *r, const ms_node *n, bool *started)
{
    for (int k = 0; k < n->n_in && !*started; k++) {
        if (n->in[k] && n->in[k]->storage->kind == MS_MEMORY_GATHERED)
            MS_TRY(ms__run_owner->read(r, n->in[k]->storage, started));
        else if (MS_UNLIKELY(n->in_version[k] == MS_AGAIN)) MS_TRY(ms__read_parameters(r, n->edges[k].node, started));
    }
    return MS_OK;
}
