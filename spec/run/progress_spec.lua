-- SPDX-License-Identifier: MIT
--- Progress on terminals of changing width, in files, and of the library's own long operations.
local process = require "spec.support.process"
local progress = require "moonshard.run.progress"
local ranks = require "spec.support.ranks"
local task = require "moonshard.core.task"

describe("a progress line", function()
  it("fits a terminal of any width, also one that changes", function()
    local Pty = require "spec.support.pty"
    local script = process.temp_folder()
    finally(function() process.remove_folder(script) end)
    process.write(script .. "/a.lua", [[
      local bar = require "moonshard.run.progress".new { total = 8 }
      for step = 1, 8 do
        local n = io.read()
        bar.last_draw = -math.huge
        bar:step(step, 0, "loss 1.2345  lr 1.00e-03  norm 1.00  12.3 K tokens/s  99 s left" .. ("x"):rep(200))
      end
      bar:say "done"
      bar:finish()
    ]])
    local pty = Pty.start({ "sh", "-c", "stty -echo; echo ready; exec luajit " .. script .. "/a.lua" },
      { LUA_PATH = ("@/lua/?.lua;@/lua/?/init.lua;;"):gsub("@", process.root), TERM = "xterm", MOONSHARD_PROGRESS = "bar" })
    assert(pty:expect "ready\r\n")
    for step, width in ipairs { 100, 80, 61, 59, 40, 20, 5, 200 } do
      pty:resize(width)
      pty:type "\n"
      local drawn = assert(pty:expect "\27[K")
      local line = drawn:match "\r([^\r\n]*)\27%[K$"
      assert.are.equal(width - 1, #line, line)
      local cells = #(line:match "^%[([#.]*)%]" or "")
      assert.are.equal(width >= 60 and 20 or width >= 40 and 8 or 0, cells)
      if width >= 20 then assert.is_truthy(line:find(("%d/8  loss"):format(step), 1, true)) end
    end
    assert(pty:expect "done\r\n")
    assert.are.equal(0, (pty:finish()))
  end)

  it("has no escape codes in a file, and nothing at all when it is silent", function()
    local script = [[
      local bar = require "moonshard.run.progress".new { total = 40, silent = arg[1] == "silent" }
      for step = 1, 40 do bar:step(step, step, "loss 1") end
      bar:say "done"
      bar:finish()
    ]]
    local job = ranks.run(0, script, { env = { MOONSHARD_PROGRESS = false, TERM = "xterm" } })
    assert.are.equal(0, job.code, job.stderr)
    assert.is_nil(job.stdout:find "[\27\r]")
    assert.matches("^step  1/40  loss 1\nstep  2/40  loss 1\n.*step 40/40  loss 1\ndone\n$", job.stdout)
    assert.are.equal("", ranks.run(0, script, { args = { "silent" } }).stdout)
  end)

  it("formats durations for people", function()
    local texts = {}
    for k, s in ipairs { 0.4, 119, 120, 3725, 7200, 86400, 1 / 0 } do texts[k] = progress.duration(s) end
    assert.are.same({ "0 s", "119 s", "2 min 0 s", "62 min 5 s", "2 h 0 min", "24 h 0 min", "?" }, texts)
  end)

  it("works without a total", function()
    local out = {}
    local bar = progress.new { style = "bar", write = function(s) out[#out + 1] = s end }
    bar:step(3, 100, "loss 1")
    assert.are.equal("\r3  loss 1\27[K", table.concat(out))
    task.shown_by(nil)
  end)
end)

describe("long operations", function()
  local function shown(style, seconds)
    local out = {}
    local bar = progress.new { total = 9, style = style, write = function(s) out[#out + 1] = s end,
      width = function() return 80 end }
    finally(function() task.shown_by(nil) end)
    task.report("saving", 0, 4)
    bar.task_began, bar.task_shown = bar.task_began - seconds, bar.task_shown - seconds
    for k = 1, 4 do
      task.report("saving", k, 4)
      bar.last_draw = -math.huge
    end
    return table.concat(out)
  end

  it("are shown once they take over a second, with rate and time left", function()
    assert.are.equal("", shown("bar", 0.5))
    assert.are.equal("", shown("lines", 0.5))
    assert.matches("^\r%[#####%.+%] saving 1/4  0%.5/s  6 s left\27%[K\r%[##########%.+%] saving 2/4  1/s  2 s left",
      shown("bar", 2))
    assert.are.equal("saving: 2 s\n", shown("lines", 2))
    assert.matches("^saving: 1/4  60 s left\nsaving: 20 s\n$", shown("lines", 20))
  end)

  it("report their parts from the first to the last", function()
    local ms = require "moonshard"
    local said = {}
    local folder = process.temp_folder()
    finally(function()
      task.shown_by(nil)
      process.remove_folder(folder)
    end)
    task.shown_by(function(what, done, total) said[#said + 1] = ("%s %d/%d"):format(what, done, total) end)
    local function says(...)
      assert.are.equal(table.concat({ ... }, ", "), table.concat(said, ", "))
      said = {}
    end
    ms.save(folder .. "/a", { a = ms.ones(1), b = ms.ones(2) })
    says("saving 0/2", "saving 1/2", "saving 2/2")
    ms.load(folder .. "/a")
    says("loading 0/2", "loading 1/2", "loading 2/2")
    local model = ms.nn.Linear(1, 1)
    ms.fsdp.save(folder .. "/b", model)
    says("saving 0/2", "saving 1/2", "saving 2/2")
    ms.fsdp.load(folder .. "/b", model)
    says("loading 0/1", "loading 1/1")
    process.write(folder .. "/text", ("to be or not to be "):rep(30))
    local corpus = ms.data.corpus(folder .. "/text")
    says("reading 0/1", "reading 1/1")
    corpus:fingerprint()
    says("comparing 0/1", "comparing 1/1")
    for _ in ms.data.batches(corpus, { context = 8, batch = 1 }):validation(1) do end
    assert.are.equal("validating 0/", said[1]:sub(1, 13))
    local last = said[#said]
    assert.are.equal(last:match "%d+/", last:match "/(%d+)" .. "/")
  end)
end)
