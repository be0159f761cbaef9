-- SPDX-License-Identifier: MIT
--- Checks of the processor, threads, memory, limits, clock, and LuaJIT.
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local rates = require "moonshard.run.rate"
local without_fma = require "moonshard.core.processor".without_fma
local read = require "moonshard.tools.doctor.read"
local scope = require "moonshard.tensor.scope".scope
require "moonshard.autograd.methods"

local ffi, lib = engine.ffi, engine.lib

local M = {}

-- Flags in /proc/cpuinfo that distinguish the levels of x86-64; a level requires all of its flags.
local levels = {
  { "v4", { "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl" } },
  { "v3", { "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe" } },
}

local function level_of(flags)
  for _, level in ipairs(levels) do
    local all = true
    for _, flag in ipairs(level[2]) do all = all and flags:find(" " .. flag .. " ", 1, true) ~= nil end
    if all then return level[1] end
  end
  return "v1"
end

-- The number of cores that this process may use, and the number of cores that are online.
local function cores()
  local allowed = read.find("/proc/self/status", "Cpus_allowed_list:([^\n]*)")
  local online = read.find "/sys/devices/system/cpu/online"
  return allowed and read.count(allowed), online and read.count(online)
end

function M.processor(line)
  local info = read.file "/proc/cpuinfo" or ""
  local model = info:match "model name%s*:%s*([^\n]*)" or jit.arch .. " processor"    -- ARM has only numbers
  local clock = tonumber(info:match "cpu MHz%s*:%s*([%d.]+)" or "")
  local has = level_of(" " .. (info:match "flags%s*:%s*([^\n]*)" or "") .. " ")
  local used = ffi.string(lib.ms_cpu_isa())
  local _, online = cores()
  local arm, why = jit.arch == "arm64", used == "v1" and ": " .. without_fma or ""
  local text = ("%s, %s cores%s; kernels for %s"):format(model, online or "?",
    clock and (", %.2f GHz"):format(clock / 1000) or "", arm and "arm64" or "x86-64-" .. used)
  if arm then
    line("good", "processor", text)
  elseif used < has then
    line("slow", "processor", ("%s, although the processor supports %s%s"):format(text, has, why), "unset MOONSHARD_ISA")
  elseif used == "v1" then
    line("slow", "processor", text .. why, "a processor with AVX2 and FMA runs the kernels for v3")
  else
    line("good", "processor", text)
  end
  local load = tonumber(read.find("/proc/loadavg", "^(%S+)") or "")
  if load and online then
    if load > 0.5 * online then
      line("slow", "load", ("on average, %.1f processes ran or waited for %d cores in the last minute"):format(load, online),
        "end other busy processes, or do not trust the rates below")
    else
      line("good", "load", ("on average, %.2f processes ran or waited for a core in the last minute"):format(load))
    end
  end
end

local function with_threads(n, fn)
  local before = lib.ms_num_threads()
  lib.ms_set_num_threads(n)
  local ok, result = pcall(fn)
  lib.ms_set_num_threads(before)
  if not ok then error(result, 0) end
  return result
end

function M.threads(line)
  local n = lib.ms_num_threads()
  local allowed, online = cores()
  local text = ("%d of %s cores"):format(n, allowed or "?")
  local set = os.getenv "MOONSHARD_THREADS" and "MOONSHARD_THREADS" or "OMP_NUM_THREADS"
  if allowed and n > allowed then
    line("slow", "threads", text .. "; threads share cores", ("set %s to %d or less"):format(set, allowed))
  elseif allowed and n < allowed and os.getenv(set) then
    line("slow", "threads", text, ("unset %s, which is %s"):format(set, os.getenv(set)))
  elseif allowed and online and allowed < online then
    line("slow", "threads", ("%s; this process is bound to %d of the machine's %d cores"):format(text, allowed, online),
      "start this process without taskset; with mpirun, add --bind-to none")
  else
    line("good", "threads", text)
  end

  local single = with_threads(1, function() return rates.measure("cpu", "float32") end)
  local all = n > 1 and rates.measure("cpu", "float32") or single
  text = ("float32 %.0f GFLOP/s on %d thread%s"):format(all / 1e9, n, n > 1 and "s" or "")
  if n > 1 then text = text .. (", %.2f times the rate of one thread"):format(all / single) end
  -- Below 0.6 n times the rate of one thread, the threads did not each have a core all the time.
  if n > 1 and all < 0.6 * n * single then
    local quota = read.find("/sys/fs/cgroup/cpu.max", "^(%d+ %d+)")
    line("slow", "products", text, quota and "the container's quota of CPU time (cpu.max) is " .. quota
      or "look for other processes, hyper-threads that count as cores, or a quota of CPU time")
  else
    line("good", "products", text)
  end
end

local SIZE = 64 * 1024 * 1024

-- Bytes read and written per second when a tensor of 64 MiB is copied.
local function copy_rate()
  return scope(function()
    local a = create.ones(SIZE / 4)
    local b = create.zeros(SIZE / 4)
    return 2 * SIZE / read.best(function() b:copy_(a) end, 0.2)
  end)
end

function M.memory(line)
  local info = read.file "/proc/meminfo" or ""
  local function kilobytes(name) return tonumber(info:match("\n?" .. name .. ":%s*(%d+)")) end
  local total, available = kilobytes "MemTotal", kilobytes "MemAvailable"
  local limit = tonumber(read.find "/sys/fs/cgroup/memory.max"
    or read.find "/sys/fs/cgroup/memory/memory.limit_in_bytes" or "")
  if total and available then
    local text = ("%s, %s available"):format(read.bytes(total * 1024), read.bytes(available * 1024))
    if limit and limit < total * 1024 then
      text = ("%s; this container may use %s"):format(text, read.bytes(limit))
    end
    if available < 0.1 * total then
      line("slow", "memory", text, "end other processes before the system swaps")
    else
      line("good", "memory", text)
    end
  end
  local rate = copy_rate()
  -- One thread of a processor of the last ten years usually reads and writes more than this.
  if rate < 4e9 then
    line("slow", "copies", read.bytes(rate) .. "/s, read and written",
      "end other busy processes; virtual machines on one host share its memory bandwidth")
  else
    line("good", "copies", read.bytes(rate) .. "/s, read and written")
  end
  local mode = read.find("/sys/kernel/mm/transparent_hugepage/enabled", "%[(%w+)%]")
  if mode == "never" then
    line("slow", "huge pages", "never used", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
  elseif mode then
    line("good", "huge pages", mode == "always" and "for all memory" or "for memory that asks for them, as tensors do")
  end
end

function M.limits(line)
  local text = read.file "/proc/self/limits"
  if not text then return end
  local found, bad = {}, false
  local function limit(name, label, least, remedy)
    local value = text:match(name .. "%s+(%S+)")
    if not value then return end
    local n = tonumber(value) or math.huge
    found[#found + 1] = label .. " " .. value
    if n < least then
      bad = true
      line("slow", "limits", ("%s: %s"):format(label, value), remedy)
    end
  end
  limit("Max open files", "open files", 1024, "ulimit -n 4096; each rank opens files for its peers' memory")
  limit("Max address space", "address space", math.huge, "ulimit -v unlimited; a limit makes large tensors fail")
  limit("Max processes", "processes", 256, "ulimit -u 4096; each thread counts as a process")
  if not bad then line("good", "limits", table.concat(found, ", ")) end
end

function M.clock(line)
  local source = read.find "/sys/devices/system/clocksource/clocksource0/current_clocksource" or "unknown source"
  local n = 10000
  local seconds = read.best(function() for _ = 1, n do lib.ms_time() end end, 0.01) / n
  local text = ("%s, %.0f ns to read"):format(source, seconds * 1e9)
  if seconds > 5e-7 then
    line("slow", "clock", text, "boot with clocksource=tsc; profiles and waits read the clock often")
  else
    line("good", "clock", text)
  end
end

local LOOP = [[
  local n, sum = ..., 0
  local function half(x) return 0.5 * x end
  for k = 1, n do sum = sum + half(k) end
  return sum
]]
local needed = { cjson = "lua-cjson", lfs = "lua-filesystem", argparse = "lua-argparse" }

function M.luajit(line)
  local text = ("%s %s, %s"):format(jit.version, jit.arch, ffi.abi "gc64" and "GC64" or "Lua memory limited to 2 GB")
  local compiled, interpreted = loadstring(LOOP), loadstring(LOOP)
  jit.off(interpreted, true)
  local n = 2e6
  local seconds = read.best(function() compiled(10 * n) end, 0.05) / (10 * n)
  local slowly = read.best(function() interpreted(n) end, 0.05) / n
  text = ("%s; %.1f ns per iteration of a simple loop, %.1f ns interpreted"):format(text, seconds * 1e9, slowly * 1e9)
  if not jit.status() then
    line("slow", "LuaJIT", text .. "; its compiler is off", jit.arch == "arm64"
      and "2.1.0-beta3 compiles wrongly for ARM64: install a newer LuaJIT"
      or "remove -joff or jit.off() from the command and script")
  elseif seconds > 0.5 * slowly then                    -- a compiled loop takes a tenth of an interpreted one
    line("slow", "LuaJIT", text .. ": the loop is not compiled",
      "a security policy may forbid memory that is written and executed (SELinux: execmem)")
  else
    line("good", "LuaJIT", text)
  end
  local names = {}
  for name in pairs(needed) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    if not pcall(require, name) then
      line("broken", "Lua modules", name .. " is missing", "apt-get install " .. needed[name])
    end
  end
end

return M
