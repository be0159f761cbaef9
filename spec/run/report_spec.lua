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
    folder = process.temp_folder()
  end)
  lazy_teardown(function() process.remove_folder(folder) end)

  it("is written when the run ends, without names of other files to load", function()
    record("end", 20):finish()
    local text = process.read(path "end/report.html")
    assert.is_truthy(text:find '"step": ?20')
    assert.is_nil(text:find 'src="http')
    assert.is_nil(text:find '<link rel="stylesheet"')
    for name in require("lfs").dir(path "end") do assert.is_nil(name:find "tmp") end
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

  it("holds every k-th line of a run that has too many, and all that repeat a step", function()
    local run = ms.run.start { out = path "long", quiet = true }
    run:finish()
    local lines, filler = {}, ("x"):rep(1000)
    for k = 1, 70000 do lines[k] = ('{"step": %d, "time": %d, "loss": 1, "%s": 1}\n'):format(k, k, filler) end
    lines[35000] = lines[35000] .. '{"step": 35000, "time": 35000, "val_loss": 2}\n'
    process.write(path "long/metrics.jsonl", table.concat(lines))
    assert(ms.run.report(path "long"))
    local text = process.read(path "long/report.html")
    assert.is_truthy(text:find('"every":3', 1, true))
    assert.are.equal(23332, select(2, text:gsub('"loss": 1,', "")))      -- of 70001 lines, the 35001st is kept, too
    assert.is_truthy(text:find('"val_loss": 2', 1, true))
  end)
end)

-- ---- in Chromium -----------------------------------------------------------------------------------------

local check = browser.is_there and it or pending
local function describe_page(what, fn) describe(what .. browser.missing, fn) end

-- A page in use: opened once for the tests of a block.
local function opened(name, given)
  local page = browser.page(path(name) .. "/report.html", given)
  local use = { page = page }
  function use.view() return page:value "view && view.map(Math.round)" end
  -- The place in the window of a step in the first plot, half way up.
  function use.place(step)
    local at = page:value(("(r => [r.left + plots[0].X(%d), r.top + 100])(plots[0].svg.getBoundingClientRect())"):format(step))
    return at[1], at[2]
  end
  function use.read() return page:value "plots[0].out.textContent" end
  return use
end

describe_page("report.html in Chromium", function()
  lazy_setup(function()
    folder = process.temp_folder()
    if not browser.is_there then return end
    local run = record("shown", 200)
    run:histogram("weights", ms.rand(100))
    run:profile(function()
      local model = ms.nn.Sequential(ms.nn.Linear(4, 8), ms.nn.ReLU(), ms.nn.Linear(8, 2))
      model(ms.rand(3, 4)):sum():backward()
    end)
    ms.catch_warnings(ms.warn, "unseen")
    local stderr = io.stderr
    io.stderr = { write = function() end }              -- luacheck: ignore 122
    ms.warn "the <disk> is slow"
    io.stderr = stderr                                  -- luacheck: ignore 122
    run:finish()
  end)
  lazy_teardown(function() process.remove_folder(folder) end)

  check("shows every point, medium, option, warning and layer without an error", function()
    local dom, console = browser.open(path "shown/report.html")
    assert.are.equal("", console)
    local of = points(dom)
    assert.are.equal(199 + 20, of.Loss)
    assert.are.equal(200, of["Learning rate"])
    assert.are.equal(200, of.Throughput)
    for _, text in ipairs { "loss: 1 of 200 values are not finite, the first at step 5.", "samples, step 200",
      'alt="digit at step 200"', "&lt;zero&gt;", "once &lt;/script&gt;&lt;script&gt;",
      "Step 200: the &lt;disk&gt; is slow", "weights: 100 values from ", ">1 (Linear)<", ">3 (Linear)<" } do
      assert.is_truthy(dom:find(text, 1, true), text)
    end
    assert.is_nil(dom:find("unseen", 1, true))
    assert.are.equal(1, select(2, dom:gsub('<table id="by%-rank">', "")))
  end)

  describe("in use", function()
    local use, page
    lazy_setup(function()
      if not browser.is_there then return end
      use = opened "shown"
      page = use.page
    end)
    lazy_teardown(function() if page then page:close() end end)
    before_each(function() if page then page:value "show(null)" page:frame() end end)

    check("zooms all plots to the part that the mouse drags over, and back by double-click or button", function()
      local x1, y = use.place(50)
      local x2 = use.place(100)
      page:drag(x1, y, x2, y)
      assert.are.same({ 50, 100 }, use.view())
      for k = 0, 2 do
        assert.are.same({ 50, 100 }, page:value(("plots[%d].range.map(Math.round)"):format(k)))
      end
      -- The line now begins left of the plot and ends right of it.
      assert.is_true(page:value "+plots[0].svg.querySelector('path').getAttribute('d').match(/^M([-\\d.]+)/)[1] <= plots[0].left + 1")
      page:value "plots[0].svg.dispatchEvent(new MouseEvent('dblclick'))"
      assert.are.equal(require("cjson").null, use.view() or require("cjson").null)
      page:drag(x1, y, x2, y)
      page:value "document.getElementById('all').click()"
      page:frame()
      assert.is_true(page:value "view === null && document.getElementById('all').disabled")
    end)

    check("moves with Shift, but not beyond the ends, and zooms with Ctrl and the wheel", function()
      page:value "show([50, 100])"
      page:frame()
      local x, y = use.place(75)
      local to = use.place(85)
      page:drag(x, y, to, y, "shift")
      assert.are.same({ 40, 90 }, use.view())
      page:drag(x, y, x + 600, y, "shift")
      assert.are.same({ 1, 51 }, use.view())
      page:value "show([51, 99])"
      page:frame()
      page:wheel(use.place(75), y, -200, "control")
      assert.are.same({ 63, 87 }, use.view())
      page:wheel(x, y, 200)                             -- scrolls
      assert.are.same({ 63, 87 }, use.view())
      page:value "scrollTo(0, 0)"
    end)

    check("reads the nearest point where the mouse is", function()
      local x, y = use.place(100)
      page:hover(x, y)
      assert.matches("^step 100, [%d.]+ s: loss 0.01  ·  val_loss 0.02$", use.read())
      assert.are.equal(1, page:value "plots[0].above.querySelectorAll('line').length")
      assert.are.equal(2, page:value "plots[0].above.querySelectorAll('circle').length")
      page:hover(5, 5)
      assert.are.equal("", use.read())
    end)

    check("is used with the keyboard alone", function()
      page:value "document.activeElement.blur()"
      for _ = 1, 80 do                                  -- from wherever the last click was, all around the page
        page:key "Tab"
        if page:value "document.activeElement === plots[0].svg" then break end
      end
      assert.is_true(page:value "document.activeElement === plots[0].svg")
      page:key "Home"
      assert.matches("^step 1, .*: loss 1  ·  val_loss 0.2 %(step 10%)$", use.read())
      page:key "ArrowRight"
      assert.matches("^step 3, ", use.read())           -- a key press moves by a hundredth of the plot
      page:key "End"
      assert.matches("^step 200, ", use.read())
      page:key "+"
      assert.are.same({ 101, 200 }, use.view())
      page:key("ArrowLeft", "shift")
      assert.are.same({ 91, 190 }, use.view())
      page:key "-"
      assert.is_true(page:value "view === null")
      page:key "+"
      page:key "0"
      assert.is_true(page:value "view === null")
    end)

    check("has logarithmic axes and an axis of time", function()
      page:value "document.querySelector('figure button').click()"
      local labels = page:value "[...plots[0].svg.querySelectorAll('text')].map(t => t.textContent).join(' ')"
      assert.matches("^0.01 0.1 1 ", labels)
      -- Equal factors are equally far apart.
      assert.is_true(page:value "Math.abs((plots[0].Y(-1) - plots[0].Y(0)) - (plots[0].Y(-2) - plots[0].Y(-1))) < 1e-6")
      page:value "document.querySelector('figure button').click()"
      page:value "document.getElementById('by').click()"
      page:frame()
      assert.is_true(page:value "plots[0].range[1] === series.get('val_loss').time[19]")
      page:value "document.getElementById('by').click()"
      page:frame()
      assert.is_true(page:value "plots[0].range[1] === 200")
    end)

    check("tells a screen reader what its plots, buttons and tables are", function()
      local plots, buttons, tables, headings = {}, {}, 0, {}
      page:value "document.querySelector('details').open = true"
      page:frame()
      for _, node in ipairs(page:accessible()) do
        assert.is_true(node.role ~= "button" or node.name ~= "", "a button without a name")
        if node.role == "application" then plots[#plots + 1] = node end
        if node.role == "button" then buttons[#buttons + 1] = node.name end
        if node.role == "table" then tables = tables + 1 end
        if node.role == "heading" then headings[node.name] = true end
        if node.role == "image" then assert.is_true(node.name ~= "", "an image without a text") end
      end
      assert.are.equal("Loss. loss: 200 values, from 0.005 to 1, last 0.005; val_loss: 20 values, from 0.01 to 0.2, last 0.01",
        plots[1].name)
      assert.matches("Drag over a plot to zoom", plots[1].description)
      assert.is_true(plots[1].properties.focusable)
      assert.is_truthy(table.concat(buttons, ","):find("Loss: logarithmic axis", 1, true))
      for _, name in ipairs { "Metrics", "Loss", "Warnings", "Time of a step", "Configuration", "Environment" } do
        assert.is_true(headings[name], name)
      end
      assert.is_true(tables >= 6, tables)               -- by rank, by layer, confusion, options, environment, Loss
      assert.are.equal("polite", page:value "plots[0].out.getAttribute('aria-live')")
      page:value "document.querySelector('details').open = false"
    end)

    check("fits a narrow window", function()
      page:size(360, 800)
      page:frame()
      assert.is_true(page:value "document.documentElement.scrollWidth <= 360")
      assert.is_true(page:value "plots[0].width < 340")
      page:size(1280, 1600)
      page:frame()
    end)

    check("prints light, in two columns, with plots of the paper's size, whatever the screen shows", function()
      page:media("print", "dark")
      page:size(700, 1000)
      page:value "dispatchEvent(new Event('beforeprint'))"
      assert.are.equal("rgb(255, 255, 255)", page:value "getComputedStyle(document.body).backgroundColor")
      assert.are.equal("none", page:value "getComputedStyle(document.getElementById('by')).display")
      assert.is_true(page:value "document.documentElement.scrollWidth <= 700")
      assert.are.equal("0 0 340 190", page:value "plots[0].svg.getAttribute('viewBox')")
      assert.are.equal(2, page:value "getComputedStyle(document.getElementById('charts')).gridTemplateColumns.split(' ').length")
      page:value "dispatchEvent(new Event('afterprint'))"
      page:media("", "dark")
      assert.are.equal("rgb(11, 15, 20)", page:value "getComputedStyle(document.body).backgroundColor")
      page:media("", "light")
      page:size(1280, 1600)
      page:print(path "shown.pdf")
      assert.are.equal("%PDF", process.read(path "shown.pdf"):sub(1, 4))
      page:frame()
      assert.is_true(page:value "plots[0].width > 340") -- drawn for the screen again
    end)

    check("wrote nothing to the console in all of this", function() assert.are.same({}, page.console) end)
  end)

  check("shows numbers at the ends of what a double holds, and skips lines that are no steps", function()
    local run = ms.run.start { out = path "odd", quiet = true }
    run:log { huge = -1e308, tiny = 5e-324, both = 1e300, none = 0 / 0 }
    run:log { huge = 1e308, tiny = 1e-323, both = 1e-300, none = 1 / 0, step = 2 ^ 53 - 2 }
    run:log { late = 1 }                                -- one point, at the last step that a number can count
    run:finish()
    process.write(path "odd/metrics.jsonl", process.read(path "odd/metrics.jsonl")
      .. '[1, 2]\nnull\n5\n"x"\n{"loss": 1}\n{"step": "3", "loss": 1}\n')
    assert(ms.run.report(path "odd"))
    local use = opened "odd"
    local page = use.page
    finally(function() page:close() end)
    assert.are.equal(3, page:value "rows.length")
    for _, log in ipairs { false, true } do
      for name, y in pairs { huge = log and 1 or 2, tiny = 2, both = 2, none = 0, late = 1 } do
        local drawn = page:value(([[(p => {
          p.log = %s;
          p.draw();
          return [...p.svg.querySelectorAll("path, circle")].map(e => e.outerHTML).join(" ");
        })(plots.find(p => p.title === "%s"))]]):format(tostring(log), name))
        assert.is_nil(drawn:find "NaN" or drawn:find "Infinity", name)
        assert.are.equal(y, select(2, drawn:gsub("<circle", "")), name)
      end
    end
    assert.are.same({}, page.console)
  end)

  check("stays fluid with 100,000 points in each plot #timed", function()
    local run = ms.run.start { out = path "large", quiet = true }
    run:finish()
    local lines = {}
    for k = 1, 100000 do
      lines[k] = ('{"step": %d, "time": %.3f, "loss": %.9g, "lr": %.9g, "grad_norm": %.9g, "tokens_per_second": %d}\n')
        :format(k, k / 100, 1 + math.random() + 1000 / k, 1 / k, math.random(), math.random(1e6))
    end
    process.write(path "large/metrics.jsonl", table.concat(lines))
    assert(ms.run.report(path "large"))
    local use = opened "large"
    local page = use.page
    finally(function() page:close() end)
    assert.are.equal("100000", page:value "plots[0].svg.closest('figure').dataset.points")
    page:value "show([20000, 60000])"
    page:frame()
    -- The time from a change of the view to the next frame that shows it, for the mouse's moves of a drag with Shift,
    -- steps of zooming, and reading of points; all four plots are in the window.
    process.within(0.05, function()
      local times = page:value [[(async () => {
        const times = [], svg = plots[0].svg, box = svg.getBoundingClientRect();
        const frame = () => new Promise(requestAnimationFrame);
        const mouse = (kind, x, held) => svg.dispatchEvent(new PointerEvent(kind, { clientX: box.left + x,
          clientY: box.top + 100, shiftKey: held, bubbles: true }));
        async function time(act) {
          await frame();
          const before = performance.now();
          act();
          await frame();                                // callbacks of this frame: the plots are drawn in one
          await new Promise(r => setTimeout(r));        // after it has been painted
          times.push(performance.now() - before);
        }
        mouse("pointerdown", 300, true);
        for (let k = 0; k < 20; k++) await time(() => mouse("pointermove", 300 - 10 * k, true));
        mouse("pointerup", 100, true);
        for (let k = 0; k < 20; k++) await time(() => plots[0].zoom(k < 10 ? 0.8 : 1.25, 40000));
        for (let k = 0; k < 20; k++) await time(() => mouse("pointermove", 100 + 10 * k, false));
        return times.sort((a, b) => a - b);
      })()]]
      print(("        median %.1f ms, 95 %% below %.1f ms"):format(times[30], times[57]))
      return times[57] / 1000
    end)
    assert.are.same({}, page.console)
  end)
end)
