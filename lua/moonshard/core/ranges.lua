-- SPDX-License-Identifier: MIT
--- Ranges of the profiler: calls of modules, and ranges that the script makes. The memory history and the profile of a
--- run use those of modules, too.
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"

local lib, ffi, bit = engine.lib, engine.ffi, require "bit"

local M = {}

local before = ffi.new "double[1]"

local function close(from, allocated, kind, name, ...)
  lib.ms_range_close(from, allocated, kind, name, "")
  return context.results(...)
end

--- Runs fn(...) as a range made by the script; if no recording is active, only calls fn.
function M.user(name, fn, ...)
  local from = lib.ms_range_open(before)
  if from == 0 then return fn(...) end
  return close(from, before[0], ffi.C.MS_RANGE_USER, name, pcall(fn, ...))
end

local wanted, changed
local mark                                              -- set while a memory history or a run's profile is recorded

--- Determines whether a recording needs ranges of module calls, and passes the answer to the function registered by
--- on_change.
function M.look()
  wanted = mark ~= nil or bit.band(lib.ms_trace_wanted(), ffi.C.MS_TRACE_MODULES) ~= 0
  if changed then changed(wanted) end
end

--- Registers fn(wanted), called when a recording begins or ends, and at once if a recording needs module ranges now.
---@param fn fun(wanted: boolean)  wanted: whether a recording needs ranges of module calls
function M.on_change(fn)
  changed = fn
  if wanted then fn(wanted) end
end

--- Registers fn(name): it is called before the body of each module call, and returns a function that is called after
--- the body. nil: nothing is called from now on. Returns the function that was registered before.
---@param fn (fun(name: string): fun())?
---@return (fun(name: string): fun())?
function M.follow_modules(fn)
  local earlier = mark
  mark = fn
  M.look()
  return earlier
end

local function left(leave, ...)
  leave()
  return ...
end

--- Runs fn(...) as the range of a module call.
function M.module(name, fn, ...)
  local from = lib.ms_range_open(before)
  if from == 0 then M.look() end                        -- no profile is active: one may have ended without a stop
  if not mark then return close(from, before[0], ffi.C.MS_RANGE_MODULE, name, pcall(fn, ...)) end
  return close(from, before[0], ffi.C.MS_RANGE_MODULE, name, left(mark(name), pcall(fn, ...)))
end

return M
