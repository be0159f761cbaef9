// SPDX-License-Identifier: MIT
// cudnn/standin.cpp -- a stand-in for cuDNN's C backend, for the emulated GPU: libcudnn_standin.so. It checks
// descriptors as the library does, and computes a graph operation by operation in float32 on the stream.
//
// It is stricter in some points, so that a wrong caller cannot be right by chance: the arguments of a run must be
// exactly the graph's tensors and numbers, the workspace is overwritten, tensors in memory are aligned to 16 bytes, and
// its heuristic names two engines, of which the first is not deterministic and gives NaN.
#include <algorithm>
#include <map>

#include "cuda/attention/cudnn_graph.h"
#include "cuda/cuda.h"

namespace
{

enum { BAD_PARAM = 2000, NOT_FINAL = 2004 };
enum { GRAPH = 9000, RANDOM };  // attributes of configurations, engines and plans that only the stand-in knows

struct node {
    int type;
    bool final = false;
    std::map<int, std::vector<char>> attributes;

    bool has(int name) const { return attributes.count(name) > 0; }
    template <class T> T get(int name, size_t k = 0) const
    {
        T v;
        memcpy(&v, attributes.at(name).data() + k * sizeof v, sizeof v);
        return v;
    }
    node *of(int name) const { return has(name) ? get<node *>(name) : nullptr; }
    template <class T> void put(int name, T v) { attributes[name].assign((char *)&v, (char *)&v + sizeof v); }
};

// Counters that specs read, and a status that they set, through LuaJIT's FFI.
struct {
    double plans, runs;
} counted;
int planted;  // what all following runs return; 0: the real status

size_t size_of(int type)
{
    switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    default: return 4;
    }
}

// ---- tensors ----

struct tensor {
    int64_t id, dim[4], stride[4];
    int type;
    bool is_virtual, by_value;
    explicit tensor(const node *n)
    {
        id = n->get<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
        type = n->get<int>(CUDNN_ATTR_TENSOR_DATA_TYPE);
        is_virtual = n->get<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL);
        by_value = n->get<bool>(CUDNN_ATTR_TENSOR_IS_BY_VALUE);
        for (size_t k = 0; k < 4; k++) {
            dim[k] = n->get<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS, k);
            stride[k] = n->get<int64_t>(CUDNN_ATTR_TENSOR_STRIDES, k);
        }
    }
    int64_t at(const int64_t (&i)[4]) const  // dimensions of size 1 are broadcast
    {
        int64_t sum = 0;
        for (int k = 0; k < 4; k++) sum += (dim[k] == 1 ? 0 : i[k]) * stride[k];
        return sum;
    }
    int64_t extent() const
    {
        int64_t last[] = { dim[0] - 1, dim[1] - 1, dim[2] - 1, dim[3] - 1 };
        return at(last) + 1;
    }
};
bool good_tensor(const node *n)
{
    for (int name : { CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT,
                      CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_ATTR_TENSOR_IS_VIRTUAL,
                      CUDNN_ATTR_TENSOR_IS_BY_VALUE })
        if (!n->has(name)) return false;
    if (n->attributes.at(CUDNN_ATTR_TENSOR_DIMENSIONS).size() != 32) return false;
    tensor t(n);
    for (int k = 0; k < 4; k++)
        if (t.dim[k] < 1 || t.stride[k] < 1) return false;
    return !(t.is_virtual && t.by_value);
}

// ---- operations ----

struct operand_names {
    int how, x, y, out, select;  // -1: none
};
bool names_of(const node *o, operand_names *n)
{
    switch (o->type) {
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
        *n = { CUDNN_ATTR_OPERATION_MATMUL_DESC, CUDNN_ATTR_OPERATION_MATMUL_ADESC, CUDNN_ATTR_OPERATION_MATMUL_BDESC,
               CUDNN_ATTR_OPERATION_MATMUL_CDESC, -1 };
        return true;
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
        *n = { CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
               CUDNN_ATTR_OPERATION_POINTWISE_BDESC, CUDNN_ATTR_OPERATION_POINTWISE_YDESC,
               CUDNN_ATTR_OPERATION_POINTWISE_TDESC };
        return true;
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
        *n = { CUDNN_ATTR_OPERATION_REDUCTION_DESC, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, -1,
               CUDNN_ATTR_OPERATION_REDUCTION_YDESC, -1 };
        return true;
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
        *n = { -1, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, -1, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, -1 };
        return true;
    default: return false;
    }
}
bool good_operation(const node *o)
{
    operand_names n;
    if (!names_of(o, &n) || !o->has(n.x) || !o->has(n.out) || (n.how >= 0 && !o->has(n.how))) return false;
    tensor x(o->of(n.x)), out(o->of(n.out));
    if (o->type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
        if (!o->has(n.y)) return false;
        tensor y(o->of(n.y));
        return x.dim[3] == y.dim[2] && out.dim[2] == x.dim[2] && out.dim[3] == y.dim[3] && out.dim[0] == x.dim[0] &&
               out.dim[1] == y.dim[1];
    }
    for (int k = 0; k < 4 && o->type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR; k++)
        if (out.dim[k] != x.dim[k] && out.dim[k] != 1) return false;
    for (int k = 0; k < 4 && o->type == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR; k++)
        if (x.dim[k] != out.dim[k] && x.dim[k] != 1) return false;
    return true;
}

// The memory of a graph's tensors during a run.
class memory
{
    std::map<int64_t, std::vector<float>> own;  // elements of virtual tensors, and tensors passed by value
    std::map<int64_t, void *> given;

  public:
    void give(int64_t id, void *p) { given[id] = p; }
    void number(int64_t id, float v) { own[id] = { v }; }
    float load(const tensor &t, const int64_t (&i)[4])
    {
        int64_t at = t.at(i);
        if (t.is_virtual || t.by_value) return own[t.id][(size_t)at];
        return ::load<float>(t.type == CUDNN_DATA_FLOAT ? MS_F32 : t.type == CUDNN_DATA_HALF ? MS_F16 : MS_BF16,
                             given[t.id], at);
    }
    void store(const tensor &t, const int64_t (&i)[4], float v)
    {
        int64_t at = t.at(i);
        if (!t.is_virtual)
            return ::store<float>(t.type == CUDNN_DATA_FLOAT  ? MS_F32
                                  : t.type == CUDNN_DATA_HALF ? MS_F16
                                                              : MS_BF16,
                                  given[t.id], at, v);
        std::vector<float> &all = own[t.id];
        if (all.empty()) all.assign((size_t)t.extent(), NAN);
        if (t.type == CUDNN_DATA_HALF) v = ms_f16_to_float(ms_float_to_f16(v));
        if (t.type == CUDNN_DATA_BFLOAT16) v = ms_bf16_to_float(ms_float_to_bf16(v));
        all[(size_t)at] = v;
    }
};
template <class F> void each(const tensor &t, const F &fn)
{
    int64_t i[4];
    for (i[0] = 0; i[0] < t.dim[0]; i[0]++)
        for (i[1] = 0; i[1] < t.dim[1]; i[1]++)
            for (i[2] = 0; i[2] < t.dim[2]; i[2]++)
                for (i[3] = 0; i[3] < t.dim[3]; i[3]++) fn(i);
}
float pointwise(int mode, float x, float b)
{
    switch (mode) {
    case CUDNN_POINTWISE_ADD: return x + b;
    case CUDNN_POINTWISE_MUL: return x * b;
    case CUDNN_POINTWISE_DIV: return x / b;
    case CUDNN_POINTWISE_SUB: return x - b;
    case CUDNN_POINTWISE_EXP: return std::exp(x);
    case CUDNN_POINTWISE_LOG: return std::log(x);
    default: return x >= b;
    }
}
void run(const node *o, memory &m)
{
    operand_names n;
    names_of(o, &n);
    tensor x(o->of(n.x)), out(o->of(n.out));
    const node *how = n.how >= 0 ? o->of(n.how) : nullptr;
    if (o->type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
        tensor y(o->of(n.y));
        each(out, [&](const int64_t (&i)[4]) {
            float sum = 0;
            for (int64_t k = 0; k < x.dim[3]; k++)
                sum += m.load(x, { i[0], i[1], i[2], k }) * m.load(y, { i[0], i[1], k, i[3] });
            m.store(out, i, sum);
        });
    } else if (o->type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) {
        bool most = how->get<int>(CUDNN_ATTR_REDUCTION_OPERATOR) == CUDNN_REDUCE_TENSOR_MAX;
        each(out, [&](const int64_t (&i)[4]) { m.store(out, i, most ? -INFINITY : 0); });
        each(x, [&](const int64_t (&i)[4]) {
            int64_t to[4];
            for (int k = 0; k < 4; k++) to[k] = out.dim[k] == 1 ? 0 : i[k];
            float v = m.load(x, i), sum = m.load(out, to);
            m.store(out, to, most ? (v > sum ? v : sum) : sum + v);
        });
    } else if (o->type == CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR) {
        // cuDNN reads the same memory by other dimensions and strides. Here rows and columns are exchanged: the
        // result is the transpose.
        each(out, [&](const int64_t (&i)[4]) { m.store(out, i, m.load(x, { i[0], i[1], i[3], i[2] })); });
    } else {
        int mode = how->get<int>(CUDNN_ATTR_POINTWISE_MODE);
        const node *b = o->of(n.y), *t = o->of(n.select);
        each(out, [&](const int64_t (&i)[4]) {
            float v = mode == CUDNN_POINTWISE_GEN_INDEX ? 0 : m.load(x, i), w = b ? m.load(tensor(b), i) : 0;
            if (mode == CUDNN_POINTWISE_GEN_INDEX) v = (float)i[how->get<int64_t>(CUDNN_ATTR_POINTWISE_AXIS)];
            else if (mode == CUDNN_POINTWISE_BINARY_SELECT) v = m.load(tensor(t), i) != 0 ? v : w;
            else v = pointwise(mode, v, w);
            m.store(out, i, v);
        });
    }
}

std::vector<const node *> operations(const node *graph)
{
    const std::vector<char> &all = graph->attributes.at(CUDNN_ATTR_OPERATIONGRAPH_OPS);
    std::vector<const node *> out(all.size() / sizeof(node *));
    memcpy(out.data(), all.data(), all.size());
    return out;
}
// The tensors of a graph that are not virtual, by id.
std::map<int64_t, tensor> arguments(const node *graph)
{
    std::map<int64_t, tensor> out;
    for (const node *o : operations(graph)) {
        operand_names n;
        names_of(o, &n);
        for (int name : { n.x, n.y, n.out, n.select })
            if (name >= 0 && o->has(name) && !tensor(o->of(name)).is_virtual) {
                tensor t(o->of(name));
                out.emplace(t.id, t);
            }
    }
    return out;
}
// Whether cuDNN accepts the graph: heads of half types have a multiple of 8 columns, up to 128, and their strides other
// than 1 are multiples of 8.
bool takes(const node *graph)
{
    for (const auto &[id, t] : arguments(graph)) {
        if (t.by_value || t.type == CUDNN_DATA_FLOAT) continue;
        int64_t d = t.stride[3] == 1 ? t.dim[3] : t.dim[2];
        if (d % 8 || d > 128) return false;
        for (int k = 0; k < 4; k++)
            if (t.stride[k] != 1 && t.stride[k] % 8) return false;
    }
    return true;
}
int64_t workspace_of(const node *graph)
{
    int64_t most = 0;  // a graph of forward has no reshape, and so needs no workspace
    for (const node *o : operations(graph))
        if (o->type == CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)
            most = std::max(most, 2 * tensor(o->of(CUDNN_ATTR_OPERATION_RESHAPE_YDESC)).extent());
    return most;
}
bool has_all(const node *n, std::initializer_list<int> names)
{
    for (int name : names)
        if (!n->has(name)) return false;
    return true;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))
API void *cudnn_standin_counts() { return &counted; }
API int *cudnn_standin_planted() { return &planted; }

API int cudnnCreate(void **out)
{
    *out = new cudaStream_t();
    return CUDNN_STATUS_SUCCESS;
}
API int cudnnSetStream(void *handle, void *stream)
{
    *(cudaStream_t *)handle = (cudaStream_t)stream;
    return CUDNN_STATUS_SUCCESS;
}
API void cudnnGetLastErrorString(char *text, size_t n) { snprintf(text, n, "the stand-in refuses the call"); }
API int cudnnBackendCreateDescriptor(int type, cudnn_desc *out)
{
    *out = new node { type, false, {} };
    return CUDNN_STATUS_SUCCESS;
}
API int cudnnBackendDestroyDescriptor(cudnn_desc d)
{
    delete (node *)d;
    return CUDNN_STATUS_SUCCESS;
}
API int cudnnBackendSetAttribute(cudnn_desc d, int name, int type, int64_t n, const void *values)
{
    node *to = (node *)d;
    if (!to || to->final || n < 0 || (n > 0 && !values)) return BAD_PARAM;
    for (int64_t k = 0; type == CUDNN_TYPE_BACKEND_DESCRIPTOR && k < n; k++)
        if (!((node *const *)values)[k] || !((node *const *)values)[k]->final) return NOT_FINAL;
    to->attributes[name].assign((const char *)values, (const char *)values + (size_t)n * size_of(type));
    return CUDNN_STATUS_SUCCESS;
}
API int cudnnBackendFinalize(cudnn_desc d)
{
    node *n = (node *)d;
    bool good = false;
    if (!n || n->final) return BAD_PARAM;
    switch (n->type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR: good = good_tensor(n); break;
    case CUDNN_BACKEND_MATMUL_DESCRIPTOR: good = n->has(CUDNN_ATTR_MATMUL_COMP_TYPE); break;
    case CUDNN_BACKEND_REDUCTION_DESCRIPTOR:
        good = has_all(n, { CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_ATTR_REDUCTION_COMP_TYPE });
        break;
    case CUDNN_BACKEND_POINTWISE_DESCRIPTOR:
        good = has_all(n, { CUDNN_ATTR_POINTWISE_MODE, CUDNN_ATTR_POINTWISE_MATH_PREC });
        break;
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
        good = has_all(n, { CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_ATTR_OPERATIONGRAPH_OPS });
        break;
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
        good = has_all(n, { CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_ATTR_ENGINEHEUR_MODE });
        break;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
        good = has_all(n, { CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG });
        if (good) {
            node *c = n->of(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
            n->put(GRAPH, c->get<node *>(GRAPH));
            n->put(RANDOM, c->get<bool>(RANDOM));
            counted.plans++;
        }
        break;
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR:
        good = has_all(n, { CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
                            CUDNN_ATTR_VARIANT_PACK_WORKSPACE });
        break;
    default: good = good_operation(n);
    }
    if (!good) return BAD_PARAM;
    n->final = true;
    return CUDNN_STATUS_SUCCESS;
}
API int cudnnBackendGetAttribute(cudnn_desc d, int name, int, int64_t most, int64_t *n, void *values)
{
    node *from = (node *)d;
    if (!from || !from->final) return NOT_FINAL;
    *n = 1;
    switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: {
        node *graph = from->of(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
        *n = takes(graph) ? std::min<int64_t>(most, 2) : 0;
        for (int64_t k = 0; k < *n; k++) {
            node *c = ((node **)values)[k];
            c->put(GRAPH, graph);
            c->put(RANDOM, k == 0);
            c->final = true;
        }
        return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_ATTR_ENGINECFG_ENGINE: {
        node *engine = *(node **)values;
        engine->put(RANDOM, from->get<bool>(RANDOM));
        engine->final = true;
        return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
        ((int *)values)[0] = 0;
        if (from->get<bool>(RANDOM)) ((int *)values)[1] = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC, *n = 2;
        return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
        *(int64_t *)values = workspace_of(from->get<node *>(GRAPH));
        return CUDNN_STATUS_SUCCESS;
    default: return BAD_PARAM;
    }
}
API int cudnnBackendExecute(void *handle, cudnn_desc plan, cudnn_desc pack)
{
    node *p = (node *)plan, *v = (node *)pack;
    if (planted) return planted;
    if (!p || !v || !p->final || !v->final || p->type != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) return NOT_FINAL;
    const node *graph = p->get<node *>(GRAPH);
    std::map<int64_t, tensor> needed = arguments(graph);
    size_t n = v->attributes[CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS].size() / 8;
    if (n != needed.size() || v->attributes[CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS].size() != 8 * n) return BAD_PARAM;
    memory m;
    for (size_t k = 0; k < n; k++) {
        int64_t id = v->get<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, k);
        void *data = v->get<void *>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, k);
        auto found = needed.find(id);
        if (found == needed.end() || !data) return BAD_PARAM;
        if (found->second.by_value) m.number(id, *(float *)data);
        else if ((uintptr_t)data % 16) return BAD_PARAM + 3;
        else m.give(id, data);
    }
    void *room = v->get<void *>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    int64_t bytes = workspace_of(graph);
    if (bytes > 0 && !room) return BAD_PARAM;
    bool random = p->get<bool>(RANDOM);
    counted.runs++;
    ms_shim::push(*(cudaStream_t *)handle, [=]() mutable {
        if (bytes > 0) memset(room, 0xff, (size_t)bytes);
        for (const node *o : operations(graph)) run(o, m);
        operand_names names;
        const node *last = operations(graph).back();
        names_of(last, &names);
        tensor out(last->of(names.out));
        if (random) each(out, [&](const int64_t (&i)[4]) { m.store(out, i, NAN); });
    });
    return CUDNN_STATUS_SUCCESS;
}
