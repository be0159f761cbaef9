-- SPDX-License-Identifier: MIT
--- Elements by position: where elements are not 0, selection by masks, and writes, sums and reductions at positions,
--- which are int64 tensors and count from 0. Each runs in a scope, which releases its intermediate results.
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
local where = require "moonshard.tensor.ops".where
require "moonshard.tensor.rearrange"
require "moonshard.tensor.summaries"

local op, a_in, a_i, args = engine.op, engine.a_in, engine.a_i, engine.args
local methods, wrap, id_of, is_tensor = tensor.methods, tensor.wrap, tensor.id_of, tensor.is_tensor
local dimension, a_tensor = tensor.dimension, tensor.a_tensor

local M = {}

-- ---- elements that are not 0 ----------------------------------------------------------------------

local NONZERO = op "nonzero"

--- The positions of the elements that are not 0, as if t were flattened: int64 [n], from 0. Waits for the device.
function methods._true_positions(t)
  t = methods.detach(t)
  a_i[0] = methods.count_nonzero(t):item()
  return wrap(tensor.call1_with(NONZERO, t, "nonzero", 1))
end

-- The position of each element that is not 0 along each dimension: a list.
local function coordinates(t)
  local at, out = methods._true_positions(t), {}
  for d = #t.shape, 1, -1 do
    local n = t.shape[d]
    out[d] = d == 1 and at or methods.remainder(at, n)
    at = d > 1 and methods.floor_divide(at, n) or at
  end
  return out
end
M.coordinates = coordinates

--- Where elements are not 0, in row-major order; positions count from 0. Waits for the device.
---@param given? { as_tuple: boolean }  as_tuple: a list with a tensor for each dimension (default: one tensor)
---@return Tensor|Tensor[]  int64 [n, number of dimensions], with n such elements; with as_tuple, each [n]
function methods.nonzero(t, given)
  local as_tuple = opts("nonzero", given, { as_tuple = false }).as_tuple
  id_of(t, "nonzero")
  return scope.run("nonzero", function()
    local flat = #t.shape == 0 and methods.reshape(t, 1) or t
    local list = coordinates(flat)
    if as_tuple then return list end
    if #t.shape == 0 then return create.zeros({ list[1]:numel(), 0 }, { dtype = "int64", device = t.device }) end
    return shapes.stack(list, 2)
  end)
end

--- The same as nonzero without options.
---@return Tensor  int64 [number of elements that are not 0, number of dimensions]
function methods.argwhere(t)
  id_of(t, "argwhere")
  return methods.nonzero(t)
end

-- ---- masks ----------------------------------------------------------------------------------------

--- The shape to which shapes broadcast; nil if they do not.
---@param list integer[][]
---@return integer[]?
function M.broadcast(list)
  local n, out = 0, {}
  for _, shape in ipairs(list) do n = math.max(n, #shape) end
  for d = 1, n do
    out[d] = 1
    for _, shape in ipairs(list) do
      local size = shape[d - n + #shape] or 1
      if size ~= 1 and out[d] ~= 1 and size ~= out[d] then return nil end
      if out[d] == 1 then out[d] = size end
    end
  end
  return out
end

--- The shape to which tensors broadcast.
---@param who string  the function's name in messages
---@param list Tensor[]  shapes that broadcast
---@return integer[]
function M.joint_shape(who, list)
  local sizes = {}
  for k, t in ipairs(list) do sizes[k] = t.shape end
  local joint = M.broadcast(sizes)
  if joint then return joint end
  for k, shape in ipairs(sizes) do sizes[k] = tostring(shape) end
  errors.raise("%s: shapes %s do not broadcast", who, table.concat(sizes, " and "))
end

local function check_mask(who, mask)
  opts.expect(mask, a_tensor, "%s: mask", who)
  if mask.dtype ~= "bool" then
    errors.raise("%s: the mask is %s %s, expected bool", who, mask.dtype, tostring(mask.shape))
  end
end

--- The elements where mask is true, in row-major order. Waits for the device.
---@param mask Tensor  bool; broadcasts with t
---@return Tensor  [number of such elements]
function methods.masked_select(t, mask)
  id_of(t, "masked_select")
  check_mask("masked_select", mask)
  local shape = M.joint_shape("masked_select", { t, mask })
  return scope.run("masked_select", function()
    local at = methods._true_positions(methods.expand(mask, shape))
    return methods.index_select(methods.reshape(methods.expand(t, shape), -1), 1, at)
  end)
end

local function masked_scatter(who, t, mask, src)
  id_of(t, who)
  check_mask(who, mask)
  opts.expect(src, a_tensor, "%s: source", who)
  return scope.run(who, function()
    local at = methods._true_positions(methods.expand(mask, t.shape))
    local n, have = at:numel(), src:numel()
    if have < n then errors.raise("%s: the size of the source is %d, expected at least %d, the number of true elements of the mask", who, have, n) end
    src = methods.narrow(methods.reshape(src, -1), 1, 1, n)
    return methods.reshape(methods.scatter(methods.reshape(t, -1), 1, at, src), t.shape)
  end)
end

--- t with the elements where mask is true replaced by those of src, in row-major order. Errors: src has fewer elements
--- than mask has true ones.
---@param mask Tensor  bool; broadcasts to t's shape
---@param src Tensor  of t's dtype
---@return Tensor
function methods.masked_scatter(t, mask, src) return masked_scatter("masked_scatter", t, mask, src) end
--- masked_scatter in place.
---@param mask Tensor  bool; broadcasts to t's shape
---@param src Tensor  of t's dtype
---@return Tensor self
function methods.masked_scatter_(t, mask, src)
  return methods.copy_(t, masked_scatter("masked_scatter_", t, mask, src))
end

-- ---- as if t were flattened -----------------------------------------------------------------------

--- The elements at positions of t, as if it were flattened. Errors: an id outside of 0 to numel - 1.
---@param idx Tensor  int64; ids from 0
---@return Tensor  of idx's shape
function methods.take(t, idx)
  id_of(t, "take")
  opts.expect(idx, a_tensor, "take: index")
  return scope.run("take", function()
    return methods.reshape(methods.index_select(methods.reshape(t, -1), 1, methods.reshape(idx, -1)), idx.shape)
  end)
end

local function put(who, t, idx, src, given)
  local accumulate = opts(who, given, { accumulate = false }).accumulate
  id_of(t, who)
  opts.expect(idx, a_tensor, "%s: index", who)
  opts.expect(src, a_tensor, "%s: source", who)
  if idx:numel() ~= src:numel() then
    errors.raise("%s: the index has shape %s and the source %s; expected equal numbers of elements", who, tostring(idx.shape),
      tostring(src.shape))
  end
  return scope.run(who, function()
    local write = accumulate and methods.scatter_add or methods.scatter
    local flat = write(methods.reshape(t, -1), 1, methods.reshape(idx, -1), methods.reshape(src, -1))
    return methods.reshape(flat, t.shape)
  end)
end

--- t with src at positions, as if t were flattened. Errors: an id outside of 0 to numel - 1.
---@param idx Tensor  int64; ids from 0
---@param src Tensor  as many elements as idx, of t's dtype
---@param given? { accumulate: boolean }  accumulate: adds src (default: false, src replaces)
---@return Tensor
function methods.put(t, idx, src, given) return put("put", t, idx, src, given) end
--- put in place.
---@param idx Tensor  int64; ids from 0
---@param src Tensor  as many elements as idx, of t's dtype
---@param given? { accumulate: boolean }  accumulate: adds src (default: false, src replaces)
---@return Tensor self
function methods.put_(t, idx, src, given) return methods.copy_(t, put("put_", t, idx, src, given)) end

-- ---- slices along a dimension ---------------------------------------------------------------------

-- Checks idx, a list of positions along d. Returns d counted from 1, idx expanded to the shape that a source must have,
-- and this shape.
local function along(who, t, d, idx)
  id_of(t, who)
  local at = dimension(t, d, who) + 1
  opts.expect(idx, a_tensor, "%s: index", who)
  if #idx.shape > 1 or idx.dtype ~= "int64" and idx.dtype ~= "int32" then
    errors.raise("%s: the index is %s %s, expected int64 or int32, [n]", who, idx.dtype, tostring(idx.shape))
  end
  local list, size = {}, { unpack(t.shape) }
  for k = 1, #size do list[k] = k == at and idx:numel() or 1 end
  size[at] = idx:numel()
  return at, methods.expand(methods.reshape(idx, list), size), size
end

local function check_source(who, src, t, size)
  opts.expect(src, a_tensor, "%s: source", who)
  local expected = setmetatable(size, tensor.Shape)
  if src.shape ~= expected or src.dtype ~= t.dtype then
    errors.raise("%s: the source is %s %s, expected %s %s", who, src.dtype, tostring(src.shape), t.dtype,
      tostring(expected))
  end
end

local function add_slices(who, t, d, idx, src, given)
  local alpha = given ~= nil and opts(who, given, { alpha = 1 }).alpha or 1
  local at, ids, size = along(who, t, d, idx)
  check_source(who, src, t, size)
  return methods.scatter_add_(t, at, ids, alpha == 1 and src or src * alpha)
end
local function copy_slices(who, t, d, idx, src)
  local at, ids, size = along(who, t, d, idx)
  check_source(who, src, t, size)
  return methods.scatter_(t, at, ids, src)
end
local function fill_slices(who, t, d, idx, value)
  local at, ids, size = along(who, t, d, idx)
  if not is_tensor(value) then
    if type(value) == "boolean" then value = value and 1 or 0 end
    value = create.tensor(opts.expect(value, opts.number, "%s: value", who), { dtype = t.dtype, device = t.device })
  elseif #value.shape > 0 then
    errors.raise("%s: the value has shape %s, expected a number or a tensor of shape []", who, tostring(value.shape))
  end
  value = methods.to(value, t.dtype)
  if not value.requires_grad then return methods.scatter_(t, at, ids, methods.expand(value, size)) end
  -- The value's gradient is that of all filled elements, each counted once, also if its position occurs twice.
  local filled = methods.scatter_(create.zeros(t.shape, { dtype = "bool", device = t.device }), at, ids,
    create.ones(size, { dtype = "bool", device = t.device }))
  return methods.copy_(t, where(filled, value, t))
end

--- t with alpha times the slices of src added along d, at positions that may occur several times. Errors: an id
--- outside of 0 to size - 1, a source of another shape or dtype.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64 [n]; ids from 0
---@param src Tensor  t's shape, but n along d; of t's dtype
---@param given? { alpha: number }  alpha: factor of src (default: 1)
---@return Tensor
function methods.index_add(t, d, idx, src, given)
  id_of(t, "index_add")
  return scope.run("index_add", add_slices, "index_add", methods.clone(t), d, idx, src, given)
end
--- index_add in place.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64 [n]; ids from 0
---@param src Tensor  t's shape, but n along d; of t's dtype
---@param given? { alpha: number }  alpha: factor of src (default: 1)
---@return Tensor self
function methods.index_add_(t, d, idx, src, given)
  scope.run("index_add_", add_slices, "index_add_", t, d, idx, src, given)
  return t
end
--- t with the slices along d at positions replaced by those of src. If a position occurs twice, one of the slices
--- remains. Errors: an id outside of 0 to size - 1, a source of another shape or dtype.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64 [n]; ids from 0
---@param src Tensor  t's shape, but n along d; of t's dtype
---@return Tensor
function methods.index_copy(t, d, idx, src)
  id_of(t, "index_copy")
  return scope.run("index_copy", copy_slices, "index_copy", methods.clone(t), d, idx, src)
end
--- index_copy in place.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64 [n]; ids from 0
---@param src Tensor  t's shape, but n along d; of t's dtype
---@return Tensor self
function methods.index_copy_(t, d, idx, src)
  scope.run("index_copy_", copy_slices, "index_copy_", t, d, idx, src)
  return t
end
--- t with the slices along d at positions filled with one value. Errors: an id outside of 0 to size - 1.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64 [n]; ids from 0
---@param value number|boolean|Tensor  a tensor must have no dimensions
---@return Tensor
function methods.index_fill(t, d, idx, value)
  id_of(t, "index_fill")
  return scope.run("index_fill", fill_slices, "index_fill", methods.clone(t), d, idx, value)
end
--- index_fill in place.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64 [n]; ids from 0
---@param value number|boolean|Tensor  a tensor must have no dimensions
---@return Tensor self
function methods.index_fill_(t, d, idx, value)
  scope.run("index_fill_", fill_slices, "index_fill_", t, d, idx, value)
  return t
end

-- ---- reductions at positions ----------------------------------------------------------------------

--- As scatter_add_, on a copy.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64, of as many dimensions as t; ids from 0
---@param src Tensor  at least of idx's shape, of t's dtype
---@return Tensor
function methods.scatter_add(t, d, idx, src) return methods.scatter_add_(methods.clone(t), d, idx, src) end

local SCATTER_REDUCE = op "scatter_reduce"
local KINDS = { prod = 0, amax = 1, amin = 2 }
local REDUCTIONS = { "sum", "prod", "mean", "amax", "amin" }
local NOTHING = { sum = 0, mean = 0, prod = 1, amax = -math.huge, amin = math.huge }

-- The neutral element of a reduction in a dtype, for a scatter at idx: a number, or a tensor for the largest int64,
-- which is no Lua number.
local function nothing(reduce, dtype, idx)
  local value = NOTHING[reduce]
  if math.abs(value) ~= math.huge or dtype:find "float" then return value end
  if dtype == "int64" and value > 0 then
    return create.full(idx.shape, -2 ^ 63, { dtype = dtype, device = idx.device }):bitwise_not()
  end
  local limits = { int64 = { -2 ^ 63 }, int32 = { -2 ^ 31, 2 ^ 31 - 1 }, int16 = { -2 ^ 15, 2 ^ 15 - 1 },
    int8 = { -128, 127 }, uint8 = { 0, 255 }, bool = { 0, 1 } }
  return limits[dtype][value < 0 and 1 or 2]
end

-- t with src reduced into it at the positions in idx. Without include_self, the elements of t there are first replaced
-- by the neutral element.
local function reduced(t, d, idx, src, reduce, include_self)
  local part = src
  for k = 1, #idx.shape do part = methods.narrow(part, k, 1, idx.shape[k]) end
  if not include_self then
    t = methods.scatter(t, d, idx, nothing(reduce, t.dtype, idx))
  end
  if reduce == "sum" or reduce == "mean" then
    local sum = methods.scatter_add(t, d, idx, part)
    if reduce == "sum" then return sum end
    local ones = create.ones(idx.shape, { dtype = t.dtype, device = t.device })
    local count = create.full(t.shape, include_self and 1 or 0, { dtype = t.dtype, device = t.device })
    count = methods.clamp_min(methods.scatter_add_(count, d, idx, ones), 1)
    return t:is_floating_point() and sum / count or methods.floor_divide(sum, count)
  end
  args.n_in, args.n_i, args.n_f = 3, 2, 0
  a_in[0], a_in[1], a_in[2] = t.id, id_of(idx, "scatter_reduce", "index"), part.id
  a_i[0], a_i[1] = d - 1, KINDS[reduce]
  return wrap(tensor.call(SCATTER_REDUCE, t, idx, part))
end

local function scatter_reduce(who, t, d, idx, src, reduce, given)
  local include_self = opts(who, given, { include_self = true }).include_self
  opts.expect(reduce, opts.one_of(REDUCTIONS), "%s: reduction", who)
  id_of(t, who)
  opts.expect(idx, a_tensor, "%s: index", who)
  opts.expect(src, a_tensor, "%s: source", who)
  local at = #t.shape > 0 and dimension(t, d, who) + 1 or 1
  local fits = #idx.shape == #t.shape and #idx.shape == #src.shape
  for k = 1, fits and #idx.shape or 0 do
    fits = fits and idx.shape[k] <= src.shape[k] and (k == at or idx.shape[k] <= t.shape[k])
  end
  if not fits or src.dtype ~= t.dtype then
    errors.raise("%s: the index has shape %s, the source is %s %s, the tensor %s %s; expected three tensors "
      .. "of equally many dimensions, source and tensor of one dtype; the index may exceed the source in no dimension, and "
      .. "the tensor in dimension %d only", who, tostring(idx.shape), src.dtype, tostring(src.shape), t.dtype,
      tostring(t.shape), at)
  end
  return scope.run(who, function() return reduced(t, at, idx, src, reduce, include_self) end)
end

--- Reduces src along d into a copy of t, at the positions in idx: with "sum" as scatter_add. Errors: an id outside of 0
--- to size - 1.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64, of as many dimensions as t; ids from 0
---@param src Tensor  at least of idx's shape, of t's dtype
---@param reduce "sum"|"prod"|"mean"|"amax"|"amin"  how elements for one position are combined
---@param given? { include_self: boolean }  include_self: t's own element counts, too (default: true)
---@return Tensor
function methods.scatter_reduce(t, d, idx, src, reduce, given)
  return scatter_reduce("scatter_reduce", t, d, idx, src, reduce, given)
end
--- scatter_reduce in place.
---@param d integer  from 1; negative from the end
---@param idx Tensor  int64, of as many dimensions as t; ids from 0
---@param src Tensor  at least of idx's shape, of t's dtype
---@param reduce "sum"|"prod"|"mean"|"amax"|"amin"  how elements for one position are combined
---@param given? { include_self: boolean }  include_self: t's own element counts, too (default: true)
---@return Tensor self
function methods.scatter_reduce_(t, d, idx, src, reduce, given)
  return methods.copy_(t, scatter_reduce("scatter_reduce_", t, d, idx, src, reduce, given))
end

opts.fix(methods, { "index_copy", "index_copy_", "index_fill", "index_fill_", "argwhere", "masked_select",
  "masked_scatter", "masked_scatter_", "take", "scatter_add" })

return M
