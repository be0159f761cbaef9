-- SPDX-License-Identifier: MIT
--- The bounds of docs/semantics.md#memory, checked on the memory that the engine counts at every point of a training on
--- a device: the composable suite's Transformer on meta, both front ends, Adam.
local collected = require "spec.support.collected"

local M = {}

local function fully_shard(reshard)
  return function(model, ms, device)
    local options = { reshard_after_forward = reshard, mesh = ms.dist.init_device_mesh(device:match "^%a+",
      { ms.dist.world_size() }) }
    for _, layer in ipairs(model.layers) do ms.fsdp.fully_shard(layer, options) end
    ms.fsdp.fully_shard(model, options)
    model:to_empty(device)
    for _, m in ipairs(model:modules()) do
      if m.reset_parameters then m:reset_parameters() end
    end
    return model
  end
end

local function FSDP(strategy, pieces)
  return function(model, ms, device)
    local options = { sharding_strategy = strategy, use_orig_params = pieces, device_id = device }
    for k, layer in ipairs(model.layers) do model.layers[k] = ms.fsdp.FSDP(layer, options) end
    return ms.fsdp.FSDP(model, options)
  end
end

--- Ways to shard a model on meta: name, function (model, ms, device) that returns the initialized model, and whether it
--- reshards after forward.
M.WAYS = {
  { "fully_shard, reshard_after_forward = true", fully_shard(true), true },
  { "fully_shard, reshard_after_forward = false", fully_shard(false), false },
  { "FSDP, full_shard", FSDP("full_shard", false), true },
  { "FSDP, full_shard, original parameters", FSDP("full_shard", true), true },
  { "FSDP, shard_grad_op", FSDP("shard_grad_op", false), false },
  { "FSDP, shard_grad_op, original parameters", FSDP("shard_grad_op", true), false },
}

--- A model, and elements of a block, of the model, outside the blocks, and of a shard cut along rows.
---@param dim integer
---@param heads integer
---@param device string
function M.model(dim, heads, device)
  local ms = require "moonshard"
  local TransformerLM = require("spec.support.models.transformer_lm").TransformerLM
  local model = TransformerLM { vocab = 32, layers = 3, dim = dim, heads = heads, max_seq = 16, tie = false,
    device = device }
  local sizes, world = { B = 0, U = 0, S = 0 }, ms.dist.world_size()
  for _, p in ipairs(model.layers[1]:parameters()) do sizes.B = sizes.B + p:numel() end
  for _, p in ipairs(model:parameters()) do
    local n, rows = p:numel(), p:size(1)
    sizes.U, sizes.S = sizes.U + n, sizes.S + math.ceil(rows / world) * n / rows
  end
  sizes.N = sizes.U - 3 * sizes.B
  return model, sizes
end

--- Functions that compare a device's memory, now and its peak since the last call, with a bound in elements.
---@param device string
---@param slack number  elements by which a bound may be exceeded
function M.meter(device, slack)
  local ms = require "moonshard"
  ms.scope(function()                                          -- operators allocate what they keep
    ms.nn.Linear(8, 8, { device = device })(ms.ones(2, 8, { device = device })):sum():backward()
  end)
  collected()
  local base = ms.memory_stats(device).allocated
  ms.reset_peak_memory_stats(device)
  local function within(field, bound, point)
    if device ~= "cpu" then ms.cuda.synchronize() end
    local elements = (ms.memory_stats(device)[field] - base) / 4
    ms.reset_peak_memory_stats(device)
    assert(elements <= bound + slack, ("%s: %d elements, the bound is %d"):format(point, elements, bound))
    return elements
  end
  return function(bound, point) return within("allocated", bound, point) end,
    function(bound, point) return within("peak_allocated", bound, point) end
end

--- Trains three steps with Adam, sharded in one of WAYS, and checks the bounds at every point.
function M.check(way, dim, heads, device, slack)
  local ms = require "moonshard"
  local _, shard, reshard = unpack(way)
  local now, peak = M.meter(device, slack)
  local model, n = M.model(dim, heads, "meta")
  local B, U, N, S = n.B, n.U, n.N, n.S
  model = shard(model, ms, device)
  peak(S + B, "initialisation, peak")
  now(S + 1e6, "initialisation")                               -- the suite allows 4 MB here
  local optim = ms.optim.Adam(model:parameters(), { lr = 1e-4 })
  for step = 1, 3 do
    local held = step == 1 and S or 3 * S                      -- shards and, from the second step on, two moments
    ms.scope(function()
      local ids = ms.randint(0, 32, { 1, 4 }):to(device)
      local loss = model(ids):sum()
      local most = peak(held + (reshard and 3 * B + N or U + B), "forward of step " .. step)
      assert(most >= held + B - slack, "gathered parameters are counted")
      loss:backward()
      peak(held + (reshard and S + 4 * B + N or U + 1.5 * B), "backward of step " .. step)
    end)
    optim:step()
    now(4 * S, "after step " .. step)
    optim:zero_grad()
    local rest = now(3 * S, "after zero_grad " .. step)
    assert(rest >= 0.9 * 3 * U / ms.dist.world_size(), "shards are counted; the last rank has fewer rows")
  end
end

return M
