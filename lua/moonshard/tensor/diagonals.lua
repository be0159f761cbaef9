-- SPDX-License-Identifier: MIT
--- Diagonals and triangles of matrices: traces, matrices made of diagonals and blocks, positions of triangles. Also
--- functions that bring tensors to shapes that fit together. Intermediate results are released.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local positions = require "moonshard.tensor.positions"
local scope = require "moonshard.tensor.scope"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
require "moonshard.tensor.rearrange"

local methods, id_of, is_tensor = tensor.methods, tensor.id_of, tensor.is_tensor

local M = {}

--- The sum of a matrix's main diagonal. Errors: other than 2 dimensions.
---@return Tensor  []
function methods.trace(t)
  id_of(t, "trace")
  if #t.shape ~= 2 then errors.raise("trace: the tensor has shape %s, expected 2 dimensions", tostring(t.shape)) end
  return scope.run("trace", function() return methods.sum(methods.diag(t)) end)
end

--- Matrices with the elements of t's last dimension on a diagonal and zeros elsewhere.
---@param k? integer  0 is the main diagonal, 1 the one above it, -1 the one below (default: 0)
---@param d1? integer  the rows' dimension in the result, from 1; negative from the end (default: -2)
---@param d2? integer  the columns' dimension in the result (default: -1)
---@return Tensor  of one dimension more than t
function methods.diag_embed(t, k, d1, d2)
  id_of(t, "diag_embed")
  k = opts.expect(k == nil and 0 or k, opts.whole, "diag_embed: diagonal")
  local n = #t.shape
  if n == 0 then errors.raise("diag_embed: the tensor has no dimensions, expected at least 1") end
  local at = {}
  for name, d in pairs { rows = d1 or -2, columns = d2 or -1 } do
    if type(d) ~= "number" or d % 1 ~= 0 or d == 0 or d > n + 1 or d < -n - 1 then
      opts.wrong(d, ("a dimension from -%d to %d except 0"):format(n + 1, n + 1), "diag_embed: the dimension of the %s", name)
    end
    at[name] = d > 0 and d or d + n + 2
  end
  if at.rows == at.columns then errors.raise("diag_embed: rows and columns are both dimension %d", at.rows) end
  return scope.run("diag_embed", function()
    local size, beside, wide = t.shape[n], math.abs(k), { unpack(t.shape) }
    if beside > 0 then
      wide[n] = beside
      t = shapes.cat({ t, create.zeros(wide, { dtype = t.dtype, device = t.device }) }, n)
    end
    local places = create.arange(size + beside, { device = t.device })
    local on = methods.eq(methods.unsqueeze(places, 1) - methods.unsqueeze(places, 2), k)
    local zero = create.zeros({}, { dtype = t.dtype, device = t.device })
    local y = methods.where(methods.unsqueeze(t, k >= 0 and -1 or -2), on, zero)
    return methods.movedim(y, { -2, -1 }, { at.rows, at.columns })
  end)
end

--- Fills the main diagonal of a matrix; of a tensor of more dimensions, whose sizes must be equal, the elements that
--- have the same position along every dimension.
---@param value number|boolean  cast to t's dtype
---@param wrap? boolean  in a matrix with more rows than columns, the diagonal begins again after every columns + 1 rows
---  (default: false)
---@return Tensor self
function methods.fill_diagonal_(t, value, wrap)
  id_of(t, "fill_diagonal_")
  local shape = t.shape
  if #shape < 2 then
    errors.raise("fill_diagonal_: the tensor has shape %s, expected at least 2 dimensions", tostring(shape))
  end
  for d = 3, #shape do
    if shape[d] ~= shape[1] or shape[2] ~= shape[1] then
      errors.raise("fill_diagonal_: the tensor has shape %s; with more than 2 dimensions, all sizes must be equal", tostring(shape))
    end
  end
  return scope.run("fill_diagonal_", function()
    local rows, columns, on = shape[1], shape[2], nil
    for d = 2, #shape do
      local line, size = {}, {}
      for e = 1, #shape do line[e], size[e] = e == 1 and rows or 1, e == d and shape[d] or 1 end
      local first = create.arange(rows, { device = t.device })
      if wrap and #shape == 2 then first = methods.remainder(first, columns + 1) end
      local same = methods.eq(methods.reshape(first, line),
        methods.reshape(create.arange(shape[d], { device = t.device }), size))
      on = on and methods.logical_and(on, same) or same
    end
    return methods.masked_fill_(t, on, value)
  end)
end

local function triangle(who, rows, columns, k, given, lower)
  if opts.is(k) and given == nil then k, given = nil, k end
  opts.expect(rows, opts.whole_from(0), "%s: rows", who)
  opts.expect(columns, opts.whole_from(0), "%s: columns", who)
  k = opts.expect(k == nil and 0 or k, opts.whole, "%s: diagonal", who)
  local o = opts(who, given, { dtype = "int64", device = opts.string })
  return scope.run(who, function()
    local ones = create.ones({ rows, columns }, { device = o.device })
    local at = methods.nonzero(lower and methods.tril(ones, k) or methods.triu(ones, k))
    return methods.to(methods.contiguous(methods.t(at)), o.dtype)
  end)
end

--- The positions of a matrix's lower triangle, row by row; they count from 0.
---@param rows integer  rows of the matrix
---@param columns integer  columns of the matrix
---@param k? integer  up to this diagonal: 0 is the main one, 1 the one above it (default: 0)
---@param given? { dtype: string, device: string }  dtype: dtype of the result (default: int64)
---@return Tensor  [2, number of elements]: rows, columns
function M.tril_indices(rows, columns, k, given) return triangle("tril_indices", rows, columns, k, given, true) end
--- The positions of a matrix's upper triangle, row by row; they count from 0.
---@param rows integer  rows of the matrix
---@param columns integer  columns of the matrix
---@param k? integer  from this diagonal on: 0 is the main one, 1 the one above it (default: 0)
---@param given? { dtype: string, device: string }  dtype: dtype of the result (default: int64)
---@return Tensor  [2, number of elements]: rows, columns
function M.triu_indices(rows, columns, k, given) return triangle("triu_indices", rows, columns, k, given, false) end

--- A matrix with the given matrices as blocks on its diagonal, and zeros elsewhere.
---@param list Tensor[]  of up to 2 dimensions: a matrix, a row or a single element
---@return Tensor  [sum of rows, sum of columns]
function M.block_diag(list)
  if type(list) ~= "table" or is_tensor(list) or #list == 0 then
    opts.wrong(list, "a list of at least one tensor", "block_diag: argument 1")
  end
  local columns = 0
  for k = 1, #list do
    opts.expect(list[k], tensor.a_tensor, "block_diag: element %d", k)
    if #list[k].shape > 2 then
      errors.raise("block_diag: element %d has shape %s, expected at most 2 dimensions", k, tostring(list[k].shape))
    end
    columns = columns + (list[k].shape[#list[k].shape] or 1)
  end
  return scope.run("block_diag", function()
    local rows, before = {}, 0
    for k = 1, #list do
      local t = #list[k].shape < 2 and methods.reshape(list[k], 1, -1) or list[k]
      local n, width = t.shape[1], t.shape[2]
      local function zeros(size) return create.zeros({ n, size }, { dtype = t.dtype, device = t.device }) end
      rows[k] = shapes.cat({ zeros(before), t, zeros(columns - before - width) }, 2)
      before = before + width
    end
    return shapes.cat(rows)
  end)
end

-- ---- shapes that fit together ---------------------------------------------------------------------

--- Concatenates tensors in depth: along dimension 3; those of fewer dimensions are first changed by
--- atleast_3d.
---@param list Tensor[]  equal sizes except along that dimension; one dtype and device
---@return Tensor
function M.dstack(list)
  if type(list) ~= "table" or is_tensor(list) or #list == 0 then
    opts.wrong(list, "a list of at least one tensor", "dstack: argument 1")
  end
  local parts = {}
  for k = 1, #list do parts[k] = M.atleast_3d(opts.expect(list[k], tensor.a_tensor, "dstack: element %d", k)) end
  return shapes.cat(parts, 3)
end

--- t, or, if t has no dimensions, a view of it with one, of size 1.
---@param t Tensor  of any shape
---@return Tensor
function M.atleast_1d(t)
  opts.expect(t, tensor.a_tensor, "atleast_1d: argument 1")
  return #t.shape == 0 and methods.reshape(t, 1) or t
end
--- t, or a view of it with two dimensions: a vector becomes a row.
---@param t Tensor  of any shape
---@return Tensor
function M.atleast_2d(t)
  opts.expect(t, tensor.a_tensor, "atleast_2d: argument 1")
  return #t.shape < 2 and methods.reshape(t, 1, -1) or t
end
--- t, or a view of it with three dimensions: [n] becomes [1, n, 1] and [n, m] becomes [n, m, 1].
---@param t Tensor  of any shape
---@return Tensor
function M.atleast_3d(t)
  opts.expect(t, tensor.a_tensor, "atleast_3d: argument 1")
  if #t.shape == 2 then return methods.unsqueeze(t, 3) end
  return #t.shape < 2 and methods.reshape(t, 1, -1, 1) or t
end

--- Views of tensors in the shape to which they broadcast.
---@param list Tensor[]  shapes that broadcast
---@return Tensor[]  they share the tensors' storage
function M.broadcast_tensors(list)
  if type(list) ~= "table" or is_tensor(list) or #list == 0 then
    opts.wrong(list, "a list of at least one tensor", "broadcast_tensors: argument 1")
  end
  for k = 1, #list do opts.expect(list[k], tensor.a_tensor, "broadcast_tensors: element %d", k) end
  local shape, out = positions.joint_shape("broadcast_tensors", list), {}
  for k = 1, #list do out[k] = methods.expand(list[k], shape) end
  return out
end

opts.fix(methods, { "trace", "diag_embed", "fill_diagonal_" })
opts.fix(M, { "block_diag", "dstack", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors" })

return M
