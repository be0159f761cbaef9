-- SPDX-License-Identifier: MIT
--- report.html: the run's metrics, media and configuration in one file. The page (report.html beside this file) reads
--- the lines of metrics.jsonl and media.jsonl, which it contains as they are; of a very long run, a part of them.
local base64 = require "moonshard.core.base64"
local cjson = require "cjson"
local read_json = require("moonshard.core.json").decode
local environment = require "moonshard.run.environment"
local lfs = require "lfs"
local lib = require("moonshard.core.ffi").lib
local page = require "moonshard.run.page"
local regular = require "moonshard.io.regular"

local M = {}

local PAGE = debug.getinfo(1, "S").source:match "^@(.*)%.lua$" .. ".html"
local IMAGES = 32                                       -- the page contains at most this many images, the latest
local METRICS, MEDIA = 32 * 2 ^ 20, 8 * 2 ^ 20          -- the page contains at most about this many bytes of each file

local function read(path)
  local file = regular.open(path, "rb")
  local text = file and file:read "*a" or ""
  if file then file:close() end
  return text
end

local function size_of(path) return lfs.attributes(path, "size") or 0 end

-- The lines of metrics.jsonl. If there are too many, every k-th line, and every line with the step of the line before,
-- because scripts log the validation loss in such lines. Returns k, too.
local function metrics_of(path)
  local name = path .. "/metrics.jsonl"
  local every = math.ceil(size_of(name) / METRICS)
  if every <= 1 then return read(name), 1 end
  local list, at, before = {}, 0, nil
  for line in io.lines(name) do
    local step = line:match '^{"step": (%d+)'
    at = at + 1
    if at % every == 0 or step == before then list[#list + 1] = line end
    before = step
  end
  return table.concat(list, "\n"), every
end

-- The lines of media.jsonl; only the last ones if the file is long.
local function media_of(path)
  local file = regular.open(path .. "/media.jsonl", "rb")
  if not file then return "" end
  local skip = size_of(path .. "/media.jsonl") - MEDIA
  if skip > 0 then
    file:seek("set", skip)
    file:read "*l"
  end
  local text = file:read "*a"
  file:close()
  return text or ""
end

local function images_of(path, media)
  local list, images = {}, {}
  for line in media:gmatch "[^\n]+" do
    if line:find('"kind": "image"', 1, true) then
      local ok, m = pcall(read_json, line)
      if ok and type(m.file) == "string" then list[#list + 1] = m.file end
    end
  end
  for k = math.max(1, #list - IMAGES + 1), #list do
    local bytes = list[k]:find "^images/[^/]+%.png$" and read(path .. "/" .. list[k]) or ""
    if bytes ~= "" then images[list[k]] = base64.encode(bytes) end
  end
  return images
end

--- Writes report.html of a run's folder. Returns its path, or nil and the reason.
---@param path string  path of the folder
---@return string? file
---@return string? err
function M.write(path)
  local ok, config = pcall(read_json, read(path .. "/config.json"))
  if not ok or type(config) ~= "table" then config = {} end
  local media = media_of(path)
  local metrics, every = metrics_of(path)
  local own = { name = path:match "([^/]+)/*$" or path, facts = { "sessions", unpack(environment.names) }, every = every }
  local written, err = page.write(path .. "/report.html", PAGE, {
    config = page.safe(cjson.encode { config = config, own = own }), images = cjson.encode(images_of(path, media)),
    media = page.safe(media), metrics = page.safe(metrics),
  })
  if not written then return nil, err end
  return path .. "/report.html"
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
