// SPDX-License-Identifier: MIT
// cpu/product/onednn.c -- products by oneDNN's matmul primitive (C API v2, 2.6). Besides this file, only
// cpu/product/onednn_conv.c uses oneDNN.
//
// Creating a primitive takes 0.2-1 ms, starting one well under a microsecond. Primitives are therefore cached in a
// bounded table. Its key is everything that a primitive depends on: sizes, strides, dtype, bias, threads. An entry owns
// its memory objects; a call only sets their data handles. Scratch memory comes from our pool.
#include <oneapi/dnnl/dnnl.h>
#include "cpu/product/conv_work.h"
#include "cpu/product/product.h"

enum { ENTRIES = 1024, PROBES = 8 };

typedef struct key {
    int64_t m, n, k, a_rs, a_cs, b_rs, b_cs, c_rs;
    int32_t dtype, bias, threads, used;  // bias: whether there is one; used: 1, so that no key equals an empty entry's
} key;

typedef struct entry {
    key key;
    uint64_t last_use;
    dnnl_primitive_t primitive;
    dnnl_memory_t a, b, c, bias, scratch;
    size_t scratch_bytes;
} entry;

static dnnl_engine_t engine;
static dnnl_stream_t stream;
static entry table[ENTRIES];
static uint64_t uses;
static int state;  // 0 = not tried, 1 = ready, -1 = unusable

static ms_status failed(const ms_gemm *g, dnnl_status_t st, const char *doing)
{
    if (st == dnnl_out_of_memory)
        return ms__no_memory((size_t)(g->m * g->n + g->m * g->k + g->k * g->n) * (size_t)ms__dtype_size(g->dtype),
                             g->what, "an upper bound, for a product of %lld x %lld x %lld; oneDNN was %s",
                             (long long)g->m, (long long)g->n, (long long)g->k, doing);
    return ms__fail(MS_EUNSUPPORTED,
                    "%s: oneDNN failed with status %d while %s, for a product of %lld x %lld x %lld in %s", g->what,
                    (int)st, doing, (long long)g->m, (long long)g->n, (long long)g->k, ms__dtype_name(g->dtype));
}

// Initialises oneDNN on the first call. A limit set by MOONSHARD_ISA applies to oneDNN, too.
bool ms__onednn_ready(void)
{
    if (MS_LIKELY(state)) return state > 0;
    const char *isa = ms_cpu_isa();
    if (strcmp(isa, "v3") == 0) dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
    else if (strcmp(isa, "v1") == 0) dnnl_set_max_cpu_isa(dnnl_cpu_isa_sse41);
    bool ok = dnnl_engine_create(&engine, dnnl_cpu, 0) == dnnl_success &&
              dnnl_stream_create(&stream, engine, dnnl_stream_default_flags) == dnnl_success;
    state = ok ? 1 : -1;
    return ok;
}

bool ms__onednn_tiles(void)
{
    return ms__onednn_ready() &&
           (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_amx) == dnnl_cpu_isa_avx512_core_amx;
}

// Whether oneDNN accepts a matrix: its rows or its columns are contiguous and do not overlap (those of expanded tensors
// do).
static bool is_plain(int64_t rows, int64_t cols, int64_t rs, int64_t cs)
{
    return (cs == 1 && (rs >= cols || rows == 1)) || (rs == 1 && (cs >= rows || cols == 1));
}

bool ms__onednn_takes(const ms_gemm *g)
{
    if (g->dtype != MS_F32 && (g->dtype != MS_BF16 || strcmp(ms_cpu_isa(), "v4") != 0)) return false;
    if (!is_plain(g->m, g->k, g->a_rs, g->a_cs) || !is_plain(g->k, g->n, g->b_rs, g->b_cs) || g->c_rs < g->n)
        return false;
    return ms__onednn_ready();
}

static void drop_product(entry *e)
{
    if (e->primitive) dnnl_primitive_destroy(e->primitive);
    dnnl_memory_t all[] = { e->a, e->b, e->c, e->bias, e->scratch };
    for (int i = 0; i < MS_COUNT(all); i++)
        if (all[i]) dnnl_memory_destroy(all[i]);
    memset(e, 0, sizeof *e);
}

typedef struct layout {
    int64_t rows, cols, rs, cs;
} layout;

static dnnl_status_t memory(dnnl_memory_t *out, dnnl_memory_desc_t *desc, dnnl_data_type_t type, layout l)
{
    int64_t rows = l.rows, cols = l.cols, rs = l.rs, cs = l.cs;
    dnnl_dims_t shape = { rows, cols }, strides = { rs, cs };
    // a matrix of one row or column may have any stride in that dimension
    if (rows == 1 && rs < cols) strides[0] = cols * cs;
    if (cols == 1 && cs < rows) strides[1] = rs == 1 ? rows : 1;
    dnnl_status_t st = dnnl_memory_desc_init_by_strides(desc, 2, shape, type, strides);
    return st ? st : dnnl_memory_create(out, desc, engine, DNNL_MEMORY_NONE);
}

static ms_status make_product(entry *e, const ms_gemm *g, const key *k)
{
    dnnl_data_type_t type = g->dtype == MS_F32 ? dnnl_f32 : dnnl_bf16;
    dnnl_memory_desc_t a, b, c, bias;
    dnnl_matmul_desc_t desc;
    dnnl_primitive_attr_t attr = NULL;
    dnnl_primitive_desc_t pd = NULL;
    const dnnl_memory_desc_t *scratch;
    const char *doing = "describing memory";
    dnnl_status_t st = memory(&e->a, &a, type, (layout) { g->m, g->k, g->a_rs, g->a_cs });
    if (!st) st = memory(&e->b, &b, type, (layout) { g->k, g->n, g->b_rs, g->b_cs });
    if (!st) st = memory(&e->c, &c, type, (layout) { g->m, g->n, g->c_rs, 1 });
    if (!st && g->bias) st = memory(&e->bias, &bias, type, (layout) { 1, g->n, g->n, 1 });
    if (st) goto out;
    doing = "making a matmul primitive";
    if ((st = dnnl_matmul_desc_init(&desc, &a, &b, g->bias ? &bias : NULL, &c))) goto out;
    if ((st = dnnl_primitive_attr_create(&attr))) goto out;
    if ((st = dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user))) goto out;
    if ((st = dnnl_primitive_desc_create(&pd, &desc, attr, engine, NULL))) goto out;
    if ((st = dnnl_primitive_create(&e->primitive, pd))) goto out;
    scratch = dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
    e->scratch_bytes = scratch ? dnnl_memory_desc_get_size(scratch) : 0;
    if (e->scratch_bytes) st = dnnl_memory_create(&e->scratch, scratch, engine, DNNL_MEMORY_NONE);
out:
    if (pd) dnnl_primitive_desc_destroy(pd);
    if (attr) dnnl_primitive_attr_destroy(attr);
    if (st) {
        drop_product(e);
        return failed(g, st, doing);
    }
    e->key = *k;
    return MS_OK;
}

static ms_status find_product(entry **out, const ms_gemm *g)
{
    key k = { g->m,    g->n,    g->k,     g->a_rs,         g->a_cs,          g->b_rs,
              g->b_cs, g->c_rs, g->dtype, g->bias != NULL, ms_num_threads(), 1 };
    const uint64_t *word = (const uint64_t *)&k;
    uint64_t h = 0;
    for (size_t i = 0; i < sizeof k / 8; i++) h = (h ^ word[i]) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    entry *oldest = NULL;
    for (unsigned i = 0; i < PROBES; i++) {
        entry *e = &table[(h + i) % ENTRIES];
        if (memcmp(&e->key, &k, sizeof k) == 0) {
            *out = e;
            return MS_OK;
        }
        if (!oldest || e->last_use < oldest->last_use) oldest = e;
    }
    drop_product(oldest);
    *out = oldest;
    return make_product(oldest, g, &k);
}

ms_status ms__gemm_onednn(const ms_gemm *g)
{
    entry *e;
    ms_block *scratch = NULL;
    dnnl_exec_arg_t args[5];
    int n = 0;
    MS_TRY(find_product(&e, g));
    e->last_use = ++uses;
    if (e->scratch_bytes) MS_TRY(ms__alloc_scratch(&scratch, e->scratch_bytes, g->what));
    struct {
        dnnl_memory_t memory;
        const void *data;
        int arg;
    } all[] = {
        { e->a, g->a, DNNL_ARG_SRC },
        { e->b, g->b, DNNL_ARG_WEIGHTS },
        { e->c, g->c, DNNL_ARG_DST },
        { e->bias, g->bias, DNNL_ARG_BIAS },
        { e->scratch, scratch ? scratch->data : NULL, DNNL_ARG_SCRATCHPAD },
    };
    dnnl_status_t st = dnnl_success;
    for (int i = 0; i < MS_COUNT(all); i++) {
        if (!all[i].memory) continue;
        if (!st) st = dnnl_memory_set_data_handle(all[i].memory, (void *)(uintptr_t)all[i].data);
        args[n++] = (dnnl_exec_arg_t) { all[i].arg, all[i].memory };
    }
    if (!st) st = dnnl_primitive_execute(e->primitive, stream, n, args);
    if (scratch) ms__free(scratch);
    return st ? failed(g, st, "running a matmul primitive") : MS_OK;
}
