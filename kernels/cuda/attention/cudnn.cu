// SPDX-License-Identifier: MIT
// cuda/attention/cudnn.cu -- attention by cuDNN 9, where it is installed, in place of flash.cu and flash_backward.cu,
// for the calls that attend() accepts. Making a plan takes cuDNN 0.3 to 1 s; it is made at the first call of a shape
// and kept. MOONSHARD_CUDNN=off: cuDNN is not used. The emulator uses a stand-in for cuDNN, only with
// MOONSHARD_CUDNN=on.
#include <dlfcn.h>
#include <cfloat>
#include <cstdlib>
#include <mutex>

#include "cuda/attention/cudnn_graph.h"
#include "cuda/attention/flash.h"
#include "cuda/library.h"

#ifdef MS_EMULATED
#define LIBRARY "libcudnn_standin.so.9"
enum { SHORTEST = 1 };
constexpr double LEAST_WORK = 0;
#else
#define LIBRARY "libcudnn.so.9"
// cuDNN is used from these sizes on, because a plan does not pay for smaller calls: the number of queries and of keys,
// and the multiplications in q k^T.
enum { SHORTEST = 256 };
constexpr double LEAST_WORK = 1e9;
#endif
enum { CUDA_MAJOR = 13, PLANS = 64 };
constexpr int64_t ROOM =
    256 << 20;  // the largest workspace of a plan, in bytes; a backward's grows with the square of the length

static struct {
    bool tried, there;
    cudnn_functions f;
    void *handles[MS_CUDA_DEVICES];
} nn;
struct plan_key {
    int index, backward;
    cudnn_attention a;
};
static struct {
    plan_key key;
    cudnn_graph *graph;  // owns the plan
    cudnn_desc plan;     // NULL if cuDNN has no plan for this shape
    int64_t bytes;
} plans[PLANS];
static int n_plans;
static std::mutex nn_lock;  // for nn, plans and n_plans

static bool nn_load(void)
{
    if (nn.tried) return nn.there;
    nn.tried = true;
    const char *on = getenv("MOONSHARD_CUDNN");
#ifdef MS_EMULATED
    if (!on) return false;
#endif
    if (on && strcmp(on, "off") == 0) return false;
    std::string places;
    void *lib = ms__cuda_library(LIBRARY, CUDA_MAJOR, &places);
    if (!lib) return false;  // cuDNN is optional
#define FIND(result, name, parameters) \
    if (!(nn.f.name = (result(*) parameters)dlsym(lib, "cudnn" #name))) return false;
    MS_CUDNN_FUNCTIONS(FIND)
#undef FIND
    return nn.there = true;
}
static bool handle_of(int index, void **out)
{
    if (!nn.handles[index]) {
        void *h;
        if (nn.f.Create(&h) != CUDNN_STATUS_SUCCESS ||
            nn.f.SetStream(h, ms__cuda_stream(index, MS_STREAM_COMPUTE)) != CUDNN_STATUS_SUCCESS) {
            nn.there = false;
            return false;
        }
        nn.handles[index] = h;
    }
    *out = nn.handles[index];
    return true;
}

// Stores the strides of x. A dimension of size 1 has stride 0 in flash_part; cuDNN needs a positive one.
static void put_strides(cudnn_attention *a, int id, const flash_part &x)
{
    int64_t *s = a->strides[id], rows = a->tq > a->tk ? a->tq : a->tk;
    s[2] = x.rows ? x.rows : a->d;
    s[1] = x.head || a->heads > 1 ? x.head : s[2] * rows;
    s[0] = x.batch || a->batch > 1 ? x.batch : s[1] * a->heads;
}
static cudnn_attention sizes_of(const flash &f, int dtype, bool backward)
{
    cudnn_attention a;
    memset(&a, 0, sizeof a);  // padding, too: keys are compared as bytes
    a.batch = f.heads / f.inner, a.heads = f.inner, a.tq = f.tq, a.tk = f.tk, a.d = f.d;
    a.bf16 = dtype == MS_BF16, a.causal = f.span.high == 0;
    put_strides(&a, NN_Q, f.q), put_strides(&a, NN_K, f.k), put_strides(&a, NN_V, f.v), put_strides(&a, NN_O, f.o);
    if (!backward) return a;
    put_strides(&a, NN_G, f.g), put_strides(&a, NN_DQ, f.dq), put_strides(&a, NN_DK, f.dk);
    put_strides(&a, NN_DV, f.dv);
    return a;
}

static void drop_plan(int at)
{
    plans[at].plan = NULL;
    delete plans[at].graph;
    plans[at].graph = NULL;
}

// The index in `plans` of a shape's plan, which is made at the first call; -1 if there is none.
static int attention_plan_of(int index, void *handle, const plan_key &key)
{
    int at = 0;
    while (at < n_plans && memcmp(&plans[at].key, &key, sizeof key) != 0) at++;
    if (at < n_plans) return plans[at].plan ? at : -1;
    if (at == PLANS) {
        static bool said;
        if (!said)
            fprintf(stderr,
                    "moonshard: cuda:%d: attention has asked cuDNN for %d plans (one for each shape, in forward and in "
                    "backward); further shapes use Moonshard's own kernels, because a plan takes up to a second\n",
                    index, PLANS);
        said = true;
        return -1;
    }
    plans[at].key = key;
    cudnn_graph *graph = plans[at].graph = new cudnn_graph(nn.f, plans[at].key.a);
    if (key.backward) graph->backward();
    else graph->forward();
    plans[at].plan = graph->plan(handle, NULL, ROOM, &plans[at].bytes);
    if (!plans[at].plan) drop_plan(at);
    n_plans++;
    return plans[at].plan ? at : -1;
}

static ms_status execute_plan(const ms_call *c, int index, void *handle, int at, void **pointers, bool *done)
{
    scratch room;
    int64_t ids[NN_IDS], n = 0;
    void *data[NN_IDS];
    for (int64_t id = 1; id < NN_IDS; id++)
        if (pointers[id]) ids[n] = id, data[n++] = pointers[id];
    if (plans[at].bytes > 0) MS_TRY(room.alloc(c, MS_CUDA | index << 8, plans[at].bytes));
    void *workspace = room.data;
    cudnn_graph calls(nn.f, plans[at].key.a);
    cudnn_desc pack = calls.make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    calls.set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, ids);
    calls.set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n, data);
    calls.set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    calls.done(pack, "making the variant pack");
    if (!calls.status) calls.need(nn.f.BackendExecute(handle, plans[at].plan, pack), "cudnnBackendExecute");
    *done = !calls.status;
    if (*done) return MS_OK;
    if (calls.status / 1000 == CUDNN_STATUS_NOT_SUPPORTED / 1000) {
        drop_plan(at);  // cuDNN has refused it: our own kernel computes this shape from now on
        return MS_OK;
    }
    return ms__fail(MS_ESTATE, "%s: cuda:%d: cuDNN: %s", c->op->name, index, calls.text);
}

// *done: whether cuDNN computes the call. It does not get small calls, calls with a mask, dropout, a cap, a window, an
// offset, shared keys or a gradient of the logsumexp, nor a backward that needs only some of the gradients.
static ms_status attend(const ms_call *c, const flash &f, int dtype, bool backward, bool *done)
{
    int index = index_of(c->out[0]);
    void *handle;
    bool plain = f.share == 1 && f.span.low == -MS_FAR && (f.span.high == 0 || f.span.high == MS_FAR);
    *done = false;
    if (!plain || is_altered(f) || f.g_lse || f.tq < SHORTEST || f.tk < SHORTEST ||
        (double)f.heads * f.tq * f.tk * f.d < LEAST_WORK || (backward && !(f.dq.data && f.dk.data && f.dv.data)))
        return MS_OK;
    std::lock_guard<std::mutex> hold(nn_lock);
    if (!nn_load()) return MS_OK;
    MS_TRY(ms__cuda_use(index));
    if (!handle_of(index, &handle)) return MS_OK;
    plan_key key;
    memset(&key, 0, sizeof key);
    key.index = index, key.backward = backward;
    cudnn_attention a = sizes_of(f, dtype, backward);
    memcpy(&key.a, &a, sizeof a);
    int at = attention_plan_of(index, handle, key);
    if (at < 0) return MS_OK;
    float scale = f.scale, one = 1, lowest = -FLT_MAX;
    void *pointers[NN_IDS] = {};
    pointers[NN_Q] = f.q.data, pointers[NN_K] = f.k.data, pointers[NN_V] = f.v.data, pointers[NN_O] = f.o.data;
    pointers[NN_LSE] = f.lse, pointers[NN_SCALE] = &scale;
    if (f.span.high == 0) pointers[NN_LOWEST] = &lowest;
    if (backward) {
        pointers[NN_G] = f.g.data, pointers[NN_DQ] = f.dq.data, pointers[NN_DK] = f.dk.data;
        pointers[NN_DV] = f.dv.data, pointers[NN_DELTA] = f.delta, pointers[NN_ONE] = &one;
    }
    return execute_plan(c, index, handle, at, pointers, done);
}
ms_status ms__cudnn_attention(const ms_call *c, const flash &f, bool *done)
{
    return attend(c, f, c->in[0]->dtype, false, done);
}
ms_status ms__cudnn_backward(const ms_call *c, const flash &f, bool *done)
{
    return attend(c, f, c->in[1]->dtype, true, done);
}
