-- SPDX-License-Identifier: MIT
--- ms.run changes no file that is not its own, writes through no link, waits for no pipe; and what fails on one rank
--- fails on all.
local lfs = require "lfs"
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local folder
local function path(name) return folder .. "/" .. name end

-- Starts a run in a process of its own, because it may wait for a pipe. Returns its status and its output.
local function record(out, resume)
  local script = path "script.lua"
  process.write(script, ([[
    package.path = "%s/lua/?.lua;%s/lua/?/init.lua;" .. package.path
    local ms = require "moonshard"
    local model = ms.nn.Linear(2, 1)
    local run = ms.run.start { out = %q, resume = %s, quiet = true, model = model,
      optimizer = ms.optim.SGD(model:parameters(), { lr = 1 }), sinks = { "csv" } }
    run:log { loss = 1 }
    run:text("notes", "text")
    run:image("pic", ms.zeros(2, 2))
    run:checkpoint()
    run:finish()
  ]]):format(process.root, process.root, path(out), tostring(resume)))
  local child = process.start({ "luajit", script }, { stdout = script .. ".out", stderr = script .. ".err" })
  local status = child:wait(10 * process.patience)
  if not status then child:stop() end
  return status, process.read(script .. ".err")
end

local function fifo(name) assert(os.execute(("mkfifo '%s'"):format(path(name))) == 0) end
local function link(to, name) assert(lfs.link(path(to), path(name), true)) end

describe("a run's folder with files of others", function()
  before_each(function() folder = process.temp_folder() end)
  after_each(function() process.remove_folder(folder) end)

  local names = { "report.html", "metrics.csv", "metrics.csv.tmp", "media.jsonl", "superseded.jsonl", "config.json",
    "config.json.tmp", "samples.txt", "step-000001.safetensors", "metrics.jsonl" }
  for _, name in ipairs(names) do
    local said = name == "metrics.jsonl" and "a run" or name
    it("is refused by a new run if it contains " .. name .. ": a file, a link, a pipe", function()
      for _, kind in ipairs { "file", "link", "pipe" } do
        lfs.mkdir(path(kind))
        process.write(path "other", "the user's")
        if kind == "file" then process.write(path(kind .. "/" .. name), "the user's")
        elseif kind == "link" then link("other", kind .. "/" .. name)
        else fifo(kind .. "/" .. name) end
        local ok, err = pcall(ms.run.start, { out = path(kind), quiet = true })
        assert.is_false(ok)
        assert.is_truthy(err:find(("'%s' already contains %s; give another folder"):format(path(kind), said), 1, true), err)
        if kind ~= "pipe" then assert.are.equal("the user's", process.read(path(kind .. "/" .. name))) end
      end
    end)
  end

  it("keeps a text file and a folder that have the names of a text and of the images", function()
    lfs.mkdir(path "a")
    process.write(path "a/notes.txt", "the user's")
    local status, err = record("a", false)
    assert.are.equal(0, status, err)
    assert.is_truthy(err:find("a/notes.txt: File exists", 1, true), err)
    assert.are.equal("the user's", process.read(path "a/notes.txt"))
    lfs.mkdir(path "b")
    lfs.mkdir(path "b/images")
    assert.is_false((pcall(ms.run.start, { out = path "b", quiet = true })))
  end)

  for _, name in ipairs { "config.json", "config.json.tmp", "media.jsonl", "superseded.jsonl", "report.html",
    "metrics.csv", "metrics.jsonl" } do
    it("is refused by a run that continues if " .. name .. " is a link or a pipe", function()
      for _, kind in ipairs { "link", "pipe" } do
        assert.are.equal(0, (record(kind, false)))
        local metrics = process.read(path(kind .. "/metrics.jsonl"))
        process.write(path "other", name == "metrics.jsonl" and metrics or "the user's")
        os.remove(path(kind .. "/" .. name))
        if kind == "link" then link("other", kind .. "/" .. name) else fifo(kind .. "/" .. name) end
        local before = process.read(path "other")
        local status, err = record(kind, true)
        assert.are.equal(1, status, err)                -- and not stopped after the limit
        -- A pipe in place of the metrics is no run to continue.
        assert.is_truthy(err:find(kind == "link" and "is a symbolic link, expected a regular file"
          or name == "metrics.jsonl" and "already contains a run" or "is a named pipe, expected a regular file", 1, true), err)
        assert.are.equal(before, process.read(path "other"))
        if name ~= "metrics.jsonl" then assert.are.equal(metrics, process.read(path(kind .. "/metrics.jsonl"))) end
      end
    end)
  end

  it("is not left through a link in place of its images or of one image", function()
    assert.are.equal(0, (record("a", false)))
    process.write(path "other", "the user's")
    os.remove(path "a/images/pic-000001.png")
    link("other", "a/images/pic-000001.png")
    -- Without its checkpoint the run begins at the first step again.
    os.remove(path "a/step-000001.safetensors")
    local status, err = record("a", true)
    assert.are.equal(0, status, err)
    assert.is_truthy(err:find("pic-000001.png' is a symbolic link, expected a regular file", 1, true), err)
    assert.are.equal("the user's", process.read(path "other"))
    process.remove_folder(path "a/images")
    lfs.mkdir(path "others")
    link("others", "a/images")
    status, err = record("a", true)
    assert.are.equal(0, status, err)
    assert.is_truthy(err:find("a/images' is a symbolic link, expected a folder", 1, true), err)
    for name in lfs.dir(path "others") do assert.is_truthy(name:find "^%.") end
  end)

  it("continues after the temporary files of a process that was killed", function()
    assert.are.equal(0, (record("a", false)))
    for _, name in ipairs { "config.json.tmp", "metrics.csv.tmp" } do process.write(path("a/" .. name), "half") end
    local status, err = record("a", true)
    assert.are.equal(0, status, err)
    assert.is_nil(lfs.attributes(path "a/config.json.tmp"))
  end)
end)

for _, world in ipairs { 2, 3 } do
  ranks.describe(world, "a checkpoint that rank 0 cannot write", function()
    local dist = ms.dist
    it("fails on every rank with that reason, and calls after dist.recover match", function(rank)
      local out = ("/tmp/moonshard-other-files-%d"):format(process.parent())
      for _, shard in ipairs { true, false } do
        local model = ms.nn.Linear(4, 4)
        if shard then ms.fsdp.fully_shard(model) end
        local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.1 })
        model(ms.ones(2, 4)):sum():backward()
        optimizer:step()
        local run = ms.run.start { out = out .. tostring(shard), quiet = true, model = model, optimizer = optimizer }
        local ok, err = pcall(run.checkpoint, run, { path = "/proc/none/x.safetensors" })
        assert.is_false(ok)
        assert.matches("cannot create '/proc/none/x.safetensors'", tostring(err))
        if rank > 0 then assert.matches("rank 0 failed: ", tostring(err)) end
        dist.recover()
        for k = 1, 3 do
          local t = ms.full({ 1 }, k)
          dist.all_reduce(t)
          assert.are.equal(world * k, t:item())
        end
        run:checkpoint()
        run:finish()
        dist.barrier()
        if rank == 0 then process.remove_folder(out .. tostring(shard)) end
      end
    end)
  end)
end
