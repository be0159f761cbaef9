// SPDX-License-Identifier: MIT
// shard/unit.h -- the shard engine: units and their state.
//
// A unit consists of the parameters of one wrapped module: one all-gather and one reduce-scatter per use. It has two
// storages: the *shard* (this rank's part of every parameter, padded to the same size on every rank, always resident)
// and the *gather buffer* (all parameters whole, vacated while sharded). The tensor object of a parameter stays the
// same while the unit exists: it is a view of the gather buffer, and operators refuse it while the buffer is vacated.
// Its *local* tensor is a view of the shard: it is the optimizer's leaf, and reduced gradients land in its grad
// (docs/semantics.md#lifecycle). This describes fully_shard; in fsdp.FSDP a flat parameter or pieces take these places
// (shard/views/views.h).
#ifndef MS_UNIT_H
#define MS_UNIT_H

#include "comm/recover.h"
#include "comm/request.h"
#include "autograd/graph.h"
#include "base/trace.h"

typedef struct unit unit;

typedef struct unit_param {
    unit *owner;
    ms_tensor *param, *local;
    ms_tensor *whole, *resting;  // param is a view like `whole` while gathered, like `resting` (stored dtype) otherwise
    ms_tensor *fresh;            // the whole gradient computed by `run`, the current backward
    ms_run *run;
    ms_tensor *pending;              // the whole gradient to be reduced; `fresh` is added to it at post-backward
    ms_tensor *saved;                // the landed gradient, while grad holds an unreduced one (views/classic.c)
    int dim;                         // the dimension that is divided; always the first with layout `flat`
    int64_t outer, rows, row_numel;  // products of the sizes before dim, of dim and after dim (flat: 1, numel, 1)
    int64_t chunk;                   // rows per rank, ceil(rows / world); flat: each rank's elements of all parameters
    int64_t first, here;             // this rank's first row and number of rows
    // Byte offsets: in the shard (stored dtype), in its cast and in the gather buffer (both in gather_dtype).
    size_t shard_at, cast_at, whole_at;
    int dtype, gather_dtype;  // stored dtype, gathered dtype
    int ndim;                 // number of dimensions of the whole parameter
    int64_t shape[MS_MAX_DIMS], numel;
    bool extended;  // has an all-gather extension, which makes the whole parameter outside of the gather buffer
    uint64_t seen;  // param's version when it last agreed with the shard; if it differs, the script has changed param
} unit_param;

typedef struct layout layout;
typedef struct views views;

typedef struct {
    unit **units;
    int n;
} unit_list;

// Options with which the script made the unit. They do not change.
typedef struct unit_options {
    int backward_prefetch_at;  // MS_PREFETCH_*
    bool offload, pins;        // pins: offloaded memory is pinned
    bool keep_low;             // gradients keep the reduce dtype
    int output_dtype;
    int param_dtype, reduce_dtype;
    double before, after;  // fsdp.FSDP: divisors of the gradients before and after they are summed
} unit_options;

// Settings that the script may change between the unit's passes (ms_unit_set, ms_unit_set_comm_hook,
// ms_unit_set_prefetch). Passes only read them; lazy initialisation replaces -1 in reshard_after_forward and then
// sets by_rule for the root.
typedef struct unit_settings {
    int param_dtype, reduce_dtype;  // as in the options; -1 after MS_UNIT_FULL_PRECISION
    bool cast_forward_inputs;
    int reshard_after_forward;  // 1: yes; 0: no; -1: chosen by lazy initialisation; > 1: the size of post_group
    bool by_rule;               // stays whole after forward because it is the root, not because of a script's option
    // If reshard_after_forward is more than 1: the ranks that keep slices of the whole parameters until backward.
    ms_group *post_group;
    bool reshard_after_backward, sync, unshard_in_backward;
    bool all_reduce;         // all-reduce over `replicate`; false: reduced gradients are summed in `partial`
    double divide;           // the divisor of gradients; 0: the number of ranks
    double all_reduce_hook;  // key of the script's hook; 0: none
    ms_comm_hook hook;
    // The script checks the order of units, so collectives do not compare it, and forward does not prefetch by it
    bool checked;
    // prefetches: forward gathers later units early; limited: forward and backward gather only the next unit early
    bool prefetches, limited;
    bool fake_gather, fake_reduce;
    unit_list forward_prefetch, backward_prefetch;  // set by the script
} unit_settings;

// Where the unit's bytes are and how they are laid out. make.c and a layout's plan change it when the unit is made,
// moved or planned again; extend.c adds its inputs and outputs at the first gather. `cast` exists during one gather,
// `post` between forward and backward.
typedef struct unit_memory {
    int device;
    int home;  // device of the shards and of the gradients that land: `device`, or the CPU with offload
    // The device in the options; -1: none. Offloaded units compute on it, or else on the module's first device
    // other than meta.
    int computes;
    bool casts;     // a parameter is gathered in a dtype other than its stored one, or has an extension
    bool in_place;  // world of one without casts: the shard is also the gather buffer
    ms_storage *shard, *gather_buffer, *cast;
    size_t shard_bytes, gather_bytes, cast_bytes;
    int64_t piece_elements;  // flat: parameters begin at multiples of this; 0: not planned yet
    ms_piece *pieces;        // what the all-gather copies from the shards (or their casts) to the gather buffer
    int n_pieces;
    struct extension *extensions;  // all-gather extensions (shard/extend.c)
    int n_extensions;
    ms_storage *post;  // this rank's slice of the whole parameters, between forward and backward
    size_t post_bytes;
    uint64_t post_version;  // versions of the parameters when the slice was made
} unit_memory;

// Whether the parameters are whole, and what they are views of. gather.c and summon.c change it; order.c sets `ahead`,
// views/pieces.c `concealed`.
typedef struct unit_state {
    ms_work *gather;         // the gather in flight
    bool fetched;            // the gather buffer is filled, but the parameters are not views of it yet
    bool gathered;           // parameters are whole
    bool concealed;          // whole in memory, but the parameters are views of their pieces (views/pieces.c: stay)
    uint64_t gathered_from;  // versions of the parameters when the gather began
    uint64_t ahead;  // if gathered before its forward: 1 + the versions of the parameters at that time; otherwise 0
    uint64_t shard_seen;  // version of the shard when the parameters last became whole or sharded
    // Why a script's change of a whole parameter could not be copied to the shard; the next gather fails with it.
    const char *unkept;
    ms_storage *summoned;           // while summoned: whole parameters in the stored dtype, or on the CPU; or NULL
    bool summoning;                 // between ms_unit_summon and ms_unit_unsummon
    bool was_whole, was_concealed;  // the state before ms_unit_summon
} unit_state;

// The uses of the unit: forwards, and backwards between their pre- and post-backward. forward.c, backward.c and order.c
// change it.
typedef struct unit_pass {
    int forwards;  // number of forwards in progress (nested)
    struct {
        int64_t use;
        ms_run *run;
    } * active;  // uses between their pre- and post-backward
    int n_active, cap_active;
    int64_t uses[64];   // use numbers of the passes in progress, by nesting depth
    bool open;          // the unit has several modules and is in a pass: more of its modules may run
    bool open_graph;    // a module of the open pass recorded a graph
    int64_t open_pass;  // number of the use that began the open pass; 0: no open pass
    uint64_t skipped;   // a stack of bits, one per nested pass; 1: the unit ignores the pass
} unit_pass;

// The progress of a backward, and `partial` gradients; unit_param has the others. backward.c, unit.c and the views
// change it; root.c drops gradients after an error or when the script clears them.
typedef struct unit_gradients {
    size_t arrived;    // bytes of gradients that have arrived since the latest post-backward that took them
    bool partly;       // this backward has run some but not all modules of a pass
    int behind;        // passes whose backward is still to come, without the pass whose gradients are being reduced
    bool accumulated;  // the gradients waiting to be reduced include some of earlier backwards
    int32_t failures;  // ms_state.dist_failures when the first of the accumulated gradients arrived
    // Accumulated gradients were dropped after an error, and the script has cleared none of the unit's grads since
    bool lost;
    ms_tensor *partial;  // reduced over the shard group, but not yet all-reduced over `replicate`
    unit_param **partial_of;
    int64_t *partial_at;  // index of each parameter's part in `partial`; -1: cleared by the script
    int n_partial;
} unit_gradients;

struct unit {
    double handle;
    const char *name;
    uint32_t serial;  // number among the units with the same module class and group
    const layout *layout;
    const views *views;
    ms_group *group;
    ms_group *replicate;  // the ranks with the same shard, over which reduced gradients are all-reduced; NULL: none
    int rank, world, n;
    unit_param *params;
    unit_param *leaves;  // the optimizer's leaves, where gradients land: params, or the flat parameter
    int n_leaves;
    unit_param flat;          // used by views/flat.c; its param and local are the same tensor
    struct context *context;  // shared with the other units of the root; NULL before lazy initialisation
    // The root's serial number: the same on every rank if all ranks make their models in the same order.
    uint32_t model;
    unit_options options;
    unit_settings settings;
    unit_memory memory;
    unit_state state;
    unit_pass pass;
    unit_gradients gradients;
};

unit *ms__unit(double handle);  // the unit with this handle; NULL with the error set
ms_status ms__unit_handle_new(unit *u);
void ms__unit_handle_drop(double handle);
bool ms__unit_idle(const unit *u);  // whether no forward, backward or summon of u is in progress
ms_label ms__unit_label(const unit *u, const char *name);
// The stream for a collective of u that would overlap with computations on `queue` and writes `bytes` on all ranks
// together. Small collectives on one node run on the compute stream: they take less time than handing them over to a
// worker.
ms_stream_kind ms__unit_stream(const unit *u, const ms_group *g, ms_stream_kind queue, size_t bytes);
void ms__unit_accumulates(unit *u);  // records that this backward's gradients are not reduced, but kept for a later one
// Lists the names of u's parameters, each with the device unless that is NULL; of those that do not fit, the number.
void ms__unit_list(const unit *u, const char *device, char *to, size_t size);
ms_id ms__unit_local_id(ms_tensor *local);  // the id of a tensor that the unit owns: the same at every call

// ---- recording and logging ----
void ms__unit_note(const unit *u, int event, bool prefetched);
void ms__unit_log(const unit *u, const char *phase);  // u NULL: the root
const char *ms__unit_range_name(const unit *u, const char *phase);
// A profiler range with PyTorch's name (docs/semantics.md#logging): "FSDP::all_gather (layers.1)". u NULL: the root.
// Units without parameters have no ranges.
#define UNIT_RANGE(u, phase) UNIT_RANGE_IF(true, u, phase)
#define UNIT_RANGE_IF(when, u, phase) \
    MS_RANGE_IF((when) && (!(u) || ((const unit *)(u))->n), MS_RANGE_FSDP, ms__unit_range_name((u), (phase)), NULL)

// ms__whole_index: index of p's first element in a tensor over the whole gather buffer. ms__shard_index: index of this
// rank's first element of p in a tensor over the shard.
static inline int64_t ms__whole_index(const unit_param *p)
{
    return (int64_t)(p->whole_at / (size_t)ms__dtype_size(p->gather_dtype));
}
static inline int64_t ms__shard_index(const unit_param *p)
{
    return (int64_t)(p->shard_at / (size_t)ms__dtype_size(p->dtype));
}

#endif
