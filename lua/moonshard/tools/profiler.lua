-- SPDX-License-Identifier: MIT
--- profiler: measures where a script spends its time. A profile is a list of ranges: operators, their backward,
--- modules, collectives, waiting, units (with PyTorch's names: "FSDP::all_gather (layers.1)"), optimizer steps, steps
--- of ms.steps, and ranges that the script makes.
---
---   local p = ms.profiler.profile(function() train(10) end)
---   print(p)                                       -- a table by name
---   p:export_chrome_trace("trace.json")            -- for ui.perfetto.dev
---
--- Times are wall-clock times on the CPU: that of an operator on a GPU is the time of its launch, and the time to wait
--- for the device appears where the script waits. MOONSHARD_PROFILE=FILE records a whole script and writes FILE at its
--- end. With several ranks the file has a process for each, on the clock of rank 0, and arrows from the rank that
--- arrived last at a collective to the others.
local calls = require "moonshard.dist.calls"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local places = require "moonshard.core.places"
local ranges = require "moonshard.core.ranges"
local reports = require "moonshard.tools.memory"
local steps = require "moonshard.tools.profile_steps"

local lib, ffi = engine.lib, engine.ffi
local raise = errors.raise

local M = { schedule = steps.schedule }

-- ---- ranges of the script ------------------------------------------------------------------------

--- Runs fn(…) as a range named `name`; if no recording is active, only calls fn.
---@param name string  name of the range
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function M.record_function(name, fn, ...)
  if type(name) ~= "string" then opts.wrong(name, "a name", "record_function: argument 1") end
  opts.expect(fn, opts.fn, "record_function: argument 2")
  return ranges.user(name, fn, ...)
end

-- ---- averages -----------------------------------------------------------------------------------

---@class ProfileRow
---@field key string                the range's name
---@field thread string             "script", "gather queue", "reduce queue", "copy queue"
---@field category string           "operator", "backward", "module", "collective", "wait", "fsdp", "optimizer", "step", "user"
---@field detail string             shapes of inputs if rows are grouped by them, else ""
---@field count integer  number of ranges in the row
---@field cpu_time_total number     microseconds, including the ranges inside
---@field self_cpu_time_total number  microseconds, excluding the ranges inside
---@field cpu_time number           mean per call, microseconds
---@field cpu_memory_usage number   bytes allocated minus bytes freed, including the ranges inside
---@field self_cpu_memory_usage number  the same, excluding the ranges inside

---@class ProfileAverages
local Averages = { __name = "ProfileAverages" }
Averages.__index = Averages

local sortable = { "self_cpu_time_total", "cpu_time_total", "cpu_time", "count", "cpu_memory_usage",
  "self_cpu_memory_usage", "key" }

local function time_text(us)
  if us >= 1e6 then return ("%.3f s"):format(us / 1e6) end
  if us >= 1e3 then return ("%.3f ms"):format(us / 1e3) end
  return ("%.1f us"):format(us)
end

local function bytes_text(n)
  local size = math.abs(n)
  if size >= 2 ^ 30 then return ("%.2f GiB"):format(n / 2 ^ 30) end
  if size >= 2 ^ 20 then return ("%.2f MiB"):format(n / 2 ^ 20) end
  if size >= 2 ^ 10 then return ("%.2f KiB"):format(n / 2 ^ 10) end
  return ("%d B"):format(n)
end

--- The rows as text, by default the longest self time first. Percentages are of the recorded time, per thread.
---@param given? { sort_by: string, row_limit: integer, max_name_column_width: integer }
---   sort_by: name of a field of the rows; row_limit: number of rows to print; -1: all; max_name_column_width:
---   characters of a name, at least 4
---@return string
function Averages:table(given)
  opts.need(getmetatable(self) == Averages, self, "the averages of a profile (call it with a colon)", "table: self")
  local o = opts("table", given, { sort_by = opts.one_of(sortable, "self_cpu_time_total"), row_limit = 100,
    max_name_column_width = opts.option(opts.number_from(4), 60) })
  opts.need(o.row_limit >= -1 and (o.row_limit % 1 == 0 or o.row_limit == math.huge), o.row_limit,
    "a whole number of rows, or -1 for all", "table: row_limit")
  if o.row_limit == -1 then o.row_limit = math.huge end
  local rows, with_detail, queues = {}, false, false
  for k, row in ipairs(self) do
    rows[k] = row
    with_detail = with_detail or row.detail ~= ""
    queues = queues or row.thread ~= "script"
  end
  table.sort(rows, function(a, b)
    local x, y = a[o.sort_by], b[o.sort_by]
    if x ~= y and o.sort_by == "key" then return x < y end
    if x ~= y then return x > y end
    return a.place < b.place
  end)
  local function short(text)
    text = text:gsub("%c", "?")
    return #text > o.max_name_column_width and text:sub(1, o.max_name_column_width - 3) .. "..." or text
  end
  local lines = { { "name", "self", "self %", "total", "total %", "mean", "calls", "self memory", queues and "thread"
    or nil } }
  if with_detail then table.insert(lines[1], "shapes") end
  for k = 1, math.min(#rows, o.row_limit) do
    local r = rows[k]
    local line = { short(r.key), time_text(r.self_cpu_time_total),
      ("%.1f %%"):format(100 * r.self_cpu_time_total / self.recorded),
      time_text(r.cpu_time_total), ("%.1f %%"):format(100 * r.cpu_time_total / self.recorded), time_text(r.cpu_time),
        tostring(r.count), bytes_text(r.self_cpu_memory_usage) }
    if queues then line[#line + 1] = r.thread end
    if with_detail then line[#line + 1] = r.detail end
    lines[#lines + 1] = line
  end
  local widths = {}
  for _, line in ipairs(lines) do
    for k, cell in ipairs(line) do widths[k] = math.max(widths[k] or 0, #cell) end
  end
  local out = {}
  for k, line in ipairs(lines) do
    local cells = {}
    for j, cell in ipairs(line) do
      local left = j == 1 or j > 8
      cells[j] = left and cell .. (" "):rep(widths[j] - #cell) or (" "):rep(widths[j] - #cell) .. cell
    end
    out[k] = table.concat(cells, "  "):gsub("%s+$", "")
  end
  if #rows > o.row_limit then out[#out + 1] = "... and " .. errors.count(#rows - o.row_limit, "more row") end
  out[#out + 1] = ("recorded %s, of which %s in ranges of the script's thread"):format(time_text(self.recorded),
    time_text(self.covered))
  if self.dropped > 0 then out[#out + 1] = ("dropped %s (limit = %d)"):format(errors.count(self.dropped, "range"), self.limit) end
  return table.concat(out, "\n")
end

Averages.__tostring = function(self) return self:table() end

-- ---- profiles -----------------------------------------------------------------------------------

---@class Profile
local Profile = { __name = "Profile" }
Profile.__index = Profile

-- Calls visit(range, self time, self memory) for every range. Returns the total time of the script's thread in ranges.
-- On each thread, the ranges inside another range precede it. Ranges may also overlap (coroutines, a step left by
-- break); their common time then counts for the one that ended first, so no time is counted twice.
local function walk(trace, visit)
  local stacks = {}
  for k = 0, trace.n - 1 do
    local r = trace.ranges[k]
    local stack = stacks[r.lane]
    if not stack then
      stack = {}
      stacks[r.lane] = stack
    end
    local inside, memory = 0, 0
    while stack[1] and stack[#stack].start >= r.start do
      inside, memory = inside + stack[#stack].span, memory + stack[#stack].memory
      stack[#stack] = nil
    end
    local last, stop = stack[#stack], r.start + r.duration
    local span = last and last.stop > r.start and math.max(stop - last.stop, 0) or r.duration
    stack[#stack + 1] = { start = r.start, stop = stop, span = span, memory = r.memory }
    visit(r, span - inside, r.memory - memory)
  end
  local covered = 0                     -- time of the script's thread in ranges
  for _, top in ipairs(stacks[0] or {}) do covered = covered + top.span end
  return covered
end

local function check_self(self, who)
  opts.need(type(self) == "table" and getmetatable(self) == Profile, self, "a profile (call it with a colon)",
    "%s: self", who)
end

local function trace_of(self, who)
  check_self(self, who)
  if self._records then raise("%s: the profile is still recording; call stop() first", who) end
  return self._trace
end

--- Ends the recording. Idempotent.
---@return Profile
function Profile:stop()
  check_self(self, "stop")
  if not self._records then return self end
  lib.ms_trace_stop(self._trace)
  self._records = false
  ranges.look()
  return self
end

--- All ranges in the order in which they ended: { name, category, thread, detail, start, duration (seconds), allocated,
--- memory (bytes) }. While ms.record_memory_history records, the detail of an operator's backward is the module that
--- ran the operator. Collectives over several ranks also have bytes, unit, ranks (their number) and, if all of them
--- were recording, last_rank (which arrived last), last_after and first_waited (the seconds by which it arrived after
--- the rank before it, and after the first rank).
---@return table[]
function Profile:events()
  local trace, out = trace_of(self, "events"), {}
  for k = 0, trace.n - 1 do
    local r = trace.ranges[k]
    local e = { name = ffi.string(r.name), category = ffi.string(lib.ms_name_of(ffi.C.MS_NAME_RANGE, r.kind)),
      thread = ffi.string(lib.ms_name_of(ffi.C.MS_NAME_LANE, r.lane)),
      detail = ffi.string(r.detail), start = r.start, duration = r.duration, allocated = r.allocated,
        memory = r.memory }
    if e.category == "backward" then                    -- from the engine: "module 12", or "" if it is not known
      e.detail = places.module(tonumber(e.detail:match "^module (%d+)$")) or e.detail
    end
    if r.collective > 0 then
      local c = trace.collectives[r.collective - 1]
      e.bytes, e.ranks, e.unit = c.bytes, c.members, c.unit[0] ~= 0 and ffi.string(c.unit) or nil
      if c.last >= 0 then e.last_rank, e.last_after, e.first_waited = c.last, c.last_after, c.waited end
    end
    out[k + 1] = e
  end
  return out
end

--- Sums of ranges by name, category and thread (all steps of ms.steps are "step"): rows in an array that prints as a
--- table.
---@param given? { group_by_input_shape: boolean }
---   group_by_input_shape: operators have a row for each shape; needs record_shapes
---@return ProfileAverages
function Profile:key_averages(given)
  local trace = trace_of(self, "key_averages")
  local o = opts("key_averages", given, { group_by_input_shape = false })
  local rows, by_key = {}, {}
  rows.covered = 1e6 * walk(trace, function(r, own, memory)
    local kind = tonumber(r.kind)
    local name = kind == ffi.C.MS_RANGE_STEP and "step" or ffi.string(r.name)
    local detail = o.group_by_input_shape and kind == ffi.C.MS_RANGE_OP and ffi.string(r.detail) or ""
    local key = name .. "\0" .. r.lane .. "\0" .. kind .. "\0" .. detail
    local row = by_key[key]
    if not row then
      row = { key = name, thread = ffi.string(lib.ms_name_of(ffi.C.MS_NAME_LANE, r.lane)),
      category = ffi.string(lib.ms_name_of(ffi.C.MS_NAME_RANGE, kind)), detail = detail, count = 0,
        cpu_time_total = 0, self_cpu_time_total = 0, cpu_memory_usage = 0, self_cpu_memory_usage = 0, place = #rows }
      by_key[key], rows[#rows + 1] = row, row
    end
    row.count = row.count + 1
    row.cpu_time_total, row.self_cpu_time_total = row.cpu_time_total + 1e6 * r.duration,
      row.self_cpu_time_total + 1e6 * own
    row.cpu_memory_usage, row.self_cpu_memory_usage = row.cpu_memory_usage + r.memory,
      row.self_cpu_memory_usage + memory
  end)
  for _, row in ipairs(rows) do row.cpu_time = row.cpu_time_total / row.count end
  rows.recorded, rows.dropped, rows.limit = 1e6 * (trace.ended - trace.begun), tonumber(trace.dropped), self.limit
  return setmetatable(rows, Averages)
end

local function check_path(path)
  if type(path) ~= "string" or path == "" then opts.wrong(path, "a path", "export_chrome_trace: argument 1") end
  if path:find("%z") then raise("export_chrome_trace: the path %s contains a zero byte", ("%q"):format(path)) end
end

local function save(self, path, key)
  errors.check(lib.ms_trace_save(self._trace, path, (log.rank()), key))
  return path
end

-- Writes one file for all ranks that pass the same path. Before that, the clocks of nodes are compared again, which
-- gives their drift since the start of the job.
local save_together = calls.several(function(self, path)
  local dist = require "moonshard.dist"
  check_path(path)
  local of_file = { path = path, key = ("%.0fr%d"):format(1e9 * lib.ms_time(), dist.rank()) }
  for _, theirs in ipairs(dist.all_gather_object(of_file)) do
    if theirs.path == path then
      of_file = theirs                                  -- the first rank that has this path chooses the key
      break
    end
  end
  errors.check(lib.ms_dist_measure_clock())
  dist.barrier()
  lib.ms_dist_take_clock()
  save(self, path, of_file.key)
  dist.barrier()
  return path
end)

--- Writes the profile in Chrome's trace format, for chrome://tracing and ui.perfetto.dev. With several ranks every rank
--- makes this call, and ranks that pass the same path write one file: each is a process in it, their times are those of
--- rank 0's clock, a collective's arguments name the rank that arrived last, and arrows lead from that rank to the
--- others. Ranks on several nodes need a common file system for one file; otherwise each node has a file. Returns the
--- path.
---@param path string  path of the file
---@param given? { all_ranks: boolean }  all_ranks: false: this rank alone calls and writes a file of its own
---@return string
function Profile:export_chrome_trace(path, given)
  trace_of(self, "export_chrome_trace")
  local o = opts("export_chrome_trace", given, { all_ranks = true })
  if o.all_ranks and select(2, log.rank()) > 1 then return save_together(self, path) end
  check_path(path)
  return save(self, path, "")
end

function Profile:__tostring()
  if self._records then return "Profile(recording)" end
  return self:key_averages():table { row_limit = 30 }
end

--- Starts recording; other profiles may record at the same time.
---@param given? { limit: integer, with_modules: boolean, record_shapes: boolean }
---   limit: largest number of ranges to keep (56 bytes each); with_modules: also records calls of modules;
---   record_shapes: also records the shapes of operators' inputs
---@return Profile
function M.start(given)
  if given == M then raise("profiler.start: called with a colon; write profiler.start(…)") end
  local o = opts("profiler.start", given, { limit = opts.option(opts.whole_from(1), 1000000), with_modules = true, record_shapes = false })
  local trace = lib.ms_trace_start(o.limit, (o.record_shapes and ffi.C.MS_TRACE_SHAPES or 0) + (o.with_modules
    and ffi.C.MS_TRACE_MODULES or 0))
  if trace == nil then errors.fail() end
  ranges.look()
  -- If the script drops a profile that still records, garbage collection ends the recording.
  return setmetatable({ limit = o.limit, _trace = ffi.gc(trace, lib.ms_trace_free), _records = true }, Profile)
end

local function finish(p, ok, ...)
  p:stop()
  if not ok then error((...), 0) end
  return p, ...
end

--- Records while fn runs. May also be called as `profile(fn)`. With a schedule, only the steps that it selects are
--- recorded: fn is called with an object p, and calls p:step() at the end of each step. Returns the last profile, which
--- has fewer steps if fn ends within a cycle.
---@param given? { limit: integer, with_modules: boolean, record_shapes: boolean, schedule: function, on_trace_ready: fun(p: Profile) }
---   limit: largest number of ranges to keep (56 bytes each); with_modules: also records calls of modules;
---   record_shapes: also records the shapes of operators' inputs; schedule: a result of profiler.schedule;
---   on_trace_ready: with a schedule: called with each profile
---@param fn fun(p?: ProfileSteps): any  called without arguments, or with a schedule's steps
---@return Profile? profile  nil if the schedule recorded no step
---@return any  the results of fn
function M.profile(given, fn)
  if fn == nil and not opts.is(given) then given, fn = nil, given end
  opts.expect(fn, opts.fn, "profiler.profile: the last argument")
  if opts.is(given) and (given.schedule ~= nil or given.on_trace_ready ~= nil) then
    local options = {}
    for name, value in pairs(given) do options[name] = value end
    options.schedule, options.on_trace_ready = nil, nil
    return steps.run(given, options, M.start, fn)
  end
  return finish(M.start(given), pcall(fn))
end

--- The memory of this rank on a device, with the line and module of each allocation since ms.record_memory_history():
--- ms.memory_report by PyTorch's name.
---@param given? { device: string, html: string }
---   device: name of the device (default: the default device); html: writes a page with two flame graphs to this file
---@return MemoryReport
function M.memory_snapshot(given) return reports.memory_report(given) end

-- The path for a rank that ends before it has joined the job.
local function of_rank(path)
  local rank, world = log.rank()
  if world <= 1 then return path end
  local stem, ending = path:match "^(.*)(%.[^./]*)$"
  return ("%s.rank%d%s"):format(stem or path, rank, ending or "")
end

--- Internal, for MOONSHARD_PROFILE: records until the process ends.
function M._whole_script(path)
  local own, exists = of_rank(path), require("lfs").attributes(path, "mode")
  if exists == "named pipe" then                        -- opening a pipe would wait for a reader
    error(("MOONSHARD_PROFILE: cannot write %s: it is a named pipe"):format(path), 0)
  end
  -- Fail now, not after a day of training. The file itself is made by the first rank that ends.
  local tried = exists and path or own
  local file, why = io.open(tried, "a")
  if not file then error("MOONSHARD_PROFILE: cannot write " .. why, 0) end
  file:close()
  if not exists then os.remove(tried) end
  local p = M.start()
  lib.ms_trace_save_at_exit(ffi.gc(p._trace, nil), path, own, (log.rank()))       -- the engine writes the file at exit
end

return errors.closed(M, "profiler")
