-- SPDX-License-Identifier: MIT
--- Where the time of a step goes: sums over ranges, compared with numbers by hand, and the profile of a job.
local cjson = require "cjson"
local ms = require "moonshard"
local process = require "spec.support.process"
local profiles = require "moonshard.run.profile"
local ranks = require "spec.support.ranks"

-- A range of the script's thread.
local function range(category, name, start, stop, more)
  local e = { category = category, name = name, start = start, duration = stop - start, detail = "" }
  for key, value in pairs(more or {}) do e[key] = value end
  return e
end

describe("the profile of a step", function()
  it("divides the time among forward, backward, optimizer, communication and the rest", function()
    -- Ranges inside another one come before it.
    local s = profiles.summary({
      range("wait", "waiting for the gather queue", 2, 4), range("fsdp", "FSDP::pre_forward (1)", 1, 4),
      range("operator", "matmul", 4, 6), range("module", "1 (Linear)", 4, 7),
      range("operator", "relu", 7, 8), range("module", "Net", 1, 10), range("operator", "mse_loss", 10, 11),
      range("backward", "backward of relu", 12, 13, { detail = "Net" }),
      range("wait", "waiting for the reduce queue", 14, 15),
      range("backward", "backward of matmul", 13, 16, { detail = "1 (Linear)" }),
      range("module", "1 (Linear)", 17, 18),                                           -- computed again
      range("backward", "run", 12, 20), range("collective", "all_reduce", 21, 23, { unit = "2" }),
      range("optimizer", "AdamW", 20, 24), range("user", "step", 0, 25),
    }, 30)
    assert.are.equal(30, s.total)
    assert.are.equal(9 - 2 + 1, s.forward)
    assert.are.equal(8 - 1, s.backward)
    assert.are.equal(4 - 2, s.optimizer)
    assert.are.equal(2 + 1 + 2, s.communication)
    assert.are.equal(30 - 8 - 7 - 2 - 5, s.other)
    assert.are.same({ ["1"] = 2, ["2"] = 2, ["waiting for the reduce queue"] = 1 }, s.waits)
    assert.are.same({ ["1 (Linear)"] = { forward = 3, backward = 2 + 1 },
      Net = { forward = 9 - 3 - 2, backward = 1 } }, s.layers)
  end)

  it("has the mean of the ranks by layer, and the waiting of each by unit, the longest first", function()
    local function summary(k)
      return { total = k, forward = 1, backward = 1, optimizer = 1, communication = k, other = 0,
        layers = { a = { forward = k, backward = 0 }, b = { forward = 4, backward = k } },
        waits = { [k == 1 and "one" or "two"] = k, both = 9 } }
    end
    local of_ranks, layers, waits = profiles.join { summary(1), summary(2) }
    assert.are.same({ 1, 2 }, { of_ranks[1].total, of_ranks[2].communication })
    assert.are.same({ { name = "b", forward = 4, backward = 1.5 }, { name = "a", forward = 1.5, backward = 0 } }, layers)
    assert.are.same({ { name = "both", seconds = { 9, 9 } }, { name = "two", seconds = { 0, 2 } },
      { name = "one", seconds = { 1, 0 } } }, waits)
  end)

  it("returns what the function returns, raises its error, and leaves no recording behind", function()
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    local run = ms.run.start { out = folder .. "/run", quiet = true }
    assert.are.same({ 3, nil, "x" }, { run:profile(function(a, b) return a + b, nil, "x" end, 1, 2) })
    assert.has_error(function() run:profile(function() error("boom", 0) end) end, "boom")
    assert.has_error(function() run:profile(5) end)
    assert.are.equal(0, require("moonshard.core.ffi").lib.ms_trace_wanted())
    assert.are.equal(0, require("moonshard.core.ffi").state.memory_module)
    run:finish()
  end)

  for _, world in ipairs { 1, 2, 3 } do
    it(("of %d ranks names the unit that is waited for, and the layers #timed"):format(world), function()
      local folder = process.temp_folder()
      finally(function() process.remove_folder(folder) end)
      local job = ranks.run(world, ([[
        local ms = require "moonshard"
        local nn, dist, fsdp = ms.nn, ms.dist, ms.fsdp
        dist.init()
        local model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        fsdp.fully_shard(model[1])
        fsdp.fully_shard(model)
        local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.1 })
        local run = ms.run.start { out = %q, quiet = true }
        local ready = %q
        local function step()
          if run.step == 1 then
            -- The last rank comes half a second after the others.
            local last = dist.world_size() - 1
            if dist.rank() < last then io.open(ready .. dist.rank(), "w"):close() end
            for r = 0, dist.rank() == last and last - 1 or -1 do
              while not io.open(ready .. r) do end
            end
            local till = ms.time() + 0.5
            while dist.rank() == last and ms.time() < till do end
          end
          local loss = model(ms.rand(8, 64)):sum()
          loss:backward()
          optimizer:step()
          optimizer:zero_grad()
          return loss
        end
        for _ = 1, 1 do run:log { loss = step() } end
        run:log { loss = run:profile(step) }
        run:finish()
      ]]):format(folder .. "/run", folder .. "/ready"))
      assert.are.equal(0, job.code, job.stderr)
      local profile
      for line in io.lines(folder .. "/run/media.jsonl") do profile = cjson.decode(line) end
      assert.are.same({ "profile", 2, world }, { profile.kind, profile.step, #profile.ranks })
      for _, r in ipairs(profile.ranks) do
        assert.is_near(r.total, r.forward + r.backward + r.optimizer + r.communication + r.other, 1e-6)
        assert.is_true(r.forward > 0 and r.backward > 0 and r.optimizer > 0)
      end
      local layers, units = {}, {}
      for _, l in ipairs(profile.layers) do layers[l.name] = l end
      for _, w in ipairs(profile.waits) do units[w.name] = w.seconds end
      for _, name in ipairs { "1 (FSDPLinear)", "3 (Linear)", "2 (ReLU)" } do
        assert.is_true(layers[name].forward > 0 and layers[name].backward > 0, name)
      end
      if world > 1 then
        -- All but the last rank wait for the first unit that is gathered.
        local waited = (units.root or { 0 })[1] + (units["1"] or { 0 })[1]
        assert.is_true(waited > 0.08, waited)
        assert.is_true(profile.ranks[1].communication >= waited - 1e-6)
        assert.is_nil(units["waiting for the reduce queue"])           -- this wait is listed under its unit
        assert.is_true(profile.ranks[world].communication < profile.ranks[1].communication)
      end
    end)
  end
end)
