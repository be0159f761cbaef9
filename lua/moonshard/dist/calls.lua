-- SPDX-License-Identifier: MIT
--- Calls that several ranks make together. If such a call fails on one rank, its peers would wait forever, and a script
--- that survives the error would match later collectives wrongly. The error therefore makes the peers' calls fail, too.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"

local lib, state, C = engine.lib, engine.state, engine.ffi.C
local position = engine.ffi.new "ms_dist_position"
local getinfo = debug.getinfo
local getmetatable, type, pcall, error, tostring, ipairs = getmetatable, type, pcall, error, tostring, ipairs

local M = {}

---@class Group
local Group = { __name = "Group" }
M.Group = Group

--- Joins the job if this rank has not joined yet. An error before that cannot be published.
function M.ensure()
  if state.dist_failures < 0 and lib.ms_dist_init(nil, 0) ~= 0 then errors.fail() end
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

-- ---- after an error ------------------------------------------------------------------------------

-- An error that a script survives may fail different calls on different ranks, and the ranks may catch it at different
-- lines. So each group's first collectives after an error, until one succeeds, send the script's position: the iterations
-- of its loops, the place of the call, of the call that failed, and of the pcall that caught the error. A rank that is
-- behind a peer's position fails in its calls until it has caught up. Otherwise each later collective would be matched
-- with the peers' next one.

-- failed: the place of the latest failed call, "" if it was not a single collective. caught: where its error was caught.
-- times: how many errors in succession were caught there in one iteration. succession: whether no call has succeeded
-- since. seen: the value of state.dist_failures that is already accounted for. iteration: the script's loops at the
-- latest error.
local failed, caught, times, succession, seen, iteration = "", nil, 0, false, 0, {}

local function async_place(site) return "async " .. (site or "") end

local function is_async(x) return type(x) == "table" and getmetatable(x) == nil and x.async == true end

-- A call's place is the script's stack. The place of an asynchronous call is only its line: it fails at the wait, when
-- the stack of the call is gone.
local function place(a, b, c)
  local stack, catchers = errors.user_stack()
  if is_async(c) or is_async(b) or is_async(a) then stack = async_place(errors.user_line(3)) end
  return stack, catchers
end

-- Whether the script is still in the iteration of the latest error.
local function same_iteration(loops)
  for k = 1, math.min(#loops, #iteration) do
    if loops[k][1] ~= iteration[k][1] or loops[k][2] ~= iteration[k][2] then return false end
  end
  return #loops > 0 and #iteration > 0
end

local function failed_at(where, catchers)
  local catcher, loops = catchers and catchers[1], errors.user_loops()
  local again = succession and catcher == caught and (#loops == 0 or same_iteration(loops))
  failed, caught, times, seen = where, catcher, again and times + 1 or 1, state.dist_failures
  succession, iteration = true, loops
end

--- Records that an asynchronous call made at that line failed.
---@param site string?
function M.async_failed(site)
  local _, catchers = errors.user_stack()
  failed_at(async_place(site), catchers)
end

--- Records the failure of a call that is not a single collective.
function M.failed()
  local _, catchers = errors.user_stack()
  failed_at("", catchers)
end

-- Before a collective of an unsettled group.
local function resume(a, b, c)
  if state.dist_failures ~= seen then failed_at "" end
  local here, catchers = place(a, b, c)
  local loops = errors.user_loops()
  position.failed, position.caught, position.here, position.times = failed, caught or "", here, times
  position.left = caught and same_iteration(loops) and caught or nil
  position.n_inside, position.n_loops = math.min(#catchers, C.MS_MAX_NESTED), math.min(#loops, C.MS_MAX_NESTED)
  for k = 1, position.n_inside do position.inside[k - 1] = catchers[#catchers + 1 - k] end
  for k = 1, position.n_loops do position.limit[k - 1], position.index[k - 1] = loops[k][1], loops[k][2] end
  lib.ms_dist_resume(position)
  -- The error has cleared the step, because it could have ended the loop.
  for _, loop in ipairs(loops) do
    if loop[3] then return lib.ms_dist_set_step(loop[2]) end
  end
end

--- Prepares the forward of a model whose ranks are connected by these groups: after an error, all of them meet first.
---@param groups Group[]
function M.realign(groups)
  for _, group in ipairs(groups) do
    if lib.ms_dist_unsettled(group.id) ~= 0 then
      resume()
      if lib.ms_dist_realign(group.id, errors.user_line(2)) ~= 0 then errors.fail() end
      succession = false
    end
  end
end

-- ---- one collective ------------------------------------------------------------------------------

--- The script's line of the latest call of one collective; nil: unknown.
M.site = nil

local lines_of = setmetatable({}, { __mode = "k" })

-- The id of the group of a call; the id of the world if the arguments do not show it.
local function intended(a, b, c)
  local g = group_in(c) or group_in(b) or group_in(a)
  return getmetatable(g) == Group and g.id or 0
end

local function finish_one(since, find, a, b, c, ok, ...)
  if ok then
    succession = false
    return ...
  end
  -- Does nothing if the call failed on every member.
  lib.ms_dist_refused(find(a, b, c), tostring((...)), errors.user_line(2), since)
  failed_at(place(a, b, c))
  error((...), 0)
end

-- Prepares one collective. Returns the number of failures so far.
local function begin_one(find, a, b, c)
  local failures = state.dist_failures
  if failures > 0 and lib.ms_dist_unsettled(find(a, b, c)) ~= 0 then resume(a, b, c) end
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
    -- Before pcall, because LuaJIT cannot compile code after debug.getinfo that returns through pcall.
    M.site = call_site()
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
  if ok then
    succession = false
    return ...
  end
  if concerns(a, b, c, d) then
    lib.ms_dist_publish_error(tostring((...)), since)
    M.failed()
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
    if state.dist_failures > 0 then resume() end
    return finish(lib.ms_dist_errors(), concerns, a, b, c, d, pcall(fn, a, b, c, d, e))
  end, fn)
end

return M
