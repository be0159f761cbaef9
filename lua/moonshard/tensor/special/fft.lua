-- SPDX-License-Identifier: MIT
--- ms.fft: Fourier transforms of any length. There is no complex dtype: complex numbers are pairs (real, imaginary) in
--- a last dimension of size 2, which is not counted among their dimensions.
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
require "moonshard.tensor.rearrange"

local op, a_i, a_f = engine.op, engine.a_i, engine.a_f
local methods, wrap, a_tensor = tensor.methods, tensor.wrap, tensor.a_tensor
local COMPLEX, REAL, HALF = op "fft_complex", op "fft_real", op "fft_half"

local M = {}

local NORM = opts.one_of({ "backward", "ortho", "forward" }, "backward")
local ONE = { n = opts.whole_from(1), dim = opts.option(opts.whole, -1), norm = NORM }

-- Checks complex numbers. Returns the number of their dimensions, without that of the pairs.
local function pairs_of(who, x)
  opts.expect(x, a_tensor, "%s: argument", who)
  local n = #x.shape
  if n < 2 or x.shape[n] ~= 2 then
    errors.raise("%s: argument has shape %s, expected complex numbers: pairs (real, imaginary) in a last dimension of size 2, as ms.fft.complex makes them",
      who, tostring(x.shape))
  end
  return n - 1
end
local function reals_of(who, x)
  opts.expect(x, a_tensor, "%s: argument", who)
  if #x.shape == 0 then errors.raise("%s: argument has 0 dimensions, expected at least 1", who) end
  return #x.shape
end

-- Checks d, one of n dimensions; returns it counted from 1.
local function dimension(who, d, n)
  if not opts.whole.test(d) or d == 0 or d > n or d < -n then
    errors.raise("%s: dimension %s is out of range, expected -%d to %d except 0", who, tostring(d), n, n)
  end
  return d > 0 and d or n + 1 + d
end

local function factor(norm, n, inverse)
  if norm == "ortho" then return 1 / math.sqrt(n) end
  return (norm == "forward") ~= inverse and 1 / n or 1
end

-- x with n elements along d: cut, or followed by zeros.
local function resized(who, x, d, n)
  local have = x.shape[d]
  if have == 0 and not n then errors.raise("%s: dimension %d of %s has no elements", who, d, tostring(x.shape)) end
  if not n or n == have then return x end
  if n < have then return methods.narrow(x, d, 1, n) end
  local sizes = { unpack(x.shape) }
  sizes[d] = n - have
  return shapes.cat({ x, create.zeros(sizes, { dtype = x.dtype, device = x.device }) }, d)
end

local function complex_along(x, d, n, inverse, norm)
  local who = inverse and "fft.ifft" or "fft.fft"
  x = resized(who, x, d, n)
  a_i[0], a_i[1], a_f[0] = d - 1, inverse and 1 or 0, factor(norm, x.shape[d], inverse)
  return wrap(tensor.call1_with(COMPLEX, x, who, 2, 1))
end
-- Transforms real numbers; returns the first half, as rfft does. inverse: with the factor of an inverse transform.
local function real_along(x, d, n, norm, inverse)
  local who = inverse and "fft.ihfft" or "fft.rfft"
  x = resized(who, x, d, n)
  a_i[0], a_f[0] = d - 1, factor(norm, x.shape[d], inverse or false)
  return wrap(tensor.call1_with(REAL, x, who, 1, 1))
end
local function half_along(x, d, n, norm, forward)
  local who = forward and "fft.hfft" or "fft.irfft"
  n = n or 2 * (x.shape[d] - 1)
  if n < 1 then
    errors.raise("%s: dimension %d has size %d, expected at least 2 without option 'n', the length of the result",
      who, d, x.shape[d])
  end
  x = resized(who, x, d, math.floor(n / 2) + 1)
  a_i[0], a_i[1], a_f[0] = d - 1, n, factor(norm, n, not forward)
  return wrap(tensor.call1_with(HALF, x, who, 2, 1))
end

-- Makes a function that transforms one dimension by fn(x, d, options).
local function along(who, count, fn)
  return function(x, given)
    local o = opts(who, given, ONE)
    local d = dimension(who, o.dim, count(who, x))
    return scope.run(who, function() return fn(x, d, o) end)
  end
end

local fft = along("fft.fft", pairs_of, function(x, d, o) return complex_along(x, d, o.n, false, o.norm) end)
--- The transform X[k] = sum over j of x[j] exp(-2 pi i j k / n), along a dimension.
---@param x Tensor  complex numbers [..., 2]
---@param given? { n: integer, dim: integer, norm: string }
---   n: the length; x is cut, or followed by zeros (default: x's size); dim: from 1, negative from the end (default:
---   -1, the last one before the pairs); norm: the factor: "backward", 1; "ortho", 1 / sqrt(n); "forward", 1 / n
---   (default: "backward")
---@return Tensor  complex numbers
function M.fft(x, given) return fft(x, given) end

local ifft = along("fft.ifft", pairs_of, function(x, d, o) return complex_along(x, d, o.n, true, o.norm) end)
--- The inverse of fft.
---@param x Tensor  complex numbers [..., 2]
---@param given? { n: integer, dim: integer, norm: string }
---   n: the length (default: x's size); dim: as fft's (default: -1); norm: the factor: "backward", 1 / n; "ortho", 1 /
---   sqrt(n); "forward", 1 (default: "backward")
---@return Tensor  complex numbers
function M.ifft(x, given) return ifft(x, given) end

local rfft = along("fft.rfft", reals_of, function(x, d, o) return real_along(x, d, o.n, o.norm) end)
--- The first half of the transform of real numbers; the elements of the other half are conjugates of these.
---@param x Tensor  real numbers
---@param given? { n: integer, dim: integer, norm: string }
---   n: the length (default: x's size); dim: as fft's (default: -1); norm: as fft's (default: "backward")
---@return Tensor  complex numbers, floor(n / 2) + 1 along the dimension
function M.rfft(x, given) return rfft(x, given) end

local irfft = along("fft.irfft", pairs_of, function(x, d, o) return half_along(x, d, o.n, o.norm) end)
--- The inverse of rfft.
---@param x Tensor  complex numbers [..., 2]
---@param given? { n: integer, dim: integer, norm: string }
---   n: the length of the result (default: 2 (x's size - 1)); dim: as fft's (default: -1); norm: as ifft's (default:
---   "backward")
---@return Tensor  real numbers
function M.irfft(x, given) return irfft(x, given) end

local hfft = along("fft.hfft", pairs_of, function(x, d, o) return half_along(M.conj(x), d, o.n, o.norm, true) end)
--- The transform, which is real, of a sequence whose first half is x and whose second half has x's conjugates in
--- reverse order.
---@param x Tensor  complex numbers [..., 2]
---@param given? { n: integer, dim: integer, norm: string }
---   n: the length of the result (default: 2 (x's size - 1)); dim: as fft's (default: -1); norm: as fft's (default:
---   "backward")
---@return Tensor  real numbers
function M.hfft(x, given) return hfft(x, given) end

local ihfft = along("fft.ihfft", reals_of, function(x, d, o) return M.conj(real_along(x, d, o.n, o.norm, true)) end)
--- The inverse of hfft.
---@param x Tensor  real numbers
---@param given? { n: integer, dim: integer, norm: string }
---   n: the length (default: x's size); dim: as fft's (default: -1); norm: as ifft's (default: "backward")
---@return Tensor  complex numbers, floor(n / 2) + 1 along the dimension
function M.ihfft(x, given) return ihfft(x, given) end

-- ---- several dimensions --------------------------------------------------------------------------

local MANY = { s = opts.table, dim = opts.table, norm = NORM }
local TWO = { s = opts.table, dim = opts.option(opts.table, { -2, -1 }), norm = NORM }

-- Makes a function that transforms several dimensions by fn(x, dims, sizes, norm); sizes[k] may be nil.
local function over(who, spec, count, fn)
  return function(x, given)
    local o = opts(who, given, spec)
    local n = count(who, x)
    local dims, sizes, seen = {}, o.s or {}, {}
    if o.dim then
      for k, d in ipairs(o.dim) do dims[k] = dimension(who, d, n) end
    else
      local first = o.s and n - #o.s or 0
      if first < 0 then errors.raise("%s: option 's' has %d sizes for %d dimension%s", who, #o.s, n, n == 1 and "" or "s") end
      for d = first + 1, n do dims[#dims + 1] = d end
    end
    if #dims == 0 then errors.raise("%s: there is no dimension to transform, expected at least 1: option 'dim' or 's' is empty", who) end
    if o.s and #o.s ~= #dims then errors.raise("%s: the length of option 's' is %d, expected the length of option 'dim', %d", who, #o.s, #dims) end
    for _, d in ipairs(dims) do
      if seen[d] then errors.raise("%s: option 'dim' names dimension %d twice", who, d) end
      seen[d] = true
    end
    for k, size in ipairs(sizes) do opts.expect(size, opts.whole_from(1), "%s: size %d of option 's'", who, k) end
    return scope.run(who, function() return fn(x, dims, sizes, o.norm) end)
  end
end

local function complex_over(inverse)
  return function(x, dims, sizes, norm)
    for k, d in ipairs(dims) do x = complex_along(x, d, sizes[k], inverse, norm) end
    return x
  end
end
local function real_over(x, dims, sizes, norm)
  x = real_along(x, dims[#dims], sizes[#dims], norm)
  for k = 1, #dims - 1 do x = complex_along(x, dims[k], sizes[k], false, norm) end
  return x
end
local function half_over(x, dims, sizes, norm)
  for k = 1, #dims - 1 do x = complex_along(x, dims[k], sizes[k], true, norm) end
  return half_along(x, dims[#dims], sizes[#dims], norm)
end

--- fft along several dimensions.
---@param x Tensor  complex numbers [..., 2]
---@param given? { s: integer[], dim: integer[], norm: string }
---   s: the lengths (default: x's sizes); dim: the dimensions (default: the last #s ones, or all);
---   norm: as fft's (default: "backward")
---@return Tensor  complex numbers
---@family fft.fftn(x, given)

--- ifft along several dimensions.
---@param x Tensor  complex numbers [..., 2]
---@param given? { s: integer[], dim: integer[], norm: string }
---   s: the lengths (default: x's sizes); dim: the dimensions (default: the last #s ones, or all);
---   norm: as ifft's (default: "backward")
---@return Tensor  complex numbers
---@family fft.ifftn(x, given)

--- rfft along the last of several dimensions, then fft along the others.
---@param x Tensor  real numbers
---@param given? { s: integer[], dim: integer[], norm: string }
---   s: the lengths (default: x's sizes); dim: the dimensions (default: the last #s ones, or all);
---   norm: as fft's (default: "backward")
---@return Tensor  complex numbers
---@family fft.rfftn(x, given)

--- The inverse of rfftn.
---@param x Tensor  complex numbers [..., 2]
---@param given? { s: integer[], dim: integer[], norm: string }
---   s: the lengths of the result (default: x's sizes, and 2 (size - 1) along the last dimension); dim: the dimensions
---   (default: the last #s ones, or all); norm: as ifft's (default: "backward")
---@return Tensor  real numbers
---@family fft.irfftn(x, given)

for name, how in pairs { fft = { pairs_of, complex_over(false) }, ifft = { pairs_of, complex_over(true) },
  rfft = { reals_of, real_over }, irfft = { pairs_of, half_over } } do
  for suffix, spec in pairs { n = MANY, ["2"] = TWO } do
    M[name .. suffix] = over(("fft.%s%s"):format(name, suffix), spec, how[1], how[2])
  end
end

-- ---- frequencies, order ---------------------------------------------------------------------------

local FREQUENCIES = { d = opts.option(opts.number, 1), dtype = opts.string, device = opts.string }
local function frequencies(who, n, given, negative)
  local o = opts(who, given, FREQUENCIES)
  opts.expect(n, opts.whole_from(1), "%s: n", who)
  return scope.run(who, function()
    local like = { dtype = o.dtype, device = o.device }
    local half = math.floor(n / 2)
    local up = create.arange(0, negative and n - half or half + 1, 1, like)
    if negative and half > 0 then up = shapes.cat({ up, create.arange(-half, 0, 1, like) }, 1) end
    if not methods.is_floating_point(up) then up = methods.float(up) end
    return up / (n * o.d)
  end)
end

--- The frequencies of fft's results: 0, 1, ... and the negative ones, divided by n * d.
---@param n integer  the length
---@param given? { d: number, dtype: string, device: string }
---   d: the time from sample to sample (default: 1); dtype: of the result (default: float32); device: of the
---   result (default: the default device)
---@return Tensor  [n]
function M.fftfreq(n, given) return frequencies("fft.fftfreq", n, given, true) end

--- The frequencies of rfft's results: 0, 1, ..., floor(n / 2), divided by n * d.
---@param n integer  the length
---@param given? { d: number, dtype: string, device: string }
---   d: the time from sample to sample (default: 1); dtype: of the result (default: float32); device: of the
---   result (default: the default device)
---@return Tensor  [floor(n / 2) + 1]
function M.rfftfreq(n, given) return frequencies("fft.rfftfreq", n, given, false) end

local SHIFT = { dim = opts.any, complex = false }
local function shifted(who, x, given, back)
  local o = opts(who, given, SHIFT)
  opts.expect(x, a_tensor, "%s: argument", who)
  local n = o.complex and pairs_of(who, x) or #x.shape
  local dims, shifts = {}, {}
  if type(o.dim) == "table" then
    for k, d in ipairs(o.dim) do dims[k] = dimension(who, d, n) end
  elseif o.dim ~= nil then
    dims[1] = dimension(who, o.dim, n)
  else
    for d = 1, n do dims[d] = d end
  end
  for k, d in ipairs(dims) do
    local half = math.floor(x.shape[d] / 2)
    shifts[k] = back and -half or half
  end
  return methods.roll(x, shifts, dims)
end

--- Moves the frequency 0 to the middle.
---@param x Tensor  in the order of fft's results
---@param given? { dim: integer|integer[], complex: boolean }
---   dim: the dimensions (default: all); complex: x has complex numbers, whose pairs do not count as a dimension
---   (default: false)
---@return Tensor
function M.fftshift(x, given) return shifted("fft.fftshift", x, given, false) end

--- The inverse of fftshift.
---@param x Tensor  as fftshift returns it
---@param given? { dim: integer|integer[], complex: boolean }
---   dim: the dimensions (default: all); complex: x has complex numbers, whose pairs do not count as a dimension
---   (default: false)
---@return Tensor
function M.ifftshift(x, given) return shifted("fft.ifftshift", x, given, true) end

-- ---- complex numbers ------------------------------------------------------------------------------

--- Complex numbers from their real and imaginary parts.
---@param re Tensor  the real parts
---@param im? Tensor  the imaginary parts, of re's shape (default: 0)
---@return Tensor  [..., 2]
function M.complex(re, im)
  opts.expect(re, a_tensor, "fft.complex: argument 1, the real parts,")
  if im ~= nil then opts.expect(im, a_tensor, "fft.complex: argument 2, the imaginary parts,") end
  return scope.run("fft.complex", function() return shapes.stack({ re, im or create.zeros_like(re) }, -1) end)
end

--- The real parts, a view.
---@param z Tensor  complex numbers [..., 2]
---@return Tensor
function M.real(z)
  pairs_of("fft.real", z)
  return methods.select(z, -1, 1)
end

--- The imaginary parts, a view.
---@param z Tensor  complex numbers [..., 2]
---@return Tensor
function M.imag(z)
  pairs_of("fft.imag", z)
  return methods.select(z, -1, 2)
end

--- The absolute values. The gradient at 0 is 0.
---@param z Tensor  complex numbers [..., 2]
---@return Tensor
function M.abs(z)
  pairs_of("fft.abs", z)
  return methods.norm(z, 2, -1)
end

--- The angles, from -pi to pi.
---@param z Tensor  complex numbers [..., 2]
---@return Tensor
function M.angle(z)
  pairs_of("fft.angle", z)
  return scope.run("fft.angle", function() return methods.atan2(M.imag(z), M.real(z)) end)
end

--- The conjugates.
---@param z Tensor  complex numbers [..., 2]
---@return Tensor
function M.conj(z)
  pairs_of("fft.conj", z)
  return scope.run("fft.conj", function() return M.complex(M.real(z), -M.imag(z)) end)
end

--- The product of complex numbers.
---@param a Tensor  complex numbers [..., 2]
---@param b Tensor  complex numbers; broadcasts with a
---@return Tensor
function M.mul(a, b)
  pairs_of("fft.mul", a)
  pairs_of("fft.mul", b)
  return scope.run("fft.mul", function()
    local x, y, u, v = M.real(a), M.imag(a), M.real(b), M.imag(b)
    return M.complex(x * u - y * v, x * v + y * u)
  end)
end

opts.fix(M, { "complex", "real", "imag", "abs", "angle", "conj", "mul" }, "fft.")

return errors.closed(M, "fft")
