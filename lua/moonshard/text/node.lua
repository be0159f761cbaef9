-- SPDX-License-Identifier: MIT
--- Values of a JSON file that others wrote: what is read is checked, and errors name the file and the key.
local errors = require "moonshard.core.errors"
local json = require "moonshard.core.json"
local opts = require "moonshard.core.opts"
local cjson = require "cjson"

local Node = {}
Node.__index = Node

local M = {}

--- The kind of ids.
M.ID = opts.kind("a whole number from 0 to 2^24 - 1", function(v)
  return type(v) == "number" and v % 1 == 0 and v >= 0 and v < 2 ^ 24
end)

--- The root of a JSON text.
---@param text string
---@param path string  of the file, for errors
---@param who string  the function that errors name
function M.new(text, path, who)
  local ok, value = pcall(json.decode, text)
  if not ok then errors.raise("%s: '%s' is no JSON: %s", who, path, value) end
  if type(value) ~= "table" then errors.raise("%s: '%s' is %s, expected an object", who, path, json.show(value, errors.kind)) end
  return setmetatable({ value = value, file = path, who = who, path = "" }, Node)
end

local BRANCH = opts.kind("an object or a list", opts.table.test)

local function path_of(self, key)
  if type(key) == "number" then return ("%s[%d]"):format(self.path, key) end
  return self.path == "" and key or self.path .. "." .. key
end

--- Raises that a key's value is not what was expected.
---@param key string|integer|nil  nil: the node itself
---@param text string  such as "is 3, expected a string"
function Node:fail(key, text)
  errors.raise("%s: '%s': %s %s", self.who, self.file, key and path_of(self, key) or self.path, text)
end

--- The value of a key, which is of a kind; nil for null and for a missing key that is not required.
---@param key string|integer
---@param kind table  of opts
---@param required? boolean
function Node:get(key, kind, required)
  local value = rawget(self.value, key)
  if value == cjson.null then value = nil end
  if value == nil and not required then return nil end
  if value == nil then self:fail(key, "is missing") end
  if not kind.test(value) then self:fail(key, ("is %s, expected %s"):format(json.show(value, errors.kind), kind.text)) end
  return value
end

--- The node of a key that is an object or a list; nil as for get.
function Node:child(key, required)
  local value = self:get(key, BRANCH, required)
  return value and setmetatable({ value = value, file = self.file, who = self.who, path = path_of(self, key) }, Node)
end

--- The nodes of a list, all of which are objects or lists; none for a missing list that is not required.
---@return table[]
function Node:list(key, required)
  local of, list = self:child(key, required), {}
  for k = 1, of and #of.value or 0 do list[k] = of:child(k, true) end
  return list
end

--- The value of a key that must be one of the names.
function Node:one_of(key, names, required) return self:get(key, opts.one_of(names), required) end

--- The text or the regular expression of { String = text } or { Regex = pattern }; or of a text.
---@return string text
---@return boolean is_regex
function Node:pattern(key)
  local value = rawget(self.value, key)
  if type(value) == "string" then return value, false end
  local at = self:child(key, true)
  local regex = at:get("Regex", opts.string)
  return regex or at:get("String", opts.string, true), regex ~= nil
end

--- Raises unless a key is absent, or has one of the given values; for what Moonshard does not have.
function Node:only(key, ...)
  local value = rawget(self.value, key)
  if value == nil or value == cjson.null then return end
  for k = 1, select("#", ...) do
    if value == select(k, ...) then return end
  end
  self:fail(key, ("is %s, which Moonshard does not have"):format(json.show(value, errors.kind)))
end

return M
