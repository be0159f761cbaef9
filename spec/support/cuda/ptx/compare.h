// SPDX-License-Identifier: MIT
// ptx/compare.h -- runs each kernel twice, as g++ and as nvcc compiled it (the mode `compare`): both must leave the
// same bits in memory, apart from the payload of NaN. g++'s kernel then calls the functions of CUDA's mathematical
// library (functions.h).
//
// Before g++'s kernel runs, the allocations to which the kernel's parameters point are saved, and those to which short
// ones of these point, as lists of tensors do; afterwards they are restored for the translated kernel. A launch that
// may reach more than MOST bytes, or another process's memory, runs once.
#pragma once
#include "checks.h"

namespace ms_shim
{

class comparison
{
    enum : size_t { MOST = 256 << 20, SHORT = 64 << 10 };
    struct piece {
        char *at;
        std::vector<char> before, other;  // other: after g++'s kernel
    };
    std::vector<piece> pieces;

    // NaN as operations and conversions make it: quiet, with a payload that a narrower type can hold, or with all bits,
    // as GPUs have it. Nearly all small negative integers have other bits.
    static bool is_nan(uint64_t bits, int width)
    {
        const uint64_t most = ((uint64_t)1 << (width - 1)) - 1, number = bits & most;
        if (width == 16) return number == most || number == 0x7fc0 || number == 0x7e00;
        if (width == 32) return number == most || (number >= 0x7fc00000 && number % (1 << 13) == 0);
        return number == most || (number >= 0x7ff8000000000000 && number % (1 << 29) == 0);
    }
    // Whether so many bits are the same numbers of some type.
    static bool alike(uint64_t a, uint64_t b, int bits)
    {
        if (a == b) return true;
        // A conversion from a half type loses the sign of a NaN, of which copysign and its gradient make that of a
        // number.
        if (is_nan(a, bits) && is_nan(b, bits)) return true;
        if (bits == 16) return (a ^ b) == 0x8000 && kernel_name && strncmp(kernel_name, "copysign", 8) == 0;
        const uint64_t low = ((uint64_t)1 << bits / 2) - 1;
        return alike(a & low, b & low, bits / 2) && alike(a >> bits / 2, b >> bits / 2, bits / 2);
    }

  public:
    // Saves what a launch may write; whether it is to run twice.
    bool begin(const void *const *arguments, const size_t *sizes, size_t n)
    {
        const std::vector<range> ranges = ranges_of_memory();
        std::vector<const range *> reached;
        size_t bytes = 0;
        auto look = [&](const char *words, size_t size) {
            for (size_t k = 0; k + 8 <= size; k += 8) {
                const char *p;
                memcpy(&p, words + k, 8);
                const range *r = range_before(ranges, p);
                if (!r || p >= r->to || std::find(reached.begin(), reached.end(), r) != reached.end()) continue;
                reached.push_back(r);
                bytes += (size_t)(r->to - r->from);
            }
        };
        for (size_t k = 0; k < n; k++) look((const char *)arguments[k], sizes[k]);
        for (size_t k = 0; k < reached.size(); k++)
            if (reached[k]->to - reached[k]->from <= (ptrdiff_t)SHORT)
                look(reached[k]->from, (size_t)(reached[k]->to - reached[k]->from));
        pieces.clear();
        bool shared = std::any_of(reached.begin(), reached.end(), [](const range *r) { return r->shared; });
        if (bytes > MOST || shared) return false;
        for (const range *r : reached) pieces.push_back({ (char *)r->from, { r->from, r->to }, {} });
        return true;
    }
    void swap()
    {
        for (piece &p : pieces) {
            p.other.assign(p.at, p.at + p.before.size());
            memcpy(p.at, p.before.data(), p.before.size());
        }
    }
    void end(const char *symbol)
    {
        for (const piece &p : pieces) {
            size_t n = p.before.size();
            if (memcmp(p.at, p.other.data(), n) == 0) continue;
            for (size_t k = 0; k < n; k += 8) {
                uint64_t a = 0, b = 0;
                memcpy(&a, p.at + k, std::min<size_t>(8, n - k));
                memcpy(&b, p.other.data() + k, std::min<size_t>(8, n - k));
                if (alike(a, b, 64)) continue;
                here.now = nullptr;
                fault("%s: %s leaves %016llx at byte %zu of an allocation of %zu, g++'s kernel %016llx", kernel_name,
                      symbol, (unsigned long long)a, k, n, (unsigned long long)b);
            }
        }
        pieces.clear();
    }
};
inline thread_local comparison twice;

}  // namespace ms_shim
