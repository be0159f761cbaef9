--- Several models of one class: their collectives never pair, in whatever order the ranks run them.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function make(front)
  local _, nn, fsdp = load()
  local m = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
  if front == "FSDP" then
    m[3] = fsdp.FSDP(m[3])
    return fsdp.FSDP(m)
  end
  fsdp.fully_shard(m[3])
  return fsdp.fully_shard(m)
end

for _, world in ipairs { 2, 3 } do
  for _, front in ipairs { "FSDP", "fully_shard" } do
    ranks.describe(world, ("two models of one class, %s, on %d ranks"):format(front, world), function(rank)
      it("are told apart when one rank runs them the other way round", function()
        local ms = load()
        local a, b = make(front), make(front)
        local x = ms.ones(2, 4)
        local ok, message = pcall(function()
          local order = rank == 1 and { b, a } or { a, b }
          for _, m in ipairs(order) do m(x) end
        end)
        assert.is_false(ok)
        assert.truthy(message:find("the ranks ask for different things", 1, true), message)
        assert.truthy(message:find("of the model made as number", 1, true), message)
        assert.truthy(message:find("all ranks of a group must wrap the same models, in the same order", 1, true), message)
        -- In one order they run.
        for _ = 1, 2 do
          for _, m in ipairs { a, b } do m(x):sum():backward() end
        end
        assert.is_truthy(a:parameters()[1].grad)
      end)

      it("may run in any order that all ranks share, and in backward too", function()
        local ms = load()
        local a, b = make(front), make(front)
        for step = 1, 3 do
          local y = step % 2 == 0 and a(ms.ones(2, 4)) * b(ms.ones(2, 4)) or b(ms.ones(2, 4)) + a(ms.ones(2, 4))
          y:sum():backward()
        end
      end)
    end)
  end
end
