-- SPDX-License-Identifier: MIT
--- ms.linalg, and the methods of tensors that call it by PyTorch's older names.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local matrices = require "moonshard.tensor.special.matrices"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"
local methods = tensor.methods

local M = {}
for _, part in ipairs { matrices, require "moonshard.tensor.special.norms" } do
  for name, fn in pairs(part) do M[name] = fn end
end

--- The product of matrices: Tensor:matmul.
---@param A Tensor  [..., N, K]
---@param B Tensor  [..., K, M]; batches broadcast
---@return Tensor  [..., N, M]
function M.matmul(A, B)
  opts.expect(A, tensor.a_tensor, "linalg.matmul: A")
  return methods.matmul(A, B)
end

--- The cross product of vectors with 3 elements. Errors: a dimension of another size.
---@param x Tensor  the vectors
---@param y Tensor  broadcasts with x
---@param given? { dim: integer }  dim: the vectors' dimension (default: -1)
---@return Tensor
function M.cross(x, y, given)
  local o = opts("linalg.cross", given, { dim = -1 })
  opts.expect(x, tensor.a_tensor, "linalg.cross: x")
  return methods.cross(x, y, o.dim)
end

opts.fix(M, { "matmul" }, "linalg.")

--- The inverse of square matrices: ms.linalg.inv.
---@return Tensor  of t's shape
function methods.inverse(t) return matrices.inv(t) end

--- The determinants of square matrices: ms.linalg.det.
---@return Tensor
function methods.det(t) return matrices.det(t) end

--- The sign and the logarithm of the absolute value of determinants: ms.linalg.slogdet.
---@return Tensor sign
---@return Tensor logabsdet
function methods.slogdet(t) return matrices.slogdet(t) end

--- The logarithm of determinants; nan where one is negative.
---@return Tensor
function methods.logdet(t)
  return scope.run("logdet", function()
    local sign, log = matrices.slogdet(t)
    return log + methods.log(methods.detach(sign))
  end)
end

--- The singular value decomposition t = U diag(S) V^T; ms.linalg.svd returns V^T instead, and all vectors by default.
---@param given? { some: boolean }  some: false makes U and V square (default: true)
---@return Tensor U  [..., M, K] if t has shape [..., M, N], with K = min(M, N)
---@return Tensor S  [..., K], descending
---@return Tensor V  [..., N, K]
function methods.svd(t, given)
  local o = opts("svd", given, { some = true })
  local u, s, vh = matrices.svd(t, { full_matrices = not o.some })
  return u, s, methods.transpose(vh, -1, -2)
end

--- t = Q R: ms.linalg.qr.
---@param given? { some: boolean }  some: false makes Q square (default: true)
---@return Tensor Q
---@return Tensor R
function methods.qr(t, given)
  local o = opts("qr", given, { some = true })
  return matrices.qr(t, { mode = o.some and "reduced" or "complete" })
end

--- The Cholesky factor: ms.linalg.cholesky.
---@param given? { upper: boolean }  upper: returns the transposed factor, of t's upper triangle (default: false)
---@return Tensor  of t's shape
function methods.cholesky(t, given) return matrices.cholesky(t, given) end

-- Solves A X = b with the Cholesky factor f of A.
local function solve_factor(b, f, upper)
  local ft = methods.transpose(f, -1, -2)
  local first, second = f, ft
  if upper then first, second = ft, f end
  return matrices.solve_triangular(second, matrices.solve_triangular(first, b, { upper = false }), { upper = true })
end

--- Solves A X = t, with the Cholesky factor of A.
---@param factor Tensor  [..., N, N], as cholesky returns it
---@param given? { upper: boolean }  upper: whether the factor is the upper one (default: false)
---@return Tensor  [..., N, K] if t has shape [..., N, K]
function methods.cholesky_solve(t, factor, given)
  local o = opts("cholesky_solve", given, { upper = false })
  opts.expect(factor, tensor.a_tensor, "cholesky_solve: factor")
  return scope.run("cholesky_solve", function() return solve_factor(t, factor, o.upper) end)
end

--- The inverse of the matrix whose Cholesky factor t is.
---@param given? { upper: boolean }  upper: whether the factor is the upper one (default: false)
---@return Tensor  of t's shape
function methods.cholesky_inverse(t, given)
  local o = opts("cholesky_inverse", given, { upper = false })
  return scope.run("cholesky_inverse", function()
    local one = create.eye(t.shape[#t.shape], { dtype = t.dtype, device = t.device })
    return solve_factor(methods.expand(one, t.shape), t, o.upper)
  end)
end

--- The pseudoinverse: ms.linalg.pinv.
---@param given? { rcond: number }  rcond: singular values up to rcond times the largest one count as 0 (default: 1e-15)
---@return Tensor
function methods.pinverse(t, given)
  return matrices.pinv(t, { rtol = opts("pinverse", given, { rcond = 1e-15 }).rcond })
end

--- The n-th power of square matrices: ms.linalg.matrix_power.
---@param n integer  the exponent; negative: powers of the inverse
---@return Tensor
function methods.matrix_power(t, n) return matrices.matrix_power(t, n) end

--- The exponential of square matrices: ms.linalg.matrix_exp.
---@return Tensor
function methods.matrix_exp(t) return matrices.matrix_exp(t) end

opts.fix(methods, { "inverse", "det", "slogdet", "logdet", "matrix_power", "matrix_exp" })

return errors.closed(M, "linalg")
