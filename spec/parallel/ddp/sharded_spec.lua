-- SPDX-License-Identifier: MIT
--- DDP around a module that is partly sharded: DDP reduces the other parameters, units their own.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function net()
  local ms, nn = load()
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.a = nn.Linear(3, 5)
    self.b = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    self.c = nn.Linear(5, 4, { bias = false })
    self:register_buffer("seen", ms.zeros(1))
  end
  function Net:forward(x)
    self.seen:add_(1)
    return self.c(self.b(self.a(x):tanh()):tanh())
  end
  ms.manual_seed(7)
  return Net()
end

local SHARDED = {
  ["fully_shard in the middle"] = function(model, fsdp)
    fsdp.fully_shard(model.b[3])
    fsdp.fully_shard(model.b)
  end,
  ["fully_shard around it all, the rest ignored"] = function(model, fsdp)
    local rest = model.a:parameters()
    rest[#rest + 1] = model.c.weight
    fsdp.fully_shard(model.b[1])
    fsdp.fully_shard(model, { ignored_params = rest })
  end,
  ["FSDP in the middle"] = function(model, fsdp, quietly) model.b = quietly(fsdp.FSDP, model.b) end,
  ["FSDP with original parameters"] = function(model, fsdp, quietly) model.b = quietly(fsdp.FSDP, model.b,
    { use_orig_params = true }) end,
}
local NAMES = {}
for name in pairs(SHARDED) do NAMES[#NAMES + 1] = name end
table.sort(NAMES)

local OPTIONS = { {}, { find_unused_parameters = true }, { static_graph = true }, { gradient_as_bucket_view = true } }

for world = 1, 4 do
  ranks.describe(world, ("DDP around sharded modules on %d ranks"):format(world), function(rank)
    for _, name in ipairs(NAMES) do
      for _, options in ipairs(world == 4 and { {} } or OPTIONS) do
        it(("trains as the plain model: %s, %s"):format(name, next(options) or "plain"), function()
          local ms, nn, fsdp, _, quietly = load()
          local plain, inner = net(), net()
          SHARDED[name](inner, fsdp, quietly)
          local _, model = ms.catch_warnings(nn.DDP, inner, options)
          local optimizers = { ms.optim.SGD(plain:parameters(), { lr = 0.05 }),
            ms.optim.SGD(model:parameters(), { lr = 0.05 }) }
          ms.catch_warnings(function()
            for step = 1, 3 do
              for r = 0, world - 1 do (plain(ms.ones(2, 3) * (r + step)):pow(2):mean() / world):backward() end
              model(ms.ones(2, 3) * (rank + step)):pow(2):mean():backward()
              fsdp.check_sharded_parity(plain.b, inner.b)
              for _, part in ipairs { "a", "c" } do
                ms.testing.assert_close(inner[part].weight.grad, plain[part].weight.grad)
                ms.testing.assert_close(inner[part].weight:detach(), plain[part].weight:detach())
              end
              for _, optimizer in ipairs(optimizers) do
                optimizer:step()
                optimizer:zero_grad()
              end
            end
          end)
        end)
      end
    end

    it("leaves out sharded parameters in low precision, broadcasts and join", function()
      local ms, nn, fsdp = load()
      local inner = net()
      fsdp.fully_shard(inner.b)
      local model = nn.DDP(inner, { mixed_precision = { param_dtype = "bfloat16", reduce_dtype = "float32" } })
      local dtypes = {}
      inner.b[1]:register_forward_pre_hook(function(m, args)
        dtypes[1] = m.weight.dtype
        return { args[1]:float() }
      end)
      inner.b:register_forward_hook(function(_, _, out) return out:to "bfloat16" end)
      model(ms.ones(2, 3)):float():sum():backward()
      assert.same({ "float32" }, dtypes)
      assert.equal("float32", inner.b[1].weight.grad.dtype)
      local joined = nn.DDP((function()
        local m = net()
        fsdp.fully_shard(m.b)
        return m
      end)())
      joined:join(function()
        -- sharded units do not support unequal numbers of steps
        for _ = 1, 2 do joined(ms.ones(2, 3)):sum():backward() end
      end)
    end)
  end)
end
