-- SPDX-License-Identifier: MIT
--- Common parts of benchmarks: measures the machine's peak rates first, alternates cases, computes best and median,
--- checks bars (a bar is the limit that a result is meant to meet), and prints one format.
---
---   #!/usr/bin/env luajit
---   local root = arg[0]:match "^(.*)scripts/bench/" or "./"
---   package.path = ("@lua/?.lua;@lua/?/init.lua;@scripts/bench/support/?.lua;"):gsub("@", root) .. package.path
---   local bench = require("bench").start("gemm", arg)       -- prints the machine's rates
---   local case = bench:measure("matmul 512 float32", function() a:matmul(b) end, { flops = 2 * 512 ^ 3 })
---   bench:bar("matmul 512 float32", case.flops_per_second / bench.fma_float32, ">=", 0.90)
---   bench:finish()                                          -- exits with 1 under --check if a bar is missed
---
--- Options of every benchmark: --quick (about a second, for the format only), --check, --runs N, --help.
--- Lines: `machine: …`, `case: …`, `bar: …`, and at the end `N bars, N met, N missed`.
local ffi = require "ffi"

ffi.cdef [[
double probe_fma_float32(double seconds);
double probe_fma_bfloat16(double seconds);
double probe_amx_bfloat16(double seconds);
double probe_copy(void *to, const void *from, double bytes);
double probe_read(const void *from, double bytes, int threads);
void  *probe_memory(double bytes);
void   probe_free(void *p);
double probe_now(void);
double probe_handover(int rounds);
double probe_direct(const char *path, double bytes, double chunk, int write);
]]

local here = debug.getinfo(1, "S").source:match "^@(.*)scripts/bench/support/" or "./"
local build = os.getenv "MOONSHARD_BUILD" or "build"
if build:sub(1, 1) ~= "/" then build = here .. build end
local loaded, probe = pcall(ffi.load, build .. "/libmoonshard_probe.so")
if not loaded then error("bench: no libmoonshard_probe.so: build first (scripts/setup)\n" .. tostring(probe), 0) end

local M = { now = probe.probe_now }

---@class Bench
---@field quick boolean
---@field fma_float32 number   operations per second, one thread
---@field fma_bfloat16 number  0 if the processor has no such instruction
---@field amx_bfloat16 number  the same with tiles (AMX)
---@field copy number          bytes read plus written per second, one thread, 64 MiB (quick: 8)
local Bench = {}
Bench.__index = Bench

--- Statistics of a list of times: { best (the smallest), max, median, runs (how many there are) }.
function M.statistics(list)
  local sorted = { unpack(list) }
  table.sort(sorted)
  local n = #sorted
  return { best = sorted[1], max = sorted[n], median = n % 2 == 1 and sorted[(n + 1) / 2]
    or (sorted[n / 2] + sorted[n / 2 + 1]) / 2, runs = n }
end

local function seconds_text(s)
  if s >= 1 then return ("%.3f s"):format(s) end
  if s >= 1e-3 then return ("%.3f ms"):format(s * 1e3) end
  return ("%.3f us"):format(s * 1e6)
end
M.seconds_text = seconds_text

--- The rate of memcpy: bytes read plus bytes written per second. opts: runs (9); sync, called before each copy (a
--- barrier, so that all ranks copy at once).
---@return number best
---@return number median
function M.copy_rate(bytes, opts)
  opts = opts or {}
  local from, to = probe.probe_memory(bytes), probe.probe_memory(bytes)
  local list = {}
  for k = 1, (opts.runs or 9) + 1 do
    if opts.sync then opts.sync() end
    list[k] = probe.probe_copy(to, from, bytes)
  end
  table.remove(list, 1)
  probe.probe_free(from)
  probe.probe_free(to)
  local s = M.statistics(list)
  return 2 * bytes / s.best, 2 * bytes / s.median
end

--- Seconds to read memory once, divided between threads.
---@param from ffi.cdata*
---@param bytes number
---@param threads integer
---@return number
function M.read(from, bytes, threads) return probe.probe_read(from, bytes, threads) end

--- Seconds from a write to a pipe until the thread that sleeps in reading it runs: the unit for latencies.
function M.handover() return probe.probe_handover(2000) end

--- Parses the options of a benchmark: quick, check, runs, and the options in `more` (names with their defaults). --help
--- prints the head of the script and exits.
---@param argv table  the script's arguments
---@param more? table<string, string>
---@return table
function M.options(argv, more)
  local out, names, i = {}, {}, 1
  for name, default in pairs(more or {}) do
    out[name], names[#names + 1] = default, "--" .. name .. " X"
  end
  table.sort(names)
  local known = table.concat({ "--quick, --check, --runs N", unpack(names) }, ", ")
  while argv[i] do
    local word = argv[i]
    local name = word:match "^%-%-(.*)$"
    if name == "quick" or name == "check" then out[name] = true
    elseif name == "help" then
      print(("usage: scripts/bench/%s [OPTION]..."):format(argv[0]:match "[^/]*$"))
      for line in io.lines(argv[0]) do
        if line:find "^%-%-" and not line:find "SPDX" then print((line:gsub("^%-+ ?", ""))) elseif not line:find "^%-%-" and not line:find "^#!" then break end
      end
      print "  --quick   about a second, for the format of the output\n  --check   end with status 1 if a bar is missed"
      print "  --runs N  how often a case is measured"
      for _, text in ipairs(names) do print(("  %s  (%s)"):format(text, more[text:match "%-%-(%S+)"])) end
      os.exit(0)
    elseif argv[i + 1] and (name == "runs" and tonumber(argv[i + 1]) or name and more and more[name] ~= nil) then
      i = i + 1
      out[name] = name == "runs" and tonumber(argv[i]) or argv[i]
    else
      io.stderr:write(("%s: '%s' is not an option, or lacks its value; expected %s\n"):format(argv[0]:match "[^/]*$",
        word, known))
      os.exit(2)
    end
    i = i + 1
  end
  return out
end

--- For a benchmark over ranks, called first. In a rank it returns. Started without mpirun it runs the script under
--- mpirun, once for each entry of `jobs`, and exits.
---@param jobs (integer|string)[]  numbers of ranks, each with further options
---@param argv table  the script's arguments
---@param more? table<string, string>  as for M.options
function M.over_ranks(jobs, argv, more)
  if require "moonshard.core.launcher"().name ~= "" then return end
  M.options(argv, more)
  local words, code = {}, 0
  for k, word in ipairs(argv) do words[k] = (" '%s'"):format(word:gsub("'", "'\\''")) end
  for _, job in ipairs(jobs) do
    local n, own = tostring(job):match "^(%d+)(.*)$"
    -- Settings that Open MPI has as variables: mpirun accepts root, and more ranks than cores; a single rank is not
    -- bound to one core, so it has a thread for each.
    local status = os.execute(
      ("OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 %s "
      .. "mpirun -n %s luajit '%s'%s%s"):format(n == "1" and "OMPI_MCA_hwloc_base_binding_policy=none" or "", n,
      argv[0], table.concat(words), own))
    if status ~= 0 then code = 1 end
  end
  os.exit(code)
end

--- For benchmarks over ranks: replaces the time of each run by the time of the slowest rank in that run. Collective.
---@param times number[]
---@return number[]
function M.slowest(times)
  local ms = require "moonshard"
  local t = ms.tensor(times, { dtype = "float64" })
  ms.dist.all_reduce(t, { op = "max" })
  return t:tolist()
end

--- The address of a tensor's data. It is valid as long as the tensor exists.
---@param t Tensor
---@return ffi.cdata*
function M.pointer(t) return ffi.cast("char *", ffi.cast("intptr_t", t:data_ptr())) end

--- Seconds to read, or to write and sync, a file of this size past the page cache; nil if the disk does not support
--- O_DIRECT.
---@param path string
---@param bytes number
---@param write boolean
---@return number?
function M.direct(path, bytes, write)
  local seconds = probe.probe_direct(path, bytes, 8 * 2 ^ 20, write and 1 or 0)
  return seconds > 0 and seconds or nil
end

-- Limits PyTorch, oneDNN and MKL to the instructions that MOONSHARD_ISA leaves our kernels.
local LEVELS = {
  v1 = "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2",
  v2 = "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2",
  v3 = "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2",
}

--- Starts a benchmark: reads its options, measures and prints the machine's rates.
--- opts: silent (a rank that does not print), sync (barrier for the copy rate), options (as for M.options).
---@return Bench
function M.start(name, argv, opts)
  opts = opts or {}
  local given = M.options(argv, opts.options)
  local self = setmetatable({ name = name, silent = opts.silent, bars = 0, met = 0, given = given, quick = given.quick,
    check = given.check,
    runs = given.runs }, Bench)
  local time = self.quick and 0.02 or 0.3
  self.fma_float32 = probe.probe_fma_float32(time)
  self.fma_bfloat16 = probe.probe_fma_bfloat16(time)
  self.amx_bfloat16 = probe.probe_amx_bfloat16(time)
  self.copy = M.copy_rate(self.quick and 2 ^ 23 or 2 ^ 26, { sync = opts.sync, runs = self.quick and 3 or 9 })
  self:print(("machine: copy %.1f GB/s, fma float32 %.1f GF/s, fma bfloat16 %.1f GF/s, tiles bfloat16 %.1f GF/s, one thread"):format(
    self.copy / 1e9, self.fma_float32 / 1e9, self.fma_bfloat16 / 1e9, self.amx_bfloat16 / 1e9))
  return self
end

function Bench:print(line)
  if not self.silent then
    io.stdout:write(line, "\n")
    io.stdout:flush()
  end
end

--- The peer, PyTorch, where it is installed (python3, or the interpreter that MOONSHARD_PEER_PYTHON names): prints its
--- version and returns a function that runs support/NAME with a list of words and returns what it prints; nil without
--- PyTorch. The program inherits neither the environment, so that Open MPI's variables do not reach it, nor the core to
--- which mpirun has bound this rank: its processes would share it.
---@param name string
---@return (fun(words: (string|number)[]): string)?
function Bench:peer(name)
  local command = ("taskset -c 0-$(($(nproc --all) - 1)) env -i PATH=\"$PATH\" HOME=\"$HOME\" %s '%s' "):format(
    LEVELS[os.getenv "MOONSHARD_ISA"] or "", os.getenv "MOONSHARD_PEER_PYTHON" or "python3")
  local function output(words)
    local pipe = io.popen(command .. words)
    local text = pipe:read "*a"
    pipe:close()
    return text
  end
  local version = output "-c 'import torch; print(torch.__version__)' 2>/dev/null"
  if version == "" then return nil end
  self:print("# peer: PyTorch " .. version:match "^[%d.]+")
  return function(words)
    return output(("'%sscripts/bench/support/%s' %s"):format(here, name, table.concat(words, " ")))
  end
end

--- What a peer printed: for each line `seconds S ...` the list of its numbers.
---@param text string
---@param n integer  the number of such lines
---@return number[][]
function M.seconds(text, n)
  local lists = {}
  for line in text:gmatch "seconds ([^\n]*)" do
    local list = {}
    for number in line:gmatch "%S+" do list[#list + 1] = tonumber(number) end
    lists[#lists + 1] = list
  end
  assert(#lists == n, text)
  return lists
end

--- Times steps in alternation with those of a peer. cases: { name, step (returns its seconds), least (the bar of the
--- peer's median over ours) }. opts: runs; steps of each case in a run (1); warm (1), steps that do not count; peer, and
--- the words to call it with in each run: it prints a line `seconds S ...` for each case. Returns the statistics of
--- our steps.
function Bench:beside(cases, opts)
  local ours, theirs, results = {}, {}, {}
  for k, case in ipairs(cases) do
    ours[k], theirs[k] = {}, {}
    for _ = 1, opts.warm or 1 do case.step() end
  end
  for _ = 1, opts.runs do
    for k, case in ipairs(cases) do
      for _ = 1, opts.steps or 1 do table.insert(ours[k], case.step()) end
    end
    for k, list in ipairs(opts.peer and M.seconds(opts.peer(opts.words), #cases) or {}) do
      for _, seconds in ipairs(list) do table.insert(theirs[k], seconds) end
    end
  end
  for k, case in ipairs(cases) do
    local own = M.statistics(ours[k])
    results[k] = own
    self:report(case.name, own.best, own.median)
    if opts.peer then
      local other = M.statistics(theirs[k])
      self:report(case.name .. ", PyTorch", other.best, other.median)
      self:bar(case.name .. ", PyTorch's time over ours", other.median / own.median, ">=", case.least)
    end
  end
  return results
end

-- The number of calls of fn that take at least `least` seconds together, so that the clock's resolution does not
-- matter.
local function inner_count(fn, least)
  local n = 1
  while true do
    local t = M.now()
    for _ = 1, n do fn() end
    t = M.now() - t
    if t >= least or n >= 2 ^ 20 then return n end
    n = math.max(n * 2, math.min(n * 16, math.ceil(n * least / math.max(t, 1e-9))))
  end
end

--- Measures several functions in alternation, A B A B …: { { name, fn, flops = , bytes = }, … }. opts: runs (20);
--- least (minimum seconds per run: 2 ms); warm (each run begins with a call that does not count); sync (called before
--- each run), inner (with sync: calls per run, 1); slowest (as M.slowest, for a benchmark over ranks). Prints a line
--- for each function and returns by name { best, max, median, runs, flops_per_second, bytes_per_second,
--- median_flops_per_second, median_bytes_per_second }; the rates without `median_` are computed from the best time.
--- --quick and --runs take precedence over the options.
function Bench:alternate(cases, opts)
  opts = opts or {}
  local runs = self.quick and 3 or self.runs or opts.runs or 20
  local least = self.quick and 1e-4 or opts.least or 2e-3
  local times, inner = {}, {}
  for k, case in ipairs(cases) do
    case[2]()
    times[k] = {}
    inner[k] = opts.sync and (opts.inner or 1) or inner_count(case[2], least)
  end
  for run = 1, runs do
    for k, case in ipairs(cases) do
      local fn, n = case[2], inner[k]
      if opts.sync then opts.sync() end
      if opts.warm then fn() end
      local t = M.now()
      for _ = 1, n do fn() end
      times[k][run] = (M.now() - t) / n
    end
  end
  local results = {}
  for k, case in ipairs(cases) do
    if opts.slowest then times[k] = opts.slowest(times[k]) end        -- the time of the slowest rank in this run
    local s = M.statistics(times[k])
    s.flops_per_second = case.flops and case.flops / s.best
    s.bytes_per_second = case.bytes and case.bytes / s.best
    s.median_flops_per_second = case.flops and case.flops / s.median
    s.median_bytes_per_second = case.bytes and case.bytes / s.median
    results[case[1]] = s
    self:print(("case: %-44s best %12s  median %12s%s%s"):format(case[1], seconds_text(s.best), seconds_text(s.median),
      case.flops and ("  %8.1f GF/s"):format(s.flops_per_second / 1e9) or "",
      case.bytes and ("  %8.2f GB/s"):format(s.bytes_per_second / 1e9) or ""))
  end
  return results
end

--- Measures one function; opts: as for alternate, and flops, bytes.
function Bench:measure(name, fn, opts)
  opts = opts or {}
  return self:alternate({ { name, fn, flops = opts.flops, bytes = opts.bytes } }, opts)[name]
end

--- Prints a number that was measured in another way, in the same format.
function Bench:report(name, best, median, unit)
  self:print(("case: %-44s best %12s  median %12s"):format(name, unit and ("%.4g %s"):format(best, unit)
    or seconds_text(best),
    unit and ("%.4g %s"):format(median, unit) or seconds_text(median)))
end

--- Compares a number with its bar, prints the verdict, and returns whether the bar is met.
---@param relation ">="|"<="  the bar is value >= limit, or value <= limit
function Bench:bar(name, value, relation, limit, unit)
  local met = relation == ">=" and value >= limit or relation == "<=" and value <= limit
  self.bars = self.bars + 1
  if met then self.met = self.met + 1 end
  self:print(("bar: %-45s %10.4g %s %g%s  %s"):format(name, value, relation, limit, unit and " " .. unit or "", met
    and "met" or "MISSED"))
  return met
end

--- Prints the last line; exits with 1 under --check if a bar was missed.
function Bench:finish()
  self:print(("%d bars, %d met, %d missed"):format(self.bars, self.met, self.bars - self.met))
  if self.check and self.met < self.bars then os.exit(1, true) end
end

return M
