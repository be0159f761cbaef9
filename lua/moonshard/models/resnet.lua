-- SPDX-License-Identifier: MIT
--- ResNet (He et al. 2016) for images: 18 and 34 layers of basic blocks; 50, 101 and 152 of bottlenecks, with the
--- stride in their 3 x 3 convolution. Parameters and buffers have torchvision's names, with the elements of a
--- Sequential counted from 1.
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"

local relu = nn.F.relu

-- A convolution of kernel x kernel elements, padded so that only the stride changes the size of the image. Batch norm
-- follows, so there is no bias.
local function conv(size_in, size_out, kernel, stride, kind)
  return nn.Conv2d(size_in, size_out, kernel, { stride = stride, padding = (kernel - 1) / 2, bias = false,
    dtype = kind.dtype, device = kind.device })
end

-- The projection of a block's input that is added to the block's result; nil if both have the same sizes, so that the
-- input itself is added.
local function shortcut(size_in, size_out, stride, kind)
  if stride == 1 and size_in == size_out then return nil end
  return nn.Sequential(conv(size_in, size_out, 1, stride, kind), nn.BatchNorm2d(size_out, kind))
end

---@class ResNetBasicBlock: Module
local BasicBlock = nn.Module:extend "BasicBlock"
BasicBlock.expansion = 1

function BasicBlock:init(size_in, width, stride, kind)
  self.conv1 = conv(size_in, width, 3, stride, kind)
  self.bn1 = nn.BatchNorm2d(width, kind)
  self.conv2 = conv(width, width, 3, 1, kind)
  self.bn2 = nn.BatchNorm2d(width, kind)
  self.downsample = shortcut(size_in, width, stride, kind)
end

function BasicBlock:forward(x)
  local y = relu(self.bn1(self.conv1(x)))
  y = self.bn2(self.conv2(y))
  return relu(y + (self.downsample and self.downsample(x) or x))
end

---@class ResNetBottleneck: Module
local Bottleneck = nn.Module:extend "Bottleneck"
Bottleneck.expansion = 4

function Bottleneck:init(size_in, width, stride, kind)
  self.conv1 = conv(size_in, width, 1, 1, kind)
  self.bn1 = nn.BatchNorm2d(width, kind)
  self.conv2 = conv(width, width, 3, stride, kind)
  self.bn2 = nn.BatchNorm2d(width, kind)
  self.conv3 = conv(width, 4 * width, 1, 1, kind)
  self.bn3 = nn.BatchNorm2d(4 * width, kind)
  self.downsample = shortcut(size_in, 4 * width, stride, kind)
end

function Bottleneck:forward(x)
  local y = relu(self.bn1(self.conv1(x)))
  y = relu(self.bn2(self.conv2(y)))
  y = self.bn3(self.conv3(y))
  return relu(y + (self.downsample and self.downsample(x) or x))
end

-- By depth: the kind of block, and the number of blocks of each of the four stages.
local depths = {
  [18] = { BasicBlock, 2, 2, 2, 2 }, [34] = { BasicBlock, 3, 4, 6, 3 }, [50] = { Bottleneck, 3, 4, 6, 3 },
  [101] = { Bottleneck, 3, 4, 23, 3 }, [152] = { Bottleneck, 3, 8, 36, 3 },
}

---@class ResNet: Module
---@overload fun(opts: { depth: integer, classes: integer, channels: integer, width: integer, dtype: string, device: string }): ResNet
---   depth: 18, 34, 50, 101 or 152 layers (default: 18); classes: number of logits (default: 1000); channels: channels
---   of an image (default: 3); width: channels of the first stage, which each further stage doubles (default: 64)
local ResNet = nn.Module:extend "ResNet"

function ResNet:init(given)
  local o = opts("ResNet", given, { depth = 18, classes = 1000, channels = 3, width = 64, dtype = opts.string,
    device = opts.any })
  local plan = depths[o.depth]
  if not plan then errors.raise("ResNet: option 'depth' is %s, expected 18, 34, 50, 101 or 152", tostring(o.depth)) end
  local kind, Block, size = { dtype = o.dtype, device = o.device }, plan[1], o.width
  self.channels = o.channels
  self.conv1 = nn.Conv2d(o.channels, size, 7, { stride = 2, padding = 3, bias = false, dtype = o.dtype,
    device = o.device })
  self.bn1 = nn.BatchNorm2d(size, kind)
  self.maxpool = nn.MaxPool2d(3, 2, { padding = 1 })
  for stage = 1, 4 do
    local blocks, width = {}, o.width * 2 ^ (stage - 1)
    for k = 1, plan[stage + 1] do
      blocks[k] = Block(size, width, k == 1 and stage > 1 and 2 or 1, kind)
      size = width * Block.expansion
    end
    self["layer" .. stage] = nn.Sequential(unpack(blocks))
  end
  self.avgpool = nn.AdaptiveAvgPool2d(1)
  self.fc = nn.Linear(size, o.classes, kind)
  for _, m in ipairs(self:modules()) do
    if m:isa(nn.Conv2d) then nn.init.kaiming_normal_(m.weight, { mode = "fan_out", nonlinearity = "relu" }) end
  end
end

--- The feature maps of the last stage, before they are averaged.
---@param x Tensor  [B, channels, H, W]
---@return Tensor  [B, C, H / 32, W / 32], rounded up; C: channels of the stage
function ResNet:features(x)
  if x.ndim ~= 4 or x:size(2) ~= self.channels then
    errors.raise("ResNet: images have shape %s, expected [B, %d, H, W]", tostring(x.shape), self.channels)
  end
  x = self.maxpool(relu(self.bn1(self.conv1(x))))
  return self.layer4(self.layer3(self.layer2(self.layer1(x))))
end

---@param x Tensor  [B, channels, H, W]
---@return Tensor  [B, classes]
function ResNet:forward(x) return self.fc(self.avgpool(self:features(x)):flatten(2)) end

return ResNet
