-- SPDX-License-Identifier: MIT
--- The option `state` of fsdp.save and fsdp.load: schedules, loaders, scalers and tables of values in the index of a
--- checkpoint.
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"
local raises = require "spec.support.raises"

local function make()
  local ms = require "moonshard"
  ms.manual_seed(1)
  local model = ms.fsdp.fully_shard(ms.nn.Linear(5, 3))
  local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.1 })
  local loader = ms.data.DataLoader(ms.data.TensorDataset(ms.rand(12, 5)), { batch_size = 2, shuffle = true })
  return model, optimizer, { loader = loader, schedule = ms.optim.lr_scheduler.step(optimizer, { step_size = 1 }),
    scaler = ms.amp.GradScaler { init_scale = 8 }, stopping = ms.metrics.EarlyStopping(), seen = { best = math.huge } }
end

for world = 1, 3 do
  ranks.describe(world, ("option 'state' of fsdp.save over %d ranks"):format(world), function()
    local path = ("/tmp/moonshard-states-%d"):format(process.parent())
    teardown(function() os.execute("rm -rf " .. path) end)

    it("gives objects and tables the state that they had", function()
      local ms = require "moonshard"
      local model, optimizer, state = make()
      for _ = 1, 2 do state.loader:next() end
      ms.scope(function()
        state.scaler:scale(ms.ones(1))
        state.scaler:update(4)
      end)
      state.schedule:step()
      state.seen = { n = 7, best = math.huge, names = { "a" } }
      ms.fsdp.save(path, model, optimizer, { state = state, extra = { step = 2 } })

      local other, its_optimizer, there = make()
      local seen = there.seen
      assert.are.equal(2, ms.fsdp.load(path, other, its_optimizer, { state = there }).step)
      assert.are.equal(2, there.loader.done)
      assert.are.equal(4, there.scaler:get_scale())
      assert.are.equal(0.1 * 0.1, its_optimizer.param_groups[1].lr)
      assert.are.equal(math.huge, there.stopping.best)
      assert.are.same({ n = 7, best = math.huge, names = { "a" } }, seen)
      local one, two = state.loader:next(), there.loader:next()
      assert.is_true(one:equal(two))

      raises(("load: the checkpoint '%s' has no state of 'more' (it has: loader, scaler, schedule, seen, stopping); leave it "
        .. "out of option 'state' while loading"):format(path), ms.fsdp.load, path, other, its_optimizer,
        { state = { more = {} } })
    end)

    it("refuses tensors, which belong to the model", function()
      local ms = require "moonshard"
      local model, optimizer = make()
      raises("save: option 'state': 'ema' has averages; give them as option 'ema'", ms.fsdp.save, path, model, optimizer,
        { state = { ema = ms.optim.EMA(model:parameters()) } })
      raises("save: option 'state': 'seen.t' is a tensor; register it as a buffer of the model, or save it with ms.save",
        ms.fsdp.save, path, model, optimizer, { state = { seen = { t = ms.ones(1) } } })
      raises("save: option 'state': 'n' is a number (1), expected an object with state_dict and load_state_dict, or a table "
        .. "of numbers, strings and booleans", ms.fsdp.save, path, model, optimizer, { state = { n = 1 } })
    end)
  end)
end
