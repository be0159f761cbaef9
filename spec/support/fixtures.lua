-- SPDX-License-Identifier: MIT
--- Files of other programs (spec/data/fixtures), read by the library, also in damaged copies.
local cjson = require "cjson"
local ffi = require "ffi"
local ms = require "moonshard"
local log = require "moonshard.core.log"
local process = require "spec.support.process"

local fixtures = { folder = process.root .. "/spec/data/fixtures/files" }

--- By name of a file: `reader`, `options`, `result`, `tolerance`, and whether its format has `checksums`.
fixtures.expected = cjson.decode(process.read(fixtures.folder .. "/expected.json"))

--- What a reader of the library gives for a file. Warnings are discarded.
---@param reader string  a function of ms.data, or "load"
---@param path string
---@param options? table
---@return any
function fixtures.read(reader, path, options)
  local fn = reader == "load" and ms.load or ms.data[reader]
  return select(2, log.catch_warnings(function()
    if reader == "read_npy" or reader == "read_idx" or reader == "read_lines" or reader == "read_wav" then
      return (fn(path))
    end
    return (fn(path, options))
  end))
end

--- A text that is equal for equal results: tensors by dtype, shape and bytes.
---@param value any
---@return string
function fixtures.bytes(value)
  if ms.is_tensor(value) then
    local t = value:contiguous()
    local n = t:numel() * t:element_size()
    local bytes = n > 0 and ffi.string(ffi.cast("const char *", t:data_ptr()), n) or ""
    return ("%s %s %s"):format(t.dtype, tostring(t.shape), bytes)
  end
  if type(value) ~= "table" then return type(value) .. tostring(value) end
  local names, parts = {}, {}
  for name in pairs(value) do names[#names + 1] = name end
  table.sort(names, function(a, b) return tostring(a) < tostring(b) end)
  for k, name in ipairs(names) do parts[k] = tostring(name) .. "=" .. fixtures.bytes(value[name]) end
  return "{" .. table.concat(parts, ";") .. "}"
end

--- Calls fn(what, text) for damaged copies of a text: cut at every 7th byte; every 11th byte with all bits or the
--- lowest one flipped.
---@param text string
---@param fn fun(what: string, text: string)
function fixtures.damage(text, fn)
  for n = 0, #text - 1, 7 do fn(("cut after %d bytes"):format(n), text:sub(1, n)) end
  for at = 1, #text, 11 do
    for _, mask in ipairs { 255, 1 } do
      local c = string.char(bit.bxor(text:byte(at), mask))
      fn(("byte %d xor %d"):format(at, mask), text:sub(1, at - 1) .. c .. text:sub(at + 1))
    end
  end
end

-- The files that the library itself writes.
local function write_own(folder)
  ms.data.write_png(folder .. "/own.png", (ms.arange(0, 63):reshape(3, 3, 7) * 4):to "uint8")
  local model = { w = ms.arange(0, 8):reshape(2, 4), b = ms.ones(3) }
  ms.save(folder .. "/own.safetensors", { model = model, epoch = 3 })
  return { ["own.png"] = { reader = "read_image", checksums = true },
    ["own.safetensors"] = { reader = "load", checksums = true } }
end

--- Reads damaged copies of all files. Returns a list of the faults, as texts, and the number of copies that were read:
--- an error that does not name the file, or is one of Lua; where the format has checksums, a changed value.
---@param folder string  for the copies
---@return string[] faults
---@return integer count
function fixtures.sweep(folder)
  local faults, count, own = {}, 0, write_own(folder)
  local function file(name, e, text)
    local path = folder .. "/copy-" .. name
    local function result(copy)
      os.remove(path)                                     -- ext4 flushes a file that is cut and written again
      process.write(path, copy)
      return pcall(function() return fixtures.bytes(fixtures.read(e.reader, path, e.options)) end)
    end
    local ok, right = result(text)
    assert(ok, right)
    fixtures.damage(text, function(what, copy)
      count = count + 1
      local read, got = result(copy)
      local unclear = not read and (not got:find(path, 1, true) or got:find "attempt to" or got:find "bad argument")
      local bad = unclear or read and e.checksums and got ~= right
      if bad then faults[#faults + 1] = ("%s, %s: %s"):format(name, what, read and "other values" or got) end
    end)
    os.remove(path)
  end
  for name, e in pairs(fixtures.expected) do
    if e.damage and e.reader ~= "convert" then file(name, e, process.read(fixtures.folder .. "/" .. name)) end
  end
  for name, e in pairs(own) do file(name, e, process.read(folder .. "/" .. name)) end
  return faults, count
end

return fixtures
