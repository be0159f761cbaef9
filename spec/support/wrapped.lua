-- SPDX-License-Identifier: MIT
--- The golden models wrapped in fsdp.FSDP, for specs: every unit of a model's definition, and the root.
local M = {}

--- Replaces every module of the list, innermost first, by the result of wrap(module).
function M.replace(model, modules, wrap)
  for _, target in ipairs(modules) do
    for _, m in ipairs(model:modules()) do
      for name, child in m:named_children() do
        if child == target then m[tonumber(name) or name] = wrap(child) end
      end
    end
  end
end

--- Wraps the units of def's model, and then the model, with the same options. Returns the root.
function M.fsdp(def, model, options)
  local fsdp = require "moonshard.parallel.fsdp"
  M.replace(model, def.units(model), function(m) return fsdp.FSDP(m, options) end)
  return fsdp.FSDP(model, options)
end

--- Loads Moonshard in the calling process; returns ms, ms.nn, ms.fsdp, ms.dist and M.quietly for a spec of FSDP.
function M.load()
  local ms = require "moonshard"
  return ms, ms.nn, ms.fsdp, ms.dist, M.quietly
end

--- Calls fn without printing warnings, such as those about strategies in a world of one rank and about no_shard.
function M.quietly(fn, ...)
  local ms = require "moonshard"
  local function rest(_, ...) return ... end
  return rest(ms.catch_warnings(fn, ...))
end

return M
