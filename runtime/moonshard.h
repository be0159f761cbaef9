// SPDX-License-Identifier: MIT
// moonshard.h -- the engine's public interface, and its only public header.
//
// LuaJIT's cdef is generated from this file at build time (preprocessed, stripped), so it keeps to
// what the FFI parses: enums instead of macros, opaque types, no structs passed by value, no
// function pointer towards the caller (C never calls back).
//
// Conventions, said once:
//  * Tensors are named by ids: plain numbers made of a slot and a generation, never pointers. An id
//    is valid until its scope ends or it is released; using it later is MS_ERELEASED. 0 is no tensor.
//    Negative numbers are the script's own (Lua's tensor classes) and refused everywhere.
//  * A function that returns an id returns 0 on failure; one that returns ms_status returns MS_OK or
//    a code. Either way ms_error() then says why. On failure nothing was changed, nothing leaks.
//  * Dimensions and positions are 0-based in C; Lua translates.
//  * One thread, the one that called ms_init(), calls the engine.
#ifndef MOONSHARD_H
#define MOONSHARD_H

#include <stdint.h>
#include <stddef.h>

#ifndef MS_API
#define MS_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef double ms_id;

typedef enum {
    MS_OK = 0,
    MS_EINVAL,       // an argument is wrong: shape, dtype, device, option, value
    MS_ENOMEM,       // memory: the text names the operator and the sizes
    MS_ERELEASED,    // the id's tensor was released
    MS_ESTATE,       // right call, wrong moment: sharded parameter, freed graph, modified saved tensor
    MS_ECOMM,        // a collective failed: mismatch, absence, peer's error
    MS_EIO,          // files
    MS_EINTR,        // Ctrl-C
    MS_EUNSUPPORTED  // the device or dtype has no kernel for this
} ms_status;

typedef enum { MS_F32, MS_F64, MS_F16, MS_BF16, MS_I64, MS_I32, MS_U8, MS_BOOL, MS_DTYPES } ms_dtype;

typedef enum { MS_CPU, MS_CUDA, MS_META, MS_DEVICES } ms_device_type;

enum { MS_VERSION = 1, MS_MAX_DIMS = 8, MS_MAX_IN = 64, MS_MAX_OUT = 64, MS_MAX_I = 24, MS_MAX_F = 8 };

// ---- engine -----------------------------------------------------------------------------------

// What Lua reads without a call. One per process; the fields are written by the engine unless said.
typedef struct {
    int32_t scope;          // innermost open scope, 0 = none (tensors made now are unscoped)
    int32_t grad_mode;      // 1 = operators record the graph; use ms_set_grad_mode
    int32_t interrupted;    // set by ms_interrupt (signal handler), cleared by who reports it
    int32_t gc_wanted;      // unscoped bytes passed the soft limit: run a collection, then clear
    int32_t autocast;       // dtype + 1 of ms.amp.autocast, 0 = off
    int32_t run_depth;      // open runs
    int32_t default_dtype;  // of numbers without one, and of real functions of integers; use ms_set_default_dtype
    int32_t sigints;        // Ctrl-C's caught so far
} ms_state;

MS_API int ms_version(void);               // the interface's: MS_VERSION when the library was built
MS_API const char *ms_release_name(void);  // the release's: "1.1.0", or "1.1.0-dev" on the way to it
MS_API ms_status ms_init(void);            // idempotent
MS_API ms_state *ms_get_state(void);       // the same struct at every call
MS_API const char *ms_error(void);         // text of the last failure on this thread
MS_API int ms_error_code(void);            // its ms_status
MS_API void ms_interrupt(void);            // async-signal-safe: the next engine call fails with MS_EINTR
MS_API void ms_catch_sigint(int on);       // SIGINT calls ms_interrupt; a second one within 2 s kills
// SIGUSR1 and SIGUSR2 are noted instead of ending the process. Which came since the last call (2 where both did), 0:
// none; at: when the latest one came (ms_time).
MS_API void ms_catch_checkpoint_signals(int on);
MS_API int ms_checkpoint_signal(double *at);
MS_API int ms_num_threads(void);               // of operators on the CPU
MS_API void ms_set_num_threads(int n);         // 1 to 1024
MS_API double ms_time(void);                   // seconds, monotonic
MS_API const char *ms_cpu_isa(void);           // "v1", "v3", "v4": level in use
MS_API int ms_set_grad_mode(int on);           // returns the mode before
MS_API int ms_set_autocast(int dtype_plus_1);  // returns the value before
MS_API int ms_set_default_dtype(int dtype);    // a floating-point one; returns the one before

MS_API const char *ms_dtype_name(int dtype);  // "float32" …
MS_API int ms_dtype_size(int dtype);          // bytes
MS_API int ms_promote(int a, int b);          // dtype of an operation on two tensors

// ---- memory -----------------------------------------------------------------------------------

typedef struct {
    double allocated, peak_allocated, reserved, peak_reserved, live_tensors;
} ms_memory;

MS_API ms_status ms_memory_stats(int device, ms_memory *out);  // bytes, exact: what tensors asked for
MS_API void ms_reset_peak_memory(int device);                  // to what is in use now
MS_API void ms_empty_cache(void);                              // returns reserved memory that is not in use
MS_API void ms_set_memory_limit(double bytes);                 // MS_ENOMEM beyond it; 0 = none
// For specs: fails the nth allocation from now; -n: and all after it; 0: none. Returns how many were still to come
// before the one that was asked for last: 0 when it has failed.
MS_API double ms_fail_allocation(double nth);
MS_API void ms_set_gc_limit(double bytes);  // soft limit on unscoped bytes between collections

#ifndef MS_TYPES_ONLY  // the CPU kernels need no more: a function added below leaves what they compile as it was
                       // (ccache)

// ---- the GPU ----------------------------------------------------------------------------------

MS_API int ms_cuda_count(void);                   // devices; 0 where there are none
MS_API const char *ms_cuda_why(void);             // why there are none; "" otherwise
MS_API const char *ms_cuda_name(int index);       // NULL: no such device (ms_error)
MS_API ms_status ms_cuda_synchronize(int index);  // waits for everything queued there
// dst = src on the copy stream, between the CPU and a GPU (or within one): returns at once, and the next operator on
// either waits.
MS_API ms_status ms_copy_async(ms_id dst, ms_id src);
// A tensor's memory for another process of this machine: 64 bytes of handle, and where in it the tensor begins. The
// tensor lives on until the other is done; what was queued is through on return.
MS_API ms_status ms_cuda_share(ms_id t, uint8_t *handle, double *offset);
// The same memory here, contiguous; mapped until the process ends.
MS_API ms_id ms_cuda_open(int index, const uint8_t *handle, double offset, int dtype, int ndim, const int64_t *shape);

// ---- tensors ----------------------------------------------------------------------------------

// Devices in arguments: type | index << 8 (cuda:1 = MS_CUDA | 1 << 8).
typedef struct {
    int32_t dtype, device, ndim, requires_grad, is_leaf, is_contiguous, version, is_param, sharded, has_grad;
    int64_t numel, offset;
    int64_t shape[8], stride[8];
} ms_info;

MS_API ms_id ms_empty(int dtype, int device, int ndim, const int64_t *shape);                // uninitialised
MS_API ms_id ms_from_data(int dtype, int ndim, const int64_t *shape, const double *values);  // cpu; converted
MS_API ms_id ms_from_pointer(void *data, int dtype, int ndim, const int64_t *shape);  // cpu; caller keeps it alive
MS_API ms_status ms_tensor_info(ms_id t, ms_info *out);                               // MS_ERELEASED when it is gone
MS_API void *ms_data_ptr(ms_id t);                                // of the first element; waits for the storage's event
MS_API ms_status ms_read(ms_id t, double *out, double capacity);  // all elements, row-major, as doubles (int64 too)
MS_API ms_status ms_item(ms_id t, double *out);                   // of one element
MS_API int ms_is_alive(ms_id t);                                  // neither released nor gone with its scope?
MS_API void ms_release(ms_id t);                                  // takes the name away; no-op when it is gone
MS_API ms_status ms_keep(ms_id t);                                // out of its scope: lives until released
MS_API ms_status ms_move_to_parent(ms_id t);                      // into the scope around its own
MS_API double ms_scope_of(ms_id t);  // of its scope: a number other than 0; 0 = unscoped or gone
MS_API void ms_adopt(ms_id t);    // an unscoped tensor nobody owns any more joins the innermost scope, if one is open
MS_API void ms_drop(ms_id t);     // releases it if it belongs to the innermost scope, else leaves it
MS_API ms_id ms_detach(ms_id t);  // same storage, no graph
// Copies of tensors that share a storage: which one it is (0: nobody else's), a copy of all its bytes (uint8 [n]), and
// what t is of its own storage over such a copy (no graph).
MS_API double ms_storage_key(ms_id t);
MS_API ms_id ms_storage_copy(ms_id t);
MS_API ms_id ms_view_alike(ms_id t, ms_id copy);
MS_API ms_status ms_set_data(ms_id t, ms_id src);         // re-points t (a leaf) at src's storage, shape, dtype
MS_API int ms_same_storage(ms_id a, ms_id b);             // 1 where both lie in one
MS_API int ms_storage_is_shared(ms_id t);                 // does anything but t hold its memory?
MS_API ms_id ms_param_new(ms_id t, int requires_grad);    // a new leaf sharing t's storage, unscoped
MS_API ms_status ms_set_name(ms_id t, const char *name);  // shown in errors ("blocks.0.weight")
MS_API ms_status ms_bump_version(ms_id t);                // as a change in place does

// ---- scopes -----------------------------------------------------------------------------------

// Opens a scope in the current chain; the caller keeps name alive while it is open. Returns its handle, > 0.
MS_API double ms_scope_open(const char *name);
// Ends it and every scope left open inside; keep[0..n) move to the scope around it (or become unscoped).
// Closing a scope that is gone already is a no-op.
MS_API void ms_scope_close(double scope, const ms_id *keep, int n);
MS_API int ms_scope_is_open(double scope);  // 1 until it is closed
// Chains: one per coroutine. Returns the chain that was current. 0 is the main chain.
MS_API int ms_chain_new(void);
MS_API int ms_chain_switch(int chain);
MS_API void ms_chain_free(int chain);

// Unscoped tensors carry one of these with a C finalizer (ffi.gc): never a closure.
typedef struct {
    ms_id id;
} ms_owner;
MS_API void ms_owner_init(ms_owner *o, ms_id id);  // call it once, then give o to ffi.gc
MS_API void ms_owner_release(ms_owner *o);         // the finalizer: releases the tensor

// ---- operators --------------------------------------------------------------------------------

// Arguments of one operator call. The caller owns the struct and may reuse it; the engine reads
// n_* and that many entries, and writes out[].
typedef struct {
    int32_t n_in, n_out, n_i, n_f;
    ms_id in[64];
    ms_id out[64];
    int64_t i[24];
    double f[8];
} ms_args;

// What operators take in i[] and f[], by name; tensors go to in[], where 0 is an absent one. `name?` may be missing
// with all behind it, `name...` is any number of them. Operators that are not listed take neither. Dimensions and
// positions count from 0, negative ones from the end; keepdim, causal, training and tanh are 0 or 1; a reduction of a
// loss is 0 (none), 1 (mean) or 2 (sum). Names that end in _backward are the engine's own.
//   add sub add_ sub_                           f: alpha?
//   add_scalar mul_scalar rsub_scalar div_scalar rdiv_scalar pow_scalar rpow_scalar  f: number
//   add_scalar_ mul_scalar_ div_scalar_ pow_scalar_  f: number
//   eq_scalar ne_scalar lt_scalar le_scalar gt_scalar ge_scalar  f: number
//   gelu                                        i: tanh?
//   allclose                                    f: rtol, atol, equal_nan?
//   masked_fill masked_fill_ fill_              f: value
//   clamp clamp_                                f: low, high (-inf, inf: none)
//   arange_                                     f: first, step
//   cast                                        i: dtype
//   to_device                                   i: device
//   view reshape expand                         i: size... (-1: the rest; in expand, as it is)
//   transpose                                   i: dim, dim
//   permute                                     i: dim...
//   narrow                                      i: dim, first, length
//   select                                      i: dim, position
//   squeeze                                     i: dim... (none: all of size 1)
//   unsqueeze                                   i: dim
//   split                                       i: dim, size, size... (one: of every piece)
//   sum mean prod all any                       i: keepdim?, dim... (none: all)
//   var std                                     i: keepdim?, correction?, dim... (correction 1)
//   norm                                        i: keepdim?, dim...; f: p
//   max min logsumexp                           i: dim, keepdim?
//   argmax argmin                               i: dim?, keepdim?
//   cumsum softmax log_softmax                  i: dim
//   cat stack index_select gather scatter_ scatter_add_  i: dim
//   tile                                        i: times...
//   tril triu                                   i: diagonal?
//   layer_norm                                  i: dimensions (how many, the last ones); f: eps
//   rms_norm                                    f: eps
//   batch_norm                                  i: training; f: eps
//   conv2d                                      i: stride, stride, top, left, bottom, right, dilation, dilation, groups
//   cross_entropy                               i: reduction, ignore_index?; f: label_smoothing?
//   mse_loss                                    i: reduction
//   embedding                                   i: padding_idx?
//   dropout                                     f: p
//   attention                                   i: causal?; f: dropout_p?, scale? (0: 1 / sqrt of the head's size)
//   rand_                                       i: place?; f: low?, high? (0, 1; both or none)
//   randn_                                      i: place?; f: mean?, std? (0, 1; both or none)
//   randint_                                    i: place?; f: low, high (below it)
//   trunc_normal_                               i: place?; f: mean, std, low, high
// A place: t is a part of a larger tensor and begins there, so that shards get the numbers of the whole.

MS_API int ms_op_find(const char *name);   // -1 if there is none
MS_API int ms_op_count(void);              // operators are numbered from 0
MS_API const char *ms_op_name(int op);     // NULL: no such operator
MS_API const char *ms_op_samples(int op);  // sample inputs for the generic specs, "" if none
MS_API const char *ms_op_doc(int op);      // one line about the method it is, "" if none
MS_API int ms_op_inputs(int op);           // how many it takes at least
MS_API int ms_op_flags(int op);            // MS_OP_*
enum {
    MS_OP_DIFFERENTIABLE = 1,
    MS_OP_INPLACE = 2,
    MS_OP_VIEW = 4,
    MS_OP_RANDOM = 8,
    MS_OP_LOW = 16,
    MS_OP_WIDE = 32 /* under autocast: half, float32 */,
    MS_OP_ANY_DEVICE = 64 /* inputs may lie on several */,
    MS_OP_EACH = 128 /* element by element: a single number may lie on the CPU */,
    MS_OP_METHOD = 256 /* a method of tensors that takes the inputs alone; those of two with numbers: NAME_scalar */,
    MS_OP_ACTIVATION = 512 /* a function of nn.F, too */
};
MS_API int ms_op_has_kernel(int op, int device);  // does it run there?

MS_API ms_status ms_call_op(int op, ms_args *a);           // fills a->out and a->n_out
MS_API ms_id ms_call1(int op, ms_id a);                    // one input, one output
MS_API ms_id ms_call1f(int op, ms_id a, double f);         // and one number
MS_API ms_id ms_call2(int op, ms_id a, ms_id b);           // two tensors
MS_API ms_id ms_call3(int op, ms_id a, ms_id b, ms_id c);  // c may be 0

// Positions of a sparse tensor, int64 [D, N] on the cpu, checked against its D sizes. With unique: the different ones
// in order, and for each of the N the place of its like among them. Both are new tensors.
MS_API ms_status ms_sparse_coalesce(ms_id indices, const int64_t *sizes, ms_id *unique, ms_id *places);

// ---- random numbers ---------------------------------------------------------------------------

MS_API void ms_manual_seed(double seed);               // resets the offset too
MS_API void ms_rng_get(double *seed, double *offset);  // where the generator stands
MS_API void ms_rng_set(double seed, double offset);    // as ms_rng_get gave it

// ---- autograd ---------------------------------------------------------------------------------

typedef enum { MS_RUN_DONE, MS_RUN_EVENT, MS_RUN_FAILED } ms_run_state;

typedef enum {                        /* in                                   answer                               */
               MS_EV_TENSOR_HOOK = 1, /* gradient                             a gradient, or none                  */
               MS_EV_FUNCTION,        /* output gradients (0 where absent)    one or none (0) per input            */
               MS_EV_MODULE_BACKWARD, /* grad_in, grad_out                    grad_in, or none                     */
               MS_EV_LEAF_HOOK,       /* parameter (gradient landed)          -                                    */
               MS_EV_RECOMPUTE,       /* checkpoint                           its outputs, recomputed              */
               MS_EV_PRE_GATHER,      /* unit (all its extended parameters)   inputs to gather, by parameter       */
               MS_EV_POST_GATHER,     /* unit, gathered buffers, out          tensors, tensors to free (1st time)  */
               MS_EV_REDUCE,          /* unit, gradient, output               - (output has been filled)           */
               MS_EV_ALL_REDUCE       /* unit, reduced shard                  -                                    */
} ms_event_kind;

typedef struct {
    int32_t kind;
    int32_t n;   // tensors in `in`
    double key;  // which hook, function, checkpoint: the number it was registered with
    double unit;
    const ms_id *in;  // borrowed until the next call on the run
    int32_t n_first;  // MODULE_BACKWARD: how many of them are grad_in
} ms_event;

typedef struct ms_run ms_run;

// A backward from n roots. grads[k] may be 0 for one-element roots (then 1). NULL on failure.
MS_API ms_run *ms_backward(int n, const ms_id *roots, const ms_id *grads, int retain_graph);
// Gradients of n roots by m inputs instead; read them with ms_run_result after MS_RUN_DONE. Leaves' grads untouched.
MS_API ms_run *ms_grad(int n, const ms_id *roots, const ms_id *grads, int m, const ms_id *inputs, int retain_graph,
                       int allow_unused);
MS_API ms_run_state ms_run_next(ms_run *r, ms_event *ev);            // until MS_RUN_DONE
MS_API ms_status ms_run_answer(ms_run *r, const ms_id *ids, int n);  // to the last event; before ms_run_next
MS_API ms_id ms_run_result(ms_run *r, int k);                        // 0: unused input
MS_API void ms_run_free(ms_run *r);                                  // after DONE
MS_API void ms_run_abort(ms_run *r);                                 // cannot fail; ends the runs above it too; frees
MS_API void ms_run_fail(
    ms_run *r, const char *text);  // the same for an error of the script: peers that wait in r's collectives raise text
MS_API ms_run *ms_run_top(void);   // NULL when none is open

MS_API ms_status ms_set_requires_grad(ms_id t, int on);  // leaves only
MS_API ms_id ms_get_grad(ms_id t);                       // 0 = none; the same id at every read
MS_API ms_status ms_set_grad(ms_id t, ms_id grad);       // 0 clears
// Hooks: key is the caller's number, handed back in events. Returns a handle for ms_hook_remove, 0 on failure.
MS_API double ms_register_hook(ms_id t, double key);       // tensor hook
MS_API double ms_register_leaf_hook(ms_id t, double key);  // after the gradient landed
MS_API void ms_hook_remove(double handle);
// A custom function: outs (made without grad) become the outputs of a node over ins, whose backward is MS_EV_FUNCTION.
MS_API ms_status ms_function_record(double key, int n_in, const ms_id *in, int n_out, const ms_id *out);
// The same for a checkpointed region: backward is MS_EV_RECOMPUTE; the answer's graph ends at `detached`
// leaves that ms_checkpoint_inputs names (one per input, 0 where the input is no tensor or needs no gradient).
// The event runs with gradients on; the script sets the random offset of the first time itself, and the engine takes it
// back. The region's forward, without gradients, runs between begin (a token, 0: failed) and end; then it is recorded.
MS_API double ms_checkpoint_begin(void);
MS_API void ms_checkpoint_end(double token);
MS_API ms_status ms_checkpoint_record(double key, int n_in, const ms_id *in, int n_out, const ms_id *out);
MS_API ms_status ms_checkpoint_inputs(ms_run *r, int n, const ms_id *detached);
// A full backward hook on a module: identity nodes around it. Call once on the inputs, once on the outputs;
// each rewrites ids in place to the tensors to go on with.
MS_API double ms_module_hook_inputs(double key, int n, ms_id *in);
MS_API ms_status ms_module_hook_outputs(double token, int n, ms_id *out);

// Keys whose owners (tensor and leaf hooks, functions, checkpoints) died since the last call: Lua drops what it kept
// under them. A module hook's key is the caller's: it serves every call of the module and is never reported.
MS_API int ms_dead_keys(double *out, int capacity);

// ---- sharded units ----------------------------------------------------------------------------

// Handles are numbers > 0. Every function marked collective is called by all ranks of the group in the same order.
enum { MS_LAYOUT_ROWS, MS_LAYOUT_FLAT };
// What scripts see of a flat unit while it is sharded: its sharded parameters; one flat parameter (ms_unit_flat), which
// is the leaf that optimizers have; or the parameters themselves as this rank's 1-d pieces. The last two go by the
// rules of fsdp.FSDP.
enum { MS_VIEWS_SHARDED, MS_VIEWS_FLAT, MS_VIEWS_PIECES };
enum { MS_PREFETCH_PRE, MS_PREFETCH_POST, MS_PREFETCH_NONE };
typedef struct {
    double group;  // the shard group's id
    int32_t views, backward_prefetch, keep_low_precision_grads;
    int32_t offload;  // shards and their gradients stay on the CPU
    int32_t device;   // where they compute, wherever the parameters are now; -1: where the parameters are
    int32_t layout;
    int32_t reshard_after_forward;  // 1, 0, or -1: by the root rule (true for non-roots, false for the root)
    int32_t param_dtype, reduce_dtype, output_dtype;  // -1: as they are
    int32_t cast_forward_inputs;
    int32_t replicates, reshards_to;  // whether the two groups below count
    double replicate_group;           // ranks that hold the same shards: reduced gradients are all-reduced over them
    double reshard_group;  // after forward the whole is kept in slices by these ranks (consecutive members of group)
    const int32_t *dims;   // per parameter, the dimension that is cut (rows only; it divides evenly); NULL: the first
} ms_unit_options;

// Takes n parameters (whole, equal on all ranks, contiguous, of at least one dimension; on meta too) and keeps this
// rank's part of each. name: the module's, for errors. Shared parameters are passed once. n may be 0: hooks without
// parameters.
MS_API double ms_unit_new(const char *name, int n, const ms_id *params, const ms_unit_options *o);
// The script's owner of a unit: its C finalizer frees the unit when the module is collected.
typedef struct {
    double unit;
} ms_unit_owner;
MS_API void ms_unit_owner_release(ms_unit_owner *o);
MS_API ms_status ms_unit_set_name(double unit, const char *name);  // as the root sees it
MS_API void ms_unit_free(double unit);  // the module died: its parameters keep only their local parts
// Once, from the first forward: root and every unit below it (root among them), in module order.
MS_API ms_status ms_unit_lazy_init(double root, int n, const double *units);
MS_API int ms_unit_is_lazy(double unit);       // 1 once lazily initialised
MS_API double ms_unit_backwards(double unit);  // that went through its root's units to their end
MS_API double ms_unit_root(double unit);       // 0 before that
MS_API int ms_unit_is_gathered(double unit);   // are its parameters whole here?
MS_API int ms_unit_device(double unit);        // what it computes on
// Around forward. io: the tensors among inputs / outputs; entries are rewritten to the tensors to go on with.
// Collective. After an error in forward: ms_unit_forward_failed.
MS_API ms_status ms_unit_pre_forward(double unit, int n, ms_id *io);
MS_API ms_status ms_unit_post_forward(double unit, int n, ms_id *io);
MS_API void ms_unit_forward_failed(double unit);
// A unit of several modules has a pass around the forwards of those that run together: it is gathered, resharded and
// reduced once for all of them. begin, before each one's pre-forward: 1 where a pass begins, 0 where one is under way,
// -1 where there is none (a checkpoint runs again). end: behind the last module's post-forward, at the root's end where
// not all of them ran, or after an error.
MS_API int ms_unit_begin_pass(double unit);
MS_API ms_status ms_unit_end_pass(double unit, int failed);
MS_API ms_status ms_unit_unshard(double unit, int async);  // collective; async: ms_unit_wait later
MS_API ms_status ms_unit_wait(double unit);                // for its gather
MS_API ms_status ms_unit_reshard(double unit);             // releases the gathered parameters
enum {
    MS_UNIT_SYNC,
    MS_UNIT_RESHARD_AFTER_FORWARD,
    MS_UNIT_RESHARD_AFTER_BACKWARD,
    MS_UNIT_IS_LAST_BACKWARD,
    MS_UNIT_DIVIDE_FACTOR,
    MS_UNIT_UNSHARD_IN_BACKWARD,
    MS_UNIT_ALL_REDUCE,
    MS_UNIT_ALL_REDUCE_HOOK,  // the hook's key, 0: none
    MS_UNIT_CAST_FORWARD_INPUTS,
    MS_UNIT_FORWARD_PREFETCH,  // 0: nothing is gathered early when this unit is entered
    MS_UNIT_LIMIT_GATHERS,     // 0: not one unit is gathered early, but all that the order still has
    MS_UNIT_FULL_PRECISION,    // 1: gathered and reduced as it is stored, whatever its options said; the unit must be
                               // idle
    MS_UNIT_FAKE_GATHER,
    MS_UNIT_FAKE_REDUCE,  // 1: without the collective, to see what it costs; the numbers are wrong (flat units)
    MS_UNIT_CHECKED
};  // the script checks the order of units itself: collectives don't compare it, nothing is gathered early in forward
MS_API ms_status ms_unit_set(double unit, int what, double value);
// How gradients are reduced instead of by the unit itself: by the script (MS_EV_REDUCE: gradient, padded, and the shard
// to fill; unsharded ones are reduced in place and come alone), or divided and summed over a group of the script's
// choice, in a low-precision dtype or as they are.
enum { MS_COMM_NONE, MS_COMM_SCRIPT, MS_COMM_SUM, MS_COMM_LOW };
typedef struct {
    int32_t kind, low, lands, pad;  // LOW: the dtype that is sent, and the one in which the gradient lands
    double key;                     // SCRIPT
    double group, before, after;    // SUM, LOW: what divides before and after the sum
} ms_comm_hook;
MS_API ms_status ms_unit_set_comm_hook(double unit, const ms_comm_hook *h);  // NULL: the default reduction
// SUM and LOW by hand: out = this rank's block of the sum of grad, or grad itself where out is 0. Collective.
MS_API ms_status ms_comm_hook_run(const ms_comm_hook *h, ms_id grad, ms_id out);
MS_API void ms_comm_division(int n, double *before, double *after);  // the factors for n ranks
// Whole parameters in the stored dtype for the script to read and write (flat units only). Collective; not inside a
// forward or backward. show 0: takes part, but keeps its own pieces in view; 2: shows them on the CPU. Ending it with
// writeback keeps what was written.
MS_API ms_status ms_unit_summon(double unit, int show);
MS_API ms_status ms_unit_unsummon(double unit, int writeback);
MS_API int ms_unit_is_idle(double unit);  // not between its forward and its backward phases
MS_API ms_status ms_unit_set_prefetch(double unit, int backward, int n, const double *units);
// The parameters are final until the next forward: the first unit of the latest forward that has some is gathered from
// here on. Collective.
MS_API ms_status ms_unit_gather_first(double unit);
// A managed parameter's unit (0: not managed), this rank's part (the same id for life), and the whole (collective,
// detached, stored dtype).
MS_API double ms_unit_of(ms_id p);
MS_API double ms_unit_flat_offset(
    ms_id p);  // of a flat unit's parameter: where its piece begins in this rank's part, in elements
MS_API ms_id ms_unit_flat(double unit);     // MS_VIEWS_FLAT: its flat parameter (the same id for life), 1-d, padded
MS_API ms_id ms_unit_local(ms_id p);        // this rank's part
MS_API ms_id ms_unit_full_tensor(ms_id p);  // collective; a new tensor
MS_API ms_status ms_unit_check_reduced(
    ms_id p);  // an error where gradients of p, or some of them, wait for a backward that reduces them
MS_API ms_status
ms_unit_drop_saved_grad(ms_id p);  // what a gradient of p that is not reduced has put out of sight; no-op for others
MS_API ms_id ms_unit_full_grad(ms_id p);  // of its gradient; 0 without error text when there is none
// A tensor of p's whole shape that operators refuse as they refuse p itself while it is sharded: what stands for a
// sharded gradient or copy in scripts. And the whole of such a thing, whose part on this rank is `part` (collective).
MS_API ms_id ms_unit_stand_in(ms_id p, int dtype);
MS_API ms_id ms_unit_gather_like(ms_id p, ms_id part);
// rows: of dimension `dim`, of which this rank has `here` from `first` on; outer and row_numel: elements before and
// behind it.
typedef struct {
    double unit;
    int32_t layout, world, rank, dtype, dim, pad;
    int64_t first, here, rows, row_numel, outer;
} ms_shard_info;
MS_API ms_status ms_unit_shard_info(ms_id p, ms_shard_info *out);  // where this rank's part lies in the whole
// Moves the shards to a device and dtype (-1: keep); keep_values 0 leaves them uninitialised (to_empty).
MS_API ms_status ms_unit_to(double unit, int device, int dtype, int keep_values);
// Parameter j of the unit (as in ms_unit_new) becomes p, of the same shape and dtype, with this rank's part of p's
// values; the former one is no parameter of the unit any more. The unit must be idle.
MS_API ms_status ms_unit_replace(double unit, int j, ms_id p);
// All-gather extensions: parameters (by position in ms_unit_new; extension e has count[e] of them, one after the other
// in `which`) of which the script says what is gathered, and what the whole is made of. Their units are gathered by
// runs: MS_EV_PRE_GATHER asks for every extension's inputs (ms_unit_extension_inputs), MS_EV_POST_GATHER says that
// outputs are there; at the first gather the script answers it with ms_unit_extension_whole, later it fills that
// tensor. n 0 takes the extensions away; so does ms_unit_to.
MS_API ms_status ms_unit_extend(double unit, int n, const int32_t *count, const int32_t *which);
MS_API ms_run *ms_unit_gather_run(double unit, int early,
                                  int prefetched);  // to whole parameters; early: only until it is under way
MS_API int ms_unit_prefetches(double unit, double *units,
                              int capacity);  // extended units to gather early when this one's forward begins
MS_API ms_status ms_unit_extension_inputs(double unit, int e, int n, const ms_id *in);
MS_API int ms_unit_extension_outputs(double unit, int e, ms_id *out, int capacity);  // as many as inputs; -1: failed
MS_API ms_status ms_unit_extension_whole(double unit, int e, int n_whole, const ms_id *whole, int n_free,
                                         const ms_id *freed);
// What the schedule did: recording on/off; entries in order. prefetched only for unshard.
enum { MS_UNIT_EV_UNSHARD, MS_UNIT_EV_RESHARD, MS_UNIT_EV_POST_BACKWARD };
typedef struct {
    int32_t event, prefetched;
    const char *unit;
} ms_unit_event;
MS_API void ms_unit_record(int on);  // on: starts empty
MS_API int ms_unit_recorded(ms_unit_event *out, int capacity);

// ---- optimizers -------------------------------------------------------------------------------

typedef enum { MS_SGD, MS_ADAM, MS_ADAMW } ms_optim_kind;  // places of these in the table; of any: ms_optim_at
typedef struct {
    int32_t kind, nesterov, amsgrad, reserved;
    double lr, weight_decay;
    double momentum, dampening;  // SGD
    double beta1, beta2, eps;    // Adam, AdamW
    double more[5];              // of optimizers that the table has besides
} ms_optim_options;

// The table of optimizers: one row each, from a header of kernels/formulas/optim.
enum { MS_OPTIM_STATES = 3, MS_OPTIM_OPTIONS = 8 };
typedef struct {
    const char *name, *doc;  // NULL: there are no more; its meaning
    int32_t at, count;       // its place in ms_optim_options, in bytes; 1, 2: numbers; 0, -1: a flag, int32_t or double
    double value[2];         // defaults
    double low, below;       // low <= number < below, at construction; infinite: no limit
    int32_t later, unused;   // the limits hold for changes between steps, too
} ms_optim_option;
typedef struct {
    const char *name;                     // of the class: "AdamW"
    const char *doc;                      // its formula in words, with the source
    const char *states[MS_OPTIM_STATES];  // names of what it keeps for a parameter; NULL: there are no more
    uint32_t needed, reserved;            // bits of those that it keeps whatever the options are
    ms_optim_option options[MS_OPTIM_OPTIONS];
} ms_optim_row;
MS_API const ms_optim_row *ms_optim_at(int kind);            // NULL: there is none
MS_API ms_status ms_optim_check(const ms_optim_options *o);  // of options together
MS_API int ms_optim_is_plain(const ms_optim_options *o);     // is a step p -= lr * g and nothing else?

// One fused pass over the n leaves that have a gradient; the others are left alone. A sharded parameter stands for its
// local part. state: MS_OPTIM_STATES ids a leaf, as its row names them, 0 until they are made, unscoped, at the leaf's
// first step; steps: how many each leaf has taken. On failure nothing was changed.
MS_API ms_status ms_optim_step(const ms_optim_options *o, int n, const ms_id *leaves, ms_id *state, double *steps);
// The same for several groups of leaves: all of them step, or none.
typedef struct {
    const ms_optim_options *options;
    int64_t n;
    const ms_id *leaves;
    ms_id *state;   // MS_OPTIM_STATES x n
    double *steps;  // n
} ms_optim_group;
MS_API ms_status ms_optim_step_groups(int n_groups, const ms_optim_group *groups);
// Norm of order p (> 0, may be infinite) of all their gradients over all ranks, before they are scaled down to max_norm
// (infinite: only measured): a new 0-dim tensor. Collective where some are sharded.
MS_API ms_id ms_clip_grad_norm(int n, const ms_id *leaves, double max_norm, double p);

// ---- dist -------------------------------------------------------------------------------------

// What the environment says of this process: known before the ranks have met.
typedef struct {
    const char *name;                              // "mpirun", "srun", "PMIx", "mpiexec", "torchrun"; "": no launcher
    int32_t rank, world, local_rank, local_world;  // local: on this node. world, local_world 0: it does not say
    char reason[200];                              // why its variables make no sense; "": they do
} ms_launch;
MS_API void ms_launcher(ms_launch *out);  // reads the environment

// Process groups are numbers: 0 is the world, 1 this rank alone. Ranks in arguments are the world's. Before
// ms_dist_init, and without a launcher, the world is this process alone and collectives are copies.
MS_API ms_status ms_dist_init(const char *backend,
                              double timeout);  // "auto", "mpi", "self"; NULL: "auto". timeout in seconds, 0: as it is
MS_API int ms_dist_is_initialized(void);        // has this process joined?
MS_API void ms_dist_finalize(void);             // also automatic when the process ends with code 0
MS_API const char *ms_dist_backend(void);       // "self" or "mpi"
MS_API const char *ms_dist_launcher(void);      // ms_launcher's name
MS_API ms_status ms_dist_free_group(double group, const char *site);  // collective over the world
MS_API double ms_dist_new_group(int n, const int32_t *ranks,
                                const char *site);  // collective over the world; < 0: failed
MS_API int ms_dist_rank(double group);              // -1: not a member, -2: no such group (ms_error)
MS_API int ms_dist_size(double group);              // ranks of the group
MS_API int ms_dist_member(double group, int k);     // world rank of its member k
MS_API int ms_dist_local_rank(void);                // among the ranks of this node
MS_API int ms_dist_local_size(void);                // ranks of this node
MS_API int ms_dist_nodes(void);                     // number of nodes

enum {
    MS_DIST_BARRIER,
    MS_DIST_ALL_REDUCE,
    MS_DIST_ALL_GATHER,
    MS_DIST_REDUCE_SCATTER,
    MS_DIST_BROADCAST,
    MS_DIST_REDUCE,
    MS_DIST_GATHER,
    MS_DIST_SCATTER,
    MS_DIST_ALL_TO_ALL,
    MS_DIST_SEND,
    MS_DIST_RECV
};
enum { MS_DIST_SUM, MS_DIST_AVG, MS_DIST_MAX, MS_DIST_MIN, MS_DIST_PROD };

typedef struct ms_work ms_work;  // an asynchronous collective
typedef struct {
    int32_t op, reduction, root, async;  // root: source or destination; of send and recv the peer
    double group;
    ms_id out, in;   // all_reduce, broadcast, reduce, recv: out only; send: in only. gather: out on the root only
    int32_t n_list;  // scatter on the root: its tensors by member
    const ms_id *list;
    const char *site;  // the script's "file:line", for messages; NULL: unknown
} ms_dist_call;
// Runs a collective, or queues it and sets *work (NULL when there was nothing to wait for).
MS_API ms_status ms_dist_run(const ms_dist_call *c, ms_work **work);
MS_API ms_status ms_work_wait(ms_work *w);  // NULL allowed
MS_API int ms_work_done(ms_work *w);        // never waits
MS_API void ms_work_free(ms_work *w);       // the collective itself goes on

// Bytes of any length. all: every member's, one after the other; lengths: by member; borrowed until the next call.
MS_API ms_status ms_dist_gather_bytes(double group, const char *data, double n, const char *site, const char **all,
                                      const double **lengths);
// *bytes and *n: in, those to send, read on rank `source` alone; out, what it sent, borrowed until the next call.
MS_API ms_status ms_dist_broadcast_bytes(double group, int source, const char *site, const char **bytes, double *n);

// The ledger of collectives issued here: recording nests; entries are kept until the outermost end.
typedef struct {
    int32_t op, dtype;
    double input_numel, output_numel, bytes, group;  // bytes: of the larger one of input and output
    const char *unit;                                // NULL: none
} ms_ledger_entry;
MS_API int ms_dist_record_begin(void);                             // number of entries so far
MS_API int ms_dist_record_count(void);                             // entries so far
MS_API ms_status ms_dist_record_get(int k, ms_ledger_entry *out);  // entry k, from 0
MS_API void ms_dist_record_end(void);                              // of the innermost begin

MS_API void ms_dist_set_timeout(double seconds);  // of waiting for a peer
MS_API void ms_dist_set_step(double step);        // of ms.steps, -1: none; compared over ranks
MS_API void ms_dist_set_delay(
    int op, double seconds);  // for specs: collectives (op -1: all) take that much longer on this rank
MS_API void ms_dist_set_debug_level(int level);  // 0 off, 1 info, 2 detail
MS_API int ms_dist_debug_level(void);            // 0 off, 1 info, 2 detail
MS_API double ms_dist_errors(void);              // published errors that this rank has met
MS_API double ms_dist_mismatches(void);  // collectives that failed here because members asked for different things
// Work that began when there were `since` of them died here, and the script goes on: peers that wait for it raise this.
MS_API void ms_dist_publish_error(const char *text, double since);
// A collective of this group (below 0: send or receive, -1 - from * world size - to) was refused before it was issued,
// and the script goes on: the peers' calls that belong to it fail with this text. since: as above.
MS_API void ms_dist_refused(double group, const char *text, const char *site, double since);
// MPI's own float32 collective on raw memory, to measure beside it: 0 all-gather, 1 reduce-scatter, 2 all-reduce.
MS_API ms_status ms_dist_mpi_own(int op, void *out, const void *in, double count);

// ---- files ------------------------------------------------------------------------------------

// Writing tensors as safetensors: new, metadata, declare every tensor, write each in any order (one at a time is
// enough: a caller needs no more than one whole tensor), commit. The file appears at commit, whole and on disk,
// or not at all; abort frees the saver, before or after commit. NULL on failure.
typedef struct ms_saver ms_saver;
MS_API ms_saver *ms_saver_new(const char *path);
MS_API ms_status ms_saver_metadata(ms_saver *s, const char *key, const char *value);
MS_API ms_status ms_saver_declare(ms_saver *s, const char *name, int dtype, int ndim, const int64_t *shape);
MS_API ms_status ms_saver_write(ms_saver *s, const char *name, ms_id t);
MS_API ms_status ms_saver_commit(ms_saver *s);
MS_API void ms_saver_abort(ms_saver *s);
MS_API void ms_saver_sum(const ms_saver *s,
                         char *out);  // after commit: 16 hexadecimal digits and a 0, which stand for the whole file

// Reading: open checks the whole header. Tensors are numbered in order of their names. With verify, what differs from
// the sums that savers write into the header is an error, here and in what is read; files without sums are read as they
// are.
typedef struct ms_loader ms_loader;
MS_API ms_loader *ms_loader_open(const char *path, int verify);
MS_API const char *ms_loader_sum(const ms_loader *l);  // ms_saver_sum's digits; empty without verify, or sums
MS_API void ms_loader_close(ms_loader *l);
MS_API int ms_loader_count(const ms_loader *l);
MS_API const char *ms_loader_name(const ms_loader *l, int k);
MS_API int ms_loader_find(const ms_loader *l, const char *name);               // -1: none
MS_API ms_status ms_loader_info(const ms_loader *l, int k, ms_info *out);      // dtype, shape
MS_API ms_id ms_loader_read(ms_loader *l, int k, double first, double count);  // rows of dimension 0; count -1: all
MS_API int ms_loader_metadata_count(const ms_loader *l);
MS_API const char *ms_loader_metadata_key(const ms_loader *l, int k);
MS_API const char *ms_loader_metadata_value(const ms_loader *l, int k);

// Ranges of elements of many tensors at once: want them all (they land in dst, contiguous and of the same dtype, from
// element `at` on), then fetch. With whole (17 bytes), the whole file is read and verified, once and in order; where it
// has no sums, whole gets its XXH64.
MS_API ms_status ms_loader_want(ms_loader *l, int k, double first, double count, ms_id dst, double at);
MS_API ms_status ms_loader_fetch(ms_loader *l, char *whole);

// Small files: a new one, on disk when it returns; one that is read (at most 1 GiB; out: ms_file_free's).
MS_API ms_status ms_file_put(const char *path, const char *data, double n);
MS_API ms_status ms_file_get(const char *path, const char *who, char **out, double *n);
MS_API void ms_file_free(char *data);
MS_API void ms_file_sum(const char *data, double n, char *out);  // XXH64: 16 hexadecimal digits and a 0

// A folder that is replaced as a whole: new (path is resolved, links included; nothing is made yet), make (a temporary
// folder beside it, of which `made` is filled in), commit (the finished folder gets the name, on disk; what had the
// name is in the temporary one), free (removes the temporary folder with its files; later: on the side, until the next
// one is freed or the process ends). look, before the caller checks what has the name: commit replaces that and nothing
// else. It is called by new, too. Where the file system cannot exchange two folders, commit changes nothing of a folder
// that is there and sets *inside: the caller replaces its files, by move_in (a finished file gets the name `to` there,
// in the place of what has it) and remove. make removes temporary folders of processes of this
// host that have ended.
typedef struct ms_folder ms_folder;
MS_API ms_folder *ms_folder_new(const char *path);
MS_API const char *ms_folder_path(const ms_folder *f);
MS_API const char *ms_folder_made(const ms_folder *f);
MS_API ms_status ms_folder_look(ms_folder *f);
MS_API ms_status ms_folder_make(ms_folder *f);
MS_API ms_status ms_folder_commit(ms_folder *f, int later, int *inside);
MS_API ms_status ms_folder_move_in(ms_folder *f, const char *from, const char *to);
MS_API ms_status ms_folder_remove(ms_folder *f, const char *name);
MS_API void ms_folder_free(ms_folder *f);
MS_API ms_status ms_folder_sync(const char *path);
MS_API ms_status ms_folder_list(const char *path, const char *who, char **out,
                                double *n);  // each name and a '/'; out: ms_file_free's

// Token files: ranges of memory-mapped files, one after the other, as one sequence of token ids.
typedef struct ms_tokens ms_tokens;
MS_API ms_tokens *ms_tokens_new(void);
MS_API void ms_tokens_free(ms_tokens *t);
MS_API ms_status ms_tokens_add(ms_tokens *t, const char *path, int token_bytes, double offset, double count);
MS_API double ms_tokens_count(const ms_tokens *t);
MS_API ms_status ms_tokens_read(const ms_tokens *t, double first, double count, uint8_t *out);  // 1-byte tokens
// Place of j in a shuffle of [0, n), a whole number below n, a number from 0 to 1: they follow from three whole numbers
// (a seed, an epoch …).
MS_API double ms_shuffle(double a, double b, double c, double j, double n);
MS_API double ms_hash_share(double a, double b, double c);
MS_API double ms_hash_below(double a, double b, double c, double n);
// out[0]: n sequences of `length` ids from the given places (0 past the end); out[1]: for each the id that follows, or
// `ignore` at the first skip[k] positions and after scored[k] more. skip and scored may be NULL. int64 [n, length].
MS_API ms_status ms_tokens_batch(const ms_tokens *t, int n, const double *starts, const double *skip,
                                 const double *scored, int length, double ignore, ms_id *out);

// ---- profiler ---------------------------------------------------------------------------------

typedef enum {
    MS_RANGE_OP,
    MS_RANGE_BACKWARD,
    MS_RANGE_MODULE,
    MS_RANGE_COLLECTIVE,
    MS_RANGE_WAIT,
    MS_RANGE_FSDP,
    MS_RANGE_OPTIMIZER,
    MS_RANGE_STEP,
    MS_RANGE_USER,
    MS_RANGES
} ms_range_kind;

typedef struct {
    const char *name, *detail;  // detail: shapes of an operator's inputs, a collective's unit; "" without
    double start, duration;     // seconds of the monotonic clock (ms_time)
    double allocated, memory;   // bytes of all devices at its end, and how many more than at its start; 0 on a queue
    int32_t kind, lane;         // lane: the script's thread 0, the queues 1 ...
} ms_range;

// What was recorded, ranges in the order in which they ended: on one lane those inside another stand before it.
typedef struct {
    ms_range *ranges;
    double n, dropped;    // dropped: had no room
    double begun, ended;  // seconds
} ms_trace;

enum {
    MS_TRACE_SHAPES = 1,
    MS_TRACE_MODULES = 2
};  // what is recorded as well: shapes of operators' inputs, calls of modules
// room: ranges, made at once. NULL on failure; the caller frees it. Several may record at a time.
MS_API ms_trace *ms_trace_start(double room, int what);
MS_API void ms_trace_stop(ms_trace *t);  // what was recorded may be read from then on
MS_API void ms_trace_free(ms_trace *t);
MS_API int ms_trace_wanted(void);                                               // by those that record now, together
MS_API ms_status ms_trace_save(const ms_trace *t, const char *path, int rank);  // Chrome's trace format
// Stops, saves and frees it at the end of the process, and says so on stderr.
MS_API void ms_trace_save_at_exit(ms_trace *t, const char *path, int rank);
// A range of the script's own: open gives its start (0: nothing is recorded) and what was allocated, close takes them;
// copies the texts.
MS_API double ms_range_open(double *allocated);
MS_API void ms_range_close(double start, double allocated, int kind, const char *name, const char *detail);
MS_API const char *ms_range_category(int kind);  // "operator" ...
MS_API const char *ms_range_lane(int lane);      // "script", "gather queue" ...

#endif  // MS_TYPES_ONLY

#ifdef __cplusplus
}
#endif

#endif
