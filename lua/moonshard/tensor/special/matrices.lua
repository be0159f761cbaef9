-- SPDX-License-Identifier: MIT
--- Inverses, linear systems, factorizations, determinants and least squares of matrices: the part of ms.linalg that
--- calls LAPACK, which is loaded at the first use (kernels/cpu/linalg). Also powers, exponentials and products, made of
--- matmul.
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"
require "moonshard.tensor.summaries"

local op, a_in, a_i, a_f, args = engine.op, engine.a_in, engine.a_i, engine.a_f, engine.args
local methods, wrap, id_of, a_tensor = tensor.methods, tensor.wrap, tensor.id_of, tensor.a_tensor

local M = {}

local INV, SOLVE, TRIANGULAR, DET, SLOGDET = op "linalg_inv", op "linalg_solve", op "linalg_solve_triangular",
  op "linalg_det", op "linalg_slogdet"
local CHOLESKY, QR, SVD, EIGH, PINV, LSTSQ = op "linalg_cholesky", op "linalg_qr", op "linalg_svd", op "linalg_eigh",
  op "linalg_pinv", op "linalg_lstsq"
local EPSILON = { float32 = 2 ^ -23, float64 = 2 ^ -52 }

-- Checks that a is a matrix or a batch of matrices.
local function matrices(who, a, what)
  opts.expect(a, a_tensor, "%s: %s", who, what)
  if #a.shape < 2 then
    errors.raise("%s: %s has shape %s, expected a matrix or a batch of matrices: at least 2 dimensions", who, what,
      tostring(a.shape))
  end
  return a
end

-- Calls an operator with one matrix, or two, and the first n_i integers of engine.a_i and n_f numbers of engine.a_f.
local function call(number, who, a, b, n_i, n_f)
  args.n_in, args.n_i, args.n_f = b and 2 or 1, n_i, n_f or 0
  a_in[0] = id_of(a, who)
  if b then a_in[1] = id_of(b, who) end
  tensor.call(number, a, b)
end

-- The first n outputs of the last call.
local function outputs(n)
  local out = engine.a_out
  local second, third = out[1], out[2]
  if n == 1 then return wrap(out[0]) end
  if n == 2 then return wrap(out[0]), wrap(second) end
  return wrap(out[0]), wrap(second), wrap(third)
end

local function flipped(t) return methods.transpose(t, -1, -2) end

-- Expands two batches of matrices to the batch dimensions to which both broadcast.
local function common_batch(who, a, b)
  local sa, sb = a.shape, b.shape
  local n, same = math.max(#sa, #sb), #sa == #sb
  local ea, eb = {}, {}
  for k = 3, n do                                          -- counted from the end
    local x, y = sa[#sa - k + 1] or 1, sb[#sb - k + 1] or 1
    if x ~= y and x ~= 1 and y ~= 1 then
      errors.raise("%s: the batch dimensions of %s and %s do not broadcast", who, tostring(sa), tostring(sb))
    end
    same = same and x == y
    ea[n - k + 1] = x == 1 and y or x
    eb[n - k + 1] = ea[n - k + 1]
  end
  if same then return a, b end
  for k = 2, 1, -1 do ea[n - k + 1], eb[n - k + 1] = sa[#sa - k + 1], sb[#sb - k + 1] end
  return methods.expand(a, ea), methods.expand(b, eb)
end

--- The inverse of square matrices. Errors: a singular matrix, a dtype other than float32 and float64.
---@param A Tensor  [..., N, N]
---@return Tensor  of A's shape
function M.inv(A)
  return wrap(tensor.call1(INV, matrices("linalg.inv", A, "A"), "linalg.inv"))
end

-- Whether the right side b of a system with matrices a is a batch of vectors, by PyTorch's rule.
local function is_vector(a, b)
  local sa, sb = a.shape, b.shape
  if #sb == 1 then return true end
  if #sb ~= #sa - 1 then return false end
  for d = 1, #sb do
    if sb[d] ~= sa[d] then return false end
  end
  return true
end

-- Raises unless the matrices a are square and b has as many rows (d = 2) or columns (d = 1) as they. given: b as the
-- script gave it.
local function check_rows(who, a, b, d, given)
  if a.shape[#a.shape] ~= a.shape[#a.shape - 1] then
    errors.raise("%s: A has shape %s, expected square matrices: the last two dimensions equal", who, tostring(a.shape))
  end
  if a.shape[#a.shape] ~= b.shape[#b.shape + 1 - d] then
    errors.raise("%s: A has shape %s and B has shape %s, expected as many %s in B as A has", who, tostring(a.shape),
      tostring(given.shape), d == 2 and "rows" or "columns")
  end
end

--- Solves A X = B. Errors: a singular matrix, sizes that do not fit, a dtype other than float32 and float64.
---@param A Tensor  [..., N, N]
---@param B Tensor  [..., N, K], or vectors: [N], or A's shape without its last dimension; batches broadcast
---@param given? { left: boolean }  left: false solves X A = B (default: true)
---@return Tensor X  of B's shape, with the batch dimensions of A and B broadcast
function M.solve(A, B, given)
  local o = opts("linalg.solve", given, { left = true })
  matrices("linalg.solve", A, "A")
  opts.expect(B, a_tensor, "linalg.solve: B")
  return scope.run("linalg.solve", function()
    local vector = is_vector(A, B)
    local a, b = A, vector and methods.unsqueeze(B, -1) or B
    if #b.shape < 2 then matrices("linalg.solve", b, "B") end
    check_rows("linalg.solve", A, b, (vector or o.left) and 2 or 1, B)
    if not o.left then a = flipped(a) end
    if not o.left and not vector then b = flipped(b) end
    a, b = common_batch("linalg.solve", a, b)
    call(SOLVE, "linalg.solve", a, b, 0)
    local x = outputs(1)
    if vector then return methods.squeeze(x, -1) end
    return o.left and x or flipped(x)
  end)
end

--- Solves A X = B for triangular A; A's other triangle is not read. Errors: a 0 on the diagonal.
---@param A Tensor  [..., N, N]
---@param B Tensor  [..., N, K]; batches broadcast
---@param given { upper: boolean, left: boolean, unitriangular: boolean }
---   upper: whether the triangle is the upper one (required); left: false solves X A = B (default: true);
---   unitriangular: the diagonal counts as ones and is not read (default: false)
---@return Tensor X  of B's shape, with the batch dimensions of A and B broadcast
function M.solve_triangular(A, B, given)
  local who = "linalg.solve_triangular"
  local o = opts(who, given, { upper = opts.option(opts.boolean, opts.required), left = true, unitriangular = false })
  matrices(who, A, "A")
  matrices(who, B, "B")
  check_rows(who, A, B, o.left and 2 or 1, B)
  return scope.run(who, function()
    local a, b, upper = A, B, o.upper
    if not o.left then a, b, upper = flipped(A), flipped(B), not o.upper end
    a, b = common_batch(who, a, b)
    a_i[0], a_i[1] = upper and 1 or 0, o.unitriangular and 1 or 0
    call(TRIANGULAR, who, a, b, 2)
    local x = outputs(1)
    return o.left and x or flipped(x)
  end)
end

--- The determinants of square matrices. The gradient exists for singular matrices, too.
---@param A Tensor  [..., N, N]
---@return Tensor  [...]
function M.det(A) return wrap(tensor.call1(DET, matrices("linalg.det", A, "A"), "linalg.det")) end

--- The sign and the logarithm of the absolute value of determinants, which does not overflow.
---@param A Tensor  [..., N, N]
---@return Tensor sign  [...], -1, 0 or 1
---@return Tensor logabsdet  [...]; -inf for a singular matrix, whose gradient is an error
function M.slogdet(A)
  call(SLOGDET, "linalg.slogdet", matrices("linalg.slogdet", A, "A"), nil, 0)
  return outputs(2)
end

--- The lower triangular L with A = L L^T, for symmetric positive-definite A; only A's lower triangle is read.
--- Errors: a matrix that is not positive-definite.
---@param A Tensor  [..., N, N]
---@param given? { upper: boolean }  upper: reads the upper triangle and returns L^T (default: false)
---@return Tensor  of A's shape
function M.cholesky(A, given)
  local o = opts("linalg.cholesky", given, { upper = false })
  a_i[0] = o.upper and 1 or 0
  call(CHOLESKY, "linalg.cholesky", matrices("linalg.cholesky", A, "A"), nil, 1)
  return outputs(1)
end

--- A = Q R, with orthonormal columns in Q and an upper triangular R.
---@param A Tensor  [..., M, N]
---@param given? { mode: string }
---   mode: "reduced", K = min(M, N) columns of Q; "complete", K = M; "r", computes R only, as "reduced" (default:
---   "reduced")
---@return Tensor Q  [..., M, K]; empty in mode "r"
---@return Tensor R  [..., K, N]
function M.qr(A, given)
  if type(given) == "string" then given = { mode = given } end
  local o = opts("linalg.qr", given, { mode = opts.one_of({ "reduced", "complete", "r" }, "reduced") })
  a_i[0] = o.mode == "complete" and 1 or 0
  call(QR, "linalg.qr", matrices("linalg.qr", A, "A"), nil, 1)
  local q, r = outputs(2)
  if o.mode ~= "r" then return q, r end
  q:release()
  return create.empty(0, { dtype = A.dtype, device = A.device }), r
end

local function svd(who, A, full)
  a_i[0] = full and 1 or 0
  call(SVD, who, matrices(who, A, "A"), nil, 1)
  return outputs(3)
end

--- The singular value decomposition A = U diag(S) Vh. The gradients of U and Vh need distinct singular values; the
--- vectors' signs are arbitrary. Errors: values that are inf or nan.
---@param A Tensor  [..., M, N]
---@param given? { full_matrices: boolean }
---   full_matrices: square U and Vh, whose last vectors have no gradient; false: the first K = min(M, N) vectors
---   (default: true)
---@return Tensor U  [..., M, M] or [..., M, K]
---@return Tensor S  [..., K], descending
---@return Tensor Vh  [..., N, N] or [..., K, N]
function M.svd(A, given)
  return svd("linalg.svd", A, opts("linalg.svd", given, { full_matrices = true }).full_matrices)
end

--- The singular values of matrices.
---@param A Tensor  [..., M, N]
---@return Tensor  [..., min(M, N)], descending
function M.svdvals(A)
  local u, s, vh = svd("linalg.svdvals", A, false)
  u:release()
  vh:release()
  return s
end

local UPLO = { uplo = opts.one_of({ "L", "U" }, "L") }
local function eigh(who, A, given)
  local o = opts(who, given, UPLO)
  a_i[0] = o.uplo == "U" and 1 or 0
  call(EIGH, who, matrices(who, A, "A"), nil, 1)
  return outputs(2)
end

--- The eigenvalues and eigenvectors of symmetric matrices. The gradient of the eigenvectors needs distinct eigenvalues;
--- the eigenvectors' signs are arbitrary. Errors: elements that are inf or nan.
---@param A Tensor  [..., N, N]
---@param given? { uplo: string }  uplo: the triangle that is read, "L" or "U" (default: "L")
---@return Tensor eigenvalues  [..., N], ascending
---@return Tensor eigenvectors  [..., N, N], as columns
function M.eigh(A, given) return eigh("linalg.eigh", A, given) end

--- The eigenvalues of symmetric matrices.
---@param A Tensor  [..., N, N]
---@param given? { uplo: string }  uplo: the triangle that is read, "L" or "U" (default: "L")
---@return Tensor  [..., N], ascending
function M.eigvalsh(A, given)
  local values, vectors = eigh("linalg.eigvalsh", A, given)
  vectors:release()
  return values
end

-- The limit, relative to the largest singular value, up to which singular values count as 0.
local function default_rtol(A)
  return (EPSILON[A.dtype] or 0) * math.max(A.shape[#A.shape - 1], A.shape[#A.shape])
end

--- The pseudoinverse (Moore and Penrose). Its gradient is right where the rank does not change.
---@param A Tensor  [..., M, N]
---@param given? { atol: number, rtol: number, hermitian: boolean }
---   atol: singular values up to it count as 0 (default: 0); rtol: so do those up to rtol times the largest one
---   (default: the dtype's precision times max(M, N), or 0 if atol is above 0); hermitian: accepted for scripts of
---   PyTorch and ignored
---@return Tensor  [..., N, M]
function M.pinv(A, given)
  local o = opts("linalg.pinv", given, { atol = opts.number_from(0), rtol = opts.number_from(0), hermitian = false })
  matrices("linalg.pinv", A, "A")
  a_f[0], a_f[1] = o.atol or 0, o.rtol or (o.atol and o.atol > 0 and 0 or default_rtol(A))
  call(PINV, "linalg.pinv", A, nil, 0, 2)
  return outputs(1)
end

local LSTSQ_OPTIONS = { rcond = opts.number_from(0),
  driver = opts.one_of({ "gelsy", "gels", "gelsd", "gelss" }, "gelsy") }
--- The X that minimizes |A X - B|; if there are several, the smallest one. Its gradient is right where the rank does
--- not change.
---@param A Tensor  [..., M, N]
---@param B Tensor  [..., M, K], or vectors: [M], or A's shape without its last dimension; batches broadcast
---@param given? { rcond: number, driver: string }
---   rcond: singular values up to rcond times the largest one count as 0 (default: the dtype's precision times
---   max(M, N)); driver: "gelsy" or "gels", by QR, "gelsd" or "gelss", by singular values (default: "gelsy")
---@return Tensor solution  [..., N, K]
---@return Tensor residuals  [..., K], the squared distances; empty unless M > N and every matrix has rank N
---@return Tensor rank  [...], int64
---@return Tensor singular_values  [..., min(M, N)], without gradient; empty from "gelsy" and "gels"
function M.lstsq(A, B, given)
  local who = "linalg.lstsq"
  local o = opts(who, given, LSTSQ_OPTIONS)
  matrices(who, A, "A")
  opts.expect(B, a_tensor, "linalg.lstsq: B")
  local m, n = A.shape[#A.shape - 1], A.shape[#A.shape]
  local by_values = o.driver == "gelsd" or o.driver == "gelss"
  return scope.run(who, function()
    local vector = is_vector(A, B)
    local b = vector and methods.unsqueeze(B, -1) or B
    matrices(who, b, "B")
    if b.shape[#b.shape - 1] ~= m then
      errors.raise("%s: A has shape %s and B has shape %s, expected as many rows in B as in A", who, tostring(A.shape),
        tostring(B.shape))
    end
    local a
    a, b = common_batch(who, A, b)
    a_i[0], a_f[0] = by_values and 1 or 0, o.rcond or default_rtol(A)
    call(LSTSQ, who, a, b, 1, 1)
    local x, rank, s = outputs(3)
    local like = { dtype = A.dtype, device = A.device }
    local residuals
    if m > n and methods.item(methods.all(methods.eq(rank, n))) then
      residuals = methods.sum(methods.square(methods.matmul(a, x) - b), -2)
    else
      residuals = create.zeros(0, like)
    end
    s = by_values and methods.detach(s) or create.zeros(0, like)
    return vector and methods.squeeze(x, -1) or x, residuals, rank, s
  end)
end

local function identity_like(A)
  local n = A.shape[#A.shape]
  return methods.expand(create.eye(n, { dtype = A.dtype, device = A.device }), A.shape)
end

local function square(who, A)
  matrices(who, A, "A")
  if A.shape[#A.shape] ~= A.shape[#A.shape - 1] then
    errors.raise("%s: A has shape %s, expected square matrices: the last two dimensions equal", who, tostring(A.shape))
  end
end

--- The n-th power of square matrices, by repeated squaring; negative powers are those of the inverse.
---@param A Tensor  [..., N, N]
---@param n integer  the exponent
---@return Tensor  of A's shape
function M.matrix_power(A, n)
  square("linalg.matrix_power", A)
  opts.expect(n, opts.whole, "linalg.matrix_power: n")
  return scope.run("linalg.matrix_power", function()
    if n == 0 then return methods.contiguous(identity_like(A)) end
    local power, result = n < 0 and M.inv(A) or A, nil
    n = math.abs(n)
    while true do
      if n % 2 == 1 then result = result and methods.matmul(result, power) or power end
      n = math.floor(n / 2)
      if n == 0 then return result == A and methods.clone(A) or result end
      power = methods.matmul(power, power)
    end
  end)
end

--- The exponential of square matrices, I + A + A^2 / 2 + ...: halves A until its largest column sum of absolute values
--- is at most 0.5, adds the terms up to the 18th power, and squares the sum once for each halving. Waits for the
--- device.
---@param A Tensor  [..., N, N]
---@return Tensor  of A's shape
function M.matrix_exp(A)
  square("linalg.matrix_exp", A)
  return scope.run("linalg.matrix_exp", function()
    if A:numel() == 0 then return methods.clone(A) end
    local size = methods.item(methods.max(methods.sum(methods.abs(methods.detach(A)), -2)))
    local halvings = size > 0.5 and size < math.huge and math.ceil(math.log(size / 0.5) / math.log(2)) or 0
    local a, one = A * 2 ^ -halvings, identity_like(A)
    local sum = one
    for k = 18, 1, -1 do sum = one + methods.matmul(a, sum) / k end
    for _ = 1, halvings do sum = methods.matmul(sum, sum) end
    return sum
  end)
end

--- The product of several matrices, in the order that takes the fewest multiplications.
---@param list Tensor[]  at least two, [N, K]; the first and the last may be vectors
---@return Tensor
function M.multi_dot(list)
  opts.expect(list, opts.table, "linalg.multi_dot: argument")
  local n = #list
  if n < 2 then errors.raise("linalg.multi_dot: the number of tensors is %d, expected at least two", n) end
  for k, t in ipairs(list) do
    opts.expect(t, a_tensor, "linalg.multi_dot: tensor %d", k)
    local dims = #t.shape
    if dims ~= 2 and not (dims == 1 and (k == 1 or k == n)) then
      errors.raise("linalg.multi_dot: tensor %d has shape %s, expected %s", k, tostring(t.shape),
        (k == 1 or k == n) and "a matrix or a vector" or "a matrix; only the first and the last may be vectors")
    end
  end
  local sizes = {}                                         -- matrix k is sizes[k] x sizes[k + 1]
  for k, t in ipairs(list) do
    local rows, columns = t.shape[1], t.shape[2] or t.shape[1]
    if #t.shape == 1 then rows, columns = k == 1 and 1 or t.shape[1], k == 1 and t.shape[1] or 1 end
    if k > 1 and rows ~= sizes[k] then
      errors.raise("linalg.multi_dot: tensor %d has shape %s, expected %d row%s", k, tostring(t.shape), sizes[k],
        sizes[k] == 1 and "" or "s")
    end
    sizes[k], sizes[k + 1] = rows, columns
  end
  local cost, cut = {}, {}
  for length = 1, n do
    for i = 1, n - length + 1 do
      local j, best, at = i + length - 1, length == 1 and 0 or math.huge, nil
      for k = i, j - 1 do
        local c = cost[i * n + k] + cost[(k + 1) * n + j] + sizes[i] * sizes[k + 1] * sizes[j + 1]
        if c < best then best, at = c, k end
      end
      cost[i * n + j], cut[i * n + j] = best, at
    end
  end
  local function product(i, j)
    if i == j then return list[i] end
    local k = cut[i * n + j]
    return methods.matmul(product(i, k), product(k + 1, j))
  end
  return scope.run("linalg.multi_dot", function() return product(1, n) end)
end

--- The sums of the products of vectors' elements.
---@param x Tensor  the vectors
---@param y Tensor  broadcasts with x
---@param given? { dim: integer }  dim: the vectors' dimension (default: -1)
---@return Tensor
function M.vecdot(x, y, given)
  local o = opts("linalg.vecdot", given, { dim = -1 })
  opts.expect(x, a_tensor, "linalg.vecdot: x")
  opts.expect(y, a_tensor, "linalg.vecdot: y")
  return scope.run("linalg.vecdot", function()
    local products = x * y
    return methods.to(methods.sum(products, o.dim), products.dtype)       -- integers keep their dtype
  end)
end

--- The reason why LAPACK cannot be used; nil if it can. The first call loads it.
---@return string?
function M.why_unavailable()
  return scope.run("linalg.why_unavailable", function()
    local ok, text = pcall(M.inv, create.ones(1, 1))
    if not ok then return (tostring(text):gsub("^.-linalg%.inv ", "ms.linalg ")) end
    return nil
  end)
end

--- Whether LAPACK can be used. The first call loads it.
---@return boolean
function M.is_available() return M.why_unavailable() == nil end

opts.fix(M, { "inv", "det", "slogdet", "svdvals", "matrix_power", "matrix_exp", "multi_dot" }, "linalg.")

return M
