-- SPDX-License-Identifier: MIT
--- Loops over one DataLoader, one in another, beside each other, left and begun again: each is an epoch of its own.
local ms = require "moonshard"
local data = ms.data

local N = 6
local function list_of(n)
  local items = {}
  for k = 1, n do items[k] = k end
  return items
end

-- Loaders of a batch for each item 1 to N.
local kinds = {
  { "in order", {} },
  { "shuffled", { shuffle = true, seed = 7 } },
  { "shuffled, with workers", { shuffle = true, seed = 7, workers = 2 } },
  { "of a stream", {}, true },
  { "of a stream, with workers", { workers = 2 }, true },
}
local loaders = {}
local function new(kind, alone)
  local source = list_of(N)
  if kind[3] then
    source = data.IterableDataset(function(epoch)
      local k = 0
      return function()
        k = k + 1
        if k <= N then return (k + epoch) % N + 1 end
      end
    end)
  end
  local loader = data.DataLoader(source, { shuffle = kind[2].shuffle, seed = kind[2].seed,
    workers = not alone and kind[2].workers or 0 })
  loaders[#loaders + 1] = loader
  return loader
end

-- The order of an epoch, by one loop alone and without workers.
local function epoch_alone(kind, epoch)
  local loader, seen = new(kind, true), {}
  loader:set_epoch(epoch)
  for x in loader:epoch() do seen[#seen + 1] = x:item() end
  return seen
end

after_each(function()
  for _, loader in ipairs(loaders) do loader:close() end
  loaders = {}
end)

describe("loops over one loader", function()
  for _, kind in ipairs(kinds) do
    it("may be nested: " .. kind[1], function()
      local loader, outer, inner = new(kind), {}, {}
      for x in loader:epoch() do
        outer[#outer + 1] = x:item()
        local seen = {}
        for y in loader:epoch() do seen[#seen + 1] = y:item() end
        inner[#inner + 1] = seen
        assert.are.equal(outer[#outer], x:item())
      end
      assert.are.same(epoch_alone(kind, 0), outer)
      assert.are.equal(N, #inner)
      for k = 1, N do assert.are.same(epoch_alone(kind, k), inner[k]) end
      assert.are.same({ N + 1, 0 }, { loader.epochs, loader.done })
    end)

    it("may run beside each other: " .. kind[1], function()
      local loader, first, second = new(kind), {}, {}
      local a, b = loader:epoch(), loader:epoch()
      for _ = 1, N do
        local x, y = a(), b()
        first[#first + 1], second[#second + 1] = x:item(), y:item()
      end
      assert.is_nil(a())
      assert.is_nil(b())
      assert.is_nil(a())
      assert.are.same({ epoch_alone(kind, 0), epoch_alone(kind, 1) }, { first, second })
    end)

    it("may be left and begun again: " .. kind[1], function()
      local loader, outer, inner = new(kind), {}, {}
      for x in loader:epoch() do
        outer[#outer + 1] = x:item()
        for y in loader:epoch() do
          inner[#inner + 1] = y:item()
          if #inner % 2 == 0 then break end
        end
        if #outer == 3 then break end
      end
      local all = epoch_alone(kind, 0)
      assert.are.same({ all[1], all[2], all[3] }, outer)
      local expected = {}
      for k = 1, 3 do
        local one = epoch_alone(kind, k)
        expected[2 * k - 1], expected[2 * k] = one[1], one[2]
      end
      assert.are.same(expected, inner)
      local again = {}
      for x in loader:epoch() do again[#again + 1] = x:item() end
      assert.are.same(epoch_alone(kind, 4), again)
    end)
  end

  it("resume the outermost one from a state that was saved in it, also after and in an inner loop", function()
    for _, within in ipairs { false, true } do
      local loader, state, rest = new(kinds[2]), nil, {}
      for x in loader:epoch() do
        local last = x:item()
        if state then rest[#rest + 1] = last end
        for _ in loader:epoch() do
          if within and loader:state_dict().batches == 2 then state = state or loader:state_dict() end
        end
        if not within and loader:state_dict().batches == 2 then state = loader:state_dict() end
      end
      assert.are.same({ 0, 2 }, { state.epoch, state.batches })
      local other, seen = new(kinds[2]), {}
      other:load_state_dict(state)
      for x in other:epoch() do seen[#seen + 1] = x:item() end
      assert.are.same(rest, seen)
    end
  end)

  it("leave `next` where the last batch was, and end when it took their last one", function()
    local loader, seen = new(kinds[1]), {}
    for x in loader:epoch() do
      seen[#seen + 1] = x:item()
      seen[#seen + 1] = loader:next():item()
    end
    assert.are.same({ 1, 2, 3, 4, 5, 6 }, seen)
    assert.are.equal(1, loader:next():item())
    assert.are.same({ 1, 1 }, { loader.epochs, loader.done })
  end)

  it("between two calls of `next` do not change what it returns", function()
    local alone, loader, seen, right = new(kinds[2]), new(kinds[2]), {}, {}
    for k = 1, 2 * N do
      if k == N + 1 then alone:set_epoch(N + 1) end          -- the loops have taken epochs 1 to N
      right[k], seen[k] = alone:next():item(), loader:next():item()
      if k <= N then
        for _ in loader:epoch() do
          if k % 2 == 0 then break end
        end
      end
    end
    assert.are.same(right, seen)
  end)

  it("whose first item fails begin the same epoch again, also a resumed one", function()
    local broken = true
    local set = data.Dataset { size = 4, get = function(i)
      if broken then error "no" end
      return i
    end }
    local loader = data.DataLoader(set, { shuffle = true, seed = 3 })
    loader:load_state_dict { epoch = 5, batches = 1, items = 1, seed = 3, size = 4 }
    assert.is_false(pcall(loader:epoch()))
    broken = false
    local n = 0
    for _ in loader:epoch() do n = n + 1 end
    assert.are.same({ 3, 6 }, { n, loader.epochs })
  end)
end)
