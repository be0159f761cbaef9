-- SPDX-License-Identifier: MIT
--- Scenarios for failing allocations. A job must give the bits of an undisturbed run, or a clean error after which the
--- same process runs the scenario again and gives those bits. For spec/kernels/no_memory_spec.lua and scripts/starve.
---
--- A scenario is run(ms, rank, folder, world) -> list of tensors, numbers and texts: its result, bit by bit.
local starved = {}

local scenarios = {}
starved.scenarios = scenarios

-- Operators that draw random numbers, recorded in-place operators, and an optimizer with two groups.
function scenarios.operators(ms)
  local F, init = ms.nn.F, ms.nn.init
  ms.manual_seed(5)
  local w, v = ms.randn(6, 8), ms.randn(8)
  w.requires_grad, v.requires_grad = true, true
  local optimizer = ms.optim.SGD({ { params = { w } }, { params = { v }, lr = 0.1 } }, { lr = 0.01, momentum = 0.9 })
  local out = {}
  for step = 1, 2 do
    local loss = ms.scope(function()
      local x = F.dropout(w * 1, 0.4)
      x:add_(v)
      x:mul_(F.dropout(v, 0.2))
      x:clamp_(-2, 2)
      local q = F.dropout(x, 0.5):reshape(1, 6, 8)
      local y = F.scaled_dot_product_attention(q, q * 2, q + 1, { dropout_p = 0.3 }):reshape(6, 8)
      local a, b = unpack(y:split(4, 2))
      a = a:clone()
      a:add_(b)
      a:scatter_add_(1, ms.tensor({ { 0, 1, 2, 0 } }, { dtype = "int64" }), ms.rand(1, 4))
      local noise = ms.empty(4, 6)
      init.normal_(noise:t())                                         -- not contiguous: drawn into a buffer
      local l = ((a + noise:t()) * ms.rand(6, 4)):pow(2):sum()
      l:backward()
      ms.nn.utils.clip_grad_norm_({ w, v }, 0.5)
      optimizer:step()
      optimizer:zero_grad()
      return l
    end)
    out[step] = loss:item()
  end
  out[3], out[4] = w, v
  for _, p in ipairs { w, v } do
    local state = optimizer:state_of(p)
    out[#out + 1], out[#out + 2] = state.step, state.momentum_buffer
  end
  return out
end

-- A sharded training with dropout, saved after two steps and loaded into a second model, which runs a third step.
function scenarios.training(ms, rank, folder)
  local nn, fsdp = ms.nn, ms.fsdp
  local function make()
    ms.manual_seed(3)
    local model = nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.3), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2),
      nn.Linear(16, 11))
    fsdp.fully_shard(model[3])
    fsdp.fully_shard(model)
    return model, ms.optim.AdamW(model:parameters(), { lr = 0.01 })
  end
  local out = {}
  local function train(model, optimizer, steps)
    for _ = 1, steps do
      ms.scope(function()
        local ids = ms.randint(0, 11, { 7 })
        local loss = nn.F.cross_entropy(model(ids), ids)
        loss:backward()
        nn.utils.clip_grad_norm_(model:parameters(), 1)
        optimizer:step()
        optimizer:zero_grad()
        out[#out + 1] = loss:item()
      end)
    end
  end
  local model, optimizer = make()
  ms.manual_seed(100 + rank)
  train(model, optimizer, 2)
  fsdp.save(folder .. "/checkpoint", model, optimizer)
  local other, its_optimizer = make()
  fsdp.load(folder .. "/checkpoint", other, its_optimizer)
  ms.manual_seed(200 + rank)
  train(other, its_optimizer, 1)
  for _, p in ipairs(other:parameters()) do
    out[#out + 1] = p:to_local()
    out[#out + 1] = its_optimizer:state_of(p).step
  end
  return out
end

-- The collectives of training, and a message from the first rank to the last, with few elements and with many.
function scenarios.collectives(ms, rank, _, world)
  local dist, out = ms.dist, {}
  for _, n in ipairs { 6, 3000 } do
    local mine = ms.arange(n * world):float() * (rank + 1)
    local sum, part, all = mine:clone(), ms.empty(n), ms.empty(n * world)
    dist.all_reduce(sum)
    dist.reduce_scatter(part, mine)
    dist.all_gather(all, part)
    dist.broadcast(part, { src = world - 1 })
    local half = mine:to "bfloat16"
    dist.all_reduce(half, { op = "avg" })
    for _, t in ipairs { sum, part, all, half } do out[#out + 1] = t end
    if rank == 0 then dist.send(all, world - 1) end
    if rank == world - 1 then
      local got = ms.empty(n * world)
      dist.recv(got, 0)
      out[#out + 1] = got
    end
    dist.barrier()
  end
  return out
end

--- Builds fail_malloc.c in the folder; returns the library for LD_PRELOAD.
---@param folder string
function starved.shim(folder)
  local process = require "spec.support.process"
  local shim = folder .. "/fail_malloc.so"
  if os.execute(("cc -O1 -shared -fPIC -o %s %s/spec/support/fail_malloc.c"):format(shim, process.root)) ~= 0 then
    error("cannot build " .. shim, 2)
  end
  return shim
end

--- Runs a job of starve_job.lua. Returns the number of outcomes of each kind, and the lines about wrong ones.
---@param n integer  ranks; 0: one process
---@param args any[]  scenario, "malloc" or "pool", mode, and the mode's two numbers
---@param opts? table  env, timeout; nodes: a pair of spec/support/nodes.lua with n ranks on each
---@return table<string, integer> counts, string[] wrong
function starved.job(n, args, opts)
  local process, ranks = require "spec.support.process", require "spec.support.ranks"
  opts = opts or {}
  local folder, root = process.temp_folder(), process.root
  local shim = starved.shim(folder)
  local env = { OMP_NUM_THREADS = "1", MOONSHARD_TIMEOUT = "20",
    LUA_PATH = ("@/lua/?.lua;@/lua/?/init.lua;@/?.lua;;"):gsub("@", root) }
  for k, v in pairs(opts.env or {}) do env[k] = v end
  if n == 0 or opts.nodes then env.LD_PRELOAD = shim end
  local script = root .. "/spec/support/starve_job.lua"
  local given = { env = env, timeout = opts.timeout, args = { args[1], args[2], folder, args[3], args[4], args[5] },
    mpirun = { "-x", "LD_PRELOAD=" .. shim } }             -- only the ranks preload it, not mpirun
  local job = opts.nodes and opts.nodes:run(n, script, given) or ranks.run(n, script, given)
  local counts, wrong = { same = 0, error = 0 }, {}
  for line in process.read(folder .. "/outcomes"):gmatch "[^\n]+" do
    local outcome = line:match "^%d+\t%d+\t([^\t]*)\t"
    if outcome then
      counts[outcome] = (counts[outcome] or 0) + 1
      if outcome ~= "same" and outcome ~= "error" then wrong[#wrong + 1] = line end
    end
  end
  if job.code ~= 0 or job.timed_out then
    wrong[#wrong + 1] = ("the job ended with status %s: %s"):format(job.code, job.stderr)
  end
  process.remove_folder(folder)
  return counts, wrong
end

--- The bits of a result as a text.
function starved.bits(list)
  local words = {}
  for k, x in ipairs(list) do
    if type(x) == "table" then
      local numbers = x:detach():reshape(-1):double():tolist()
      for i, v in ipairs(numbers) do numbers[i] = ("%.17g"):format(v) end
      words[k] = table.concat(numbers, " ")
    else
      words[k] = type(x) == "number" and ("%.17g"):format(x) or tostring(x)
    end
  end
  return table.concat(words, "\n")
end

return starved
