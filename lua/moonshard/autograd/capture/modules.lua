-- SPDX-License-Identifier: MIT
--- Modules in captured steps (ms.capture). A repetition does not run a module's forward, so the module must be as it was
--- when the step was recorded: its mode, its parameters, buffers and children, and the plain values in its fields.
local capture = require "moonshard.autograd.capture"
local errors = require "moonshard.core.errors"

local M = {}

local plain = { number = true, string = true, boolean = true }

local function show(v) return type(v) == "table" and "was replaced" or "was changed to " .. errors.show(v) end

local function changed(m, name, value)
  errors.raise("captured step: field '%s' of %s %s after the step was recorded; capture the step again, or change it back",
    tostring(name), m:class_name(), show(value))
end

local function element_changed(m, k) changed(m, k, rawget(m, k)) end

local function note(m, list)
  local slots, kinds, fields = rawget(m, "_slots"), rawget(m, "_kind"), {}
  for name, value in pairs(slots) do
    if plain[type(value)] or kinds[name] then fields[name] = value end
  end
  list.touched(function()
    for name, value in pairs(fields) do
      if not rawequal(slots[name], value) then changed(m, name, slots[name]) end
    end
    for name, value in pairs(slots) do
      if fields[name] == nil and (plain[type(value)] or kinds[name]) then changed(m, name, value) end
    end
  end)
  -- An assignment to an existing element of a container does not call __newindex, so each element is checked.
  for k = 1, #m > 0 and #m + 1 or 0 do list.element(m, k, element_changed) end
end

local seen = setmetatable({}, { __mode = "k" })
capture.on_change(function() seen = setmetatable({}, { __mode = "k" }) end)

--- Notes a module's mode and fields for the check before repetitions. Called at each call of a module while a step is
--- recorded.
---@param m Module
function M.note(m)
  if seen[m] then return end
  seen[m] = true
  capture.note(m, note)
end

--- Refuses to capture the step that is being recorded if the module, which it calls, has hooks in Lua.
---@param m Module
function M.refuse_hooks(m)
  for _, list in ipairs { { "_pre", "a forward pre-hook" }, { "_post", "a forward hook" },
    { "_back", "a full backward hook" }, { "_before", "a full backward pre-hook" } } do
    local hooks = m[list[1]]
    if hooks and hooks[1] then capture.refuse_hook(("%s of %s"):format(list[2], m:class_name()), hooks[1].fn) end
  end
end

return M
