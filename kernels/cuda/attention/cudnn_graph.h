// SPDX-License-Identifier: MIT
// cuda/attention/cudnn_graph.h -- flash attention as graphs of cuDNN's C backend, and plans for them. The plugin makes
// and runs plans (cudnn.cu); spec/support/cuda/cudnn/plans.cpp makes them for a GPU that it describes, without having
// one.
//
// All sums are float32. Only engines whose results repeat bitwise are used. For the backward, such an engine needs a
// workspace of 2 bytes for each pair of a query and a key of each head.
#ifndef MS_CUDNN_GRAPH_H
#define MS_CUDNN_GRAPH_H

#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "cuda/attention/cudnn_values.h"

#define VALUE(name, value) name = value,
enum { MS_CUDNN_VALUES(VALUE) };
#undef VALUE

typedef void *cudnn_desc;

// The library's functions; enumerators are passed as int.
// clang-format off
#define MS_CUDNN_FUNCTIONS(X) \
    X(int, Create, (void **handle)) \
    X(int, SetStream, (void *handle, void *stream)) \
    X(void, GetLastErrorString, (char *text, size_t n)) \
    X(int, BackendCreateDescriptor, (int type, cudnn_desc *out)) \
    X(int, BackendDestroyDescriptor, (cudnn_desc d)) \
    X(int, BackendSetAttribute, (cudnn_desc d, int name, int type, int64_t n, const void *values)) \
    X(int, BackendGetAttribute, (cudnn_desc d, int name, int type, int64_t most, int64_t *n, void *values)) \
    X(int, BackendFinalize, (cudnn_desc d)) \
    X(int, BackendExecute, (void *handle, cudnn_desc plan, cudnn_desc pack))
// clang-format on
struct cudnn_functions {
#define POINTER(result, name, parameters) result(*name) parameters;
    MS_CUDNN_FUNCTIONS(POINTER)
#undef POINTER
};

// The unique ids of a graph's tensors in memory and of its scalars. NN_LOWEST: the score of keys after the query, in
// causal attention.
enum { NN_Q = 1, NN_K, NN_V, NN_O, NN_LSE, NN_G, NN_DQ, NN_DK, NN_DV, NN_DELTA, NN_SCALE, NN_ONE, NN_LOWEST, NN_IDS };

// Sizes of a call, whose tensors are [batch, heads, rows, d] of 16-bit numbers. strides: of q, k, v, o, g, dq, dk and
// dv, indexed by their ids: from a batch, a head and a row to the next.
struct cudnn_attention {
    int64_t batch, heads, tq, tk, d, strides[NN_DV + 1][3];
    bool bf16, causal;
};

// Builds a graph. After a call has failed, the following ones do nothing. An object owns all descriptors that it has
// made: a plan is valid as long as its graph.
class cudnn_graph
{
    const cudnn_functions &f;
    const cudnn_attention &a;
    enum { MOST_MADE = 256 };
    cudnn_desc made[MOST_MADE];
    int n_made = 0;
    int64_t next = 100;  // the next id of a virtual tensor
    cudnn_desc scale = NULL;

  public:
    int status = CUDNN_STATUS_SUCCESS;
    char text[512] = "";  // what has failed, or why there is no plan
    enum { MOST = 32 };
    cudnn_desc ops[MOST] = {};
    int n_ops = 0;

    cudnn_graph(const cudnn_functions &functions, const cudnn_attention &sizes) : f(functions), a(sizes) {}
    cudnn_graph(const cudnn_graph &) = delete;
    ~cudnn_graph()
    {
        while (n_made > 0) f.BackendDestroyDescriptor(made[--n_made]);  // the newest first: it may point to older ones
    }

    void need(int s, const char *what)
    {
        if (status || s == CUDNN_STATUS_SUCCESS) return;
        status = s;
        int n = snprintf(text, sizeof text, "%s failed with status %d: ", what, s);
        f.GetLastErrorString(text + n, sizeof text - (size_t)n);
    }
    cudnn_desc make(int type)
    {
        cudnn_desc d = NULL;
        if (n_made == MOST_MADE) need(CUDNN_STATUS_NOT_SUPPORTED, "making more than 256 descriptors");
        if (!status) need(f.BackendCreateDescriptor(type, &d), "creating a descriptor");
        if (d) made[n_made++] = d;
        return d;
    }
    void set(cudnn_desc d, int name, int type, int64_t n, const void *values)
    {
        if (!status) need(f.BackendSetAttribute(d, name, type, n, values), "setting an attribute");
    }
    void set(cudnn_desc d, int name, cudnn_desc value) { set(d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value); }
    cudnn_desc done(cudnn_desc d, const char *what)
    {
        if (!status) need(f.BackendFinalize(d), what);
        return d;
    }

  private:
    // ---- tensors ----

    enum { REAL, VIRTUAL, NUMBER };
    cudnn_desc tensor(int64_t id, int type, const int64_t (&dim)[4], const int64_t (&stride)[4], int kind)
    {
        cudnn_desc t = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
        int64_t align = 16;
        bool is_virtual = kind == VIRTUAL, by_value = kind == NUMBER;
        set(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
        set(t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
        set(t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align);
        set(t, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dim);
        set(t, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride);
        set(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
        set(t, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
        return done(t, "making a tensor");
    }
    int half() const { return a.bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF; }
    cudnn_desc number(int64_t id)
    {
        int64_t one[] = { 1, 1, 1, 1 };
        return tensor(id, CUDNN_DATA_FLOAT, one, one, NUMBER);
    }
    // The heads of tensor `id`, in memory or virtual. turned: with rows and columns exchanged.
    cudnn_desc heads(int64_t id, bool turned = false, int kind = REAL)
    {
        int64_t rows = id == NN_K || id == NN_V || id == NN_DK || id == NN_DV ? a.tk : a.tq;
        const int64_t *s = a.strides[id];
        int64_t dim[] = { a.batch, a.heads, turned ? a.d : rows, turned ? rows : a.d };
        int64_t stride[] = { s[0], s[1], turned ? 1 : s[2], turned ? s[2] : 1 };
        return tensor(kind == REAL ? id : next++, half(), dim, stride, kind);
    }
    // A contiguous tensor with a row per query: in memory if it has an id, otherwise virtual.
    cudnn_desc by_query(int type, int64_t columns, int64_t id = 0)
    {
        int64_t dim[] = { a.batch, a.heads, a.tq, columns };
        int64_t stride[] = { a.heads * a.tq * columns, a.tq * columns, columns, 1 };
        return tensor(id ? id : next++, type, dim, stride, id ? REAL : VIRTUAL);
    }
    cudnn_desc scores() { return by_query(CUDNN_DATA_FLOAT, a.tk); }
    cudnn_desc row() { return by_query(CUDNN_DATA_FLOAT, 1); }
    cudnn_desc turned_scores()
    {
        int64_t n = a.tq * a.tk, dim[] = { a.batch, a.heads, a.tk, a.tq }, stride[] = { a.heads * n, n, 1, a.tk };
        return tensor(next++, half(), dim, stride, VIRTUAL);
    }

    // ---- operations ----

    void add(cudnn_desc o)
    {
        done(o, "making an operation");
        if (n_ops < MOST) ops[n_ops++] = o;
    }
    void matmul(cudnn_desc x, cudnn_desc y, cudnn_desc out)
    {
        cudnn_desc m = make(CUDNN_BACKEND_MATMUL_DESCRIPTOR), o = make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
        int type = CUDNN_DATA_FLOAT;
        set(m, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
        set(o, CUDNN_ATTR_OPERATION_MATMUL_DESC, done(m, "making a matmul"));
        set(o, CUDNN_ATTR_OPERATION_MATMUL_ADESC, x);
        set(o, CUDNN_ATTR_OPERATION_MATMUL_BDESC, y);
        set(o, CUDNN_ATTR_OPERATION_MATMUL_CDESC, out);
        add(o);
    }
    struct pointwise {
        int mode, type;
        int64_t axis;  // of GEN_INDEX, otherwise -1
    };
    // y = mode(x, b); if the mode is BINARY_SELECT, y = t ? x : b. b and t may be NULL.
    cudnn_desc point(const pointwise &how, cudnn_desc x, cudnn_desc b, cudnn_desc t, cudnn_desc y)
    {
        cudnn_desc p = make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
        cudnn_desc o = make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
        set(p, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &how.mode);
        set(p, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &how.type);
        if (how.axis >= 0) set(p, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &how.axis);
        set(o, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, done(p, "making a pointwise operation"));
        set(o, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
        if (b) set(o, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
        if (t) set(o, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
        set(o, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
        add(o);
        return y;
    }
    cudnn_desc point(int mode, cudnn_desc x, cudnn_desc b, cudnn_desc y)
    {
        return point({ mode, CUDNN_DATA_FLOAT, -1 }, x, b, NULL, y);
    }
    cudnn_desc reduce(int how, cudnn_desc x, cudnn_desc y)
    {
        cudnn_desc r = make(CUDNN_BACKEND_REDUCTION_DESCRIPTOR), o = make(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
        int type = CUDNN_DATA_FLOAT;
        set(r, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how);
        set(r, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
        set(o, CUDNN_ATTR_OPERATION_REDUCTION_DESC, done(r, "making a reduction"));
        set(o, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
        set(o, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
        add(o);
        return y;
    }
    cudnn_desc reshape(cudnn_desc x, cudnn_desc y)
    {
        cudnn_desc o = make(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
        set(o, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
        set(o, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
        add(o);
        return y;
    }
    // In causal attention, sets the scores of keys that come after their query to NN_LOWEST.
    cudnn_desc hide(cudnn_desc s)
    {
        if (!a.causal) return s;
        int index = CUDNN_DATA_INT32, truth = CUDNN_DATA_BOOLEAN, real = CUDNN_DATA_FLOAT;
        cudnn_desc query = point({ CUDNN_POINTWISE_GEN_INDEX, index, 2 }, s, NULL, NULL, by_query(index, a.tk));
        cudnn_desc key = point({ CUDNN_POINTWISE_GEN_INDEX, index, 3 }, s, NULL, NULL, by_query(index, a.tk));
        cudnn_desc seen = point({ CUDNN_POINTWISE_CMP_GE, truth, -1 }, query, key, NULL, by_query(truth, a.tk));
        return point({ CUDNN_POINTWISE_BINARY_SELECT, real, -1 }, s, number(NN_LOWEST), seen, scores());
    }
    // q k^T, scaled.
    cudnn_desc scaled_scores(cudnn_desc q, cudnn_desc k_turned)
    {
        cudnn_desc product = scores();
        matmul(q, k_turned, product);
        scale = number(NN_SCALE);
        return point(CUDNN_POINTWISE_MUL, product, scale, scores());
    }

  public:
    // Builds the graph of the forward, which writes o and lse.
    void forward()
    {
        cudnn_desc s = hide(scaled_scores(heads(NN_Q), heads(NN_K, true))), p = by_query(half(), a.tk);
        cudnn_desc most = reduce(CUDNN_REDUCE_TENSOR_MAX, s, row());
        cudnn_desc e = point(CUDNN_POINTWISE_EXP, point(CUDNN_POINTWISE_SUB, s, most, scores()), NULL, scores());
        cudnn_desc sum = reduce(CUDNN_REDUCE_TENSOR_ADD, e, row());
        point(CUDNN_POINTWISE_ADD, most, point(CUDNN_POINTWISE_LOG, sum, NULL, row()),
              by_query(CUDNN_DATA_FLOAT, 1, NN_LSE));
        point(CUDNN_POINTWISE_DIV, e, sum, p);
        matmul(p, heads(NN_V), heads(NN_O));
    }
    // Builds the graph of the backward: it reads q, k, v, g, o and lse; writes dq, dk, dv, and delta for its own use.
    void backward()
    {
        cudnn_desc q = heads(NN_Q), k_turned = heads(NN_K, true), g = heads(NN_G);
        cudnn_desc go = point(CUDNN_POINTWISE_MUL, g, heads(NN_O), by_query(CUDNN_DATA_FLOAT, a.d));
        cudnn_desc sums = reduce(CUDNN_REDUCE_TENSOR_ADD, go, row());
        cudnn_desc delta = point(CUDNN_POINTWISE_MUL, sums, number(NN_ONE), by_query(CUDNN_DATA_FLOAT, 1, NN_DELTA));
        cudnn_desc s = hide(
            point(CUDNN_POINTWISE_SUB, scaled_scores(q, k_turned), by_query(CUDNN_DATA_FLOAT, 1, NN_LSE), scores()));
        cudnn_desc p = point(CUDNN_POINTWISE_EXP, s, NULL, scores()), dp = scores();
        matmul(reshape(p, turned_scores()), g, heads(NN_DV));
        matmul(g, heads(NN_V, true), dp);
        dp = point(CUDNN_POINTWISE_MUL, point(CUDNN_POINTWISE_SUB, dp, delta, scores()), p, scores());
        cudnn_desc ds = point(CUDNN_POINTWISE_MUL, dp, scale, scores());
        matmul(reshape(ds, turned_scores()), q, heads(NN_DK));
        matmul(ds, reshape(k_turned, heads(NN_K, false, VIRTUAL)), heads(NN_DQ));
    }

    // A plan for the first engine whose results repeat bitwise and which needs at most `room` bytes; NULL if there is
    // none, and `text` says why. handle: cuDNN's; NULL without a GPU: properties then describes one.
    cudnn_desc plan(void *handle, cudnn_desc properties, int64_t room, int64_t *bytes)
    {
        cudnn_desc graph = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
        if (handle) set(graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
        set(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, n_ops, ops);
        cudnn_desc heuristics = make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
        int mode = CUDNN_HEUR_MODE_A;
        set(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, done(graph, "making the graph"));
        set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
        if (properties) set(heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, properties);
        done(heuristics, "making the heuristic");
        cudnn_desc configurations[8];
        int64_t n = 0;
        for (cudnn_desc &c : configurations) c = make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
        if (!status)
            need(f.BackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 8, &n,
                                       configurations),
                 "listing the engines");
        if (!status)
            snprintf(text, sizeof text, "none of %lld engines is deterministic and has a plan within %lld bytes",
                     (long long)n, (long long)room);
        for (int64_t k = 0; k < n && !status; k++) {
            if (is_random(configurations[k])) continue;
            cudnn_desc p = make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
            if (handle) set(p, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
            set(p, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configurations[k]);
            if (properties) set(p, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, properties);
            int64_t got;
            if (!status && f.BackendFinalize(p) == CUDNN_STATUS_SUCCESS &&
                f.BackendGetAttribute(p, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &got, bytes) ==
                    CUDNN_STATUS_SUCCESS &&
                *bytes <= room)
                return p;
        }
        return NULL;
    }
    // Whether an engine's results may differ from run to run; also true if cuDNN does not tell.
    bool is_random(cudnn_desc configuration)
    {
        cudnn_desc engine = make(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
        int64_t n = 0;
        int notes[16] = {};
        if (status ||
            f.BackendGetAttribute(configuration, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n,
                                  &engine) != CUDNN_STATUS_SUCCESS ||
            f.BackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, 16, &n, notes) !=
                CUDNN_STATUS_SUCCESS)
            return true;
        for (int64_t k = 0; k < n && k < 16; k++)
            if (notes[k] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) return true;
        return false;
    }
};

#endif
