-- SPDX-License-Identifier: MIT
--- The documents as a web site: pandoc makes a page of each, and this file adds navigation, a search index and links
--- between the pages. The site needs neither network nor server; index.html is docs/guide.md.
local lfs = require "lfs"

local M = {}

-- The navigation: a group and its pages, from the tree's root. Pages of `folder` that are in no group's list follow.
local GROUPS = {
  { "Start", { "docs/guide.md", "README.md", "docs/lua.md", "docs/sharding.md" } },
  { "Tutorial", {}, folder = "docs/tutorial" },
  { "Cookbook", { "docs/cookbook/README.md" }, folder = "docs/cookbook" },
  { "Use", { "docs/launching.md", "docs/tools.md", "docs/data.md", "docs/troubleshooting.md", "docs/performance.md" } },
  { "Reference", { "docs/names.md", "docs/api/README.md", "docs/api/ms.md", "docs/api/tensor.md",
    "docs/api/nn.md" }, folder = "docs/api" },
  { "Inside", { "docs/semantics.md", "docs/architecture.md", "docs/extending.md", "docs/glossary.md" },
    folder = "docs" },
  { "Project", { "CONTRIBUTING.md", "CHANGELOG.md", "docs/notices.md" } },
}

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local function escaped(text) return (text:gsub("[&<>\"]", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;",
  ['"'] = "&quot;" })) end

-- The page's file in the site: docs/api/README.md is api/index.html, README.md is readme.html.
local function target_of(path)
  if path == "docs/guide.md" then return "index.html" end
  local inside = path:match "^docs/(.*)%.md$"
  return (inside and inside:gsub("README$", "index") or path:match "^(.*)%.md$":lower()) .. ".html"
end

-- The path from the tree's root to the target of a link in a file of the tree.
local function resolved(from, link)
  local path, n = (from:match "^(.*/)" or "") .. link, 1
  while n > 0 do path, n = path:gsub("[^/]+/%.%./", "", 1) end
  return path
end

local function up(target) return ("../"):rep(select(2, target:gsub("/", ""))) end

-- The pages in the order of the navigation: { path, target, title, group }.
local function pages_of(root)
  local list, listed = {}, {}
  for _, group in ipairs(GROUPS) do
    for _, path in ipairs(group[2]) do listed[path] = true end
  end
  for _, group in ipairs(GROUPS) do
    local paths, more = { unpack(group[2]) }, {}
    for name in lfs.dir(root .. "/" .. (group.folder or "docs/images")) do
      local path = (group.folder or "") .. "/" .. name
      if name:find "%.md$" and not listed[path] then more[#more + 1] = path end
    end
    table.sort(more)
    for _, path in ipairs(more) do paths[#paths + 1] = path end
    for _, path in ipairs(paths) do
      list[#list + 1] = { path = path, target = target_of(path), group = group[1],
        title = read(root .. "/" .. path):match "\n?# ([^\n]*)" }
    end
  end
  return list
end

-- Converts all pages to HTML, four at a time, and stores the text of each in page.body. Returns whether pandoc
-- succeeded.
local function convert(root, pages, folder)
  local commands = {}
  for k, page in ipairs(pages) do
    commands[k] = ("pandoc -f gfm -t html5 --wrap=preserve -o %s %s"):format(
      quoted(("%s/body%d.html"):format(folder, k)), quoted(root .. "/" .. page.path))
  end
  write(folder .. "/commands", table.concat(commands, "\0"))
  if os.execute(("xargs -0 -P 4 -n 1 sh -c <%s"):format(quoted(folder .. "/commands"))) ~= 0 then return false end
  for k, page in ipairs(pages) do
    page.body = read(("%s/body%d.html"):format(folder, k))
    os.remove(("%s/body%d.html"):format(folder, k))
  end
  os.remove(folder .. "/commands")
  return true
end

-- Makes links to documents point at their pages. Appends to `copied` the other files that the page links to.
local function relink(root, page, targets, copied, fault)
  page.body = page.body:gsub('(%f[%a][hs][er][ec]f?=")([^"]*)"', function(attribute, link)
    if link:find "^%a+:" or link:find "^#" then return nil end
    local file, anchor = link:match "^([^#]*)(.*)$"
    local path = resolved(page.path, file)
    if not targets[path] then
      if lfs.attributes(root .. "/" .. path, "mode") ~= "file" then
        fault("%s links to %s, which is no file of the site", page.path, link)
        return nil
      end
      targets[path] = path:gsub("^docs/", "")
      copied[#copied + 1] = path
    end
    return attribute .. up(page.target) .. targets[path] .. anchor .. '"'
  end)
end

local function navigation(pages, current)
  local parts, group = {}, nil
  for _, page in ipairs(pages) do
    if page.group ~= group then
      local open = page.group == current.group or page.group == "Start" or page.group == "Tutorial"
      parts[#parts + 1] = (group and "</ul></details>\n" or "")
        .. ("<details%s><summary>%s</summary><ul>"):format(open and " open" or "", page.group)
      group = page.group
    end
    parts[#parts + 1] = ('<li><a href="%s%s"%s>%s</a></li>'):format(up(current.target), page.target,
      page == current and ' aria-current="page"' or "", escaped(page.title))
  end
  return table.concat(parts, "\n") .. "</ul></details>"
end

local function plain(html)
  return (html:gsub("<[^>]*>", " "):gsub("&lt;", "<"):gsub("&gt;", ">"):gsub("&quot;", '"'):gsub("&amp;", "&")
    :gsub("%s+", " "))
end

-- Sections of a page for the search: each heading with the text up to the next.
local function sections(page, list)
  for id, heading, text in (page.body:gsub("<h%d", "\1%0") .. "\1"):gmatch '<h%d id="([^"]*)"[^>]*>(.-)</h%d>([^\1]*)' do
    list[#list + 1] = { page.target .. "#" .. id, page.title, plain(heading), plain(text):sub(1, 1000) }
  end
end

local function contents(page)
  local parts = {}
  for id, heading in page.body:gmatch '<h2 id="([^"]*)"[^>]*>(.-)</h2>' do
    parts[#parts + 1] = ('<li><a href="#%s">%s</a></li>'):format(id, heading:gsub("</?a[^>]*>", ""))
  end
  if #parts < 2 then return "" end
  return '<nav class="contents" aria-label="On this page"><ul>' .. table.concat(parts, "\n") .. "</ul></nav>"
end

--- Writes the site into a folder, which is made.
---@param root string  the source tree
---@param folder string
---@param fault fun(format: string, ...)
function M.write(root, folder, fault)
  if os.execute "command -v pandoc >/dev/null 2>&1" ~= 0 then
    return fault "--site needs pandoc (apt-get install pandoc)"
  end
  os.execute("mkdir -p " .. quoted(folder))
  local pages, targets, copied, index = pages_of(root), {}, {}, {}
  for _, page in ipairs(pages) do targets[page.path] = page.target end
  if not convert(root, pages, folder) then return fault "pandoc failed" end
  local own = root .. "/scripts/support/docs/site/"
  local template = read(own .. "page.html")
  for _, page in ipairs(pages) do
    relink(root, page, targets, copied, fault)
    sections(page, index)
    local values = { title = escaped(page.title), up = up(page.target), body = page.body, contents = contents(page),
      navigation = navigation(pages, page) }
    os.execute("mkdir -p " .. quoted((folder .. "/" .. page.target):match "^(.*)/"))
    write(folder .. "/" .. page.target, (template:gsub("{{(%w+)}}", values)))
  end
  for _, path in ipairs(copied) do
    local to = folder .. "/" .. targets[path]
    os.execute("mkdir -p " .. quoted(to:match "^(.*)/"))
    write(to, read(root .. "/" .. path))
  end
  write(folder .. "/index.js", "window.sections = " .. require("cjson").encode(index):gsub("\\/", "/") .. ";\n")
  for _, name in ipairs { "style.css", "search.js" } do write(folder .. "/" .. name, read(own .. name)) end
end

return M
