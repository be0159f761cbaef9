-- SPDX-License-Identifier: MIT
--- Checks of arguments and options. A kind describes the accepted values. Options are one table with string keys.
---   opts.expect(fn, opts.fn, "%s: argument %d", who, k)      -- who: argument 2 is a number (3), expected a function
---   local o = opts("adamw", given, { params = opts.required, lr = 1e-3, weight_decay = opts.number })
--- In the table that describes options, a default also determines the type; a kind declares an option without default,
--- unless opts.option or opts.one_of made the kind with a default.
local errors = require "moonshard.core.errors"
local hints = require "moonshard.core.hints"

local M = {}

--- Maps a wrapper to the wrapped function, which has the annotations.
M.original = setmetatable({}, { __mode = "k" })

-- ---- kinds --------------------------------------------------------------------------------------

local Kind = { __name = "kind" }

--- Makes a kind of value.
---@param text string  what messages say after "expected", such as "a tensor"
---@param test fun(value): boolean  whether a value is of this kind
function M.kind(text, test) return setmetatable({ text = text, test = test }, Kind) end

local kind = M.kind
local function anything() return true end
local function is_number(v) return type(v) == "number" and v == v end
local function is_whole(v) return type(v) == "number" and v % 1 == 0 end

M.required = kind("a value", anything)      -- the option must be given
M.any = kind("a value", anything)           -- accepts any value; may be absent
local of_type = {}
for name, text in pairs { number = "a number", string = "a string", boolean = "a boolean", table = "a table" } do
  of_type[name] = kind(text, function(v) return type(v) == name end)
end
M.number, M.string, M.boolean, M.table = of_type.number, of_type.string, of_type.boolean, of_type.table
M.positive = kind("a number > 0", function(v) return is_number(v) and v > 0 end)
M.whole = kind("a whole number", is_whole)

local numbers_from = {}
--- The kind of numbers that are not less than low.
function M.number_from(low)
  numbers_from[low] = numbers_from[low]
    or kind(("a number from %g"):format(low), function(v) return is_number(v) and v >= low end)
  return numbers_from[low]
end

local wholes_from = {}
--- The kind of whole numbers that are not less than low.
function M.whole_from(low)
  wholes_from[low] = wholes_from[low]
    or kind(("a whole number from %d"):format(low), function(v) return is_whole(v) and v >= low end)
  return wholes_from[low]
end

--- The kind of functions and of objects that can be called, such as modules. `__no_function`: a `__call` that does not
--- count, because it only raises an error or is the iterator of `for` loops.
M.fn = kind("a function", function(v)
  local mt = type(v) == "table" and getmetatable(v)
  return type(v) == "function" or mt and rawget(mt, "__call") ~= rawget(mt, "__no_function") or false
end)
of_type["function"] = M.fn

--- An option of a kind with a default; with M.required as default it must be given.
function M.option(of, default)
  local one = kind(of.text, of.test)
  one.names, one.default = of.names, default
  return one
end

--- An enumeration: opts.one_of({"sum", "mean"}, "mean"). Without a default the option may be absent.
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

--- Text for the end of a message about a value: if it is a table with the name of a positional argument as a key, that
--- this argument is given by position; "" for all other values.
---@param value any  what a script gave
---@return string
function M.by_position(value)
  local first
  for name in pairs(M.is(value) and value or {}) do
    if hints.is_positional(name) and (not first or name < first) then first = name end
  end
  return first and ("; '%s' is given by position, not by name"):format(first) or ""
end

-- The number of elements of a list of tensors, such as the result of meshgrid or chunk; nil for all other values.
local function tensors_in(value)
  if type(value) ~= "table" or getmetatable(value) ~= nil or #value == 0 then return nil end
  for k = 1, #value do
    if errors.show(value[k]) ~= "Tensor" then return nil end
  end
  return #value
end

--- Raises "LABEL is VALUE, expected TEXT". label: a format, followed by its values.
function M.wrong(value, text, label, ...)
  if select("#", ...) > 0 then label = label:format(...) end
  local n = text:find "^a tensor" and tensors_in(value)
  if n then
    errors.raise("%s is a list of %d tensor%s, expected %s; %s", label, n, n == 1 and "" or "s", text,
      n == 1 and "its tensor is list[1]" or "unpack it: local a, b = unpack(list)")
  end
  local mt = type(value) == "table" and getmetatable(value)
  local instead = mt and text:find "^a tensor" and rawget(mt, "__for_a_tensor")
  local is_empty = type(value) == "table" and not mt and next(value) == nil and text:find "list"
  if errors.is_int64(value) and text:find "number" then
    instead = text:find "^a tensor" and "ms.tensor(x) makes an int64 tensor of it, exactly"
      or math.abs(tonumber(value)) < 2 ^ 53 and "tonumber(x) makes a number of it" or "tonumber(x) rounds it"
  end
  errors.raise("%s is %s, expected %s%s", label, is_empty and "an empty list" or errors.kind(value), text,
    instead and "; " .. instead or (label:find "option" or text == "a tensor") and "" or M.by_position(value))
end

--- Raises as M.wrong does unless ok is true; for conditions that no kind describes.
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

--- Returns value if it is of the kind; otherwise raises as M.wrong does.
---@generic T
---@param value T  the value to check
---@param expected table  a kind, made by opts.kind
---@param label string  for string.format, with the arguments that follow
---@return T value
function M.expect(value, expected, label, ...)
  if expected.test(value) then return value end
  refuse(value, expected, select("#", ...) > 0 and label:format(...) or label)
end

-- ---- functions without options --------------------------------------------------------------------

-- Maps n to the bytecode of a wrapper with n arguments. Each wrapper is loaded separately, because closures of one
-- prototype share their traces, which are compiled for the function that is called first.
local calls = setmetatable({}, { __index = function(t, n)
  local names = {}
  for k = 1, n do names[k] = "a" .. k end
  local list = table.concat(names, ", ")
  local code = ("local f, none, who = ... return function(%s) if more ~= nil then none(who, more, last) end return f(%s) end")
    :format(n > 0 and list .. ", more, last" or "more, last", list)
  t[n] = string.dump(loadstring(code), true)
  return t[n]
end })

local here = debug.getinfo(1, "S").source

-- The wrappers that check the arguments after the last one.
local checked = setmetatable({}, { __mode = "k" })

-- Returns `fn` with n arguments, wrapped so that up to two arguments after them are passed to none(who, more, last).
-- original: the function that has the annotations.
local function followed_by(none, who, fn, n, original)
  local wrapper = loadstring(calls[n], here)(fn, none, who)
  M.original[wrapper], checked[wrapper] = original, true
  return wrapper
end

--- Wraps fn so that options after its last argument are an error.
---@param who string  the function's name in messages
---@param fn function  with a fixed number of arguments
---@return function
function M.fixed(who, fn)
  local info = debug.getinfo(fn, "u")
  assert(not info.isvararg, who)
  return followed_by(M.none, who, fn, info.nparams, fn)
end

--- Replaces functions of a table by wrappers made by M.fixed. prefix: put before the name in messages.
---@param functions table  contains the functions, by name
---@param names string[]  keys of the functions to replace
---@param prefix? string  such as "cuda."
function M.fix(functions, names, prefix)
  for _, name in ipairs(names) do functions[name] = M.fixed((prefix or "") .. name, functions[name]) end
end

-- Raises if one of the arguments after the last one is a table of options that is not empty.
local function nothing_after_options(who, more, last)
  if M.is(more) and next(more) ~= nil or M.is(last) and next(last) ~= nil then
    errors.raise("%s: a table of options follows the last argument, expected one table of options at most", who)
  end
end

--- Makes options after the last argument an error for all functions of a table with a fixed number of arguments, and
--- for such constructors of its classes. Names that begin with "_" are left out.
---@param functions table  functions and classes, by name
function M.seal(functions)
  for name, value in pairs(functions) do
    local holder, key = functions, name
    if type(value) == "table" and rawget(value, "__isa") and rawget(value, "__name") then
      holder, key, value = value, "init", rawget(value, "init")
    end
    if type(name) == "string" and name:sub(1, 1) ~= "_" and type(value) == "function" then
      local original, is_checked = value, checked[value]
      while M.original[original] do
        original = M.original[original]
        is_checked = is_checked or checked[original]
      end
      local info = debug.getinfo(original, "u")
      if not is_checked and not info.isvararg then
        local has_options = info.nparams > 0 and debug.getlocal(original, info.nparams) == "given"
        local check = has_options and nothing_after_options or M.none
        rawset(holder, key, followed_by(check, name, value, info.nparams, original))
      end
    end
  end
end

-- ---- options --------------------------------------------------------------------------------------

local printing = {}
--- Declares that a metatable only adds printing and the like to a table of data: M.is_plain treats such tables as
--- plain, and a scope keeps the tensors in such a table if it returns the table.
---@param mt table
---@return table mt
function M.printing(mt)
  printing[mt], mt.__tensors = true, true
  return mt
end

--- Whether x is a table of data, without a metatable or with one of M.printing: not a tensor, module or group.
function M.is_plain(x)
  if type(x) ~= "table" then return false end
  local mt = getmetatable(x)
  return mt == nil or printing[mt] == true
end

--- Whether x is a table in which the library looks for tensors: plain, or with a metatable that has __tensors = true,
--- as those of distributions.
function M.may_hold_tensors(x)
  if type(x) ~= "table" then return false end
  local mt = getmetatable(x)
  return mt == nil or type(mt) == "table" and rawget(mt, "__tensors") == true
end

--- Whether x can be a table of options. Tensors, modules, classes, groups and lists are never options.
function M.is(x) return type(x) == "table" and getmetatable(x) == nil and x[1] == nil end

--- For an argument that may be left out before the options: if it is a table of options, it is the options. Errors: the
--- options are given, too.
---@param who string  the function's name in messages
---@param value any  the argument
---@param given table?  the options
---@return any value  nil if the argument was left out
---@return table? given
function M.shift(who, value, given)
  if not M.is(value) then return value, given end
  if given ~= nil then errors.raise("%s: two tables of options, expected one", who) end
  return nil, value
end

local results = setmetatable({}, { __mode = "k" })
--- Declares that a table is the second result of a function, not options: where it stands in place of options, as in
--- model:load_state_dict(ms.load(path)), it counts as nil.
---@param x table
function M.result(x) results[x] = true end

local function check_value(who, name, value, expected)
  if getmetatable(expected) ~= Kind then expected = of_type[type(expected)] end
  if not expected.test(value) then refuse(value, expected, ("%s: option '%s'"):format(who, name)) end
end

-- The options that a number given in place of the table of options most likely means: PyTorch takes them by position.
local FIRST = { "stride", "batch_size" }

-- The end of a message about a value given in place of the table of options: how to give it by name. A boolean is most
-- likely the value of the one option that accepts booleans, a string that of the option that accepts it.
local function by_name(value, spec)
  local found
  for _, name in ipairs(type(value) == "boolean" and errors.names(spec) or {}) do
    local expected = spec[name]
    if expected == M.boolean or type(expected) == "boolean" then
      if found then return "" end
      found = name
    end
  end
  if found then return ("; write { %s = %s }"):format(found, tostring(value)) end
  if type(value) == "string" then
    for _, name in ipairs(errors.names(spec)) do
      local names = getmetatable(spec[name]) == Kind and spec[name].names
      for _, known in ipairs(names or {}) do
        if known == value then return ("; write { %s = '%s' }"):format(name, value) end
      end
    end
  end
  if type(value) ~= "number" then return "" end
  for _, name in ipairs(FIRST) do
    if spec[name] ~= nil then return ("; options are given by name: write { %s = %g }"):format(name, value) end
  end
  local names = {}
  for _, name in ipairs(errors.names(spec)) do
    local expected = spec[name]
    if expected ~= M.any and expected ~= M.required and (type(expected) == "number"
      or getmetatable(expected) == Kind and expected.test(value)) then
      names[#names + 1] = name
    end
  end
  if #names == 1 then return ("; options are given by name: write { %s = %g }"):format(names[1], value) end
  return "; options are given by name" .. (#names > 0 and ": " .. table.concat(names, ", ") or "")
end

-- The part of a message about an unknown option that says what to write instead.
local function instead_of(name, names)
  local hint = type(name) == "string" and not hints.synonym(name, names) and hints.option(name)
  if hint then return "; " .. hint end
  local near = type(name) == "string" and errors.nearest(name, names)
  return near and ("; did you mean '%s'?"):format(near) or ""
end

--- Checks the options given to `who`, for functions that read them from `given` themselves. Makes no table.
---@param who string  the function's name in messages
---@param given table  the options
---@param spec table<string, any>  kinds or defaults of the options, by name
function M.verify(who, given, spec)
  if not M.is_plain(given) then
    errors.raise("%s: options are %s, expected a table%s", who, errors.kind(given), by_name(given, spec))
  end
  for name, value in pairs(given) do
    local expected = spec[name]
    if expected == nil then
      local names = errors.names(spec)
      errors.raise("%s: unknown option %s%s (accepted: %s)", who, errors.show(name), instead_of(name, names),
        #names > 0 and table.concat(names, ", ") or "none")
    end
    check_value(who, name, value, expected)
  end
end

--- Checks the options given to `who`; missing options get their defaults.
---@param who string  the function's name in messages
---@param given table?  the options; nil: none
---@param spec table<string, any>  kinds or defaults of the options, by name
---@return table
function M.check(who, given, spec)
  local out = {}
  if given ~= nil and not results[given] then
    M.verify(who, given, spec)
    for name, value in pairs(given) do out[name] = value end
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

-- Not compiled: code that LuaJIT 2.1.0-beta3 had compiled from this check returned defaults instead of given options,
-- in up to seven of a million calls.
jit.off(M.verify)
jit.off(M.check)

--- Raises if one of `more` and `last`, the arguments after the last one, is a table of options that is not empty.
function M.none(who, more, last)
  if M.is(more) and next(more) ~= nil then M.check(who, more, {}) end
  if M.is(last) and next(last) ~= nil then M.check(who, last, {}) end
end

--- Returns the number of positional arguments, and the table of options after them, if there is one.
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
