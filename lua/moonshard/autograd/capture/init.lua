-- SPDX-License-Identifier: MIT
--- ms.capture: a training step that is recorded while it runs once and repeated by the engine without Lua.
---
--- A repetition runs none of the step's Lua, so everything that the step read in Lua must be unchanged. The engine
--- itself checks the tensors, parameters and grads that it uses; this file checks modes, the modules that the step
--- called and the groups of its optimizers, and gives the engine the optimizers' current options.
local class = require "moonshard.core.class"
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local lib, ffi, state = engine.lib, engine.ffi, engine.state
local raise, is_tensor, wrap = errors.raise, tensor.is_tensor, tensor.wrap
local select, type, pcall, error, ipairs, unpack, rawget, tostring = select, type, pcall, error, ipairs, unpack, rawget,
  tostring

local M = {}

-- ---- what the recording notes ---------------------------------------------------------------------

-- The recording in progress; nil without one. of: the objects that M.note has been called for, as keys; list: their
-- entries, in order.
local now
local watchers = {}

-- Counts assignments to fields of modules, and changes of their modes.
local touched = 0
--- To be called when a field or mode of a module changes.
function M.touch() touched = touched + 1 end

--- Registers fn, which is called when a recording begins, with true, and when it ends, with false.
---@param fn fun(on: boolean)  on: whether a step is being recorded
function M.on_change(fn) watchers[#watchers + 1] = fn end

---@class CaptureChecks
---@field element fun(t: table, k: any, changed: fun(t: table, k: any))
---   repetitions require that t[k] is as now; otherwise changed(t, k) raises, or returns to accept the new value
---@field touched fun(check: fun())  check is called before a repetition if M.touch was called since the last one
---@field always fun(check: fun())   check is called before each repetition
---@field tally fun(counts: ffi.cdata*, bytes: integer): Tally?
---   the Tally of the numbers in this memory, if a GPU counts them in repetitions; nil: they are always up to date

--- While a step is recorded: arranges that note(of, list) is called once, at the end of the recording. note adds checks
--- to list; a check raises before a repetition if what the step read of `of` in Lua has changed.
---@param of any  such as a module or an optimizer
---@param note fun(of: any, list: CaptureChecks)  may raise
function M.note(of, note)
  if not now or now.of[of] then return end
  now.of[of] = true
  local list = now.list
  list[#list + 1] = { of = of, note = note }
end

--- Whether a step is being recorded.
---@return boolean
function M.active() return now ~= nil end

--- Where a script's function is defined, for messages: " (train.lua:12)"; "" if that is not known.
---@param fn any
---@return string
function M.place(fn)
  local info = type(fn) == "function" and debug.getinfo(fn, "S")
  return info and info.what ~= "C" and (" (%s:%d)"):format(info.short_src, info.linedefined) or ""
end

--- Raises if a step is being recorded, which then fails even if the script catches the error.
---@param text string  why the step cannot be captured
function M.refuse(text)
  if not now then return end
  lib.ms_capture_refuse(text)
  errors.fail()
end

--- As M.refuse, for a hook.
---@param what string  describes the hook
---@param fn any  the hook
function M.refuse_hook(what, fn)
  M.refuse(("it calls %s%s, which repetitions would not call; remove it, or do not capture this step")
    :format(what, M.place(fn)))
end

local function finish()
  local noted = now
  now = nil
  if noted then
    for _, fn in ipairs(watchers) do fn(false) end
  end
  return noted
end

--- Ends the recording of a step whose work differs from that of other steps, such as one that a gradient scaler skips:
--- the step goes on uncaptured, and its next call is a recording again.
function M.leave()
  lib.ms_capture_leave()
  finish()
end

local function begin()
  now = { of = {}, list = {} }
  for _, fn in ipairs(watchers) do fn(true) end
end

-- Checks per function that checker makes: LuaJIT compiles functions of this length.
local PART = 60

-- Returns a function that makes the checks of `element` and `always` (CaptureChecks) before a repetition. It is made
-- from source text without loops: with a loop, LuaJIT compiles no call of the captured step, and all of its Lua takes 5
-- times as long.
local function checker(c)
  local source = { "local c, rawget = ...\nlocal t, k, v, always, changed = c.tables, c.keys, c.values, c.always, c.changed\n",
    "local parts = {}\nlocal function accept(i)\nchanged[i](t[i], k[i])\nv[i] = rawget(t[i], k[i])\nend\n" }
  local function add(...) source[#source + 1] = (...):format(select(2, ...)) end
  local n, parts = #c.tables, 0
  for first = 1, n + #c.always, PART do
    parts = parts + 1
    add("parts[%d] = function()\n", parts)
    for i = first, math.min(first + PART - 1, n + #c.always) do
      if i <= n then add("if rawget(t[%d], k[%d]) ~= v[%d] then accept(%d) end\n", i, i, i, i)
      else add("always[%d]()\n", i - n) end
    end
    add("end\n")
  end
  add("return function()\n")
  for i = 1, parts do add("parts[%d]()\n", i) end
  add("end\n")
  return loadstring(table.concat(source), "=checks of a captured step")(c, rawget)
end

local function check_touched(c)
  for _, check in ipairs(c.touchy) do check() end
  c.touches = touched
end

local function check_noted(c)
  c.check()
  if c.touches ~= touched then check_touched(c) end
end

--- Counts that a GPU keeps in repetitions.
---@class Tally
local Tally = {}
Tally.__index = Tally

--- Brings the counted numbers up to date; waits for the GPU. The caller may then change them.
function Tally:read()
  if lib.ms_tally_read(self.made) ~= 0 then errors.fail() end
end

--- Whether v is a Tally.
---@param v any
---@return boolean
function M.is_tally(v) return getmetatable(v) == Tally end

local function checks_of(noted, step)
  local c = { tables = {}, keys = {}, values = {}, changed = {}, always = {}, touchy = {} }
  local list = {
    element = function(t, k, changed)
      local at = #c.tables + 1
      c.tables[at], c.keys[at], c.values[at], c.changed[at] = t, k, rawget(t, k), changed
    end,
    touched = function(check) c.touchy[#c.touchy + 1] = check end,
    always = function(check) c.always[#c.always + 1] = check end,
    tally = function(counts, bytes)
      local made = lib.ms_capture_tally(step, counts, bytes)
      return made ~= nil and setmetatable({ made = ffi.gc(made, lib.ms_tally_free) }, Tally) or nil
    end,
  }
  for _, entry in ipairs(noted.list) do entry.note(entry.of, list) end
  c.touches, c.check = touched, checker(c)
  return c
end

-- ---- arguments and results ------------------------------------------------------------------------

local ids, made = ffi.new("ms_id[?]", engine.MAX_IN), ffi.new("ms_id[?]", engine.MAX_IN)

local function check_argument(v, k)
  local kind = type(v)
  if is_tensor(v) then
    if v.id < 0 then
      raise("captured step: argument %d is %s, expected a tensor, not an instance of a tensor class", k, errors.kind(v))
    end
  elseif kind ~= "nil" and kind ~= "number" and kind ~= "boolean" and kind ~= "string" then
    raise("captured step: argument %d is %s, expected a tensor, number, string, boolean or nil", k, errors.kind(v))
  end
end

local TENSOR = {}  -- stands for a tensor argument in `fixed`

-- Writes the ids of the tensors among the n arguments to `ids` and returns their number. fixed: what the recording's
-- arguments were, TENSOR for a tensor; nil: not recorded yet. Raises unless the arguments are tensors where fixed has
-- TENSOR, and equal to fixed elsewhere.
local function take_arguments(fixed, n, ...)
  local tensors = 0
  if fixed and n == 2 and fixed.two then                  -- the usual case: a batch and its targets
    local a, b = ...
    if is_tensor(a) and is_tensor(b) and a.id >= 0 and b.id >= 0 then
      ids[0], ids[1] = a.id, b.id
      return 2
    end
  end
  if fixed and fixed.n ~= n then
    raise("captured step: the number of arguments is %d, expected %d, as when the step was recorded", n, fixed.n)
  end
  if n > engine.MAX_IN then raise("captured step: %d arguments given, expected at most %d", n, engine.MAX_IN) end
  for k = 1, n do
    local v = (select(k, ...))
    if type(v) == "table" and is_tensor(v) and v.id >= 0 then
      ids[tensors] = v.id
      tensors = tensors + 1
      if fixed and fixed[k] ~= TENSOR then
        raise("captured step: argument %d is a Tensor, but was %s when the step was recorded", k, errors.show(fixed[k]))
      end
    elseif not fixed then
      check_argument(v, k)
    elseif fixed[k] ~= v then
      check_argument(v, k)
      raise("captured step: argument %d is %s, but was %s when the step was recorded: only tensors may change", k,
        errors.show(v), fixed[k] == TENSOR and "a Tensor" or errors.show(fixed[k]))
    end
  end
  return tensors
end

-- Returns n results; those that are tensors with a graph are detached.
local function detached(n, ...)
  local out = { n = n, ... }
  for k = 1, n do
    if is_tensor(out[k]) and out[k].requires_grad then out[k] = out[k]:detach() end
  end
  return unpack(out, 1, n)
end

local function count_detached(...) return detached(select("#", ...), ...) end

-- Returns the results of the recorded function, each tensor as a copy, as repetitions return them.
local function copy_results(self, n, ...)
  if not now then                                         -- the step has ended its own recording (M.leave)
    local left = { ... }
    for k = 1, n do left[k] = is_tensor(left[k]) and left[k]:detach():clone() or left[k] end
    return unpack(left, 1, n)
  end
  local out, tensors = { n = n, ... }, 0
  for k = 1, n do
    local v = out[k]
    if is_tensor(v) then
      if v.id < 0 then
        raise("captured step: result %d is %s, expected a tensor, not an instance of a tensor class", k, errors.kind(v))
      end
      ids[tensors] = v.id
      tensors = tensors + 1
    elseif type(v) == "table" or type(v) == "function" or type(v) == "userdata" then
      raise("captured step: result %d is %s, expected a tensor, number, string, boolean or nil", k, errors.kind(v))
    end
  end
  if lib.ms_capture_results(self._step, tensors, ids, made) ~= 0 then errors.fail(...) end
  local fixed, at = { n = n, is_tensor = {} }, 0
  for k = 1, n do
    fixed.is_tensor[k] = is_tensor(out[k])
    if fixed.is_tensor[k] then
      out[k] = wrap(made[at])
      at = at + 1
    else
      fixed[k] = out[k]
    end
  end
  self._results = fixed
  return unpack(out, 1, n)
end

local function count_copies(self, ...) return copy_results(self, select("#", ...), ...) end

-- ---- steps ----------------------------------------------------------------------------------------

--- A captured step, from ms.capture. Calling it runs the step; its results are new tensors without a graph.
---@class CapturedStep
---@operator call: any
local CapturedStep = class.new "CapturedStep"

local function modes()
  return state.grad_mode, state.autocast, state.default_dtype, context.now.device or false
end

local function run_recorded(self, arguments, n)
  return count_copies(self, self._fn(unpack(arguments, 1, n)))
end

local function drop(self)
  for _, t in ipairs(self._own or {}) do lib.ms_release(t.id) end
  if self._step then lib.ms_capture_free(ffi.gc(self._step, nil)) end
  self._step, self._own = nil, nil
end

local function close_recording(self, noted)
  if lib.ms_capture_end(self._step) ~= 0 then errors.fail() end
  self._noted = checks_of(noted, self._step)
end

local info = ffi.new "ms_captured_info"
local function read_info(self)
  lib.ms_capture_info(self._step, info)
  return info
end

local function end_recording(self, fixed, before, ok, ...)
  local noted, message = finish(), (...)
  if ok and not noted then                                -- the step has ended its own recording (M.leave)
    drop(self)
    return ...
  end
  if ok then ok, message = pcall(close_recording, self, noted) end
  if not ok then
    drop(self)
    error(message, 0)
  end
  self._arguments, self._modes, self._sends = fixed, before, read_info(self).sends ~= 0
  return ...
end

local function record(self, n, ...)
  local tensors = take_arguments(nil, n, ...)
  local noted = { modes() }
  local arguments, fixed = { ... }, { n = n }
  -- The step's scope (scope.run, below) ends before the recording does, so that what outlives the step is known.
  local step = lib.ms_capture_begin(tensors, ids, made)
  if step == nil then errors.fail(...) end
  self._step = ffi.gc(step, lib.ms_capture_free)
  local own = {}                                          -- the step's copies of the tensor arguments
  for k = 1, n do
    fixed[k] = arguments[k]
    if is_tensor(arguments[k]) then
      own[#own + 1] = wrap(made[#own]):keep()
      arguments[k], fixed[k] = own[#own], TENSOR
    end
  end
  self._own, fixed.two = own, n == 2 and #own == 2
  begin()
  return end_recording(self, fixed, noted, pcall(context.block, "ms.capture", scope.run, "captured step",
    run_recorded, self, arguments, n))
end

local function check_modes(self)
  local grad, cast, dtype, device = modes()
  local m = self._modes
  if grad ~= m[1] or cast ~= m[2] or dtype ~= m[3] or device ~= m[4] then
    raise("captured step: %s has changed since the step was recorded", grad ~= m[1] and "the grad mode (no_grad)"
      or cast ~= m[2] and "autocast" or dtype ~= m[3] and "the default dtype" or "the default device")
  end
end

local function results(r, k, at, n)
  if k > n then return end
  if r.is_tensor[k] then return wrap(made[at]), results(r, k + 1, at + 1, n) end
  return r[k], results(r, k + 1, at, n)
end

local function repeat_step(self, n, ...)
  -- The arguments come first: LuaJIT does not compile a use of ... after a loop.
  local tensors = take_arguments(self._arguments, n, ...)
  check_modes(self)
  check_noted(self._noted)
  if lib.ms_capture_repeat(self._step, tensors, ids, made) ~= 0 then errors.fail(...) end
  local r = self._results
  if r.n == 1 and r.is_tensor[1] then return wrap(made[0]) end
  return results(r, 1, 0, r.n)
end

-- Tells peers, which wait for this rank in the step's collectives, of the error of a failed repetition.
local function told(ok, ...)
  if not ok then
    lib.ms_dist_failed(tostring((...)))
    error((...), 0)
  end
  return ...
end

-- A call before the recording: runs fn. Not part of __call: LuaJIT compiles no function that makes closures.
local function warm_up(self, n, ...)
  take_arguments(nil, n, ...)
  local before = self._left
  self._left = 0
  return (function(ok, ...)
    self._left = ok and before - 1 or before
    if not ok then error((...), 0) end
    return ...
  end)(pcall(scope.run, "captured step", function(...) return count_detached(self._fn(...)) end, ...))
end

function CapturedStep:__call(...)
  local n = select("#", ...)
  if self._step and self._sends then
    return told(pcall(repeat_step, self, n, ...))
  end
  if self._step then return repeat_step(self, n, ...) end
  if self._left == false then raise("captured step: called after release()") end
  if self._left > 0 then return warm_up(self, n, ...) end
  return record(self, n, ...)
end

--- Frees the step's recording and its memory. Later calls are errors.
function CapturedStep:release()
  drop(self)
  self._left, self._arguments, self._noted, self._results = false, nil, nil, nil
end

--- The memory that only this step uses: its arguments, intermediate tensors, results and the grads that it leaves; 0
--- until the step has been recorded. It is freed with the step, except for grads that are still in use.
---@return integer bytes
function CapturedStep:memory()
  if not self._step then return 0 end
  return read_info(self).bytes
end

function CapturedStep:__tostring()
  if self._left == false then return "CapturedStep(released)" end
  if not self._step then
    return ("CapturedStep(not recorded; %d more call%s before the recording)"):format(self._left,
      self._left == 1 and "" or "s")
  end
  local o = read_info(self)
  local graphs = o.graphs == 0 and "" or (", %d in %d CUDA graph%s"):format(o.graphed, o.graphs, o.graphs == 1 and "" or "s")
  return ("CapturedStep(%s of work%s, %s)"):format(errors.count(o.work, "piece"), graphs, errors.count(o.bytes, "byte"))
end

--- Captures a training step. The first `warmup` calls of the result run fn as it is; the next one runs it and records
--- what the engine does; all later calls repeat that without Lua, on the same memory: forward, backward, gradient
--- scalers, clipping, optimizer steps, zero_grad, collectives. Every call is one step with the same bits as fn itself:
--- new arguments are copied in, random numbers and step counts advance, and options of optimizers that changed between
--- calls (learning rates of schedules) take effect. Results are new tensors without a graph.
---
--- What fn does in Lua is not repeated: it must have the same shapes in every call and read no values. Errors: fn reads
--- values (item, tolist, printing), calls hooks, keeps tensors that it makes, changes a learning rate or sets the
--- random generator; later calls with other shapes, dtypes or numbers, or after a parameter, module, mode or group that
--- fn used was replaced. A step with a gradient scaler must also call its update; a call in which the scaler skips the
--- optimizer's step is not recorded, but the first later one in which it does not skip is.
---@param fn fun(...): any  the step; its arguments are tensors, numbers, strings, booleans or nil
---@param given? { warmup: integer }  warmup: calls before the recording (default: 1), for work that only first calls
---   do, such as making an optimizer's state
---@return CapturedStep
function M.capture(fn, given)
  opts.expect(fn, opts.fn, "capture: argument 1")
  local o = opts("capture", given, { warmup = 1 })
  opts.need(o.warmup >= 0 and o.warmup % 1 == 0, o.warmup, "a whole number from 0", "capture: option 'warmup'")
  local self = CapturedStep()
  self._fn, self._left = fn, o.warmup
  return self
end

return M
