-- SPDX-License-Identifier: MIT
--- More of nn.utils: parameters as one vector, clipping by value, norms of lists of tensors.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local no_grad = require "moonshard.autograd".no_grad
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local shape = require "moonshard.tensor.shape"
local shards = require "moonshard.nn.module.shards"
local tensor = require "moonshard.tensor"
local utils = require "moonshard.nn.utils"

local expect_reduced = require "moonshard.autograd.sparse".expect_reduced

local M = {}

-- Returns the list of tensors that was given as a list or as a single tensor.
local function list_of(who, list)
  if tensor.is_tensor(list) then return { list } end
  opts.need(opts.is_plain(list), list, "a list of tensors" .. (type(list) == "table" and "; write model:parameters()"
    or ""), "%s: argument 1", who)
  for k, t in ipairs(list) do opts.expect(t, tensor.a_tensor, "%s: tensor %d", who, k) end
  return list
end

-- The tensors that hold the gradients' elements on this rank.
local function gradients_of(who, params)
  local list = {}
  for k, p in ipairs(params) do
    shards.expect_trained(p, ("%s: parameter %d"):format(who, k), "the list")
    local g = p.grad
    if g ~= nil then
      expect_reduced(p)
      if g.is_sparse then
        g = g:coalesce()
        p.grad = g
        g = g:values()
      elseif g.to_local then
        g = g:to_local()
      end
      list[#list + 1] = g
    end
  end
  return list
end

--- Clamps every element of the gradients to [-clip_value, clip_value], in place. Sharded gradients are clamped where
--- they are: no communication.
---@param params Tensor|Tensor[]  those without a gradient are left out
---@param clip_value number  at least 0
function M.clip_grad_value_(params, clip_value)
  params = tensor.flat(list_of("clip_grad_value_", params))
  opts.expect(clip_value, opts.number_from(0), "clip_grad_value_: clip_value")
  no_grad(function()
    for _, g in ipairs(gradients_of("clip_grad_value_", params)) do g:clamp_(-clip_value, clip_value) end
  end)
end

--- The norm of all elements of a list of tensors. It is the norm of this process's tensors: unlike clip_grad_norm_, it
--- does not add the parts of other ranks.
---@param tensors Tensor|Tensor[]  floating point, on one device
---@param given? { norm_type: number, error_if_nonfinite: boolean }  norm_type: p of the norm; math.huge is the maximum
---   norm (default: 2); error_if_nonfinite: a norm that is inf or nan is an error (default: false)
---@return Tensor  []; 0 for an empty list
function M.get_total_norm(tensors, given)
  local o = opts("get_total_norm", given, { norm_type = 2, error_if_nonfinite = false })
  local order = o.norm_type
  local list = list_of("get_total_norm", tensors)
  if #list == 0 then return create.zeros({}) end
  return scope.scope(function()
    local norms = {}
    for k, t in ipairs(list) do norms[k] = t:norm(order) end
    local norm = shape.stack(norms):norm(order)
    if o.error_if_nonfinite then utils._refuse_nonfinite(norm, order, "get_total_norm") end
    return norm
  end)
end

--- Multiplies all gradients by max_norm / (total_norm + 1e-6) if that is below 1: clip_grad_norm_ with a norm that the
--- script has computed. Sharded gradients are multiplied where they are: no communication.
---@param params Tensor|Tensor[]  those without a gradient are left out
---@param max_norm number  at least 0
---@param total_norm Tensor|number  the norm of all gradients over all ranks: a number, or a tensor of one element
function M.clip_grads_with_norm_(params, max_norm, total_norm)
  params = tensor.flat(list_of("clip_grads_with_norm_", params))
  opts.expect(max_norm, opts.number_from(0), "clip_grads_with_norm_: max_norm")
  local is_tensor = tensor.is_tensor(total_norm)
  opts.need(type(total_norm) == "number" or is_tensor and total_norm:numel() == 1, total_norm,
    "a number or a tensor of one element", "clip_grads_with_norm_: total_norm")
  no_grad(function()
    local factor
    if is_tensor then
      factor = (total_norm:detach():reshape {} + 1e-6):reciprocal():mul_(max_norm):clamp_(-math.huge, 1)
    else
      factor = math.min(1, max_norm / (total_norm + 1e-6))
    end
    for _, g in ipairs(gradients_of("clip_grads_with_norm_", params)) do
      g:mul_(is_tensor and factor:to(g.device) or factor)
    end
  end)
end

--- All elements of a list of tensors, in order. Gradients flow through the result.
---@param params Tensor[]  on one device
---@return Tensor  [number of elements]
function M.parameters_to_vector(params)
  local list = list_of("parameters_to_vector", params)
  opts.need(#list > 0, list, "a list of at least one tensor", "parameters_to_vector: argument 1")
  return scope.scope(function()
    local parts = {}
    for k, p in ipairs(list) do parts[k] = p:reshape(-1) end
    return shape.cat(parts)
  end)
end

--- Copies the elements of a vector into a list of tensors, in order, without a graph. Errors: the vector has another
--- number of elements than the tensors.
---@param vec Tensor  [number of elements]
---@param params Tensor[]  are overwritten
function M.vector_to_parameters(vec, params)
  opts.expect(vec, tensor.a_tensor, "vector_to_parameters: vector")
  local list, total = list_of("vector_to_parameters", params), 0
  for _, p in ipairs(list) do total = total + p:numel() end
  if vec.ndim ~= 1 or vec:numel() ~= total then
    errors.raise("vector_to_parameters: the vector has shape %s, expected [%d]", tostring(vec.shape), total)
  end
  no_grad(scope.scope, function()
    local first = 1
    for _, p in ipairs(list) do
      local n = p:numel()
      p:detach():copy_(vec:narrow(1, first, n):reshape(p.shape))
      first = first + n
    end
  end)
end

return M
