// SPDX-License-Identifier: MIT
// autograd/captured.c -- notes the grads of leaves that a captured step reads and sets.
#include <stdio.h>

#include "autograd/captured.h"

// What a repetition needs of a leaf's grad. ANY: nothing, because the step sets or clears the grad first; NONE: that it
// is not set; SAME: the tensor that was the grad when the step was recorded.
typedef enum { ANY, NONE, SAME } need;

typedef struct {
    ms_tensor *t;               // the leaf's tensor
    ms_tensor *before, *after;  // the grad that is needed; the grad at the step's end; NULL: none
    need need;
} noted;

struct ms_noted {
    noted *list;
    int n, cap;
    int *by_leaf;  // hash table by leaf: 1 + index in list; 0: free
    int size;
};

static int slot_of_note(const struct ms_noted *k, const void *t)
{
    return (int)(ms__hash_value(1, (uint64_t)(uintptr_t)t) >> 24 & (uint64_t)(k->size - 1));
}

static bool rehash_notes(struct ms_noted *k)
{
    int size = k->size ? 2 * k->size : 256, *table = calloc((size_t)size, sizeof *table);
    if (!table) return false;
    free(k->by_leaf);
    k->by_leaf = table;
    k->size = size;
    for (int i = 0; i < k->n; i++) {
        int h = slot_of_note(k, k->list[i].t);
        while (table[h]) h = (h + 1) & (size - 1);
        table[h] = i + 1;
    }
    return true;
}

static void note(ms_captured *c, ms_leaf *l, need what)
{
    struct ms_noted *k = c->noted;
    if (!l->tensor) return;
    if (!k) k = c->noted = calloc(1, sizeof *k);
    if (!k || (2 * (k->n + 1) > k->size && !rehash_notes(k))) {
        ms__capture_no_memory(c);
        return;
    }
    int h = slot_of_note(k, l->tensor);
    for (; k->by_leaf[h]; h = (h + 1) & (k->size - 1))
        if (k->list[k->by_leaf[h] - 1].t == l->tensor) return;
    if (ms__grow(&k->list, &k->cap, k->n, sizeof *k->list, "captured step", "grads")) {
        ms__capture_no_memory(c);
        return;
    }
    k->list[k->n] =
        (noted) { .t = ms__retain(l->tensor), .before = what == SAME ? ms__retain(l->grad) : NULL, .need = what };
    k->by_leaf[h] = ++k->n;
}

void ms__note_grad_read(ms_captured *c, ms_leaf *l) { note(c, l, l->grad ? SAME : NONE); }
void ms__note_grad_set(ms_captured *c, ms_leaf *l, const ms_tensor *g) { note(c, l, g && !l->grad ? NONE : ANY); }

static ms_tensor *grad_of(const ms_tensor *t) { return t->leaf ? t->leaf->grad : NULL; }

static int by_block(const void *a, const void *b)
{
    const ms_block *x = *(ms_block *const *)a, *y = *(ms_block *const *)b;
    return x < y ? -1 : x > y;
}

ms_status ms__captured_grads_end(ms_captured *c, int *pinned)
{
    struct ms_noted *k = c->noted;
    *pinned = 0;
    if (!k) return MS_OK;
    int n = 0;
    ms_block **blocks = malloc((size_t)(k->n + 1) * sizeof *blocks);
    if (!blocks) return ms__no_memory((size_t)k->n * sizeof *blocks, "captured step", "the list of grads");
    for (int i = 0; i < k->n; i++) {
        ms_tensor *g = grad_of(k->list[i].t);
        k->list[i].after = ms__retain(g);
        if (g && g->storage->block && g->storage->block->pins == c->pins) blocks[n++] = g->storage->block;
    }
    qsort(blocks, (size_t)n, sizeof *blocks, by_block);
    for (int i = 0; i < n; i++) *pinned += i == 0 || blocks[i] != blocks[i - 1];
    free(blocks);
    return MS_OK;
}

static const char *named(const ms_tensor *t)
{
    static char text[400];
    if (t->name) snprintf(text, sizeof text, "parameter '%s' (%s)", t->name, ms__tensor_text(t));
    else snprintf(text, sizeof text, "leaf %s", ms__tensor_text(t));
    return text;
}

ms_status ms__captured_grads_check(const ms_captured *c)
{
    const struct ms_noted *k = c->noted;
    for (int i = 0; k && i < k->n; i++) {
        const noted *l = &k->list[i];
        if (MS_LIKELY(l->need == ANY || grad_of(l->t) == l->before)) continue;
        if (l->need == NONE)
            return ms__fail(MS_ESTATE,
                            "captured step: %s has a grad, but had none when the step was recorded; call zero_grad in "
                            "the step, or before each call of it",
                            named(l->t));
        return ms__fail(MS_ESTATE,
                        "captured step: the grad of %s is not the tensor that the step added to when it was recorded; "
                        "clear the grads in the step, or capture the step again",
                        named(l->t));
    }
    return MS_OK;
}

void ms__captured_grads_set(const ms_captured *c, void (*set)(ms_leaf *l, ms_tensor *grad))
{
    const struct ms_noted *k = c->noted;
    for (int i = 0; k && i < k->n; i++) {
        const noted *l = &k->list[i];
        if (grad_of(l->t) != l->after && l->t->leaf) set(l->t->leaf, ms__retain(l->after));
    }
}

void ms__captured_grads_forget(ms_captured *c)
{
    struct ms_noted *k = c->noted;
    if (!k) return;
    for (int i = 0; i < k->n; i++) {
        ms__release(k->list[i].before);
        ms__release(k->list[i].after);
        ms__release(k->list[i].t);
    }
    free(k->list);
    free(k->by_leaf);
    free(k);
    c->noted = NULL;
}
