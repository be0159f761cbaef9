-- SPDX-License-Identifier: MIT
--- Two nodes that share only a network: two network namespaces of this machine (spec/support/nodes.lua). Unlike
--- simulated nodes, which communicate through MPI's shared memory, these use TCP, and each node has its own control
--- memory, host name and process ids.
local nodes = require "spec.support.nodes"
local missing = nodes.missing()

describe("two nodes that share a network only", function()
  local pair
  setup(function() if not missing then pair = nodes.open() end end)
  teardown(function() if pair then pair:close() end end)

  -- Runs a script in which every rank prints a line "RANK:WORDS". Returns the words by rank, and the job.
  local function lines(n, script, opts)
    local job = pair:run(n, script, opts)
    assert.are.equal(0, job.code, job.stderr .. job.stdout)
    local found = {}
    for rank, words in job.stdout:gmatch "(%d+):([^\n]*)\n" do found[tonumber(rank)] = words end
    for rank = 0, 2 * n - 1 do
      assert.is_truthy(found[rank], ("rank %d said nothing: %s"):format(rank, job.stdout .. job.stderr))
    end
    return found, job
  end
  local function on_nodes(name, body)
    it(name, function()
      if missing then return pending(missing) end
      body()
    end)
  end

  for n = 1, 2 do
    on_nodes(("give the bits of one node, %d rank%s on each"):format(n, n > 1 and "s" or ""), function()
      -- Tensors of one and of several slices and messages, with sizes that the ranks do not divide evenly, in dtypes
      -- with and without rounding.
      local script = [[
        local ms = require "moonshard"
        local dist = ms.dist
        local rank, world = dist.rank(), dist.world_size()
        local words = {}
        local function sum(t)
          local h = 0
          for k, v in ipairs(t:double():tolist()) do h = (h * 31 + v * 1024 + k) % 2147483647 end
          words[#words + 1] = ("%.17g"):format(h)
        end
        for _, n in ipairs { 5, 150001 } do
          for _, dtype in ipairs { "float32", "bfloat16", "int64" } do
            for _, op in ipairs { "sum", dtype == "bfloat16" and "avg" or "max" } do
              ms.manual_seed(n + rank)
              local whole = (ms.randn(n * world) * 100):to(dtype)
              local part, all, copy = ms.empty(n, { dtype = dtype }), ms.empty(n * world, { dtype = dtype }),
                whole:clone()
              dist.all_reduce(copy, { op = op })
              sum(copy)
              dist.reduce_scatter(part, whole, { op = op })
              dist.all_gather(all, part)
              assert(all:equal(copy))
              dist.reduce(whole, { dst = world - 1, op = op })
              if rank == world - 1 then assert(whole:equal(copy)) end
              dist.broadcast(all, { src = 1 })
              assert(all:equal(copy))
            end
          end
        end
        local pieces = ms.arange(world * 3):float() + rank
        local turned = ms.empty(world * 3)
        dist.all_to_all(turned, pieces)
        sum(turned)
        if rank == 0 then dist.send(pieces, world - 1) end
        if rank == world - 1 then dist.recv(pieces, 0) end
        sum(pieces)
        for k, v in ipairs(dist.all_gather_object { rank, ("x"):rep(2000 * rank) }) do
          assert(v[1] == k - 1 and #v[2] == 2000 * v[1])
        end
        io.write(("%d:%s\n"):format(rank, table.concat(words, " ")))
      ]]
      local ranks = require "spec.support.ranks"
      local here = ranks.run(2 * n, script)
      assert.are.equal(0, here.code, here.stderr)
      local want = {}
      for rank, words in here.stdout:gmatch "(%d+):([^\n]*)\n" do want[tonumber(rank)] = words end
      assert.same(want, (lines(n, script)))
    end)
  end

  on_nodes("get an error of a rank, whichever node it is on, without waiting for the limit", function()
    for culprit = 0, 3 do
      local found = lines(2, ([[
        local ms = require "moonshard"
        local rank = ms.dist.rank()
        local net = ms.nn.Linear(4, 4)
        ms.fsdp.fully_shard(net)
        net:register_forward_pre_hook(function() if rank == %d then error("a hook fails", 0) end end)
        local t0 = ms.time()
        local ok, message = pcall(function() net(ms.ones(2, 4)) ms.dist.barrier() end)
        local seconds = ms.time() - t0
        ms.dist.recover()
        local t = ms.ones(3) * rank
        ms.dist.all_reduce(t)
        io.write(("%%d:%%s %%s %%g %%s\n"):format(rank, ok, seconds < 10, t:sum():item(), (tostring(message):gsub("\n.*", ""))))
      ]]):format(culprit), { env = { MOONSHARD_TIMEOUT = "30" } })
      for rank = 0, 3 do
        assert.matches("^false true 18 ", found[rank])
        assert.matches(rank == culprit and "a hook fails" or ("rank %d failed: .*a hook fails"):format(culprit),
          found[rank])
      end
    end
  end)

  on_nodes("name the requests of both when they ask for different things", function()
    local found = lines(1, [[
      local ms = require "moonshard"
      local rank = ms.dist.rank()
      local ok, message = pcall(ms.dist.all_reduce, ms.ones(rank == 0 and 3 or 4000))
      ms.dist.recover()
      local t = ms.ones(5)
      ms.dist.all_reduce(t)
      io.write(("%d:%s %g %s\n"):format(rank, ok, t:sum():item(), (message:gsub("\n.*", ""))))
    ]])
    for rank = 0, 1 do
      assert.matches("^false 10 .*rank 0: all_reduce of 3 float32.*rank 1: all_reduce of 4000 float32", found[rank])
    end
  end)

  on_nodes("end if a rank dies, or never arrives", function()
    for _, way in ipairs { "killed", "absent" } do
      local job = pair:run(1, ([[
        local ms = require "moonshard"
        local rank = ms.dist.rank()
        ms.dist.barrier()
        if rank == 1 then
          if %q == "killed" then require("ffi").cdef "int raise(int);" require("ffi").C.raise(9) end
          local t0 = ms.time()
          while ms.time() - t0 < 30 do end
        end
        ms.dist.all_reduce(ms.ones(3))
      ]]):format(way), { env = { MOONSHARD_TIMEOUT = "2" }, timeout = 60 })
      assert.is_false(job.timed_out)
      assert.are_not.equal(0, job.code)
      assert.is_true(job.seconds < 25, job.seconds)
      if way == "absent" then assert.matches("rank 1 has not arrived %(it is on another node%)", job.stderr) end
    end
  end)
end)
