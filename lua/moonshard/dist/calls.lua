-- SPDX-License-Identifier: MIT
--- Calls that several ranks make together. If such a call fails on one rank, its peers would wait forever, and a script
--- that survives the error would match later collectives wrongly. The error therefore makes the peers' calls fail, too.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local launcher = require "moonshard.core.launcher"
local opts = require "moonshard.core.opts"
local places = require "moonshard.core.places"
local resume = require "moonshard.dist.resume"

local ended, succeeded = resume.ended, resume.succeeded
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

--- Joins the job if this rank has not joined yet. An error before a rank has joined cannot be published.
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

local calling                                           -- the function inside the wrapper that was called last
local call_again

local function finish_one(since, find, a, b, c, ok, ...)
  if ok then
    places.mark()
    ended(true)
    succeeded()
    return ...
  end
  if lib.ms_dist_asked() ~= 0 then return call_again(since, find, a, b, c) end
  -- ms_dist_refused does nothing if the call failed on every member.
  lib.ms_dist_refused(find(a, b, c), tostring((...)), errors.user_line(2), since)
  ended(true)
  resume.failed_at(resume.place(a, b, c))
  error((...), 0)
end

-- Calls the function again, with the script's position, after it failed because a peer continues after an error that
-- this rank has not met. Not compiled: with the call in finish_one itself, one run in 20 of LuaJIT 2.1.0-beta3 crashed
-- in compiled code.
function call_again(since, find, a, b, c)
  resume.before(true, a, b, c)
  return finish_one(since, find, a, b, c, pcall(calling, a, b, c))
end
jit.off(call_again)

-- Called before one collective. After an earlier failure it tells the engine where in the script this call is, so that
-- the ranks' calls are matched again. Returns the number of failed collectives so far.
local function begin_one(find, a, b, c)
  local failures = state.dist_failures
  if failures > 0 and lib.ms_dist_continues(find(a, b, c)) ~= 0 then resume.before(true, a, b, c) end
  return failures
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
    calling = fn
    return finish_one(begin_one(find, a, b, c), find, a, b, c, pcall(fn, a, b, c))
  end, fn)
end

-- ---- several -------------------------------------------------------------------------------------

-- Whether other ranks make this call, too.
local function has_peers(a, b, c, d)
  local g = group_in(a) or group_in(b) or group_in(c) or group_in(d)
  if getmetatable(g) ~= Group then return true end
  return lib.ms_dist_rank(g.id) >= 0 and lib.ms_dist_size(g.id) > 1
end

local function finish(since, concerns, a, b, c, d, ok, ...)
  ended(false)
  if ok then
    places.mark()
    succeeded()
    return ...
  end
  if concerns(a, b, c, d) then
    lib.ms_dist_publish_error(tostring((...)), since)
    resume.failed()
  end
  error((...), 0)
end

local function finish_apart(since, concerns, a, ok, ...)
  if ok then return ... end
  if concerns(a) then
    lib.ms_dist_publish_error(tostring((...)), since)
    resume.failed()
  end
  error((...), 0)
end

--- Wraps fn(a, b), which issues no collective but changes state that ranks share, such as sharded parameters. If it
--- fails on some ranks only, this state is no longer consistent, so its error is published.
---@param fn function
---@param concerns fun(a: any): boolean  whether peers make the call, too
---@return function
function M.apart(fn, concerns)
  return standing_for(function(a, b)
    if state.dist_failures < 0 then return fn(a, b) end       -- this rank has not joined a job
    return finish_apart(lib.ms_dist_errors(), concerns, a, pcall(fn, a, b))
  end, fn)
end

--- Wraps fn, which may issue any number of collectives in any groups: its errors are published to the world. fn has at
--- most five arguments. concerns(a, b, c, d): whether peers make the call, too (default: unless the arguments contain a
--- group that has no other ranks or lacks this rank).
---@param fn function
---@param concerns? fun(...): boolean
---@return function
function M.several(fn, concerns)
  concerns = concerns or has_peers
  return standing_for(function(a, b, c, d, e)
    ensure()
    if state.dist_failures > 0 then resume.before(false) end
    return finish(lib.ms_dist_errors(), concerns, a, b, c, d, pcall(fn, a, b, c, d, e))
  end, fn)
end

return M
