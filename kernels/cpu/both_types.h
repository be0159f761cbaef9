// SPDX-License-Identifier: MIT
// cpu/both_types.h -- includes the file of kernels that the macro BODY names, once for float and once for double.
// Defines for it REAL, R(name), the mathematical functions, and the functions that read and write a row (rows.h). Half
// types use the float version.
#define REAL float
#define R(x) x##_f32
#define EXP(x) ms_exp_f32(x)
#define LOG(x) ms_log_f32(x)
#define SQRT(x) sqrtf(x)
#define ROW_IN ms__row_in
#define ROW_AT ms__row_at
#define ROW_OUT ms__row_out
#include BODY
#undef REAL
#undef R
#undef EXP
#undef LOG
#undef SQRT
#undef ROW_IN
#undef ROW_AT
#undef ROW_OUT
#define REAL double
#define R(x) x##_f64
#define EXP(x) exp(x)
#define LOG(x) log(x)
#define SQRT(x) sqrt(x)
#define ROW_IN ms__row_in_f64
#define ROW_AT ms__row_at_f64
#define ROW_OUT ms__row_out_f64
#include BODY
