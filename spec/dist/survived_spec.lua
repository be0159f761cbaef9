-- Errors that scripts survive: the k-th failure of one rank is the k-th failure of all, however far apart they are.
local ranks = require "spec.support.ranks"

for world = 2, 4 do
  ranks.describe(world, "errors that scripts survive", function()
    local ms = require "moonshard"
    local nn, fsdp, dist, optim = ms.nn, ms.fsdp, ms.dist, ms.optim
    local rank = dist.rank()
    local K = { dtype = "float64" }

    local fronts = {
      no_shard = function(m) return fsdp.FSDP(m, { sharding_strategy = "no_shard", use_orig_params = true }) end,
      no_shard_flat = function(m) return fsdp.FSDP(m, { sharding_strategy = "no_shard" }) end,
      full_shard = function(m) return fsdp.FSDP(m) end,
      fully_shard = function(m) return fsdp.fully_shard(m) end,
      ddp = function(m) return nn.DDP(m) end,
    }

    -- Its forward fails where `armed` says so.
    local Weak = nn.Module:extend "Weak"
    function Weak:init() self.a = nn.Linear(3, 3, K) end
    function Weak:forward(x)
      if self.armed then error("this rank's forward failed", 0) end
      return self.a(x):tanh()
    end

    local function input(step, r)
      ms.manual_seed(100 * step + r)
      return ms.randn(2, 3, K)
    end

    -- Tries of a step, `failures` in a row of which fail on rank `bad`; then a good one, beside one process that never fails.
    local function train(wrap, bad, failures)
      ms.manual_seed(1)
      local weak = Weak()
      ms.manual_seed(1)
      local alone = Weak()
      local m = wrap(weak)
      local o, ro = optim.SGD(m:parameters(), { lr = 0.1 }), optim.SGD(alone:parameters(), { lr = 0.1 })
      local texts = {}
      for step = 1, 3 do
        for try = 1, failures do
          weak.armed = rank == bad
          local ok, why = pcall(function() m(input(10 * step + try, rank)):pow(2):sum():backward() end)
          weak.armed = nil
          assert.is_false(ok)
          texts[#texts + 1] = tostring(why)
          o:zero_grad()
        end
        m(input(step, rank)):pow(2):sum():backward()
        o:step()
        o:zero_grad()
        for r = 0, world - 1 do (alone(input(step, r)):pow(2):sum() / world):backward() end
        ro:step()
        ro:zero_grad()
        local probe = input(99, 0)
        local want, got = alone(probe), m(probe)
        assert.is_true((want - got):abs():max():item() < 1e-12)
      end
      return texts
    end

    for name, wrap in ms.sorted_pairs(fronts) do
      for _, failures in ipairs { 1, 3 } do
        it(("%s: %d failed tries of one rank are %d on the others, and the good steps meet"):format(name, failures, failures), function()
          for bad = 0, world - 1, world - 1 do
            for _, why in ipairs(train(wrap, bad, failures)) do
              assert.matches(rank == bad and "^this rank's forward failed" or ("rank %d failed: this rank's forward failed"):format(bad), why)
            end
          end
        end)
      end

      it(name .. ": all ranks fail three times by themselves, and the good steps meet", function()
        for _, why in ipairs(train(wrap, rank, 3)) do assert.matches("this rank's forward failed", why) end
      end)
    end

    it("thousands of failures, ahead of the others or while they meet them, are as many failures", function()
      local lib = require "moonshard.ffi".lib
      dist.barrier()
      if rank == 0 then
        -- In bursts: the others have met the last one when the next burst takes the place of the texts that they read.
        for k = 1, 10000 do
          lib.ms_dist_publish_error("number " .. k, lib.ms_dist_errors())
          if k % 20 == 0 then
            local from = os.clock()
            while os.clock() - from < 3e-4 do end
          end
        end
      else
        for k = 1, 10000 do
          local ok, why = pcall(dist.barrier)
          assert.is_false(ok)
          -- Of so many only the latest texts are kept.
          if not why:find "its text is gone" then assert.matches(("rank 0 failed: number %d$"):format(k), (why:gsub("\n.*", ""))) end
        end
      end
      local t = ms.ones(5)
      dist.all_reduce(t)
      assert.are.equal(world, t[5]:item())
    end)

    it("work within work that dies of one error fails once", function()
      ms.manual_seed(2)
      local weak = Weak()
      local m = fsdp.fully_shard(weak)
      -- The backward dies of an error of a forward in one of its hooks.
      local hooked = true
      local function try()
        local out = m(input(1, rank))
        out:register_hook(function()
          if hooked then
            weak.armed = rank == 0
            m(input(2, rank))
          end
        end)
        out:sum():backward()
      end
      assert.is_false((pcall(try)))
      hooked, weak.armed = false, nil
      local before = require "moonshard.ffi".lib.ms_dist_errors()
      try()
      dist.barrier()
      assert.are.equal(before, require "moonshard.ffi".lib.ms_dist_errors())
    end)
  end)
end
