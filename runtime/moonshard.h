// SPDX-License-Identifier: MIT
// moonshard.h -- the engine's public interface, and its only public header.
//
// LuaJIT's cdef is generated from this file at build time (preprocessed, without comments). The header therefore uses
// only what the FFI can parse: enums instead of macros, opaque types, no structs by value, no callbacks.
//
// Conventions:
//  * Tensors are named by ids: plain numbers made of a slot and a generation, never pointers. An id
//    is valid until its scope ends or it is released; using it later fails with MS_ERELEASED. 0 means no tensor.
//    Negative numbers are reserved for scripts (Lua's tensor classes); every function refuses them.
//  * A function that returns an id returns 0 on failure; one that returns ms_status returns MS_OK or
//    a code. In both cases ms_error() then gives the reason. A call that refuses an argument changes nothing. No failed
//    call leaks memory.
//  * Dimensions and positions are 0-based in C; Lua translates.
//  * Only the thread that called ms_init() may call the engine; ms_interrupt() may be called by any thread.
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
    MS_ENOMEM,       // out of memory: the text names the operator and the sizes
    MS_ERELEASED,    // the id's tensor was released
    MS_ESTATE,       // the call is not allowed now: sharded parameter, freed graph, modified saved tensor
    MS_ECOMM,        // a collective failed: mismatch, missing rank, error of a peer
    MS_EIO,          // a file operation failed
    MS_EINTR,        // Ctrl-C
    MS_EUNSUPPORTED  // the device is not available, or the call is not supported for this device or dtype
} ms_status;

typedef enum { MS_F32, MS_F64, MS_F16, MS_BF16, MS_I64, MS_I32, MS_U8, MS_BOOL, MS_I8, MS_I16, MS_DTYPES } ms_dtype;

typedef enum { MS_CPU, MS_CUDA, MS_META, MS_DEVICES } ms_device_type;

enum { MS_VERSION = 1, MS_MAX_DIMS = 8, MS_MAX_IN = 64, MS_MAX_OUT = 64, MS_MAX_I = 24, MS_MAX_F = 8 };

// ---- engine -----------------------------------------------------------------------------------

// State that Lua reads without a call. One struct per process. Lua may write interrupted, gc_wanted, memory_module,
// memory_limit, gc_limit and debug_level; only the engine writes the other fields.
typedef struct {
    int32_t scope;        // innermost open scope; 0: none (tensors made now are unscoped)
    int32_t grad_mode;    // 1: operators record the graph; use ms_set_grad_mode
    int32_t interrupted;  // set by ms_interrupt (a signal handler), cleared when the interrupt is reported
    int32_t gc_wanted;    // set when memory has grown by the soft limit: Lua runs a garbage collection, then clears it
    int32_t autocast;     // dtype + 1 of ms.amp.autocast; 0: off
    int32_t run_depth;    // number of open runs
    // Dtype of tensors made from numbers without a dtype, and of results of exp, sqrt, ... of integers; use
    // ms_set_default_dtype.
    int32_t default_dtype;
    int32_t sigints;  // number of Ctrl-Cs caught so far
    // Number of failures of calls that communicate that this rank has met, and of recoveries (ms_dist_recover). -1
    // before dist.init.
    int32_t dist_failures;
    int32_t memory_waiting;  // number of allocations whose place in the script ms_memory_site has not set yet
    // Number of the module whose forward or backward runs, for the memory history; 0: none. The script sets it around
    // each forward; in backward, each operator runs with the number under which it was recorded.
    int32_t memory_module;
    int32_t debug_level;  // of collectives: 0 off, 1 info, 2 detail; ms_init reads it from MOONSHARD_DEBUG
    double memory_limit;  // of each device, in bytes: allocations beyond it fail with MS_ENOMEM; 0: no limit
    double gc_limit;      // soft limit, in bytes: growth of memory between garbage collections
} ms_state;

MS_API int ms_version(void);               // version of this interface: MS_VERSION at the time the library was built
MS_API const char *ms_release_name(void);  // version of the release: "1.1.0", or "1.1.0-dev" before that release
MS_API ms_status ms_init(void);            // idempotent
MS_API ms_state *ms_get_state(void);       // the same struct at every call
MS_API const char *ms_error(void);         // message of the last failure on this thread
MS_API int ms_error_code(void);            // ms_status of the last failure
MS_API void ms_interrupt(void);            // async-signal-safe; makes the next operator, run or wait fail with MS_EINTR
// on 1: SIGINT calls ms_interrupt; if no call has failed with MS_EINTR 1 s later, the next SIGINT ends the process. 0:
// restores the previous handler.
MS_API void ms_catch_sigint(int on);
// on 1: SIGUSR1, SIGUSR2 and SIGTERM are recorded; 0: they end the process.
MS_API void ms_catch_checkpoint_signals(int on);
// The checkpoint signals received since the last call. 0: none, 1: SIGUSR1, 2: SIGUSR2 or SIGTERM, or mpirun ends the
// job. *at is the time (ms_time) of the latest.
MS_API int ms_checkpoint_signal(double *at);
MS_API int ms_num_threads(void);               // number of threads for operators on the CPU
MS_API void ms_set_num_threads(int n);         // values below 1 count as 1, above 1024 as 1024
MS_API double ms_time(void);                   // time of a monotonic clock, in seconds
MS_API const char *ms_cpu_isa(void);           // of the kernels in use: "v1", "v3", "v4" of x86-64; on ARM "neon"
MS_API int ms_set_grad_mode(int on);           // returns the previous mode
MS_API int ms_set_autocast(int dtype_plus_1);  // returns the previous value
MS_API int ms_set_default_dtype(int dtype);    // a floating-point dtype; returns the previous one

typedef enum { MS_NAME_DTYPE, MS_NAME_MEMORY, MS_NAME_RANGE, MS_NAME_LANE } ms_named;
// The name of an ms_dtype ("float32"), an ms_memory_kind ("parameters"), or a range's kind ("operator") or lane
// ("gather queue"). NULL if there is none.
MS_API const char *ms_name_of(ms_named what, int k);
MS_API int ms_dtype_size(int dtype);  // in bytes

// ---- memory -----------------------------------------------------------------------------------

// What memory holds. MS_MEMORY_GATHERED: whole parameters of sharded units. MS_MEMORY_OTHER: all else, such as
// activations, buffers and temporary results.
typedef enum {
    MS_MEMORY_OTHER,
    MS_MEMORY_PARAMETERS,
    MS_MEMORY_GRADIENTS,
    MS_MEMORY_OPTIMIZER,
    MS_MEMORY_GATHERED,
    MS_MEMORY_KINDS
} ms_memory_kind;

typedef struct {
    double allocated, peak_allocated, reserved, peak_reserved, peak_scratch, live_tensors;
    double parameters, gradients, optimizer, gathered;  // parts of `allocated`
} ms_memory;

// allocated: exact sum of the bytes that tensors requested; reserved: bytes taken from the system or driver, including
// free blocks; live_tensors: number of tensors alive in the engine. peak_scratch: most bytes that the CPU's kernels
// used while they ran, beyond tensors; unlike `allocated` it depends on the processor, its caches and the number of
// threads.
MS_API ms_status ms_memory_stats(int device, ms_memory *out);
MS_API void ms_reset_peak_memory(int device);  // sets the peaks to the current values
// The memory history. on 1: records each allocation from now on. 0: records no more allocations, but still notes when
// the recorded ones are freed.
MS_API void ms_memory_history(int on);
// Attributes the allocations since the last call to a place in the script, a number that the script chooses.
MS_API void ms_memory_site(double site);
// Live memory of one place, module, purpose, kind and device, and its part of the device's peak, in bytes and blocks.
typedef struct {
    const char *what;  // an operator's name, or the purpose
    double site, bytes, peak_bytes;
    int32_t blocks, peak_blocks, kind, device, module;  // kind: an ms_memory_kind
    uint32_t epoch;                                     // used by the engine
} ms_memory_record;
// Reads what is in use on a device now, what was in use at the peak since the history began or ms_reset_peak_memory was
// called (only `allocated` and its parts are set), and the first `room` records of the device. Returns the number of
// all its records. The pointers may be NULL.
MS_API double ms_memory_snapshot(int device, ms_memory *now, ms_memory *peak, ms_memory_record *out, double room);
MS_API void ms_empty_cache(void);  // returns unused reserved memory to the system or driver

// CPU kernels define MS_TYPES_ONLY, so that a function added below does not invalidate their ccache entries.
#ifndef MS_TYPES_ONLY

// ---- the GPU ----------------------------------------------------------------------------------

MS_API int ms_cuda_count(void);                   // number of devices
MS_API const char *ms_cuda_why(void);             // the reason why there is no device; "" if there is one
MS_API const char *ms_cuda_name(int index);       // NULL if there is no such device (see ms_error)
MS_API ms_status ms_cuda_synchronize(int index);  // waits for all work queued on the device
// Copies src to dst on the copy stream, between the CPU and a GPU or within one device. Returns at once; the next
// operator on dst waits for the copy, and so does the next one that changes src.
MS_API ms_status ms_copy_async(ms_id dst, ms_id src);
// Pins t's memory for copies to a GPU, if the tensor is on the CPU and its block has 256 KiB or more: smaller blocks
// share pages. The block stays pinned when the tensor is released, and tensors of its size use it again. A copy from
// pinned memory is queued: the host does not wait; operators that change the source wait.
MS_API ms_status ms_pin(ms_id t);
MS_API int ms_is_pinned(ms_id t);

// ---- tensors ----------------------------------------------------------------------------------

// A device argument is type | index << 8 (cuda:1 is MS_CUDA | 1 << 8).
// offset and stride are in elements. version: number of changes in place. sharded: 1 while operators refuse the
// parameter.
typedef struct {
    int32_t dtype, device, ndim, requires_grad, is_leaf, is_contiguous, version, is_param, sharded, has_grad;
    int64_t numel, offset;
    int64_t shape[8], stride[8];
} ms_info;

MS_API ms_id ms_empty(int dtype, int device, int ndim, const int64_t *shape);  // uninitialised
// Makes a tensor on the CPU and converts the values to dtype.
MS_API ms_id ms_from_data(int dtype, int ndim, const int64_t *shape, const double *values);
MS_API ms_id ms_from_int64(int ndim, const int64_t *shape, const int64_t *values);  // the same for int64, exact
// Makes a tensor on the CPU that uses the caller's memory; the caller keeps data alive.
MS_API ms_id ms_from_pointer(void *data, int dtype, int ndim, const int64_t *shape);
MS_API ms_status ms_tensor_info(ms_id t, ms_info *out);  // MS_ERELEASED after t's release
MS_API void *ms_data_ptr(ms_id t);                       // address of the first element; waits for queued writes to it
// Reads all elements in row-major order, converted to double (int64, too). capacity: number of elements of out.
// Every nan is the quiet NaN without sign and payload.
MS_API ms_status ms_read(ms_id t, double *out, double capacity);
MS_API ms_status ms_read_int64(ms_id t, int64_t *out, double capacity);  // the same for an int64 tensor, exact
MS_API ms_status ms_item(ms_id t, double *out);  // the value of a tensor of one element, as ms_read converts it
MS_API int ms_is_alive(ms_id t);                 // 0 once t was released, by ms_release or by its scope
MS_API void ms_release(ms_id t);                 // no-op if t was released already
MS_API ms_status ms_keep(ms_id t);               // removes t from its scope: t lives until it is released
MS_API double ms_scope_of(ms_id t);              // a number that identifies t's scope; 0: unscoped or released
// Moves an unscoped tensor without an owner into the innermost scope, if a scope is open.
MS_API void ms_adopt(ms_id t);
MS_API void ms_drop(ms_id t);     // releases t if it belongs to the innermost scope and has no owner; otherwise a no-op
MS_API ms_id ms_detach(ms_id t);  // a tensor on the same storage, without graph
// For copying tensors that share a storage: ms_storage_key gives the key of t's storage (0: only t uses it),
// ms_storage_copy a copy of all its bytes (uint8 [n]), and ms_view_alike a view of such a copy with t's shape, strides,
// offset and dtype (no graph).
MS_API double ms_storage_key(ms_id t);
MS_API ms_id ms_storage_copy(ms_id t);
MS_API ms_id ms_view_alike(ms_id t, ms_id copy);
// Makes t (a leaf) a view of src's storage, with src's shape and dtype.
MS_API ms_status ms_set_data(ms_id t, ms_id src);
MS_API int ms_same_storage(ms_id a, ms_id b);             // 1 if both are views of one storage
MS_API int ms_storage_is_shared(ms_id t);                 // 1 if anything besides t holds its storage
MS_API ms_id ms_param_new(ms_id t, int requires_grad);    // a new unscoped leaf that shares t's storage
MS_API ms_status ms_set_name(ms_id t, const char *name);  // a name shown in errors ("blocks.0.weight")

// ---- scopes -----------------------------------------------------------------------------------

// Opens a scope in the current chain and returns its handle, > 0. The caller keeps name alive while the scope is open.
MS_API double ms_scope_open(const char *name);
// Closes the scope and all scopes left open inside it. The tensors keep[0..n) move to the enclosing scope, or become
// unscoped. No-op if the scope is closed already.
MS_API void ms_scope_close(double scope, const ms_id *keep, int n);
MS_API int ms_scope_is_open(double scope);  // 1 until the scope is closed
// A chain is the stack of one coroutine's scopes; 0 is the main chain. ms_chain_switch returns the previous one.
MS_API int ms_chain_new(void);
MS_API int ms_chain_switch(int chain);
MS_API void ms_chain_free(int chain);

// Lua's owner of an unscoped tensor. Its finalizer (ffi.gc) is a C function: a closure would keep the tensor alive.
typedef struct {
    ms_id id;
} ms_owner;
MS_API void ms_owner_init(ms_owner *o, ms_id id);  // to be called once, before ffi.gc
MS_API void ms_owner_release(ms_owner *o);         // the finalizer: releases the tensor

// ---- operators --------------------------------------------------------------------------------

// Arguments of an operator call. The caller owns the struct and may reuse it; the engine reads n_in, n_i and n_f and
// that many entries, and writes n_out and out[].
typedef struct {
    int32_t n_in, n_out, n_i, n_f;
    ms_id in[64];
    ms_id out[64];
    int64_t i[24];
    double f[8];
} ms_args;

// An operator of the table. takes: the names of its integers i[] and, behind a semicolon, of its numbers f[], for
// example "keepdim?, dim...; correction=1"; a bar ends the names of tensors, "idx | dim". name? is optional, and 0
// unless given; name=1 is optional with this default; name... is any number of values; what follows one that is left
// out is left out, too. Dimensions and positions count from 0, negative ones from the end; keepdim, causal, training
// and the like are 0 or 1; the reduction of a loss is 0 (none), 1 (mean) or 2 (sum). Operators whose names end in
// _backward are internal, and do not state what they take.
typedef struct {
    const char *name;
    const char *takes, *doc;         // doc: what it computes; "" if the name says it. docs/api/c.md has a table
    const char *samples;             // sample inputs for the generic specs (ops/op.h)
    int32_t flags;                   // MS_OP_*
    int8_t inputs, most_inputs;      // the smallest and largest number of tensors; 0 in in[] is an absent one
    int8_t integers, most_integers;  // of i[]
    int8_t numbers, most_numbers;    // of f[]
    uint8_t kernels;                 // bits of the types of devices on which it can run: 1 << MS_CPU ...
} ms_op_row;

MS_API int ms_op_find(const char *name);   // -1 if there is no such operator
MS_API int ms_op_count(void);              // operators are numbered from 0
MS_API const ms_op_row *ms_op_at(int op);  // NULL if there is no such operator
enum {
    MS_OP_DIFFERENTIABLE = 1,
    MS_OP_INPLACE = 2,
    MS_OP_VIEW = 4,
    MS_OP_RANDOM = 8,
    MS_OP_LOW = 16 /* runs in a half dtype under autocast */,
    MS_OP_WIDE = 32 /* runs in float32 under autocast */,
    MS_OP_ANY_DEVICE = 64 /* inputs may lie on different devices */,
    MS_OP_EACH = 128 /* elementwise: a 0-dim input may lie on the CPU */,
    MS_OP_METHOD = 256 /* a method of tensors; if elementwise, its variant with a number is NAME_scalar */,
    MS_OP_ACTIVATION = 512 /* also a function of nn.F */
};

MS_API ms_status ms_call_op(int op, ms_args *a);           // sets a->out and a->n_out
MS_API ms_id ms_call1(int op, ms_id a);                    // one input, one output
MS_API ms_id ms_call1f(int op, ms_id a, double f);         // one input and one number
MS_API ms_id ms_call2(int op, ms_id a, ms_id b);           // two inputs
MS_API ms_id ms_call3(int op, ms_id a, ms_id b, ms_id c);  // three inputs; c may be 0

// indices: the positions of a sparse tensor, int64 [D, N] on the CPU. They are checked against the D sizes. Unless
// unique is NULL, makes two new tensors: *unique has the distinct positions, sorted; *places has, for each of the N
// positions, its index in *unique.
MS_API ms_status ms_sparse_coalesce(ms_id indices, const int64_t *sizes, ms_id *unique, ms_id *places);

// ---- random numbers ---------------------------------------------------------------------------

MS_API void ms_manual_seed(double seed);               // sets the generator's seed, and its offset to 0
MS_API void ms_rng_get(double *seed, double *offset);  // reads the generator's state
MS_API void ms_rng_set(double seed, double offset);    // restores a state that ms_rng_get returned

// ---- autograd ---------------------------------------------------------------------------------

typedef enum { MS_RUN_DONE, MS_RUN_EVENT, MS_RUN_FAILED } ms_run_state;

typedef enum {                        /* in                                   answer                               */
               MS_EV_TENSOR_HOOK = 1, /* gradient                             a gradient, or none                  */
               MS_EV_FUNCTION,        /* output gradients (0 where absent)    one or none (0) per input            */
               MS_EV_MODULE_BACKWARD, /* grad_in, grad_out                    grad_in, or none                     */
               MS_EV_LEAF_HOOK,       /* parameter (gradient landed)          -                                    */
               MS_EV_RECOMPUTE,       /* checkpoint                           its outputs, recomputed              */
               MS_EV_PRE_GATHER,      /* unit                                 - (ms_unit_extension_inputs first)   */
               MS_EV_POST_GATHER,     /* unit                                 - (ms_unit_extension_whole first)    */
               MS_EV_REDUCE,          /* unit, gradient, output               - (the script has filled output)     */
               MS_EV_ALL_REDUCE       /* unit, reduced shard                  -                                    */
} ms_event_kind;

typedef struct {
    int32_t kind;
    int32_t n;        // number of tensors in `in`
    double key;       // the number with which the hook, function or checkpoint was registered
    double unit;      // the unit of PRE_GATHER, POST_GATHER, REDUCE and ALL_REDUCE; otherwise 0
    const ms_id *in;  // borrowed until the next call on the run
    int32_t n_first;  // MODULE_BACKWARD: the first n_first tensors are grad_in, the rest grad_out
} ms_event;

typedef struct ms_run ms_run;

// Starts a backward from n roots. grads[k] is the gradient of root k; 0 means the number 1, for a root of one element.
// NULL on failure.
MS_API ms_run *ms_backward(int n, const ms_id *roots, const ms_id *grads, int retain_graph);
// Starts computing the gradients of n roots with respect to m inputs; read them with ms_run_result after MS_RUN_DONE.
// Does not change the grads of leaves.
MS_API ms_run *ms_grad(int n, const ms_id *roots, const ms_id *grads, int m, const ms_id *inputs, int retain_graph,
                       int allow_unused);
MS_API ms_run_state ms_run_next(ms_run *r, ms_event *ev);  // to be called again while it returns MS_RUN_EVENT
// Answers the last event; to be called before ms_run_next.
MS_API ms_status ms_run_answer(ms_run *r, const ms_id *ids, int n);
MS_API ms_id ms_run_result(ms_run *r, int k);  // the gradient of input k of ms_grad; 0: none
MS_API void ms_run_free(ms_run *r);            // to be called after MS_RUN_DONE; after MS_RUN_FAILED, call ms_run_abort
// Ends and frees r and the runs that began after it. Peers that wait in r's collectives raise `why`, an error of the
// script; NULL: the last failure of the engine.
MS_API void ms_run_abort(ms_run *r, const char *why);
MS_API ms_run *ms_run_top(void);  // the innermost open run, or NULL

MS_API ms_status ms_set_requires_grad(ms_id t, int on);  // for leaves only
// The operators that use t from now on do not keep it: their backward computes it again, from the inputs of the
// operator that made t. MS_EINVAL unless that operator has one output, keeps all of its inputs and not its output for
// its own backward, and is neither in place nor random. No-op if t has no graph.
MS_API ms_status ms_recompute(ms_id t);
// Makes operators and backward fail at the first value that is nan or inf. what: 0: off; 1: nan, unless one of the
// operator's numbers is nan; 2: also inf, unless an input or one of the numbers is infinite. ms_anomaly_line sets the
// script's line of the operator that made t; errors of the operator's backward name that line.
MS_API void ms_set_anomaly(int what);
MS_API ms_status ms_anomaly_line(ms_id t, const char *line);
MS_API ms_id ms_get_grad(ms_id t);                  // 0 if there is none; every call returns the same id
MS_API ms_status ms_set_grad(ms_id t, ms_id grad);  // grad 0 clears it
// Marks t's gradient as this rank's own, which optimizers and clip_grad_norm_ refuse, or as reduced. A marked gradient
// counts as reduced once a collective has written it, or a tensor that a collective wrote was copied or assigned to it.
MS_API ms_status ms_grad_set_local(ms_id t, int on);
// Hooks: key is a number chosen by the caller, which the events contain. Returns a handle for ms_hook_remove; 0 on
// failure.
// Calls the hook before t's gradient is used (after 0), or, of a leaf, after it has been added to its grad (after 1).
MS_API double ms_register_hook(ms_id t, double key, int after);
MS_API void ms_hook_remove(double handle);
// Records a custom function: makes out, which was computed without grad, the outputs of a node over in. Its backward
// raises MS_EV_FUNCTION.
MS_API ms_status ms_function_record(double key, int n_in, const ms_id *in, int n_out, const ms_id *out);
// A checkpointed region. Its forward runs without gradients between ms_checkpoint_begin (returns a token, 0: failed)
// and ms_checkpoint_end, and is then recorded. Its backward raises MS_EV_RECOMPUTE with grad mode on: the script sets
// the forward's random offset and computes the outputs again, and the engine restores the current offset afterwards.
// The graph of the recomputed outputs ends at detached leaves, which ms_checkpoint_inputs names (one per input; 0 if
// the input is not a tensor or needs no gradient).
MS_API double ms_checkpoint_begin(void);
MS_API void ms_checkpoint_end(double token);
MS_API ms_status ms_checkpoint_record(double key, int n_in, const ms_id *in, int n_out, const ms_id *out);
MS_API ms_status ms_checkpoint_inputs(ms_run *r, int n, const ms_id *detached);
// Records identity nodes around a module that has a full backward hook. Call ms_module_hook_inputs on the inputs and
// ms_module_hook_outputs on the outputs. Each replaces the ids in its array; the module must use the new ids.
MS_API double ms_module_hook_inputs(double key, int n, ms_id *in);
MS_API ms_status ms_module_hook_outputs(double token, int n, ms_id *out);

// Writes up to `capacity` keys whose hooks, functions or checkpoints were freed, each once, and returns their number:
// Lua then drops what it stores for them. The key of a module hook serves every call of the module and is never
// reported.
MS_API int ms_dead_keys(double *out, int capacity);

// ---- sharded units ----------------------------------------------------------------------------

// Handles are numbers > 0. Every function marked "collective" must be called by all ranks of the group in the same
// order.
enum { MS_LAYOUT_ROWS, MS_LAYOUT_FLAT };
// What scripts see of a unit while it is sharded. SHARDED: its sharded parameters, which operators refuse. FLAT and
// PIECES need layout flat, and follow the rules of fsdp.FSDP. FLAT: one flat parameter (ms_unit_flat), which is the
// leaf that optimizers step. PIECES: the parameters themselves, as this rank's 1-d pieces.
enum { MS_VIEWS_SHARDED, MS_VIEWS_FLAT, MS_VIEWS_PIECES };
enum { MS_PREFETCH_PRE, MS_PREFETCH_POST, MS_PREFETCH_NONE };
typedef struct {
    double group;  // id of the shard group
    // MS_VIEWS_*; MS_PREFETCH_*; keep_low_precision_grads 1: reduced gradients keep reduce_dtype.
    int32_t views, backward_prefetch, keep_low_precision_grads;
    int32_t offload;                // 1: shards and their gradients stay on the CPU; 2: in pinned memory
    int32_t device;                 // the device on which the unit computes; -1: the parameters' current device
    int32_t layout;                 // MS_LAYOUT_*
    int32_t reshard_after_forward;  // 1: yes; 0: no; -1: yes unless the unit is the root; > 1: size of reshard_group
    int32_t param_dtype, reduce_dtype, output_dtype;  // -1: unchanged
    int32_t cast_forward_inputs;                      // 1: floating-point inputs of forward are cast to param_dtype
    int32_t replicates, reshards_to;                  // 1: replicate_group, or reshard_group, is given
    double replicate_group;  // ranks that hold the same shards and all-reduce their reduced gradients
    double reshard_group;    // ranks (consecutive members of group) that keep slices of the parameters after forward
    // For each parameter, the dimension that is sharded (layout rows only); NULL: the first. The size of a later
    // dimension must be divisible by the number of ranks.
    const int32_t *dims;
} ms_unit_options;

// Makes a unit of n parameters and keeps this rank's part of each. The parameters must be whole, contiguous, equal on
// all ranks, and have at least one dimension; they may be on meta. name: the class of the module, or of the modules,
// for errors until ms_unit_set_name. Pass shared parameters once. n 0 makes a unit that only has hooks.
MS_API double ms_unit_new(const char *name, int n, const ms_id *params, const ms_unit_options *o);
// The script's owner of a unit: its finalizer, a C function, frees the unit when the module is collected.
typedef struct {
    double unit;
} ms_unit_owner;
MS_API void ms_unit_owner_release(ms_unit_owner *o);
MS_API ms_status ms_unit_set_name(double unit, const char *name);  // name: the module's path below the root
// To be called after the module was freed: its parameters keep only their local parts.
MS_API void ms_unit_free(double unit);
// To be called once, at the first forward. units: all units of the root, including the root's own, in module order.
MS_API ms_status ms_unit_lazy_init(double root, int n, const double *units);
typedef struct {
    double root;          // the handle of its root; 0 before ms_unit_lazy_init
    double backwards;     // number of backwards completed through the units of its root
    int32_t started;      // 1 once ms_unit_lazy_init was called
    int32_t is_gathered;  // 1 if its parameters are whole on this rank
    int32_t is_idle;      // 0 in its forward, between ms_unit_summon and ms_unit_unsummon, and in its root's backward
    int32_t device;       // the device on which it computes
} ms_unit_state;
// Valid until the next call; all 0 if there is no such unit.
MS_API const ms_unit_state *ms_unit_get_state(double unit);
// To be called before and after the module's forward; after an error, call ms_unit_forward_failed instead of
// ms_unit_post_forward. io: the tensors among the inputs or outputs; each entry is replaced by the tensor to use from
// then on. Collective.
MS_API ms_status ms_unit_pre_forward(double unit, int n, ms_id *io);
MS_API ms_status ms_unit_post_forward(double unit, int n, ms_id *io);
MS_API void ms_unit_forward_failed(double unit);
// A unit of several modules has a pass that contains the forwards of modules that run together: the unit is gathered,
// resharded and reduced once for all of them. Call ms_unit_begin_pass before each module's pre-forward; it returns 1 if
// it began a pass, 0 inside a pass, -1 if no pass begins, because a checkpoint is being recomputed or the unit does not
// exist. Call ms_unit_end_pass after the last module's post-forward, at the end of the root's forward if some modules
// did not run, or after an error.
MS_API int ms_unit_begin_pass(double unit);
MS_API ms_status ms_unit_end_pass(double unit, int failed);
MS_API ms_status ms_unit_unshard(double unit, int async);  // collective; async: ms_unit_wait must follow
MS_API ms_status ms_unit_wait(double unit);                // waits for the gather that ms_unit_unshard started
MS_API ms_status ms_unit_reshard(double unit);             // releases the gathered parameters
enum {
    MS_UNIT_SYNC,
    MS_UNIT_RESHARD_AFTER_FORWARD,
    MS_UNIT_RESHARD_AFTER_BACKWARD,
    MS_UNIT_IS_LAST_BACKWARD,
    MS_UNIT_DIVIDE_FACTOR,
    MS_UNIT_UNSHARD_IN_BACKWARD,
    MS_UNIT_ALL_REDUCE,
    MS_UNIT_ALL_REDUCE_HOOK,  // key of the hook; 0: none
    MS_UNIT_CAST_FORWARD_INPUTS,
    MS_UNIT_FORWARD_PREFETCH,  // 0: when this unit's forward begins, gather early only what ms_unit_set_prefetch names
    MS_UNIT_LIMIT_GATHERS,     // 1: gather one unit early at a time; 0: all that come later in the forward or backward
    // 1: gather and reduce in the stored dtype, whatever the options say; the unit must be idle
    MS_UNIT_FULL_PRECISION,
    MS_UNIT_FAKE_GATHER,  // 1: skip the all-gathers, to measure their cost; the results are wrong
    MS_UNIT_FAKE_REDUCE,  // 1: skip the reductions (flat units only), to measure their cost; the results are wrong
    // 1: the script checks the order of units, and forward gathers no unit early by it
    MS_UNIT_CHECKED
};
MS_API ms_status ms_unit_set(double unit, int what, double value);
// Replaces the unit's own reduction of gradients. SCRIPT: the script reduces (MS_EV_REDUCE passes the padded gradient
// and the shard to fill; the gradient of an unsharded unit is passed alone and is reduced in place). SUM: the gradient
// is divided and summed over a group chosen by the script. LOW: as SUM, in a low-precision dtype.
enum { MS_COMM_NONE, MS_COMM_SCRIPT, MS_COMM_SUM, MS_COMM_LOW };
typedef struct {
    // low: the dtype that is sent; lands: the dtype in which the gradient lands (kind LOW).
    int32_t kind, low, lands, pad;
    double key;                   // key of the script's hook, for kind SCRIPT
    double group, before, after;  // for kinds SUM and LOW: the group, and the divisors before and after the sum
} ms_comm_hook;
MS_API ms_status ms_unit_set_comm_hook(double unit, const ms_comm_hook *h);  // NULL: restores the default reduction
// Runs a SUM or LOW hook: out receives this rank's block of the sum of grad; out 0: reduces grad in place. Collective.
MS_API ms_status ms_comm_hook_run(const ms_comm_hook *h, ms_id grad, ms_id out);
MS_API void ms_comm_division(int n, double *before, double *after);  // computes the divisors for n ranks
// Makes the whole parameters visible in the stored dtype, for the script to read and write (flat units only). show 0:
// takes part, but keeps this rank's pieces visible; 2: shows the whole parameters on the CPU. ms_unit_unsummon with
// writeback keeps the script's changes. Collective; not allowed inside a forward or backward.
MS_API ms_status ms_unit_summon(double unit, int show);
MS_API ms_status ms_unit_unsummon(double unit, int writeback);
// Sets the units that are gathered early when this unit's forward (backward 0) or backward (1) begins. n 0: the
// next units: in a forward, in the order of the latest complete forward; in a backward, in the reverse of its forward.
MS_API ms_status ms_unit_set_prefetch(double unit, int backward, int n, const double *units);
// To be called when the parameters will not change before the next forward: gathers the first unit with parameters, in
// the order of the latest forward, in the background. Collective.
MS_API ms_status ms_unit_gather_first(double unit);
MS_API double ms_unit_of(ms_id p);  // the unit that manages parameter p; 0: none
// Flat units: offset of p's piece in this rank's part of the flat parameter, in elements.
MS_API double ms_unit_flat_offset(ms_id p);
// MS_VIEWS_FLAT: the flat parameter, 1-d, padded; every call returns the same id
MS_API ms_id ms_unit_flat(double unit);
MS_API ms_id ms_unit_local(ms_id p);  // this rank's part of p; every call returns the same id
// The whole parameter (gradient 0) as a new detached tensor in the stored dtype, or its whole gradient (gradient 1; 0
// without an error if there is none); collective.
MS_API ms_id ms_unit_full(ms_id p, int gradient);
// Fails if a gradient of p has not been reduced yet.
MS_API ms_status ms_unit_check_reduced(ms_id p);
// To be called when a script clears p's grad. Drops the reduced gradient that the engine keeps aside while grad holds
// an unreduced one. Also drops p's gradients that wait in the unit for a reduction if this rank has met an error since
// the first of them: they belong to work that failed. No-op in a backward. If p belongs to no unit, its grad is no
// longer marked as this rank's own.
MS_API ms_status ms_unit_drop_saved_grad(ms_id p);
// A tensor of p's whole shape that operators refuse, as they refuse p while it is sharded. It represents a sharded
// gradient or copy of p in scripts. ms_unit_gather_like gathers the whole of such a tensor, given this rank's part
// (collective).
MS_API ms_id ms_unit_stand_in(ms_id p, int dtype);
MS_API ms_id ms_unit_gather_like(ms_id p, ms_id part);
// Rows lie along dimension `dim`. The parameter has `rows` rows, of which this rank has `here`, from row `first` on.
// outer: product of the sizes before dim; row_numel: product of the sizes after it.
typedef struct {
    double unit;
    int32_t layout, world, rank, dtype, dim, pad;
    int64_t first, here, rows, row_numel, outer;
} ms_shard_info;
// The position of this rank's part in the whole parameter.
MS_API ms_status ms_unit_shard_info(ms_id p, ms_shard_info *out);
// Moves the shards to a device and dtype (-1: unchanged). keep_values 0 leaves them uninitialised (to_empty).
MS_API ms_status ms_unit_to(double unit, int device, int dtype, int keep_values);
// Replaces parameter j of the unit (counted as in ms_unit_new) by p, a whole leaf of the same shape and dtype; this
// rank keeps its part of p's values. The replaced parameter no longer belongs to the unit. The unit must be idle.
MS_API ms_status ms_unit_replace(double unit, int j, ms_id p);
// All-gather extensions: the script decides which tensors are gathered for some parameters, and builds the whole
// parameters from them. Extension e covers count[e] parameters, consecutive in `which`, as positions in ms_unit_new.
// Units with extensions are gathered by runs. MS_EV_PRE_GATHER asks for every extension's inputs
// (ms_unit_extension_inputs). MS_EV_POST_GATHER says that the outputs are gathered: at the first gather the script
// answers with ms_unit_extension_whole; later it fills that tensor again. n 0 removes the extensions; so does
// ms_unit_to.
MS_API ms_status ms_unit_extend(double unit, int n, const int32_t *count, const int32_t *which);
// Makes a run that gathers the unit. early 1: the run ends when the gather has been issued. prefetched:
// whether ms_unit_record notes the gather as prefetched.
MS_API ms_run *ms_unit_gather_run(double unit, int early, int prefetched);
// Lists the units with extensions that should be gathered early when this unit's forward begins; returns their number.
MS_API int ms_unit_prefetches(double unit, double *units, int capacity);
MS_API ms_status ms_unit_extension_inputs(double unit, int e, int n, const ms_id *in);
// Writes the gathered outputs of extension e to out. Returns their number, which equals the number of its inputs; -1:
// failed.
MS_API int ms_unit_extension_outputs(double unit, int e, ms_id *out, int capacity);
MS_API ms_status ms_unit_extension_whole(double unit, int e, int n_whole, const ms_id *whole, int n_free,
                                         const ms_id *freed);
// A record of when units are gathered (UNSHARD) and resharded and end their backward. prefetched: only for UNSHARD.
enum { MS_UNIT_EV_UNSHARD, MS_UNIT_EV_RESHARD, MS_UNIT_EV_POST_BACKWARD };
typedef struct {
    int32_t event, prefetched;
    const char *unit;
} ms_unit_event;
MS_API void ms_unit_record(int on);  // 1: starts an empty record
// Copies the first `capacity` events; returns the number of all.
MS_API int ms_unit_recorded(ms_unit_event *out, int capacity);

// ---- optimizers -------------------------------------------------------------------------------

typedef enum { MS_SGD, MS_ADAM, MS_ADAMW } ms_optim_kind;  // indices into the table of optimizers (ms_optim_at)
typedef struct {
    int32_t kind, nesterov, amsgrad, maximize;
    int32_t master_weights;  // leaves of half types keep a float32 master, which is stepped in their place
    int32_t reserved;
    double lr, weight_decay;
    double momentum, dampening;  // for SGD
    double beta1, beta2, eps;    // for Adam and AdamW
    double more[5];              // for optimizers added to the table
} ms_optim_options;

// The table of optimizers: one row per optimizer, each from a header in kernels/formulas/optim.
enum { MS_OPTIM_STATES = 4, MS_OPTIM_OPTIONS = 8 };
typedef struct {
    const char *name, *doc;  // name: NULL ends the list
    // at: byte offset in ms_optim_options. count: 1 or 2 for that many numbers (double); 0 for a flag stored as
    // int32_t; -1 for a flag stored as double.
    int32_t at, count;
    double value[2];        // default values
    double low, below;      // allowed values at construction: low <= number < below; an infinite value means no limit
    int32_t later, unused;  // later: the limits also apply to changes between steps
} ms_optim_option;
typedef struct {
    const char *name;                     // name of the Lua class: "AdamW"
    const char *doc;                      // description of the formula, with its source
    const char *states[MS_OPTIM_STATES];  // names of the states kept per parameter; NULL ends the list. With option
                                          // master_weights one more follows: "master"
    uint32_t needed, reserved;            // needed: bit k is set if state k is kept whatever the options
    ms_optim_option options[MS_OPTIM_OPTIONS];
} ms_optim_row;
MS_API const ms_optim_row *ms_optim_at(int kind);            // NULL if there is no such optimizer
MS_API ms_status ms_optim_check(const ms_optim_options *o);  // checks options that depend on each other
MS_API int ms_optim_is_plain(const ms_optim_options *o);     // 1 if a step is p -= lr * g and nothing else

// Steps all leaves that have a gradient, in one fused pass. A sharded parameter's local part is stepped. state:
// MS_OPTIM_STATES ids per leaf, in the order of the optimizer's row; each is 0 until the leaf's first step makes it,
// unscoped. steps: the number of steps that each leaf has taken. On failure nothing has changed.
MS_API ms_status ms_optim_step(const ms_optim_options *o, int n, const ms_id *leaves, ms_id *state, double *steps);
// As ms_optim_step, for several groups of leaves. On failure no group has changed.
typedef struct {
    const ms_optim_options *options;
    int64_t n;
    const ms_id *leaves;
    ms_id *state;   // MS_OPTIM_STATES x n ids
    double *steps;  // n numbers
} ms_optim_group;
// terms: NULL, or one of two. With `clips`: as ms_clip_grad_norm of all leaves, then the step, but in one pass:
// gradients are scaled where the step reads them, and keep their values; `norm` is set to what ms_clip_grad_norm
// returns. With `skip`: if that float32 element is not 0, nothing changes except `steps`, which counts the step in any
// case; if all gradients are on its GPU and no leaf needs new state, the GPU decides, and the host waits for nothing.
typedef struct {
    int32_t clips, reserved;
    double max_norm, p;
    ms_id norm, skip;
} ms_step_terms;
MS_API ms_status ms_optim_step_groups(int n_groups, const ms_optim_group *groups, ms_step_terms *terms);
// The value that a float32 element has now, to be read later: ms_flag_new queues a copy and does not wait for a GPU.
// ms_flag_read waits for it.
typedef struct ms_flag ms_flag;
MS_API ms_flag *ms_flag_new(ms_id of);
MS_API ms_status ms_flag_read(ms_flag *flag, double *out);
MS_API void ms_flag_free(ms_flag *flag);
// Scales the gradients of all leaves so that their norm of order p (> 0, may be infinite) over all ranks is at most
// max_norm (infinite: only computes the norm). Returns the norm before scaling as a new 0-dim tensor. Collective if
// some leaves are sharded.
MS_API ms_id ms_clip_grad_norm(int n, const ms_id *leaves, double max_norm, double p);
// Multiplies contiguous gradients on one device by *inverse, and stores 1 in *found if one of them is not finite. stop:
// the first such gradient and those after it keep their values. inverse, found: float32, one element, on the same
// device. On a GPU the host waits for nothing.
MS_API ms_status ms_unscale_gradients(int n, const ms_id *gradients, ms_id inverse, ms_id found, int32_t stop);
// Multiplies *scale by `bad` if *found is above 0, otherwise by `good`, unless that exceeds float32. scale, found: as
// in ms_unscale_gradients. On a GPU the host waits for nothing.
MS_API ms_status ms_adapt_scale(ms_id scale, ms_id found, double bad, double good);

// ---- dist -------------------------------------------------------------------------------------

// The launcher of this process, from its environment variables. Known before ms_dist_init.
typedef struct {
    const char *name;  // "mpirun", "srun", "PMIx", "mpiexec", "torchrun"; "" without a launcher
    int32_t rank, world, local_rank, local_world;  // local: on this node. world or local_world 0: unknown
    char reason[200];                              // why the launcher's variables are invalid; "" if they are valid
} ms_launch;
MS_API void ms_launcher(ms_launch *out);  // reads the environment

// Process groups are numbers: 0 is the world, 1 contains only this rank. Ranks in arguments are world ranks. Before
// ms_dist_init, and without a launcher, the world contains only this process and collectives are copies.
// backend: "auto", "mpi", "nccl", "self"; NULL: "auto". timeout: in seconds; 0: unchanged.
MS_API ms_status ms_dist_init(const char *backend, double timeout);
MS_API int ms_dist_is_initialized(void);   // 1 once ms_dist_init has succeeded
MS_API void ms_dist_finalize(void);        // is also called when the process ends with code 0
MS_API const char *ms_dist_backend(void);  // "self", "mpi" or "nccl"
MS_API ms_status ms_dist_free_group(double group, const char *site);  // collective over the world
MS_API double ms_dist_new_group(int n, const int32_t *ranks,
                                const char *site);  // collective over the world; < 0: failed
MS_API int ms_dist_rank(double group);              // -1: not a member, -2: no such group (see ms_error)
MS_API int ms_dist_size(double group);              // number of ranks in the group; -2: no such group
MS_API int ms_dist_member(double group, int k);     // world rank of member k; -1: no such group or member
MS_API int ms_dist_local_rank(void);                // this rank's number among the ranks of this node

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
    MS_DIST_RECV,
    // Three of these under PyTorch's names, which messages use.
    MS_DIST_ALL_GATHER_INTO_TENSOR,
    MS_DIST_REDUCE_SCATTER_TENSOR,
    MS_DIST_ALL_TO_ALL_SINGLE
};
enum { MS_DIST_SUM, MS_DIST_AVG, MS_DIST_MAX, MS_DIST_MIN, MS_DIST_PROD };

typedef struct ms_work ms_work;  // an asynchronous collective
typedef struct {
    int32_t op, reduction, root, async;  // root: source or destination; for send and recv, the peer
    double group;
    ms_id out, in;   // all_reduce, broadcast, reduce, recv use only out; send only in; gather uses out only on the root
    int32_t n_list;  // scatter on the root: number of tensors, one per member
    const ms_id *list;
    const char *site;  // the script's "file:line", for messages; NULL: unknown
} ms_dist_call;
// Runs a collective; or queues it and sets *work, which is NULL if there is nothing to wait for.
MS_API ms_status ms_dist_run(const ms_dist_call *c, ms_work **work);
MS_API ms_status ms_work_wait(ms_work *w);  // w may be NULL
MS_API int ms_work_done(ms_work *w);        // never waits
MS_API void ms_work_free(ms_work *w);       // does not cancel the collective

typedef struct {
    double group;
    const char *site;  // the script's "file:line", for messages; NULL: unknown
    // 0: the script itself called dist; 1: another function of the library called it. Must be equal on all ranks.
    int inside;
} ms_bytes_call;
// Gathers bytes: *all receives the n bytes of every member, concatenated in the order of the group; *lengths receives
// every member's n. Both are borrowed until the next call.
MS_API ms_status ms_dist_gather_bytes(const ms_bytes_call *c, const char *data, double n, const char **all,
                                      const double **lengths);
// Broadcasts bytes. On rank `source`, *bytes and *n are the bytes to send. On return they are the received bytes on
// every rank, borrowed until the next call.
MS_API ms_status ms_dist_broadcast_bytes(const ms_bytes_call *c, int source, const char **bytes, double *n);

// Recordings of the collectives that this rank issues. They may be nested; entries are kept until the next outermost
// one begins.
typedef struct {
    int32_t op, dtype;
    double input_numel, output_numel, bytes, group;  // bytes: size of the larger of input and output
    const char *unit;                                // name of the unit whose collective it is; NULL: none
} ms_ledger_entry;
MS_API int ms_dist_record_begin(void);                 // begins a recording; returns the number of entries so far
MS_API const ms_ledger_entry *ms_dist_record(int *n);  // the entries so far and their number
MS_API void ms_dist_record_end(void);                  // ends the innermost recording

MS_API void ms_dist_set_timeout(double seconds);  // longest time to wait for a peer
MS_API void ms_dist_set_step(double step);        // the step of ms.steps; -1: none; compared between ranks
// Between nodes: the first rank of each node exchanges time stamps with rank 0; once every rank has returned,
// ms_dist_take_clock makes this rank's traces use the result. To be called on all ranks. On one node all ranks have one
// clock, and both do nothing.
MS_API ms_status ms_dist_measure_clock(void);
MS_API void ms_dist_take_clock(void);
// Says that a call which may communicate in several groups has failed on this rank for the reason in text, and that the
// script continues. It takes a number in each group of this rank: peers that make a collective of that number fail.
MS_API void ms_dist_failed(const char *text);
// Says that a call of a collective of this group has failed before it communicated, and that the script continues: the
// call takes its number, and peers that make a collective of that number fail with text. group < 0 means a send or
// receive: -1 - from * world size - to. since: ms_state.dist_failures when the call began.
MS_API void ms_dist_refused(double group, const char *text, const char *site, double since);
// To be called on all ranks: makes groups whole again that an error in a collective has broken. Until then every
// collective of such a group fails with that error. Only waits for the ranks if none has met an error since the latest
// call or, with `background`, has collectives in the background; otherwise it ends these. site: the script's line, for
// messages; may be NULL.
MS_API ms_status ms_dist_recover(const char *site, int background);
// For a prompt over ranks, where every rank runs each line, and no rank makes a collective between lines; to be called
// when a line begins or ends. ended: the number of lines that this rank has ended. Collectives of a line fail as soon
// as a peer that they wait for has ended more lines than this rank had when it issued them.
MS_API void ms_dist_set_lines(double ended);

// ---- files ------------------------------------------------------------------------------------

// Writes a safetensors file: ms_saver_new (NULL on failure), metadata, declare every tensor, write them in any order
// (so the caller needs only one whole tensor at a time), commit. After commit the complete file is on disk; before,
// `path` is unchanged. ms_saver_abort frees the saver, before or after commit.
typedef struct ms_saver ms_saver;
MS_API ms_saver *ms_saver_new(const char *path);
MS_API ms_status ms_saver_metadata(ms_saver *s, const char *key, const char *value);
MS_API ms_status ms_saver_declare(ms_saver *s, const char *name, int dtype, int ndim, const int64_t *shape);
MS_API ms_status ms_saver_write(ms_saver *s, const char *name, ms_id t);
MS_API ms_status ms_saver_commit(ms_saver *s);
MS_API void ms_saver_abort(ms_saver *s);
// After commit: writes the header's checksum, which covers every byte of the file, as 16 hexadecimal digits and a 0.
MS_API void ms_saver_sum(const ms_saver *s, char *out);

// Reads a safetensors file: ms_loader_open checks the whole header. Tensors are numbered in the order of their names.
// With verify, open and reads fail if bytes differ from the checksums that savers write into the header. Files without
// checksums are not verified.
typedef struct ms_loader ms_loader;
MS_API ms_loader *ms_loader_open(const char *path, int verify);
// The file's checksum, as ms_saver_sum writes it, in hexadecimal digits; "" if opened without verify, or the file has
// none.
MS_API const char *ms_loader_sum(const ms_loader *l);
MS_API void ms_loader_close(ms_loader *l);
// The name of tensor k, from 0; NULL past the last one. *other: its dtype in the file, such as "F8_E4M3", if tensors
// here lack it: then it cannot be read. Else NULL.
MS_API const char *ms_loader_name(const ms_loader *l, int k, const char **other);
MS_API int ms_loader_find(const ms_loader *l, const char *name);           // -1 if there is none
MS_API ms_status ms_loader_info(const ms_loader *l, int k, ms_info *out);  // sets dtype and shape
// Reads rows [first, first + count) of dimension 0 of tensor k; count -1: all rows from first on.
MS_API ms_id ms_loader_read(ms_loader *l, int k, double first, double count);
// The key of entry k of the metadata, from 0, and its value; NULL past the last one.
MS_API const char *ms_loader_metadata(const ms_loader *l, int k, const char **value);

// Reads ranges of elements of many tensors at once: call ms_loader_want for each, then ms_loader_fetch. A range is
// stored in dst, a contiguous CPU tensor of the same dtype, from element `at` on. If whole (17 bytes) is not NULL,
// fetch reads the whole file once, in order, and verifies it if l was opened with verify; for a file without checksums,
// whole receives its XXH64, otherwise "".
MS_API ms_status ms_loader_want(ms_loader *l, int k, double first, double count, ms_id dst, double at);
MS_API ms_status ms_loader_fetch(ms_loader *l, char *whole);

// Small files. ms_file_put makes a new file and syncs its contents; its name is durable after ms_folder_sync of the
// folder. ms_file_get reads a file of at most 1 GiB; free *out with ms_file_free. who: the function that errors name.
MS_API ms_status ms_file_put(const char *path, const char *data, double n);
MS_API ms_status ms_file_get(const char *path, const char *who, char **out, double *n);
MS_API void ms_file_free(char *data);
MS_API void ms_file_sum(const char *data, double n, char *out);  // writes the XXH64 as 16 hexadecimal digits and a 0

typedef enum {
    MS_COMMIT_NEW,        // no folder, or an empty one, had the name
    MS_COMMIT_EXCHANGED,  // the folder that had the name is now at the temporary path: call ms_folder_settle
    MS_COMMIT_INSIDE      // the file system cannot exchange two folders: replace the files inside the existing one
} ms_commit_how;
typedef enum {
    MS_LEFT_NOT,         // not a temporary file or folder for this name
    MS_LEFT_RUNS,        // temporary; its process is running, or belongs to another host and cannot be checked
    MS_LEFT_UNFINISHED,  // left by a process that ended while it saved
    MS_LEFT_REPLACED     // left by a process that ended before it removed the folder that it had replaced
} ms_left;

// A folder that is replaced as a whole, also by several processes at once.
//  new      resolves path and its symbolic links, then does what look does; creates nothing
//  look     opens the folder that has the name, if any; *same (if not NULL): whether the look before found the same one
//  make     creates a temporary folder beside the target; the caller fills it (see ms_folder_path)
//  commit   gives the temporary folder the name and syncs it to disk; *how is an ms_commit_how (MS_COMMIT_INSIDE:
//           nothing has been renamed)
//  settle   after MS_COMMIT_EXCHANGED, when the folder that had the name has been checked: with
//           ok, free removes it (with `later`, in a thread that ends before the next free or the end of the process);
//           otherwise it gets its name back
//  move_in  after MS_COMMIT_INSIDE: gives a finished file the name `to` in the folder of the last look, replacing a
//           file of that name; remove removes a file there
//  discard  removes a temporary folder that an ended process left beside the target, and the files of a save in it
//  free     frees the handle, and removes the temporary folder and the files of a save in it, unless commit has
//           given it the name, or settle has not been called
typedef struct ms_folder ms_folder;
MS_API ms_folder *ms_folder_new(const char *path);
MS_API const char *ms_folder_path(const ms_folder *f, int temporary);  // of the target, or of the temporary folder
MS_API ms_status ms_folder_look(ms_folder *f, int *same);
MS_API ms_status ms_folder_make(ms_folder *f);
MS_API ms_status ms_folder_commit(ms_folder *f, int *how);
MS_API ms_status ms_folder_settle(ms_folder *f, int ok, int later);
MS_API ms_status ms_folder_move_in(ms_folder *f, const char *from, const char *to);
MS_API ms_status ms_folder_remove(ms_folder *f, const char *name);
MS_API void ms_folder_discard(const ms_folder *f, const char *name);
MS_API void ms_folder_free(ms_folder *f);
// Classifies an entry of the folder that contains the file or folder `name`; returns an ms_left.
MS_API int ms_folder_left(const char *entry, const char *name);
MS_API ms_status ms_folder_sync(const char *path);
// Lists the names in a folder, each followed by a '/'; free *out with ms_file_free.
MS_API ms_status ms_folder_list(const char *path, const char *who, char **out, double *n);

// Token files: ranges of memory-mapped files, concatenated to one sequence of token ids.
typedef struct ms_tokens ms_tokens;
MS_API ms_tokens *ms_tokens_new(void);
MS_API void ms_tokens_free(ms_tokens *t);
// Appends `count` tokens of token_bytes (1, 2 or 4) bytes each, from byte `offset` of the file on.
MS_API ms_status ms_tokens_add(ms_tokens *t, const char *path, int token_bytes, double offset, double count);
MS_API ms_status ms_tokens_read(const ms_tokens *t, double first, double count,
                                uint8_t *out);  // fails unless tokens have 1 byte
// Reproducible random numbers from three whole numbers a, b, c (a seed, an epoch …).
MS_API double ms_shuffle(double a, double b, double c, double j, double n);  // element j of a shuffle of [0, n)
MS_API double ms_hash_share(double a, double b, double c);                   // a number in [0, 1]
MS_API double ms_hash_below(double a, double b, double c, double n);         // a whole number below n
// out[0]: n sequences of `length` ids from the given positions on (0 past the end). out[1]: for each id the one that
// follows it; `ignore` at the first skip[k] positions and after the scored[k] positions that follow them. skip and
// scored may be NULL. Both tensors are int64 [n, length].
MS_API ms_status ms_tokens_batch(const ms_tokens *t, int n, const double *starts, const double *skip,
                                 const double *scored, int length, double ignore, ms_id *out);

// ---- texts -------------------------------------------------------------------------------------

// Texts to tokens. Memory belongs to the caller; no text has 2^29 bytes or more.
// A slot of a table. Pairs of tokens that join are a hash table of 2^pair_bits slots, half of which are used: the ids a
// and b, a = -1 in an empty slot, the pair's rank x, the least of which is joined first, and the id y that they join
// to. A trie of tokens is a double array (Aoe 1989) of whole blocks of 256 slots: byte c leads from slot k to slot k.b
// ^ c if that one's a is k, and y is the id of the token that ends there, or -1. The root is slot 0.
typedef struct {
    int32_t a, b, x, y;
} ms_text_slot;
typedef struct {
    const ms_text_slot *trie, *pairs;
    const double *scores;  // by id
    const int32_t *bytes;  // the token of each byte, or -1, for characters that have none; NULL: none
    double unknown_score;
    int32_t pair_bits, unknown;  // unknown: the id of characters without a token, or -1
    int32_t single;  // 1: scores are added in single precision, and a byte's token has its byte; 0: a character's
                     // first byte has all of them
    int32_t cuts;  // a word begins 1: at a sign of a space (U+2581) after another character, which no token has; 2: at
                   // each such sign; 0: nowhere
    // Of byte-pair encoding. by_byte: words begin as bytes, not as characters. fuses: neighbours without a token become
    // one unknown token. prefix, suffix: of the token of a character that does not begin, or that ends, a word.
    int32_t by_byte, fuses, prefix_size, suffix_size;
    const char *prefix, *suffix;
} ms_text_model;
// A map of characters, in darts-clone's units; what else is changed: a space before the text, several spaces to one,
// spaces to U+2581.
typedef struct {
    const uint32_t *units;
    const char *texts;
    int32_t count, texts_size, prefix, squeezes, escapes;
} ms_text_map;
// The end of a token, on the way to the best division of a text.
typedef struct {
    double best;
    int32_t from, id;
} ms_text_end;
// Whether a text has no byte above 127.
MS_API int ms_text_ascii(const char *text, int n);
// Adds an entry to a table of pairs, unless the pair is there.
MS_API void ms_text_add(ms_text_slot *slots, int bits, int a, int b, int x, int y);
// Adds the pairs of tokens whose bytes are a token, of ids below n: id's bytes are those of `texts` from ends[id] to
// ends[id + 1], none for no token; the largest score is joined first. Returns how many there are, of which those that
// do not fill half of the table are added; -1 without memory.
MS_API int ms_text_pairs(const char *texts, const int *ends, const double *scores, int n, ms_text_slot *slots,
                         int bits);
// Writes the normalized text and, unless origins is NULL, for each of its bytes and what follows them the byte of the
// text that it comes from. Returns its size; -1 if `room` is too small.
MS_API int ms_text_normalize(const ms_text_map *m, const char *text, int n, char *out, int *origins, int room);
// Writes the tokens of a text, at most one a byte, and the numbers of their bytes; returns how many. ends: n + 1
// elements, whose first and last `best` are the sums of scores before the text and after it.
MS_API int ms_text_unigram(const ms_text_model *m, const char *text, int n, ms_text_end *ends, int *ids, int *sizes);
// The same by joining pairs; -1 without memory.
MS_API int ms_text_bpe(const ms_text_model *m, const char *text, int n, int *ids, int *sizes);

// ---- captured steps ----------------------------------------------------------------------------

// A step that is recorded while it runs once, and repeated without the script: the same operators, backward, clipping,
// optimizer steps and collectives on the same memory, with new arguments and random numbers. Leaf hooks may do work of
// the engine only; the caller refuses all others (ms_capture_refuse).
//  begin    starts a recording; own[k] is the step's copy of argument in[k], which the step must use instead. NULL on
//           failure
//  results  to be called in the recording, with what the step returns: out[k] is a copy of results[k]
//  end      ends the recording, after the tensors that the step made have been released. Fails if the step cannot be
//           repeated; then call free
//  repeat   runs the step: copies in[] to the step's arguments; out[] are copies of its results
//  free     frees the step and its memory; also ends a recording
// The options and step counts that the recorded step passed to ms_optim_step must stay valid: repetitions read the
// options again, and increment the counts (see ms_capture_tally).
typedef struct ms_captured ms_captured;
MS_API ms_captured *ms_capture_begin(int n, const ms_id *in, ms_id *own);
MS_API ms_status ms_capture_results(ms_captured *c, int n, const ms_id *results, ms_id *out);
MS_API ms_status ms_capture_end(ms_captured *c);
MS_API ms_status ms_capture_repeat(ms_captured *c, int n, const ms_id *in, ms_id *out);
MS_API void ms_capture_free(ms_captured *c);
// bytes: the memory that only the step uses; work: the number of pieces of work that it repeats. After the first
// repetition: graphs, the number of its CUDA graphs; graphed, the number of pieces of work that these contain.
// sends: whether the step has collectives of several ranks; peers then wait for a rank that cannot repeat it, so its
// error must be told to them (ms_dist_failed). ms_capture_repeat does so for its own.
typedef struct {
    double bytes, work, graphs, graphed;
    int32_t sends, reserved;
} ms_captured_info;
MS_API void ms_capture_info(const ms_captured *c, ms_captured_info *out);
MS_API ms_status ms_capture_refuse(const char *text);  // refuses the step that is being recorded: MS_ESTATE
// Ends the recording, whose step is then not captured: only ms_capture_free may follow. For a step whose work differs
// from that of other steps, such as one without the optimizer's step.
MS_API void ms_capture_leave(void);
// For a gradient scaler in a step that is being recorded. unless: sets *sum to the sum of the `found` tensors, of one
// float32 element each. If *sum is not 0, ends the recording (ms_capture_leave). Otherwise a repetition does what is
// recorded up to unless_end only if its own sum is 0, too. adapt: changes the scale by the rule, now and in each
// repetition; *rule, which has the count of steps with finite gradients, must stay valid.
typedef struct ms_scale_rule {
    double growth_factor, backoff_factor, growth_interval, growth_tracker;
} ms_scale_rule;
MS_API ms_status ms_capture_unless(int n, const ms_id *found, double *sum);
MS_API ms_status ms_capture_unless_end(void);
MS_API ms_status ms_capture_adapt(ms_id scale, int n, const ms_id *found, ms_scale_rule *rule);
// If flags, scale and gradients are on one GPU, that GPU decides in each repetition whether to step, and only it knows
// the counts: steps of leaves (ms_optim_group) and growth_tracker. tally: returns the tally of the numbers at `counts`,
// a block of `bytes` bytes; NULL if they are always up to date. read: brings the numbers up to date with the GPU, for
// which it waits; the script may then change them. The numbers must stay valid until the step and the tally are no
// longer used.
typedef struct ms_tally ms_tally;
MS_API ms_tally *ms_capture_tally(const ms_captured *c, const void *counts, double bytes);
MS_API ms_status ms_tally_read(ms_tally *tally);
MS_API void ms_tally_free(ms_tally *tally);

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
    const char *name, *detail;  // detail: shapes of an operator's inputs, unit of a collective; "": none
    double start, duration;     // in seconds of the monotonic clock (ms_time)
    // allocated: bytes on all devices at the end; memory: their change since the start. Both: 0 for ranges on streams.
    double allocated, memory;
    int16_t kind, lane;  // lane: 0: the script's thread; 1 and up: the CPU's streams
    int32_t collective;  // 1 + its index in the trace's `collectives`; 0: none
} ms_range;

// A collective that succeeded; its range refers to it. Between nodes times are compared by clocks that were measured
// when the job began (ms_dist_measure_clock).
typedef struct {
    double group, number;       // the same on every member
    double bytes;               // size of the larger of input and output
    const char *unit;           // name of the unit whose collective it is; "": none
    int32_t members, last;      // last: the world rank that arrived last; -1: not every member was recording
    double last_after, waited;  // by how many seconds `last` arrived after the last but one, and after the first
} ms_collective_range;

// Bytes allocated on all devices at one time, by kind.
typedef struct {
    double time, bytes[5];  // indexed by ms_memory_kind
} ms_memory_sample;

// Recorded ranges in the order in which they ended: on each lane, inner ranges come before outer ones.
typedef struct {
    ms_range *ranges;
    double n, dropped;    // dropped: number of ranges that did not fit
    double begun, ended;  // in seconds
    ms_collective_range *collectives;
    ms_memory_sample *samples;  // taken at the end of a range if the bytes have changed since the previous sample
    double n_collectives, n_samples;
} ms_trace;

// Optional content: shapes of operators' inputs, calls of modules.
enum { MS_TRACE_SHAPES = 1, MS_TRACE_MODULES = 2 };
// Starts recording up to `room` ranges and allocates memory for them. NULL on failure. Several traces may record at the
// same time.
MS_API ms_trace *ms_trace_start(double room, int what);
MS_API void ms_trace_stop(ms_trace *t);  // to be called before the ranges are read
MS_API void ms_trace_free(ms_trace *t);
MS_API int ms_trace_wanted(void);  // the optional content that at least one active trace wants
// Writes the trace as one process of a file in Chrome's trace format. If the file has the same `key`, adds the process
// to it, so that ranks that pass the same key and path, in any order, make one file; otherwise replaces it. key:
// letters and digits; "": always replaces.
MS_API ms_status ms_trace_save(const ms_trace *t, const char *path, int rank, const char *key);
// When the process ends: stops, saves and frees the trace, and prints a line about it to stderr. A process that has
// joined a job adds itself to the job's file `path`; any other process writes `own`.
MS_API void ms_trace_save_at_exit(ms_trace *t, const char *path, const char *own, int rank);
// A range of the script: ms_range_open returns the start time (0: nothing is recorded) and sets the bytes allocated;
// pass both to ms_range_close, which copies the texts.
MS_API double ms_range_open(double *allocated);
MS_API void ms_range_close(double start, double allocated, int kind, const char *name, const char *detail);

// ---- for tests and benchmarks only ------------------------------------------------------------

// Makes the nth allocation from now fail; -n: that one and all later ones; 0: none. Returns the number of allocations
// that were left until the previous request would have taken effect; 0: it has taken effect, or there was none. A
// request -n that has taken effect gives 1.
MS_API double ms_fail_allocation(double nth);
// Makes collectives of this kind (op -1: all) take `seconds` longer on this rank.
MS_API void ms_dist_set_delay(int op, double seconds);
// MPI's own float32 collective on raw memory, for comparison. op: 0 all-gather, 1 reduce-scatter, 2 all-reduce,
// 3 barrier.
MS_API ms_status ms_dist_mpi_own(int op, void *out, const void *in, double count);

#endif  // MS_TYPES_ONLY

#ifdef __cplusplus
}
#endif

#endif
