-- SPDX-License-Identifier: MIT
--- Facts about the start of a run, for its config.json: M.names lists them.
local engine = require "moonshard.core.ffi"
local generator = require "moonshard.tensor.random"
local lib, string_of = engine.lib, engine.ffi.string

local M = {}

--- The names of the facts; run.start adds from_step, the number of steps that earlier starts have taken.
M.names = { "version", "commit", "host", "processor", "ranks", "devices", "threads", "command", "time", "seed",
  "packages", "from_step" }

local function first_line(path, pattern)
  local file = io.open(path, "r")
  if not file then return nil end
  local found, line = nil, file:read "*l"               -- nil if the path is a folder
  while line and not found do
    found = line:match(pattern)
    line = file:read "*l"
  end
  file:close()
  return found
end

--- The commit of the git tree that contains a folder; nil outside a tree. Reads git's files, because a process of many
--- threads, with MPI, should not fork.
---@param folder string
---@return string?
function M.commit(folder)
  local up = folder
  for _ = 1, 64 do
    local git = up .. "/.git"
    local elsewhere = first_line(git, "^gitdir: (.+)$")      -- in a worktree .git is a file
    if elsewhere then git = elsewhere:sub(1, 1) == "/" and elsewhere or up .. "/" .. elsewhere end
    local head = first_line(git .. "/HEAD", "^(.+)$")
    if head then
      local ref = head:match "^ref: (.+)$"
      if not ref then return head end
      local common = first_line(git .. "/commondir", "^(.+)$")
      if common then common = common:sub(1, 1) == "/" and common or git .. "/" .. common end
      local name = ref:gsub("%p", "%%%0")
      for _, base in ipairs { git, common } do
        local id = first_line(base .. "/" .. ref, "^(%x+)$") or first_line(base .. "/packed-refs", "^(%x+) " .. name .. "$")
        if id then return id end
      end
      return nil
    end
    up = up .. "/.."
  end
  return nil
end

-- Versions of the Lua modules in use that state one.
local function packages()
  local list = { luajit = jit.version:gsub("^LuaJIT ", "") }
  for name, module in pairs(package.loaded) do
    local version = type(module) == "table" and rawget(module, "_VERSION")
    if type(version) == "string" and name ~= "_G" then list[name] = version end
  end
  return list
end

local function command()
  local words = {}
  for k = 0, arg and #arg or -1 do words[#words + 1] = tostring(arg[k]) end
  return table.concat(words, " ")
end

--- The facts of this start. `devices` and `ranks` are of the whole job.
---@param devices string[]  the device of each rank
---@return table<string, any>
function M.facts(devices)
  local script = arg and arg[0] or ""
  return {
    version = string_of(lib.ms_release_name()),
    commit = M.commit(script:match "^(.*)/[^/]*$" or "."),
    host = first_line("/proc/sys/kernel/hostname", "^(.+)$") or os.getenv "HOSTNAME",
    processor = first_line("/proc/cpuinfo", "^model name%s*:%s*(.+)$"),
    ranks = #devices,
    devices = devices,
    threads = lib.ms_num_threads(),
    command = command(),
    time = os.date "!%Y-%m-%dT%H:%M:%SZ",
    packages = packages(),
    seed = generator.get_rng_state()[1],
  }
end

return M
