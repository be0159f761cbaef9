// SPDX-License-Identifier: MIT
// cpu/elementwise/dropout.c -- y = x / (1 - p) for elements that are kept, else 0; masks.h says which are kept. The
// gradient is the same function of the output's gradient, with the same random words.
#include "cpu/rows/layers.h"
#include "cpu/elementwise/masks.h"

typedef struct drop {
    int dtype;
    double p;
    uint64_t seed, offset;
    const void *x;
    void *y;
} drop;

enum { BLOCK = 16384 };

#define SAME(v) (v)
// Scales elements [at, at + n), also those that are dropped, so that the loop has no branch.
#define KEEP(T, F, LOAD, STORE, SCALE)              \
    {                                               \
        const T *restrict x = (const T *)d->x + at; \
        T *restrict y = (T *)d->y + at;             \
        for (int64_t k = 0; k < n; k++) {           \
            F v = LOAD(x[k]) * SCALE;               \
            y[k] = STORE(words[k] >= low ? v : 0);  \
        }                                           \
    }

static MS_KERNEL void drop_part(void *arg, int64_t first, int64_t last, int64_t block)
{
    const drop *d = arg;
    uint64_t limit = ms__mask_limit(d->p);
    double scale = d->p < 1 ? 1 / (1 - d->p) : 0;
    float narrow = (float)scale;
    uint32_t words[4 * MS_MASK_BLOCKS], low = limit > UINT32_MAX ? UINT32_MAX : (uint32_t)limit;
    bool all = limit > UINT32_MAX;
    (void)block;
    for (int64_t at = first; at < last; at += 4 * MS_MASK_BLOCKS) {
        int64_t n = last - at < 4 * MS_MASK_BLOCKS ? last - at : 4 * MS_MASK_BLOCKS;
        ms__mask_words(words, (n + 3) / 4, d->seed, d->offset, (uint64_t)at / 4);
        if (all) memset(words, 0, sizeof words);
        switch (d->dtype) {
        case MS_F32: KEEP(float, float, SAME, SAME, narrow) break;
        case MS_F64: KEEP(double, double, SAME, SAME, scale) break;
        case MS_BF16: KEEP(ms_bf16, float, ms_bf16_to_float, ms_float_to_bf16, narrow) break;
        default: KEEP(ms_f16, float, ms_f16_to_float, ms_float_to_f16, narrow)
        }
    }
}

// Computes forward and backward. The operator's check has put the seed and offset into saved_rng: in forward new ones,
// in backward the forward's, which the call has as integers.
ms_status ms__cpu_dropout(ms_call *c)
{
    ms_tensor *x, *y = c->out[0];
    drop d = { y->dtype, c->f[0], c->saved_rng[0], c->saved_rng[1], NULL, ms__data(y) };
    MS_TRY(ms__contiguous(&x, c->in[0]));
    d.x = ms__data(x);
    ms__parallel(y->numel, BLOCK, drop_part, &d);
    ms__release(x);
    return MS_OK;
}
