-- SPDX-License-Identifier: MIT
--- Data. Datasets, samplers and loaders as PyTorch has them:
---   local set = data.TensorDataset(images, labels)
---   local loader = data.DataLoader(set, { batch_size = 32, shuffle = true })
---   for x, y in loader:epoch() do ... end
---
--- For language models, memory-mapped corpora of text files and token shards, and seeded batches shared by the ranks:
---   local corpus = ms.data.corpus "texts/"
---   local batches = ms.data.batches(corpus, { context = 128, batch = 16, seed = 1, rank = dist.rank(),
---     world = dist.world_size() })
---   local ids, targets = batches:train(step)
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"
local datasets = require "moonshard.data.dataset"
local samplers = require "moonshard.data.samplers"

local M = {
  corpus = require "moonshard.data.corpus".open,
  batches = require "moonshard.data.batches".new,
  Dataset = datasets.Dataset,
  IterableDataset = datasets.IterableDataset,
  TensorDataset = datasets.TensorDataset,
  ConcatDataset = datasets.ConcatDataset,
  Subset = datasets.Subset,
  random_split = datasets.random_split,
  Sampler = samplers.Sampler,
  SequentialSampler = samplers.SequentialSampler,
  RandomSampler = samplers.RandomSampler,
  WeightedRandomSampler = samplers.WeightedRandomSampler,
  BatchSampler = samplers.BatchSampler,
  DistributedSampler = samplers.DistributedSampler,
  BucketBatchSampler = samplers.BucketBatchSampler,
  default_collate = require "moonshard.data.collate".default_collate,
  DataLoader = require "moonshard.data.loader",
  transforms = require "moonshard.data.transforms",
}
for _, name in ipairs { "arrays", "images", "tables" } do
  for key, fn in pairs(require("moonshard.data." .. name)) do M[key] = fn end
end

return errors.closed(M, "data")
