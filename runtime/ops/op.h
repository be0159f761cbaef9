// SPDX-License-Identifier: MIT
// ops/op.h -- the operator table and dispatch.
//
// An operator is one constant row: `const ms_op ms__op_relu = {…}`. A file of rows ends with their list, MS_OPERATORS
// (rows/ops.h), which registers them. Lua and the specs find rows by name. A new operator needs a row (kernels/rows:
// check, backward, samples, what it takes) and kernels (kernels/cpu, kernels/cuda); an elementwise one only a line in
// kernels/rows/elementwise.def and its formulas. The generic specs test gradients, strides, size 0 and devices with the
// row's samples. docs/extending.md has recipes.
#ifndef MS_OP_H
#define MS_OP_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ms_op ms_op;

// One call of an operator. check() validates in[], i[] and f[] and makes out[]; run() fills out[].
typedef struct ms_call {
    const ms_op *op;
    int n_in, n_out, n_i, n_f;
    ms_tensor *in[MS_MAX_IN];  // NULL if an optional input is absent
    ms_tensor *out[MS_MAX_OUT];
    int64_t i[MS_MAX_I];
    double f[MS_MAX_F];
    uint64_t saved_rng[2];  // the seed and offset that a random operator used, for its backward
    // In a CUDA graph: where kernels find the seed and offset of each launch, on the device, in place of saved_rng.
    // NULL: the call is not in a graph
    const uint64_t *rng_there;
} ms_call;

// A call on tensors that will not change, reduced to what its kernel reads: a captured step repeats it without looking
// at tensors again. run(args) does what the kernel does on these tensors.
enum { MS_PREPARED = 320 };
typedef struct ms_prepared {
    ms_status (*run)(void *args);
    size_t bytes;  // number of bytes of args that are used
    int64_t args[MS_PREPARED / 8];
} ms_prepared;

// The arguments of a backward, from the node. in[k] and out[k] are NULL unless saved; gout[k] is NULL if output k
// received no gradient.
typedef struct ms_backward_call {
    const ms_op *op;
    int n_in, n_out, n_i, n_f;
    ms_tensor **in, **out;
    const struct ms_meta *in_meta, *out_meta;  // shape and dtype of every input and output
    const int64_t *i;
    const double *f;
    const uint64_t *saved_rng;
    ms_tensor **gout;
    ms_tensor **gin;  // to be filled with owned references; leave NULL where need is false
    const bool *need;
    // Returns the sum so far of the contributions to input k's gradient, a tensor of the input's shape, dtype and
    // device, if backward may add to that tensor and return it as gin[k] (an owned reference); otherwise NULL.
    // This saves passes over memory, above all for gradients that are mostly zeros.
    ms_tensor *(*so_far)(const struct ms_backward_call *b, int k);
    const struct ms_run *run;  // used by so_far
    const struct ms_edge *edges;
} ms_backward_call;

typedef struct ms_meta {
    uint8_t dtype, ndim;
    bool present;  // false: there is no such tensor (an absent optional input or output)
    int device;
    int64_t shape[MS_MAX_DIMS];
} ms_meta;

// A flag of rows, besides the flags of moonshard.h: the last three integers of a call are the seed and the offset of a
// forward's random numbers, and a mask (rows/grad.h). The seed and the offset are used if the call's first number, a
// probability, is above 0.
enum { MS_OP_SEEDED = 1 << 10 };

struct ms_op {
    const char *name;
    int8_t n_in_min, n_in_max;   // number of inputs
    int16_t flags;               // MS_OP_*
    uint64_t save_in, save_out;  // bits of the inputs and outputs that backward reads
    int8_t n_shown;              // outputs that the caller gets; the others are only for backward. 0: all
    ms_status (*check)(ms_call *c);
    ms_status (*run[MS_DEVICES])(ms_call *c);    // kernels by device type; meta tensors need none
    ms_status (*backward)(ms_backward_call *b);  // NULL if not differentiable
    // For a call on the CPU whose kernel has run: fills *p, which repetitions of a captured step run in place of the
    // kernel, and returns true. If it returns false, or is NULL, repetitions run the kernel.
    bool (*prepare)(ms_call *c, ms_prepared *p);
    // Sample inputs for the generic specs, separated by ';'. A sample is a list of blank-separated words:
    //   [3,4] float input, random normal; [3,4]+ positive; [3,4]u in (-0.9, 0.9), p in (0.05, 0.95); [3,4]a above 1;
    //   [3,3]s symmetric, positive-definite; [3]i5 int64 ids in [0,5); [3,4]b bool; [3,4]q int8;
    //   [3]c float32 in (0.002, 0.02) that gets no gradient; - absent;  i=1,2 integers; f=0.5,1
    //   numbers.
    const char *samples;
    // The names of the integers in i[] and, behind a semicolon, of the numbers in f[], "keepdim?, dim...;
    // correction=1": ms_op_row in moonshard.h has the notation. NULL: neither. It is checked for calls of scripts;
    // kernels and C code that calls ms__run_op rely on it. Not stated for rows whose names end in _backward.
    const char *takes;
    const char *doc;  // what it computes, in a sentence or two, or NULL
};

// ---- calling operators from C ----
typedef struct {
    int n_in;
    ms_tensor *const *in;
    int n_i;
    const int64_t *i;
    int n_f;
    const double *f;
} ms_op_args;
// Runs an operator without recording a graph, whatever the grad mode. out[] receives owned references to the first
// n_out outputs; in-place operators return in[0], retained.
ms_status ms__run_op(const ms_op *op, const ms_op_args *a, int n_out, ms_tensor **out);
ms_status ms__op1(ms_tensor **out, const ms_op *op, ms_tensor *a);
ms_status ms__op1f(ms_tensor **out, const ms_op *op, ms_tensor *a, double f);
ms_status ms__op2(ms_tensor **out, const ms_op *op, ms_tensor *a, ms_tensor *b);
ms_status ms__op3(ms_tensor **out, const ms_op *op, ms_tensor *a, ms_tensor *b, ms_tensor *c);
// Functions that record calls on the tape; autograd/graph.c sets them when the library is loaded. A call with an input
// that requires a gradient is recorded in two steps: node_for before its kernel runs, record when its outputs exist.
typedef struct {
    // Called before an in-place operator that will be recorded: saves the old values that its backward reads.
    ms_status (*before)(const ms_call *c);
    ms_node *(*node_for)(const ms_call *c);  // NULL with the error set
    void (*record)(ms_node *n, ms_call *c);  // cannot fail: saves what backward reads and sets the node of the outputs
    void (*drop)(ms_node *n);                // called instead of record if the kernel failed
    // Records the inputs of calls inside a checkpoint's region; NULL outside.
    void (*meet)(int n, ms_tensor *const *in);
} ms_recorder;
extern ms_recorder ms__recorder;

// ---- dispatch ----
ms_status ms__dispatch(ms_call *c);  // checks, runs and records c; c->out then has owned references
const ms_op *ms__op_by_name(const char *name);
void ms__cuda_kernel_add(const char *op, ms_status (*run)(ms_call *));

#ifdef __cplusplus
}
#endif

#include "ops/check.h"
#include "ops/common.h"
#include "ops/copy.h"
#include "ops/engine.h"
#include "ops/parallel.h"

#endif
