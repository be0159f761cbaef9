// SPDX-License-Identifier: MIT
// shard/unit.c -- units: handles, gather and reshard, lazy initialisation, the public functions on them. How they are
// made is shard/make.c; the schedule (who calls these when) is shard/schedule.c.
#include <stdio.h>

#include "device/device.h"
#include "shard/unit.h"
#include "ops/op.h"

// ---- handles ----------------------------------------------------------------------------------

static unit **units;
static uint32_t *generations;
static uint32_t n_units = 1, cap_units;
static context *contexts;

context *ms__contexts(void) { return contexts; }

unit *ms__unit(double handle)
{
    uint64_t bits = handle >= 1 ? (uint64_t)handle : 0;
    uint32_t i = (uint32_t)(bits & 0xfffff);
    if (i && i < n_units && units[i] && units[i]->handle == handle) return units[i];
    ms__fail(MS_EINVAL, "fsdp: %.0f is no unit", handle);
    return NULL;
}

ms_status ms__unit_handle_new(unit *u)
{
    uint32_t i = 1;
    while (i < n_units && units[i]) i++;
    if (i >= cap_units) {
        uint32_t cap = cap_units ? 2 * cap_units : 64;
        unit **grown = realloc(units, cap * sizeof *units);
        uint32_t *g = realloc(generations, cap * sizeof *generations);
        if (grown) units = grown;
        if (g) generations = g;
        if (!grown || !g || cap > 0xfffff)
            return ms__no_memory(cap * (sizeof *units + sizeof *generations), "fsdp", "unit '%s'", u->name);
        memset(units + cap_units, 0, (cap - cap_units) * sizeof *units);
        memset(generations + cap_units, 0, (cap - cap_units) * sizeof *generations);
        cap_units = cap;
    }
    if (i == n_units) n_units++;
    units[i] = u;
    u->handle = (double)((uint64_t)++generations[i] << 20 | i);
    return MS_OK;
}

void ms__unit_handle_drop(double handle) { units[(uint32_t)((uint64_t)handle & 0xfffff)] = NULL; }

// ---- recording --------------------------------------------------------------------------------

static ms_unit_event *events;
static int n_events, cap_events;
static bool recording;

void ms_unit_record(int on)
{
    recording = on != 0;
    if (on) n_events = 0;
}

int ms_unit_recorded(ms_unit_event *out, int capacity)
{
    for (int k = 0; k < n_events && k < capacity; k++) out[k] = events[k];
    return n_events;
}

void ms__unit_note(const unit *u, int event, bool prefetched)
{
    if (MS_LIKELY(!recording)) return;
    if (n_events == cap_events) {
        int cap = cap_events ? 2 * cap_events : 256;
        ms_unit_event *e = realloc(events, (size_t)cap * sizeof *e);
        if (!e) return;
        events = e;
        cap_events = cap;
    }
    events[n_events++] = (ms_unit_event) { .event = event, .prefetched = prefetched, .unit = u->name };
}

// MOONSHARD_LOG=fsdp: a line on stderr for every phase of every unit, by PyTorch's names (docs/semantics.md#logging).
void ms__unit_log(const unit *u, const char *phase)
{
    static int on = -1;
    if (on < 0) {
        const char *wanted = getenv("MOONSHARD_LOG");
        on = wanted && strstr(wanted, "fsdp") != NULL;
    }
    if (MS_LIKELY(!on)) return;
    char rank[32] = "";
    int world = ms_dist_size(0);
    if (world > 1) snprintf(rank, sizeof rank, "[rank %d] ", ms_dist_rank(0));
    if (u && u->name[0]) fprintf(stderr, "%sFSDP::%s (%s)\n", rank, phase, u->name);
    else fprintf(stderr, "%sFSDP::%s\n", rank, phase);
}

const char *ms__unit_range_name(const unit *u, const char *phase)
{
    return u && u->name[0] ? ms__trace_text("FSDP::%s (%s)", phase, u->name) : ms__trace_text("FSDP::%s", phase);
}

// ---- gather and reshard -----------------------------------------------------------------------

bool ms__unit_idle(const unit *u)
{
    return u->pass.forwards == 0 && !u->pass.open && u->pass.n_active == 0 && !u->state.summoning;
}

// A copy from another device may still be writing: unlike a collective, nobody has waited for it.
static void vacate_full(unit *u)
{
    while (MS_UNLIKELY(u->memory.full->event || u->memory.full->readers)) (void)ms__storage_sync(u->memory.full, true);
    ms__storage_vacate(u->memory.full);
}

// This rank's parts in the gathered dtype: in a storage laid out like the shard, or (world of one) like the whole. What
// is on its way to another device is waited for by whoever needs it.
static ms_status cast_shard(unit *u, ms_storage *to)
{
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        if (p->local->numel == 0 || p->extended) continue;
        size_t at = to == u->memory.full ? p->full_at : p->low_at;
        ms_tensor *dst =
            ms__tensor_on(to, p->low, p->local->ndim, p->local->shape, (int64_t)(at / (size_t)ms__dtype_size(p->low)));
        ms_status st = p->low == p->dtype && to->device != u->memory.home ? ms__copy_async(dst, p->local, NULL)
                                                                          : ms__copy(dst, p->local);
        ms__release(dst);
        MS_TRY(st);
    }
    return MS_OK;
}

uint64_t ms__unit_shard_versions(const unit *u)
{
    uint64_t sum = u->views == MS_VIEWS_FLAT && u->flat.local ? u->flat.local->version->count : 0;
    for (int j = 0; j < u->n; j++) sum += u->params[j].local->version->count;
    return sum;
}

uint64_t ms__unit_versions(const unit *u)
{
    uint64_t sum = ms__unit_shard_versions(u);
    for (int j = 0; j < u->n && u->views == MS_VIEWS_PIECES; j++) sum += u->params[j].param->version->count;
    return sum;
}

void ms__unit_drop_post(unit *u)
{
    if (u->memory.post) ms__storage_release(u->memory.post);
    u->memory.post = NULL;
}

// What the forward left with post_group, unless the parameters have changed since (every rank sees that alike).
static bool post_serves(unit *u)
{
    if (u->memory.post && u->memory.post_version != ms__unit_versions(u)) ms__unit_drop_post(u);
    return u->memory.post != NULL;
}

// One dtype for all that is gathered, else bytes.
static int gathered_dtype(const unit *u)
{
    int dtype = -1;
    for (int j = 0; j < u->n; j++) {
        const unit_param *p = &u->params[j];
        if (p->extended) continue;
        if (dtype >= 0 && p->low != dtype) return MS_U8;
        dtype = p->low;
    }
    return u->memory.n_extensions ? ms__extensions_dtype(u, dtype) : dtype >= 0 ? dtype : MS_U8;
}

void ms__unit_drop_pending(context *c)
{
    for (int k = 0; k < c->n; k++) {
        for (int j = 0; j < c->units[k]->n; j++) ms__drop(&c->units[k]->params[j].pending);
        ms__flat_drop_kept(c->units[k]);
    }
}

// An error of one rank ended work in which the others had come further, or less far: units that are whole there are
// sharded here. From the same state on all ranks, then: nothing is whole that nobody uses, no order is remembered, and
// if it was a backward, no gradient waits to be reduced: some ranks' had been, and are gone.
void ms__unit_after_errors(unit *u)
{
    context *c = u->context;
    if (!c) return;
    if (MS_UNLIKELY(c->failed_backward != ms__comm_failed_backward())) {
        c->failed_backward = ms__comm_failed_backward();
        ms__unit_drop_pending(c);
    }
    if (MS_LIKELY(c->epoch == ms__comm_epoch())) return;
    c->epoch = ms__comm_epoch();
    for (int k = 0; k < c->n; k++) {
        if (!ms__unit_idle(c->units[k])) continue;
        ms__unit_shard(c->units[k]);
        ms__unit_drop_post(c->units[k]);
    }
    c->n_order = c->n_last = c->n_entered = 0;
}

ms_status ms__unit_check_home(const unit *u)
{
    if (MS_LIKELY(!u->options.offload || u->memory.home == MS_CPU || (u->memory.home & 0xff) == MS_META || u->n == 0))
        return MS_OK;
    const char *where = strrchr(ms__tensor_text(u->params[0].local), ' ') + 1;
    char device[32], names[1024] = "";
    snprintf(device, sizeof device, "%s", where);
    if (u->views != MS_VIEWS_SHARDED)
        return ms__fail(MS_ESTATE,
                        "An FSDP-managed module with parameter CPU offloading enabled has parameters on %s. Make sure "
                        "to not move the module "
                        "from CPU when offloading parameters.",
                        device);
    for (int j = 0; j < u->n; j++) {
        const char *name = u->params[j].param->name;
        size_t len = strlen(names);
        snprintf(names + len, sizeof names - len, "%s('%s', '%s')", len ? ", " : "", name ? name : "?", device);
    }
    return ms__fail(MS_ESTATE,
                    "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a "
                    "CPU state dict or call "
                    "module:to_empty(\"cpu\"). Found following parameters on non-CPU device: [%s]",
                    names);
}

ms_label ms__unit_label(const unit *u, const char *name)
{
    return (ms_label) { .unit = name, .model = u->context ? u->context->model : 0 };
}

// The shards are gathered from where they are: offloaded ones out of the CPU's memory, the wholes into the device's.
ms_status ms__unit_start_gather(unit *u, bool early, bool prefetched)
{
    if (MS_UNLIKELY(u->state.unkept != NULL)) {
        const char *text = u->state.unkept;
        u->state.unkept = NULL;
        return ms__fail(MS_ESTATE, "%s", text);
    }
    MS_TRY(ms__unit_check_home(u));
    // The script promised that these parameters stay as they are, and changed them after all (every rank sees that
    // alike).
    if (MS_UNLIKELY(u->state.ahead && (u->state.gather || u->state.fetched) &&
                    u->state.ahead != ms__unit_versions(u) + 1))
        ms__unit_shard(u);
    u->state.ahead = 0;
    bool nothing = u->memory.in_place || (u->memory.device & 0xff) == MS_META;  // to be fetched
    nothing |= u->world == 1 && early && u->memory.home == u->memory.device;
    if (u->state.gathered || u->state.gather || u->state.fetched || u->n == 0 || (nothing && early)) return MS_OK;
    if (u->memory.n_extensions && !nothing) {
        if (!ms__extensions_given(u))
            return ms__fail(MS_ESTATE,
                            "fsdp: unit '%s' has all-gather extensions: it is gathered from its module's forward, "
                            "unshard() or backward only",
                            u->name);
        MS_TRY(ms__extensions_place(u));
    }
    ms__unit_note(u, MS_UNIT_EV_UNSHARD, prefetched);
    UNIT_RANGE(u, "all_gather");
    u->state.gathered_from = ms__unit_versions(u);
    if (nothing) return MS_OK;
    ms_storage *from = u->memory.shard;
    ms_stream_kind stream = early ? MS_STREAM_GATHER : MS_STREAM_COMPUTE;
    bool post = post_serves(u);
    ms_status st = ms__storage_sync(post ? u->memory.post : u->memory.shard, false);
    if (st == MS_OK) st = ms__storage_refill(u->memory.full, "fsdp: gathered parameters");
    if (st == MS_OK && u->settings.fake_gather && u->world > 1) {
        u->state.fetched = true;
        return MS_OK;
    }
    if (st == MS_OK && u->world == 1 && u->memory.n_extensions == 0) {  // nothing to fetch: the cast is the gather
        st = cast_shard(u, u->memory.full);
        if (st != MS_OK) vacate_full(u);
        else u->state.fetched = true;
        return st;
    }
    if (st == MS_OK && u->memory.casts && !post) {
        st = ms__storage_new(&u->memory.low, u->memory.home, u->memory.low_bytes, "fsdp: low-precision shard");
        if (st == MS_OK) st = cast_shard(u, u->memory.low);
        if (st == MS_OK && u->memory.n_extensions) st = ms__extensions_pack(u);
        from = u->memory.low;
    }
    ms_piece slice = { .out_stride = u->memory.post_bytes,
                       .bytes = u->memory.post_bytes,
                       .total = u->memory.full_bytes };
    ms_request r = { .group = post ? u->settings.post_group : u->group,
                     .op = MS_DIST_ALL_GATHER,
                     .stream = stream,
                     .from = post ? u->memory.post : from,
                     .to = u->memory.full,
                     .dtype = gathered_dtype(u),
                     .n_pieces = post ? 1 : u->memory.n_pieces,
                     .pieces = post ? &slice : u->memory.pieces,
                     .label = ms__unit_label(u, u->name) };
    r.label.text_only = !post && u->settings.checked;
    if (st == MS_OK) st = ms__collective(&r, &u->state.gather);
    if (u->memory.low) {
        ms__storage_release(u->memory.low);  // the collective holds its own reference
        u->memory.low = NULL;
    }
    if (st != MS_OK) vacate_full(u);
    else u->state.fetched = !u->state.gather;  // a group of one is through already
    return st;
}

// Waits for the gather under way. One that failed must not fail what comes after it: it only read the shard.
static ms_status wait_gather(unit *u)
{
    ms_status st = ms__work_wait(u->state.gather);
    ms__work_release(u->state.gather);
    u->state.gather = NULL;
    if (MS_LIKELY(st == MS_OK)) return MS_OK;
    char text[2048];
    snprintf(text, sizeof text, "%s", ms_error());
    while (u->memory.shard->event || u->memory.shard->readers) (void)ms__storage_sync(u->memory.shard, true);
    return ms__fail(st, "%s", text);
}

ms_status ms__unit_fetch(unit *u)
{
    if (u->state.gather) {
        ms_status st = wait_gather(u);
        if (st != MS_OK) {
            vacate_full(u);
            return st;
        }
    }
    u->state.fetched = true;
    return MS_OK;
}

void ms__unit_show(unit *u, bool whole)
{
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        ms__tensor_point(p->param, whole ? p->whole : p->resting);
        p->param->sharded = !whole && u->views != MS_VIEWS_PIECES;
        p->seen = p->param->version->count;
    }
    u->state.concealed = false;
    u->state.shard_seen = ms__unit_shard_versions(u);
}

ms_status ms__unit_finish_gather(unit *u)
{
    if (u->state.gathered) {
        if (u->state.concealed) ms__unit_show(u, true);
        return MS_OK;
    }
    UNIT_RANGE(u, "all_gather_copy_out");
    if (!u->state.fetched) MS_TRY(ms__unit_fetch(u));
    u->state.fetched = false;
    ms__unit_show(u, true);
    if (u->views == MS_VIEWS_FLAT)
        for (int j = 0; j < u->n; j++) u->params[j].param->requires_grad = u->flat.local->requires_grad;
    u->state.gathered = true;
    ms__unit_drop_post(u);
    return MS_OK;
}

// This rank's slice of the gathered bytes is copied; behind the copy they are let go.
ms_status ms__unit_shard_to_post(unit *u)
{
    if (!u->state.gathered || u->memory.in_place || u->n == 0) {
        ms__unit_shard(u);
        return MS_OK;
    }
    size_t begin = (size_t)ms__group_rank(u->settings.post_group) * u->memory.post_bytes,
           n = begin < u->memory.full_bytes ? u->memory.full_bytes - begin : 0;
    if (n > u->memory.post_bytes) n = u->memory.post_bytes;
    ms_storage *post;
    MS_TRY(ms__storage_new(&post, u->memory.device, u->memory.post_bytes, "fsdp: slice of the gathered parameters"));
    if (n > 0) {
        int64_t count = (int64_t)n;
        ms_tensor *from = ms__tensor_on(u->memory.full, MS_U8, 1, &count, (int64_t)begin),
                  *to = ms__tensor_on(post, MS_U8, 1, &count, 0);
        ms_status st = ms__copy(to, from);
        ms__release(from);
        ms__release(to);
        if (st != MS_OK) {
            ms__storage_release(post);
            return st;
        }
    }
    ms__unit_shard(u);
    u->memory.post = post;
    u->memory.post_version = ms__unit_versions(u);
    return MS_OK;
}

void ms__unit_shard(unit *u)
{
    if (u->state.gather) {  // nobody will use it: wait, because peers read and write these bytes
        (void)wait_gather(u);
        if (!u->state.gathered && !u->memory.in_place) vacate_full(u);
    }
    ms__unit_drop_post(u);
    if (!u->state.gathered && u->state.fetched && !u->memory.in_place) vacate_full(u);
    u->state.fetched = false;
    ms__extensions_vacate(u);
    if (!u->state.gathered) return;
    ms__unit_keep(u);
    if (u->n) ms__unit_note(u, MS_UNIT_EV_RESHARD, false);
    ms__unit_show(u, false);
    if (!u->memory.in_place) vacate_full(u);
    u->state.gathered = false;
}

// ---- lazy initialisation ----------------------------------------------------------------------

// An instance of fsdp.FSDP below another one that has run may get a new root, around what is wrapped again.
static bool may_change_root(const unit *u)
{
    const context *c = u->context;
    return u->views != MS_VIEWS_SHARDED && c->root != u && ms__unit_idle(u) && !c->in_backward && !c->reducing.owner;
}

ms_status ms_unit_lazy_init(double root_handle, int n, const double *handles)
{
    unit *root = ms__unit(root_handle);
    if (!root) return (ms_status)ms_error_code();
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
            st = (ms_status)ms_error_code();
        } else if (u->context && !may_change_root(u)) {
            st = ms__fail(MS_ESTATE,
                          "FSDP state has already been lazily initialized for %s\nFSDP requires running forward "
                          "through the root module first",
                          u->name);
        } else if ((st = ms__unit_check_home(u)) != MS_OK) {
            break;
        } else if ((u->memory.device & 0xff) == MS_META) {
            for (int j = 0; j < u->n; j++) {
                size_t len = strlen(names);
                snprintf(names + len, sizeof names - len, "%s'%s'", len ? ", " : "",
                         u->params[j].param->name ? u->params[j].param->name : "?");
            }
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
    c->model = root->serial;
    c->n = n;
    c->is_last_backward = true;
    c->epoch = ms__comm_epoch();
    c->failed_backward = ms__comm_failed_backward();
    c->next = contexts;
    contexts = c;
    for (int k = 0; k < n; k++) {
        c->units[k]->context = c;
        if (c->units[k]->settings.reshard_after_forward < 0) {
            c->units[k]->settings.reshard_after_forward = c->units[k] != root;
            c->units[k]->settings.by_rule = c->units[k] == root;
        }
    }
    return MS_OK;
}

// u's module dies: nobody of its root's units waits for it, prefetches it or lists it.
void ms__context_leave(unit *u)
{
    context *c = u->context;
    if (!c) return;
    if (c->reducing.owner == u) ms__unit_drop_reduction(&c->reducing);
    int n = 0;
    for (int k = 0; k < c->n; k++)
        if (c->units[k] != u) c->units[n++] = c->units[k];
    c->n = n;
    c->n_last = c->n_order = c->n_entered = 0;
    if (c->opened == u) c->opened = NULL;
    if (c->root == u) c->root = NULL;
    for (int k = 0; k < c->n; k++) {  // nobody prefetches it any more
        unit *v = c->units[k];
        for (int j = v->settings.n_forward_prefetch; j-- > 0;)
            if (v->settings.forward_prefetch[j] == u)
                v->settings.forward_prefetch[j] = v->settings.forward_prefetch[--v->settings.n_forward_prefetch];
        for (int j = v->settings.n_backward_prefetch; j-- > 0;)
            if (v->settings.backward_prefetch[j] == u)
                v->settings.backward_prefetch[j] = v->settings.backward_prefetch[--v->settings.n_backward_prefetch];
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

int ms_unit_is_lazy(double handle)
{
    unit *u = ms__unit(handle);
    return u && u->context;
}

double ms_unit_backwards(double handle)
{
    unit *u = ms__unit(handle);
    return u && u->context ? (double)u->context->backwards : 0;
}

double ms_unit_root(double handle)
{
    unit *u = ms__unit(handle);
    return u && u->context && u->context->root ? u->context->root->handle : 0;
}

int ms_unit_is_gathered(double handle)
{
    unit *u = ms__unit(handle);
    return u && u->state.gathered;
}

int ms_unit_device(double handle)
{
    unit *u = ms__unit(handle);
    return u ? u->memory.device : MS_CPU;
}

// ---- by hand ----------------------------------------------------------------------------------

ms_status ms_unit_unshard(double handle, int async)
{
    unit *u = ms__unit(handle);
    if (!u) return (ms_status)ms_error_code();
    ms__unit_after_errors(u);
    MS_TRY(ms__unit_start_gather(u, async != 0, false));
    return async ? MS_OK : ms__unit_finish_gather(u);
}

ms_status ms_unit_wait(double handle)
{
    unit *u = ms__unit(handle);
    return u ? ms__unit_finish_gather(u) : (ms_status)ms_error_code();
}

ms_status ms_unit_reshard(double handle)
{
    unit *u = ms__unit(handle);
    if (!u) return (ms_status)ms_error_code();
    if (!ms__unit_idle(u))
        return ms__fail(MS_ESTATE,
                        "reshard: unit '%s' is between its forward and its backward phases; wait for them to end",
                        u->name);
    ms__unit_shard(u);
    return MS_OK;
}

static ms_status set_full_precision(unit *u, bool on)
{
    if (!ms__unit_idle(u))
        return ms__fail(MS_ESTATE,
                        "fsdp: unit '%s' is between its forward and its backward phases; its precision cannot change",
                        u->name);
    ms__unit_shard(u);
    u->settings.param_dtype = on ? -1 : u->options.param_dtype;
    u->settings.reduce_dtype = on ? -1 : u->options.reduce_dtype;
    for (int j = 0; j < u->n; j++) {
        unit_param *p = &u->params[j];
        p->low = u->settings.param_dtype >= 0 && ms__is_float(p->dtype) ? u->settings.param_dtype : p->dtype;
    }
    return ms__unit_replan(u);
}

ms_status ms_unit_set(double handle, int what, double value)
{
    unit *u = ms__unit(handle);
    if (!u) return (ms_status)ms_error_code();
    switch (what) {
    case MS_UNIT_SYNC: u->settings.sync = value != 0; break;
    case MS_UNIT_RESHARD_AFTER_FORWARD:
        u->settings.reshard_after_forward = value != 0;
        u->settings.post_group = NULL;
        u->settings.by_rule = false;
        break;
    case MS_UNIT_RESHARD_AFTER_BACKWARD: u->settings.reshard_after_backward = value != 0; break;
    case MS_UNIT_UNSHARD_IN_BACKWARD: u->settings.unshard_in_backward = value != 0; break;
    case MS_UNIT_ALL_REDUCE: u->settings.all_reduce = value != 0; break;
    case MS_UNIT_ALL_REDUCE_HOOK: u->settings.all_reduce_hook = value; break;
    case MS_UNIT_CHECKED: u->settings.checked = value != 0; break;
    case MS_UNIT_FORWARD_PREFETCH: u->settings.prefetches = value != 0; break;
    case MS_UNIT_LIMIT_GATHERS: u->settings.limited = value != 0; break;
    case MS_UNIT_FAKE_GATHER: u->settings.fake_gather = value != 0; break;
    case MS_UNIT_FAKE_REDUCE: u->settings.fake_reduce = value != 0; break;
    case MS_UNIT_FULL_PRECISION: return set_full_precision(u, value != 0);
    case MS_UNIT_CAST_FORWARD_INPUTS: u->settings.cast_forward_inputs = value != 0; break;
    case MS_UNIT_IS_LAST_BACKWARD:
        if (u->context) u->context->is_last_backward = value != 0;
        break;
    case MS_UNIT_DIVIDE_FACTOR:
        if (!(value > 0)) return ms__fail(MS_EINVAL, "set_gradient_divide_factor: %g is not greater than 0", value);
        u->settings.divide = value;
        break;
    default: return ms__fail(MS_EINVAL, "fsdp: setting %d does not exist", what);
    }
    return MS_OK;
}
