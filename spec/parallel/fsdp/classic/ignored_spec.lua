-- SPDX-License-Identifier: MIT
--- Ignored modules and states of FSDP: with low precision, on meta, on other devices, below a root that is wrapped or
--- not, and different ones on different ranks.
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function net()
  local ms, nn = load()
  ms.manual_seed(3)
  return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 4))
end

-- No unit reduces gradients of ignored parameters; averages them over the ranks directly.
local function reduce_by_hand(m)
  local ms, _, _, dist = load()
  ms.no_grad(function()
    for _, p in ipairs(m:parameters()) do
      p.grad:div_(dist.world_size())
      dist.all_reduce(p.grad)
    end
  end)
end

for _, world in ipairs { 1, 2, 3 } do
  ranks.describe(world, ("ignored modules on %d ranks"):format(world), function(rank)
    for _, where in ipairs { "the root", "what is around them is no instance" } do
      it("train together with sharded ones, ignored by " .. where, function()
        local ms, _, fsdp, _, quietly = load()
        for _, pieces in ipairs { false, true } do
          local plain, inner = net(), net()
          local free = inner[2]
          local options = { ignored_modules = { free }, use_orig_params = pieces }
          local model
          if where == "the root" then
            model = quietly(function()
              inner[3] = fsdp.FSDP(inner[3], { use_orig_params = pieces })
              return fsdp.FSDP(inner, options)
            end)
          else
            model = inner
            quietly(function() for _, k in ipairs { 1, 3 } do inner[k] = fsdp.FSDP(inner[k], options) end end)
          end
          local optims = {}
          for k, m in ipairs { plain, model } do optims[k] = ms.optim.SGD(m:parameters(), { lr = 0.1 }) end
          for _ = 1, 2 do
            for r = 0, world - 1 do (plain(ms.ones(2, 3) * (r + 1)):pow(2):mean() / world):backward() end
            model(ms.ones(2, 3) * (rank + 1)):pow(2):mean():backward()
            reduce_by_hand(free)
            for _, optim in ipairs(optims) do
              optim:step()
              optim:zero_grad()
            end
          end
          local got = fsdp.state_dict(model)
          for name, t in pairs(fsdp.state_dict(plain)) do ms.testing.assert_close(got[name], t) end
        end
      end)
    end

    it("may differ between ranks if the sharded parameters are equal", function()
      local ms, nn, fsdp, dist, quietly = load()
      -- Rank r ignores r + 1 layers; the sharded layers are the same on every rank.
      local extra = nn.ModuleList {}
      for _ = 1, rank + 1 do extra:append(nn.Linear(5, 5)) end
      local Net = nn.Module:extend "Net"
      function Net:init() self.body, self.extra = net(), extra end
      function Net:forward(x)
        local y = self.body[1](x)
        for _, layer in ipairs(self.extra) do y = layer(y):tanh() end
        return self.body[3](self.body[2](y))
      end
      local ignored = {}
      for k, layer in ipairs(extra) do ignored[k] = layer end
      local model = quietly(fsdp.FSDP, Net(), { ignored_modules = ignored })
      local optim = ms.optim.SGD(model:parameters(), { lr = 0.1 })
      for _ = 1, 2 do
        model(ms.ones(2, 3)):sum():backward()
        optim:step()
        optim:zero_grad()
      end
      local n = {}
      for _, p in ipairs(model.params) do n[#n + 1] = p:numel() end
      for _, other in ipairs(dist.all_gather_object(n)) do assert.same(n, other) end
    end)

    it("stay on meta where they are", function()
      local ms, _, fsdp, _, quietly = load()
      for _, how in ipairs { "to_empty and reset_parameters", "param_init_fn" } do
        local inner = ms.with_device("meta", net)
        local initialised = {}
        local model = quietly(fsdp.FSDP, inner, { ignored_modules = { inner[2] },
          param_init_fn = how == "param_init_fn" and function(m)
          initialised[m] = true
          m:to_empty { device = "cpu" }
          m:reset_parameters()
        end or nil })
        assert.equal("meta", inner[2].weight.device)
        assert.equal("cpu", model.params[1].device)
        assert.is_nil(initialised[inner[2]])
      end
    end)

    it("compute in their own dtype beside units of low precision; inputs of another one are an error", function()
      local ms, nn, fsdp, _, quietly = load()
      local policy = fsdp.MixedPrecision { param_dtype = "bfloat16" }
      local inner = net()
      local model = quietly(fsdp.FSDP, inner, { ignored_modules = { inner[2] }, mixed_precision = policy })
      assert.matches("linear: all arguments must have the same dtype, got bfloat16 %[2, 5%] cpu and, as argument 2, float32 %[5, 5%] cpu",
        message(model, ms.ones(2, 3)))
      local Cast = nn.Module:extend "Cast"
      function Cast:init(m) self.m = m end
      function Cast:forward(x) return self.m(x:float()):to "bfloat16" end
      inner = net()
      local free = inner[2]
      inner[2] = Cast(free)
      model = quietly(fsdp.FSDP, inner, { ignored_modules = { inner[2] }, mixed_precision = policy })
      model(ms.ones(2, 3)):float():sum():backward()
      assert.equal("float32", free.weight.dtype)
      assert.equal("float32", free.weight.grad.dtype)
    end)
  end)
end

ranks.describe(2, "ignored modules with device_id #cuda", function()
  it("stay where they are, with their buffers", function()
    local ms, _, fsdp, _, quietly = load()
    if not ms.cuda.is_available() then return end
    local inner = net()
    inner[2]:register_buffer("scale", ms.ones(3))
    inner[3]:register_buffer("scale", ms.ones(3))
    local model = quietly(fsdp.FSDP, inner, { device_id = 0, ignored_modules = { inner[2] } })
    assert.equal("cuda:0", model.params[1].device)
    assert.equal("cuda:0", inner[3].scale.device)
    assert.equal("cpu", inner[2].weight.device)
    assert.equal("cpu", inner[2].scale.device)
  end)
end)
