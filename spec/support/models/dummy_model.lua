-- SPDX-License-Identifier: MIT
--- TestDummyModel of PyTorch's suites about sharded state: four Linears in sequence, three of them inside Sequentials.
--- Every submodule that has parameters is a unit.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nn = ms.nn

local TestDummyModel = nn.Module:extend("TestDummyModel")

function TestDummyModel:init()
  self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
  self.net2 = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
  self.net3 = nn.Linear(32, 64)
  self.net4 = nn.Sequential(nn.ReLU(), nn.Linear(64, 8))
end

function TestDummyModel:forward(x) return self.net4(self.net3(self.net2(self.net1(x)))) end

common.sum_model(TestDummyModel, { 8, 8 })

return {
  TestDummyModel = TestDummyModel,
  init = common.init_of(function() return TestDummyModel() end, function(m)
    return { m.net1[1], m.net1, m.net2[1], m.net2, m.net3, m.net4[2], m.net4 }
  end),
}
