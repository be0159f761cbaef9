-- SPDX-License-Identifier: MIT
--- Calls that several ranks make together. If such a call fails on one rank, its peers would wait forever, and a script
--- that survives the error would match later collectives wrongly. The error therefore makes the peers' calls fail, too.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"

local lib = engine.lib
local getmetatable, type, pcall, error, tostring = getmetatable, type, pcall, error, tostring

local M = {}

---@class Group
local Group = { __name = "Group" }
M.Group = Group

--- Joins the job if this rank has not joined yet. An error before that cannot be published.
function M.ensure()
  if lib.ms_dist_is_initialized() == 0 and lib.ms_dist_init(nil, 0) ~= 0 then errors.fail() end
end
local ensure = M.ensure

-- Finds a group in an argument of a call, or in its options.
local function group_in(x)
  if type(x) ~= "table" then return nil end
  local mt = getmetatable(x)
  if mt == Group then return x end
  if mt ~= nil then return nil end
  return x.group or x.process_group
end

local function standing_for(wrapper, fn)
  opts.original[wrapper] = fn
  return wrapper
end

-- ---- one collective ------------------------------------------------------------------------------

-- The id of the group of a call; the id of the world if the arguments do not show it.
local function intended(a, b, c)
  local g = group_in(c) or group_in(b) or group_in(a)
  return getmetatable(g) == Group and g.id or 0
end

local function finish_one(since, mismatches, find, a, b, c, ok, ...)
  if ok then return ... end
  -- Do not publish a mismatch: every member detects it by itself.
  if lib.ms_dist_mismatches() == mismatches then
    lib.ms_dist_refused(find(a, b, c), tostring((...)), errors.user_line(2), since)
  end
  error((...), 0)
end

--- Wraps fn, which issues one collective. The group is searched among the first three arguments, or has the id that
--- find(a, b, c) returns.
---@param fn function
---@param find? fun(...): number
---@return function
function M.one(fn, find)
  find = find or intended
  return standing_for(function(a, b, c)
    ensure()
    return finish_one(lib.ms_dist_errors(), lib.ms_dist_mismatches(), find, a, b, c, pcall(fn, a, b, c))
  end, fn)
end

-- ---- several -------------------------------------------------------------------------------------

-- Whether other ranks make this call, too.
local function has_peers(a, b, c, d)
  local g = group_in(a) or group_in(b) or group_in(c) or group_in(d)
  if getmetatable(g) ~= Group then return true end
  return lib.ms_dist_rank(g.id) >= 0 and lib.ms_dist_size(g.id) > 1
end

local function finish(since, mismatches, concerns, a, b, c, d, ok, ...)
  if ok then return ... end
  if lib.ms_dist_mismatches() == mismatches and concerns(a, b, c, d) then
    lib.ms_dist_publish_error(tostring((...)), since)
  end
  error((...), 0)
end

--- Wraps fn, which may issue any number of collectives in any groups: its errors are published to the world. fn has at
--- most five arguments. concerns(a, b, c, d): whether peers make the call, too; used if the arguments contain no group.
---@param fn function
---@param concerns? fun(...): boolean
---@return function
function M.several(fn, concerns)
  concerns = concerns or has_peers
  return standing_for(function(a, b, c, d, e)
    ensure()
    return finish(lib.ms_dist_errors(), lib.ms_dist_mismatches(), concerns, a, b, c, d, pcall(fn, a, b, c, d, e))
  end, fn)
end

return M
