-- SPDX-License-Identifier: MIT
--- U-Net (Ronneberger et al. 2015): logits for every pixel of an image. The way down halves the image and adds
--- channels; the way up doubles it, and joins each stage with the result of the same size from the way down. As is
--- usual today, 3 x 3 convolutions keep the size of the image and are followed by batch norm.
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local shapes = require "moonshard.tensor.shape"
local F = nn.F

-- A stage: two convolutions of 3 x 3, each followed by batch norm and ReLU.
local function stage(size_in, size_out, kind)
  local function conv(from)
    return nn.Conv2d(from, size_out, 3, { padding = 1, bias = false, dtype = kind.dtype, device = kind.device })
  end
  return nn.Sequential(conv(size_in), nn.BatchNorm2d(size_out, kind), nn.ReLU(),
    conv(size_out), nn.BatchNorm2d(size_out, kind), nn.ReLU())
end

-- A layer that doubles height and width.
local function doubling(how, size_in, size_out, kind)
  if how == "transposed" then
    return nn.ConvTranspose2d(size_in, size_out, 2, { stride = 2, dtype = kind.dtype, device = kind.device })
  end
  return nn.Sequential(nn.Upsample { scale_factor = 2, mode = "bilinear", align_corners = true },
    nn.Conv2d(size_in, size_out, 1, kind))
end

---@class UNet: Module
---@overload fun(opts: { channels: integer, classes: integer, widths: integer[], up: "transposed"|"bilinear", dtype: string, device: string }): UNet
---   channels: channels of an image (default: 3); classes: logits of a pixel (default: 2); widths: channels of the
---   stages, from the whole image down (default: 64, 128, 256, 512, 1024); up: how images are doubled: by a transposed
---   convolution, or bilinearly, followed by a convolution of 1 x 1 (default: "transposed")
local UNet = nn.Module:extend "UNet"

function UNet:init(given)
  local o = opts("UNet", given, { channels = 3, classes = 2, widths = opts.table,
    up = opts.one_of({ "transposed", "bilinear" }, "transposed"), dtype = opts.string, device = opts.any })
  local widths, kind = o.widths or { 64, 128, 256, 512, 1024 }, { dtype = o.dtype, device = o.device }
  opts.need(#widths >= 2, widths, "a list of at least 2 numbers of channels", "UNet: option 'widths'")
  for k, n in ipairs(widths) do opts.expect(n, opts.whole_from(1), "UNet: width %d", k) end
  self.channels, self.depth = o.channels, #widths - 1
  self.enter = stage(o.channels, widths[1], kind)
  self.down = nn.ModuleList()
  self.up = nn.ModuleList()
  self.join = nn.ModuleList()
  for k = 1, self.depth do self.down:append(stage(widths[k], widths[k + 1], kind)) end
  for k = self.depth, 1, -1 do
    self.up:append(doubling(o.up, widths[k + 1], widths[k], kind))
    self.join:append(stage(2 * widths[k], widths[k], kind))
  end
  self.head = nn.Conv2d(widths[1], o.classes, 1, kind)
end

-- Adds zeros around x up to the size of `other`, which is larger if halving dropped its last row or column.
local function padded_to(other, x)
  local h, w = other:size(3) - x:size(3), other:size(4) - x:size(4)
  if h == 0 and w == 0 then return x end
  local top, left = math.floor(h / 2), math.floor(w / 2)
  return F.pad(x, { left, w - left, top, h - top })
end

---@param x Tensor  [B, channels, H, W]; height and width are at least 2^(stages - 1)
---@return Tensor  [B, classes, H, W]
function UNet:forward(x)
  local least = 2 ^ self.depth
  if x.ndim ~= 4 or x:size(2) ~= self.channels or x:size(3) < least or x:size(4) < least then
    errors.raise("UNet: images have shape %s, expected [B, %d, H, W] with H and W from %d", tostring(x.shape),
      self.channels, least)
  end
  local seen = { self.enter(x) }
  for k = 1, self.depth do seen[k + 1] = self.down[k](F.max_pool2d(seen[k], 2)) end
  local y = seen[self.depth + 1]
  for k = 1, self.depth do
    local skip = seen[self.depth + 1 - k]
    y = self.join[k](shapes.cat({ skip, padded_to(skip, self.up[k](y)) }, 2))
  end
  return self.head(y)
end

return UNet
