// SPDX-License-Identifier: MIT
// device/history.c -- the memory history: live bytes by place in the script, now and at the peak.
//
// C never calls Lua, so an allocation waits in a list until the script reports its place (ms_memory_site), after the
// call that allocated has returned. The allocation then belongs to a record: one per place, purpose, kind, device and
// module.
//
// A record keeps its bytes at the peak without a copy of all records at each new peak. Every new peak of a device
// begins an epoch, and a record saves its bytes when they change for the first time in an epoch. Invariant: at the peak
// a record had peak_bytes if its epoch is the device's, else the bytes that it has now.
#include "device/history.h"
#include "device/device.h"

// The record's number in a block's tag (ms_block) is an index into `list` if it has the bit WAITING, otherwise into
// `records`.
enum { BUCKETS = 4096, WAITING = 1 << 27 };

typedef struct {
    ms_block *block;  // NULL: it was freed, in epoch `died`
    const char *what;
    size_t bytes;
    uint32_t born, died;
    int device, module;
    ms_memory_kind kind;
} waiting;

typedef struct {
    uint32_t epoch;
    size_t bytes, kinds[MS_MEMORY_KINDS];  // at the peak
} peak;

bool ms__history_on;
static struct {
    ms_memory_record *records;  // records[0] is unused
    int *chain, n, cap, cap_chain, bucket[BUCKETS];
    waiting *waiting;
    int cap_waiting;
    peak peaks[1 + MS_CUDA_DEVICES];
} history = { .n = 1 };

static peak *peak_of(int device) { return &history.peaks[ms__is_cuda(device) ? 1 + ms__index(device) : 0]; }

static void set_record(ms_block *b, uint32_t number) { b->tag = (b->tag & 15) | number << 4; }

// To be called before a record's bytes change: saves what it had at the peak. Returns r.
static ms_memory_record *touch(ms_memory_record *r)
{
    uint32_t epoch = peak_of(r->device)->epoch;
    if (r->epoch == epoch) return r;
    r->epoch = epoch;
    r->peak_bytes = r->bytes;
    r->peak_blocks = r->blocks;
    return r;
}

// Returns the number of the record of a place, purpose, kind, device and module, and adds the record if there is none.
// 0: there is no memory for it, or the number of records has reached its limit.
static uint32_t find_waiting(double site, const waiting *w)
{
    uint64_t key[] = { (uint64_t)site, (uint64_t)(uintptr_t)w->what, (uint64_t)w->kind << 32 | (uint32_t)w->device,
                       (uint64_t)w->module };
    int *at = &history.bucket[ms__hash_bytes(MS_HASH_START, key, sizeof key) % BUCKETS];
    for (int k = *at; k; k = history.chain[k]) {
        const ms_memory_record *r = &history.records[k];
        if (r->site == site && r->what == w->what && r->kind == (int)w->kind && r->device == w->device &&
            r->module == w->module)
            return (uint32_t)k;
    }
    if (history.n >= WAITING ||
        ms__grow(&history.records, &history.cap, history.n, sizeof *history.records, "memory history", "records") ||
        ms__grow(&history.chain, &history.cap_chain, history.n, sizeof *history.chain, "memory history", "records"))
        return 0;
    history.records[history.n] = (ms_memory_record) {
        .what = w->what, .site = site, .kind = (int)w->kind, .device = w->device, .module = w->module
    };
    history.chain[history.n] = *at;
    return (uint32_t)(*at = history.n++);
}

void ms__history_add(ms_block *b, const ms_usage *u, const char *what)
{
    peak *p = peak_of(b->device);
    int n = ms__state.memory_waiting;
    if (n < WAITING && ms__grow(&history.waiting, &history.cap_waiting, n, sizeof *history.waiting, "memory history",
                                "allocations") == MS_OK) {
        history.waiting[n] = (waiting) { b,
                                         ms__intern(what ? what : "allocation"),
                                         b->bytes,
                                         .born = p->epoch,
                                         .device = b->device,
                                         .module = ms__state.memory_module,
                                         .kind = ms__kind_of(b) };
        set_record(b, (uint32_t)(WAITING | n));
        ms__state.memory_waiting++;
    }
    if (u->allocated <= p->bytes) return;
    p->epoch++;
    p->bytes = u->allocated;
    memcpy(p->kinds, u->kinds, sizeof p->kinds);
}

void ms__history_drop(const ms_block *b)
{
    uint32_t k = b->tag >> 4;
    if (k & WAITING) {
        history.waiting[k & ~WAITING].block = NULL;
        history.waiting[k & ~WAITING].died = peak_of(b->device)->epoch;
        return;
    }
    ms_memory_record *r = touch(&history.records[k]);
    r->bytes -= (double)b->bytes;
    r->blocks--;
}

// Adds a block of `bytes` bytes to record k (sign 1), or subtracts it (sign -1).
static void count(uint32_t k, double bytes, int sign)
{
    ms_memory_record *r = touch(&history.records[k]);
    r->bytes += sign * bytes;
    r->blocks += sign;
}

void ms__history_kind(ms_block *b, ms_memory_kind kind)
{
    uint32_t k = b->tag >> 4;
    if (k & WAITING) {
        history.waiting[k & ~WAITING].kind = kind;
        return;
    }
    waiting w = {
        .what = history.records[k].what, .device = b->device, .module = history.records[k].module, .kind = kind
    };
    uint32_t to = find_waiting(history.records[k].site, &w);
    if (!to) return;
    count(k, (double)b->bytes, -1);
    count(to, (double)b->bytes, 1);
    set_record(b, to);
}

void ms_memory_site(double site)
{
    for (int i = 0; i < ms__state.memory_waiting; i++) {
        waiting *w = &history.waiting[i];
        uint32_t epoch = peak_of(w->device)->epoch;
        // The peak of an epoch was reached when the epoch began.
        bool at_peak = w->born < epoch && (w->block || w->died == epoch);
        if (!w->block && !at_peak) continue;
        uint32_t k = find_waiting(site, w);
        if (w->block) set_record(w->block, k);
        if (!k) continue;
        ms_memory_record *r = touch(&history.records[k]);
        if (w->block) {
            r->bytes += (double)w->bytes;
            r->blocks++;
        }
        if (at_peak) {
            r->peak_bytes += (double)w->bytes;
            r->peak_blocks++;
        }
    }
    ms__state.memory_waiting = 0;
}

void ms__history_restart(int device, const ms_usage *u)
{
    peak *p = peak_of(device);
    p->epoch++;
    p->bytes = u->allocated;
    memcpy(p->kinds, u->kinds, sizeof p->kinds);
}

const char *ms__memory_kind_name(int kind)
{
    static const char *const names[] = { "other", "parameters", "gradients", "optimizer", "gathered" };
    return kind >= 0 && kind < MS_MEMORY_KINDS ? names[kind] : NULL;
}

double ms__history_read(int device, ms_memory *at_peak, ms_memory_record *out, double room)
{
    const peak *p = peak_of(device);
    if (at_peak) {
        memset(at_peak, 0, sizeof *at_peak);
        at_peak->allocated = (double)p->bytes;
        ms__kinds_out(p->kinds, at_peak);
    }
    double n = 0;
    for (int k = 1; k < history.n; k++) {
        if (history.records[k].device != device) continue;
        const ms_memory_record *r = touch(&history.records[k]);
        if (r->bytes == 0 && r->peak_bytes == 0) continue;
        if (out && n < room) out[(int)n] = *r;
        n++;
    }
    return n;
}
