-- SPDX-License-Identifier: MIT
--- FSDP instances as modules: names, listings, fields read from the wrapped module, parameters as pieces, construction
--- (docs/semantics.md#classic, #pieces, #initialisation).
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load
local collected = require "spec.support.collected"

local function listed(m)
  local list = {}
  for name, p in m:named_parameters() do list[#list + 1] = name .. tostring(p.shape) end
  return table.concat(list, " ")
end

local function found(warnings, text)
  for _, w in ipairs(warnings) do
    if w:find(text, 1, true) then return true end
  end
  return false
end

for world = 1, 4 do
  ranks.describe(world, ("FSDP as a module on %d ranks"):format(world), function()
    local function ceil(n) return math.ceil(n / world) end

    it("is garbage-collected without references, also after access to the wrapped module's methods", function()
      local ms, nn, fsdp, _, quietly = load()
      local Net = nn.Module:extend "Net"
      function Net:init() self.layer = nn.Linear(3, 4) end
      function Net:forward(x) return self.layer(x) end
      function Net:told() return self:class_name() end
      collected()
      local before = ms.memory_stats("cpu").live_tensors
      quietly(function()
        for _ = 1, 3 do assert.equal("Net", fsdp.FSDP(Net()):told()) end
      end)
      collected()
      assert.equal(before, ms.memory_stats("cpu").live_tensors)
    end)

    it("lists one flat parameter per unit, outside of forward, without the wrappers' names", function()
      local ms, nn, fsdp, _, quietly = load()
      local seen
      local Net = nn.Module:extend "Net"
      function Net:init()
        self.a = nn.Linear(3, 4)
        self.b = nn.Sequential(nn.Linear(4, 2))
      end
      function Net:forward(x)
        seen = listed(self)
        assert.same({ 4, 3 }, { unpack(self.a.weight.shape) })
        return self.b(self.a(x))
      end
      local net = Net()
      net.b[1] = quietly(fsdp.FSDP, net.b[1])
      local model = quietly(fsdp.FSDP, net)
      assert.equal(("flat_param[%d] b.1.flat_param[%d]"):format(ceil(16), ceil(10)), listed(model))
      assert.equal(2, #model:parameters())
      assert.equal(model.flat_param, model.params[1])
      model(ms.ones(2, 3))
      assert.equal(("a.weight[4, 3] a.bias[4] b.1.flat_param[%d]"):format(ceil(10)), seen)
      local names = {}
      for name in model:named_modules() do names[#names + 1] = name end
      assert.same({ "", "", "a", "b", "b.1", "b.1" }, names)
      assert.equal("FSDP", model:get_submodule("b.1"):class_name())
      assert.equal(model.module.b[1].flat_param, model:get_parameter "b.1.flat_param")
    end)

    it("shows the original parameters as this rank's pieces", function(rank)
      local ms, nn, fsdp, _, quietly = load()
      local layer = nn.Linear(5, 7)
      local weight, bias = layer.weight, layer.bias
      local optim = ms.optim.SGD(layer:parameters(), { lr = 0.1 })           -- made before wrapping
      local plain = ms.deepcopy(layer)
      local model = quietly(fsdp.FSDP, layer, { use_orig_params = true, sharding_strategy = "full_shard" })
      assert.equal(weight, model.weight)
      assert.equal("weight bias", (listed(model):gsub("%[[^]]*%]", "")))
      if world == 1 then
        assert.same({ 7, 5 }, { unpack(weight.shape) })                     -- not sharded: unchanged
      else
        -- 35 + 1 + 7 elements: the bias begins at a multiple of 16 bytes.
        local each = ceil(43)
        local from, to = rank * each, (rank + 1) * each
        assert.same({ math.max(0, math.min(35, to) - from) }, { unpack(weight.shape) })
        assert.same({ math.max(0, math.min(43, to) - math.max(36, from)) }, { unpack(bias.shape) })
      end
      assert.is_true(weight:isa(nn.Parameter))
      ms.manual_seed(rank)
      local loss = model(ms.rand(2, 5)):sum()
      loss:backward()
      assert.equal(tostring(weight.shape), tostring(weight.grad.shape))
      optim:step()
      local plain_optim = ms.optim.SGD(plain:parameters(), { lr = 0.1 })
      for r = 0, world - 1 do
        ms.manual_seed(r)
        ;(plain(ms.rand(2, 5)):sum() / world):backward()
      end
      plain_optim:step()
      fsdp.check_sharded_parity(plain, model)
    end)

    it("shows pieces after forward where it reshards, and whole parameters where it does not", function()
      local ms, nn, fsdp, _, quietly = load()
      if world == 1 then return end
      for _, case in ipairs { { "full_shard", false }, { "shard_grad_op", true }, { "no_shard", true } } do
        local inner = nn.Linear(3, 3)
        local options = { use_orig_params = true, sharding_strategy = case[1] }
        local model = quietly(function()
          return fsdp.FSDP(nn.Sequential(fsdp.FSDP(inner, options), nn.Linear(3, 1)), options)
        end)
        local loss = model(ms.ones(2, 3)):sum()
        assert.equal(case[2], #inner.weight.shape == 2)
        loss:backward()
        assert.equal(case[1] == "no_shard", #inner.weight.shape == 2)
      end
    end)

    it("takes different options for groups of pieces, and freezes some of them", function(rank)
      local ms, nn, fsdp, _, quietly = load()
      local function make()
        ms.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
      end
      local function groups(m)
        local weights, biases = {}, {}
        for name, p in m:named_parameters() do table.insert(name:find "weight" and weights or biases, p) end
        return { { params = weights, lr = 0.02, weight_decay = 0.1 }, { params = biases, lr = 0.01 } }
      end
      local plain, model = make(), make()
      model = quietly(fsdp.FSDP, model, { use_orig_params = true })
      local a, b = ms.optim.AdamW(groups(plain), {}), ms.optim.AdamW(groups(model), {})
      for step = 1, 4 do
        if step == 3 then
          plain[1].weight.requires_grad = false
          model[1].weight.requires_grad = false
        end
        for r = 0, world - 1 do
          ms.manual_seed(10 * step + r)
          ;(plain(ms.rand(3, 4)):sum() / world):backward()
        end
        ms.manual_seed(10 * step + rank)
        model(ms.rand(3, 4)):sum():backward()
        fsdp.check_sharded_parity(plain, model)
        a:step()
        b:step()
        a:zero_grad()
        b:zero_grad()
      end
      fsdp.check_sharded_parity(plain, model)
    end)

    it("writes back a parameter that the script replaced", function()
      local ms, nn, fsdp, _, quietly = load()
      local model = quietly(fsdp.FSDP, nn.Linear(4, 4), { use_orig_params = true })
      local weight = model.weight
      model.module.weight = nn.Parameter(ms.full({ 4, 4 }, 3))
      model(ms.ones(1, 4))
      assert.equal(weight, model.module.weight)
      fsdp.summon_full_params(model, function() assert.is_true(weight:eq(3):all():item()) end)
      model.module.weight = nn.Parameter(ms.zeros(11))
      local expected = tostring(weight:to_local().shape)
      raises(("Cannot writeback when the parameter shape changes\nExpects %s but got [11]"):format(expected), model,
        ms.ones(1, 4))
    end)

    it("writes it back before a forward that gathers ahead, a state dict and summon_full_params", function()
      local ms, nn, fsdp, _, quietly = load()
      for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
        local model = quietly(function()
          local net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
          for k = 1, 3 do net[k] = fsdp.FSDP(net[k], { use_orig_params = true, sharding_strategy = strategy }) end
          return fsdp.FSDP(net, { use_orig_params = true, sharding_strategy = strategy })
        end)
        local x = ms.rand(3, 4)
        for _, layer in ipairs { 1, 2, 3 } do
          local inner = model.module[layer].module
          model(x):sum():backward()             -- from here on the order is known, and gathers start early
          local weight = inner.weight
          inner.weight = nn.Parameter(ms.zeros(4, 4))
          ms.no_grad(function() assert.is_true(model.module[layer](x):equal(model.module[layer](x * 2))) end)
          inner.weight = nn.Parameter(ms.ones(4, 4))
          local out = model(x)
          local plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
          plain:load_state_dict(fsdp.state_dict(model))
          assert.is_true(plain[layer].weight:eq(1):all():item())
          ms.testing.assert_close(out, plain(x))
          inner.weight = nn.Parameter(ms.full({ 4, 4 }, 2))
          local name = layer .. ".weight"
          assert.is_true(fsdp.state_dict(model)[name]:equal(ms.full({ 4, 4 }, 2)))
          assert.equal(weight, inner.weight)
          inner.weight = nn.Parameter(ms.full({ 4, 4 }, 3))
          fsdp.summon_full_params(model, function() assert.is_true(inner.weight:equal(ms.full({ 4, 4 }, 3))) end)
          inner.weight = nn.Parameter(ms.full({ 4, 4 }, 4))
          fsdp.load_state_dict(model, plain:state_dict())
          assert.is_true(fsdp.state_dict(model)[name]:equal(ms.ones(4, 4)))
          model:zero_grad()
        end
      end
    end)

    it("runs optimizers in backward by hooks on pieces", function(rank)
      local ms, nn, fsdp, _, quietly = load()
      local function make()
        ms.manual_seed(2)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
      end
      local a = quietly(fsdp.FSDP, make(), { use_orig_params = true })
      local b = quietly(fsdp.FSDP, make(), { use_orig_params = true })
      local optim_a, ran = ms.optim.SGD(a:parameters(), { lr = 0.1 }), 0
      for _, p in ipairs(b:parameters()) do
        local optim = ms.optim.SGD({ p }, { lr = 0.1 })
        p:register_post_accumulate_grad_hook(function()
          ran = ran + 1
          optim:step()
          optim:zero_grad()
        end)
      end
      for step = 1, 3 do
        for _, m in ipairs { a, b } do
          ms.manual_seed(step * 10 + rank)
          m(ms.rand(2, 4)):sum():backward()
        end
        optim_a:step()
        optim_a:zero_grad()
        for _, p in ipairs(b:parameters()) do assert.is_nil(p.grad) end
      end
      assert.equal(12, ran)
      local p, q = a:parameters(), b:parameters()
      for k = 1, #p do assert.is_true(p[k]:equal(q[k])) end
    end)

    it("reads fields, methods and positions of the wrapped module, and assigns its own", function()
      local ms, nn, fsdp, _, quietly = load()
      local Net = nn.Module:extend "Net"
      function Net:init()
        self.layer, self.calls, self.colour = nn.Linear(2, 2), 0, "red"
      end
      function Net:forward(x) return self.layer(x) end
      function Net:touch(n)
        self.calls = self.calls + n
        return self
      end
      local net = Net()
      local model = quietly(fsdp.FSDP, net)
      assert.equal(net, model.module)
      assert.equal("red", model.colour)
      assert.equal(net, model:touch(2))               -- runs with the wrapped module as self
      assert.equal(2, net.calls)
      assert.equal(2, model.calls)
      model.colour = "blue"
      assert.equal("red", net.colour)
      assert.is_nil(model.nothing)
      local list = quietly(fsdp.FSDP, nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
      assert.equal("ReLU", list[2]:class_name())
      assert.equal("ReLU", list[-1]:class_name())
      model:eval()
      assert.is_false(net.training)
      assert.truthy(tostring(model):find("^FSDP%("))
      raises("FSDP does not support deepcopy. Please use state dict for serialization.", ms.deepcopy, model)
    end)

    it("finds roots and instances", function()
      local _, nn, fsdp, _, quietly = load()
      local inner = quietly(fsdp.FSDP, nn.Linear(2, 2))
      local middle = quietly(fsdp.FSDP, nn.Sequential(inner))
      local outer = quietly(fsdp.FSDP, nn.Sequential(middle, nn.Linear(2, 2)))
      assert.same({ outer, middle, inner }, fsdp.fsdp_modules(outer))
      assert.same({ outer }, fsdp.fsdp_modules(outer, { root_only = true }))
      assert.is_true(outer:check_is_root())
      assert.is_false(middle:check_is_root())
      assert.is_false(inner:check_is_root())
    end)

    it("wraps modules without parameters, and warns of containers without forward", function()
      local ms, nn, fsdp, _, quietly = load()
      for _, id in ipairs { false, "cpu", 0 } do
        local model = quietly(fsdp.FSDP, nn.ReLU(), { device_id = id or nil })
        assert.equal(0, #model.params)
        assert.equal(1, model(ms.ones(1)):item())
      end
      local list = nn.ModuleList { nn.Linear(2, 2) }
      assert.is_true(found(ms.catch_warnings(fsdp.FSDP, list),
        "FSDP will not all-gather parameters for containers that do not implement forward: " .. tostring(list)))
    end)

    it("a wrapped list is walked by ipairs like the list: a policy that wraps everything changes no result", function()
      local ms, nn, fsdp, _, quietly = load()
      local Net = nn.Module:extend "Walks"
      function Net:init()
        self.blocks = nn.ModuleList { nn.Linear(3, 3), nn.Linear(3, 3) }
        self.last = nn.Linear(3, 1)
      end
      function Net:forward(x)
        for _, block in ipairs(self.blocks) do x = block(x):tanh() end
        return self.last(x)
      end
      local function make()
        ms.manual_seed(9)
        return Net()
      end
      local plain = make()
      local model = quietly(fsdp.FSDP, make(), { auto_wrap_policy = fsdp.wrap.always_wrap_policy })
      assert.equal(2, #model.blocks)
      assert.equal(model.blocks[1], model.blocks.module[1])
      local x = ms.ones(2, 3)
      assert.is_true((plain(x) - model(x)):abs():max():item() < 1e-6)
    end)

    it("warns of the strategies it changes", function()
      local ms, nn, fsdp = load()
      for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
        local warnings = ms.catch_warnings(fsdp.FSDP, nn.Linear(2, 2), { sharding_strategy = strategy })
        local clamp = ("FSDP is switching to use `NO_SHARD` instead of %s since the world size is 1."):format(strategy)
        local old = "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use `DistributedDataParallel` instead."
        local want = world == 1 and strategy ~= "no_shard" and { clamp } or world > 1 and strategy == "no_shard"
          and { old } or {}
        assert.same(want, warnings)
      end
    end)

    it("broadcasts rank 0's parameters and buffers", function(rank)
      local ms, nn, fsdp, dist, quietly = load()
      local function make(seed)
        ms.manual_seed(seed)
        local net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
        net[2]:register_buffer("noise", ms.rand(4))
        net[2]:register_buffer("count", ms.full({ 1 }, seed, { dtype = "int64" }))
        return net
      end
      local plain, model = make(0), make(rank)
      local sent = dist.record(function()
        model = quietly(function()
          model[2] = fsdp.FSDP(model[2], { sync_module_states = true })
          return fsdp.FSDP(model, { sync_module_states = true })
        end)
      end)
      local broadcasts = 0
      for _, c in ipairs(sent) do
        if c.op == "broadcast" then broadcasts = broadcasts + 1 end
      end
      -- One broadcast per instance and dtype: float32 and int64 of the inner one, float32 of the outer one.
      assert.equal(3, broadcasts)
      local sd, want = model:state_dict(), plain:state_dict()
      for name, t in pairs(want) do assert.is_true(t:equal(sd[name]), name) end
    end)

    it("materializes modules on meta, by reset_parameters or by a function", function()
      local ms, nn, fsdp, _, quietly = load()
      local Const = nn.Module:extend "Const"
      function Const:init(kind)
        self.value = nn.Parameter(ms.empty(5, kind))
        self:register_buffer("offset", ms.empty(2, kind))
        self:reset_parameters()
      end
      function Const:reset_parameters()
        if self.value.device:find "^meta" then return end
        ms.no_grad(function()
          self.value:fill_(4)
          self.offset:fill_(2)
        end)
      end
      function Const:forward(x) return x * self.value end
      local function make()
        return nn.Sequential(Const { device = "meta" }, nn.Sequential(Const { device = "meta" }))
      end
      local function check(model, value)
        fsdp.summon_full_params(model, function()
          for _, p in ipairs(model:parameters()) do assert.is_true(p:eq(value):all():item()) end
        end)
        for _, b in ipairs(model:buffers()) do assert.equal("cpu", b.device:match "^%a+") end
        assert.same({ 5 }, { unpack(model(ms.ones(5)).shape) })
      end
      for _, nested in ipairs { false, true } do
        local policy = nested and fsdp.wrap.always_wrap_policy or nil
        check(quietly(fsdp.FSDP, make(), { auto_wrap_policy = policy }), 4)
        check(quietly(fsdp.FSDP, make(), { auto_wrap_policy = policy, param_init_fn = function(m)
          m:to_empty "cpu"
          ms.no_grad(function()
            for _, p in ipairs(m:parameters()) do p:fill_(9) end
          end)
        end }), 9)
      end
      raises("Expected 3 to be callable but got number", fsdp.FSDP, make(), { param_init_fn = 3 })
      local Bare = nn.Module:extend "Bare"
      function Bare:init() self.value = nn.Parameter(ms.empty(5, { device = "meta" })) end
      function Bare:forward(x) return x * self.value end
      local said
      local warnings = ms.catch_warnings(function() said = { pcall(fsdp.FSDP, Bare()) } end)
      assert.is_false(said[1])
      assert.is_true(found(warnings, "Unable to call `reset_parameters()` for module on meta device with error"))
    end)

    it("has messages for what cannot be flattened", function()
      local ms, nn, fsdp, dist, quietly = load()
      local mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, { dtype = "float64" }))
      raises("Must flatten tensors with uniform dtype but got float32 and float64", quietly, fsdp.FSDP, mixed)
      local frozen = nn.Linear(2, 2)
      frozen.bias.requires_grad = false
      raises("Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`", quietly, fsdp.FSDP,
        frozen)
      local integers = nn.Module:extend "Integers"()
      integers.p = nn.Parameter(ms.zeros(3, { dtype = "int64" }), { requires_grad = false })
      raises("Cannot flatten integer dtype tensors", quietly, fsdp.FSDP, integers)
      raises("FSDP: argument 1 is nil, expected a module", quietly, fsdp.FSDP)
      local ok, text = pcall(quietly, fsdp.FSDP, nn.Linear(2, 2), { sharding_strategie = "no_shard" })
      assert.is_false(ok)
      assert.truthy(text:find("did you mean 'sharding_strategy'?", 1, true))
      raises("Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them.",
        quietly, fsdp.FSDP,
        nn.Linear(2, 2), { process_group = dist.default_group(), device_mesh = dist.init_device_mesh("cpu",
          { world }) })
      local odd = quietly(function()
        return fsdp.FSDP(nn.Sequential(fsdp.FSDP(nn.Linear(2, 2), { use_orig_params = true }), nn.Linear(2, 2)))
      end)
      raises("Expects one homogeneous value for use_orig_params but got both false and true", odd, ms.ones(1, 2))
    end)
  end)
end
