-- SPDX-License-Identifier: MIT
--- fully_shard with a CPUOffloadPolicy: shards, gradients and optimizer on the CPU while another device computes (the
--- emulated GPU if there is no other). Results equal those without it.
local ranks = require "spec.support.ranks"

local load = require "spec.support.load"
local own = "cuda:" .. require "moonshard".cuda.current_device()  -- this rank's GPU, one of the two that ranks share

-- Comparisons with unsharded training are in float64: Adam magnifies rounding errors of small gradients.
local function build(dtype)
  local ms, nn = load()
  ms.manual_seed(0)
  return nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 8), nn.LayerNorm(8)):to(dtype or "float64")
end

-- Applies fully_shard to the third layer, then to the whole.
local function shard(model, options)
  local _, _, _, fsdp = load()
  fsdp.fully_shard(model[3], options)
  return fsdp.fully_shard(model, options)
end

local function input(rank, step, dtype)
  local ms = load()
  ms.manual_seed(100 + rank + step * 10)
  return ms.rand(4, 8):to(dtype or "float64")
end

local function offloaded(more)
  local _, _, _, fsdp = load()
  local options = { offload_policy = fsdp.CPUOffloadPolicy() }
  for key, value in pairs(more or {}) do options[key] = value end       -- order does not matter: a copy
  return options
end

local function assert_on_cpu(model, optimizer)
  for name, p in model:named_parameters() do
    assert.equal("cpu", p.device, name)
    assert.equal("cpu", p:to_local().device, name)
    if p.grad then
      assert.equal("cpu", p.grad.device, name)
      assert.equal("cpu", p:to_local().grad.device, name)
    end
  end
  for _, entry in pairs(optimizer:state_dict().state) do           -- in any order: each is checked separately
    for key, value in pairs(entry) do
      if type(value) == "table" then assert.equal("cpu", value.device, key) end
    end
  end
end

for world = 1, 4 do
  ranks.describe(world, ("fully_shard with CPU offload on %d ranks #cuda"):format(world), function()
    local settings = { { reshard_after_forward = true }, { reshard_after_forward = false }, {} }
    if world == 4 then settings[#settings + 1] = { reshard_after_forward = 2 } end
    for _, more in ipairs(settings) do
      it("trains as unsharded training does, reshard_after_forward = " .. tostring(more.reshard_after_forward),
        function(rank)
        local ms, _, _, fsdp = load()
        local reference, model = build(), shard(build():to "cuda", offloaded(more))
        local a, b = ms.optim.Adam(reference:parameters(), { lr = 0.01 }),
          ms.optim.Adam(model:parameters(), { lr = 0.01 })
        for step = 1, 3 do
          for r = 0, world - 1 do (reference(input(r, step)):pow(2):sum() / world):backward() end
          local out = model(input(rank, step))                          -- moved to the device by the outermost unit
          assert.equal(own, out.device)
          out:pow(2):sum():backward()
          assert_on_cpu(model, b)
          fsdp.check_sharded_parity(reference, model)
          a:step()
          b:step()
          assert_on_cpu(model, b)
          fsdp.check_sharded_parity(reference, model)
          a:zero_grad { set_to_none = step ~= 2 }
          b:zero_grad { set_to_none = step ~= 2 }
        end
        model:unshard()
        assert.equal(own, model[1].weight.device)
        model:reshard()
        assert.equal("cpu", model[1].weight.device)
      end)
    end

    it("gives the gradients that it gives without offload, to the bit", function(rank)
      local _, _, _, fsdp = load()
      for _, policy in ipairs {
        {}, { param_dtype = "bfloat16" }, { param_dtype = "bfloat16", reduce_dtype = "float32" },
        { reduce_dtype = "bfloat16" },
        { param_dtype = "float16", reduce_dtype = "float32" },
      } do
        local mp_policy = fsdp.MixedPrecisionPolicy(policy)
        local plain = shard(build("float32"):to "cuda", { mp_policy = mp_policy })
        local model = shard(build("float32"):to "cuda", offloaded { mp_policy = mp_policy })
        for step = 1, 2 do
          for _, m in ipairs { plain, model } do
            local out = m(input(rank, step, "float32"))
            assert.equal(policy.param_dtype or "float32", out.dtype)
            out:float():pow(2):sum():backward()
          end
          for k, p in ipairs(plain:parameters()) do
            local q = model:parameters()[k]
            assert.equal(p.grad.dtype, q.grad.dtype)
            assert.equal("cpu", q.grad.device)
            assert.is_true(p.grad:to_local():to("cpu"):equal(q.grad:to_local()))
            assert.is_true(p:full_tensor():to("cpu"):equal(q:full_tensor()))
          end
        end
      end
    end)

    it("accumulates gradients on the device while they are not synchronised", function(rank)
      local ms, _, _, fsdp = load()
      local reference, model = build(), shard(build():to "cuda", offloaded())
      for round = 1, 2 do                                               -- the second round accumulates
        for part = 1, 3 do
          for r = 0, world - 1 do (reference(input(r, 3 * round + part)):pow(2):sum() / world):backward() end
          model:set_requires_gradient_sync(part == 3)
          local before = model[1].weight.grad
          model(input(rank, 3 * round + part)):pow(2):sum():backward()
          if part < 3 then assert.equal(before, model[1].weight.grad) end
        end
        fsdp.check_sharded_parity(reference, model)
      end
      assert.equal("cpu", model[1].weight.grad.device)
      assert.is_true(ms.memory_stats("cuda").allocated > 0)
    end)

    it("clips by the norm over all ranks", function(rank)
      local ms, nn, _, fsdp = load()
      local reference, model = build(), shard(build():to "cuda", offloaded())
      for _, norm_type in ipairs { 1, 2, math.huge } do
        for r = 0, world - 1 do (reference(input(r, 1)):pow(2):sum() / world):backward() end
        model(input(rank, 1)):pow(2):sum():backward()
        local want = nn.utils.clip_grad_norm_(reference:parameters(), 0.5, { norm_type = norm_type })
        local got = nn.utils.clip_grad_norm_(model:parameters(), 0.5, { norm_type = norm_type })
        ms.testing.assert_close(got:to "cpu", want)
        fsdp.check_sharded_parity(reference, model)
        reference:zero_grad()
        model:zero_grad()
      end
    end)

    it("saves and loads model and optimizer, whole and sharded", function(rank)
      local ms, _, _, fsdp = load()
      local model = shard(build():to "cuda", offloaded())
      local optimizer = ms.optim.Adam(model:parameters(), { lr = 0.01 })
      local function step(m, o, k)
        m(input(rank, k)):pow(2):sum():backward()
        o:step()
        o:zero_grad()
      end
      step(model, optimizer, 1)
      local sharded, whole = model:state_dict(), fsdp.state_dict(model)
      local state = fsdp.optim_state_dict(model, optimizer)
      for name, p in model:named_parameters() do
        assert.equal(p:to_local():data_ptr(), sharded[name]:to_local():data_ptr())
        assert.equal("cpu", whole[name].device)
        assert.equal("cpu", state.state[name].exp_avg.device)
        whole[name], state.state[name].exp_avg = whole[name]:clone(), state.state[name].exp_avg:clone()
      end
      local other = shard(build():to "cuda", offloaded())
      local second = ms.optim.Adam(other:parameters(), { lr = 0.5 })
      fsdp.load_state_dict(other, whole)
      fsdp.load_optim_state_dict(other, second, state)
      for k = 2, 3 do
        step(model, optimizer, k)
        step(other, second, k)
      end
      assert_on_cpu(other, second)
      for name, p in other:named_parameters() do assert.is_true(p:equal(model:get_parameter(name)), name) end
    end)

    it("takes pin_memory, which changes no number and no device", function(rank)
      local _, _, _, fsdp = load()
      assert.equal("CPUOffloadPolicy(pin_memory = true)", tostring(fsdp.CPUOffloadPolicy()))
      local outs = {}
      for k, pins in ipairs { true, false } do
        local model = shard(build():to "cuda", { offload_policy = fsdp.CPUOffloadPolicy { pin_memory = pins } })
        local out = model(input(rank, 1):to "cuda")
        out:sum():backward()
        outs[k] = { out:to "cpu", model[1].weight.grad:to_local():clone() }
        assert.equal("cpu", model[1].weight:to_local().device)
      end
      assert.is_true(outs[1][1]:equal(outs[2][1]) and outs[1][2]:equal(outs[2][2]))
      assert.matches("option 'pin_memory'", (select(2, pcall(fsdp.CPUOffloadPolicy, { pin_memory = "yes" }))))
    end)

    it("uses the device of its mesh if the module is on the CPU or on meta", function(rank)
      local ms, nn, _, fsdp = load()
      local function model_with_buffer()
        local m = build()
        m[1]:register_buffer("scale", ms.ones(1), { persistent = false })
        return m
      end
      local mesh = ms.dist.init_device_mesh("cuda", { world })
      local model = shard(model_with_buffer(), offloaded { mesh = mesh })
      assert.equal(own, model[1].scale.device)
      assert.equal("cpu", model[1].weight.device)
      assert.equal(own, model(input(rank, 1)).device)

      local empty = ms.with_device("meta", build)
      shard(empty, offloaded { mesh = mesh })
      assert.equal("meta", empty[1].weight.device:match "^%a+")
      empty:to_empty "cpu"
      local values = fsdp.state_dict(model)
      fsdp.load_state_dict(empty, values)
      local out = empty(input(rank, 1))
      assert.equal(own, out.device)
      assert.is_true(out:to("cpu"):equal(model(input(rank, 1)):to "cpu"))
      assert.equal("cpu", empty[1].weight:to_local().device)
      -- Without offload, shards are on the mesh's device.
      local plain = shard(build(), { mesh = mesh })
      assert.equal(own, plain[1].weight.device)
      nn.F.mse_loss(plain(input(rank, 1)), ms.zeros(4, 8, { device = "cuda", dtype = "float64" })):backward()
      assert.equal(own, plain[1].weight.grad.device)
    end)

    it("refuses parameters that a script has moved away from the CPU", function(rank)
      local _, nn, _, fsdp = load()
      local model = nn.Sequential(nn.Linear(8, 8, { bias = false })):to("float64"):to "cuda"
      fsdp.fully_shard(model, offloaded())
      model:to "cuda"
      local ok, message = pcall(model, input(rank, 1))
      assert.is_false(ok)
      assert.equal("FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state dict or call "
        .. "module:to_empty(\"cpu\"). Found following parameters on non-CPU device: [('1.weight', '" .. own .. "')]",
        (message:gsub("^[^\n]-:%d+: ", "")))
      model:to "cpu"
      assert.equal(own, model(input(rank, 1)).device)
      model:to "cuda"                                                   -- after the first forward, too
      assert.has_error(function() model(input(rank, 1)) end)
    end)

    it("shows all-gather extensions a copy on the device", function(rank)
      local model, plain = shard(build():to "cuda", offloaded()), shard(build():to "cuda", {})
      local seen = {}
      for _, m in ipairs { model, plain } do
        local part = m[3].weight:to_local()
        function part.fsdp_pre_all_gather(self)
          seen[#seen + 1] = self.device
          return { self:to "bfloat16" }, nil
        end
        function part.fsdp_post_all_gather(_, outputs, _, dtype, out)
          if out then
            out:copy_(outputs[1])
            return
          end
          local whole = outputs[1]:to(dtype)
          return whole, { whole }
        end
      end
      for step = 1, 2 do
        local outs = {}
        for k, m in ipairs { model, plain } do
          outs[k] = m(input(rank, step))
          outs[k]:pow(2):sum():backward()
        end
        assert.is_true(outs[1]:to("cpu"):equal(outs[2]:to "cpu"))
        for name, p in model:named_parameters() do
          assert.is_true(p.grad:full_tensor():equal(plain:get_parameter(name).grad:full_tensor():to "cpu"), name)
        end
      end
      assert.is_true(#seen >= 4)
      for _, device in ipairs(seen) do assert.equal(own, device) end
    end)
  end)
end

ranks.describe(4, "fully_shard with CPU offload over a 2-d mesh #cuda", function()
  it("reduces over shards and replicas, and shows the hook what was reduced", function(rank)
    local ms, _, _, fsdp = load()
    local mesh = ms.dist.init_device_mesh("cuda", { 2, 2 }, { names = { "dp_replicate", "dp_shard" } })
    local reference, model = build(), shard(build(), offloaded { mesh = mesh })
    local devices = {}
    model:set_all_reduce_hook(function(t) devices[#devices + 1] = t.device end)
    for step = 1, 2 do
      for part = 1, 2 do
        for r = 0, 3 do (reference(input(r, 2 * step + part)):pow(2):sum() / 4):backward() end
        model:set_requires_all_reduce(part == 2)
        model(input(rank, 2 * step + part)):pow(2):sum():backward()
      end
      fsdp.check_sharded_parity(reference, model)
    end
    assert_on_cpu(model, ms.optim.SGD(model:parameters(), { lr = 0.1 }))
    assert.same({ own, own }, devices)
  end)
end)
