-- SPDX-License-Identifier: MIT
--- A rank that is killed while a captured step is recorded, or while its peers repeat theirs: the job ends at once and
--- names it.
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"

local SCRIPT = [[
  local ms = require "moonshard"
  local dist, nn = ms.dist, ms.nn
  local ffi = require "ffi"
  ffi.cdef "int kill(int, int); int getpid(void);"
  dist.init { timeout = 20 }
  local rank, call = dist.rank(), 0
  local model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)):to "%s"
  for k = 1, 2 do ms.fsdp.fully_shard(model[k]) end
  ms.fsdp.fully_shard(model)
  local function die()
    print(("killed at %%.6f"):format(ms.time()))
    io.flush()
    ffi.C.kill(ffi.C.getpid(), 9)
  end
  local step = ms.capture(function(x)
    local loss = model(x):sum()
    if rank == 1 and call == 2 and "%s" == "recording" then die() end
    loss:backward()
    return loss
  end)
  for k = 1, 5 do
    call = k
    if rank == 1 and k == 4 then die() end
    step(ms.ones(2, 3, { device = model[1].weight.device }))
  end
]]

for _, case in ipairs { { 2, "cpu" }, { 3, "cpu" }, { 2, "cuda" } } do
  local world, device = case[1], case[2]
  for _, what in ipairs { "recording", "repetitions" } do
    describe(("a rank that is killed in the %s of a captured step, %d ranks #%s"):format(what, world, device), function()
      it("ends the job, which names it", function()
        process.within(1.1, function()
          local done = ranks.run(world, SCRIPT:format(device, what), { timeout = 60 * process.patience,
            env = { MOONSHARD_CUDA = device == "cuda" and "emulated" or "off" } })
          assert.are_not.equal(0, done.code)
          assert.is_false(done.timed_out)
          local at = tonumber(done.stdout:match "killed at (%S+)")
          assert.is_not_nil(at, done.stdout .. done.stderr)
          assert.matches("rank 1 %(process %d+%) died", done.stderr)
          return done.ended - at, done.stderr
        end)
      end)
    end)
  end
end
