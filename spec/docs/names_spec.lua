-- SPDX-License-Identifier: MIT
--- Every name of the library that documents and examples use is in docs/names.md, the list of the reference: functions
--- and classes by their place (`ms.zeros`, `nn.Linear`, `fsdp.wrap.or_policy`), methods by their name (`:backward`).
local lfs = require "lfs"
local process = require "spec.support.process"

-- What `nn`, `F` and so on are short for, and where their entries are in the reference.
local SHORT = { nn = "nn", F = "nn.F", dist = "dist", fsdp = "fsdp", optim = "optim", amp = "amp" }
local OF_MS = { nn = true, dist = true, fsdp = true, optim = true, amp = true, data = true, profiler = true, run = true,
  plot = true, testing = true, text = true, hf = true, metrics = true, linalg = true, fft = true,
  distributions = true }

local function files(folder, pattern)
  local list = {}
  for name in lfs.dir(process.root .. "/" .. folder) do
    if name:find(pattern) then list[#list + 1] = folder .. "/" .. name end
  end
  table.sort(list)
  return list
end

-- The reference: its names, and methods by their last part.
local known, entries, methods = {}, {}, {}
for line in process.read(process.root .. "/docs/names.md"):gmatch "\n(%- [^\n]*)" do
  local names, first = {}, nil
  for name in line:match "^.-`:":gmatch "`([^`]+)`" do
    name = name:gsub("%([^`]*$", ""):match "([%w_.:]+)$"       -- of a C function, too
    if name then
      first = first or name
      names[#names + 1] = name == first and name or first:gsub("[%w_]+$", name)     -- abs_, beside Tensor:abs
    end
  end
  for _, name in ipairs(names) do
    known[name], entries[name] = true, true
    local method = name:match ":([%w_]+)$"
    if method then methods[method] = true end
    local prefix = name:match "^(.*)%."
    while prefix do                                              -- nn.utils, because there is nn.utils.clip_grad_norm_
      known[prefix] = true
      prefix = prefix:match "^(.*)%."
    end
  end
end
-- Methods of Lua's own strings and files, and fields that hold functions in what the library returns.
for _, name in ipairs { "byte", "find", "format", "gmatch", "gsub", "len", "lower", "match", "rep", "reverse", "sub",
  "upper", "close", "lines", "read", "write", "flush", "seek", "setvbuf" } do methods[name] = true end

-- A name as the reference has it: without ms. where a module of the library follows.
local function place(chain)
  local first, rest = chain:match "^([%w_]+)%.(.*)$"
  if first == "ms" then
    local module = rest:match "^([%w_]+)"
    return OF_MS[module] and rest or chain
  end
  return SHORT[first] .. "." .. rest
end

-- Whether the name has an entry, or is a field of a class that has one (ms.Tensor.methods).
local function has(name)
  if known[name] then return true end
  local before = name:match "^(.*)%.[%w_]+$"
  return before ~= nil and entries[before] and before:match "[^.]*$":find "^%u" ~= nil
end

-- The code of a file: a whole Lua file, or the blocks and the inline code of a document.
local function code_of(path)
  local text = process.read(process.root .. "/" .. path)
  if not path:find "%.md$" then return text end
  local parts = {}
  text = text:gsub("\n```(%w*)[^\n]*\n(.-)\n```", function(language, block)
    if (" lua text diff "):find(" " .. language .. " ", 1, true) then parts[#parts + 1] = block end
    return "\n"
  end)
  for inline in text:gmatch "`([^`\n]+)`" do parts[#parts + 1] = inline end
  return table.concat(parts, "\n")
end

-- Names that are wrong on purpose, or not of the library.
local ELSEWHERE = {
  ["docs/lua.md"] = { ["ms.nn.Liner"] = true, ["nn.functional.mse_loss"] = true, method = true },
  ["scripts/examples/vae.lua"] = { loss = true, sample = true },          -- of moonshard.models.vae
  ["docs/extending.md"] = { ["dist.scan"] = true, medium = true },    -- of recipes
  ["docs/semantics.md"] = { on_end = true },                     -- of the bucket that a communication hook gets
}

-- Appends the names of a file that the reference lacks. Returns how many names the file has.
local function look(path, text, faults)
  local n, known_here = 0, ELSEWHERE[path] or {}
  text = text:gsub("[\"'][%w_./-]+%.%l+[\"']", '""')            -- names of files
  local own = {}
  for name in text:gmatch "function%s+[%w_.]+[.:]([%w_]+)" do own[name] = true end
  for name in text:gmatch "[.%s]([%w_]+)%s*=%s*function" do own[name] = true end
  for name in text:gmatch "\n%+%u+%((%w+)," do own[name], own[name .. "_"] = true, true end   -- operators that a diff adds
  for name in text:gmatch "\n%+ +MS_ROW%(\"(%w+)\"," do own[name] = true end
  for before, chain in ("\n" .. text):gmatch "([^%w_.:/])(%a[%w_]*%.[%w_.]+)" do
    local first = chain:match "^[%w_]+"
    chain = chain:gsub("%.+$", "")
    if (first == "ms" or SHORT[first]) and before ~= "-" and not chain:find "%.lua$" and not chain:find "%.md$"
      and not chain:find "%.NAME" then
      n = n + 1
      local name = place(chain)
      if not has(name) and not own[name:match "[^.]*$"] and not known_here[chain] then
        faults[#faults + 1] = ("%s: %s"):format(path, chain)
      end
    end
  end
  for object, method in text:gmatch "([%w_)%]\"}]):([%a_][%w_]*)%s*[%({\"]" do
    n = n + 1
    if not methods[method] and not own[method] and not known_here[method] then
      faults[#faults + 1] = ("%s: %s:%s"):format(path, object, method)
    end
  end
  return n
end

local function unique(list)
  local seen, kept = {}, {}
  for _, text in ipairs(list) do
    if not seen[text] then kept[#kept + 1] = text end
    seen[text] = true
  end
  return table.concat(kept, "\n")
end

describe("a name of the library", function()
  local sources = { "README.md", "CONTRIBUTING.md" }
  for _, folder in ipairs { "docs", "docs/tutorial", "docs/cookbook" } do
    for _, path in ipairs(files(folder, "%.md$")) do sources[#sources + 1] = path end
  end
  for _, path in ipairs(files("scripts/examples", "%.lua$")) do sources[#sources + 1] = path end

  it("that documents or examples use is in the reference", function()
    local faults, n = {}, 0
    for _, path in ipairs(sources) do n = n + look(path, code_of(path), faults) end
    assert.are.equal("", unique(faults))
    assert.is_true(n > 1500, n .. " names")
  end)

  it("that is not in the reference is found", function()
    local faults = {}
    look("a.md", "local x = ms.zeroes(2)\nx:backwards()\nnn.F.nothing(x)\nfsdp.fully_shart(m)\nms.zeros(2):backward()\n", faults)
    assert.are.equal("a.md: ms.zeroes\na.md: nn.F.nothing\na.md: fsdp.fully_shart\na.md: x:backwards", unique(faults))
  end)
end)
