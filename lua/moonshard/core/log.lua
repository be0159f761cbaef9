-- SPDX-License-Identifier: MIT
--- Warnings and log lines: written to stderr, with the rank as prefix if there are several ranks.
local context = require "moonshard.core.context"
local launcher = require "moonshard.core.launcher"
local opts = require "moonshard.core.opts"

local M = {}

--- The rank and the number of ranks. Before dist.init they come from the launcher's variables; without a launcher they
--- are 0 and 1.
---@return integer rank
---@return integer world
function M.rank()
  local dist = package.loaded["moonshard.dist"]
  local ok, rank, world
  if dist then
    ok, rank, world = pcall(function()
      if dist.is_initialized() then return dist.rank(), dist.world_size() end
      return nil, nil
    end)
  end
  if not ok or not rank then
    local launch = launcher()
    return launch.rank, launch.world
  end
  return rank, world
end

local function rank_prefix()
  local rank, world = M.rank()
  return world > 1 and ("[rank %d] "):format(rank) or ""
end

local now = context.now

-- The first KEPT warnings that were written while no function was registered by M.follow, such as those of dist.init.
local kept, follower = {}, nil
local KEPT = 100

--- Registers fn(message), which is called with each warning that is written to stderr, and first with the
--- warnings that were written while no function was registered, at most 100. nil: removes the function.
---@param fn? fun(message: string)
function M.follow(fn)
  follower = fn
  if not fn then return end
  local earlier = kept
  kept = {}
  for _, message in ipairs(earlier) do fn(message) end
end

--- Writes a warning to stderr, prefixed with the rank if there are several. Inside catch_warnings it is instead
--- appended to the list that catch_warnings returns.
---@param message string  without a newline
function M.warn(message)
  opts.expect(message, opts.string, "warn: message")
  if now.warnings then
    now.warnings[#now.warnings + 1] = message
    return
  end
  -- A single write, because the lines of several ranks must not interleave.
  io.stderr:write(rank_prefix() .. "warning: " .. message .. "\n")
  if follower then
    follower(message)
  elseif #kept < KEPT then
    kept[#kept + 1] = message
  end
end

local reported = {}

--- As M.warn, but writes each message only once per process. Inside catch_warnings it is always appended
--- to the list that catch_warnings returns.
---@param message string  without a newline
function M.warn_once(message)
  if not now.warnings then
    if reported[message] then return end
    reported[message] = true
  end
  M.warn(message)
end

--- Writes a line to stderr, prefixed with the rank if there are several.
---@param format string  as string.format takes it
---@param ... any  arguments of format
function M.log(format, ...)
  if select("#", ...) > 0 then opts.expect(format, opts.string, "log: format") end
  io.stderr:write(rank_prefix() .. (select("#", ...) > 0 and format:format(...) or tostring(format)) .. "\n")
end

local function finish(before, list, ok, ...)
  now.warnings = before
  if not ok then error((...), 0) end
  return list, ...
end

--- Runs fn(…) and collects the warnings raised inside.
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return string[] warnings
---@return any  the results of fn
function M.catch_warnings(fn, ...)
  opts.expect(fn, opts.fn, "catch_warnings: argument 1")
  local before, list = now.warnings, {}
  now.warnings = list
  return finish(before, list, pcall(fn, ...))
end

return M
