-- SPDX-License-Identifier: MIT
--- ms.doctor: checks what this machine offers for training. Every line comes from a file that was read or a measurement
--- that was made.
local disk = require "moonshard.tools.doctor.disk"
local gpu = require "moonshard.tools.doctor.gpu"
local job = require "moonshard.tools.doctor.job"
local machine = require "moonshard.tools.doctor.machine"
local opts = require "moonshard.core.opts"

---@class DoctorLine
---@field state string  "good", "slow" or "broken"
---@field subject string  what was checked, such as "memory"
---@field text string  what was read and measured
---@field remedy string?  what to do; present unless state is "good"

---@class DoctorReport
---@field lines DoctorLine[]
---@field slow integer  number of lines that are slow
---@field broken integer  number of lines that are broken
---@field summary string  the number of checks, and how many are good, slow and broken
local Report = {}

local function wrapped(text, indent, columns)
  local lines, line = {}, ""
  for word in text:gmatch "%S+" do
    if #line > 0 and #line + 1 + #word > columns - indent then
      lines[#lines + 1], line = line, word
    else
      line = #line > 0 and line .. " " .. word or word
    end
  end
  lines[#lines + 1] = line
  return table.concat(lines, "\n" .. (" "):rep(indent))
end

local Line = {}

function Line:__tostring()
  local text = ("%-6s  %-14s  %s"):format(self.state, self.subject, wrapped(self.text, 24, 110))
  if self.remedy then text = text .. "\n" .. (" "):rep(24) .. wrapped("-> " .. self.remedy, 27, 110) end
  return text
end

function Report:__tostring()
  local out = {}
  for k, line in ipairs(self.lines) do out[k] = tostring(line) end
  out[#out + 1] = self.summary
  return table.concat(out, "\n")
end

local checks = { machine.processor, machine.threads, machine.memory, machine.limits, machine.clock, machine.luajit,
  job.shared_memory, job.mpi, job.network, gpu.device, gpu.libraries }

--- Checks this machine and returns a report: processor, threads, memory, limits, clock, LuaJIT, shared memory, MPI (by
--- a job of two ranks), network, GPU, CUDA's libraries, and the disk of a folder. It takes about two seconds; in a rank
--- of a job no second job is started. The report has `lines`, each with its `state` ("good", "slow" or "broken"),
--- `subject`, `text` and, unless it is good, `remedy`; the numbers of lines that are `slow` and `broken`; and a
--- `summary`, a line with these numbers.
---@param given? {folder: string, report: function}
---   folder: where runs and checkpoints are saved (default: the working directory); report: called with each line as
---   soon as its check has ended
---@return DoctorReport  `tostring` of it, and of each line, is the text that scripts/doctor prints
local function doctor(given)
  local o = opts("doctor", given, { folder = ".", report = opts.fn })
  local self = setmetatable({ lines = {}, slow = 0, broken = 0 }, Report)
  local function line(state, subject, text, remedy)
    local entry = setmetatable({ state = state, subject = subject, text = text, remedy = remedy }, Line)
    self.lines[#self.lines + 1] = entry
    if state ~= "good" then self[state] = self[state] + 1 end
    if o.report then o.report(entry) end
  end
  for _, check in ipairs(checks) do check(line) end
  disk.check(line, o.folder)
  self.summary = ("%d checks: %d good, %d slow, %d broken"):format(#self.lines, #self.lines - self.slow - self.broken,
    self.slow, self.broken)
  return self
end

return doctor
