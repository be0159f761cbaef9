-- SPDX-License-Identifier: MIT
--- Data for language models: memory-mapped corpora of text files and token shards, and seeded batches shared by
--- the ranks.
---   local corpus = ms.data.corpus "texts/"
---   local batches = ms.data.batches(corpus, { context = 128, batch = 16, seed = 1, rank = dist.rank(),
---     world = dist.world_size() })
---   local ids, targets = batches:train(step)
require "moonshard.autograd.methods"
local M = {
  corpus = require "moonshard.data.corpus".open,
  batches = require "moonshard.data.batches".new,
}

return M
