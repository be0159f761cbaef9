// SPDX-License-Identifier: MIT
// ops/cuda.c -- the table of engine functions for the CUDA plugin (ops/cuda.h).
#include "ops/cuda.h"
#include "ops/queued.h"
#include "cpu/cpu.h"
#include "rows/ops.h"

static const ms_cuda_engine engine = {
    .fail = ms__fail,
    .call_fail = ms__call_fail,
    .tensor_text = ms__tensor_text,
    .shape_text = ms__shape_text,
    .dtype_name = ms__dtype_name,
    .promote = ms__promote,
    .result_dtype = ms__result_dtype,
    .broadcast = ms__broadcast,
    .tensor_new = ms__tensor_new,
    .tensor_like = ms__tensor_like,
    .tensor_view = ms__tensor_view,
    .is_contiguous = ms__is_contiguous,
    .contiguous = ms__contiguous,
    .retain = ms__retain,
    .release = ms__release,
    .alloc = ms__alloc,
    .free = ms__free,
    .apart = ms__cpu_apart,
    .largest_below = ms__largest_below,
    .reduced_dims = ms__reduced_dims,
    .queued_text = ms__queued_text,
};

__attribute__((constructor)) static void offer(void)
{
    ms__cuda_client = (ms_cuda_client) { .engine = &engine, .add_kernel = ms__cuda_kernel_add };
}
