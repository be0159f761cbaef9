// SPDX-License-Identifier: MIT
// train/optim_body.h -- the optimizers' loops over one block; optim.c includes it once per element type with
//   T (stored parameter and gradient), REAL (arithmetic and state), LOAD(x) and STORE(x) (T to REAL and back), N(name)
//   (this type's loop) and R(name) (the formula in REAL).
// A loop reads every array once, and writes all but the gradient once. The formulas are in formulas/optim. HALF is
// defined for float16 and bfloat16: PIECE elements at a time are converted to float32 and stepped by float32's loops.

// The part of a job from element `at` on.
static job N(part)(const job *j, int64_t at)
{
    job by = *j;
    by.p = (T *)j->p + at;
    by.g = (const T *)j->g + at;
    if (j->master) by.master = j->master + at;
    for (int s = 0; s < MS_OPTIM_STATES; s++)
        if (j->state[s]) by.state[s] = (REAL *)j->state[s] + at;
    return by;
}

#ifndef HALF
// One loop for each set of states that the formula accepts, so that the loop does not test which states exist. The
// formula gets addresses of copies: GCC knows that these are not NULL, removes the formula's test, and vectorizes.
#define LOOP(FORMULA, SET)                                                                                    \
    if ((MS_KEEPS_##FORMULA >> SET & 1) && set == SET) {                                                      \
        for (int64_t k = 0; k < n; k++) {                                                                     \
            REAL s0 = SET & 1 ? a[k] : 0, s1 = SET & 2 ? b[k] : 0, s2 = SET & 4 ? c[k] : 0;                   \
            p[k] = R(ms_##FORMULA)(p[k], f[MS_OPTIM_SIGN] * g[k], SET & 1 ? &s0 : NULL, SET & 2 ? &s1 : NULL, \
                                   SET & 4 ? &s2 : NULL, f);                                                  \
            if (SET & 1) a[k] = s0;                                                                           \
            if (SET & 2) b[k] = s1;                                                                           \
            if (SET & 4) c[k] = s2;                                                                           \
        }                                                                                                     \
        return;                                                                                               \
    }
#define OPTIMIZER(NAME, FORMULA)                                                                                 \
    static MS_KERNEL void N(pass_##NAME)(T *restrict p, const T *restrict g, REAL *restrict a, REAL *restrict b, \
                                         REAL *restrict c, const double *factors, int set, int64_t n)            \
    {                                                                                                            \
        REAL f[MS_OPTIM_FACTORS + 1];                                                                            \
        for (int k = 0; k <= MS_OPTIM_FACTORS; k++) f[k] = (REAL)factors[k];                                     \
        LOOP(FORMULA, 0)                                                                                         \
        LOOP(FORMULA, 1)                                                                                         \
        LOOP(FORMULA, 2)                                                                                         \
        LOOP(FORMULA, 3)                                                                                         \
        LOOP(FORMULA, 4)                                                                                         \
        LOOP(FORMULA, 5)                                                                                         \
        LOOP(FORMULA, 6)                                                                                         \
        LOOP(FORMULA, 7)                                                                                         \
    }
#include "formulas/optim/list.h"

static void N(run_whole)(const job *j, int64_t at, int64_t n)
{
    REAL *state[MS_OPTIM_STATES];
    int set = 0;
    for (int s = 0; s < MS_OPTIM_STATES; s++) {
        state[s] = j->state[s] ? (REAL *)j->state[s] + at : NULL;
        set |= (state[s] != NULL) << s;
    }
    switch (j->kind) {
#define OPTIMIZER(NAME, FORMULA)                                                                                \
    case KIND_##NAME:                                                                                           \
        N(pass_##NAME)((T *)j->p + at, (const T *)j->g + at, state[0], state[1], state[2], j->factors, set, n); \
        return;
#include "formulas/optim/list.h"
    }
}
#else
// Steps n elements, at most PIECE, in float32: the master weights, or the converted parameters if there are none. The
// results, rounded, are the new parameters.
static MS_KERNEL void N(run_whole)(const job *j, int64_t at, int64_t n)
{
    float g[PIECE], whole[PIECE];
    job by = N(part)(j, at);
    T *p = by.p;
    const T *from = by.g;
    unsigned mode = keep_tiny();
    for (int64_t k = 0; k < n; k++) g[k] = LOAD(from[k]);
    if (!by.master)
        for (int64_t k = 0; k < n; k++) whole[k] = LOAD(p[k]);
    set_tiny(mode);
    const float *stepped = by.p = by.master ? by.master : whole;
    by.g = g;
    run_whole_f32(&by, 0, n);
    keep_tiny();
    for (int64_t k = 0; k < n; k++) p[k] = STORE(stepped[k]);
    set_tiny(mode);
}
#endif

// Runs elements [at, at + n) of a job. If the job has a scale or a half type, runs PIECE elements at a time, so that
// the scaled or converted numbers stay in the cache.
static MS_KERNEL void N(run)(const job *j, int64_t at, int64_t n)
{
#ifndef HALF
    if (MS_LIKELY(j->scale == 1)) {
        N(run_whole)(j, at, n);
        return;
    }
#endif
    REAL f = (REAL)j->scale;
    for (int64_t end = at + n; at < end; at += PIECE) {
        T g[PIECE];
        job by = N(part)(j, at);
        int64_t size = end - at < PIECE ? end - at : PIECE;
        if (j->scale != 1) {
            const T *from = by.g;
            unsigned mode = keep_tiny();
            for (int64_t k = 0; k < size; k++) g[k] = STORE(LOAD(from[k]) * f);
            set_tiny(mode);
            by.g = g;
        }
        N(run_whole)(&by, 0, size);
    }
}

#undef LOOP
#undef HALF
#undef T
#undef REAL
#undef R
#undef LOAD
#undef STORE
#undef N
