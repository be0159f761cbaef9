-- SPDX-License-Identifier: MIT
--- Low-rank adapters (Hu et al. 2021, "LoRA"): a frozen layer with weight W computes with W + alpha / rank * B A, of
--- which only the two small matrices A and B are trained.
---
--- A layer with adapters stays the same object; it gets the parameters lora_A and lora_B, beside its own, and the class
--- "LoRA<Class>", which extends the class it had. Its own parameters keep their names.
local calls = require "moonshard.dist.calls"
local class = require "moonshard.core.class"
local errors = require "moonshard.core.errors"
local listing = require "moonshard.core.listing"
local methods = require "moonshard.core.methods"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local scope = require "moonshard.tensor.scope"
local shards = require "moonshard.nn.module.shards"
local tensor = require "moonshard.tensor"
local create = require "moonshard.tensor.create"
local util = require "moonshard.tensor.util"
local autograd = require "moonshard.autograd"
local init = require "moonshard.nn.initial".init
local base = require "moonshard.nn.module"
local Linear = require "moonshard.nn.linear.linear".Linear
local Int8Linear = require "moonshard.nn.linear.int8".Int8Linear
local F = require "moonshard.nn.functional".F
local convs = require "moonshard.nn.conv.layers"
local Embedding = require "moonshard.nn.embedding.embedding".Embedding
local empty = require "moonshard.nn.module.parameter".empty

local raise, ipairs, pairs, rawget = errors.raise, ipairs, pairs, rawget
local no_grad = autograd.no_grad

-- ---- layers --------------------------------------------------------------------------------------

local function fill(A, B)
  init.kaiming_uniform_(A, { a = math.sqrt(5) })
  init.zeros_(B)
end

local function drop(x, slots)
  return slots.lora_dropout > 0 and slots.training and ops.dropout(x, slots.lora_dropout) or x
end

-- The layers that can have adapters. shapes(weight, rank): the shapes of A and B. part(x, A, B, slots): what the
-- adapters, before the factor alpha / rank, add to the layer's result. delta(A, B): the product B A in the form of the
-- weight; nil if the weight cannot take it. fill(A, B): sets initial values whose product is 0. accepts(m): whether the
-- layer m can have adapters (nil: every layer of the class can). like(m): a tensor of the adapters' dtype (nil: the
-- weight).
local kinds = {
  {
    class = Linear,
    shapes = function(weight, rank) return { rank, weight:size(2) }, { weight:size(1), rank } end,
    part = function(x, A, B, slots) return ops.linear(ops.linear(drop(x, slots), A), B) end,
    delta = function(A, B) return B:matmul(A) end,
    fill = fill,
  },
  {
    class = Embedding,
    shapes = function(weight, rank) return { rank, weight:size(1) }, { weight:size(2), rank } end,
    part = function(ids, A, B, slots) return ops.linear(ops.embedding(A:t(), ids, slots.padding_idx), B) end,
    delta = function(A, B) return A:t():matmul(B:t()) end,
    fill = function(A, B)
      init.zeros_(A)
      init.normal_(B)
    end,
  },
}

kinds[#kinds + 1] = {
  class = Int8Linear, shapes = kinds[1].shapes, part = kinds[1].part, fill = fill,
  like = function(m) return m.scale end,
}

-- Convolutions: A is a convolution with the layer's options and `rank` output channels; B has kernel size 1.
for name, plain in pairs { Conv1d = F.conv1d, Conv2d = F.conv2d, Conv3d = F.conv3d } do   -- the order does not matter
  local forward = convs[name].forward
  kinds[#kinds + 1] = {
    class = convs[name],
    accepts = function(m) return m.how.groups == 1 end,
    shapes = function(weight, rank)
      local A, B = { rank }, { weight:size(1), rank }
      for d = 2, weight.ndim do A[d] = weight:size(d) end
      for d = 3, weight.ndim do B[d] = 1 end
      return A, B
    end,
    part = function(x, A, B, slots)
      local down = { _slots = { weight = A, how = slots.how, padding_mode = slots.padding_mode } }
      return plain(forward(down, drop(x, slots)), B)
    end,
    delta = function(A, B)
      local shape = { B:size(1) }
      for d = 2, A.ndim do shape[d] = A:size(d) end
      return B:reshape(B:size(1), -1):matmul(A:reshape(A:size(1), -1)):reshape(shape)
    end,
    fill = fill,
  }
end

local function kind_of(m)
  local forward = base.forward_of(m)
  for _, kind in ipairs(kinds) do
    if forward ~= nil and forward == kind.class.forward then return (not kind.accepts or kind.accepts(m)) and kind end
  end
end

local adapted = setmetatable({}, { __mode = "k" })      -- class -> its class with adapters

local function class_for(cls, kind)
  if adapted[cls] then return adapted[cls] end
  local out = class.new("LoRA" .. rawget(cls, "__name"), cls)
  adapted[cls] = out
  out._lora = { kind = kind, of = cls }
  local forward, part = kind.class.forward, kind.part
  function out:forward(x)
    local slots, y = self._slots, forward(self, x)
    if slots.lora_merged then return y end
    return y:add(part(x, slots.lora_A, slots.lora_B, slots), { alpha = slots.lora_scale })
  end
  function out:reset_parameters()
    cls.reset_parameters(self)
    no_grad(kind.fill, self.lora_A, self.lora_B)
  end
  function out:extra_repr()
    return ("%s, adapters of rank %d%s"):format(cls.extra_repr(self), shards.shape_of(self.lora_A)[1],
      self.lora_merged and ", merged" or "")
  end
  return out
end

local function adapt(m, kind, o)
  local weight = m.weight
  local A, B = kind.shapes(weight, o.rank)
  local like = { dtype = o.dtype or (kind.like and kind.like(m) or weight).dtype, device = weight.device }
  m.lora_A = empty(A, like)
  m.lora_B = empty(B, like)
  m.lora_scale, m.lora_dropout, m.lora_merged = o.alpha / o.rank, o.dropout, false
  if weight.device ~= "meta" then no_grad(kind.fill, m.lora_A, m.lora_B) end
  setmetatable(m, class_for(getmetatable(m), kind))
end

-- ---- choosing ------------------------------------------------------------------------------------

-- Returns two values: a function from a path to the pattern that fits it, or nil; and the list of patterns, each a Lua
-- pattern for the last names of a path. If the option is a function, the pattern is "", and the list is empty. `what`:
-- the option's name in messages.
local function chooser(what, given)
  if type(given) == "function" then return function(name, x) return given(name, x) and "" or nil end, {} end
  local list = type(given) == "string" and { given } or given
  opts.need(opts.is_plain(list) and #list > 0, given, "a pattern of names, a list of them, or a function",
    "lora: option '%s'", what)
  for k, pattern in ipairs(list) do
    opts.expect(pattern, opts.string, "lora: option '%s': element %d", what, k)
    local ok = pcall(string.find, ".", "%." .. pattern .. "$")
    if not ok then raise("lora: option '%s': %s is not a Lua pattern", what, errors.show(pattern)) end
  end
  return function(name)
    for _, pattern in ipairs(list) do
      if ("." .. name):find("%." .. pattern .. "$") then return pattern end
    end
  end, list
end

-- The layers of the model that get adapters: a list of { name, module, kind }.
local function chosen(model, target)
  local fits, patterns = chooser("target", target)
  local list, used, other = {}, {}, {}
  for name, m in model:named_modules() do
    local pattern = fits(name, m)
    if pattern then
      local kind = kind_of(m)
      if getmetatable(m)._lora then raise("lora: '%s' has adapters already", name) end
      if kind then
        list[#list + 1] = { name = name, module = m, kind = kind }
        used[pattern] = true
      else
        local attends = rawget(getmetatable(m), "__name") == "MultiheadAttention"
        other[pattern] = other[pattern] or ("'%s', a %s%s"):format(name, m:class_name(), attends
          and ", of which only 'out_proj' can have adapters: its query, key and value are one packed matrix" or "")
      end
    end
  end
  for k, pattern in ipairs(patterns) do
    if not used[pattern] then
      raise("lora: target %s matches no layer that can have adapters (Linear, Int8Linear, Embedding, or a convolution with groups = 1; no subclass with a forward of its own%s)%s",
        errors.show(pattern), k > 1 and "; no layer that an earlier pattern matches" or "", other[pattern] and ("; it matches " .. other[pattern]) or "")
    end
  end
  if #list == 0 then raise "lora: the function 'target' accepts no layer that can have adapters" end
  return list
end

-- The options that a result of state_dict implies: rank, alpha, and target and trainable as functions.
local function options_of(state)
  opts.need(opts.is_plain(state), state, "a result of state_dict", "lora: option 'state'")
  local layers, others, rank, alpha = {}, {}, nil, state.lora_alpha
  for name, t in pairs(state) do                          -- in any order: an error names one of the wrong values
    opts.expect(t, tensor.a_tensor, "lora: option 'state': %s", errors.show(name))
    local layer = name == "lora_A" and "" or name:match "^(.+)%.lora_A$"
    if layer then
      layers[layer], rank = true, t.shape[1]
    elseif name ~= "lora_alpha" and name ~= "lora_B" and not name:find "%.lora_B$" then
      others[name] = true
    end
  end
  if not alpha then
    raise "lora: option 'state': it lacks 'lora_alpha': give the options target, rank and alpha, and call load_state_dict"
  end
  return { rank = rank, alpha = alpha:item(), target = function(name) return layers[name] end,
    trainable = next(others) and function(name) return others[name] end or nil }
end

-- ---- the object -----------------------------------------------------------------------------------

--- The adapters of a model, made by nn.lora.
---@class LoRA
---@field model Module  the model that nn.lora got
---@field layers { name: string, module: Module }[]  the layers with adapters
---@field rank integer
---@field alpha number
local LoRA = class.new "LoRA"

local function is_sharded(self)
  for _, layer in ipairs(self.layers) do
    if shards.is_sharded(layer.module.weight) then return true end
  end
  return false
end

local function collective(fn) return calls.several(fn, is_sharded) end

--- The model's parameters that require gradients: the adapters, and those that the option `trainable` chose.
---@return Parameter[]
function LoRA:parameters()
  local list = {}
  for _, p in self.model:named_parameters() do
    if p.requires_grad then list[#list + 1] = p end
  end
  return listing.new(list)
end

local function same_sizes(a, b) return table.concat(a, ",") == table.concat(b, ",") end

local function size_of(p)
  local n = 1
  for _, size in ipairs(shards.shape_of(p)) do n = n * size end
  return n
end

--- The numbers of elements that are trained, and of all elements of the model.
---@return integer trained, integer total
function LoRA:count()
  local trained, total = 0, 0
  for _, p in ipairs(self.model:parameters()) do
    total = total + size_of(p)
    if p.requires_grad then trained = trained + size_of(p) end
  end
  return trained, total
end

-- Names and parameters of the adapters and of the other parameters that are trained.
local function entries(self)
  local own, names, list = {}, {}, {}
  for _, layer in ipairs(self.layers) do own[layer.module.lora_A], own[layer.module.lora_B] = true, true end
  for name, p in self.model:named_parameters() do
    if own[p] or self._trainable[p] then names[#names + 1], list[#list + 1] = name, p end
  end
  return names, list
end

--- What distinguishes the model from the one without adapters: whole tensors of the adapters and of the parameters that
--- the option `trainable` chose, by name, on every rank, and alpha as `lora_alpha`; to be saved by ms.save. Collective
--- if the model is sharded.
---@return table<string, Tensor>
LoRA.state_dict = collective(function(self)
  local sd, names, list = {}, entries(self)
  sd.lora_alpha = create.tensor(self.alpha, { dtype = "float64", device = "cpu" })
  for k, name in ipairs(names) do
    local p = list[k]
    sd[name] = shards.is_sharded(p) and p:full_tensor() or p:detach()
  end
  return sd
end)

--- Loads the result of state_dict, by copying, into a model that may be sharded in another way. Everything is checked
--- before anything changes. Errors: missing or unknown names; other shapes; another alpha; adapters that are merged.
---@param sd table<string, Tensor>  whole tensors by name
function LoRA:load_state_dict(sd)
  opts.need(opts.is_plain(sd), sd, "a table of tensors", "load_state_dict: argument 1")
  if self.merged then raise "load_state_dict: the adapters are merged; unmerge() first" end
  local names, list = entries(self)
  local alpha = sd.lora_alpha                             -- files of earlier versions have none
  if alpha and (not tensor.is_tensor(alpha) or alpha:item() ~= self.alpha) then
    raise("load_state_dict: 'lora_alpha' is %s, expected %g, the adapters' alpha", tostring(tensor.is_tensor(alpha)
      and alpha:item() or alpha), self.alpha)
  end
  local known = { lora_alpha = true }
  for k, name in ipairs(names) do
    local t = sd[name]
    if t == nil then raise("load_state_dict: '%s' is missing", name) end
    opts.expect(t, tensor.a_tensor, "load_state_dict: '%s'", name)
    local shape = shards.shape_of(list[k])
    if not same_sizes(t.shape, shape) then
      raise("load_state_dict: '%s' has shape %s, expected [%s]", name, tostring(t.shape), table.concat(shape, ", "))
    end
    known[name] = true
  end
  for name in pairs(sd) do                              -- in any order: the error names one unknown name
    if not known[name] then raise("load_state_dict: %s", errors.unknown("name", name, names)) end
  end
  no_grad(function()
    for k, name in ipairs(names) do
      local p = list[k]
      local part = shards.part_of(p)
      part:copy_(shards.own(p, sd[name]):reshape(part.shape))
      if shards.is_sharded(p) then shards.drop_gathered(p) end
    end
  end)
end

-- Raises if a layer cannot take its adapters: its weight is int8; or another module has it, which would change, too.
local function check_mergeable(self)
  local users = {}
  for name, m in self.model:named_modules() do
    for own, p in m:named_parameters { recurse = false } do
      users[p] = users[p] or {}
      table.insert(users[p], base.join(name, own))
    end
  end
  for _, layer in ipairs(self.layers) do
    if not layer.kind.delta then
      raise("merge: the weight of '%s' is int8, which cannot take its adapters", layer.name)
    end
    local names = users[layer.module.weight]
    if names and #names > 1 then
      raise("merge: the weight of '%s' has several names ('%s'), but the adapters change it for one layer only",
        layer.name, table.concat(names, "', '"))
    end
  end
end

-- Adds sign * alpha / rank * B A to the weight of each layer with adapters A and B, in float32 at least: a weight of
-- fewer bits is rounded once.
local function add_to_weights(self, sign)
  no_grad(function()
    for _, layer in ipairs(self.layers) do
      local m = layer.module
      scope.scope(function()
        local function wide(t) return t.dtype == "float64" and t or t:float() end
        local function whole(p) return wide(shards.whole(p, shards.part_of(p):detach()):reshape(shards.shape_of(p))) end
        local delta = layer.kind.delta(whole(m.lora_A), whole(m.lora_B))
        local part = shards.part_of(m.weight)
        part:copy_(wide(part):add(shards.own(m.weight, delta):reshape(part.shape), { alpha = sign * m.lora_scale }))
        if shards.is_sharded(m.weight) then shards.drop_gathered(m.weight) end
      end)
      m.lora_merged = sign > 0
    end
  end)
  self.merged = sign > 0
end

--- Adds alpha / rank * B A to the weights, so that the layers compute as fast as without adapters; until unmerge, the
--- adapters do not compute and get no gradients. Collective if the model is sharded. Errors: a weight that another
--- module has, too; a weight that is int8.
---@return LoRA self
LoRA.merge = collective(function(self)
  if self.merged then return self end
  check_mergeable(self)
  add_to_weights(self, 1)
  return self
end)

--- Subtracts what merge added. The weights are then what they were, up to rounding. Collective if the model is sharded.
---@return LoRA self
LoRA.unmerge = collective(function(self)
  if self.merged then add_to_weights(self, -1) end
  return self
end)

--- Removes the adapters from the layers, which get their classes back; after merge, the model computes what it did with
--- adapters. The parameters that nn.lora froze stay frozen. Errors: the model is sharded.
function LoRA:remove()
  if is_sharded(self) then raise "remove: the model is sharded; remove the adapters from an unsharded copy" end
  for _, layer in ipairs(self.layers) do
    local m = layer.module
    setmetatable(m, getmetatable(m)._lora.of)
    m.lora_A, m.lora_B, m.lora_scale, m.lora_dropout, m.lora_merged = nil, nil, nil, nil, nil
  end
  self.layers = {}
end

opts.fix(LoRA, { "load_state_dict", "remove", "parameters", "count" }, "LoRA:")
methods.guard(LoRA, "lora")
methods.close(LoRA)
methods.refuse_call(LoRA, "the object of nn.lora cannot be called; call the model, whose layers have the adapters")

function LoRA:__tostring()
  local trained, total = self:count()
  return ("LoRA(rank %d, alpha %g, %s, %d of %d elements are trained)"):format(self.rank, self.alpha,
    errors.count(#self.layers, "layer"), trained, total)
end

-- Refuses parameters that a unit or nn.DDP already has, because the adapters would not be part of it.
local function check_unwrapped(model)
  for name, p in model:named_parameters() do
    local unit = rawget(p, "_unit") or rawget(p, "_flat")
    local owner = unit and "a sharded module" or rawget(p, "_replicas") and "nn.DDP"
    if owner then
      raise("lora: parameter '%s' belongs to %s already; call nn.lora before sharding or wrapping", name, owner)
    end
  end
end

-- Raises unless the names and shapes of a state are those that the model's adapters will have.
local function check_state(self, state)
  local wanted = { lora_alpha = {} }
  for _, layer in ipairs(self.layers) do
    local weight = layer.module.weight
    if weight.device == "meta" then
      raise("lora: option 'state': the weight of '%s' is on meta, so its adapters cannot get values", layer.name)
    end
    local A, B = layer.kind.shapes(weight, self.rank)
    wanted[base.join(layer.name, "lora_A")], wanted[base.join(layer.name, "lora_B")] = A, B
  end
  for name, p in self.model:named_parameters() do
    if self._trainable[p] then wanted[name] = shards.shape_of(p) end
  end
  for name, t in util.sorted_pairs(state) do
    if not wanted[name] then raise("lora: option 'state': the model has no adapter or trained parameter '%s'", name) end
    if not same_sizes(t.shape, wanted[name]) then
      raise("lora: option 'state': '%s' has shape %s, expected [%s]", name, tostring(t.shape),
        table.concat(wanted[name], ", "))
    end
  end
  for name in util.sorted_pairs(wanted) do
    if state[name] == nil then raise("lora: option 'state': '%s' is missing", name) end
  end
end

--- Freezes a model and gives some of its layers low-rank adapters (Hu et al. 2021): y = W x + alpha / rank * B A x,
--- where A [rank, in] and B [out, rank] are trained. Unless state is given, the model at first computes what it did
--- before. The layers may be Linear, Int8Linear, Embedding or convolutions of one group; their adapters are the
--- parameters lora_A and lora_B, beside the layer's own. To be called before fully_shard, fsdp.FSDP (with
--- use_orig_params) and nn.DDP.
---@param model Module  its parameters are frozen
---@param given { target: string|string[]|fun(name: string, m: Module): boolean, rank: integer, alpha: number, dropout: number, trainable: string|string[]|fun(name: string, p: Parameter): boolean, state: table<string, Tensor>, dtype: string }
---   target: the layers that get adapters: a Lua pattern for the last parts of their paths, such as "qkv" or
---   "attn%.%a+", a list of patterns, or a function; rank: rows of A (default: 8); alpha: the adapters' part is
---   multiplied by alpha / rank (default: rank); dropout: probability of dropout on the input of A,
---   except in Embedding (default: 0); trainable: other parameters that are trained, such as "head%.weight"; state: a
---   result of state_dict, which gives layers, rank, alpha and values in place of the other options but dropout and
---   dtype; dtype: of the adapters (default: that of the layer's weight), such as "float32" beside frozen weights in
---   bfloat16
---@return LoRA
local function lora(model, given)
  opts.expect(model, base.a_module, "lora: argument 1")
  local o = opts("lora", given, {
    target = opts.any, rank = opts.whole_from(1), alpha = opts.positive,
    dropout = opts.option(opts.kind("a number from 0 to below 1",
      function(v) return type(v) == "number" and v >= 0 and v < 1 end), 0), trainable = opts.any, state = opts.any, dtype = opts.string,
  })
  local state = o.state
  if state ~= nil then
    for _, name in ipairs { "target", "rank", "alpha", "trainable" } do
      if o[name] ~= nil then
        raise("lora: options 'state' and '%s' are both given, expected only 'state', which determines '%s'", name, name)
      end
    end
    for name, value in pairs(options_of(state)) do o[name] = value end
  elseif o.target == nil then
    raise "lora: option 'target' is missing"
  end
  o.rank = o.rank or 8
  o.alpha = o.alpha or o.rank
  check_unwrapped(model)
  local self = LoRA()
  self.model, self.rank, self.alpha, self.merged = model, o.rank, o.alpha, false
  self.layers, self._trainable = chosen(model, o.target), setmetatable({}, { __mode = "k" })
  if o.trainable ~= nil then
    local fits, patterns = chooser("trainable", o.trainable)
    local used = {}
    for name, p in model:named_parameters() do
      local pattern = fits(name, p)
      if pattern then self._trainable[p], used[pattern] = true, true end
    end
    for k, pattern in ipairs(patterns) do
      if not used[pattern] then
        raise("lora: option 'trainable': the pattern %s matches no parameter%s", errors.show(pattern),
          k > 1 and " that no earlier pattern matches" or "")
      end
    end
  end
  if state ~= nil then check_state(self, state) end
  for _, p in model:named_parameters() do p:requires_grad_(self._trainable[p] == true) end
  for _, layer in ipairs(self.layers) do adapt(layer.module, layer.kind, o) end
  if state ~= nil then self:load_state_dict(state) end
  return self
end

return { lora = lora }
