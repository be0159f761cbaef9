-- SPDX-License-Identifier: MIT
--- Calls the operators that resample images, and those that copy windows of images to columns and back; checks their
--- arguments. nn.F and the layers pass `who`, the function's or layer's name in messages.
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"
local windows = require "moonshard.nn.pooling.windows"

local args, a_in, a_i, a_f = engine.args, engine.a_in, engine.a_i, engine.a_f
local a_tensor, call, id_of, info_of, raise, wrap = tensor.a_tensor, tensor.call, tensor.id_of, tensor.info_of,
  errors.raise, tensor.wrap
local run = scope.scope
local op_resample, op_im2col, op_col2im = engine.op "resample", engine.op "im2col", engine.op "col2im"

local M = {}

-- The engine's numbers for the kinds of resampling (ms_resample_kind, kernels/formulas/resample.h).
local KIND = { nearest = 0, ["nearest-exact"] = 1, linear = 2, cubic = 3, linear_antialias = 4, cubic_antialias = 5,
  reflect = 6, replicate = 7, circular = 8 }

--- Resamples the last `dims` dimensions. o.size: the sizes of the output; o.before: elements added before each dimension
--- (padding); o.scale, o.align: scale factors and align_corners (interpolation).
function M.resample(who, x, dims, kind, o)
  a_in[0] = id_of(x, who)
  a_i[0], a_i[1], a_i[2] = dims, KIND[kind], o.align and 1 or 0
  for d = 1, dims do
    a_i[2 + d], a_i[2 + dims + d] = o.size[d], o.before and o.before[d] or 0
    a_f[d - 1] = o.scale and o.scale[d] or 1
  end
  args.n_in, args.n_i, args.n_f = 1, 3 + 2 * dims, dims
  return wrap(call(op_resample, x))
end

-- ---- interpolation ----------------------------------------------------------------------------------

-- For each mode the number of dimensions after batch and channels (nil: 1 to 3), and the kind of resampling (nil: the
-- mode is an adaptive pooling).
local modes = {
  nearest = { kind = "nearest" }, ["nearest-exact"] = { kind = "nearest-exact" }, area = {},
  linear = { kind = "linear", dims = 1 }, bilinear = { kind = "linear", dims = 2 },
  trilinear = { kind = "linear", dims = 3 }, bicubic = { kind = "cubic", dims = 2 },
}
local mode_names = { "nearest", "nearest-exact", "area", "linear", "bilinear", "trilinear", "bicubic" }
local interpolate_spec = {
  size = opts.any, scale_factor = opts.any, mode = opts.one_of(mode_names, "nearest"), align_corners = opts.boolean,
  recompute_scale_factor = opts.boolean, antialias = false,
}

--- Checks the options of an interpolation, for layers as well.
---@param who string
---@return table  the options
function M.interpolation(who, given)
  local o = opts(who, given, interpolate_spec)
  if o.size ~= nil and o.scale_factor ~= nil then
    raise("%s: only one of size or scale_factor should be defined", who)
  elseif o.size == nil and o.scale_factor == nil then
    raise("%s: either size or scale_factor should be defined", who)
  elseif o.size ~= nil and o.recompute_scale_factor then
    raise("%s: recompute_scale_factor is not meaningful with an explicit size", who)
  end
  if o.align_corners ~= nil and not modes[o.mode].dims then
    raise("%s: align_corners option can only be set with the interpolating modes: linear | bilinear | bicubic | trilinear; mode is '%s'",
      who, o.mode)
  end
  if o.antialias and modes[o.mode].dims ~= 2 then
    raise("%s: antialias is only supported with the modes bilinear and bicubic, mode is '%s'", who, o.mode)
  end
  return o
end

-- A list of the scale factors for `dims` dimensions: v for each one, or a copy of the list v.
local function factors_of(who, v, dims)
  local list = {}
  local good = type(v) == "number" or opts.is_plain(v) and #v == dims
  for d = 1, good and dims or 0 do
    list[d] = type(v) == "number" and v or v[d]
    good = good and opts.positive.test(list[d]) and list[d] < math.huge
  end
  opts.need(good, v, ("a number above 0, or a list of %d of them"):format(dims), "%s: option 'scale_factor'", who)
  return list
end

--- Interpolates x with options that M.interpolation has checked.
function M.interpolated(who, x, o)
  opts.expect(x, a_tensor, "%s: argument 1", who)
  local mode = modes[o.mode]
  local dims = x.ndim - 2
  if dims < 1 or dims > 3 or mode.dims and mode.dims ~= dims then
    raise("%s: the input has shape %s, expected %s for mode '%s'", who, tostring(x.shape),
      mode.dims and ("%d dimensions: batch, channels and %d more"):format(mode.dims + 2, mode.dims)
      or "3 to 5 dimensions: batch, channels and 1 to 3 more", o.mode)
  end
  if not dtypes.is_float(info_of(x).dtype) then
    raise("%s: the input is %s, expected a floating-point dtype; cast it first", who, x.dtype)
  end
  local size, scale = {}, {}
  local factors = o.scale_factor ~= nil and factors_of(who, o.scale_factor, dims)
  if not factors then size = windows.sizes_of(who, "option 'size'", o.size, dims, 1) end
  for d = 1, dims do
    local n = x:size(2 + d)
    if n == 0 then raise("%s: the input %s has no elements along dimension %d", who, tostring(x.shape), 2 + d) end
    if factors then size[d] = math.floor(n * factors[d]) end
    if size[d] < 1 then
      raise("%s: the output's size along dimension %d would be %d: input %s, scale_factor %g", who, 2 + d, size[d],
        tostring(x.shape), factors[d])
    end
    if o.align_corners then
      scale[d] = size[d] > 1 and (n - 1) / (size[d] - 1) or 0
    else
      scale[d] = factors and not o.recompute_scale_factor and 1 / factors[d] or n / size[d]
    end
  end
  if o.mode == "area" then return windows.adaptive_avg_pool(who, x, dims, size) end
  return M.resample(who, x, dims, o.antialias and mode.kind .. "_antialias" or mode.kind,
    { size = size, scale = scale, align = o.align_corners })
end

-- ---- windows as columns -----------------------------------------------------------------------------

local columns_spec = { stride = opts.any, padding = opts.any, dilation = opts.any }

--- Checks the arguments of unfold and fold, for layers as well.
function M.columns(who, kernel, given)
  local o = opts(who, given, columns_spec)
  o.kernel = windows.sizes_of(who, "the kernel's size", kernel, 2, 1)
  o.stride = windows.sizes_of(who, "option 'stride'", o.stride == nil and 1 or o.stride, 2, 1)
  o.padding = windows.sizes_of(who, "option 'padding'", o.padding == nil and 0 or o.padding, 2, 0)
  o.dilation = windows.sizes_of(who, "option 'dilation'", o.dilation == nil and 1 or o.dilation, 2, 1)
  return o
end

-- Calls op, im2col or col2im. size: for col2im, the image's { H, W }.
local function columns(who, op, x, o, size)
  a_in[0] = id_of(x, who)
  for d = 1, 2 do
    a_i[d - 1], a_i[d + 1], a_i[d + 3], a_i[d + 5] = o.kernel[d], o.stride[d], o.padding[d], o.dilation[d]
    a_i[d + 7] = size and size[d] or 0
  end
  args.n_in, args.n_i, args.n_f = 1, size and 10 or 8, 0
  return wrap(call(op, x))
end

-- The numbers of windows along the height and the width of an image.
local function places(who, o, height, width)
  local list = {}
  for d, n in ipairs { height, width } do
    local room = n + 2 * o.padding[d] - o.dilation[d] * (o.kernel[d] - 1) - 1
    if room < 0 then
      raise("%s: windows of %d x %d elements with dilation (%d, %d) and padding (%d, %d) do not fit images of %d x %d", who,
        o.kernel[1], o.kernel[2], o.dilation[1], o.dilation[2], o.padding[1], o.padding[2], height, width)
    end
    list[d] = math.floor(room / o.stride[d]) + 1
  end
  return list[1], list[2]
end

--- F.unfold with arguments that M.columns has checked.
function M.unfolded(who, x, o)
  opts.expect(x, a_tensor, "%s: argument 1", who)
  if x.ndim ~= 3 and x.ndim ~= 4 then
    raise("%s: the input has shape %s, expected [N, C, H, W] or [C, H, W]", who, tostring(x.shape))
  end
  places(who, o, x:size(-2), x:size(-1))
  if x.ndim == 4 then return columns(who, op_im2col, x, o) end
  return run(function() return columns(who, op_im2col, x:unsqueeze(1), o):squeeze(1) end)
end

--- F.fold with arguments that M.columns has checked; size: { H, W }.
function M.folded(who, x, size, o)
  opts.expect(x, a_tensor, "%s: argument 1", who)
  local h, w = places(who, o, size[1], size[2])
  local kernel = o.kernel[1] * o.kernel[2]
  if x.ndim ~= 2 and x.ndim ~= 3 or x:size(-1) ~= h * w or x:size(-2) % kernel ~= 0 then
    raise("%s: the input has shape %s, expected [N, C x %d, %d] or [C x %d, %d] for images of %d x %d", who,
      tostring(x.shape), kernel, h * w, kernel, h * w, size[1], size[2])
  end
  if x.ndim == 3 then return columns(who, op_col2im, x, o, size) end
  return run(function() return columns(who, op_col2im, x:unsqueeze(1), o, size):squeeze(1) end)
end

return M
