-- SPDX-License-Identifier: MIT
--- profiler.schedule: which steps of a loop a profile records.
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"

local M = {}

local count, from_one = opts.option(opts.whole_from(0), 0), opts.option(opts.whole_from(1), opts.required)

--- A schedule for profiler.profile, in cycles: `wait` steps are left out, then `warmup` steps, then `active` steps are
--- recorded as one profile.
---@param given { wait: integer, warmup: integer, active: integer, repeats: integer, skip_first: integer }
---   wait: steps that are not recorded; warmup: as wait, since a recording needs no warm-up; active: recorded steps of
---   a cycle, at least 1; repeats: number of cycles (0: until the loop ends); skip_first: steps before the first cycle
---@return fun(done: integer): "none"|"warmup"|"record"|"record_and_save"  what to do in the step after `done` steps
function M.schedule(given)
  local o = opts("profiler.schedule", given or {}, { wait = count, warmup = count, active = from_one, repeats = count,
    skip_first = count })
  local cycle = o.wait + o.warmup + o.active
  return function(done)
    opts.expect(done, opts.whole_from(0), "schedule: the number of steps")
    local k = done - o.skip_first
    if k < 0 or o.repeats > 0 and k >= o.repeats * cycle then return "none" end
    k = k % cycle
    if k < o.wait then return "none" end
    if k < o.wait + o.warmup then return "warmup" end
    return k < cycle - 1 and "record" or "record_and_save"
  end
end

--- The steps of a scheduled profile.
---@class ProfileSteps
---@field step_num integer  the number of steps that are done
local Steps = { __name = "ProfileSteps" }
Steps.__index = Steps

local actions = opts.one_of { "none", "warmup", "record", "record_and_save" }

-- Begins, continues or drops a recording, as the schedule says for the next step.
local function look(self)
  self._action = opts.expect(self._schedule(self.step_num), actions, "profiler.profile: the result of the schedule")
  local wanted = self._action == "record" or self._action == "record_and_save"
  if wanted and not self._profile then
    self._profile = self._start(self._options)
  elseif self._profile and not wanted then              -- PyTorch warns and drops it, too
    self._profile:stop()
    self._profile = nil
    log.warn(("profiler.profile: the schedule returned 'record' and then '%s', so the recording is dropped; its last step needs "
      .. "'record_and_save'"):format(self._action))
  end
end

local function save(self)
  local profile = self._profile
  self._profile = nil
  if not profile then return end
  profile:stop()
  self._last = profile
  if self._on_trace_ready then self._on_trace_ready(profile) end
end

--- To be called at the end of each step.
function Steps:step()
  opts.need(getmetatable(self) == Steps, self,
    "the object that the profiled function gets as its argument p; write p:step(), not p.step()", "step: self")
  if self._action == "record_and_save" then save(self) end
  self.step_num = self.step_num + 1
  look(self)
end

local function finish(self, ok, ...)
  if not ok then
    if self._profile then self._profile:stop() end
    error((...), 0)
  end
  save(self)
  return self._last, ...
end

--- Internal: runs fn(steps) by the schedule `o.schedule`. start: profiler.start, called with `options`.
function M.run(o, options, start, fn)
  if not opts.fn.test(o.schedule) then
    errors.raise("profiler.profile: option 'schedule' is %s, expected a function, such as profiler.schedule makes",
      errors.kind(o.schedule))
  end
  local self = setmetatable({ step_num = 0, _schedule = o.schedule, _on_trace_ready = o.on_trace_ready,
    _start = start, _options = options }, Steps)
  look(self)
  return finish(self, pcall(fn, self))
end

return M
