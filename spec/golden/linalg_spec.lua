-- SPDX-License-Identifier: MIT
--- ms.linalg, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"
local L, inf = ms.linalg, math.huge

local function flat(list, fn)
  local parts = {}
  for k, t in ipairs(list) do parts[k] = fn(t):reshape(-1) end
  return ms.cat(parts)
end
-- The results as one vector: pair gives their magnitudes, signed keeps their signs.
local function pair(fn) return function(...) return flat({ fn(...) }, ms.abs) end end
local function signed(fn)
  return function(...)
    return flat({ fn(...) }, function(t) return t.dtype == "int64" and t:to "float64" or t end)
  end
end
local function symmetric(t) return t + t:transpose(-1, -2) end

local cases = {
  inv = L.inv, solve = L.solve, solve_vector = L.solve, solve_vectors = L.solve,
  solve_right = function(a, b) return L.solve(a, b, { left = false }) end,
  triangular = function(a, b) return L.solve_triangular(a, b, { upper = false }) end,
  triangular_upper = function(a, b) return L.solve_triangular(a, b, { upper = true }) end,
  triangular_right = function(a, b) return L.solve_triangular(a, b, { upper = true, left = false }) end,
  triangular_ones = function(a, b) return L.solve_triangular(a, b, { upper = false, unitriangular = true }) end,
  det = L.det, slogdet = signed(L.slogdet),
  cholesky = L.cholesky,
  cholesky_upper = function(t) return L.cholesky(t, { upper = true }) end,
  qr = pair(L.qr), qr_square = pair(L.qr), qr_wide = pair(L.qr),
  qr_complete = function(t) return select(2, L.qr(t, { mode = "complete" })):abs() end,
  svd = pair(function(t) return L.svd(t, { full_matrices = false }) end),
  svd_wide = pair(function(t) return L.svd(t, { full_matrices = false }) end),
  svd_full = pair(L.svd), svdvals = L.svdvals,
  eigh = pair(function(t) return L.eigh(symmetric(t)) end),
  eigh_upper = pair(function(t) return L.eigh(symmetric(t), { uplo = "U" }) end),
  eigvalsh = L.eigvalsh,
  pinv = L.pinv, pinv_wide = L.pinv,
  pinv_deficient = function(t) return L.pinv(t:detach(), { rtol = 1e-6 }) end,
  lstsq = L.lstsq, lstsq_wide = L.lstsq,
  lstsq_values = function(a, b) return (L.lstsq(a, b, { driver = "gelsd" })) end,
  lstsq_rest = signed(function(a, b)
    local _, residuals, rank, s = L.lstsq(a, b, { driver = "gelsd" })
    return residuals, rank, s
  end),
  lstsq_deficient = function(a, b)
    local x, residuals, rank = L.lstsq(a, b, { rcond = 1e-6, driver = "gelsd" })
    return ms.cat { x:reshape(-1), rank:double():reshape(-1), ms.full({ 1 }, residuals:numel(), { dtype = "float64" }) }
  end,
  norm = L.norm,
  norm_nuclear = function(t) return L.norm(t, "nuc", { dim = { 1, 3 } }) end,
  norm_vector = function(t) return L.norm(t, 3, { dim = 2, keepdim = true }) end,
  matrix_norm_keep = function(t) return L.matrix_norm(t, 2, { dim = { 1, 2 }, keepdim = true }) end,
  matrix_power = function(t) return L.matrix_power(t, 5) end,
  matrix_power_inverse = function(t) return L.matrix_power(t, -2) end,
  matrix_power_0 = function(t) return L.matrix_power(t, 0) + 0 * t end,
  matrix_exp = L.matrix_exp, cond = L.cond,
  cond_1 = function(t) return L.cond(t, 1) end,
  matrix_rank = L.matrix_rank,
  multi_dot = function(...) return L.multi_dot { ... } end,
  vecdot = function(a, b) return L.vecdot(a, b, { dim = 1 }) end,
  cross = L.cross, logdet = ms.logdet, svd_method = pair(ms.svd),
  cholesky_solve = ms.cholesky_solve, cholesky_inverse = ms.cholesky_inverse,
}
for name, p in pairs { ["1"] = 1, half = 0.5, inf = inf, minf = -inf, m2 = -2, ["0"] = 0 } do
  cases["vector_norm_" .. name] = function(t) return L.vector_norm(t, p, { dim = -1 }) end
end
for name, p in pairs { fro = "fro", nuc = "nuc", ["1"] = 1, m1 = -1, ["2"] = 2, m2 = -2, inf = inf, minf = -inf } do
  cases["matrix_norm_" .. name] = function(t) return L.matrix_norm(t, p) end
end

golden_cases("linalg", cases)
