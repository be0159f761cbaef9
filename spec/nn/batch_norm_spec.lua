-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local nn = ms.nn
local F = nn.F
local close = ms.testing.assert_close
local message = require "spec.support.message"
local names = require "spec.support.names"

local f64 = { dtype = "float64" }
local function column(t, ndim)                -- [C] as [1, C, 1 …]
  local shape = { 1, t:size(1) }
  for _ = 3, ndim do shape[#shape + 1] = 1 end
  return t:reshape(shape)
end

-- Batch statistics computed by definition.
local function stats(x)
  local dims = { 1 }
  for d = 3, x.ndim do dims[#dims + 1] = d end
  return x:mean(dims), x:var(dims, { correction = 0 }), x:numel() / x:size(2)
end

describe("batch norm", function()
  before_each(function() ms.manual_seed(3) end)

  for _, case in ipairs { { "BatchNorm1d", { 6, 3 } }, { "BatchNorm1d", { 4, 3, 5 } },
    { "BatchNorm2d", { 2, 3, 4, 5 } } } do
    local name, shape = case[1], case[2]
    it(("of %s over %d dimensions normalises each channel by its batch while training"):format(name, #shape), function()
      local m = nn[name](3, f64)
      ms.no_grad(function()
        m.weight:copy_(ms.tensor({ 1, 2, -1 }, f64))
        m.bias:copy_(ms.tensor({ 0, 1, 5 }, f64))
      end)
      local x = ms.randn(shape, f64) * 3 + 7
      local mean, var, n = stats(x)
      local expected = (x - column(mean, #shape)) / (column(var, #shape) + 1e-5):sqrt() * column(m.weight,
        #shape) + column(m.bias, #shape)
      close(m(x), expected, { rtol = 1e-10, atol = 1e-10 })
      -- Running statistics: 0.9 of the old value and 0.1 of the batch's, with the unbiased variance.
      close(m.running_mean, mean * 0.1, { rtol = 1e-12, atol = 1e-12 })
      close(m.running_var, var * (0.1 * n / (n - 1)) + 0.9, { rtol = 1e-12, atol = 1e-12 })
      assert.are.equal(1, m.num_batches_tracked:item())
      assert.are.equal("int64", m.num_batches_tracked.dtype)
      -- Eval mode normalizes with the running statistics and does not count batches.
      m:eval()
      local y = (x - column(m.running_mean, #shape)) / (column(m.running_var, #shape) + 1e-5):sqrt() * column(m.weight,
        #shape)
        + column(m.bias, #shape)
      close(m(x), y, { rtol = 1e-10, atol = 1e-10 })
      assert.are.equal(1, m.num_batches_tracked:item())
    end)
  end

  it("has PyTorch's parameters and buffers, in its order", function()
    local m = nn.BatchNorm2d(4)
    assert.are.equal("weight bias", names(m:named_parameters()))
    assert.are.equal("running_mean running_var num_batches_tracked", names(m:named_buffers()))
    assert.are.same({ 1, 1, 1, 1 }, m.weight:tolist())
    assert.are.same({ 0, 0, 0, 0 }, m.bias:tolist())
    assert.are.same({ 0, 0, 0, 0 }, m.running_mean:tolist())
    assert.are.same({ 1, 1, 1, 1 }, m.running_var:tolist())
    assert.are.equal("[]", tostring(m.num_batches_tracked.shape))
    assert.are.equal("BatchNorm2d(4, eps 1e-05, momentum 0.1, affine, running stats)", tostring(m))
    assert.are.equal("", names(nn.BatchNorm1d(4, { affine = false, track_running_stats = false }):named_parameters()))
    assert.are.equal("", names(nn.BatchNorm1d(4, { affine = false, track_running_stats = false }):named_buffers()))
  end)

  it("joins blocks of rows, for the same bits with any number of threads", function()
    for _, dtype in ipairs { "float64", "float32" } do
      local x = (ms.randn(203, 600, f64) * 2 + 100):to(dtype)         -- 64 rows per block
      local g = ms.randn(203, 600, f64):to(dtype)
      local function run(threads)
        local before = ms.num_threads()
        ms.set_num_threads(threads)
        local a = x:clone():requires_grad_(true)
        local y = F.batch_norm(a, { training = true })
        y:backward(g)
        ms.set_num_threads(before)
        return y:detach(), a.grad
      end
      local y, dx = run(1)
      local y2, dx2 = run(2)
      assert.is_true(y:equal(y2) and dx:equal(dx2))
      local d = x:double()
      local mean, var = stats(d)
      local rstd = 1 / (var + 1e-5):sqrt()
      local h = (d - column(mean, 2)) * column(rstd, 2)
      local tol = dtype == "float64" and { rtol = 1e-10, atol = 1e-11 } or { rtol = 1e-4, atol = 1e-4 }
      close(y, h:to(dtype), tol)
      local gd = g:double()
      close(dx, (column(rstd, 2) * (gd - column(gd:mean(1), 2) - h * column((gd * h):mean(1), 2))):to(dtype), tol)
    end
  end)

  it("averages over all batches if momentum is false", function()
    local m = nn.BatchNorm1d(2, { momentum = false, dtype = "float64" })
    local sum = ms.zeros(2, f64)
    for step = 1, 4 do
      local x = ms.randn(5, 2, f64) + step
      m(x)
      sum = sum + x:mean(1)
      close(m.running_mean, sum / step, { rtol = 1e-12, atol = 1e-12 })
    end
    assert.are.equal(4, m.num_batches_tracked:item())
  end)

  it("lets an empty batch through, counts it, and keeps the running statistics", function()
    for _, shape in ipairs { { 0, 2 }, { 0, 2, 3 }, { 4, 2, 0 } } do
      local m = nn.BatchNorm1d(2)
      local x = ms.zeros(shape):requires_grad_()
      local y = m(x)
      y:sum():backward()
      assert.are.equal(tostring(x.shape), tostring(y.shape))
      assert.are.same({ { 0, 0 }, { 1, 1 }, { 0, 0 }, { 0, 0 } },
        { m.running_mean:tolist(), m.running_var:tolist(), m.weight.grad:tolist(), m.bias.grad:tolist() })
      assert.are.equal(1, m.num_batches_tracked:item())
    end
  end)

  it("uses the batch's statistics in eval, too, if none are tracked", function()
    local m = nn.BatchNorm1d(2, { track_running_stats = false, dtype = "float64" }):eval()
    local x = ms.randn(5, 2, f64) + 3
    close(m(x):mean(1), ms.zeros(2, f64), { rtol = 0, atol = 1e-12 })
  end)

  it("starts over by reset_running_stats", function()
    local m = nn.BatchNorm1d(2)
    m(ms.randn(4, 2) + 5)
    m:reset_running_stats()
    assert.are.same({ 0, 0 }, m.running_mean:tolist())
    assert.are.same({ 1, 1 }, m.running_var:tolist())
    assert.are.equal(0, m.num_batches_tracked:item())
  end)

  it("keeps its counters through state dicts", function()
    local a, b = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    a(ms.randn(4, 2) + 5)
    b:load_state_dict(a:state_dict())
    assert.is_true(b.running_mean:equal(a.running_mean))
    assert.are.equal(1, b.num_batches_tracked:item())
  end)

  it("takes half inputs with float32 statistics and weights, and half weights", function()
    for _, dtype in ipairs { "bfloat16", "float16" } do
      local m = nn.BatchNorm1d(3)
      local x = ms.randn(8, 3)
      local y = m(x:to(dtype))
      assert.are.equal(dtype, y.dtype)
      close(y:float(), nn.BatchNorm1d(3)(x:to(dtype):float()), { rtol = 1e-2, atol = 1e-2 })
      assert.are.equal("float32", m.running_mean.dtype)
      m:to(dtype)
      local z = m(x:to(dtype))
      z:sum():backward()
      assert.are.equal(dtype, m.running_mean.dtype)
      assert.are.equal(dtype, m.weight.grad.dtype)
    end
  end)

  it("is a function too, with PyTorch's arguments", function()
    local x = ms.randn(6, 2, f64)
    local mean, var = ms.zeros(2, f64), ms.ones(2, f64)
    close(F.batch_norm(x, mean, var), x / math.sqrt(1 + 1e-5), { rtol = 1e-12, atol = 1e-12 })
    assert.are.same({ 0, 0 }, mean:tolist())
    F.batch_norm(x, mean, var, { training = true, momentum = 1 })
    close(mean, x:mean(1), { rtol = 1e-12, atol = 1e-12 })
    close(var, x:var(1), { rtol = 1e-12, atol = 1e-12 })
    close(F.batch_norm(x, { training = true }):mean(1), ms.zeros(2, f64), { rtol = 0, atol = 1e-12 })
  end)

  it("differentiates through the batch's own statistics", function()
    local w, b = ms.tensor({ 1.5, -0.5 }, f64):requires_grad_(true), ms.tensor({ 0.1, 0.2 }, f64):requires_grad_(true)
    local x = ms.randn(5, 2, f64):requires_grad_(true)
    assert.is_true(ms.testing.gradcheck(function(a, c, d) return F.batch_norm(a, nil, nil, c, d,
      { training = true }) end, { x, w, b }))
  end)

  it("refuses inputs that it cannot normalise", function()
    assert.are.equal("BatchNorm1d: Expected more than 1 value per channel when training, got input size [1, 3]",
      message(nn.BatchNorm1d(3), ms.zeros(1, 3)))
    assert.are.equal("sequential.2: batch_norm: Expected more than 1 value per channel when training, got input size [1, 3]",
      message(nn.Sequential(nn.Identity(), nn.BatchNorm1d(3)), ms.zeros(1, 3)))
    assert.are.equal("expected 2D or 3D input (got 4D input)", message(nn.BatchNorm1d(3), ms.zeros(1, 3, 2, 2)))
    assert.are.equal("expected 4D input (got 2D input)", message(nn.BatchNorm2d(3), ms.zeros(2, 3)))
    assert.truthy(message(nn.BatchNorm1d(3), ms.zeros(4,
      2)):find("the weight must be [2], one number per channel of the input [4, 2], got [3]", 1, true))
    assert.truthy(message(nn.BatchNorm1d, 3, { momentum = "x" }):find("option 'momentum'", 1, true))
    assert.truthy(message(F.batch_norm, ms.zeros(2, 3)):find("needs a running mean and variance", 1, true))
  end)
end)
