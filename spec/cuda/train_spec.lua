-- SPDX-License-Identifier: MIT
--- The training script on device cuda, alone and over ranks that share a GPU or have one each.
local process = require "spec.support.process"
local training = require "spec.support.training"

local folder, runs
local train, losses, metrics, ok = training.train, training.losses, training.metrics, training.ok

--- Trains a few steps on n ranks (0: no mpirun), and returns the losses, the norms of the gradients and the validation.
local function trained(n, device, env)
  runs = runs + 1
  local name = ("run-%d"):format(runs)
  ok(train(n, name, { "--steps", 3, "--device", device, "--layers", 1, "--dtype", "float32" }, { env = env }))
  local steps, validations = metrics(name)
  local out = {}
  for k, m in ipairs(steps) do out[2 * k - 1], out[2 * k] = m.loss, m.grad_norm end
  assert.are.equal(6, #out)
  out[7] = validations[1].val_loss
  return out, losses(name)
end

describe("scripts/train.lua --device cuda #cuda", function()
  setup(function()
    folder, runs = training.begin(), 0
    process.write(folder .. "/text/a", training.sentences(60))
  end)
  teardown(function() process.remove_folder(folder) end)

  for _, case in ipairs {
    { 0, {}, "in one process" },
    { 2, { MOONSHARD_CUDA_DEVICES = "1" }, "over 2 ranks that share a GPU" },
    { 2, { MOONSHARD_CUDA_DEVICES = "2" }, "over 2 ranks with a GPU each" },
    { 2, { MOONSHARD_CUDA_SHARE = "fd" }, "over 2 ranks that map each other's memory by file descriptors" },
    { 2, { MOONSHARD_CUDA_SHARE = "staging" }, "over 2 ranks that cannot map each other's memory" },
  } do
    it("gives the losses, norms and validation of the CPU to 1e-6 of them, " .. case[3], function()
      local cpu, cuda = trained(case[1], "cpu"), trained(case[1], "cuda", case[2])
      for k = 1, 7 do assert.near(cpu[k], cuda[k], 1e-6 * cpu[k], "value " .. k) end
    end)
  end

  it("repeats every loss to the bit over ranks", function()
    local _, first = trained(2, "cuda")
    local _, again = trained(2, "cuda", { MOONSHARD_CUDA_DEVICES = "1" })
    assert.are.same(first, again)
  end)
end)
