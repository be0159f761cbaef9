-- SPDX-License-Identifier: MIT
--- Progress of a long loop: on a terminal one line that is redrawn, elsewhere plain lines, so that files contain no
--- escape codes.
---
--- Under mpirun a rank's standard output is a pseudo terminal even if mpirun writes to a file, so isatty does not
--- detect this. scripts/train therefore sets MOONSHARD_PROGRESS to bar or lines, depending on mpirun's own output. If
--- it is not set, a process that a launcher started prints lines.
local launcher = require "moonshard.core.launcher"
local ffi = require "ffi"

ffi.cdef "int isatty(int);"

local M = {}

--- "bar" or "lines".
function M.style()
  local said = os.getenv "MOONSHARD_PROGRESS"
  if said == "bar" or said == "lines" then return said end
  if launcher().name ~= "" then return "lines" end
  return ffi.C.isatty(1) == 1 and os.getenv "TERM" ~= "dumb" and "bar" or "lines"
end

---@class Progress
local Progress = {}
Progress.__index = Progress

--- Shows the progress over steps first + 1 .. total.
---@param given {total: integer, first: integer?, silent: boolean?, style: string?, write: function?}  silent: prints nothing
---@return Progress
function M.new(given)
  local self = setmetatable({ total = given.total, first = given.first or 0, silent = given.silent }, Progress)
  self.style = given.style or M.style()
  self.write = given.write or function(text)
    io.stdout:write(text)
    io.stdout:flush()
  end
  self.every = math.max(1, math.floor(given.total / 20))      -- for style "lines": about 20 lines
  self.drawn = false
  self.last_draw = -math.huge
  return self
end

local function bar(done, width)
  local full = math.floor(done * width + 0.5)
  return ("#"):rep(full) .. ("."):rep(width - full)
end

--- Whether this step will be shown; otherwise the caller need not make its text.
---@param step integer  from 1
---@param now number    seconds
function Progress:wants(step, now)
  if self.silent then return false end
  local last = step == self.total
  if self.style == "bar" then return now - self.last_draw >= 0.1 or last end
  return step % self.every == 0 or step == self.first + 1 or last
end

--- Shows that a step is done.
---@param step integer  from 1
---@param now number    seconds
---@param text string   shown after the step's number
function Progress:step(step, now, text)
  if not self:wants(step, now) then return end
  if self.style == "bar" then
    self.last_draw = now
    local width = tonumber(os.getenv "COLUMNS") or 80
    local line = ("[%s] %d/%d  %s"):format(bar(step / self.total, 20), step, self.total, text)
    self.write("\r" .. line:sub(1, width - 1) .. "\27[K")
    self.drawn = true
  else
    local digits = #tostring(self.total)
    self.write(("step %" .. digits .. "d/%d  %s\n"):format(step, self.total, text))
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

--- Ends the loop; the last line remains.
function Progress:finish()
  if self.drawn and not self.silent then self.write "\n" end
  self.drawn = false
end

return M
