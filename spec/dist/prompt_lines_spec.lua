-- SPDX-License-Identifier: MIT
--- What the engine does for a prompt over ranks: lines that end on some ranks only, a new start after a failed line.
local ranks = require "spec.support.ranks"

ranks.describe(3, "lines of a prompt", function(rank)
  local ms, lib
  local ended = 1
  lazy_setup(function()
    ms = require "moonshard"
    lib = require("moonshard.core.ffi").lib
    ms.dist.init()
  end)

  -- MPI's own barrier: it stands for the process that waits for all ranks of a prompt.
  local function meet() lib.ms_dist_mpi_own(3, nil, nil, 0) end

  -- Runs fn as a line, and afterwards recovers as the prompt does.
  local function line(fn)
    lib.ms_dist_set_lines(ended)
    local ok, message = pcall(fn)
    if not ok then lib.ms_dist_failed(tostring(message)) end
    ended = ended + 1
    lib.ms_dist_set_lines(ended)
    meet()
    ms.dist.recover()
    meet()
    return ok, message
  end

  local function sum_is_right()
    local t = ms.ones(3) * (rank + 1)
    ms.dist.all_reduce(t)
    assert.are.same({ 6, 6, 6 }, t:tolist())
  end

  it("fail a collective that a peer has not called when its line ends", function()
    for _ = 1, 20 do
      local ok, message = line(function()
        if rank ~= 1 then ms.dist.barrier() end
      end)
      assert.are.equal(rank == 1, ok)
      if not ok then assert.matches("barrier: collective #.*: rank 1 has ended its line at the prompt$", message) end
      assert.is_true(line(sum_is_right))
    end
  end)

  it("match collectives again after an error, in all groups", function()
    local pair = ms.dist.new_group { 0, 2 }
    for k = 1, 10 do
      local ok = line(function()
        if rank == k % 3 then error "a wheel came off" end
        if rank ~= 1 then ms.dist.all_reduce(ms.ones(2), { group = pair }) end
        ms.dist.barrier()
      end)
      assert.is_false(ok)
      assert.is_true(line(function()
        local t = ms.ones(1)
        if rank ~= 1 then
          ms.dist.all_reduce(t, { group = pair })
          assert.are.equal(2, t:item())
        end
        if rank == 0 then ms.dist.send(t, 2) elseif rank == 2 then ms.dist.recv(t, 0) end
        sum_is_right()
      end))
    end
  end)

  it("end collectives in the background", function()
    local work
    assert.is_true(line(function()
      if rank == 0 then work = ms.dist.all_reduce(ms.ones(4), { async = true }) end
    end))
    if rank == 0 then assert.is_false(pcall(work.wait, work)) end
    ms.dist.recover()
    assert.is_true(line(sum_is_right))
  end)
end)
