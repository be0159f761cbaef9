-- SPDX-License-Identifier: MIT
--- Images as sequences: a projection of square patches, a learned first position, and learned positions. ViT and CLIP.
require "moonshard.autograd.methods"
local create = require "moonshard.tensor.create"
local Config = require "moonshard.hf.config"
local errors = require "moonshard.core.errors"
local nn = require "moonshard.nn"
local shape = require "moonshard.tensor.shape"

---@class HFPatches: Module
local Patches = nn.Module:extend "HFPatches"

---@param o table  what `read` returns, and dim, name, patch_bias, and the shapes of the parameters first and positions
function Patches:init(o)
  local kind = { dtype = o.dtype, device = o.device }
  self.projection = nn.Conv2d(o.channels, o.dim, o.patch, { stride = o.patch, bias = o.patch_bias or false,
    dtype = o.dtype, device = o.device })
  self.first = nn.Parameter(create.zeros(o.first, kind))
  self.positions = nn.Parameter(create.zeros(o.positions, kind))
  self.image, self.channels, self.name = o.image, o.channels, o.name
end

---@param images Tensor  [B, channels, image, image]
---@return Tensor  [B, 1 + patches, C]
function Patches:forward(images)
  if images.ndim ~= 4 or images:size(2) ~= self.channels or images:size(3) ~= self.image
    or images:size(4) ~= self.image then
    errors.raise("%s: images have shape %s, expected [B, %d, %d, %d]", self.name, tostring(images.shape), self.channels,
      self.image, self.image)
  end
  local x = self.projection(images):flatten(3):transpose(2, 3)
  local first = self.first:reshape(1, 1, -1):expand(x:size(1), 1, x:size(3))
  return shape.cat({ first, x }, 2) + self.positions:reshape(1, -1, x:size(3))
end

--- What a configuration says about images: the options of Patches, and the number of positions.
---@param c HFConfig
---@return { image: integer, patch: integer, channels: integer } o
---@return integer positions
local function read(c, image, patch)
  local o = { image = c:get("image_size", Config.size, image), patch = c:get("patch_size", Config.size, patch),
    channels = c:get("num_channels", Config.size, 3) }
  if o.image % o.patch ~= 0 then
    c:fail("image_size", "is %d, expected a multiple of patch_size, %d", o.image, o.patch)
  end
  return o, (o.image / o.patch) ^ 2 + 1
end

return { Patches = Patches, read = read }
