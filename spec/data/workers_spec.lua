-- SPDX-License-Identifier: MIT
--- Loaders with worker processes.
local ms = require "moonshard"
local data = ms.data
local process = require "spec.support.process"
local raises = require "spec.support.raises"
local message = require "spec.support.message"

local function counted(n) return data.Dataset { size = n, get = function(i) return i end } end

local function epoch_of(loader)
  local list = {}
  for x in loader:epoch() do list[#list + 1] = x:tolist() end
  return list
end

-- The process ids of children of a process that run worker.lua.
local function workers_of(pid)
  local list = {}
  for child in process.read(("/proc/%d/task/%d/children"):format(pid, pid)):gmatch "%d+" do
    if process.read(("/proc/%s/cmdline"):format(child)):find("data/worker.lua", 1, true) then
      list[#list + 1] = tonumber(child)
    end
  end
  return list
end

-- Waits until fn returns true; fails after 20 s (times process.patience).
local function eventually(fn)
  local stop = process.now() + 20 * process.patience
  while not fn() do
    assert.is_true(process.now() < stop, "the condition does not hold after 20 s")
    process.sleep(0.01)
  end
end

describe("a loader with workers", function()
  local loader

  after_each(function()
    if loader then loader:close() end
    loader = nil
    assert.are.same({}, workers_of(process.pid()))
  end)

  for _, n in ipairs { 1, 3 } do
    it(("gives the batches of one without, by %d workers"):format(n), function()
      local scale, names = ms.arange(0, 20):double(), { [0] = "even", "odd" }
      local function twice(i) return scale[i] * 2 end
      local set = data.Dataset { size = 20, get = function(i)
        return { x = twice(i), noise = ms.rand(2), name = names[i % 2], n = i, big = i > 7 }
      end }
      local function batches(count)
        loader = data.DataLoader(set, { batch_size = 6, shuffle = true, seed = 3, workers = count })
        local list = {}
        for _ = 1, 2 do
          for b in loader:epoch() do
            list[#list + 1] = { b.x:tolist(), b.noise:tolist(), b.name, b.n:tolist(), b.big:tolist(), b.x.dtype,
              b.big.dtype }
          end
        end
        loader:close()
        return list
      end
      assert.are.same(batches(0), batches(n))
    end)
  end

  it("gives the rows of tensors, subsets, classes of the script, and what 'collate' returns", function()
    local x = ms.randn(9, 2)
    local Doubled = data.Dataset:extend "Doubled"
    function Doubled:init(t) self.t = t end
    function Doubled:size() return self.t:size(1) end
    function Doubled:get(i) return self.t[i] * 2 end
    for _, set in ipairs { data.TensorDataset(x), data.Subset(data.TensorDataset(x), { 3, 1 }), Doubled(x) } do
      local plain = epoch_of(data.DataLoader(set, { batch_size = 2 }))
      loader = data.DataLoader(set, { batch_size = 2, workers = 2 })
      assert.are.same(plain, epoch_of(loader))
      loader:close()
    end
    local offset = 5
    loader = data.DataLoader(counted(4), { batch_size = 2, workers = 1, collate = function(items)
      return items[1] + offset, items
    end })
    local list = {}
    for first, items in loader:epoch() do list[#list + 1] = { first, items } end
    assert.are.same({ { 6, { 1, 2 } }, { 8, { 3, 4 } } }, list)
  end)

  it("deals a stream among ranks, and continues in the middle of an epoch", function()
    local function new(workers)
      local stream = data.IterableDataset(function(epoch)
        local k = 0
        return function()
          k = k + 1
          return k <= 23 and epoch * 100 + k or nil
        end
      end)
      loader = data.DataLoader(stream, { batch_size = 2, rank = 1, world = 2, workers = workers })
      return loader
    end
    local expected = epoch_of(new(0))
    assert.are.same(expected, epoch_of(new(2)))
    for _ = 1, 3 do loader:next() end
    local sd = loader:state_dict()
    loader:close()
    new(2):load_state_dict(sd)
    local rest = epoch_of(loader)
    assert.are.equal(3, #rest)
    assert.are.equal(1, sd.epoch)
    assert.are.same({ 114, 116 }, rest[1])
    -- A state that is loaded while batches are under way.
    loader:next()
    loader:load_state_dict(sd)
    assert.are.same(rest, epoch_of(loader))
  end)

  it("names the item and the line that failed, in a worker too, and continues afterwards", function()
    local set = data.Dataset { size = 5, get = function(i)
      if i == 4 then error "broken" end
      return i
    end }
    loader = data.DataLoader(set, { batch_size = 2, workers = 2 })
    local text = message(epoch_of, loader)
    assert.matches("^DataLoader: item 4: [^\n]*workers_spec%.lua:%d+: broken$", text)
    loader:set_epoch(0)
    assert.are.same({ 1, 2 }, loader:next():tolist())
    assert.are.equal(text, message(epoch_of, data.DataLoader(set, { batch_size = 2 })))
  end)

  it("raises an error of 'collate' with the line of the script, once, as without workers", function()
    local o = { batch_size = 2, collate = function() error "broken" end }
    local _, text = pcall(epoch_of, data.DataLoader(counted(2), o))
    assert.matches("^[^\n:]*workers_spec%.lua:%d+: broken$", text)
    loader = data.DataLoader(counted(2), { batch_size = 2, workers = 1, collate = o.collate })
    assert.are.same({ false, text }, { pcall(epoch_of, loader) })
  end)

  -- Each in a process of its own, which has loaded nothing else; collate has no other upvalue.
  for path, names in ms.sorted_pairs {
    ["nn.utils"] = { "clip_grad_norm_", "get_total_norm", "parametrize", "prune", "rnn", "stateless" },
    ["nn.utils.rnn"] = { "pad_sequence" }, ["nn.utils.parametrize"] = { "register_parametrization" },
    ["nn.utils.stateless"] = { "functional_call" }, ["optim"] = { "lr_scheduler", "Adam" },
    ["nn"] = { "Linear", "F", "utils" },
  } do
    it(("sees all of %s, the only upvalue of collate"):format(path), function()
      local list = "{ '" .. table.concat(names, "', '") .. "' }"
      local job = process.script(([[
        local ms = require "moonshard"
        local module = ms.%s
        local function collate()
          for _, name in ipairs %s do assert(module[name], name) end
          return 1
        end
        local loader = ms.data.DataLoader({ 1 }, { workers = 1, collate = collate })
        print(loader:next())
        loader:close()
      ]]):format(path, list))
      assert.are.same({ 0, "1\n" }, { job.code, job.stdout }, job.stderr)
    end)
  end

  it("sees the same keys in every public table", function()
    local queue, groups, classes_of = {}, {}, {}
    for _, name in ipairs(getmetatable(ms).modules) do queue[#queue + 1] = { name, ms[name] } end
    for _, name in ipairs { "fft", "linalg", "cuda" } do queue[#queue + 1] = { name, ms[name] } end
    local seen = {}
    for _, entry in ipairs(queue) do
      local path, t, owner = unpack(entry)
      if not seen[t] then
        seen[t] = true
        if owner and rawget(t, "__name") then              -- a class
          if not classes_of[owner] then
            classes_of[owner] = {}
            groups[#groups + 1] = classes_of[owner]
          end
          table.insert(classes_of[owner], { path, t })
        else
          groups[#groups + 1] = { { path, t } }
        end
        for key, value in ms.sorted_pairs(t) do
          local plain = type(value) == "table" and key:find "^%a" and not ms.is_tensor(value)
          if plain and rawget(getmetatable(value) or {}, "__name") == nil then
            queue[#queue + 1] = { path .. "." .. key, value, path }
          end
        end
      end
    end
    -- A worker for each table, because one must not load what another lacks; but one for all classes of a table, which
    -- are loaded with it.
    local found = {}
    for _, group in ipairs(groups) do
      local paths, modules = {}, {}
      for k, entry in ipairs(group) do
        paths[k], modules[k] = unpack(entry)
        found[paths[k]] = true
      end
      local function keys()
        local lines = {}
        for k, module in ipairs(modules) do
          local names = {}
          for key in next, module do names[#names + 1] = tostring(key) end
          table.sort(names)
          lines[k] = paths[k] .. ": " .. table.concat(names, " ")
        end
        return table.concat(lines, "\n")
      end
      loader = data.DataLoader(counted(1), { workers = 1, collate = keys })
      assert.are.equal(keys(), loader:next())
      loader:close()
    end
    for _, path in ipairs { "nn.utils.rnn", "nn.Linear", "optim.lr_scheduler", "data.transforms", "distributions",
      "fsdp" } do
      assert.is_true(found[path], path)
    end
  end)

  it("says which item found the disk full", function()
    local set = data.Dataset { size = 3, get = function(i)
      if i == 2 then data.write_npy("/dev/full", ms.ones(3)) end
      return i
    end }
    loader = data.DataLoader(set, { workers = 1 })
    assert.matches("^DataLoader: item 2: [^\n]*write_npy: cannot write '/dev/full': No space left on device$",
      message(epoch_of, loader))
  end)

  it("says that a worker was killed, and which item it was making", function()
    local set = data.Dataset { size = 4, get = function(i)
      if i == 3 then require("ffi").C.moonshard_worker_kill(require("ffi").C.moonshard_worker_self(), 9) end
      return i
    end }
    loader = data.DataLoader(set, { batch_size = 2, workers = 2 })
    assert.matches("^DataLoader: worker 2 %(process %d+%) was killed by signal 9 while it made item 3$",
      message(epoch_of, loader))
    eventually(function() return #workers_of(process.pid()) == 0 end)
    assert.are.same({ 1, 2 }, (function()
      loader:set_epoch(0)
      return loader:next():tolist()
    end)())
    loader:close()
    loader = data.DataLoader(counted(10), { workers = 1 })
    loader:next()
    process.kill(workers_of(process.pid())[1], process.SIGKILL)
    assert.matches("^DataLoader: worker 1 %(process %d+%) was killed by signal 9", message(epoch_of, loader))
  end)

  it("says that a worker takes too long", function()
    local set = data.Dataset { size = 2, get = function() while true do end end }
    loader = data.DataLoader(set, { workers = 1, timeout = 0.3 })
    assert.matches("^DataLoader: worker 1 %(process %d+%) made no batch within 0.3 s$", message(epoch_of, loader))
  end)

  it("refuses a dataset that a worker cannot get, by the name of the value", function()
    local file = io.tmpfile()
    local set = data.Dataset { size = 2, get = function() return file:read(1) end }
    raises("DataLoader: the dataset['dataset']['fn']: its upvalue 'file' is a userdata, which cannot be sent to another process",
      epoch_of, data.DataLoader(set, { workers = 1 }))
    file:close()
  end)

  it("ends its workers when it is collected", function()
    local temporary = data.DataLoader(counted(4), { workers = 2 })
    temporary:next()
    assert.are.equal(2, #workers_of(process.pid()))
    temporary = nil                                        -- luacheck: ignore 311
    collectgarbage()
    collectgarbage()
    eventually(function() return #workers_of(process.pid()) == 0 end)
  end)

  -- In a process of its own, because the heap of the specs' process may grow.
  it("holds as much memory after 10,000 epochs of 10 items as after 500", function()
    local job = process.script [[
      local ms, process = require "moonshard", require "spec.support.process"
      local function resident(pid)
        return process.read(("/proc/%d/status"):format(pid)):match "VmRSS:%s*(%d+)"
      end
      local set = ms.data.Dataset { size = 10, get = function(i) return ms.full({ 100 }, i) end }
      local loader = ms.data.DataLoader(set, { batch_size = 5, shuffle = true, workers = 1 })
      local epochs = process.tool and 2000 or 10000       -- fewer under a sanitizer or valgrind: slow
      for epoch = 1, epochs do
        for x in loader:epoch() do assert(x:size(1) == 5) end
        if epoch == 500 or epoch == epochs then
          collectgarbage()
          collectgarbage()
          local me = process.pid()
          local workers = process.read(("/proc/%d/task/%d/children"):format(me, me))
          print(ms.memory_stats("cpu").allocated, resident(me), resident(tonumber(workers:match "^%s*(%d+)%s*$")))
        end
      end
    ]]
    assert.are.equal(0, job.code, job.stderr)
    local at = {}
    for allocated, script, worker in job.stdout:gmatch "(%d+)\t(%d+)\t(%d+)\n" do
      at[#at + 1] = { tonumber(allocated), tonumber(script), tonumber(worker) }
    end
    assert.are.equal(2, #at)
    assert.are.equal(at[1][1], at[2][1])
    if process.tool then return end
    for k, who in pairs { [2] = "the script", [3] = "the worker" } do
      local more = at[2][k] - at[1][k]                    -- KiB
      assert.is_true(more < 2048, ("%s grew by %d KiB"):format(who, more))
    end
  end)
end)

describe("workers of a script", function()
  -- Starts a script whose loader has two workers; returns it when both run.
  local function start(body)
    local folder = process.temp_folder()
    process.write(folder .. "/script.lua", ([[
      package.path = "%s/lua/?.lua;%s/lua/?/init.lua;" .. package.path
      local ms = require "moonshard"
      local set = ms.data.Dataset { size = 1000, get = function(i) %s return i end }
      local loader = ms.data.DataLoader(set, { workers = 2 })
      while true do loader:next() end
    ]]):format(process.root, process.root, body))
    local child = process.start({ "luajit", folder .. "/script.lua" },
      { stdout = folder .. "/stdout", stderr = folder .. "/stderr" })
    local list
    eventually(function()
      list = workers_of(child.pid)
      return #list == 2
    end)
    process.sleep(0.2)
    return child, list, folder
  end

  local busy = "while true do end"
  for _, case in ipairs { { "SIGINT", "" }, { "SIGKILL", "" }, { "SIGKILL", busy }, { "SIGINT", busy } } do
    local signal, body = unpack(case)
    it(("end with it after %s%s"):format(signal, body ~= "" and ", in the middle of an item" or ""), function()
      local child, list, folder = start(body)
      process.kill(child.pid, process[signal])
      eventually(function() return child:poll() end)
      for _, pid in ipairs(list) do
        eventually(function() return not process.exists(pid) or not process.runs(pid) end)
      end
      if signal == "SIGINT" then assert.matches("interrupted", process.read(folder .. "/stderr")) end
      process.remove_folder(folder)
    end)
  end
end)
