-- SPDX-License-Identifier: MIT
--- The optimizers of the engine's table. An optimizer passes each of its groups (`param_groups`: leaves and their
--- options, which scripts may change between steps) to the engine as one list. The formulas, and the names, defaults
--- and limits of options, are rows of the engine's table (kernels/formulas/optim). State is made at a leaf's first
--- step; for a sharded parameter it covers only this rank's part.
local calls = require "moonshard.dist.calls"
local class = require "moonshard.core.class"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local listing = require "moonshard.core.listing"
local methods = require "moonshard.core.methods"
local places = require "moonshard.core.places"
local opts = require "moonshard.core.opts"
local compiled = require "moonshard.optim.compiled"
local rows = require "moonshard.optim.rows"
local shards = require "moonshard.nn.module.shards"
local tensor = require "moonshard.tensor"
local utils = require "moonshard.nn.utils"

local lib, ffi = engine.lib, engine.ffi
local capture = require "moonshard.autograd.capture"
local autograd = require "moonshard.autograd"
local no_grad, enable_grad = autograd.no_grad, autograd.enable_grad
local sparse = require "moonshard.autograd.sparse"
local with_dense_grads, is_local = sparse.with_dense_grads, sparse.is_local
local a_tensor = tensor.a_tensor
local raise, show, is_tensor = errors.raise, errors.kind, tensor.is_tensor
local is_plain = opts.is_plain
local ipairs = ipairs
local STATES = ffi.C.MS_OPTIM_STATES

--- The base of optimizers. It steps the leaves of each group in one fused pass. A group is `{ params = {…}, lr = …, …
--- }`; scripts may change its options between steps. State is made at a leaf's first step; for a sharded parameter it
--- covers only this rank's part.
---@class Optimizer
---@field param_groups table[]  each { params = Tensor[], lr = number, … }
---@field state table<Tensor, table>  state[p] is state_of(p)
local Optimizer = class.new "Optimizer"
methods.close(Optimizer)

local function check_leaf(self, p, seen, where)
  local who = self:class_name()
  opts.expect(p, a_tensor, "%s: %s", who, where)
  if tensor.info_of(p).is_leaf == 0 then
    raise("%s: %s is the result of an operation; only leaves can be optimized", who, where)
  end
  shards.expect_trained(p, ("%s: %s"):format(who, where), "the optimizer")
  if rawget(seen, p) then raise("%s: %s is in the list twice", who, where) end
  if seen[p] then raise("%s: %s belongs to another group already", who, where) end
  seen[p] = true
end

local function add_group(self, given, where)
  local group = {}
  for name, value in pairs(given) do
    if name ~= "params" and self._defaults[name] == nil then
      raise("%s: %s", self:class_name(), errors.unknown("option of " .. where, name, errors.names(self._defaults)))
    end
    group[name] = value
  end
  for name, value in pairs(self._defaults) do
    if group[name] == nil then group[name] = value end
  end
  local params = is_tensor(given.params) and { given.params } or given.params
  if not is_plain(params) then
    opts.wrong(params, "a list of leaves" .. (type(params) == "table" and "; write model:parameters()" or ""),
      "%s: params of %s", self:class_name(), where)
  end
  group.params = {}
  local seen = setmetatable({}, { __index = self._seen })  -- a separate table, so that a refused group changes nothing
  for k, p in ipairs(params) do
    check_leaf(self, p, seen, ("parameter %d"):format(k))
    group.params[k] = p
  end
  self._check(self, group)
  for _, p in ipairs(group.params) do self._seen[p] = rawget(p, "_unit") or true end
  self.param_groups[#self.param_groups + 1] = group
end

local function construct(self, params, given, spec)
  local who = self:class_name()
  if is_tensor(params) then raise("%s: argument 1 is a Tensor, expected a list of leaves or groups", who) end
  if not is_plain(params) then
    local module = type(params) == "table" and params.parameters
    raise("%s: argument 1 is %s, expected a list of leaves or groups%s", who, show(params),
      (module or type(params) == "function") and "; write model:parameters()" or "")
  end
  if params[1] == nil and next(params) ~= nil then
    raise("%s: argument 1 has entries but no element 1, expected a list of leaves or of groups { params = ... }", who)
  end
  if params[1] == nil then
    raise("%s: the list of parameters is empty; modules register what is assigned to their fields (layers, nn.Parameter), not the contents of plain tables", who)
  end
  if type(given) == "number" then
    raise("%s: options are %s, expected a table; write { lr = %s }", who, show(given), given)
  end
  self._defaults = opts(who, given, spec)
  self._compiled, self._seen, self.param_groups = {}, {}, {}
  self.state = setmetatable({}, { __index = function(_, p) return self:state_of(p) end })
  if is_tensor(params[1]) then
    add_group(self, { params = params }, "group 1")
  else
    for k, group in ipairs(params) do
      if not is_plain(group) then opts.wrong(group, "a group {params = {…}}", "%s: element %d", who, k) end
      if is_tensor(group[1]) then raise("%s: element %d is a list of parameters; %s", who, k, listing.SEVERAL) end
      add_group(self, group, "group " .. k)
    end
  end
end

--- _construct(self, params, given, spec) initialises a new optimizer. spec: its options, as opts takes them.
Optimizer._construct = construct

--- Adds a group. Errors: a parameter that belongs to another group or is not a leaf.
---@param group { params: Tensor[], lr: number }
---   params: leaves that belong to no group yet; lr: learning rate. The group may contain any other option; the
---   optimizer's own values are the defaults
function Optimizer:add_param_group(group)
  opts.need(is_plain(group), group, "a group {params = {…}}", "%s: add_param_group: argument 1", self:class_name())
  add_group(self, group, "group " .. #self.param_groups + 1)
end

-- Steps a sparse leaf by its sparse gradient, which only plain gradient descent supports.
local function step_sparse(self, c, group, p)
  local g = p.grad
  if not g then return end
  if lib.ms_optim_is_plain(c.options) == 0 then
    raise("%s: sparse parameters are only supported by SGD without momentum and weight decay", self:class_name())
  end
  if not g.is_sparse then
    raise("%s: a sparse parameter has a dense gradient; make the gradient sparse, or the parameter dense",
      self:class_name())
  end
  no_grad(function() p:add_(g, { alpha = group.maximize and group.lr or -group.lr }) end)
end

-- The array of groups for the engine; made again when a group was compiled again.
local function engine_groups(self, n)
  local made = self._engine_groups
  local same = made ~= nil and made.n == n
  for k = 1, n do same = same and made[k] == self._compiled[k] end
  if same then return made.list end
  made = { n = n, list = ffi.new("ms_optim_group[?]", math.max(n, 1)) }
  for k = 1, n do
    local c, group = self._compiled[k], made.list[k - 1]
    made[k] = c                                         -- keeps the memory that the pointers refer to
    group.options, group.n, group.leaves, group.state, group.steps = c.options, c.n, c.ids, c.state, c.steps
  end
  self._engine_groups = made
  return made.list
end

local function is_young(c)
  for k = 0, c.n - 1 do
    if c.steps[k] == 0 then return true end
  end
  return false
end

local asked = ffi.new "ms_step_terms"

-- Steps groups 1 to n. terms: { max_norm, norm_type } limits the gradients and gets a field `norm`, the id of the norm;
-- { unless = Tensor, flag = Flag } skips the step unless the tensor is 0; nil: neither.
local function step_dense(self, n, terms)
  local unless, clips = terms and terms.unless, terms and not terms.unless
  if unless then compiled.note_counts(self, n, terms.flag) end
  asked.clips, asked.max_norm, asked.p = clips and 1 or 0, clips and terms[1] or 0, clips and terms[2] or 0
  asked.norm, asked.skip = 0, unless and unless.id or 0
  local failed = lib.ms_optim_step_groups(n, engine_groups(self, n), asked) ~= 0
  if unless and failed then self._undecided = nil end
  if clips then terms.norm = asked.norm end
  if failed then
    local params = {}
    for k = 1, n do
      compiled.take_state(self._compiled[k])
      for _, p in ipairs(self.param_groups[k].params) do params[#params + 1] = p end
    end
    errors.fail_of(params)
  end
  for k = 1, n do
    local c = self._compiled[k]
    if c.young then                                     -- a leaf's first step makes its state
      compiled.take_state(c)
      c.young = is_young(c)
    end
  end
end

-- Runs step_dense while sparse gradients in groups k to n are replaced by dense ones.
local function with_groups_dense(self, n, k, terms)
  if k > n then return step_dense(self, n, terms) end
  return with_dense_grads(self._compiled[k].leaves, with_groups_dense, self, n, k + 1, terms)
end

-- Whether the optimizer has state for p, of another shape than that of this rank's part, to which p has been cut since.
local function has_whole_state(self, p)
  if self._seen[p] ~= true or not rawget(p, "_unit") or not shards.is_cut(p) then return false end
  local entry = self:state_of(p)
  for _, name in ipairs(entry and self._row.states or {}) do
    if entry[name] and not self:_keeps_whole(name) then return true end
  end
  return false
end

--- Raises if the model no longer trains one of the parameters, or has sharded it since the optimizer made its state.
---@param who? string  the function's name in messages; default: the optimizer's
---@param object? string  what has to be made again
function Optimizer:_expect_trained(who, object)
  if self._changes == shards.changes() and not shards.has_strays() then return end
  who, object = who or self:class_name(), object or "the optimizer"
  for _, group in ipairs(self.param_groups) do
    for k, p in ipairs(group.params) do
      shards.expect_trained(p, ("%s: parameter %d"):format(who, k), object)
      if has_whole_state(self, p) then
        raise("%s: parameter %d was sharded after the optimizer had made its state; make %s after sharding, and load the "
          .. "state with fsdp.load_optim_state_dict", who, k, object)
      end
    end
  end
  self._changes = shards.changes()
end

-- Compiles the groups and passes their options to the engine; scripts may have changed both. Returns the number of
-- groups.
local function prepare(self)
  self:_expect_trained()
  local groups = self.param_groups
  local n = #groups
  for k = 1, n do
    local group = groups[k]
    local c = compiled.group(self, k, group)
    self:_check(group, true, c.options)
  end
  return n
end

-- For a captured step: notes the compiled groups, whose options repetitions read. Raises if the step changed options
-- after the optimizer's step, because repetitions would not change them.
local function note_groups(self, list)
  local groups, options = self.param_groups, self._row.options
  local function replaced()
    raise("captured step: groups or state of %s were replaced after the step was recorded; capture the step again",
      self:class_name())
  end
  list.element(groups, #groups + 1, replaced)
  list.always(compiled.begin_repetition(self, #groups, list))
  for k, group in ipairs(groups) do
    local c = self._compiled[k]
    local now = ffi.new "ms_optim_options"
    self:_check(group, true, now)
    if ffi.string(now, ffi.sizeof(now)) ~= ffi.string(c.options, ffi.sizeof(now)) then
      raise("captured step: it changes options of group %d of %s after the optimizer's step, but repetitions would "
        .. "not; change them outside of the captured step, where the scheduler's step belongs, too",
        k, self:class_name())
    end
    list.element(groups, k, replaced)
    list.element(self._compiled, k, replaced)
    list.element(group, "params", replaced)
    for j = 1, #group.params + 1 do list.element(group.params, j, replaced) end
    -- Copies changed options to c.options, which repetitions read; raises if a value is invalid.
    local function set() self:_check(group, true, c.options) end
    for j = 1, #options do
      local name = options[j].name
      if type(group[name]) == "table" then              -- a pair, which may be changed in place
        local pair, a, b = group[name], group[name][1], group[name][2]
        list.always(function()
          local v = group[name]
          if v == pair and v[1] == a and v[2] == b then return end
          set()
          pair, a, b = v, v[1], v[2]
        end)
      else list.element(group, name, set) end
    end
  end
end

--- Makes one step with all parameters that have a gradient.
---@param closure? fun(): any  recomputes the loss and runs backward, before the step
---@return any  the closure's result, or true
function Optimizer:step(closure)
  local result = true
  if closure ~= nil then
    opts.expect(closure, opts.fn, "%s: step: closure", self:class_name())
    result = enable_grad(closure)
  end
  local groups = self.param_groups
  capture.note(self, note_groups)
  local n = prepare(self)
  for k = 1, n do
    local c = self._compiled[k]
    for j = 1, c.count do
      if c.params[j].id < 0 and c.params[j].is_sparse then
        step_sparse(self, c, groups[k], c.params[j])
      end
    end
  end
  with_groups_dense(self, n, 1)
  places.mark()
  return result
end

local norm_options = { norm_type = 2, error_if_nonfinite = false }

local function parameters_of(self)
  local all = {}
  for _, group in ipairs(type(self) == "table" and self.param_groups or {}) do
    for _, p in ipairs(group.params) do all[#all + 1] = p end
  end
  return all
end

-- Whether a step cannot be one pass of the engine, because the optimizer has hooks, a step function in Lua or sparse
-- parameters, or because the step is being recorded.
local function in_parts(self)
  if self._hooked or self.step ~= Optimizer.step or capture.active() then return true end
  for _, group in ipairs(self.param_groups) do
    for _, p in ipairs(group.params) do
      if p.id < 0 and p.is_sparse then return true end
    end
  end
  return false
end

-- As with clip_grad_norm_, an error on one rank makes its peers fail in the first all-reduce of the norm.
local in_one_pass = calls.one(function(self, max_norm, given)
  local who = self:class_name()
  opts.expect(max_norm, opts.number_from(0), "%s: step_clipped: max_norm", who)
  local clip = { max_norm, given and opts(who .. ": step_clipped", given, norm_options).norm_type or 2 }
  with_groups_dense(self, prepare(self), 1, clip)
  places.mark()
  return tensor.wrap_new(clip.norm)
end, function(self) return utils._first_group(parameters_of(self)) end)

--- Makes one step with gradients that are limited as by nn.utils.clip_grad_norm_(parameters, max_norm): one factor
--- multiplies all of them, so that their norm over all ranks is at most max_norm. The result is that of
--- clip_grad_norm_ and step to the bit, if each gradient has its parameter's dtype, but in one pass: the gradients are
--- scaled where the step reads them, and keep their values. On a GPU the host waits for nothing. Optimizers whose steps
--- are Lua functions, steps with hooks or sparse parameters, and captured steps call clip_grad_norm_ and step.
--- Collective if parameters are sharded.
---@param max_norm number  at least 0; math.huge only computes the norm
---@param given? { norm_type: number, error_if_nonfinite: boolean }  norm_type: order of the norm (default: 2);
---   math.huge: the largest element; error_if_nonfinite: a norm that is inf or nan is an error, before anything changes
---@return Tensor norm  before clipping: a plain 0-dim tensor, on the gradients' device if all have the same, else on the CPU
function Optimizer:step_clipped(max_norm, given)
  if opts.is(given) and given.error_if_nonfinite ~= nil then
    utils.clip_grad_norm_(parameters_of(self), math.huge, given)
    given = { norm_type = given.norm_type }
  end
  if not in_parts(self) then return in_one_pass(self, max_norm, given) end
  local norm = utils.clip_grad_norm_(parameters_of(self), max_norm, given)
  self:step()
  return norm
end

-- Whether peers make this step, too, and cannot find this rank's error by themselves. False if the error is an
-- unreduced gradient, or a parameter that is no longer trained, which every rank finds.
local function has_peers(self)
  local found = false
  if type(self) == "table" and self._expect_trained and not pcall(self._expect_trained, self) then return false end
  for _, group in ipairs(type(self) == "table" and self.param_groups or {}) do
    for _, p in ipairs(group.params) do
      if p.id >= 0 and lib.ms_unit_check_reduced(p.id) ~= 0 or is_local(p) then return false end
    end
    found = found or utils._has_peers(group.params)
  end
  return found
end
Optimizer.step = calls.apart(Optimizer.step, has_peers)

--- For amp.GradScaler: makes one step, unless a gradient was not finite. If the GPU can decide that, the host does not
--- wait; later calls correct the counts of steps. Returns false if this optimizer's step is not one pass of the engine.
---@param terms { unless: Tensor, flag: Flag }  unless: is not 0 if the step must be skipped; flag: reads that value later
---@return boolean
Optimizer._step_unless = calls.apart(function(self, terms)
  if in_parts(self) then return false end
  with_groups_dense(self, prepare(self), 1, terms)
  places.mark()
  return true
end, has_peers)

local function step_leaves(self, group, c, at)
  capture.refuse("the step of a ZeroRedundancyOptimizer, in which each rank steps its own parameters, is not "
    .. "supported; do not capture this step")
  local n = #at
  local ids, state, steps = ffi.new("ms_id[?]", n), ffi.new("ms_id[?]", STATES * n), ffi.new("double[?]", n)
  for j, k in ipairs(at) do
    ids[j - 1], steps[j - 1] = c.ids[k - 1], c.steps[k - 1]
    for s = 0, STATES - 1 do state[STATES * (j - 1) + s] = c.state[STATES * (k - 1) + s] end
  end
  self:_check(group, true, c.options)
  local status = lib.ms_optim_step(c.options, n, ids, state, steps)
  for j, k in ipairs(at) do
    c.steps[k - 1] = steps[j - 1]
    for s = 0, STATES - 1 do c.state[STATES * (k - 1) + s] = state[STATES * (j - 1) + s] end
  end
  compiled.take_state(c)
  if status ~= 0 then errors.fail_of(group.params) end
end

--- Steps only the leaves in `has`.
---@param has table<Tensor, boolean>  the leaves to step, as keys
function Optimizer:_step_part(has)
  self:_expect_trained()
  for index, group in ipairs(self.param_groups) do
    local c, at, leaves = compiled.group(self, index, group), {}, {}
    for k, p in ipairs(c.leaves) do
      if has[p] then at[#at + 1], leaves[#leaves + 1] = k, p end
    end
    if #at > 0 then with_dense_grads(leaves, step_leaves, self, group, c, at) end
  end
end

--- Clears all gradients: sets them to nil, or to 0 if set_to_none is false. Errors: parameters that fsdp.FSDP has
--- replaced since.
---@param given? { set_to_none: boolean }
function Optimizer:zero_grad(given)
  local keep = given ~= nil and opts("zero_grad", given, { set_to_none = true }).set_to_none == false
  self._cleared = (self._cleared or 0) + 1              -- read by amp.GradScaler
  local groups = self.param_groups
  for k = 1, #groups do
    local params = groups[k].params
    for j = 1, #params do
      local p = params[j]
      if rawget(p, "_left") then
        shards.expect_trained(p, ("%s: zero_grad: parameter %d"):format(self:class_name(), j), "the optimizer")
      end
      if p.id >= 0 then lib.ms_unit_drop_saved_grad(p.id) end
      if not keep then
        p.grad = nil
      elseif p.id < 0 then
        for _, part in ipairs(tensor.flat { p }) do
          if part.grad then part.grad:detach():zero_() end
        end
      elseif p.grad then
        p.grad:detach():zero_()
      end
    end
  end
end

require "moonshard.optim.state"(Optimizer)

function Optimizer:__tostring()
  local n = 0
  for _, group in ipairs(self.param_groups) do n = n + #group.params end
  return ("%s(%s, %s, lr %s)"):format(self:class_name(), errors.count(#self.param_groups, "group"),
    errors.count(n, "parameter"), tostring(self.param_groups[1].lr))
end

--- Checks a group's options. later: called after construction. into: the engine's struct that gets the options; nil:
--- none.
function Optimizer:_check(group, later, into) rows.check(self._row, group, later, into) end

-- ---- classes ------------------------------------------------------------------------------------

-- One class per row of the engine's table, which also gives their annotations (tools/engine_types.lua).
local classes = { Optimizer = Optimizer }

local function define(row)
  local cls = Optimizer:extend(row.name)
  cls._row = row
  ---@param params Tensor[]|table[]  leaves, or groups { params = {…}, lr = …, … }, whose options override `given`
  function cls:init(params, given)
    construct(self, params, given, rows.copy(row.defaults))
  end
  classes[row.name] = cls
end

local kind = 0
while lib.ms_optim_at(kind) ~= nil do
  define(rows.read(lib.ms_optim_at(kind), kind))
  kind = kind + 1
end

return classes
