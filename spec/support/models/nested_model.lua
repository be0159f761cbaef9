-- SPDX-License-Identifier: MIT
--- NestedModel of PyTorch's optimizer-state suite: products and biases that are modules, wrapped in two ways.
--- `wrap` (also init's "recursive") makes units of parts of blocks and of whole blocks; `wrap_alt` makes units of other
--- parts.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local wrapped = require "spec.support.wrapped"
local nn = ms.nn

local Bias = nn.Module:extend("Bias")
function Bias:init(dim) self.bias = nn.Parameter(ms.randn(dim)) end
function Bias:forward(x) return x + self.bias end

local BlockA = nn.Module:extend("BlockA")
function BlockA:init(from, to)
  self.bias_module0 = Bias(to)
  self.weight = nn.Parameter(ms.randn(from, to))
  self.bias_module1 = Bias(to)
end
function BlockA:forward(x) return self.bias_module1(nn.F.relu(self.bias_module0(x:matmul(self.weight)))) end

local BlockB = nn.Module:extend("BlockB")
function BlockB:init(from, to)
  self.weight = nn.Parameter(ms.randn(from, to))
  self.bias_module0 = Bias(to)
  self.bias_module1 = Bias(to)
end
BlockB.forward = BlockA.forward

local NestedModel = nn.Module:extend("NestedModel")

function NestedModel:init()
  self.block0 = BlockB(5, 3)
  self.block1 = BlockB(3, 7)
  self.bias = nn.Parameter(ms.randn(5))
  self.block2 = nn.Sequential(BlockA(7, 9), BlockA(9, 9), BlockB(9, 5))
end

function NestedModel:forward(x)
  local relu = nn.F.relu
  return relu(self.block2(relu(self.block1(relu(self.block0(x)))))) + self.bias
end

common.sum_model(NestedModel, { 8, 5 })

--- Two groups for an optimizer, in another order than parameters(); the model's own bias is in neither.
function NestedModel:param_groups()
  local second = self.block2:parameters()
  for _, p in ipairs(self.block0:parameters()) do second[#second + 1] = p end
  return { self.block1:parameters(), second }
end

-- The units: a bias of block1, the rest of block1; both biases of block2[2], the rest of block2[2]; all of block2[3].
local function units(m)
  local second = m.block2[2]
  return { m.block1.bias_module0, m.block1, second.bias_module0, second.bias_module1, second, m.block2[3] }
end

local function alt_units(m) return { m.block0.bias_module0, m.block0 } end

local function wrap_with(list)
  return function(model, options)
    wrapped.replace(model, list(model), function(m) return ms.fsdp.FSDP(m, options) end)
    return model
  end
end

return {
  Bias = Bias, BlockA = BlockA, BlockB = BlockB, NestedModel = NestedModel,
  init = common.init_of(function() return NestedModel() end, units),
  --- Units inside model, which itself is not a unit. options: for fsdp.FSDP.
  wrap = wrap_with(units), wrap_alt = wrap_with(alt_units),
}
