-- SPDX-License-Identifier: MIT
--- The parameters of FSDP instances: `params` with and without use_orig_params, nested instances, parameters that a
--- forward does not use, and parameters that replace sharded ones (docs/semantics.md#summon, #pieces, #classic).
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local STRATEGIES = { "full_shard", "shard_grad_op", "no_shard" }

local function wrap(m, options)
  local _, _, fsdp, _, quietly = load()
  return quietly(fsdp.FSDP, m, options)
end

local function net()
  local ms, nn = load()
  ms.manual_seed(0)
  return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4))
end

for _, world in ipairs { 1, 2, 3 } do
  ranks.describe(world, ("parameters of FSDP on %d ranks"):format(world), function()
    for _, strategy in ipairs(STRATEGIES) do
      it("params is one flat parameter, with original ones too, and shares their storage: " .. strategy, function(rank)
        local ms = load()
        local flat, pieces = wrap(net(), { sharding_strategy = strategy }),
          wrap(net(), { sharding_strategy = strategy, use_orig_params = true })
        local function backward(model) model(ms.ones(2, 5) * (rank + 1)):pow(2):sum():backward() end
        for _, model in ipairs { flat, pieces } do
          assert.equal(1, #model.params)
          assert.equal(1, model.params[1].ndim)
          assert.is_nil(model.params[1].grad)
          backward(model)
        end
        -- Elements have other positions, because pieces begin at multiples of 16 bytes; the sums are the same.
        local function total(t)
          local sum = t:double():sum()
          if strategy ~= "no_shard" then ms.dist.all_reduce(sum) end
          return sum
        end
        ms.no_grad(function()
          ms.testing.assert_close(total(pieces.params[1]), total(flat.params[1]))
          ms.testing.assert_close(total(pieces.params[1].grad), total(flat.params[1].grad))
        end)
        -- A write to the flat parameter is visible in its pieces, and the other way round.
        local p, first = pieces.params[1], pieces:parameters()[1]
        ms.no_grad(function()
          p:fill_(3)
          for _, q in ipairs(pieces:parameters()) do q.grad:fill_(4) end
          p.grad:mul_(0.5)                                      -- the padding stays 0
        end)
        for _, q in ipairs(pieces:parameters()) do
          assert.equal(3 * q:numel(), q:sum():item())
          assert.equal(2 * q:numel(), q.grad:sum():item())
        end
        first.grad = ms.ones_like(first)
        local sum = 0
        for _, q in ipairs(pieces:parameters()) do sum = sum + q.grad:sum():item() end
        assert.equal(sum, pieces.params[1].grad:sum():item())
        ms.no_grad(function() pieces.params[1].grad:fill_(7) end)
        assert.equal(7 * first:numel(), first.grad:sum():item())
        pieces:zero_grad()
        assert.is_nil(pieces.params[1].grad)
        assert.equal(4, #pieces:parameters())
        pieces:no_sync(function() backward(pieces) end)
        assert.is_true(pieces.params[1].grad:numel() >= 15 + 3 + 12 + 4)
      end)

      it("an instance that only contains another one has none, and trains: " .. strategy, function(rank)
        local ms, _, fsdp = load()
        for _, pieces in ipairs { false, true } do
          local options = { sharding_strategy = strategy, use_orig_params = pieces }
          local model, want = wrap(wrap(net(), options), options), net()
          assert.same({}, model.params)
          assert.equal(1, #model.module.params)
          for _ = 1, 2 do
            for r = 0, world - 1 do (want(ms.ones(2, 5) * (r + 1)):pow(2):sum() / world):backward() end
            model(ms.ones(2, 5) * (rank + 1)):pow(2):sum():backward()
            fsdp.check_sharded_parity(want, model)
          end
          assert.is_true(model:check_is_root())
          assert.is_false(model.module:check_is_root())
        end
      end)

      -- PyTorch's test_unshard_params_as_tensors: there, plain tensors take the parameters' place.
      it("are whole and the same objects in the forward and the backward of their unit, whatever is prefetched: "
        .. strategy, function(rank)
        local ms, nn = load()
        for _, backward in ipairs { "pre", "post", "none" } do
          for _, forward in ipairs { false, true } do
            local objects, seen = {}, {}
            local Layer = nn.Module:extend "Layer"
            function Layer:init() self.weight, self.bias = nn.Parameter(ms.rand(5, 5)), nn.Parameter(ms.rand(5)) end
            local function look(self, phase)
              for name, shape in pairs { weight = { 5, 5 }, bias = { 5 } } do          -- in any order
                assert.is_true(rawequal(objects[self][name], self[name]))
                assert.same(shape, { unpack(self[name].shape) })
                assert.is_true(self[name].is_leaf and self[name].requires_grad)
                -- A gradient of the whole must not stay with the parameter.
                assert.is_nil(self[name].grad)
              end
              seen[phase] = (seen[phase] or 0) + 1
            end
            function Layer:forward(x)
              look(self, "forward")
              local h = x:matmul(self.weight)
              h:register_hook(function() look(self, "backward") end)
              return (h + self.bias):tanh()
            end
            local options = { sharding_strategy = strategy, use_orig_params = true, backward_prefetch = backward,
              forward_prefetch = forward }
            local list = {}
            for k = 1, 3 do
              local layer = Layer()
              objects[layer] = { weight = layer.weight, bias = layer.bias }
              list[k] = wrap(layer, options)
            end
            local model = wrap(nn.Sequential(unpack(list)), options)
            for _ = 1, 2 do
              model:zero_grad()
              model(ms.ones(2, 5) * (rank + 1)):sum():backward()
            end
            assert.same({ forward = 6, backward = 6 }, seen)
            local elements = 0
            for _, p in ipairs(model:parameters()) do
              assert.equal(p:numel(), p.grad and p.grad:numel() or 0)
              elements = elements + p:numel()
            end
            assert.is_true(strategy == "no_shard" or world == 1 or elements < 3 * 30)
          end
        end
      end)

      it("those that their unit's forward does not use get zeros, those of a unit that does not run get no gradient: " .. strategy,
        function(rank)
        local ms, nn, fsdp = load()
        local Part = nn.Module:extend "Part"
        function Part:init() self.x, self.y, self.z = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5) end
        function Part:forward(t) return self.x(t) end
        for _, pieces in ipairs { false, true } do
          local options = { sharding_strategy = strategy, use_orig_params = pieces }
          local inner = Part()
          inner.z = wrap(inner.z, options)
          local model = wrap(inner, options)
          model(ms.ones(2, 5) * (rank + 1)):sum():backward()
          assert.is_nil(inner.z:parameters()[1].grad)
          if pieces then
            for name, p in model:named_parameters() do
              if name:find "^y" then assert.equal(0, p.grad:abs():sum():item()) end
              if name:find "^x" and p:numel() > 0 then assert.is_true(p.grad:abs():sum():item() > 0) end
            end
          else
            fsdp.summon_full_params(model, function() end)
            assert.is_true(model.params[1].grad:abs():sum():item() >= 0)
          end
        end
      end)

      it("a replaced one raises at the next forward: " .. strategy, function()
        local ms, nn = load()
        local inner = net()
        inner[3] = wrap(inner[3], { sharding_strategy = strategy })
        local model = wrap(inner, { sharding_strategy = strategy })
        model(ms.ones(2, 5))
        inner[3].module.weight = nn.Parameter(ms.ones(4, 3))
        raises("parameter '3.weight' was replaced after its module was sharded: the replacement, a Parameter, is neither sharded nor reduced; "
          .. "change the parameter in place, or replace it before its module is wrapped", model, ms.ones(2, 5))
      end)
    end

    it("one that a script replaced after fully_shard is accepted before the first forward, and is an error later",
      function(rank)
      local ms, nn, fsdp = load()
      local model, want = net(), net()
      fsdp.fully_shard(model[1])
      fsdp.fully_shard(model)
      local optimizers = {}
      for k, m in ipairs { model, want } do
        m[1].bias = nn.Parameter(ms.full({ 3 }, 0.5))
        m[3].weight = nn.Parameter(ms.arange(12):reshape(4, 3):to "float32" * 0.01, { requires_grad = false })
        optimizers[k] = ms.optim.SGD(m:parameters(), { lr = 0.1 })
      end
      for _ = 1, 2 do
        for r = 0, world - 1 do (want(ms.ones(2, 5) * (r + 1)):pow(2):sum() / world):backward() end
        model(ms.ones(2, 5) * (rank + 1)):pow(2):sum():backward()
        fsdp.check_sharded_parity(want, model)
        for _, o in ipairs(optimizers) do
          o:step()
          o:zero_grad()
        end
      end
      assert.is_true(model[1].bias.placements ~= nil)
      fsdp.check_sharded_parity(want, model)
      local own = model[1].bias
      model[1].bias = nn.Parameter(ms.zeros(3))
      raises("parameter '1.bias' was replaced after its module was sharded: the replacement, a Parameter, is neither sharded nor reduced; "
        .. "change the parameter in place, or replace it before the first forward", model, ms.ones(2, 5))
      model[1].bias = own
      model(ms.ones(2, 5)):sum():backward()
    end)

    it("one that a script replaced is accepted if it was on meta, shared, or gathered by hand, and is an error if it does not fit", function()
      local ms, nn, fsdp = load()
      local Net = nn.Module:extend "Net"
      function Net:init() self.l, self.w = nn.Linear(3, 3), nn.Parameter(ms.ones(3)) end
      function Net:forward(x) return self.l(x):sum() + self.w:sum() end
      local meta = ms.with_device("meta", function() return Net() end)
      fsdp.fully_shard(meta.l)
      fsdp.fully_shard(meta)
      meta.l:to_empty "cpu"
      ms.no_grad(function() for _, p in ipairs(meta.l:parameters()) do p:zero_() end end)
      meta.w = nn.Parameter(ms.full({ 3 }, 2))
      local out = meta(ms.ones(1, 3))
      out:backward()
      assert.equal(6, out:item())
      assert.same({ 1, 1, 1 }, meta.w.grad:full_tensor():tolist())

      local function shared()
        local m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        m[2].weight = m[1].weight
        return fsdp.fully_shard(m)
      end
      local m = shared()
      m:unshard()
      local new = nn.Parameter(ms.eye(3))
      m[1].weight, m[2].weight = new, new
      m(ms.ones(1, 3)):sum():backward()
      assert.is_true(rawequal(m[1].weight, m[2].weight))
      assert.is_true(m[2].weight:full_tensor():equal(ms.eye(3)))
      local before = "parameter '%s' was replaced after its module was sharded: the replacement, a Parameter, is neither sharded nor reduced; "
        .. "change the parameter in place, or replace it before the first forward"
      for _, case in ipairs {
        { nn.Parameter(ms.eye(3)), before:format "1.weight" },                    -- in one of the two modules that share it
        { nn.Parameter(ms.eye(4)),
          "fsdp: parameter '1.bias' was replaced by float32 [4, 4] cpu, expected a whole leaf float32 [3] with values, like the old parameter", "bias" },
        { nn.Parameter(ms.ones(3, { dtype = "float64" })),
          "fsdp: parameter '1.bias' was replaced by float64 [3] cpu, expected a whole leaf float32 [3] with values, like the old parameter", "bias" },
      } do
        local wrong = shared()
        wrong[1][case[3] or "weight"] = case[1]
        raises(case[2], wrong, ms.ones(1, 3))
      end
    end)
  end)
end
