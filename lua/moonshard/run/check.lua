-- SPDX-License-Identifier: MIT
--- Checks of what a script gives to a run: names, and options to record. Every rank makes these checks before anything
--- is written, so that an error leaves no incomplete folder behind.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local utf8 = require "moonshard.run.text".utf8

local M = {}

--- Whether a text can be a name in files and on a terminal: UTF-8 without control characters, and not empty.
---@param text any
---@return boolean
function M.is_name(text) return type(text) == "string" and text ~= "" and not text:find "[%c\127]" and utf8(text) == text end

local EXPECTED = "a number, a string, a boolean, a list or a table with names"

local function wrong(who, at, value) errors.raise("%s: %s is %s, expected %s", who, at, errors.kind(value), EXPECTED) end

-- Raises unless value can be written as JSON. A list has the keys 1 to n, any other table has names as keys; both may
-- contain lists and tables, but not themselves. at: where value is, for messages; above: the tables that contain it, as
-- keys.
local function check(who, at, value, above)
  local kind = type(value)
  if kind == "number" or kind == "string" or kind == "boolean" then return end
  if not opts.is_plain(value) then wrong(who, at, value) end
  if above[value] then errors.raise("%s: %s contains itself", who, at) end
  above[value] = true
  local length = #value
  for key, part in pairs(value) do                      -- in any order: the first error found is raised
    local in_list = length > 0 and type(key) == "number" and key % 1 == 0 and key >= 1 and key <= length
    if not in_list and (length > 0 or type(key) ~= "string") then
      errors.raise("%s: %s has the key %s, expected only names, or only the positions 1, 2 ... of a list",
        who, at, errors.show(key))
    end
    check(who, in_list and ("%s[%d]"):format(at, key) or ("%s.%s"):format(at, key), part, above)
  end
  above[value] = nil
end

--- Raises if a table of options contains what cannot be written as JSON; the error says where it is.
---@param who string  the function's name in messages
---@param config? table  options by name
function M.config(who, config)
  if not config then return end
  local at = "option 'config'"
  if getmetatable(config) or #config > 0 then errors.raise("%s: %s is %s, expected a table of options by name", who, at,
    #config > 0 and "a list" or errors.kind(config)) end
  check(who, at, config, {})
end

return M
