// SPDX-License-Identifier: MIT
// autograd/graph.h -- the tape (nodes, leaves, hooks), and runs that process it backwards.
//
// A node keeps the tensors that its backward reads, and edges to the nodes of its inputs. Sequence numbers increase, so
// every consumer of a node's outputs has a higher number than the node: a run that always processes the node with the
// highest number needs no dependency counts. Contributions to leaves are counted, so that a leaf's hooks run and its
// gradient lands as soon as its last contribution has arrived.
#ifndef MS_GRAPH_H
#define MS_GRAPH_H

#include "ops/op.h"

typedef struct ms_edge {
    ms_node *node;
    ms_leaf *leaf;
    int16_t index;  // which output of node
} ms_edge;          // node or leaf is set, or neither

struct ms_leaf {        // a leaf tensor that takes part in a graph
    int refs;           // references by the tensor and by edges
    int pending;        // contributions that `run` still expects
    ms_tensor *tensor;  // not retained; NULL once the tensor is freed
    ms_tensor *grad;
    ms_tensor *total;  // sum of the contributions so far in `run`
    ms_hook *hooks;    // tensor hooks (before landing) and leaf hooks (after)
    ms_run *run;       // the run that processes the leaf; NULL: none
    ms_edge *forward;  // set for a checkpoint's detached input: its gradient continues along this edge
};

typedef enum { MS_HOOK_TENSOR, MS_HOOK_LEAF, MS_HOOK_UNIT, MS_HOOK_REMOVED } ms_hook_kind;
struct ms_hook {  // a hook on a node's output or on a leaf
    ms_hook_kind kind;
    int index;  // which output of the node
    double key, handle;
    void *unit;  // UNIT: pre_backward(unit, use) of ms__run_owner runs before the gradient is used
    int64_t use;
    ms_hook **list;  // the list that contains this hook
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

#define MS_AGAIN UINT32_MAX  // in_version of an input that backward computes again (ms_recompute)

// One block of memory: the struct, followed by its arrays.
struct ms_node {
    int refs;
    uint8_t kind, n_in, n_out, n_i, n_f;
    bool keeps;            // has saved tensors or state that the first backward frees
    bool freed;            // the saved tensors and the state have been freed
    bool needed, counted;  // in `run`: its gradient is needed; its contributions to leaves have been counted
    uint16_t size_class;
    const ms_op *op;  // set for kind OP
    uint64_t seq;
    uint64_t saved_rng[2];
    double key;  // set for kinds FUNCTION and CHECKPOINT
    void *unit;  // UNIT: the unit; MODULE_*: the ms_module_call; CHECKPOINT: the ms_region
    // UNIT: the number of the unit's use; OP: 2 * ms_state.memory_module when it was recorded, + 1 if its output is
    // computed again in backward (ms_recompute).
    int64_t use;
    ms_hook *hooks;
    ms_run *run;                         // the run that processes the node; NULL: none
    ms_node *next;                       // links the free list or the list of nodes being freed
    ms_edge *edges;                      // n_in edges
    ms_tensor **in, **out;               // saved inputs and outputs; NULL where not saved
    uint32_t *in_version, *out_version;  // their version counters when they were saved, or MS_AGAIN
    ms_tensor **gout;                    // n_out sums of the gradients received so far in `run`
    ms_meta *in_meta, *out_meta;
    int64_t *i;
    double *f;
};

ms_leaf *ms__leaf_of(ms_tensor *t);  // the leaf of t, made at the first call; borrowed
void ms__leaf_release(ms_leaf *l);
bool ms__grad_is_local(const ms_leaf *l);  // whether l, which may be NULL, has a grad that nn.DDP has not reduced
void ms__leaf_set_grad(ms_leaf *l, ms_tensor *g);  // takes ownership of g; NULL clears the gradient
void ms__node_release(ms_node *n);     // iterative, so that chains of a million nodes do not overflow the stack
void ms__node_free_saved(ms_node *n);  // called after the node's backward, unless the graph is retained
// Makes a node over n_in inputs and sets its edges and metas. It has room for n_out outputs, which ms__node_output
// sets.
ms_node *ms__node_new(ms_node_kind kind, int n_in, ms_tensor *const *in, int n_out);
void ms__node_output(ms_node *n, int k, ms_tensor *t);  // makes t output k of n
ms_meta ms__meta_of(const ms_tensor *t);
uint64_t ms__next_node(void);                    // the sequence number that the next node will get
bool ms__any_grad(int n, ms_tensor *const *in);  // whether grad mode is on and an input requires grad
void ms__dead_key(double key);                   // makes ms_dead_keys report the key
ms_hook *ms__hook_add(ms_hook **list, ms_hook_kind kind, int index);  // appends a hook; NULL if there is no memory

// One call of a module with a full backward hook; the two identity nodes around the call share it.
typedef struct ms_module_call {
    int refs, n_in, n_out;
    double key, token;
    ms_tensor **grad_out;
} ms_module_call;

void ms__module_call_release(ms_module_call *m);

// The leaves that a checkpointed region used in its forward. A backward expects a contribution to each of them until
// the region has been recomputed.
typedef struct ms_region {
    double token;
    int n, cap;
    ms_leaf **leaves;          // retained
    struct ms_region *around;  // the enclosing open region
} ms_region;
void ms__region_release(ms_region *g);

#include "autograd/custom.h"
#include "autograd/leaf.h"
#include "autograd/run.h"
#include "autograd/saved.h"

#endif
