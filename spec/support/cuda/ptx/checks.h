// SPDX-License-Identifier: MIT
// ptx/checks.h -- checks of each access of a translated kernel (the mode `check`), as compute-sanitizer's tools make
// them on a GPU, and further.
//
//   memory    accesses of global memory lie within one live allocation, and there within the bytes for which the
//             engine's pool uses it, pinned memory or a constant of the kernel; accesses of shared memory within the
//             block's, generic ones in one of them or on the thread's stack; none lies in another space than its
//             instruction names, and each is aligned to its width
//   races     two threads access one byte of shared or global memory, one of them writes, and nothing orders them:
//             within a warp bar.sync or bar.warp.sync, within a block bar.sync, between blocks nothing. Atomics do not
//             race with each other, nor with reads: 4 aligned bytes do not tear, and the loops around cas look first. A
//             byte that cp.async writes may be accessed only once its thread has waited for the copy.
//   unwritten bytes of shared memory, and of global memory since its allocation, are written before they are read
//   barriers  every thread of a block meets equally many barriers, the threads of a warp the same ones
//
// Shuffles, products and loads of matrices with absent lanes are found by the mode `warps`, which `check` includes.
#pragma once
#include <algorithm>
#include <atomic>

#include "cuda/shim.h"

namespace ms_shim
{

// Memory that a kernel may access.
struct range {
    const char *from, *to;
    const uint8_t *marks;  // of the byte at `from` (memory.h); nullptr: none
    bool known;            // all that was written here has been marked
    bool shared;           // with other processes
};
// The live allocations, pinned memory, and what this process shares with others; sorted.
inline std::vector<range> ranges_of_memory()
{
    std::vector<range> ranges;
    std::lock_guard<std::mutex> hold(memory_lock);
    for (const arena &a : arenas)
        for (const auto &[from, of] : a.live) {
            const uint8_t *marks = a.written ? a.written + (from - a.base) : nullptr;
            ranges.push_back({ from, from + of.bytes, marks, of.born > foreign, false });
        }
    for (const auto &[from, bytes] : pinned) ranges.push_back({ from, from + bytes, nullptr, false, false });
    for (const auto &[from, h] : virtuals.mappings)
        ranges.push_back({ from, from + virtuals.allocations[h].bytes, nullptr, false, true });
    for (const auto &[from, of] : opened)
        ranges.push_back({ (const char *)from, (const char *)from + of.bytes, nullptr, false, true });
    std::sort(ranges.begin(), ranges.end(), [](const range &a, const range &b) { return a.from < b.from; });
    return ranges;
}
// The range that begins last, of those that begin at `at` or before; nullptr if there is none.
inline const range *range_before(const std::vector<range> &ranges, const char *at)
{
    auto next =
        std::upper_bound(ranges.begin(), ranges.end(), at, [](const char *p, const range &r) { return p < r.from; });
    return next == ranges.begin() ? nullptr : &*std::prev(next);
}

enum access_kind { READ, WRITE, ATOMIC, VOLATILE };  // VOLATILE: writes

class block_checks
{
    enum { NOBODY = -1 };
    struct mark {  // an access of some bytes of a word
        unsigned block = 0, line = 0;
        uint16_t thread = 0, block_time = 0, warp_time = 0;
        uint8_t bytes = 0;     // a bit for each; 0: no access
        bool several = false;  // by several lanes of the warp
        bool atomic = false;
    };
    struct word {
        uint64_t owner = 0;       // the launch, and for shared memory the block, to which the marks belong
        mark wrote, read, other;  // read: of the last warp that read it; other: of an earlier warp
        uint16_t copying = 0;     // 1 + the thread whose cp.async is on its way
        uint8_t filled = 0;       // shared memory: the bytes that were written
    };
    struct copy_of {
        char *to;
        int bytes, line;
    };
    // No kernel accesses single bytes of shared memory. In global memory, of two threads that write the two bytes of a
    // unit only the last one's marks are kept.
    enum { UNIT = 2 };
    std::vector<word> shared { (size_t)MOST_SHARED / UNIT };
    word *global[8] = {};       // of each arena, mapped but mostly untouched
    std::vector<range> ranges;  // what a kernel may access; sorted
    size_t recent[4] = {};      // indices of ranges that were accessed last
    std::vector<unsigned> met, warps_met, met_at;
    std::vector<uint64_t> together, arrivals[2];
    std::vector<std::vector<copy_of>> copies { (size_t)MAX_THREADS };
    uint64_t launch = 0, block = 0;
    char *window = nullptr, *gap = nullptr, *dynamic = nullptr, *end_of_shared = nullptr;
    void *constants = nullptr;

    static unsigned thread() { return here.now->thread.x; }
    mark now(unsigned line, unsigned bytes, access_kind kind) const
    {
        unsigned t = thread();
        return { here.now->block.x,      line,           (uint16_t)t, (uint16_t)met[t],
                 (uint16_t)warps_met[t], (uint8_t)bytes, false,       kind >= ATOMIC };
    }
    static bool races(const mark &m, const mark &by, access_kind kind)
    {
        if (!(m.bytes & by.bytes) || (m.atomic && kind != WRITE)) return false;
        if (m.block != by.block) return true;
        if ((m.thread == by.thread && !m.several) || m.block_time != by.block_time) return false;
        return m.thread / 32 != by.thread / 32 || m.warp_time == by.warp_time;
    }
    [[noreturn]] void race(const char *at, const mark &m, const mark &by, access_kind kind)
    {
        static const char *const verbs[] = { "reads", "writes", "changes", "writes" };
        char who[64], where[64];
        if (m.block != by.block) snprintf(who, sizeof who, "block %u", m.block);
        else snprintf(who, sizeof who, m.several ? "warp %d" : "thread %d", m.several ? m.thread / 32 : m.thread);
        if (arena_of(at)) snprintf(where, sizeof where, "global memory at %p", at);
        else snprintf(where, sizeof where, "byte %td of shared memory", at - window);
        fault("line %u: %s %s, which %s accesses in line %u, with no barrier between", by.line, verbs[kind], where, who,
              m.line);
    }
    void touch(word &w, uint64_t owner, const char *at, const mark &by, access_kind kind)
    {
        if (w.owner != owner) w = word {}, w.owner = owner;
        if (races(w.wrote, by, kind)) race(at, w.wrote, by, kind);
        if (kind == READ) {
            bool same = w.read.bytes && w.read.block == by.block && w.read.thread / 32 == by.thread / 32;
            bool beside = same && w.read.block_time == by.block_time && w.read.warp_time == by.warp_time;
            if (w.read.bytes && !same) w.other = w.read;
            mark joined = by;
            if (beside) {
                joined.several = w.read.several || w.read.thread != by.thread;
                joined.bytes |= w.read.bytes;
            }
            w.read = joined;
            return;
        }
        for (mark *m : { &w.read, &w.other }) {
            if (kind == WRITE && races(*m, by, kind)) race(at, *m, by, kind);
            m->bytes &= (uint8_t)~by.bytes;
        }
        if (w.wrote.bytes && w.wrote.thread == by.thread && w.wrote.block_time == by.block_time &&
            w.wrote.warp_time == by.warp_time && w.wrote.block == by.block && w.wrote.atomic == by.atomic) {
            w.wrote.bytes |= by.bytes;
        } else w.wrote = by;
    }
    static unsigned mask(const char *at, int n, int k)  // the bytes of the k-th word of n bytes at `at`
    {
        unsigned all = (1u << UNIT) - 1, skip = (unsigned)((uintptr_t)at % UNIT);
        int left = n + (int)skip - k * UNIT;
        unsigned m = left >= UNIT ? all : (1u << left) - 1;
        return k == 0 ? m & (all << skip) : m;
    }
    word &shared_word(const char *at) { return shared[(size_t)(at - dynamic_base()) / UNIT]; }
    uint64_t of_block() const { return launch << 32 | (block & 0xffffffff); }

    void in_shared(char *at, int n, access_kind kind, int line, bool async = false)
    {
        mark by = now((unsigned)line, 0, kind);
        for (int k = 0; k * UNIT < n + (int)((uintptr_t)at % UNIT); k++) {
            char *byte = at + k * UNIT;
            word &w = shared_word(byte);
            by.bytes = (uint8_t)mask(at, n, k);
            if (w.owner == of_block() && w.copying && (kind == READ || w.copying != by.thread + 1))
                fault("line %d: %s byte %td of shared memory, to which thread %d copies without having waited", line,
                      kind == READ ? "reads" : "writes", byte - window, w.copying - 1);
            touch(w, of_block(), byte, by, kind);
            if (kind == READ && (w.filled & by.bytes) != by.bytes)
                fault("line %d: reads byte %td of shared memory, not written before", line, byte - window);
            if (kind != READ) w.filled |= by.bytes;
            if (async) w.copying = (uint16_t)(by.thread + 1);
        }
    }
    const range *allowed(const char *at, int n)
    {
        for (size_t r : recent)
            if (r < ranges.size() && at >= ranges[r].from && at + n <= ranges[r].to) return &ranges[r];
        const range *r = range_before(ranges, at);
        if (!r || at + n > r->to) return nullptr;
        std::rotate(recent, recent + 3, recent + 4);
        recent[0] = (size_t)(r - ranges.data());
        return r;
    }
    void in_global(char *at, int n, access_kind kind, int line)
    {
        const range *r = allowed(at, n);
        if (!r) {
            Dl_info of;
            if (kind == READ && dladdr(at, &of) && of.dli_fbase == constants) return;
            const range *before = range_before(ranges, at);
            if (!before || !arena_of(at))
                fault("line %d: %d bytes at %p, outside of every allocation", line, n, (void *)at);
            fault("line %d: %d bytes at %p, %td bytes behind the start of an allocation of %td", line, n, (void *)at,
                  at - before->from, before->to - before->from);
        }
        arena *a = arena_of(at);
        if (!a) return;  // pinned or another process's
        const uint8_t *marks = r->marks ? r->marks + (at - r->from) : nullptr;
        if (marks && memchr(marks, BEYOND, (size_t)n))
            fault("line %d: %d bytes at %p, in an allocation of %td bytes, but behind the tensor that lies there", line,
                  n, (void *)at, r->to - r->from);
        if (marks && r->known && (kind == READ || kind == ATOMIC) && memchr(marks, UNWRITTEN, (size_t)n))
            fault("line %d: reads %d bytes of global memory at %p, not written since their allocation of %td bytes",
                  line, n, (void *)at, r->to - r->from);
        if (kind != READ) wrote(at, (size_t)n);
        word *&words = global[a - arenas];
        if (!words) {
            void *p = mmap(nullptr, a->bytes / UNIT * sizeof(word), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) fault("no memory for the marks of global memory");
            words = (word *)p;
        }
        mark by = now((unsigned)line, 0, kind);
        for (int k = 0; k * UNIT < n + (int)((uintptr_t)at % UNIT); k++) {
            by.bytes = (uint8_t)mask(at, n, k);
            touch(words[(size_t)(at - a->base) / UNIT + (size_t)k], launch << 32, at + k * UNIT, by, kind);
        }
    }

  public:
    // A launch begins: finds what it may access. library: an address in the kernel's library, where its constants lie.
    void begin_launch(const void *library)
    {
        static std::atomic<uint64_t> launches { 0 };
        launch = ++launches;
        Dl_info of;
        constants = dladdr(library, &of) ? of.dli_fbase : nullptr;
        ranges = ranges_of_memory();
    }
    // Shared memory: `fixed` bytes of the kernel's variables, `rest` bytes that the launch adds, which begin at
    // `added`.
    void begin(char *shared_memory, size_t fixed, char *added, size_t rest, unsigned threads)
    {
        window = shared_memory, gap = window + fixed, dynamic = added, end_of_shared = added + rest;
        block++;
        met.assign(threads, 0);
        warps_met.assign(threads, 0);
        met_at.assign(threads, 0);
        for (auto *list : { &together, &arrivals[0], &arrivals[1] }) list->assign(threads, 0);
        for (auto &c : copies) c.clear();
    }
    void access(char space, const void *p, int n, int kind, int line)
    {
        char *at = (char *)p, *end = dynamic_base() + MOST_SHARED;
        if (n > 1 && ((uintptr_t)p & (uintptr_t)(n - 1)))
            fault("line %d: %d bytes at %p, which is not a multiple of %d", line, n, p, n);
        if (space == 'o') fault("line %d: %d bytes at %p, outside of the thread's local memory", line, n, p);
        if (space == 'l') return;
        bool inside = at >= window && at + n <= end;
        if ((space == 's' && !inside) || (inside && (at + n > end_of_shared || (at < dynamic && at + n > gap))))
            fault("line %d: %d bytes at %td of shared memory, which has %td", line, n, at - window,
                  (at < dynamic ? gap : end_of_shared) - window);
        if (space == 'g' && inside)
            fault("line %d: an instruction for global memory accesses byte %td of shared memory", line, at - window);
        if (inside) return in_shared(at, n, (access_kind)kind, line);
        // A generic address may be that of a local variable or a parameter.
        char *stack = (char *)__builtin_frame_address(0);
        if (space == 'n' && at > stack && at < stack + STACK) return;
        in_global(at, n, (access_kind)kind, line);
    }
    void begin_copy(void *to, int n, int line)
    {
        copies[thread()].push_back({ (char *)to, n, line });
        in_shared((char *)to, n, WRITE, line, true);
    }
    // Marks what finish_copies (tensor.h) copied as written by this thread now.
    void finish_copies()
    {
        auto &mine = copies[thread()];
        size_t done = mine.size() - here.self->copies.size();
        for (size_t k = 0; k < done; k++) {
            for (int i = 0; i < mine[k].bytes; i += UNIT) shared_word(mine[k].to + i).copying = 0;
            in_shared(mine[k].to, mine[k].bytes, WRITE, mine[k].line);
        }
        mine.erase(mine.begin(), mine.begin() + (ptrdiff_t)done);
    }
    void passed(int line)
    {
        met[thread()]++;
        met_at[thread()] = (unsigned)line;
        for (unsigned k = thread() / 32 * 32; k < met.size() && k < thread() / 32 * 32 + 32; k++)
            if (k != thread() && met[k] == met[thread()] && met_at[k] != (unsigned)line)
                fault("line %d: thread %u of this warp meets the barrier of line %u", line, k, met_at[k]);
    }
    // A thread arrives at an instruction that its warp executes together; then they have met. A lane may already have
    // arrived at the next such instruction when another one looks.
    void arrived(int line)
    {
        uint64_t n = ++together[thread()];
        arrivals[n & 1][thread()] = n << 32 | (unsigned)line;
    }
    void arrived_together(int line) const
    {
        uint64_t n = together[thread()], mine = arrivals[n & 1][thread()];
        unsigned first = thread() / 32 * 32;
        for (unsigned k = first; k < met.size() && k < first + 32; k++)
            if (arrivals[n & 1][k] != mine)
                fault("line %d: lane %u does not take part in what its warp does", line, k % 32);
    }
    void warp_passed() { warps_met[thread()]++; }
    void end()
    {
        for (size_t k = 1; k < met.size(); k++)
            if (met[k] != met[0]) fault("thread %zu meets %u barriers, thread 0 meets %u", k, met[k], met[0]);
    }
};
inline thread_local block_checks checks;

}  // namespace ms_shim
