-- SPDX-License-Identifier: MIT
--- Specs of collectives, sharding and DDP once more on the emulated GPU, over 2 to 4 ranks, with NCCL's stand-in as the
--- backend. Their expectations hold for any order of sums, or compare what NCCL did with itself.
local lfs = require "lfs"
local process = require "spec.support.process"

local build = os.getenv "MOONSHARD_BUILD" or "build"
if build:sub(1, 1) ~= "/" then build = process.root .. "/" .. build end
local built = lfs.attributes(build .. "/standin/libnccl_standin.so.2") ~= nil

-- device: the ranks' default device; without it the spec itself puts tensors on the GPU.
local suites = {
  { "spec/cuda/sharded_spec.lua" },
  { "spec/reference/exec_order_spec.lua" },
  { "spec/reference/comm_hooks_spec.lua" },
  { "spec/reference/fully_shard_extensions_spec.lua" },
  { "spec/reference/sharded_grad_scaler_spec.lua" },
  { "spec/parallel/fsdp/fully_shard/parity_spec.lua", device = "cuda" },
  { "spec/parallel/fsdp/both/both_spec.lua", device = "cuda" },
}

describe("backend nccl #cuda", function()
  for _, suite in ipairs(suites) do
    it("passes " .. suite[1], function()
      if not built then return pending "this build has no emulated GPU: there is no g++" end
      local folder = process.temp_folder()
      local child = process.start({ "busted", process.root .. "/" .. suite[1] }, { stdout = folder .. "/out",
        stderr = folder .. "/err", env = { MOONSHARD_CUDA = "emulated", MOONSHARD_BACKEND = "nccl",
          MOONSHARD_CUDA_DEVICES = "1", MOONSHARD_SPEC_DEVICE = suite.device } })
      local code = child:wait(400 * process.patience)
      if not code then child:stop(3) end
      local out = process.read(folder .. "/out")
      process.remove_folder(folder)
      assert.are.equal(0, code, out)
      assert.matches("\n[1-9]%d* passed, 0 failed\n$", out)
    end)
  end
end)
