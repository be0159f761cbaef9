-- SPDX-License-Identifier: MIT
--- The examples run and print what their comments promise; each has fewer than 60 lines.
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local folder = process.root .. "/scripts/examples"

-- Lines that an example's output must have, in this order.
local EXPECTED = {
  ["int8_gather.lua"] = { "step 20  loss ", "step 40  loss ", "losses differ by ", "bytes gathered per forward: " },
  ["images.lua"] = { "epoch 1  loss ", "epoch 6  loss ", "more than 95 % right" },
  ["text.lua"] = { "step 40  perplexity ", "step 120  perplexity ", "T" },
  ["vae.lua"] = { "epoch 12  loss ", "mean error of a pixel: below 0.1",
    "images, reconstructions and new ones: 146 x 56 pixels" },
  ["chats.lua"] = { "64 chats" },
  ["resnet.lua"] = { "epoch 1  loss ", "epoch 6  loss ", "more than 90 % right" },
}

local function check(output, lines)
  local at = 1
  for _, line in ipairs(lines) do
    local from, to = output:find(line, at, true)
    if not from then error(("'%s' is missing in:\n%s"):format(line, output), 2) end
    at = to
  end
end

describe("examples", function()
  for _, name in ipairs(process.names(folder, "%.lua$")) do
    it(name .. " runs and has fewer than 60 lines", function()
      local _, lines = process.read(folder .. "/" .. name):gsub("\n", "")
      assert.is_true(lines < 60)
      local elsewhere = process.temp_folder()
      local out = elsewhere .. "/out"
      finally(function() process.remove_folder(elsewhere) end)
      -- Run from another folder, an example finds the library by its own path.
      local child = process.start({ "env", "-C", elsewhere, "luajit", folder .. "/" .. name },
        { stdout = out, stderr = out .. ".err" })
      assert.are.equal(0, child:wait(180) or child:stop(), process.read(out .. ".err"))
      assert.are.equal("", process.read(out .. ".err"))
      check(process.read(out), EXPECTED[name] or error("no expected output for " .. name))
    end)
  end

  -- Under sanitizers and valgrind only 40 steps: later steps touch the same memory and would take minutes.
  local steps = process.tool and 40 or 200
  it(("int8_gather.lua trains within 2 %% of bfloat16 over %d steps and two ranks, with half of the bytes"):format(
    steps), function()
    local job = ranks.run(2, folder .. "/int8_gather.lua", { args = { steps }, timeout = 280 })
    assert.are.equal(0, job.code, job.stderr)
    local n = 0
    for half, int8 in job.stdout:gmatch "loss ([%d.]+) with bfloat16, ([%d.]+) with int8" do
      n = n + 1
      assert.is_true(math.abs(int8 / half - 1) <= 0.02, job.stdout)
    end
    assert.are.equal(steps / 20, n)
    local apart, of = job.stdout:match "losses differ by at most ([%d.]+) %% over (%d+) steps"
    assert.are.equal(steps, tonumber(of), job.stdout)
    assert.is_true(tonumber(apart) <= 2, job.stdout)
    local first, last = job.stdout:match "step 20  loss ([%d.]+)",
      job.stdout:match(("step %d  loss ([%%d.]+)"):format(steps))
    -- The loss decreases.
    assert.is_true(tonumber(last) < tonumber(first) * (steps == 200 and 0.7 or 1), job.stdout)
    local half, int8 = job.stdout:match "bytes gathered per forward: (%d+) with bfloat16, (%d+) with int8"
    assert.is_true(int8 / half < 0.52, job.stdout)
  end)

  it("resnet.lua runs over two ranks", function()
    local job = ranks.run(2, folder .. "/resnet.lua")
    assert.are.equal(0, job.code, job.stderr)
    check(job.stdout, EXPECTED["resnet.lua"])
  end)
end)
