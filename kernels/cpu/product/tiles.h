// SPDX-License-Identifier: MIT
// cpu/product/tiles.h -- the micro-kernels of matrix products, compiled for each level of processors (tiles.c). The
// levels differ only in the shape of a tile of C, which stays in registers over the depth.
#ifndef MS_TILES_H
#define MS_TILES_H

#include "cpu/product/product.h"

// Cache lines of the data packed next, prefetched into the second-level cache while the current rows are computed, and
// the lines into which that data will be packed. `apart`: bytes between the lines of a group. `jump`: bytes from the
// end of a group to the next group.
typedef struct gemm_ahead {
    const char *at;
    char *to;  // NULL if the destination is already in the cache
    int64_t apart, jump, groups;
    int lines, pairs;         // lines per group (even); pairs of them fetched so far
    struct gemm_ahead *then;  // prefetched after all groups of this struct
} gemm_ahead;

// Packed panels: of A, [panel][step][rows]; of B, [panel][step][wide]. Both are padded with zeros.
//   strip: m rows by n columns, a multiple of lanes, with any strides of A; B is read in place, or is one packed panel.
//   panel: as strip, for up to `wide` columns of one panel of B that is padded to whole vectors.
//   sweep: up to `group` packed panels of A by the panels of B for n columns. keep: NULL, or o->b is not packed yet, n
//   is a multiple of lanes and rows of a tile's: its panels are packed there on the way. pack: out[p * out_rs + j] =
//   m(p, j) for p < k, j < n, rows padded to a multiple of lanes. pack_panels: whole panels of B, whose rows are
//   contiguous. pack_rows: m rows and k columns of A into panels that are `depth` long.
#define MS_TILES(T, OPERANDS)                                                                                    \
    struct {                                                                                                     \
        int64_t rows, lanes, wide, group;                                                                        \
        void (*strip)(int64_t n, int64_t m, int64_t k, const OPERANDS *o);                                       \
        void (*panel)(int64_t n, int64_t m, int64_t k, const OPERANDS *o);                                       \
        void (*sweep)(int64_t n, int64_t rows, int64_t k, const OPERANDS *o, T *keep, gemm_ahead *ahead);        \
        void (*pack)(T * out, int64_t out_rs, const ms_matrix *m, int64_t k, int64_t n);                         \
        void (*pack_panels)(T * out, const T *b, int64_t rs, int64_t k, int64_t panels);                         \
        void (*pack_rows)(T * out, const ms_matrix *m, int64_t rows, int64_t k, int64_t depth);                  \
        /* bfloat16, float only: as pack of `lanes` contiguous columns, pack_rows of `rows` contiguous rows, and \
           pack_panels; the first two take steps in multiples of 2 lanes and return how many they took */        \
        int64_t (*pack_columns_bf16)(float *out, int64_t out_rs, const ms_bf16 *b, int64_t cs, int64_t k);       \
        int64_t (*pack_rows_bf16)(float *out, const ms_bf16 *a, int64_t rs, int64_t k);                          \
        void (*pack_panels_bf16)(float *out, const ms_bf16 *b, int64_t rs, int64_t k, int64_t panels);           \
    }
typedef MS_TILES(float, ms_operands_f32) ms_tiles_f32;
typedef MS_TILES(double, ms_operands_f64) ms_tiles_f64;

// The micro-kernels for this processor.
const ms_tiles_f32 *ms__tiles_f32(void);
const ms_tiles_f64 *ms__tiles_f64(void);

#endif
