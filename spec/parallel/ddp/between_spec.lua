-- SPDX-License-Identifier: MIT
--- nn.DDP: whatever runs between a forward and its backward, the gradients are those of one process, or all ranks raise
--- an error (docs/semantics.md#ddp-no-sync). The right values are closed forms: the gradient of a layer is its input.
local ranks = require "spec.support.ranks"

local long = os.getenv "MOONSHARD_LONG"

local load = require "spec.support.load"

-- The loss is the sum of a(x) + 2 b(x), so the gradients of the weights are x and 2 x; `spare` is used by no rank.
local function make(spare)
  local ms, nn = load()
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.a, self.b = nn.Linear(2, 1, { bias = false }), nn.Linear(2, 1, { bias = false })
    if spare then self.spare = nn.Linear(2, 1, { bias = false }) end
    self:register_buffer("calls", ms.zeros(1))
  end
  function Net:forward(x) return { self.a(x) + self.b(x) * 2 } end
  local net = Net()
  for _, p in ipairs(net:parameters()) do nn.init.ones_(p) end
  return net
end

local function total(m, x) return m(x)[1]:sum() end

-- What runs between forward and backward: fn(m, x, loss) -> a factor of the gradient that is right then (default: 1).
local between = {
  { "nothing", function() end },
  { "no_grad", function(m, x) load().no_grad(m, x) end },
  { "inference_mode", function(m, x) load().inference_mode(m, x) end },
  { "eval", function(m, x)
    m:eval()
    m(x)
    m:train()
  end },
  { "eval and no_grad", function(m, x)
    m:eval()
    load().no_grad(m, x)
    m:train()
  end },
  { "an evaluation that fails", function(m) assert.is_false(pcall(load().no_grad, m, load().ones(1, 3))) end },
  { "a forward that fails", function(m) assert.is_false(pcall(m, load().ones(1, 3))) end },
  { "no_grad inside no_sync", function(m, x) m:no_sync(load().no_grad, m, x) end },
  { "a forward inside no_sync", function(m, x) m:no_sync(m, x) end },
  { "a micro-batch inside no_sync", function(m, x)
    m:no_sync(function() total(m, x * 4):backward() end)
    return 5
  end },
  { "a second forward", function(m, x) m(x) end },
  { "a second forward and its backward", function(m, x)
    total(m, x * 4):backward()
    return 5
  end },
  { "its own backward, the graph retained", function(_, _, loss)
    loss:backward(nil, { retain_graph = true })
    return 2
  end },
  { "the gradient of the input", function(m, x, loss)
    local ms = load()
    ms.testing.assert_close(ms.grad(loss, x, { retain_graph = true })[1]:float(),
      (m.a.weight + m.b.weight * 2):detach(), { rtol = 1e-2, atol = 1e-2 })
  end },
  { "the gradients of parameters", function(m, x, loss)
    local ms = load()
    local own = ms.grad(loss, m.a.weight, { retain_graph = true })[1]      -- this rank's own
    ms.testing.assert_close(own:float(), x:detach():float())
  end },
  { "gradients that fail", function(m, _, loss)
    local ms = load()
    assert.is_false(pcall(ms.grad, loss, ms.ones(1, { requires_grad = true }), { retain_graph = true }))
    assert.is_true(m.training)
  end },
}

local low = { param_dtype = "bfloat16", reduce_dtype = "float32" }
local function hooked(name) return function(m) m:register_comm_hook(nil, load().nn.ddp_hooks[name]) end end
local function delayed(m)
  return { delay_all_reduce_named_params = { "a.weight" }, param_to_hook_all_reduce = m.a.weight }
end

-- Inside join, ranks that have finished take part in one reduction for each forward. If parameters are stepped in
-- backward, a graph that was recorded before is refused, because its saved values have changed.
local not_in_join = { ["a second forward"] = true, ["a second forward and its backward"] = true, eval = true,
  ["a forward that fails"] = true, ["its own backward, the graph retained"] = true }
local not_stepped = { ["a second forward and its backward"] = true, ["its own backward, the graph retained"] = true }

-- { name, options or a function of the module that returns them, setup(ddp), fields: spare: with an unused parameter;
-- joins: inside join; steps: parameters are stepped in backward; refuses: what may raise on all ranks instead }
local kinds = {
  { "no options", {} },
  { "a bucket a parameter", { bucket_cap_mb = 1e-6 } },
  { "find_unused_parameters", { find_unused_parameters = true, bucket_cap_mb = 1e-6 }, spare = true },
  { "static_graph", { static_graph = true, bucket_cap_mb = 1e-6 }, spare = true },
  { "gradient_as_bucket_view", { gradient_as_bucket_view = true } },
  { "gradient_as_bucket_view and find_unused_parameters", { gradient_as_bucket_view = true,
    find_unused_parameters = true }, spare = true },
  { "skip_all_reduce_unused_params", { skip_all_reduce_unused_params = true, find_unused_parameters = true,
    bucket_cap_mb = 1e-6 }, spare = true },
  { "mixed_precision", { mixed_precision = low } },
  { "delay_all_reduce_named_params", delayed },
  { "join", {}, joins = true, refuses = not_in_join },
  { "allreduce_hook", {}, hooked "allreduce_hook" },
  { "powerSGD_hook", {}, function(m)
    local hooks = load().nn.ddp_hooks
    m:register_comm_hook(hooks.PowerSGDState(nil, { start_powerSGD_iter = 2, min_compression_rate = 100 }),
      hooks.powerSGD_hook)
  end },
  { "hook_then_optimizer", {}, function(m)
    local ms, nn = load()
    m:register_comm_hook(nil, nn.ddp_hooks.hook_then_optimizer(nn.ddp_hooks.allreduce_hook,
      function(list) return ms.optim.SGD(list, { lr = 1 }) end))
  end, steps = true, refuses = not_stepped },
  { "hook_with_zero_step", {}, function(m)
    local ms, nn = load()
    local zero = ms.optim.ZeroRedundancyOptimizer(m:parameters(), { optimizer_class = ms.optim.SGD, lr = 1,
      overlap_with_ddp = true })
    m:register_comm_hook(nil, nn.ddp_hooks.hook_with_zero_step(nn.ddp_hooks.allreduce_hook, m, zero))
  end, steps = true, refuses = not_stepped },
  { "broadcast_buffers = false", { broadcast_buffers = false }, long = true },
  { "init_sync = false", { init_sync = false }, long = true },
  { "mixed_precision that casts no inputs", { mixed_precision = { param_dtype = "bfloat16", cast_forward_inputs = false } },
    long = true, half = true },
  { "reduce_dtype alone", { mixed_precision = { reduce_dtype = "bfloat16" } }, long = true },
  { "fp16_compress_hook", {}, hooked "fp16_compress_hook", long = true },
  { "post_localSGD_hook", {}, function(m)
    local hooks = load().nn.ddp_hooks
    m:register_comm_hook(hooks.PostLocalSGDState { start_localSGD_iter = 1000 }, hooks.post_localSGD_hook)
  end, long = true },
  { "static_graph and join", { static_graph = true }, joins = true, long = true, refuses = not_in_join },
}

-- Whether all ranks have raised; fails unless all or none have.
local function all_failed(ok, why)
  local _, _, dist = load()
  dist.recover()
  local list, n = dist.all_gather_object { ok, tostring(why) }, 0
  for _, entry in ipairs(list) do n = n + (entry[1] and 0 or 1) end
  assert.is_true(n == 0 or n == #list, tostring(why))
  return n > 0
end

local function check(kind, case, rank, world)
  local ms, nn = load()
  local net = make(kind.spare)
  local options = type(kind[2]) == "function" and kind[2](net) or kind[2]
  local m = nn.DDP(net, options)
  if kind[3] then kind[3](m) end
  local x = ms.full({ 1, 2 }, rank + 1, { requires_grad = true })
  if kind.half then x = x:to "bfloat16" end
  local optimizer = not kind.steps and ms.optim.SGD(m:parameters(), { lr = 1 })
  for _ = 1, 3 do                                       -- before and after the buckets are rebuilt
    local factor = 1
    local function body()
      m:zero_grad()
      if options.static_graph and rawget(m, "_ddp").synced_backwards == 0 then        -- fixes the graph
        total(m, x):backward()
        m:zero_grad()
      end
      local loss = total(m, x)
      factor = case[2](m, x, loss) or 1
      loss:backward()
      if optimizer then optimizer:step() end
    end
    local ok, why
    ms.catch_warnings(function()
      if kind.joins then ok, why = pcall(m.join, m, {}, body) else ok, why = pcall(body) end
    end)
    if all_failed(ok, why) then
      assert.is_true(kind.refuses and kind.refuses[case[1]] or false, ("%s: %s"):format(case[1], tostring(why)))
      return
    end
    local mean = factor * (world + 1) / 2
    local weights = {}
    for k, p in ipairs { net.a.weight, net.b.weight } do
      local got = p.grad and p.grad:tolist()[1][2]
      assert.is_true(got ~= nil and math.abs(got - k * mean) <= 4e-3 * k * mean,
        ("%s: the gradient is %s on rank %d, right %g"):format(case[1], tostring(got), rank, k * mean))
      weights[k] = p:tolist()
    end
    for _, other in ipairs(ms.dist.all_gather_object(weights)) do assert.same(weights, other) end
  end
end

for world = 1, 4 do
  ranks.describe(world, ("between forward and backward of DDP on %d ranks #mpi"):format(world), function()
    for k, kind in ipairs(kinds) do
      if long or not kind.long and (world == 2 or k <= 6) then
        it(("any call leaves the gradients of one process: %s"):format(kind[1]), function(rank)
          for _, case in ipairs(between) do check(kind, case, rank, world) end
        end)
      end
    end

    it("each backward of one of several outputs reduces, where parameters may be unused", function(rank)
      local ms, nn = load()
      local net = require("spec.support.models.double_linear").DoubleLinear(1)
      for _, p in ipairs(net:parameters()) do nn.init.ones_(p) end
      ms.catch_warnings(function()
        local m = nn.DDP(net, { find_unused_parameters = true })
        for _ = 1, 2 do
          m:zero_grad()
          local a, b = m(ms.full({ 1, 1 }, rank + 1))
          a:sum():backward()
          assert.is_nil(net.lin2.weight.grad)
          b:sum():backward()
          for _, p in ipairs { net.lin1.weight, net.lin2.weight } do
            assert.near((world + 1) / 2, p.grad:item(), 1e-6)
          end
        end
      end)
    end)

    it("outputs may be in objects, in checkpoints, or computed in a hook of ms.grad", function(rank)
      local ms, nn = load()
      local Object = {}
      local Net = nn.Module:extend "Net"
      function Net:init() self.lin = nn.Linear(2, 1, { bias = false }) end
      function Net:forward(x)
        local y = self.lin(x):sum():keep()
        return setmetatable({ model = self, y = y }, { __index = Object })
      end
      local x = ms.full({ 1, 2 }, rank + 1, { requires_grad = true })
      for _, options in ipairs { {}, { find_unused_parameters = true }, { static_graph = true } } do
        ms.catch_warnings(function()
          local objects, plain = nn.DDP(Net(), options), nn.DDP(nn.Linear(2, 1, { bias = false }), options)
          for _ = 1, 2 do
            objects:zero_grad()
            objects(x).y:backward()
            assert.near((world + 1) / 2, objects.module.lin.weight.grad:tolist()[1][1], 1e-6)
            plain:zero_grad()
            ms.checkpoint(plain, x):sum():backward()
            assert.near((world + 1) / 2, plain.module.weight.grad:tolist()[1][1], 1e-6)
            plain:zero_grad()
            local loss, y = plain(x):sum(), ms.ones(1, { requires_grad = true })
            local z = y * 2
            z:register_hook(function() loss:backward() end)
            ms.grad(z, y)
            assert.near((world + 1) / 2, plain.module.weight.grad:tolist()[1][1], 1e-6)
          end
        end)
      end
    end)

    it("wrappers that share some parameters each reduce the backward of their own outputs", function(rank)
      local ms, nn = load()
      local shared, own = nn.Linear(2, 1, { bias = false }), nn.Linear(1, 1, { bias = false })
      nn.init.ones_(own.weight)
      local part, whole = nn.DDP(shared), nn.DDP(nn.Sequential(own, nn.Sequential(nn.Linear(1, 2), shared)))
      local x, y = ms.full({ 1, 2 }, rank + 1), ms.full({ 1, 1 }, rank + 1)
      local function mean(p)
        local all = ms.dist.all_gather_object(p.grad:tolist())
        for _, other in ipairs(all) do assert.same(all[1], other) end
      end
      for _ = 1, 3 do
        local a, b = part(x):sum(), whole(y):sum()
        a:backward()
        assert.near((world + 1) / 2, shared.weight.grad:tolist()[1][1], 1e-6)
        b:backward()
        for _, p in ipairs(whole:parameters()) do mean(p) end
        whole:zero_grad()
        b, a = whole(y):sum(), part(x):sum()
        b:backward()
        a:backward()
        for _, p in ipairs(whole:parameters()) do mean(p) end
        whole:zero_grad()
      end
    end)

    it("captured steps reduce although the model runs again", function(rank)
      local ms, nn = load()
      for _, options in ipairs { {}, { static_graph = true }, { gradient_as_bucket_view = true } } do
        local m = nn.DDP(make(), options)
        local optimizer = ms.optim.SGD(m:parameters(), { lr = 0 })
        local step = ms.capture(function(x)
          optimizer:zero_grad()
          local loss = total(m, x)
          ms.no_grad(m, x)
          loss:backward()
          optimizer:step()
        end, { warmup = 2 })
        for scale = 1, 5 do
          step(ms.full({ 1, 2 }, scale * (rank + 1)))
          assert.near(scale * (world + 1) / 2, m.a.weight.grad:tolist()[1][1], 1e-5)
        end
      end
    end)
  end)
end
