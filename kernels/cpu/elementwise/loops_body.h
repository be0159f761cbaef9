// SPDX-License-Identifier: MIT
// cpu/elementwise/loops_body.h -- the loops of one computing type. elementwise.c includes it once per type, with REAL,
// R(name), and one of MS_FLOAT, MS_DOUBLE, MS_INTEGER and MS_BYTE defined.

#ifndef MS_BYTE
#include "formulas/elementwise.h"
#endif

#define OMIT(...)
#if defined(MS_FLOAT) || defined(MS_DOUBLE)
#define FOR_FLOATS LOOP
#define FOR_ANGLE LOOP_ANGLE
#else
#define FOR_FLOATS OMIT
#define FOR_ANGLE OMIT
#endif
#ifdef MS_DOUBLE
#define FOR_DOUBLE LOOP
#else
#define FOR_DOUBLE OMIT
#endif
#ifdef MS_INTEGER
#define FOR_WHOLE LOOP
#else
#define FOR_WHOLE OMIT
#endif
#ifdef MS_BYTE
#define FOR_ALL OMIT
#define FOR_BOOL LOOP
#else
#define FOR_ALL LOOP
#define FOR_BOOL OMIT
#endif
#define FOR_FOUR LOOP

#define A a[k]
#define B b[k]
#define C c[k]
#define MASK_A u[k]
#define MASK_B v[k]
#define FORMULA(name, types, expression) FOR_##types(name, REAL, expression)
#define TRUTH(name, types, expression) FOR_##types(name, uint8_t, expression)
#include "rows/elementwise.def"
#undef A
#undef B
#undef C
#undef MASK_A
#undef MASK_B

#undef OMIT
#undef FOR_FLOATS
#undef FOR_ANGLE
#undef FOR_DOUBLE
#undef FOR_WHOLE
#undef FOR_ALL
#undef FOR_BOOL
#undef FOR_FOUR
#undef REAL
#undef R
