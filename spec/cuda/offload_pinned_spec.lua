-- SPDX-License-Identifier: MIT
--- Offloaded shards and gradients in pinned memory: the bits of staged copies, also where the GPU reads them late.
local process = require "spec.support.process"

-- A layer whose shard and gradients have pages of their own, trained over three steps.
local SCRIPT = [[
  local ms = require "moonshard"
  local nn, fsdp = ms.nn, ms.fsdp
  ms.manual_seed(1)
  local model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 300), nn.Linear(300, 2)):to "cuda"
  local policy = %s
  for _, part in ipairs { model[2], model } do policy(part) end
  local opt = ms.optim.AdamW(model:parameters(), { lr = 1e-2 })
  for step in ms.steps(3) do
    local loss = model(ms.full({ 2, 8 }, step, { device = "cuda" })):square():mean()
    loss:backward()
    opt:step()
    opt:zero_grad()
    print(("%%.17g"):format(loss:item()))
  end
  for _, p in ipairs(model:parameters()) do
    local t = p.to_local and p:to_local() or p
    print(t.device, ("%%.17g"):format(t:detach():double():sum():item()))
  end
]]
local KINDS = {
  pinned = "function(m) fsdp.fully_shard(m, { offload_policy = fsdp.CPUOffloadPolicy() }) end",
  staged = "function(m) fsdp.fully_shard(m, { offload_policy = fsdp.CPUOffloadPolicy { pin_memory = false } }) end",
  ["pinned, bfloat16"] = [[function(m) fsdp.fully_shard(m, { offload_policy = fsdp.CPUOffloadPolicy(),
    mp_policy = fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16" } }) end]],
  ["staged, bfloat16"] = [[function(m) fsdp.fully_shard(m, { offload_policy = fsdp.CPUOffloadPolicy { pin_memory = false },
    mp_policy = fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16" } }) end]],
}

--- The output and the messages of a training.
local function trained(kind, emulator)
  local job = process.script(SCRIPT:format(KINDS[kind]), { MOONSHARD_CUDA = process.gpu, MOONSHARD_EMULATOR = emulator or "" })
  assert.are.equal(0, job.code, job.stderr)
  assert.matches("\ncpu\t", job.stdout)
  return job.stdout, job.stderr
end

describe("offloaded shards in pinned memory #cuda", function()
  for _, suffix in ipairs { "", ", bfloat16" } do
    it("give the bits of staged ones" .. suffix, function()
      local staged = trained("staged" .. suffix)
      for _, emulator in ipairs { "", "late", "late,seed:3" } do
        local pinned, err = trained("pinned" .. suffix, emulator)
        assert.are.equal(staged, pinned)
        assert.are.equal("", err)
      end
    end)
  end

  it("are pinned only with pin_memory, and staged with one warning where pinning fails", function()
    local fails = "fail:cudaHostRegister:1:2"
    local staged, none = trained("staged", fails)
    assert.are.equal("", none)
    local pinned, err = trained("pinned", fails)
    assert.are.equal(staged, pinned)
    local _, count = err:gsub("CPU memory is not pinned, so copies to and from GPUs are staged: [^\n]*cudaHostRegister", "")
    assert.are.equal(1, count, err)
  end)
end)
