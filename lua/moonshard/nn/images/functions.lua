-- SPDX-License-Identifier: MIT
--- Functions of nn.F on images and on signals of one to three dimensions: interpolation, padding, windows as columns,
--- and local response normalisation.
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local resampling = require "moonshard.nn.images.resampling"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"
local windows = require "moonshard.nn.pooling.windows"

local op_pad = engine.op "pad"
local a_tensor, info_of, raise, run = tensor.a_tensor, tensor.info_of, errors.raise, scope.scope
local M = {}

-- ---- interpolation ----------------------------------------------------------------------------------

--- Resizes images, signals or volumes. Errors: a mode that does not fit the number of dimensions.
---@param x Tensor  [N, C, L], [N, C, H, W] or [N, C, D, H, W], floating point
---@param given { size: integer|integer[], scale_factor: number|number[], mode: "nearest"|"nearest-exact"|"area"|"linear"|"bilinear"|"trilinear"|"bicubic", align_corners: boolean, recompute_scale_factor: boolean, antialias: boolean }
---   size: sizes of the output, or one for all dimensions; scale_factor: output elements for each input element,
---   instead of size; mode: how elements are computed (default: "nearest"): "linear" is for [N, C, L], "bilinear" and
---   "bicubic" for [N, C, H, W], "trilinear" for [N, C, D, H, W]; "area" takes the mean of the elements that an output
---   covers; align_corners: aligns the centres of the first and last elements of input and output, not their edges;
---   recompute_scale_factor: positions in the input are input size / rounded output size apart, not 1 / scale_factor;
---   antialias: with bilinear and bicubic, each element of a smaller output is a weighted mean of all the input
---   elements that it covers
---@return Tensor  [N, C, L'], [N, C, H', W'] or [N, C, D', H', W']
function M.interpolate(x, given)
  return resampling.interpolated("interpolate", x, resampling.interpolation("interpolate", given))
end

--- interpolate under its older name.
---@param x Tensor  [N, C, L], [N, C, H, W] or [N, C, D, H, W], floating point
---@param given { size: integer|integer[], scale_factor: number|number[], mode: "nearest"|"nearest-exact"|"area"|"linear"|"bilinear"|"trilinear"|"bicubic", align_corners: boolean, recompute_scale_factor: boolean, antialias: boolean }
---   size: sizes of the output, or one for all dimensions; scale_factor: output elements for each input element,
---   instead of size; mode: how elements are computed (default: "nearest"); align_corners: aligns the centres of the
---   first and last elements of input and output, not their edges; recompute_scale_factor: positions in the input are
---   input size / rounded output size apart, not 1 / scale_factor; antialias: with bilinear and bicubic, each element
---   of a smaller output is a weighted mean of all the input elements that it covers
---@return Tensor
function M.upsample(x, given)
  return resampling.interpolated("upsample", x, resampling.interpolation("upsample", given))
end

-- ---- padding ----------------------------------------------------------------------------------------

-- Pads dimension d of x with copies of x's elements; for integer and bool tensors, which need no gradient.
local function picked(x, d, before, after, mode)
  local n, ids = x:size(d), {}
  for o = 1, n + before + after do
    local i = o - 1 - before
    if mode == "reflect" then i = i < 0 and -i or i >= n and 2 * (n - 1) - i or i end
    ids[o] = mode == "circular" and i % n or math.min(math.max(i, 0), n - 1)
  end
  return x:index_select(d, create.tensor(ids, { dtype = "int64", device = x.device }))
end

-- Pads x with copies of its own elements. pad: { before, after } of the last dimension, then of the one before it.
local function pad_with_elements(x, pad, mode)
  local dims = #pad / 2
  if dims > 3 then raise("pad: %d sizes with mode '%s', expected 2, 4 or 6: up to 3 dimensions", #pad, mode) end
  local o = { size = {}, before = {} }
  for d = 1, dims do
    local before, after, at = pad[2 * (dims - d) + 1], pad[2 * (dims - d) + 2], x.ndim - dims + d
    if mode == "circular" and (before < 0 or after < 0) then       -- the elements that remain go round
      local first = math.max(-before, 0)
      local rest = x:size(at) - first - math.max(-after, 0)
      if rest < 1 then
        raise("pad: %d and %d elements added at dimension %d of size %d leave no elements of the input", before, after, at, x:size(at))
      end
      x, before, after = x:narrow(at, first + 1, rest), math.max(before, 0), math.max(after, 0)
    end
    local n = x:size(at)
    local most = mode == "reflect" and n - 1 or mode == "circular" and n or math.huge
    if before > most or after > most then
      raise("pad: Padding size should be %s the corresponding input dimension, but got: padding (%d, %d) at dimension %d of input %s with mode '%s'",
        mode == "reflect" and "less than" or "at most", before, after, at, tostring(x.shape), mode)
    end
    o.size[d], o.before[d] = n + before + after, before
    if o.size[d] < 1 or n + math.min(before, 0) + math.min(after, 0) < 1 then
      raise("pad: %d and %d elements added at dimension %d of size %d leave no elements of the input", before, after, at, n)
    end
  end
  if dtypes.is_float(info_of(x).dtype) then return resampling.resample("pad", x, dims, mode, o) end
  return run(function()
    local y = x
    for d = 1, dims do
      local before, at = o.before[d], x.ndim - dims + d
      y = picked(y, at, before, o.size[d] - x:size(at) - before, mode)
    end
    return y
  end)
end

-- Adds elements of one value, or removes elements. pad: { before, after } of the last dimension, then of
-- the one before it, and so on.
local function pad_with_value(x, pad, value)
  local y, sides, added = x, {}, false
  for k = 1, #pad, 2 do
    local d, before, after = x.ndim - (k - 1) / 2, pad[k], pad[k + 1]
    local size = y:size(d)
    if size + before + after < 0 or size + math.min(before, 0) + math.min(after, 0) < 0 then
      raise("pad: %d and %d elements at dimension %d of size %d give a negative size", before, after, d, size)
    end
    if before < 0 or after < 0 then
      local first = math.max(-before, 0)
      y = y:narrow(d, first + 1, size - first - math.max(-after, 0))
    end
    sides[k], sides[k + 1] = math.max(before, 0), math.max(after, 0)
    added = added or before > 0 or after > 0
  end
  if not added then return y:clone() end
  for k = 1, #pad do engine.a_i[k - 1] = sides[k] end
  engine.a_f[0] = value
  return tensor.wrap(tensor.call1_with(op_pad, y, "pad", #pad, 1))
end

local pad_spec = { mode = opts.one_of({ "constant", "reflect", "replicate", "circular" }, "constant"), value = 0 }

--- Adds elements at both ends of the last dimensions; negative numbers remove elements. Errors: a negative size; unless
--- the mode is "constant", a result without elements; in a dimension with n elements, more than n - 1 at an end with
--- "reflect", and more than n with "circular".
---@param x Tensor  of any shape
---@param pad integer[]  { before, after } of the last dimension, then those of the one before it, and so on
---@param given? { mode: "constant"|"reflect"|"replicate"|"circular", value: number }
---   mode: "constant": elements of one value; over up to three dimensions: "reflect": the elements beside the border,
---   mirrored; "replicate": the border; "circular": the elements at the other end; value: value of constant elements
---   (default: 0)
---@return Tensor
function M.pad(x, pad, given)
  local o = opts("pad", given, pad_spec)
  opts.expect(x, a_tensor, "pad: argument 1")
  opts.need(opts.is_plain(pad) and #pad % 2 == 0 and #pad > 0, pad, "a list of an even number of sizes", "pad: argument 2")
  if #pad > 2 * x.ndim then
    raise("pad: %d sizes for %d dimension%s, expected at most two for each", #pad, x.ndim, x.ndim == 1 and "" or "s")
  end
  for k, n in ipairs(pad) do opts.expect(n, opts.whole, "pad: size %d", k) end
  if o.mode == "constant" then return run(pad_with_value, x, pad, o.value) end
  if o.value ~= 0 then raise("pad: Padding mode \"%s\" doesn't take in value argument", o.mode) end
  return run(pad_with_elements, x, pad, o.mode)
end

-- ---- windows as columns -----------------------------------------------------------------------------

--- Copies each window of an image to a column: element (c, ky, kx) of window l becomes element ((c KH + ky) KW + kx,
--- l).
---@param x Tensor  [N, C, H, W] or [C, H, W], floating point
---@param kernel integer|integer[]  height and width of a window, or one number for both
---@param given? { stride: integer|integer[], padding: integer|integer[], dilation: integer|integer[] }
---   stride: distance of windows (default: 1); padding: zeros added on every side (default: 0); dilation: distance of a
---   window's elements (default: 1)
---@return Tensor  [N, C KH KW, L] or [C KH KW, L] with L windows, row by row
function M.unfold(x, kernel, given)
  return resampling.unfolded("unfold", x, resampling.columns("unfold", kernel, given))
end

--- Adds columns to the places of an image from which unfold takes them: the gradient of unfold.
---@param x Tensor  [N, C KH KW, L] or [C KH KW, L], floating point
---@param size integer|integer[]  height and width of the image, or one number for both
---@param kernel integer|integer[]  height and width of a window, or one number for both
---@param given? { stride: integer|integer[], padding: integer|integer[], dilation: integer|integer[] }
---   stride: distance of windows (default: 1); padding: zeros that unfold adds on every side (default: 0); dilation:
---   distance of a window's elements (default: 1)
---@return Tensor  [N, C, H, W] or [C, H, W]
function M.fold(x, size, kernel, given)
  return resampling.folded("fold", x, windows.sizes_of("fold", "argument 2, the image's size,", size, 2, 1),
    resampling.columns("fold", kernel, given))
end

-- ---- local response normalisation -------------------------------------------------------------------

--- Divides each element by (k + alpha * mean of the squares of `size` adjacent channels)^beta (Krizhevsky et al. 2012).
---@param x Tensor  [N, C, ...], floating point
---@param size integer  number of adjacent channels
---@param given? { alpha: number, beta: number, k: number }
---   alpha: factor of the mean (default: 1e-4); beta: the power (default: 0.75); k: the number added (default: 1)
---@return Tensor  of x's shape
function M.local_response_norm(x, size, given)
  local o = opts("local_response_norm", given, { alpha = 1e-4, beta = 0.75, k = 1 })
  opts.expect(x, a_tensor, "local_response_norm: argument 1")
  opts.expect(size, opts.whole_from(1), "local_response_norm: argument 2, the number of adjacent channels,")
  if x.ndim < 3 then
    raise("local_response_norm: Expected 3D or higher dimensionality input (got %d dimensions)", x.ndim)
  end
  if x:numel() == 0 then return x:clone() end
  return run(function()
    local squares = (x * x):reshape(x:size(1), 1, x:size(2), -1)
    squares = pad_with_value(squares, { 0, 0, math.floor(size / 2), math.floor((size - 1) / 2) }, 0)
    local mean = windows.avg_pool("local_response_norm", squares, 2, { kernel = { size, 1 }, stride = { 1, 1 },
      padding = { 0, 0 }, dilation = { 1, 1 } })
    return x / (mean:reshape(x.shape) * o.alpha + o.k):pow(o.beta)
  end)
end

return M
