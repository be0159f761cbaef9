-- SPDX-License-Identifier: MIT
--- nn.utils: a layer fused with its batch norm for evaluation, and calls of a module with other parameters.
local autograd = require "moonshard.autograd"
local class = require "moonshard.core.class"
local context = require "moonshard.core.context"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local base = require "moonshard.nn.module"
local Parameter = require "moonshard.nn.module.parameter".Parameter

local raise = errors.raise
local deepcopy = require "moonshard.tensor.util".deepcopy

local M = {}

-- A copy of the layer with batch norm bn folded into its weight and bias. dim: the weight's output channel dimension.
local function fused(who, layer, bn, dim)
  opts.expect(layer, base.a_module, "%s: argument 1", who)
  opts.expect(bn, base.a_module, "%s: argument 2", who)
  if layer.training or bn.training then raise("%s: a layer is in training mode; call eval() on both", who) end
  local mean, var = bn.running_mean, bn.running_var
  if not mean then raise("%s: argument 2, %s, has no running statistics", who, bn:class_name()) end
  local weight = layer.weight
  if weight:size(dim) ~= mean:size(1) then
    raise("%s: the first layer has %d outputs and the second %d channels, expected equal numbers", who, weight:size(dim), mean:size(1))
  end
  return autograd.no_grad(function()
    local out = deepcopy(layer)
    local scale = (var + bn.eps):rsqrt()
    if bn.weight then scale = scale * bn.weight end
    local shape = {}
    for d = 1, weight.ndim do shape[d] = d == dim and scale:size(1) or 1 end
    local bias = (layer.bias and layer.bias - mean or -mean) * scale
    if bn.bias then bias = bias + bn.bias end
    out.weight = Parameter((weight * scale:reshape(shape)):detach(), { requires_grad = weight.requires_grad })
    out.bias = Parameter(bias:detach(), { requires_grad = weight.requires_grad })
    return out
  end)
end

--- Returns a copy of a convolution that computes what the convolution and a batch norm after it compute in evaluation.
---@param conv Module  a convolution, in evaluation mode
---@param bn Module  a batch norm with running statistics, in evaluation mode
---@param given? { transpose: boolean }  transpose: conv is a transposed convolution (default: according to its class)
---@return Module
function M.fuse_conv_bn_eval(conv, bn, given)
  local transposed = opts("fuse_conv_bn_eval", given, { transpose = opts.boolean }).transpose
  if transposed == nil then transposed = class.name(conv):find "ConvTranspose" ~= nil end
  return fused("fuse_conv_bn_eval", conv, bn, transposed and 2 or 1)
end

--- Returns a copy of a linear layer that computes what the layer and a batch norm after it compute in evaluation.
---@param linear Module  in evaluation mode
---@param bn Module  a batch norm with running statistics, in evaluation mode
---@return Module
function M.fuse_linear_bn_eval(linear, bn) return fused("fuse_linear_bn_eval", linear, bn, 1) end

opts.fix(M, { "fuse_linear_bn_eval" })

-- ---- calls with other parameters ---------------------------------------------------------------------

M.stateless = {}

local function restore(places, ...)
  for _, place in ipairs(places) do place.slots[place.name] = place.value end
  return context.results(...)
end

--- Calls a module with other tensors in place of some of its parameters and buffers; gradients flow to the given
--- tensors. A shared parameter is replaced under all its names. Errors: unknown names; other shapes; sharded
--- parameters.
---@param m Module  called with the arguments
---@param values table<string, Tensor>  by name; all others are the module's own
---@param ... any  arguments of the module
---@return any  the module's results
function M.stateless.functional_call(m, values, ...)
  opts.expect(m, base.a_module, "functional_call: argument 1")
  opts.need(opts.is_plain(values), values, "a table of tensors", "functional_call: argument 2")
  local names, modules, known, used, instead = {}, {}, {}, {}, {}
  base.walk(m, "", nil, names, modules, {})
  local all = {}
  for k, mod in ipairs(modules) do
    for _, list in ipairs { mod._params, mod._buffers } do
      for _, name in ipairs(list) do
        local value, path = mod._slots[name], base.join(names[k], name)
        if value ~= nil then
          known[#known + 1] = path
          all[#all + 1] = { slots = mod._slots, name = name, value = value }
          local new = values[path]
          if new ~= nil then
            opts.expect(new, tensor.a_tensor, "functional_call: '%s'", path)
            if rawget(value, "_unit") or rawget(value, "_flat") then
              raise("functional_call: '%s' is sharded, and cannot be replaced", path)
            end
            if tostring(new.shape) ~= tostring(value.shape) then
              raise("functional_call: '%s' has shape %s, expected %s", path, tostring(new.shape), tostring(value.shape))
            end
            instead[value] = new
            used[path] = true
          end
        end
      end
    end
  end
  for path in pairs(values) do                          -- in any order: the error names one unknown name
    if not used[path] then raise("functional_call: %s", errors.unknown("name", path, known)) end
  end
  local places = {}
  for _, place in ipairs(all) do
    if instead[place.value] then
      places[#places + 1] = place
      place.slots[place.name] = instead[place.value]
    end
  end
  return restore(places, pcall(m, ...))
end

errors.closed(M.stateless, "nn.utils.stateless")

return M
