-- SPDX-License-Identifier: MIT
--- Compiles and runs what is entered at the prompt. After an error or Ctrl-C the session and its tensors remain.
local ffi = require "ffi"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local scope = require "moonshard.tensor.scope"
local autograd = require "moonshard.autograd"
local show = require("moonshard.tools.prompt.show").show

local state = engine.state
-- Copies of globals that a session may overwrite.
local io, debug, jit = io, debug, jit
local tostring, type, select, loadstring = tostring, type, select, loadstring
local pcall, xpcall, error = pcall, xpcall, error

local M = {}

-- Whether Lua's message says that the input ended too early. If Lua expected '=', the input is complete: an expression
-- after a statement.
local function ended_early(message)
  return message and message:find "near '?<eof>'?" ~= nil and not message:find "'=' expected"
end

-- Compiles a text. Returns nil, Lua's message, and whether the input ended too early. No line can close a string that
-- is open at the end of a line, unless a backslash continues it: Lua's message about the text and a newline tells.
local function load_text(text)
  local chunk, message = loadstring(text, "=prompt")
  if message and message:find "unfinished string" then message = select(2, loadstring(text .. "\n", "=prompt")) end
  return chunk, message, ended_early(message)
end

-- The expression is passed as an argument, because a tail call would hide its line from messages. The newline ends a
-- comment.
local function compile_expression(before, text)
  return loadstring(before .. "return select(1, " .. text .. ")", "=prompt")
    or text:find("--", 1, true) and loadstring(before .. "return select(1, " .. text .. "\n)", "=prompt") or nil
end

--- Compiles a line, or several lines if the first one is incomplete: an expression, statements, or statements and an
--- expression.
---@return function? chunk  nil if the text cannot be compiled
---@return string? message  Lua's reason
---@return boolean? more  true: the text is incomplete, so further lines may follow
function M.compile(text)
  local expression = text:gsub("^%s*=", "")
  local chunk = compile_expression("", expression)
  if chunk then return chunk end
  -- A local variable would end with its line, so it becomes a global of the session.
  local body = text:gsub("^%s*local%s+function%s", "function "):gsub("^%s*local%s+([%a_][%w_%s,]*=[^=])", "%1")
  local message, more
  chunk, message, more = load_text(body)
  if chunk then return chunk end
  local statements, last = body:match "^(.*;)(.-)$"
  chunk = statements and compile_expression(statements, last)
  if chunk then return chunk end
  if not more then more = select(3, load_text("return " .. expression)) end
  return nil, message, more
end

-- The text of any error value; its __tostring may fail or not return a string.
function M.text_of(message)
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
  return { text = M.text_of(message), trace = lines }
end

-- After Ctrl-C the kernel discards pending output of the terminal, which may include a message or prompt that was
-- printed too early. Output therefore waits for a moment.
ffi.cdef [[
int moonshard_wait(void *, unsigned long, int) __asm__("poll");
int moonshard_is_terminal(int) __asm__("isatty");
]]
function M.settle() ffi.C.moonshard_wait(nil, 0, 30) end

-- Where results and failures go: to the terminal, unless execute gets another destination.
local terminal = {
  result = function(text) io.stdout:write(text, "\n") end,
  failure = function(text, trace)
    if text == "interrupted" then M.settle() end
    io.stdout:write(text, "\n")
    for k = 1, #trace do io.stdout:write(trace[k], "\n") end
  end,
}
local destination = terminal

local function print_results(ok, ...)
  if not ok then
    local failure = ...
    if type(failure) ~= "table" then failure = { text = M.text_of(failure), trace = {} } end      -- the function `report` failed
    for k = 9, #failure.trace do failure.trace[k] = nil end
    destination.failure(failure.text:find "interrupted$" and "interrupted" or failure.text, failure.trace)
    return false
  end
  for k = 1, select("#", ...) do destination.result(show((select(k, ...)))) end
  return true
end

-- Interrupts Lua code that calls no operator. Compiled code does not run hooks, so input is interpreted. A pcall in the
-- script may catch the error, so it is raised again at the script's next instruction, until the prompt is reached. It
-- is not raised in the library, which may be between a change of state and the pcall that undoes it; the library's next
-- operator fails by itself. After 200000 instructions inside the library, the error is raised there, too.
local heard, steps = 0, 0
local thrown = false
local library = errors.library

local function look_for_interrupt()
  if state.sigints == heard and state.interrupted == 0 then return end
  steps = steps + 1
  local info = debug.getinfo(2, "S")
  if steps < 200000 and info and info.source:sub(1, #library) == library then
    if steps == 1 then debug.sethook(look_for_interrupt, "", 1) end
    return
  end
  thrown, steps, state.interrupted = true, 0, 0
  debug.sethook(look_for_interrupt, "", 1)
  error("interrupted", 0)
end

local function values(ok, ...)
  local broken = thrown
  heard = state.sigints                                 -- set first, because the hook may run at any time
  thrown, steps = false, 0
  -- The hook stays on while results are printed, because printing runs operators and can be interrupted.
  debug.sethook(look_for_interrupt, "", 10000)
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

-- Called by pcall, because Ctrl-C may also arrive between two statements of this file, outside of xpcall.
local function protected(chunk) return values(xpcall(chunk, report)) end

-- Closes scopes and aborts backwards that an error or break left open, and ignores a Ctrl-C that came too late.
local function tidy()
  autograd.abort_left(true)
  scope.close_all_left()
  state.interrupted = 0
end

--- Runs one complete input and prints its results. Returns false after an error. A Ctrl-C since the input was read
--- cancels it before it runs.
---@param chunk function
---@param to? { result: fun(text: string), failure: fun(text: string, trace: string[]) }  nil: the terminal
---@return boolean
function M.execute(chunk, to)
  destination = to or terminal
  heard = state.sigints  -- set first: the hook handles an interrupt after the check below
  thrown, steps = false, 0
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
  if not ok then destination.failure(M.text_of(fine), {}) end
  tidy()
  io.stdout:flush()
  return ok and fine
end

return M
