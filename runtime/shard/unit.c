// SPDX-License-Identifier: MIT
// shard/unit.c -- handles of units; records of unit events for scripts, logs and profiles.
#include <stdio.h>

#include "shard/unit.h"

// ---- handles ----------------------------------------------------------------------------------

static unit **units;
static uint32_t *generations;
static uint32_t n_units = 1, cap_units;

unit *ms__unit(double handle)
{
    uint64_t bits = handle >= 1 ? (uint64_t)handle : 0;
    uint32_t i = (uint32_t)(bits & 0xfffff);
    if (i && i < n_units && units[i] && units[i]->handle == handle) return units[i];
    ms__fail(MS_EINVAL, "fsdp: %.0f is not a unit", handle);
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
    if (ms__grow(&events, &cap_events, n_events, sizeof *events, "fsdp", "recorded events")) return;
    events[n_events++] = (ms_unit_event) { .event = event, .prefetched = prefetched, .unit = u->name };
}

// MOONSHARD_LOG=fsdp: prints a line to stderr for every phase of every unit, with PyTorch's names
// (docs/semantics.md#logging).
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

void ms__unit_accumulates(unit *u)
{
    if (!u->gradients.accumulated) u->gradients.failures = ms__state.dist_failures;
    u->gradients.accumulated = true;
}

bool ms__unit_idle(const unit *u)
{
    return u->pass.forwards == 0 && !u->pass.open && u->pass.n_active == 0 && !u->state.summoning;
}

ms_id ms__unit_local_id(ms_tensor *local)
{
    bool named = local->slot != 0;
    ms_id id = ms__name_unscoped(ms__retain(local));
    if (id && !named) ms__own(local);
    return id;
}

ms_label ms__unit_label(const unit *u, const char *name)
{
    return (ms_label) { .unit = *name ? name : "root", .model = u->model };
}
