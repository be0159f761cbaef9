// SPDX-License-Identifier: MIT
// shard/unit.h -- the shard engine: units and what they are made of.
//
// A unit is the parameters of one wrapped module: one all-gather and one reduce-scatter per use. It keeps two storages:
// the *shard* (this rank's part of every parameter, padded to the same size on every rank, always resident) and the
// *gather buffer* (all parameters whole, vacated while sharded). A parameter object stays the same for the unit's
// life: it is a view of the gather buffer, and operators refuse it while the buffer is vacated. Its *local* tensor is a
// view of the shard: the optimizer's leaf, in whose grad reduced gradients land. (docs/semantics.md#lifecycle)
#ifndef MS_UNIT_H
#define MS_UNIT_H

#include "comm/error.h"
#include "comm/request.h"
#include "autograd/graph.h"
#include "base/trace.h"

typedef struct unit unit;

typedef struct unit_param {
    unit *owner;
    ms_tensor *param, *local;
    ms_tensor *whole, *resting;  // what param views while gathered, and while sharded (in the stored dtype)
    ms_tensor *fresh;            // whole gradient of `run`, the backward in progress
    ms_run *run;
    ms_tensor *pending;              // whole gradient to reduce; fresh ones are added at post-backward
    ms_tensor *saved;                // the landed gradient, while grad holds an unreduced one (views/classic.c)
    int dim;                         // the dimension that is cut; other than the first only with layout `rows`
    int64_t outer, rows, row_numel;  // products of the sizes before, of and after dim (flat: 1, numel, 1)
    int64_t chunk;                   // rows per rank, ceil(rows / W)
    int64_t first, here;             // this rank's rows
    // Offsets in bytes: in the shard (stored dtype), in its cast and in the gather buffer (both in gather_dtype).
    size_t shard_at, cast_at, whole_at;
    int dtype, gather_dtype;  // stored and gathered
    int ndim;                 // of the whole parameter
    int64_t shape[MS_MAX_DIMS], numel;
    bool extended;  // has an all-gather extension, which makes the whole: none in the gather buffer
    uint64_t seen;  // param's version when the whole was shown, or when a change of it was last copied to the shard
} unit_param;

typedef struct layout layout;
typedef struct views views;

typedef struct {
    unit **units;
    int n;
} unit_list;

// What the script asked for when it made the unit. Constant after making.
typedef struct unit_options {
    int backward_prefetch_at;  // MS_PREFETCH_*
    bool offload;
    bool keep_low;  // gradients stay in the reduce dtype
    int output_dtype;
    int param_dtype, reduce_dtype;
    double before, after;  // fsdp.FSDP: divisors of gradients before and after their sum
} unit_options;

// What the script may change while the unit lives, between its passes (ms_unit_set and its neighbours in script.c).
// The schedule only reads it; lazy initialisation resolves the root rule in it.
typedef struct unit_settings {
    int param_dtype, reduce_dtype;  // those of the options, or -1 for MS_UNIT_FULL_PRECISION
    bool cast_forward_inputs;
    int reshard_after_forward;  // -1: by the root rule
    bool by_rule;               // stays whole after forward as the root, not by an option of the script
    ms_group *post_group;  // reshard_after_forward as a number: the ranks that keep slices of the whole until backward
    bool reshard_after_backward, sync, unshard_in_backward;
    bool all_reduce;         // over `replicate`; false: reduced gradients gather in `partial`
    double divide;           // 0: the number of ranks
    double all_reduce_hook;  // the script's key of the hook, 0: none
    ms_comm_hook hook;
    bool checked;              // MS_UNIT_CHECKED
    bool prefetches, limited;  // MS_UNIT_FORWARD_PREFETCH, MS_UNIT_LIMIT_GATHERS
    bool fake_gather, fake_reduce;
    unit_list forward_prefetch, backward_prefetch;  // given by the script
} unit_settings;

// Where the unit's bytes are and how they are laid out. make.c and a layout's plan change it when the unit is made,
// moved or replanned; extend.c adds its inputs and outputs at the first gather; `cast` lives during one gather, `post`
// between forward and backward.
typedef struct unit_memory {
    int device;
    int home;       // device of the shards and of the gradients that land: `device`, or with offload the CPU
    int computes;   // offload: the device of forward and backward; -1: the module's first device that is not meta
    bool casts;     // some parameter is gathered in another dtype than it is stored in
    bool in_place;  // world of one without casts: the gather buffer is the shard
    ms_storage *shard, *gather_buffer, *cast;
    size_t shard_bytes, gather_bytes, cast_bytes;
    int64_t piece_elements;  // flat: parameters begin at multiples of this; 0: not planned yet
    ms_piece *pieces;        // from the shard (or its low-precision cast) to the gather buffer
    int n_pieces;
    struct extension *extensions;  // shard/extend.c
    int n_extensions;
    ms_storage *post;  // this rank's slice of the whole, between forward and backward
    size_t post_bytes;
    uint64_t post_version;  // versions of the parameters when it was cut
} unit_memory;

// Whether the parameters are whole, and what they show. gather.c and summon.c change it.
typedef struct unit_state {
    ms_work *gather;         // in flight
    bool fetched;            // the gather buffer is filled, but the parameters do not view it yet
    bool gathered;           // parameters are whole
    bool concealed;          // whole in memory, but parameters view their pieces: a root between forward and backward
    uint64_t gathered_from;  // versions of the parameters when their gather began
    uint64_t ahead;          // 0, or, gathered before its forward: 1 + the versions of the parameters at that time
    uint64_t shard_seen;     // version of the shard when the wholes were shown
    const char *unkept;      // why a change of a whole could not be copied to the shard; the next gather fails with it
    ms_storage *summoned;    // whole parameters in the stored dtype, while summoned and gathered in another
    bool summoning, was_whole, was_concealed;
} unit_state;

// Who uses the unit: forwards, and backwards between their pre- and post-phase. The schedule changes it.
typedef struct unit_pass {
    int forwards;
    struct {
        int64_t use;
        ms_run *run;
    } * active;  // uses between their pre- and post-backward
    int n_active, cap_active;
    int64_t uses[64];   // use numbers of the passes in progress, by nesting depth
    bool open;          // a unit of several modules is in a pass, in which more of them may run
    bool open_graph;    // a module of the open pass recorded a graph
    int64_t open_pass;  // number of the use that began the open pass; 0: none
    uint64_t skipped;   // bit stack over nested passes; set: the pass ignores the unit
} unit_pass;

// The progress of a backward. The gradients are in unit_param. backward.c and the views change it.
typedef struct unit_gradients {
    size_t arrived;      // bytes in this backward
    bool partly;         // this backward has run some but not all modules of a pass
    int behind;          // passes without a backward yet, besides the one whose gradients are reduced
    ms_tensor *partial;  // reduced over the shard group, not yet all-reduced over `replicate`
    unit_param **partial_of;
    int n_partial;
} unit_gradients;

struct unit {
    double handle;
    const char *name;
    uint32_t serial;  // among the units of modules of its class, over its group
    const layout *layout;
    const views *views;
    ms_group *group;
    ms_group *replicate;  // the ranks with the same shard, which all-reduce the reduced gradients; NULL: none
    int rank, world, n;
    unit_param *params;
    unit_param *slots;  // the optimizer's leaves, where gradients land: params, or the flat parameter
    int n_slots;
    unit_param flat;          // of views/flat.c; its param and local are one tensor
    struct context *context;  // shared with the root's other units; NULL before lazy initialisation
    uint32_t model;           // the root's serial: the same on every rank if all make their models in the same order
    unit_options options;
    unit_settings settings;
    unit_memory memory;
    unit_state state;
    unit_pass pass;
    unit_gradients gradients;
};

unit *ms__unit(double handle);  // NULL with the error set
ms_status ms__unit_handle_new(unit *u);
void ms__unit_handle_drop(double handle);
bool ms__unit_idle(const unit *u);                         // no forward, backward or summon is in progress on it
ms_label ms__unit_label(const unit *u, const char *name);  // of a collective of u
ms_id ms__unit_local_id(ms_tensor *local);                 // of a tensor that the unit owns: the same at every call

// ---- recording and logging ----
void ms__unit_note(const unit *u, int event, bool prefetched);
void ms__unit_log(const unit *u, const char *phase);  // NULL: of the root
const char *ms__unit_range_name(const unit *u, const char *phase);
// A range of the profiler by PyTorch's name (docs/semantics.md#logging): "FSDP::all_gather (layers.1)".
// NULL: of the root; units without parameters have none.
#define UNIT_RANGE(u, phase) UNIT_RANGE_IF(true, u, phase)
#define UNIT_RANGE_IF(when, u, phase) \
    MS_RANGE_IF((when) && (!(u) || ((const unit *)(u))->n), MS_RANGE_FSDP, ms__unit_range_name((u), (phase)), NULL)

// Index of p's first element in a tensor over the whole gather buffer, and of this rank's first one over the shard.
static inline int64_t ms__whole_index(const unit_param *p)
{
    return (int64_t)(p->whole_at / (size_t)ms__dtype_size(p->gather_dtype));
}
static inline int64_t ms__shard_index(const unit_param *p)
{
    return (int64_t)(p->shard_at / (size_t)ms__dtype_size(p->dtype));
}

#endif
