// SPDX-License-Identifier: MIT
// autograd/graph.h -- the tape: nodes, leaves, hooks; and runs, which pull it backwards.
//
// A node keeps what its backward reads and edges to the nodes that made its inputs. Sequence numbers
// grow with time, so every consumer of a node's outputs has a higher one: a run that always takes
// the highest node needs no dependency counts. Leaves are counted, so that a leaf's total is
// known (hooks, landing) the moment its last contribution has arrived.
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
    int pending;        // contributions still to come in `run`
    ms_tensor *tensor;  // weak; NULL when the tensor died
    ms_tensor *grad;
    ms_tensor *total;  // contributions so far in `run`
    ms_hook *hooks;    // tensor hooks (before landing) and leaf hooks (after)
    ms_run *run;       // the run that is using it
    ms_edge *forward;  // a checkpoint's detached input: its gradient goes on along this edge
};

// The leaves that a checkpointed region met when it ran forward: until it has run again, its contributions to them are
// still to come.
typedef struct ms_region {
    double token;
    int n, cap;
    ms_leaf **leaves;          // retained
    struct ms_region *around;  // of the regions that are open
} ms_region;
extern ms_region *ms__region;  // the innermost open one, or NULL
void ms__region_release(ms_region *g);

typedef enum { MS_HOOK_TENSOR, MS_HOOK_LEAF, MS_HOOK_UNIT, MS_HOOK_REMOVED } ms_hook_kind;
struct ms_hook {  // on a node's output, or on a leaf
    ms_hook_kind kind;
    int index;  // which output
    double key, handle;
    void *unit;  // UNIT: the owner's pre_backward(unit, use) runs before the gradient is used
    int64_t use;
    ms_hook **list;  // where it hangs, NULL when its owner died
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

// What the two identity nodes around a module with a full backward hook share.
typedef struct ms_module_call {
    int refs, n_in, n_out;
    double key, token;
    ms_tensor **grad_out;
} ms_module_call;

// One block of memory: the struct, then the arrays it points at.
struct ms_node {
    int refs;
    uint8_t kind, n_in, n_out, n_i, n_f;
    bool keeps;            // it kept something that a first backward frees
    bool freed;            // … and it has
    bool needed, counted;  // in `run`
    uint16_t size_class;
    const ms_op *op;  // OP only
    uint64_t seq;
    uint64_t saved_rng[2];
    double key;  // FUNCTION, CHECKPOINT
    void *unit;  // UNIT: the unit; MODULE_*: the ms_module_call; CHECKPOINT: the ms_region
    int64_t use;
    ms_hook *hooks;
    ms_run *run;            // that will run it
    ms_node *next;          // free list, or the list of dying nodes
    ms_edge *edges;         // n_in
    ms_tensor **in, **out;  // saved, or NULL
    uint32_t *in_version, *out_version;
    ms_tensor **gout;  // n_out gradients so far in `run`
    ms_meta *in_meta, *out_meta;
    int64_t *i;
    double *f;
};

ms_leaf *ms__leaf_of(ms_tensor *t);  // made on demand; borrowed
void ms__leaf_release(ms_leaf *l);
void ms__leaf_set_grad(ms_leaf *l, ms_tensor *g);  // takes over g; NULL clears
void ms__node_release(ms_node *n);                 // iterative: chains of a million nodes
void ms__node_free_saved(ms_node *n);              // after its backward, unless the graph is retained
// A node of another kind over n_in inputs (edges and metas set) with room for n_out outputs (metas to be set by
// ms__node_output).
ms_node *ms__node_new(ms_node_kind kind, int n_in, ms_tensor *const *in, int n_out, int n_i, int n_f);
void ms__node_output(ms_node *n, int k, ms_tensor *t);  // t becomes output k
bool ms__any_grad(int n, ms_tensor *const *in);         // grad mode is on and one of them requires grad
void ms__dead_key(double key);
ms_hook *ms__hook_add(ms_hook **list, ms_hook_kind kind, int index);  // at the end; NULL: no memory
void ms__module_call_release(ms_module_call *m);

// ---- for the engine that manages parameters (autograd/owner.h) ----
// Identity over inputs: outs are aliases (owned) with a node whose backward, when it runs, calls
// the owner's post_backward(unit). Inputs without grad pass through unchanged (retained); *recorded tells.
ms_status ms__unit_boundary(void *unit, int64_t use, int n, ms_tensor *const *in, ms_tensor **out, bool *recorded);
// Before the gradient of t's node output is used, run the owner's pre_backward(unit, use).
ms_status ms__unit_hook(ms_tensor *t, void *unit, int64_t use);

// A task on a run's agenda (a stack). step returns MS_RUN_DONE when finished (popped), MS_RUN_EVENT
// after ms__run_event (it is called again once the answer is there), MS_RUN_FAILED with the error set.
// A step that pushes further tasks returns MS_RUN_DONE with `again` set to be called after them.
typedef struct ms_task {
    ms_run_state (*step)(struct ms_task *t, ms_run *run, ms_event *ev);
    void (*drop)(struct ms_task *t);  // abort or done: release what it holds; may be NULL
    void *ptr;
    int64_t phase, n;
    bool again;
} ms_task;
ms_status ms__run_push(ms_run *run, const ms_task *t);
ms_run *ms__run_new(void);  // an empty run on the stack (unshard, reduction)
// Fills ev; tensors are named for the time of the event. MS_RUN_EVENT, or MS_RUN_FAILED.
ms_run_state ms__run_event(ms_run *run, ms_event *ev, ms_event_kind kind, double key, double unit, int n,
                           ms_tensor *const *in, int n_first);
int ms__run_answers(ms_run *run, ms_tensor *const **t);  // of the last event; borrowed until the step returns
bool ms__run_is_backward(const ms_run *run);
bool ms__run_has_units(const ms_run *run);  // it goes through units
void ms__run_meets_unit(
    void);  // a unit is entered: what runs just now (a recomputed region, a hook) goes through units too
bool ms__run_recomputing(void);          // a checkpoint of some open run is being recomputed
bool ms__run_in_backward(void);          // some open run is a backward
bool ms__exclusive(const ms_tensor *t);  // its bytes are nobody else's and all there is in its storage
ms_status ms__accumulate(ms_tensor **total,
                         ms_tensor *g);  // *total += g, in place where the buffer is its own; takes over g

// Leaf hooks of a managed parameter, whose gradient has landed on the shard: pushes a task if there are any.
ms_status ms__leaf_hooks(ms_run *run, ms_tensor *t);

#endif
