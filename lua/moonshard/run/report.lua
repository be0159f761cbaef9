-- SPDX-License-Identifier: MIT
--- report.html: the run's metrics, media and configuration in one file. The page (report.html beside this file) reads
--- the lines of metrics.jsonl and media.jsonl, which it contains as they are.
local base64 = require "moonshard.run.base64"
local cjson = require "cjson"
local folders = require "moonshard.run.folder"
local lib = require("moonshard.core.ffi").lib

local M = {}

local PAGE = debug.getinfo(1, "S").source:match "^@(.*)%.lua$" .. ".html"
local IMAGES = 32                                       -- the page contains at most this many images, the latest

local function read(path)
  local file = io.open(path, "rb")
  local text = file and file:read "*a" or ""
  if file then file:close() end
  return text
end

-- JSON contains "<" only in strings. With "<" escaped, no text can end the script element.
local function safe(json) return (json:gsub("<", "\\u003c")) end

local function images_of(path)
  local list, images = {}, {}
  if read(path .. "/media.jsonl") ~= "" then
    for m in folders.lines(path .. "/media.jsonl") do
      if m.kind == "image" and type(m.file) == "string" then list[#list + 1] = m.file end
    end
  end
  for k = math.max(1, #list - IMAGES + 1), #list do
    local bytes = list[k]:find "^images/[^/]+%.png$" and read(path .. "/" .. list[k]) or ""
    if bytes ~= "" then images[list[k]] = base64(bytes) end
  end
  return images
end

--- Writes report.html of a run's folder. Returns its path, or nil and the reason.
---@param path string  path of the folder
---@return string? file
---@return string? err
function M.write(path)
  local ok, config = pcall(cjson.decode, read(path .. "/config.json"))
  if not ok or type(config) ~= "table" then config = {} end
  config.report_name = path:match "([^/]+)/*$" or path
  local parts = {
    config = safe(cjson.encode(config)), images = cjson.encode(images_of(path)),
    media = safe(read(path .. "/media.jsonl")), metrics = safe(read(path .. "/metrics.jsonl")),
  }
  local page = read(PAGE)
  if page == "" then return nil, ("cannot read '%s'"):format(PAGE) end
  local name = path .. "/report.html"
  local file, err = io.open(name .. ".tmp", "wb")
  if not file then return nil, err end
  local at, written = 1, true
  for from, key, after in page:gmatch "()@(%l+)@()" do
    if parts[key] then
      written = written and file:write(page:sub(at, from - 1), parts[key])
      at = after
    end
  end
  written = written and file:write(page:sub(at))
  if not (file:close() and written) then return nil, ("cannot write '%s'"):format(name) end
  ok, err = os.rename(name .. ".tmp", name)
  if not ok then return nil, err end
  return name
end

local INTERVAL, SHARE = 15, 1 / 200    -- seconds between reports; the part of a run's time that they may take

--- Writes the report. Returns the time at which the next one is due and, if this one was not written, the reason.
---@param path string  path of the folder
---@return number next
---@return string? err
function M.update(path)
  local began = lib.ms_time()
  local _, err = M.write(path)
  local now = lib.ms_time()
  return now + math.max(INTERVAL, (now - began) / SHARE), err
end

return M
