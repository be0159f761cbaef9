-- SPDX-License-Identifier: MIT
--- Checks of a folder: its file system, and the speed of writing files in the way checkpoints are written.
local engine = require "moonshard.core.ffi"
local read = require "moonshard.tools.doctor.read"

local ffi, lib = engine.ffi, engine.lib

local M = {}

-- The type and the mount point of the file system that contains a path.
local function mount_of(path)
  local kind, point = nil, ""
  for at, rest in ("\n" .. (read.file "/proc/self/mountinfo" or "")):gmatch "\n%S+ %S+ %S+ %S+ (%S+) ([^\n]*)" do
    at = at:gsub("\\040", " ")
    local inside = at == "/" or path == at or path:sub(1, #at + 1) == at .. "/"
    if inside and #at >= #point then kind, point = rest:match "%- (%S+)", at end
  end
  return kind, point
end

local remote = { nfs = true, nfs4 = true, cifs = true, smb3 = true, ["9p"] = true, lustre = true, ceph = true,
  beegfs = true }

--- Checks the file system of a folder: whether files can be written, how fast, and how much space is free.
---@param line function  prints a finding
---@param folder string  path of the folder
function M.check(line, folder)
  local path = read.absolute(folder)
  if not path then
    return line("broken", "disk", ("there is no folder '%s'"):format(folder), "make the folder, or name another one")
  end
  local kind, point = mount_of(path)
  local free, size = read.space(path)
  local text = ("%s: %s mounted on %s%s"):format(path, kind or "unknown file system", point,
    free and size > 0 and (", %s of %s free"):format(read.bytes(free), read.bytes(size)) or "")
  local name = read.temporary(path)
  local data = ("moonshard"):rep(2 ^ 20)
  local why
  local function put(n)
    if not why and lib.ms_file_put(name, data, n) ~= 0 then why = ffi.string(lib.ms_error()) end
    os.remove(name)
  end
  local rate = #data / read.best(function() put(#data) end, 0)
  local small = read.best(function() put(512) end, 0)
  if why then
    local full = why:find "No space" or free and size > 0 and free < #data and not why:find "Read%-only"
    return line("broken", "disk", ("%s; %s"):format(text, why),
      full and "free some space, or name another folder" or "name a folder in which this user can write files")
  end
  text = ("%s; a file of %s is written and synced at %s/s, one of 512 bytes in %.1f ms"):format(text, read.bytes(#data),
    read.bytes(rate), small * 1e3)
  if rate < 5e7 then
    line("slow", "disk", text, "save checkpoints to a faster disk")
  elseif free and free < 1e9 then
    line("slow", "disk", text, "free some space: a checkpoint needs three times the size of the weights with AdamW")
  elseif remote[kind] then
    line("good", "disk", text .. "; over a network")
  else
    line("good", "disk", text)
  end
end

return M
