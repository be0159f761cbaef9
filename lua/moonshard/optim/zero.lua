-- SPDX-License-Identifier: MIT
--- ZeroRedundancyOptimizer: distributes an optimizer's state over ranks that have the same parameters and gradients, as
--- under nn.DDP. Each rank owns some of the parameters, steps these, and broadcasts them.
---
--- It contains an ordinary optimizer of all parameters. State is made at a parameter's first step, and each rank only
--- steps the parameters that it owns. Groups, options and positions in state dicts are therefore those of the ordinary
--- optimizer.
local pieces = require "moonshard.dist.pieces"
local calls = require "moonshard.dist.calls"
local class = require "moonshard.core.class"
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local shards = require "moonshard.nn.module.shards"
local tensor = require "moonshard.tensor"
local autograd = require "moonshard.autograd"
local Optimizer = require "moonshard.optim.optimizer".Optimizer

local lib = engine.lib
local raise, show, no_grad = errors.raise, errors.kind, autograd.no_grad
local rawget, ipairs, pairs, type, pcall, error = rawget, ipairs, pairs, type, pcall, error

local NAME = "ZeroRedundancyOptimizer"

--- Distributes an optimizer's state over ranks that have the same parameters and gradients, as under nn.DDP
--- (Rajbhandari et al. 2020, stage 1): each rank owns some of the parameters, steps these, and broadcasts them. Options
--- that are not listed below are passed to optimizer_class. Collective.
---@class ZeroRedundancyOptimizer: Optimizer
---@overload fun(params: Tensor[]|table[], opts: { optimizer_class: table, process_group: Group, parameters_as_bucket_view: boolean, overlap_with_ddp: boolean }): ZeroRedundancyOptimizer
---   params: equal lists on all ranks; optimizer_class: such as optim.AdamW; parameters_as_bucket_view: puts a rank's
---   parameters into one block of memory for each dtype and device; overlap_with_ddp: a hook of nn.ddp_hooks steps the
---   parameters, not step()
---@field optim Optimizer  the optimizer inside; its state is that of this rank's parameters
local Zero = Optimizer:extend(NAME)

local OPTIONS = { optimizer_class = opts.any, process_group = dist._a_group, parameters_as_bucket_view = false,
  overlap_with_ddp = false }

-- ---- ownership -----------------------------------------------------------------------------------

local function each_param(self, fn)
  for index, group in ipairs(self.param_groups) do
    for k, p in ipairs(group.params) do fn(p, index, k) end
  end
end

local function check_params(self)
  local texts = {}
  each_param(self, function(p, index, k)
    local function refuse(why) raise("%s: parameter %d of group %d %s", NAME, k, index, why) end
    if p.is_sparse then refuse "is sparse; only dense parameters are supported" end
    if p.id < 0 then refuse(("is a %s; tensor classes are not supported"):format(p:class_name())) end
    if tensor.info_of(p).sharded ~= 0 or rawget(p, "_unit") or rawget(p, "_flat") then
      refuse "is already sharded, so an ordinary optimizer shards its state; use that instead"
    end
    texts[#texts + 1] = ("%s %s (group %d)"):format(p.dtype, tostring(p.shape), index)
  end)
  if self._world == 1 then return end
  local all = dist.all_gather_object(texts, { group = self._group })
  for r = 2, self._world do
    for k = 1, math.max(#all[1], #all[r]) do
      if all[r][k] ~= all[1][k] then
        raise("%s: ranks have different parameters: number %d is %s on rank %d and %s on rank %d", NAME, k, all[r][k]
          or "absent", self._ranks[r], all[1][k] or "absent", self._ranks[1])
      end
    end
  end
end

-- Assigns whole parameters to ranks: the largest of each group first, each to the rank that has the fewest elements so
-- far.
local function partition(self)
  local sizes, owner, lists = {}, {}, {}
  for r = 1, self._world do sizes[r], lists[r] = 0, {} end
  for _, group in ipairs(self.param_groups) do
    local sorted = {}
    for k, p in ipairs(group.params) do sorted[k] = { p, p:numel(), k } end
    table.sort(sorted, function(a, b)
      if a[2] ~= b[2] then return a[2] > b[2] end
      return a[3] < b[3]
    end)
    for _, entry in ipairs(sorted) do
      local least = 1
      for r = 2, self._world do
        if sizes[r] < sizes[least] then least = r end
      end
      sizes[least] = sizes[least] + entry[2]
      owner[entry[1]] = least
      table.insert(lists[least], entry[1])
    end
  end
  local own, n = {}, 0
  for _, p in ipairs(lists[self._rank]) do own[p], n = true, n + 1 end
  self._owner, self._lists, self._own, self._n_own = owner, lists, own, n
end

-- Makes each rank's parameters views of one block of memory per dtype and device.
local function view_in_blocks(self)
  local old = self._blocks
  self._blocks = {}
  no_grad(function()
    for r, list in ipairs(self._lists) do
      self._blocks[r] = {}
      for _, some in ipairs(pieces.assign(list, { math.huge })) do
        local n, at = 0, 1
        for _, p in ipairs(some) do n = n + p:numel() end
        local flat = create.empty(n, { dtype = some[1].dtype, device = some[1].device }):keep()
        for _, p in ipairs(some) do
          local view = flat:narrow(1, at, p:numel()):view(p.shape)
          view:copy_(p)
          errors.check(lib.ms_set_data(p.id, view.id), p)
          at = at + p:numel()
        end
        table.insert(self._blocks[r], flat)
      end
    end
  end)
  for _, list in ipairs(old or {}) do
    for _, flat in ipairs(list) do flat:release() end
  end
end

local function in_block(self, p)
  for _, flat in ipairs(self._blocks[self._owner[p]]) do
    if lib.ms_same_storage(p.id, flat.id) ~= 0 then return true end
  end
  return false
end

-- A parameter that was converted or moved has memory of its own, which the broadcast of blocks would leave out.
local function keep_in_blocks(self)
  local all = true
  each_param(self, function(p) all = all and in_block(self, p) end)
  if not all then view_in_blocks(self) end
end

local function arrange(self)
  partition(self)
  if self._as_view then view_in_blocks(self) end
end

function Zero:init(params, given)
  local mine, rest = {}, {}
  if given ~= nil and not opts.is(given) then raise("%s: options are %s, expected a table", NAME, show(given)) end
  for name, value in pairs(given or {}) do
    if OPTIONS[name] ~= nil then mine[name] = value else rest[name] = value end
  end
  local o = opts(NAME, mine, OPTIONS)
  local cls = o.optimizer_class
  if not class.is_class(cls) or not cls.__isa[Optimizer] or cls == Zero or cls == Optimizer then
    raise("%s: option 'optimizer_class' is %s, expected an optimizer's class, such as optim.AdamW", NAME,
      class.is_class(cls) and tostring(cls) or show(cls))
  end
  if opts.is_plain(params) and params[1] == nil then
    raise("%s got an empty parameter list", NAME)
  end
  local rank = dist.rank(o.process_group)
  if not rank then raise("%s: this rank is not a member of %s", NAME, tostring(o.process_group)) end
  self._group, self._rank, self._world = o.process_group, rank + 1, dist.world_size(o.process_group)
  self._ranks = dist.group_ranks(o.process_group)
  self._as_view, self._overlaps = o.parameters_as_bucket_view, o.overlap_with_ddp
  self.optim = cls(params, rest)
  self.param_groups = self.optim.param_groups
  check_params(self)
  arrange(self)
end

--- Adds a group and distributes its parameters. Collective.
---@param group table  as Optimizer:add_param_group takes it
function Zero:add_param_group(group)
  local groups = self.param_groups
  self.optim:add_param_group(group)
  local ok, message = pcall(check_params, self)
  if not ok then
    for _, p in ipairs(groups[#groups].params) do self.optim._seen[p] = nil end
    groups[#groups] = nil
    error(message, 0)
  end
  self._consolidated = nil
  arrange(self)
end

-- ---- steps ---------------------------------------------------------------------------------------

-- Broadcasts every rank's parameters.
local function send_all(self)
  for r, src in ipairs(self._ranks) do
    if not self._as_view then
      pieces.broadcast(self._lists[r], self._group, nil, src)
    else
      for _, flat in ipairs(self._blocks[r]) do dist.broadcast(flat, { src = src, group = self._group }) end
    end
  end
end

--- Raises if the model no longer trains one of the parameters as a whole.
function Zero:_expect_trained(who, object)
  if self._changes == shards.changes() and not shards.has_strays() then return end
  who, object = who or NAME, object or "the optimizer"
  each_param(self, function(p, index, k)
    local which = ("%s: parameter %d of group %d"):format(who, k, index)
    shards.expect_trained(p, which, object)
    if rawget(p, "_unit") then
      raise("%s was sharded after the optimizer had been made; make an ordinary optimizer after sharding", which)
    end
  end)
  self._changes = shards.changes()
end

--- Steps this rank's parameters and broadcasts the new values. Collective; gradients must be equal on all ranks. With
--- overlap_with_ddp it only warns and returns nil.
---@param closure? fun(): any  recomputes the loss and runs backward, before the step
---@return any  the closure's result, or true
function Zero:step(closure)
  if self._overlaps then
    log.warn_once "`step()` should not be included in the training loop when `overlap_with_ddp=true`"
    return nil
  end
  if closure ~= nil then opts.expect(closure, opts.fn, "%s: step: closure", NAME) end
  local result = true
  self._consolidated = nil
  self:_expect_trained()
  if closure then
    result = autograd.enable_grad(closure)
    if self._world > 1 then dist.barrier(self._group) end        -- if one rank's closure failed, no rank may step
  end
  if self._as_view then keep_in_blocks(self) end
  self.optim:_step_part(self._own)
  if self._world > 1 then no_grad(send_all, self) end
  return result
end

--- For hooks that overlap steps with DDP: steps those parameters of the list that this rank owns, and starts to
--- broadcast the whole list. Skips parameters whose broadcast this backward has already started.
function Zero:_step_overlapped(list)
  local sent, works, own, any = self._sent or {}, self._works or {}, {}, false
  self._sent, self._works, self._consolidated = sent, works, nil
  local some = {}
  for _, p in ipairs(list) do
    if self._owner[p] and not sent[p] then
      sent[p], some[#some + 1] = true, p
      if self._own[p] then own[p], any = true, true end
    end
  end
  if any then self.optim:_step_part(own) end
  if self._world == 1 then return end
  for _, p in ipairs(some) do
    if p:numel() > 0 then
      works[#works + 1] = dist.broadcast(p:detach(), { src = self._ranks[self._owner[p]], group = self._group,
        async = true })
    end
  end
end

--- Steps and broadcasts the remaining parameters, and waits for all broadcasts.
function Zero:_end_overlapped()
  each_param(self, function(p)
    if not (self._sent and self._sent[p]) then self:_step_overlapped { p } end
  end)
  local works = self._works or {}
  self._sent, self._works = nil, nil
  for _, work in ipairs(works) do work:wait() end
end

--- After a failed backward: waits for broadcasts in flight.
function Zero:_drop_overlapped()
  local works = self._works or {}
  self._sent, self._works = nil, nil
  for _, work in ipairs(works) do pcall(work.wait, work) end
end

-- ---- state ---------------------------------------------------------------------------------------

local function position_of(self)
  local position, n = {}, 0
  each_param(self, function(p)
    n = n + 1
    position[p] = n
  end)
  return position
end

--- Gathers all ranks' state on one rank, on the CPU; state_dict() on that rank then returns it. Collective.
---@param to? integer|{to: integer}  a rank of the world (default: 0)
function Zero:consolidate_state_dict(to)
  if opts.is(to) then to = opts("consolidate_state_dict", to, { to = 0 }).to end
  to = to or 0
  local member = false
  for _, rank in ipairs(self._ranks) do member = member or rank == to end
  if not member then
    raise("consolidate_state_dict: argument 1, a rank, is %s, expected one of the group's ranks %s", show(to),
      table.concat(self._ranks, ", "))
  end
  self._consolidated = nil
  local here, names = dist.rank() == to, self.optim._row.states
  local sd, position = self.optim:state_dict(), position_of(self)
  local mine = {}
  for _, p in ipairs(self._lists[self._rank]) do
    local entry = sd.state[position[p]]
    if entry then
      local has = { step = entry.step }
      for _, name in ipairs(names) do has[name] = entry[name] and entry[name].dtype or nil end
      mine[position[p]] = has
    end
  end
  local all = dist.all_gather_object(mine, { group = self._group })
  for r, rank in ipairs(self._ranks) do
    for _, p in ipairs(self._lists[r]) do
      local at = position[p]
      local has, entry = all[r][at], sd.state[at]
      if has and here then sd.state[at] = { step = has.step } end
      for _, name in ipairs(has and names or {}) do
        if has[name] and here then
          local t = entry and entry[name]:detach():clone():to "cpu"
          if rank ~= to then
            t = create.empty(p.shape, { dtype = has[name], device = "cpu" })
            dist.recv(t, rank, { group = self._group })
          end
          sd.state[at][name] = t:keep()
        elseif has[name] and dist.rank() == rank then
          dist.send(entry[name]:detach():to "cpu", to, { group = self._group })
        end
      end
    end
  end
  if here then self._consolidated = sd end
end

--- The state of all ranks, in the format of an ordinary optimizer, on the rank where consolidate_state_dict has
--- gathered it.
---@return { state: table<integer, table>, param_groups: table[] }
function Zero:state_dict()
  if not self._consolidated then
    raise("Optimizer state has not been consolidated on this rank. Please call `consolidate_state_dict(%d)` on all ranks beforehand if you meant "
      .. "to save the global state.", dist.rank())
  end
  return self._consolidated
end

--- Prepares to load the state of all parameters, from an ordinary optimizer or from a consolidated state of any number
--- of ranks; each rank keeps its part.
---@return fun() take
function Zero:_prepare_load(sd)
  local part = sd
  if type(sd) == "table" and type(sd.state) == "table" and type(sd.param_groups) == "table" then
    part = { param_groups = sd.param_groups, state = {} }
    each_param(self, function(p, index, k)
      local group = sd.param_groups[index]
      local at = type(group) == "table" and type(group.params) == "table" and group.params[k]
      if at and self._own[p] then part.state[at] = sd.state[at] end
    end)
  end
  local take = self.optim:_prepare_load(part)
  return function()
    take()
    self._consolidated = nil
  end
end

--- The state tensors and step of a parameter, by name; nil before its first step, and on ranks that do not own the
--- parameter.
---@param p Tensor  a parameter of a group
---@return { step: integer }?
function Zero:state_of(p) return self.optim:state_of(p) end

local function has_peers(self) return (self._world or 2) > 1 end
for _, name in ipairs { "add_param_group", "step", "consolidate_state_dict" } do
  Zero[name] = calls.several(Zero[name], has_peers)
end
Zero.init = calls.several(Zero.init)

function Zero:__tostring()
  local n = 0
  each_param(self, function() n = n + 1 end)
  return ("%s(%s; %d of %s on this rank)"):format(NAME, tostring(self.optim), self._n_own, errors.count(n, "parameter"))
end

return { ZeroRedundancyOptimizer = Zero }
