-- SPDX-License-Identifier: MIT
--- ms.plot: plots of numbers as SVG and as text.
local axes = require "moonshard.plot.axis"
local base64 = require "moonshard.core.base64"
local ms = require "moonshard"
local process = require "spec.support.process"

local plot, nan = ms.plot, 0 / 0

local function count(text, pattern) return select(2, text:gsub(pattern, "")) end
local function ascii(p, columns, rows) return p:text { ascii = true, columns = columns, rows = rows } end

describe("ms.plot", function()
  describe("ticks", function()
    for _, case in ipairs {
      { "linear", 0, 10, 5, "0 2 4 6 8 10" },
      { "linear", 0.13, 0.87, 4, "0.2 0.4 0.6 0.8" },
      { "linear", -1, 1, 2, "-1 0 1" },
      { "linear", 0, 3e6, 3, "0 1e6 2e6 3e6" },
      { "linear", 5, 5, 4, "4 6" },
      { "linear", 1000.001, 1000.003, 2, "1000.001 1000.002 1000.003" },
      { "log", 1e-3, 1e3, 7, "0.001 0.01 0.1 1 10 100 1000" },
      { "log", 1, 1e9, 3, "1 10000 1e8" },
      { "log", 1.5, 30, 4, "2 5 10 20" },
      { "log", 2.1, 2.4, 3, "2.1 2.2 2.3 2.4" },
    } do
      local scale, low, high, wanted, text = unpack(case)
      it(("of a %s axis from %g to %g are %s"):format(scale, low, high, text), function()
        local _, labels = axes.of(scale, { { low, high } }):ticks(wanted)
        assert.are.equal(text, table.concat(labels, " "))
      end)
    end
  end)

  it("draws a line in ASCII with its axes", function()
    assert.are.equal(table.concat({
      "title",
      "2 |             ****",
      "1 |     ********",
      "0 |*****",
      "  +-----------------",
      "   1       2       3",
      "                step",
    }, "\n") .. "\n", ascii(plot.line({ 0, 1, 2 }, { title = "title", x_label = "step" }), 20, 3))
  end)

  it("draws one series in braille and blocks, in ASCII only on request", function()
    local text = plot.line({ 0, 1, 2 }):text { ascii = false }
    assert.is_truthy(text:find("│", 1, true))
    assert.is_truthy(text:find "\226[\160-\163][\128-\191]")
    for _, p in ipairs { plot.line { 1, 2 }, plot.histogram { 1, 2 }, plot.heatmap { { 1, 2 } },
      plot.images { ms.ones(2, 2) } } do
      assert.is_nil(ascii(p):find "[\128-\255]")
    end
  end)

  it("draws several series with a mark for each", function()
    local list = {}
    for k = 1, 33 do list[k] = { y = { k, 0 }, label = "series " .. k } end
    local svg, classes = plot.line(list):svg(), {}
    for class in svg:gmatch '<path class="line (c%d[r%d ]*)" stroke%-linecap' do classes[#classes + 1] = class end
    assert.are.equal(33, #classes)
    assert.are.same({ "c1", "c1 r1", "c1 r2", "c1 r3", "c1" }, { classes[1], classes[9], classes[17], classes[25], classes[33] })
    local plain = plot.line({ { y = { 1, 2 }, label = "a" } }):svg()
    assert.are.equal("360", (plain:match 'height="(%d+)"'))
    assert.are.equal(tostring(360 + 18 * 5), (svg:match 'height="(%d+)"'))
    for x, label in svg:gmatch '<text class="key" text%-anchor="start" x="([%d.]+)" y="[%d.]+">(.-)</text>' do
      assert.is_true(x + 7 * #label <= 640, label)
    end

    local text = ascii(plot.line { { y = { 1, 2 }, label = "a" }, { y = { 2, 1 }, label = "b" } })
    assert.is_truthy(text:find("* a   o b", 1, true))
    assert.is_truthy(text:find "|.*%*.*o")
  end)

  for name, values in pairs { ["nan"] = { 1, 2, nan, 3, 4 }, ["infinite value"] = { 1, 2, math.huge, 3, 4 } } do
    it("leaves a gap for a " .. name, function()
      local path = plot.line(values):svg():match '<path class="line.- d="(.-)"'
      assert.are.equal(2, count(path, "M"))
    end)
  end

  it("leaves a gap on a logarithmic axis for values that are not positive", function()
    local path = plot.line({ 1, 10, 0, 100, -1, 1000 }, { y_scale = "log" }):svg():match '<path class="line.- d="(.-)"'
    assert.are.equal(3, count(path, "M"))
  end)

  it("shows a point between two gaps", function()
    assert.is_truthy(plot.line({ nan, 1, nan }):svg():find ' d="M(%S+ [%d.]+)L%1"')
  end)

  it("keeps the extremes of many points", function()
    local y = {}
    for k = 1, 100000 do y[k] = k % 7 end
    y[50001], y[77777] = 1000, -500
    local text = plot.line(y, { height = 360 }):svg()
    local path = text:match '<path class="line.- d="(.-)"'
    local least, most = math.huge, -math.huge
    for v in path:gmatch " ([%d.]+)" do
      least, most = math.min(least, tonumber(v)), math.max(most, tonumber(v))
    end
    assert.is_true(count(path, "[ML]") <= 4 * 640)
    assert.is_truthy(text:find('data-points="100000"', 1, true))
    assert.are.equal(16, least)
    assert.are.equal(330, most)
  end)

  it("draws an element for each point, bar, cell and image", function()
    assert.are.equal(3, count(plot.scatter({ 1, 2, nan, 4 }):svg(), "<circle "))
    assert.are.equal(10, count(plot.histogram(ms.rand(50), { bins = 10 }):svg(), "<title>"))
    assert.are.equal(5, count(plot.heatmap({ { 1, 2, 3 }, { 4, nan, 6 } }):svg(), "<title>"))
    assert.are.equal(2, count(plot.images({ ms.rand(4, 4), ms.rand(3, 4, 4) }):svg(), "<image "))
  end)

  it("writes labels and values of a heat map, in the terminal where they fit", function()
    local labels = { "cat", "h\195\188pf" }
    local map = plot.heatmap({ { 9, 1 }, { 250, nan } }, { row_labels = labels, column_labels = labels, values = true,
      title = "counts" })
    assert.are.equal("counts\n cat    9    1\nh\195\188pf  250  nan\n      cat h\195\188pf\nfrom 1 to 250\n", ascii(map))
    local svg = map:svg()
    assert.are.equal(3, count(svg, '<text style="fill'))
    assert.is_truthy(svg:find('#1f2328" text%-anchor="middle" x="[%d.]+" y="[%d.]+">250</text>'))
    assert.is_truthy(svg:find('#ffffff" text%-anchor="middle" x="[%d.]+" y="[%d.]+">9</text>'))

    local shaded = plot.heatmap({ { 0, 9 } }, { row_labels = { "a" } })
    assert.are.equal("a    @@\nfrom 0 to 9\n", ascii(shaded))
    assert.are.equal(0, count(shaded:svg(), '<text style="fill'))
    local wide = {}
    for k = 1, 40 do wide[k] = k end
    assert.are.equal(ascii(plot.heatmap { wide }) .. "columns = 120 shows more\n",
      ascii(plot.heatmap({ wide }, { values = true })))
    assert.is_truthy(ascii(plot.heatmap({ wide }, { values = true }), 120):find("  1  2  3  4", 1, true))
  end)

  describe("heat map without room for its labels", function()
    local labels = { "h\195\188pfen", "automobile", "automatic" }
    local function map(row, given)
      given.row_labels, given.column_labels, given.x_label, given.y_label = labels, labels, "to", "from"
      return plot.heatmap({ row, row, row }, given)
    end

    it("cuts them as long as they differ", function()
      local p = map({ 1, 20, 3000 }, { values = true })
      assert.are.equal(table.concat({ "from",
        "    h\195\188pfen       1      20    3000",
        "automobile       1      20    3000",
        " automatic       1      20    3000",
        "            h\195\188pfen automob automat",
        "                                to",
        "from 1 to 3000" }, "\n") .. "\n", ascii(p, 36))
      assert.is_truthy(p:svg():find(">to</text>", 1, true) and p:svg():find(">from</text>", 1, true))
    end)

    it("slants them in the SVG", function()
      assert.are.equal(0, count(map({ 1, 2, 3 }, {}):svg(), "rotate%(%-35%)"))
      local narrow = map({ 1, 2, 3 }, { width = 300 }):svg()
      assert.are.equal(3, count(narrow, "rotate%(%-35%)"))
      local function bottom(svg)
        local low = 0
        for y, height in svg:gmatch '<rect x="[%d.]+" y="([%d.]+)" width="[%d.]+" height="([%d.]+)"' do
          low = math.max(low, tonumber(y) + tonumber(height))
        end
        return low
      end
      assert.is_true(bottom(narrow) + 30 < bottom(map({ 1, 2, 3 }, {}):svg()))      -- they have more room
    end)

    it("numbers them, with a legend", function()
      assert.are.equal(table.concat({ "from",
        "1    1   20 3000",
        "2    1   20 3000",
        "3    1   20 3000",
        "     1    2    3",
        "              to",
        "1 h\195\188pfen  2 automobile",
        "3 automatic",
        "from 1 to 3000" }, "\n") .. "\n", ascii(map({ 1, 20, 3000 }, { values = true }), 26))
      local rows_only = plot.heatmap({ { 1, 2, 3, 4, 5 } }, { values = true, row_labels = { ("r"):rep(20) } })
      assert.are.equal("1  1  2  3  4  5\nrows:\n1 rrrrrrrrrrrrrrrrrrrr\nfrom 1 to 5\n", ascii(rows_only, 20))
    end)

    it("leaves values out last, and says how many columns show them", function()
      local p = map({ 1, 20, 1234567 }, { values = true })
      assert.are.equal(table.concat({ "from",
        "1     @",
        "2     @",
        "3     @",
        "  1 2 3",
        "     to",
        "1 h\195\188pfen",
        "2 automobile",
        "3 automatic",
        "from 1 to 1.235e6",
        "columns = 25 shows more" }, "\n") .. "\n", ascii(p, 20))
      assert.is_truthy(ascii(p, 25):find("1       1      20 1.235e6", 1, true))
      assert.is_nil(ascii(p, 25):find "columns")
    end)
  end)

  it("counts every finite value of a histogram once", function()
    local sum = 0
    for n in plot.histogram({ 1, 1, 2, 3, nan, 10, -math.huge }, { bins = 3 }):svg():gmatch ": (%d+)</title>" do
      sum = sum + tonumber(n)
    end
    assert.are.equal(5, sum)
  end)

  it("takes tensors where it takes lists", function()
    assert.are.equal(plot.line({ 1, 2, 4 }):svg(), plot.line(ms.tensor { 1, 2, 4 }):svg())
    assert.are.equal(plot.heatmap({ { 1, 2 }, { 3, 4 } }):svg(), plot.heatmap(ms.tensor { { 1, 2 }, { 3, 4 } }):svg())
  end)

  for name, y in pairs { ["the largest numbers"] = { -1e308, 1e308, 0 }, ["the smallest numbers"] = { 5e-324, 1e-323 },
    ["equal numbers"] = { 1.7e308, 1.7e308 }, ["one small number"] = { 5e-324 }, ["no finite number"] = { nan, math.huge } } do
    for _, scale in ipairs { "linear", "log" } do
      it(("draws %s on a %s axis"):format(name, scale), function()
        local p = plot.line(y, { y_scale = scale })
        assert.is_truthy(ascii(p):find("\n", 1, true))
        local path = p:svg():match '<path class="line.- d="(.-)"'
        assert.is_nil(path:find "[^ML%d. -]")
        for v in path:gmatch "%-?[%d.]+" do assert.is_true(tonumber(v) >= 0 and tonumber(v) <= 640) end
      end)
    end
  end

  it("counts values whose range is beyond the largest number", function()
    assert.is_truthy(plot.histogram({ -1e308, 1e308, 0 }, { bins = 2 }):svg():find ": 1</title>.*: 2</title>")
  end)

  it("keeps control characters from a terminal, and bytes that are no text from a file", function()
    local p = plot.line({ { y = { 1, 2 }, label = "a\27[31m" } },
      { title = "a\nb\255", x_label = "\r", y_label = "\127" })
    assert.is_nil(ascii(p):gsub("\n", ""):find "[%c\127]")
    assert.is_truthy(ascii(p):find "^a b")
    assert.is_nil(p:svg():find "\255")
  end)

  it("escapes the text of users", function()
    local text = plot.line({ { y = { 1, 2 }, label = "</svg>&" } }, { title = "<script>\1\"'" }):svg()
    assert.are.equal(1, count(text, "</svg>"))
    assert.is_nil(text:find("<script", 1, true))
    assert.is_truthy(text:find("&lt;script&gt;\239\191\189&quot;&#39;", 1, true))
  end)

  it("encodes bytes in base 64", function()
    local cases = { [""] = "", f = "Zg==", fo = "Zm8=", foo = "Zm9v", foobar = "Zm9vYmFy", ["\255\254"] = "//4=" }
    for bytes, text in pairs(cases) do
      assert.are.equal(text, base64.encode(bytes))
      assert.are.equal(bytes, base64.decode(text))
    end
  end)

  it("writes a file, or returns the reason why it cannot", function()
    local path, p = os.tmpname(), plot.line { 1, 2 }
    assert.is_true(p:save(path))
    assert.are.equal(p:svg(), process.read(path))
    os.remove(path)
    for _, extension in ipairs { ".svg", ".HTML" } do
      assert.is_true(p:save(path .. extension))
      os.remove(path .. extension)
    end
    local ok, err = p:save(path .. "/no/such/folder.svg")
    assert.is_nil(ok)
    assert.is_truthy(err:find "No such file")
  end)

  describe("refuses", function()
    for _, case in ipairs {
      { "a text", function() plot.line "x" end, "plot.line: argument 1: 'y' is a string ('x'), expected a list of numbers" },
      { "no values", function() plot.line {} end, "plot.line: argument 1: 'y' is missing" },
      { "an empty series", function() plot.scatter { y = {} } end, "plot.scatter: argument 1: 'y' is empty" },
      { "x and y of two lengths", function() plot.line { x = { 1 }, y = { 1, 2 } } end, "the length of 'x' is 1, but the length of 'y' is 2" },
      { "an element that is no number", function() plot.line { 1, "a" } end, "'y': element 2 is a string ('a')" },
      { "a second bad series", function() plot.line { { 1 }, { y = "b" } } end, "plot.line: series 2: 'y' is a string" },
      { "an unknown field", function() plot.line { y = { 1 }, name = "a" } end, "unknown field 'name'" },
      { "an unknown scale", function() plot.line({ 1 }, { y_scale = "lg" }) end, "did you mean 'log'?" },
      { "a tensor of two dimensions", function() plot.line(ms.ones(2, 2)) end, "has shape [2, 2], expected one dimension" },
      { "no finite value to count", function() plot.histogram { nan } end, "argument 1 has no finite number" },
      { "a file of another format", function() plot.line({ 1 }):save "a.b/cm.png" end,
        "plot:save: 'a.b/cm.png' has the extension 'png', but plots are saved as SVG: write .svg or .html" },
      { "rows of two lengths", function() plot.heatmap { { 1 }, { 1, 2 } } end, "row 2 has length 2, but row 1 has length 1" },
      { "too few labels", function() plot.heatmap({ { 1, 2 } }, { column_labels = { "a" } }) end, "has length 1, expected 2" },
      { "an image that is no tensor", function() plot.images { 1 } end, "plot.images: image 1 is a number (1), expected a tensor" },
      { "an image of one dimension", function() plot.images { ms.ones(2) } end, "plot.images: image 1 has shape [2]" },
    } do
      local what, call, message = unpack(case)
      it(what, function()
        local ok, err = pcall(call)
        assert.is_false(ok)
        assert.is_truthy(err:find("plot_spec.lua:", 1, true), err)
        assert.is_truthy(err:find(message, 1, true), err)
      end)
    end
  end)
end)
