-- SPDX-License-Identifier: MIT
--- Ranges of calls under the profiler, for modules' calls and a script's own.
local engine = require "moonshard.core.ffi"

local lib, ffi, bit = engine.lib, engine.ffi, require "bit"

local M = {}

local before = ffi.new "double[1]"

local function close(from, allocated, kind, name, ok, ...)
  lib.ms_range_close(from, allocated, kind, name, "")
  if not ok then error((...), 0) end
  return ...
end

--- fn(...) as a range of the script's own; not recording, it only calls fn.
function M.user(name, fn, ...)
  local from = lib.ms_range_open(before)
  if from == 0 then return fn(...) end
  return close(from, before[0], ffi.C.MS_RANGE_USER, name, pcall(fn, ...))
end

local wanted, changed

--- Does a recording want calls of modules as ranges? Tells what on_change was given.
function M.look()
  wanted = bit.band(lib.ms_trace_wanted(), ffi.C.MS_TRACE_MODULES) ~= 0
  if changed then changed(wanted) end
end

--- fn(wanted) runs when recordings begin or cease to want calls of modules; nn registers it.
---@param fn fun(wanted: boolean)
function M.on_change(fn)
  changed = fn
  if wanted then fn(wanted) end
end

--- fn(...) as the range of a module's call.
function M.module(name, fn, ...)
  local from = lib.ms_range_open(before)
  if from == 0 then M.look() end                        -- the profile that wanted them was lost
  return close(from, before[0], ffi.C.MS_RANGE_MODULE, name, pcall(fn, ...))
end

return M
