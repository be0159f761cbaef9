-- SPDX-License-Identifier: MIT
--- Module: extra state, and hooks before and after state dicts are made and loaded. Hooks other than those after
--- loading get the prefix of their module's names ("blocks.1.", "" for the module whose state dict it is), because the
--- tables have the names of all modules.
local class = require "moonshard.core.class"
local errors = require "moonshard.core.errors"
local listing = require "moonshard.core.listing"
local opts = require "moonshard.core.opts"
local base = require "moonshard.nn.module.register"

local raise, show = errors.raise, errors.kind
local Module, walk, join = base.Module, base.walk, base.join
local rawget, rawset, ipairs, pairs, concat = rawget, rawset, ipairs, pairs, table.concat

local EXTRA = "_extra_state"

-- ---- extra state ---------------------------------------------------------------------------------

--- To be defined by a class that has state besides its parameters and buffers; set_extra_state must be defined, too.
--- The result is in the state dict, under the name `_extra_state`. Files can hold it if it is a number, string, boolean,
--- or a table of these.
---@return any
function Module:get_extra_state()
  raise("get_extra_state: %s has no extra state; a class has it if it defines get_extra_state and set_extra_state",
    self:class_name())
end

--- To be defined by a class that defines get_extra_state: sets the extra state that a state dict has.
---@param value any  what get_extra_state returned
function Module:set_extra_state(value)
  raise("set_extra_state: %s has no extra state, so it cannot take %s", self:class_name(), show(value))
end

--- The names and modules of all extra states, in the order of modules().
---@return string[] names, Module[] modules
function Module._extras(self)
  local names, modules, found, owners = {}, {}, {}, {}
  walk(self, "", nil, names, modules, {})
  for k, m in ipairs(modules) do
    local gets, sets = m.get_extra_state ~= Module.get_extra_state, m.set_extra_state ~= Module.set_extra_state
    if not m._wraps and (gets or sets) then
      if gets ~= sets then
        raise("%s defines only one of get_extra_state and set_extra_state, expected both", m:class_name())
      end
      found[#found + 1], owners[#owners + 1] = join(names[k], EXTRA), m
    end
  end
  return found, owners
end

--- All extra states by name, for a file. Errors: a value that cannot be in a file.
---@return table<string, any>
function Module._extra_states(self)
  local names, modules = self:_extras()
  local out = {}
  local function check(name, value, depth)
    local kind = type(value)
    if kind == "table" and getmetatable(value) == nil and depth < 20 then
      for key, v in pairs(value) do
        check(name, key, depth)
        check(name, v, depth + 1)
      end
    elseif kind ~= "number" and kind ~= "string" and kind ~= "boolean" then
      opts.wrong(value, "a number, string, boolean or plain table of these, at most 20 levels deep, for a file",
        "extra state '%s'", name)
    end
  end
  for k, name in ipairs(names) do
    local value = modules[k]:get_extra_state()
    if value ~= nil then check(name, value, 0) end
    out[name] = value
  end
  return out
end

--- Sets the extra states.
---@param value_of fun(name: string): any  the extra state of that name; nil: the module's state does not change
function Module._set_extra_states(self, value_of)
  local names, modules = self:_extras()
  for k, name in ipairs(names) do
    local value = value_of(name)
    if value ~= nil then modules[k]:set_extra_state(value) end
  end
end

--- Whether a name of a state dict is that of an extra state.
---@param name string
function Module._is_extra(name)
  return type(name) == "string" and (name == EXTRA or name:sub(-#EXTRA - 1) == "." .. EXTRA)
end

-- ---- hooks ---------------------------------------------------------------------------------------

-- Calls fn(hook, module, prefix) for the hooks of one kind of every module. children_first: those of children first.
local function each(self, kind, children_first, fn)
  local names, modules = {}, {}
  walk(self, "", nil, names, modules, {})
  local first, last, step = 1, #modules, 1
  if children_first then first, last, step = #modules, 1, -1 end
  for k = first, last, step do
    local hooks = rawget(modules[k], "_state_hooks")
    for _, hook in ipairs(hooks and listing.copy(hooks[kind]) or {}) do
      fn(hook.fn, modules[k], names[k] == "" and "" or names[k] .. ".")
    end
  end
end

--- Runs the hooks before a state dict is made.
function Module._before_saving(self)
  each(self, "saving", false, function(hook, m, prefix) hook(m, prefix) end)
end

--- Adds the extra states to a new state dict, then runs the state dict post hooks.
---@return table sd
function Module._after_saving(self, sd)
  local names, modules = self:_extras()
  for k, name in ipairs(names) do sd[name] = modules[k]:get_extra_state() end
  each(self, "saved", true, function(hook, m, prefix)
    local result = hook(m, sd, prefix)
    if result ~= nil then
      raise("%s: a state dict post-hook returned %s, expected nothing; change the state dict in place", m:class_name(),
        show(result))
    end
  end)
  return sd
end

--- Returns the state dict to load: sd with this model's names, as the hooks have changed it. sd itself stays as it is.
function Module._before_loading(self, sd, count_from)
  local copy = {}
  for name, t in pairs(self:_renamed(sd, count_from)) do copy[name] = t end
  each(self, "loading", false, function(hook, m, prefix) hook(m, copy, prefix) end)
  return copy
end

--- Whether hooks after loading may edit the lists of missing and unexpected names.
function Module._edits_names(self)
  local found = false
  each(self, "loaded", true, function() found = true end)
  return found
end

--- Raises unless sd is a table of tensors.
function Module._expect_state(sd, who)
  if opts.is_plain(sd) then return end
  local hint = type(sd) == "string" and "; write ms.load(path)"
    or class.isa(sd, Module) and "; write model:state_dict()" or ""
  opts.wrong(sd, "a table of tensors" .. hint, who)
end

local function listed(names, what)
  if #names == 0 then return ("no %s keys"):format(what) end
  return ("%s keys: ['%s']"):format(what, concat(names, "', '"))
end

-- The lists of names that load_state_dict returns print as its result does in PyTorch.
local unexpected_of = setmetatable({}, { __mode = "k" })     -- the list of missing names -> the list of unexpected ones
local MISSING = opts.printing { __tostring = function(missing)
  if #missing == 0 and #unexpected_of[missing] == 0 then return "<All keys matched successfully>" end
  return listed(missing, "missing")
end }
local UNEXPECTED = opts.printing { __tostring = function(unexpected) return listed(unexpected, "unexpected") end }

--- Makes tostring of the lists of missing and unexpected names show their contents.
---@return string[] missing, string[] unexpected
function Module._printed_names(missing, unexpected)
  unexpected_of[missing] = unexpected
  return setmetatable(missing, MISSING), setmetatable(unexpected, UNEXPECTED)
end

--- What is wrong with the names of a state dict that is loaded with strict: lines of an error message.
function Module._name_faults(missing, unexpected)
  local faults = {}
  local function add(what, names)
    if names[1] then faults[#faults + 1] = ('%s key(s) in state_dict: "%s". '):format(what, concat(names, '", "')) end
  end
  add("Missing", missing)
  add("Unexpected", unexpected)
  return faults
end

--- Raises an error that lists the faults of a state dict.
---@param faults string[]  lines of the message
function Module._refuse_state(self, faults)
  raise("Error(s) in loading state_dict for %s:\n\t%s", self:class_name(), concat(faults, "\n\t"))
end

--- Sets the extra states and runs the hooks after a state dict has been loaded.
---@param value_of fun(name: string): any  an extra state, by name
---@param strict? boolean  raises if the hooks leave missing or unexpected names
function Module._after_loading(self, value_of, missing, unexpected, strict)
  self:_set_extra_states(value_of)
  each(self, "loaded", true, function(hook, m) hook(m, missing, unexpected) end)
  local faults = strict and Module._name_faults(missing, unexpected) or {}
  if faults[1] then self:_refuse_state(faults) end
end

local Handle = class.new "Handle"

function Handle:remove()
  for k, hook in ipairs(self.hooks) do
    if hook == self.hook then table.remove(self.hooks, k) break end
  end
end

local function register(self, who, kind, fn)
  opts.expect(fn, opts.fn, "%s: hook", who)
  local hooks = rawget(self, "_state_hooks")
  if not hooks then
    hooks = { saving = {}, saved = {}, loading = {}, loaded = {} }
    rawset(self, "_state_hooks", hooks)
  end
  local handle = Handle()
  handle.hooks, handle.hook = hooks[kind], { fn = fn }
  handle.hooks[#handle.hooks + 1] = handle.hook
  return handle
end

--- Registers fn(module, prefix), called before a state dict that contains this module is made.
---@param fn fun(m: Module, prefix: string)  prefix: what the module's names begin with, such as "blocks.1."
---@return ModuleHandle
function Module:register_state_dict_pre_hook(fn)
  return register(self, "register_state_dict_pre_hook", "saving", fn)
end

--- Registers fn(module, sd, prefix), called after a state dict that contains this module was made; it may change sd.
---@param fn fun(m: Module, sd: table<string, Tensor>, prefix: string)
---   sd has the names of all modules; prefix: what the names of this module begin with, such as "blocks.1."
---@return ModuleHandle
function Module:register_state_dict_post_hook(fn)
  return register(self, "register_state_dict_post_hook", "saved", fn)
end

--- Registers fn(module, sd, prefix), called before a state dict is compared with the model and loaded; it may change
--- sd, which is a copy of the given table, for example to rename what an older version of the class has saved.
---@param fn fun(m: Module, sd: table<string, Tensor>, prefix: string)
---   sd has the names of all modules; prefix: what the names of this module begin with, such as "blocks.1."
---@return ModuleHandle
function Module:register_load_state_dict_pre_hook(fn)
  return register(self, "register_load_state_dict_pre_hook", "loading", fn)
end

--- Registers fn(module, missing, unexpected), called after a state dict was loaded, with the names that
--- load_state_dict returns. With strict, the names that the hooks leave in the lists are an error after the hooks, when
--- the tensors have been loaded; without such a hook nothing changes before that error.
---@param fn fun(m: Module, missing: string[], unexpected: string[])  the lists may be changed
---@return ModuleHandle
function Module:register_load_state_dict_post_hook(fn)
  return register(self, "register_load_state_dict_post_hook", "loaded", fn)
end

return Module
