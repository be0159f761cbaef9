-- SPDX-License-Identifier: MIT
--- Opens pages in Debian's Chromium without a display.
local process = require "spec.support.process"

local M = {}

M.is_there = os.execute "command -v chromium >/dev/null 2>&1" == 0

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

--- The elements of a page after its script ran, and what was written to the console.
---@param path string  of the file, absolute
---@param more? string  options of Chromium
---@return string dom
---@return string console
function M.open(path, more)
  local folder = os.tmpname() .. ".chromium"
  -- Chromium does not run with a sanitizer's library.
  local command = ("cd / && unset LD_PRELOAD && HOME=%s timeout 120 chromium --headless --no-sandbox --disable-gpu "
    .. "--disable-dev-shm-usage --user-data-dir=%s --enable-logging=stderr --window-size=1280,1600 %s --dump-dom %s "
    .. ">%s.out 2>%s.err")
    :format(folder, folder, more or "", quoted("file://" .. path), folder, folder)
  os.execute("mkdir -p " .. folder .. " && " .. command)
  local dom, log, console = process.read(folder .. ".out"), process.read(folder .. ".err"), {}
  os.execute(("rm -rf %s %s.out %s.err"):format(folder, folder, folder))
  for line in log:gmatch "[^\n]+" do
    if line:find("CONSOLE", 1, true) then console[#console + 1] = line end
  end
  return dom, table.concat(console, "\n")
end

return M
