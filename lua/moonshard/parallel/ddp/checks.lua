-- SPDX-License-Identifier: MIT
--- Checks before DDP wraps a module: all parameters are on one type of device, and the models of all ranks are alike
--- (docs/semantics.md#ddp-construction).
local dist = require "moonshard.dist"
local raise = require "moonshard.core.errors".raise

local M = {}

--- Raises unless all parameters are on one type of device, which must not be meta.
function M.devices(params)
  local kinds, seen = {}, {}
  for _, p in ipairs(params) do
    local kind = p.device:match "^%a+"
    if not seen[kind] then
      seen[kind] = true
      kinds[#kinds + 1] = kind
    end
  end
  table.sort(kinds)
  if #kinds > 1 then
    raise("DistributedDataParallel's input module must be on the same type of devices, but input module parameters locate in ['%s'].",
      table.concat(kinds, "', '"))
  end
  if seen.meta then
    raise("DDP: the module is on the meta device; initialize its parameters first (to_empty, then reset_parameters)")
  end
end

-- Raises if a rank's list of parameters or buffers differs from that of the group's first rank. An entry: name, sizes,
-- dtype, and whether it is trained, frozen or delayed.
local function compare(all, kind)
  local first = all[1][kind]
  for r = 2, #all do
    local mine = all[r][kind]
    if #mine ~= #first then
      raise("DDP expects same model across all ranks, but Rank %d has %d %s, while rank 0 has inconsistent %d %s.", r - 1, #mine, kind, #first, kind)
    end
    for k, entry in ipairs(mine) do
      local other = first[k]
      if entry[1] ~= other[1] then
        raise("DDP expects same model across all ranks, but on Rank %d %s[%d] is '%s', and on rank 0 '%s'; all ranks must register the same names in the same order.",
          r - 1, kind, k, entry[1], other[1])
      end
      local what = entry[2] ~= other[2] and "sizes " .. entry[2] or entry[3] ~= other[3] and "dtype " .. entry[3]
      if what then
        raise("[%d]: %s[%d] in this process with %s appears not to match %s of the same %s in process 0.", r - 1, kind,
          k, what, what:match "^%a+", kind:sub(1, -2))
      end
      if entry[4] ~= other[4] then
        raise("DDP expects same model across all ranks, but parameter '%s' is %s on Rank %d, and %s on rank 0.",
          entry[1], entry[4], r - 1, other[4])
      end
    end
  end
end

--- Raises on every rank unless the parameters and buffers of all ranks are alike. Collective.
---@param params string[][]  an entry each: name, sizes, dtype, and "trained", "frozen" or "delayed"
---@param buffers string[][]  the same, without the last
---@param group Group?
function M.same_model(params, buffers, group)
  local all = dist.all_gather_object({ params = params, buffers = buffers }, { group = group })
  compare(all, "params")
  compare(all, "buffers")
end

return M
