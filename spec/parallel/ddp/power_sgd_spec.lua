-- SPDX-License-Identifier: MIT
--- PowerSGD as a communication hook of nn.DDP: exact if a gradient's rank is not larger than the approximation's, few
--- bytes sent, and error feedback for what is left out (docs/semantics.md#ddp-hooks).
local gradients = require "spec.support.ddp_gradients"
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"

local function load()
  local ms = require "moonshard"
  return ms, ms.nn, ms.dist, ms.nn.ddp_hooks
end

-- A wrapped model of matrices 12 x 10 and 3 x 12 with their biases; options of the state, or nil for the plain mean.
local function wrapped(options, group)
  local ms, nn, _, hooks = load()
  ms.manual_seed(5)
  local model = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 3)):double()
  local ddp, state = nn.DDP(model), nil
  if options then
    state = hooks.PowerSGDState(group, options)
    ddp:register_comm_hook(state, hooks.powerSGD_hook)
  end
  return ddp, state, model
end

local function batch(rank, step, rows) return gradients.batch(rank, step, { rows = rows }) end

for world = 1, 4 do
  ranks.describe(world, ("PowerSGD on %d ranks"):format(world), function()
    it("gives the mean if its rank is that of the gradient", function(rank)
      local ms = load()
      for _, case in ipairs {
        { start = 2, rank = 12, rows = 8 },                     -- full rank of every matrix
        { start = 0, rank = 3, rows = 3, same = true },         -- three rows on every rank give gradients of rank 3
      } do
        local options = { matrix_approximation_rank = case.rank, min_compression_rate = 0.01,
          start_powerSGD_iter = case.start,
          use_error_feedback = case.start > 0, warm_start = case.start > 0 }
        local ddp, plain = wrapped(options), wrapped()
        for step = 1, 4 do
          local x = batch(case.same and 0 or rank, step, case.rows)
          local a, b = gradients.of(ddp, x), gradients.of(plain, x)
          for k = 1, #a do ms.testing.assert_close(a[k], b[k], { rtol = 1e-7, atol = 1e-8 }) end
        end
      end
    end)

    it("sends two thin matrices and the vectors from its iteration on", function(rank)
      local _, _, dist = load()
      local ddp, state = wrapped { matrix_approximation_rank = 1, start_powerSGD_iter = 2, min_compression_rate = 2.5 }
      for step = 1, 4 do
        local told, sent = dist.record(function() gradients.of(ddp, batch(rank, step)) end), 0
        for _, c in ipairs(told) do
          if c.op == "all_reduce" and c.dtype == "float64" then sent = sent + c.input_numel end
        end
        -- The 12 x 10 matrix is sent as 12 + 10 numbers. The 3 x 12 matrix would not shrink by 2.5, so it is sent
        -- whole, like the vectors of 12 and 3.
        assert.equal(step <= 2 and 120 + 36 + 12 + 3 or 22 + 51, sent)
      end
      local rate, before, after = state:compression_stats()
      assert.same({ 2 * 171, 2 * 73 }, { before, after })
      assert.near(171 / 73, rate, 1e-12)
      assert.equal(4, state.iter)
    end)

    it("adds the approximation error to later gradients: nothing is lost", function(rank)
      local ms, _, dist = load()
      local ddp, state = wrapped { start_powerSGD_iter = 2 }
      local plain = wrapped()
      local x = batch(rank, 1)
      local want = gradients.of(plain, x)[1]
      for _ = 1, 2 do gradients.of(ddp, x) end
      local sum, coarse = ms.zeros_like(want), nil
      for _ = 1, 6 do
        local g = gradients.of(ddp, x)[1]
        coarse = coarse or g
        sum:add_(g)
      end
      assert.is_false(coarse:allclose(want, { rtol = 1e-3 }))
      -- The mean of the ranks' errors is what the sum lacks.
      local left
      for k, p in ipairs(ddp:parameters()) do
        for _, memory in pairs(state.memory) do         -- any order: there is one bucket
          if k == 1 then
            assert.is_nil(left)
            for _, known in ipairs(rawget(ddp, "_ddp").buckets) do
              for j, q in ipairs(known.parameters) do
                if q == p then left = memory.error:narrow(1, known.offsets[j], p:numel()):view(p.shape):clone() end
              end
            end
          end
        end
      end
      dist.all_reduce(left, { op = "avg" })
      ms.testing.assert_close(sum + left, want * 6, { rtol = 1e-9, atol = 1e-9 })
    end)

    it("trains: ranks stay equal, losses are close to those of the plain mean, the script's random numbers do not change",
      function(rank)
      local ms, _, dist = load()
      local finals = {}
      for k, options in ipairs { false, { start_powerSGD_iter = 2, matrix_approximation_rank = 2 } } do
        local ddp, _, model = wrapped(options or nil)
        local optimizer = ms.optim.SGD(ddp:parameters(), { lr = 0.02 })
        for step = 1, 60 do
          ms.scope(function()
            local x = batch(rank, step)
            local loss = (ddp(x) - x:narrow(2, 1, 3)):pow(2):mean()
            ms.manual_seed(step)
            loss:backward()
            finals[3] = ms.rand(1):item()
            ms.manual_seed(step)
            assert.equal(finals[3], ms.rand(1):item())
            optimizer:step()
            optimizer:zero_grad()
            finals[k] = loss:item()
          end)
        end
        for _, p in ipairs(model:parameters()) do
          local first = p:detach():clone()
          dist.broadcast(first, { src = 0 })
          assert.is_true(first:equal(p))
        end
      end
      local start = (batch(rank, 60):narrow(2, 1, 3)):pow(2):mean():item()
      assert.is_true(finals[1] < start)
      assert.near(finals[1], finals[2], 0.1 * start)
    end)

    it("runs inside wrapper hooks and over a group, and refuses unsupported options", function(rank)
      local ms, nn, dist, hooks = load()
      local ddp = nn.DDP(nn.Linear(40, 30))
      ddp:register_comm_hook(hooks.PowerSGDState(dist.default_group(),
        { start_powerSGD_iter = 2, matrix_approximation_rank = 30, min_compression_rate = 0.1 }),
        hooks.bf16_compress_wrapper(hooks.powerSGD_hook))
      local plain = nn.DDP(nn.Linear(40, 30))
      ms.no_grad(function()
        for k, p in ipairs(ddp:parameters()) do plain:parameters()[k]:copy_(p) end
      end)
      for step = 1, 3 do
        ms.manual_seed(10 * step + rank)
        local x = ms.randn(2, 40)
        local a, b = gradients.of(ddp, x), gradients.of(plain, x)
        for k = 1, #a do
          local scale = b[k]:abs():max():item()
          assert.is_true((a[k] - b[k]):abs():max():item() < 0.1 * scale)
        end
      end
      assert.equal("Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, because PowerSGD can only be applied "
        .. "after the first two iterations in DDP.", message(hooks.PowerSGDState, nil, { start_powerSGD_iter = 1 }))
      assert.matches("'matrix_approximation_rank' is a number %(0%)",
        message(hooks.PowerSGDState, nil, { matrix_approximation_rank = 0 }))
      assert.matches("expected a group", message(hooks.PowerSGDState, 7))
      local other = nn.DDP(nn.Linear(2, 2))
      other:register_comm_hook({}, hooks.powerSGD_hook)
      assert.matches("expected a PowerSGDState", message(function() other(ms.ones(1, 2)):sum():backward() end))
    end)
  end)
end
