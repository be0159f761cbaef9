-- SPDX-License-Identifier: MIT
--- Datasets, samplers, collation and the loader without workers.
local ms = require "moonshard"
local data = ms.data
local message = require "spec.support.message"
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"

describe("a dataset of the wrong kind", function()
  it("is refused with what is expected", function()
    for _, make in ipairs { data.DataLoader, function(x) return data.Subset(x, { 1 }) end } do
      for text, wrong in pairs {
        [" is an empty table, expected a dataset or a list of at least one item; data.Dataset {} has no items"] = {},
        [" is a table, expected a dataset, a list of items, a table of size and get, or a tensor"] = { batch_size = 2 },
        [" is a number (3), expected a dataset, a list of items, a table of size and get, or a tensor"] = 3,
      } do
        local got = message(make, wrong)
        assert.truthy(got:find(text, 1, true), got)
      end
    end
    assert.are.equal(0, data.DataLoader(data.Dataset {}):size())
  end)
end)

local function counted(n) return data.Dataset { size = n, get = function(i) return i end } end

-- The batches of one epoch as lists.
local function epoch_of(loader)
  local list = {}
  for x in loader:epoch() do list[#list + 1] = x:tolist() end
  return list
end

local function flat(batches)
  local list = {}
  for _, batch in ipairs(batches) do
    for _, v in ipairs(batch) do list[#list + 1] = v end
  end
  return list
end

local function sorted(list)
  local copy = { unpack(list) }
  table.sort(copy)
  return copy
end

local function range(n)
  local list = {}
  for k = 1, n do list[k] = k end
  return list
end

describe("a dataset", function()
  it("of a function, of a list or of a class gives items from 1 and from the end", function()
    local Squares = data.Dataset:extend "Squares"
    function Squares:init(n) self.n = n end
    function Squares:size() return self.n end
    function Squares:get(i) return i * i end       -- luacheck: ignore 212
    local of_function = data.Dataset { size = 3, get = function(i) return i * i end }
    for _, d in ipairs { of_function, data.Dataset { 1, 4, 9 }, Squares(3) } do
      assert.are.same({ 3, 4, 9, 1 }, { d:size(), d[2], d[-1], d:item(1) })
    end
    assert.are.equal("Squares(3 items)", tostring(Squares(3)))
  end)

  it("gives an item of several values as several results, and by index as a list", function()
    local of_function = data.Dataset { size = 2, get = function(i) return i, i + 10 end }
    for _, d in ipairs { of_function, data.Dataset { { 1, 11 }, { 2, 12 } } } do
      assert.are.same({ 2, 12 }, { d:get(2) })
      assert.are.same({ 2, 12 }, d[2])
    end
  end)

  it("of tensors gives rows, and a batch of them at once", function()
    local x = ms.arange(0, 12):reshape(4, 3)
    local d = data.TensorDataset(x, ms.arange(0, 4))
    assert.are.same({ 6, 7, 8 }, d[3][1]:tolist())
    local rows = d:batch { 4, 1 }
    assert.are.same({ { { 9, 10, 11 }, { 0, 1, 2 } }, { 3, 0 } }, { rows[1]:tolist(), rows[2]:tolist() })
  end)

  it("of other datasets has their items one after the other, or selected ones", function()
    local d = data.ConcatDataset { { 10, 20 }, counted(3), { 30 } }
    local list = {}
    for k = 1, d:size() do list[k] = d[k] end
    assert.are.same({ 10, 20, 1, 2, 3, 30 }, list)
    local s = data.Subset(d, { 6, 1 })
    assert.are.same({ 2, 30, 10 }, { s:size(), s[1], s[2] })
  end)

  it("is split at random into parts without overlap, by sizes or fractions", function()
    for _, lengths in ipairs { { 5, 3, 2 }, { 0.5, 0.3, 0.2 } } do
      local parts, all = data.random_split(counted(10), lengths, { seed = 4 }), {}
      for k, size in ipairs { 5, 3, 2 } do
        assert.are.equal(size, parts[k]:size())
        for j = 1, size do all[#all + 1] = parts[k][j] end
      end
      assert.are.same(range(10), sorted(all))
      assert.are_not.same(range(10), all)
    end
    -- As in PyTorch: sizes are rounded down, and what is left goes to the first parts, one item each.
    local parts = data.random_split(counted(11), { 0.5, 0.25, 0.25 })
    assert.are.same({ 6, 3, 2 }, { parts[1]:size(), parts[2]:size(), parts[3]:size() })
  end)

  it("refuses what it cannot use, by name", function()
    raises("Dataset: option 'get' is missing", data.Dataset, { size = 3 })
    raises("Dataset: item 4 does not exist, expected a position from 1 to 3", function() return counted(3)[4] end)
    raises("TensorDataset: argument 2 has shape [3], but argument 1 has [2, 2]; their first sizes must be equal",
      data.TensorDataset, ms.zeros(2, 2), ms.zeros(3))
    raises("Subset: index 2 is 9, expected a position from 1 to 3", data.Subset, counted(3), { 1, 9 })
    raises("random_split: the lengths add up to 9, but the dataset has 10 items", data.random_split, counted(10), { 5, 4 })
  end)
end)

describe("a sampler", function()
  it("gives every position once in a random order, another in each epoch", function()
    for _, n in ipairs { 1, 2, 10, 1000 } do
      local s = data.RandomSampler(n, { seed = 7 })
      assert.are.same(range(n), sorted(s:tolist(0)))
      assert.are.same(s:tolist(3), data.RandomSampler(n, { seed = 7 }):tolist(3))
    end
    local s = data.RandomSampler(1000, { seed = 7 })
    assert.are_not.same(s:tolist(0), s:tolist(1))
    assert.are_not.same(s:tolist(0), data.RandomSampler(1000, { seed = 8 }):tolist(0))
  end)

  it("puts each item first about equally often", function()
    local s, first = data.RandomSampler(10, { seed = 1 }), {}
    for k = 1, 10 do first[k] = 0 end
    for epoch = 0, 9999 do
      local i = s:order(epoch)(1)
      first[i] = first[i] + 1
    end
    for k = 1, 10 do assert.is_true(math.abs(first[k] - 1000) < 150, first[k]) end      -- 5 standard deviations
  end)

  it("draws more samples than items as several orders, or with replacement", function()
    local list = data.RandomSampler(4, { num_samples = 10, seed = 1 }):tolist()
    for first = 1, 5, 4 do assert.are.same(range(4), sorted { unpack(list, first, first + 3) }) end
    local counts = { 0, 0, 0, 0 }
    for _, i in ipairs(data.RandomSampler(4, { replacement = true, num_samples = 4000, seed = 1 }):tolist()) do
      counts[i] = counts[i] + 1
    end
    for k = 1, 4 do assert.is_true(math.abs(counts[k] - 1000) < 140, counts[k]) end
  end)

  it("draws in proportion to weights, never an item of weight 0", function()
    local counts = { 0, 0, 0 }
    for _, i in ipairs(data.WeightedRandomSampler({ 1, 0, 3 }, 4000, { seed = 2 }):tolist()) do
      counts[i] = counts[i] + 1
    end
    assert.are.equal(0, counts[2])
    assert.is_true(math.abs(counts[1] - 1000) < 140, counts[1])
    -- Without replacement: item 3 is first with probability 3/4.
    local s, first = data.WeightedRandomSampler(ms.tensor { 1, 0, 3 }, 2, { replacement = false, seed = 2 }), 0
    for epoch = 0, 3999 do
      local at = s:order(epoch)
      assert.are.same({ 1, 3 }, sorted { at(1), at(2) })
      if at(1) == 3 then first = first + 1 end
    end
    assert.is_true(math.abs(first - 3000) < 140, first)
  end)

  it("over ranks is PyTorch's: padded from the beginning, or cut", function()
    -- list(DistributedSampler(range(10), num_replicas=4, rank=r, shuffle=False)), and with drop_last=True, plus 1.
    local padded = { { 1, 5, 9 }, { 2, 6, 10 }, { 3, 7, 1 }, { 4, 8, 2 } }
    local cut = { { 1, 5 }, { 2, 6 }, { 3, 7 }, { 4, 8 } }
    for r = 0, 3 do
      local function list(drop_last)
        return data.DistributedSampler(10, { num_replicas = 4, rank = r, shuffle = false, drop_last = drop_last })
          :tolist()
      end
      assert.are.same(padded[r + 1], list(false))
      assert.are.same(cut[r + 1], list(true))
    end
    assert.are.same({ 1 }, data.DistributedSampler(1, { num_replicas = 3, rank = 2, shuffle = false }):tolist())
  end)

  it("over ranks has each item once with pad = false", function()
    for _, case in ipairs { { 10, 4 }, { 5, 2 }, { 8, 2 }, { 1, 3 }, { 0, 2 } } do
      for _, shuffle in ipairs { false, true } do
        local items, world = unpack(case)
        local seen, most, least = {}, 0, math.huge
        for r = 0, world - 1 do
          local loader = data.DataLoader(ms.arange(items), { rank = r, world = world, pad = false, shuffle = shuffle,
            batch_size = 2, seed = 3 })
          local n, batches = 0, 0
          for x in loader:epoch() do
            for _, v in ipairs(x:tolist()) do
              seen[#seen + 1], n = v, n + 1
            end
            batches = batches + 1
          end
          assert.are.equal(loader:size(), batches)
          most, least = math.max(most, n), math.min(least, n)
        end
        table.sort(seen)
        assert.are.same(ms.arange(items):tolist(), seen)
        assert.is_true(most - least <= 1)
      end
    end
    assert.has_error(function() data.DataLoader({ 1, 2 }, { world = 2, pad = false, drop_last = true }) end)
  end)

  it("takes the epoch of set_epoch where none is given", function()
    local s = data.DistributedSampler(50, { num_replicas = 2, rank = 0 })
    local third = s:tolist(3)
    s:set_epoch(3)
    assert.are.same(third, s:tolist(0))
  end)

  it("by length visits every item once in batches of similar lengths", function()
    local lengths, spread = {}, 0
    for k = 1, 103 do lengths[k] = (k * 37) % 101 end
    local s = data.BucketBatchSampler(lengths, 4, { bucket = 5, seed = 3 })
    local batches = s:tolist(1)
    assert.are.equal(26, #batches)
    assert.are.same(range(103), sorted(flat(batches)))
    for _, batch in ipairs(batches) do
      local least, most = math.huge, 0
      for _, i in ipairs(batch) do least, most = math.min(least, lengths[i]), math.max(most, lengths[i]) end
      spread = spread + most - least
    end
    assert.is_true(spread / 26 < 30, spread / 26)                 -- about 60 for batches at random
    assert.are.equal(25, data.BucketBatchSampler(lengths, 4, { drop_last = true }):size())
  end)

  it("by length gives ranks parts of the same batches", function()
    local lengths = range(30)
    local whole = data.BucketBatchSampler(lengths, 6, { bucket = 2, seed = 3 }):tolist(2)
    for world = 2, 3 do
      for k, batch in ipairs(whole) do
        local joined = {}
        for rank = 0, world - 1 do
          local s = data.BucketBatchSampler(lengths, 6 / world,
            { bucket = 2, seed = 3, num_replicas = world, rank = rank })
          for _, i in ipairs(s:order(2)(k)) do joined[#joined + 1] = i end
        end
        assert.are.same(sorted(batch), sorted(joined))
      end
    end
  end)

  it("refuses what it cannot use, by name", function()
    raises("WeightedRandomSampler: 3 samples without replacement need as many positive weights, got 2",
      data.WeightedRandomSampler, { 1, 0, 1 }, 3, { replacement = false })
    raises("WeightedRandomSampler: weight 2 is a number (-1), expected a finite number from 0", data.WeightedRandomSampler,
      { 1, -1 }, 3)
    raises("DistributedSampler: rank is 2, expected less than num_replicas, 2", data.DistributedSampler, 4,
      { rank = 2, num_replicas = 2 })
  end)
end)

describe("a loader's epoch", function()
  local lost
  local function use() return lost:sum() end
  local function loader() return data.DataLoader(data.TensorDataset(ms.ones(4, 2)), { batch_size = 2 }) end

  it("is named as the scope of what its iterations made", function()
    for x in loader():epoch() do lost = x + 1 end
    assert.matches("by add; its scope: loader:epoch)", message(use), 1, true)
    for _ in ms.steps(1) do lost = ms.ones(2) + 1 end
    assert.matches("by add; its scope: ms.steps)", message(use), 1, true)
  end)

  it("is named as before after one that break left", function()
    local count = 0
    for x in loader():epoch() do
      count, lost = count + 1, x + 1
      if count == 1 then break end
    end
    local epoch, state = loader():epoch()
    assert.matches("its scope: the last step of a loop that break or an error left)", message(use), 1, true)
    for x in epoch, state do lost = x + 1 end
    assert.matches("its scope: loader:epoch)", message(use), 1, true)
  end)
end)

describe("a loader of single items", function()
  -- A value with lists in place of its tensors.
  local function plain(v)
    if ms.is_tensor(v) then return { v.dtype, tostring(v.shape), v:tolist() } end
    if type(v) ~= "table" then return v end
    local out = {}
    for key, item in pairs(v) do out[key] = plain(item) end
    return out
  end

  -- The only batch of n items.
  local function batch(n, get)
    local all
    for a, b, c in data.DataLoader({ size = n, get = get }, { batch_size = n }):epoch() do all = plain { a, b, c } end
    return all
  end

  it("gives what default_collate makes of them, whatever the items are", function()
    local x = ms.arange(0, 24):reshape(2, 3, 4)
    local rows = x:permute(2, 3, 1):contiguous()
    for name, get in pairs {
      views = function(i) return x[i], x[i][2], i end,
      ["views that cannot be copied as they are"] = function(i) return rows:select(3, i), x[i]:t() end,
      ["copies, then a view"] = function(i) return i == 1 and x[1]:t():contiguous() or x[i]:t() end,
      ["one tensor twice"] = function(i)
        local t = x[i] + 1
        return t, t
      end,
      ["a list"] = function(i) return { x[i], "name", i > 1 } end,
      fields = function(i) return { image = x[i], id = i } end,
      ["no elements"] = function() return ms.zeros(0, 3), ms.ones(1) end,
      texts = function(i) return "item " .. i, x[i] end,
    } do
      local items = {}
      for i = 1, 2 do
        local values = { get(i) }
        items[i] = #values == 1 and values[1] or values
      end
      assert.are.same(plain { data.default_collate(items) }, batch(2, get), name)
    end
  end)

  it("records the graph of items that need it", function()
    local w = ms.ones(3):requires_grad_(true)
    ms.scope(function()
      local function get(i) return i == 1 and ms.ones(3) or w * i end
      data.DataLoader({ size = 3, get = get }, { batch_size = 3 }):next():sum():backward()
    end)
    assert.are.same({ 5, 5, 5 }, w.grad:tolist())
  end)

  it("names the item that differs, and keeps tensors that the dataset holds", function()
    local held = { ms.ones(2), ms.zeros(2), ms.ones(3) }
    for _ = 1, 3 do
      assert.are.same({ { 1, 1 }, { 0, 0 } }, batch(2, function(i) return held[i], i end)[1][3])
    end
    local hint = "; give a function 'collate' that makes the batch"
    for wanted, get in pairs {
      ["item 3 of the batch is float32 [3], but item 1 is float32 [2]"] = function(i) return held[i] end,
      ["item 2 of the batch is int64 [2], but item 1 is float32 [2] (field 1)"] = function(i)
        return i == 2 and ms.ones(2):long() or ms.ones(2), i
      end,
      ["item 2 of the batch is a number, but item 1 is a tensor (field 2)"] = function(i)
        return i, i == 1 and ms.ones(2) or i
      end,
      ["item 2 of the batch has 3 values, but item 1 has 2"] = function(i) return 1, 2, i == 2 and 3 or nil end,
      ["item 3 of the batch has no field 2 (field 2)"] = function(i) return 1, i < 3 and 2 or nil, 3 end,
    } do
      assert.are.equal("default_collate: " .. wanted .. hint, message(batch, 3, get))
    end
  end)
end)

describe("default_collate", function()
  it("stacks tensors, makes tensors of numbers and booleans, keeps strings, merges tables", function()
    local b = data.default_collate { { x = ms.ones(2), n = 1, ok = true, s = "a", pair = { 1, "u" } },
      { x = ms.zeros(2), n = 2.5, ok = false, s = "b", pair = { 2, "v" } } }
    assert.are.same({ { 1, 1 }, { 0, 0 } }, b.x:tolist())
    assert.are.same({ 1, 2.5 }, b.n:tolist())
    assert.are.equal("bool", b.ok.dtype)
    assert.are.same({ "a", "b" }, b.s)
    assert.are.same({ 1, 2 }, b.pair[1]:tolist())
    assert.are.same({ "u", "v" }, b.pair[2])
  end)

  it("names the item and the field that do not fit", function()
    local hint = "; give a function 'collate' that makes the batch"
    local function of(...) return function(...) return data.default_collate { ... } end, ... end
    raises("default_collate: item 2 of the batch is float32 [3], but item 1 is float32 [2]" .. hint, of(ms.ones(2), ms.ones(3)))
    raises("default_collate: item 2 of the batch has 1 value, but item 1 has 2" .. hint, of({ 1, 2 }, { 1 }))
    raises("default_collate: item 2 of the batch is a string, but item 1 is a number (field 'y' of 2)" .. hint,
      of({ 1, { y = 1 } }, { 2, { y = "a" } }))
    raises("default_collate: item 2 of the batch has no field 'y'" .. hint, of({ x = 1, y = 1 }, { x = 1 }))
    raises("default_collate: item 2 of the batch has a field 'x', but item 1 does not" .. hint, of({ y = 1 }, { x = 1 }))
  end)
end)

describe("a loader", function()
  it("gives the items in order, the last batch as it is or not at all", function()
    assert.are.same({ { 1, 2, 3 }, { 4, 5, 6 }, { 7 } }, epoch_of(data.DataLoader(counted(7), { batch_size = 3 })))
    local loader = data.DataLoader(counted(7), { batch_size = 3, drop_last = true })
    assert.are.same({ { 1, 2, 3 }, { 4, 5, 6 } }, epoch_of(loader))
    assert.are.equal(2, loader:size())
    assert.are.same({ { 3 }, { 1 } }, epoch_of(data.DataLoader(counted(7), { sampler = { 3, 1 } })))
    assert.are.same({ { 3, 1 }, { 2 } }, epoch_of(data.DataLoader(counted(7), { batch_sampler = { { 3, 1 }, { 2 } } })))
  end)

  it("of a tensor gives its rows", function()
    assert.are.same({ { { 0, 1 }, { 2, 3 } }, { { 4, 5 } } },
      epoch_of(data.DataLoader(ms.arange(0, 6):reshape(3, 2), { batch_size = 2 })))
  end)

  it("shuffles by its seed and epoch, by default that of ms.manual_seed", function()
    ms.manual_seed(5)
    local loader = data.DataLoader(counted(20), { batch_size = 6, shuffle = true })
    local first, second = epoch_of(loader), epoch_of(loader)
    assert.are.same(range(20), sorted(flat(first)))
    assert.are.same(range(20), sorted(flat(second)))
    assert.are_not.same(first, second)
    assert.are.same(first, epoch_of(data.DataLoader(counted(20), { batch_size = 6, shuffle = true, seed = 5 })))
    loader:set_epoch(0)
    assert.are.same(first, epoch_of(loader))
  end)

  it("gives several values, and what a function 'collate' returns", function()
    local set = data.Dataset { size = 3, get = function(i) return ms.full({ i }, i), i end }
    local loader = data.DataLoader(set, { batch_size = 3, collate = function(items)
      local lengths = {}
      for k, item in ipairs(items) do lengths[k] = item[1]:size(1) end
      return ms.cat { items[1][1], items[2][1], items[3][1] }, lengths
    end })
    for x, lengths in loader:epoch() do
      assert.are.same({ 1, 2, 2, 3, 3, 3 }, x:tolist())
      assert.are.same({ 1, 2, 3 }, lengths)
    end
  end)

  it("takes the rows of tensors as one batch, equal to that of single items", function()
    local x, y = ms.randn(17, 3), ms.arange(0, 17)
    local rows = data.TensorDataset(x, y)
    local each = data.Dataset { size = 17, get = function(i) return x[i], y[i] end }
    local a = data.DataLoader(data.Subset(rows, { 17, 2, 3, 9, 8 }), { batch_size = 2, shuffle = true, seed = 1 })
    local b = data.DataLoader(data.Subset(each, { 17, 2, 3, 9, 8 }), { batch_size = 2, shuffle = true, seed = 1 })
    for k = 1, 6 do
      local ax, ay = a:next()
      local bx, by = b:next()
      assert.is_true(ax:equal(bx) and ay:equal(by), k)
    end
  end)

  it("seeds the random numbers of an item by epoch and item, and leaves the script's as they were", function()
    local set = data.Dataset { size = 6, get = function() return ms.rand(2) end }
    ms.manual_seed(1)
    local expected = ms.rand(3):tolist()
    ms.manual_seed(1)
    local by_two = data.DataLoader(set, { batch_size = 2, seed = 9 })
    local by_three = data.DataLoader(set, { batch_size = 3, seed = 9 })
    local two, three = flat(epoch_of(by_two)), flat(epoch_of(by_three))
    assert.are.same(two, three)
    assert.are_not.same(two[1], two[2])
    assert.are_not.same(two, flat(epoch_of(by_two)))
    assert.are.same(expected, ms.rand(3):tolist())
  end)

  for world = 1, 4 do
    it(("gives %d ranks together the batches of one"):format(world), function()
      for epoch = 0, 1 do
        local whole = data.DataLoader(counted(48), { batch_size = 12, shuffle = true, seed = 2 })
        whole:set_epoch(epoch)
        whole = epoch_of(whole)
        local parts = {}
        for rank = 0, world - 1 do
          local loader = data.DataLoader(counted(48),
            { batch_size = 12 / world, shuffle = true, seed = 2, rank = rank, world = world })
          loader:set_epoch(epoch)
          for k, batch in ipairs(epoch_of(loader)) do
            parts[k] = parts[k] or {}
            for _, v in ipairs(batch) do table.insert(parts[k], v) end
          end
        end
        assert.are.equal(4, #parts)
        for k = 1, 4 do assert.are.same(sorted(whole[k]), sorted(parts[k])) end
      end
    end)
  end

  it("continues in the middle of an epoch, on as many ranks or others", function()
    local function loader(world, rank)
      return data.DataLoader(counted(26),
        { batch_size = 4 / world, shuffle = true, seed = 3, world = world, rank = rank })
    end
    local whole = loader(1, 0)
    for _ = 1, 9 do whole:next() end                             -- an epoch of 7 batches, then 2
    local sd = whole:state_dict()
    assert.are.same({ epoch = 1, batches = 2, items = 4, seed = 3, size = 26 }, sd)
    local rest = epoch_of(setmetatable({}, { __index = function(_, name)
      return name == "epoch" and function()
        whole:load_state_dict(sd)
        return whole:epoch()
      end
    end }))
    assert.are.equal(5, #rest)
    local again = data.DataLoader(counted(26), { batch_size = 4, shuffle = true, seed = 99 })
    again:load_state_dict(sd)
    assert.are.same(rest, epoch_of(again))
    assert.are.equal(7, #epoch_of(again))
    local parts = {}
    for rank = 0, 1 do
      local part = loader(2, rank)
      part:load_state_dict(sd)
      for k, batch in ipairs(epoch_of(part)) do
        parts[k] = parts[k] or {}
        for _, v in ipairs(batch) do table.insert(parts[k], v) end
      end
    end
    for k = 1, 5 do assert.are.same(sorted(rest[k]), sorted(parts[k])) end
  end)

  it("begins another epoch where one was left", function()
    local loader = data.DataLoader(counted(6), { batch_size = 2, shuffle = true, seed = 1 })
    loader:next()
    assert.are.equal(3, #epoch_of(loader))
    assert.are.equal(2, loader:state_dict().epoch)
  end)

  it("deals the items of a stream among ranks, continues it, and repeats items of the last block", function()
    local function stream(n)
      return data.IterableDataset(function(epoch)
        local k = 0
        return function()
          k = k + 1
          return k <= n and epoch * 100 + k or nil
        end
      end)
    end
    local function loader(world, rank, drop_last)
      return data.DataLoader(stream(9), { batch_size = 4 / world, world = world, rank = rank, drop_last = drop_last })
    end
    assert.are.same({ { 1, 2, 3, 4 }, { 5, 6, 7, 8 }, { 9 } }, epoch_of(loader(1, 0)))
    assert.are.same({ { 1, 3 }, { 5, 7 }, { 9 } }, epoch_of(loader(2, 0)))
    assert.are.same({ { 2, 4 }, { 6, 8 }, { 9 } }, epoch_of(loader(2, 1)))
    assert.are.same({ { 2, 4 }, { 6, 8 } }, epoch_of(loader(2, 1, true)))
    local one = loader(1, 0)
    for _ = 1, 4 do one:next() end
    local other = loader(1, 0)
    other:load_state_dict(one:state_dict())
    assert.are.same({ { 105, 106, 107, 108 }, { 109 } }, epoch_of(other))
    assert.is_nil(one:size())
  end)

  it("names the item whose function fails", function()
    local set = data.Dataset { size = 5, get = function(i) return i ~= 4 and i or error("broken", 0) end }
    raises("DataLoader: item 4: broken", epoch_of, data.DataLoader(set, { batch_size = 2 }))
    local none = data.Dataset { size = 5, get = function(i) return i < 3 and i or nil end }
    raises("DataLoader: item 3 is nil, expected a value", epoch_of, data.DataLoader(none, { batch_size = 2 }))
  end)

  it("refuses options that exclude each other, and a state of other data", function()
    raises("DataLoader: options 'sampler' and 'shuffle' exclude each other", data.DataLoader, counted(3),
      { shuffle = true, sampler = { 1 } })
    raises("DataLoader: options 'batch_sampler' and 'batch_size' exclude each other", data.DataLoader, counted(3),
      { batch_size = 2, batch_sampler = { { 1 } } })
    raises("DataLoader: option 'rank' is 1, expected less than option 'world', 1", data.DataLoader, counted(3), { rank = 1 })
    raises("DataLoader: the sampler gave item 9, expected a position from 1 to 3", epoch_of,
      data.DataLoader(counted(3), { sampler = { 9 } }))
    local loader = data.DataLoader(counted(3), { batch_size = 2 })
    raises("DataLoader: load_state_dict: the state is of a dataset of size 4, but this one has size 3", loader.load_state_dict,
      loader, data.DataLoader(counted(4), { batch_size = 2 }):state_dict())
    raises("DataLoader: load_state_dict: the state is of batches of size 3 over all ranks, but this loader's have size 2",
      loader.load_state_dict, loader, data.DataLoader(counted(3), { batch_size = 3 }):state_dict())
  end)

  it("holds one batch: each iteration releases what it made, and items are released at once", function()
    local set = data.Dataset { size = 10, get = function(i) return ms.full({ 1000 }, i) end }
    local loader, at = data.DataLoader(set, { batch_size = 5, shuffle = true }), {}
    collectgarbage()
    collectgarbage "stop"
    for epoch = 1, 10000 do
      for x in loader:epoch() do x:add(1) end
      if epoch == 10 or epoch == 10000 then at[#at + 1] = ms.memory_stats("cpu").allocated end
      if epoch % 100 == 0 then
        collectgarbage "restart"
        collectgarbage()
        collectgarbage "stop"
      end
    end
    collectgarbage "restart"
    assert.are.equal(at[1], at[2])
    local before, peak = ms.memory_stats("cpu").allocated, 0
    ms.scope(function()
      for _ = 1, 100 do
        local x = loader:next()
        peak = math.max(peak, ms.memory_stats("cpu").allocated - before)
        x:release()
      end
    end)
    assert.is_true(peak <= 5 * 4096, peak)
  end)
end)

ranks.describe(2, "a loader over ranks #mpi", function()
  it("takes the rank and the number of ranks for DistributedSampler from the job", function()
    local list = data.DistributedSampler(7, { shuffle = false }):tolist()
    assert.are.same(ms.dist.rank() == 0 and { 1, 3, 5, 7 } or { 2, 4, 6, 1 }, list)
  end)
end)
