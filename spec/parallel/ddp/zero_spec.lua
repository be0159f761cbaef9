-- SPDX-License-Identifier: MIT
--- DDP's hooks that step a ZeroRedundancyOptimizer during the reductions (docs/semantics.md#ddp-hooks): bit for bit the
--- results of a plain optimizer step after backward.
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"

local HOOKS = { "hook_with_zero_step", "hook_with_zero_step_interleaved" }

local function load()
  local ms = require "moonshard"
  return ms, ms.nn, ms.dist, ms.optim, ms.nn.ddp_hooks
end

-- Five layers, of which an even step leaves out one; its frozen bias does not change.
local function make()
  local ms, nn = load()
  ms.manual_seed(31)
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.first, self.second, self.extra, self.last = nn.Linear(4, 9), nn.Linear(9, 5), nn.Linear(5, 5), nn.Linear(5, 3)
    self.second.bias.requires_grad = false
  end
  function Net:forward(x, skip)
    x = self.second(self.first(x):tanh())
    if not skip then x = self.extra(x):tanh() end
    return self.last(x)
  end
  return Net()
end

local function input(rank, step)
  local ms = load()
  ms.manual_seed(100 * step + rank)
  return ms.randn(6, 4)
end

local function same(a, b, what)
  for name, p in a:named_parameters() do
    local q = b:get_parameter(name)
    assert.is_true(p:equal(q), what .. name)
    if p.grad then assert.is_true(p.grad:equal(q.grad), what .. "gradient of " .. name) else assert.is_nil(q.grad) end
  end
end

local function overlapped(hook, ddp, options)
  local _, _, _, optim, hooks = load()
  local o = { optimizer_class = optim.AdamW, lr = 0.02, overlap_with_ddp = true }
  for name, value in pairs(options or {}) do o[name] = value end
  local zero = optim.ZeroRedundancyOptimizer(ddp:parameters(), o)
  ddp:register_comm_hook(nil, hooks[hook](hooks.allreduce_hook, ddp, zero))
  return zero
end

for world = 1, 4 do
  ranks.describe(world, ("steps of ZeRO under DDP's reductions on %d ranks #mpi"):format(world), function()
    for _, hook in ipairs(HOOKS) do
      for _, case in ipairs {
        { "one bucket", {} }, { "a bucket a parameter", { bucket_cap_mb = 1e-6 } },
        { "gradients in buckets, parameters in blocks", { bucket_cap_mb = 2e-4, gradient_as_bucket_view = true },
        { parameters_as_bucket_view = true } },
        { "unused parameters", { bucket_cap_mb = 1e-6, find_unused_parameters = true }, nil, true },
        { "unused parameters, not sent", { bucket_cap_mb = 1e-6, find_unused_parameters = true,
        skip_all_reduce_unused_params = true }, nil, true },
        { "a static graph", { bucket_cap_mb = 1e-6, static_graph = true } },
        { "mixed precision", { bucket_cap_mb = 1e-6, mixed_precision = { param_dtype = "bfloat16",
        reduce_dtype = "float32" } } },
        { "delayed gradients", { bucket_cap_mb = 1e-6, delay_all_reduce_named_params = { "extra.weight",
        "last.bias" } } },
      } do
        it(("trains as AdamW does, %s: %s"):format(hook, case[1]), function(rank)
          local ms, nn, _, optim = load()
          local a, b = make(), make()
          local function options_of(m)
            local o = {}
            for name, value in pairs(case[2]) do o[name] = value end
            if o.delay_all_reduce_named_params then o.param_to_hook_all_reduce = m.first.weight end
            return o
          end
          local plain, ddp = nn.DDP(a, options_of(a)), nn.DDP(b, options_of(b))
          local adam, zero = optim.AdamW(plain:parameters(), { lr = 0.02 }), overlapped(hook, ddp, case[3])
          ms.catch_warnings(function()
            for step = 1, 5 do
              ms.scope(function()
                local x, skip = input(rank, step), case[4] and step % 2 == 0
                for _, o in ipairs { adam, zero } do
                  o.param_groups[1].lr = 0.02 / step
                  -- Otherwise unused parameters keep the gradients of the step before.
                  if step ~= 4 then o:zero_grad() end
                end
                if step == 3 then                         -- no step is taken inside no_sync
                  local before = b.first.weight:detach():clone()
                  plain:no_sync(function() plain(x, skip):sum():backward() end)
                  ddp:no_sync(function() ddp(x, skip):sum():backward() end)
                  assert.is_true(before:equal(b.first.weight))
                end
                plain(x, skip):pow(2):sum():backward()
                adam:step()
                ddp(x, skip):pow(2):sum():backward()
                same(a, b, ("step %d: "):format(step))
              end)
            end
          end)
          zero:consolidate_state_dict(0)
          if rank == 0 then
            local expected, got = adam:state_dict().state, zero:state_dict().state
            for at, entry in ms.sorted_pairs(expected) do
              assert.equal(entry.step, got[at].step)
              assert.is_true(entry.exp_avg_sq:equal(got[at].exp_avg_sq))
            end
          end
        end)
      end

      it(hook .. " sends each parameter once, from the rank that steps it", function(rank)
        local ms, nn, dist = load()
        local ddp = nn.DDP(make(), { bucket_cap_mb = 1e-6, broadcast_buffers = false })
        overlapped(hook, ddp)
        for step = 1, 3 do
          local loss = ddp(input(rank, step)):sum()
          local sent, pieces = 0, 0
          for _, c in ipairs((dist.record(function() loss:backward() end))) do
            if c.op == "broadcast" then sent, pieces = sent + c.output_numel, pieces + 1 end
          end
          local all = 36 + 9 + 45 + 5 + 25 + 5 + 15 + 3               -- frozen parameters also belong to a rank
          assert.same(world > 1 and { all, 8 } or { 0, 0 }, { sent, pieces })
        end
        assert.same({ "`step()` should not be included in the training loop when `overlap_with_ddp=true`" },
          (ms.catch_warnings(function()
            local zero = overlapped(hook, nn.DDP(make()))
            assert.is_nil(zero:step())
          end)))
      end)

      it(hook .. " abandons a failed backward, and continues", function(rank)
        local ms, nn, _, optim = load()
        local a, b = make(), make()
        local plain, ddp = nn.DDP(a, { bucket_cap_mb = 1e-6 }), nn.DDP(b, { bucket_cap_mb = 1e-6 })
        local adam, zero = optim.AdamW(plain:parameters(), { lr = 0.02 }), overlapped(hook, ddp)
        local function both(step)
          adam:zero_grad()
          zero:zero_grad()
          plain(input(rank, step)):sum():backward()
          adam:step()
          ddp(input(rank, step)):sum():backward()
        end
        both(1)
        local loss = ddp(input(rank, 2)):sum()
        local handle = b.first.weight:register_hook(function() error "no gradient" end)
        assert.matches("no gradient", message(loss.backward, loss), 1, true)
        handle:remove()
        for name, p in a:named_parameters() do assert.is_true(p:equal(b:get_parameter(name)), name) end
        both(3)
        ms.scope(function() both(4) end)
        same(a, b, "later: ")
      end)

      it(hook .. " takes no part in join", function(rank)
        local _, nn = load()
        local ddp = nn.DDP(make())
        overlapped(hook, ddp)
        assert.matches(hook .. ": not supported inside join, because finished ranks take no optimizer steps",
          message(ddp.join, ddp, function()
          ddp(input(rank, 1)):sum():backward()
        end), 1, true)
      end)
    end
  end)
end

describe("hooks of DDP that step ZeRO", function()
  it("refuse unsupported arguments", function()
    local _, nn, _, optim, hooks = load()
    local ddp = nn.DDP(make())
    local plain = optim.ZeroRedundancyOptimizer(ddp:parameters(), { optimizer_class = optim.SGD })
    local zero = optim.ZeroRedundancyOptimizer(ddp:parameters(),
      { optimizer_class = optim.SGD, overlap_with_ddp = true })
    for _, name in ipairs(HOOKS) do
      local function try(...) return message(hooks[name], ...) end
      assert.equal(name .. ": argument 1 is nil, expected a communication hook", try(nil, ddp, zero))
      assert.equal(name .. ": argument 2 is a Net, expected a module wrapped in nn.DDP",
        try(hooks.allreduce_hook, ddp.module, zero))
      assert.equal(name .. ": argument 3 is a SGD, expected a ZeroRedundancyOptimizer",
        try(hooks.allreduce_hook, ddp, optim.SGD(ddp:parameters())))
      assert.equal("ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=true` to use this hook properly",
        try(hooks.allreduce_hook, ddp, plain))
    end
  end)
end)

ranks.describe(2, "hooks of DDP that step ZeRO on 2 ranks #mpi", function()
  it("require the optimizer on DDP's ranks", function(rank)
    local _, nn, dist, optim, hooks = load()
    local groups = { dist.new_group { 0 }, dist.new_group { 1 } }
    local ddp = nn.DDP(make())
    local zero = optim.ZeroRedundancyOptimizer(ddp:parameters(),
      { optimizer_class = optim.SGD, overlap_with_ddp = true, process_group = groups[rank + 1] })
    assert.equal(("hook_with_zero_step: the optimizer is sharded over ranks %d, expected those over which DDP reduces gradients, 0, 1"):format(rank),
      message(hooks.hook_with_zero_step, hooks.allreduce_hook, ddp, zero))
  end)
end)
