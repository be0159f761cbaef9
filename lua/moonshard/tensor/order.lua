-- SPDX-License-Identifier: MIT
--- Sorting, the largest, middle and most frequent elements, distinct elements, searches. NaN is larger than every
--- number, and equal elements keep their order.
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
local where = require "moonshard.tensor.ops".where
require "moonshard.tensor.summaries"
require "moonshard.tensor.positions"

local op, a_in, a_i, args = engine.op, engine.a_in, engine.a_i, engine.args
local methods, wrap, id_of, is_tensor = tensor.methods, tensor.wrap, tensor.id_of, tensor.is_tensor
local position, dimension, call1_with, a_tensor = tensor.position, tensor.dimension, tensor.call1_with, tensor.a_tensor

-- ---- sorting --------------------------------------------------------------------------------------

local SORT, TOPK = op "sort", op "topk"

local function sorted(who, t, d, descending)
  a_i[0], a_i[1] = position(d, who), descending and 1 or 0
  local values = call1_with(SORT, t, who, 2)
  local ids = engine.a_out[1]
  return wrap(values), wrap(ids)
end

local ORDER = { descending = false, stable = opts.option(opts.boolean, true) }
--- Sorts along d; equal elements keep their order, and nan is larger than every number.
---@param d? integer  from 1; negative from the end (default: -1)
---@param given? { descending: boolean, stable: boolean }
---   descending: the largest first (default: false); stable: accepted for PyTorch's scripts, the order is always stable
---@return Tensor values
---@return Tensor indices  int64, of the same shape: where each value was, from 0
function methods.sort(t, d, given)
  if given == nil and opts.is(d) then d, given = nil, d end
  return sorted("sort", t, d or -1, opts("sort", given, ORDER).descending)
end

--- The positions that sort t along d: the indices of sort.
---@param d? integer  from 1; negative from the end (default: -1)
---@param given? { descending: boolean, stable: boolean }
---   descending: the largest first (default: false); stable: accepted for PyTorch's scripts, the order is always stable
---@return Tensor  int64, from 0
function methods.argsort(t, d, given)
  if given == nil and opts.is(d) then d, given = nil, d end
  local o = opts("argsort", given, ORDER)
  id_of(t, "argsort")
  return scope.run("argsort", function() return select(2, sorted("argsort", methods.detach(t), d or -1, o.descending)) end)
end

--- Sorts along the first dimension.
---@return Tensor
function methods.msort(t)
  id_of(t, "msort")
  return scope.run("msort", function() return (sorted("msort", t, 1, false)) end)
end

--- The k largest elements along d, the largest first; of equal elements, the first. Errors: k above the size of d.
---@param k integer  how many
---@param d? integer  from 1; negative from the end (default: -1)
---@param given? { largest: boolean, sorted: boolean }
---   largest: false takes the smallest, the smallest first (default: true); sorted: accepted for PyTorch's scripts, the
---   result is always sorted
---@return Tensor values
---@return Tensor indices  int64: where each value was, from 0
function methods.topk(t, k, d, given)
  if given == nil and opts.is(d) then d, given = nil, d end
  local o = opts("topk", given, { largest = true, sorted = true })
  opts.expect(k, opts.whole_from(0), "topk: k")
  a_i[0], a_i[1], a_i[2] = position(d or -1, "topk"), k, o.largest and 1 or 0
  local values = call1_with(TOPK, t, "topk", 3)
  local ids = engine.a_out[1]
  return wrap(values), wrap(ids)
end

-- The dimension of a reduction, from 1 (by default the last; nil: t has none), and the option keepdim.
local function along(who, t, d, given)
  if given == nil and opts.is(d) then d, given = nil, d end
  local keepdim = opts(who, given, { keepdim = false }).keepdim
  id_of(t, who)
  if #t.shape == 0 then
    position(d or -1, who)
    return nil, keepdim
  end
  local at = dimension(t, d or -1, who) + 1
  if t.shape[at] == 0 then errors.raise("%s: dimension %d of %s has no elements", who, at, tostring(t.shape)) end
  return at, keepdim
end

-- Returns the elements of a sorted tensor at the positions `place` (of size 1 along d), and their positions before the
-- sort.
local function chosen(values, ids, place, d, keepdim)
  local v, at = methods.gather(values, d, place), methods.gather(ids, d, place)
  if keepdim then return v, at end
  return methods.squeeze(v, d), methods.squeeze(at, d)
end

--- The k-th smallest element along d. Errors: k outside of 1 to the size of d.
---@param k integer  from 1
---@param d? integer  from 1; negative from the end (default: -1)
---@param given? { keepdim: boolean }  keepdim: leaves the dimension with size 1
---@return Tensor values
---@return Tensor indices  int64: where each value was, from 0
function methods.kthvalue(t, k, d, given)
  local at, keepdim = along("kthvalue", t, d, given)
  local n = at and t.shape[at] or 1
  if not opts.whole_from(1).test(k) or k > n then
    opts.wrong(k, ("a whole number from 1 to %d"):format(n), "kthvalue: k")
  end
  return scope.run("kthvalue", function()
    local values, ids = sorted("kthvalue", t, at or 1, false)
    if not at then return values, ids end
    values, ids = methods.narrow(values, at, k, 1), methods.narrow(ids, at, k, 1)
    if keepdim then return methods.clone(values), methods.clone(ids) end
    return methods.clone(methods.squeeze(values, at)), methods.clone(methods.squeeze(ids, at))
  end)
end

-- ---- middle, quantiles, most frequent -------------------------------------------------------------

-- The median along d: of two middle elements, the lower one. ignored: whether elements that are nan do not count; if
-- they count, the result is the first nan, if there is one.
local function middle(who, t, d, keepdim, ignored)
  local values, ids = sorted(who, t, d, false)
  local n = t.shape[d]
  local nans = methods.is_floating_point(t)
    and methods.sum(methods.to(methods.isnan(methods.detach(t)), "int64"), d, { keepdim = true })
  local place
  if not nans then
    local size = { unpack(t.shape) }
    size[d] = 1
    place = create.full(size, math.floor((n - 1) / 2), { dtype = "int64", device = t.device })
  elseif ignored then
    place = methods.clamp_min(methods.floor_divide(n - 1 - nans, 2), 0)
  else
    place = where(methods.eq(nans, 0), math.floor((n - 1) / 2), n - nans)
  end
  return chosen(values, ids, place, d, keepdim)
end

local function median_of(who, t, d, given, ignored)
  if d == nil and given == nil then
    id_of(t, who)
    if t:numel() == 0 then errors.raise("%s: the tensor %s has no elements", who, tostring(t.shape)) end
    return scope.run(who, function()
      return (middle(who, methods.reshape(t, -1), 1, false, ignored))
    end)
  end
  local at, keepdim = along(who, t, d, given)
  if not at then return sorted(who, t, 1, false) end
  return scope.run(who, middle, who, t, at, keepdim, ignored)
end

--- Without d, the median of all elements; along d: values, indices. Of two middle elements, the lower one; nan if there
--- is a nan.
---@param d? integer  from 1; negative from the end (default: all elements; -1 with an option)
---@param given? { keepdim: boolean }  keepdim: leaves the dimension with size 1
---@return Tensor values
---@return Tensor? indices  int64: where each value was, from 0
function methods.median(t, d, given) return median_of("median", t, d, given, false) end
--- The median of the elements that are not nan; nan if there are none. See median.
---@param d? integer  from 1; negative from the end (default: all elements; -1 with an option)
---@param given? { keepdim: boolean }  keepdim: leaves the dimension with size 1
---@return Tensor values
---@return Tensor? indices  int64: where each value was, from 0
function methods.nanmedian(t, d, given) return median_of("nanmedian", t, d, given, true) end

local RULES = { "linear", "lower", "higher", "midpoint", "nearest" }

-- Quantiles q (1-d, in t's dtype) of the elements along d, a dimension from 1; the result's first dimension is q's.
local function quantiles(t, q, d, rule, ignored)
  t = methods.transpose(t, d, -1)
  local values = methods.unsqueeze((sorted("quantile", t, -1, false)), 1)
  local n, missing = t.shape[#t.shape], methods.isnan(methods.detach(t))
  local nans = methods.unsqueeze(methods.sum(methods.to(missing, q.dtype), -1, { keepdim = true }), 1)
  local shape = { q:numel() }
  for k = 1, #t.shape do shape[k + 1] = 1 end
  q = methods.reshape(q, shape)
  local rank
  if ignored then
    rank = methods.clamp_min(q * (n - 1 - nans), 0)
  else
    rank = where(methods.gt(nans, 0), n - 1, q * (n - 1) + nans * 0)   -- the last element, which is nan
  end
  if rule == "lower" then rank = methods.floor(rank) end
  if rule == "higher" then rank = methods.ceil(rank) end
  if rule == "nearest" then rank = methods.round(rank) end
  local below = methods.floor(rank)
  local size = { unpack(rank.shape) }
  local function at(place)
    local of = { unpack(size) }
    of[#of] = n
    return methods.gather(methods.expand(values, of), -1, methods.contiguous(methods.to(place, "int64")))
  end
  local y = at(below)
  if rule == "linear" or rule == "midpoint" then
    local weight = rule == "midpoint" and 0.5 or rank - below
    y = methods.lerp(y, at(methods.ceil(rank)), weight)
  end
  return methods.squeeze(methods.transpose(y, d + 1, -1), d + 1)
end

local function quantile_of(who, t, q, d, given, ignored)
  if given == nil and opts.is(d) then d, given = nil, d end
  local o = opts(who, given, { keepdim = false, interpolation = opts.one_of(RULES, "linear") })
  id_of(t, who)
  if t.dtype ~= "float32" and t.dtype ~= "float64" then
    errors.raise("%s: the tensor is %s %s, expected float32 or float64", who, t.dtype, tostring(t.shape))
  end
  if t:numel() == 0 then errors.raise("%s: the tensor %s has no elements", who, tostring(t.shape)) end
  if is_tensor(q) and (#q.shape > 1 or q.dtype ~= t.dtype) then
    errors.raise("%s: q is %s %s, expected a number or %s [n]", who, q.dtype, tostring(q.shape), t.dtype)
  elseif not is_tensor(q) and (type(q) ~= "number" or not (q >= 0 and q <= 1)) then
    opts.wrong(q, "a number from 0 to 1 or a tensor of them", "%s: q", who)
  end
  local at = d ~= nil and #t.shape > 0 and dimension(t, d, who) + 1
  return scope.run(who, function()
    local one = not is_tensor(q) or #q.shape == 0
    local list = methods.reshape(is_tensor(q) and q or create.tensor({ q }, { dtype = t.dtype, device = t.device }), -1)
    if is_tensor(q) and list:numel() > 0 then
      local low, high = list:detach():min():item(), list:detach():max():item()
      if not (low >= 0 and high <= 1) then errors.raise("%s: q has elements from %g to %g, expected 0 to 1", who, low, high) end
    end
    local flat = not at and methods.reshape(t, -1) or t
    local y = quantiles(flat, list, at or 1, o.interpolation, ignored)
    if o.keepdim then
      local size = { list:numel() }
      for k = 1, #t.shape do size[k + 1] = (not at or k == at) and 1 or t.shape[k] end
      y = methods.reshape(y, size)
    end
    return one and methods.squeeze(y, 1) or y
  end)
end

--- Quantiles of the elements along d. Where the rank q * (size - 1) lies between two elements, the result is
--- interpolated; it is nan if there is a nan. Errors: a dtype other than float32 and float64, no elements, q outside of
--- 0 to 1.
---@param q number|Tensor  from 0 to 1; a tensor, [n] of t's dtype, gives n results along a new first dimension
---@param d? integer  from 1; negative from the end (default: all elements)
---@param given? { keepdim: boolean, interpolation: "linear"|"lower"|"higher"|"midpoint"|"nearest" }
---   keepdim: leaves the dimension with size 1; interpolation: rule for a rank between two elements (default: linear)
---@return Tensor
function methods.quantile(t, q, d, given) return quantile_of("quantile", t, q, d, given, false) end
--- quantile of the elements that are not nan; nan if there are none.
---@param q number|Tensor  from 0 to 1; a tensor, [n] of t's dtype, gives n results along a new first dimension
---@param d? integer  from 1; negative from the end (default: all elements)
---@param given? { keepdim: boolean, interpolation: "linear"|"lower"|"higher"|"midpoint"|"nearest" }
---   keepdim: leaves the dimension with size 1; interpolation: rule for a rank between two elements (default: linear)
---@return Tensor
function methods.nanquantile(t, q, d, given) return quantile_of("nanquantile", t, q, d, given, true) end

-- Whether each element along d differs from the one before it; the first one does.
local function changes(values, d)
  local n, size = values.shape[d], { unpack(values.shape) }
  size[d] = math.min(n, 1)
  local first = create.ones(size, { dtype = "bool", device = values.device })
  if n < 2 then return first end
  return shapes.cat({ first, methods.ne(methods.narrow(values, d, 2, n - 1), methods.narrow(values, d, 1, n - 1)) }, d)
end

--- The most frequent element along d; of equally frequent ones, the smallest. Errors: no elements along d.
---@param d? integer  from 1; negative from the end (default: -1)
---@param given? { keepdim: boolean }  keepdim: leaves the dimension with size 1
---@return Tensor values
---@return Tensor indices  int64: where the last such element is, from 0
function methods.mode(t, d, given)
  local at, keepdim = along("mode", t, d, given)
  if not at then return sorted("mode", t, 1, false) end
  return scope.run("mode", function()
    local values, ids = sorted("mode", t, at, false)
    local n, size = t.shape[at], {}
    for k = 1, #t.shape do size[k] = k == at and n or 1 end
    local place = methods.reshape(create.arange(n, { device = t.device }), size)
    local starts = changes(methods.detach(values), at)
    local begins = methods.cummax(where(starts, place, 0), at)
    local ends = shapes.cat({ methods.narrow(starts, at, math.min(2, n), n - 1),
      methods.narrow(create.ones_like(starts), at, 1, 1) }, at)
    local length = where(ends, place - begins + 1, 0)
    return chosen(values, ids, methods.argmax(length, at, { keepdim = true }), at, keepdim)
  end)
end

-- ---- distinct elements ----------------------------------------------------------------------------

-- t's slices along d as rows, their number, and the number of elements of each.
local function rows_of(who, t, d)
  local moved = methods.movedim(t, d, 1)
  local size = { unpack(moved.shape) }
  local n = table.remove(size, 1)
  local m = 1
  for _, one in ipairs(size) do m = m * one end
  if m == 0 then errors.raise("%s: the slices of %s along dimension %d have no elements", who, tostring(t.shape), d) end
  return methods.reshape(moved, n, m), n, m
end

-- The positions that sort rows: by their first elements, rows with equal ones by their second, and so on.
local function order_of_rows(rows, n, m)
  local order = create.arange(n, { device = rows.device })
  for column = m, 1, -1 do
    local _, by = sorted("unique", methods.index_select(methods.select(rows, 2, column), 1, order), 1, false)
    order = methods.index_select(order, 1, by)
  end
  return order
end

-- The distinct elements of t, or its distinct slices along d. ordered: sorts them first; otherwise only neighbours are
-- compared. o: the options of unique.
local function different(who, t, d, o, ordered)
  local flat = d == nil
  local rows, n, m
  if flat then
    rows = methods.reshape(t, -1)
    n, m = rows:numel(), 1
  else
    rows, n, m = rows_of(who, t, d)
  end
  local order, lined = nil, rows
  if ordered and flat then
    lined, order = sorted(who, rows, 1, false)
  elseif ordered then
    order = order_of_rows(rows, n, m)
    lined = methods.index_select(rows, 1, order)
  end
  local starts = changes(lined, 1)
  if not flat then starts = methods.any(starts, 2) end
  local at = methods._true_positions(starts)
  local out = {}
  if flat then
    out[1] = methods.index_select(lined, 1, at)
  else
    out[1] = methods.index_select(t, d, order and methods.index_select(order, 1, at) or at)
  end
  if o.return_inverse then
    local number = methods.cumsum(methods.to(starts, "int64"), 1) - 1
    if order then number = methods.scatter_(create.zeros_like(number), 1, order, number) end
    out[#out + 1] = flat and methods.reshape(number, t.shape) or number
  end
  if o.return_counts then
    local last = create.full({ 1 }, n, { dtype = "int64", device = t.device })
    out[#out + 1] = methods.diff(at, { append = last })
  end
  return unpack(out)
end

local function unique_of(who, t, given, ordered)
  local accepted = { return_inverse = false, return_counts = false, dim = opts.whole }
  if ordered then accepted.sorted = true end
  local o = opts(who, given, accepted)
  id_of(t, who)
  local d = o.dim ~= nil and dimension(t, o.dim, who) + 1 or nil
  return scope.run(who, different, who, methods.detach(t), d, o, ordered)
end

--- The distinct elements, sorted; a nan equals no other nan. No gradient.
---@param given? { sorted: boolean, return_inverse: boolean, return_counts: boolean, dim: integer }
---   sorted: accepted for PyTorch's scripts, the result is always sorted; return_inverse: also returns inverse
---   (default: false); return_counts: also returns counts (default: false); dim: distinct slices along this dimension,
---   from 1 (default: elements)
---@return Tensor values
---@return Tensor? inverse  int64, of t's shape (with dim: [size of dim]): where each element is in values, from 0
---@return Tensor? counts  int64: how often each value occurs; the second result without return_inverse
function methods.unique(t, given) return unique_of("unique", t, given, true) end

--- t without elements that are equal to the one before. No gradient.
---@param given? { return_inverse: boolean, return_counts: boolean, dim: integer }
---   return_inverse: also returns inverse (default: false); return_counts: also returns counts (default: false); dim:
---   slices along this dimension, from 1 (default: elements of t, flattened)
---@return Tensor values
---@return Tensor? inverse  int64, of t's shape (with dim: [size of dim]): where each element is in values, from 0
---@return Tensor? counts  int64: how many equal neighbours a value stands for; the second result without return_inverse
function methods.unique_consecutive(t, given) return unique_of("unique_consecutive", t, given, false) end

-- ---- searches -------------------------------------------------------------------------------------

local SEARCHSORTED = op "searchsorted"

local function search(who, boundaries, values, right, out_int32)
  if type(values) == "number" then
    values = create.tensor(values, { dtype = boundaries.dtype, device = boundaries.device })
  end
  args.n_in, args.n_i, args.n_f = 2, 2, 0
  a_in[0], a_in[1] = id_of(boundaries, who, "boundaries"), id_of(values, who, "numbers")
  a_i[0], a_i[1] = right and 1 or 0, out_int32 and 1 or 0
  return wrap(tensor.call(SEARCHSORTED, boundaries, values))
end

--- Where numbers could be inserted into sorted boundaries: how many boundaries are below each number. t: the
--- boundaries, sorted along the last dimension. No gradient. Errors: different dtypes.
---@param values Tensor|number  of t's dtype; t has one dimension, or the shape of values except for the last dimension
---@param given? { right: boolean, side: "left"|"right", out_int32: boolean, sorter: Tensor }
---   right: behind equal boundaries (default: before them); side: "right" is the same as right = true; out_int32: the
---   result is int32 instead of int64 (default: false); sorter: int64, the positions that sort t (default: t is sorted)
---@return Tensor  int64, of values' shape
function methods.searchsorted(t, values, given)
  local o = opts("searchsorted", given, { right = opts.boolean, side = opts.one_of { "left", "right" },
    out_int32 = false, sorter = a_tensor })
  if o.side == "left" and o.right then errors.raise("searchsorted: side is 'left', but right is true") end
  id_of(t, "searchsorted", "boundaries")
  return scope.run("searchsorted", function()
    local from = o.sorter and methods.gather(methods.detach(t), -1, o.sorter) or t
    return search("searchsorted", from, values, o.right or o.side == "right", o.out_int32)
  end)
end

--- The number of the bucket of each element: how many boundaries are below it. No gradient. Errors: different dtypes.
---@param boundaries Tensor  [n], sorted, of t's dtype
---@param given? { right: boolean, out_int32: boolean }
---   right: a boundary belongs to the bucket above it (default: below); out_int32: the result is int32 instead of
---   int64 (default: false)
---@return Tensor  int64, of t's shape
function methods.bucketize(t, boundaries, given)
  local o = opts("bucketize", given, { right = false, out_int32 = false })
  opts.expect(boundaries, a_tensor, "bucketize: boundaries")
  if #boundaries.shape ~= 1 then
    errors.raise("bucketize: the boundaries have shape %s, expected one dimension", tostring(boundaries.shape))
  end
  return search("bucketize", boundaries, t, o.right, o.out_int32)
end

opts.fix(methods, { "msort" })

return {}
