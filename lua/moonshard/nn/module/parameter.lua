-- SPDX-License-Identifier: MIT
--- nn.Parameter: a tensor that modules register when it is assigned to a field.
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local tensor_class = require "moonshard.tensor.class"
local a_tensor = tensor.a_tensor

--- A leaf that shares t's storage. Modules register it when it is assigned to a field. It belongs to no scope and lives
--- as long as something refers to it. Errors: requires_grad with a dtype that is not floating point.
---@class Parameter: Tensor
---@overload fun(t: Tensor, opts?: { requires_grad: boolean }): Parameter
---   t: gives storage, shape, dtype and device; requires_grad: gets a gradient
local Parameter = tensor.subclass("Parameter")
Parameter.__unscoped = true
Parameter.__param = true

-- Makes a new leaf on t's storage; t itself keeps its id and graph.
function Parameter.__construct(cls, t, given)
  opts.expect(t, a_tensor, "Parameter: argument 1")
  local o = opts("Parameter", given, { requires_grad = true })
  local parts = tensor.inner(t)
  if parts then  -- t is an instance of a tensor class: its inner tensors become leaves
    for k, part in ipairs(parts) do parts[k] = cls(part, given) end
    local p = tensor.rebuild(parts, t)
    return setmetatable(p, tensor_class.parameter_class(getmetatable(t), cls))
  end
  local id = engine.lib.ms_param_new(t.id, o.requires_grad and 1 or 0)
  if id == 0 then errors.fail(t) end
  return tensor.wrap_as(cls, id)
end

-- A parameter whose elements are uninitialised.
local function empty(shape, given)
  local t = create.empty(shape, given)
  local p = Parameter(t)
  t:release()
  return p
end

return { Parameter = Parameter, empty = empty }
