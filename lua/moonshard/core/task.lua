-- SPDX-License-Identifier: MIT
--- Reports the progress of long operations of the library (such as saving, loading and reading text) to the script's
--- progress line. Without a progress line, nothing is printed.
local M = {}

local shown

--- Sets the function that shows reports; nil: none.
---@param fn? fun(what: string, done: integer, total: integer)
function M.shown_by(fn) shown = fn end

--- Reports that `done` of `total` parts are done; with done == total the operation has ended.
---@param what string  the operation, such as "saving"
---@param done integer  from 0
---@param total integer
function M.report(what, done, total)
  if shown then shown(what, done, total) end
end

return M
