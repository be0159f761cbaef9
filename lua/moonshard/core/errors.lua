-- SPDX-License-Identifier: MIT
--- Raises errors, and writes the parts that their messages share: values, and similar names. An error is raised at the
--- user's line: the line of the first stack frame outside lua/moonshard. If Lua does not know that line, as for
--- `pcall(f, x)` with a function of the library, the message has none.
local engine = require "moonshard.core.ffi"
local lib, string_of = engine.lib, engine.ffi.string

local hints = require "moonshard.core.hints"

local M = {}

-- The front end's folder, the parent of this file's folder.
local prefix = debug.getinfo(1, "S").source:match "^(@.*/)core/[^/]*$"
M.library = prefix             -- the prefix of the source path of every function of the front end
local getinfo = debug.getinfo

-- Where a function is defined: "C", "library", or the script's file. Cached, because debug.getinfo allocates 300 bytes
-- per frame, and training loops look up the lines that make tensors.
local places = setmetatable({}, { __mode = "k" })

local function place_of(fn)
  local place = places[fn]
  if not place then
    local info = getinfo(fn, "S")
    place = info.what == "C" and "C" or info.source:sub(1, #prefix) == prefix and "library" or info.short_src
    places[fn] = place
  end
  return place
end
M.place_of = place_of

--- Whether the function at the given level of the stack belongs to the front end.
---@param level integer  1: the caller
---@return boolean
function M.is_library(level)
  local info = getinfo(level + 1, "f")
  return info ~= nil and place_of(info.func) == "library"
end

--- The script's current line, "file:line"; nil if it is not known.
---@param level? integer  the stack level at which the search begins; 1 (default): the caller
---@return string?
function M.user_line(level)
  local n, through_c = (level or 1) + 1, false
  while true do
    local info = getinfo(n, "f")
    if not info then return nil end
    local place = place_of(info.func)
    if place == "C" then
      through_c = true
    elseif place == "library" then
      through_c = false
    else
      local line = place and not through_c and getinfo(n, "l").currentline or -1
      return line >= 0 and place .. ":" .. line or nil
    end
    n = n + 1
  end
end

--- Raises text at the user's line.
---@param text string  the message, without the line
function M.raise_text(text)
  local at = M.user_line(2)
  error(at and at .. ": " .. text or text, 0)
end

--- Raises a formatted message at the user's line.
---@param format string  for string.format, with the arguments that follow
function M.raise(format, ...)
  M.raise_text(select("#", ...) > 0 and format:format(...) or format)
end

local no_memory
--- Registers fn, which says what holds the memory when an allocation fails. nil: no function.
---@param fn? fun(device: string): string?  device: name of the full device; returns text that is added to the message
function M.on_no_memory(fn) no_memory = fn end

--- The text of the engine's last failure.
function M.last()
  local text = string_of(lib.ms_error())
  if not no_memory or lib.ms_error_code() ~= engine.ffi.C.MS_ENOMEM then return text end
  local device = text:match "no memory for %d+ bytes on (%S+)"
  return text .. (device and no_memory(device) or "")
end

local release_error
--- Registers fn, which is called before an error about a released tensor is raised.
---@param fn fun()  called without arguments
function M.on_release_error(fn) release_error = fn end

local function explain_release() return "" end
--- Registers fn, which says why a tensor was released with a scope that returned it.
---@param fn fun(t: Tensor): string  returns text that is added to the message
function M.explain_release(fn) explain_release = fn end

--- Raises the engine's last failure at the user's line. `tensors` are those of the call: if one was released, the
--- message names the line that made it, if that is known.
---@param tensors Tensor[]  may have holes; n: their number (default: #tensors)
function M.fail_of(tensors)
  local text = M.last()
  if lib.ms_error_code() == engine.ffi.C.MS_ERELEASED then
    for k = 1, tensors.n or #tensors do
      local t = tensors[k]
      local id = type(t) == "table" and rawget(t, "id")
      if id and lib.ms_is_alive(id) == 0 then
        local site = rawget(t, "_site")
        if site then
          local base = text:match "^.-keep%(%) it" or text:match "^tensor was released by release%(%)"
          local note = text:sub(#base + 1):match "^ ?%(?(.-)%)?$"
          local joint = (note == "" or note:find "^made by") and "" or "; "
          text = ("%s (made at %s%s%s)"):format(base, site, joint, (note:gsub("^made", "")))
        end
        if text:find "^tensor was released with its scope" then text = text .. explain_release(t) end
        break
      end
    end
    if release_error then release_error() end
  end
  M.raise_text(text)
end

--- As fail_of, with the tensors as arguments.
function M.fail(...) M.fail_of { n = select("#", ...), ... } end

local function renamed(who, parts, ok, ...)
  if ok then return ... end
  local text = ...
  if type(text) == "string" then
    text = text:gsub("%f[%w_]([%w_]+): ", function(name) return parts[name] and who .. ": " end)
  end
  error(text, 0)
end

--- Returns the results of fn. Its errors name `who`, the function that the script called, in place of one of `parts`,
--- of which that is made.
---@param who string
---@param parts table<string, boolean>
---@param fn function  called with the arguments that follow
function M.naming(who, parts, fn, ...) return renamed(who, parts, pcall(fn, ...)) end

--- Raises the engine's last failure unless status is MS_OK.
function M.check(status, ...)
  if status ~= 0 then M.fail(...) end
end

-- ---- nearest names ---------------------------------------------------------------------------

-- The Damerau-Levenshtein distance; limit + 1 if it is larger than limit.
local function distance(a, b, limit)
  local n, m = #a, #b
  if math.abs(n - m) > limit then return limit + 1 end
  local before, last = {}, {}
  for j = 0, m do last[j] = j end
  for i = 1, n do
    local row = { [0] = i }
    local least = i
    for j = 1, m do
      local cost = a:byte(i) == b:byte(j) and 0 or 1
      local d = math.min(last[j] + 1, row[j - 1] + 1, last[j - 1] + cost)
      if i > 1 and j > 1 and a:byte(i) == b:byte(j - 1) and a:byte(i - 1) == b:byte(j) then
        d = math.min(d, before[j - 2] + 1)
      end
      row[j] = d
      if d < least then least = d end
    end
    if least > limit then return limit + 1 end
    before, last = last, row
  end
  return last[m]
end

--- Whether two names differ by at most `limit` letters that are missing, added, replaced or swapped.
---@param a string
---@param b string
---@param limit integer
---@return boolean
function M.alike(a, b, limit) return distance(a, b, limit) <= limit end

--- The keys of the given tables, sorted.
---@param ... table  with strings as keys
---@return string[]
function M.names(...)
  local names = {}
  for k = 1, select("#", ...) do
    for name in pairs((select(k, ...))) do names[#names + 1] = name end
  end
  table.sort(names)
  return names
end

--- The name in `names` that hints.synonym gives for `name` or, without one, the most similar one; nil if none is similar.
---@param name string  the unknown name
---@param names string[]  the known names
---@return string?
function M.nearest(name, names)
  local synonym = hints.synonym(name, names)
  if synonym then return synonym end
  local best, best_d
  local lower = tostring(name):lower()
  local limit = math.max(1, math.floor(#lower / 3) + 1)
  for _, other in ipairs(names) do
    local o = other:lower()
    local d = distance(lower, o, limit)
    if d > limit and #lower >= 3 and (o:find(lower, 1, true) or lower:find(o, 1, true) and #o >= 3) then d = limit end
    if d <= limit then
      -- For equal distances, prefer the same upper and lower case.
      d = d + distance(tostring(name), other, limit + 1) / 100
      if not best_d or d < best_d then best, best_d = other, d end
    end
  end
  return best
end

--- The message "unknown <what> 'x'", with "; did you mean 'y'?" if a known name is similar.
function M.unknown(what, name, names)
  local near = M.nearest(name, names)
  return ("unknown %s '%s'%s"):format(what, tostring(name), near and ("; did you mean '%s'?"):format(near) or "")
end

--- As M.unknown, for a public table of functions and classes. If another table has the name, or Moonshard has no such
--- function, the message says what to write instead.
function M.unknown_in(what, name, names)
  local elsewhere = type(name) == "string" and not hints.synonym(name, names) and hints.elsewhere(name, what)
  if not elsewhere then return M.unknown("name in " .. what .. ":", name, names) end
  return ("unknown name in %s: '%s'; %s"):format(what, name, elsewhere)
end

--- Makes reading an unknown name of a table an error that suggests the most similar name.
---@param module table  its keys are the known names
---@param what string  the table's name in messages, such as "nn.F"
---@param former? table<string, function>  what former names, which are not suggested, return
---@return table module
function M.closed(module, what, former)
  return setmetatable(module, { __index = function(_, name)
    if former and former[name] then return former[name]() end
    if type(name) ~= "string" or name:sub(1, 1) == "_" then return nil end      -- tools test tables for such names
    local names = {}
    for known in pairs(module) do
      known = tostring(known)
      if known:sub(1, 1) ~= "_" then names[#names + 1] = known end                -- internal names are not suggested
    end
    table.sort(names)
    M.raise_text(M.unknown_in(what, name, names))
  end })
end

--- A number and its noun: "1 parameter", "2 parameters".
---@param n integer
---@param noun string  whose plural ends in s
---@return string
function M.count(n, noun) return ("%d %s%s"):format(n, noun, n == 1 and "" or "s") end

local int64, uint64 = engine.ffi.typeof "int64_t", engine.ffi.typeof "uint64_t"
--- Whether a value is a 64-bit integer of the FFI, such as 5LL or 5ULL.
---@return boolean
function M.is_int64(v)
  return type(v) == "cdata" and (engine.ffi.istype(int64, v) or engine.ffi.istype(uint64, v))
end

--- A value as messages show it: 'text', 3, Tensor, Linear, function.
function M.show(v)
  local kind = type(v)
  if kind == "string" then return "'" .. v .. "'" end
  if kind == "number" or kind == "boolean" or kind == "nil" then return tostring(v) end
  local mt = kind == "table" and getmetatable(v)
  local name = mt and rawget(mt, "__name")
  return name or kind
end

--- Describes a value: "a string ('x')", "a Linear".
function M.kind(v)
  local kind = type(v)
  if kind == "nil" then return "nil" end
  if kind == "userdata" and tostring(v) == "userdata: NULL" then return "null" end       -- of JSON
  if kind == "string" or kind == "number" or kind == "boolean" then return ("a %s (%s)"):format(kind, M.show(v)) end
  if M.is_int64(v) then return ("a 64-bit integer (%s)"):format(tostring(v)) end
  return "a " .. M.show(v)
end

return M
