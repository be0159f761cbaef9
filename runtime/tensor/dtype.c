// SPDX-License-Identifier: MIT
// tensor/dtype.c -- names, sizes and promotion of dtypes.
#include "base/base.h"
#include "tensor/dtype.h"

static const struct {
    const char *name;
    int size;
} dtypes[MS_DTYPES] = {
    [MS_F32] = { "float32", 4 },   [MS_F64] = { "float64", 8 }, [MS_F16] = { "float16", 2 },
    [MS_BF16] = { "bfloat16", 2 }, [MS_I64] = { "int64", 8 },   [MS_I32] = { "int32", 4 },
    [MS_U8] = { "uint8", 1 },      [MS_BOOL] = { "bool", 1 },   [MS_I8] = { "int8", 1 },
    [MS_I16] = { "int16", 2 },
};

const char *ms__dtype_name(int dtype) { return dtypes[dtype].name; }

// PyTorch's order: bool < uint8, int8 < int16 < int32 < int64 < half types < float32 < float64. float16 with bfloat16
// gives float32, and uint8 with int8 gives int16, which holds the numbers of both.
int ms__promote(int a, int b)
{
    static const uint8_t rank[MS_DTYPES] = {
        [MS_BOOL] = 0, [MS_U8] = 1,  [MS_I8] = 1,   [MS_I16] = 2, [MS_I32] = 3,
        [MS_I64] = 4,  [MS_F16] = 5, [MS_BF16] = 5, [MS_F32] = 6, [MS_F64] = 7,
    };
    if (a == b) return a;
    if (rank[a] == rank[b]) return ms__is_float(a) ? MS_F32 : MS_I16;
    return rank[a] > rank[b] ? a : b;
}

int ms_dtype_size(int dtype) { return dtype >= 0 && dtype < MS_DTYPES ? dtypes[dtype].size : 0; }
