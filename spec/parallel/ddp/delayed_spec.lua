-- SPDX-License-Identifier: MIT
--- DDP's delay_all_reduce_named_params and param_to_hook_all_reduce (docs/semantics.md#ddp-construction): the same
--- gradients, some of them reduced together when the gradient of the hooked parameter has arrived.
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"

local load = require "spec.support.load"

-- Four layers: 3 x 4, 4 x 5, 5 x 6, 6 x 2. Gradients arrive from the last to the first.
local function make()
  local ms, nn = load()
  ms.manual_seed(11)
  return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Linear(6, 2)):to "float64"
end

local function input(rank, step)
  local ms = load()
  ms.manual_seed(100 * step + rank)
  return ms.randn(3, 3, { dtype = "float64" })
end

local LAST = { "4.weight", "5.bias" }                   -- of the layers whose gradients arrive first
local ALL = { "1.weight", "1.bias", "2.weight", "2.bias", "4.weight", "4.bias", "5.weight", "5.bias" }

local function pairs_of(m, names)
  local out = {}
  for k, name in ipairs(names) do out[k] = { name, m:get_parameter(name) } end
  return out
end

local function reduced(list)
  local out = {}
  for _, c in ipairs(list) do
    if c.op == "all_reduce" then out[#out + 1] = c.input_numel end
  end
  return out
end

for world = 1, 4 do
  ranks.describe(world, ("gradients that DDP reduces later on %d ranks #mpi"):format(world), function()
    for _, case in ipairs {
      { "given by name, reduced at the first layer's gradient", function() return LAST, "1.weight" end },
      { "given by name and parameter", function(m) return pairs_of(m, LAST), "1.weight" end },
      { "reduced at the gradient of one of them", function() return { "4.weight", "1.weight" }, "1.weight" end },
      { "all of them", function() return ALL, "1.bias" end },
      { "in small buckets", function() return LAST, "2.weight" end, { bucket_cap_mb = 1e-4 } },
      { "gradients in buckets", function() return LAST, "1.weight" end, { gradient_as_bucket_view = true } },
      { "looking for unused parameters", function() return LAST, "1.weight" end, { find_unused_parameters = true } },
      { "a static graph", function() return LAST, "1.weight" end, { static_graph = true } },
      { "all of them in a static graph", function() return ALL, "1.bias" end, { static_graph = true } },
    } do
      it("has the gradients and parameters of plain DDP: " .. case[1], function(rank)
        local ms, nn = load()
        local m = make()
        local list, hook = case[2](m)
        local options = { delay_all_reduce_named_params = list, param_to_hook_all_reduce = m:get_parameter(hook) }
        for name, value in pairs(case[3] or {}) do options[name] = value end
        local plain, ddp = nn.DDP(make()), nn.DDP(m, options)
        local a, b = ms.optim.Adam(plain:parameters(), { lr = 0.01 }), ms.optim.Adam(ddp:parameters(), { lr = 0.01 })
        ms.catch_warnings(function()
          for step = 1, 4 do
            local x = input(rank, step)
            -- gradients accumulated without a reduction are reduced with the next step's
            if step == 3 then
              plain:no_sync(function() plain(x):sum():backward() end)
              ddp:no_sync(function() ddp(x):sum():backward() end)
            end
            plain(x):pow(2):sum():backward()
            ddp(x):pow(2):sum():backward()
            for name, p in plain:named_parameters() do
              assert.is_true(p.grad:equal(ddp:get_parameter(name).grad), name)
            end
            a:step()
            b:step()
            a:zero_grad()
            b:zero_grad()
            for name, p in plain:named_parameters() do assert.is_true(p:equal(ddp:get_parameter(name)), name) end
          end
        end)
      end)
    end

    it("sends them in one piece when the hooked gradient arrives, in the dtype to reduce in", function(rank)
      local _, nn, dist = load()
      local m = make()
      local ddp = nn.DDP(m, { bucket_cap_mb = 1e-6, delay_all_reduce_named_params = LAST,
        param_to_hook_all_reduce = m[2].weight })
      local x = input(rank, 1)
      ddp(x):sum():backward()
      -- Elements per reduction: 5.weight 12, 4.bias 6, 2.bias 5, 2.weight 20; the two delayed parameters together, 30 +
      -- 2; 1.bias 4, 1.weight 12.
      local list = reduced(dist.record(function() ddp(x):sum():backward() end))
      table.sort(list)
      assert.same({ 4, 5, 6, 12, 12, 20, 32 }, list)
      local low = nn.DDP(make(), {})
      local half = make()
      local mixed = nn.DDP(half, { mixed_precision = { param_dtype = "bfloat16", reduce_dtype = "float32" },
        delay_all_reduce_named_params = LAST, param_to_hook_all_reduce = half[1].weight })
      for _, c in ipairs(dist.record(function() mixed(x):sum():backward() end)) do
        if c.op == "all_reduce" then assert.equal("float32", c.dtype) end
      end
      assert.equal("float64", half[5].bias.grad.dtype)
      low(x):sum():backward()
      assert.is_true((half[5].bias.grad - low.module[5].bias.grad):abs():max():item() < 1e-6)
    end)

    it("starts every rank with rank 0's delayed parameters", function(rank)
      local ms, nn, dist = load()
      local m = make()
      ms.no_grad(function() m[5].bias:fill_(rank) end)
      nn.DDP(m, { delay_all_reduce_named_params = LAST, param_to_hook_all_reduce = m[1].weight })
      assert.same({ 0, 0 }, m[5].bias:tolist())
      assert.equal(world, dist.world_size())
    end)

    it("reports gradients that arrive too late", function(rank)
      local _, nn = load()
      local m = make()
      local ddp = nn.DDP(m, { delay_all_reduce_named_params = { "1.weight" }, param_to_hook_all_reduce = m[5].weight })
      -- Each rank raises its own error or the first one that a peer published.
      assert.matches("DDP: the gradient of parameter '1.weight' arrived after the gradient of param_to_hook_all_reduce ('5.weight') and is not reduced; "
        .. "param_to_hook_all_reduce must be the parameter whose gradient arrives last", message(function() ddp(input(rank, 1)):sum():backward() end),
        1, true)
    end)

    it("reports a hooked gradient that never arrived", function(rank)
      local ms, nn = load()
      local m = make()
      local Skips = nn.Module:extend "Skips"
      function Skips:init(inner)
        self.inner = inner
        self.other = nn.Parameter(ms.ones(1))
      end
      function Skips:forward(x) return self.inner(x) end
      local skips = Skips(m)
      local names = {}
      for k, name in ipairs(ALL) do names[k] = "inner." .. name end
      names[#names + 1] = "other"
      local never = nn.DDP(skips, { delay_all_reduce_named_params = names, param_to_hook_all_reduce = skips.other })
      never(input(rank, 1)):sum():backward()
      assert.equal(("Expected to have finished reduction in the prior iteration before starting a new one. On rank %d no gradient arrived at "
        .. "param_to_hook_all_reduce ('other'), so those of delay_all_reduce_named_params were not reduced."):format(
        rank),
        message(never, input(rank, 2)))
    end)
  end)
end

describe("DDP's delayed gradients", function()
  it("require a parameter to hook, and known, trained parameters", function()
    local ms, nn = load()
    local m = make()
    local function try(list, hook)
      return message(nn.DDP, m, { delay_all_reduce_named_params = list, param_to_hook_all_reduce = hook })
    end
    assert.matches("'delay_all_reduce_named_params' and 'param_to_hook_all_reduce' must be given together", try({ "1.weight" }), 1,
      true)
    assert.matches("'delay_all_reduce_named_params' and 'param_to_hook_all_reduce' must be given together", try(nil, m[1].weight),
      1, true)
    assert.equal("DDP: delay_all_reduce_named_params[2]: unknown parameter '1.wieght'; did you mean '1.weight'?",
      try({ "1.bias", "1.wieght" }, m[1].weight))
    assert.equal("DDP: delay_all_reduce_named_params[1] is a number (3), expected a name or a pair {name, parameter}",
      try({ 3 }, m[1].weight))
    assert.equal("DDP: delay_all_reduce_named_params[1] is a Parameter, expected a name or a pair {name, parameter}",
      try({ m[1].bias }, m[1].weight))
    assert.equal("DDP: delay_all_reduce_named_params[1]: the parameter given with '1.weight' is not the module's parameter of that name",
      try({ { "1.weight", m[1].bias } }, m[1].weight))
    assert.equal("DDP: delay_all_reduce_named_params[2]: '1.bias' is in the list twice",
      try({ "1.bias", "1.bias" }, m[1].weight))
    assert.equal("DDP: option 'param_to_hook_all_reduce' is a Parameter, expected a parameter of the module",
      try({ "1.bias" }, nn.Parameter(ms.ones(1))))
    m[2].bias.requires_grad = false
    assert.equal("DDP: delay_all_reduce_named_params[1]: parameter '2.bias' is frozen, expected one that requires a gradient",
      try({ "2.bias" }, m[1].weight))
    local sparse = nn.Sequential(nn.Embedding(3, 2, { sparse = true }), nn.Linear(2, 2))
    assert.matches("parameter '1.weight' belongs to a sparse embedding", message(nn.DDP, sparse,
      { delay_all_reduce_named_params = { "1.weight" }, param_to_hook_all_reduce = sparse[2].weight }), 1, true)
    local ddp = nn.DDP(m, { delay_all_reduce_named_params = { "1.bias" }, param_to_hook_all_reduce = m[1].weight })
    assert.equal("join: not supported with the option delay_all_reduce_named_params",
      message(ddp.join, ddp, function() end))
  end)
end)
