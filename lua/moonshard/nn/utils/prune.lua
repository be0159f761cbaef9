-- SPDX-License-Identifier: MIT
--- nn.utils.prune: a parameter times a mask of zeros and ones, as a parametrization. State dicts have PyTorch's names,
--- "weight_orig" and "weight_mask", unless the parameter has other parametrizations, too.
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local parametrize = require "moonshard.nn.utils.parametrize"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
local base = require "moonshard.nn.module"

local raise, no_grad = errors.raise, autograd.no_grad
local Module = base.Module

local M = {}

-- ---- the mask --------------------------------------------------------------------------------------

local Mask = Module:extend "PruningMask"

function Mask:init(mask) self:register_buffer("mask", mask) end
function Mask:forward(value) return value * self.mask end

-- The parametrizations of a parameter and the position of its mask among them; nil if the parameter is not pruned.
local function mask_of(m, name)
  if not parametrize.is_parametrized(m, name) then return nil end
  local list = m.parametrizations[name]
  for k = 1, #list do
    if list[k]:isa(Mask) then return list, k end
  end
end

-- Registers hooks that save a state dict with PyTorch's names, and that load one with these names.
local function rename(m, name)
  local function pairs_of(of)
    local list, k = mask_of(of, name)
    if not list or #list > 1 then return {} end
    local path = "parametrizations." .. name .. "."
    return { [path .. "original"] = name .. "_orig", [("%s%d.mask"):format(path, k)] = name .. "_mask" }
  end
  m:register_state_dict_post_hook(function(of, sd, prefix)
    for ours, theirs in pairs(pairs_of(of)) do sd[prefix .. theirs], sd[prefix .. ours] = sd[prefix .. ours], nil end
  end)
  m:register_load_state_dict_pre_hook(function(of, sd, prefix)
    for ours, theirs in pairs(pairs_of(of)) do
      if sd[prefix .. theirs] ~= nil then sd[prefix .. ours], sd[prefix .. theirs] = sd[prefix .. theirs], nil end
    end
  end)
end

-- Gives a parameter the mask that choose(value, mask) returns. mask: the parameter's present mask, or ones.
local function apply(who, m, name, choose)
  opts.expect(m, base.a_module, "%s: argument 1", who)
  opts.expect(name, opts.string, "%s: argument 2", who)
  local list, k = mask_of(m, name)
  local value = m[name]
  if not tensor.is_tensor(value) then
    raise("%s: %s: %s", who, m:class_name(), errors.unknown("parameter", name, m._params))
  end
  no_grad(function()
    value = value:detach()
    if list then
      list[k].mask:copy_(choose(value, list[k].mask))
    else
      local mask = choose(value, create.ones_like(value))
      parametrize.register_parametrization(m, name, Mask(mask:detach():clone()))
      rename(m, name)
    end
  end)
  return m
end

-- ---- amounts ---------------------------------------------------------------------------------------

local an_amount = opts.kind("a fraction below 1, or a whole number of elements",
  function(v) return type(v) == "number" and v >= 0 and (v < 1 or v % 1 == 0) end)

-- How many of n elements or parts to prune; halves are rounded to even, as Python does.
local function count(who, amount, n)
  opts.expect(amount, an_amount, "%s: the amount", who)
  if amount >= 1 then
    if amount > n then raise("%s: the amount is %d, expected at most the number left to prune, %d", who, amount, n) end
    return amount
  end
  local exact = amount * n
  local down = math.floor(exact)
  if exact - down == 0.5 then return down + down % 2 end
  return math.floor(exact + 0.5)
end

-- A mask without the `amount` elements of the least importance among those that `mask` keeps.
local function without_least(who, mask, importance, amount)
  local flat = mask:flatten():clone()
  local k = count(who, amount, flat:sum():item())
  if k == 0 then return flat:view(mask.shape) end
  local _, at = importance:flatten():masked_fill(flat:eq(0), math.huge):topk(k, 1, { largest = false })
  return flat:index_fill_(1, at, 0):view(mask.shape)
end

-- As without_least, for the parts at each position of dimension d, which are kept or pruned as a whole.
local function without_least_parts(who, mask, importance, amount, d)
  local others = {}
  for k = 1, mask.ndim do
    if k ~= d then others[#others + 1] = k end
  end
  local kept = mask:sum(others):ne(0)
  local k = count(who, amount, kept:sum():item())
  if k == 0 then return mask:clone() end
  local _, at = importance:masked_fill(kept:logical_not(), math.huge):topk(k, 1, { largest = false })
  return mask:clone():index_fill_(d, at, 0)
end

-- Checks the dimension of a structured pruning; returns it as a number from 1 (a negative one counts from the end).
local function dimension(who, value, d)
  if value.ndim < 2 then
    raise("%s: a parameter of shape %s has no parts to prune, expected at least 2 dimensions", who, tostring(value.shape))
  end
  local at = type(d) == "number" and d % 1 == 0 and (d < 0 and value.ndim + 1 + d or d) or 0
  if at < 1 or at > value.ndim then
    raise("%s: option 'dim' is %s, expected a dimension of a parameter of shape %s", who, errors.show(d),
      tostring(value.shape))
  end
  return at
end

-- ---- functions -------------------------------------------------------------------------------------

--- Sets the elements of the least absolute value to 0, now and in training. A further call prunes among the elements
--- that are not pruned yet. To be called before sharding.
---@param m Module  a layer
---@param name string  name of the parameter
---@param amount number  below 1: the fraction of the elements to prune; else their number
---@return Module m
function M.l1_unstructured(m, name, amount)
  return apply("l1_unstructured", m, name, function(value, mask)
    return without_least("l1_unstructured", mask, value:abs(), amount)
  end)
end

--- Sets random elements to 0.
---@param m Module  a layer
---@param name string  name of the parameter
---@param amount number  below 1: the fraction of the elements to prune; else their number
---@return Module m
function M.random_unstructured(m, name, amount)
  return apply("random_unstructured", m, name, function(value, mask)
    return without_least("random_unstructured", mask, create.rand_like(value), amount)
  end)
end

--- Sets the parts of the least norm to 0: rows, or the parts at each position of another dimension.
---@param m Module  a layer
---@param name string  name of the parameter, of at least 2 dimensions
---@param amount number  below 1: the fraction of the parts to prune; else their number
---@param given? { n: number, dim: integer }
---   n: order of the norm, above 0; math.huge: the largest element (default: 2); dim: the dimension of the parts
---   (default: 1)
---@return Module m
function M.ln_structured(m, name, amount, given)
  local who = "ln_structured"
  local o = opts(who, given, { n = opts.option(opts.positive, 2), dim = 1 })
  return apply(who, m, name, function(value, mask)
    local d = dimension(who, value, o.dim)
    local parts = value:abs():transpose(1, d):flatten(2)
    local norms = o.n == math.huge and parts:amax(2) or parts:pow(o.n):sum(2):pow(1 / o.n)
    return without_least_parts(who, mask, norms, amount, d)
  end)
end

--- Sets random parts to 0: rows, or the parts at each position of another dimension.
---@param m Module  a layer
---@param name string  name of the parameter, of at least 2 dimensions
---@param amount number  below 1: the fraction of the parts to prune; else their number
---@param given? { dim: integer }  dim: the dimension of the parts (default: 1)
---@return Module m
function M.random_structured(m, name, amount, given)
  local who = "random_structured"
  local o = opts(who, given, { dim = 1 })
  return apply(who, m, name, function(value, mask)
    local d = dimension(who, value, o.dim)
    local random = create.rand(value:size(d), { dtype = value.dtype, device = value.device })
    return without_least_parts(who, mask, random, amount, d)
  end)
end

--- Sets the elements to 0 where a mask is 0.
---@param m Module  a layer
---@param name string  name of the parameter
---@param mask Tensor  zeros and ones, of the parameter's shape
---@return Module m
function M.custom_from_mask(m, name, mask)
  local who = "custom_from_mask"
  opts.expect(mask, tensor.a_tensor, "%s: the mask", who)
  return apply(who, m, name, function(value, before)
    if tostring(mask.shape) ~= tostring(value.shape) then
      raise("%s: the mask has shape %s, expected that of the parameter, %s", who, tostring(mask.shape),
        tostring(value.shape))
    end
    return before * mask:to(value.device, value.dtype)
  end)
end

--- Gives a parameter a mask of ones, unless it has a mask.
---@param m Module  a layer
---@param name string  name of the parameter
---@return Module m
function M.identity(m, name)
  return apply("identity", m, name, function(_, mask) return mask end)
end

--- Prunes several parameters together: the elements of the least absolute value among all of them, or random ones.
---@param parameters table[]  pairs { module, name }
---@param amount number  below 1: the fraction to prune of all elements that are not pruned yet; else the number to prune
---@param given? { method: "l1"|"random" }  method: "l1": the least absolute values; "random": random elements (default: "l1")
function M.global_unstructured(parameters, amount, given)
  local who = "global_unstructured"
  local o = opts(who, given, { method = opts.one_of({ "l1", "random" }, "l1") })
  opts.need(opts.is_plain(parameters) and parameters[1] ~= nil, parameters, "a list of pairs { module, name }",
    "%s: argument 1", who)
  local values, masks = {}, {}
  for k, pair in ipairs(parameters) do
    opts.need(opts.is_plain(pair), pair, "a pair { module, name }", "%s: entry %d", who, k)
    M.identity(pair[1], pair[2])
    local list, at = mask_of(pair[1], pair[2])
    values[k], masks[k] = pair[1][pair[2]]:detach():flatten(), list[at].mask
  end
  no_grad(function()
    local flat = {}
    for k, mask in ipairs(masks) do flat[k] = mask:flatten() end
    local value = shapes.cat(values, 1)
    local whole = without_least(who, shapes.cat(flat, 1), o.method == "l1" and value:abs() or create.rand_like(value),
      amount)
    local first = 1
    for _, mask in ipairs(masks) do
      mask:copy_(whole:narrow(1, first, mask:numel()):view(mask.shape))
      first = first + mask:numel()
    end
  end)
end

--- Makes a pruned parameter an ordinary one again: the original, which optimizers already have, with zeros where the
--- mask has zeros. Other parametrizations before the mask, such as weight_norm, are removed, too; the parameter gets
--- their result. Errors: a parameter that has a parametrization after the mask.
---@param m Module  a layer
---@param name string  name of the parameter
---@return Module m
function M.remove(m, name)
  opts.expect(m, base.a_module, "remove: argument 1")
  local list = mask_of(m, name)
  if not list then
    raise("remove: '%s' of %s is not pruned", tostring(name), m:class_name())
  end
  return parametrize._remove_one("remove", m, name, Mask)
end

--- Whether a parameter of the module or of its descendants is pruned.
---@param m Module  any module
---@return boolean
function M.is_pruned(m)
  opts.expect(m, base.a_module, "is_pruned: argument 1")
  for _, sub in ipairs(m:modules()) do
    if sub:isa(Mask) then return true end
  end
  return false
end

opts.fix(M, { "l1_unstructured", "random_unstructured", "custom_from_mask", "identity", "remove", "is_pruned" })

return M
