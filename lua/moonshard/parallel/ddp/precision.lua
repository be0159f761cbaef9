-- SPDX-License-Identifier: MIT
--- DDP's mixed precision: while the wrapped module runs, its fields contain low-precision copies of its parameters.
---
--- A copy is a recorded cast, made when forward first reads the parameter. Gradients therefore arrive at the parameter
--- itself, in its own dtype: hooks receive them there, no_sync accumulates them, and buckets convert them to the
--- reduction's dtype. Copies are not visible outside of forward. A checkpointed region that is recomputed in backward
--- makes its own copies.
local autograd = require "moonshard.autograd"
local dtypes = require "moonshard.core.dtypes"
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local precision = require "moonshard.parallel.precision"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local lib, state = engine.lib, engine.state
local is_tensor = tensor.is_tensor
local rawget, rawset, getmetatable, setmetatable = rawget, rawset, getmetatable, setmetatable
local ipairs, pairs, pcall, select, unpack = ipairs, pairs, pcall, select, unpack

local M = {}

local function is_float(t) return dtypes.is_float(dtypes.number(t.dtype)) end

--- Checks the option's value: a MixedPrecision, or a table with its fields.
---@return MixedPrecision?
function M.check(given)
  if given == nil then return nil end
  local policy = opts.is(given) and precision.MixedPrecision(given) or given
  opts.need(precision.is_precision(policy), given, "an fsdp.MixedPrecision or a table of its options",
    "DDP: option 'mixed_precision'")
  for _, name in ipairs { "keep_low_precision_grads", "module_classes_to_ignore" } do
    if policy[name] then
      errors.raise("DDP: mixed_precision: DDP does not support option '%s', expected param_dtype, reduce_dtype or buffer_dtype",
        name)
    end
  end
  return policy
end

--- Casts floating point buffers permanently.
---@param buffers Tensor[]  changed in place
function M.cast_buffers(buffers, dtype)
  autograd.no_grad(function()
    for _, b in ipairs(buffers) do
      if is_float(b) and b.dtype ~= dtype then
        local low = b:to(dtype)
        errors.check(lib.ms_set_data(b.id, low.id), b)
        low:release()
      end
    end
  end)
end

-- Casts the floating point tensors in v, also inside plain tables. A table without such tensors is returned unchanged.
local function cast(v, dtype, seen)
  if is_tensor(v) then return is_float(v) and v.dtype ~= dtype and v:to(dtype) or v end
  if not opts.is_plain(v) then return v end
  if seen[v] then return seen[v] end
  seen[v] = v
  local changed
  for key, x in pairs(v) do
    local y = cast(x, dtype, seen)
    if y ~= x then
      changed = changed or {}
      changed[key] = y
    end
  end
  if not changed then return v end
  local out = {}
  for key, x in pairs(v) do out[key] = x end
  for key, y in pairs(changed) do out[key] = y end
  seen[v] = setmetatable(out, getmetatable(v))
  return out
end

---@class LowPrecision
---@field policy MixedPrecision  the dtypes to use
---@field modules Module[]  modules with parameters of their own
---@field ignored table<Parameter, boolean>  parameters that are not cast
local Low = {}
Low.__index = Low

--- Prepares the casts of a module's forward.
---@param m Module  the wrapped module
---@param policy MixedPrecision  the dtypes to use
---@param ignored table<Parameter, boolean>  parameters that keep their dtype, as keys
---@return LowPrecision
function M.new(m, policy, ignored)
  local modules = {}
  for _, sub in ipairs(m:modules()) do
    if #sub._params > 0 then modules[#modules + 1] = sub end
  end
  return setmetatable({ policy = policy, modules = modules, ignored = ignored, inside = false }, Low)
end

--- The dtype in which a parameter's gradient is reduced.
function Low:reduce_dtype(p) return self.policy.reduce_dtype or self.policy.param_dtype or p.dtype end

-- Empties the fields of the parameters to cast; reading such a field then makes the copy.
local function lower(self)
  local dtype, copies, hidden = self.policy.param_dtype, {}, {}
  local grad = autograd.is_grad_enabled()
  local function copy_of(p)
    if not copies[p] then
      -- Record the cast, so that a later read with gradients can reuse the copy.
      local before = autograd.set_grad_enabled(grad)
      copies[p] = p:to(dtype):keep()                     -- the copy outlives the call of the module that reads it
      autograd.set_grad_enabled(before)
    end
    return copies[p]
  end
  for _, m in ipairs(self.modules) do
    local slots, own = rawget(m, "_slots"), nil
    if getmetatable(slots) == nil then
      for _, name in ipairs(m._params) do
        local p = rawget(slots, name)
        if p ~= nil and not self.ignored[p] and p.dtype ~= dtype and is_float(p) then
          own = own or {}
          own[name], slots[name] = p, nil
        end
      end
    end
    if own then
      hidden[#hidden + 1] = { slots, own }
      setmetatable(slots, { __index = function(_, name)
        local p = own[name]
        if p == nil then return nil end
        local low = copy_of(p)
        rawset(slots, name, low)
        return low
      end })
    end
  end
  return copies, hidden
end

-- Restores the parameters, except in fields that the script has assigned. If a scope is open, it then owns the copies,
-- because a forward may have returned one; otherwise they are released.
local function raise_again(copies, hidden)
  for _, entry in ipairs(hidden) do
    local slots, own = entry[1], entry[2]
    setmetatable(slots, nil)
    for name, p in pairs(own) do
      local now = rawget(slots, name)
      if now == nil or now == copies[p] then rawset(slots, name, p) end
    end
  end
  for _, low in pairs(copies) do
    if state.scope ~= 0 then lib.ms_adopt(low.id) else low:release() end
  end
end

local function leave(self, around, copies, hidden, ...)
  self.inside = false
  autograd.set_around(around)
  raise_again(copies, hidden)
  return context.results(...)
end

--- Runs fn(…) while the modules' fields contain copies of the parameters in param_dtype.
function Low:run(fn, ...)
  if self.inside or not self.policy.param_dtype then return fn(...) end
  local copies, hidden = lower(self)
  self.inside = true
  local outer
  outer = autograd.set_around(function(again, ...)
    if outer then return outer(scope.run, "checkpoint", self.run, self, again, ...) end
    return scope.run("checkpoint", self.run, self, again, ...)
  end)
  return leave(self, outer, copies, hidden, pcall(fn, ...))
end

--- Runs the wrapped module's forward, on floating point inputs cast to param_dtype if the policy casts inputs.
function Low:forward(m, ...)
  local policy = self.policy
  if not policy.param_dtype or not (policy.cast_root_forward_inputs or policy.cast_forward_inputs) then
    return self:run(m, ...)
  end
  local args, seen = { n = select("#", ...), ... }, {}
  for k = 1, args.n do args[k] = cast(args[k], policy.param_dtype, seen) end
  return self:run(m, unpack(args, 1, args.n))
end

return M
