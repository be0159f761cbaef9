-- SPDX-License-Identifier: MIT
--- Progress of long loops: on a terminal one line that is redrawn, elsewhere plain lines, so that files contain no
--- escape codes. The newest Progress object also shows operations of the library that take over a second.
---
--- Under mpirun a rank's standard output is a pseudo terminal even if mpirun writes to a file, so isatty does not
--- detect this. scripts/train therefore sets MOONSHARD_PROGRESS to bar or lines, depending on mpirun's own output.
--- Without this variable, a process that a launcher started prints lines.
local launcher = require "moonshard.core.launcher"
local lib = require("moonshard.core.ffi").lib
local task = require "moonshard.core.task"
local ffi = require "ffi"

ffi.cdef [[
int isatty(int);
int moonshard_window(int, unsigned long, unsigned short *) __asm__("ioctl");
]]

local M = {}

--- Whether a file descriptor is a terminal.
---@param fd integer
function M.is_terminal(fd) return ffi.C.isatty(fd) == 1 end

--- How progress is shown: "bar" (one line that is redrawn) or "lines" (plain lines).
---@param fd? integer  file descriptor of the output (default: 1)
function M.style(fd)
  local said = os.getenv "MOONSHARD_PROGRESS"
  if said == "bar" or said == "lines" then return said end
  if launcher().name ~= "" then return "lines" end
  return M.is_terminal(fd or 1) and os.getenv "TERM" ~= "dumb" and "bar" or "lines"
end

local size = ffi.new "unsigned short[4]"
local TIOCGWINSZ = 0x5413
-- The terminal's width now: a window may change its size at any time.
local function terminal_width(fd)
  if ffi.C.moonshard_window(fd, TIOCGWINSZ, size) == 0 and size[1] > 0 then return size[1] end
  return tonumber(os.getenv "COLUMNS") or 80
end

---@class Progress
local Progress = {}
Progress.__index = Progress

function Progress:__tostring()
  return ("Progress over steps %d to %s"):format(self.first + 1, self.total and ("%d"):format(self.total) or "?")
end

--- Shows the progress over steps first + 1 .. total.
---@param given {total: integer?, first: integer?, silent: boolean?, style: string?, write: function?, width: function?, stderr: boolean?}
---   total: nil if it is not known; first: number of steps taken before; silent: prints nothing; style: "bar" or
---   "lines" (default: M.style); write: prints a text; width: returns the terminal's width; stderr: prints to stderr
---   instead of stdout
---@return Progress
function M.new(given)
  local self = setmetatable({ total = given.total, first = given.first or 0, silent = given.silent }, Progress)
  local fd, file = given.stderr and 2 or 1, given.stderr and io.stderr or io.stdout
  self.style = given.style or M.style(fd)
  self.write = given.write or function(text)
    file:write(text)
    file:flush()
  end
  self.width = given.width or function() return terminal_width(fd) end
  -- Style "lines" prints 20 to 40 lines, fewer if there are fewer steps; one every 10 s if the total is not known.
  self.every = given.total and math.max(1, math.floor(given.total / 20))
  self.drawn = false
  self.last_draw = -math.huge
  self.began = lib.ms_time()
  if not self.silent then
    task.shown_by(function(...) self:task(...) end)
  end
  return self
end

--- A duration as text: "42 s", "3 min 5 s", "2 h 10 min".
function M.duration(seconds)
  if seconds ~= seconds or seconds == math.huge then return "?" end
  local s = math.floor(seconds + 0.5)
  if s < 120 then return ("%d s"):format(s) end
  if s < 7200 then return ("%d min %d s"):format(math.floor(s / 60), s % 60) end
  return ("%d h %d min"):format(math.floor(s / 3600), math.floor(s % 3600 / 60))
end

local function bar(done, width)
  local full = math.floor(math.min(done, 1) * width + 0.5)
  return ("#"):rep(full) .. ("."):rep(width - full)
end

-- The first n characters of a line of UTF-8.
local function beginning(line, n)
  if not line:find "[\128-\255]" then return line:sub(1, n) end
  local count = 0
  for at in line:gmatch "()[^\128-\191]" do
    if count == n then return line:sub(1, at - 1) end
    count = count + 1
  end
  return line
end

-- Draws one line over the last one. It ends before the last column, so that the terminal does not wrap it; a narrow
-- terminal gets a shorter bar, or none.
local function draw(self, share, text)
  local width = self.width()
  local cells = width >= 60 and 20 or width >= 40 and 8 or 0
  local line = share and cells > 0 and ("[%s] %s"):format(bar(share, cells), text) or text
  self.write("\r" .. beginning(line, math.max(0, width - 1)) .. "\27[K")
  self.drawn = true
end

--- Whether this step will be shown; otherwise the caller need not make its text.
---@param step integer  from 1
---@param now number    seconds
function Progress:wants(step, now)
  if self.silent then return false end
  if self.style == "bar" then return now - self.last_draw >= 0.1 or step == self.total end
  if not self.every then return now - self.last_draw >= 10 end
  return step % self.every == 0 or step == self.first + 1 or step == self.total
end

--- Shows that a step is done.
---@param step integer  from 1
---@param now number    seconds
---@param text string   shown after the step's number
function Progress:step(step, now, text)
  if not self:wants(step, now) then return end
  self.last_draw = now
  local total = self.total
  text = text:gsub("[%c\127]", " ")                     -- a script's text must not move the cursor
  if self.style == "bar" then
    draw(self, total and step / total, ("%s  %s"):format(total and ("%d/%d"):format(step, total) or step, text))
  elseif total then
    self.write(("step %" .. #tostring(total) .. "d/%d  %s\n"):format(step, total, text))
  else
    self.write(("step %d  %s\n"):format(step, text))
  end
end

--- Shows the progress of an operation once it has taken over a second; style "lines": every 10 s, and at its end.
---@param what string  the operation, such as "saving"
---@param done integer  from 0
---@param total integer
function Progress:task(what, done, total)
  if self.silent then return end
  local now = lib.ms_time()
  if what ~= self.what or done == 0 or done < self.done then
    self.what, self.task_began, self.task_shown = what, now, now
  end
  self.done = done
  local spent = now - self.task_began
  local ended = done >= total
  if ended then self.what = nil end
  if self.style == "bar" then
    if spent < 1 or now - self.last_draw < 0.1 then return end
    self.last_draw = now
    local rate = done / spent
    draw(self, done / total, ("%s %d/%d  %.3g/s  %s left"):format(what, done, total, rate,
      M.duration((total - done) / rate)))
  elseif ended and spent >= 1 then
    self.write(("%s: %s\n"):format(what, M.duration(spent)))
  elseif now - self.task_shown >= 10 then
    self.task_shown = now
    self.write(("%s: %d/%d  %s left\n"):format(what, done, total, M.duration((total - done) / done * spent)))
  end
end

--- Prints lines that are not redrawn.
---@param text string  one or more lines
function Progress:say(text)
  if self.silent then return end
  self.write((self.drawn and "\r\27[K" or "") .. text .. "\n")
  self.drawn = false
  self.last_draw = -math.huge
end

--- Ends the progress line, whose last text stays on the terminal.
function Progress:finish()
  if self.drawn and not self.silent then self.write "\n" end
  self.drawn = false
end

return M
