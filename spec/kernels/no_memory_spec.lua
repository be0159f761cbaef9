-- SPDX-License-Identifier: MIT
--- A single allocation fails, at any place: the result is the undisturbed run's bits, or a clean error and those bits
--- in the next run. An operator that is repeated after a garbage collection had no effect before. These jobs
--- fail a part of the allocations, one in each run; scripts/starve fails all.
local starved = require "spec.support.starved"

describe("one failed allocation", function()
  for _, case in ipairs {
    { "operators", "malloc", 3, 12 }, { "operators", "pool", 1, 20 }, { "training", "malloc", 23, 5 },
    { "training", "pool", 7, 8 },
  } do
    local scenario, kind, stride, least = unpack(case)
    it(("of %s, among %s, changes no bit of what follows"):format(kind, scenario), function()
      if os.getenv "LD_PRELOAD" then return pending "another allocator is preloaded" end
      local counts, wrong = starved.job(0, { scenario, kind, "fork", 1, stride })
      assert.same({}, wrong)
      assert.is_true(counts.same >= least and counts.error >= least, ("%d same, %d errors"):format(counts.same,
        counts.error))
    end)
  end

  -- Over ranks: the peers get the error, also on other nodes, no rank waits for the time limit, and all continue.
  for _, case in ipairs {
    { "collectives", "malloc", 0 }, { "collectives", "malloc", 1 }, { "training", "pool", 1 },
  } do
    local scenario, kind, culprit = unpack(case)
    it(("of %s, among %s over two nodes, on rank %d, is an error on both ranks or nothing"):format(kind, scenario,
      culprit), function()
      if os.getenv "LD_PRELOAD" then return pending "another allocator is preloaded" end
      local stride = kind == "pool" and 9 or 3
      local counts, wrong = starved.job(2, { scenario, kind, "loop", culprit, stride },
        { env = { MOONSHARD_COMM_NODES = "2" } })
      assert.same({}, wrong)
      assert.is_true(counts.error >= 20, ("%d same, %d errors"):format(counts.same, counts.error))
    end)
  end
end)
