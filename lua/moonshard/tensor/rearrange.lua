-- SPDX-License-Identifier: MIT
--- Rearrangements made of views, index_select, gather and cat: reversing, rolling, rotating, moving dimensions,
--- splitting, joining, repeating, diagonals, grids. Those that need intermediate tensors run in a scope, which releases
--- them.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
local where = require "moonshard.tensor.ops".where

local methods, id_of, dimension, a_tensor = tensor.methods, tensor.id_of, tensor.dimension, tensor.a_tensor

local M = {}

-- Returns dimensions, which are given as numbers or as one list, counted from 1. Errors: one of them is named twice.
local function dimensions(t, who, first, ...)
  id_of(t, who)
  local list = type(first) == "table" and first or { first, ... }
  local out, seen = {}, {}
  for k = 1, #list do
    local d = dimension(t, list[k], who) + 1
    if seen[d] then errors.raise("%s: dimension %d is named twice", who, list[k]) end
    out[k], seen[d] = d, true
  end
  return out
end

-- Whole numbers first, first + step, …: positions from 0, on t's device.
local function ids(t, first, count, step)
  local list = create.arange(count, { dtype = "int64", device = t.device })
  return list * (step or 1) + first
end

local function flipped(t, list)
  for _, d in ipairs(list) do
    local n = methods.size(t, d)
    t = methods.index_select(t, d, ids(t, n - 1, n, -1))
  end
  return #list == 0 and methods.clone(t) or t
end

--- Reverses the order of the elements along dimensions, by copying.
---@param ... integer|integer[]  dimensions, from 1; negative from the end
---@return Tensor
function methods.flip(t, ...)
  id_of(t, "flip")
  if #t.shape == 0 then return methods.reshape(methods.flip(methods.reshape(t, 1), ...), {}) end
  return scope.run("flip", flipped, t, dimensions(t, "flip", ...))
end

local function rolled(t, shifts, list)
  local copied = false
  for k, d in ipairs(list) do
    local n = methods.size(t, d)
    local by = n > 0 and shifts[k] % n or 0
    if by > 0 then
      t = shapes.cat({ methods.narrow(t, d, n - by + 1, by), methods.narrow(t, d, 1, n - by) }, d)
      copied = true
    end
  end
  return copied and t or methods.clone(t)
end

--- Moves elements along dimensions; those that leave at the end come in at the start. Errors: different numbers of
--- shifts and dimensions.
---@param shifts integer|integer[]  for each dimension by how many places; negative: towards the start
---@param dims? integer|integer[]  from 1; negative from the end (default: as if t were flattened)
---@return Tensor
function methods.roll(t, shifts, dims)
  id_of(t, "roll")
  if type(shifts) ~= "table" then shifts = { shifts } end
  for k = 1, math.max(#shifts, 1) do opts.expect(shifts[k], opts.whole, "roll: shift %d", k) end
  local list = dimensions(t, "roll", dims)
  if dims == nil then
    if #shifts > 1 then errors.raise("roll: %d shifts without dimensions, expected one", #shifts) end
    return scope.run("roll", function()
      return methods.reshape(rolled(methods.reshape(t, -1), shifts, { 1 }), t.shape)
    end)
  end
  if #shifts ~= #list then
    errors.raise("roll: the number of shifts is %d and that of dimensions %d, expected equal numbers", #shifts, #list)
  end
  return scope.run("roll", rolled, t, shifts, list)
end

--- Turns t by 90 degrees in the plane of two dimensions, k times, from the first towards the second.
---@param k? integer  number of turns; negative: the other way (default: 1)
---@param dims? integer[]  two dimensions, from 1; negative from the end (default: {1, 2})
---@return Tensor
function methods.rot90(t, k, dims)
  k = opts.expect(k == nil and 1 or k, opts.whole, "rot90: number of turns")
  if dims ~= nil and (not opts.is_plain(dims) or #dims ~= 2) then
    opts.wrong(dims, "a list of two dimensions", "rot90: dimensions")
  end
  local list = dimensions(t, "rot90", dims or { 1, 2 })
  local a, b = list[1], list[2]
  return scope.run("rot90", function()
    k = k % 4
    if k == 0 then return methods.clone(t) end
    if k == 2 then return flipped(t, list) end
    return methods.transpose(flipped(t, { k == 1 and b or a }), a, b)
  end)
end

--- Moves dimensions to other places, without copying; the others keep their order. Errors: different numbers of
--- dimensions and places.
---@param source integer|integer[]  dimensions of t, from 1; negative from the end
---@param destination integer|integer[]  their places in the result, from 1; negative from the end
---@return Tensor  shares t's storage
function methods.movedim(t, source, destination)
  local from, to = dimensions(t, "movedim", source), dimensions(t, "movedim", destination)
  if #from ~= #to then
    errors.raise("movedim: the number of source dimensions is %d and that of destination dimensions %d, expected equal numbers", #from, #to)
  end
  local order, moved, n = {}, {}, #t.shape
  for k, d in ipairs(from) do order[to[k]], moved[d] = d, true end
  local d = 0
  for place = 1, n do
    if not order[place] then
      repeat d = d + 1 until not moved[d]
      order[place] = d
    end
  end
  return n == 0 and t or methods.permute(t, order)
end

methods.swapaxes, methods.swapdims = methods.transpose, methods.transpose
methods.broadcast_to = methods.expand

--- Replaces one dimension by several: a view if t's strides allow it, otherwise a copy.
--- Errors: the sizes' product differs from the dimension's size.
---@param d integer  from 1; negative from the end
---@param sizes integer[]  one of them may be -1 and is then computed
---@return Tensor
function methods.unflatten(t, d, sizes)
  id_of(t, "unflatten")
  local at = dimension(t, d, "unflatten") + 1
  if type(sizes) ~= "table" or tensor.is_tensor(sizes) or #sizes == 0 then
    opts.wrong(sizes, "a list of sizes", "unflatten: argument 2")
  end
  local total, known, free = methods.size(t, at), 1, nil
  for k = 1, #sizes do
    opts.expect(sizes[k], opts.whole_from(-1), "unflatten: size %d", k)
    if sizes[k] == -1 and not free then free = k else known = known * sizes[k] end
  end
  if free and (known <= 0 or total % known ~= 0) or not free and known ~= total then
    errors.raise("unflatten: sizes %s do not multiply to the size %d of dimension %d",
      tostring(setmetatable({ unpack(sizes) }, tensor.Shape)), total, d)
  end
  local out = {}
  for k = 1, at - 1 do out[k] = methods.size(t, k) end
  for k = 1, #sizes do out[#out + 1] = k == free and total / known or sizes[k] end
  for k = at + 1, #t.shape do out[#out + 1] = methods.size(t, k) end
  return methods.reshape(t, out)
end

--- t in the shape of u: a view if t's strides allow it, otherwise a copy. Errors: the number of elements differs.
---@param u Tensor  gives the shape
---@return Tensor
function methods.reshape_as(t, u)
  opts.expect(u, a_tensor, "reshape_as: argument 1")
  return methods.reshape(t, u.shape)
end

--- t with the dtype and on the device of u; t itself if it has them.
---@param u Tensor  gives dtype and device
---@return Tensor
function methods.type_as(t, u)
  opts.expect(u, a_tensor, "type_as: argument 1")
  return methods.to(t, u.device, u.dtype)
end

-- ---- joining and splitting ------------------------------------------------------------------------

local function stacked(who, list, prepare)
  if type(list) ~= "table" or tensor.is_tensor(list) then opts.wrong(list, "a list of tensors", "%s: argument 1", who) end
  if #list == 0 then
    opts.need(opts.is_plain(list), list, "a list of tensors", "%s: argument 1", who)
    errors.raise("%s: the list is empty, expected at least one tensor", who)
  end
  for k = 1, #list do opts.expect(list[k], a_tensor, "%s: element %d", who, k) end
  return scope.run(who, function()
    local parts = {}
    for k = 1, #list do parts[k] = prepare(list[k], #list[k].shape) end
    return shapes.cat(parts, who == "hstack" and #parts[1].shape > 1 and 2 or 1)
  end)
end

--- Concatenates tensors side by side: along dimension 2, or along dimension 1 if they have no second one. Errors: as
--- cat.
---@param list Tensor[]  equal sizes except along that dimension; one dtype and device
---@return Tensor
function M.hstack(list)
  return stacked("hstack", list, function(t, n) return n == 0 and methods.reshape(t, 1) or t end)
end

--- Concatenates tensors one below the other: along dimension 1; those of one dimension become rows. Errors: as cat.
---@param list Tensor[]  equal sizes except along that dimension; one dtype and device
---@return Tensor
function M.vstack(list)
  return stacked("vstack", list, function(t, n) return n < 2 and methods.reshape(t, 1, -1) or t end)
end

--- Splits t along d, without copying: into n pieces whose sizes differ by at most 1, the larger ones first, or at
--- places.
---@param n integer|integer[]  number of pieces; or for each cut the number of elements before it, negative from the end
---@param d? integer  from 1; negative from the end (default: 1)
---@return Tensor[]  they share t's storage
function methods.tensor_split(t, n, d)
  id_of(t, "tensor_split")
  local at = dimension(t, d or 1, "tensor_split") + 1
  local total, ends = methods.size(t, at), {}
  if type(n) == "table" and not tensor.is_tensor(n) then
    for k = 1, #n do
      local cut = opts.expect(n[k], opts.whole, "tensor_split: split position %d", k)
      ends[k] = math.min(math.max(cut < 0 and cut + total or cut, 0), total)
    end
    ends[#ends + 1] = total
  else
    opts.expect(n, opts.whole_from(1), "tensor_split: number of pieces")
    for k = 1, n do ends[k] = math.floor(total / n) * k + math.min(k, total % n) end
  end
  local out, first = {}, 0
  for k, last in ipairs(ends) do
    out[k] = methods.narrow(t, at, math.max(last - first, 0) > 0 and first + 1 or 1, math.max(last - first, 0))
    first = last
  end
  return out
end

--- The coordinates of a grid: for each of the given vectors a tensor with the grid's shape that varies along one
--- dimension. Errors: a tensor of more than one dimension.
---@param list Tensor[]  vectors of one dtype and device
---@param given? { indexing: "ij"|"xy" }
---   indexing: "xy" swaps the first two dimensions, as for images (default: "ij")
---@return Tensor[]  they share the vectors' storage
function M.meshgrid(list, given)
  if type(list) ~= "table" or tensor.is_tensor(list) or #list == 0 then
    opts.wrong(list, "a list of tensors, such as { x, y }", "meshgrid: argument 1")
  end
  local o = opts("meshgrid", given, { indexing = opts.one_of({ "ij", "xy" }, "ij") })
  local n, sizes, place = #list, {}, {}
  for k = 1, n do
    opts.expect(list[k], a_tensor, "meshgrid: element %d", k)
    if #list[k].shape > 1 then
      errors.raise("meshgrid: element %d has shape %s, expected at most one dimension", k, tostring(list[k].shape))
    end
    place[k] = o.indexing == "xy" and n > 1 and k < 3 and 3 - k or k
    sizes[place[k]] = list[k]:numel()
  end
  tensor.check_count("meshgrid", n)
  local out = {}
  for k = 1, n do
    local alone = {}
    for d = 1, n do alone[d] = d == place[k] and sizes[d] or 1 end
    out[k] = methods.expand(methods.reshape(list[k], alone), sizes)
  end
  return out
end

-- ---- diagonals ------------------------------------------------------------------------------------

local function diagonal_of(t, k, a, b)
  t = methods.movedim(t, { a, b }, { -2, -1 })
  local rows, columns = methods.size(t, -2), methods.size(t, -1)
  local first = k >= 0 and k or -k * columns
  local count = math.max(0, k >= 0 and math.min(rows, columns - k) or math.min(rows + k, columns))
  return methods.index_select(methods.flatten(t, -2, -1), -1, ids(t, count > 0 and first or 0, count, columns + 1))
end

--- The elements on a diagonal of two dimensions, by copying; the diagonal is the result's last dimension.
---@param k? integer  0 is the main diagonal, 1 the one above it, -1 the one below (default: 0)
---@param d1? integer  the rows' dimension, from 1; negative from the end (default: 1)
---@param d2? integer  the columns' dimension, from 1; negative from the end (default: 2)
---@return Tensor
function methods.diagonal(t, k, d1, d2)
  k = opts.expect(k == nil and 0 or k, opts.whole, "diagonal: diagonal")
  local list = dimensions(t, "diagonal", d1 or 1, d2 or 2)
  return scope.run("diagonal", diagonal_of, t, k, list[1], list[2])
end

local function matrix_of(t, k)
  local n, beside = methods.size(t, 1), math.abs(k)
  if beside > 0 then
    t = shapes.cat { t, create.zeros({ beside }, { dtype = t.dtype, device = t.device }) }
  end
  local at = ids(t, 0, n + beside)
  local on = methods.eq(methods.unsqueeze(at, 1) - methods.unsqueeze(at, 2), k)
  return where(on, methods.unsqueeze(t, k >= 0 and 2 or 1), 0)
end

--- A matrix with the elements of a vector on a diagonal and zeros elsewhere; or the diagonal of a matrix, by copying.
--- Errors: a tensor of other than 1 or 2 dimensions.
---@param k? integer  0 is the main diagonal, 1 the one above it, -1 the one below (default: 0)
---@return Tensor
function methods.diag(t, k)
  id_of(t, "diag")
  k = opts.expect(k == nil and 0 or k, opts.whole, "diag: diagonal")
  local n = #t.shape
  if n ~= 1 and n ~= 2 then
    errors.raise("diag: the tensor has %d dimensions, shape %s; expected 1 or 2", n, tostring(t.shape))
  end
  if n == 2 then return scope.run("diag", diagonal_of, t, k, 1, 2) end
  return scope.run("diag", matrix_of, t, k)
end

-- ---- repeating and taking -------------------------------------------------------------------------

local function repeated(t, counts, at)
  if type(counts) == "number" then
    local wide = { unpack(t.shape) }
    table.insert(wide, at + 1, counts)
    return methods.flatten(methods.expand(methods.unsqueeze(t, at + 1), wide), at, at + 1)
  end
  local list, from = counts:tolist(), {}
  for k = 1, methods.size(t, at) do
    local count = list[#list == 1 and 1 or k]
    if count < 0 then errors.raise("repeat_interleave: the number of repetitions of element %d is %d, expected at least 0", k, count) end
    for _ = 1, count do from[#from + 1] = k - 1 end
  end
  return methods.index_select(t, at, create.tensor(from, { dtype = "int64", device = t.device }))
end

--- Repeats each element along d. Errors: a negative number of repetitions; a tensor of repetitions with another shape
--- than [1] or [size of d].
---@param counts integer|Tensor  how often; a tensor, int64 or int32, [1] or [size of d]: how often each element
---@param d? integer  from 1; negative from the end (default: t is flattened first)
---@return Tensor
function methods.repeat_interleave(t, counts, d)
  id_of(t, "repeat_interleave")
  local at = d == nil and 1 or dimension(t, d, "repeat_interleave") + 1
  if not tensor.is_tensor(counts) then
    opts.expect(counts, opts.whole_from(0), "repeat_interleave: number of repetitions")
  else
    local n, size = counts:numel(), d == nil and t:numel() or methods.size(t, at)
    if #counts.shape ~= 1 or n ~= 1 and n ~= size or counts.dtype ~= "int64" and counts.dtype ~= "int32" then
      errors.raise("repeat_interleave: repetitions are %s %s, expected int64 or int32, [1] or [%d]", counts.dtype,
        tostring(counts.shape), size)
    end
  end
  return scope.run("repeat_interleave", function()
    local flat = d == nil and methods.reshape(t, -1) or t
    return repeated(flat, counts, at)
  end)
end

--- Takes elements along d, as gather does, but the other dimensions broadcast: `out[i][j] = t[i][idx[i][j]]` for d = 2.
--- Errors: an id outside of 0 to size - 1.
---@param idx Tensor  int64; ids from 0
---@param d? integer  from 1; negative from the end (default: t and idx are flattened first)
---@return Tensor
function methods.take_along_dim(t, idx, d)
  id_of(t, "take_along_dim")
  opts.expect(idx, a_tensor, "take_along_dim: index")
  if d == nil then
    return scope.run("take_along_dim", function()
      return methods.gather(methods.reshape(t, -1), 1, methods.reshape(idx, -1))
    end)
  end
  local at = dimension(t, d, "take_along_dim") + 1
  local n = #t.shape
  if #idx.shape ~= n then
    errors.raise("take_along_dim: the index has shape %s and the tensor %s, expected the same number of dimensions",
      tostring(idx.shape), tostring(t.shape))
  end
  local of_t, of_idx = {}, {}
  for k = 1, n do
    local a, b = t.shape[k], idx.shape[k]
    if k ~= at and a ~= b and a ~= 1 and b ~= 1 then
      errors.raise("take_along_dim: shapes %s and %s do not broadcast: dimension %d has sizes %d and %d", tostring(t.shape),
        tostring(idx.shape), k, a, b)
    end
    local joint = a == 1 and b or a
    of_t[k], of_idx[k] = k == at and a or joint, k == at and b or joint
  end
  return scope.run("take_along_dim", function()
    return methods.gather(methods.expand(t, of_t), at, methods.contiguous(methods.expand(idx, of_idx)))
  end)
end

opts.fix(methods, { "roll", "rot90", "movedim", "unflatten", "reshape_as", "type_as", "tensor_split", "diagonal",
  "diag", "repeat_interleave", "take_along_dim" })
methods.moveaxis = methods.movedim
opts.fix(M, { "hstack", "vstack" })

return M
