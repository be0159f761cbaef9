-- SPDX-License-Identifier: MIT
--- MOONSHARD_LOG=fsdp: prints the phases of units on stderr, with the names of PyTorch's log
--- (docs/semantics.md#logging).
local ranks = require "spec.support.ranks"

local script = [[
  local ms = require "moonshard"
  local nn, fsdp = ms.nn, ms.fsdp
  local model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
  fsdp.fully_shard(model[1])
  fsdp.fully_shard(model)
  for step in ms.steps(2) do model(ms.ones(1, 4)):sum():backward() end
]]
local step = { "FSDP::root_pre_forward", "FSDP::pre_forward", "FSDP::pre_forward (1)", "FSDP::post_forward (1)",
  "FSDP::post_forward",
  "FSDP::pre_backward", "FSDP::pre_backward (1)", "FSDP::root_post_backward", "FSDP::post_backward (1)",
    "FSDP::post_backward" }

-- The lines of one step; units whose inputs need no gradient may end in any order.
local function phases(text, prefix)
  local out = {}
  for line in text:gmatch "[^\n]+" do
    if line:sub(1, #prefix) == prefix then out[#out + 1] = line:sub(#prefix + 1) end
  end
  for first = 1, #out, #step do
    if out[first + 8] == "FSDP::post_backward" then out[first + 8], out[first + 9] = out[first + 9], out[first + 8] end
  end
  return out
end

local both = {}
for _ = 1, 2 do
  for _, line in ipairs(step) do both[#both + 1] = line end
end

describe("the log of units", function()
  it("is quiet unless it is asked for", function()
    local job = ranks.run(0, script, { env = { MOONSHARD_LOG = false } })
    assert.are.equal(0, job.code, job.stderr)
    assert.is_nil(job.stderr:find("FSDP::", 1, true))
  end)

  it("names each phase and unit in order, the root without a name", function()
    local job = ranks.run(0, script, { env = { MOONSHARD_LOG = "fsdp" } })
    assert.are.equal(0, job.code, job.stderr)
    assert.are.same(both, phases(job.stderr, ""))
  end)

  it("begins with the rank if there are several", function()
    local job = ranks.run(2, script, { env = { MOONSHARD_LOG = "fsdp" } })
    assert.are.equal(0, job.code, job.stderr)
    for rank = 0, 1 do assert.are.same(both, phases(job.stderr, ("[rank %d] "):format(rank))) end
  end)
end)
