// SPDX-License-Identifier: MIT
// device/device.h -- the interface to GPUs: a versioned function table that the plugin libmoonshard_cuda.so exports.
// The engine links neither CUDA nor its kernels; it loads the plugin when a script first asks for a GPU or for a tensor
// on one. If the plugin is unavailable, ms_cuda_why returns the reason.
//
// Every device has four streams (ms_stream_kind). Operators run on the compute stream in the order of their calls, and
// the host does not wait for them. Reading a result on the host waits for it (ms__move to the CPU, ms__cuda_sync).
#ifndef MS_DEVICE_H
#define MS_DEVICE_H

#include "base/base.h"
#include "device/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MS_CUDA_TABLE_VERSION = 7, MS_CUDA_DEVICES = 16, MS_CUDA_HANDLE = 64 };
#define MS_CUDA_SYMBOL "ms_cuda_table_v1"
#define MS_CUDA_NULL "ms_cuda_null_table"  // a function of the null device, which returns its table

struct ms_call;
struct ms_tensor;
struct ms_pending;
struct ms_cuda_engine;  // functions of the engine that the plugin may call: ops/cuda.h
typedef struct {
    const char *op;
    ms_status (*run)(struct ms_call *c);
} ms_cuda_kernel;

// MS_OPTIM_SIGN: index in `factors`, after the formula's own, of the gradient's sign: -1 to maximize, else 1.
enum { MS_OPTIM_FACTORS = 11, MS_OPTIM_SIGN = MS_OPTIM_FACTORS };

// One leaf of a fused optimizer step (train/optim.c).
typedef struct ms_optim_job {
    int kind, dtype;
    void *p, *state[MS_OPTIM_STATES];  // state[k] is NULL if this step does not use it
    float *master;                     // float32 copy of p: it is stepped, and p gets its rounded values; NULL: none
    const void *g;
    double scale;  // multiplied with the gradient, which is then rounded to its dtype; 1: none
    double factors[MS_OPTIM_FACTORS + 1];
    int64_t numel, block;  // block: index of the leaf's first block
    int device;
} ms_optim_job;

// A pass over leaves of one optimizer on one device: n jobs, divided into `blocks` blocks of `block` elements.
typedef struct ms_optim_pass {
    int n;
    const ms_optim_job *jobs, *there;  // there: a copy of the jobs on the device; NULL: optim copies them there
    int64_t blocks, block;
} ms_optim_pass;

// ms_norm_part: one gradient of clip_grad_norm_ or unscale_ (train/). ms_norm_job: the norms of the gradients on
// one device.
typedef struct ms_norm_part {
    void *g;
    int dtype, owner;      // owner: index of the sum to which the gradient contributes
    int64_t numel, block;  // block: index of the gradient's first block
} ms_norm_part;
typedef struct ms_norm_job {
    int n, owners;
    double p;               // order of the norm: sums of |g|^p, or for an infinite p the maximum of |g|
    int64_t piece, blocks;  // elements of a block, number of blocks: chosen by ms_cuda_gradients.norms
    ms_block *room;         // memory on the device, for the sums; the caller frees it
    // A copy of the list of gradients that is on the device already, with each `block` as an earlier call of norms has
    // set it; NULL: norms copies its list to the device
    const ms_norm_part *there;
} ms_norm_job;

// What an optimizer step reads on the device, so that the host does not wait for it. If `job` is set, its sums cover
// all gradients, and the step multiplies each gradient that it reads by the factor that limits their norm
// (clip_grad_norm_).
typedef struct ms_cuda_step {
    const ms_norm_job *job;  // NULL: the gradients are not scaled
    double max_norm;
    int dtype;
    void *norm;         // gets the norm before clipping, a scalar of this dtype on the device
    const float *skip;  // on the device: if it is not 0, the step changes nothing; NULL: the step is made
} ms_cuda_step;

// What a GPU counts in captured steps with a gradient scaler (train/tally.c): `done` decisions, of which `value` were
// to step. The kernel that counts copies both to `host`, pinned memory, in one store.
typedef struct ms_tally_counts {
    uint32_t done, value;
} ms_tally_counts;
typedef struct ms_tally_place {
    ms_tally_counts *there;
    uint64_t *host;  // an ms_tally_counts
} ms_tally_place;

// The choice of the factors of n jobs by the number of steps that a GPU has made. All pointers refer to its memory.
// Each job has a group; `factors` has for each group sets->depth sets of MS_OPTIM_FACTORS + 1 factors: one for the case
// that no step was made since the count was sets->base, one for the case that one was made, and so on. With depth 0 the
// jobs have their factors already.
typedef struct ms_optim_sets {
    uint32_t base;
    int32_t depth;
} ms_optim_sets;
typedef struct ms_optim_choice {
    int n;
    ms_optim_job *jobs;
    const ms_optim_sets *sets;
    const double *factors;
    const int32_t *group;
    const float *skip;  // if it is not 0, the step that follows is not made
    ms_tally_place tally;
} ms_optim_choice;

// A change of a gradient scaler's scale by the flags of all its optimizers. All pointers refer to the GPU's memory.
typedef struct ms_scale_change {
    int n;
    const float *found[MS_CUDA_DEVICES + 1];
    float *scale;
    const ms_scale_rule *rule;  // its growth_tracker replaces *tracker, unless it is NaN
    double *tracker;
} ms_scale_change;

// dst[i] = src[i] / divisor * scale, with one rounding to dst's dtype. The dtypes are floating-point: equal, or one of
// them float32. dst may be src.
typedef struct ms_cuda_finish {
    void *dst;
    const void *src;
    int dst_dtype, src_dtype;
    int64_t n;
    double divisor, scale;
} ms_cuda_finish;

// A reduction over ranks (comm/movers): of every part, n_ranks sources are combined in their order and the result is
// stored in n_dst destinations. Half types are added in float32 and rounded once, other types in their own type: the
// result is bitwise equal to the CPU's. src and dst hold the pointers of all parts: part i has src[i * n_ranks ...]
// and dst[i * n_dst ...]. A destination may be a source.
enum { MS_CUDA_MEMBERS = 64 };  // most ranks of a reduction
typedef struct ms_cuda_reduction {
    int dtype, reduction, n_ranks, n_dst, n_parts;  // reduction: MS_DIST_SUM ...
    double scale;                                   // multiplied with the result before it is rounded
    const int64_t *numel, *zeros;                   // of every part: elements, and elements of zeros that follow them
    const char *const *src;
    char *const *dst;
} ms_cuda_reduction;

// A 2-d copy on a device, as of cudaMemcpy2D: lines of `bytes` bytes, which begin dst_line and src_line bytes apart.
typedef struct ms_cuda_lines {
    void *dst;
    const void *src;
    size_t dst_line, src_line, bytes, lines;
} ms_cuda_lines;

// A copy of numel contiguous elements, one of a list: between float32, bfloat16 and float16, or within one dtype.
typedef struct ms_cuda_copy {
    void *dst;
    const void *src;  // NULL: zeros
    int64_t numel;
    int dst_dtype, src_dtype;
} ms_cuda_copy;

// MS_TO_DEVICE_LATER: as MS_TO_DEVICE, from pinned memory that the caller does not change before the copy has run.
typedef enum { MS_TO_DEVICE, MS_TO_HOST, MS_ON_DEVICE, MS_TO_DEVICE_LATER } ms_direction;

// The part of the table (ms_cuda_table) for passes over lists of gradients.
typedef struct {
    // norms: computes for each owner the sum of |g|^p over its gradients, or for an infinite p the maximum of |g|, at
    // the beginning of j->room, which it allocates. clip: scales the gradients so that their norm is at most max_norm,
    // and stores the norm before scaling in *out, a scalar on the device (NULL: nowhere). *total: the norm of all
    // gradients, if some are on other devices or ranks; NULL: it is computed from this device's sums.
    ms_status (*norms)(int index, ms_norm_job *j, ms_norm_part *list);
    ms_status (*clip)(int index, const ms_norm_job *j, const double *total, double max_norm, int dtype, void *out);
    // Multiplies the gradients by *inverse, and stores 1 in *found if one of them is not finite. stop: that gradient
    // and those after it keep their values; each part's owner is then its index in `list`. Allocates j->room as norms
    // does.
    ms_status (*unscale)(int index, ms_norm_job *j, ms_norm_part *list, const float *inverse, float *found, bool stop);
    // Multiplies *scale by `bad` if *found is above 0, otherwise by `good` unless the product overflows float32.
    ms_status (*adapt)(int index, float *scale, const float *found, double bad, double good);
    // For captured steps. choose: copies each job's factors to the job, and counts the step that follows unless it is
    // skipped. adapt_by: changes the scale and its count of steps with finite gradients by PyTorch's rule.
    ms_status (*choose)(int index, const ms_optim_choice *c);
    ms_status (*adapt_by)(int index, const ms_scale_change *c);
} ms_cuda_gradients;

// The part of the table (ms_cuda_table) for collectives: events and memory that processes share, copies, reductions,
// pinned memory.
typedef struct ms_cuda_ranks {
    // Events for which other processes of this machine can wait (stream_wait): made by event_new, opened there by
    // event_open. A wait refers to the latest record at the time of the call. event_record must be called for the
    // device of event_new.
    ms_status (*event_new)(int index, void **event, uint8_t handle[MS_CUDA_HANDLE]);
    ms_status (*event_open)(int index, const uint8_t handle[MS_CUDA_HANDLE], void **event);
    ms_status (*event_record)(int index, int stream, void *event);
    ms_status (*copy_lines)(int index, int stream, const ms_cuda_lines *l);
    ms_status (*reduce)(int index, int stream, const ms_cuda_reduction *r);
    ms_status (*copy_all)(int index, int stream, int n, const ms_cuda_copy *list);  // in as few launches as possible
    // Pins host memory that this process has mapped.
    ms_status (*pin)(void *p, size_t bytes);
    ms_status (*pause)(int index, int stream, double seconds);  // for specs: keeps the stream busy
    // For libraries that queue work themselves (NCCL): makes the device current in this thread and returns the stream,
    // a cudaStream_t; NULL with the error set.
    void *(*native_stream)(int index, int stream);
    ms_status (*finish)(int index, int stream, const ms_cuda_finish *f);
    // Sharing by file descriptors, in place of share and open, where the driver has no handles for memory (CUDA IPC):
    // to_fd exports p, as returned by alloc, as a descriptor that the caller closes, or sets *fd = -1 if share exports
    // it. from_fd maps the memory; the caller may then close fd. close unmaps it.
    ms_status (*to_fd)(void *p, int *fd, size_t *bytes);
    ms_status (*from_fd)(int index, int fd, size_t bytes, void **out);
} ms_cuda_ranks;

// The part of the table for captured steps (device/capture.c): work of the compute stream as a CUDA graph.
typedef struct {
    // From begin to end, what this thread queues on the compute stream does not run, but becomes a graph. Meanwhile the
    // thread must neither wait nor copy from host memory. After a failure the stream is as before begin.
    ms_status (*begin)(int index);
    ms_status (*end)(int index, void **graph);
    ms_status (*launch)(int index, void *graph);
    void (*drop)(int index, void *graph);  // waits until the graph's launches have ended, then destroys it
} ms_cuda_graphs;

// On failure a function stores its message with the engine's function `fail` and returns the status. stream: an
// ms_stream_kind.
typedef struct ms_cuda_table {
    int version;
    int separate;  // 1: every block is an allocation of its own, so that the emulator detects overruns
    // Returns the number of devices, at least 1; or -1 with the reason in text.
    int (*start)(const struct ms_cuda_engine *engine, char *text, size_t n);
    ms_status (*describe)(int index, char *text, size_t n);
    // Returns MS_ENOMEM without storing a message when the device is out of memory.
    ms_status (*alloc)(int index, size_t bytes, void **out);
    void (*free)(int index, void *p);
    // For memory checkers: marks, in stream order, the first `used` of p's `size` bytes as accessible and the others as
    // not. NULL if there is no memory checker.
    void (*mark)(int index, void *p, size_t used, size_t size);
    ms_status (*host_alloc)(size_t bytes, void **out);  // pinned memory
    void (*host_free)(void *p);
    // Queues a copy. Except with MS_TO_DEVICE_LATER, the caller may write to a source in host memory as soon as the
    // call returns: the driver stages pageable memory, and the call waits for a copy from pinned memory.
    ms_status (*copy)(int index, int stream, void *dst, const void *src, size_t bytes, ms_direction way);
    // Copies on the compute stream of `from`; both devices' compute streams then wait for the copy.
    ms_status (*copy_peer)(int to, void *dst, int from, const void *src, size_t bytes);
    ms_status (*fill)(int index, int stream, void *p, int byte, size_t bytes);
    ms_status (*sync)(int index, int stream);  // stream < 0: all streams; also reports errors of kernels
    // Makes an event that completes after the work queued so far. `drop` keeps events for reuse.
    ms_status (*record)(int index, int stream, void **event);
    int (*done)(void *event);        // 1: complete, 0: not yet, < 0: failed
    ms_status (*wait)(void *event);  // makes the host wait
    ms_status (*stream_wait)(int index, int stream, void *event);
    void (*drop)(void *event);
    // Sharing memory between processes of this machine: exports an allocation as a handle, and maps a handle.
    ms_status (*share)(void *p, uint8_t handle[MS_CUDA_HANDLE]);  // p: as returned by alloc
    ms_status (*open)(int index, const uint8_t handle[MS_CUDA_HANDLE], void **out);
    void (*close)(int index, void *p);  // unmaps memory that open has mapped
    ms_status (*copy_tensor)(struct ms_tensor *dst,
                             const struct ms_tensor *src);  // within one device; broadcasts, converts, any strides
    ms_status (*fill_tensor)(struct ms_tensor *t, double value);
    // a NULL-terminated list of lists, each ending with an entry whose op is NULL
    const ms_cuda_kernel *const *families;
    // Makes an optimizer's step on the leaves of the pass. reads: what it reads on the device; NULL: nothing.
    ms_status (*optim)(int index, const ms_optim_pass *p, const ms_cuda_step *reads);
    ms_status (*scale)(int index, int dtype, void *g, int64_t n, double f);  // g *= f
    ms_cuda_gradients gradients;
    ms_cuda_ranks ranks;
    ms_cuda_graphs graphs;
} ms_cuda_table;

// What the engine offers to the plugin: a table of the engine's functions, and the function that registers kernels.
// ops/cuda.c sets ms__cuda_client when the library is loaded.
typedef struct {
    const struct ms_cuda_engine *engine;
    void (*add_kernel)(const char *op, ms_status (*run)(struct ms_call *c));
} ms_cuda_client;
extern ms_cuda_client ms__cuda_client;

// The loaded table. NULL if no GPU has been requested yet or there is none.
const ms_cuda_table *ms__cuda(void);
// Loads the plugin. MS_EUNSUPPORTED with the reason if that fails, MS_EINVAL if the device does not exist.
ms_status ms__cuda_need(int device, const char *what);

#ifdef __cplusplus
}
#endif
#endif
