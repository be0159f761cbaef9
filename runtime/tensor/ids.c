// SPDX-License-Identifier: MIT
// tensor/ids.c -- ids of tensors (slot and generation), and the scopes that release them.
//
// A slot holds one reference to its tensor. Releasing an id drops that reference and increments the slot's generation,
// so a released id is never valid again; a slot whose generations are used up is retired. A ring records the ids that
// scripts and scopes released most recently, so that an error about a released tensor names the operator that made it
// and the scope that released it.
#include <stdio.h>

#include "tensor/tensor.h"

enum {
    SLOT_BITS = 22,
    CHUNK_BITS = 12,
    CHUNK = 1 << CHUNK_BITS,
    CHUNKS = 1 << (SLOT_BITS - CHUNK_BITS),
    SCOPES = 1 << 16,
    CHAINS = 1 << 12,
    GRAVES = 1 << 14
};
#define GENERATIONS ((uint32_t)1 << 31)  // 31 bits of generation and 22 of slot number: a double holds 53

typedef struct slot {
    ms_tensor *tensor;
    uint32_t generation;
    uint32_t next, prev;  // neighbours in the scope's list or in the free list
    uint32_t scope;       // the scope that owns the id; 0: unscoped
    uint16_t owners;      // number of owners in the engine (ms__own)
    bool collected;       // a finalizer in Lua will release the id
    const char *made_by;  // name of the operator that made the tensor, or NULL
} slot;

typedef struct grave {  // a released id
    ms_id id;
    const char *scope;  // the scope that released the id, interned; NULL: ms_release did
    const char *made_by;
} grave;

typedef struct scope {
    uint32_t generation, parent, head;
    int32_t chain;
    bool open;
    const char *name;
} scope;

static struct {
    slot *chunks[CHUNKS];
    uint32_t n_slots, free_head, free_tail;  // slot 0 is unused
    scope *scopes;
    uint32_t n_scopes, free_scope;
    uint32_t chain_top[CHAINS];
    uint8_t chain_used[CHAINS];
    int chain;
    grave *graves;  // a ring of GRAVES entries; NULL if there was no memory for it
    uint32_t n_graves;
    struct {
        double since;       // bytes of the unscoped tensors made since the last collection, plus 256 for each
        double live;        // bytes of the unscoped tensors alive
        double live_after;  // bytes in use on the CPU right after the last collection
        bool asked;
    } unscoped;
} ids = { .n_slots = 1, .n_scopes = 1 };

static inline slot *slot_at(uint32_t i) { return &ids.chunks[i >> CHUNK_BITS][i & (CHUNK - 1)]; }
static inline ms_id id_of(uint32_t i, const slot *s) { return (ms_id)(((uint64_t)s->generation << SLOT_BITS) | i); }

// The slot of an id that is alive; NULL otherwise. Its index is tensor->slot.
static slot *slot_of_id(ms_id id)
{
    if (!(id >= 1 && id < 9007199254740992.0)) return NULL;
    uint64_t bits = (uint64_t)id;
    uint32_t i = (uint32_t)(bits & ((1u << SLOT_BITS) - 1));
    if (MS_UNLIKELY(i == 0 || i >= ids.n_slots)) return NULL;
    slot *s = slot_at(i);
    return MS_LIKELY(s->generation == bits >> SLOT_BITS && s->tensor) ? s : NULL;
}

static slot *slot_take(uint32_t *index)
{
    if (MS_LIKELY(ids.free_head)) {
        *index = ids.free_head;
        slot *s = slot_at(ids.free_head);
        ids.free_head = s->next;
        if (!ids.free_head) ids.free_tail = 0;
        return s;
    }
    if (ids.n_slots >= 1u << SLOT_BITS) return NULL;
    uint32_t c = ids.n_slots >> CHUNK_BITS;
    if (!ids.chunks[c] && !(ids.chunks[c] = calloc(CHUNK, sizeof(slot)))) return NULL;
    *index = ids.n_slots++;
    slot *s = slot_at(*index);
    s->generation = 1;
    return s;
}

static void link_scope(slot *s, uint32_t to)
{
    s->scope = to;
    s->prev = 0;
    s->next = 0;
    if (!to) return;
    s->next = ids.scopes[to].head;
    if (s->next) slot_at(s->next)->prev = s->tensor->slot;
    ids.scopes[to].head = s->tensor->slot;
}

static void unlink_scope(slot *s)
{
    if (!s->scope) return;
    if (s->prev) slot_at(s->prev)->next = s->next;
    else ids.scopes[s->scope].head = s->next;
    if (s->next) slot_at(s->next)->prev = s->prev;
    s->scope = 0;
}

static inline void remember(const slot *s, const char *scope_name)
{
    if (MS_LIKELY(ids.graves != NULL))
        ids.graves[ids.n_graves++ & (GRAVES - 1)] = (grave) { id_of(s->tensor->slot, s), scope_name, s->made_by };
}

static const grave *grave_of(ms_id id)
{
    for (uint32_t k = 0; ids.graves && k < GRAVES && k < ids.n_graves; k++) {
        const grave *g = &ids.graves[(ids.n_graves - 1 - k) & (GRAVES - 1)];
        if (g->id == id) return g;
    }
    return NULL;
}

// Interns a scope's name. A cache indexed by its address avoids most searches, because scripts use few names.
static const char *scope_text(const char *name)
{
    static struct {
        const char *given, *kept;
    } known[64];
    size_t k = ((uintptr_t)name >> 3) % MS_COUNT(known);
    if (MS_LIKELY(known[k].given == name && strcmp(known[k].kept, name) == 0)) return known[k].kept;
    known[k].given = name;
    return known[k].kept = ms__intern(name);
}

static void slot_release(slot *s)
{
    ms_tensor *t = s->tensor;
    uint32_t i = t->slot;
    if (!s->scope) ids.unscoped.live -= (double)ms__nbytes(t);
    unlink_scope(s);
    s->tensor = NULL;
    s->owners = 0;
    s->collected = false;
    t->slot = 0;
    if (MS_LIKELY(++s->generation < GENERATIONS)) {
        s->next = 0;
        if (ids.free_tail) slot_at(ids.free_tail)->next = i;
        else ids.free_head = i;
        ids.free_tail = i;
    }
    ms__release(t);
}

// Requests a garbage collection when the unscoped tensors made since the last one exceed the soft limit plus half of
// the unscoped bytes alive; or when all CPU memory in use (a small unscoped loss may hold a large graph) has grown
// since the last collection by more than the soft limit plus half of its size at that time.
static void count_unscoped(const ms_tensor *t)
{
    double bytes = (double)ms__nbytes(t) + 256;
    ms_memory all;
    ms__pool_stats(MS_CPU, &all);
    ids.unscoped.live += (double)ms__nbytes(t);
    if (ids.unscoped.asked && !ms__state.gc_wanted) {  // the script has run the collection
        ids.unscoped.asked = false;
        ids.unscoped.since = 0;
        ids.unscoped.live_after = all.allocated;
    }
    ids.unscoped.since += bytes;
    if (ids.unscoped.since > ms__state.gc_limit + ids.unscoped.live / 2 ||
        all.allocated > ids.unscoped.live_after + ms__state.gc_limit + ids.unscoped.live_after / 2) {
        ms__state.gc_wanted = 1;
        ids.unscoped.asked = true;
    }
}

static ms_status no_names(const char *what)
{
    if (ids.n_slots < 1u << SLOT_BITS) return ms__no_memory(CHUNK * sizeof(slot), what, "ids of %d tensors", CHUNK);
    return ms__fail(MS_ENOMEM, "more than %d tensors are alive in the script: close scopes or release some",
                    (1 << SLOT_BITS) - 1);
}

ms_status ms__names_reserve(int n, const char *what)
{
    uint32_t c = (ids.n_slots + (uint32_t)n - 1) >> CHUNK_BITS;
    if (MS_LIKELY(c < CHUNKS && ids.chunks[c])) return MS_OK;
    uint32_t i = ids.free_head;
    for (; n > 0 && i; n--) i = slot_at(i)->next;
    if (n == 0 || (c < CHUNKS && (ids.chunks[c] = calloc(CHUNK, sizeof(slot))))) return MS_OK;
    return no_names(what);
}

static ms_id name_in(ms_tensor *t, uint32_t where, const char *made_by)
{
    if (t->slot) {
        slot *s = slot_at(t->slot);
        ms_id id = id_of(t->slot, s);
        ms__release(t);  // the slot has its own reference
        return id;
    }
    uint32_t i;
    slot *s = slot_take(&i);
    if (!s) {
        ms__release(t);
        no_names(made_by ? made_by : "tensor");
        return 0;
    }
    s->tensor = t;
    s->made_by = made_by;
    t->slot = i;
    link_scope(s, where);
    if (!where) count_unscoped(t);
    return id_of(i, s);
}

ms_id ms__name(ms_tensor *t) { return name_in(t, (uint32_t)ms__state.scope, NULL); }
ms_id ms__name_made(ms_tensor *t, const char *made_by) { return name_in(t, (uint32_t)ms__state.scope, made_by); }

ms_id ms__name_unscoped(ms_tensor *t)
{
    ms_id id = name_in(t, 0, NULL);
    if (id) ms_keep(id);
    return id;
}

const char *ms__op_title(const char *name)
{
    static __thread char title[64];
    static const char *const others[][2] = { { "cast", "to" },      { "to_device", "to" },     { "rand_", "rand" },
                                             { "randn_", "randn" }, { "randint_", "randint" }, { "arange_", "arange" },
                                             { "eye_", "eye" } };
    for (int k = 0; k < MS_COUNT(others); k++)
        if (strcmp(name, others[k][0]) == 0) return others[k][1];
    const char *variant = strstr(name, "_scalar"), *rest = variant ? variant + 7 : "";
    if (!variant && (variant = strstr(name, "_all"))) rest = variant + 4;
    int n = variant ? (int)(variant - name) : (int)strlen(name);
    if (strncmp(name, "linalg_", 7) == 0 || strncmp(name, "fft_", 4) == 0) {  // functions of ms.linalg and ms.fft
        snprintf(title, sizeof title, "%s", name);
        *strchr(title, '_') = '.';
        return title;
    }
    snprintf(title, sizeof title, "%.*s%s", n, name, rest);
    return title;
}

static void released(ms_id id)
{
    char op[64] = "", note[256] = "";
    const grave *g = grave_of(id);
    if (g && g->made_by) snprintf(op, sizeof op, "made by %s", ms__op_title(g->made_by));
    if (g && (*op || g->scope))
        snprintf(note, sizeof note, " (%s%s%s%s)", op, *op && g->scope ? "; " : "", g->scope ? "its scope: " : "",
                 g->scope ? g->scope : "");
    bool by_script = g && !g->scope;
    ms__fail(MS_ERELEASED, "tensor was released%s%s",
             !g          ? ", by release() or with its scope; return it, or keep() it"
             : by_script ? " by release()"
                         : " with its scope; return it, or keep() it",
             note);
}

ms_tensor *ms__tensor(ms_id id)
{
    slot *s = slot_of_id(id);
    if (MS_LIKELY(s != NULL)) return s->tensor;
    if (id == 0) ms__fail(MS_EINVAL, "a tensor was expected, got none");
    else if (id < 0) ms__fail(MS_EINVAL, "an instance of a tensor class cannot be used here; pass its inner_tensors()");
    else released(id);
    return NULL;
}

int ms_is_alive(ms_id id) { return slot_of_id(id) != NULL; }

void ms_release(ms_id id)
{
    slot *s = slot_of_id(id);
    if (!s) return;
    remember(s, NULL);
    slot_release(s);
}

ms_status ms_keep(ms_id id)
{
    slot *s = slot_of_id(id);
    if (!s) return ms__tensor(id) ? MS_OK : ms__failure();
    if (s->scope) {
        unlink_scope(s);
        count_unscoped(s->tensor);
    }
    return MS_OK;
}

double ms_scope_of(ms_id id)
{
    slot *s = slot_of_id(id);
    return s ? (double)s->scope : 0;
}

void ms_adopt(ms_id id)
{
    slot *s = slot_of_id(id);
    if (!s || s->scope || s->owners || !ms__state.scope) return;
    ids.unscoped.live -= (double)ms__nbytes(s->tensor);
    link_scope(s, (uint32_t)ms__state.scope);
}

void ms_drop(ms_id id)
{
    slot *s = slot_of_id(id);
    if (!s || !s->scope || s->scope != (uint32_t)ms__state.scope || s->owners) return;
    remember(s, scope_text(ids.scopes[s->scope].name));
    slot_release(s);
}

// ---- owners -----------------------------------------------------------------------------------

void ms_owner_init(ms_owner *o, ms_id id)
{
    slot *s = slot_of_id(id);
    o->id = id;
    if (s) s->collected = true;
}

void ms_owner_release(ms_owner *o)
{
    slot *s = slot_of_id(o->id);
    if (!s) return;
    if (s->owners || s->scope) s->collected = false;
    else slot_release(s);
}

void ms__own(ms_tensor *t)
{
    if (!t->slot) return;
    slot *s = slot_at(t->slot);
    s->owners++;
    if (s->scope) {
        unlink_scope(s);
        count_unscoped(t);
    }
}

void ms__disown(ms_tensor *t)
{
    if (!t->slot) return;
    slot *s = slot_at(t->slot);
    if (s->owners && --s->owners) return;
    if (s->collected || s->scope) return;
    if (ms__state.scope) {
        ids.unscoped.live -= (double)ms__nbytes(t);
        link_scope(s, (uint32_t)ms__state.scope);
    } else {
        slot_release(s);
    }
}

// ---- scopes -----------------------------------------------------------------------------------

double ms_scope_open(const char *name)
{
    uint32_t i = ids.free_scope;
    if (MS_UNLIKELY(!ids.scopes)) {
        ids.scopes = calloc(SCOPES, sizeof *ids.scopes);
        // Touch the memory once now, so that resident memory does not grow while the ring of released ids fills.
        if ((ids.graves = malloc(GRAVES * sizeof *ids.graves))) memset(ids.graves, 0, GRAVES * sizeof *ids.graves);
    }
    if (MS_LIKELY(i)) ids.free_scope = ids.scopes[i].parent;
    else if (ids.scopes && ids.n_scopes < SCOPES) i = ids.n_scopes++;
    else if (ids.scopes)
        return ms__no_id(
            ms__fail(MS_ENOMEM, "more than %d scopes are open: is there an infinite recursion?", SCOPES - 1));
    else return ms__no_id(ms__no_memory(SCOPES * sizeof *ids.scopes, "scope", "%d scopes", SCOPES));
    scope *s = &ids.scopes[i];
    s->parent = (uint32_t)ms__state.scope;
    s->head = 0;
    s->chain = ids.chain;
    s->open = true;
    s->name = name;  // not copied: the caller keeps the name alive while the scope is open
    ms__state.scope = (int32_t)i;
    ids.chain_top[ids.chain] = i;
    return (double)(((uint64_t)s->generation << 16) | i);
}

static scope *scope_of(double handle)
{
    if (!(handle >= 1)) return NULL;
    uint64_t bits = (uint64_t)handle;
    uint32_t i = (uint32_t)(bits & (SCOPES - 1));
    bool open = i < ids.n_scopes && ids.scopes[i].open && ids.scopes[i].generation == (uint32_t)(bits >> 16);
    return open ? &ids.scopes[i] : NULL;
}

int ms_scope_is_open(double handle) { return scope_of(handle) != NULL; }

void ms_scope_close(double handle, const ms_id *keep, int n)
{
    scope *s = scope_of(handle);
    if (MS_UNLIKELY(!s)) return;
    uint32_t at = (uint32_t)(s - ids.scopes), parent = s->parent;
    int in = s->chain;
    for (int k = 0; k < n; k++) {
        slot *e = slot_of_id(keep[k]);
        if (!e || !e->scope) continue;
        // Moves only tensors of this scope and of scopes that are still open inside it.
        uint32_t c = ids.chain_top[in];
        while (c != at && c != e->scope) c = ids.scopes[c].parent;
        if (c != e->scope) continue;
        unlink_scope(e);
        link_scope(e, parent);
        if (!parent) count_unscoped(e->tensor);
    }
    for (uint32_t c = ids.chain_top[in];;) {
        scope *e = &ids.scopes[c];
        const char *text = e->head ? scope_text(e->name) : NULL;
        while (e->head) {
            slot *last = slot_at(e->head);
            remember(last, text);
            slot_release(last);
        }
        uint32_t outer = e->parent;
        e->open = false;
        e->generation++;
        e->parent = ids.free_scope;
        ids.free_scope = c;
        if (c == at) break;
        c = outer;
    }
    ids.chain_top[in] = parent;
    if (in == ids.chain) ms__state.scope = (int32_t)parent;
}

// ---- chains -----------------------------------------------------------------------------------

int ms_chain_new(void)
{
    for (int c = 1; c < CHAINS; c++)
        if (!ids.chain_used[c]) {
            ids.chain_used[c] = 1;
            // A coroutine's first scope has no parent: tensors made outside of its own scopes are unscoped.
            ids.chain_top[c] = 0;
            return c;
        }
    ms__fail(MS_ENOMEM, "more than %d coroutines have scopes at once: let some end", CHAINS - 1);
    return -1;
}

int ms_chain_switch(int to)
{
    int before = ids.chain;
    if (to < 0 || to >= CHAINS) return before;
    ids.chain = to;
    ms__state.scope = (int32_t)ids.chain_top[to];
    return before;
}

void ms_chain_free(int c)
{
    if (c <= 0 || c >= CHAINS || !ids.chain_used[c]) return;
    if (ids.chain_top[c]) {
        uint32_t i = ids.chain_top[c];
        while (ids.scopes[i].parent) i = ids.scopes[i].parent;
        ms_scope_close((double)(((uint64_t)ids.scopes[i].generation << 16) | i), NULL, 0);
    }
    ids.chain_used[c] = 0;
    if (c == ids.chain) ms_chain_switch(0);
}
