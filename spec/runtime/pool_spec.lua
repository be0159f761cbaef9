-- SPDX-License-Identifier: MIT
--- The allocator: exact counts of bytes, reuse, limits, injected failures.
local ms = require "moonshard"
local engine = require "moonshard.core.ffi"
local collected = require "spec.support.collected"
local process = require "spec.support.process"
local lib, state = engine.lib, engine.state

describe("the allocator", function()
  local function allocated() return ms.memory_stats("cpu").allocated end

  it("counts bytes as requested, and frees all of them", function()
    collected()                                 -- leftovers of earlier specs are not counted
    for _, n in ipairs { 0, 1, 15, 16, 17, 1000, 65537, 262144, 1048577, 5000000 } do
      local before = allocated()
      ms.scope(function()
        local _ = ms.empty(n)
        assert.are.equal(before + 4 * n, allocated())
        local _ = ms.empty(n, { dtype = "bfloat16" })
        assert.are.equal(before + 6 * n, allocated())
      end)
      assert.are.equal(before, allocated())
    end
  end)

  it("aligns to 64 bytes and keeps live blocks apart", function()
    ms.scope(function()
      local list, at = {}, {}
      for k = 1, 200 do
        local n = (k * 37) % 1500 + 1
        list[k] = ms.full({ n }, k)
        local p = list[k]:data_ptr()
        assert.are.equal(0, p % 64)
        at[k] = { p, p + 4 * n }
      end
      table.sort(at, function(a, b) return a[1] < b[1] end)
      for k = 2, #at do assert.is_true(at[k - 1][2] <= at[k][1]) end
      for k = 1, 200 do assert.are.equal(k * list[k]:numel(), list[k]:sum():item()) end
    end)
  end)

  it("reuses freed blocks, and releases cached ones on demand", function()
    local first, again
    ms.scope(function() first = ms.empty(3000000):data_ptr() end)
    ms.scope(function() again = ms.empty(3000000):data_ptr() end)
    assert.are.equal(first, again)
    local reserved = ms.memory_stats("cpu").reserved
    ms.empty_cache()
    assert.is_true(ms.memory_stats("cpu").reserved <= reserved - 12000000)
    ms.scope(function() assert.are.equal(0, ms.zeros(3000000):sum():item()) end)
  end)

  it("counts bytes by what they hold, on every device", function()
    local kinds = { "parameters", "gradients", "optimizer", "gathered" }
    for _, device in ipairs(ms.cuda.is_available() and { "cpu", "cuda" } or { "cpu" }) do
      collected()
      local before = ms.memory_stats(device)
      local function now()
        local stats, out = ms.memory_stats(device), {}
        for k, kind in ipairs(kinds) do out[k] = stats[kind] - before[kind] end
        return out
      end
      local layer = ms.nn.Linear(10, 20):to(device)
      local optimizer = ms.optim.AdamW(layer:parameters())
      assert.are.same({ 880, 0, 0, 0 }, now())
      ms.scope(function() layer(ms.ones(3, 10, { device = device })):sum():backward() end)
      assert.are.same({ 880, 880, 0, 0 }, now())
      optimizer:step()
      assert.are.same({ 880, 880, 1760, 0 }, now())
      optimizer:zero_grad()
      assert.are.same({ 880, 0, 1760, 0 }, now())
      layer:to "float64"
      collected()
      assert.are.same({ 1760, 0, 1760, 0 }, now())
      layer, optimizer = nil, nil                       -- luacheck: ignore 311
      collected()
      assert.are.same({ 0, 0, 0, 0 }, now())
    end
  end)

  it("keeps the peak until it is reset", function()
    collected()
    ms.reset_peak_memory_stats("cpu")
    local before = allocated()
    ms.scope(function() local _ = ms.empty(100000) end)
    assert.are.equal(before + 400000, ms.memory_stats("cpu").peak_allocated)
    ms.reset_peak_memory_stats("cpu")
    assert.are.equal(before, ms.memory_stats("cpu").peak_allocated)
  end)

  it("counts what operators use while they run apart, so the peak does not depend on processor or threads", function()
    local function peaks(env)
      local job = process.script([[
        local ms = require "moonshard"
        local nn = ms.nn
        ms.reset_peak_memory_stats()
        for _, dtype in ipairs { "float32", "bfloat16" } do
          local net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(7200, 300))
          net:to(dtype)(ms.rand(8, 4, 32, 32, { dtype = dtype })):pow(2):mean():backward()
          local q = ms.rand(2, 4, 150, 32, { dtype = dtype, requires_grad = true })
          nn.F.scaled_dot_product_attention(q, q, q):sum():backward()
        end
        local m = ms.memory_stats()
        assert(m.peak_scratch > 0)
        print(m.peak_allocated)]], env)
      assert.are.equal(0, job.code, job.stderr)
      return job.stdout
    end
    local reference = peaks { OMP_NUM_THREADS = "1" }
    for _, env in ipairs { { OMP_NUM_THREADS = "3" }, { OMP_NUM_THREADS = "2", MOONSHARD_ISA = "v1" },
      { MOONSHARD_ISA = "v3" } } do
      assert.are.equal(reference, peaks(env))
    end
  end)

  it("refuses allocations beyond a limit, names the operator and the sizes, and continues", function()
    -- Leftovers of other specs are freed now, not during the test.
    collected()
    local before = allocated()
    state.memory_limit = before + 1000
    local ok, why = pcall(ms.empty, 1000)
    local fine = pcall(ms.scope, function() local _ = ms.empty(100) end)
    state.memory_limit = 0
    assert.is_false(ok)
    assert.matches("no memory for 4000 bytes on cpu %(limit of ms_state.memory_limit; %d+ bytes allocated", why)
    assert.is_true(fine)
    assert.are.equal(before, allocated())
    ok, why = pcall(ms.empty, 2 ^ 41)
    assert.is_false(ok)
    assert.matches("no memory for 8796093022208 bytes", why)
  end)

  it("fails the nth allocation from now, once: ms.empty collects and tries again", function()
    local shape = require "ffi".new("int64_t[1]", 10)
    ms.scope(function()
      lib.ms_fail_allocation(3)
      local _ = ms.empty(10)
      _ = ms.empty(10)
      local before = allocated()
      assert.are.equal(0, lib.ms_empty(0, 0, 1, shape))
      assert.matches("ms_fail_allocation", require "ffi".string(lib.ms_error()))
      assert.are.equal(before, allocated())
      assert.are_not.equal(0, lib.ms_empty(0, 0, 1, shape))
      lib.ms_fail_allocation(1)
      assert.are.equal(10, ms.empty(10):numel())
      lib.ms_fail_allocation(0)
    end)
  end)
end)
