-- SPDX-License-Identifier: MIT
--- A CUDA function fails on one rank of a node in a collective of tensors on GPUs: all ranks get the right result in
--- another way, or an error each; none goes on with a result that lacks a part. The ranks' next collectives are right.
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local SCRIPT = [[
  local ffi = require "ffi"
  ffi.cdef "int setenv(const char *, const char *, int);"
  if os.getenv "OMPI_COMM_WORLD_RANK" == "1" then ffi.C.setenv("MOONSHARD_EMULATOR", "fail:%s:1", 1) end
  local ms = require "moonshard"
  local dist = ms.dist
  dist.init { timeout = 20 }
  local rank = dist.rank()
  local function all_gather(n)
    local out = ms.zeros(2 * n, { device = "cuda" })
    dist.all_gather(out, ms.full({ n }, rank + 1, { device = "cuda" }))
    return out:sum():item() / n
  end
  local calls = {
    all_reduce = function()
      local t = ms.full({ 5000 }, rank + 1, { device = "cuda" })
      dist.all_reduce(t)
      return t:sum():item() / 5000
    end,
    all_gather = function() return all_gather(5000) end,
    lines = function()                                    -- the ranks' columns of a weight alternate
      local layer = ms.nn.Linear(8, 6, { bias = false, device = "cuda" })
      ms.no_grad(function() layer.weight:fill_(3 / 8) end)
      ms.fsdp.fully_shard(layer, { shard_placement_fn = function() return ms.fsdp.Shard(2) end })
      return layer(ms.ones(1, 8, { device = "cuda" })):mean():item()
    end,
  }
  print(rank, pcall(calls["%s"]))
  dist.recover()
  print(rank, "then", pcall(all_gather, 100))
]]

--- Runs it on 2 ranks where the function fails on rank 1, and returns the lines of both ranks: { [rank] = { text, … } }
local function run(call, in_call, env)
  env = env or {}
  env.MOONSHARD_CUDA = "emulated"
  local job = ranks.run(2, SCRIPT:format(call, in_call), { timeout = 60 * process.patience, env = env })
  assert.are.equal(0, job.code, job.stdout .. job.stderr)
  local out = { [0] = {}, {} }
  for rank, text in job.stdout:gmatch "(%d)\t([^\n]*)" do table.insert(out[tonumber(rank)], text) end
  return out, job.stderr
end

local FD = { MOONSHARD_CUDA_SHARE = "fd" }

describe("on a node whose rank 1 has a CUDA function that fails, #cuda", function()
  -- The function and the number of the call, in what, and the text that names it.
  for _, case in ipairs {
    { "cudaLaunchKernel:2", "all_reduce", "reduce, launching" }, { "cudaMemcpy2DAsync:1", "lines" },
    { "cudaStreamWaitEvent:1", "all_gather" },
  } do
    local call, what, named = unpack(case, 1, 3)
    it(("%s in %s gives each rank an error, and collectives after dist.recover are right"):format(call, what), function()
      local out = run(call, what)
      assert.matches("^false\t.*" .. (named or call:match "^%a+2?%a*"), out[1][1])
      assert.matches("^false\t.*rank 1 ", out[0][1])
      for rank = 0, 1 do assert.are.equal("then\ttrue\t3", out[rank][2]) end
    end)
  end

  for _, case in ipairs {
    { "cudaIpcGetMemHandle:1" }, { "cudaIpcOpenMemHandle:1" }, { "cudaIpcGetEventHandle:1" },
    { "cudaIpcOpenEventHandle:1" }, { "cuMemExportToShareableHandle:1", FD },
    { "cuMemRetainAllocationHandle:1", FD }, { "cuMemImportFromShareableHandle:1", FD }, { "cuMemMap:2", FD },
    { "cuMemAddressReserve:2", FD },
  } do
    local call, env = unpack(case, 1, 2)
    it(("%s moves the bytes in another way"):format(call), function()
      local out, err = run(call, "all_reduce", env)
      for rank = 0, 1 do assert.same({ "true\t3", "then\ttrue\t3" }, out[rank]) end
      assert.matches("moonshard: rank 1: ", err)
    end)
  end
end)
