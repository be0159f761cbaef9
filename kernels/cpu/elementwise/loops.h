// SPDX-License-Identifier: MIT
// cpu/elementwise/loops.h -- the CPU's elementwise engine.
//
// An inner loop works on contiguous chunks of one of four computing types. The engine iterates over strided and
// broadcast operands and converts element types in chunks that fit the first-level cache. One loop per operator and
// computing type therefore serves every dtype and layout; half types are loaded as float and rounded on store.
// Contiguous operands of the computing type are passed to the loop in place; only a large operand that lies across the
// output's rows is copied as a whole.
#ifndef MS_LOOPS_H
#define MS_LOOPS_H

#include "ops/op.h"

typedef enum { MS_C_F32, MS_C_F64, MS_C_I64, MS_C_BOOL, MS_CLASSES } ms_class;  // float, double, int64_t, uint8_t 0/1
enum { MS_CHUNK = 512, MS_LOOP_MAX = 4 };

// x[k] is operand k. x[0] is the output; it may also be an input. p: the formula's scalar arguments, or NULL.
typedef void (*ms_loop_fn)(int64_t n, void *const *x, const double *p);

typedef struct ms_loop {
    int n;  // number of operands
    int ndim;
    int64_t shape[MS_MAX_DIMS];
    char *data[MS_LOOP_MAX];
    int64_t stride[MS_LOOP_MAX][MS_MAX_DIMS];  // in bytes
    uint8_t dtype[MS_LOOP_MAX], cls[MS_LOOP_MAX];
    ms_loop_fn fn;
    const double *p;
    int64_t inner[MS_LOOP_MAX];     // set by ms__loop_run: strides along the last dimension, in bytes
    bool direct[MS_LOOP_MAX], all;  // direct[k]: operand k is passed in place; all: all operands are passed in place
} ms_loop;

// The computing type of an operator on this dtype.
static inline int ms__class_of(int dtype)
{
    return dtype == MS_F64 ? MS_C_F64 : dtype == MS_BOOL ? MS_C_BOOL : !ms__is_float(dtype) ? MS_C_I64 : MS_C_F32;
}
static inline int ms__class_dtype(int cls)
{
    static const uint8_t d[] = { MS_F32, MS_F64, MS_I64, MS_BOOL };
    return d[cls];
}
static inline int ms__class_size(int cls) { return cls == MS_C_F32 ? 4 : cls == MS_C_BOOL ? 1 : 8; }

// x[0] = fn(x[1], …), all broadcast to x[0]'s shape. cls[k]: the computing type of operand k. If fn is NULL, converts
// x[1] to x[0] through the computing type cls[0], which must equal cls[1].
void ms__loop(int n, ms_tensor *const *x, const uint8_t *cls, ms_loop_fn fn, const double *p);
// As ms__loop, for a loop whose fields from n to p the caller has set; merges its dimensions.
void ms__loop_run(ms_loop *l);

// A loop over contiguous operands whose dtypes are the computing types: one call of fn computes it.
typedef struct ms_dense_loop {
    ms_loop_fn fn;  // NULL: the call needs another kind of loop, or several loops
    int64_t n;      // number of elements
    int operands;
    void *x[MS_LOOP_MAX];
    bool scalars;  // whether the formula has scalar arguments, which are in p
    double p[2];
} ms_dense_loop;
// If ms__cpu_prepare_loop has set this, ms__loop describes its loop here instead of running it; otherwise NULL.
extern ms_dense_loop *ms__loop_asked;

// ms__load converts n elements of dtype, `stride` bytes apart (0 repeats one element), to contiguous elements of type
// cls; ms__store converts back.
void ms__load(int cls, int dtype, int64_t n, void *dst, const char *src, int64_t stride);
void ms__store(int cls, int dtype, int64_t n, char *dst, int64_t stride, const void *src);

#endif
