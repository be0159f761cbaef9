-- SPDX-License-Identifier: MIT
--- A Debian with only the packages that apt needs, in a folder (mmdebstrap), for specs that install packages into it.
local lfs = require "lfs"
local process = require "spec.support.process"

local Root = {}
Root.__index = Root

-- Runs a command with its output in files beside the root.
local function run(self, words, limit)
  local out = self.path .. ".out"
  local child = process.start(words, { stdout = out, stderr = out .. ".err",
    env = { MOONSHARD_LIB = false, LUA_PATH = false, LUA_CPATH = false, LD_PRELOAD = false, LC_ALL = "C.UTF-8" } })
  local code = child:wait(limit or 150) or child:stop()
  return code, process.read(out), process.read(out .. ".err")
end

--- Makes the root. Returns nil and the reason where this is impossible.
---@param path string  a folder that does not exist
---@return table? root
---@return string? reason
local function new(path)
  local self = setmetatable({ path = path }, Root)
  if require("posix.unistd").geteuid() ~= 0 then return nil, "only the user root can install packages into a folder" end
  if run(self, { "unshare", "--mount", "true" }) ~= 0 then return nil, "unshare --mount fails: mount namespaces are missing or not permitted here" end
  local release = process.read "/etc/os-release":match "VERSION_CODENAME=(%S+)"
  -- The machine's own sources of Debian's packages.
  local sources = "/etc/apt/sources.list.d/debian.sources"
  if not lfs.attributes(sources) then sources = "/etc/apt/sources.list" end
  local code, out, err = run(self, { "mmdebstrap", "--variant=apt", "--dpkgopt=force-unsafe-io", "--quiet",
    '--aptopt=Acquire::Retries "5"', release, path, sources }, 400)
  assert(code == 0, "mmdebstrap failed:\n" .. out .. err)
  os.execute(("cp -L /etc/resolv.conf '%s/etc/'"):format(path))
  return self
end

--- Runs a shell line inside the root, with nothing in the environment but PATH and HOME. Returns its output; its status
--- must be `code`.
---@param line string
---@param opts? { user?: string, code?: integer, limit?: number }  user: its name; nil: root. code (0)
---@return string stdout
---@return string stderr
function Root:run(line, opts)
  opts = opts or {}
  process.write(self.path .. ".sh", [[
cd "$1" && for at in proc dev sys; do mount --rbind /$at $at || exit 99; done
chroot=$(PATH=$PATH:/usr/sbin command -v chroot)
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME="$2" DEBIAN_FRONTEND=noninteractive \
  "$chroot" --userspec="$3" . sh -c "cd $2 && $4"
]])
  local user = opts.user
  local code, out, err = run(self, { "unshare", "--mount", "sh", self.path .. ".sh", self.path,
    user and "/home/" .. user or "/root", user and user .. ":" .. user or "0:0", line }, opts.limit or 150)
  assert(code == (opts.code or 0), ("status %s of: %s\n%s%s"):format(code, line, out, err))
  return out, err
end

return new
