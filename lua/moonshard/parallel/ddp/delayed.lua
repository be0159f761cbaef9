-- SPDX-License-Identifier: MIT
--- DDP's option delay_all_reduce_named_params: parameters without a bucket. Their gradients are reduced together, in
--- one flat buffer for each dtype and device, when the gradient of param_to_hook_all_reduce has arrived
--- (docs/semantics.md#ddp-construction).
local buckets = require "moonshard.parallel.ddp.buckets"
local pieces = require "moonshard.dist.pieces"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local is_tensor = require "moonshard.tensor".is_tensor

local raise = errors.raise
local ipairs, type, setmetatable = ipairs, type, setmetatable

local M = {}

---@class Delayed
---@field params Parameter[]  the delayed parameters
---@field names string[]  their names, in the same order
---@field has table<Parameter, boolean>  the delayed parameters, as keys
---@field hook Parameter      the arrival of its gradient starts the reduction
---@field hook_name string  name of that parameter
---@field waiting boolean     a gradient has arrived since the last reduction
---@field launched boolean  the reduction of this backward has started
local Delayed = {}
Delayed.__index = Delayed

local function trainable(p, name, option, sparse)
  if not p.requires_grad then
    raise("DDP: %s: parameter '%s' is frozen, expected one that requires a gradient", option, name)
  end
  if sparse[p] then
    raise("DDP: %s: parameter '%s' belongs to a sparse embedding, whose gradient is complete only at the end of backward", option,
      name)
  end
end

--- Checks both options; returns nil if nothing is delayed. list: names, or pairs { name, parameter }. sparse:
--- parameters whose gradients are only complete at the end of backward.
---@param m Module  the wrapped module
---@param list (string|table)[]?  the option delay_all_reduce_named_params
---@param hook Parameter?  the option param_to_hook_all_reduce
---@return Delayed?
function M.resolve(m, list, hook, sparse)
  if (list == nil) ~= (hook == nil) then
    raise("DDP: options 'delay_all_reduce_named_params' and 'param_to_hook_all_reduce' must be given "
      .. "together: the gradients of the first are reduced when the gradient of the second has arrived")
  end
  if list == nil then return nil end
  local known, names = {}, {}
  for name, p in m:named_parameters() do
    known[name], names[p] = p, name
    names[#names + 1] = name
  end
  local self = setmetatable({ params = {}, names = {}, has = {}, waiting = false, launched = false }, Delayed)
  for k, entry in ipairs(list) do
    local option = ("delay_all_reduce_named_params[%d]"):format(k)
    local name, p = entry, nil
    if type(entry) == "table" and not is_tensor(entry) then name, p = entry[1], entry[2] end
    if type(name) ~= "string" then opts.wrong(entry, "a name or a pair {name, parameter}", "DDP: %s", option) end
    if not known[name] then raise("DDP: %s: %s", option, errors.unknown("parameter", name, names)) end
    if p ~= nil and p ~= known[name] then
      raise("DDP: %s: the parameter given with '%s' is not the module's parameter of that name", option, name)
    end
    p = known[name]
    if self.has[p] then raise("DDP: %s: '%s' is in the list twice", option, name) end
    trainable(p, name, option, sparse)
    self.params[k], self.names[k], self.has[p] = p, name, true
  end
  opts.need(is_tensor(hook) and names[hook], hook, "a parameter of the module",
    "DDP: option 'param_to_hook_all_reduce'")
  if #self.params == 0 then return nil end
  self.hook, self.hook_name = hook, names[hook]
  trainable(hook, self.hook_name, "param_to_hook_all_reduce", sparse)
  return self
end

--- Allocates one buffer per dtype and device. If memory runs out, there are no buffers afterwards.
function Delayed:prepare(dtype_of)
  local old = self.buckets
  self.buckets, self.dtype_of = {}, dtype_of
  buckets.free(old or {})
  self.buckets = buckets.build(pieces.assign(self.params, { math.huge }, dtype_of), dtype_of)
end

--- Called when the gradient of p, a delayed parameter or the hook parameter, has arrived; the latter starts the
--- reduction. Raises if the reduction of this backward has already started.
function Delayed:arrived(p, group, divisor)
  if self.launched then
    raise("DDP: the gradient of parameter '%s' arrived after the gradient of param_to_hook_all_reduce ('%s') and is not reduced; "
      .. "param_to_hook_all_reduce must be the parameter whose gradient arrives last", self:name_of(p), self.hook_name)
  end
  self.waiting = true
  if p ~= self.hook then return end
  self.launched = true
  for _, b in ipairs(self.buckets) do
    for k, q in ipairs(b.parameters) do b:take(k, q) end
    b:launch(group, divisor)
  end
end

function Delayed:name_of(p)
  for k, q in ipairs(self.params) do
    if q == p then return self.names[k] end
  end
  return self.hook_name
end

--- Waits for the reduction and copies the results to the gradients.
function Delayed:finish()
  for _, b in ipairs(self.buckets) do
    b:finish()
    for k in ipairs(b.parameters) do b:give(k) end
  end
end

--- Resets the state for the next backward.
function Delayed:forget()
  for _, b in ipairs(self.buckets) do b:reset() end
  self.waiting, self.launched = false, false
end

return M
