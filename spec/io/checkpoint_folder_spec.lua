-- SPDX-License-Identifier: MIT
--- What fsdp.save replaces: symbolic links stay; folders that are not checkpoints, and foreign files, are refused by
--- name; temporary folders of ended processes are removed, those of running processes stay.
local foreign = require "spec.support.foreign_folders"
local lfs = require "lfs"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local function failure(fn, ...)
  local ok, message = pcall(fn, ...)
  assert.is_false(ok)
  return (message:gsub("^[^\n]-:%d+: ", ""))
end

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

  it("is found through a link, which stays", function()
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

  it("replaces a checkpoint that is damaged: the format's mark is what counts", function()
    save(path, 1)
    local text = process.read(path .. "/index.json")
    process.write(path .. "/index.json", (text:gsub('"bytes":%d', '"bytes":9')))
    assert.matches("is damaged", failure(value_at, path))
    save(path, 2)
    assert.equal(2, value_at(path))
  end)

  it("loses the temporary folders of killed saves with the next one, and no other folder", function()
    save(path, 1)
    local function temporary(name, owner, more)
      lfs.mkdir(name)
      if owner then process.write(name .. "/owner", owner) end
      lfs.mkdir(name .. "/checkpoint")
      process.write(name .. "/checkpoint/" .. (more or "rank-00000.safetensors"), "x")
    end
    -- The owner file that a save in another process writes, and the end of that process.
    process.write(work .. "/script.lua", [[
      package.path = "lua/?.lua;lua/?/init.lua;" .. package.path
      local lib, ffi = require("moonshard.core.ffi").lib, require "ffi"
      local folder = lib.ms_folder_new(arg[1])
      assert(lib.ms_folder_make(folder) == 0)
      io.write(ffi.string(lib.ms_folder_made(folder)), "\n")
      io.flush()
      io.open(arg[2]):read()                              -- reading from a pipe: waits
    ]])
    shell("mkfifo '%s/wait'", work)
    local child = process.start({ "luajit", work .. "/script.lua", path, work .. "/wait" }, { stdout = work .. "/out" })
    local limit = process.now() + 60
    while not process.read(work .. "/out"):find "\n" and process.now() < limit do process.sleep(0.01) end
    local made = process.read(work .. "/out"):match "^(.-)/checkpoint\n"
    -- Names of its kind, none of which is its own.
    local function like(k)
      return (made:gsub("%x%x$", function(digits) return ("%02x"):format((tonumber(digits, 16) + k) % 256) end))
    end
    local owner = process.read(made .. "/owner")
    assert.matches("^moonshard %x+%-%x+%-%x+%-%x+%-%x+ pid:%[%d+%] %d+ %d+\n$", owner)
    local another_boot = owner:gsub("^moonshard %x+", "moonshard 00000000")
    local another_start = owner:gsub("%d+\n$", "1\n")
    local names = {
      elsewhere = like(1), reused = like(2), with_more = like(3),
      unlike = made:gsub("%x%x$", "xy"),
      empty = like(4), unknown = like(5), bare = like(6),
      link = like(7),
    }
    temporary(names.elsewhere, another_boot)
    temporary(names.reused, another_start)
    temporary(names.with_more, another_start, "mine.txt")
    temporary(names.unlike, another_start)
    temporary(names.unknown, "mine")
    temporary(names.bare, "")
    process.write(names.bare .. "/checkpoint/rank-00000.safetensors", "x")
    lfs.link(names.bare, names.link, true)
    lfs.mkdir(names.empty)
    local function there(name) return lfs.attributes(name, "mode") == "directory" end
    save(path, 2)
    assert.is_true(there(made) and there(names.elsewhere) and there(names.with_more) and there(names.unlike)
      and there(names.unknown))
    assert.equal("x", process.read(names.with_more .. "/checkpoint/mine.txt"))
    assert.equal("x", process.read(names.bare .. "/checkpoint/rank-00000.safetensors"))
    assert.equal("link", lfs.symlinkattributes(names.link, "mode"))
    assert.is_false(there(names.reused) or there(names.empty))
    process.kill(child.pid, 9)
    child:wait(10)
    save(path, 3)
    assert.is_false(there(made))
    assert.equal(3, value_at(path))
  end)

  it("keeps what appears in it while a save is under way", function()
    local index = require "moonshard.io.checkpoint_index"
    save(path, 1)
    local asked, replaceable = 0, index.replaceable
    index.replaceable = function(...)
      asked = asked + 1
      if asked == 2 then process.write(path .. "/notes.txt", "mine") end
      return replaceable(...)
    end
    local ok, message = pcall(save, path, 2)
    index.replaceable = replaceable
    assert.is_false(ok)
    assert.matches("contains 'notes.txt'", message)
    assert.equal("mine", process.read(path .. "/notes.txt"))
    assert.equal(1, value_at(path))
    -- Later still: the file is moved aside with the old checkpoint, and stays there.
    os.remove(path .. "/notes.txt")
    asked = 0
    index.replaceable = function(...)
      asked = asked + 1
      local names, bytes = replaceable(...)
      if asked == 2 then process.write(path .. "/notes.txt", "mine") end
      return names, bytes
    end
    ok, message = pcall(save, path, 2)
    index.replaceable = replaceable
    assert.is_true(ok, message)
    assert.equal(2, value_at(path))
    local found
    for name in lfs.dir(work) do
      found = found or name:find "%.tmp%-" and work .. "/" .. name .. "/checkpoint/notes.txt"
    end
    assert.equal("mine", process.read(found))
  end)

  it("is not replaced when another folder has got its name since the save began", function()
    local index = require "moonshard.io.checkpoint_index"
    save(path, 1)
    save(path .. "-other", 5)
    local asked, replaceable = 0, index.replaceable
    index.replaceable = function(...)
      asked = asked + 1
      local names, bytes = replaceable(...)
      if asked == 2 then
        os.rename(path, path .. "-aside")
        os.rename(path .. "-other", path)
      end
      return names, bytes
    end
    local ok, message = pcall(save, path, 2)
    index.replaceable = replaceable
    assert.is_false(ok)
    assert.matches("was replaced by another process while this one saved there", message)
    assert.equal(5, value_at(path))
    assert.equal(1, value_at(path .. "-aside"))
  end)

  it("is refused at once by all ranks with a pipe for a file of it", function()
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
      { { list = { 1, 2, x = 3 } }, "a list of 2 elements with 1 other keys" },
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
