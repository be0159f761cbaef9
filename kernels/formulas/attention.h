// SPDX-License-Identifier: MIT
// formulas/attention.h -- which keys a query attends to, and the soft cap of scores, shared by CPU and GPU.
#ifndef MS_FORMULAS_ATTENTION
#define MS_FORMULAS_ATTENTION

#include "formulas/math32.h"

// Query i attends to the keys from i + low to i + high. Without a limit, low is -MS_FAR and high is MS_FAR, which is
// more than any length and whose double still fits in 32 bits.
enum { MS_FAR = 1 << 30 };
typedef struct ms_span {
    int64_t low, high;
} ms_span;

// The keys of query i, of tk: from ms_span_first to below ms_span_end.
MS_FN int64_t ms_span_first(ms_span s, int64_t i) { return i + s.low > 0 ? i + s.low : 0; }
MS_FN int64_t ms_span_end(ms_span s, int64_t i, int64_t tk)
{
    int64_t end = i + s.high + 1;
    return end < 0 ? 0 : end < tk ? end : tk;
}
// The queries that attend to a key, as a span.
MS_FN ms_span ms_span_turned(ms_span s)
{
    ms_span t = { -s.high, -s.low };
    return t;
}

// The soft cap of Gemma 2: cap tanh(s / cap), and its slope from the result.
MS_FN float ms_capped_f32(float s, float cap) { return cap * ms_tanh_f32(s / cap); }
MS_FN float ms_cap_slope_f32(float capped, float cap) { return 1 - capped / cap * (capped / cap); }
MS_FN double ms_capped_f64(double s, double cap) { return cap * ms_tanh_f64(s / cap); }
MS_FN double ms_cap_slope_f64(double capped, double cap) { return 1 - capped / cap * (capped / cap); }

#endif
