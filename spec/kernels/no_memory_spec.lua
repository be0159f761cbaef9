-- SPDX-License-Identifier: MIT
--- One allocation that fails, wherever it is, while the next succeeds: the undisturbed run's bits, or a clean error and
--- those bits afterwards. An operator that is repeated after a collection had no effect before. scripts/starve runs all
--- of it.
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

  -- Ranks: the peers hear of it, on other nodes too, none waits for the limit, and all go on.
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
