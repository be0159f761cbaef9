-- SPDX-License-Identifier: MIT
--- Drives a prompt in a pseudo-terminal: starts it, types lines, and reads what it prints.
local process = require "spec.support.process"
local Pty = require "spec.support.pty"

local M = { program = process.root .. "/scripts/repl" }


local own_folder = process.temp_folder()
local inputrc = own_folder .. "/inputrc"
process.write(inputrc, "set enable-bracketed-paste off\n")

local typed = 0                                         -- number of lines and Ctrl-C typed at all prompts

--- Removes the files of this module, and prints how many lines and Ctrl-C were typed.
function M.remove()
  process.remove_folder(own_folder)
  io.write(("        counted: %d lines and Ctrl-C typed at prompts\n"):format(typed))
end

--- Starts a prompt and waits until it reads.
---@param command string[]
---@param history? string  file of the history (default: none)
---@param env? table<string, string>
function M.open(command, history, env)
  local all = {
    MOONSHARD_HISTORY = history or "", TERM = "xterm", COLUMNS = "300", LINES = "6", MOONSHARD_THREADS = "1",
    INPUTRC = inputrc,
  }
  for k, v in pairs(env or {}) do all[k] = v end
  local p = Pty.start(command, all)
  function p:type(text)
    typed = typed + select(2, text:gsub("[\n\3]", ""))
    return Pty.type(self, text)
  end
  assert(p:expect("Ctrl-D to leave.", 60))
  assert(p:expect "> ")
  return p
end

--- Waits until the prompt reads again. Returns what was printed before.
function M.answer(p, seconds, what)
  local limit = process.now() + (seconds or 10) * process.patience
  repeat
    p:read(0.05)
    local text = p.text:gsub("\r", "")
    if text == "> " or text:sub(-3) == "\n> " then
      p.text = ""
      return (text:gsub("\n?> $", ""))
    end
  until process.now() > limit
  error("no prompt after " .. tostring(what) .. ": " .. p.text)
end

--- Types a line and returns what is printed before the next prompt.
function M.ask(p, line, seconds)
  p:type(line .. "\n")
  assert(p:expect "\n")
  return M.answer(p, seconds, line)
end

--- Types a statement of several lines, and returns what is printed before the next prompt.
---@param lines string[]
function M.ask_lines(p, lines)
  for k = 1, #lines - 1 do
    p:type(lines[k] .. "\n")
    assert(p:expect ">> ")
  end
  return M.ask(p, lines[#lines])
end

--- Pastes lines as a terminal does, and types Enter. Returns the lines that are printed after the echo, before the next
--- prompt. The prompt must have been opened with M.pasting.
---@param lines string[]
function M.paste(p, lines)
  p:type("\27[200~" .. table.concat(lines, "\n") .. "\27[201~\n")
  assert(p:expect "\27[?2004l")                         -- readline has accepted the text,
  local printed = assert(p:expect "\27[?2004h")         -- and waits for the next
  assert(p:expect "> ")
  return (printed:gsub("\r", ""):gsub("\27.*$", ""):gsub("\n$", ""))
end

--- The environment of a prompt whose terminal marks pastes, which readline's default asks it to.
M.pasting = { INPUTRC = "/dev/null" }

--- Types a line, and waits until it runs. The line first prints a text that it does not contain, because the terminal
--- echoes what is typed.
function M.run(p, line)
  p:type("print('it ' .. 'runs') " .. line .. "\n")
  assert(p:expect "it runs\r\n", line)
end

--- Runs a line and types Ctrl-C. Returns the seconds until the prompt reads again.
---@param seconds? number  how long the line runs before Ctrl-C (default: until it prints, 0.2 s at most)
---@return number
function M.interrupt(p, line, seconds)
  M.run(p, line)
  if seconds then process.sleep(seconds) else p:read(0.2) end
  local before = process.now()
  p:type "\3"
  assert(p:expect "interrupted", line)
  assert(p:expect "\n> ", line)
  local took = process.now() - before
  p.text = ""
  return took
end

return M
