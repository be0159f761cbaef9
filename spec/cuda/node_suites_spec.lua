-- SPDX-License-Identifier: MIT
--- Specs of sharding once more on the emulated GPU: between ranks that map each other's GPU memory, by handles or by file
--- descriptors, and between ranks that cannot share it, whose bytes go through windows in CPU memory. The reference
--- suites themselves run over memory that is mapped by handles.
---
--- By default each way has every kind of collective once. MOONSHARD_LONG=1 (scripts/test --long) adds other numbers of
--- ranks, with which each way copies the same pieces to and from more ranks, and the models whose time goes into the
--- emulated kernels of attention, which do not see how gradients and parameters have come.
local lfs = require "lfs"
local process = require "spec.support.process"
local run_suite = require "spec.support.suite"

local build = process.build
local built = lfs.attributes(build .. "/libmoonshard_cuda_emulated.so") ~= nil

local long = os.getenv "MOONSHARD_LONG"

-- device: the ranks' default device; without it the spec itself puts tensors on the GPU. filter: only these tests;
-- without: not these. share: how the ranks share memory (MOONSHARD_CUDA_SHARE).
local suites = {
  { "spec/parallel/fsdp/fully_shard/parity_spec.lua", device = "cuda", without = not long and "transformer_lm" },
  -- The transformer by one way, over a number of ranks that does not divide its sizes.
  { "spec/parallel/fsdp/fully_shard/parity_spec.lua", device = "cuda",
    filter = "over.3.ranks.trains.transformer_lm.*true" },
  { "spec/parallel/fsdp/both/parity/both_wrappers_spec.lua", device = "cuda" },
  -- Of the matrix, one model over replicas of shards: a reduction in one group follows one in another.
  { "spec/parallel/fsdp/both/parity/matrix_spec.lua", device = "cuda", filter = "^on.4.ranks.net.trains.*hybrid" },
  { "spec/parallel/fsdp/both/parity/matrix_spec.lua", device = "cuda", filter = "^on.2.ranks.net.trains" },
  -- One rank shares nothing. File descriptors differ from handles only in how memory is mapped.
  { "spec/parallel/fsdp/fully_shard/parity_spec.lua", device = "cuda", filter = "^fully_shard.over.3.ranks",
    without = not long and "transformer_lm", share = "fd" },
  { "spec/parallel/fsdp/fully_shard/parity_spec.lua", device = "cuda",
    filter = long and "over.[234].ranks" or "over.3.ranks", without = not long and "transformer_lm",
    share = "staging" },
  { "spec/parallel/fsdp/both/parity/matrix_spec.lua", device = "cuda", filter = "^on.2.ranks.net.trains",
    share = "staging" },
  { "spec/parallel/ddp/ddp_spec.lua", device = "cuda", filter = "^DDP.over.2.ranks",
    without = not long and "trains.transformer", share = "staging" },
  { "spec/cuda/sharded_spec.lua", share = "staging" },
  -- Here, and over NCCL, one number of ranks: the suites above have the collectives of the others.
  { "spec/reference/exec_order_spec.lua", filter = long and "cuda" or "on.3.ranks,.cuda", share = "staging" },
  { "spec/reference/comm_hooks_spec.lua", filter = long and "cuda" or "on.4.ranks,.cuda", share = "staging" },
  { "spec/reference/fully_shard_extensions_spec.lua", filter = "cuda", without = not long and "over.[24].ranks",
    share = "staging" },
  { "spec/reference/sharded_grad_scaler_spec.lua", filter = "on.3.ranks,.cuda", without = not long and "found_inf",
    share = "staging" },
}

local WAYS = { fd = "map memory of GPUs by file descriptors", staging = "cannot share memory of GPUs" }

for _, suite in ipairs(suites) do
  describe(("ranks of a node that %s #cuda"):format(WAYS[suite.share] or "map memory of GPUs"), function()
    it("pass " .. suite[1], function()
      if not built then return pending "this build has no emulated GPU: there is no g++" end
      run_suite(suite[1], { MOONSHARD_CUDA = process.gpu, MOONSHARD_CUDA_SHARE = suite.share,
        MOONSHARD_SPEC_DEVICE = suite.device }, suite.filter, suite.without)
    end)
  end)
end
