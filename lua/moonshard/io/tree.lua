-- SPDX-License-Identifier: MIT
--- Tables of tensors, numbers, strings, booleans and tables of these in a safetensors file, as for checkpoints
--- { model = model:state_dict(), epoch = 3 }. A tensor's name in the file is its path, such as "model.1.weight"; one
--- string of metadata, JSON, has the rest: a table is { k: keys, v: values }, a tensor { t: its name }, a number
--- { n: 17 digits }, and a string with other bytes than printable ASCII { x: its bytes in
--- hexadecimal }.
local cjson = require "cjson"
local read_json = require("moonshard.core.json").decode
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"

local is_tensor, sorted_pairs = tensor.is_tensor, util.sorted_pairs
local M = {}

--- The key of the metadata under which a file has the structure of the table.
M.KEY = "moonshard.tree"

--- Whether a table has nothing but tensors by name, which need no tree.
---@param tensors table
---@return boolean
function M.is_flat(tensors)
  for name, t in pairs(tensors) do
    if type(name) ~= "string" or not is_tensor(t) then return false end
  end
  return true
end

local put

local function put_table(value, path, into)
  if into.open[value] then errors.raise("save: '%s' is a table that contains itself", path) end
  into.open[value] = true
  local keys, values = {}, {}
  local named, listed = {}, {}
  for key, v in pairs(value) do
    if type(key) == "string" then named[key] = v elseif type(key) == "number" then listed[#listed + 1] = key
    else errors.raise("save: %s has a key that is %s, expected a string or a number", path == "" and "the table"
      or "'" .. path .. "'", errors.kind(key)) end
  end
  table.sort(listed)
  local function add(key, v)
    local name = type(key) == "number" and ("%.17g"):format(key) or key
    keys[#keys + 1] = put(key, name, into)
    values[#values + 1] = put(v, path == "" and name or path .. "." .. name, into)
  end
  for _, key in ipairs(listed) do add(key, value[key]) end
  for key, v in sorted_pairs(named) do add(key, v) end
  into.open[value] = nil
  return { k = keys, v = values }
end

function put(value, path, into)
  local kind = type(value)
  if kind == "boolean" then return value end
  if kind == "number" then return { n = value ~= value and "nan" or ("%.17g"):format(value) } end
  if kind == "string" then
    if not value:find "[^\32-\126]" then return value end
    return { x = (value:gsub(".", function(c) return ("%02x"):format(c:byte()) end)) }
  end
  if is_tensor(value) then
    local name = into.names[value]
    if not name then
      name = path
      while into.tensors[name] do name = name .. "_" end
      into.tensors[name], into.names[value] = value, name
    end
    return { t = name }
  end
  if opts.is_plain(value) then return put_table(value, path, into) end
  return opts.wrong(value, "a tensor, a number, a string, a boolean or a table of these"
    .. (kind == "table" and value.state_dict and "; write its state_dict()" or ""), "save: '%s'", path)
end

-- A node as JSON. cjson would write k and v in an order that differs between processes.
local function text_of(node)
  if type(node) ~= "table" or not node.k then return cjson.encode(node) end
  local lists = {}
  for i, list in ipairs { node.k, node.v } do
    local parts = {}
    for j, part in ipairs(list) do parts[j] = text_of(part) end
    lists[i] = table.concat(parts, ",")
  end
  return ('{"k":[%s],"v":[%s]}'):format(unpack(lists))
end

--- The tensors of a table, by their names in the file, and JSON text with everything else in the table, which is equal
--- for equal tables.
---@param value table
---@return table<string, Tensor> tensors
---@return string text
function M.flatten(value)
  local into = { tensors = {}, names = {}, open = {} }
  local node = put(value, "", into)
  return into.tensors, text_of(node)
end

local get

local function get_table(node, tensors)
  local out = {}
  assert(type(node.k) == "table" and type(node.v) == "table" and #node.k == #node.v)
  for i, key in ipairs(node.k) do out[get(key)] = get(node.v[i], tensors) end
  return out
end

function get(node, tensors)
  if type(node) ~= "table" then
    assert(type(node) == "string" or type(node) == "boolean")
    return node
  end
  if node.n then return assert(tonumber(node.n)) end
  if node.x then return (node.x:gsub("%x%x", function(two) return string.char(tonumber(two, 16)) end)) end
  if node.t then return assert(tensors[node.t]) end
  return get_table(node, tensors)
end

--- The table that flatten took apart.
---@param tensors table<string, Tensor>  all tensors of the file
---@param text string  the text that flatten made
---@param path string  the file, for errors
---@return table
function M.unflatten(tensors, text, path)
  local ok, value = pcall(function() return get(read_json(text), tensors) end)
  if not ok or not opts.is_plain(value) then
    errors.raise("load: '%s': the metadata '%s' is damaged, or does not fit the tensors of the file", path, M.KEY)
  end
  return value
end

return M
