// SPDX-License-Identifier: MIT
// device/device.h -- the interface to GPUs: one versioned table that the plugin libmoonshard_cuda.so exports. The
// engine links neither CUDA nor its kernels; it loads the plugin when a tensor is first created on device "cuda". If
// the plugin is unavailable, the reason is kept as text (ms_cuda_why).
//
// Every device has four streams (ms_stream_kind). Operators run on the compute stream in the order of their calls,
// and the host does not wait for them. Reading a result on the host waits first (ms__move to the CPU, ms__cuda_sync).
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
struct ms_cuda_engine;  // functions of the engine that the plugin may call: ops/cuda.h
typedef struct {
    const char *op;
    ms_status (*run)(struct ms_call *c);
} ms_cuda_kernel;

// One leaf of a fused optimizer step (train/optim.c).
enum { MS_OPTIM_FACTORS = 12 };
typedef struct ms_optim_job {
    int kind, dtype;
    void *p, *state[MS_OPTIM_STATES];  // NULL: this step keeps no such state
    const void *g;
    double factors[MS_OPTIM_FACTORS];
    int64_t numel, block;  // block: number of the leaf's first block
    int device;
} ms_optim_job;

typedef enum { MS_TO_DEVICE, MS_TO_HOST, MS_ON_DEVICE } ms_direction;

// On failure a function stores its text with the engine's fail and returns the status. stream: an ms_stream_kind.
typedef struct ms_cuda_table {
    int version, emulated;
    // Returns the number of devices, at least 1; or -1 with the reason in text.
    int (*start)(const struct ms_cuda_engine *engine, char *text, size_t n);
    ms_status (*describe)(int index, char *text, size_t n);
    // MS_ENOMEM without a text when the device is out of memory.
    ms_status (*alloc)(int index, size_t bytes, void **out);
    void (*free)(int index, void *p);
    // For memory checkers: in stream order, the first `used` of p's `size` bytes are owned from here on. NULL: no
    // checker.
    void (*mark)(int index, void *p, size_t used, size_t size);
    ms_status (*host_alloc)(size_t bytes, void **out);  // pinned
    void (*host_free)(void *p);
    // Queued. Host memory that is not pinned is staged, so it may be reused at once.
    ms_status (*copy)(int index, int stream, void *dst, const void *src, size_t bytes, ms_direction way);
    // On the compute stream of `from`; both devices' compute streams then wait for it.
    ms_status (*copy_peer)(int to, void *dst, int from, const void *src, size_t bytes);
    ms_status (*fill)(int index, int stream, void *p, int byte, size_t bytes);
    ms_status (*sync)(int index, int stream);                  // stream < 0: all; also reports errors of kernels
    ms_status (*record)(int index, int stream, void **event);  // a new event after the work now in the stream
    int (*done)(void *event);                                  // 1, 0, or < 0: failed
    ms_status (*wait)(void *event);                            // the host waits
    ms_status (*stream_wait)(int index, int stream, void *event);
    void (*drop)(void *event);
    // Sharing memory between processes of this machine: exports an allocation as a handle, and maps a handle.
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

// The engine's side of the plugin: its table, and where kernels are registered. ops/cuda.c sets it when the library is
// loaded.
typedef struct {
    const struct ms_cuda_engine *engine;
    void (*add_kernel)(const char *op, ms_status (*run)(struct ms_call *c));
} ms_cuda_client;
extern ms_cuda_client ms__cuda_client;

// The loaded table; NULL while no GPU was requested, or if there is none.
const ms_cuda_table *ms__cuda(void);
// Loads it; MS_EUNSUPPORTED with the reason if there is none, MS_EINVAL if there is no such device.
ms_status ms__cuda_need(int device, const char *what);
ms_status ms__cuda_sync(int device, int stream);

// Copies bytes between and within devices, in the order of the compute stream. A copy to the CPU waits for its end.
ms_status ms__move(int to, void *dst, int from, const void *src, size_t bytes);
ms_status ms__set_bytes(int device, void *p, int byte, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
