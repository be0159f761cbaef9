-- SPDX-License-Identifier: MIT
--- Layers of functions.lua and sampling.lua: upsampling, channels and space, windows as columns, local response
--- normalisation.
local functions = require "moonshard.nn.images.functions"
local opts = require "moonshard.core.opts"
local resampling = require "moonshard.nn.images.resampling"
local sampling = require "moonshard.nn.images.sampling"
local Module = require "moonshard.nn.module".Module
local windows = require "moonshard.nn.pooling.windows"

local function shown(v) return type(v) == "table" and "[" .. table.concat(v, ", ") .. "]" or tostring(v) end

-- ---- upsampling -------------------------------------------------------------------------------------

-- Sets the fields of an upsampling layer.
local function upsample(self, name, o)
  self.how = o
  self.mode, self.size, self.scale_factor, self.align_corners = o.mode, o.size, o.scale_factor, o.align_corners
  self._who = name
end
local function upsample_forward(self, x)
  local slots = self._slots
  return resampling.interpolated(slots._who or self:class_name(), x, slots.how)
end
local function upsample_repr(self)
  local how = self.how
  return (how.size ~= nil and "size " .. shown(how.size) or "scale factor " .. shown(how.scale_factor))
    .. ", mode " .. how.mode .. (how.align_corners and ", align corners" or "")
end

--- F.interpolate as a module: resizes [N, C, L], [N, C, H, W] or [N, C, D, H, W].
---@class Upsample: Module
---@overload fun(opts: { size: integer|integer[], scale_factor: number|number[], mode: "nearest"|"nearest-exact"|"area"|"linear"|"bilinear"|"trilinear"|"bicubic", align_corners: boolean, recompute_scale_factor: boolean, antialias: boolean }): Upsample
---   size: sizes of the output, or one for all dimensions; scale_factor: output elements for each input element,
---   instead of size; mode: how elements are computed (default: "nearest"); align_corners: aligns the centres of the
---   first and last elements of input and output, not their edges; recompute_scale_factor: positions in the input are
---   input size / rounded output size apart, not 1 / scale_factor; antialias: with bilinear and bicubic, each element
---   of a smaller output is a weighted mean of all the input elements that it covers
local Upsample = Module:extend "Upsample"

function Upsample:init(given) upsample(self, "Upsample", resampling.interpolation("Upsample", given)) end
Upsample.forward, Upsample.extra_repr = upsample_forward, upsample_repr

local sizes_spec = { size = opts.any, scale_factor = opts.any }

-- The class of a layer that resizes images in a fixed mode.
local function upsampling_class(name, mode, align)
  local cls = Module:extend(name)
  function cls:init(given)
    local o = opts(name, given, sizes_spec)
    o.mode, o.align_corners = mode, align
    upsample(self, name, resampling.interpolation(name, o))
  end
  cls.forward, cls.extra_repr = upsample_forward, upsample_repr
  return cls
end

--- Resizes images [N, C, H, W] by repeating pixels: Upsample with mode "nearest".
---@class UpsamplingNearest2d: Module
---@overload fun(opts: { size: integer|integer[], scale_factor: number|number[] }): UpsamplingNearest2d
---   size: { H', W' }, or one number for both; scale_factor: output pixels for each input pixel, instead of size
local UpsamplingNearest2d = upsampling_class("UpsamplingNearest2d", "nearest")

--- Resizes images [N, C, H, W] bilinearly, with the corners of input and output aligned.
---@class UpsamplingBilinear2d: Module
---@overload fun(opts: { size: integer|integer[], scale_factor: number|number[] }): UpsamplingBilinear2d
---   size: { H', W' }, or one number for both; scale_factor: output pixels for each input pixel, instead of size
local UpsamplingBilinear2d = upsampling_class("UpsamplingBilinear2d", "bilinear", true)

-- ---- channels and space -----------------------------------------------------------------------------

--- F.pixel_shuffle as a module: [..., C * r * r, H, W] becomes [..., C, H * r, W * r].
---@class PixelShuffle: Module
---@field factor integer  the factor by which height and width grow
---@overload fun(r: integer): PixelShuffle  r: the factor by which height and width grow
local PixelShuffle = Module:extend "PixelShuffle"

---@param r integer  the factor by which height and width grow
function PixelShuffle:init(r)
  self.factor = opts.expect(r, opts.whole_from(1), "PixelShuffle: argument 1, the factor,")
end
function PixelShuffle:forward(x) return sampling.pixel_shuffle(x, self._slots.factor) end
function PixelShuffle:extra_repr() return tostring(self.factor) end

--- F.pixel_unshuffle as a module: [..., C, H, W] becomes [..., C * r * r, H / r, W / r].
---@class PixelUnshuffle: Module
---@field factor integer  the factor by which height and width shrink
---@overload fun(r: integer): PixelUnshuffle  r: the factor by which height and width shrink
local PixelUnshuffle = Module:extend "PixelUnshuffle"

---@param r integer  the factor by which height and width shrink
function PixelUnshuffle:init(r)
  self.factor = opts.expect(r, opts.whole_from(1), "PixelUnshuffle: argument 1, the factor,")
end
function PixelUnshuffle:forward(x) return sampling.pixel_unshuffle(x, self._slots.factor) end
function PixelUnshuffle:extra_repr() return tostring(self.factor) end

--- F.channel_shuffle as a module: interleaves groups of channels of [N, C, ...].
---@class ChannelShuffle: Module
---@field groups integer  number of groups, divides C
---@overload fun(groups: integer): ChannelShuffle  groups: number of groups, divides C
local ChannelShuffle = Module:extend "ChannelShuffle"

---@param groups integer  number of groups, divides C
function ChannelShuffle:init(groups)
  self.groups = opts.expect(groups, opts.whole_from(1), "ChannelShuffle: argument 1, the number of groups,")
end
function ChannelShuffle:forward(x) return sampling.channel_shuffle(x, self._slots.groups) end
function ChannelShuffle:extra_repr() return tostring(self.groups) end

-- ---- windows as columns -----------------------------------------------------------------------------

local function text(v) return v[1] == v[2] and tostring(v[1]) or v[1] .. "x" .. v[2] end
local function columns_repr(how)
  local out = "kernel " .. text(how.kernel)
  for _, name in ipairs { "stride", "padding", "dilation" } do
    if text(how[name]) ~= (name == "padding" and "0" or "1") then out = ("%s, %s %s"):format(out, name, text(how[name])) end
  end
  return out
end

--- F.unfold as a module: the windows of images [N, C, H, W] as columns [N, C KH KW, L].
---@class Unfold: Module
---@overload fun(kernel: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[], dilation: integer|integer[] }): Unfold
---   kernel: height and width of a window, or one number for both; stride: distance of windows (default: 1); padding:
---   zeros added on every side (default: 0); dilation: distance of a window's elements (default: 1)
local Unfold = Module:extend "Unfold"

---@param kernel integer|integer[]  height and width of a window, or one number for both
function Unfold:init(kernel, given) self.how = resampling.columns("Unfold", kernel, given) end
function Unfold:forward(x) return resampling.unfolded("Unfold", x, self._slots.how) end
function Unfold:extra_repr() return columns_repr(self.how) end

--- F.fold as a module: adds columns [N, C KH KW, L] to the places of images [N, C, H, W] from which Unfold takes them.
---@class Fold: Module
---@field size integer[]  { H, W }
---@overload fun(size: integer|integer[], kernel: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[], dilation: integer|integer[] }): Fold
---   size: height and width of the images, or one number for both; kernel: height and width of a window, or one number
---   for both; stride: distance of windows (default: 1); padding: zeros that Unfold adds on every side (default: 0);
---   dilation: distance of a window's elements (default: 1)
local Fold = Module:extend "Fold"

---@param size integer|integer[]  height and width of the images, or one number for both
---@param kernel integer|integer[]  height and width of a window, or one number for both
function Fold:init(size, kernel, given)
  self.size = windows.sizes_of("Fold", "argument 1, the image's size,", size, 2, 1)
  self.how = resampling.columns("Fold", kernel, given)
end
function Fold:forward(x)
  local slots = self._slots
  return resampling.folded("Fold", x, slots.size, slots.how)
end
function Fold:extra_repr() return text(self.size) .. ", " .. columns_repr(self.how) end

-- ---- local response normalisation -------------------------------------------------------------------

--- F.local_response_norm as a module: divides by (k + alpha * mean of squares over channels)^beta.
---@class LocalResponseNorm: Module
---@overload fun(size: integer, opts?: { alpha: number, beta: number, k: number }): LocalResponseNorm
---   size: number of adjacent channels; alpha: factor of the mean of squares (default: 1e-4); beta: the power
---   (default: 0.75); k: the number added (default: 1)
local LocalResponseNorm = Module:extend "LocalResponseNorm"

---@param size integer  number of adjacent channels
function LocalResponseNorm:init(size, given)
  self.size = opts.expect(size, opts.whole_from(1), "LocalResponseNorm: argument 1, the number of adjacent channels,")
  self.how = opts("LocalResponseNorm", given, { alpha = 1e-4, beta = 0.75, k = 1 })
end
function LocalResponseNorm:forward(x)
  local slots = self._slots
  return functions.local_response_norm(x, slots.size, slots.how)
end
function LocalResponseNorm:extra_repr()
  return ("%d, alpha %g, beta %g, k %g"):format(self.size, self.how.alpha, self.how.beta, self.how.k)
end

return { Upsample = Upsample, UpsamplingNearest2d = UpsamplingNearest2d, UpsamplingBilinear2d = UpsamplingBilinear2d,
  PixelShuffle = PixelShuffle, PixelUnshuffle = PixelUnshuffle, ChannelShuffle = ChannelShuffle, Unfold = Unfold,
  Fold = Fold, LocalResponseNorm = LocalResponseNorm }
