-- SPDX-License-Identifier: MIT
--- Compares sharded with unsharded training: the same model, the same batches, step by step. parity.lua compares FSDP,
--- DDP and one process.
local assert = require "luassert"

local M = {}

-- Loads the modules that only the ranks need; the busted process only registers tests.
local function load()
  local ms = require "moonshard"
  return ms, ms.fsdp, require "spec.support.golden"
end
M.load = load

--- Shards the units of a model, then the model. def: a file of spec/support/models that has `units`. options: the
--- options of every fully_shard, or a function of the module that returns them.
function M.shard(def, model, options)
  local _, fsdp = load()
  local function of(m) return type(options) == "function" and options(m) or options end
  for _, unit in ipairs(def.units(model)) do fsdp.fully_shard(unit, of(unit)) end
  return fsdp.fully_shard(model, of(model))
end

--- Trains a reference model of def, which sees every rank's batch, and a sharded copy of it, and compares them in every
--- step. change(model): applied to the sharded copy before its first forward. Returns the sharded copy, the reference.
function M.compare(def, rank, world, options, steps, change)
  return M.compare_with(function(model)
    M.shard(def, model, options)
    if change then change(model) end
    return model
  end, def, rank, world, steps)
end

--- As M.compare, with another way to shard: sharded(model) returns the sharded copy.
function M.compare_with(sharded, def, rank, world, steps)
  local ms, fsdp, golden = load()
  golden.phase = 0
  local function make()
    local model = def.make { dtype = "float64" }
    golden.fill(model)
    return model
  end
  local reference, model = make(), sharded(make())
  fsdp.check_sharded_parity(reference, model)
  local reference_optim, optim = def.optim(reference:parameters()), def.optim(model:parameters())
  for step = 0, steps - 1 do
    ms.scope(function()
      local want
      for r = 0, world - 1 do
        local loss = def.loss(reference, r, step, golden)
        if r == rank then want = loss:item() end
        ;(loss / world):backward()
      end
      local loss = def.loss(model, rank, step, golden)
      assert.near(want, loss:item(), 1e-9 * math.max(1, math.abs(want)))
      loss:backward()
    end)
    fsdp.check_sharded_parity(reference, model)
    reference_optim:step()
    optim:step()
    fsdp.check_sharded_parity(reference, model)
    reference_optim:zero_grad()
    optim:zero_grad()
  end
  return model, reference
end

return M
