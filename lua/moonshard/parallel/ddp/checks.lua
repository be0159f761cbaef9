-- SPDX-License-Identifier: MIT
--- Checks before DDP wraps a module: all parameters are on one type of device and have equal shapes on all ranks
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

--- Raises unless the number, shapes and dtypes of parameters on every rank equal those on the group's first rank.
function M.same_model(params, group)
  local mine = {}
  for k, p in ipairs(params) do mine[k] = tostring(p.shape) .. " " .. p.dtype end
  local all = dist.all_gather_object(mine, { group = group })
  for r = 2, #all do
    if #all[r] ~= #all[1] then
      raise("DDP expects same model across all ranks, but Rank %d has %d params, while rank 0 has inconsistent %d params.", r - 1, #all[r], #all[1])
    end
    for k, text in ipairs(all[r]) do
      if text ~= all[1][k] then
        local sizes, dtype = text:match "^(.*) (%S+)$"
        local what = "sizes " .. sizes
        if all[1][k]:sub(1, #sizes + 1) == sizes .. " " then what = "dtype " .. dtype end
        raise("[%d]: params[%d] in this process with %s appears not to match %s of the same param in process 0.", r - 1,
          k, what, what:match "^%a+")
      end
    end
  end
end

return M
