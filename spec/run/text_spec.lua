-- SPDX-License-Identifier: MIT
--- Output of the training script: samples and their known words, run folders and their numbers, progress.
local cjson = require "cjson"
local lfs = require "lfs"
local process = require "spec.support.process"
local progress = require "moonshard.run.progress"
local run_folder = require "moonshard.run.folder"
local text = require "moonshard.run.text"

describe("known words", function()
  local words = text.words_of { { text = "The moon, the sea.\n(quiet)" } }

  it("are longest runs of letters that a text contains in the same spelling", function()
    local known, total = text.known_words(" the moon 12 Sea quiet; thesea ", words)
    assert.are.same({ 3, 5 }, { known, total })
  end)

  it("do not count where a sample ends, or may begin, inside one", function()
    assert.are.same({ 1, 1 }, { text.known_words("oon the se", words) })
    assert.are.same({ 0, 0 }, { text.known_words("moon", words) })
    assert.are.same({ 0, 0 }, { text.known_words("", words) })
  end)
end)

describe("a run's folder", function()
  it("writes numbers with 9 digits, or all of them, and what JSON cannot express as null", function()
    local o = { a = 1 / 3, b = 12, c = 0 / 0, d = math.huge, e = 'q"\n\\', f = true, g = { "x", "y" }, h = 2 ^ 52,
      i = {} }
    local line = run_folder.json(o)
    assert.are.equal(
      '{"a": 0.333333333, "b": 12, "c": null, "d": null, "e": "q\\"\\n\\\\", "f": true, "g": ["x", "y"], '
      .. '"h": 4503599627370496, "i": []}', line)
    assert.are.equal('q"\n\\', cjson.decode(line).e)
    assert.are.equal(1 / 3, cjson.decode(run_folder.json(o, { "a" }, { digits = 17 })).a)
    assert.are.equal('{"b": 12, "a": 0.333333333}', run_folder.json(o, { "b", "z", "a" }))
    -- The shortest text that reads back as the same number.
    assert.are.equal('{"lr": 0.003}', run_folder.json({ lr = 0.003 }, nil, { digits = 17 }))
  end)

  it("is a new one each time, and never one that holds a run", function()
    local folder = process.temp_folder()
    local here = lfs.currentdir()
    finally(function()
      lfs.chdir(here)
      process.remove_folder(folder)
    end)
    lfs.chdir(folder)
    assert.are.equal("runs/001-a", run_folder.new(nil, "-a", { x = 1 }).path)
    assert.are.equal("runs/002-b", run_folder.new(nil, "-b", {}).path)
    local run = assert(run_folder.new("deep/down", "", { x = 1 }))
    run:metric({ step = 1, loss = 2.5 }, { "step", "loss" })
    run:sample(1, "text")
    assert.are.equal('{"step": 1, "loss": 2.5}\n', process.read "deep/down/metrics.jsonl")
    assert.are.equal('{"x": 1}\n', process.read "deep/down/config.json")
    local none, err = run_folder.new("deep/down", "", {})
    assert.is_nil(none)
    assert.matches("already contains a run", err)
    for _, name in ipairs { "config.json", "samples.txt" } do         -- file of another program
      lfs.mkdir(name .. "-is-here")
      process.write(name .. "-is-here/" .. name, "mine")
      none, err = run_folder.new(name .. "-is-here", "", {})
      assert.is_nil(none)
      assert.matches("already contains " .. name, err)
      assert.are.equal("mine", process.read(name .. "-is-here/" .. name))
    end
    process.write("deep/down/step-000009.safetensors", "")
    process.write("deep/down/step-000010.safetensors", "")
    assert.are.equal("deep/down/step-000010.safetensors", run_folder.find_checkpoint "deep/down")
    assert.matches("there is no checkpoint", select(2, run_folder.find_checkpoint "runs/001-a"))
  end)
end)

describe("progress", function()
  local function run(style, n)
    local out = {}
    local bar = progress.new { total = n, style = style, write = function(s) out[#out + 1] = s end }
    for step = 1, n do
      bar:step(step, step, "loss 1")
      if step == 2 then bar:say "validation" end
    end
    bar:finish()
    return table.concat(out)
  end

  it("is lines without escape codes, at most some 20 of them", function()
    assert.are.equal("step 1/3  loss 1\nstep 2/3  loss 1\nvalidation\nstep 3/3  loss 1\n", run("lines", 3))
    local _, lines = run("lines", 1000):gsub("\n", "")
    assert.is_true(lines >= 20 and lines <= 22)
  end)

  it("is one line drawn again on a terminal, cleared before other lines", function()
    assert.are.equal("\r[#######.............] 1/3  loss 1\27[K\r[#############.......] 2/3  loss 1\27[K\r\27[Kvalidation\n"
      .. "\r[####################] 3/3  loss 1\27[K\n", run("bar", 3))
  end)
end)
