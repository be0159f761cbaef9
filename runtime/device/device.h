// SPDX-License-Identifier: MIT
// device/device.h -- the GPU as the engine sees it: one versioned table that the plugin beside the engine
// exports (libmoonshard_cuda.so). The engine links neither CUDA nor its kernels; it loads the plugin
// when a tensor is first wanted on device "cuda". Why it is not there stays readable as text.
//
// Every device has four streams (ms_stream_kind). Operators run on the compute stream, in the order of
// their calls; the host does not wait for them. What reads a result on the host waits first
// (ms__move to the CPU, ms__cuda_sync).
#ifndef MS_DEVICE_H
#define MS_DEVICE_H

#include "base/base.h"
#include "device/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MS_CUDA_TABLE_VERSION = 1, MS_CUDA_DEVICES = 16, MS_CUDA_HANDLE = 64 };
#define MS_CUDA_SYMBOL "ms_cuda_table_v1"

struct ms_call;
struct ms_tensor;
struct ms_pending;
struct ms_cuda_engine;  // what the plugin may call: ops/cuda.h
typedef struct {
    const char *op;
    ms_status (*run)(struct ms_call *c);
} ms_cuda_kernel;

// One leaf of a fused optimizer step; see train/optim.h.
enum { MS_OPTIM_FACTORS = 12 };
typedef struct ms_optim_job {
    int kind, dtype;
    void *p, *state[MS_OPTIM_STATES];  // NULL: this step keeps no such state
    const void *g;
    double factors[MS_OPTIM_FACTORS];
    int64_t numel, block;  // number of its first block
    int device;
} ms_optim_job;

typedef enum { MS_TO_DEVICE, MS_TO_HOST, MS_ON_DEVICE } ms_direction;

// A function that fails leaves its text by the engine's fail and returns its status. stream: an ms_stream_kind.
typedef struct ms_cuda_table {
    int version, emulated;
    // Number of devices, at least 1; or -1 and why not.
    int (*start)(const struct ms_cuda_engine *engine, char *text, size_t n);
    ms_status (*describe)(int index, char *text, size_t n);
    // MS_ENOMEM without a text when the device has no more.
    ms_status (*alloc)(int index, size_t bytes, void **out);
    void (*free)(int index, void *p);
    // For checkers: from here on in stream order, the first `used` bytes of p's `size` are somebody's. NULL: nobody
    // checks.
    void (*mark)(int index, void *p, size_t used, size_t size);
    ms_status (*host_alloc)(size_t bytes, void **out);  // pinned
    void (*host_free)(void *p);
    // Queued. Host memory that is not pinned may be used again at once: it is staged.
    ms_status (*copy)(int index, int stream, void *dst, const void *src, size_t bytes, ms_direction way);
    ms_status (*copy_peer)(int to, void *dst, int from, const void *src,
                           size_t bytes);  // compute stream of `from`; both then wait
    ms_status (*fill)(int index, int stream, void *p, int byte, size_t bytes);
    ms_status (*sync)(int index, int stream);  // stream < 0: all; also reports what kernels complained about
    ms_status (*record)(int index, int stream, void **event);  // a new event after what the stream has now
    int (*done)(void *event);                                  // 1, 0, or < 0: failed
    ms_status (*wait)(void *event);                            // the host waits
    ms_status (*stream_wait)(int index, int stream, void *event);
    void (*drop)(void *event);
    // Memory of another process on this machine: an allocation's handle, and its mapping there.
    ms_status (*share)(void *p, uint8_t handle[MS_CUDA_HANDLE]);  // p as alloc returned it
    ms_status (*open)(int index, const uint8_t handle[MS_CUDA_HANDLE], void **out);
    void (*close)(int index, void *p);
    ms_status (*copy_tensor)(struct ms_tensor *dst,
                             const struct ms_tensor *src);  // one device; broadcast, cast, any strides
    ms_status (*fill_tensor)(struct ms_tensor *t, double value);
    const ms_cuda_kernel *const *families;  // NULL-terminated list of lists that end with op NULL
    ms_status (*optim)(int index, int n, const ms_optim_job *jobs, int64_t blocks, int64_t block);
    // Sum of |g|^p (or the maximum, p infinite) over n elements into *out (double, on the device); and g *= f.
    ms_status (*norm)(int index, int dtype, const void *g, int64_t n, double p, double *out);
    ms_status (*scale)(int index, int dtype, void *g, int64_t n, double f);
} ms_cuda_table;

// What the plugin gets of the engine, and who takes its kernels: ops/cuda.c sets it when the library is loaded.
typedef struct {
    const struct ms_cuda_engine *engine;
    void (*add_kernel)(const char *op, ms_status (*run)(struct ms_call *c));
} ms_cuda_client;
extern ms_cuda_client ms__cuda_client;

// The loaded table, or NULL: nobody has asked for a GPU yet, or there is none.
const ms_cuda_table *ms__cuda(void);
// Loads it; MS_EUNSUPPORTED with the reason where there is none or no such device.
ms_status ms__cuda_need(int device, const char *what);
ms_status ms__cuda_sync(int device, int stream);

// Bytes between and within devices, in the order of the compute stream. To the CPU it waits until they are there.
ms_status ms__move(int to, void *dst, int from, const void *src, size_t bytes);
ms_status ms__set_bytes(int device, void *p, int byte, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
