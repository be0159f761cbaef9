// SPDX-License-Identifier: MIT
// ptx/compare.h -- runs each kernel twice, as g++ and as nvcc compiled it (the mode `compare`): both must leave the
// same bits in memory, apart from the payload of NaN.
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

    static bool is_nan(uint64_t bits, int exponent, int mantissa)
    {
        uint64_t all = ((uint64_t)1 << exponent) - 1;
        return (bits >> mantissa & all) == all && (bits & (((uint64_t)1 << mantissa) - 1)) != 0;
    }
    // Kernels of float64 that call functions of the mathematical library, of CUDA or of the host. Their results may
    // differ by ULPS units of the last place: differences of results of these functions do. norm_kernel and
    // kernels with a fold_result finish norms of any power.
    static constexpr const char *ROUNDED[][2] = { { "draw_", "kernelId" },  { "softmax", "kernelId" },
                                                  { "cross_", "kernelId" }, { "attend", "kernelId" },
                                                  { "norm_kernelILb", "" }, { "fold_result", "kernelId" } };
    enum { ULPS = 256 };
    static bool is_rounded(const char *symbol)
    {
        for (const auto &r : ROUNDED)
            if (strstr(symbol, r[0]) && strstr(symbol, r[1])) return true;
        return false;
    }
    // Whether 8 bytes are the same numbers of some type.
    static bool same(uint64_t a, uint64_t b)
    {
        if (a == b || (is_nan(a, 11, 52) && is_nan(b, 11, 52))) return true;
        for (int at = 0; at < 64; at += 32) {
            uint64_t x = a >> at & 0xffffffff, y = b >> at & 0xffffffff;
            if (x == y || (is_nan(x, 8, 23) && is_nan(y, 8, 23))) continue;
            for (int k = 0; k < 32; k += 16) {
                uint64_t u = x >> k & 0xffff, v = y >> k & 0xffff;
                bool nan = (is_nan(u, 8, 7) && is_nan(v, 8, 7)) || (is_nan(u, 5, 10) && is_nan(v, 5, 10));
                if (u != v && !nan) return false;
            }
        }
        return true;
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
        const bool rounded = is_rounded(symbol);
        for (const piece &p : pieces) {
            size_t n = p.before.size();
            if (memcmp(p.at, p.other.data(), n) == 0) continue;
            for (size_t k = 0; k < n; k += 8) {
                uint64_t a = 0, b = 0;
                memcpy(&a, p.at + k, std::min<size_t>(8, n - k));
                memcpy(&b, p.other.data() + k, std::min<size_t>(8, n - k));
                if (same(a, b) || (rounded && a - b + ULPS <= 2 * ULPS)) continue;
                here.now = nullptr;
                fault("%s leaves %016llx at byte %zu of an allocation of %zu, g++'s kernel %016llx", symbol,
                      (unsigned long long)a, k, n, (unsigned long long)b);
            }
        }
        pieces.clear();
    }
};
inline thread_local comparison twice;

}  // namespace ms_shim
