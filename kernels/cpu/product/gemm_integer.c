// SPDX-License-Identifier: MIT
// cpu/product/gemm_integer.c -- products of integers: counts, one-hot look-ups, index arithmetic. They wrap around, as
// in PyTorch. Plain loops: integer products are not on a training path.
#include "cpu/product/product.h"
#include "cpu/cpu.h"

#define PRODUCT(T, U)                                                                                         \
    static MS_KERNEL void rows_##T(const ms_gemm *g, int64_t first, int64_t last)                             \
    {                                                                                                         \
        for (int64_t i = first; i < last; i++) {                                                              \
            U *c = (U *)g->c + i * g->c_rs;                                                                   \
            for (int64_t j = 0; j < g->n; j++) c[j] = 0;                                                      \
            for (int64_t p = 0; p < g->k; p++) {                                                              \
                const U a = ((const U *)g->a)[i * g->a_rs + p * g->a_cs], *b = (const U *)g->b + p * g->b_rs; \
                for (int64_t j = 0; j < g->n; j++) c[j] = (U)(c[j] + a * b[j * g->b_cs]);                     \
            }                                                                                                 \
        }                                                                                                     \
    }
// clang-format off
PRODUCT(int64_t, uint64_t)
PRODUCT(int32_t, uint32_t)
PRODUCT(int16_t, uint16_t)
PRODUCT(uint8_t, uint8_t)
// clang-format on

static void rows(void *arg, int64_t first, int64_t last, int64_t block)
{
    const ms_gemm *g = arg;
    (void)block;
    if (g->dtype == MS_I64) rows_int64_t(g, first, last);
    else if (g->dtype == MS_I32) rows_int32_t(g, first, last);
    else if (g->dtype == MS_I16) rows_int16_t(g, first, last);
    else rows_uint8_t(g, first, last);  // int8, too: the bits are the same
}

ms_status ms__gemm_integer(const ms_gemm *g)
{
    int64_t work = g->n * g->k, block = work > 0 ? 65536 / work + 1 : g->m + 1;  // rows per task
    ms__parallel(g->m, block, rows, (void *)g);
    return MS_OK;
}
