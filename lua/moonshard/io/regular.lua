-- SPDX-License-Identifier: MIT
--- Regular files in folders that others may change. Nothing is written through a symbolic link, which may lead to a
--- file outside of the folder, and no pipe is opened, because that waits for another process.
local lfs = require "lfs"

local M = {}

local KINDS = { link = "a symbolic link", directory = "a folder", ["named pipe"] = "a named pipe" }

--- Whether a path is free, or a regular file.
---@param path string
---@param linked? boolean  the file may be behind a symbolic link
---@return boolean ok
---@return string? err
function M.check(path, linked)
  local mode = (linked and lfs.attributes or lfs.symlinkattributes)(path, "mode")
  if not mode or mode == "file" then return true end
  return false, ("'%s' is %s, expected a regular file"):format(path, KINDS[mode] or "a " .. mode)
end

--- Whether two paths are there and lead to the same file or folder.
---@param a string
---@param b string
---@return boolean?
function M.same(a, b)
  local one, other = lfs.attributes(a), lfs.attributes(b)
  return one and other and one.dev == other.dev and one.ino == other.ino
end

--- io.open for a regular file. Reading follows symbolic links.
---@param path string
---@param mode string  as for io.open
---@return file*?
---@return string? err
function M.open(path, mode)
  local ok, err = M.check(path, mode:sub(1, 1) == "r")
  if not ok then return nil, err end
  return io.open(path, mode)
end

--- Opens a new file, to be renamed to `path` when it is complete. A regular file that has the path `temporary` already
--- is removed: a killed process has left it.
---@param path string
---@param temporary string  path of the new file
---@return file*?
---@return string? err
function M.create(path, temporary)
  local ok, err = M.check(path)
  if ok then ok, err = M.check(temporary) end
  if not ok then return nil, err end
  os.remove(temporary)
  return io.open(temporary, "wbx")                      -- fails if the name is taken meanwhile, also by a link
end

return M
