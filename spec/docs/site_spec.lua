-- SPDX-License-Identifier: MIT
--- The documents as a web site (scripts/docs --site): its files, its links, and what Chromium makes of them.
local browser = require "spec.support.browser"
local lfs = require "lfs"
local process = require "spec.support.process"

local folder

local function files_under(path, list)
  for name in lfs.dir(path) do
    local inside = path .. "/" .. name
    local mode = name:sub(1, 1) ~= "." and lfs.attributes(inside, "mode")
    if mode == "directory" then files_under(inside, list) elseif mode == "file" then list[#list + 1] = inside end
  end
  return list
end

local function resolved(from, link)
  local path, n = from:match "^(.*/)" .. link, 1
  while n > 0 do path, n = path:gsub("[^/]+/%.%./", "", 1) end
  return path
end

local has_pandoc = os.execute "command -v pandoc >/dev/null 2>&1" == 0

describe("the site of the documents", function()
  if not has_pandoc then
    pending("needs pandoc")
    return
  end

  local pages = {}
  lazy_setup(function()
    folder = process.temp_folder()
    assert.are.equal("", (process.shell(("scripts/docs --site '%s/site'"):format(folder))))
    for _, path in ipairs(files_under(folder .. "/site", {})) do
      if path:find "%.html$" then pages[path] = process.read(path) end
    end
  end)
  lazy_teardown(function() process.remove_folder(folder) end)

  it("has a page for every document", function()
    local n = 0
    local function look(place)
      for name in lfs.dir(process.root .. "/" .. place) do
        if name:find "%.md$" then
          n = n + 1
          local target = place .. "/" .. name
          target = target == "docs/guide.md" and "index.html"
            or target:match "^docs/(.*)%.md$":gsub("README$", "index") .. ".html"
          assert.is_string(pages[folder .. "/site/" .. target], target .. " is missing")
        end
      end
    end
    for _, place in ipairs { "docs", "docs/api", "docs/tutorial", "docs/cookbook" } do look(place) end
    assert.is_true(n > 40)
  end)

  it("has a target for every internal link, and loads nothing from elsewhere", function()
    local dead, n, anchors = {}, 0, {}
    for path, html in pairs(pages) do
      anchors[path] = {}
      for id in html:gmatch ' id="([^"]*)"' do anchors[path][id] = true end
    end
    for path, html in pairs(pages) do
      for attribute, link in html:gmatch '%f[%a]([hs][er][ec]f?)="([^"]*)"' do
        local outside = link:find "^%a+:"
        if outside and attribute == "src" then dead[#dead + 1] = path .. " loads " .. link end
        if not outside then
          n = n + 1
          local file, anchor = link:match "^([^#]*)#?(.*)$"
          local target = file == "" and path or resolved(path, file)
          if not lfs.attributes(target, "mode") then
            dead[#dead + 1] = path .. " links to " .. link
          elseif anchor ~= "" and anchors[target] and not anchors[target][anchor] then
            dead[#dead + 1] = path .. " links to the missing anchor " .. link
          end
        end
      end
    end
    assert.are.equal("", table.concat(dead, "\n"))
    assert.is_true(n > 2000)
  end)

  if not browser.is_there then
    pending("needs chromium")
    return
  end

  local page                                            -- one browser for all pages
  local function open(path)
    if page then page:open(path) else page = browser.page(path) end
    return page:result()
  end
  lazy_teardown(function()
    if page then page:close() end
  end)

  local cases = {
    { "cookbook/training.html", "<h1[^>]*>Cookbook: training", 14 },
    { "api/nn.html", "<h1[^>]*>nn", 80 },
  }
  for _, case in ipairs(cases) do
    local path, heading, least = unpack(case)
    it(("opens %s without an error, with its navigation and at least %d blocks of code"):format(path, least), function()
      local dom, console = open(folder .. "/site/" .. path)
      assert.are.equal("", console)
      assert.matches(heading, dom)
      local _, blocks = dom:gsub('<pre class="sourceCode lua">', "")
      assert.is_true(blocks >= least, blocks .. " blocks")
      local _, links = dom:match '<nav class="pages".-</nav>':gsub("<li>", "")
      assert.is_true(links > 40)
      assert.matches('aria%-current="page"', dom)
    end)
  end

  it("opens every page without an error; a page with an error is noticed", function()
    local frames = { "<!doctype html><title>all</title>" }
    for path in pairs(pages) do frames[#frames + 1] = ('<iframe src="%s"></iframe>'):format(path:sub(#folder + 2)) end
    frames[#frames + 1] = '<iframe src="planted.html"></iframe>'
    process.write(folder .. "/all.html", table.concat(frames, "\n"))
    process.write(folder .. "/planted.html", "<!doctype html><script>console.error('planted')</script>")
    local _, console = open(folder .. "/all.html")
    assert.are.equal("planted", console)
    assert.is_true(#frames > 45)
  end)

  it("finds what a reader searches for", function()
    for question, answer in pairs {
      ["accumulate gradients"] = "cookbook/training.html#accumulate-gradients",
      ["fully_shard"] = "api/fsdp.html#fsdpfully_shard",
    } do
      local dom, console = open(folder .. "/site/index.html?q=" .. question:gsub(" ", "+"))
      assert.are.equal("", console)
      local found = dom:match '<ol id="found">(.-)</ol>' or ""
      local links = {}
      for link in found:gmatch 'href="([^"]*)"' do links[#links + 1] = link end
      local first_five = table.concat({ unpack(links, 1, 5) }, "\n")
      assert.is_truthy(first_five:find(answer, 1, true), question .. " finds\n" .. first_five)
    end
  end)
end)
