-- SPDX-License-Identifier: MIT
--- The reference suite test_fsdp_exec_order at 2, 3 and 4 ranks, on the CPU and on a GPU (the emulated one if there is
--- no other), and further cases: an order that ends early, counts of collectives, and the same without debug level
--- "detail".
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

-- layer1 and layer2 have 36 elements each, so that their collectives would pair up silently.
local function wrap(strategy, device)
  local ms, nn, fsdp = load()
  local Model = nn.Module:extend "Model"
  function Model:init()
    self.layer0 = nn.Linear(5, 6)
    self.layer1 = nn.Linear(6, 6, { bias = false })
    self.layer2 = nn.Sequential(nn.Linear(6, 3, { bias = false }), nn.ReLU(), nn.Linear(3, 6, { bias = false }))
    self.relu = nn.ReLU()
    self.use_alt_path = false
    for _, p in ipairs(self.layer2:parameters()) do p.requires_grad = false end
  end
  function Model:forward(x)
    local z = self.relu(self.layer0(x))
    if self.skip then return z end
    return self.relu(self.use_alt_path and self.layer2(z) or self.layer1(z))
  end
  function Model.get_input(_, where) return ms.randn(8, 5):to(where) end
  function Model.get_loss(_, _, output) return output:sum() end
  function Model.run_backward(_, loss) loss:backward() end
  function Model:flip_path()
    local freeze, unfreeze = self.layer1, self.layer2
    if self.use_alt_path then freeze, unfreeze = unfreeze, freeze end
    for _, p in ipairs(freeze:parameters()) do p.requires_grad = false end
    for _, p in ipairs(unfreeze:parameters()) do p.requires_grad = true end
    self.use_alt_path = not self.use_alt_path
  end
  ms.manual_seed(0)
  local model = Model()
  model.layer1 = fsdp.FSDP(model.layer1, { sharding_strategy = strategy })
  model.layer2 = fsdp.FSDP(model.layer2, { sharding_strategy = strategy })
  return fsdp.FSDP(model, { sharding_strategy = strategy }):to(device)
end

local function iteration(model, device)
  local input = model.module:get_input(device)
  local output = model(input)
  model.module:run_backward(model.module:get_loss(input, output):to(device))
end

local function starts_with(text, prefix) return text:sub(1, #prefix) == prefix end

local function bare(text) return (text:gsub("^[^\n]-:%d+: ", "")) end

for _, device in ipairs { "cpu", "cuda:0" } do
  for world = 2, 4 do
    ranks.describe(world, ("test_fsdp_exec_order on %d ranks, %s"):format(world, device), function()
      for _, strategy in ipairs { "full_shard", "shard_grad_op" } do
        it("test_invalid_first_iter_order, " .. strategy, function(rank)
          local _, _, _, dist = load()
          dist.set_debug_level "detail"
          local model = wrap(strategy, device)
          if rank ~= 0 then model:flip_path() end
          local ok, message = pcall(function() model(model.module:get_input(device)) end)
          assert.is_false(ok)
          assert.equal("Forward order differs across ranks: rank 0 is all-gathering parameters for [['layer1.weight']] while rank 1 is "
            .. "all-gathering parameters for [['layer2.1.weight', 'layer2.3.weight']]", bare(message))
        end)

        for _, iterations in ipairs { 1, 3 } do
          it(("test_invalid_later_iter_order, %s, iters_before_path_change = %d"):format(strategy, iterations),
            function(rank)
            local ms, _, _, dist = load()
            dist.set_debug_level "detail"
            local model = wrap(strategy, device)
            for _ = 1, iterations do iteration(model, device) end
            if rank ~= 0 then model:flip_path() end
            local input = model.module:get_input(device)
            local ok, message
            local warnings = ms.catch_warnings(function()
              ok, message = pcall(function() model.module:get_loss(input, model(input)):backward() end)
            end)
            if rank ~= 0 then
              assert.equal(1, #warnings)
              assert.equal(("Forward order differs from that of the first iteration on rank %d."
                .. "\nExpected to all-gather for [['layer1.weight']] but trying to all-gather parameters for "
                .. "[['layer2.1.weight', 'layer2.3.weight']]"):format(rank), warnings[1])
            else
              assert.equal(0, #warnings)
            end
            -- The ranks gather different layers of equal size, which no debug level lets pass.
            assert.is_false(ok)
            assert.truthy(message:find("layer1", 1, true) and message:find("layer2", 1, true), message)
          end)
        end

        it("test_train_eval, " .. strategy, function()
          local ms, _, _, dist = load()
          dist.set_debug_level "detail"
          local model = wrap(strategy, device)
          local warnings = ms.catch_warnings(function()
            for _ = 1, 2 do
              model:train()
              for _ = 1, 3 do iteration(model, device) end
              model:eval()
              for _ = 1, 3 do
                local input = model.module:get_input(device)
                model.module:get_loss(input, model(input)):to(device)
              end
            end
          end)
          for _, text in ipairs(warnings) do
            assert.is_false(starts_with(text, "Forward order differs"), "Warning was incorrectly issued: " .. text)
          end
          assert.equal(0, #warnings)
        end)

        it("a sequence that ends early gives one warning, " .. strategy, function(rank)
          local ms, _, _, dist = load()
          dist.set_debug_level "detail"
          local model = wrap(strategy, device)
          iteration(model, device)
          model.module.skip = true                    -- on all ranks alike, so that only the check detects it
          local warnings = ms.catch_warnings(function()
            for _ = 1, 2 do iteration(model, device) end
          end)
          assert.same({ ("Forward order differs from that of the first iteration on rank %d."
            .. "\nExpected to all-gather for 2 units but the forward ended after 1"):format(rank) },
            warnings)
        end)

        it("counts one more all-gather a unit in the first iteration, and none later, " .. strategy, function()
          local _, _, _, dist = load()
          dist.set_debug_level "detail"
          local model = wrap(strategy, device)
          local function gathers(fn, ...)
            local n = 0
            for _, c in ipairs((dist.record(fn, ...))) do
              if c.op == "all_gather" then n = n + 1 end
            end
            return n
          end
          -- One gather per unit in forward and, with full_shard, one in backward for the unit that was resharded.
          local whole = strategy == "full_shard" and 3 or 2
          assert.equal(2 * 2, gathers(function() model(model.module:get_input(device)) end))
          -- There was no backward yet, so this is still the first iteration, and parameters that stayed gathered need
          -- no gather.
          assert.equal((strategy == "full_shard" and 2 or 0) + 2, gathers(iteration, model, device))
          for _ = 1, 3 do assert.equal(whole, gathers(iteration, model, device)) end
        end)
      end
    end)
  end
end

for world = 2, 4 do
  -- Each in a gang of its own, because the ranks do nothing more after such an error.
  for _, strategy in ipairs { "full_shard", "shard_grad_op" } do
    for _, shorter in ipairs { false, true } do
      local what = shorter and "an order that ends early" or "another order"
      ranks.describe(world, ("%s without debug level detail, %s, on %d ranks"):format(what, strategy, world), function()
        it("is an error on every rank before data moves", function(rank)
          local _, _, _, dist = load()
          assert.equal("off", dist.debug_level())
          local model = wrap(strategy, "cpu")
          iteration(model, "cpu")
          if rank ~= 0 then
            if shorter then model.module.skip = true else model:flip_path() end
          end
          local ok, message = pcall(iteration, model, "cpu")
          assert.is_false(ok)
          assert.truthy(message:find("layer1", 1, true), message)        -- the layer that rank 0 was in
        end)
      end)
    end
  end
end
