-- SPDX-License-Identifier: MIT
--- luajit planted.lua ROOT LIBRARY FAULT [RANKS]: commits one fault. FAULT: a function of planted.c; `tensor_overflow`
--- (writes one byte past the end of a tensor of the engine), `tensor_after_release` (writes to a released tensor) or
--- `engine_leak` (leaves a file of the engine open); or `none`. With RANKS, under mpirun, all ranks meet before the
--- fault.
local root, library, fault = arg[1], arg[2], arg[3]
package.path = ("@/lua/?.lua;@/lua/?/init.lua;"):gsub("@", root) .. package.path
local ffi = require "ffi"
local ms = require "moonshard"
local lib = require("moonshard.core.ffi").lib

ffi.cdef [[
int leak(int); int overflow(int); int use_after_free(int); int undefined(int); int uninitialised(int); int race(int);
void *memset(void *, int, size_t);
]]
if arg[4] then ms.dist.barrier() end
if fault == "none" then
  local t = ms.ones(100)
  assert(t:sum():item() == 100)
elseif fault == "tensor_overflow" or fault == "tensor_after_release" then
  local t = ms.ones(100)
  local data = lib.ms_data_ptr(t.id)
  if fault == "tensor_after_release" then t:release() end
  ffi.C.memset(ffi.cast("char *", data) + (fault == "tensor_overflow" and 400 or 0), 1, 1)
elseif fault == "engine_leak" then
  local path = os.tmpname()
  ms.save(path, { x = ms.ones(3) })
  assert(lib.ms_loader_open(path, 0) ~= nil)
  os.remove(path)
else
  local planted = ffi.load(library)
  planted[fault](0)
end
