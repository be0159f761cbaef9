// SPDX-License-Identifier: MIT
// cpu/product/onednn_conv.c -- convolutions of float32 by oneDNN's convolution primitives (C API v2, 2.6).
//
// Their kernels read blocked layouts (the same pixel of 8 or 16 channels side by side) at the processor's peak rate.
// Operands are copied to such layouts, and results back, in 4 % of the time of ResNet-18's convolutions.
//
// A convolution is divided into tasks, by its shapes alone: each computes a part of the channels for a block of images,
// with a primitive made for one thread. So the bits do not depend on the number of threads, and no thread waits for
// another within a primitive. The parts divide the result's channels; for the gradient of the weight, the output's.
// This gradient is computed for each block of images, and the blocks' gradients are added in order.
//
// Making a primitive takes about a millisecond; primitives are cached in a bounded table, as those of products are.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>
#include "cpu/product/conv_work.h"

enum { X = MS_CONV_IMAGE, W = MS_CONV_WEIGHT, Y = MS_CONV_OUTPUT };

enum {
    LEAST = 1 << 22,  // multiply-adds below which the copies and the making of primitives would not pay
    PART = 64,        // channels of a part; with 32 some kernels reach only a quarter of the speed
    TASKS = 16,       // tasks wanted at a time; half as many for a weight's gradient, because each has its own sums
    ROOM = 16 << 20,  // bytes of blocked images and outputs at a time, unless the caller allows more
    ENTRIES = 512,
    PROBES = 8,
};

// Everything that the primitives of a task depend on.
typedef struct key {
    ms_conv v;                            // the task's images and channels
    int64_t in, out;                      // channels of the whole image and output
    int64_t group;                        // channels of the image in the whole weight: those of a group
    int64_t channel, depth, row, column;  // distances in the image, in elements
    int64_t result, bias;
} key;

typedef struct entry {
    key key;
    uint64_t last_use;
    bool refused;  // oneDNN has no fast kernel
    dnnl_primitive_t conv;
    dnnl_primitive_t move[3];  // copies an operand to its blocked layout, the result from it; NULL: no copy is needed
    dnnl_memory_desc_t plain[3], blocked[3], bias, scratch;
    size_t scratch_bytes;
} entry;

static dnnl_engine_t engine;
static entry *table[ENTRIES];
static uint64_t uses;

// Sets how many threads oneDNN uses for calls of this thread. The OpenMP library is oneDNN's: the engine does not link
// it.
static void openmp_threads(int n)
{
    static void (*set)(int);
    if (!set) set = (void (*)(int))dlsym(RTLD_DEFAULT, "omp_set_num_threads");
    if (set) set(n);
}

static bool ready(void)
{
    const char *isa = ms_cpu_isa();
    if (strcmp(isa, "v3") != 0 && strcmp(isa, "v4") != 0) return false;
    return ms__onednn_ready() && (engine || dnnl_engine_create(&engine, dnnl_cpu, 0) == dnnl_success);
}

// ---- primitives ---------------------------------------------------------------------------------

static void drop_conv(entry *e)
{
    if (e->conv) dnnl_primitive_destroy(e->conv);
    for (int k = 0; k < 3; k++)
        if (e->move[k]) dnnl_primitive_destroy(e->move[k]);
    *e = (entry) { 0 };
}

// Whether the depth is 1 everywhere: oneDNN is then given two spatial dimensions.
static bool is_flat(const ms_conv *v) { return v->d == 1 && v->kd == 1 && v->od == 1 && v->front == 0; }

// Describes the operands: `plain` in the layouts of the caller's tensors, `any` in layouts that oneDNN may choose.
static dnnl_status_t describe_operands(const key *k, dnnl_memory_desc_t *plain, dnnl_memory_desc_t *any)
{
    const ms_conv *v = &k->v;
    const bool flat = is_flat(v);
    int64_t kernel = ms__conv_kernel(v), positions = ms__conv_positions(v);
    int64_t size[3][5] = { { v->n, v->in, v->d, v->h, v->w },
                           { v->out, v->in, v->kd, v->kh, v->kw },
                           { v->n, v->out, v->od, v->oh, v->ow } };
    int64_t step[3][5] = { { k->in * k->channel, k->channel, k->depth, k->row, k->column },
                           { k->group * kernel, kernel, v->kh * v->kw, v->kw, 1 },
                           { k->out * positions, positions, v->oh * v->ow, v->ow, 1 } };
    for (int t = 0; t < 3; t++) {
        dnnl_dims_t dims, strides;
        int n = 0;
        for (int d = 0; d < 5; d++) {
            if (d == 2 && flat) continue;
            dims[n] = size[t][d], strides[n++] = step[t][d];
        }
        dnnl_status_t st = dnnl_memory_desc_init_by_strides(&plain[t], n, dims, dnnl_f32, strides);
        if (!st) st = dnnl_memory_desc_init_by_tag(&any[t], n, dims, dnnl_f32, dnnl_format_tag_any);
        if (st) return st;
    }
    return dnnl_success;
}

// Makes the convolution's primitive descriptor. For a gradient, oneDNN needs the descriptor of the forward as a hint.
static dnnl_status_t choose_conv(dnnl_primitive_desc_t *out, const key *k, dnnl_alg_kind_t algorithm,
                                 const dnnl_memory_desc_t *any, const dnnl_memory_desc_t *bias,
                                 dnnl_primitive_attr_t attr)
{
    const ms_conv *v = &k->v;
    const int64_t size[] = { v->d, v->h, v->w }, kernel[] = { v->kd, v->kh, v->kw }, reach[] = { v->od, v->oh, v->ow },
                  steps[] = { v->sd, v->sh, v->sw }, padding[] = { v->front, v->top, v->left },
                  dilation[] = { v->dd, v->dh, v->dw };
    dnnl_dims_t stride, between, before, after;
    for (int d = is_flat(v) ? 1 : 0, n = 0; d < 3; d++, n++) {
        stride[n] = steps[d], between[n] = dilation[d] - 1, before[n] = padding[d];
        after[n] = (reach[d] - 1) * steps[d] + (kernel[d] - 1) * dilation[d] + 1 - size[d] - padding[d];
    }
    dnnl_convolution_desc_t d;
    dnnl_primitive_desc_t forward = NULL;
    dnnl_status_t st =
        dnnl_dilated_convolution_forward_desc_init(&d, dnnl_forward_training, algorithm, &any[X], &any[W], bias,
                                                   &any[Y], stride, between, before, after);
    if (!st) st = dnnl_primitive_desc_create(&forward, &d, attr, engine, NULL);
    if (st || k->result == Y) {
        *out = forward;
        return st;
    }
    if (k->result == X)
        st = dnnl_dilated_convolution_backward_data_desc_init(&d, algorithm, &any[X], &any[W], &any[Y], stride, between,
                                                              before, after);
    else
        st = dnnl_dilated_convolution_backward_weights_desc_init(&d, algorithm, &any[X], &any[W], NULL, &any[Y], stride,
                                                                 between, before, after);
    if (!st) st = dnnl_primitive_desc_create(out, &d, attr, engine, forward);
    dnnl_primitive_desc_destroy(forward);
    if (st) *out = NULL;
    return st;
}

static dnnl_status_t make_move(entry *e, int k, bool out, dnnl_primitive_attr_t attr)
{
    dnnl_primitive_desc_t pd;
    const dnnl_memory_desc_t *from = out ? &e->blocked[k] : &e->plain[k], *to = out ? &e->plain[k] : &e->blocked[k];
    dnnl_status_t st = dnnl_reorder_primitive_desc_create(&pd, from, engine, to, engine, attr);
    if (st) return st;
    const dnnl_memory_desc_t *scratch = dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
    // Copies between these layouts need no scratch memory; a copy that needs some is refused.
    st = scratch && dnnl_memory_desc_get_size(scratch) ? dnnl_unimplemented : dnnl_primitive_create(&e->move[k], pd);
    dnnl_primitive_desc_destroy(pd);
    return st;
}

// The weight's gradient of a kernel of 3 x 3 is computed by Winograd's minimal filtering (tiles of 4 x 4, with
// AVX-512): a quarter of the multiplications, and errors like those of direct sums, half to twice as large. It would
// make the output and the image's gradient as fast, too, but with five times the error of direct sums.
static bool suits_winograd(const key *k)
{
    const ms_conv *v = &k->v;
    return k->result == W && is_flat(v) && v->kh == 3 && v->kw == 3 && v->sh == 1 && v->sw == 1 && v->dh == 1 &&
           v->dw == 1;
}

static dnnl_status_t make_conv(entry *e, const key *k)
{
    static const dnnl_query_t query[3][3] = {
        [X] = { dnnl_query_diff_src_md, dnnl_query_weights_md, dnnl_query_diff_dst_md },
        [W] = { dnnl_query_src_md, dnnl_query_diff_weights_md, dnnl_query_diff_dst_md },
        [Y] = { dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md },
    };
    const ms_conv *v = &k->v;
    dnnl_alg_kind_t direct = dnnl_convolution_direct;
    dnnl_memory_desc_t any[3];
    dnnl_primitive_attr_t attr = NULL;
    dnnl_primitive_desc_t pd = NULL;
    const char *name = "";
    e->key = *k;
    dnnl_status_t st = describe_operands(k, e->plain, any);
    if (!st && k->bias) st = dnnl_memory_desc_init_by_tag(&e->bias, 1, (dnnl_dims_t) { v->out }, dnnl_f32, dnnl_x);
    if (!st) st = dnnl_primitive_attr_create(&attr);
    if (!st) st = dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user);
    if (st) goto out;
    const dnnl_memory_desc_t *bias = k->bias ? &e->bias : NULL;
    if (suits_winograd(k)) st = choose_conv(&pd, k, dnnl_convolution_winograd, any, bias, attr);
    if (!pd) st = choose_conv(&pd, k, direct, any, bias, attr);
    if (!st) st = dnnl_primitive_desc_query(pd, dnnl_query_impl_info_str, 0, &name);
    // oneDNN's other kernels, plain loops and products of unfolded images, are slower than those of conv.c.
    if (!st && strncmp(name, "jit", 3) != 0 && strncmp(name, "brg", 3) != 0) st = dnnl_unimplemented;
    if (st) goto out;
    const dnnl_memory_desc_t *scratch = dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
    if (scratch) e->scratch = *scratch, e->scratch_bytes = dnnl_memory_desc_get_size(scratch);
    if ((st = dnnl_primitive_create(&e->conv, pd))) goto out;
    for (int t = 0; t < 3 && !st; t++) {
        e->blocked[t] = *dnnl_primitive_desc_query_md(pd, query[k->result][t], 0);
        bool sums = t == W && k->result == W;  // the sums over blocks of images are kept in the blocked layout
        if (sums || !dnnl_memory_desc_equal(&e->plain[t], &e->blocked[t])) st = make_move(e, t, t == k->result, attr);
    }
out:
    if (pd) dnnl_primitive_desc_destroy(pd);
    if (attr) dnnl_primitive_attr_destroy(attr);
    return st;
}

// Finds or makes the primitives. *out is NULL where oneDNN has no fast kernel.
static dnnl_status_t find_conv(entry **out, const key *k)
{
    const uint64_t *word = (const uint64_t *)k;
    uint64_t h = 0;
    for (size_t i = 0; i < sizeof *k / 8; i++) h = (h ^ word[i]) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    entry **place = NULL, *e;
    for (unsigned i = 0; i < PROBES; i++) {
        entry **at = &table[(h + i) % ENTRIES];
        if (*at && memcmp(&(*at)->key, k, sizeof *k) == 0) {
            place = at;
            break;
        }
        if (!place || (*place && (!*at || (*at)->last_use < (*place)->last_use))) place = at;
    }
    if (!*place && !(*place = calloc(1, sizeof **place))) return dnnl_out_of_memory;
    e = *place;
    if (memcmp(&e->key, k, sizeof *k) != 0) {
        drop_conv(e);
        dnnl_status_t st = make_conv(e, k);
        if (st) drop_conv(e);
        if (st == dnnl_out_of_memory) return st;
        e->key = *k;
        e->refused = st != dnnl_success;
    }
    e->last_use = ++uses;
    *out = e->refused ? NULL : e;
    return dnnl_success;
}

// ---- tasks --------------------------------------------------------------------------------------

typedef struct plan {
    const ms_conv_work *c;
    ms_conv v;                       // the whole convolution, or a group of it
    key key;                         // the tasks' key, without their images and channels
    int64_t split, part, parts;      // channels that are divided; channels of a part; number of parts
    int64_t each, blocks, at_once;   // images of a block; number of blocks; blocks computed at a time
    int64_t first, count;            // the current blocks
    entry *e[2][2];                  // [whether the part is the last][whether the block is the last]
    size_t bytes[3], scratch_bytes;  // of a task's blocked operands; its scratch memory
    int64_t slots;  // pieces of scratch memory: one for each thread, or one for each task if tasks are fewer
    char *room[3], *sums, *scratch;  // sums: gradients of the weight, of the blocks but block 0
    int status;                      // the dnnl_status_t of `divide` or a task that failed, else 0
} plan;

static entry *entry_of(const plan *p, int64_t part, int64_t block)
{
    return p->e[part == p->parts - 1][block == p->blocks - 1];
}

// Whether tasks use only a part of the channels of operand k, which is X or Y; all parts share the other of these two.
static bool divided(const plan *p, int k) { return k == (p->c->result == X ? X : Y); }

// Where, in the caller's tensor, the elements of operand k begin that a task (a part and a block) uses.
static float *plain_operand(const plan *p, int k, int64_t part, int64_t block)
{
    const ms_conv *v = &p->v;
    int64_t size = p->key.channel, kernel = ms__conv_kernel(v), positions = ms__conv_positions(v), at;
    int64_t channel = k == W || divided(p, k) ? part * p->part : 0;
    if (k == X) at = (block * p->each * p->key.in + channel) * size;
    else if (k == Y) at = (block * p->each * p->key.out + channel) * positions;
    else at = channel * kernel * (p->c->result == X ? 1 : v->in);
    return (float *)p->c->operands[k] + at;
}

// Where a task's elements of operand k begin in their blocked layout; in the caller's tensor if they are not copied.
static void *blocked(const plan *p, int k, int64_t part, int64_t block)
{
    if (!entry_of(p, part, block)->move[k]) return plain_operand(p, k, part, block);
    int64_t b = block - p->first;
    if (k == W && p->c->result == W && block > 0) return p->sums + (size_t)(b * p->parts + part) * p->bytes[W];
    return p->room[k] + (size_t)(k == W ? part : divided(p, k) ? part * p->at_once + b : b) * p->bytes[k];
}

typedef struct bound {
    int arg;
    const dnnl_memory_desc_t *desc;
    void *data;
} bound;

// Runs a primitive on the calling thread alone.
static void execute_primitive(plan *p, dnnl_primitive_t primitive, const bound *b)
{
    enum { MOST = 5 };
    dnnl_memory_t memory[MOST] = { NULL };
    dnnl_exec_arg_t args[MOST];
    dnnl_stream_t stream = NULL;
    int n = 0;
    while (b[n].desc) n++;
    openmp_threads(1);
    dnnl_status_t st = dnnl_stream_create(&stream, engine, dnnl_stream_default_flags);
    for (int i = 0; i < n && !st; i++) {
        st = dnnl_memory_create(&memory[i], b[i].desc, engine, b[i].data);
        args[i] = (dnnl_exec_arg_t) { b[i].arg, memory[i] };
    }
    if (!st) st = dnnl_primitive_execute(primitive, stream, n, args);
    for (int i = 0; i < n; i++)
        if (memory[i]) dnnl_memory_destroy(memory[i]);
    if (stream) dnnl_stream_destroy(stream);
    if (st) __atomic_store_n(&p->status, (int)st, __ATOMIC_RELAXED);
}

// Copies an operand to its blocked layout, or the result from it.
static void move_operand(plan *p, int k, int64_t part, int64_t block)
{
    entry *e = entry_of(p, part, block);
    if (!e->move[k]) return;
    bool out = k == p->c->result;
    bound b[3] = { { out ? DNNL_ARG_TO : DNNL_ARG_FROM, &e->plain[k], plain_operand(p, k, part, block) },
                   { out ? DNNL_ARG_FROM : DNNL_ARG_TO, &e->blocked[k], blocked(p, k, part, block) } };
    execute_primitive(p, e->move[k], b);
}

static void move_weight(void *arg, int64_t part, int64_t end, int64_t unused)
{
    (void)end, (void)unused;
    move_operand(arg, W, part, 0);
}

// Copies the operands of the current blocks: block by block the operand that all parts share; then, for a weight's
// gradient, the parts of the output's gradient.
static void move_in(void *arg, int64_t task, int64_t end, int64_t unused)
{
    plan *p = arg;
    (void)end, (void)unused;
    if (task < p->count) move_operand(p, p->c->result == X ? Y : X, 0, p->first + task);
    else move_operand(p, Y, task / p->count - 1, p->first + task % p->count);
}

// Zeroes a task's part of the image's gradient: the kernel, of size 1, skips pixels, whose gradient stays 0.
static void clear(const plan *p, int64_t part, int64_t block)
{
    const ms_conv *v = &entry_of(p, part, block)->key.v;
    float *to = plain_operand(p, X, part, block);
    for (int64_t n = 0; n < v->n; n++)
        memset(to + n * p->key.in * p->key.channel, 0, (size_t)(v->in * p->key.channel) * sizeof *to);
}

static void compute(void *arg, int64_t task, int64_t end, int64_t unused)
{
    static const int name[3][3] = {
        [X] = { DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST },
        [W] = { DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST },
        [Y] = { DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST },
    };
    plan *p = arg;
    int64_t part = task / p->count, block = p->first + task % p->count;
    entry *e = entry_of(p, part, block);
    int result = p->c->result;
    (void)end, (void)unused;
    bound b[6] = { { 0 } };
    int n = 0;
    for (; n < 3; n++) b[n] = (bound) { name[result][n], &e->blocked[n], blocked(p, n, part, block) };
    if (e->scratch_bytes) {
        int64_t slot = p->slots < ms_num_threads() ? task : ms__thread_num();
        b[n++] = (bound) { DNNL_ARG_SCRATCHPAD, &e->scratch, p->scratch + (size_t)slot * p->scratch_bytes };
    }
    if (p->c->bias) b[n] = (bound) { DNNL_ARG_BIAS, &e->bias, (float *)(uintptr_t)p->c->bias + part * p->part };
    if (result == X && p->key.channel != ms__conv_size(&p->v)) clear(p, part, block);
    execute_primitive(p, e->conv, b);
    if (result != W) move_operand(p, result, part, block);
}

// Adds the current blocks' gradients of the weight to that of block 0, in order.
static void add_blocks(void *arg, int64_t first, int64_t last, int64_t unused)
{
    plan *p = arg;
    float *to = (float *)p->room[W];
    (void)unused;
    for (int64_t b = 0; b < p->count; b++) {
        const float *from = (const float *)(p->sums + (size_t)(b * p->parts) * p->bytes[W]);
        if (p->first + b > 0)
            for (int64_t i = first; i < last; i++) to[i] += from[i];
    }
}

// ---- the whole convolution ----------------------------------------------------------------------

// Divides the convolution into tasks, and finds their primitives. *takes is false where oneDNN has no fast kernel.
static dnnl_status_t divide_tasks(plan *p, bool *takes)
{
    ms_conv *v = &p->v;
    const bool weight = p->c->result == W;
    p->key = (key) {
        .in = p->c->v->in, .out = p->c->v->out, .group = v->in, .result = p->c->result, .bias = p->c->bias != NULL
    };
    p->key.channel = ms__conv_size(v), p->key.depth = v->h * v->w, p->key.row = v->w, p->key.column = 1;
    // A kernel of size 1 with strides reads only some of the pixels: oneDNN gets these as the image.
    if (ms__conv_kernel(v) == 1 && !(v->front | v->top | v->left) && (v->od - 1) * v->sd < v->d &&
        (v->oh - 1) * v->sh < v->h && (v->ow - 1) * v->sw < v->w) {
        p->key.depth *= v->sd, p->key.row *= v->sh, p->key.column *= v->sw;
        v->d = v->od, v->h = v->oh, v->w = v->ow, v->sd = v->sh = v->sw = 1;
    }
    p->split = p->c->result == X ? v->in : v->out;
    p->parts = (p->split + PART - 1) / PART;
    p->part = ((p->split + p->parts - 1) / p->parts + 15) / 16 * 16;
    p->parts = (p->split + p->part - 1) / p->part;

    int64_t image = (v->in * ms__conv_size(v) + v->out * ms__conv_positions(v)) * (int64_t)sizeof(float),
            room = p->c->room > ROOM ? (int64_t)p->c->room : ROOM, together = room / image < 1 ? 1 : room / image;
    if (together > v->n) together = v->n;
    int64_t rounds = (v->n + together - 1) / together, tasks = weight ? TASKS / 2 : TASKS,
            wanted = (tasks + p->parts - 1) / p->parts;
    together = (v->n + rounds - 1) / rounds;
    p->each = together > wanted ? (together + wanted - 1) / wanted : 1;
    p->blocks = (v->n + p->each - 1) / p->each;
    p->at_once = together / p->each;

    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            key k = p->key;
            int64_t channels = i || p->parts == 1 ? p->split - (p->parts - 1) * p->part : p->part;
            k.v = *v;
            k.v.n = j || p->blocks == 1 ? v->n - (p->blocks - 1) * p->each : p->each;
            if (p->c->result == X) k.v.in = channels;
            else k.v.out = channels;
            dnnl_status_t st = find_conv(&p->e[i][j], &k);
            *takes = st == dnnl_success && p->e[i][j] != NULL;
            if (!*takes) return st;
        }
    // Operands that tasks share need one layout for all.
    int shared = p->c->result == X ? Y : X;
    for (int i = 0; i < 2; i++)
        *takes = *takes && dnnl_memory_desc_equal(&p->e[0][i]->blocked[shared], &p->e[1][i]->blocked[shared]) &&
                 dnnl_memory_desc_equal(&p->e[i][0]->blocked[W], &p->e[i][1]->blocked[W]);
    return dnnl_success;
}

static ms_status make_blocked_room(plan *p, ms_block **out)
{
    for (int i = 0; i < 4; i++) {
        const entry *e = p->e[i / 2][i % 2];
        for (int k = 0; k < 3; k++) {
            size_t bytes = (dnnl_memory_desc_get_size(&e->blocked[k]) + 63) / 64 * 64;
            if (e->move[k] && bytes > p->bytes[k]) p->bytes[k] = bytes;
        }
        if (e->scratch_bytes > p->scratch_bytes) p->scratch_bytes = (e->scratch_bytes + 63) / 64 * 64;
    }
    size_t at[6] = { 0 };
    for (int k = 0; k < 3; k++)
        at[k + 1] = at[k] + p->bytes[k] * (size_t)(k == W          ? p->parts
                                                   : divided(p, k) ? p->parts * p->at_once
                                                                   : p->at_once);
    at[4] = at[3] + (p->c->result == W && p->blocks > 1 ? p->bytes[W] * (size_t)(p->parts * p->at_once) : 0);
    p->slots = p->parts * p->at_once < ms_num_threads() ? p->parts * p->at_once : ms_num_threads();
    at[5] = at[4] + p->scratch_bytes * (size_t)p->slots;
    MS_TRY(ms__alloc_scratch(out, at[5], p->c->what));
    char *data = (*out)->data;
    for (int k = 0; k < 3; k++) p->room[k] = data + at[k];
    p->sums = data + at[3];
    p->scratch = data + at[4];
    return MS_OK;
}

static ms_status run_tasks(plan *p)
{
    const bool weight = p->c->result == W;
    ms_block *room = NULL;
    ms_status st = make_blocked_room(p, &room);
    if (st == MS_OK && !weight) ms__parallel_tasks(p->parts, move_weight, p);
    for (p->first = 0; st == MS_OK && !p->status && p->first < p->blocks; p->first += p->at_once) {
        p->count = p->blocks - p->first < p->at_once ? p->blocks - p->first : p->at_once;
        st = ms__check_interrupt();
        if (st != MS_OK) break;
        ms__parallel_tasks(weight ? (1 + p->parts) * p->count : p->count, move_in, p);
        ms__parallel_tasks(p->parts * p->count, compute, p);
        if (weight) ms__parallel(p->parts * (int64_t)(p->bytes[W] / sizeof(float)), 8192, add_blocks, p);
    }
    p->first = 0;
    if (st == MS_OK && weight && !p->status) ms__parallel_tasks(p->parts, move_weight, p);
    if (room) ms__free(room);
    return st;
}

// Computes a group of the convolution.
static ms_status compute_group(const ms_conv_work *c, int64_t group, bool *done)
{
    plan p = { .c = c, .v = *c->v };
    ms_conv *v = &p.v;
    v->in /= v->groups, v->out /= v->groups, v->groups = 1;
    ms_conv_work own = *c;
    int64_t at[] = { v->in * ms__conv_size(v), v->out * v->in * ms__conv_kernel(v), v->out * ms__conv_positions(v) };
    for (int k = 0; k < 3; k++) own.operands[k] = (float *)c->operands[k] + group * at[k];
    if (c->bias) own.bias = (const float *)c->bias + group * v->out;
    p.c = &own;
    p.status = (int)divide_tasks(&p, done);
    ms_status st = *done && !p.status ? run_tasks(&p) : MS_OK;
    if (st != MS_OK || !p.status) return st;
    if (p.status == dnnl_out_of_memory)
        return ms__no_memory((size_t)(at[X] + at[Y]) * (size_t)v->n * 4, c->what,
                             "the operands of oneDNN's primitives");
    return ms__fail(MS_EUNSUPPORTED,
                    "%s: oneDNN failed with status %d (images: %lld, channels: %lld, channels of the output: %lld)",
                    c->what, p.status, (long long)v->n, (long long)v->in, (long long)v->out);
}

// Groups whose channels do not fill vectors are left to conv.c, as are small ones.
ms_status ms__conv_onednn(const ms_conv_work *c, bool *done)
{
    const ms_conv *v = c->v;
    ms_status st = MS_OK;
    *done = false;
    double work =
        (double)v->n * (double)v->out * (double)(v->in / v->groups) * (double)ms__conv_kernel(v) / (double)v->groups;
    if (c->dtype != MS_F32 || work * (double)ms__conv_positions(v) < LEAST || !ready()) return MS_OK;
    if (v->groups > 1 && (v->in / v->groups % 16 || v->out / v->groups % 16)) return MS_OK;
    openmp_threads(1);
    for (int64_t group = 0; group < v->groups && st == MS_OK && (group == 0 || *done); group++)
        st = compute_group(c, group, done);
    openmp_threads(ms_num_threads());
    return st;
}
