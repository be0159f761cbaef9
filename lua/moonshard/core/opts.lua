-- SPDX-License-Identifier: MIT
--- Checks of arguments and options. A kind describes the values that are accepted; options are one table of string
--- keys.
---   opts.expect(fn, opts.fn, "%s: argument %d", who, k)      -- who: argument 2 is a number (3), expected a function
---   local o = opts("adamw", given, { params = opts.required, lr = 1e-3, weight_decay = opts.number })
--- In a table of options a default also gives the type; a kind declares an option without a default.
local errors = require "moonshard.core.errors"

local M = {}

--- Wrapper -> the function inside, whose annotations apply.
M.original = setmetatable({}, { __mode = "k" })

-- ---- kinds --------------------------------------------------------------------------------------

local Kind = { __name = "kind" }

--- A kind of value. text: the words of messages after "expected", such as "a tensor".
---@param text string
---@param test fun(value): boolean
function M.kind(text, test) return setmetatable({ text = text, test = test }, Kind) end

local kind = M.kind
local function anything() return true end
local function is_number(v) return type(v) == "number" and v == v end
local function is_whole(v) return type(v) == "number" and v % 1 == 0 end

M.required = kind("a value", anything)      -- must be given
M.any = kind("a value", anything)           -- any value, or none
local of_type = {}
for name, text in pairs { number = "a number", string = "a string", boolean = "a boolean", table = "a table",
  ["function"] = "a function" } do
  of_type[name] = kind(text, function(v) return type(v) == name end)
end
M.number, M.string, M.boolean, M.table, M.fn = of_type.number, of_type.string, of_type.boolean, of_type.table,
  of_type["function"]
M.positive = kind("a number > 0", function(v) return is_number(v) and v > 0 end)
M.whole = kind("a whole number", is_whole)

local numbers_from = {}
--- A number that is not below low.
function M.number_from(low)
  numbers_from[low] = numbers_from[low]
    or kind(("a number from %g"):format(low), function(v) return is_number(v) and v >= low end)
  return numbers_from[low]
end

local wholes_from = {}
--- A whole number that is not below low.
function M.whole_from(low)
  wholes_from[low] = wholes_from[low]
    or kind(("a whole number from %d"):format(low), function(v) return is_whole(v) and v >= low end)
  return wholes_from[low]
end

--- A function, or an instance of a class that can be called.
M.callable = kind("a function", function(v)
  local mt = type(v) == "table" and getmetatable(v)
  return type(v) == "function" or mt and rawget(mt, "__call") ~= nil or false
end)

--- An option of a kind with its default; M.required as the default: it must be given.
function M.option(of, default)
  local one = kind(of.text, of.test)
  one.names, one.default = of.names, default
  return one
end

--- An enumeration: opts.one_of({"sum", "mean"}, "mean"); without a default the option may be absent.
function M.one_of(names, default)
  local one = kind(("one of '%s'"):format(table.concat(names, "', '")), function(v)
    for _, name in ipairs(names) do
      if v == name then return true end
    end
    return false
  end)
  one.names, one.default = names, default
  return one
end

--- Raises "LABEL is VALUE, expected TEXT". label: a format, followed by its values.
function M.wrong(value, text, label, ...)
  errors.raise("%s is %s, expected %s", select("#", ...) > 0 and label:format(...) or label, errors.kind(value), text)
end

--- Raises as wrong does unless ok; for conditions that have no kind.
function M.need(ok, value, text, label, ...)
  if not ok then M.wrong(value, text, label, ...) end
end

local function refuse(value, expected, label)
  local names = expected.names
  if not names then M.wrong(value, expected.text, "%s", label) end
  local near = type(value) == "string" and errors.nearest(value, names)
  errors.raise("%s is %s, expected %s%s", label, errors.show(value), expected.text,
    near and ("; did you mean '%s'?"):format(near) or "")
end

--- Returns value if it is of the kind; raises as wrong does if not.
---@generic T
---@param value T
---@param expected table
---@param label string
---@return T value
function M.expect(value, expected, label, ...)
  if expected.test(value) then return value end
  refuse(value, expected, select("#", ...) > 0 and label:format(...) or label)
end

-- ---- functions without options --------------------------------------------------------------------

-- n -> bytecode of a wrapper with n arguments. Each function gets a prototype of its own, because closures of one
-- prototype share its traces, which are compiled for the function that was called first.
local calls = setmetatable({}, { __index = function(t, n)
  local names = {}
  for k = 1, n do names[k] = "a" .. k end
  local list = table.concat(names, ", ")
  local code = ("local f, none, who = ... return function(%s) if more ~= nil then none(who, more) end return f(%s) end")
    :format(n > 0 and list .. ", more" or "more", list)
  t[n] = string.dump(loadstring(code), true)
  return t[n]
end })

local here = debug.getinfo(1, "S").source

--- Wraps fn so that options after its last argument are an error.
---@param who string
---@param fn function
---@return function
function M.fixed(who, fn)
  local info = debug.getinfo(fn, "u")
  assert(not info.isvararg, who)
  local wrapper = loadstring(calls[info.nparams], here)(fn, M.none, who)
  M.original[wrapper] = fn
  return wrapper
end

--- Replaces functions of a table by their wrappers. prefix: stands before the name in messages.
---@param functions table
---@param names string[]
---@param prefix? string
function M.fix(functions, names, prefix)
  for _, name in ipairs(names) do functions[name] = M.fixed((prefix or "") .. name, functions[name]) end
end

-- ---- options --------------------------------------------------------------------------------------

local function sorted_names(spec)
  local names = {}
  for name in pairs(spec) do names[#names + 1] = name end
  table.sort(names)
  return names
end

--- Is x a table without a metatable, so no tensor, module or group?
function M.is_plain(x) return type(x) == "table" and getmetatable(x) == nil end

--- Can x be a table of options? Tensors, modules, classes, groups and lists are never options.
function M.is(x) return type(x) == "table" and getmetatable(x) == nil and x[1] == nil end

local function check_value(who, name, value, expected)
  if getmetatable(expected) ~= Kind then expected = of_type[type(expected)] end
  if not expected.test(value) then refuse(value, expected, ("%s: option '%s'"):format(who, name)) end
end

--- Checks the options given to `who`; absent ones get their defaults.
---@param who string
---@param given table?
---@param spec table<string, any>
---@return table
function M.check(who, given, spec)
  local out = {}
  if given ~= nil then
    if not M.is_plain(given) then errors.raise("%s: options are %s, expected a table", who, errors.kind(given)) end
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
      if getmetatable(default) == Kind and default ~= M.required then default = default.default end
      if default == M.required then errors.raise("%s: option '%s' is missing", who, name) end
      out[name] = default
    end
  end
  return out
end

--- Raises if the argument after the last one holds options.
function M.none(who, more)
  if M.is(more) and next(more) ~= nil then M.check(who, more, {}) end
end

--- The number of positional arguments, and the options after them, if any.
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
