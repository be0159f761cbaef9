-- SPDX-License-Identifier: MIT
--- Batches in pinned memory, and copies from pinned memory to a GPU: they do not wait, and whatever changes or reuses
--- the memory waits for them.
local process = require "spec.support.process"

local HEAD = [[
  local ms = require "moonshard"
  local data = ms.data
  local function pause(seconds) require("spec.support.cuda_table").open().pause(0, 0, seconds) end
  local N = 70000                                       -- float32: 280 KB, pages of its own
  ms.ones(1, { device = "cuda" })
]]

--- Runs a script on the emulated GPU. By default its streams read pinned memory as late as they can.
local function run(script, emulator)
  local done = process.script(HEAD .. script, { MOONSHARD_CUDA = process.gpu, MOONSHARD_EMULATOR = emulator or "late" })
  assert.are.equal(0, done.code, done.stderr)
  assert.are.equal("", done.stderr)
  return done.stdout
end

describe("copies from pinned memory to a GPU #cuda #timed", function()
  it("do not wait for the GPU, as others may", function()
    process.within(0.2, function()
      return tonumber((run([[
        local x = ms.ones(N):pin_memory()
        pause(0.5)
        local begun = ms.time()
        local y = x:to("cuda", { non_blocking = true })
        local seconds = ms.time() - begun
        assert(y:sum():item() == N)
        print(seconds)]], "")))
    end)
  end)

  for _, case in ipairs {
    { "is changed in place", "x:fill_(7)" },
    { "is released, and its memory gets another tensor", "x:release() local z = ms.full({ N }, 7)" },
    { "is the source of another copy and then changed", "local z = x:to 'cuda' x:mul_(7)" },
  } do
    it("read the values that the tensor had, if it then " .. case[1], function()
      assert.are.equal("70000\n", run(([[
        local x = ms.ones(N):pin_memory()
        assert(x:is_pinned())
        pause(0.1)
        local y = x:to "cuda"
        %s
        print(y:sum():item())]]):format(case[2])))
    end)
  end

  it("keep strides and dtypes", function()
    assert.are.equal("true\ttrue\n", run [[
      local x = ms.rand(300, 250):pin_memory()
      local want = x:clone()
      print(x:t():to("cuda"):cpu():equal(want:t()), x:to({ device = "cuda", dtype = "float64", non_blocking = true })
        :cpu():equal(want:double()))]])
  end)

  it("have gradients", function()
    assert.are.equal("140000\n", run [[
      local x = ms.ones(N):pin_memory():requires_grad_()
      local loss = (x:to "cuda" * 2):sum()
      loss:backward()
      print(x.grad:sum():item())]])
  end)
end)

describe("pin_memory", function()
  it("returns the tensor, and pins only large tensors of the CPU", function()
    assert.are.equal("true\ttrue\tfalse\tfalse\n", run [[
      local x, small = ms.ones(N), ms.ones(3)
      print(rawequal(x:pin_memory(), x), x:is_pinned(), small:pin_memory():is_pinned(), x:to("cuda"):is_pinned())]])
    assert.are.equal("pin_memory: float32 [3] cuda:0 given, expected a tensor on the CPU\n", run [[
      local ok, why = pcall(function() ms.ones(3, { device = "cuda" }):pin_memory() end)
      print((why:gsub("^.-: ", "", 1)))]])
  end)

  it("changes nothing without a GPU", function()
    local done = process.script([[
      local ms = require "moonshard"
      local x = ms.ones(70000)
      print(x:pin_memory():is_pinned(), x:sum():item())]], { MOONSHARD_CUDA = "off" })
    assert.are.equal("false\t70000\n", done.stdout, done.stderr)
  end)
end)

describe("a loader with pin_memory #cuda", function()
  -- 6 items of 280 KB. The elements of item k are k, from 0, so that the sum of a batch shows its items.
  local LOADER = [[
    local source = ms.arange(0, 6, { dtype = "float32" }):unsqueeze(2):expand(6, N):contiguous()
    local loader = data.DataLoader(data.TensorDataset(source, ms.arange(0, 6)), { batch_size = 2, pin_memory = true,
      %s })
  ]]

  for _, workers in ipairs { 0, 2 } do
    it(("gives pinned batches, with %d workers"):format(workers), function()
      assert.are.equal("true\t1\ntrue\t5\ntrue\t9\n", run(LOADER:format("workers = " .. workers) .. [[
        for x, y in loader:epoch() do
          print(x:is_pinned(), y:sum():item())
          assert(not y:is_pinned())
        end]]))
    end)

    it(("moves batches to the GPU while earlier work runs, with %d workers"):format(workers), function()
      for _, emulator in ipairs { "late", "late,seed:2" } do
        assert.are.equal("70000 350000 630000 70000 350000 630000\n", run(LOADER:format("device = 'cuda', workers = "
          .. workers) .. [[
          local sums = {}
          for _ = 1, 2 do
            for x in loader:epoch() do
              sums[#sums + 1] = x:sum():keep()
              pause(0.02)
            end
          end
          for k, s in ipairs(sums) do sums[k] = ("%d"):format(s:item()) end
          print(table.concat(sums, " "))]], emulator))
      end
    end)
  end

  it("uses pinned memory again", function()
    assert.are.equal("true\n", run(LOADER:format "device = 'cuda'" .. [[
      local function reserved() return ms.memory_stats("cpu").reserved end
      local after_first
      for epoch = 1, 5 do
        for x in loader:epoch() do x:sum():item() end
        after_first = after_first or reserved()
      end
      print(reserved() <= after_first + 4 * N * 4)]]))
  end)
end)
