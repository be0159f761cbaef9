-- SPDX-License-Identifier: MIT
--- Out of memory at each allocation in turn of three sharded training steps, on one of 2 ranks: the error names
--- operator and sizes, peers get it, nothing leaks, and training continues as if it had not happened.
local ranks = require "spec.support.ranks"

local make, train = unpack(require "spec.support.small_training")
local collected = require "spec.support.collected"

-- Frees the garbage of dead graphs and modules and counts tensors. If the count is not as expected, also frees compiled
-- code and counts again.
local function live(ms, tensors)
  require("moonshard.autograd").drop_dead()
  for _ = 1, 3 do collectgarbage() end
  if ms.memory_stats().live_tensors ~= tensors then collected() end
  local m = ms.memory_stats()
  return m.allocated, m.live_tensors
end

ranks.describe(2, "an allocation that fails", { timeout = 600 }, function()
  for culprit = 0, 1 do
    it(("on rank %d, wherever it is in training"):format(culprit), function(rank)
      local lib = require("moonshard.core.ffi").lib
      local want = {}
      do
        local model, optimizer, ms = make()
        train(model, optimizer, ms, rank, want)
      end
      local ms = require "moonshard"
      ms.dist.all_gather_object(true)             -- memory that dist keeps, before bytes are counted
      local bytes, tensors = live(ms)
      local n, finished, seen = 0, false, {}
      while not finished do
        n = n + 1
        local got, ok, message = {}                 -- luacheck: no unused
        do
          local model, optimizer = make()
          ms.dist.barrier()
          lib.ms_fail_allocation(rank == culprit and -n or 0)
          ok, message = pcall(train, model, optimizer, ms, rank, got)
          lib.ms_fail_allocation(0)
          ms.dist.recover()
          if not ok then
            message = tostring(message)
            if rank == culprit then
              local op, size = message:match "^[^\n]-:%d+: ([^\n]-): no memory for (%d+) bytes on cpu %(failure requested by ms_fail_allocation; %d+ bytes allocated"
              assert.is_truthy(op, message)
              assert.is_true(#op > 0 and tonumber(size) >= 0, message)
              seen[op:match "[%w_]+$" or op] = true
            elseif not message:find("rank " .. culprit .. " failed: .*no memory for %d+ bytes") then
              -- The error was outside of forward and backward.
              assert.matches(("rank %d waits for rank %d in dist.recover"):format(culprit, rank), message)
            end
            assert.equal(0, require("moonshard.core.ffi").state.run_depth)
            for _, m in ipairs(model:modules()) do
              if m:isa(ms.fsdp.FSDPModule) then m:reshard() end     -- refused while the unit is in use
            end
          end
          -- The same model and optimizer can continue.
          assert.is_true((pcall(train, model, optimizer, ms, rank, {})), n)
        end
        finished = not ms.dist.all_gather_object(ok == false)[culprit + 1]
        if finished then assert.same(want, got) end
        -- A leak stays, so that counting after some of the failures finds those of all; a count collects all garbage.
        if n % 8 == 0 or finished then
          local now, count = live(ms, tensors)
          assert.equal(bytes, now, ("bytes after allocation %d or one of 7 before it failed: %s"):format(n, tostring(message)))
          assert.equal(tensors, count, ("tensors after allocation %d or one of 7 before it failed: %s"):format(n, tostring(message)))
        end
        if n % 20 == 0 then
          local again = {}
          local model, optimizer = make()
          train(model, optimizer, ms, rank, again)
          assert.same(want, again)
        end
      end
      assert.is_true(n > 60, n)
      if rank == culprit then
        local names = {}
        for name in pairs(seen) do names[#names + 1] = name end
        table.sort(names)
        assert.is_true(#names > 10, table.concat(names, " "))
      end
    end)
  end
end)

-- Failures of malloc in the engine: in the first steps of a process, in which every list grows. One process loads the
-- engine; the trainings are forks of it.
describe("malloc that fails", function()
  local process = require "spec.support.process"
  local script = [[
    local ffi = require "ffi"
    ffi.cdef "long fail_malloc(long); int fork(void); int waitpid(int, int *, int); void _exit(int);"
    local ms = require "moonshard"                      -- the shim must load after the engine
    local make, train = unpack(require "spec.support.small_training")
    local most, status = 1e9, ffi.new "int[1]"
    -- Loads their modules here, once. Compiling would take longer than these few steps do.
    local _ = ms.nn.utils.clip_grad_norm_, ms.nn.F.cross_entropy, ms.fsdp.fully_shard, ms.optim.AdamW
    jit.off()

    -- A training in which call n and all after it fail; 0: none. Prints n (0: the number of calls), whether it
    -- succeeded, the last loss of a training after it, and the error.
    local function try(n)
      ffi.C.fail_malloc(-(n == 0 and most or n))
      local ok, message = pcall(function()
        local model, optimizer = make()
        train(model, optimizer, ms, 0, {})
      end)
      local left = tonumber(ffi.C.fail_malloc(0))
      local losses = {}
      local model, optimizer = make()
      train(model, optimizer, ms, 0, losses)
      print(n == 0 and most - left or n, ok, ("%.9g"):format(losses[3]), (tostring(message):match "^[^\n]*"))
    end

    for n = tonumber(arg[1]), tonumber(arg[2]) do
      io.stdout:flush()
      local pid = ffi.C.fork()
      if pid == 0 then
        local ok, message = pcall(try, n)
        if not ok then io.stderr:write(("call %d: %s\n"):format(n, tostring(message))) end
        io.stdout:flush()
        ffi.C._exit(ok and 0 or 1)
      end
      ffi.C.waitpid(pid, status, 0)
      if status[0] ~= 0 then error(("call %d ended with status %d"):format(n, status[0]), 0) end
    end
  ]]

  it("raises an error that names the operation and the bytes, at every call in turn, and training continues", function()
    if os.getenv "LD_PRELOAD" then return pending "another allocator is preloaded" end
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    local shim = require("spec.support.starved").shim(folder)
    -- What the trainings from `first` to `last` print: { n, ok, loss, message } each.
    local function run(first, last)
      local job = ranks.run(0, script, { args = { first, last }, env = { LD_PRELOAD = shim, OMP_NUM_THREADS = "1" } })
      assert.are.equal(0, job.code, job.stderr)
      local list = {}
      for line in job.stdout:gmatch "[^\n]+" do
        local n, ok, loss, message = line:match "^(%d+)\t(%a+)\t(%S+)\t(.*)$"
        assert.is_truthy(n, line)
        list[#list + 1] = { tonumber(n), ok == "true", loss, message }
      end
      assert.are.equal(last - first + 1, #list)
      return list
    end
    local total, fine, want = unpack(run(0, 0)[1])
    assert.is_true(fine and total > 100, total)
    local failed, seen = 0, {}
    for k, outcome in ipairs(run(1, total)) do
      local n, ok, loss, message = unpack(outcome)
      assert.are.equal(k, n)
      assert.are.equal(want, loss, n)
      if not ok then
        failed = failed + 1
        local op, size = message:match "^[^:]+:%d+: ([%a_][%w_%. :]-): no memory for (%d+) bytes"
        assert.is_truthy(op, ("call %d: %s"):format(n, message))
        assert.is_true(tonumber(size) > 0 and tonumber(size) < 2 ^ 30, message)
        seen[op:match "^[%w_]+"] = true
      end
    end
    assert.is_true(seen.fsdp and seen.autograd and seen.backward and seen.optimizer and seen["clip_grad_norm_"])
    assert.is_true(failed > total / 2, failed)          -- without memory for a prefetch a step succeeds
  end)
end)
