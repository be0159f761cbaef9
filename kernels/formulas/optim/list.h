// SPDX-License-Identifier: MIT
// formulas/optim/list.h -- the optimizers, one self-contained header each. C and nvcc include it several times. What
// the headers define depends on the macro that is set:
//
//   MS_OPTIM_ROWS             ms__optim_NAME, an optimizer: state, options, defaults, checks, factors
//   MS_OPTIM_FORMULAS         ms_FORMULA, one element's step, in REAL (with R(name) and R_SQRT): the new parameter from
//                             the old one, its gradient, its states (NULL if not kept) and the optimizer's factors
//   OPTIMIZER(NAME, FORMULA)  one use of the includer's macro for each optimizer
//
// A set of states is a sum of 1, 2 and 4 (for state 1, 2, 3). MS_KEEPS_FORMULA has bit s set for every set s that the
// formula accepts; the CPU has one loop per set. MS_KEEPS_MASTERS is added where optimizers have the option
// master_weights. An optimizer's number (ms_optim_options.kind) is its position in the
// list.
#ifndef MS_OPTIM_LIST
#define MS_OPTIM_LIST
#include "tensor/dtype.h"

enum { MS_KEEPS_MASTERS = 1 << 8 };

typedef struct {
    ms_optim_row row;
    const char *range;                              // the name of the step in a profile
    ms_status (*check)(const ms_optim_options *o);  // checks options that depend on each other; NULL if none do
    unsigned (*keeps)(const ms_optim_options *o);   // the set of states that these options need
    int (*is_plain)(const ms_optim_options *o);     // whether a step is p -= lr * g and nothing else; NULL if never
    // Computes the factors that the formula reads, at most MS_OPTIM_FACTORS. step: the parameter's step, counted from
    // 1.
    void (*factors)(const ms_optim_options *o, double step, double *f);
} optimizer;

// One option of an optimizer. field: its field in ms_optim_options, or `more[k]` if it has no field of its own. low:
// the least value that a constructor accepts; a script may set a lower one later. The two numbers of an MS_OPTION_PAIR
// must stay in [low, below). doc: the option's meaning, for the generated reference.
#define MS_OPTION(name, field, value, low, doc)                                          \
    {                                                                                    \
#name, doc, offsetof(ms_optim_options, field), 1, { value }, low, INFINITY, 0, 0 \
    }
#define MS_OPTION_PAIR(name, first, a, b, low, below, doc)                           \
    {                                                                                \
#name, doc, offsetof(ms_optim_options, first), 2, { a, b }, low, below, 1, 0 \
    }
#define MS_OPTION_FLAG(name, field, doc)                                                                     \
    {                                                                                                        \
#name, doc, offsetof(ms_optim_options, field), sizeof((ms_optim_options) { 0 }.field) == 4 ? 0 : -1, \
            { 0 }, 0, 0, 0, 0                                                                                \
    }
#define MS_OPTION_MASTERS                                                                                              \
    MS_OPTION_FLAG(master_weights, master_weights,                                                                     \
                   "parameters of half types keep a float32 copy as state `master`, which is stepped in their place; " \
                   "each step stores its rounded values in the parameter")
#endif

#include "formulas/optim/sgd.h"
#include "formulas/optim/adam.h"
#include "formulas/optim/rmsprop.h"
#include "formulas/optim/adagrad.h"
#include "formulas/optim/adadelta.h"
#include "formulas/optim/adamax.h"
#include "formulas/optim/nadam.h"
#include "formulas/optim/radam.h"
#include "formulas/optim/lion.h"
#include "formulas/optim/rprop.h"
#include "formulas/optim/asgd.h"

#undef OPTIMIZER
