-- SPDX-License-Identifier: MIT
--- The table of the emulated GPU's plugin (runtime/device/device.h), for specs of functions that no script reaches.
local ffi = require "ffi"
local process = require "spec.support.process"

ffi.cdef [[
typedef struct { void *dst; const void *src; int dst_dtype, src_dtype; int64_t n; double divisor, scale; } spec_finish;
typedef struct { void *dst; const void *src; int64_t numel; int dst_dtype, src_dtype; } spec_copy;
typedef struct {
  int dtype, reduction, n_ranks, n_dst, n_parts;
  double scale;
  const int64_t *numel, *zeros;
  const char *const *src;
  char *const *dst;
} spec_reduction;
typedef struct {
  int version, separate;
  void *start, *describe, *alloc, *free, *mark;
  int (*host_alloc)(size_t bytes, void **out);
  void (*host_free)(void *p);
  void *copy, *copy_peer, *fill, *sync;
  int (*record)(int index, int stream, void **event);
  int (*done)(void *event);
  int (*wait)(void *event);
  void *stream_wait;
  void (*drop)(void *event);
  void *share, *open, *close, *copy_tensor, *fill_tensor, *families, *optim;
  int (*scale)(int index, int dtype, void *g, int64_t n, double f);
  void *norms, *clip, *unscale, *adapt;
  void *choose, *adapt_by;
  void *event_new, *event_open, *event_record, *copy_lines;
  int (*reduce)(int index, int stream, const spec_reduction *r);
  int (*copy_all)(int index, int stream, int n, const spec_copy *list);
  void *pin;
  int (*pause)(int index, int stream, double seconds);
  void *native_stream;
  int (*finish)(int index, int stream, const spec_finish *f);
} spec_cuda_table;
extern const spec_cuda_table ms_cuda_table_v1;
]]

local M = {}
--- Returns the table of the plugin, which the engine must have loaded.
function M.open()
  local build = process.build
  M.library = M.library or ffi.load(build .. "/libmoonshard_cuda_emulated.so")
  return M.library.ms_cuda_table_v1
end
return M
