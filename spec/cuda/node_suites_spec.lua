-- SPDX-License-Identifier: MIT
--- Specs of sharding once more on the emulated GPU: between ranks that map each other's GPU memory, and between ranks
--- that cannot share it, whose bytes go through windows in CPU memory. The reference suites themselves run over mapped
--- memory.
local lfs = require "lfs"
local process = require "spec.support.process"
local run_suite = require "spec.support.suite"

local build = process.build
local built = lfs.attributes(build .. "/libmoonshard_cuda_emulated.so") ~= nil
local REFUSED = "fail:cudaIpcGetMemHandle:1:1"

-- device: the ranks' default device; without it the spec itself puts tensors on the GPU, in the tests that `filter`
-- names.
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
      run_suite(suite[1], { MOONSHARD_CUDA = "emulated", MOONSHARD_EMULATOR = suite.refused and REFUSED or nil,
        MOONSHARD_SPEC_DEVICE = suite.device }, suite.filter)
    end)
  end)
end
