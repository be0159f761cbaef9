// SPDX-License-Identifier: MIT
// shard/unit.c -- handles of units; records of unit events for scripts, logs and profiles.
#include <stdio.h>

#include "shard/unit.h"

// ---- handles ----------------------------------------------------------------------------------

enum { MOST = 0xfffff };
static struct {
    // A handle is a generation and an index into this array, in one number. Index 0 is unused, so no handle is 0.
    struct {
        unit *unit;
        uint32_t generation;
    } * list;
    int n, cap;
    ms_unit_event *events;
    int n_events, cap_events;
    bool recording;
} units;

unit *ms__unit(double handle)
{
    int i = handle >= 1 ? (int)((uint64_t)handle & MOST) : 0;
    if (i && i < units.n && units.list[i].unit && units.list[i].unit->handle == handle) return units.list[i].unit;
    ms__fail(MS_EINVAL, "fsdp: %.0f is not the handle of a unit", handle);
    return NULL;
}

ms_status ms__unit_handle_new(unit *u)
{
    int i = 1;
    while (i < units.n && units.list[i].unit) i++;
    if (i > MOST) return ms__fail(MS_EUNSUPPORTED, "fsdp: cannot make unit '%s': the limit is %d units", u->name, MOST);
    for (; units.n <= i; units.n++) {
        MS_TRY(ms__grow(&units.list, &units.cap, units.n, sizeof *units.list, "fsdp", u->name));
        memset(&units.list[units.n], 0, sizeof *units.list);
    }
    units.list[i].unit = u;
    u->handle = (double)((uint64_t)++units.list[i].generation << 20 | (uint64_t)i);
    return MS_OK;
}

void ms__unit_handle_drop(double handle) { units.list[(uint64_t)handle & MOST].unit = NULL; }

// ---- recording --------------------------------------------------------------------------------

void ms_unit_record(int on)
{
    units.recording = on != 0;
    if (on) units.n_events = 0;
}

int ms_unit_recorded(ms_unit_event *out, int capacity)
{
    for (int k = 0; k < units.n_events && k < capacity; k++) out[k] = units.events[k];
    return units.n_events;
}

void ms__unit_note(const unit *u, int event, bool prefetched)
{
    if (MS_LIKELY(!units.recording)) return;
    if (ms__grow(&units.events, &units.cap_events, units.n_events, sizeof *units.events, "fsdp", "recorded events"))
        return;
    units.events[units.n_events++] = (ms_unit_event) { .event = event, .prefetched = prefetched, .unit = u->name };
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

void ms__unit_list(const unit *u, const char *device, char *to, size_t size)
{
    to[0] = '\0';
    for (int j = 0; j < u->n; j++) {
        const char *name = u->params[j].param->name ? u->params[j].param->name : "?";
        char entry[600];
        if (device) snprintf(entry, sizeof entry, "%s('%.500s', '%s')", j ? ", " : "", name, device);
        else snprintf(entry, sizeof entry, "%s'%.500s'", j ? ", " : "", name);
        if (strlen(to) + strlen(entry) + sizeof " and 2147483647 more" > size) {
            ms__append(to, size, " and %d more", u->n - j);
            return;
        }
        ms__append(to, size, "%s", entry);
    }
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

// Measured on two ranks: handing a collective over to a worker takes 10 to 20 us, in which 64 KiB are moved.
enum { AT_ONCE = 64 << 10 };

ms_stream_kind ms__unit_stream(const unit *u, const ms_group *g, ms_stream_kind queue, size_t bytes)
{
    bool here = u->memory.device == MS_CPU && u->memory.home == MS_CPU && g && ms__group_near(g);
    return here && bytes <= AT_ONCE ? MS_STREAM_COMPUTE : queue;
}

ms_label ms__unit_label(const unit *u, const char *name)
{
    return (ms_label) { .unit = *name ? name : "root", .model = u->model };
}
