-- SPDX-License-Identifier: MIT
--- Selects the submodules of a module that become separate FSDP instances (docs/semantics.md#wrapping).
---
--- There are two kinds of policy. A function `fn(module, recurse, remaining)` is first called with recurse = true; if
--- it returns false, the module and its children are left out. Otherwise it is called again after the children, except
--- for the root, to decide whether to wrap the module (remaining: how many elements of its parameters are not wrapped
--- yet). If mixed precision excludes classes, all children are visited, and both calls follow them. A policy object
--- (module_wrap_policy, custom_policy) selects all modules to wrap at once, with their options.
local context = require "moonshard.core.context"
local class = require "moonshard.core.class"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local attention = require "moonshard.nn.attention.attention"
local batch_norm = require "moonshard.nn.norm.batch_norm"
local containers = require "moonshard.nn.module.containers"
local opts = require "moonshard.core.opts"
local a_module = require("moonshard.nn.module.register").a_module

local raise, modes = errors.raise, context.now

local M = {}                            -- the public table

-- ---- policies ------------------------------------------------------------------------------------

local function class_list(who, classes)
  if class.is_class(classes) then classes = { classes } end
  opts.need(type(classes) == "table" and #classes > 0, classes, "a list of module classes", "%s: argument", who)
  for k, cls in ipairs(classes) do
    if not class.is_class(cls) then opts.wrong(cls, "a module class", "%s: entry %d", who, k) end
  end
  return classes
end

local function is_any(m, classes)
  for _, cls in ipairs(classes) do
    if class.isa(m, cls) then return true end
  end
  return false
end

local function callable(who, fn)
  opts.expect(fn, opts.fn, "%s: argument", who)
  return fn
end

-- A policy object: targets(root, ignored, options) returns a map from modules to options. It can also be called like a
-- function policy; it then decides by the module alone and ignores `remaining`.
local Policy = { __name = "WrapPolicy" }
Policy.__index = Policy

function Policy.__tostring(p) return p.name end

function Policy.__call(p, m, recurse) return recurse or p.decide(m) ~= false end

local function table_of(who, options)
  if options ~= nil and (type(options) ~= "table" or getmetatable(options) ~= nil) then
    raise("%s: options are %s, expected a table", who, errors.kind(options))
  end
  return options or {}
end

local function copy_of(options, override)
  local out = {}
  for key, value in pairs(options) do out[key] = value end
  for key, value in pairs(override or {}) do out[key] = value end
  return out
end

function Policy:targets(root, ignored, options)
  local targets = {}
  for _, m in ipairs(root:modules()) do
    if not ignored[m] then
      local decision = self.decide(m)
      if decision then targets[m] = copy_of(options, decision ~= true and decision or nil) end
    end
  end
  return targets
end

--- Wraps all modules that are instances of the given classes.
---@param classes table[]  module classes
function M.module_wrap_policy(classes)
  local list = class_list("module_wrap_policy", classes)
  local names = {}
  for k, cls in ipairs(list) do names[k] = rawget(cls, "__name") end
  return setmetatable({ name = ("module_wrap_policy{%s}"):format(table.concat(names, ", ")),
    decide = function(m) return is_any(m, list) end }, Policy)
end

--- Wraps the modules that fn(module) selects: fn returns false or {} (do not wrap), true (wrap with the
--- root's options), or a table (wrap with the root's options, overridden by these).
---@param fn fun(m: Module): boolean|table
---   false or {}: not wrapped; true: wrapped with the root's options; a table: options that override the root's
function M.custom_policy(fn)
  callable("custom_policy", fn)
  return setmetatable({ name = "custom_policy", decide = function(m)
    local decision = fn(m)
    if type(decision) == "boolean" then return decision end
    if type(decision) ~= "table" or getmetatable(decision) ~= nil then
      raise("The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned %s",
        errors.show(decision))
    end
    return next(decision) ~= nil and decision
  end }, Policy)
end

--- Wraps every submodule.
function M.always_wrap_policy() return true end

--- Wraps modules for which fn(module) is true.
---@param fn fun(m: Module): boolean  true: m is wrapped
function M.lambda_auto_wrap_policy(fn)
  callable("lambda_auto_wrap_policy", fn)
  return function(m, recurse) return recurse or fn(m) and true or false end
end

--- Wraps all modules that are instances of the given classes, such as a model's layers.
---@param classes table[]  module classes
function M.transformer_auto_wrap_policy(classes)
  local list = class_list("transformer_auto_wrap_policy", classes)
  return function(m, recurse) return recurse or is_any(m, list) end
end

--- Wraps modules with at least min_num_params elements that are not yet wrapped. Does not visit children of
--- force_leaf_modules (default: MultiheadAttention) and does not wrap exclude_wrap_modules (default: ModuleList,
--- ModuleDict).
---@param given? {min_num_params: number, force_leaf_modules: table[], exclude_wrap_modules: table[]}
---   min_num_params: smallest number of elements; force_leaf_modules: classes whose children are not visited;
---   exclude_wrap_modules: classes that are not wrapped
function M.size_based_auto_wrap_policy(given)
  local o = opts("size_based_auto_wrap_policy", given,
    { min_num_params = 1e8, force_leaf_modules = opts.table, exclude_wrap_modules = opts.table })
  local leaves = o.force_leaf_modules or { attention.MultiheadAttention }
  local excluded = o.exclude_wrap_modules or { containers.ModuleList, containers.ModuleDict }
  return function(m, recurse, remaining)
    if recurse then return remaining >= o.min_num_params and not is_any(m, leaves) end
    return remaining >= o.min_num_params and not is_any(m, excluded)
  end
end

--- Wraps the modules that at least one of the policies wraps.
---@param policies table  a list of functions
function M.or_policy(policies)
  opts.need(type(policies) == "table" and #policies > 0, policies, "a list of at least one policy", "or_policy: argument 1")
  return function(m, recurse, remaining)
    for _, policy in ipairs(policies) do
      if policy(m, recurse, remaining) then return true end
    end
    return false
  end
end

-- ---- annotation ----------------------------------------------------------------------------------

local function leave(...)
  modes.wrap = nil
  return context.results(...)
end

--- Runs fn; fsdp.wrap.wrap(module) inside fn wraps with these options.
---@param given table  wrapper_cls (fsdp.FSDP) and its options
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function M.enable_wrap(given, fn, ...)
  if fn == nil and opts.fn.test(given) then given, fn = {}, given end
  callable("enable_wrap", fn)
  if modes.wrap then raise "You are already within an autowrap context and we currently do not supported nested autowrap." end
  modes.wrap = copy_of(table_of("enable_wrap", given))
  return leave(pcall(fn, ...))
end

--- Returns the module, wrapped if enable_wrap is active. Options given here override those of enable_wrap.
---@param m Module  the module to wrap
---@param given? table  options of fsdp.FSDP
---@return Module
function M.wrap(m, given)
  opts.expect(m, a_module, "wrap: argument 1")
  if not modes.wrap then return m end
  local options = copy_of(modes.wrap, table_of("wrap", given))
  local wrapper = options.wrapper_cls or require "moonshard.parallel.fsdp.classic".FSDP
  options.wrapper_cls = nil
  return wrapper(m, options)
end

-- ---- wrapping a tree -----------------------------------------------------------------------------

local function numel_of(p)
  local n = 1
  for _, size in ipairs(p.shape) do n = n * size end
  return n
end

local function put(parent, name, child)
  local position = tonumber(name)
  if position and rawget(parent, position) ~= nil then parent[position] = child else parent[name] = child end
end

-- Wraps m and the modules below it by a function policy, innermost first. Returns m or its wrapper, and the number of
-- parameter elements that are wrapped; 0 if an earlier call wrapped m.
local function recurse_into(m, c, only_children)
  if c.done[m] then return c.done[m], 0 end
  local total = 0
  for _, p in ipairs(m:parameters()) do
    if not c.ignored_params[p] then total = total + numel_of(p) end
  end
  if not c.policy(m, true, total) then return m, 0 end
  local wrapped = 0
  for name, child in m:named_children() do
    if not c.ignored[child] then
      local now, n = recurse_into(child, c, false)
      if now ~= child then put(m, name, now) end
      wrapped = wrapped + n
    end
  end
  if only_children or not c.policy(m, false, total - wrapped) then return m, wrapped end
  local now = c.wrap(m)
  c.done[m] = now
  return now, total
end

-- Wraps the modules below m that `targets` maps to options, innermost first; a shared module is wrapped once.
local function post_order(m, targets, wrap, done, visited)
  if visited[m] then return end
  visited[m] = true
  for name, child in m:named_children() do
    post_order(child, targets, wrap, done, visited)
    if targets[child] then
      done[child] = done[child] or wrap(child, targets[child])
      put(m, name, done[child])
    end
  end
end

-- Raises if a module to wrap has both trainable and frozen parameters, because a flat parameter has a single
-- requires_grad. With use_orig_params it only warns: the frozen parameters then take gradient memory, too.
local function validate_frozen(root, targets, ignored_params, use_orig_params)
  local seen = {}
  local function visit(m, prefix, trainable, frozen)
    if seen[m] then return end
    seen[m] = true
    for _, name in ipairs(m._params) do
      local p = m._slots[name]
      if p ~= nil and not ignored_params[p] then
        local list = p.requires_grad and trainable or frozen
        list[#list + 1] = prefix .. name
        list.numel = list.numel + numel_of(p)
      end
    end
    for name, child in m:named_children() do
      local below = prefix .. name
      if targets[child] then
        local a, b = { numel = 0 }, { numel = 0 }
        visit(child, below .. ".", a, b)
        if #a > 0 and #b > 0 then
          local text = ("%s has both parameters with requires_grad=True and False. %s\nThe following parameters have requires_grad=True:\n['%s']\n"
            .. "The following parameters have requires_grad=False:\n['%s']"):format(below,
            use_orig_params and (
              "FSDP does not recommend wrapping such modules since the gradient memory usage will be higher than expected "
              .. "(%d numel instead of %d numel before sharding via reduce-scatter)."):format(a.numel + b.numel,
              a.numel)
              or "FSDP does not support wrapping such modules.", table.concat(a, "', '"),
            table.concat(b, "', '"))
          if not use_orig_params then raise("%s", text) end
          log.warn(text)
        end
      else
        visit(child, below .. ".", trainable, frozen)
      end
    end
  end
  visit(root, "", { numel = 0 }, { numel = 0 })
end

-- The classes that mixed precision excludes, from the options of an instance.
local function exempt_classes(o)
  if not o.mixed_precision then return {} end
  return o.mixed_precision.module_classes_to_ignore
    or { batch_norm.BatchNorm1d, batch_norm.BatchNorm2d, batch_norm.BatchNorm3d, batch_norm.SyncBatchNorm }
end

-- Wraps the submodules of root that o.auto_wrap_policy selects or mixed precision excludes, by wrap(module, options).
local function auto_wrap(root, o, options, ignored, ignored_params, wrap)
  local policy = o.auto_wrap_policy
  local is_object = getmetatable(policy) == Policy
  opts.need(is_object or type(policy) == "function", policy, "a policy of fsdp.wrap or a function",
    "FSDP: option 'auto_wrap_policy'")
  for name, m in root:named_modules() do
    if rawget(m, "_fsdp") then
      raise("FSDP auto wrapping requires modules to not already have FSDP applied but found %s in\n%s", name,
        tostring(root))
    end
  end
  local exempt = exempt_classes(o)
  local function full_precision(m) return is_any(m, exempt) end
  for _, m in ipairs(root:modules()) do
    if m ~= root and full_precision(m) then
      log.warn "Both mixed precision and an `auto_wrap_policy` were specified for FSDP, where the wrapped module has batch norm submodules. \z
        The batch norm submodules will be wrapped as separate FSDP instances with mixed precision disabled since \z
        some batch norm kernels do not support low precision."
      break
    end
  end
  local plain = copy_of(options)
  plain.mixed_precision = nil
  if is_object then
    local targets = policy:targets(root, ignored, options)
    for _, m in ipairs(root:modules()) do
      if full_precision(m) and not ignored[m] then
        targets[m] = copy_of(targets[m] or plain)
        targets[m].mixed_precision = nil
      end
    end
    targets[root] = nil
    validate_frozen(root, targets, ignored_params, o.use_orig_params)
    post_order(root, targets, wrap, {}, {})
    return
  end
  local visitor = {
    done = {}, ignored = ignored, ignored_params = ignored_params,
    policy = #exempt == 0 and policy or function(m, recurse, remaining)
      -- The first call, before a module's children: they are always visited, and the policy decides afterwards.
      if recurse then return true end
      return full_precision(m) or (policy(m, true, remaining) and policy(m, false, remaining))
    end,
    wrap = function(m) return wrap(m, full_precision(m) and plain or options) end,
  }
  recurse_into(root, visitor, true)
end

return { public = errors.closed(M, "fsdp.wrap"), auto_wrap = auto_wrap, numel_of = numel_of }
