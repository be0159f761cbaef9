-- SPDX-License-Identifier: MIT
--- Activation checkpoints around and inside units: backward gathers and reduces in the same order as without them, one
--- unit ahead (docs/semantics.md#lifecycle), and gradients equal those of one process.
local ranks = require "spec.support.ranks"
local ways = require "spec.support.ways"

-- Ways in which a model runs its layers.
local regions = {
  none = function(_, layers, x)
    for _, l in ipairs(layers) do x = l(x) end
    return x
  end,
  each = function(ms, layers, x)
    for _, l in ipairs(layers) do x = ms.checkpoint(l, x) end
    return x
  end,
  ["every other"] = function(ms, layers, x)
    for k, l in ipairs(layers) do
      if k % 2 == 1 then x = ms.checkpoint(l, x) else x = l(x) end
    end
    return x
  end,
  ["two and two"] = function(ms, layers, x)
    for k = 1, #layers, 2 do x = ms.checkpoint(function(y) return layers[k + 1](layers[k](y)) end, x) end
    return x
  end,
  all = function(ms, layers, x) return ms.checkpoint(function(y)
    for _, l in ipairs(layers) do y = l(y) end
    return y
  end, x) end,
  nested = function(ms, layers, x) return ms.checkpoint(function(y)
    for _, l in ipairs(layers) do y = ms.checkpoint(l, y) end
    return y
  end, x) end,
  ["each, twice"] = function(ms, layers, x)
    for _ = 1, 2 do
      for _, l in ipairs(layers) do x = ms.checkpoint(l, x) end
    end
    return x
  end,
  ["one twice in a region"] = function(ms, layers, x) return
    ms.checkpoint(function(y) return layers[1](layers[2](layers[1](y))) end, x) end,
}

local function make(kind, inside)
  local ms = require "moonshard"
  local nn = ms.nn
  ms.manual_seed(3)
  local Layer = nn.Module:extend "Layer"
  function Layer:init() self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6) end
  function Layer:forward(x)
    local body = function(y) return self.b(self.a(y):tanh()) end
    if inside then return ms.checkpoint(body, x) end
    return body(x)
  end
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.first = nn.Linear(4, 6)
    self.layers = nn.ModuleList {}
    for _ = 1, 4 do self.layers:append(Layer()) end
    self.last = nn.Linear(6, 3, { bias = false })
  end
  function Net:forward(x) return self.last(regions[kind](ms, self.layers, self.first(x))) end
  return Net()
end

local LAYERS = { "layers.1", "layers.2", "layers.3", "layers.4" }
local function rows(options) return ways.fully_shard(LAYERS, options) end
local function classic(options) return ways.FSDP(LAYERS, options) end

local fronts = {
  { "fully_shard", rows {} }, { "fully_shard that keeps its parameters", rows { reshard_after_forward = false } },
  { "FSDP", classic {} },
  { "FSDP with original parameters", classic { use_orig_params = true } },
  { "shard_grad_op", classic { sharding_strategy = "shard_grad_op" } },
  { "FSDP that gathers behind", classic { backward_prefetch = "post" } },
}

-- The events of units in a second backward, which knows the order; both backwards equal one process.
local function backward(front, kind, inside, rank, world)
  local ms = require "moonshard"
  local reference, model = make(kind, inside), front(make(kind, inside))
  local events
  for step = 1, 2 do
    for r = 0, world - 1 do ms.scope(function() (reference(ms.ones(2,
      4) * (r + step)):sum() / world):backward() end) end
    ms.scope(function()
      local loss = model(ms.ones(2, 4) * (rank + step)):sum()
      events = ms.fsdp.record(function() loss:backward() end)
    end)
    ms.fsdp.check_sharded_parity(reference, model)
    reference:zero_grad()
    model:zero_grad()
  end
  local list = {}
  for _, e in ipairs(events) do
    if e.event ~= "reshard" then
      list[#list + 1] = (e.event == "unshard" and "gather " or "reduce ") .. (e.unit == "" and "root" or e.unit)
    end
  end
  return list
end

ranks.describe(2, "activation checkpoints and", function()
  for _, front in ipairs(fronts) do
    it(front[1] .. ": the order of a backward is that without them", function(rank, world)
      for _, inside in ipairs { false, true } do
        local plain = backward(front[2], "none", inside, rank, world)
        -- A region of two units gathers both before the later one's reduction has been queued. FSDP that gathers behind
        -- queues the reduction first, so for that kind of region the order differs.
        local kinds = front[1]:find "behind" and { "each", "every other" } or { "each", "every other", "two and two" }
        for _, kind in ipairs(kinds) do assert.same(plain, backward(front[2], kind, inside, rank, world), kind) end
      end
    end)

    it(front[1] .. ": regions of all kinds give the gradients of one process", function(rank, world)
      for _, inside in ipairs { false, true } do
        for _, kind in ipairs { "all", "nested", "each, twice", "one twice in a region" } do
          assert.is_true(#backward(front[2], kind, inside, rank, world) > 0, kind)
        end
      end
    end)
  end
end)
