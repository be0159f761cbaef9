-- SPDX-License-Identifier: MIT
--- The reference suite test_fsdp_comm_hooks: each test with its whole grid, at 2, 3 and 4 ranks, on the CPU and on a
--- GPU (the emulated one if there is no other).
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"

local STRATEGIES = { "no_shard", "full_shard", "shard_grad_op" }
local load = require("spec.support.wrapped").load

local function make_net(device, has_wrapping, strategy, mixed_precision)
  local ms, nn, fsdp = load()
  ms.manual_seed(0)
  local options = { sharding_strategy = strategy, mixed_precision = mixed_precision, device_id = device }
  local Net = nn.Module:extend "Net"
  function Net:init()
    if has_wrapping then
      self.net = fsdp.FSDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), fsdp.FSDP(nn.Linear(16, 8), options)), options)
    else
      self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    end
    self.out = nn.Linear(8, 4)
  end
  function Net:forward(x) return self.out(nn.F.relu(self.net(x))) end
  return Net()
end

local function init_model(device, has_wrapping, strategy, mixed_precision)
  local _, _, fsdp, _, quietly = load()
  return quietly(function()
    local core = make_net(device, has_wrapping, strategy, mixed_precision)
    return fsdp.FSDP(core, { sharding_strategy = strategy, mixed_precision = mixed_precision,
      device_id = device }):to(device)
  end)
end

-- The two hooks of the suite: registered, never called.
local function dummy_hook_for_no_shard(state, grad)
  local _, _, _, dist = load()
  grad:add_(state.noise)
  dist.all_reduce(grad, { group = state.process_group })
end

local function dummy_hook_for_sharded(state, grad, output)
  local function custom_reduce_scatter() return output end
  grad:add_(state.noise)
  custom_reduce_scatter()
end

-- The suite gives each strategy the hook of the other one.
local function dummy_hook(strategy)
  return strategy ~= "no_shard" and dummy_hook_for_no_shard or dummy_hook_for_sharded
end

local function non_roots(model)
  local _, _, fsdp = load()
  local list = {}
  for _, m in ipairs(fsdp.fsdp_modules(model)) do
    if not m:check_is_root() then list[#list + 1] = m end
  end
  return list
end

for _, device in ipairs { "cpu", "cuda:0" } do
  for world = 2, 4 do
    ranks.describe(world, ("test_fsdp_comm_hooks on %d ranks, %s"):format(world, device), function()
      for _, strategy in ipairs(STRATEGIES) do
        it("test_default_communication_hook_behavior, " .. strategy, function(rank)
          local ms, nn, fsdp, _, quietly = load()
          local net = nn.Linear(1, world, { bias = false })
          local input = ms.tensor({ rank }, { dtype = "float32" }):to(device)
          local model = quietly(fsdp.FSDP, net, { device_id = device, sharding_strategy = strategy }):to(device)
          for _, entry in ipairs(fsdp.fsdp_modules(model)) do assert.is_nil(entry.comm_hook) end
          local expected = 0
          for r = 0, world - 1 do expected = expected + r end
          expected = expected / world
          for _ = 1, 4 do
            model:zero_grad()
            local loss = model(input):sum()
            loss:backward()
            local grad = model.params[1].grad
            assert.equal(device, grad.device)
            assert.equal(expected, grad[1]:item(), ("Expected hook grad of %g but got %g"):format(expected,
              grad[1]:item()))
          end
        end)

        for _, has_wrapping in ipairs { true, false } do
          it(("test_default_communication_hook_initialization, %s, has_wrapping = %s"):format(strategy,
            tostring(has_wrapping)), function()
            local _, _, fsdp = load()
            local model = init_model(device, has_wrapping, strategy)
            local modules = fsdp.fsdp_modules(model)
            assert.equal(has_wrapping and 3 or 1, #modules)
            for _, m in ipairs(modules) do assert.is_nil(m.comm_hook) end
            local state, hook = { process_group = nil, noise = 1234 }, dummy_hook(strategy)
            model:register_comm_hook(state, hook)
            raises("A communication hook is already registered", model.register_comm_hook, model, state, hook)
            for _, m in ipairs(modules) do
              assert.equal(hook, m.comm_hook)
              assert.equal(state, m.comm_hook_state)
            end
          end)
        end

        it("test_registering_hook_non_root, " .. strategy, function()
          local model = init_model(device, true, strategy)
          local submodules = non_roots(model)
          raises("register_comm_hook can only be called on a root instance.", submodules[2].register_comm_hook,
            submodules[2],
            { noise = 1234 }, dummy_hook(strategy))
        end)

        it("test_registering_hook_submodules, " .. strategy, function()
          local model = init_model(device, true, strategy)
          local submodules = non_roots(model)
          submodules[2].comm_hook = dummy_hook(strategy)
          raises("A communication hook is already registered", model.register_comm_hook, model, { noise = 1234 },
            dummy_hook(strategy))
          assert.is_nil(model.comm_hook)              -- all checks come before any assignment
        end)

        for _, has_wrapping in ipairs { true, false } do
          for _, case in ipairs { { "fp16", "float16" }, { "bf16", "bfloat16" } } do
            local short, dtype = case[1], case[2]
            it(("test_%s_hook, %s, has_wrapping = %s"):format(short, strategy, tostring(has_wrapping)), function()
              local ms, _, fsdp, dist = load()
              local state = fsdp.comm_hooks.LowPrecisionState(dist.default_group())
              local hook = fsdp.comm_hooks[short .. "_compress_hook"]
              ms.manual_seed(0)
              local with_hook = init_model(device, has_wrapping, strategy)
              with_hook:register_comm_hook(state, hook)
              local with_mp = init_model(device, has_wrapping, strategy, fsdp.MixedPrecision { reduce_dtype = dtype })
              local optim_hook = ms.optim.SGD(with_hook:parameters(), { lr = 0.1 })
              local optim_mp = ms.optim.SGD(with_mp:parameters(), { lr = 0.1 })
              local input = ms.rand(16, 8):to(device)
              with_hook:train()
              with_mp:train()
              local loss_hook, loss_mp = with_hook(input):sum(), with_mp(input):sum()
              loss_hook:backward()
              assert.equal(state.parameter_type, with_hook.params[1].grad.dtype)
              loss_mp:backward()
              optim_hook:step()
              optim_mp:step()
              dist.barrier()
              local a, b = with_hook:parameters(), with_mp:parameters()
              assert.equal(#a, #b)
              for k = 1, #a do
                assert.is_true(a[k].grad:equal(b[k].grad))        -- bit for bit
                assert.is_true(a[k].grad:abs():sum():item() > 0)
              end
            end)
          end
        end
      end

      for _, strategy in ipairs { "hybrid_shard", "hybrid_shard_zero2" } do
        it("test_registering_hook_hybrid_strategy, " .. strategy, function()
          local _, nn, fsdp = load()
          local policy = fsdp.wrap.module_wrap_policy { nn.Linear }
          local model = fsdp.FSDP(make_net(device, false):to(device),
            { auto_wrap_policy = policy, sharding_strategy = strategy })
          raises("Communication hook is not supported for hybrid strategies: " .. strategy, model.register_comm_hook,
            model, { noise = 1234 },
            dummy_hook_for_sharded)
        end)
      end
    end)
  end
end
