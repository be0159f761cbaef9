-- SPDX-License-Identifier: MIT
--- Large blocks of a GPU's memory, on the emulated GPU with chunks and slabs as on a real one.
local process = require "spec.support.process"
local on_gpu = require "spec.support.on_gpu"()

--- Runs a script; returns its output. `MiB(n)` makes a tensor of n MiB, `at` its address, `reserved()` is in MiB.
local function run(source, env)
  local given = { MOONSHARD_CUDA = process.gpu, MOONSHARD_EMULATOR = "chunks" }
  for name, value in pairs(env or {}) do given[name] = value end
  local job = process.script([[
    local ms, ffi = require "moonshard", require "ffi"
    local cuda = { device = "cuda", dtype = "uint8" }
    local function MiB(n) return ms.empty(n * 2 ^ 20, cuda) end
    local function at(t) return tonumber(ffi.cast("intptr_t", t:data_ptr())) end
    local function reserved() return ms.memory_stats("cuda").reserved / 2 ^ 20 end
  ]] .. source, given)
  assert.are.equal(0, job.code, job.stdout .. job.stderr)
  return job.stdout
end

describe("large blocks on a GPU", function()
  on_gpu("share the memory of blocks of other sizes that were freed before them", function()
    assert.are.equal("32\n32\t0\t4\n32\n", run [[
      local big = MiB(30)
      local base = at(big)
      print(reserved())
      big:release()
      local a, b = MiB(4), MiB(26)
      print(reserved(), (at(a) - base) / 2 ^ 20, (at(b) - base) / 2 ^ 20)
      a:release()
      b:release()
      MiB(32)
      print(reserved())]])
  end)

  on_gpu("fill their slab where several fit", function()
    assert.are.equal("36\n72\n", run [[
      local a, b, c = MiB(12), MiB(12), MiB(12)
      print(reserved())
      local d = MiB(12)
      print(reserved())]])
  end)

  on_gpu("take the smallest range that is free", function()
    assert.are.equal("true\ttrue\n", run [[
      local a, _, c, _ = MiB(8), MiB(1), MiB(4), MiB(1)
      local wide, narrow = at(a), at(c)
      a:release()
      c:release()
      print(at(MiB(3)) == narrow, at(MiB(5)) == wide)]])
  end)

  on_gpu("leave the ranges of a step to the next step when an optimizer makes its states", function()
    assert.are.equal("true\ttrue\n", run [[
      local p = ms.nn.Parameter(ms.zeros(2 ^ 18, { device = "cuda" }))
      local _ = MiB(30)                                  -- leaves 1 MiB of the first slab
      local optimizer = ms.optim.AdamW({ p }, { lr = 1e-3 })
      local function step()
        local a = MiB(60)
        local where = at(a)
        a:release()
        p.grad = ms.ones(2 ^ 18, { device = "cuda" })
        optimizer:step()
        optimizer:zero_grad()
        return where, reserved()
      end
      local first, least = step()
      local second, most = step()
      print(first == second, least == most)]])
  end)

  on_gpu("go back to the driver with their slab when nothing in it is used", function()
    assert.are.equal("64\n64\n32\n0\n", run [[
      local a, b = MiB(20), MiB(20)                     -- a slab each
      local part = MiB(2)                               -- in one of them
      print(reserved())
      a:release()
      b:release()
      print(reserved())
      ms.empty_cache()
      print(reserved())
      part:release()
      ms.empty_cache()
      print(reserved())]])
  end)

  on_gpu("come from a slab of their own size where the device has no memory for a larger one", function()
    assert.are.equal("10\t10\nfalse\ttrue\n", run([[
      local a = MiB(9)
      print(reserved(), ms.memory_stats("cuda").peak_reserved / 2 ^ 20)
      local ok, text = pcall(MiB, 20)
      print(ok, text:find("no memory for 20971520 bytes on cuda:0", 1, true) ~= nil)]],
      { MOONSHARD_CUDA_MEMORY = "20000000" }))
  end)

  on_gpu("never overlap, and merge again in whatever order they are freed", function()
    assert.are.equal("true\n", run [[
      math.randomseed(7)
      local live, right = {}, true
      for step = 1, 2000 do
        if #live < 40 and math.random() < 0.55 then
          local bytes = math.floor(2 ^ 20 * (1 + 7 * math.random()))
          local t = ms.empty(bytes, cuda)
          for _, other in ipairs(live) do
            right = right and (at(t) >= at(other) + other:numel() or at(other) >= at(t) + bytes)
          end
          live[#live + 1] = t
        elseif #live > 0 then table.remove(live, math.random(#live)):release() end
      end
      for _, t in ipairs(live) do t:release() end
      ms.empty_cache()
      print(right and reserved() == 0)]])
  end)
end)
