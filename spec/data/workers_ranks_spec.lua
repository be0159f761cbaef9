-- SPDX-License-Identifier: MIT
--- Workers of a loader in a job of several ranks: they are not ranks, and the job goes on whatever becomes of them.
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

ranks.describe(2, "a loader's workers under mpirun", function(rank)
  local data, dist = ms.data, ms.dist
  local function first_batch(get, given)
    local o = { batch_size = 2, workers = 2, timeout = 20 * process.patience }
    for name, value in pairs(given or {}) do o[name] = value end
    local loader = data.DataLoader(data.Dataset { size = 4, get = get }, o)
    local ok, result = pcall(function() return loader:next():tolist() end)
    loader:close()
    return ok, result
  end
  local function sums()
    for k = 1, 2 do
      local t = ms.full({ 1 }, k)
      dist.all_reduce(t)
      assert.are.equal(2 * k, t:item())
    end
  end

  for what, call in ms.sorted_pairs {
    ["dist.rank()"] = function() return require("moonshard").dist.rank() end,
    ["dist.init()"] = function() return require("moonshard").dist.init() or 1 end,
    ["a collective"] = function() return require("moonshard").dist.all_reduce(require("moonshard").ones(1)) or 1 end,
    ["ms.run.start"] = function()
      return require("moonshard").run.start { out = "/tmp/moonshard-never-made", quiet = true } and 1
    end,
  } do
    it("cannot join the job: " .. what .. " in a dataset is an error, and the job continues", function()
      local ok, err = first_batch(call)
      assert.is_false(ok)
      assert.matches("DataLoader: item 1: .*dist: a worker of a DataLoader is not a rank and cannot join the job", err)
      sums()
    end)
  end

  it("use what the rank found out before", function()
    local me = dist.rank()
    local ok, list = first_batch(function(i) return 10 * me + i end)
    assert.is_true(ok, list)
    assert.are.same({ 10 * rank + 1, 10 * rank + 2 }, list)
    sums()
  end)

  it("may be killed on one rank: its step fails, and the next ones are right after dist.recover", function()
    local victim = rank == 1
    local lost = {}
    for step = 1, 4 do
      local ok = pcall(function()
        if victim and step == 2 then
          local there, err = first_batch(function()
            require("ffi").C.moonshard_worker_kill(require("ffi").C.moonshard_worker_self(), 9)
          end)
          assert(there, err)
        end
        local t = ms.full({ 1 }, step)
        dist.all_reduce(t)
        assert.are.equal(2 * step, t:item())
      end)
      local flag = ms.tensor { step, ok and 0 or 1 }
      local agreed = pcall(dist.all_reduce, flag)         -- where the peers learn of an error of the script's own
      if agreed then assert.are.equal(2 * step, flag[1]:item()) end
      if not agreed or flag[2]:item() > 0 then lost[#lost + 1] = step end
      if not agreed then dist.recover() end
    end
    assert.are.same({ 2 }, lost)
  end)
end)
