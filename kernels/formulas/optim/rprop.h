// SPDX-License-Identifier: MIT
// formulas/optim/rprop.h -- Rprop (Riedmiller & Braun 1993, in PyTorch's form, without weight backtracking): s *=
// etas[2] where g has the sign of the previous g; where the sign has changed, s *= etas[1] and g = 0; s stays within
// step_sizes; p -= sign(g) * s. s starts at lr. See list.h.
#ifndef MS_OPTIM_RPROP
#define MS_OPTIM_RPROP

enum { RPROP_START, RPROP_MINUS, RPROP_PLUS, RPROP_LOW, RPROP_HIGH };  // factors; START: s at the first step, else 0
// The set of states that a step accepts (list.h): {the last g, s}.
enum { MS_KEEPS_rprop = 1 << 3 };

#ifdef MS_OPTIM_ROWS
static ms_status rprop_check(const ms_optim_options *o)
{
    if (!(o->more[0] > 0 && o->more[0] < 1 && o->more[1] > 1))
        return ms__fail(MS_EINVAL, "Rprop: etas are %g and %g, expected the first between 0 and 1, the second above 1",
                        o->more[0], o->more[1]);
    if (!(o->more[2] <= o->more[3]))
        return ms__fail(MS_EINVAL, "Rprop: step_sizes are %g and %g, expected the smallest step, then the largest",
                        o->more[2], o->more[3]);
    return MS_OK;
}

static unsigned rprop_keeps(const ms_optim_options *o)
{
    (void)o;
    return 3;
}

static void rprop_factors(const ms_optim_options *o, double step, double *f)
{
    f[RPROP_START] = step == 1 ? o->lr : 0;
    f[RPROP_MINUS] = o->more[0];
    f[RPROP_PLUS] = o->more[1];
    f[RPROP_LOW] = o->more[2];
    f[RPROP_HIGH] = o->more[3];
}

static const optimizer ms__optim_Rprop = {
    .row = { .name = "Rprop",
             .doc =
                 "Rprop (Riedmiller & Braun 1993, in PyTorch's form): each element has a step size of its own, which "
                 "grows while the sign of its gradient stays. For gradients of all data, not of batches.",
             .states = { "prev", "step_size" },
             .needed = 3,
             .options = { MS_OPTION(lr, lr, 1e-2, 0, "the first step's size"),
                          MS_OPTION_PAIR(etas, more[0], 0.5, 1.2, 0, INFINITY,
                                         "factors of the step size where the sign has changed, and where it has not"),
                          MS_OPTION_PAIR(step_sizes, more[2], 1e-6, 50, 0, INFINITY, "the smallest and largest step"),
                          MS_OPTION_FLAG(maximize, maximize,
                                         "maximizes instead of minimizing: negates the gradient") } },
    .range = "Rprop.step",
    .check = rprop_check,
    .keeps = rprop_keeps,
    .factors = rprop_factors,
};
#endif
#endif

#ifdef MS_OPTIM_FORMULAS
MS_FN REAL R(ms_rprop)(REAL x, REAL g, REAL *last, REAL *s, REAL *unused, const REAL *f)
{
    (void)unused;
    REAL same = g * *last, size = (*s + f[RPROP_START]) * (same > 0 ? f[RPROP_PLUS] : same < 0 ? f[RPROP_MINUS] : 1);
    size = size < f[RPROP_LOW] ? f[RPROP_LOW] : size > f[RPROP_HIGH] ? f[RPROP_HIGH] : size;
    if (same < 0) g = 0;
    *last = g;
    *s = size;
    return x - (g > 0 ? size : g < 0 ? -size : g);
}
#endif

#ifdef OPTIMIZER
OPTIMIZER(Rprop, rprop)
#endif
