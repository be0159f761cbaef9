-- SPDX-License-Identifier: MIT
--- Pages of the reference as Markdown.
local annotations = require "moonshard.tools.annotations"

local M = {}

-- The anchor that Markdown makes for a heading; numbered if the page already has the same heading.
local function anchor_of(text, used)
  local anchor = text:lower():gsub("[^%w _-]", ""):gsub(" ", "-")
  local n = used[anchor]
  used[anchor] = (n or -1) + 1
  return n and ("%s-%d"):format(anchor, n + 1) or anchor
end

local function signature(entry)
  local a, name = entry.annotation, entry.name
  if type(entry.value) ~= "function" and not entry.is_class then return name end
  if a.declared_as then return a.declared_as end
  local list = {}
  for k, argument in ipairs(entry.arguments) do
    local p = a.params[argument]
    argument = argument == "..." and "…" or argument == "given" and "opts" or argument
    list[k] = p and p.optional and argument .. "?" or argument
  end
  return ("%s(%s)"):format(name, table.concat(list, ", "))
end

local function cell(text) return (text:gsub("|", "\\|"):gsub("\n", " ")) end

local function add_row(lines, name, kind, optional, text)
  lines[#lines + 1] = ("| `%s` | `%s`%s | %s |"):format(name, cell(kind), optional and ", optional" or "", cell(text))
end

-- Options that mean the same everywhere, unless an annotation says otherwise.
local common = {
  group = "default: the world", process_group = "default: the world", async = "returns a Work at once",
  recurse = "includes the modules inside", dtype = "default: the default dtype", device = "default: the default device",
  requires_grad = "the result is a leaf that gets a gradient", keepdim = "leaves reduced dimensions with size 1",
  prefix = "put in front of each name", bias = "adds a learned bias",
  reduction = "how the elements' losses are combined",
  approximate = "`\"tanh\"`: the formula of GPT-2", batch_first = "inputs are [N, T, d] instead of [T, N, d]",
  norm_first = "normalises before attention and feed-forward, not after", dropout = "probability of dropout",
  dim_feedforward = "inner size of the feed-forward part", layer_norm_eps = "eps of each LayerNorm",
  activation = "activation of the feed-forward part: `\"relu\"`, `\"gelu\"` or a function (default: `\"relu\"`)",
  elementwise_affine = "learns weight and bias", affine = "learns weight and bias",
  track_running_stats = "keeps running statistics, which eval mode uses",
  stride = "step of the filter, in pixels (default: 1)", dilation = "distance between taps of the filter (default: 1)",
  padding = "zeros on each side, in pixels (default: 0); `\"same\"` keeps the size, `\"valid\"` is 0",
  groups = "number of groups of channels, each convolved separately",
  label_smoothing = "share of the target spread over all classes",
  ignore_index = "targets of this class do not count", weight = "[C]: factor of each class (default: 1)",
  strict = "refuses missing and unknown names", assign = "takes the tensors themselves instead of copying",
  count_from = "number of a container's first element in names; 0 in PyTorch's state dicts",
  set_to_none = "false: sets gradients to 0 instead", prepend = "runs before the hooks registered so far",
  retain_graph = "keeps the graph for another backward", norm_type = "p of the p-norm; math.huge: the maximum",
  alpha = "factor on u", gain = "factor on the result", op = "reduction",
  offload_to_cpu = "returned tensors are on the CPU", rank0_only = "the other ranks get an empty table",
  type = "form of the tensors: whole, sharded, or this rank's part",
}

-- Adds a row for each option, with the default that the library uses, unless the annotation gives one.
local function row(lines, name, p, defaults)
  if name == "given" then name = "opts" end
  local options = annotations.fields_of(p.type:match "^{%s*(.-)%s*}$" or "")
  if #options == 0 then return add_row(lines, name, p.type, p.optional, p.text) end
  local names, meanings, rest = {}, p.meanings, ""
  for _, o in ipairs(options) do names[o.name] = true end
  if not meanings then meanings, rest = annotations.meanings_of(p.text, names) end
  if rest ~= "" then add_row(lines, name, "table", p.optional, rest) end
  for _, o in ipairs(options) do
    local default = defaults and defaults[o.name]
    local meaning = meanings[o.name] or common[o.name]
    local parts = { meaning }
    if default and default ~= "" and not (meaning and meaning:find "%(default[:)]") then parts[#parts + 1] = "default `" .. default .. "`" end
    add_row(lines, name .. "." .. o.name, o.type, false, table.concat(parts, "; "))
  end
end

local function returned(lines, returns)
  for _, r in ipairs(returns) do
    local name, text = r.text:match "^([%a_]+)%s%s+(.*)$"
    lines[#lines + 1] = ("Returns `%s`%s."):format(r.type, r.text == "" and ""
      or name and (" %s: %s"):format(name, text) or ": " .. r.text):gsub("%.%.$", ".")
  end
end

local function table_of(lines, a, arguments, options)
  local any
  for _, name in ipairs(arguments) do
    if a.params[name] then
      if not any then
        lines[#lines + 1] = "| argument | type | meaning |"
        lines[#lines + 1] = "|---|---|---|"
        any = true
      end
      row(lines, name == "..." and "…" or name, a.params[name], options)
    end
  end
  if any then lines[#lines + 1] = "" end
end

local function write_entry(lines, entry)
  local a = entry.annotation
  lines[#lines + 1] = "### " .. entry.name
  lines[#lines + 1] = ""
  if a then
    lines[#lines + 1] = "`" .. signature(entry) .. "`"
    lines[#lines + 1] = ""
    if entry.same_as then
      lines[#lines + 1] = ("The same as [%s](%s)."):format(entry.same_as.name,
        (entry.same_as.page == entry.page and "" or entry.same_as.page.file .. ".md") .. "#" .. entry.same_as.anchor)
      lines[#lines + 1] = ""
    end
    lines[#lines + 1] = a.text
    lines[#lines + 1] = ""
    table_of(lines, a, entry.arguments, entry.options)
    if #a.returns > 0 then
      returned(lines, a.returns)
      lines[#lines + 1] = ""
    end
    if entry.is_class then
      local f = a.forward
      if f and (#f.returns > 0 or f.text ~= "") then
        local list = {}
        for k, name in ipairs(f.arguments) do
          if name ~= "self" and not (k == 1 and f.head:find "%.forward") and name ~= "_" then list[#list + 1] = name end
        end
        lines[#lines + 1] = ("Called with `(%s)`. %s"):format(table.concat(list, ", "), f.text)
        lines[#lines + 1] = ""
        table_of(lines, f, list)
        if #f.returns > 0 then
          returned(lines, f.returns)
          lines[#lines + 1] = ""
        end
      end
      if #a.fields > 0 then
        lines[#lines + 1] = "| field | type | meaning |"
        lines[#lines + 1] = "|---|---|---|"
        for _, f2 in ipairs(a.fields) do row(lines, f2.name, f2) end
        lines[#lines + 1] = ""
      end
    end
  end
  if entry.example then
    lines[#lines + 1] = "```lua"
    lines[#lines + 1] = entry.example
    lines[#lines + 1] = "```"
    lines[#lines + 1] = ""
  end
end

local generated = "<!-- Written by scripts/docs; do not edit. -->"

local function write_page(page)
  local lines = { "# " .. page.title, "", page.intro, "" }
  if page.ranks then
    lines[#lines + 1] = ("The examples run on %d ranks; results are those of rank 0."):format(page.ranks)
    lines[#lines + 1] = ""
  end
  if page.setup then
    lines[#lines + 1] = "Every example begins with\n\n```lua\n" .. page.setup .. "\n```\n"
  end
  for _, section in ipairs(page.sections) do
    if #section.entries > 0 then
      if #page.sections > 1 and section.title ~= "" then
        lines[#lines + 1] = "## " .. section.title
        lines[#lines + 1] = ""
      end
      if section.intro then
        lines[#lines + 1] = section.intro
        lines[#lines + 1] = ""
      end
      for _, entry in ipairs(section.entries) do write_entry(lines, entry) end
    end
  end
  return (table.concat(lines, "\n"):gsub("[ \t]+\n", "\n"):gsub("\n\n\n+", "\n\n"):gsub("\n+$", "\n"))
end

local introduction = [[
# Reference

Every public name of `require "moonshard"`. Examples are lines as typed at the prompt (`scripts/repl`), with `ms` the
library and `nn`, `F`, `dist`, `fsdp`, `optim` short for `ms.nn`, `ms.nn.F` and so on; `--> text` is the value of an
expression. All of them are run by `scripts/docs --check`.

A wrong argument is an error at the caller's line that names the argument, its value and what was expected; entries
name only the errors beyond that.
]]

local function write_index(pages)
  local lines = { generated, introduction, "| page | contents |", "|---|---|" }
  for _, page in ipairs(pages) do
    lines[#lines + 1] = ("| [%s](%s.md) | %d names |"):format(page.title, page.file, #page.entries)
  end
  lines[#lines + 1] = ""
  lines[#lines + 1] = "## Every name"
  lines[#lines + 1] = ""
  for _, page in ipairs(pages) do
    local names = {}
    for k, entry in ipairs(page.entries) do
      names[k] = ("[%s](%s.md#%s)"):format(entry.name:gsub("_", "\\_"), page.file, entry.anchor)
    end
    lines[#lines + 1] = ("**%s**: %s"):format(page.title, table.concat(names, ", "))
    lines[#lines + 1] = ""
  end
  return (table.concat(lines, "\n"):gsub("\n+$", "\n"))
end

-- The first sentence of a text, without links, in one line of about 160 bytes.
local function sentence(text)
  text = text:gsub("%s+", " "):gsub("%[([^%]]*)%]%([^)]*%)", "%1")
  local at = 1
  while true do
    local stop = text:find("%.%f[%s%z]", at)
    if not stop then break end
    if not text:sub(1, stop):find "%f[%w]e%.g%.$" and not text:sub(1, stop):find "%f[%w]i%.e%.$" then
      text = text:sub(1, stop)
      break
    end
    at = stop + 1
  end
  text = text:gsub("[.:;,]?%s*$", "")
  if #text <= 160 then return text end
  return (text:sub(1, 160):gsub("[\128-\255]*$", ""):gsub("[^%w)]*%s%S*$", "")) .. " …"
end

-- The line of an entry; of `x` and `x_`, which does the same in place, one line.
local function name_line(entry, in_place)
  local head, text
  if entry.declaration then                               -- a C function
    head, text = entry.declaration:gsub(";$", ""), entry.text
    if entry.leader then text = "see " .. entry.leader.name end
  else
    head, text = signature(entry), entry.annotation.text
    if entry.same_as then text = "the same as " .. entry.same_as.name end
  end
  if in_place then head = ("%s`, `%s"):format(head, in_place.key) end
  return ("- `%s`: %s"):format(head, sentence(text))
end

local names_intro = [[
# Every name

The public names of `require "moonshard"` and of the C interface, with the first sentence of each. `scripts/docs` writes
this list, and into `docs/api` the reference: arguments, defaults, results and an example of each name. The first build
writes the reference, too. In a tree that is not built, the annotation above a function says what its page would: search
for its name. At the prompt (`scripts/repl`), `? nn.Linear` prints it.
]]

--- docs/names.md: a line for every name. Needs no example to have run.
---@return { name: string, text: string }
function M.names(pages)
  local lines = { generated, names_intro }
  for _, page in ipairs(pages) do
    lines[#lines + 1] = ("## %s\n"):format(page.title)
    local by_name, merged = {}, {}
    for _, entry in ipairs(page.entries) do by_name[entry.name] = entry end
    for _, entry in ipairs(page.entries) do
      local other = by_name[entry.name .. "_"]
      local text = other and other.annotation and other.annotation.text
      if text and text:find "^In%-place version of [%w_]+%.?$" then merged[other] = true else other = nil end
      if not merged[entry] and (entry.declaration or entry.annotation) then
        lines[#lines + 1] = name_line(entry, other)
      end
    end
    lines[#lines + 1] = ""
  end
  return { name = "docs/names.md", text = (table.concat(lines, "\n"):gsub("\n+$", "\n")) }
end

--- The files of the reference: names under docs/api and contents.
---@return { name: string, text: string }[]
function M.files(pages)
  for _, page in ipairs(pages) do
    local used = {}
    anchor_of(page.title, used)
    for _, section in ipairs(page.sections) do
      if #(section.entries or section.functions) > 0 and #page.sections > 1 then anchor_of(section.title, used) end
      for _, entry in ipairs(section.entries or section.functions) do entry.anchor = anchor_of(entry.name, used) end
    end
  end
  local files = { { name = "README.md", text = write_index(pages) } }
  for _, page in ipairs(pages) do
    files[#files + 1] = { name = page.file .. ".md", text = generated .. "\n" .. (page.write or write_page)(page) }
  end
  return files
end

--- Reports arguments, options and fields without a description.
---@param file { name: string, text: string }
function M.check(file, fault)
  for name in file.text:gmatch "\n| `([^\n`]*)` |[^\n]*|  |%f[\n]" do
    fault("docs/api/%s: '%s' has no description", file.name, name)
  end
end

return M
