// SPDX-License-Identifier: MIT
// formulas/optim/list.h -- every optimizer: one header each, which has all that is its own. Included several times, by
// C and by nvcc; what a header gives depends on what the includer defines:
//
//   MS_OPTIM_ROWS             ms__optim_NAME, an optimizer: state, options, defaults, checks, factors
//   MS_OPTIM_FORMULAS         ms_FORMULA, one element's step, in REAL (with R(name) and R_SQRT): the new parameter, of
//                             the old one, its gradient, its states (NULL: not kept) and the optimizer's factors
//   OPTIMIZER(NAME, FORMULA)  a line of a list for each optimizer
//
// MS_KEEPS_FORMULA has bit s for every set s of states (a sum of 1, 2 and 4) that the formula may be given: the CPU has
// a loop for each. The list's order is the number of an optimizer, ms_optim_options.kind.
#ifndef MS_OPTIM_LIST
#define MS_OPTIM_LIST
#include "tensor/dtype.h"

typedef struct {
    ms_optim_row row;
    const char *range;                              // name of its step in a profile
    ms_status (*check)(const ms_optim_options *o);  // of options together; NULL: nothing to check
    unsigned (*keeps)(const ms_optim_options *o);   // the set of states that these options need
    int (*is_plain)(const ms_optim_options *o);     // is a step p -= lr * g and nothing else? NULL: never
    // What the formula reads besides, for a parameter's step number `step` (from 1): at most MS_OPTIM_FACTORS.
    void (*factors)(const ms_optim_options *o, double step, double *f);
} optimizer;

// Options of a row. field: where ms_optim_options has it, `more[k]` if it has no field of its own. low: the least
// number that a constructor takes; a pair keeps within its limits always.
#define MS_OPTION(name, field, value, low)                                          \
    {                                                                               \
#name, offsetof(ms_optim_options, field), 1, { value }, low, INFINITY, 0, 0 \
    }
#define MS_OPTION_PAIR(name, first, a, b, low, below)                           \
    {                                                                           \
#name, offsetof(ms_optim_options, first), 2, { a, b }, low, below, 1, 0 \
    }
#define MS_OPTION_FLAG(name, field)                                                                     \
    {                                                                                                   \
#name, offsetof(ms_optim_options, field), sizeof((ms_optim_options) { 0 }.field) == 4 ? 0 : -1, \
            { 0 }, 0, 0, 0, 0                                                                           \
    }
#endif

#include "formulas/optim/sgd.h"
#include "formulas/optim/adam.h"

#undef OPTIMIZER
