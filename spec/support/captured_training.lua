-- SPDX-License-Identifier: MIT
--- Kinds of training for specs of captured steps: every call must give the same bits as without capture.
local assert = require "luassert"
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local M = {}

--- Fails unless the tensors of two lists are bitwise equal.
function M.same(a, b)
  assert.are.equal(#a, #b)
  for k = 1, #a do
    assert.is_true(ms.equal(a[k], b[k]), ("tensor %d differs"):format(k))
  end
end

--- Functions by name: each makes the model, its optimizer and the step of one kind of training.
M.kinds = {}
local kinds = M.kinds

kinds["an MLP with AdamW, zero_grad first"] = function()
  local model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
  local opt = optim.AdamW(model:parameters(), { lr = 1e-2 })
  return model, opt, function(x, y)
    opt:zero_grad()
    local loss = nn.F.mse_loss(model(x), y)
    loss:backward()
    opt:step()
    return loss
  end
end

kinds["dropout, clipping and SGD with momentum, zero_grad last"] = function()
  local model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(16), nn.Linear(16, 3))
  local opt = optim.SGD(model:parameters(), { lr = 5e-2, momentum = 0.9 })
  return model, opt, function(x, y)
    local out = model(x)
    local loss = nn.F.mse_loss(out, y)
    loss:backward()
    local norm = nn.utils.clip_grad_norm_(model:parameters(), 0.05)
    opt:step()
    opt:zero_grad()
    return loss, norm, out
  end
end

kinds["bfloat16 by autocast, two groups, Adam with amsgrad"] = function()
  local model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
  local opt = optim.Adam({ { params = model[1]:parameters() }, { params = model[3]:parameters(), lr = 1e-3 } },
    { lr = 1e-2, amsgrad = true })
  return model, opt, function(x, y)
    opt:zero_grad()
    local loss = ms.amp.autocast("bfloat16", function() return nn.F.mse_loss(model(x):float(), y) end)
    loss:backward()
    opt:step()
    return loss
  end
end

kinds["batch norm, noise drawn in the step, accumulation over two halves"] = function()
  local model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
  local opt = optim.AdamW(model:parameters(), { lr = 1e-2 })
  return model, opt, function(x, y)
    local total
    for half = 0, 1 do
      local part = x:narrow(1, 4 * half + 1, 4)
      local loss = nn.F.mse_loss(model(part + ms.randn(4, 6) * 0.1), y:narrow(1, 4 * half + 1, 4))
      loss:backward()
      total = total and total + loss:detach() or loss:detach()
    end
    opt:step()
    opt:zero_grad()
    return total
  end
end

kinds["a step that clips"] = function()
  local model = nn.Linear(6, 3)
  local opt = optim.AdamW(model:parameters(), { lr = 1e-2 })
  return model, opt, function(x, y)
    nn.F.mse_loss(model(x), y):backward()
    local norm = opt:step_clipped(0.05)
    opt:zero_grad()
    return norm
  end
end

-- The scaled gradients overflow whenever the scale has grown, so that several of the steps are skipped.
kinds["a gradient scaler that skips steps, clipping"] = function()
  local model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
  local opt = optim.AdamW(model:parameters(), { lr = 1e-2 })
  local scaler = ms.amp.GradScaler { init_scale = 2 ^ 124, growth_factor = 4, growth_interval = 3 }
  return model, opt, function(x, y)
    opt:zero_grad()
    local loss = nn.F.mse_loss(model(x), y)
    scaler:scale(loss * 100):backward()
    scaler:unscale_(opt)
    nn.utils.clip_grad_norm_(model:parameters(), 1)
    scaler:step(opt)
    scaler:update()
    return loss, scaler.scale_tensor
  end
end

kinds["two optimizers and a gradient scaler"] = function()
  local model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
  local opt, other = optim.AdamW(model[1]:parameters(), { lr = 1e-2 }),
    optim.SGD(model[3]:parameters(), { lr = 1e-2, momentum = 0.9 })
  local scaler = ms.amp.GradScaler { init_scale = 2 ^ 126, growth_factor = 4, growth_interval = 2 }
  return model, opt, function(x, y)
    local loss = nn.F.mse_loss(model(x), y)
    scaler:scale(loss * 100):backward()
    scaler:step(opt)
    scaler:step(other)
    scaler:update()
    opt:zero_grad()
    other:zero_grad()
    return loss, scaler.scale_tensor
  end
end

kinds["attention with dropout, an embedding, cross-entropy, a checkpoint and a Function"] = function()
  local model = nn.Module:extend "Model"()
  model.embedding, model.head = nn.Embedding(11, 8), nn.Linear(8, 11)
  local twice = ms.Function {
    forward = function(_, x) return x * 2 end,
    backward = function(_, g) return g * 2 end,
  }
  local opt = optim.AdamW(model:parameters(), { lr = 1e-2 })
  return model, opt, function(x, y)
    local ids, targets = x:abs():mul(3):clamp(0, 10):long(), y:abs():mul(3):clamp(0, 10):long():narrow(2, 1, 3)
    local h = model.embedding(ids:narrow(2, 1, 3)):reshape(8, 3, 8)
    h = ms.checkpoint(function(t)
      local q = nn.F.dropout(t, 0.2)
      return nn.F.scaled_dot_product_attention(q, q, q, { is_causal = true, dropout_p = 0.1 })
    end, h)
    local loss = nn.F.cross_entropy(twice(model.head(h)):reshape(24, 11), targets:reshape(24))
    loss:backward()
    opt:step()
    opt:zero_grad()
    return loss
  end
end

--- Runs the training `n` steps, captured or not; after every seventh step, draws random numbers outside of the step.
--- Returns a list (the results of all steps and these numbers, then the final parameters with their states and
--- gradients, and the final buffers), and the step.
function M.train(make, n, capture)
  ms.manual_seed(3)
  local model, opt, fn = make()
  local schedule = optim.lr_scheduler.lambda(opt, function(k) return 1 / (1 + k) end)
  local step = capture and ms.capture(fn) or fn
  local seen = {}
  for k in ms.steps(n) do
    local results = { step(ms.randn(8, 6), ms.randn(8, 3)) }
    for _, r in ipairs(results) do seen[#seen + 1] = r:detach():clone():keep() end
    schedule:step()
    if k % 7 == 0 then seen[#seen + 1] = ms.randn(2):keep() end
  end
  for _, p in ipairs(model:parameters()) do
    seen[#seen + 1] = p:detach()
    for _, state in pairs(opt:state_of(p) or {}) do
      if ms.is_tensor(state) then seen[#seen + 1] = state end
    end
    if p.grad then seen[#seen + 1] = p.grad end
  end
  for _, b in ipairs(model:buffers()) do seen[#seen + 1] = b end
  if capture then assert.is_true(step:memory() > 0) end
  return seen, step
end

return M
