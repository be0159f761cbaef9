-- SPDX-License-Identifier: MIT
--- nn.DDP and models that differ between ranks, or change after they were wrapped (docs/semantics.md#ddp-construction).
local ranks = require "spec.support.ranks"

local load = require "spec.support.load"

local function make(names)
  local ms, nn = load()
  local Net = nn.Module:extend "Net"
  function Net:init()
    for _, name in ipairs(names or { "a", "b" }) do self[name] = nn.Linear(2, 1, { bias = false }) end
  end
  function Net:forward(x)
    local y = 0
    for _, child in ipairs(self:children()) do y = y + child(x) end
    return y
  end
  local net = Net()
  ms.no_grad(function()
    for _, p in ipairs(net:parameters()) do p:fill_(1) end
  end)
  return net
end

local function input(rank) return load().full({ 1, 2 }, rank + 1) end
local function gradient(p) return p.grad and p.grad:tolist()[1][1] end

-- fn must raise on all ranks, which then continue together. Returns this rank's message.
local function refused(fn, ...)
  local _, _, dist = load()
  local ok, why = pcall(fn, ...)
  dist.recover()
  for _, other in ipairs(dist.all_gather_object(ok)) do assert.is_false(other) end
  return tostring(why)
end

local kinds = { {}, { find_unused_parameters = true }, { static_graph = true }, { gradient_as_bucket_view = true },
  { bucket_cap_mb = 1e-6 } }

-- Models that differ between the ranks: { what, fn(rank, module class) -> module, the message }
local function with_buffer(name, ...)
  local ms, nn = load()
  local m = nn.Linear(2, 1)
  m:register_buffer(name, ms.ones(...))
  return m
end
local function frozen(name)
  local net = make()
  net[name]:requires_grad_(false)
  return net
end
local differences = {
  { "another order of children", function(r) return make(r == 0 and { "a", "b" } or { "b", "a" }) end,
    "on Rank 1 params[1] is 'b.weight', and on rank 0 'a.weight'" },
  { "another name", function(r) return make { r == 0 and "a" or "c" } end, "on Rank 1 params[1] is 'c.weight'" },
  { "another frozen layer", function(r) return frozen(r == 0 and "a" or "b") end,
    "parameter 'a.weight' is trained on Rank 1, and frozen on rank 0" },
  { "a frozen layer on one rank", function(r) return r == 0 and make() or frozen "b" end,
    "parameter 'b.weight' is frozen on Rank 1, and trained on rank 0" },
  { "all frozen on one rank", function(r) return r == 0 and make() or make():requires_grad_(false) end,
    "parameter 'a.weight' is frozen on Rank 1, and trained on rank 0" },
  { "another name of a buffer", function(r) return with_buffer(r == 0 and "x" or "y", 2) end,
    "on Rank 1 buffers[1] is 'y', and on rank 0 'x'" },
  { "another shape of a buffer", function(r) return with_buffer("x", r == 0 and 2 or 3) end,
    "[1]: buffers[1] in this process with sizes [3] appears not to match sizes of the same buffer in process 0." },
  { "another dtype of a buffer", function(r) return with_buffer("x", 2, { dtype = r == 0 and "float32" or "float64" }) end,
    "[1]: buffers[1] in this process with dtype float64 appears not to match dtype of the same buffer in process 0." },
  { "another number of buffers", function(r) return r == 0 and with_buffer("x", 2) or load().nn.Linear(2, 1) end,
    "Rank 1 has 0 buffers, while rank 0 has inconsistent 1 buffers" },
}

for world = 1, 4 do
  ranks.describe(world, ("DDP and changes of the model on %d ranks #mpi"):format(world), function()
    if world > 1 then
      for _, case in ipairs(differences) do
        it("refuses models that differ between ranks: " .. case[1], function(rank)
          local _, nn = load()
          assert.truthy(refused(nn.DDP, case[2](rank)):find(case[3], 1, true))
        end)
      end

      it("refuses ranks that reduce different parameters later", function(rank)
        local _, nn = load()
        local net = make()
        local why = refused(nn.DDP, net, { delay_all_reduce_named_params = { rank == 0 and "a.weight" or "b.weight" },
          param_to_hook_all_reduce = net.a.weight })
        assert.truthy(why:find("parameter 'a.weight' is trained on Rank 1, and delayed on rank 0", 1, true), why)
      end)

      it("trusts the script with init_sync = false", function(rank)
        local _, nn = load()
        local m = nn.DDP(make { rank == 0 and "a" or "b" }, { init_sync = false })
        m(input(rank)):sum():backward()
        assert.near((world + 1) / 2, gradient(m.module:parameters()[1]), 1e-6)
      end)
    end

    for _, options in ipairs(kinds) do
      it("reduces a parameter that is trained later, and leaves out one that is frozen later: "
        .. (next(options) or "no options"), function(rank)
        local ms, nn = load()
        ms.catch_warnings(function()
          local net = make()
          net.a:requires_grad_(false)
          local m = nn.DDP(net, options)
          local optimizer = ms.optim.SGD(m:parameters(), { lr = 1 })
          local mean = (world + 1) / 2
          local function train(what, a, b)
            for _ = 1, 3 do
              m:zero_grad()
              m(input(rank)):sum():backward()
              optimizer:step()
              assert.equal(a, gradient(net.a.weight), what)
              assert.equal(b, gradient(net.b.weight), what)
            end
          end
          if world == 3 then mean = 2 end
          train("a frozen", nil, mean)
          net.a:requires_grad_(true)
          train("both trained", mean, mean)
          net.b:requires_grad_(false)
          train("b frozen", mean, nil)
          net.b:requires_grad_(true)
          m:zero_grad()
          m:no_sync(function() m(input(rank)):sum():backward() end)
          m(input(rank)):sum():backward()
          assert.same({ 2 * mean, 2 * mean }, { gradient(net.a.weight), gradient(net.b.weight) })
          net:requires_grad_(false)
          m:zero_grad()
          m(input(rank))
          assert.is_nil(net.a.weight.grad)
          net:requires_grad_(true)
          train("all trained again", mean, mean)
        end)
      end)

      it("refuses parameters that were added or replaced: " .. (next(options) or "no options"), function(rank)
        local ms, nn = load()
        ms.catch_warnings(function()
          for _, name in ipairs { "b", "c" } do
            for _, inside in ipairs { false, true } do
              local net = make()
              local m = nn.DDP(net, options)
              net[name] = nn.Linear(2, 1, { bias = false })
              local function run() m(input(rank)):sum():backward() end
              local why = refused(function() if inside then m:no_sync(run) else run() end end)
              assert.truthy(why:find(("DDP: parameter '%s.weight' was added or replaced after the module was wrapped"):format(name),
                1, true), why)
              m = nn.DDP(net, options)                  -- the way out
              m(input(rank)):sum():backward()
              assert.near((world + 1) / 2, gradient(net[name].weight), 1e-6)
            end
          end
        end)
      end)

      it("reduces in the dtype of a model that was converted: " .. (next(options) or "no options"), function(rank)
        local ms, nn = load()
        ms.catch_warnings(function()
          local m = nn.DDP(make(), options)
          local p, third = m.module.a.weight, 0
          for r = 0, world - 1 do third = third + (1 / 3 + r) / world end
          for _, dtype in ipairs { "float32", "float64", "bfloat16", "float64", "float16", "float32" } do
            m:zero_grad()
            m:to(dtype)
            local reduced = ms.dist.record(function()
              m(ms.full({ 1, 2 }, 1 / 3 + rank, { dtype = dtype })):sum():backward()
            end)
            local among = {}
            for _, c in ipairs(reduced) do
              if c.op == "all_reduce" and c.dtype ~= "int32" then among[c.dtype] = true end
            end
            assert.same({ [dtype] = true }, among)
            assert.equal(dtype, p.grad.dtype)
            local bound = { float32 = 1e-6, float64 = 1e-14, bfloat16 = 2e-2, float16 = 2e-3 }
            assert.near(third, gradient(p), bound[dtype])
          end
        end)
      end)
    end

    it("steps a ZeroRedundancyOptimizer whose parameters were converted", function(rank)
      local ms, nn, dist = load()
      for _, view in ipairs { false, true } do
        local m = nn.DDP(make())
        local zero = ms.optim.ZeroRedundancyOptimizer(m:parameters(), { optimizer_class = ms.optim.SGD, lr = 1,
          parameters_as_bucket_view = view })
        for _, dtype in ipairs { "float32", "float64", "float64" } do
          m:zero_grad()
          m:to(dtype)
          m(input(rank):to(dtype)):sum():backward()
          zero:step()
        end
        local right = 1 - 3 * (world + 1) / 2
        for _, all in ipairs(dist.all_gather_object { m.module.a.weight:tolist(), m.module.b.weight:tolist() }) do
          assert.same({ { { right, right } }, { { right, right } } }, all)
        end
      end
    end)

    if world > 1 then
      it("refuses ranks that train different parameters later", function(rank)
        local _, nn = load()
        local net = make { "a", "b", "c" }
        net.a:requires_grad_(false)
        net.b:requires_grad_(false)
        local m = nn.DDP(net)
        net[rank == 0 and "a" or "b"]:requires_grad_(true)
        local why = refused(m, input(rank))
        assert.truthy(why:find("parameter 'a.weight' is frozen on Rank 1, and trained on rank 0", 1, true), why)
      end)

      it("fails on all ranks if one alone trains a parameter later", function(rank)
        local _, nn = load()
        local net = make()
        net.a:requires_grad_(false)
        local m = nn.DDP(net)
        if rank == world - 1 then net.a:requires_grad_(true) end
        local why = refused(function() m(input(rank)):sum():backward() end)
        if rank == world - 1 then
          assert.truthy(why:find("on this rank, parameter 'a.weight' was unfrozen after the module was wrapped", 1, true), why)
        end
      end)
    end
  end)
end
