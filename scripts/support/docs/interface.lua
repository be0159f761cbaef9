-- SPDX-License-Identifier: MIT
--- The page of the C interface: every function of runtime/moonshard.h with its declaration, its comment, and a line
--- that calls it: of docs/api/examples/c.c (compiled and run), else of embed.c, the front end, specs or benchmarks;
--- and the table of operators, from their rows.
local engine = require "moonshard.core.ffi"
local lib, text_of = engine.lib, engine.ffi.string

local M = {}

local function lines_of(path)
  local lines = {}
  for line in io.lines(path) do lines[#lines + 1] = line end
  return lines
end

local function comment_of(line) return line:match "^%s*//%s?(.*)$" end

--- Sections of the header: { title, types = { text }, functions = { { name, declaration, text } } }.
local function parse(lines)
  local sections = { { title = "conventions", types = {}, functions = {}, lines = {} } }
  -- leader: the function whose comment also applies to the functions below it, up to the next blank line
  local pending, fn, leader = {}, nil, nil
  local k = 1
  while k <= #lines do
    local line, section = lines[k], sections[#sections]
    local title = line:match "^// %-%-%-%- (.-) %-+$"
    local comment = comment_of(line)
    if title then
      sections[#sections + 1] = { title = title, types = {}, functions = {} }
      pending, fn = {}, nil
    elseif line:find "^%s+//" and fn then                 -- the comment continues after the declaration
      fn.text = fn.text .. " " .. comment
    elseif comment then
      pending[#pending + 1], fn = comment, nil
    elseif line:find "^MS_API [%w_]" then
      local declaration, trailing = "", {}
      repeat
        local code, text = lines[k]:match "^(.-)%s*//%s*(.*)$"
        declaration = declaration .. (declaration ~= "" and " " or "") .. (code or lines[k]):gsub("^%s+", "")
        if text then trailing[#trailing + 1] = text end
        k = k + 1
      until declaration:find ";$" or not lines[k]
      k = k - 1
      local leads = #pending > 0
      for _, text in ipairs(trailing) do pending[#pending + 1] = text end
      fn = { name = declaration:match "([%w_]+)%(", declaration = declaration:gsub("^MS_API ", ""),
        text = table.concat(pending, " ") }
      if fn.name then section.functions[#section.functions + 1] = fn end
      if leads then leader = fn elseif fn.text == "" then fn.leader = leader end
      pending = {}
    elseif line:find "^typedef .*{" or line:find "^enum {" or line:find "^struct .*{" then
      local text = pending
      pending, fn = {}, nil
      for j = 1, #text do text[j] = "// " .. text[j] end
      repeat
        text[#text + 1] = lines[k]
        k = k + 1
      until lines[k - 1]:find "^}" or lines[k - 1]:find "};?%s*$" or lines[k - 1]:find "^[^{]*{.*}.*;" or not lines[k]
      k = k - 1
      section.types[#section.types + 1] = table.concat(text, "\n")
    elseif line == "" then
      if #section.functions == 0 and #pending > 0 and section.title ~= "conventions" then
        section.intro = (section.intro and section.intro .. "\n\n" or "") .. table.concat(pending, "\n")
      end
      if section.title == "conventions" and #pending > 0 then section.intro = table.concat(pending, "\n") end
      pending, fn, leader = {}, nil, nil
    end
    k = k + 1
  end
  return sections
end

-- For each function that is not in `found` yet, stores there, by name, the first line of the file that calls it.
local function calls_in(path, shown, found)
  for _, line in ipairs(lines_of(path)) do
    if not line:find "^%s*[-/][-/]" and not line:find "^[%w_]+ [%w_ *]+%(.*[,{]$" then
      for _, pattern in ipairs { "(ms_[%w_]+)%s*%(", "%.(ms_[%w_]+)" } do
        for name in line:gmatch(pattern) do
          found[name] = found[name] or { path = shown, text = (line:gsub("^%s+", "")) }
        end
      end
    end
  end
end

-- The lines of the table of operators, in alphabetical order; without internal ones.
local function operators()
  local rows = {}
  for op = 0, lib.ms_op_count() - 1 do
    local row = lib.ms_op_at(op)
    local least, most = row.inputs, row.most_inputs
    if not text_of(row.name):find "_backward$" then
      rows[#rows + 1] = ("| `%s` | %s | %s | %s |"):format(text_of(row.name), least == most and least or least .. " to " .. most,
        text_of(row.takes) ~= "" and ("`%s`"):format(text_of(row.takes)) or "", (text_of(row.doc):gsub("|", "\\|")))
    end
  end
  table.sort(rows)
  return "| operator | tensors | integers; numbers | result |\n|---|---|---|---|\n" .. table.concat(rows, "\n")
end

-- The page as Markdown.
local function write(page)
  local lines = { "# " .. page.title, "",
    "The functions of `runtime/moonshard.h`, the library's only public header. Examples are lines of "
      .. "[examples/c.c](examples/c.c), which `scripts/docs --check` compiles and runs, and otherwise calls in the Lua "
      .. "front end or the specs (`lib` is the loaded library there). [embed.c](../../scripts/examples/embed.c) is a whole "
      .. "program.", "" }
  local function add(...)
    for k = 1, select("#", ...) do lines[#lines + 1] = (select(k, ...)) end
  end
  for _, section in ipairs(page.sections) do
    if section.intro or #section.functions > 0 then
      add("## " .. section.title:sub(1, 1):upper() .. section.title:sub(2), "")
      if section.intro then add("```text", section.intro, "```", "") end
      if #section.types > 0 then add("```c", table.concat(section.types, "\n\n"), "```", "") end
      if section.title == "operators" then add(operators(), "") end
      for _, fn in ipairs(section.functions) do
        add("### " .. fn.name, "", "```c", fn.declaration, "```", "")
        if fn.text ~= "" then add(fn.text:sub(1, 1):upper() .. fn.text:sub(2) .. (fn.text:find "[.:]$" and "" or "."), "") end
        if fn.leader then add(("See [%s](#%s)."):format(fn.leader.name, fn.leader.name), "") end
        if fn.example and fn.example.text ~= fn.declaration then
          add(("Example, %s:"):format(fn.example.path), "", fn.example.path:find "%.c$" and "```c" or "```lua",
            fn.example.text, "```", "")
        end
      end
    end
  end
  return table.concat(lines, "\n"):gsub("\n+$", "\n")
end

--- The page as a table like a page of pages.lua: entries with name and text.
function M.page(root, fault)
  local found = {}
  calls_in(root .. "/docs/api/examples/c.c", "docs/api/examples/c.c", found)
  calls_in(root .. "/scripts/examples/embed.c", "scripts/examples/embed.c", found)
  local pipe = io.popen(("cd '%s' && { find lua spec -name '*.lua' | LC_ALL=C sort; find scripts/bench -type f | LC_ALL=C sort; }"):format(root))
  for path in pipe:lines() do calls_in(root .. "/" .. path, path, found) end
  pipe:close()
  local page = { write = write, file = "c", title = "C interface", entries = {}, sections = parse(lines_of(root
    .. "/runtime/moonshard.h")) }
  for _, section in ipairs(page.sections) do
    for _, fn in ipairs(section.functions) do
      fn.example = found[fn.name]
      page.entries[#page.entries + 1] = fn
      if not fn.example then
        fault("%s (c) has no example: no line of docs/api/examples/c.c, scripts/examples, lua, spec or scripts/bench calls it",
          fn.name)
      end
    end
  end
  return page
end

--- Compiles and runs docs/api/examples/c.c.
function M.run(root, fault)
  local build = os.getenv "MOONSHARD_BUILD" or "build"
  if not build:find "^/" then build = root .. "/" .. build end
  local out = os.tmpname()
  local command = ("{ ${CC:-cc} -std=c11 -Wall -Wextra -Werror -I'%s/runtime' '%s/docs/api/examples/c.c' -o '%s' "
    .. "-L'%s' -lmoonshard -lm -Wl,-rpath,\"$(cd '%s' && pwd)\" && '%s'; } >'%s.log' 2>&1"):format(root, root, out,
    build, build, out, out)
  if os.execute(command) ~= 0 then
    local log = io.open(out .. ".log")
    fault("docs/api/examples/c.c failed:\n%s", log and log:read "*a" or "")
    if log then log:close() end
  end
  os.remove(out)
  os.remove(out .. ".log")
end

return M
