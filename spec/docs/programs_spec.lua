-- SPDX-License-Identifier: MIT
--- The documents' programs run and print what the documents say (spec/support/documents.lua).
local documents = require "spec.support.documents"
local lfs = require "lfs"
local process = require "spec.support.process"

local function pages(folder)
  local list = {}
  for name in lfs.dir(process.root .. "/" .. folder) do
    if name:find "%.md$" and name ~= "README.md" then list[#list + 1] = folder .. "/" .. name end
  end
  table.sort(list)
  return list
end

local chapters, recipes = pages "docs/tutorial", pages "docs/cookbook"
local checked = { "docs/lua.md", "docs/sharding.md", "docs/tools.md", "docs/data.md", "docs/extending.md" }
for _, list in ipairs { chapters, recipes } do
  for _, path in ipairs(list) do checked[#checked + 1] = path end
end

describe("a program in the documents", function()
  for _, path in ipairs(checked) do
    -- extending_engine_spec.lua runs the sections that change the engine.
    local changes = {}
    for _, block in ipairs(documents.blocks(path)) do
      if block.language == "diff" then changes[block.heading] = true end
    end
    local count = documents.describe(path, function(program) return changes[program.heading] end)
    it("stands in " .. path, function() assert.is_true(count > 0) end)
  end
end)

describe("a block of code in the documents", function()
  it("is run, or is a session that no spec can run, or PyTorch's side of a comparison", function()
    local other = {}
    for _, path in ipairs(checked) do
      for _, block in ipairs(documents.blocks(path)) do
        if not (" lua c sh text console diff json python "):find(" " .. block.language .. " ", 1, true) then
          other[#other + 1] = ("%s:%d: %s"):format(path, block.line, block.language)
        end
      end
    end
    assert.are.equal("", table.concat(other, "\n"))
  end)
end)

describe("the tutorial", function()
  it("has eleven chapters, numbered, each with its links to the next", function()
    assert.are.equal(11, #chapters)
    for k, path in ipairs(chapters) do
      local text = process.read(process.root .. "/" .. path)
      assert.matches(("^# %d. "):format(k), text)
      assert.matches(("\nChapter %d of 11 "):format(k), text)
      if chapters[k + 1] then assert.is_truthy(text:find("](" .. chapters[k + 1]:match "[^/]*$" .. ")", 1, true), path) end
    end
  end)
end)

describe("the cookbook", function()
  it("lists every recipe in its index, at least 40", function()
    local index, n, missing = process.read(process.root .. "/docs/cookbook/README.md"), 0, {}
    for _, path in ipairs(recipes) do
      for heading in process.read(process.root .. "/" .. path):gmatch "\n## ([^\n]*)" do
        n = n + 1
        local anchor = heading:lower():gsub("[^%w _-]", ""):gsub(" ", "-")
        local entry = ("[%s](%s#%s)"):format(heading:sub(1, 1):lower() .. heading:sub(2), path:match "[^/]*$", anchor)
        if not index:find(entry, 1, true) then missing[#missing + 1] = entry end
      end
    end
    assert.are.equal("", table.concat(missing, "\n"))
    assert.are.equal(n, tonumber(index:match "\n(%d+) short answers"))
    assert.is_true(n >= 40, n .. " recipes")
  end)
end)
