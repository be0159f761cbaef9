-- SPDX-License-Identifier: MIT
--- A rank whose GPU never finishes its work: in a collective that stays on GPUs or that NCCL's stand-in moves, every
--- rank raises an error that names that rank, or ends, within the timeout.
local lfs = require "lfs"
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"

local LIMIT = 0.5                       -- times the patience

-- From step `hang` on, rank 1's compute stream runs nothing any more. A rank that gets an error writes how long the call
-- took, and the error.
local SCRIPT = [[
  local ms = require "moonshard"
  local dist, nn = ms.dist, ms.nn
  local table = require("spec.support.cuda_table")
  dist.init { backend = os.getenv "MOONSHARD_BACKEND" }
  local rank, world = dist.rank(), dist.world_size()
  local function cuda(n) return ms.ones(n, { device = "cuda" }) end
  local model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)):to "cuda"
  ms.fsdp.fully_shard(model[1])
  ms.fsdp.fully_shard(model)
  local optimizer = ms.optim.SGD(model:parameters(), { lr = 0.1 })
  local x = cuda(6):reshape(2, 3)
  local offloaded = ms.fsdp.fully_shard(nn.Linear(3, 5), { mesh = dist.init_device_mesh("cuda", { world }),
    offload_policy = ms.fsdp.CPUOffloadPolicy() })
  local function train(x)
    local loss = model(x):sum()
    loss:backward()
    optimizer:step()
    optimizer:zero_grad()
    return loss
  end
  local captured = ms.capture(train)
  local ffi = require "ffi"
  local memory = ffi.new "void *[1]"
  assert(table.open().host_alloc(2^20, memory) == 0)
  local pinned = ms.from_pointer(memory[0], { 2^18 })
  local calls = {
    all_gather = function()
      local out = ms.zeros(5000 * world, { device = "cuda" })
      dist.all_gather(out, cuda(5000))
      return out:sum():item()
    end,
    reduce_scatter = function()
      local out = ms.zeros(5000, { device = "cuda" })
      dist.reduce_scatter(out, cuda(5000 * world))
      return out:sum():item()
    end,
    all_reduce = function()
      local work = dist.all_reduce(cuda(70), { async = true })
      if work then work:wait() end
      ms.cuda.synchronize()
    end,
    broadcast = function() dist.broadcast(cuda(70), { src = 1 }) ms.cuda.synchronize() end,
    backward = function()
      model(x):sum():backward()
      return model[1].weight.grad:to_local():sum():item()
    end,
    capture = function() return captured(x):item() end,
    -- The next two wait for the GPU before memory goes back to the driver; the error is raised by the wait after them.
    empty_cache = function()
      local out = ms.zeros(5000 * world, { device = "cuda" })
      dist.all_gather(out, cuda(5000))
      ms.empty_cache()
      ms.cuda.synchronize()
    end,
    release = function()
      local step = ms.capture(train, { warmup = 0 })
      for _ = 1, 2 do step(x) end
      step:release()
      ms.cuda.synchronize()
    end,
    -- CUDA waits for a large copy from pinned memory that the script has allocated.
    upload = function()
      local out = ms.zeros(5000 * world, { device = "cuda" })
      dist.all_gather(out, cuda(5000))
      return pinned:to "cuda"
    end,
    offload = function()
      offloaded(x):sum():backward()
      return offloaded.weight.grad:to_local():sum():item()
    end,
  }
  local call = calls["%s"]
  for _ = 1, %d do call() end
  ms.cuda.synchronize()
  dist.barrier()
  local seconds = %g
  require "moonshard.core.ffi".lib.ms_dist_set_timeout(seconds)
  if rank == 1 then table.open().pause(tonumber(ms.cuda.current_device()), 0, 1e6) end
  local begun = ms.time()
  local ok, why = pcall(call)
  if ok and rank ~= 1 then ok, why = pcall(ms.cuda.synchronize) end
  if not ok then
    io.write(("@%%d %%.6f %%s\n"):format(rank, ms.time() - begun, (why:gsub("\n", " "))))
    io.flush()
    -- mpirun kills the other ranks when one ends with an error: on a busy machine before they have seen theirs.
    io.open(("%%s.%%d"):format(arg[0], rank), "w"):close()
    local function all_have()
      for r = 0, world - 1 do if not io.open(("%%s.%%d"):format(arg[0], r)) then return false end end
      return true
    end
    while not all_have() and ms.time() - begun < 2 * seconds do os.execute "sleep 0.02" end
    error(why, 0)
  end
  print "all done"
]]

-- warm: how often the ranks make the call before the GPU hangs (default: 3).
local function check(world, what, env, pattern, warm)
  it(("in %s%s, %d ranks"):format(warm == 0 and "the first " or "", what, world), function()
    if not lfs.attributes(process.build .. "/standin/libnccl_standin.so.2") then
      return pending "this build has no emulated GPU: there is no g++"
    end
    process.within(LIMIT + 0.3, function()
      local script = SCRIPT:format(what, warm or 3, LIMIT * process.patience)
      local done = ranks.run(world, script, { timeout = 60 * process.patience, env = env })
      assert.are_not.equal(0, done.code, done.stdout)
      assert.is_false(done.timed_out)
      local longest, raised = 0, 0
      for rank, seconds, text in done.stdout:gmatch "@(%d+) (%S+) ([^\n]*)" do
        assert.matches(pattern, text)
        longest = math.max(longest, tonumber(seconds))
        raised = raised + (rank ~= "1" and 1 or 0)
      end
      assert.is_true(raised > 0, done.stdout .. done.stderr)
      assert.not_matches("all done", done.stdout)
      return longest, done.stdout
    end)
  end)
end

local HANGS = "collective #%d+ of the world .*: %d%.%d s have passed and the GPU of rank 1 has not reached this collective"

describe("a rank whose GPU hangs is named on every rank #cuda #timed", function()
  for _, what in ipairs { "all_gather", "reduce_scatter", "all_reduce", "broadcast", "backward", "capture",
    "empty_cache", "release", "upload" } do
    check(2, what, { MOONSHARD_CUDA = "emulated" }, HANGS)
  end
  -- Nothing has been mapped yet.
  for _, what in ipairs { "all_gather", "backward" } do check(2, what, { MOONSHARD_CUDA = "emulated" }, HANGS, 0) end
  check(3, "all_gather", { MOONSHARD_CUDA = "emulated" }, HANGS)
  -- The host of that rank waits for its GPU before it comes to the collective.
  check(2, "offload", { MOONSHARD_CUDA = "emulated" },
    "collective #%d+ of the world .*: %d%.%d s have passed and rank 1 has not arrived")
end)

describe("over NCCL, a rank whose GPU hangs is named on every rank #cuda #timed", function()
  for _, what in ipairs { "all_gather", "all_reduce", "backward" } do
    check(2, what, { MOONSHARD_CUDA = "emulated", MOONSHARD_BACKEND = "nccl", MOONSHARD_CUDA_DEVICES = "2" }, HANGS)
  end
end)
