-- SPDX-License-Identifier: MIT
--- Specs of sharding once more on the emulated GPU: between ranks that map each other's GPU memory, and between ranks
--- that cannot share it, whose bytes go through windows in CPU memory. The reference suites themselves run over mapped
--- memory.
local lfs = require "lfs"
local process = require "spec.support.process"

local build = os.getenv "MOONSHARD_BUILD" or "build"
if build:sub(1, 1) ~= "/" then build = process.root .. "/" .. build end
local built = lfs.attributes(build .. "/libmoonshard_cuda_emulated.so") ~= nil
local REFUSED = "fail:cudaIpcGetMemHandle:1:1"

-- device: the ranks' default device; without it the spec itself puts tensors on the GPU, in the tests that `filter` names.
local suites = {
  { "spec/parallel/fsdp/fully_shard/parity_spec.lua", device = "cuda" },
  { "spec/parallel/fsdp/both/both_spec.lua", device = "cuda" },
  { "spec/parallel/fsdp/fully_shard/parity_spec.lua", device = "cuda", refused = true },
  { "spec/cuda/sharded_spec.lua", refused = true },
  { "spec/reference/exec_order_spec.lua", filter = "cuda", refused = true },
  { "spec/reference/comm_hooks_spec.lua", filter = "cuda", refused = true },
  { "spec/reference/fully_shard_extensions_spec.lua", filter = "cuda", refused = true },
  { "spec/reference/sharded_grad_scaler_spec.lua", filter = "cuda", refused = true },
}

for _, suite in ipairs(suites) do
  describe(("ranks of a node that %s memory of GPUs #cuda"):format(suite.refused and "cannot share" or "map"), function()
    it("pass " .. suite[1], function()
      if not built then return pending "this build has no emulated GPU: there is no g++" end
      local folder = process.temp_folder()
      local command = { "busted", process.root .. "/" .. suite[1] }
      if suite.filter then table.insert(command, 2, "--filter=" .. suite.filter) end
      local child = process.start(command, { stdout = folder .. "/out", stderr = folder .. "/err",
        env = { MOONSHARD_CUDA = "emulated", MOONSHARD_EMULATOR = suite.refused and REFUSED or nil,
          MOONSHARD_SPEC_DEVICE = suite.device } })
      local code = child:wait(400 * process.patience)
      if not code then child:stop(3) end
      local out = process.read(folder .. "/out")
      process.remove_folder(folder)
      assert.are.equal(0, code, out)
      assert.matches("\n[1-9]%d* passed, 0 failed\n$", out)
    end)
  end)
end
