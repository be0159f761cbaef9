-- SPDX-License-Identifier: MIT
--- The index of a model in several safetensors files, `model.safetensors.index.json`: its weight_map names the file of
--- each tensor.
local errors = require "moonshard.core.errors"
local json = require "moonshard.core.json"
local formats = require "moonshard.io.formats"
local lfs = require "lfs"
local opts = require "moonshard.core.opts"
local regular = require "moonshard.io.regular"
local sorted_pairs = require("moonshard.tensor.util").sorted_pairs

local M = {}

local MOST = 2 ^ 26                                       -- bytes of an index

--- Whether a path is that of an index.
---@param path string
---@return boolean
function M.is_index(path) return path:find "%.json$" ~= nil end

--- The files of an index, with the tensors that each has, both in byte order. Errors: an index that is damaged, or that
--- names files outside of its folder; the message names the file and the key.
---@param path string
---@return { name: string, path: string, names: string[] }[]
function M.read(path)
  local file, why = regular.open(path, "rb")
  if not file then errors.raise("load: cannot open '%s': %s", path, (tostring(why):gsub("^.-: ", ""))) end
  local text = file:read(MOST + 1) or ""
  file:close()
  if #text > MOST then errors.raise("load: '%s' has more than %d bytes", path, MOST) end
  local ok, index = pcall(json.decode, text)
  if not ok then errors.raise("load: '%s' is not valid JSON: %s", path, tostring(index)) end
  local map = opts.is_plain(index) and index.weight_map
  if not opts.is_plain(map) or next(map) == nil then
    errors.raise("load: '%s': key 'weight_map' is %s, expected an object with a file for each tensor", path,
      map and json.show(map) or "missing")
  end
  local folder, parts, by_name = path:match "^(.*/)[^/]*$" or "", {}, {}
  for name, at in sorted_pairs(map) do
    if type(name) ~= "string" or type(at) ~= "string" or not at:find "^[%w_][%w_.-]*$" then
      errors.raise("load: '%s': key 'weight_map.%s' is %s, expected the name of a file in this folder", path,
        tostring(name), json.show(at))
    end
    if not at:find "%.safetensors$" then
      errors.raise("load: '%s' %s", path, formats.advice(path) or "does not name files of safetensors")
    end
    if not by_name[at] then
      by_name[at] = { name = at, path = folder .. at, names = {} }
      parts[#parts + 1] = by_name[at]
    end
    table.insert(by_name[at].names, name)
  end
  table.sort(parts, function(a, b) return a.name < b.name end)
  for _, part in ipairs(parts) do
    if not lfs.attributes(part.path, "mode") then
      errors.raise("load: '%s': key 'weight_map' names '%s', which is not in its folder", path, part.name)
    end
  end
  return parts
end

--- Raises unless a file has the tensors that the index says it has.
---@param path string  the index
---@param part { name: string, names: string[] }
---@param has fun(name: string): boolean
function M.check(path, part, has)
  for _, name in ipairs(part.names) do
    if not has(name) then
      errors.raise("load: '%s': key 'weight_map.%s' names '%s', which lacks this tensor", path, name, part.name)
    end
  end
end

return M
