-- SPDX-License-Identifier: MIT
--- Specs of collectives, sharding and DDP once more on the emulated GPU, over 2 to 4 ranks, with NCCL's stand-in as the
--- backend. Their expectations hold for any order of sums, or compare what NCCL did with itself.
local lfs = require "lfs"
local process = require "spec.support.process"
local run_suite = require "spec.support.suite"

local build = process.build
local built = lfs.attributes(build .. "/standin/libnccl_standin.so.2") ~= nil

local long = os.getenv "MOONSHARD_LONG"

-- device: the ranks' default device; without it the spec itself puts tensors on the GPU. filter: only these tests;
-- without: not these (node_suites_spec.lua says what only MOONSHARD_LONG=1 adds). NCCL moves no tensor of the CPU, so
-- suites with tests of both devices run those of the GPU alone, but for one.
local suites = {
  { "spec/cuda/sharded_spec.lua" },
  { "spec/reference/exec_order_spec.lua", filter = long and "cuda" or "on.3.ranks,.cuda" },
  { "spec/reference/comm_hooks_spec.lua", filter = long and "cuda" or "on.4.ranks,.cuda" },
  { "spec/reference/fully_shard_extensions_spec.lua", without = not long and "over.[24].ranks" },
  { "spec/reference/sharded_grad_scaler_spec.lua", filter = "on.3.ranks,.cuda", without = not long and "found_inf" },
  { "spec/parallel/fsdp/fully_shard/parity_spec.lua", device = "cuda",
    filter = long and "over.[234].ranks" or "over.3.ranks", without = not long and "transformer_lm" },
  { "spec/parallel/fsdp/both/parity/both_wrappers_spec.lua", device = "cuda" },
  { "spec/parallel/fsdp/both/parity/matrix_spec.lua", device = "cuda", filter = "^on.4.ranks.net.trains.*hybrid" },
  { "spec/parallel/fsdp/both/parity/matrix_spec.lua", device = "cuda", filter = "^on.2.ranks.net.trains" },
  { "spec/parallel/ddp/ddp_spec.lua", device = "cuda", filter = "^DDP.over.2.ranks",
    without = not long and "trains.transformer" },
}

describe("backend nccl #cuda", function()
  for _, suite in ipairs(suites) do
    it("passes " .. suite[1], function()
      if not built then return pending "this build has no emulated GPU: there is no g++" end
      run_suite(suite[1], { MOONSHARD_CUDA = process.gpu, MOONSHARD_BACKEND = "nccl", MOONSHARD_CUDA_DEVICES = "1",
        MOONSHARD_SPEC_DEVICE = suite.device }, suite.filter, suite.without)
    end)
  end
end)
