-- SPDX-License-Identifier: MIT
--- Communication hooks, which reduce the gradients of an FSDP instance. A hook is a function of the script, `fn(state,
--- grad, output)`, or one of the built-in hooks, which the engine itself runs when they are registered
--- (runtime/shard/views/hook.c).
local class = require "moonshard.core.class"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local precision = require "moonshard.parallel.precision"
local tensor = require "moonshard.tensor"

local lib, ffi, raise = engine.lib, engine.ffi, errors.raise
local C = ffi.C

local M = {}

-- ---- states --------------------------------------------------------------------------------------

local factors = ffi.new "double[2]"

--- The state of the built-in hooks: a group and divisors. With N ranks and a predivide factor p near the square root of
--- N, gradients are divided by p before the sum and by N / p after it, which avoids overflow of float16 sums.
---@class DefaultState
---@field process_group Group  the ranks that reduce together
---@field world_size integer  ranks in the group
---@field gradient_predivide_factor number   divides gradients before the sum
---@field gradient_postdivide_factor number  divides gradients after the sum
local DefaultState = class.new "DefaultState"

---@param group? Group  default: all ranks
function DefaultState:init(group)
  local dist = require "moonshard.dist"
  if group ~= nil then opts.expect(group, dist._a_group, "%s: process_group", self:class_name()) end
  self.process_group = group or dist.default_group()
  self.world_size = dist.world_size(self.process_group)
  lib.ms_comm_division(self.world_size, factors, factors + 1)
  self.gradient_predivide_factor, self.gradient_postdivide_factor = factors[0], factors[1]
end

--- The state of hooks that send gradients in lower precision.
---@class LowPrecisionState: DefaultState
---@field parameter_type string  dtype of the reduced gradients
local LowPrecisionState = class.new("LowPrecisionState", DefaultState)

---@param group? Group  default: all ranks
---@param given? {parameter_type: string}  parameter_type: dtype of the reduced gradients
function LowPrecisionState:init(group, given)
  if given == nil and opts.is(group) then group, given = nil, group end
  DefaultState.init(self, group)
  local o = opts("LowPrecisionState", given, { parameter_type = "float32" })
  self.parameter_type = precision.floating(o.parameter_type, "parameter_type", "LowPrecisionState")
end

M.DefaultState, M.LowPrecisionState = DefaultState, LowPrecisionState

-- ---- hooks ---------------------------------------------------------------------------------------

-- The built-in hooks by function: { name, kind, low, output }. kind: the engine's number of the hook. low: the dtype in
-- which gradients are sent; nil: their own. output: true (required), false (refused) or nil (optional).
local built_in = {}

-- Sets the engine's struct for a built-in hook with this state.
local function fill(into, hook, state)
  local dist = require "moonshard.dist"
  if type(state) ~= "table" or (state.process_group ~= nil and not dist.is_group(state.process_group)) then
    raise("%s: state is %s, expected an fsdp.comm_hooks.%s", hook.name, errors.kind(state), hook.low
      and "LowPrecisionState" or "DefaultState")
  end
  for _, field in ipairs { "gradient_predivide_factor", "gradient_postdivide_factor" } do
    opts.expect(state[field], opts.number, "%s: the state's %s", hook.name, field)
  end
  into.kind, into.key = hook.kind, 0
  into.group = (state.process_group or dist.default_group()).id
  into.before, into.after = state.gradient_predivide_factor, state.gradient_postdivide_factor
  if hook.low then
    into.low, into.lands = hook.low, dtypes.number(state.parameter_type or "float32", hook.name
      .. ": the state's parameter_type")
  end
  return into
end

local by_hand = ffi.new "ms_comm_hook"

local function define(name, kind, low, output)
  local entry = { name = name, kind = kind, low = low, output = output }
  M[name] = function(state, grad, out)
    -- If grad is a bucket of nn.DDP, reduces its flat tensor.
    if not tensor.is_tensor(grad) and type(grad) == "table" and grad.flat then grad = grad.flat end
    fill(by_hand, entry, state)
    if output == false and out ~= nil then
      raise("%s: argument 3, the output, is given, expected nil; use reduce_scatter_hook for sharded gradients", name)
    end
    if output and out == nil then
      raise("%s: argument 3, the output, is nil, expected a tensor; use allreduce_hook for gradients that are not sharded", name)
    end
    local out_id = out ~= nil and tensor.id_of(out, name, "output") or 0
    if lib.ms_comm_hook_run(by_hand, tensor.id_of(grad, name, "grad"), out_id) ~= 0 then errors.fail(grad, out) end
  end
  built_in[M[name]] = entry
end

--- Sums grad over the group in place, for no_shard; the state's factors divide before and after the sum.
---@param state DefaultState  group and factors
---@param grad Tensor  the whole flat gradient; reduced in place
---@type fun(state: DefaultState, grad: Tensor)
define("allreduce_hook", C.MS_COMM_SUM, nil, false)
--- Sums grad over the group and writes this rank's part to output; the state's factors divide before and after the sum.
---@param state DefaultState  group and factors
---@param grad Tensor  the whole flat gradient, padded
---@param output Tensor  written; this rank's part
---@type fun(state: DefaultState, grad: Tensor, output: Tensor)
define("reduce_scatter_hook", C.MS_COMM_SUM, nil, true)
--- Sums grad over the group, sent as float16; the state's factors divide before and after the sum.
---@param state LowPrecisionState  group, factors and dtype of the result
---@param grad Tensor  the whole flat gradient
---@param output? Tensor  written; nil: the result goes into grad
---@type fun(state: LowPrecisionState, grad: Tensor, output?: Tensor)
define("fp16_compress_hook", C.MS_COMM_LOW, C.MS_F16)
--- Sums grad over the group, sent as bfloat16; the state's factors divide before and after the sum.
---@param state LowPrecisionState  group, factors and dtype of the result
---@param grad Tensor  the whole flat gradient
---@param output? Tensor  written; nil: the result goes into grad
---@type fun(state: LowPrecisionState, grad: Tensor, output?: Tensor)
define("bf16_compress_hook", C.MS_COMM_LOW, C.MS_BF16)

-- ---- registration --------------------------------------------------------------------------------

local hook_struct = ffi.new "ms_comm_hook"

--- Passes a unit's hook and state to the engine.
local function apply(unit)
  local hook = unit.comm_hook
  if unit.hook_key then
    require "moonshard.autograd".drop_key(unit.hook_key)
    unit.hook_key = nil
  end
  ffi.fill(hook_struct, ffi.sizeof "ms_comm_hook")
  unit.hook_built_in = false
  if hook ~= nil then
    local known = built_in[hook]
    local sharded = known and unit.placed.strategy ~= "no_shard"
    if known and (known.output == nil or known.output == sharded) then
      local state = unit.comm_hook_state
      fill(hook_struct, known, state)
      unit.hook_built_in = { group = state.process_group, before = state.gradient_predivide_factor,
        after = state.gradient_postdivide_factor,
        lands = state.parameter_type }
    else
      -- The reference to the unit is weak, so that its model can be collected while the engine has the key.
      unit.hook_key = require "moonshard.autograd".new_key(setmetatable({ unit = unit }, { __mode = "v" }))
      hook_struct.kind, hook_struct.key = C.MS_COMM_SCRIPT, unit.hook_key
    end
  end
  if lib.ms_unit_set_comm_hook(unit.handle, hook_struct) ~= 0 then errors.fail() end
end

--- Passes the state of a built-in hook to the engine again if the script has changed it.
local function refresh(unit)
  local state, known = unit.comm_hook_state, unit.hook_built_in
  if known.group ~= state.process_group or known.before ~= state.gradient_predivide_factor
    or known.after ~= state.gradient_postdivide_factor
      or known.lands ~= state.parameter_type then
    apply(unit)
  end
end

--- Sets hook and state of one unit. After an error, the old ones remain.
local function set(unit, hook, state)
  if hook ~= nil and not opts.fn.test(hook) then
    raise("The communication hook must be callable but got %s", errors.show(hook))
  end
  local before, before_state = unit.comm_hook, unit.comm_hook_state
  unit.comm_hook, unit.comm_hook_state = hook, state
  local ok, message = pcall(apply, unit)
  if not ok then
    unit.comm_hook, unit.comm_hook_state = before, before_state
    apply(unit)
    error(message, 0)
  end
end

local autograd = require "moonshard.autograd"
autograd.handlers[C.MS_EV_REDUCE] = function(entry, event)
  local unit, t = entry.unit, autograd.event_tensors(event)
  unit.comm_hook(unit.comm_hook_state, t[1], t[2])
  return nil, 0
end

return { public = errors.closed(M, "fsdp.comm_hooks"), set = set, refresh = refresh }
