// SPDX-License-Identifier: MIT
// cudnn/plans.cpp -- the engine's graphs of attention (kernels/cuda/attention/cudnn_graph.h), compiled by cuDNN for a
// device that is described only by its properties. It needs no GPU, but a driver that loads kernels (driver.c).
//
//   plans DEVICE.json KIND B H T D CAUSAL      KIND: forward, backward
//
// Prints `plan BYTES` (the size of the plan's workspace), or `refused REASON`. q, k, v and their gradients are bfloat16
// heads of one tensor [B, T, 3, H, D], the output is [B, T, H, D].
#include <dlfcn.h>
#include <cstdlib>
#include <cstring>

#include "cuda/attention/cudnn_graph.h"

int main(int argc, char **argv)
{
    if (argc != 8) {
        fprintf(stderr, "usage: plans DEVICE.json KIND B H T D CAUSAL\n");
        return 2;
    }
    static char json[4096];
    FILE *file = fopen(argv[1], "r");
    size_t length = file ? fread(json, 1, sizeof json, file) : 0;
    void *lib = dlopen("libcudnn.so.9", RTLD_NOW);
    if (length == 0 || !lib) {
        if (length == 0) fprintf(stderr, "plans: '%s' is missing or empty\n", argv[1]);
        else fprintf(stderr, "plans: cuDNN cannot be loaded: %s\n", dlerror());
        return 2;
    }
    cudnn_functions f;
#define FIND(result, name, parameters)                                    \
    if (!(f.name = (result(*) parameters)dlsym(lib, "cudnn" #name))) {    \
        fprintf(stderr, "plans: cuDNN has no function cudnn%s\n", #name); \
        return 2;                                                         \
    }
    MS_CUDNN_FUNCTIONS(FIND)
    cudnn_attention a = {};
    a.batch = atoll(argv[3]), a.heads = atoll(argv[4]), a.tq = a.tk = atoll(argv[5]), a.d = atoll(argv[6]);
    a.bf16 = true, a.causal = atoi(argv[7]) != 0;
    for (int id = 0; id <= NN_DV; id++) {
        int64_t parts = id == NN_O || id == NN_G ? 1 : 3, row = parts * a.heads * a.d;
        int64_t strides[] = { a.tq * row, a.d, row };
        memcpy(a.strides[id], strides, sizeof strides);
    }
    cudnn_graph graph(f, a);
    cudnn_desc device = graph.make(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    graph.set(device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)length, json);
    graph.done(device, "reading the device's properties");
    if (strcmp(argv[2], "forward") == 0) graph.forward();
    else graph.backward();
    int64_t bytes = 0;
    if (graph.plan(NULL, device, INT64_MAX, &bytes)) printf("plan %lld\n", (long long)bytes);
    else printf("refused %s\n", graph.text);
    return 0;
}
