-- SPDX-License-Identifier: MIT
--- Parameters that are unfrozen, frozen, added or replaced after a model was sharded: trained as in one process, or an
--- error that names them before a step is made.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load
local ways = require "spec.support.ways"

local function net()
  local ms, nn = load()
  ms.manual_seed(3)
  local Net = nn.Module:extend "Net"
  function Net:init() self.a, self.b = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)) end
  function Net:forward(x)
    local y = self.b(self.a(x):tanh())
    return self.c and y + self.c(x) or y * (self.gain or 1)
  end
  return Net()
end

local CHILDREN, PIECES = { "a", "b.1" }, { use_orig_params = true }
local WAYS = {
  shard = ways.fully_shard {}, shard_children = ways.fully_shard(CHILDREN),
  flat = ways.FSDP {}, flat_children = ways.FSDP(CHILDREN),
  pieces = ways.FSDP({}, PIECES), pieces_children = ways.FSDP(CHILDREN, PIECES),
  no_shard = ways.FSDP({}, { sharding_strategy = "no_shard" }),
}

local function fresh()
  load().manual_seed(9)
  return load().nn.Linear(3, 3)
end

-- What happens before sharding and after it (m: the model, w: its wrapper), and the error's words by way; true: none.
local CASES = {
  { "unfrozen", function(m) m:requires_grad_(false) end, function(m) m:requires_grad_(true) end },
  { "unfrozen through the wrapper", function(m) m:requires_grad_(false) end, function(_, w) w:requires_grad_(true) end },
  { "frozen", function() end, function(m) m:requires_grad_(false) end },
  { "unfrozen in part", function(m) m.a:requires_grad_(false) end, function(m) m.a:requires_grad_(true) end,
    flat = "Must flatten tensors with uniform", no_shard = "Must flatten tensors with uniform" },
  { "frozen in part", function() end, function(m) m.a:requires_grad_(false) end,
    flat = "'b.1.weight' requires grad and 'a.weight' does not",
    no_shard = "'b.1.weight' requires grad and 'a.weight' does not" },
  { "added", function() end, function(m) m.gain = load().nn.Parameter(load().ones(3)) end,
    all = "'gain', came into the model after" },
  { "added as a child", function() end, function(m) m.c = fresh() end,
    all = "'c.weight', came into the model after" },
  { "added, but frozen", function() end, function(m) m.c = fresh():requires_grad_(false) end },
  { "added frozen, and unfrozen later", function() end, function(m) m.c = fresh():requires_grad_(false) end,
    function(m) m.c:requires_grad_(true) end, all = "'c.weight', came into the model after" },
  { "a replaced element of a list", function() end, function(m) m.b[1] = fresh() end,
    all = "'b.1.weight', came into the model after" },
  { "replaced with their module", function() end, function(m) m.a = fresh() end,
    all = "'a.weight', came into the model after" },
  { "shared with another", function() end, function(m) m.b[1].weight = m.a.weight end, all = "%f[%w]weight' was " },
}

for _, world in ipairs { 1, 2, 4 } do
  ranks.describe(world, ("parameters that change after sharding over %d ranks"):format(world), function(rank)
    local ms, _, fsdp = load()
    for _, case in ipairs(CASES) do
      for way, wrap in ms.sorted_pairs(WAYS) do
        for _, late in ipairs { false, true } do
          it(("%s, %s: %s"):format(case[1], late and "after a step" or "before the first", way), function()
            local _, _, _, _, quietly = load()
            local want, m = net(), net()
            local inner = m
            case[2](want)
            case[2](m)
            local text = (world > 1 or not (case.all or ""):find "came") and case.all or case[way]
            local function step(k)
              local SGD, options = ms.optim.SGD, { lr = 0.1 }
              local its_opt, opt = SGD(want:parameters(), options), SGD(m:parameters(), options)
              local function loss(model, r)
                ms.manual_seed(10 * k + r)
                return model(ms.randn(4, 3)):pow(2):mean()
              end
              for r = 0, world - 1 do
                local l = loss(want, r) / world
                if l.requires_grad then l:backward() end
              end
              local l = loss(m, rank)
              if l.requires_grad then l:backward() end
              for _, o in ipairs { its_opt, opt } do
                o:step()
                o:zero_grad()
              end
            end
            local ok, why = pcall(quietly, function()
              m = wrap(m)
              if late then step(1) end
              for k = 3, #case do
                case[k](want, want)
                case[k](inner, m)
              end
              step(2)
              step(3)
            end)
            assert.equal(not text, ok, why)
            if text then return assert.matches(text, why) end
            local sd = fsdp.state_dict(m)
            for name, t in ms.sorted_pairs(want:state_dict()) do ms.testing.assert_close(sd[name], t) end
          end)
        end
      end
    end

    it("are refused when they are assigned to an instance of FSDP instead of its module", function()
      local _, nn, _, _, quietly = load()
      local m = quietly(WAYS.flat_children, net())
      local ok, why = pcall(function() m.a.weight = nn.Parameter(ms.ones(3, 3)) end)
      assert.is_false(ok)
      assert.matches("parameter 'weight' was assigned to the instance, which does not pass it to the module", why)
    end)

    it("train where the script itself reduces their gradients, which clipping and scaling would hide", function()
      local _, nn, _, dist, quietly = load()
      for _, way in ipairs { "shard_children", "flat" } do
        local m = quietly(WAYS[way], net())
        local inner = m.module or m
        inner.gain = nn.Parameter(ms.ones(3))
        local opt, scaler = ms.optim.SGD(m:parameters(), { lr = 0.1 }), ms.amp.GradScaler()
        local function loss() return m(ms.full({ 1, 3 }, rank)):sum() end
        scaler:scale(loss()):backward()
        if world > 1 then
          for _, use in ipairs { function() nn.utils.clip_grad_norm_({ inner.gain }, 1) end,
            function() scaler:unscale_(opt) end, function() opt:step() end } do
            local ok, why = pcall(use)
            assert.is_false(ok)
            assert.matches("'gain', came into the model after it had been sharded", why)
          end
        end
        opt:zero_grad()
        loss():backward()
        dist.all_reduce(inner.gain.grad, { op = "avg" })
        nn.utils.clip_grad_norm_(m:parameters(), 1)
        opt:step()
        local gain = inner.gain:tolist()
        for _, other in ipairs(dist.all_gather_object(gain)) do assert.same(gain, other) end
      end
    end)

    it("may be ignored", function()
      local _, _, _, _, quietly = load()
      local m = net()
      m.b[1].weight:requires_grad_(true)
      m = quietly(fsdp.FSDP, m, { ignored_modules = { m.b[1] } })
      m(ms.ones(1, 3)):sum():backward()
      m = net()
      fsdp.fully_shard(m, { ignored_params = { m.a.weight } })
      m(ms.ones(1, 3)):sum():backward()
    end)
  end)
end
