-- SPDX-License-Identifier: MIT
--- Calls that several ranks make together. If such a call fails on one rank, it still takes its number in its groups,
--- so that the peers' calls fail, too, instead of waiting forever or meeting a later call of this rank.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local launcher = require "moonshard.core.launcher"
local opts = require "moonshard.core.opts"
local places = require "moonshard.core.places"

local lib, state = engine.lib, engine.state
local getinfo = debug.getinfo
local getmetatable, type, pcall, error, tostring = getmetatable, type, pcall, error, tostring

local M = {}

---@class Group
local Group = { __name = "Group" }
M.Group = Group

--- What this process is, for messages, if it inherited a rank's environment but is no rank (a worker of a DataLoader);
--- nil: it may be a rank.
---@type string?
M.not_a_rank = nil

--- Joins the job.
---@param backend? string
---@param timeout number  in seconds; 0: unchanged
function M.join(backend, timeout)
  if M.not_a_rank and launcher().name ~= "" then
    errors.raise("dist: %s is not a rank and cannot join the job; call dist.rank() and similar functions in the "
      .. "script's own process, and pass on their results", M.not_a_rank)
  end
  if lib.ms_dist_init(backend, timeout) ~= 0 then errors.fail() end
end

--- Joins the job if this rank has not joined yet.
function M.ensure()
  if state.dist_failures < 0 then M.join(nil, 0) end
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

--- The script's line of the latest call of a function wrapped by M.one; nil: unknown.
M.site = nil

local lines_of = setmetatable({}, { __mode = "k" })

-- The id of the group of a call; the id of the world if its arguments contain no group.
local function intended(a, b, c)
  local g = group_in(c) or group_in(b) or group_in(a)
  return getmetatable(g) == Group and g.id or 0
end

local function finish_one(since, find, a, b, c, ok, ...)
  if ok then
    places.mark()
    return ...
  end
  lib.ms_dist_refused(find(a, b, c), tostring((...)), errors.user_line(2), since)
  error((...), 0)
end

-- The script's line that called the wrapper that calls this function. A lookup takes microseconds, so lines are cached
-- by function. If the calling function belongs to the library, its caller's line is looked up.
local function call_site()
  local info = getinfo(3, "fl")
  local fn = info and info.func
  if not fn then return errors.user_line(2) end
  local lines = lines_of[fn]
  if lines == nil then
    local source = getinfo(fn, "S")
    lines = source.what ~= "C" and source.source:sub(1, #errors.library) ~= errors.library and {}
    lines_of[fn] = lines
  end
  if not lines then return errors.user_line(2) end
  local text = lines[info.currentline]
  if not text then
    text = errors.user_line(2)
    lines[info.currentline] = text
  end
  return text
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
    -- Here and not in fn: LuaJIT cannot compile a function that pcall runs and that calls debug.getinfo.
    M.site = call_site()
    return finish_one(state.dist_failures, find, a, b, c, pcall(fn, a, b, c))
  end, fn)
end

-- ---- several -------------------------------------------------------------------------------------

-- Whether other ranks make this call, too.
local function has_peers(a, b, c, d)
  local g = group_in(a) or group_in(b) or group_in(c) or group_in(d)
  if getmetatable(g) ~= Group then return true end
  return lib.ms_dist_rank(g.id) >= 0 and lib.ms_dist_size(g.id) > 1
end

local function finish(concerns, a, b, c, d, ok, ...)
  if ok then
    places.mark()
    return ...
  end
  if concerns(a, b, c, d) then lib.ms_dist_failed(tostring((...))) end
  error((...), 0)
end

local function finish_apart(concerns, a, ok, ...)
  if ok then return ... end
  if concerns(a) then lib.ms_dist_failed(tostring((...))) end
  error((...), 0)
end

--- Wraps fn(a, b), which issues no collective but changes state that ranks share, such as sharded parameters. If it
--- fails on some ranks only, this state is no longer consistent, so its peers must not go on.
---@param fn function
---@param concerns fun(a: any): boolean  whether peers make the call, too
---@return function
function M.apart(fn, concerns)
  return standing_for(function(a, b)
    if state.dist_failures < 0 then return fn(a, b) end       -- this rank has not joined a job
    return finish_apart(concerns, a, pcall(fn, a, b))
  end, fn)
end

--- Wraps fn, which may issue any number of collectives in any groups: its errors fail the
--- peers' calls in all groups. fn has at most five arguments. concerns(a, b, c, d): whether peers make the call, too (default: unless the arguments contain a
--- group that has no other ranks or lacks this rank).
---@param fn function
---@param concerns? fun(...): boolean
---@return function
function M.several(fn, concerns)
  concerns = concerns or has_peers
  return standing_for(function(a, b, c, d, e)
    ensure()
    return finish(concerns, a, b, c, d, pcall(fn, a, b, c, d, e))
  end, fn)
end

return M
