-- SPDX-License-Identifier: MIT
--- What blocks (functions that run another one with something changed) set for the code inside them. Where that is a
--- mode of the code, each coroutine has its own: it begins with those of the code that first resumes it, and a block
--- open across a yield changes them for this coroutine only. Where it is a change of shared objects (no_sync,
--- summon_full_params), the function must not yield.
local pcall, error = pcall, error

---@class Context
---@field device integer?  of with_device
---@field warnings string[]?  the innermost list of catch_warnings
---@field wrap table?  options of the enable_wrap under way
---@field block string?  the innermost block of this coroutine that must not be left by a yield
local context = {}

local M = { now = context }

local function leave(before, ok, ...)
  context.block = before
  if not ok then error((...), 0) end
  return ...
end

--- fn(…) as the body of a block that no yield may leave.
---@param name string
---@param fn function
function M.block(name, fn, ...)
  local before = context.block
  context.block = name
  return leave(before, pcall(fn, ...))
end

--- The modes of the code that runs now.
function M.copy() return { device = context.device, warnings = context.warnings, wrap = context.wrap } end

--- Puts other modes in their place; returns nothing, so save them first.
function M.set(modes)
  context.device, context.warnings, context.wrap, context.block = modes.device, modes.warnings, modes.wrap, modes.block
end

--- Raises where the coroutine that runs must not yield.
function M.check_yield()
  if context.block then
    require("moonshard.core.errors").raise(
      "coroutine.yield inside %s: its function must run to its end, since its changes apply to the whole process "
      .. "until it returns; yield before or after it", context.block)
  end
end

return M
