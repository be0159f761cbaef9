-- SPDX-License-Identifier: MIT
--- Jobs over two nodes of this machine that reach each other only by TCP: two network namespaces joined by a veth pair,
--- each with its own host name and process namespace. mpirun's agent enters the other namespace instead of using ssh.
--- Needs root, iproute2 and unshare.
local process = require "spec.support.process"

local nodes = {}

local function sh(command) return os.execute(("exec >/dev/null 2>&1; %s"):format(command)) == 0 end

--- Returns the reason why this machine cannot have such nodes, or nil if it can.
function nodes.missing()
  if process.tool then return "leak checks of sanitizers and valgrind fail in unshare, whose children are in another process namespace" end
  for _, tool in ipairs { "ip", "unshare", "mpirun" } do
    if not sh("command -v " .. tool) then return ("%s is not installed"):format(tool) end
  end
  local name = ("ms%dx"):format(process.pid())
  if not sh(("ip netns add %s && ip netns exec %s unshare --uts --pid --fork --mount-proc true; r=$?; ip netns del %s; exit $r")
    :format(name, name, name)) then
    return "network namespaces are refused here (not root?)"
  end
end

local Pair = {}
Pair.__index = Pair

--- Makes the two nodes; close() removes them.
---@return table
function nodes.open()
  local id = process.pid() % 100000
  local self = setmetatable({ folder = process.temp_folder(), "msa" .. id, "msb" .. id }, Pair)
  local a, b = self[1], self[2]
  local made = sh(([[set -e
    ip netns add %s; ip netns add %s
    ip link add v%s netns %s type veth peer name v%s netns %s
    ip -n %s addr add 10.99.0.1/24 dev v%s; ip -n %s addr add 10.99.0.2/24 dev v%s
    for n in %s %s; do ip -n $n link set lo up; ip -n $n link set v$n up; done]])
    :format(a, b, a, a, b, b, a, a, b, b, a, b))
  if not made then
    self:close()
    error("cannot make two network namespaces", 2)
  end
  -- mpirun calls this agent with a host and a command line for that host's shell.
  process.write(self.folder .. "/agent", ([[#!/bin/sh
shift
exec ip netns exec %s unshare --uts --pid --fork --mount-proc sh -c "hostname %s
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec $*"
]]):format(b, b))
  os.execute(("chmod +x %s/agent"):format(self.folder))
  return self
end

--- The command that runs argv on both nodes, n ranks on each, and the environment that mpirun needs.
---@param n integer
---@param argv string[]
---@param env? table<string, string>  environment of the ranks
function Pair:command(n, argv, env)
  local words = { "ip", "netns", "exec", self[1], "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self[1],
    "mpirun", "--mca", "plm_rsh_agent", self.folder .. "/agent", "--mca", "odls_base_sigkill_timeout", "0",
    "--host", ("10.99.0.1:%d,10.99.0.2:%d"):format(n, n), "-n", tostring(2 * n), "-wdir", process.root }
  for name, value in pairs(env or {}) do
    words[#words + 1] = "-x"
    words[#words + 1] = name .. "=" .. value
  end
  for _, word in ipairs(argv) do words[#words + 1] = word end
  return words, process.mpirun_env()
end

--- Runs a script on both nodes, n ranks on each, as ranks.run does.
---@param n integer
---@param script string
---@param opts? table  args, env, timeout
---@return { code: integer, stdout: string, stderr: string, seconds: number, timed_out: boolean }
function Pair:run(n, script, opts)
  opts = opts or {}
  local file, out, err = script, self.folder .. "/stdout", self.folder .. "/stderr"
  if not script:find "^[^\n]+%.lua$" then
    file = self.folder .. "/script.lua"
    process.write(file, script)
  end
  local env = { LUA_PATH = ("@/lua/?.lua;@/lua/?/init.lua;@/?.lua;;"):gsub("@", process.root), OMP_NUM_THREADS = "1" }
  for k, v in pairs(opts.env or {}) do env[k] = v end
  local argv = { "luajit", file }
  for _, a in ipairs(opts.args or {}) do argv[#argv + 1] = tostring(a) end
  local words, around = self:command(n, argv, env)
  local child = process.start(words, { stdout = out, stderr = err, env = around })
  local result = { timed_out = not child:wait(opts.timeout or 120) }
  if result.timed_out then child:stop(3) end
  result.code, result.seconds = child.code, child.seconds
  result.stdout, result.stderr = process.read(out), process.read(err)
  return result
end

function Pair:close()
  for k = 1, 2 do sh("ip netns del " .. self[k]) end
  process.remove_folder(self.folder)
end

return nodes
