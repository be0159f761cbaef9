-- SPDX-License-Identifier: MIT
--- Every path between ranks gives the same bits.
local ranks = require "spec.support.ranks"

-- Prints hashes of what each rank gets in collectives of random numbers, by dtype and size.
local bits = [[
  local ms = require "moonshard"
  local dist = ms.dist
  local rank, world = dist.rank(), dist.world_size()
  local ffi = require "ffi"
  local bit = require "bit"
  local function hash(t)
    local p, h = ffi.cast("const uint16_t *", ffi.cast("intptr_t", t:data_ptr())), 0
    for i = 0, t:numel() * ({ float32 = 2, float64 = 4, bfloat16 = 1, float16 = 1 })[t.dtype] - 1 do h = bit.bxor(bit.rol(h, 5), p[i]) end
    return h
  end
  ms.manual_seed(5 + rank)
  for _, dtype in ipairs { "float32", "float64", "bfloat16", "float16" } do
    for _, n in ipairs { 7, 130, 5000, 300001 } do
      local t = ms.randn(n, { dtype = dtype })
      local whole, block = ms.randn(n * world, { dtype = dtype }), ms.empty(n, { dtype = dtype })
      dist.all_reduce(t)
      dist.reduce_scatter(block, whole, { op = "avg" })
      local all = ms.empty(n * world, { dtype = dtype })
      dist.all_gather(all, block)
      dist.reduce(block, { dst = world - 1, op = "prod" })
      local moved = ms.empty(n * world, { dtype = dtype })
      dist.all_to_all(moved, all)
      dist.broadcast(block, { src = 1 })
      local sums = dist.all_gather_object { hash(t), hash(all), hash(moved), hash(block) }
      if rank == 0 then
        for r = 1, world do print(dtype, n, r, unpack(sums[r])) end
      end
    end
  end
]]

describe("the same bits #mpi", function()
  local want = {}
  for _, world in ipairs { 2, 3, 4 } do
    for _, path in ipairs {
      { "in place", {} },
      { "staged", { MOONSHARD_COMM_MAP = "refuse" } },
      { "staged through a file", { MOONSHARD_COMM_MAP = "refuse-all" } },
      { "over two nodes", { MOONSHARD_COMM_NODES = "2" } },
      { "over two nodes, to which ranks belong in turn", { MOONSHARD_COMM_NODES = "0,1,0,1" } },
    } do
      it(("on %d ranks, %s"):format(world, path[1]), function()
        local job = ranks.run(world, bits, { env = path[2] })
        assert.are.equal(0, job.code, job.stderr)
        want[world] = want[world] or job.stdout
        assert.are.equal(16 * world, select(2, job.stdout:gsub("[^\n]+", "")))
        assert.are.equal(want[world], job.stdout)
        if path[2].MOONSHARD_COMM_MAP then
          -- The warning is printed once.
          assert.are.equal(1, select(2, job.stderr:gsub(
            "tensors are staged, because ranks cannot map each other's memory here", "")))
        else
          assert.are.equal("", job.stderr)
        end
      end)
    end
  end
end)
