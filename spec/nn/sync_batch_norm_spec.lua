-- SPDX-License-Identifier: MIT
--- SyncBatchNorm over ranks against BatchNorm over the whole batch.
local ms = require "moonshard"
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"
local nn, dist = ms.nn, ms.dist
local close = ms.testing.assert_close

local exact = { rtol = 1e-11, atol = 1e-12 }

-- How the batch is divided: number of rows of every rank, by world size.
local divisions = {
  [1] = { { 5 } }, [2] = { { 3, 3 }, { 5, 1 }, { 0, 4 } }, [3] = { { 2, 2, 2 }, { 1, 4, 2 }, { 3, 0, 1 } },
  [4] = { { 2, 2, 2, 2 }, { 1, 5, 2, 3 }, { 0, 2, 0, 3 } },
}

local function copy(from, to)
  ms.no_grad(function()
    to.weight:copy_(from.weight)
    to.bias:copy_(from.bias)
  end)
end

for world = 1, 4 do
  ranks.describe(world, "SyncBatchNorm", function()
    for _, rows in ipairs(divisions[world]) do
      for _, shape in ipairs { {}, { 3 }, { 4, 5 }, { 2, 3, 2 } } do
        local kind = "BatchNorm" .. math.max(#shape, 1) .. "d"
        it(("equals %s over the whole batch, for %s rows of [3%s] and 3 steps"):format(kind, table.concat(rows, ", "),
          #shape > 0 and ", " .. table.concat(shape, ", ") or ""), function(rank)
          ms.manual_seed(3)
          local total, first = 0, 0
          for r, n in ipairs(rows) do
            if r <= rank then first = first + n end
            total = total + n
          end
          local mine = rows[rank + 1]
          local sync = nn.SyncBatchNorm(3, { momentum = 0.3, dtype = "float64" })
          local whole = nn[kind](3, { momentum = 0.3, dtype = "float64" })
          ms.no_grad(function()
            whole.weight:copy_(ms.tensor({ 1.5, -0.5, 2 }, { dtype = "float64" }))
            whole.bias:copy_(ms.tensor({ 0.1, 0.2, -1 }, { dtype = "float64" }))
          end)
          copy(whole, sync)
          for _ = 1, 3 do
            local x = ms.randn(total, 3, unpack(shape)):double() * 2 + 1
            local g = ms.randn(x.shape):double()
            local a, b = x:clone():requires_grad_(true), x:narrow(1, first + 1, mine):clone():requires_grad_(true)
            local want, got = whole(a), sync(b)
            close(got, want:narrow(1, first + 1, mine), exact)
            want:backward(g)
            got:backward(g:narrow(1, first + 1, mine):clone())
            close(b.grad, a.grad:narrow(1, first + 1, mine), exact)
            for _, name in ipairs { "weight", "bias" } do
              local sum = sync[name].grad:clone()
              dist.all_reduce(sum)
              close(sum, whole[name].grad, exact)
              sync[name].grad, whole[name].grad = nil, nil
            end
          end
          close(sync.running_mean, whole.running_mean, exact)
          close(sync.running_var, whole.running_var, exact)
          assert.are.equal(3, sync.num_batches_tracked:item())
          sync:eval()
          whole:eval()
          local x = ms.randn(2, 3, unpack(shape)):double()
          close(sync(x), whole(x), exact)
        end)
      end
    end

    it("averages over all batches with momentum = false, and keeps no statistics without track_running_stats",
      function(rank)
      ms.manual_seed(4)
      local sync, whole = nn.SyncBatchNorm(2, { momentum = false }), nn.BatchNorm1d(2, { momentum = false })
      local bare = nn.SyncBatchNorm(2, { track_running_stats = false, affine = false })
      for _ = 1, 3 do
        local x = ms.randn(2 * world, 2)
        local y = whole(x)
        sync(x:narrow(1, 2 * rank + 1, 2))
        close(bare(x:narrow(1, 2 * rank + 1, 2)), y:narrow(1, 2 * rank + 1, 2), { rtol = 1e-5, atol = 1e-6 })
      end
      close(sync.running_mean, whole.running_mean, { rtol = 1e-5, atol = 1e-6 })
      close(sync.running_var, whole.running_var, { rtol = 1e-5, atol = 1e-6 })
      assert.is_nil(bare.running_mean)
    end)

    it("computes half types with statistics in float32", function(rank)
      ms.manual_seed(5)
      local x = ms.randn(3 * world, 4, 5):bfloat16()
      local y = nn.SyncBatchNorm(4)(x:narrow(1, 3 * rank + 1, 3))
      assert.are.equal("bfloat16", y.dtype)
      close(y:float(), nn.BatchNorm1d(4)(x:float()):narrow(1, 3 * rank + 1, 3), { rtol = 1e-2, atol = 1e-2 })
    end)

    it("counts only the ranks of its group", function(rank)
      ms.manual_seed(6)
      local x = ms.randn(3, 2)
      local alone = nn.SyncBatchNorm(2, { process_group = dist.self_group() })
      assert.is_true(alone(x * (rank + 1)):equal(nn.BatchNorm1d(2)(x * (rank + 1))))
    end)

    it("is refused on every rank for a single value per channel", function(rank)
      local text = message(nn.SyncBatchNorm(2), ms.ones(rank == 0 and 1 or 0, 2))
      assert.truthy(text:find("SyncBatchNorm: Expected more than 1 value per channel when training", 1, true), text)
    end)

    it("equals batch norm over the whole batch on a GPU #cuda", function(rank)
      ms.manual_seed(9)
      local there = { device = "cuda" }
      local sync, whole = nn.SyncBatchNorm(3, there), nn.BatchNorm2d(3)
      copy(whole, sync)
      for _ = 1, 2 do
        local x, g = ms.randn(2 * world, 3, 4, 5) * 2 + 1, ms.randn(2 * world, 3, 4, 5)
        local a = x:clone():requires_grad_(true)
        local b = x:narrow(1, 2 * rank + 1, 2):to("cuda"):requires_grad_(true)
        local want, got = whole(a), sync(b)
        assert.are.equal("cuda:0", (got.device:gsub("%d$", "0")))
        close(got:cpu(), want:narrow(1, 2 * rank + 1, 2), { rtol = 1e-5, atol = 1e-5 })
        want:backward(g)
        got:backward(g:narrow(1, 2 * rank + 1, 2):to "cuda")
        close(b.grad:cpu(), a.grad:narrow(1, 2 * rank + 1, 2), { rtol = 1e-4, atol = 1e-5 })
      end
      close(sync.running_mean:cpu(), whole.running_mean, { rtol = 1e-5, atol = 1e-6 })
      close(sync.running_var:cpu(), whole.running_var, { rtol = 1e-5, atol = 1e-6 })
    end)

    for _, device in ipairs { "cpu", "cuda" } do
      it(("has the bits of uncaptured steps in a captured one on %s #%s"):format(device, device), function(rank)
        local function train(captured)
          ms.manual_seed(3)
          local m = nn.Sequential(nn.Linear(4, 6), nn.SyncBatchNorm(6), nn.Tanh(), nn.Linear(6, 2)):to(device)
          local optimizer = ms.optim.Adam(m:parameters(), { lr = 0.01 })
          local function step(x, t)
            local loss = nn.F.mse_loss(m(x), t)
            loss:backward()
            optimizer:step()
            optimizer:zero_grad()
            return loss
          end
          if captured then step = ms.capture(step) end
          local seen = {}
          for k = 1, 5 do
            ms.manual_seed(100 * rank + k)
            seen[k] = step(ms.randn(rank + 2, 4):to(device), ms.randn(rank + 2, 2):to(device)):item()
          end
          return seen, m:state_dict()
        end
        local want, state = train(false)
        local got, captured = train(true)
        assert.are.same(want, got)
        for name, t in pairs(state) do assert.is_true(t:equal(captured[name]), name) end
      end)
    end

    -- The mean loss over the whole batch is the mean of the ranks' losses, weighted by the sizes of their batches.
    it("in a sharded model trains as batch norm in one process for 20 steps, to 1e-5", function(rank)
      local function make()
        ms.manual_seed(7)
        return nn.Sequential(nn.Conv1d(2, 4, 3, { dtype = "float64" }), nn.BatchNorm1d(4, { dtype = "float64" }),
          nn.Tanh(), nn.Conv1d(4, 3, 2, { dtype = "float64" }), nn.BatchNorm1d(3, { dtype = "float64" }))
      end
      local whole, sharded = make(), nn.SyncBatchNorm.convert_sync_batchnorm(make())
      for k = 1, #sharded do ms.fsdp.fully_shard(sharded[k]) end
      ms.fsdp.fully_shard(sharded)
      local a = ms.optim.Adam(whole:parameters(), { lr = 0.02 })
      local b = ms.optim.Adam(sharded:parameters(), { lr = 0.02 })
      local rows = world * (world + 1) / 2                 -- rank r has r + 1 of them
      for step = 1, 20 do
        ms.manual_seed(100 + step)
        local x, t = ms.randn(rows, 2, 7):double(), ms.randn(rows, 3, 4):double()
        a:zero_grad()
        b:zero_grad()
        nn.F.mse_loss(whole(x), t):backward()
        local first, n = rank * (rank + 1) / 2 + 1, rank + 1
        local loss = nn.F.mse_loss(sharded(x:narrow(1, first, n)), t:narrow(1, first, n))
        ;(loss * (n * world / rows)):backward()
        a:step()
        b:step()
      end
      local want = whole:state_dict()
      for key, t in ms.sorted_pairs(ms.fsdp.state_dict(sharded)) do
        close(t, want[key], { rtol = 1e-5, atol = 1e-7 })
      end
    end)
  end)
end

describe("SyncBatchNorm", function()
  it("takes the parameters and buffers of the batch norms that it replaces", function()
    local m = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, { eps = 1e-3, momentum = 0.2 }),
      nn.Sequential(nn.BatchNorm3d(2, { affine = false }), nn.BatchNorm1d(4, { track_running_stats = false })))
    m[2].running_mean:fill_(3)
    m:eval()
    local before, weight, mean, group = m:state_dict(), m[2].weight, m[2].running_mean, dist.self_group()
    assert.are.equal(m, nn.SyncBatchNorm.convert_sync_batchnorm(m, group))
    assert.is_true(rawequal(weight, m[2].weight) and rawequal(mean, m[2].running_mean))
    assert.are.equal("SyncBatchNorm(2, eps 0.001, momentum 0.2, affine, running stats)", tostring(m[2]))
    assert.are.equal("SyncBatchNorm(2, eps 1e-05, momentum 0.1, running stats)", tostring(m[3][1]))
    assert.are.equal("SyncBatchNorm(4, eps 1e-05, momentum 0.1, affine)", tostring(m[3][2]))
    assert.is_true(m[2].process_group == group and not m[2].training)
    local after = m:state_dict()
    for name, t in pairs(before) do assert.is_true(t:equal(after[name]), name) end
    for name in pairs(after) do assert.is_truthy(before[name], name) end
    assert.is_true(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)):isa(nn.SyncBatchNorm))
  end)

  it("replaces a batch norm with several names by one SyncBatchNorm, and takes the group as an option", function()
    local shared, group = nn.BatchNorm1d(2), dist.default_group()
    local m = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(shared, nn.Sequential(shared), shared),
      { process_group = group })
    assert.is_true(m[1]:isa(nn.SyncBatchNorm) and rawequal(m[1], m[3]) and rawequal(m[1], m[2][1]))
    assert.is_true(m[1].process_group == group)
    assert.is_true(nn.SyncBatchNorm:convert_sync_batchnorm(nn.BatchNorm1d(3)):isa(nn.SyncBatchNorm))
  end)

  it("is an instance of its own in full precision under FSDP's mixed precision, as every batch norm", function()
    for _, name in ipairs { "BatchNorm1d", "BatchNorm3d", "SyncBatchNorm" } do
      local m = nn.Sequential(nn.Linear(3, 4), nn[name](4))
      local warnings = ms.catch_warnings(function()
        m = ms.fsdp.FSDP(m, { auto_wrap_policy = ms.fsdp.wrap.module_wrap_policy { nn.Linear },
          sharding_strategy = "no_shard", mixed_precision = ms.fsdp.MixedPrecision { param_dtype = "bfloat16" } })
      end)
      assert.truthy(table.concat(warnings, "\n"):find("mixed precision", 1, true), table.concat(warnings, "\n"))
      assert.are.equal(3, #ms.fsdp.fsdp_modules(m), name)
    end
  end)

  it("names what does not fit", function()
    assert.are.equal("expected at least 2D input (got 1D input)", message(nn.SyncBatchNorm(3), ms.zeros(3)))
    assert.are.equal("expected 5D input (got 4D input)", message(nn.BatchNorm3d(3), ms.zeros(2, 3, 4, 4)))
    assert.truthy(message(nn.SyncBatchNorm.convert_sync_batchnorm, 3):find("convert_sync_batchnorm: argument 1 is", 1,
      true))
    assert.truthy(message(nn.SyncBatchNorm.convert_sync_batchnorm, nn.BatchNorm1d(2), 5):find(
      "convert_sync_batchnorm: argument 2 is a number (5), expected a group", 1, true))
    assert.truthy(message(nn.SyncBatchNorm, 2, { process_group = 5 }):find(
      "SyncBatchNorm: option 'process_group' is a number (5), expected a group", 1, true))
    assert.truthy(message(nn.BatchNorm3d, 3, { process_group = 1 }):find("unknown option 'process_group'", 1, true))
  end)
end)
