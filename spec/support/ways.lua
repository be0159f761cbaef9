-- SPDX-License-Identifier: MIT
--- Ways to shard a model, as functions way(m, given) that return the sharded model. paths: the modules inside of it
--- that become units of their own; options: a table, or a function that returns it; given: more options.
local load = require "spec.support.load"

local M = {}

local function together(options, given)
  local all = {}
  for _, list in ipairs { type(options) == "function" and options() or options or {}, given or {} } do
    for name, value in pairs(list) do all[name] = value end
  end
  return all
end

---@return fun(m: Module, given?: table): Module
function M.fully_shard(paths, options)
  return function(m, given)
    local _, _, _, fsdp = load()
    local o = together(options, given)
    for _, path in ipairs(paths) do fsdp.fully_shard(m:get_submodule(path), o) end
    return fsdp.fully_shard(m, o)
  end
end

---@return fun(m: Module, given?: table): Module
function M.FSDP(paths, options)
  return function(m, given)
    local _, _, _, fsdp = load()
    local o = together(options, given)
    for _, path in ipairs(paths) do
      local above, name = path:match "^(.-)%.?([^.]+)$"
      local parent = above == "" and m or m:get_submodule(above)
      parent[tonumber(name) or name] = fsdp.FSDP(m:get_submodule(path), o)
    end
    return fsdp.FSDP(m, o)
  end
end

--- Runs fn while a switch of a module that fully_shard has sharded is off, such as "set_requires_gradient_sync".
function M.without(m, switch, fn)
  m[switch](m, false)
  local ok, why = pcall(fn)
  m[switch](m, true)
  if not ok then error(why, 0) end
end

return M
