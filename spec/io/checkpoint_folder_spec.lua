-- SPDX-License-Identifier: MIT
--- What fsdp.save replaces: symbolic links stay; folders that are not checkpoints, and foreign files, are refused by
--- name; temporary folders of ended processes are removed, those of running processes stay.
local foreign = require "spec.support.foreign_folders"
local lfs = require "lfs"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local failure = require "spec.support.message"

describe("the folder of a sharded checkpoint", function()
  local ms, work, path

  setup(function()
    ms = require "moonshard"
    work = process.temp_folder()
  end)
  teardown(function() process.remove_folder(work) end)

  local function model_of(value)
    local model = ms.nn.Linear(3, 2)
    ms.no_grad(function() for _, p in ipairs(model:parameters()) do p:fill_(value) end end)
    return model
  end

  local function save(to, value) ms.fsdp.save(to, model_of(value)) end

  local function value_at(from)
    local model = model_of(0)
    ms.fsdp.load(from, model)
    return model.weight:max():item()
  end

  local function shell(command, ...) assert.equal(0, os.execute(command:format(...))) end

  before_each(function()
    process.remove_folder(work)
    lfs.mkdir(work)
    path = work .. "/checkpoint"
  end)

  it("is found through a link, which is kept", function()
    lfs.mkdir(work .. "/store")
    save(work .. "/store/real", 1)
    lfs.link("store/real", work .. "/latest", true)
    save(work .. "/latest", 2)
    assert.equal("store/real", lfs.symlinkattributes(work .. "/latest", "target"))
    assert.equal(2, value_at(work .. "/store/real"))
    assert.equal(2, value_at(work .. "/latest/"))
    lfs.mkdir(work .. "/empty")
    lfs.link(work .. "/empty", work .. "/to-empty", true)
    lfs.link("to-empty", work .. "/to-link", true)
    save(work .. "/to-link", 3)
    assert.equal(3, value_at(work .. "/empty"))
    for _, folder in ipairs { work, work .. "/store" } do
      for name in lfs.dir(folder) do assert.is_nil(name:find("tmp", 1, true), name) end
    end
  end)

  for _, case in ipairs(foreign.list) do
    it("is not written over " .. case[1] .. ", and nothing changes", function()
      case[2](path, save)
      local before = foreign.everything(work)
      assert.matches(case[3], failure(save, path, 2))
      assert.equal(before, foreign.everything(work))
    end)
  end

  it("loses the temporary folders of killed saves with the next one, and no other folder", function()
    save(path, 1)
    local function temporary(name, more)
      lfs.mkdir(name)
      process.write(name .. "/" .. (more or "rank-00000.safetensors"), "x")
    end
    -- Another process makes a temporary folder and waits until it is killed.
    process.write(work .. "/script.lua", [[
      package.path = "lua/?.lua;lua/?/init.lua;" .. package.path
      local lib, ffi = require("moonshard.core.ffi").lib, require "ffi"
      local folder = lib.ms_folder_new(arg[1])
      assert(lib.ms_folder_make(folder) == 0)
      io.write(ffi.string(lib.ms_folder_path(folder, 1)), "\n")
      io.flush()
      io.open(arg[2]):read()                              -- reading from a pipe: waits
    ]])
    shell("mkfifo '%s/wait'", work)
    local child = process.start({ "luajit", work .. "/script.lua", path, work .. "/wait" }, { stdout = work .. "/out" })
    finally(function() process.kill(child.pid, 9) end)
    local limit = process.now() + 60
    while not process.read(work .. "/out"):find "\n" and process.now() < limit do process.sleep(0.01) end
    local made = process.read(work .. "/out"):match "^[^\n]+"
    assert.matches("/checkpoint%.tmp%-%x+%-%x+%-" .. child.pid .. "%-%d+$", made)
    -- Returns a name of the same form: one part is replaced, and the random digits differ in each.
    local digit = 0
    local function like(pattern, by)
      digit = digit + 1
      return (made:gsub("%.tmp%-%x%x", (".tmp-%02x"):format(digit)):gsub(pattern, by))
    end
    local another_start = { "%-%d+$", "-1" }
    local gone = { reused = like(unpack(another_start)), empty = like(unpack(another_start)) }
    local replaced = like("%.tmp(.*)%-%d+$", ".old%1-1")
    local kept = {
      elsewhere = like("%-%x+%-(%d+%-%d+)$", "-0123456789abcdef-%1"), with_more = like(unpack(another_start)),
      unlike = like("%-%d+$", "-xy"), of_earlier = path .. ".tmp-0123456789abcdef",
      users = like("%.tmp(.*)%-%d+$", ".old%1-1"), runs = like("%-x$", ""),
    }
    for name, folder in pairs(kept) do
      temporary(folder, name == "with_more" and "mine.txt" or name == "users" and "rank-00000.safetensors")
    end
    temporary(gone.reused)
    process.write(gone.reused .. "/rank-00001.safetensors" .. made:match "%.tmp.*", "x")
    lfs.mkdir(gone.empty)
    save(path .. "-other", 7)
    os.rename(path .. "-other", replaced)
    local link = like(unpack(another_start))
    lfs.link(kept.users, link, true)
    save(path, 2)
    for name, folder in pairs(kept) do
      assert.equal("x", process.read(folder .. "/" .. (name == "with_more" and "mine.txt" or "rank-00000.safetensors")),
        name)
    end
    assert.equal("link", lfs.symlinkattributes(link, "mode"))
    assert.equal("directory", lfs.attributes(made, "mode"))
    for name, folder in pairs(gone) do assert.is_nil(lfs.attributes(folder), name) end
    assert.is_nil(lfs.attributes(replaced))
    process.kill(child.pid, 9)
    child:wait(10)
    save(path, 3)
    assert.is_nil(lfs.attributes(made))
    assert.equal(3, value_at(path))
  end)

  it("loses the files that a killed save moved beside its own with the next save, and no others", function()
    save(path, 1)
    local left = path .. ".tmp-0123456789abcdef-%s-%d-1"
    local lib = require("moonshard.core.ffi").lib
    local folder = lib.ms_folder_new(path .. "-other")
    assert.equal(0, lib.ms_folder_make(folder))
    local host = require("ffi").string(lib.ms_folder_path(folder, 1)):match "%-(%x+)%-%d+%-%d+$"
    lib.ms_folder_free(folder)
    local moved = path .. "/rank-00001-0123456789abcdef.safetensors"
    process.write(moved, "x")
    assert.matches("contains 'rank%-00001%-0123456789abcdef.safetensors'", failure(save, path, 2))
    lfs.mkdir(left:format(host, process.pid()))
    save(path, 2)
    assert.is_nil(lfs.attributes(moved))
    assert.is_nil(lfs.attributes(left:format(host, process.pid())))
    assert.equal(2, value_at(path))
  end)

  -- Saves, and calls `change` once the folder that has the name has been examined.
  local function save_while(value, change)
    local index = require "moonshard.io.checkpoint_index"
    local asked, replaceable = 0, index.replaceable
    index.replaceable = function(...)
      asked = asked + 1
      if asked == 1 then
        local names, bytes, unused = replaceable(...)
        change()
        return names, bytes, unused
      end
      return replaceable(...)
    end
    local ok, message = pcall(save, path, value)
    index.replaceable = replaceable
    return ok, message
  end

  it("keeps what appears in it during a save", function()
    save(path, 1)
    local ok, message = save_while(2, function() process.write(path .. "/notes.txt", "mine") end)
    assert.is_false(ok)
    assert.matches("the checkpoint '" .. path:gsub("%p", "%%%0") .. "' contains 'notes.txt'", message)
    assert.equal("mine", process.read(path .. "/notes.txt"))
    assert.equal(1, value_at(path))
    for name in lfs.dir(work) do assert.is_nil(name:find("%.tmp%-") or name:find "%.old%-", name) end
  end)

  it("is the last one saved if another one gets its name during the save", function()
    save(path, 1)
    save(path .. "-other", 5)
    local ok, message = save_while(2, function()
      os.rename(path, path .. "-aside")
      os.rename(path .. "-other", path)
    end)
    assert.is_true(ok, message)
    assert.equal(2, value_at(path))
    assert.equal(1, value_at(path .. "-aside"))
    -- A folder that is not a checkpoint and gets the name during a save is not replaced.
    ok, message = save_while(3, function()
      os.rename(path, path .. "-second")
      lfs.mkdir(path)
      process.write(path .. "/rank-00000.safetensors", "mine")
    end)
    assert.is_false(ok)
    assert.matches("exists and is not a checkpoint: it contains 'rank%-00000.safetensors'", message)
    assert.equal("mine", process.read(path .. "/rank-00000.safetensors"))
  end)

  it("is saved whole by each of several processes at once", function()
    process.write(work .. "/script.lua", [[
      package.path = "lua/?.lua;lua/?/init.lua;" .. package.path
      local ms = require "moonshard"
      local model = ms.nn.Linear(3, 2)
      ms.no_grad(function() for _, p in ipairs(model:parameters()) do p:fill_(tonumber(arg[2])) end end)
      for _ = 1, arg[3] do ms.fsdp.save(arg[1], model, nil, { extra = { value = tonumber(arg[2]) } }) end
    ]])
    local children = {}
    for k = 1, 4 do
      children[k] = process.start({ "luajit", work .. "/script.lua", path, tostring(k), "10" },
        { stderr = work .. "/err" .. k })
    end
    for k, child in ipairs(children) do
      assert.equal(0, child:wait(60) or child:stop(), process.read(work .. "/err" .. k))
    end
    local model = model_of(0)
    local value = ms.fsdp.load(path, model).value
    for _, p in ipairs(model:parameters()) do assert.is_true(p:equal(ms.full(p.shape, value))) end
    for name in lfs.dir(work) do assert.is_nil(name:find("checkpoint.", 1, true), name) end
  end)

  it("has one path: ranks that name several are all refused, and nothing is written", function()
    save(work .. "/a", 1)
    save(work .. "/b", 1)
    local function contents()
      return foreign.everything(work .. "/a") .. foreign.everything(work .. "/b") .. table.concat(process.names(work), " ")
    end
    local before = contents()
    local r = ranks.run(2, [[
      local ms = require "moonshard"
      local rank, work = ms.dist.rank(), os.getenv "CHECKPOINT_WORK"
      for _, call in ipairs { "save", "load" } do
        for _, names in ipairs { { "/a", "/b" }, { "/a", "/none" }, { "/new/x", "/b" } } do
          local ok, message = pcall(ms.fsdp[call], work .. names[rank + 1], ms.nn.Linear(3, 2))
          local want = ("%s: the ranks name different folders: '%s%s' on rank 0, '%s%s' on rank 1"):format(call, work,
            names[1], work, names[2])
          io.write(not ok and message:find(want, 1, true) and "refused" or tostring(message), "\n")
        end
      end
    ]], { env = { CHECKPOINT_WORK = work } })
    assert.equal(0, r.code, r.stderr)
    assert.equal(("refused\n"):rep(12), r.stdout)
    assert.equal(before, contents())
  end)

  it("is refused at once by all ranks if one of its files is a pipe", function()
    for _, name in ipairs { "index.json", "rank-00000.safetensors" } do
      save(path, 1)
      os.remove(path .. "/" .. name)
      shell("mkfifo '%s/%s'", path, name)
      local r = ranks.run(2, [[
        local ms = require "moonshard"
        ms.dist.barrier()
        local begun = ms.time()
        local ok, message = pcall(ms.fsdp.load, os.getenv "CHECKPOINT_PATH", ms.nn.Linear(3, 2))
        local took = ms.time() - begun
        io.write(tostring(ok), " ", (message:gsub("\n.*", "")), took < 10 and "" or " LATE", "\n")
      ]], { env = { CHECKPOINT_PATH = path } })
      assert.equal(0, r.code, r.stderr)
      local n = 0
      for line in r.stdout:gmatch "[^\n]+" do
        n = n + 1
        assert.matches("^false .*load: .*" .. (name:gsub("%p", "%%%0")) .. ".*", line)
        assert.is_nil(line:find "LATE", line)
      end
      assert.equal(2, n)
      process.remove_folder(path)
    end
  end)

  it("keeps tables as they are, or refuses them", function()
    local model = model_of(1)
    for _, case in ipairs {
      { { list = { 1, 2, x = 3 } }, "a list of length 2 that also has other keys %(1%)" },
      { { map = { [10] = 1 } }, "a table with the key 10" },
      { { map = { [true] = 1 } }, "a table with the key true" },
    } do
      assert.matches(case[2], failure(ms.fsdp.save, path, model, { extra = case[1] }))
    end
    local extra = { a = { 1, { 2, 0.1 } }, b = { c = {} }, ["1"] = "x", text = "é\n\"\\" }
    ms.fsdp.save(path, model, { extra = extra })
    assert.same(extra, (ms.fsdp.load(path, model)))
  end)
end)
