-- SPDX-License-Identifier: MIT
--- A rank that is killed while GPUs of the node wait for its part of a collective: the job ends at once and names it.
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"

-- Rank 1 queues its part behind a pause of its GPU's stream, so that it is killed while the peers' streams wait for it.
local SCRIPT = [[
  local ms = require "moonshard"
  local dist, nn, lib = ms.dist, ms.nn, require("moonshard.core.ffi").lib
  local ffi = require "ffi"
  ffi.cdef "int kill(int, int); int getpid(void);"
  dist.init { timeout = 20 }
  local rank, world = dist.rank(), dist.world_size()
  local function cuda(n) return ms.ones(n, { device = "cuda" }) end
  dist.all_reduce(cuda(5000))                            -- peers have mapped each other's memory
  local model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)):to "cuda"
  ms.fsdp.fully_shard(model)
  local x = cuda(6):reshape(2, 3)
  model(x):sum():backward()
  ms.cuda.synchronize()
  dist.barrier()
  local queue = {
    all_gather = function()
      local out = ms.zeros(5000 * world, { device = "cuda" })
      dist.all_gather(out, cuda(5000), { async = true })
      return out
    end,
    reduce_scatter = function()
      local out = ms.zeros(5000, { device = "cuda" })
      dist.reduce_scatter(out, cuda(5000 * world), { async = true })
      return out
    end,
    forward = function() return model(x) end,
    backward = function()
      model(x):sum():backward()
      return model[1].weight.grad:to_local()
    end,
  }
  if rank == 1 then lib.ms_dist_set_delay(-1, 15) end
  local out = queue["%s"]()
  if rank == 1 then
    local sum = out + 1                                 -- the collective has been queued; the GPU has not run it
    print(("killed at %%.6f"):format(ms.time()))
    io.flush()
    ffi.C.kill(ffi.C.getpid(), 9)
  end
  print("sum", out:sum():item())
]]

for _, world in ipairs { 2, 3 } do
  for _, what in ipairs { "all_gather", "reduce_scatter", "forward", "backward" } do
    describe(("a rank that is killed in %s on cuda, %d ranks #cuda"):format(what, world), function()
      it("ends the job, which names it", function()
        process.within(1.1, function()
          local done = ranks.run(world, SCRIPT:format(what), { timeout = 60 * process.patience,
            env = { MOONSHARD_CUDA = "emulated" } })
          assert.are_not.equal(0, done.code)
          assert.is_false(done.timed_out)
          local at = tonumber(done.stdout:match "killed at (%S+)")
          assert.is_not_nil(at, done.stdout .. done.stderr)
          assert.matches("rank 1 %(process %d+%) died", done.stderr)
          assert.not_matches("sum", done.stdout)
          return done.ended - at, done.stderr
        end)
      end)
    end)
  end
end
