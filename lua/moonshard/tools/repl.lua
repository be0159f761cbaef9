-- SPDX-License-Identifier: MIT
--- The prompt: `scripts/repl`, or `luajit -i -e 'require "moonshard"'`.
--- Prints the values of expressions. After an error the session and its tensors remain. Ctrl-C returns to the prompt.
--- Tab completes names, fields and file names if readline is installed. `? name` shows documentation.
local ffi = require "ffi"
local engine = require "moonshard.core.ffi"
local annotations = require "moonshard.tools.annotations"
local class = require "moonshard.core.class"
local errors = require "moonshard.core.errors"
local scope = require "moonshard.tensor.scope"
local autograd = require "moonshard.autograd"
local tensor = require "moonshard.tensor"

local lib, state = engine.lib, engine.state
-- Copies of globals that a session may overwrite.
local io, debug, jit, table, math, package, os = io, debug, jit, table, math, package, os
local tostring, type, pairs, ipairs, next, select, pcall, xpcall, error, tonumber = tostring, type, pairs, ipairs, next,
  select, pcall, xpcall, error, tonumber
local getmetatable, setmetatable, rawget, rawset, loadstring, require = getmetatable, setmetatable, rawget, rawset,
  loadstring, require
local M = {}

-- ---- printing values ----------------------------------------------------------------------------

local function show_key(k)
  if type(k) == "string" and k:match "^[%a_][%w_]*$" then return k end
  return "[" .. (type(k) == "string" and ("%q"):format(k) or tostring(k)) .. "]"
end

--- A value as the prompt prints it: plain tables are shown two levels deep, with up to 20 and 6 entries.
function M.show(v, depth)
  depth = depth or 0
  if type(v) == "string" then return depth == 0 and v or ("%q"):format(v) end
  local mt = type(v) == "table" and getmetatable(v)
  if type(v) ~= "table" or (mt and mt.__tostring) then
    local text = type(v) == "function" and depth > 0 and "function" or tostring(v)
    if depth > 0 and text:find "\n" then text = text:match "^[^\n]*" .. " …" end
    return text
  end
  if depth >= 2 then return "{…}" end
  local parts, count = {}, 0
  for k, w in require("moonshard.tensor.util").sorted_pairs(v) do
    count = count + 1
    if count > (depth == 0 and 20 or 6) then
      parts[#parts + 1] = "…"
      break
    end
    local text = M.show(w, depth + 1)
    parts[#parts + 1] = k == count and text or show_key(k) .. " = " .. text
  end
  local line = "{" .. (#parts > 0 and " " .. table.concat(parts, ", ") .. " " or "") .. "}"
  if #line <= 100 then return line end
  local inner = ("  "):rep(depth + 1)
  return "{\n" .. inner .. table.concat(parts, ",\n" .. inner) .. "\n" .. ("  "):rep(depth) .. "}"
end

-- ---- running lines --------------------------------------------------------------------------------

-- Whether Lua's message says that the input ended too early. If Lua expected '=', the input is an expression after a
-- statement.
local function incomplete(message)
  return message and message:find "near '?<eof>'?" ~= nil and not message:find "'=' expected"
end

-- The expression is passed as an argument, because a tail call would hide its line from messages. The newline ends a
-- comment.
local function compile_expression(before, text)
  return loadstring(before .. "return select(1, " .. text .. ")", "=prompt")
    or text:find("--", 1, true) and loadstring(before .. "return select(1, " .. text .. "\n)", "=prompt") or nil
end

--- Compiles a line, or several lines if the first one is incomplete: an expression, statements, or statements and an
--- expression.
---@return function? chunk
---@return string? message
---@return boolean? more
function M.compile(text)
  local expression = text:gsub("^%s*=", "")
  local chunk = compile_expression("", expression)
  if chunk then return chunk end
  -- A local variable would end with its line, so it becomes a global of the session.
  local body = text:gsub("^%s*local%s+function%s", "function "):gsub("^%s*local%s+([%a_][%w_%s,]*=[^=])", "%1")
  local message
  chunk, message = loadstring(body, "=prompt")
  if chunk then return chunk end
  local statements, last = body:match "^(.*;)(.-)$"
  chunk = statements and compile_expression(statements, last)
  if chunk then return chunk end
  local _, unfinished = loadstring("return " .. expression, "=prompt")
  return nil, message, incomplete(message) or incomplete(unfinished)
end

-- The text of any error value; its __tostring may fail or not return a string.
local function text_of(message)
  local ok, text = pcall(tostring, message)
  if ok and type(text) == "string" then return text end
  return ("an error that has no text (%s)"):format(type(message))
end

local function report(message)
  local trace = debug.traceback("", 2)
  local lines = {}
  for line in trace:gmatch "[^\n]+" do
    if line:find "^%s+prompt:" then break end
    if line:find ":%d+:" and not line:find("lua/moonshard/", 1, true) then
      lines[#lines + 1] = line:gsub("^%s+", "  in ")
    end
  end
  return { text = text_of(message), trace = lines }
end

-- After Ctrl-C the kernel discards pending output of the terminal, which may include a message or prompt that was
-- printed too early. Output therefore waits for a moment.
ffi.cdef [[
int moonshard_wait(void *, unsigned long, int) __asm__("poll");
int moonshard_is_terminal(int) __asm__("isatty");
]]
function M.settle() ffi.C.moonshard_wait(nil, 0, 30) end

local function print_results(ok, ...)
  if not ok then
    local failure = ...
    if type(failure) ~= "table" then failure = { text = text_of(failure), trace = {} } end      -- the function `report` failed
    local text = failure.text
    if text:find "interrupted$" then
      text = "interrupted"
      M.settle()
    end
    io.stdout:write(text, "\n")
    for k = 1, math.min(#failure.trace, 8) do io.stdout:write(failure.trace[k], "\n") end
    return false
  end
  for k = 1, select("#", ...) do io.stdout:write(M.show((select(k, ...))), "\n") end
  return true
end

-- Interrupts Lua code that calls no operator. Compiled code does not run hooks, so input is interpreted. A pcall in the
-- script may catch the error, so it is raised again at the script's next instruction, until the prompt is reached. In
-- the library, which may be cleaning up, it is raised only after 200000 instructions.
local heard, thrown, steps = 0, false, 0
local library = errors.library

local function look_for_interrupt()
  if state.sigints == heard and state.interrupted == 0 then return end
  if thrown then
    steps = steps + 1
    local info = debug.getinfo(2, "S")
    if steps < 200000 and info and info.source:sub(1, #library) == library then return end
  end
  thrown, steps, state.interrupted = true, 0, 0
  debug.sethook(look_for_interrupt, "", 1)
  error("interrupted", 0)
end

local function values(ok, ...)
  local broken = thrown
  heard = state.sigints                                 -- set first, because the hook may run at any time
  thrown = false
  debug.sethook(look_for_interrupt, "", 10000)
  -- Printing runs operators and may itself fail or be interrupted.
  if not ok then
    debug.sethook()
    -- The interrupt arrived inside the function `report`.
    if broken and type((...)) ~= "table" then return print_results(false, "interrupted") end
    return print_results(false, ...)
  end
  local shown, failure = xpcall(print_results, report, true, ...)
  debug.sethook()
  if not shown then return print_results(false, failure) end
  return true
end

-- Ctrl-C may also arrive between two statements of this file.
local function protected(chunk) return values(xpcall(chunk, report)) end

-- Closes scopes and runs that an error or break left open, and ignores a Ctrl-C that came too late.
local function tidy()
  autograd.abort_left(true)
  scope.close_all_left()
  state.interrupted = 0
end

--- Runs one complete input and prints its results. Returns false after an error. A Ctrl-C since the input was read
--- cancels it before it runs.
function M.execute(chunk)
  heard = state.sigints  -- set first: the hook handles an interrupt after the check below
  thrown = false
  if state.interrupted ~= 0 then
    print_results(false, "interrupted")
    tidy()
    io.stdout:flush()
    return false
  end
  jit.off(chunk, true)
  debug.sethook(look_for_interrupt, "", 10000)
  local ok, fine = pcall(protected, chunk)
  debug.sethook()
  if not ok then io.stdout:write(text_of(fine), "\n") end
  tidy()
  io.stdout:flush()
  return ok and fine
end

-- ---- completion -----------------------------------------------------------------------------------

-- The keys of a value that may follow a dot or colon.
local function keys_of(v, into)
  if tensor.is_tensor(v) then
    for k in pairs(getmetatable(v).methods) do into[k] = true end
    for k in pairs(tensor.methods) do into[k] = true end
    for k in pairs(tensor.getters) do into[k] = true end
    return
  end
  local seen = 0
  while type(v) == "table" and seen < 20 do
    for k in next, v do
      if type(k) == "string" and k:sub(1, 1) ~= "_" then into[k] = true end
    end
    for _, inner in ipairs { "_parameters", "_buffers", "_modules", "_children" } do
      local listed = rawget(v, inner)
      for k in pairs(type(listed) == "table" and listed or {}) do
        if type(k) == "string" then into[k] = true end
      end
    end
    local mt = getmetatable(v)
    local index = mt and rawget(mt, "__index")
    v = type(index) == "table" and index or mt and rawget(mt, "__isa") and mt ~= v and mt or rawget(v, "__base") or nil
    seen = seen + 1
  end
  if type(v) == "string" then
    for k in pairs(string) do into[k] = true end
  end
end

--- The names that complete a text: `ms.te`, `t:re`, `x`.
---@param text string  the end of the input line
---@return string[]
function M.complete(text)
  local path, part = text:match "^(.*[.:])([%w_]*)$"
  local into, out = {}, {}
  if path then
    local value = _G
    for name in path:gmatch "([^.:]+)" do
      if name:match "^%d+$" then name = tonumber(name) end
      local ok, inner = pcall(function() return value[name] end)
      if not ok or inner == nil then return {} end
      value = inner
    end
    keys_of(value, into)
    local ms = package.loaded.moonshard
    if value == ms then
      for _, name in ipairs(getmetatable(ms).modules) do into[name] = true end
    end
  else
    part = text
    for k in pairs(_G) do
      if type(k) == "string" then into[k] = true end
    end
    local words = "and break do else elseif end false for function if in local nil not or repeat return then true until while"
    for word in words:gmatch "%a+" do into[word] = true end
  end
  for name in pairs(into) do
    if name:sub(1, #part) == part and (part ~= "" or name:sub(1, 2) ~= "__") then
      out[#out + 1] = (path or "") .. name
    end
  end
  table.sort(out)
  return out
end

-- ---- help -----------------------------------------------------------------------------------------

-- The page of a function that is made in a loop, or of a field, from types.lua. If there is none, appends known names
-- to names.
local function described(name, names)
  for known, a in require("moonshard.tensor.util").sorted_pairs(annotations.declared()) do
    local short = known:match "[%w_]+$"
    if short == name then return annotations.page(a) end
    names[#names + 1] = short
  end
  for _, field in ipairs(annotations.declared_class "Tensor".fields) do
    if field.name == name then return ("t.%s: %s  %s"):format(name, field.type, field.text) end
    names[#names + 1] = field.name
  end
end

local function lookup(name)
  local chunk = loadstring("return " .. name, "=prompt")
  local ok, value = false, nil
  if chunk then ok, value = pcall(chunk) end
  if ok and value ~= nil then return value end
  ok, value = pcall(function()                            -- a name without `ms.`, such as nn.Linear
    local found = package.loaded.moonshard
    for part in name:gmatch "[^.]+" do found = found[part] end
    return found
  end)
  if ok and value ~= nil then return value end
  if tensor.methods[name] then return tensor.methods[name] end
  -- a name without its module, such as fully_shard
  for _, inner in ipairs(getmetatable(package.loaded.moonshard).modules) do
    ok, value = pcall(function() return package.loaded.moonshard[inner][name] end)
    if ok and value ~= nil then return value end
  end
  return nil
end

--- Returns what `? name` prints.
---@param name string  such as "nn.Linear"
function M.help(name)
  name = name:match "^%s*(.-)%s*$":gsub("%(.*%)$", "")
  if name == "" then
    return "ms is the library: ms.randn(2, 3), ms.nn.Linear(3, 4). An expression prints its value; Ctrl-C interrupts; Ctrl-D or exit leaves.\n"
      .. "? name, or help(name), explains a function (? ms.cat, ? softmax); Tab completes names, fields and, inside quotes, file names."
  end
  local value = lookup((name:gsub(":", ".")))
  local long
  if type(value) == "function" then
    local short = name:match "[%w_]*$"
    local a = value == tensor.methods[short] and annotations.declared()["Tensor:" .. short] or annotations.of(value)
    long = a and annotations.page(a)
    if a and a.source ~= "" then return long end
  elseif class.is_class(value) then
    local a = annotations.of_class(value)
    if a then return annotations.page(a) end
  end
  local names = {}
  local text = described(name:match "[^.:]*$", names) or long
  if text then return text end
  if value ~= nil then return M.show(value) end
  for known in pairs(tensor.methods) do names[#names + 1] = known end
  for known in pairs(package.loaded.moonshard) do names[#names + 1] = "ms." .. known end
  table.sort(names)
  return errors.unknown("name", name, names)
end

-- ---- the loop -------------------------------------------------------------------------------------

-- Waits for a line from a terminal. A terminal delivers whole lines, so Lua's buffer contains none. The flag is polled
-- ten times a second, because a signal that arrives just before a read does not interrupt it.
M.input = ffi.new("struct { int fd; short events, revents; }", 0, 1)
local function wait_for_line()
  if ffi.C.moonshard_is_terminal(0) == 0 then return end
  repeat until state.interrupted ~= 0 or ffi.C.moonshard_wait(M.input, 1, 100) > 0
end

local function plain_reader(prompt)
  if state.interrupted ~= 0 then                        -- interrupted since the last line, while nothing ran
    state.interrupted = 0
    M.settle()
    return "", true
  end
  io.stdout:write(prompt)
  io.stdout:flush()
  wait_for_line()
  local line = state.interrupted == 0 and io.read "*l" or nil
  if line == nil and state.interrupted ~= 0 then        -- Ctrl-C ends the read, not the session
    state.interrupted = 0
    M.settle()
    io.stdout:write "\n"
    return "", true
  end
  return line
end

-- Recognises commands of other prompts, unless the session has a global with that name. Returns "leave", or "help" and
-- the name.
local function command_of(line)
  local word, rest = line:match "^%s*(%a+)%s*(.-)%s*;?%s*$"
  if not word or rawget(_G, word) ~= nil then return nil end
  if (word == "exit" or word == "quit") and (rest == "" or rest:find "^%(%s*%)$") then return "leave" end
  if word ~= "help" then return nil end
  local name = rest:match "^%((.*)%)$" or rest
  name = name:match "^%s*(.-)%s*$":gsub("^([\"'])(.*)%1$", "%2")
  return name:find "^[%w_.:]*$" and "help" or nil, name
end

--- Ends every rank of a job, because all ranks would read from the same terminal.
function M.refuse_ranks()
  local dist = require "moonshard.dist"
  local world = dist.world_size()
  if world == 1 then return end
  if dist.rank() == 0 then
    io.stderr:write(("repl: the prompt is for one process, and this is a job of %d ranks: start it without mpirun, and run scripts "):format(world),
      "over ranks (mpirun -n 2 luajit FILE)\n")
  end
  dist.barrier()                                        -- mpirun ends all ranks as soon as one has ended
  os.exit(2, true)
end

--- Reads and runs input and prints results, until the end of input.
---@param given? {quiet: boolean}
function M.run(given)
  M.refuse_ranks()
  local reader = require "moonshard.tools.readline"
  local read = reader and reader(M) or plain_reader
  if not (given and given.quiet) then
    io.stdout:write(("Moonshard on %s (%s): the library is ms. ? for help, Ctrl-D to leave.\n"):format(_VERSION
      and jit.version or "Lua", jit.arch))
  end
  lib.ms_catch_sigint(1)
  if rawget(_G, "ms") == nil then rawset(_G, "ms", package.loaded.moonshard) end
  local text
  while true do
    local line, given_up = read(text and ">> " or "> ", text)
    if line == nil then break end
    local command, name = nil, nil
    if not text and not given_up then command, name = command_of(line) end
    if command == "leave" then break end
    if given_up then
      text = nil
    elseif line == "" and not text then                 -- nothing to do
      text = nil
    elseif text then
      text = line == "" and text .. "\n" or text .. "\n" .. line
    elseif command == "help" or line:match "^%s*%?" then
      local _, page_or_error = pcall(M.help, name or line:match "^%s*%?(.*)$")
      io.stdout:write(text_of(page_or_error), "\n")
    else
      text = line
    end
    if text then
      local chunk, message, more = M.compile(text)
      if chunk then
        M.execute(chunk)
        text = nil
      elseif not more then
        io.stdout:write(message, "\n")
        text = nil
      elseif line == "" and text:match "\n\n\n$" then   -- two empty lines discard an unfinished statement
        io.stdout:write(message, "\n")
        text = nil
      end
    end
  end
  io.stdout:write "\n"
  lib.ms_catch_sigint(0)
end

--- Replaces LuaJIT's loop under `luajit -i`: called when LuaJIT reads _PROMPT for its first prompt.
function M.take_over()
  if getmetatable(_G) ~= nil then return end
  setmetatable(_G, { __index = function(globals, key)
    if key ~= "_PROMPT" then return nil end
    setmetatable(globals, nil)
    M.run()
    os.exit(0, true)
  end })
end

return M
