-- SPDX-License-Identifier: MIT
--- Collectives of tensors that stay on a GPU, between ranks of one node: they access each other's GPU memory, or
--- go through windows in CPU memory where they cannot map it. Both give the bits of the CPU.
local ranks = require "spec.support.ranks"

local load = require "spec.support.load"

-- Ways in which ranks reach each other's memory, and the environments that lead to them. Where a CUDA function is
-- named, its first call fails on every rank. `all`: with every dtype, on so many ranks; nvcc unrolls the loop over 4
-- others. The other ways lead to the same kernels or windows, so that one dtype on 3 ranks shows that they do.
local ways = {
  { "mapped memory", {}, all = { 2, 3, 6 } },
  { "mapped memory, blocks from chunks", { MOONSHARD_EMULATOR = "chunks" } },
  { "file descriptors, where the driver has no handles", { MOONSHARD_EMULATOR = "fail:cudaIpcGetMemHandle:1:1" } },
  { "file descriptors, blocks from chunks", { MOONSHARD_CUDA_SHARE = "fd", MOONSHARD_EMULATOR = "chunks" } },
  { "windows, where a rank cannot share its memory", { MOONSHARD_CUDA_SHARE = "staging" }, all = { 2, 3 } },
  { "windows, where a rank cannot map a peer's memory", { MOONSHARD_EMULATOR = "fail:cudaIpcOpenMemHandle:1:1" } },
  { "windows, where a rank cannot make events for its peers", { MOONSHARD_EMULATOR = "fail:cudaIpcGetEventHandle:1:1" } },
  { "windows, where a rank cannot open a peer's events", { MOONSHARD_EMULATOR = "fail:cudaIpcOpenEventHandle:1:1" } },
}

for _, way in ipairs(ways) do
  for _, world in ipairs(way.all or { 3 }) do
    ranks.describe(world, ("collectives on cuda through %s, %d ranks #cuda"):format(way[1], world), { env = way[2] }, function()
      --- fn(device) on both devices gives the same bits.
      local function both(name, fn)
        local a, b = fn "cpu", fn "cuda"
        assert.equal("cuda", b.device:match "^%l+", name)
        assert.is_true(b:to("cpu"):equal(a), name)
      end
      -- Values whose sums are rounded.
      local function values(rank, dtype, n, device)
        local ms = load()
        local t = ms.arange(1, n + 1, { dtype = "float32" }):mul(0.37 + rank):sin()
        if dtype == "bool" then return t:gt(0):to(device) end
        if dtype:find "int" then t = t * 100 end
        if dtype == "uint8" then t = t:abs() end
        return t:to(dtype):to(device)
      end

      for _, dtype in ipairs(way.all and { "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8",
        "int16", "int8", "bool" } or { "float32" }) do
        it("reduce in rank order: " .. dtype, function(rank)
          local ms, _, dist = load()
          local kinds = dtype:find "float" and { "sum", "avg", "max", "min", "prod" } or { "sum", "max", "min", "prod" }
          for _, kind in ipairs(kinds) do
            for _, n in ipairs { 1, 63, 5000 } do
              both(("all_reduce %s %d"):format(kind, n), function(device)
                local t = values(rank, dtype, n, device)
                dist.all_reduce(t, { op = kind })
                return t
              end)
              both(("reduce_scatter %s %d"):format(kind, n), function(device)
                local out = ms.zeros(n, { dtype = dtype, device = device })
                dist.reduce_scatter(out, values(rank, dtype, n * world, device), { op = kind })
                return out
              end)
              both(("reduce %s %d"):format(kind, n), function(device)
                local t = values(rank, dtype, n, device)
                dist.reduce(t, { dst = world - 1, op = kind })
                return rank == world - 1 and t or ms.zeros(1, { device = device })
              end)
            end
          end
        end)
      end

      it("move bytes as on the CPU", function(rank)
        local ms, _, dist = load()
        for _, n in ipairs { 1, 63, 40000, 300000 } do
          both("all_gather " .. n, function(device)
            local out = ms.zeros(n * world, { device = device })
            dist.all_gather(out, values(rank, "float32", n, device))
            return out
          end)
          both("broadcast " .. n, function(device)
            local t = values(rank, "float32", n, device)
            dist.broadcast(t, { src = 1 })
            return t
          end)
          both("all_to_all " .. n, function(device)
            local out = ms.zeros(n * world, { device = device })
            dist.all_to_all(out, values(rank, "float32", n * world, device))
            return out
          end)
          both("send " .. n, function(device)
            local t = values(rank, "float32", n, device)
            if rank == 0 then dist.send(t, 1)
            elseif rank == 1 then dist.recv(t, 0) end
            return t
          end)
        end
      end)

      it("accept a tensor of the CPU on one rank", function(rank)
        local ms, _, dist = load()
        for _, n in ipairs { 5, 40000 } do
          local t = values(rank, "float32", n, rank == 0 and "cpu" or "cuda")
          dist.all_reduce(t)
          local want = values(0, "float32", n, "cpu")
          for r = 1, world - 1 do want = want + values(r, "float32", n, "cpu") end
          assert.is_true(t:to("cpu"):equal(want), tostring(n))
          local out = ms.zeros(world * n, { device = t.device })
          dist.all_gather(out, values(rank, "float32", n, t.device))
          for r = 0, world - 1 do
            assert.is_true(out:narrow(1, r * n + 1, n):to("cpu"):equal(values(r, "float32", n, "cpu")), tostring(n))
          end
        end
      end)

      it("keep their order, also in the background and over groups", function(rank)
        local ms, _, dist = load()
        local pair = dist.new_group { 0, 1 }
        for round = 1, 30 do
          ms.scope(function()
            local x = ms.full({ 5000 }, rank + round, { device = "cuda" })
            local all, sum = ms.zeros(5000 * world, { device = "cuda" }), ms.zeros(5000, { device = "cuda" })
            local one = dist.all_gather(all, x, { async = true })
            sum:add_(x)
            local two = dist.all_reduce(sum, { async = true })
            x:mul_(2)                                   -- waits until peers have read x
            local small = ms.full({ 3 }, rank, { device = "cuda" })
            if rank < 2 then dist.all_reduce(small, { group = pair }) end
            if one and round % 2 == 0 then one:wait() end
            if two then two:wait() end
            local want_all, want_sum = 0, 0
            for r = 0, world - 1 do
              want_all = want_all + (r + round) * 5000
              want_sum = want_sum + r + round
            end
            assert.equal(want_all, all:sum():item())
            assert.equal(want_sum * 5000, sum:sum():item())
            assert.equal(2 * (rank + round), x:max():item())
            assert.equal(rank < 2 and 1 or rank, small:max():item())
          end)
        end
        dist.free_group(pair)
      end)

      it("wait for a peer's earlier collective in another group, which its GPU has not run yet", function(rank)
        local ms, _, dist = load()
        local lib, pair = require("moonshard.core.ffi").lib, dist.new_group { 0, 1 }
        for round = 1, 3 do
          ms.scope(function()
            local x = ms.full({ 5000 }, rank + round, { device = "cuda" })
            if rank < 2 then
              lib.ms_dist_set_delay(-1, 0.05)             -- of its part on the GPU
              dist.all_reduce(x, { group = pair, async = true })
              lib.ms_dist_set_delay(-1, 0)
            end
            dist.all_reduce(x, { async = true })
            local want = 2 * (2 * round + 1)
            for r = 2, world - 1 do want = want + r + round end
            assert.equal(want, x:min():item())
            assert.equal(want, x:max():item())
          end)
        end
        dist.free_group(pair)
      end)
    end)
  end
end
