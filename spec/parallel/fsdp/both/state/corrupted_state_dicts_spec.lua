-- SPDX-License-Identifier: MIT
--- State dicts with random faults, on one rank or on all: all ranks load it or all refuse it, with a message of the
--- library, and the next collective is correct. FUZZ_STATES=2000 sets the number of faults per number of ranks,
--- FUZZ_SEED=7 the seed (defaults: 60, 1).
local ranks = require "spec.support.ranks"
local kinds = require "spec.support.state_kinds"
local load = require("spec.support.wrapped").load

local COUNT, SEED = tonumber(os.getenv "FUZZ_STATES") or 60, tonumber(os.getenv "FUZZ_SEED") or 1
local KEYS = { "state", "param_groups", "params", "first.weight", "block.1.weight", "exp_avg", "step", "lr", "betas", 1,
  2, "count", "x", 0.5, -1, true }

local function any(list) return list[math.random(#list)] end

local function copy(x)
  if type(x) ~= "table" or getmetatable(x) then return x end
  local c = {}
  for k, v in pairs(x) do c[k] = copy(v) end
  return c
end

-- Removes, replaces or adds one thing at a random place in x.
local function spoil(x, values)
  while true do
    local keys = {}
    for k in pairs(x) do keys[#keys + 1] = k end
    table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
    local k = #keys > 0 and any(keys) or any(KEYS)
    if type(x[k]) ~= "table" or getmetatable(x[k]) or math.random() < 0.25 then
      local kind = math.random(3)
      if kind == 1 then x[k] = nil elseif kind == 2 then
        x[k] = values[math.random(values.n)] else x[any(KEYS)] = values[math.random(values.n)] end
      return
    end
    x = x[k]
  end
end

local function values()
  local ms, nn = load()
  local list = { 3, -1, 0 / 0, math.huge, "x", "", true, false, {}, { 1 }, { params = 1 }, { state = {} },
    ms.ones(2, 2), ms.ones(0), ms.tensor(4),
    ms.ones(7, 5, { dtype = "int64" }), ms.ones(7, 5), function() end, nn.Linear(2, 2) }
  list.n = #list
  return list
end

for world = 1, 4 do
  ranks.describe(world, ("state dicts with faults on %d ranks"):format(world), function(rank)
    it("are refused by all ranks alike, or loaded", function()
      local ms, _, fsdp, dist = load()
      local sharded, refused = {}, 0
      for _, kind in ipairs(kinds.kinds(world)) do
        -- A model over this rank alone raises its own error only.
        if kind[1] ~= "not sharded" then sharded[#sharded + 1] = kind end
      end
      math.randomseed(SEED)
      for k = 1, COUNT do
        ms.scope(function()
          local model, optim = kinds.make(any(sharded), 1)
          kinds.train(model, optim, 1, 1)
          local kind, of_model, culprit, broadcasts = any { "full", "sharded", "local" }, math.random() < 0.5,
            math.random(0, world), math.random() < 0.3
          local other, its_optim = model, optim
          if math.random() < 0.5 then other, its_optim = kinds.make(any(sharded), 2) end
          local state = of_model and fsdp.state_dict(model, { type = kind })
            or fsdp.optim_state_dict(model, optim, { type = kind })
          state = copy(state)
          local go_on = math.random(2 ^ 30)
          if culprit == world or culprit == rank then spoil(state, values()) end
          math.randomseed(go_on)                                    -- ranks draw equal numbers again
          local ok, text = pcall(function()
            if of_model then
              return fsdp.load_state_dict(other, state,
                { broadcast_from_rank0 = broadcasts, strict = math.random() < 0.7 })
            end
            return fsdp.load_optim_state_dict(other, its_optim, state, { broadcast_from_rank0 = broadcasts })
          end)
          local what = ("number %d: %s"):format(k, tostring(text))
          if not ok then
            refused = refused + 1
            assert.is_nil(text:find "attempt to" or text:find "bad argument" or text:find "lua/moonshard", what)
          end
          for _, its in ipairs(dist.all_gather_object(ok)) do assert.equal(ok, its, what) end
          local one = ms.ones(1)
          dist.all_reduce(one)
          assert.equal(world, one:item())
        end)
      end
      assert.is_true(refused > COUNT / 2)
    end)
  end)
end
