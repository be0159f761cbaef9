-- SPDX-License-Identifier: MIT
--- Modes: state that block functions (with_device, catch_warnings, no_sync, ...) set while they run another function.
--- Each coroutine has its own modes. They start as those of the code that first resumes it, and a block that is open
--- across a yield changes the modes of its own coroutine only. A block that changes shared objects (no_sync,
--- summon_full_params) must not yield.
local pcall, error = pcall, error

---@class Context
---@field device integer?  number of the device that with_device set
---@field warnings string[]?  the list that the innermost catch_warnings fills
---@field wrap table?  options of the innermost enable_wrap
---@field block string?  the innermost block of this coroutine that must not yield
local context = {}

local M = { now = context }

--- The results of a pcall; if the call failed, raises its error again.
function M.results(ok, ...)
  if not ok then error((...), 0) end
  return ...
end

local function leave(before, ...)
  context.block = before
  return M.results(...)
end

--- Runs fn(…) as a block that must not yield.
---@param name string  name of the block in messages
---@param fn function  called with the arguments that follow
function M.block(name, fn, ...)
  local before = context.block
  context.block = name
  return leave(before, pcall(fn, ...))
end

--- A copy of the current modes, without `block`.
function M.copy() return { device = context.device, warnings = context.warnings, wrap = context.wrap } end

--- Replaces the modes; the caller must have saved the old ones.
function M.set(modes)
  context.device, context.warnings, context.wrap, context.block = modes.device, modes.warnings, modes.wrap, modes.block
end

--- Raises if the current coroutine is in a block that must not yield.
function M.check_yield()
  if context.block then
    require("moonshard.core.errors").raise(
      "coroutine.yield inside %s: the function passed to it must return without a yield, because until then %s affects "
      .. "the whole process; yield before or after the call", context.block, context.block)
  end
end

return M
