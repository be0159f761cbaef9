-- SPDX-License-Identifier: MIT
--- Sharded training equals unsharded training: losses, parameters, gradients, on 1 to 4 ranks, in both layouts.
local ranks = require "spec.support.ranks"

local MODELS = { "net", "nested_wrapped_module", "non_uniform_req_grad", "mlp_stack", "exec_order", "transformer_lm" }

local parity = require "spec.support.sharded_parity"
local load, compare = parity.load, parity.compare

local function layout(name, fn)
  local fully_shard = require "moonshard.parallel.fsdp.fully_shard"
  fully_shard.layout = name
  local ok, message = pcall(fn)
  fully_shard.layout = nil
  if not ok then error(message, 0) end
end

for world = 1, 4 do
  ranks.describe(world, ("fully_shard over %d ranks"):format(world), function()
    for _, name in ipairs(MODELS) do
      for _, reshard in ipairs { true, false } do
        it(("trains %s as one process does, reshard_after_forward = %s"):format(name, tostring(reshard)), function(rank)
          compare(require("spec.support.models." .. name), rank, world, { reshard_after_forward = reshard }, 3)
        end)
      end
    end

    it("trains with one unit for everything", function(rank)
      local def = require "spec.support.models.mlp_stack"
      compare({ make = def.make, loss = def.loss, optim = def.optim, units = function() return {} end }, rank, world,
        {}, 3)
    end)

    it("trains with odd shapes, of which some ranks have no rows", function(rank)
      local ms = load()
      local def = {
        make = function(kind) return ms.nn.Sequential(ms.nn.Linear(15, 5, kind), ms.nn.ReLU(),
        ms.nn.Linear(5, 1, kind)) end,
        units = function(m) return { m[1], m[3] } end,
        optim = function(params) return ms.optim.AdamW(params, { lr = 1e-2 }) end,
        loss = function(m, r, step, golden) return m(golden.x_of({ 3, 15 }, r, step)):sum() end,
      }
      compare(def, rank, world, {}, 3)
    end)

    it("trains a parameter that two modules of a unit share", function(rank)
      local ms = load()
      local Tied = ms.nn.Module:extend "Tied"
      function Tied:init(kind)
        self.first = ms.nn.Linear(5, 5, kind)
        self.second = ms.nn.Linear(5, 5, kind)
        self.second.weight = self.first.weight
      end
      function Tied:forward(x) return self.second(self.first(x):tanh()) end
      local def = {
        make = function(kind) return Tied(kind) end, units = function() return {} end,
        optim = function(params) return ms.optim.SGD(params, { lr = 1e-2 }) end,
        loss = function(m, r, step, golden) return m(golden.x_of({ 3, 5 }, r, step)):sum() end,
      }
      compare(def, rank, world, {}, 3)
    end)
  end)
end

ranks.describe(2, "the flat layout over 2 ranks", function()
  for _, name in ipairs { "mlp_stack", "non_uniform_req_grad", "transformer_lm" } do
    it(("trains %s as one process does"):format(name), function(rank, world)
      layout("flat", function() compare(require("spec.support.models." .. name), rank, world, {}, 3) end)
    end)
  end
end)
