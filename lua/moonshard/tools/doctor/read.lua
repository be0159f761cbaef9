-- SPDX-License-Identifier: MIT
--- Functions that the checks of ms.doctor share: read files of the system, run commands, measure times, format numbers.
local engine = require "moonshard.core.ffi"
local ffi = engine.ffi

ffi.cdef [[
typedef struct {
  unsigned long bsize, frsize, blocks, bfree, bavail, files, ffree, favail, fsid, flag, namemax;
  int spare[6];
} ms_doctor_statvfs;
int ms_doctor_statvfs_of(const char *, ms_doctor_statvfs *) __asm__("statvfs");
char *realpath(const char *, char *);
void free(void *);
int getpid(void);
]]

local M = {}

--- The content of a file; nil if it cannot be read.
---@param path string
---@return string?
function M.file(path)
  local file = io.open(path, "r")
  local text = file and file:read "*a"
  if file then file:close() end
  return text
end

--- The first capture of a pattern in a file, without the whitespace around it.
---@param path string
---@param pattern? string  default: the first line
---@return string?
function M.find(path, pattern)
  local text = M.file(path)
  local found = text and text:match(pattern or "([^\n]*)")
  return found and found:match "^%s*(.-)%s*$"
end

--- The number of elements of a list such as "0-3,8".
---@param list string
---@return integer
function M.count(list)
  local n = 0
  for first, last in list:gmatch "(%d+)%-?(%d*)" do
    n = n + (tonumber(last) or tonumber(first)) - tonumber(first) + 1
  end
  return n
end

local function quoted(word) return "'" .. word:gsub("'", "'\\''") .. "'" end

--- Runs a command and returns what it wrote on stdout and stderr, and its exit status (124: it took too long).
---@param words string[]
---@param seconds number  time limit of the command
---@return string output
---@return integer status
function M.run(words, seconds)
  local line = { "timeout", "-k", "1", ("%g"):format(seconds) }
  for _, word in ipairs(words) do line[#line + 1] = quoted(word) end
  local pipe = io.popen("exec 2>&1 </dev/null; " .. table.concat(line, " ") .. "; echo \" status $?\"")
  local text = pipe:read "*a"
  pipe:close()
  local output, status = text:match "^(.*) status (%d+)\n$"
  return output or text, tonumber(status) or 1
end

--- Whether a command is in the PATH.
---@param name string
---@return boolean
function M.has(name)
  for folder in (os.getenv "PATH" or ""):gmatch "[^:]+" do
    local file = io.open(folder .. "/" .. name, "r")
    if file then
      file:close()
      return true
    end
  end
  return false
end

--- The absolute path of a file without symbolic links; nil if it does not exist.
---@param path string
---@return string?
function M.absolute(path)
  local p = ffi.C.realpath(path, nil)
  if p == nil then return nil end
  local text = ffi.string(p)
  ffi.C.free(p)
  return text
end

--- The space that users without privileges may still fill in a file system, and its size, in bytes.
---@param path string  a file or folder in it
---@return number? free
---@return number? size
function M.space(path)
  local fs = ffi.new "ms_doctor_statvfs"
  if ffi.C.ms_doctor_statvfs_of(path, fs) ~= 0 then return nil end
  return tonumber(fs.bavail) * tonumber(fs.frsize), tonumber(fs.blocks) * tonumber(fs.frsize)
end

--- A path in a folder for a new file of this process.
---@param folder string
---@return string
function M.temporary(folder)
  return ("%s/.moonshard-doctor-%d-%.0f"):format(folder, ffi.C.getpid(), engine.lib.ms_time() * 1e9)
end

local units = { "B", "KB", "MB", "GB", "TB" }

--- A number of bytes as text, in powers of 1000.
---@param n number
---@return string
function M.bytes(n)
  local k = 1
  while n >= 999.5 and k < #units do n, k = n / 1000, k + 1 end
  return (n >= 99.5 or k == 1 or n % 1 == 0) and ("%.0f %s"):format(n, units[k]) or ("%.3g %s"):format(n, units[k])
end

--- The shortest time of several calls of fn, in seconds.
---@param fn function
---@param total number  seconds after which no further call begins; at least 3 calls are made
---@return number
function M.best(fn, total)
  local best, began, calls = math.huge, engine.lib.ms_time(), 0
  repeat
    local before = engine.lib.ms_time()
    fn()
    local now = engine.lib.ms_time()
    best, calls = math.min(best, now - before), calls + 1
  until calls >= 3 and now - began > total
  return best
end

return M
