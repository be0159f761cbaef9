-- SPDX-License-Identifier: MIT
--- Signals to a whole job: requests for a checkpoint, and ends.
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"
local training = require "spec.support.training"

local names = { SIGINT = 2, SIGUSR2 = 12, SIGTERM = 15 }
local root, patience = process.root, process.patience

-- Starts a command, waits until it has printed `ready`, and sends it the signal. Returns its status, the seconds from
-- the signal to its end, and what it printed.
local function send(words, signal, ready)
  local folder = process.temp_folder()
  local out, err = folder .. "/out", folder .. "/err"
  local child = process.start(words, { stdout = out, stderr = err, env = process.mpirun_env {
    LUA_PATH = ("@/lua/?.lua;@/lua/?/init.lua;@/?.lua;;"):gsub("@", root) } })
  local deadline = process.now() + 60 * patience
  while not process.read(out):find(ready) and process.now() < deadline and not child:poll() do process.sleep(0.005) end
  process.kill(child.pid, names[signal])
  local sent = process.now()
  local code = child:wait(60) or child:stop()
  local r = { code = code, seconds = process.now() - sent, stdout = process.read(out), stderr = process.read(err) }
  process.remove_folder(folder)
  return r
end

describe("a training run #mpi", function()
  local folder
  setup(function() folder = training.begin() end)
  teardown(function() process.remove_folder(folder) end)

  -- mpirun's own status is 1 whatever its ranks do. It kills them after twice the given time.
  local mpirun = { "mpirun", "-n", "2", "--mca", "odls_base_sigkill_timeout", "30", "luajit", root .. "/scripts/train.lua" }
  for k, case in ipairs {
    { "luajit", 0, "SIGTERM", 75, { "luajit", root .. "/scripts/train.lua" } },
    { "scripts/train", 2, "SIGTERM", 75, { root .. "/scripts/train", "--no-install", "--ranks", "2" } },
    { "mpirun", 2, "SIGTERM", 1, mpirun },
    { "mpirun", 2, "SIGINT", 1, mpirun },
  } do
    local what, n, signal, status, words = unpack(case)
    it(("under %s ends on %s with a checkpoint, and continues to the bit"):format(what, signal), function()
      local name = "run" .. k
      local options = { "--steps", "100000", "--data", folder .. "/text", "--out", folder .. "/" .. name }
      local all = { unpack(words) }
      for _, list in ipairs { training.TINY, options } do
        for _, word in ipairs(list) do all[#all + 1] = tostring(word) end
      end
      local r = send(all, signal, "step +1/")
      assert.are.equal(status, r.code, r.stderr)
      local step = tonumber(r.stdout:match "step (%d+): checkpoint: [^\n]*\n$")
      assert.is_number(step, r.stdout .. r.stderr)
      -- mpirun itself would end 30 s after the signal.
      assert.is_true(r.seconds < 15 * patience, r.seconds)
      local last = step + 2
      training.ok(training.train(n, name .. "-resumed", { "--resume", folder .. "/" .. name, "--stop", last }))
      training.ok(training.train(n, name .. "-undisturbed", { "--steps", 100000, "--stop", last }))
      assert.is_true(training.checkpoint(name .. "-undisturbed", last) == training.checkpoint(name .. "-resumed", last))
    end)
  end
end)

describe("a job that catches no signals #mpi", function()
  local from_mpirun = "SIGTERM ended this job %(sent by mpirun, which was terminated or interrupted%)"
  local usr2 = "SIGUSR2 ended this job %(sent by mpirun, which received it or SIGTERM%)"
  for signal, text in pairs { SIGTERM = from_mpirun, SIGINT = from_mpirun, SIGUSR2 = usr2 } do
    it(("says once which signal ended it, after %s"):format(signal), function()
      local folder = process.temp_folder()
      process.write(folder .. "/script.lua", [[
        local ms = require "moonshard"
        ms.dist.barrier()
        if ms.dist.rank() == 0 then print "ready" io.flush() end
        while true do ms.dist.barrier() end
      ]])
      local r = send({ "mpirun", "-n", "2", "luajit", folder .. "/script.lua" }, signal, "ready")
      process.remove_folder(folder)
      assert.are_not.equal(0, r.code)
      local _, times = r.stderr:gsub("rank 0: " .. text .. "\n", "")
      assert.are.equal(1, times, r.stderr)
      assert.is_nil(r.stderr:find "rank 1:")
    end)
  end
end)

describe("a rank that is alone on its node #mpi #timed", function()
  local function run(peer, victim)
    return ranks.run(2, ([[
      local ms = require "moonshard"
      local dist = ms.dist
      local ffi = require "ffi"
      ffi.cdef "int kill(int, int); int getpid(void);"
      local t = ms.ones(1000)
      dist.all_reduce(t)
      if dist.rank() == %d then
        io.write(("@kill %%.6f\n"):format(ms.time()))
        io.flush()
        ffi.C.kill(ffi.C.getpid(), 9)
      end
      %s
    ]]):format(victim, peer), { env = { MOONSHARD_COMM_NODES = "2" } })
  end

  for victim = 0, 1 do
    for what, peer in pairs { computes = "while true do end", ["waits for it"] = "dist.all_reduce(t)" } do
      it(("is named when it is killed while its peer %s: rank %d"):format(what, victim), function()
        process.within(1, function()
          local job = run(peer, victim)
          assert.are.equal(128 + 9, job.code)
          local named = job.stderr:find(("rank %d: .-rank %d %%(process %%d+ on %%S+%%) died; if by SIGKILL, memory may have run out\n")
            :format(1 - victim, victim))
          return named and job.ended - tonumber(job.stdout:match "@kill (%S+)") or math.huge, job.stderr
        end)
      end)
    end
  end

  it("that raises an error is the only one to print it, and its peer ends", function()
    process.within(1, function()
      local job = ranks.run(2, [[
        local ms = require "moonshard"
        ms.dist.barrier()
        if ms.dist.rank() == 1 then
          io.write(("@error %.6f\n"):format(ms.time()))
          io.flush()
          error "boom"
        end
        while true do end
      ]], { env = { MOONSHARD_COMM_NODES = "2" } })
      assert.are.equal(1, job.code)
      assert.matches("^rank 1: [^\n]*boom\n", job.stderr)
      assert.is_nil(job.stderr:find "died")
      return job.ended - tonumber(job.stdout:match "@error (%S+)")
    end)
  end)
end)
