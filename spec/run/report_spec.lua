-- SPDX-License-Identifier: MIT
--- report.html of a run, as its file and as Chromium shows it.
local browser = require "spec.support.browser"
local ms = require "moonshard"
local process = require "spec.support.process"

local folder
local function path(name) return folder .. "/" .. name end

local TEXT = "once </script><script>console.error('text')</script><!-- <b>upon</b>"

-- A run of some steps with a value that is not finite, a validation loss every ten steps and one of each medium.
local function record(name, steps)
  local run = ms.run.start { out = path(name), config = { note = TEXT }, tokens = 10, flops = 1, quiet = true }
  for k = 1, steps do
    run:log { loss = k == 5 and 0 / 0 or 1 / k, lr = 0.1 }
    if k % 10 == 0 then run:log { val_loss = 2 / k, step = k } end
  end
  run:text("samples", TEXT)
  run:image("digit", ms.rand(4, 4))
  run:confusion("classes", { 0, 1 }, { 1, 1 }, { labels = { "<zero>", "one" } })
  return run
end

local function points(dom)
  local of = {}
  for n, title in dom:gmatch '<figure data%-points="(%d+)"><figcaption><h3>(.-)</h3>' do of[title] = tonumber(n) end
  return of
end

describe("report.html", function()
  lazy_setup(function()
    folder = os.tmpname() .. ".report"
    assert(require("lfs").mkdir(folder))
  end)
  lazy_teardown(function() os.execute("rm -rf '" .. folder .. "'") end)

  it("is written when the run ends, without names of other files to load", function()
    record("end", 20):finish()
    local text = process.read(path "end/report.html")
    assert.is_truthy(text:find '"step": ?20')
    assert.is_nil(text:find 'src="http')
    assert.is_nil(text:find '<link rel="stylesheet"')
    assert.is_nil(require("lfs").attributes(path "end/report.html.tmp"))
  end)

  it("keeps its scripts whole whatever the texts of the run are", function()
    local text = process.read(path "end/report.html")
    assert.are.equal(5, select(2, text:gsub("</script>", "")))
    assert.is_nil(text:find("<b>upon", 1, true))
  end)

  it("is written anew for a run that did not end", function()
    local run = record("killed", 3)
    assert.is_nil(require("lfs").attributes(path "killed/report.html"))
    assert.are.equal(path "killed/report.html", ms.run.report(path "killed"))
    assert.is_truthy(process.read(path "killed/report.html"):find '"step": ?3')
    run:finish()
  end)

  it("is written during the run, at a checkpoint and when it is due, on rank 0", function()
    local model = ms.nn.Linear(2, 1)
    local run = ms.run.start { out = path "during", model = model, optimizer = ms.optim.AdamW(model:parameters()),
      quiet = true }
    run:log { loss = 1 }
    assert.is_nil(require("lfs").attributes(path "during/report.html"))
    run.next_report = 0                                 -- the next report is due
    run:log { loss = 2 }
    assert.is_truthy(process.read(path "during/report.html"):find '"step": ?2')
    assert.is_true(run.next_report >= ms.time() + 14)
    run:log { loss = 3 }
    assert.is_nil(process.read(path "during/report.html"):find '"step": ?3')
    run.next_report = ms.time() + 11
    run:checkpoint()
    assert.is_truthy(process.read(path "during/report.html"):find '"step": ?3')
    run:finish()
  end)

  it("does not end a run if it cannot be written", function()
    local run = record("gone", 3)
    assert(require("lfs").mkdir(path "gone/report.html"))
    local warnings = ms.catch_warnings(function() run:finish() end)
    assert.is_truthy(tostring(warnings[1]):find "run: report.html was not written")
  end)

  local check = browser.is_there and it or pending
  check("shows every point, medium and option in Chromium without an error" .. (browser.is_there and ""
    or ": there is no chromium; scripts/setup --with chromium"), function()
    record("shown", 200):finish()
    local dom, console = browser.open(path "shown/report.html")
    assert.are.equal("", console)
    local of = points(dom)
    assert.are.equal(199 + 20, of.Loss)
    assert.are.equal(200, of["Learning rate"])
    assert.are.equal(200, of.Throughput)
    for _, text in ipairs { "loss: 1 of 200 values are not finite, the first at step 5.", "samples, step 200",
      'alt="digit at step 200"', "&lt;zero&gt;", "once &lt;/script&gt;&lt;script&gt;", 'role="img"' } do
      assert.is_truthy(dom:find(text, 1, true), text)
    end
  end)
end)
