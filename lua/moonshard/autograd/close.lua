-- SPDX-License-Identifier: MIT
--- Comparison of tensors with tolerances that depend on the dtype.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local read = require("moonshard.tensor.values").read
local create = require "moonshard.tensor.create"
local autograd = require "moonshard.autograd"
local scope = require "moonshard.tensor.scope"

local M = {}

-- PyTorch's tolerances, as { rtol, atol }.
local tolerances = {
  float32 = { 1.3e-6, 1e-5 }, float64 = { 1e-7, 1e-7 }, float16 = { 1e-3, 1e-5 }, bfloat16 = { 1.6e-2, 1e-5 },
}

-- rtol and atol for a comparison of two dtypes: of each, the larger of the dtypes' values.
local function tolerance(a, b)
  local ta, tb = tolerances[a] or { 0, 0 }, tolerances[b] or { 0, 0 }
  return math.max(ta[1], tb[1]), math.max(ta[2], tb[2])
end

--- The position of element k (from 0) as text: "[2, 1]".
function M.place(k, shape)
  local at = {}
  for d = #shape, 1, -1 do
    at[d] = k % shape[d] + 1
    k = math.floor(k / shape[d])
  end
  return "[" .. table.concat(at, ", ") .. "]"
end

-- int64 values beyond 2^53 are cdata.
local function is_number(v) return type(v) == "number" or errors.is_int64(v) end
local function value(v) return type(v) == "cdata" and tostring(v) or v ~= v and "nan" or ("%.9g"):format(v) end
local function distance(u, v)
  local d = math.abs(tonumber(u) - tonumber(v))
  return d == 0 and u ~= v and 1 or d
end

-- Returns how many elements differ and how many there are, and of the pair that differs most: its index (from 0), the
-- difference, and both values.
local function compare(a, b, rtol, atol, equal_nan)
  local x, n = read(a)
  local y = read(b)
  local worst, at, wrong = -1, 0, 0
  for k = 0, n - 1 do
    local u, v = x[k], y[k]
    local d = distance(u, v)
    if u == v or (equal_nan and u ~= u and v ~= v) then d = 0 end
    -- nan is close to nothing (with equal_nan, to nan); infinity only to itself.
    local close = d == 0 or d < math.huge and d <= atol + rtol * math.abs(tonumber(v))
    if not close then
      wrong = wrong + 1
      if d ~= d then d = math.huge end
      if d > worst then worst, at = d, k end
    end
  end
  return wrong, n, at, worst, x[at], y[at]
end

--- Raises an error unless a and b are close: |a - b| <= atol + rtol * |b|. Tolerances that are not given depend on the
--- dtype. Errors: different shapes or, with check_dtype, different dtypes.
---@param a any  tensors, numbers, booleans, strings, nil, tables of them
---@param b any  the expected values
---@param given? { rtol: number, atol: number, check_dtype: boolean, equal_nan: boolean }
---   rtol: relative tolerance (default: by dtype); atol: absolute tolerance (default: by dtype); check_dtype: dtypes
---   must be equal; equal_nan: two nan are close
function M.assert_close(a, b, given)
  local o = opts("assert_close", given, { rtol = opts.number_from(0), atol = opts.number_from(0), check_dtype = true,
    equal_nan = false })
  local function check(x, y, path)
    if x == nil and y == nil then return end
    if x == nil or y == nil then errors.raise("assert_close%s: got %s, expected %s", path, errors.kind(x), errors.kind(y)) end
    local tx, ty = tensor.is_tensor(x), tensor.is_tensor(y)
    if type(x) == "table" and type(y) == "table" and not tx and not ty then
      for k in pairs(x) do check(x[k], y[k], path .. "[" .. tostring(k) .. "]") end
      for k in pairs(y) do
        if x[k] == nil then check(nil, y[k], path .. "[" .. tostring(k) .. "]") end
      end
      return
    end
    if type(x) == "boolean" or type(x) == "string" then
      if x ~= y then errors.raise("assert_close%s: got %s, expected %s", path, errors.show(x), errors.show(y)) end
      return
    end
    if not tx and not ty then
      if not is_number(x) or not is_number(y) then
        errors.raise("assert_close%s: %s and %s cannot be compared, expected tensors or numbers", path, errors.kind(x),
          errors.kind(y))
      end
      local rtol, atol = o.rtol or 1e-7, o.atol or 1e-7
      local d, limit = distance(x, y), atol + rtol * math.abs(tonumber(y))
      local close = x == y or d < math.huge and d <= limit
      if not close then
        errors.raise("assert_close%s: got %s, expected %s; difference %g, allowed %g (rtol %g, atol %g)", path, value(x),
          value(y), d, limit, rtol, atol)
      end
      return
    end
    local parts, others = tx and tensor.inner(x), ty and tensor.inner(y)
    if parts and others then
      for k = 1, math.max(#parts, #others) do check(parts[k], others[k], ("%s, inner tensor %d"):format(path, k)) end
      return
    elseif parts or others then
      errors.raise("assert_close%s: got %s, expected %s", path, errors.kind(x), errors.kind(y))
    end
    scope.scope(function()
      autograd.no_grad(function()
        if not tx then x = create.full(y.shape, x, { dtype = y.dtype }) end
        if not ty then y = create.full(x.shape, y, { dtype = x.dtype }) end
        local sx, sy = x.shape, y.shape
        if sx ~= sy then
          errors.raise("assert_close%s: shapes differ: got %s, expected %s", path, tostring(sx), tostring(sy))
        end
        if o.check_dtype and x.dtype ~= y.dtype then
          errors.raise("assert_close%s: dtypes differ: got %s, expected %s", path, x.dtype, y.dtype)
        end
        local rtol, atol = tolerance(x.dtype, y.dtype)
        rtol, atol = o.rtol or rtol, o.atol or atol
        local wrong, n, at, worst, u, v = compare(x, y, rtol, atol, o.equal_nan)
        if wrong > 0 then
          errors.raise("assert_close%s: %d of %d elements of %s %s differ; worst at %s: got %s, expected %s; difference %g, "
            .. "allowed %g (rtol %g, atol %g)", path, wrong, n, x.dtype, tostring(sx), M.place(at, sx), value(u), value(v), worst,
            atol + rtol * math.abs(tonumber(v)), rtol, atol)
        end
      end)
    end)
  end
  check(a, b, "")
end

return M
