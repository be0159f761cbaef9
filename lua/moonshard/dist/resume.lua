-- SPDX-License-Identifier: MIT
--- An error that a script survives may fail different calls on different ranks, and the ranks may catch it at different
--- lines. So each group's first collectives after an error, until one succeeds, send the script's position: the
--- iterations of its loops, the place of the call, of the call that failed, and of the pcall that caught the error. A
--- rank that is behind a peer's position fails in its calls until it has caught up. Otherwise each later collective
--- would be matched with the peers' next one.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"

local lib, state, C = engine.lib, engine.state, engine.ffi.C
local position = engine.ffi.new "ms_dist_position"

local M = {}

-- failed: the place of the latest failed call, "" if it was not a single collective. caught: where its error was caught.
-- times: how many errors in succession were caught there in one iteration. succession: whether no call has succeeded
-- since. seen: the value of state.dist_failures that is already accounted for. iteration: the script's loops at the
-- latest error.
local failed, caught, times, succession, seen, iteration = "", nil, 0, false, 0, {}

--- Records that a call succeeded.
function M.succeeded() succession = false end

local function async_place(site) return "async " .. (site or "") end

local function is_async(x) return type(x) == "table" and getmetatable(x) == nil and x.async == true end

--- A call's place is the script's stack. The place of an asynchronous call is only its line: it fails at the wait, when
--- the stack of the call is gone.
function M.place(a, b, c)
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

--- Records that the call at that place failed.
---@param where string  "" if it was not a single collective
---@param catchers? string[]
function M.failed_at(where, catchers)
  local catcher, loops = catchers and catchers[1], errors.user_loops()
  local again = succession and catcher == caught and (#loops == 0 or same_iteration(loops))
  failed, caught, times, seen = where, catcher, again and times + 1 or 1, state.dist_failures
  succession, iteration = true, loops
end

--- Records that an asynchronous call made at that line failed.
---@param site string?
function M.async_failed(site)
  local _, catchers = errors.user_stack()
  M.failed_at(async_place(site), catchers)
end

--- Records the failure of a call that is not a single collective.
function M.failed()
  local _, catchers = errors.user_stack()
  M.failed_at("", catchers)
end

--- To be called before a collective of an unsettled group.
function M.before(a, b, c)
  if state.dist_failures ~= seen then M.failed_at "" end
  local here, catchers = M.place(a, b, c)
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
      M.before()
      if lib.ms_dist_realign(group.id, errors.user_line(2)) ~= 0 then errors.fail() end
      succession = false
    end
  end
end

return M
