-- SPDX-License-Identifier: MIT
--- The states of optimizers whose steps are Lua, some of which every rank keeps whole: they come back, with the next
--- steps to the bit, from optim_state_dict, fsdp.save and a run's checkpoint, and load on another number of ranks.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local OPTIONS = {
  Muon = { lr = 0.02, ns_dtype = "float32" }, Adafactor = { lr = 0.05 }, LBFGS = { lr = 0.5, max_iter = 3 },
}

local function make(kind, name, group)
  local ms, nn, fsdp, dist, quietly = load()
  ms.manual_seed(3)
  -- 2 and 4 outputs: a row or a column of means may have the shape of a rank's part.
  local model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2, { bias = name ~= "Muon" }))
  if name == "Muon" then model[1] = nn.Linear(5, 4, { bias = false }) end
  if kind == "fully_shard" then
    fsdp.fully_shard(model, { mesh = group and dist.mesh_from_group(group) })
  elseif kind == "FSDP" then
    model = quietly(fsdp.FSDP, model, { use_orig_params = true, process_group = group })
  end
  return model, ms.optim[name](model:parameters(), OPTIONS[name])
end

local function steps(model, optimizer, from, to)
  local ms = load()
  local loss
  for step = from, to do
    local function closure()
      optimizer:zero_grad()
      ms.manual_seed(step)
      return ms.scope(function()
        local value = model(ms.randn(6, 5)):pow(2):mean()
        value:backward()
        loss = value:item()
        return value:detach()
      end)
    end
    closure()
    optimizer:step(optimizer:class_name() == "LBFGS" and closure or nil)
  end
  return loss
end

local function same(a, b)
  local ms, _, fsdp = load()
  local want, got = fsdp.state_dict(a), fsdp.state_dict(b)
  for name, t in ms.sorted_pairs(want) do assert.is_true(got[name]:equal(t), name) end
end

for world = 1, 3 do
  ranks.describe(world, ("states of composed optimizers over %d ranks"):format(world), function(rank)
    local folder
    setup(function()
      local dist = select(4, load())
      folder = dist.broadcast_object(rank == 0 and os.tmpname() or nil, { src = 0 })
    end)
    teardown(function()
      if rank == 0 then os.execute(("rm -r '%s' '%s.saved'* 2>/dev/null"):format(folder, folder)) end
    end)
    local kinds = { Muon = { "fully_shard", "FSDP" }, Adafactor = { "fully_shard", "FSDP" }, LBFGS = { "whole" } }
    for _, name in ipairs { "Muon", "Adafactor", "LBFGS" } do
      for _, kind in ipairs(kinds[name]) do
        it(("come back: %s, %s"):format(name, kind), function()
          local _, _, fsdp = load()
          local checkpoints = require "moonshard.run.checkpoint"
          local model, optimizer = make(kind, name)
          steps(model, optimizer, 1, 3)
          local ways = {
            state_dicts = function(other, its)
              fsdp.load_state_dict(other, fsdp.state_dict(model))
              fsdp.load_optim_state_dict(other, its, fsdp.optim_state_dict(model, optimizer))
            end,
            broadcast = function(other, its)
              local from_first = { broadcast_from_rank0 = true }
              fsdp.load_state_dict(other, fsdp.state_dict(model))
              fsdp.load_optim_state_dict(other, its, fsdp.optim_state_dict(model, optimizer, { rank0_only = true }),
                from_first)
            end,
            folder = function(other, its)
              fsdp.save(folder .. ".saved", model, optimizer)
              fsdp.load(folder .. ".saved", other, its)
            end,
            run = function(other, its)
              checkpoints.save(folder, model, optimizer, {}, 3)
              local opened = checkpoints.open(folder)
              opened:load_model(other)
              opened:load_training(other, its)
              opened:close()
            end,
          }
          local copies = {}
          for _, way in ipairs { "state_dicts", "broadcast", "folder", "run" } do
            local other, its = make(kind, name)
            ways[way](other, its)
            copies[#copies + 1] = { other, its }
          end
          local p = optimizer.param_groups[1].params[1]
          assert.equal(optimizer:state_of(p).step, optimizer.state[p].step)
          local want = steps(model, optimizer, 4, 5)
          for _, copy in ipairs(copies) do
            assert.equal(want, steps(copy[1], copy[2], 4, 5))
            same(model, copy[1])
          end
        end)
      end
    end

    it("of Adafactor load on one rank", function()
      local _, _, fsdp = load()
      local model, optimizer = make("fully_shard", "Adafactor")
      steps(model, optimizer, 1, 3)
      local sd, states = fsdp.state_dict(model), fsdp.optim_state_dict(model, optimizer)
      assert.same({ 4, 1 }, { unpack(states.state["1.weight"].row_var.shape) })
      local alone, its = make("whole", "Adafactor")
      alone:load_state_dict(sd)
      fsdp.load_optim_state_dict(alone, its, states)
      assert.near(steps(model, optimizer, 4, 5), steps(alone, its, 4, 5), 1e-5)
    end)
  end)
end
