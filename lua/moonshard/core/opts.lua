-- SPDX-License-Identifier: MIT
--- Options: one table of string keys, checked in one place.
---   local o = opts("adamw", given, { params = opts.required, lr = 1e-3, weight_decay = 0.01, amsgrad = opts.boolean })
--- A default's type is the type expected; the markers stand for options without a default.
local errors = require "moonshard.core.errors"

local M = {}

local function marker(kind) return setmetatable({ kind = kind }, { __name = "option" }) end

M.required = marker "required"      -- any value, but one must be there
M.any = marker "any"                -- nil unless given
M.number, M.string, M.boolean, M.table, M.fn = marker "number", marker "string", marker "boolean", marker "table",
  marker "function"

local markers = {}
for _, m in ipairs { M.required, M.any, M.number, M.string, M.boolean, M.table, M.fn } do markers[m] = true end
local choices = setmetatable({}, { __mode = "k" })

--- An enumeration: opts.one_of({"sum", "mean"}, "mean"); without a default the option may be absent.
function M.one_of(names, default)
  local m = marker "one_of"
  m.names, m.default = names, default
  choices[m] = true
  return m
end

local function sorted_names(spec)
  local names = {}
  for name in pairs(spec) do names[#names + 1] = name end
  table.sort(names)
  return names
end

--- May x stand in the options' place? Tensors, modules, classes, groups and lists are never options.
function M.is(x)
  return type(x) == "table" and getmetatable(x) == nil and x[1] == nil
end

local function check_value(who, name, value, expected)
  local kind = type(value)
  if markers[expected] then
    if expected == M.required or expected == M.any then return end
    if kind ~= expected.kind then
      errors.raise("%s: option '%s' is %s, expected a %s", who, name, errors.kind(value), expected.kind)
    end
  elseif choices[expected] then
    for _, choice in ipairs(expected.names) do
      if value == choice then return end
    end
    local near = kind == "string" and errors.nearest(value, expected.names)
    errors.raise("%s: option '%s' is %s, expected one of '%s'%s", who, name, errors.show(value),
      table.concat(expected.names, "', '"),
      near and ("; did you mean '%s'?"):format(near) or "")
  elseif kind ~= type(expected) then
    errors.raise("%s: option '%s' is %s, expected a %s", who, name, errors.kind(value), type(expected))
  end
end

--- The options of who: given ones checked, absent ones by their defaults.
---@param who string
---@param given table?
---@param spec table<string, any>
---@return table
function M.check(who, given, spec)
  local out = {}
  if given ~= nil then
    if type(given) ~= "table" or getmetatable(given) ~= nil then
      errors.raise("%s: options are %s, expected a table", who, errors.kind(given))
    end
    for name, value in pairs(given) do
      local expected = spec[name]
      if expected == nil then
        local names = sorted_names(spec)
        local near = type(name) == "string" and errors.nearest(name, names)
        errors.raise("%s: unknown option %s%s (accepted: %s)", who, errors.show(name), near
          and ("; did you mean '%s'?"):format(near) or "",
          #names > 0 and table.concat(names, ", ") or "none")
      end
      check_value(who, name, value, expected)
      out[name] = value
    end
  end
  for name, default in pairs(spec) do
    if out[name] == nil then
      if default == M.required then errors.raise("%s: option '%s' is missing", who, name) end
      if choices[default] then
        out[name] = default.default
      elseif not markers[default] then
        out[name] = default
      end
    end
  end
  return out
end

--- Behind the last argument of a function without options: options there are an error.
function M.none(who, more)
  if M.is(more) and next(more) ~= nil then M.check(who, more, {}) end
end

--- Splits the arguments of a function whose last one may be options: n positional ones, then the options.
---@return integer n
---@return table? given
function M.split(...)
  local n = select("#", ...)
  while n > 0 and select(n, ...) == nil do n = n - 1 end
  if n > 0 then
    local last = select(n, ...)
    if M.is(last) then return n - 1, last end
  end
  return n, nil
end

return setmetatable(M, { __call = function(_, who, given, spec) return M.check(who, given, spec) end })
