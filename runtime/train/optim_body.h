// SPDX-License-Identifier: MIT
// train/optim_body.h -- the optimizers' loops over one block; optim.c includes it once per element type with
//   T (stored parameter and gradient), REAL (arithmetic and state), LOAD(x) and STORE(x) (T to REAL and back), N(name)
//   (this type's loop) and R(name) (the formula in REAL).
// A loop reads every array once, and writes all but the gradient once. The formulas are in formulas/optim.

// One loop for each set of states that the formula accepts, so that the loop does not test which states exist.
#define LOOP(FORMULA, SET)                                                                                  \
    if ((MS_KEEPS_##FORMULA >> SET & 1) && set == SET) {                                                    \
        for (int64_t k = 0; k < n; k++)                                                                     \
            p[k] = STORE(R(ms_##FORMULA)(LOAD(p[k]), f[MS_OPTIM_SIGN] * LOAD(g[k]), SET & 1 ? &a[k] : NULL, \
                                         SET & 2 ? &b[k] : NULL, SET & 4 ? &c[k] : NULL, f));               \
        return;                                                                                             \
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

static void N(run)(const job *j, int64_t at, int64_t n)
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

#undef LOOP
#undef T
#undef REAL
#undef R
#undef LOAD
#undef STORE
#undef N
