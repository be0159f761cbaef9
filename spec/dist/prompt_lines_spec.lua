-- SPDX-License-Identifier: MIT
--- What the engine does for a prompt over ranks: lines that end on some ranks only, a new start after a failed line.
local ffi = require "ffi"
local ranks = require "spec.support.ranks"

ranks.describe(3, "lines of a prompt", function(rank)
  local ms, lib, errors
  local ended = 1
  lazy_setup(function()
    ms = require "moonshard"
    lib = require("moonshard.core.ffi").lib
    errors = require "moonshard.core.errors"
    ms.dist.init()
  end)

  -- MPI's own barrier: it stands for the process that waits for all ranks of a prompt.
  local function meet() lib.ms_dist_mpi_own(3, nil, nil, 0) end

  -- The number of published errors on which the ranks agree, as the prompt's process does for them: a collective in the
  -- background may publish one while they read it.
  local one, all = ffi.new "float[1]", ffi.new "float[3]"
  local function published()
    one[0] = lib.ms_dist_published()
    lib.ms_dist_mpi_own(0, all, one, 3)
    return math.max(all[0], all[1], all[2])
  end

  -- Runs fn as a line, and afterwards settles as the prompt does.
  local function line(fn)
    lib.ms_dist_set_lines(ended)
    local since = lib.ms_dist_errors()
    local ok, message = pcall(fn)
    if not ok then lib.ms_dist_publish_error(tostring(message), since) end
    ended = ended + 1
    lib.ms_dist_set_lines(ended)
    meet()
    errors.check(lib.ms_dist_settle(published() + 1))
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
    assert.is_true(line(sum_is_right))
  end)

  it("are settled with the current number of errors only", function()
    assert.is_false(pcall(errors.check, lib.ms_dist_settle(0)))
    assert.matches("ms_dist_settle: number is 0, expected 1 %+ ms_dist_published%(%)", errors.last())
  end)
end)
