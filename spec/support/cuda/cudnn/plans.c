// SPDX-License-Identifier: MIT
// cudnn/plans.c -- cuDNN's flash attention through its C backend: builds the graphs of forward and backward, and asks
// for a plan for a device that is described only by its properties. It needs no GPU, but a driver that loads kernels
// (driver.c).
//
//   plans DEVICE.json KIND B H T D CAUSAL      KIND: forward, backward, deterministic (a backward without atomics)
//
// Prints `plan ENGINE BYTES` (its workspace) for the first engine whose plan is compiled, or `refused REASON`. q, k, v
// and their gradients are bfloat16 heads of one tensor [B, T, 3, H, D], the output is [B, T, H, D]; sums are float32.
#include <cudnn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef cudnnBackendDescriptor_t desc;
#define BF16 CUDNN_DATA_BFLOAT16
#define F32 CUDNN_DATA_FLOAT

static void need(cudnnStatus_t s, const char *what)
{
    char text[512] = "";
    if (s == CUDNN_STATUS_SUCCESS) return;
    cudnnGetLastErrorString(text, sizeof text);
    printf("refused %s: %s %s\n", what, cudnnGetErrorString(s), text);
    exit(0);
}
static desc make(cudnnBackendDescriptorType_t type)
{
    desc d;
    need(cudnnBackendCreateDescriptor(type, &d), "a descriptor");
    return d;
}
static void set(desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t n,
                const void *values)
{
    need(cudnnBackendSetAttribute(d, name, type, n, values), "an attribute");
}
static void set_desc(desc d, cudnnBackendAttributeName_t name, desc value)
{
    set(d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}
static desc done(desc d, const char *what)
{
    need(cudnnBackendFinalize(d), what);
    return d;
}

// ---- tensors: B, H, rows, columns ----

static int64_t B, H, T, D;
enum { REAL, VIRTUAL, SCALAR };

static desc tensor(cudnnDataType_t type, const int64_t dim[4], const int64_t stride[4], int kind)
{
    static int64_t ids;
    desc t = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    int64_t id = ++ids, align = 16;
    bool is_virtual = kind == VIRTUAL, by_value = kind == SCALAR;
    set(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
    set(t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align);
    set(t, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dim);
    set(t, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride);
    set(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
    set(t, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    return done(t, "a tensor");
}
static desc dense(cudnnDataType_t type, int64_t rows, int64_t columns, int kind)
{
    int64_t dim[] = { B, H, rows, columns }, stride[] = { H * rows * columns, rows * columns, columns, 1 };
    return tensor(type, dim, stride, kind);
}
static desc between(cudnnDataType_t type, int64_t columns) { return dense(type, T, columns, VIRTUAL); }
static desc scalar(void)
{
    int64_t one[] = { 1, 1, 1, 1 };
    return tensor(F32, one, one, SCALAR);
}
// Heads of memory [B, T, n, D]. turned: with rows and columns exchanged.
static desc heads(int64_t n, bool turned, int kind)
{
    int64_t dim[] = { B, H, turned ? D : T, turned ? T : D };
    int64_t stride[] = { T * n * D, D, turned ? 1 : n * D, turned ? n * D : 1 };
    return tensor(BF16, dim, stride, kind);
}
static desc turned_scores(cudnnDataType_t type)
{
    int64_t dim[] = { B, H, T, T }, stride[] = { H * T * T, T * T, 1, T };
    return tensor(type, dim, stride, VIRTUAL);
}

// ---- operations ----

static desc ops[64];
static int n_ops;
static void add(desc o) { ops[n_ops++] = done(o, "an operation"); }

static void matmul(desc a, desc b, desc c)
{
    desc m = make(CUDNN_BACKEND_MATMUL_DESCRIPTOR), o = make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    cudnnDataType_t f = F32;
    set(m, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &f);
    set_desc(o, CUDNN_ATTR_OPERATION_MATMUL_DESC, done(m, "a product"));
    set_desc(o, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_desc(o, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_desc(o, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    add(o);
}
// A pointwise operation: y = mode(x, b), or with t a selection (BINARY_SELECT). b and t may be NULL. axis: the axis of
// GEN_INDEX, otherwise -1.
static desc point(cudnnPointwiseMode_t mode, cudnnDataType_t type, int64_t axis, desc x, desc b, desc t, desc y)
{
    desc p = make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR), o = make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set(p, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(p, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &type);
    if (axis >= 0) set(p, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    set_desc(o, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, done(p, "a pointwise operation"));
    set_desc(o, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b) set_desc(o, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    if (t) set_desc(o, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_desc(o, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add(o);
    return y;
}
static desc binary(cudnnPointwiseMode_t mode, desc x, desc b, desc y) { return point(mode, F32, -1, x, b, NULL, y); }
static desc reduce(cudnnReduceTensorOp_t op, desc x, desc y)
{
    desc r = make(CUDNN_BACKEND_REDUCTION_DESCRIPTOR), o = make(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    cudnnDataType_t f = F32;
    set(r, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &op);
    set(r, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &f);
    set_desc(o, CUDNN_ATTR_OPERATION_REDUCTION_DESC, done(r, "a reduction"));
    set_desc(o, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_desc(o, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add(o);
    return y;
}
static desc reshape(desc x, desc y)
{
    desc o = make(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_desc(o, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_desc(o, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add(o);
    return y;
}

// Scores of later keys become a value that the caller gives (a scalar).
static desc causal(desc scores)
{
    desc row = point(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, 2, scores, NULL, NULL, between(CUDNN_DATA_INT32, T));
    desc key = point(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, 3, scores, NULL, NULL, between(CUDNN_DATA_INT32, T));
    desc seen = point(CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, -1, row, key, NULL, between(CUDNN_DATA_BOOLEAN, T));
    return point(CUDNN_POINTWISE_BINARY_SELECT, F32, -1, scores, scalar(), seen, between(F32, T));
}
// q k^T, scaled.
static desc scaled_scores(desc q, desc k_turned)
{
    desc product = between(F32, T);
    matmul(q, k_turned, product);
    return binary(CUDNN_POINTWISE_MUL, product, scalar(), between(F32, T));
}

// Writes the output, and the logarithm of the sum of exponentials of each row.
static void forward(bool is_causal)
{
    desc s = scaled_scores(heads(3 * H, false, REAL), heads(3 * H, true, REAL)), p = between(BF16, T);
    if (is_causal) s = causal(s);
    desc most = reduce(CUDNN_REDUCE_TENSOR_MAX, s, between(F32, 1));
    desc below = binary(CUDNN_POINTWISE_SUB, s, most, between(F32, T));
    desc e = binary(CUDNN_POINTWISE_EXP, below, NULL, between(F32, T));
    desc sum = reduce(CUDNN_REDUCE_TENSOR_ADD, e, between(F32, 1));
    desc log = binary(CUDNN_POINTWISE_LOG, sum, NULL, between(F32, 1));
    binary(CUDNN_POINTWISE_ADD, most, log, dense(F32, T, 1, REAL));
    binary(CUDNN_POINTWISE_DIV, e, sum, p);
    matmul(p, heads(3 * H, false, REAL), heads(H, false, REAL));
}

// deterministic: dq is the output of one product. Otherwise parts of it are added in float32, in any order.
static void backward(bool is_causal, bool deterministic)
{
    desc q = heads(3 * H, false, REAL), k_turned = heads(3 * H, true, REAL), v_turned = heads(3 * H, true, REAL);
    desc g = heads(H, false, REAL), dq = heads(3 * H, false, REAL);
    desc go = binary(CUDNN_POINTWISE_MUL, g, heads(H, false, REAL), dense(F32, T, D, VIRTUAL));
    desc sums = reduce(CUDNN_REDUCE_TENSOR_ADD, go, between(F32, 1));
    desc delta = binary(CUDNN_POINTWISE_MUL, sums, scalar(), dense(F32, T, 1, REAL));
    desc s = binary(CUDNN_POINTWISE_SUB, scaled_scores(q, k_turned), dense(F32, T, 1, REAL), between(F32, T));
    if (is_causal) s = causal(s);
    desc p = binary(CUDNN_POINTWISE_EXP, s, NULL, between(F32, T)), dp = between(F32, T), ds = between(F32, T);
    matmul(reshape(p, turned_scores(BF16)), g, heads(3 * H, false, REAL));  // dv
    matmul(g, v_turned, dp);
    dp = binary(CUDNN_POINTWISE_SUB, dp, delta, between(F32, T));
    dp = binary(CUDNN_POINTWISE_MUL, dp, p, between(F32, T));
    binary(CUDNN_POINTWISE_MUL, dp, scalar(), ds);
    matmul(reshape(ds, turned_scores(BF16)), q, heads(3 * H, false, REAL));  // dk
    desc k = reshape(k_turned, heads(3 * H, false, VIRTUAL));
    desc gathered = deterministic ? dq : dense(F32, T, D, REAL);
    matmul(ds, k, gathered);
    if (!deterministic) binary(CUDNN_POINTWISE_IDENTITY, gathered, NULL, dq);
}

// ---- plans ----

static void plan(desc device)
{
    desc graph = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR), heuristics = make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, n_ops, ops);
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    set_desc(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, done(graph, "the graph"));
    set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    set_desc(heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device);
    done(heuristics, "heuristics");
    desc configurations[8];
    int64_t n = 0, got, index = -1, bytes = -1;
    for (int k = 0; k < 8; k++) configurations[k] = make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    need(cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 8, &n,
                                  configurations),
         "engines");
    char text[512] = "the heuristics list no engine";
    for (int64_t k = 0; k < n; k++) {
        desc p = make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR), engine = make(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
        set_desc(p, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configurations[k]);
        set_desc(p, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device);
        if (cudnnBackendFinalize(p) != CUDNN_STATUS_SUCCESS) {
            cudnnGetLastErrorString(text, sizeof text);
            continue;
        }
        need(cudnnBackendGetAttribute(configurations[k], CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                      &got, &engine),
             "an engine");
        need(cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &got, &index),
             "the engine's index");
        need(cudnnBackendGetAttribute(p, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &got, &bytes),
             "the size of the workspace");
        printf("plan %lld %lld\n", (long long)index, (long long)bytes);
        return;
    }
    printf("refused all %lld engines: %s\n", (long long)n, text);
}

int main(int argc, char **argv)
{
    if (argc != 8) {
        fprintf(stderr, "usage: plans DEVICE.json KIND B H T D CAUSAL\n");
        return 2;
    }
    char json[4096];
    FILE *f = fopen(argv[1], "r");
    size_t length = f ? fread(json, 1, sizeof json, f) : 0;
    if (length == 0) {
        fprintf(stderr, "plans: %s cannot be read\n", argv[1]);
        return 2;
    }
    desc device = make(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    set(device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)length, json);
    done(device, "the device's properties");
    B = atoll(argv[3]), H = atoll(argv[4]), T = atoll(argv[5]), D = atoll(argv[6]);
    bool is_causal = atoi(argv[7]) != 0;
    if (strcmp(argv[2], "forward") == 0) forward(is_causal);
    else backward(is_causal, strcmp(argv[2], "deterministic") == 0);
    plan(device);
    return 0;
}
