-- SPDX-License-Identifier: MIT
--- nn.DDP in random programs: forwards outside and inside no_sync, evaluations, backwards in any order and over
--- retained graphs, gradients of inputs, cleared gradients, steps. The right gradients are sums and means of small
--- numbers. A step must fail if the last backward since the gradients were cleared left them on each rank, and only
--- then.
local ranks = require "spec.support.ranks"

local PROGRAMS = os.getenv "MOONSHARD_LONG" and 1000 or 40

local kinds = {
  {}, { find_unused_parameters = true }, { static_graph = true }, { gradient_as_bucket_view = true },
  { gradient_as_bucket_view = true, find_unused_parameters = true, skip_all_reduce_unused_params = true },
}

local f64 = { dtype = "float64", bias = false }

-- Runs one program of up to 14 actions, the same on all ranks. Rank r's input is factor * (r + 1).
local function run(seed, rank, world)
  local ms = require "moonshard"
  local nn = ms.nn
  math.randomseed(seed)
  local m = nn.DDP(nn.Linear(2, 1, f64), kinds[math.random(#kinds)])
  local p, optimizer = m.module.weight, ms.optim.SGD(m:parameters(), { lr = 0 })
  local done, pending, right, is_local = {}, {}, {}, false
  for r = 1, world do right[r] = 0 end

  local function forward(synced)
    local factor = math.random(5)
    local x = ms.full({ 1, 2 }, factor * (rank + 1), { dtype = "float64", requires_grad = true })
    local loss = synced and m(x):sum() or m:no_sync(function() return m(x):sum() end)
    pending[#pending + 1] = { loss = loss, factor = factor, synced = synced, x = x }
  end
  local actions = {
    forward = function() forward(true) end,
    ["forward in no_sync"] = function() forward(false) end,
    evaluation = function() ms.no_grad(m, ms.ones(1, 2, { dtype = "float64" })) end,
    backward = function(k)
      local graph, retain = pending[k], math.random(2) == 1
      graph.loss:backward(nil, { retain_graph = retain })
      if not retain then table.remove(pending, k) end
      local sum = 0
      for r = 1, world do
        right[r] = right[r] + graph.factor * r
        sum = sum + right[r]
      end
      for r = 1, graph.synced and world or 0 do right[r] = sum / world end
      is_local = not graph.synced and world > 1
    end,
    ["gradient of the input"] = function(k) ms.grad(pending[k].loss, pending[k].x, { retain_graph = true }) end,
    zero_grad = function()
      m:zero_grad { set_to_none = math.random(2) == 1 }
      for r = 1, world do right[r] = 0 end
      is_local = false
    end,
    step = function()
      local ok, why = pcall(optimizer.step, optimizer)
      assert(ok == not is_local, why or "the step took a gradient that was not reduced")
      if ok then pending = {} end                       -- the step has changed what the graphs have saved
    end,
  }
  local names = { "forward", "forward", "forward in no_sync", "evaluation", "backward", "backward",
    "gradient of the input", "zero_grad", "step" }
  for _ = 1, 14 do
    local name = names[math.random(#names)]
    local k = #pending > 0 and math.random(#pending)
    if k or name ~= "backward" and name ~= "gradient of the input" then
      done[#done + 1] = name
      local ok, why = pcall(actions[name], k)
      local got = p.grad and p.grad:tolist()[1][1] or 0
      if not ok or math.abs(got - right[rank + 1]) > 1e-9 * math.max(1, math.abs(got)) then
        error(("program %d: %s; the gradient is %g, right %g: %s"):format(seed, table.concat(done, ", "), got,
          right[rank + 1], tostring(why)), 0)
      end
    end
  end
end

for world = 1, 4 do
  ranks.describe(world, ("random programs with DDP on %d ranks #mpi"):format(world), function()
    it("have the gradients of one process", function(rank)
      local ms = require "moonshard"
      ms.catch_warnings(function()
        for seed = 1, PROGRAMS do ms.scope(run, seed, rank, world) end
      end)
    end)
  end)
end
