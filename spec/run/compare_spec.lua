-- SPDX-License-Identifier: MIT
--- scripts/compare: runs side by side in the terminal and as a page.
local browser = require "spec.support.browser"
local ms = require "moonshard"
local process = require "spec.support.process"

local folder
local function path(name) return folder .. "/" .. name end

local function record(name, lr, first)
  local run = ms.run.start { out = path(name), config = { lr = lr, same = 1 }, quiet = true }
  for k = 1, 10 do run:log { loss = k == 10 and 2 * first or first / k, accuracy = k == 4 and 0.9 or 0.1 } end
  run:finish()
end

local function compare(words) return process.shell("LC_ALL=C luajit scripts/compare " .. words) end

describe("scripts/compare", function()
  lazy_setup(function()
    folder = process.temp_folder()
    record("one", 0.1, 9)
    record("<two>", 0.2, 18)
  end)
  lazy_teardown(function() process.remove_folder(folder) end)

  local function runs() return ("'%s' '%s'"):format(path "one", path "<two>") end

  it("shows final and best values and the options that differ", function()
    local text, status = compare(runs())
    assert.are.equal(0, status)
    assert.are.equal("run    loss  best loss  lr\none    18    1 at 9     0.1\n<two>  36    2 at 9     0.2\n",
      text:match "^(.-\n)\n")
    assert.is_truthy(text:find("* one   o <two>", 1, true))
    assert.is_nil(text:find "[\27\128-\255]")
  end)

  it("shows the metrics that were asked for; of accuracies the greatest is best", function()
    local text = compare("--metric accuracy " .. runs())
    assert.is_truthy(text:find("one    0.1       0.9 at 4", 1, true), text)
  end)

  for what, case in pairs {
    ["a folder without a run"] = { "/no/such/run", 1, "'/no/such/run' contains no run" },
    ["no folder"] = { "", 2, "RUN is missing, expected the folder of a run" },
    ["an unknown option"] = { "--htlm x", 2, "unknown option '--htlm'" },
  } do
    it("refuses " .. what, function()
      local text, status = compare(case[1])
      assert.are.equal(case[2], status)
      assert.is_truthy(text:find(case[3], 1, true), text)
    end)
  end

  it("reads folders of other programs and of runs that were killed", function()
    local function foreign(name, metrics, config)
      require("lfs").mkdir(path(name))
      process.write(path(name .. "/metrics.jsonl"), metrics)
      process.write(path(name .. "/config.json"), config)
      return ("'%s' "):format(path(name))
    end
    local text, status = compare(
      foreign("epochs", '{"epoch":1,"loss":4}\n{"epoch":2,"loss":3}\n', '{"seed":1243701298123456}')
      .. foreign("lists", '[1,2]\n5\nnull\n{"step":1,"loss":"abc"}\n{"step":"x","loss":2}\n{"step":3,"lo', "[1,2]")
      .. foreign("empty", "", "")
      .. foreign("odd \195\188", '{"step":1,"loss":null}\n',
        '{"seed":1243701298123457,"text":"a\\u001b[31m\\nb' .. ("x"):rep(50) .. '"}'))
    assert.are.equal(0, status, text)
    assert.are.equal(table.concat({
      "run    loss  best loss  seed              text",
      "lists  2     2 at 2",
      "epochs 3     3 at 2     1243701298123456",
      "empty",
      "odd \195\188  nan              1243701298123457  a [31m b" .. ("x"):rep(29) .. "...",
    }, "\n"):gsub("  +", " "), (text:match "^(.-)\n\n":gsub("  +", " ")))
  end)

  it("gives many options a table of their own, with a row for each", function()
    local function with(name, value)
      local config = {}
      for k = 1, 12 do config[("option_number_%02d"):format(k)] = value * k end
      ms.run.start({ out = path(name), config = config, quiet = true }):finish()
    end
    with("much", 1)
    with("more", 2)
    local text = compare(("'%s' '%s'"):format(path "much", path "more"))
    assert.matches("^run\nmuch\nmore\n\noption            much  more\noption_number_01  1     2\n", text)
    assert.matches("option_number_12  12    24\n", text)
  end)

  it("puts the best run first, or sorts by a column", function()
    for k, lr in ipairs { 0.03, 0.01, 0.3 } do
      local run = ms.run.start { out = path("sort" .. k), quiet = true,
        config = { lr = lr, kind = k == 2 and "b" or "a", late = k == 3 and 2 or nil } }
      for step = 1, 3 do
        run:log { loss = k == 3 and 0 / 0 or (step == 2 and 4 - k or k), val_loss = 5 - k,
          acc = k == 1 and step / 2 or k / 3 }
      end
      run:finish()
    end
    local words = ("'%s' '%s' '%s'"):format(path "sort1", path "sort2", path "sort3")
    local function order(options)
      local text, status = compare(options .. " " .. words)
      assert.are.equal(0, status, text)
      return { text:match "\nsort(%d).-\nsort(%d).-\nsort(%d)" }
    end
    assert.are.same({ "3", "2", "1" }, order "")                                  -- val_loss
    assert.are.same({ "1", "2", "3" }, order "--metric loss")                     -- nan is last
    assert.are.same({ "1", "3", "2" }, order "--metric acc --metric loss")        -- the greatest first
    assert.are.same({ "1", "2", "3" }, order "--sort 'best loss'")
    assert.are.same({ "2", "1", "3" }, order "--sort lr")
    assert.are.same({ "1", "3", "2" }, order "--sort kind")
    assert.are.same({ "3", "1", "2" }, order "--sort late")                       -- without a value: last
    assert.are.same({ "1", "2", "3" }, order "--sort run")
    local text, status = compare("--metric loss --sort los " .. words)
    assert.are.equal(1, status)
    assert.is_truthy(text:find("there is no column 'los' to sort by, expected one of: run, loss, best loss, kind, late, lr", 1,
      true), text)
  end)

  it("shows options with as many digits as tell them apart, and each run with a mark of its own", function()
    local words = {}
    for k = 1, 20 do
      local name = ("many%02d"):format(k)
      local run = ms.run.start { out = path(name), quiet = true, config = { seed = 2 ^ 52 + k, lr = 10 ^ (-1 - k / 7),
        near = 0.1 + k % 3 * 1e-9 } }
      run:log { loss = k }
      run:log { loss = k / 2 }
      run:finish()
      words[k] = ("'%s'"):format(path(name))
    end
    local text = compare(table.concat(words, " "))
    assert.is_truthy(text:find("\nmany01  0.5   0.5 at 2   0.071969    0.100000001  4503599627370497\n", 1, true), text)
    local marks, seen = 0, {}
    for line in text:gmatch "[^\n]+" do
      for mark in line:gmatch "(%S) many%d%d" do
        marks = marks + 1
        assert.is_nil(seen[mark])
        seen[mark] = true
        assert.is_true(#line <= 72)
      end
    end
    assert.are.equal(20, marks)
  end)

  it("tells runs apart whose folders have the same name", function()
    for _, top in ipairs { "first", "second" } do
      require("lfs").mkdir(path(top))
      record(top .. "/same", 0.1, 9)
    end
    local text = compare(("'%s/' '%s'"):format(path "first/same", path "second/same"))
    assert.is_truthy(text:find("\n" .. path "first/same" .. "  ", 1, true), text)
    assert.is_truthy(text:find("* " .. path "first/same", 1, true))
    assert.is_truthy(text:find("o " .. path "second/same", 1, true))
  end)

  it("refuses a metric that no run has", function()
    local text, status = compare("--metric los " .. runs())
    assert.are.equal(1, status)
    assert.is_truthy(text:find("no run has the metric 'los'", 1, true))
  end)

  local check = browser.is_there and it or pending
  check("writes a page with every point, which Chromium shows without an error" .. browser.missing, function()
    local page = path "page.html"
    local _, status = compare(("--html '%s' "):format(page) .. runs())
    assert.are.equal(0, status)
    local dom, console = browser.open(page)
    assert.are.equal("", console)
    assert.are.equal(2, select(2, dom:gsub('data%-points="10"', "")))
    assert.are.equal(2, select(2, dom:gsub('<th scope="row">', "")))
    assert.is_truthy(dom:find("&lt;two&gt;", 1, true))
  end)
end)
