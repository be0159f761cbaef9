-- SPDX-License-Identifier: MIT
--- Reads annotations (LuaLS comments) of functions and classes from the sources: for `? name` at the prompt, and for
--- the reference in docs/api.
local opts = require "moonshard.core.opts"

local M = {}

---@class Annotation
---@field head string      the line that defines the function or class, without `local` and `end`
---@field source string    the comment above the head, line by line
---@field text string      the prose of the comment
---@field arguments string[]     names in the head, in order
---@field params table<string, { type: string, optional: boolean, text: string }>  the arguments, by name
---@field returns { type: string, text: string }[]  the results, in order
---@field overload string?  the type in the @overload line
---@field overload_text string   the text after that type: "name: meaning; name: meaning"
---@field fields { name: string, type: string, text: string }[]  the fields of a class

local files = {}

--- The lines of a source file; an empty list if it cannot be read.
function M.lines_of(path)
  if files[path] then return files[path] end
  local lines = {}
  local file = io.open(path, "r")
  if file then
    for line in file:lines() do lines[#lines + 1] = line end
    file:close()
  end
  files[path] = lines
  return lines
end

-- A type ends at the first space outside brackets that follows no bar, comma or colon, and precedes no bar.
local function split_type(text)
  local depth, k = 0, 1
  while k <= #text do
    local c = text:sub(k, k)
    if c:find "[%(%[{<]" then depth = depth + 1 elseif c:find "[%)%]}>]" then depth = depth - 1 end
    if c:find "%s" and depth <= 0 and not text:sub(1, k - 1):find "[|,:]$" and not text:find("^%s*[|]", k) then break end
    k = k + 1
  end
  return text:sub(1, k - 1), (text:sub(k):gsub("^%s+", ""))
end

--- Names and types in a list such as `a: number, b?: fun(x: Tensor): Tensor`.
---@param text string  the list, without braces
---@return { name: string, type: string, optional: boolean, text: string }[]
function M.fields_of(text)
  local list, depth, from = {}, 0, 1
  for k = 1, #text + 1 do
    local c = text:sub(k, k)
    if c:find "[%({<]" then depth = depth + 1 elseif c:find "[%)}>]" then depth = depth - 1 end
    if depth == 0 and (c == "," or c == "") then
      local name, mark, kind = text:sub(from, k - 1):match "^%s*([%w_.]+)(%??):%s*(.-)%s*$"
      if name then list[#list + 1] = { name = name, type = kind, optional = mark == "?", text = "" } end
      from = k + 1
    end
  end
  return list
end

--- The meanings in a text such as "low: the least; high: the largest", by name. Only names that are keys of `names`
--- count.
---@param text string  the text to split
---@param names table<string, any>  its keys are the names to look for
---@return table<string, string> meanings
---@return string rest  the text before the first of them
function M.meanings_of(text, names)
  local out, rest, name = {}, {}, nil
  for part in (text .. "; "):gmatch "(.-); +" do
    local known, meaning = part:match "^([%w_.]+): (.*)$"
    if known and names[known] then
      name, out[known] = known, meaning
    elseif name then
      out[name] = out[name] .. "; " .. part
    else
      rest[#rest + 1] = part
    end
  end
  return out, table.concat(rest, "; ")
end

--- The annotation above line `at`; nil if there is no such line.
---@return Annotation?
function M.parse(lines, at)
  if not lines[at] then return nil end
  local first = at
  while first > 1 and lines[first - 1]:match "^%s*%-%-%-" do first = first - 1 end
  local head = lines[at]
  for k = at + 1, at + 4 do                              -- a function's head may have several lines
    if not head:find "%(" or head:find "%)" then break end
    head = head .. " " .. (lines[k] or ""):gsub("^%s+", "")
  end
  local out = { head = head:gsub("^%s*local%s+", ""):gsub("^%s+", ""):gsub("%s+end$", ""), params = {}, returns = {},
    fields = {}, arguments = {} }
  local source, prose, last, overload = {}, {}, nil, nil
  for k = first, at - 1 do
    local line = lines[k]:gsub("^%s*%-%-%-%s?", "")
    source[#source + 1] = line
    local tag, rest = line:match "^@(%a+)%s*(.*)$"
    if tag == "param" then
      local name, mark, after = rest:match "^([%w_.]+)(%??)%s*(.*)$"
      local kind, text = split_type(after or "")
      last = { type = kind, optional = mark == "?", text = text }
      if name then out.params[name] = last end
    elseif tag == "return" then
      local kind, text = split_type(rest)
      last = { type = kind, text = text }
      out.returns[#out.returns + 1] = last
    elseif tag == "field" then
      local name, after = rest:match "^([%w_]+%??)%s+(.*)$"
      local kind, text = split_type(after or "")
      last = { name = name, type = kind, text = text }
      if name then out.fields[#out.fields + 1] = last end
    elseif tag == "type" and rest:find "^fun%(" then      -- a function returned by another function
      local list, result = rest:match "^fun(%b())%s*:?%s*(.*)$"
      out.typed = M.fields_of(list:sub(2, -2))
      if result ~= "" then out.returns[1] = { type = result, text = "" } end
      last = nil
    elseif tag == "overload" then
      last = {}
      out.overload, last.text = split_type(rest)
      overload = last
    elseif tag then
      last = nil
    elseif last and line:find "^%s%s" then               -- further lines of a tag are indented
      last.text = (last.text == "" and "" or last.text .. " ") .. line:gsub("^%s+", "")
    else
      prose[#prose + 1] = line
      last = nil
    end
  end
  for name in (out.head:match "%((.-)%)" or ""):gmatch "[%w_.]+" do out.arguments[#out.arguments + 1] = name end
  if out.typed then
    out.arguments = {}
    for k, p in ipairs(out.typed) do
      out.arguments[k] = p.name
      p.text = out.params[p.name] and out.params[p.name].text or ""
      out.params[p.name] = p
    end
  end
  out.source, out.text = table.concat(source, "\n"), table.concat(prose, "\n")
  out.overload_text = overload and overload.text or ""
  return out
end

-- Returns the function that a wrapper calls.
local function behind(fn)
  while opts.original[fn] do fn = opts.original[fn] end
  return fn
end

local here = debug.getinfo(1, "S").source:match "^@(.*/)" or "./"

-- The lines of the two files of declarations: the one written by hand, and the one that the engine's tables give.
local function declarations()
  if not M._declarations then
    local made = {}
    for line in require("moonshard.tools.engine_types").text():gmatch "([^\n]*)\n" do made[#made + 1] = line end
    M._declarations = { M.lines_of(here .. "../core/types.lua"), made }
  end
  return M._declarations
end

--- Declarations of functions that are made in loops, by name: "Tensor:abs", "ms.zeros".
---@return table<string, Annotation>
function M.declared()
  if M._declared then return M._declared end
  local out = {}
  for _, lines in ipairs(declarations()) do
    for at, line in ipairs(lines) do
      local name = line:match "^function ([%a.]+[.:][%w_]+)%("
      if name then out[name] = M.parse(lines, at) end
    end
  end
  M._declared = out
  return out
end

--- The annotation of a class that core/types.lua or the engine's tables declare, such as "Tensor" or "AdamW"; nil if
--- neither does.
---@return Annotation?
function M.declared_class(name)
  for _, lines in ipairs(declarations()) do
    local seen = false
    for at, line in ipairs(lines) do
      seen = seen or line:match "^%-%-%-@class ([%w_]+)" == name
      if seen and line:find "^local " then return M.parse(lines, at) end
    end
  end
end

--- The annotation of a function of the front end. The annotation of a function that another function makes is above the
--- line that assigns it to its name.
---@param fn function  a function of the front end
---@param name? string  its public name
---@return Annotation?
function M.of(fn, name)
  fn = behind(fn)
  local info = debug.getinfo(fn, "S")
  if info.what ~= "Lua" or info.source:sub(1, 1) ~= "@" then return nil end
  local lines = M.lines_of(info.source:sub(2))
  local a = M.parse(lines, info.linedefined)
  if a and a.text == "" and name then
    for at = 2, #lines do
      local line = lines[at]
      if (line:find("^[%w_.]*%f[%w_]" .. name .. "%f[^%w_].*=") or line:find("^%w+%(\"" .. name .. "\""))
        and lines[at - 1]:find "^%-%-%-" then
        return M.parse(lines, at)
      end
    end
  end
  return a
end

--- The annotation of a class: the declared one, or else the one in the file of one of its methods; nil if it has none.
---@param cls table  a class of the front end
---@return Annotation?
function M.of_class(cls)
  local name = rawget(cls, "__name")
  local declared = M.declared_class(name)
  if declared then return declared end
  local from, seen = cls, {}
  while from do
    for _, fn in require("moonshard.tensor.util").sorted_pairs(from) do
      local source = type(fn) == "function" and debug.getinfo(behind(fn), "S").source or ""
      if source:sub(1, 1) == "@" and not seen[source] then
        seen[source] = true
        local lines = M.lines_of(source:sub(2))
        for at, line in ipairs(lines) do
          if line:match "^%-%-%-@class ([%w_]+)" == name then
            while lines[at] and lines[at]:find "^%-%-%-" do at = at + 1 end
            return M.parse(lines, at)
          end
        end
      end
    end
    from = rawget(from, "__base")
  end
end

--- A page of text: the head, followed by the comment, indented.
---@param a Annotation  the annotation to print
---@return string
function M.page(a) return a.source == "" and a.head or a.head .. "\n  " .. a.source:gsub("\n", "\n  ") end

return M
