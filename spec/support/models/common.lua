-- SPDX-License-Identifier: MIT
--- Common parts of the models in this folder, most of which come from PyTorch's FSDP test suites. Their classes have
---   model:get_input(device) -> array of tensors: equal at every call, different on every rank (except in
---     TransformerWithSharedParams)
---   model:get_loss(input, output), model:run_backward(loss)
--- and each file's `init(group, fsdp_init_mode, device_init_mode, given)` builds one. fsdp_init_mode: "no_fsdp" or
--- "recursive"; device_init_mode: "before" (moved to the device, then wrapped), "after" (the caller moves it) or
--- "never"; given: fsdp (options of fsdp.FSDP), deterministic (seeded with 0), device (default: the default device) and
--- the model's own options.
local ms = require "moonshard"
local wrapped = require "spec.support.wrapped"
local dist = ms.dist

local M = {}

function M.check_mode(mode)
  if mode ~= "no_fsdp" and mode ~= "recursive" then
    error(("Unsupported FSDP init mode: %s"):format(tostring(mode)), 2)
  end
  return mode == "recursive"
end

--- The group of ranks on which the model's input depends: the first of a pair {shard, replicate}.
function M.first_group(group)
  if type(group) == "table" and not dist.is_group(group) then return group[1] end
  return group
end

function M.rank_of(self, o)
  self.rank = dist.rank(M.first_group(o.group))
  self.world_size = dist.world_size(M.first_group(o.group))
end

--- The first part of the constructor of a model that wraps itself: sets self.rank and self.world_size, and seeds the
--- generator if o.deterministic.
function M.begin(self, o)
  M.rank_of(self, o)
  if o.deterministic then ms.manual_seed(0) end
end

--- Moves m to its device if the mode is "before": m is then wrapped there.
function M.place(m, o)
  if o.device_init_mode == "before" then return m:to(o.device or ms.default_device()) end
  return m
end

--- Options of fsdp.FSDP for a unit of the model: o.fsdp, with o.group unless o.fsdp has a group or a device mesh.
function M.fsdp_options(o)
  local options = { process_group = o.group }
  for key, value in ms.sorted_pairs(o.fsdp or {}) do options[key] = value end
  if options.device_mesh then options.process_group = nil end
  return options
end

--- Returns a function wrap(m, group), which returns m, or m in a unit of its own if the model is wrapped. Over a given
--- group the unit has strategy full_shard instead of a hybrid one.
function M.wrapper(o)
  if not o.wrap_fsdp then return function(m) return m end end
  return function(m, group)
    local options = M.fsdp_options(o)
    if group then
      options.process_group, options.device_mesh = group, nil
      if (options.sharding_strategy or ""):find "^hybrid" then options.sharding_strategy = "full_shard" end
    end
    return ms.fsdp.FSDP(m, options)
  end
end

--- The model's options from init's arguments.
function M.options(group, fsdp_init_mode, device_init_mode, given)
  local o = { group = group, wrap_fsdp = M.check_mode(fsdp_init_mode), device_init_mode = device_init_mode }
  if device_init_mode ~= "before" and device_init_mode ~= "after" and device_init_mode ~= "never" then
    error(("Unsupported device init mode: %s"):format(tostring(device_init_mode)), 2)
  end
  for key, value in ms.sorted_pairs(given or {}) do o[key] = value end
  return o
end

--- The init of a model that does not wrap itself: build(o) makes it, units(model) lists the modules to wrap, innermost
--- first.
function M.init_of(build, units)
  return function(...)
    local o = M.options(...)
    if o.deterministic then ms.manual_seed(0) end
    local model = M.place(build(o), o)
    M.rank_of(model, o)
    if o.wrap_fsdp then wrapped.replace(model, units(model), M.wrapper(o)) end
    return model
  end
end

--- Gives a class an input of uniform numbers, and as loss the sum of its output, or of both outputs.
function M.sum_model(class, shape)
  function class.get_input(self, device)
    ms.manual_seed(1 + self.rank)
    return { ms.rand(shape, { device = device }) }
  end
  function class.get_loss(_, _, output, second) return second and output:sum() + second:sum() or output:sum() end
  function class.run_backward(_, loss) loss:backward() end
end

return M
