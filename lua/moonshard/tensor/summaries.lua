-- SPDX-License-Identifier: MIT
--- Reductions that no row describes (tensor/rows.lua): extremes and their positions, norms, running extremes; and
--- reductions, counts and differences that are made of other operators. Each of these runs in a scope, which releases
--- its intermediate results.
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local positions = require "moonshard.tensor.rows".positions
local scope = require "moonshard.tensor.scope"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"

local op, a_i, a_f = engine.op, engine.a_i, engine.a_f
local methods, id_of, dimension, a_tensor = tensor.methods, tensor.id_of, tensor.dimension, tensor.a_tensor
local wrap, position, call1, call1_with = tensor.wrap, tensor.position, tensor.call1, tensor.call1_with

local KEEPDIM = { keepdim = false }

for _, name in ipairs { "max", "min" } do
  local along, over_all = op(name), op(name .. "_all")
  --- Without d, the largest (smallest) element; along d: values, indices (int64, from 0); for a tensor d, as maximum
  --- (minimum).
  methods[name] = function(t, d, given)
    if given == nil and opts.is(d) then d, given = nil, d end
    if d == nil then
      if given ~= nil then opts(name .. " without a dimension", given, {}) end
      return wrap(call1(over_all, t, name))
    end
    if tensor.is_tensor(d) then return methods[name == "max" and "maximum" or "minimum"](t, d) end
    a_i[0], a_i[1] = position(d, name), given ~= nil and opts(name, given, KEEPDIM).keepdim and 1 or 0
    local values = call1_with(along, t, name, 2)
    local indices = engine.a_out[1]
    return wrap(values), wrap(indices)
  end
end

for _, name in ipairs { "argmax", "argmin" } do
  local number = op(name)
  methods[name] = function(t, d, given)
    if given == nil and opts.is(d) then d, given = nil, d end
    a_i[0], a_i[1] = position(d or -1, name), given ~= nil and opts(name, given, KEEPDIM).keepdim and 1 or 0
    return wrap(call1_with(number, t, name, 2))
  end
end

local NORM = op "norm"
local NORM_OPTIONS = { keepdim = false, dim = opts.any, p = opts.any }
--- The p-norm, `sum(|t|^p)^(1/p)`; p = math.huge gives the largest absolute value. Errors: a dtype that is not floating
--- point.
---@param p? number  the exponent (default: 2)
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@param given? { keepdim: boolean, dim: integer|integer[], p: number }
---   keepdim: leaves the dimensions with size 1; dim: d by name; p: p by name
---@return Tensor
function methods.norm(t, p, d, given)
  if given == nil and opts.is(d) then d, given = nil, d end
  if given == nil and opts.is(p) then p, given = nil, p end
  local keepdim = false
  if given ~= nil then
    local o = opts("norm", given, NORM_OPTIONS)
    keepdim = o.keepdim
    if o.p ~= nil and p ~= nil or o.dim ~= nil and d ~= nil then
      errors.raise("norm: %s is given by position and by name", o.p ~= nil and p ~= nil and "p" or "the dimension")
    end
    if o.p ~= nil then p = o.p end
    if o.dim ~= nil then d = o.dim end
  end
  if p ~= nil then opts.expect(p, opts.number, "norm: p") end
  a_i[0] = keepdim and 1 or 0
  local n = positions(d, 1, "norm")
  a_f[0] = p or 2
  return wrap(call1_with(NORM, t, "norm", n, 1))
end

for _, name in ipairs { "cummax", "cummin" } do
  local number = op(name)
  methods[name] = opts.fixed(name, function(t, d)
    a_i[0] = position(d or -1, name)
    local values = call1_with(number, t, name, 1)
    local indices = engine.a_out[1]
    return wrap(values), wrap(indices)
  end)
end

for _, name in ipairs { "cumsum", "cumprod" } do
  local fn = methods[name]
  methods[name .. "_"] = opts.fixed(name .. "_", function(t, d) return methods.copy_(t, fn(t, d)) end)
end

-- ---- made of other operators ----------------------------------------------------------------------

--- Whether t's dtype is float32, float64, float16 or bfloat16.
---@return boolean
function methods.is_floating_point(t)
  id_of(t, "is_floating_point")
  return dtypes.is_float(tensor.info_of(t).dtype)
end

--- The number of elements that are not 0.
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@return Tensor  int64
function methods.count_nonzero(t, d)
  id_of(t, "count_nonzero")
  return scope.run("count_nonzero", function() return methods.sum(methods.to(methods.ne(t, 0), "int64"), d) end)
end

--- The smallest and the largest elements.
---@param given? { dim: integer, keepdim: boolean }
---   dim: the dimension to reduce (default: all); keepdim: leaves the dimension with size 1
---@return Tensor smallest
---@return Tensor largest
function methods.aminmax(t, given)
  local o = opts("aminmax", given, { dim = opts.whole, keepdim = false })
  local keep = { keepdim = o.keepdim }
  return methods.amin(t, o.dim, keep), methods.amax(t, o.dim, keep)
end

--- The sum of the elements that are not nan.
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@param given? { keepdim: boolean }  keepdim: leaves the dimensions with size 1
---@return Tensor
function methods.nansum(t, d, given)
  id_of(t, "nansum")
  return scope.run("nansum", function()
    return methods.sum(methods.is_floating_point(t) and methods.masked_fill(t, methods.isnan(t), 0) or t, d, given)
  end)
end

--- The mean of the elements that are not nan; nan if there are none. Errors: a dtype that is not floating point.
---@param d? integer|integer[]  dimensions to reduce (default: all)
---@param given? { keepdim: boolean }  keepdim: leaves the dimensions with size 1
---@return Tensor
function methods.nanmean(t, d, given)
  if not methods.is_floating_point(t) then
    errors.raise("nanmean: the tensor is %s, expected floating point", t.dtype)
  end
  return scope.run("nanmean", function()
    local missing = methods.isnan(t)
    local count = methods.sum(methods.to(methods.logical_not(missing), t.dtype), d, given)
    return methods.sum(methods.masked_fill(t, missing, 0), d, given) / count
  end)
end

--- Differences of neighbours: `out[i] = t[i + 1] - t[i]`; for bool, whether they differ.
---@param n? integer  how often to take differences (default: 1)
---@param d? integer  from 1; negative from the end (default: -1)
---@param given? { prepend: Tensor, append: Tensor }
---   prepend: joined to t along d before it; append: joined after it; unused with n = 0
---@return Tensor  smaller by n along d; with n = 0 a copy of t
function methods.diff(t, n, d, given)
  if given == nil and opts.is(d) then d, given = nil, d end
  if given == nil and opts.is(n) then n, given = nil, n end
  local o = opts("diff", given, { prepend = a_tensor, append = a_tensor })
  n = opts.expect(n == nil and 1 or n, opts.whole_from(0), "diff: n")
  id_of(t, "diff")
  local at = dimension(t, d or -1, "diff") + 1
  if n == 0 then return methods.clone(t) end
  return scope.run("diff", function()
    local list = { o.prepend or t }
    if o.prepend then list[2] = t end
    list[#list + 1] = o.append
    t = #list > 1 and shapes.cat(list, at) or t
    for _ = 1, n do
      local size = methods.size(t, at)
      if size == 0 then return methods.clone(t) end
      local a, b = methods.narrow(t, at, 1, size - 1), methods.narrow(t, at, math.min(2, size), size - 1)
      t = t.dtype == "bool" and methods.ne(a, b) or b - a
    end
    return t
  end)
end

-- ---- counts ---------------------------------------------------------------------------------------

-- Adds the elements of `amounts` to n zeros, at the positions in ids, which count from 0.
local function tally(ids, amounts, n)
  local out = create.zeros({ n }, { dtype = amounts.dtype, device = ids.device })
  return methods.scatter_add_(out, 1, ids, amounts)
end

local function histogram(t, bins, low, high)
  local x = methods.double(methods.reshape(methods.detach(t), -1))
  if low == high and t:numel() > 0 then low, high = x:min():item(), x:max():item() end
  if low ~= low or high ~= high or math.abs(low) == math.huge or math.abs(high) == math.huge then
    errors.raise("histc: the range is %g to %g, expected finite numbers", low, high)
  end
  local width, from = high - low
  if low == high then                                       -- the range is low - 1 to low + 1, which may round to low
    width, from = 2, x - low + 1
  elseif width == math.huge then
    width, from = high / 2 - low / 2, x / 2 - low / 2
  else
    from = x - low
  end
  local inside = low == high and methods.logical_and(methods.ge(from, 0), methods.le(from, 2))
    or methods.logical_and(methods.ge(x, low), methods.le(x, high))
  from = methods.masked_fill(from, methods.logical_not(inside), 0)
  local place = methods.clamp(methods.floor(from / width * bins), 0, bins - 1)
  return methods.to(tally(methods.to(place, "int64"), methods.to(inside, "int64"), bins), t.dtype)
end

--- Counts elements in bins of equal width between low and high; others and nan are not counted. No gradient. Errors: a
--- dtype that is not floating point, low above high, a range that is not finite.
---@param bins? integer  number of bins (default: 100)
---@param low? number  lower end of the first bin (default: 0)
---@param high? number  upper end of the last bin, itself counted (default: 0); if both ends are equal, they are t's extremes
---@return Tensor  [bins] of t's dtype
function methods.histc(t, bins, low, high)
  bins = opts.expect(bins == nil and 100 or bins, opts.whole_from(1), "histc: number of bins")
  low = opts.expect(low == nil and 0 or low, opts.number, "histc: lower end")
  high = opts.expect(high == nil and 0 or high, opts.number, "histc: upper end")
  if low > high then errors.raise("histc: the lower end %g is above the upper end %g", low, high) end
  if not methods.is_floating_point(t) then errors.raise("histc: the tensor is %s, expected floating point", t.dtype) end
  return scope.run("histc", histogram, t, bins, low, high)
end

--- Counts how often each number from 0 occurs, or adds weights. No gradient. Errors: negative numbers, a tensor
--- that is not 1-d, a dtype other than int64 and int32, weights of another shape.
---@param given? { weights: Tensor, minlength: integer }
---   weights: a tensor of t's shape, whose elements are added in place of 1; minlength: lowest size of the result
---   (default: 0)
---@return Tensor  [largest number + 1], at least [minlength]; int64, or of weights' dtype
function methods.bincount(t, given)
  local o = opts("bincount", given, { weights = a_tensor, minlength = opts.option(opts.whole_from(0), 0) })
  id_of(t, "bincount")
  if #t.shape ~= 1 or t.dtype ~= "int64" and t.dtype ~= "int32" then
    errors.raise("bincount: the tensor is %s %s, expected int64 or int32, [n]", t.dtype, tostring(t.shape))
  end
  if o.weights ~= nil and o.weights.shape ~= t.shape then
    errors.raise("bincount: the weights have shape %s, expected %s", tostring(o.weights.shape), tostring(t.shape))
  end
  local n = t:numel()
  if n > 0 and t:min():item() < 0 then errors.raise("bincount: the lowest element is %d, expected at least 0", t:min():item()) end
  return scope.run("bincount", function()
    local amounts = o.weights and methods.detach(o.weights)
      or create.ones({ n }, { dtype = "int64", device = t.device })
    local size = math.max(n > 0 and tonumber(t:max():item()) + 1 or 0, o.minlength)
    return tally(methods.to(t, "int64"), amounts, size)
  end)
end

opts.fix(methods, { "is_floating_point", "count_nonzero" })

return {}
