// SPDX-License-Identifier: MIT
// ptx/compare.h -- runs each kernel twice, as g++ and as nvcc compiled it (the mode `compare`): both must leave the
// same bits in memory, apart from the payload of NaN.
//
// Before g++'s kernel runs, the allocations to which the kernel's parameters point are saved, and those to which short
// ones of these point, as lists of tensors do; afterwards they are restored for the translated kernel. A launch that
// may reach more than MOST bytes, or another process's memory, runs once.
#pragma once
#include <cmath>

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

    // What calls functions of the mathematical library, CUDA's or the host's: their results may differ by 2 units of
    // the last place. Kernels of float64 by a part of their symbols, and by their operators, of which none is all:
    //   CALLS   stores such results
    //   CHAINS  computes them from each other
    //   ADDS    adds them up, or to what may be nearly their opposite: a unit of the last place of a term is many of
    //           the sum's. Terms are about 1, so SMALL may remain.
    enum how { EXACT = 0, CALLS = 2, CHAINS = 4, ADDS = 8 };  // units of the last place
    static constexpr struct {
        const char *symbol, *type, *ops;
        how may;
    } ROUNDED[] = {
        { "draw_", "kernelId", "", CALLS },
        { "roots_", "kernelId", "", CALLS },
        { "scan_", "Id", " logcumsumexp", ADDS },
        { "norm_kernelILb", "", "", CALLS },  // norms of any power
        { "clip_kernel", "", "", CALLS },
        { "fold_result", "kernelId", " logsumexp norm ", ADDS },
        { "softmax", "kernelId", "", ADDS },
        { "cross_", "kernelId", "", ADDS },
        { "attend", "kernelId", "", ADDS },
        { "forward_", "kernelId", "", ADDS },
        { "backward_kernelId", "4pass", "", ADDS },
        { "unproject_", "kernelId", "", ADDS },
        { "gelu_", "kernelId", "", ADDS },
        { "product_kernelIdLb1", "", "", ADDS },
        { "gradient_kernel11ms_ctc", "", "", ADDS },
        { "loss_kernel11ms_ctc", "", "", ADDS },
    };
    static constexpr double SMALL = 0x1p-49;
    // Elementwise operators, by the beginnings of their names. A gradient may be a chain of two functions, or add up
    // two terms (TERMS), of which one may be nearly the other's opposite. Of float32 those that have no formula of
    // ours.
    static constexpr const char *OF_DOUBLE =
                                    " acos asin atan binary_cross celu cos elu erf exp gelu hypot logit logs log1 "
                                    "log2 log_ mish norm_ pow rpow selu sigmoid silu sin soft tan xlogy ",
                                *TERMS = " binary_cross_entropy_second gelu logaddexp mish_backward silu_backward ",
                                *OF_FLOAT = " acos asin atan cosh erfc exp2 hypot log10 log2 norm_ pow rpow sinh ";
    static bool begins(const char *list, const char *name)
    {
        for (const char *at = list; (at = strchr(at, ' ')) && at[1];) {
            size_t n = strcspn(++at, " ");
            if (strncmp(name, at, n) == 0) return true;
        }
        return false;
    }
    static how may_differ(const char *symbol)
    {
        const char *op = kernel_name ? kernel_name : "";
        bool of_double = strstr(symbol, "strided_kernelId");
        if (of_double || strstr(symbol, "strided_kernelIf") || strstr(symbol, "dense_any_kernel"))
            return of_double && begins(TERMS, op) ? ADDS
                   : begins(of_double ? OF_DOUBLE : OF_FLOAT, op) || (of_double && strcmp(op, "log") == 0) ? CHAINS
                                                                                                           : EXACT;
        for (const auto &r : ROUNDED)
            if (strstr(symbol, r.symbol) && strstr(symbol, r.type) && (!*r.ops || begins(r.ops, op))) return r.may;
        return EXACT;
    }
    // How many units of the last place two numbers of this size differ.
    static uint64_t apart(uint64_t a, uint64_t b, int bits)
    {
        const uint64_t sign = (uint64_t)1 << (bits - 1);
        int64_t x = (int64_t)(a & (sign - 1)), y = (int64_t)(b & (sign - 1));
        if (a & sign) x = -x;
        if (b & sign) y = -y;
        return x > y ? (uint64_t)x - (uint64_t)y : (uint64_t)y - (uint64_t)x;
    }
    static bool is_nan(uint64_t bits, int exponent, int mantissa)
    {
        uint64_t all = ((uint64_t)1 << exponent) - 1;
        return (bits >> mantissa & all) == all && (bits & (((uint64_t)1 << mantissa) - 1)) != 0;
    }
    static bool are_nan(uint64_t a, uint64_t b, int exponent, int mantissa)
    {
        return is_nan(a, exponent, mantissa) && is_nan(b, exponent, mantissa);
    }
    // Whether so many bits are the same numbers of some type, or near enough.
    static bool alike(uint64_t a, uint64_t b, int bits, how may)
    {
        if (a == b || (may != EXACT && apart(a, b, bits) <= (bits == 16 ? 1 : may))) return true;
        // A conversion from a half type loses the sign of a NaN, of which copysign and its gradient make that of a
        // number.
        if (bits == 16)
            return are_nan(a, b, 8, 7) || are_nan(a, b, 5, 10) ||
                   ((a ^ b) == 0x8000 && kernel_name && strncmp(kernel_name, "copysign", 8) == 0);
        double x, y;
        memcpy(&x, &a, 8);
        memcpy(&y, &b, 8);
        if (bits == 64 ? are_nan(a, b, 11, 52) || (may == ADDS && fabs(x - y) <= SMALL) : are_nan(a, b, 8, 23))
            return true;
        const uint64_t low = ((uint64_t)1 << bits / 2) - 1;
        return alike(a & low, b & low, bits / 2, may) && alike(a >> bits / 2, b >> bits / 2, bits / 2, may);
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
        const how may = may_differ(symbol);
        for (const piece &p : pieces) {
            size_t n = p.before.size();
            if (memcmp(p.at, p.other.data(), n) == 0) continue;
            for (size_t k = 0; k < n; k += 8) {
                uint64_t a = 0, b = 0;
                memcpy(&a, p.at + k, std::min<size_t>(8, n - k));
                memcpy(&b, p.other.data() + k, std::min<size_t>(8, n - k));
                if (alike(a, b, 64, may)) continue;
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
