-- SPDX-License-Identifier: MIT
--- Pages (HTML) that need no network: a common head with colours for light, dark and print, followed by a template in
--- which @name@ stands for a part.
local ffi = require "ffi"
local regular = require "moonshard.io.regular"

ffi.cdef "int moonshard_page_self(void) __asm__(\"getpid\");"

local M = {}

local here = debug.getinfo(1, "S").source:match "^@(.*)/[^/]*$"

local function read(path)
  local file, err = io.open(path, "rb")
  local text = file and file:read "*a"
  if file then file:close() end
  if text then return text end
  error(("cannot read '%s'"):format(err or path), 0)
end

--- JSON for a script element. It contains "<" only in strings, and with "<" escaped no text can end the element.
---@param json string
---@return string
function M.safe(json) return (json:gsub("<", "\\u003c")) end

--- Calls put with each piece of a page, in order.
---@param template string  path of the template; it begins inside the head's style element
---@param parts table<string, string>  the texts for the names in the template
---@param put fun(piece: string)
local function pieces(template, parts, put)
  local text, at = read(here .. "/page.html") .. read(template), 1
  for from, name, after in text:gmatch "()@(%l+)@()" do
    if parts[name] then
      put(text:sub(at, from - 1))
      put(parts[name])
      at = after
    end
  end
  put(text:sub(at))
end

--- A page as text.
---@param template string  path of the template
---@param parts table<string, string>
---@return string
function M.text(template, parts)
  local list = {}
  pieces(template, parts, function(piece) list[#list + 1] = piece end)
  return table.concat(list)
end

--- Writes a page; replaces an existing file atomically. Returns true, or nil and the reason.
---@param path string
---@param template string  path of the template
---@param parts table<string, string>
---@return true?
---@return string? err
function M.write(path, template, parts)
  -- Each process has its own temporary file, because run.report may write a page while the run writes it, too.
  local temporary = ("%s.%d.tmp"):format(path, ffi.C.moonshard_page_self())
  local file, err = regular.create(path, temporary)
  if not file then return nil, err end
  local ok, why = pcall(pieces, template, parts, function(piece) assert(file:write(piece)) end)
  local closed, close_err = file:close()
  if ok then ok, why = closed, close_err end
  if ok then ok, why = os.rename(temporary, path) end
  if ok then return true end
  os.remove(temporary)
  return nil, tostring(why)
end

return M
