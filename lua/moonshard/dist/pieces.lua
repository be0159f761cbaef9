-- SPDX-License-Identifier: MIT
--- Splits tensors into lists of one dtype and device each, and broadcasts tensors in such lists.
local dist = require "moonshard.dist"
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local shape = require "moonshard.tensor.shape"

local M = {}

local MIB = 1024 * 1024
local function size_of(dtype) return engine.lib.ms_dtype_size(dtypes.number(dtype)) end

--- Splits parameters into lists, in the given order. All parameters of a list have the same device and dtype_of(p), the
--- dtype of the list's flat buffer (default: p's dtype). A list ends when it reaches its limit in bytes. limits: the
--- limit of the first list of each dtype and device, then that of later lists.
---@param params Parameter[]
---@param limits number[]
---@param dtype_of? fun(p: Parameter): string
---@return Parameter[][]
function M.assign(params, limits, dtype_of)
  local closed, open = {}, {}
  local kinds, at = {}, {}
  for _, p in ipairs(params) do
    local dtype = dtype_of and dtype_of(p) or p.dtype
    local kind = dtype .. p.device
    if not open[kind] then
      if not at[kind] then
        at[kind] = 1
        kinds[#kinds + 1] = kind
      end
      open[kind] = { bytes = 0 }
    end
    local list = open[kind]
    list[#list + 1] = p
    list.bytes = list.bytes + p:numel() * size_of(dtype)
    if list.bytes >= limits[math.min(at[kind], #limits)] then
      closed[#closed + 1] = list
      at[kind], open[kind] = at[kind] + 1, nil
    end
  end
  for _, kind in ipairs(kinds) do closed[#closed + 1] = open[kind] end
  return closed
end

--- Broadcasts tensors from one rank of the group (default: its first), packed into messages of one dtype. A message
--- ends with the tensor with which it reaches `limit` bytes (default: 250 MiB).
---@param tensors Tensor[]
---@param group Group?
---@param limit? number
---@param src? integer  rank in the world
function M.broadcast(tensors, group, limit, src)
  src = src or dist.group_ranks(group)[1]
  local receives = dist.rank() ~= src
  local some = {}
  for _, t in ipairs(tensors) do
    if t:numel() > 0 then some[#some + 1] = t end
  end
  for _, list in ipairs(M.assign(some, { limit or 250 * MIB })) do
    local parts = {}
    for k, t in ipairs(list) do parts[k] = t:detach():reshape(-1) end
    local flat = #parts == 1 and parts[1]:is_contiguous() and list[1]:is_contiguous() and parts[1]
      or shape.cat(parts, 1)
    dist.broadcast(flat, { src = src, group = group })
    if receives and flat ~= parts[1] then
      local at = 1
      for k, t in ipairs(list) do
        t:detach():copy_(flat:narrow(1, at, parts[k]:numel()):view(t.shape))
        at = at + parts[k]:numel()
      end
    end
  end
end

M.MIB = MIB

return M
