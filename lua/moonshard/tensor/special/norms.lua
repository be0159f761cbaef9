-- SPDX-License-Identifier: MIT
--- Norms of vectors and matrices, condition numbers and ranks: the part of ms.linalg that reduces.
local errors = require "moonshard.core.errors"
local linalg = require "moonshard.tensor.special.matrices"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local methods, a_tensor, dimension = tensor.methods, tensor.a_tensor, tensor.dimension
local M = {}

local DIMS = opts.kind("a dimension or a list of them", function(v) return opts.whole.test(v) or opts.is_plain(v) end)
local function options(who, given)
  return opts(who, given, { dim = DIMS, keepdim = false })
end

-- The order and the options. A table in the place of the order is the options.
local function shifted(order, given)
  if given == nil and opts.is(order) then return nil, order end
  return order, given
end

local function vector_norm(x, order, dim, keepdim)
  if order == -math.huge then return methods.amin(methods.abs(x), dim, { keepdim = keepdim }) end
  if order == 0 then return methods.to(methods.sum(methods.ne(x, 0), dim, { keepdim = keepdim }), x.dtype) end
  return methods.norm(x, order, dim, { keepdim = keepdim })
end

--- The norm of vectors, `sum(|x|^ord)^(1 / ord)`; math.huge: the largest absolute value; -math.huge: the smallest; 0:
--- how many elements are not 0.
---@param x Tensor  of a floating-point dtype
---@param ord? number  (default: 2)
---@param given? { dim: integer|integer[], keepdim: boolean }
---   dim: the vectors' dimensions (default: all); keepdim: leaves them with size 1 (default: false)
---@return Tensor
function M.vector_norm(x, ord, given)
  ord, given = shifted(ord, given)
  local o = options("linalg.vector_norm", given)
  opts.expect(x, a_tensor, "linalg.vector_norm: x")
  ord = opts.expect(ord == nil and 2 or ord, opts.number, "linalg.vector_norm: ord")
  return scope.run("linalg.vector_norm", function() return vector_norm(x, ord, o.dim, o.keepdim) end)
end

local ORDERS = { fro = true, nuc = true, [1] = true, [-1] = true, [2] = true, [-2] = true, [math.huge] = true,
  [-math.huge] = true }
local AN_ORDER = opts.kind("'fro', 'nuc', 1, -1, 2, -2, math.huge or -math.huge", function(v) return ORDERS[v] == true end)

local function matrix_norm(who, A, ord, dims, keepdim)
  opts.need(type(dims) == "table" and #dims == 2, dims, "a list of two dimensions", "%s: option 'dim'", who)
  local rows, columns = dimension(A, dims[1], who) + 1, dimension(A, dims[2], who) + 1
  if rows == columns then errors.raise("%s: option 'dim' names dimension %d twice", who, rows) end
  local keep = { keepdim = keepdim }
  if ord == "fro" then return methods.norm(A, 2, { rows, columns }, keep) end
  if ord == "nuc" or math.abs(ord) == 2 then
    local s = linalg.svdvals(methods.movedim(A, { rows, columns }, { -2, -1 }))
    local r = ord == "nuc" and methods.sum(s, -1) or methods[ord > 0 and "amax" or "amin"](s, -1)
    if not keepdim then return r end
    return methods.unsqueeze(methods.unsqueeze(r, math.min(rows, columns)), math.max(rows, columns))
  end
  -- Orders 1 and -1 sum columns, inf and -inf rows. The norm is the largest sum, or the smallest if ord is negative.
  local summed, left = rows, columns
  if math.abs(ord) ~= 1 then summed, left = columns, rows end
  local sums = methods.sum(methods.abs(A), summed, { keepdim = true })
  local r = methods[ord > 0 and "amax" or "amin"](sums, left, { keepdim = true })
  return keepdim and r or methods.squeeze(methods.squeeze(r, math.max(rows, columns)), math.min(rows, columns))
end

--- The norm of matrices. "fro": the root of the sum of squares; "nuc": the sum of singular values; 2, -2: the largest
--- and smallest one; 1, -1: the largest and smallest sum of a column's absolute values; math.huge, -math.huge: those of
--- a row's absolute values.
---@param A Tensor  [..., M, N]
---@param ord? number|string  (default: "fro")
---@param given? { dim: integer[], keepdim: boolean }
---   dim: the dimensions of rows and columns (default: { -2, -1 }); keepdim: leaves them with size 1 (default: false)
---@return Tensor
function M.matrix_norm(A, ord, given)
  ord, given = shifted(ord, given)
  local o = options("linalg.matrix_norm", given)
  opts.expect(A, a_tensor, "linalg.matrix_norm: A")
  ord = opts.expect(ord == nil and "fro" or ord, AN_ORDER, "linalg.matrix_norm: ord")
  return scope.run("linalg.matrix_norm", function()
    return matrix_norm("linalg.matrix_norm", A, ord, o.dim or { -2, -1 }, o.keepdim)
  end)
end

--- The norm of vectors or matrices. Without ord, the 2-norm of all elements along dim. With ord, vector_norm if dim
--- (or, without dim, the tensor) has one dimension, and matrix_norm if it has two.
---@param x Tensor  of a floating-point dtype
---@param ord? number|string  as vector_norm's or matrix_norm's
---@param given? { dim: integer|integer[], keepdim: boolean }
---   dim: the dimensions (default: all); keepdim: leaves them with size 1 (default: false)
---@return Tensor
function M.norm(x, ord, given)
  ord, given = shifted(ord, given)
  local who = "linalg.norm"
  local o = options(who, given)
  opts.expect(x, a_tensor, "linalg.norm: x")
  local n = o.dim == nil and #x.shape or type(o.dim) == "table" and #o.dim or 1
  return scope.run(who, function()
    if ord == nil then return vector_norm(x, 2, o.dim, o.keepdim) end
    if n == 2 then
      return matrix_norm(who, x, opts.expect(ord, AN_ORDER, "linalg.norm: ord"), o.dim or { 1, 2 }, o.keepdim)
    end
    opts.expect(ord, opts.number, "linalg.norm: ord of vectors")
    if n ~= 1 then
      errors.raise("linalg.norm: ord %g needs 1 or 2 dimensions, got %d; the tensor has shape %s", ord, n,
        tostring(x.shape))
    end
    return vector_norm(x, ord, o.dim, o.keepdim)
  end)
end

--- The condition number of matrices: the norm times the norm of the inverse.
---@param A Tensor  [..., M, N]; square unless p is nil, 2 or -2
---@param p? number|string  as matrix_norm's ord (default: 2, the ratio of the largest and the smallest singular value)
---@return Tensor  [...]
function M.cond(A, p)
  p = opts.expect(p == nil and 2 or p, AN_ORDER, "linalg.cond: p")
  opts.expect(A, a_tensor, "linalg.cond: A")
  return scope.run("linalg.cond", function()
    if p == 2 or p == -2 then
      local s = linalg.svdvals(A)
      local largest, smallest = methods.amax(s, -1), methods.amin(s, -1)
      if p == 2 then return largest / smallest end
      return smallest / largest
    end
    local dims = { -2, -1 }
    return matrix_norm("linalg.cond", A, p, dims, false) * matrix_norm("linalg.cond", linalg.inv(A), p, dims, false)
  end)
end

local EPSILON = { float32 = 2 ^ -23, float64 = 2 ^ -52 }
--- The rank of matrices: how many singular values are above the larger of two limits.
---@param A Tensor  [..., M, N]
---@param given? { atol: number, rtol: number, tol: number, hermitian: boolean }
---   atol: a limit (default: 0); rtol: a limit, relative to the largest singular value (default: the dtype's precision
---   times max(M, N), or 0 if atol is above 0); tol: atol by an older name; hermitian: accepted for scripts of PyTorch
---   and ignored
---@return Tensor  [...], int64
function M.matrix_rank(A, given)
  local from = opts.number_from(0)
  local o = opts("linalg.matrix_rank", given, { atol = from, rtol = from, tol = from, hermitian = false })
  opts.expect(A, a_tensor, "linalg.matrix_rank: A")
  local atol = o.tol or o.atol or 0
  return scope.run("linalg.matrix_rank", function()
    local s = linalg.svdvals(methods.detach(A))
    if s:numel() == 0 then return methods.sum(methods.to(s, "int64"), -1) end
    local rtol = o.rtol or atol > 0 and 0 or EPSILON[A.dtype] * math.max(A.shape[#A.shape - 1], A.shape[#A.shape])
    local limit = methods.clamp_min(methods.amax(s, -1, { keepdim = true }) * rtol, atol)
    return methods.sum(methods.gt(s, limit), -1)
  end)
end

opts.fix(M, { "cond" }, "linalg.")

return M
