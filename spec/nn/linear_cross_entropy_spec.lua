-- SPDX-License-Identifier: MIT
--- F.linear_cross_entropy in chunks of rows, compared with linear and cross_entropy, on the CPU and the (emulated) GPU.
local ms = require "moonshard"
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"
local F = ms.nn.F

local devices = ms.cuda.is_available() and { "cpu", "cuda" } or { "cpu" }
-- Half types round the gradient of the logits, and in chunks once more the gradients of input and weight.
local bounds = { float64 = 1e-14, float32 = 1e-6, bfloat16 = 1e-2, float16 = 2e-3 }

local function off(a, b)
  a, b = a:detach():to "cpu":to "float64", b:detach():to "cpu":to "float64"
  return (a - b):norm():item() / math.max(b:norm():item(), 1e-30)
end

--- Leaves x [rows, 12], w [40, 12], b [40] and class ids.
local function leaves(rows, dtype, device)
  ms.manual_seed(5)
  local function leaf(...) return ms.randn(...):to(dtype):to(device):requires_grad_(true) end
  return leaf(rows, 12), leaf(40, 12), leaf(40), ms.randint(0, 40, { rows }):to(device)
end

--- The loss and the gradients of x, w and b, with `chunk` rows in a chunk (nil: linear and
--- cross_entropy).
local function results(rows, dtype, device, chunk, o, scale)
  local x, w, b, ids = leaves(rows, dtype, device)
  local given = { linear_bias = b, batch_chunk_size = chunk }
  for name, value in pairs(o) do given[name] = value end
  local loss
  if chunk then loss = F.linear_cross_entropy(x, w, ids, given)
  else loss = F.cross_entropy(F.linear(x, w, b), ids, o) end
  loss:backward(loss.ndim == 0 and ms.tensor(scale or 1, { dtype = dtype, device = device })
    or (ms.arange(0, rows, { dtype = "float32" }) * 0.1 - 1):to(dtype):to(device))
  return { loss = loss, x = x.grad, w = w.grad, b = b.grad }
end

describe("linear_cross_entropy", function()
  for _, device in ipairs(devices) do
    for dtype, bound in pairs(bounds) do
      for _, reduction in ipairs { "mean", "sum", "none" } do
        it(("is cross_entropy of linear, %s, %s, on %s"):format(reduction, dtype, device), function()
          local weight = (ms.arange(0, 40, { dtype = "float32" }) * 0.04 + 0.5):to(dtype):to(device)
          for _, o in ipairs { {}, { ignore_index = 9, label_smoothing = 0.2, weight = weight } } do
            o.reduction = reduction
            for _, rows in ipairs { 1, 33 } do
              local want = results(rows, dtype, device, nil, o, 0.375)
              for _, chunk in ipairs { 1, 8, 16, 33 } do
                local got = results(rows, dtype, device, chunk, o, 0.375)
                for name, t in pairs(want) do
                  assert.are.equal(t.dtype, got[name].dtype)
                  assert.are.equal(t.shape, got[name].shape)
                  local error = off(got[name], t)
                  assert.is_true(error <= bound, ("%d rows in chunks of %d: %s: %g"):format(rows, chunk, name, error))
                  if chunk >= rows then assert.are.equal(0, error) end
                end
              end
            end
          end
        end)
      end
    end
  end

  for _, device in ipairs(devices) do
    for _, dtype in ipairs { "bfloat16", "float16" } do
      it(("does not round a wide loss of %s, and has the same gradients, on %s"):format(dtype, device), function()
        for _, reduction in ipairs { "mean", "sum", "none" } do
          for _, chunk in ipairs { 8, 33 } do
            local x, w, b, ids = leaves(33, dtype, device)
            local function run(wide)
              x.grad, w.grad, b.grad = nil, nil, nil
              local loss = F.linear_cross_entropy(x, w, ids, { linear_bias = b, batch_chunk_size = chunk, wide = wide,
                reduction = reduction })
              loss:backward(ms.full(loss.shape, 0.375, { dtype = loss.dtype, device = device }))
              return loss, x.grad, w.grad, b.grad
            end
            local wide, wx, ww, wb = run(true)
            local narrow, nx, nw, nb = run(false)
            assert.are.same({ "float32", dtype }, { wide.dtype, narrow.dtype })
            assert.is_true(off(wide, F.cross_entropy(F.linear(x, w, b):float(), ids, { reduction = reduction })) < 1e-6)
            assert.is_true(wide:to(dtype):equal(narrow))
            assert.is_true(wx:equal(nx) and ww:equal(nw) and wb:equal(nb))
          end
        end
      end)
    end
  end

  it("has wide losses of probabilities, and of float64 as they are", function()
    local x, w = leaves(5, "bfloat16", "cpu")
    local shares = ms.rand(5, 40):softmax(2):bfloat16()
    local loss = F.linear_cross_entropy(x, w, shares, { wide = true })
    assert.are.equal("float32", loss.dtype)
    assert.is_true(off(loss, F.cross_entropy(F.linear(x, w):float(), shares:float())) < 1e-6)
    loss:backward()
    assert.are.equal("bfloat16", x.grad.dtype)
    local dx, dw, _, ids = leaves(5, "float64", "cpu")
    assert.are.equal("float64", F.linear_cross_entropy(dx, dw, ids, { wide = true }).dtype)
  end)

  it("has the gradients of finite differences", function()
    for _, reduction in ipairs { "mean", "sum", "none" } do
      local x, w, b, ids = leaves(5, "float64", "cpu")
      assert.is_true(ms.testing.gradcheck(function(...)
        local t, v, c = ...
        return F.linear_cross_entropy(t, v, ids, { linear_bias = c, reduction = reduction, batch_chunk_size = 2 })
      end, { x, w, b }))
    end
  end)

  it("has equal bits with any number of threads", function()
    local threads, first = ms.num_threads(), nil
    for n = 1, 3 do
      ms.set_num_threads(n)
      local got = results(300, "float32", "cpu", 64, {})
      first = first or got
      for name, t in pairs(got) do assert.is_true(t:equal(first[name]), name) end
    end
    ms.set_num_threads(threads)
  end)

  it("keeps small gradients of float16 when the loss is scaled", function()
    for _, device in ipairs(devices) do
      local function gradient(chunk)
        ms.manual_seed(2)
        local x = ms.zeros(4096, 8, { dtype = "float16", device = device }):requires_grad_()
        local w = (ms.randn(64, 8) * 0.01):to "float16":to(device)
        local ids = ms.randint(0, 64, { 4096 }):to(device)
        local loss = F.linear_cross_entropy(x, w, ids, { batch_chunk_size = chunk }) * 1024
        loss:backward()
        return x.grad
      end
      local got, want = gradient(512), gradient(4096)
      assert.is_true(got:equal(want))
      assert.is_true(want:ne(0):to "float32":mean():item() > 0.9)
    end
  end)

  it("takes any leading dimensions, and probabilities", function()
    local x, w = ms.randn(3, 4, 12), ms.randn(40, 12)
    local ids = ms.randint(0, 40, { 3, 4 })
    local logits = F.linear(x, w):reshape(12, 40)
    local each = F.linear_cross_entropy(x, w, ids, { reduction = "none", batch_chunk_size = 5 })
    assert.are.same({ 3, 4 }, { unpack(each.shape) })
    ms.testing.assert_close(each:reshape(12), F.cross_entropy(logits, ids:reshape(12), { reduction = "none" }))
    local p = F.softmax(ms.randn(3, 4, 40))
    ms.testing.assert_close(F.linear_cross_entropy(x, w, p), F.cross_entropy(logits, p:reshape(12, 40)))
    ms.testing.assert_close(F.linear_cross_entropy(x[1][2], w, ids[1][2]), each[1][2])
  end)

  it("is float32 under autocast", function()
    local function loss(chunk)
      local x, w, b, ids = leaves(33, "float32", "cpu")
      local l = ms.amp.autocast("bfloat16", F.linear_cross_entropy, x, w, ids, { linear_bias = b, batch_chunk_size = chunk })
      l:backward()
      return { l, x.grad, w.grad, b.grad }
    end
    local got, want = loss(8), loss(64)
    for k = 1, 4 do
      assert.are.equal("float32", got[k].dtype)
      assert.is_true(off(got[k], want[k]) <= (k == 1 and 1e-6 or 1e-2))
    end
  end)

  it("computes only what is requested: one gradient, again, under no_grad and in a checkpoint", function()
    local x, w, _, ids = leaves(33, "float32", "cpu")
    local given = { batch_chunk_size = 8 }
    local function loss() return F.linear_cross_entropy(x, w, ids, given) end
    local l = loss()
    local dx, dw = unpack(ms.grad(l, { x, w }, { retain_graph = true }))
    l:backward(nil, { retain_graph = true })
    l:backward()
    assert.is_true(x.grad:equal(dx + dx) and w.grad:equal(dw + dw))
    assert.is_true(F.linear_cross_entropy(x, w:detach(), ids, given):equal(l))
    assert.is_true(ms.grad(F.linear_cross_entropy(x:detach(), w, ids, given), { w })[1]:equal(dw))
    local plain = ms.no_grad(loss)
    assert.is_true(plain:equal(l) and not plain.requires_grad)
    x.grad, w.grad = nil, nil
    local again = ms.checkpoint(loss)
    again:backward()
    assert.is_true(again:equal(l) and x.grad:equal(dx) and w.grad:equal(dw))
  end)

  it("never has the logits of all rows", function()
    local rows, classes = 4096, 2048                    -- 32 MiB of logits
    local x, w = ms.randn(rows, 8):requires_grad_(), ms.randn(classes, 8):requires_grad_()
    local ids = ms.randint(0, classes, { rows })
    local function peak(chunk)
      ms.reset_peak_memory_stats "cpu"
      local before = ms.memory_stats "cpu".allocated
      ms.scope(function() F.linear_cross_entropy(x, w, ids, { batch_chunk_size = chunk }):backward() end)
      x.grad, w.grad = nil, nil
      return (ms.memory_stats "cpu".peak_allocated - before) / 2 ^ 20
    end
    assert.is_true(peak(rows) >= 64)
    assert.is_true(peak(256) <= 8)                      -- logits and their gradient: 2 MiB each
  end)

  it("keeps no memory outside of scopes, like cross_entropy", function()
    local x, w, _, ids = leaves(33, "float32", "cpu")
    local live = ms.memory_stats "cpu".live_tensors
    F.linear_cross_entropy(x, w, ids, { batch_chunk_size = 8 }):release()
    F.cross_entropy(x, ms.zeros(33, { dtype = "int64" })):release()
    collectgarbage()
    collectgarbage()
    assert.is_true(ms.memory_stats "cpu".live_tensors <= live)
  end)

  it("refuses what it cannot compute, by name", function()
    local x, w, b, ids = leaves(5, "float32", "cpu")
    for _, case in ipairs {
      { function() F.linear_cross_entropy(x, w:t(), ids) end,
        "linear_cross_entropy: the input must be [..., in] and linear_weight [classes, in], got [5, 12] and [12, 40]" },
      { function() F.linear_cross_entropy(x, w, ids:narrow(1, 1, 4)) end,
        "linear_cross_entropy: target for input [5, 12] and 40 classes must have shape [5], got [4]" },
      { function() F.linear_cross_entropy(x, w, x) end,
        "linear_cross_entropy: probabilities for input [5, 12] and 40 classes must have shape [5, 40], got [5, 12]" },
      { function() F.linear_cross_entropy(x, w, ids, { batch_chunk_size = 0 }) end,
        "linear_cross_entropy: option 'batch_chunk_size' is a number (0), expected a whole number from 1" },
      { function() F.linear_cross_entropy(x, w:to "float64", ids, { batch_chunk_size = 2 }) end,
        "linear_cross_entropy: input and weight must have the same floating-point dtype, got float32 [5, 12] cpu and float64 [40, 12] cpu" },
      { function() F.linear_cross_entropy(x, w, ids + 40, { batch_chunk_size = 2 }) end, "is neither in 0 .. 39 nor ignore_index -100" },
      { function() F.linear_cross_entropy(x, w, ids, { linear_bias = b:narrow(1, 1, 3), batch_chunk_size = 2 }) end,
        "linear_cross_entropy: the bias must be float32 [40], got float32 [3] cpu" },
      { function() F.linear_cross_entropy(x, w, ids, { weight = b, batch_chunk_size = 2 }):backward() end,
        "linear_cross_entropy: gradients of class weights are not supported; detach the weights" },
      { function() F.linear_cross_entropy(x, w, nil) end, "linear_cross_entropy: ids" },
    } do
      local text = message(case[1])
      assert.is_truthy(text:find(case[2], 1, true), text)
    end
  end)
end)

-- A tied weight, whose gradient is the sum of the embedding's and the head's.
local Tied = ms.nn.Module:extend "Tied"
function Tied:init(chunk)
  self.token, self.mix, self.chunk = ms.nn.Embedding(40, 12), ms.nn.Linear(12, 12), chunk
  self.head = ms.nn.Linear(12, 40, { bias = false })
  self.head.weight = self.token.weight
end
function Tied:forward(ids)
  return F.linear_cross_entropy(self.mix(self.token(ids)), self.head.weight, ids, { batch_chunk_size = self.chunk })
end

--- The losses of three steps on 33 ids of this rank.
local function losses(chunk, wrap, seed)
  ms.manual_seed(3)
  local model = wrap(Tied(chunk))
  local optimizer = ms.optim.SGD(model:parameters(), { lr = 0.5 })
  local list = {}
  for k = 1, 3 do
    ms.manual_seed(10 * k + seed)
    local loss = model(ms.randint(0, 40, { 3, 11 }))
    loss:backward()
    optimizer:step()
    optimizer:zero_grad()
    list[k] = loss:item()
  end
  return list
end

local function trains_alike(wrap, seed)
  local got, want = losses(8, wrap, seed), losses(100, wrap, seed)
  assert.is_true(want[3] < want[1] and want[3] ~= want[2])
  for k = 1, 3 do assert.is_true(math.abs(got[k] - want[k]) <= 1e-5, ("step %d: %g, %g"):format(k, got[k], want[k])) end
end

describe("linear_cross_entropy with a tied weight", function()
  it("trains as cross_entropy of linear does", function() trains_alike(function(net) return net end, 0) end)
end)

ranks.describe(2, "linear_cross_entropy with a tied weight", function()
  for name, wrap in pairs {
    DDP = function(net) return ms.nn.DDP(net) end,
    fully_shard = function(net) return ms.fsdp.fully_shard(net) end,
    FSDP = function(net) return ms.fsdp.FSDP(net) end,
  } do
    it("trains as cross_entropy of linear does, with " .. name, function() trains_alike(wrap, ms.dist.rank()) end)
  end
end)
