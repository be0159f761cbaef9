-- SPDX-License-Identifier: MIT
--- Resumes collectives after an error that the script survives. Different calls may have failed on different ranks, and
--- the ranks may have caught the error at different lines. So each group's first collectives after an error, until one
--- succeeds, send the script's position, the place of the call that failed, and where its error was caught. The calls
--- of a rank that is behind a peer's position fail until the rank has caught up. Otherwise each of its collectives
--- would be matched with a later one of its peers. A single collective is one that the script calls; other calls, such
--- as a backward, make collectives inside.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local position = require "moonshard.core.position"

local lib, state, C = engine.lib, engine.state, engine.ffi.C
local sent = engine.ffi.new "ms_dist_position"

local M = {}

-- failed: the place (M.place) of the latest failed call; "" if that call, such as a backward, makes collectives inside.
-- caught: where its error was caught. times: how many errors in succession were caught there. succession: whether no
-- call has succeeded since. seen: the value of state.dist_failures that is already accounted for.
local failed, caught, times, succession, seen = "", nil, 0, false, 0

-- Whether the engine has a position for calls that are one collective (positions[1]) and for calls that make
-- collectives inside, such as a backward (positions[0]).
local positions = { [0] = false, false }

--- Records that a call has ended: later calls must not send its position.
---@param single boolean  the call is one collective; false: it makes collectives inside, as a backward does
function M.ended(single)
  local k = single and 1 or 0
  if not positions[k] then return end
  positions[k] = false
  lib.ms_dist_resumed(k)
end

--- Records that a call succeeded.
function M.succeeded() succession = false end

local function async_place(site) return "async " .. (site or "") end

local function is_async(x) return type(x) == "table" and getmetatable(x) == nil and x.async == true end

--- A call's place is the script's position. The place of an asynchronous call is only its line: it fails at the wait,
--- where the rest of the call's position is no longer known.
---@return string, Position
function M.place(a, b, c)
  local at = position.now()
  return (is_async(c) or is_async(b) or is_async(a)) and async_place(errors.user_line(3)) or at.text, at
end

--- Records that the call at the place `where` failed.
---@param where string  "" if the call makes collectives inside, as a backward does
---@param at Position?  nil: unknown
function M.failed_at(where, at)
  local catcher = at and at.caught
  times = succession and catcher == caught and times + 1 or 1
  failed, caught, succession, seen = where, catcher, true, state.dist_failures
end

--- Records that an asynchronous call made at the line `site` failed.
---@param site string?
function M.async_failed(site) M.failed_at(async_place(site), position.now()) end

--- Records the failure of a call that makes collectives inside, as a backward does.
function M.failed() M.failed_at("", position.now()) end

--- Passes this rank's position in the script to the engine, which uses it to match the ranks' calls again after an
--- error. To be called before a collective, or before a call that makes collectives inside.
---@param single boolean  the call is one collective; false: it makes collectives inside, as a backward does
function M.before(single, a, b, c)
  if state.dist_failures ~= seen then M.failed_at "" end
  local here, at = M.place(a, b, c)
  sent.failed, sent.caught, sent.here, sent.times = failed, caught or "", here, times
  sent.single = single and 1 or 0
  positions[sent.single] = true
  sent.n = math.min(#at, C.MS_MAX_NESTED)
  for k = 1, sent.n do sent.line[k - 1], sent.count[k - 1] = at[k][1], at[k][2] end
  lib.ms_dist_resume(sent)
  -- An error clears the step number, because it may have ended the loop of ms.steps; a position with a step shows that
  -- the loop still runs.
  if at.step then lib.ms_dist_set_step(at.step) end
end

--- After an error, makes the ranks of each of these groups meet before the forward of a model that they share.
---@param groups Group[]
function M.realign(groups)
  for _, group in ipairs(groups) do
    if lib.ms_dist_unsettled(group.id) ~= 0 then
      M.before(true)
      local status = lib.ms_dist_realign(group.id, errors.user_line(2))
      M.ended(true)
      if status ~= 0 then errors.fail() end
      succession = false
    end
  end
end

return M
