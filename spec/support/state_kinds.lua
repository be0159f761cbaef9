-- SPDX-License-Identifier: MIT
--- One small model with its optimizer, sharded in many ways: for specs that load the state of one into another.
local train_alike = require "spec.support.train_alike"

local M = {}

local function load() return require "moonshard" end

local function net(seed)
  local ms = load()
  local nn = ms.nn
  ms.manual_seed(seed)
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.first = nn.Linear(5, 7)
    self.block = nn.Sequential(nn.Linear(7, 6, { bias = false }), nn.Tanh(), nn.Linear(6, 1))
    self:register_buffer("count", ms.zeros(2, { dtype = "int64" }))
  end
  function Net:forward(x)
    self.count:add_(1)
    return self.block(self.first(x))
  end
  return Net()
end

local function classic(options, nested)
  return function(model)
    local ms = load()
    local o = type(options) == "function" and options() or options
    for _, name in ipairs(nested) do model[name] = ms.fsdp.FSDP(model[name], o) end
    return ms.fsdp.FSDP(model, o)
  end
end

local function rows(options, nested)
  return function(model)
    local ms = load()
    local o = type(options) == "function" and options() or options
    for _, name in ipairs(nested) do ms.fsdp.fully_shard(model[name], o) end
    return ms.fsdp.fully_shard(model, o)
  end
end

local function mesh()
  return load().dist.init_device_mesh("cpu", { 2, 2 }, { names = { "dp_replicate", "dp_shard" } })
end

-- Shards along columns if their number is divisible by the number of ranks.
local function columns(_, p)
  local ms = load()
  return #p.shape == 2 and p.shape[2] % ms.dist.world_size() == 0 and ms.fsdp.Shard(2) or nil
end

--- { name, function that shards a model, number of ranks that it needs (nil: any) }
M.KINDS = {
  { "FSDP, nested", classic({}, { "first", "block" }) },
  { "FSDP, one flat parameter", classic({}, {}) },
  { "FSDP, original parameters", classic({ use_orig_params = true }, { "block" }) },
  { "FSDP, shard_grad_op, original parameters", classic({ sharding_strategy = "shard_grad_op", use_orig_params = true },
  {}) },
  { "FSDP, no_shard", classic({ sharding_strategy = "no_shard" }, { "first" }) },
  { "FSDP, no_shard, original parameters", classic({ sharding_strategy = "no_shard", use_orig_params = true },
  { "block" }) },
  { "fully_shard, nested", rows({}, { "first", "block" }) },
  { "fully_shard, columns", rows({ shard_placement_fn = columns }, {}) },
  { "not sharded", function(model) return model end },
  { "FSDP, hybrid_shard", classic(function() return { sharding_strategy = "hybrid_shard", device_mesh = mesh() } end,
  { "block" }), 4 },
  { "FSDP, hybrid_shard_zero2, original parameters",
    classic(function() return { sharding_strategy = "hybrid_shard_zero2", use_orig_params = true,
      device_mesh = mesh() } end, {}), 4 },
  { "fully_shard, replicated and sharded", rows(function() return { mesh = mesh() } end, { "first" }), 4 },
}

--- The kinds that this number of ranks supports.
function M.kinds(world)
  local list = {}
  for _, kind in ipairs(M.KINDS) do
    if kind[3] == nil or kind[3] == world then list[#list + 1] = kind end
  end
  return list
end

--- A model sharded in the way of a kind, and its optimizer, over the model's parameters, or over of(parameters).
function M.make(kind, seed, of)
  local ms = load()
  local model = select(2, ms.catch_warnings(function() return kind[2](net(seed)) end))
  local params = model:parameters()
  return model, ms.optim.AdamW(of and of(params) or params, { lr = 1 / 3, amsgrad = true })
end

--- Trains steps `from` to `to` on batches that are equal on all ranks.
function M.train(model, optim, from, to) train_alike(model, optim, from, to, 5) end

--- Model and optimizer as lines of numbers with all their digits, in order. Collective.
function M.contents(model, optim)
  local ms = load()
  local lines = {}
  local function flatten(name, x)
    if ms.is_tensor(x) then x = x:tolist() end
    if type(x) ~= "table" then
      lines[#lines + 1] = ("%s %.17g"):format(name, x)
      return
    end
    for k, v in ms.sorted_pairs(x) do flatten(name .. " " .. k, v) end
  end
  flatten("model", ms.fsdp.state_dict(model))
  local sd = ms.fsdp.optim_state_dict(model, optim)
  flatten("optim", sd.state)
  flatten("lr", sd.param_groups[1].lr)
  return table.concat(lines, "\n")
end

return M
