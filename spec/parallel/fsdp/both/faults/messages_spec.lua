-- SPDX-License-Identifier: MIT
--- FSDP's messages about wrong use: those of PyTorch's FSDP that no other spec provokes.
---
--- Messages that cannot occur: hooks of other arities (hooks always get all arguments), gradients of another shape or
--- device (`grad` refuses them), missing accelerators and modules left on the CPU (it is a compute device), parameters
--- of an offloading module moved to a GPU (shards stay on the CPU: below), empty lists of parameters, gradients of
--- several devices in a scaler.
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function inner_and_root(inner_options, options)
  local _, nn, fsdp, _, quietly = load()
  return quietly(function() return fsdp.FSDP(nn.Sequential(fsdp.FSDP(nn.Linear(2, 2), inner_options), nn.Linear(2, 2)),
    options) end)
end

ranks.describe(2, "messages of FSDP", function()
  it("are about parameters that are another instance's", function()
    local _, nn, fsdp, _, quietly = load()
    local inner = quietly(fsdp.FSDP, nn.Linear(2, 2))
    local other = nn.Linear(2, 2)
    other.more = inner.flat_param
    raises("Cannot flatten a `FlatParameter`", quietly, fsdp.FSDP, other)
  end)

  it("are about options that differ between instances", function()
    local ms = load()
    raises("Expects one homogeneous value for limit_all_gathers but got both true and false",
      inner_and_root({ limit_all_gathers = false }, {}), ms.ones(1, 2))
  end)

  it("are about groups that hybrid instances do not share", function()
    local ms, _, _, dist = load()
    local self, all = dist.self_group(), dist.default_group()
    local again = dist.new_group { 0, 1 }
    local function of(pair) return { sharding_strategy = "hybrid_shard", process_group = pair } end
    raises("Some instances use a hybrid sharding strategy, but intra-node process groups do not match",
      inner_and_root(of { again, self }, of { all, self }), ms.ones(1, 2))
    local alone = dist.rank() == 0 and dist.new_group { 0 } or nil
    if not alone then dist.new_group { 0 } end
    local mine = dist.new_group { 1 }
    alone = alone or mine
    raises("Some instances use a hybrid sharding strategy, but inter-node process groups do not match",
      inner_and_root(of { all, alone }, of { all, self }), ms.ones(1, 2))
  end)

  it("are about apply while parameters are whole", function()
    local ms, nn, fsdp, _, quietly = load()
    local model = inner_and_root({}, {})
    raises("expected to be in states ['idle'] but current state is 'summon_full_params'", fsdp.summon_full_params,
      model, function()
      model:apply(function() end)
    end)
    local layer, wrapped = nn.Linear(2, 2), nil
    layer:register_forward_hook(function() wrapped:apply(function() end) end)
    wrapped = quietly(fsdp.FSDP, layer)
    raises("expected to be in states ['idle'] but current state is 'forward_backward'", wrapped, ms.ones(1, 2))
  end)

  it("are about summon_full_params in backward, and with unsupported gradients", function()
    local ms, _, fsdp, dist = load()
    local model = inner_and_root({}, {})
    local y = model(ms.ones(1, 2))
    y:register_hook(function()
      dist.barrier()             -- otherwise the error of a rank that is ahead could end the other's backward
      fsdp.summon_full_params(model, function() end)
    end)
    local loss = y:sum()
    raises("Cannot manually unshard parameters during forward/backward", loss.backward, loss)
    local pieces = inner_and_root({ use_orig_params = true }, { use_orig_params = true })
    raises("with_grads=true, use_orig_params=true, offload_to_cpu=true is not supported yet", fsdp.summon_full_params,
      pieces,
      { with_grads = true, offload_to_cpu = true }, function() end)
  end)

  it("are about modules on several devices, on another device than device_id, and moved to a GPU with CPU offload", function()
    local ms, nn, fsdp, dist, quietly = load()
    if ms.cuda.device_count() < 2 then return end
    local function pair(a, b) return nn.Sequential(nn.Linear(2, 2):to(a), nn.Linear(2, 2):to(b)) end
    raises("To support a module with both CPU and GPU params, please pass in device_id argument.", quietly, fsdp.FSDP,
      pair("cpu", "cuda:0"))
    local moved = quietly(fsdp.FSDP, pair("cpu", "cuda:0"), { device_id = "cuda:0" })
    assert.equal("cuda:0", moved.params[1].device)
    raises("FSDP only supports single device modules but got params on ['cuda:0', 'cuda:1']", quietly, fsdp.FSDP,
      pair("cuda:0", "cuda:1"))
    raises(("Inconsistent compute device and `device_id` on rank %d: cuda:1 vs cuda:0"):format(dist.rank()), quietly,
      fsdp.FSDP,
      nn.Linear(2, 2):to "cuda:1", { device_id = "cuda:0" })
    local warnings = ms.catch_warnings(fsdp.FSDP, nn.Linear(2, 2), { device_id = "cuda" })
    assert.equal(1, #warnings)
    assert.truthy(warnings[1]:find("which does not have an explicit index", 1, true))
    local offloaded = quietly(fsdp.FSDP, nn.Linear(2, 2), { cpu_offload = true, device_id = "cuda:0" }):to "cuda:0"
    assert.equal("cuda:0", offloaded.params[1].device)
    raises("An FSDP-managed module with parameter CPU offloading enabled has parameters on cuda:0. Make sure to not move the module from CPU when "
      .. "offloading parameters.", offloaded, ms.ones(1, 2, { device = "cuda:0" }))
    offloaded:to "cpu"
    local out = offloaded(ms.ones(1, 2, { device = "cuda:0" }))
    assert.equal("cuda:0", out.device)
    out:sum():backward()
    assert.equal("cpu", offloaded.params[1].device)
    assert.equal("cpu", offloaded.params[1].grad.device)
  end)
end)

ranks.describe(4, "messages about extensions", function()
  it("refuse a number for reshard_after_forward", function()
    local ms, nn, fsdp = load()
    local layer = fsdp.fully_shard(nn.Linear(4, 8, { bias = false }), { reshard_after_forward = 2 })
    local part = layer.weight:to_local()
    function part:fsdp_pre_all_gather() return { self }, nil end
    function part.fsdp_post_all_gather(_, outputs) return outputs[1], {} end
    raises("fsdp: parameter 'weight' has all-gather extensions; with them reshard_after_forward must be true or false, not a number",
      layer, ms.ones(1, 4))
  end)
end)

ranks.describe(2, "warnings of the check of the forward order", function()
  it("report a sequence longer than the first one", function(rank)
    local ms, nn, fsdp, dist = load()
    dist.set_debug_level "detail"
    local Net = nn.Module:extend "Net"
    function Net:init()
      self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
      self.twice = false
    end
    function Net:forward(x)
      x = self.b(self.a(x))
      return self.twice and self.a(x) or x
    end
    local net = Net()
    net.a, net.b = fsdp.FSDP(net.a), fsdp.FSDP(net.b)
    local model = fsdp.FSDP(net)
    model(ms.ones(1, 2)):sum():backward()
    net.twice = true
    local warnings, loss = ms.catch_warnings(function() return model(ms.ones(1, 2)):sum() end)
    assert.same({ ("Forward order differs from that of the first iteration on rank %d."
      .. "\nExpected to not all-gather any more parameters in the forward but trying to all-gather parameters for [['a.weight', 'a.bias']]")
      :format(rank) }, warnings)
    ms.catch_warnings(function() loss:backward() end)
  end)
end)
