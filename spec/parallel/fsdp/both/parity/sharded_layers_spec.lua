-- SPDX-License-Identifier: MIT
--- nn and optim with sharded parameters: fills by position, moves of units, norms over ranks, state of parts.
local ms = require "moonshard"
local ranks = require "spec.support.ranks"
local nn, optim = ms.nn, ms.optim

-- A model whose rows 2, 3 and 4 ranks divide unevenly, with empty parts.
local function make(given)
  local kind = given or {}
  return nn.Sequential(
    nn.Linear(3, 7, kind), nn.ReLU(),
    nn.Sequential(nn.Linear(7, 5, kind), nn.ReLU(), nn.LayerNorm(5, kind)),
    nn.Linear(5, 1, kind))
end

local function shard(m)
  ms.fsdp.fully_shard(m[3])
  return ms.fsdp.fully_shard(m)
end

for _, world in ipairs { 1, 2, 3, 4 } do
  ranks.describe(world, ("nn over %d ranks #mpi"):format(world), function()
    it("fills a shard with the random numbers of its place in the whole tensor", function()
      ms.manual_seed(11)
      local plain = make()
      ms.manual_seed(11)
      local early = shard(make())
      local late = shard(make { device = "meta" })
      late:to_empty "cpu"
      ms.manual_seed(11)
      late:apply(function(m)
        if m.reset_parameters then m:reset_parameters() end
      end)
      for name, p in plain:named_parameters() do
        assert.is_true(p:equal(early:get_parameter(name):full_tensor()), name)
        assert.is_true(p:equal(late:get_parameter(name):full_tensor()), name .. " after meta")
      end
    end)

    it("fills shards by every initialisation", function()
      for _, case in ipairs {
        { nn.init.normal_, 1, 2 }, { nn.init.uniform_, -3, 4 }, { nn.init.trunc_normal_, 0, 1, -1, 1 },
        { nn.init.xavier_uniform_ },
        { nn.init.kaiming_uniform_, { a = 1 } }, { nn.init.constant_, 5 }, { nn.init.ones_ }, { nn.init.zeros_ },
      } do
        local whole, m = nn.Parameter(ms.empty(7, 3)), shard(make())
        ms.manual_seed(3)
        case[1](whole, unpack(case, 2))
        ms.manual_seed(3)
        case[1](m[1].weight, unpack(case, 2))
        assert.is_true(whole:equal(m[1].weight:full_tensor()))
      end
    end)

    it("moves units to another dtype", function()
      ms.manual_seed(4)
      local m, whole = shard(make()), {}
      for name, p in m:named_parameters() do whole[name] = p:full_tensor() end
      m:to("float64")
      for name, p in m:named_parameters() do
        assert.are.equal("float64", p.dtype)
        assert.is_true(whole[name]:double():equal(p:full_tensor()), name)
      end
      m(ms.ones(2, 3, { dtype = "float64" })):sum():backward()
    end)

    it("moves gradients with them, so that a step after the move equals one before it", function()
      ms.manual_seed(4)
      local m = shard(make())
      m(ms.randn(2, 3)):sum():backward()
      local before = {}
      for name, p in m:named_parameters() do before[name] = p.grad:full_tensor() end
      m:to("float64")
      for name, p in m:named_parameters() do
        assert.are.equal("float64", p.grad.dtype)
        assert.is_true(before[name]:double():equal(p.grad:full_tensor()), name)
      end
      m(ms.zeros(2, 3, { dtype = "float64" })):sum():backward()         -- and accumulates more
      assert.are.equal("float64", m[1].weight.grad.dtype)
      m:to("float32")
      ms.optim.SGD(m:parameters(), { lr = 1 }):step()
      m:to_empty("meta")
      for _, p in ipairs(m:parameters()) do assert.are.equal("meta", p.grad.device) end
    end)

    it("measures and clips by the norm over all ranks", function(rank)
      local dist = ms.dist
      for _, order in ipairs { 1, 2, 3, math.huge } do
        ms.manual_seed(5)
        local plain = make { dtype = "float64" }
        ms.manual_seed(5)
        local m = shard(make { dtype = "float64" })
        local x = ms.randn(4, 3, { dtype = "float64" }) + rank
        plain(x):sum():backward()
        m(x):sum():backward()
        for _, p in ipairs(plain:parameters()) do dist.all_reduce(p.grad, { op = "avg" }) end
        local expected = nn.utils.clip_grad_norm_(plain:parameters(), 0.5, { norm_type = order })
        local got = nn.utils.clip_grad_norm_(m:parameters(), 0.5, { norm_type = order })
        assert.are.equal("[]", tostring(got.shape))
        assert.is_true(math.abs(got:item() - expected:item()) <= 1e-12 * expected:item())
        for name, p in plain:named_parameters() do
          ms.testing.assert_close(m:get_parameter(name).grad:full_tensor(), p.grad, { rtol = 1e-10, atol = 1e-14 })
        end
      end
    end)

    it("keeps optimizer state for this rank's part only", function(_, n)
      ms.manual_seed(6)
      local m = shard(make())
      local opt = optim.AdamW(m:parameters(), { lr = 0.1 })
      m(ms.ones(2, 3)):sum():backward()
      opt:step()
      local p = m[1].weight
      local part, state = p:to_local(), opt:state_of(p)
      assert.are.equal(tostring(part.shape), tostring(state.exp_avg.shape))
      assert.is_true(part:numel() <= math.ceil(7 / n) * 3)
      local elements = 0
      for _, q in ipairs(m:parameters()) do
        local s = opt:state_of(q)
        assert.are.equal(1, s.step)
        elements = elements + s.exp_avg:numel() + s.exp_avg_sq:numel()
      end
      local here = 0
      for _, q in ipairs(m:parameters()) do here = here + q:to_local():numel() end
      assert.are.equal(2 * here, elements)
    end)

    it("names the path of an operator's error through sharded modules", function()
      local m = shard(make())
      local ok, e = pcall(m, ms.ones(2, 4))
      assert.is_false(ok)
      assert.truthy(e:find("sequential.1: linear: ", 1, true), e)
    end)
  end)
end
