-- SPDX-License-Identifier: MIT
--- Packs values for another process: numbers, strings, tables with their metatables, tensors, and functions of the
--- script with their upvalues. Modules, functions and classes of the library's public tables, and fields of modules, are
--- packed by name; the other process requires them. A global that a function uses is the other process's.
---
--- The packed bytes are a text, then the elements of the tensors, each tensor at a multiple of 64 bytes. The text
--- begins with the lengths of its two parts and the number of tensors, each followed by a colon. The first part has
--- "dtype,offset,sizes;" of each tensor, the second the value. A value begins with a letter for its kind:
---   n: nil; t: true; f: false; d: a number, 8 bytes; s: a string, "LENGTH:" and its bytes; X: a tensor, "NUMBER:";
---   P: what has a name, "MODULE:KEY:"; R: an earlier table or function, "NUMBER:"; T: a table, its metatable, keys and
---   values, then "e"; F: a function, "LENGTH:", its bytecode, "NUMBER:" and so many upvalues
local class = require "moonshard.core.class"
local engine = require "moonshard.core.ffi"
local dtypes = require "moonshard.core.dtypes"
local errors = require "moonshard.core.errors"
local create = require "moonshard.tensor.create"
local raw = require "moonshard.data.raw"
local tensor = require "moonshard.tensor"

local ffi, lib = engine.ffi, engine.lib
local CLASS_META = getmetatable(class.new "Packed")       -- the metatable of classes, which no module has as a field

local M = {}

-- ---- what has a name -------------------------------------------------------------------------------------

local function is_c(fn) return debug.getinfo(fn, "S").what == "C" end

-- The module of the classes of datasets. package.loaded may lack it, because spec runners load modules again.
local OWN = { ["moonshard.data.dataset"] = require "moonshard.data.dataset" }

-- A value keeps the first name that it gets.
local function add(names, name, module)
  for key, value in next, module do
    local kind = type(value)
    local kept = kind == "function" and (name ~= "_G" or is_c(value)) or kind == "table" and name ~= "_G"
    if kept and type(key) == "string" and not names[value] then names[value] = { name, key } end
  end
end

-- Names the functions and tables of the public tables: { "moonshard", "nn.utils.rnn" }. Breadth first and sorted, so
-- that of several paths the shortest is chosen.
local function add_public(names, ms)
  for _, name in ipairs(getmetatable(ms).modules) do      -- what only the library has loaded becomes a field of ms
    if package.loaded["moonshard." .. name] then assert(ms[name]) end
  end
  local queue, seen = { { ms, "" } }, { [ms] = true }
  for _, entry in ipairs(queue) do
    local t, path, keys = entry[1], entry[2], {}
    for key in next, t do
      if type(key) == "string" and key:find "^%a[%w_]*$" then keys[#keys + 1] = key end
    end
    table.sort(keys)
    for _, key in ipairs(keys) do
      local value, full = rawget(t, key), path .. key
      local kind = type(value)
      if (kind == "function" or kind == "table") and not names[value] then names[value] = { "moonshard", full } end
      if kind == "table" and not seen[value] and getmetatable(value) ~= CLASS_META and not tensor.is_tensor(value) then
        seen[value] = true
        queue[#queue + 1] = { value, full .. "." }
      end
    end
  end
end

-- Names of modules, and of functions and tables in them. Globals have names only if they are Lua's own: those of the
-- script do not exist in another process. A table that is public has its public path as its name, because other modules
-- add functions to it: `require "moonshard.nn.utils"` alone gives a table without those of nn/init.lua.
local function known()
  local names = { [CLASS_META] = { "moonshard.core.class", "@meta" } }
  local ms, modules = package.loaded.moonshard, {}
  if ms then
    names[ms] = { "moonshard", "" }
    add_public(names, ms)
  end
  for name, module in pairs(package.loaded) do
    if type(module) == "table" and type(name) == "string" then modules[#modules + 1] = name end
  end
  table.sort(modules)
  for _, name in ipairs(modules) do
    local module = package.loaded[name]
    names[module] = names[module] or { name, "" }
  end
  for name, module in pairs(OWN) do add(names, name, module) end
  for _, name in ipairs(modules) do add(names, name, package.loaded[name]) end
  return names
end

local function named(module, key)
  if module == "moonshard.core.class" and key == "@meta" then return CLASS_META end
  local found = module == "_G" and _G or require(module)
  if key == "" then return found end
  if module ~= "moonshard" then return found[key] end
  for part in key:gmatch "[^.]+" do found = found[part] end
  return found
end

-- ---- packing ---------------------------------------------------------------------------------------------

local double = ffi.new "double[1]"

local write

local function refuse(p, what)
  errors.raise("%s: %s is %s, which cannot be sent to another process", p.who, table.concat(p.path), what)
end

local function inside(p, name, value)
  p.path[#p.path + 1] = name
  write(p, value)
  p.path[#p.path] = nil
end

local function write_function(p, fn)
  local ok, code = pcall(string.dump, fn)
  if not ok then refuse(p, "a function written in C") end
  local count = debug.getinfo(fn, "u").nups
  p[#p + 1] = ("F%d:%s%d:"):format(#code, code, count)
  for k = 1, count do
    local name, value = debug.getupvalue(fn, k)
    inside(p, (": its upvalue '%s'"):format(name), value)
  end
end

local function write_table(p, t)
  p[#p + 1] = "T"
  inside(p, ": its metatable", getmetatable(t))
  for key, value in next, t do
    write(p, key)
    inside(p, ("[%s]"):format(errors.show(key)), value)
  end
  p[#p + 1] = "e"
end

local function write_tensor(p, t)
  if t.id < 0 or t.placements then refuse(p, "a " .. class.name(t)) end
  p.tensors[#p.tensors + 1] = t
  p[#p + 1] = ("X%d:"):format(#p.tensors)
end

function write(p, v)
  local kind = type(v)
  if v == nil then
    p[#p + 1] = "n"
  elseif kind == "boolean" then
    p[#p + 1] = v and "t" or "f"
  elseif kind == "number" then
    double[0] = v
    p[#p + 1] = "d" .. ffi.string(double, 8)
  elseif kind == "string" then
    p[#p + 1] = ("s%d:"):format(#v) .. v
  elseif kind ~= "table" and kind ~= "function" then
    refuse(p, "a " .. kind)
  elseif p.seen[v] then
    p[#p + 1] = ("R%d:"):format(p.seen[v])
  elseif tensor.is_tensor(v) then
    write_tensor(p, v)
  else
    p.names = p.names or known()
    if p.names[v] then
      p[#p + 1] = ("P%s:%s:"):format(unpack(p.names[v]))
      return
    end
    p.count = p.count + 1
    p.seen[v] = p.count
    if kind == "table" then write_table(p, v) else write_function(p, v) end
  end
end

local function aligned(n) return math.ceil(n / 64) * 64 end

--- Packs a value. Returns the number of bytes and a function that stores them at an address.
---@param value any
---@param who string  names the caller in errors
---@param what string  names the value in errors
---@return integer bytes
---@return fun(at: ffi.cdata*) store
function M.pack(value, who, what)
  local p = { who = who, path = { what }, tensors = {}, seen = {}, count = 0 }
  write(p, value)
  local heads, contents, at = {}, {}, 0
  for k, t in ipairs(p.tensors) do
    local there, data = raw.contiguous(t)
    local info = tensor.info_of(there)
    local bytes = tonumber(info.numel) * lib.ms_dtype_size(info.dtype)
    contents[k] = { tensor = there, data = data, bytes = bytes, at = at }
    heads[k] = ("%d,%d,%s;"):format(info.dtype, at, table.concat(there.shape, ","))
    at = at + aligned(bytes)
  end
  local body, head = table.concat(p), table.concat(heads)
  local text = ("%d:%d:%d:"):format(#head, #body, #p.tensors) .. head .. body
  local first = aligned(#text)
  return first + at, function(to)
    ffi.copy(to, text, #text)
    for _, c in ipairs(contents) do ffi.copy(to + first + c.at, c.data, c.bytes) end
  end
end

-- ---- unpacking -------------------------------------------------------------------------------------------

local function word(u)
  local finish = u.text:find(":", u.at, true)
  local text = u.text:sub(u.at, finish - 1)
  u.at = finish + 1
  return text
end

local function bytes(u)
  local n = tonumber(word(u))
  u.at = u.at + n
  return u.text:sub(u.at - n, u.at - 1)
end

local read

local function read_table(u)
  local t = {}
  u.objects[#u.objects + 1] = t
  local meta = read(u)
  while u.text:sub(u.at, u.at) ~= "e" do
    local key = read(u)
    rawset(t, key, read(u))
  end
  u.at = u.at + 1
  return setmetatable(t, meta)
end

local function read_function(u)
  local fn = assert(loadstring(bytes(u)))
  u.objects[#u.objects + 1] = fn
  for k = 1, tonumber(word(u)) do debug.setupvalue(fn, k, read(u)) end
  return fn
end

local readers = {
  n = function() return nil end,
  t = function() return true end,
  f = function() return false end,
  d = function(u)
    ffi.copy(double, u.text:sub(u.at, u.at + 7), 8)
    u.at = u.at + 8
    return double[0]
  end,
  s = bytes,
  P = function(u)
    local module = word(u)
    return named(module, word(u))
  end,
  X = function(u) return u.tensors[tonumber(word(u))] end,
  R = function(u) return u.objects[tonumber(word(u))] end,
  T = read_table,
  F = read_function,
}

function read(u)
  local tag = u.text:sub(u.at, u.at)
  u.at = u.at + 1
  return readers[tag](u)
end

--- The value that pack stored at an address. copy: tensors get memory of their own; otherwise they use the memory
--- at the address.
---@param from ffi.cdata*  const char *
---@param copy boolean
---@return any
function M.unpack(from, copy)
  local sizes = ffi.string(from, 64)
  local head, body, count, finish = sizes:match "^(%d+):(%d+):(%d+):()"
  head, body = tonumber(head), tonumber(body)
  local length = finish - 1 + head + body
  local text = ffi.string(from, length)
  local u = { text = text, at = finish + head, tensors = {}, objects = {} }
  local first, k = aligned(length), 0
  for dtype, at, shape in text:sub(finish, finish + head - 1):gmatch "(%d+),(%d+),([^;]*);" do
    local sizes_of = {}
    for size in shape:gmatch "%d+" do sizes_of[#sizes_of + 1] = tonumber(size) end
    local name, where = dtypes.name(tonumber(dtype)), from + first + tonumber(at)
    k = k + 1
    u.tensors[k] = copy and raw.tensor(name, sizes_of, where) or create.from_pointer(where, sizes_of, { dtype = name })
  end
  assert(k == tonumber(count), "packing: the list of tensors is incomplete")
  return read(u)
end

return M
