// SPDX-License-Identifier: MIT
// autograd/graph.h -- the tape: nodes, leaves, hooks; and runs, which go through it backwards.
//
// A node keeps the tensors that its backward reads, and edges to the nodes of its inputs. Sequence numbers grow with
// time, so every consumer of a node's outputs has a higher one: a run that always takes the highest node needs no
// dependency counts. Contributions to leaves are counted, so that a leaf's hooks run and its gradient lands as soon as
// its last contribution has arrived.
#ifndef MS_GRAPH_H
#define MS_GRAPH_H

#include "ops/op.h"

typedef struct ms_edge {
    ms_node *node;
    ms_leaf *leaf;
    int16_t index;
} ms_edge;  // one of node, leaf; or neither

struct ms_leaf {        // of a leaf tensor that takes part in a graph
    int refs;           // the tensor and edges
    int pending;        // contributions that `run` still expects
    ms_tensor *tensor;  // weak; NULL once the tensor is freed
    ms_tensor *grad;
    ms_tensor *total;  // sum of the contributions so far in `run`
    ms_hook *hooks;    // tensor hooks (before landing) and leaf hooks (after)
    ms_run *run;       // the run that uses it
    ms_edge *forward;  // of a checkpoint's detached input: its gradient flows along this edge
};

typedef enum { MS_HOOK_TENSOR, MS_HOOK_LEAF, MS_HOOK_UNIT, MS_HOOK_REMOVED } ms_hook_kind;
struct ms_hook {  // on a node's output, or on a leaf
    ms_hook_kind kind;
    int index;  // of the output
    double key, handle;
    void *unit;  // UNIT: the owner's pre_backward(unit, use) runs before the gradient is used
    int64_t use;
    ms_hook **list;  // that it belongs to
    ms_hook *next;
};

typedef enum {
    MS_NODE_OP,
    MS_NODE_FUNCTION,
    MS_NODE_CHECKPOINT,
    MS_NODE_MODULE_IN,
    MS_NODE_MODULE_OUT,
    MS_NODE_UNIT
} ms_node_kind;

// One block of memory: the struct, then the arrays it points at.
struct ms_node {
    int refs;
    uint8_t kind, n_in, n_out, n_i, n_f;
    bool keeps;            // it saved something that its first backward frees
    bool freed;            // that has been freed
    bool needed, counted;  // in `run`
    uint16_t size_class;
    const ms_op *op;  // OP only
    uint64_t seq;
    uint64_t saved_rng[2];
    double key;  // FUNCTION, CHECKPOINT
    void *unit;  // UNIT: the unit; MODULE_*: the ms_module_call; CHECKPOINT: the ms_region
    int64_t use;
    ms_hook *hooks;
    ms_run *run;            // the run that uses it
    ms_node *next;          // free list, or the list of dying nodes
    ms_edge *edges;         // n_in
    ms_tensor **in, **out;  // saved, or NULL
    uint32_t *in_version, *out_version;
    ms_tensor **gout;  // n_out sums of gradients so far in `run`
    ms_meta *in_meta, *out_meta;
    int64_t *i;
    double *f;
};

ms_leaf *ms__leaf_of(ms_tensor *t);  // made on demand; borrowed
void ms__leaf_release(ms_leaf *l);
void ms__leaf_set_grad(ms_leaf *l, ms_tensor *g);  // takes over g; NULL clears
void ms__node_release(ms_node *n);                 // iterative, for chains of a million nodes
void ms__node_free_saved(ms_node *n);              // after its backward, unless the graph is retained
// A node over n_in inputs (edges and metas set) with room for n_out outputs, which ms__node_output sets.
ms_node *ms__node_new(ms_node_kind kind, int n_in, ms_tensor *const *in, int n_out);
void ms__node_output(ms_node *n, int k, ms_tensor *t);  // t becomes output k
ms_meta ms__meta_of(const ms_tensor *t);
bool ms__any_grad(int n, ms_tensor *const *in);                       // grad mode is on and one of them requires grad
void ms__dead_key(double key);                                        // reports the key by ms_dead_keys
ms_hook *ms__hook_add(ms_hook **list, ms_hook_kind kind, int index);  // at the end; NULL: no memory

#include "autograd/custom.h"
#include "autograd/leaf.h"
#include "autograd/run.h"

#endif
