-- SPDX-License-Identifier: MIT
--- What to write for files of tensors that ms.load does not read.
local read_json = require("moonshard.core.json").decode

local M = {}

local PART = 16 * 1024 * 1024                             -- an index or the directory of a zip archive is not larger

-- The first and last bytes of a file, at most PART each.
local function ends_of(path)
  local file = io.open(path, "rb")
  if not file then return "", "" end
  local first = file:read(PART) or ""
  file:seek("set", math.max(0, (file:seek "end" or 0) - PART))
  local last = file:read(PART) or ""
  file:close()
  return first, last
end

-- For the index of files of torch.save, JSON that lists the tensors of each.
local function of_index(text)
  local ok, index = pcall(read_json, text)
  if not ok or type(index) ~= "table" or type(index.weight_map) ~= "table" then return nil end
  local seen, names = {}, {}
  for _, name in pairs(index.weight_map) do
    if type(name) == "string" and not seen[name] then seen[name], names[#names + 1] = true, name end
  end
  table.sort(names)
  return ("is the index of a model in several files; write all = {} and, for each of its %d files, after scripts/convert "
    .. "of each, for name, t in pairs(ms.load(FILE)) do all[name] = t end; the first is '%s'"):format(#names,
    names[1] or "FILE")
end

--- What to write for a file; nil if its format is not known.
---@param path string
---@return string?  text that follows the path, such as "is a file of torch.save; ..."
function M.advice(path)
  local first, last = ends_of(path)
  if first:find "^%s*{" or first:sub(1, 3) == "\239\187\191" then return of_index(first) end
  if first:sub(1, 6) == "\147NUMPY" then return "is an array of NumPy; write ms.data.read_npy(path)" end
  if first:sub(1, 2) == "\128\2" then
    return "is a file of torch.save; `scripts/convert FILE out.safetensors` writes its tensors for ms.load"
  end
  if first:sub(1, 4) == "GGUF" then return "is a GGUF file, which ms.load does not read" end
  if first:sub(1, 8) == "\137HDF\r\n\26\n" then return "is an HDF5 file, which ms.load does not read" end
  if first:sub(1, 4) ~= "PK\3\4" then return nil end
  -- The names in the directory at the archive's end tell the kinds of zip archives apart.
  if last:find("/code/", 1, true) then
    return "is a TorchScript program; in PyTorch, write torch.save(torch.jit.load(FILE).state_dict(), 'new.pt'), then "
      .. "`scripts/convert new.pt out.safetensors`"
  end
  if last:find(".npy", 1, true) and not last:find("data.pkl", 1, true) then
    return "is an archive of NumPy; write ms.data.read_npz(path)"
  end
  return "is a file of torch.save; `scripts/convert FILE out.safetensors` writes its tensors for ms.load"
end

return M
