// SPDX-License-Identifier: MIT
// cpu/product/tiles_types.h -- tiles_body.h for both accumulating types, on the level that tiles.c has set.
#define EACH_LANE_2(f, s) f(s, 0), f(s, 1)
#define EACH_LANE_4(f, s) EACH_LANE_2(f, s), f(s, 2), f(s, 3)
#define EACH_LANE_8(f, s) EACH_LANE_4(f, s), f(s, 4), f(s, 5), f(s, 6), f(s, 7)
#define EACH_LANE_16(f, s) \
    EACH_LANE_8(f, s), f(s, 8), f(s, 9), f(s, 10), f(s, 11), f(s, 12), f(s, 13), f(s, 14), f(s, 15)

#define REAL float
#define R(x) x##_f32
#define K(x) LEVEL(x##_f32)
#define KIND "s"
#define SIZE "4"
#define STEPS 16
#if VEC == 64
#define LANES 16
#define EACH_LANE EACH_LANE_16
#elif VEC == 32
#define LANES 8
#define EACH_LANE EACH_LANE_8
#else
#define LANES 4
#define EACH_LANE EACH_LANE_4
#endif
#define BF16
#include "cpu/product/tiles_body.h"
#undef BF16
#undef REAL
#undef R
#undef K
#undef KIND
#undef SIZE
#undef STEPS
#undef LANES
#undef EACH_LANE

#define REAL double
#define R(x) x##_f64
#define K(x) LEVEL(x##_f64)
#define KIND "d"
#define SIZE "8"
#define STEPS 8
#if VEC == 64
#define LANES 8
#define EACH_LANE EACH_LANE_8
#elif VEC == 32
#define LANES 4
#define EACH_LANE EACH_LANE_4
#else
#define LANES 2
#define EACH_LANE EACH_LANE_2
#endif
#include "cpu/product/tiles_body.h"
#undef REAL
#undef R
#undef K
#undef KIND
#undef SIZE
#undef STEPS
#undef LANES
#undef EACH_LANE

#undef VEC
#undef ROWS
#undef VECS
#undef DEPTH
#undef GROUP
#undef TARGET
#undef LEVEL
