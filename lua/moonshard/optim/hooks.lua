-- SPDX-License-Identifier: MIT
--- Hooks around an optimizer's step.
local capture = require "moonshard.autograd.capture"
local listing = require "moonshard.core.listing"
local opts = require "moonshard.core.opts"
local Optimizer = require "moonshard.optim.optimizer".Optimizer

local M = {}

---@class OptimizerHandle
local Handle = { __name = "Handle" }
Handle.__index = Handle

-- Lists of hooks are replaced, never changed, so that a hook may register and remove hooks while they run.
local function replace(self, list, hooks)
  self[list] = #hooks > 0 and hooks or nil
  self._hooked = (self._pre_step or self._post_step) and true or nil
end

--- Removes the hook. Idempotent.
function Handle:remove()
  local left = {}
  for _, hook in ipairs(self.optimizer[self.list] or {}) do
    if hook ~= self.hook then left[#left + 1] = hook end
  end
  replace(self.optimizer, self.list, left)
end

local function register(self, list, who, fn)
  opts.expect(fn, opts.fn, "%s: hook", who)
  local hook, hooks = { fn = fn }, listing.copy(self[list] or {})
  hooks[#hooks + 1] = hook
  replace(self, list, hooks)
  return setmetatable({ optimizer = self, list = list, hook = hook }, Handle)
end

--- Registers fn(optimizer, closure), called before a step. What fn returns, if anything, replaces the closure.
---@param fn fun(optimizer: Optimizer, closure: function?): function?  the hook
---@return OptimizerHandle  handle:remove() removes the hook
function Optimizer:register_step_pre_hook(fn) return register(self, "_pre_step", "register_step_pre_hook", fn) end

--- Registers fn(optimizer, closure), called after a step.
---@param fn fun(optimizer: Optimizer, closure: function?)  the hook
---@return OptimizerHandle  handle:remove() removes the hook
function Optimizer:register_step_post_hook(fn) return register(self, "_post_step", "register_step_post_hook", fn) end

local function hooked(step, self, closure)
  local first = (self._pre_step or self._post_step)[1]
  capture.refuse_hook(("a step hook of %s"):format(self:class_name()), first.fn)
  for _, hook in ipairs(self._pre_step or {}) do closure = hook.fn(self, closure) or closure end
  local result = step(self, closure)
  for _, hook in ipairs(self._post_step or {}) do hook.fn(self, closure) end
  return result
end

--- Makes the hooks run around a class's own step.
function M.around(cls)
  local step = cls.step
  function cls:step(closure)
    if self._hooked then return hooked(step, self, closure) end
    return step(self, closure)
  end
  opts.original[cls.step] = opts.original[step] or step
end

return M
