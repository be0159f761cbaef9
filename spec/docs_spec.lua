-- SPDX-License-Identifier: MIT
--- The documents: every citation of docs/ and every link has its target and its anchor, and no file cites or opens what
--- is not in the repository.
local lfs = require "lfs"
local process = require "spec.support.process"

local function files_under(folder, list)
  for _, name in ipairs(process.names(process.root .. "/" .. folder)) do
    local path = folder .. "/" .. name
    local mode = lfs.attributes(process.root .. "/" .. path, "mode")
    if mode == "directory" and name:sub(1, 1) ~= "." then
      files_under(path, list)
    elseif mode == "file" then
      list[#list + 1] = path
    end
  end
  return list
end

local sources = { "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CMakeLists.txt" }
local tops = {}
for _, folder in ipairs { "cmake", "runtime", "kernels", "lua", "scripts", "spec", "docs" } do
  tops[folder] = true
  files_under(folder, sources)
end

-- Anchors of a document: written ones, and those that Markdown makes of headings.
local function anchors_of(path)
  local anchors, seen = {}, {}
  for line in (process.read(process.root .. "/" .. path) .. "\n"):gmatch "(.-)\n" do
    for id in line:gmatch '<a id="([^"]+)">' do anchors[id] = true end
    local heading = line:match "^#+ (.+)$"
    if heading then
      local id = heading:lower():gsub("[^%w _-]", ""):gsub(" ", "-")
      local at = seen[id]               -- the second of equal headings is id-1
      seen[id] = (at or 0) + 1
      anchors[at and id .. "-" .. at or id] = true
    end
  end
  return anchors
end

-- A link of a file, from the tree's root.
local function resolved(file, path)
  local target, n = (file:match "^(.*/)[^/]*$" or "") .. path, 1
  while n > 0 do target, n = target:gsub("[^/]+/%.%./", "", 1) end
  return target
end

describe("documents", function()
  it("have every anchor that is cited", function()
    local dead, seen, known = {}, 0, {}
    local function look(file, path, anchor)
      seen = seen + 1
      if not lfs.attributes(process.root .. "/" .. path, "mode") then
        dead[#dead + 1] = ("%s cites %s, which does not exist"):format(file, path)
        return
      end
      known[path] = known[path] or anchors_of(path)
      if anchor and not known[path][anchor] then dead[#dead + 1] = ("%s cites %s#%s"):format(file, path, anchor) end
    end
    for _, file in ipairs(sources) do
      if not file:find("golden/data", 1, true) then
        local text = process.read(process.root .. "/" .. file)
        for path, rest in text:gmatch "(docs/[%w_/-]+%.md)(#?[^\n)\"]*)" do
          local any
          for anchor in rest:match("^[#%w, -]*"):gmatch "#([%w-]+)" do
            any = true
            look(file, path, anchor)
          end
          if not any then look(file, path) end
        end
        if file:find "%.md$" then
          local prose = text:gsub("\n```.-\n```", "")             -- in code, model[1](x) is no link
          for path, anchor in prose:gmatch "%]%(([%w_/.-]*)#?([%w_-]*)%)" do
            -- Readers of the repository have only docs/names.md, which is committed.
            if not file:find "^docs/api/" and resolved(file, path):find "^docs/api/[%w_]+%.md$" then
              dead[#dead + 1] = ("%s links to %s, which is not in the repository: docs/names.md is"):format(file, path)
            end
            look(file, path == "" and file or resolved(file, path), anchor ~= "" and anchor or nil)
          end
        end
      end
    end
    assert.is_true(seen > 20)
    assert.are.equal("", table.concat(dead, "\n"))
  end)

  it("name only files and folders that are there", function()
    local missing, n = {}, 0
    for _, file in ipairs(sources) do
      if file:find "%.md$" and file ~= "CHANGELOG.md" and not file:find("golden/data", 1, true) then
        for path in process.read(process.root .. "/" .. file):gmatch "`([%w_/.]+)`" do
          local top = path:match "^([%w_]+)/"
          if tops[top or ""] then
            n = n + 1
            if not lfs.attributes(process.root .. "/" .. path, "mode") then
              missing[#missing + 1] = ("%s names %s"):format(file, path)
            end
          end
        end
      end
    end
    assert.are.equal("", table.concat(missing, "\n"))
    assert.is_true(n > 30)
  end)

  it("are all in the repository: nothing cites or opens a file outside it", function()
    local outside = {}
    local names = { "behaviour" .. ".md", "design" .. ".md", "style" .. ".md", "field" .. ".md", "coverage" .. ".md",
      "api" .. "%.md", "%.%./" .. "shared" }
    for _, file in ipairs(sources) do
      local text = process.read(process.root .. "/" .. file)
      for _, name in ipairs(names) do
        if text:find(name) then outside[#outside + 1] = ("%s: %s"):format(file, name) end
      end
    end
    assert.are.equal("", table.concat(outside, "\n"))
  end)
end)
