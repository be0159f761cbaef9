-- SPDX-License-Identifier: MIT
--- Checks of what several ranks need: shared memory, MPI, the network. A job of two ranks is started and measured.
local cjson = require "cjson"
local engine = require "moonshard.core.ffi"
local launcher = require "moonshard.core.launcher"
local read = require "moonshard.tools.doctor.read"

local M = {}

local SEGMENT = 5e6                                     -- bytes of shared memory that MPI needs for each rank

function M.shared_memory(line)
  local function room(folder)
    local name = read.temporary(folder)
    local file = io.open(name, "w")
    if not file then return nil end
    local ok = file:write(("x"):rep(65536)) and file:flush()
    file:close()
    os.remove(name)
    return ok and read.space(folder) or 0
  end
  local free = room "/dev/shm"
  if free and free >= 2 * SEGMENT then return line("good", "/dev/shm", read.bytes(free) .. " free") end
  local why = free and read.bytes(free) .. " free" or "cannot be written"
  local remedy = "mount a tmpfs at /dev/shm; start a container with --shm-size=1g"
  local temporary = os.getenv "TMPDIR"
  temporary = temporary and temporary ~= "" and temporary or "/tmp"
  local there = room(temporary)
  if there and there >= 2 * SEGMENT then
    line("slow", "/dev/shm", ("%s; MPI's shared memory is put into %s"):format(why, temporary), remedy)
  else
    line("broken", "/dev/shm", ("%s, and %s has no room for MPI's shared memory"):format(why, temporary), remedy)
  end
end

-- The program of each rank of the measured job. Rank 0 prints the results as JSON.
function M.rank()
  local create, dist = require "moonshard.tensor.create", require "moonshard.dist"
  require "moonshard.autograd.methods"
  dist.init { timeout = 20 }
  local small, large = create.zeros(16), create.zeros(4 * 1024 * 1024)
  local function seconds(n, fn)
    for _ = 1, n do fn() end
    dist.barrier()
    return read.best(function() for _ = 1, n do fn() end end, 0) / n
  end
  local latency = seconds(200, function() dist.all_reduce(small) end)
  local slow = seconds(2, function() dist.all_reduce(large) end)
  if dist.rank() == 0 then print("result " .. cjson.encode { latency = latency, rate = large:numel() * 4 / slow }) end
end

-- The most informative line of a failed command's output.
local function reason(output)
  return output:match "[^\n]*moonshard: [^\n]*" or output:match "rank %d+[^\n]*" or output:match "%S[^\n]*"
    or "no output"
end

local environment = { "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
  "OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_hwloc_base_binding_policy=none" }

function M.mpi(line)
  local launch = launcher()
  if launch.name ~= "" then
    return line("good", "MPI", ("this is rank %d of %d, started by %s; no other job is started to measure"):format(
      launch.rank, launch.world, launch.name))
  end
  if not read.has "mpirun" then
    return line("broken", "MPI", "there is no mpirun in the PATH", "apt-get install openmpi-bin, then scripts/setup")
  end
  local version = read.run({ "mpirun", "--version" }, 10):match "[^\n]+" or "mpirun, which does not tell its version"
  if read.has "srun" then version = version .. "; srun is in the PATH, too" end
  local luajit = arg and arg[-1] and arg[-1]:find "luajit" and arg[-1] or "luajit"
  local words = { "env" }
  for _, setting in ipairs(environment) do words[#words + 1] = setting end
  for _, word in ipairs { "LUA_PATH=" .. package.path, "LUA_CPATH=" .. package.cpath, "mpirun", "-n", "2", luajit, "-e",
    'require("moonshard.tools.doctor.job").rank()' } do
    words[#words + 1] = word
  end
  local began = engine.lib.ms_time()
  local output, status = read.run(words, 60)
  local took = engine.lib.ms_time() - began
  local result = output:match "result (%b{})"
  if status ~= 0 or not result then
    local what = status == 124 and "two ranks did not end within 60 s" or "two ranks failed: " .. reason(output)
    local remedy = output:find "MPI plugin" and "apt-get install libopenmpi-dev, then scripts/setup"
      or "mpirun -n 2 luajit -e 'require(\"moonshard\").dist.init()' shows all of its output"
    return line("broken", "MPI", version .. "; " .. what, remedy)
  end
  local measured = cjson.decode(result)
  local text = ("%s; 2 ranks: %.1f s from start to end, all_reduce of 64 bytes %.1f us, of 16 MiB %s/s"):format(version,
    took, measured.latency * 1e6, read.bytes(measured.rate))
  -- A small all_reduce takes 2 to 5 us if each rank has a core; milliseconds if ranks wait for a core.
  if measured.latency > 1e-4 then
    line("slow", "MPI", text, "give each rank a core of its own; ranks that share one wait for each other")
  else
    line("good", "MPI", text)
  end
end

local function entries(folder)
  local lfs = require "lfs"
  local list = {}
  if lfs.attributes(folder, "mode") ~= "directory" then return list end
  for name in lfs.dir(folder) do
    if name:sub(1, 1) ~= "." then list[#list + 1] = name end
  end
  table.sort(list)
  return list
end

function M.network(line)
  local found = {}
  for _, name in ipairs(entries "/sys/class/infiniband") do
    for _, port in ipairs(entries("/sys/class/infiniband/" .. name .. "/ports")) do
      local at = ("/sys/class/infiniband/%s/ports/%s/"):format(name, port)
      found[#found + 1] = ("%s port %s: %s, %s"):format(name, port, read.find(at .. "rate") or "rate unknown",
        read.find(at .. "state", "%d+:%s*([^\n]*)") or "state unknown")
    end
  end
  for _, name in ipairs(entries "/sys/class/net") do
    local at = "/sys/class/net/" .. name .. "/"
    local speed = tonumber(read.find(at .. "speed") or "")
    local state = read.find(at .. "operstate")
    if name ~= "lo" and state == "up" then
      local rate = speed and speed > 0 and ("%g Gbit/s"):format(speed / 1000) or "rate unknown"
      found[#found + 1] = name .. ": " .. rate
    end
  end
  line("good", "network", #found > 0 and table.concat(found, "; ")
    or "no interface is up besides loopback: one node only")
end

return M
