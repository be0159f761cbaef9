-- SPDX-License-Identifier: MIT
--- Losses: what the golden numbers leave open.
local message = require "spec.support.message"
local ms = require "moonshard"
local refuses = require "spec.support.raises"
local nn, F = ms.nn, ms.nn.F

local f64 = { dtype = "float64" }
local function ids(list) return ms.tensor(list, { dtype = "int64" }) end

describe("a loss", function()
  it("refuses a target of another shape instead of broadcasting it", function()
    refuses("l1_loss: the input has shape [3] and the target [3, 1]; expected the same shape", F.l1_loss, ms.ones(3),
      ms.ones(3, 1))
    refuses("triplet_margin_loss: the input has shape [2] and the negative [3]; expected the same shape",
      F.triplet_margin_loss, ms.ones(2), ms.ones(2), ms.ones(3))
  end)

  it("refuses options and classes that make no sense", function()
    for _, name in ipairs { "mse_loss", "l1_loss", "huber_loss" } do
      refuses(name .. ": the input has shape [3] and the weight [1]; expected the same shape", F[name], ms.ones(3),
        ms.ones(3), { weight = ms.ones(1) })
      refuses(name .. ": option 'weight' is a number (2), expected a tensor", F[name], ms.ones(3), ms.ones(3),
        { weight = 2 })
    end
    refuses("huber_loss: option 'delta' is a number (0), expected a number > 0", F.huber_loss, ms.ones(1), ms.ones(1),
      { delta = 0 })
    refuses("gaussian_nll_loss: the variance has negative elements", F.gaussian_nll_loss, ms.ones(1), ms.ones(1), -1)
    refuses("nll_loss: input has shape [2, 3] and target [2, 1]; expected [C] and [], [N, C] and [N], or "
      .. "[N, C, ...] and [N, ...]", F.nll_loss, ms.ones(2, 3), ids { { 0 }, { 1 } })
    assert.is_false(pcall(F.nll_loss, ms.ones(2, 3), ids { 0, 3 }))
    local advice = 'target must be int64 or int32, got float32 [2]; write target:long(), or make it with ms.tensor(..., { dtype = "int64" })'
    refuses("nll_loss: " .. advice, F.nll_loss, ms.ones(2, 3), ms.ones(2))
    refuses("cross_entropy: " .. advice, F.cross_entropy, ms.ones(2, 3), ms.ones(2))
    refuses("CrossEntropyLoss: " .. advice, nn.CrossEntropyLoss(), ms.ones(2, 3), ms.ones(2))
    refuses("nll_loss: the weight has shape [2], expected [3]: the input has 3 classes", F.nll_loss, ms.ones(2, 3),
      ids { 0, 2 }, { weight = ms.ones(2) })
    refuses("one_hot: the largest id is 3, expected less than 3", F.one_hot, ids { 0, 3 }, 3)
    refuses("one_hot: the lowest id is -1, expected ids from 0", F.one_hot, ids { -1 })
  end)

  it("of probabilities refuses numbers outside of 0 to 1, except in a captured step", function()
    local function text(what, value)
      return ("binary_cross_entropy: the %s has the element %s, expected numbers from 0 to 1; for logits write "
        .. "binary_cross_entropy_with_logits"):format(what, value)
    end
    local half = ms.tensor { 0.5, 0.5 }
    for value, input in pairs { ["-1"] = { 2, -1 }, ["1.5"] = { 0.5, 1.5 }, ["nan"] = { 0.5, 0 / 0 } } do
      refuses(text("input", value), F.binary_cross_entropy, ms.tensor(input), half)
      refuses("bceloss: " .. text("input", value), nn.BCELoss(), ms.tensor(input, { requires_grad = true }), half)
    end
    refuses(text("target", "2"), F.binary_cross_entropy, half, ids { 2, 0 })
    for _, dtype in ipairs { "int64", "bool", "float64" } do
      assert.near(math.log(2), F.binary_cross_entropy(half, ids { 1, 0 }:to(dtype)):item(), 1e-6)
    end
    assert.is_true(F.binary_cross_entropy(ms.ones(0), ms.ones(0)):isnan():item())
    local step = ms.capture(function(x) return F.binary_cross_entropy(x, half) end)
    for _ = 1, 3 do assert.near(math.log(2), step(half):item(), 1e-6) end
    assert.is_true(step(ms.tensor { 2, -1 }):isnan():item())
  end)

  -- PyTorch 2.9: forward promotes; its backward refuses float32 against float64, so the gradients are those of the
  -- losses of promoted tensors.
  local of_two = { mse_loss = nn.MSELoss, l1_loss = nn.L1Loss, smooth_l1_loss = nn.SmoothL1Loss,
    huber_loss = nn.HuberLoss, soft_margin_loss = nn.SoftMarginLoss }
  local pairs_of = { { "float32", "float64", "float64" }, { "float16", "float32", "float32" },
    { "float16", "bfloat16", "float32" }, { "float32", "int64", "float32" }, { "bfloat16", "int32", "bfloat16" },
    { "float32", "bool", "float32" } }
  for name, class in ms.sorted_pairs(of_two) do
    it("promotes two dtypes, and each gradient has its tensor's: " .. name, function()
      for _, of in ipairs(pairs_of) do
        local a, b = ms.tensor({ 0.5, 1, -2 }, { dtype = of[1], requires_grad = true }), ms.tensor { 1, 0, 1 }:to(of[2])
        if name == "l1_loss" and of[2] == "bool" then b = b:long() end                -- no `-` with a bool
        local wide = a:detach():to(of[3])
        wide.requires_grad = true
        local wanted = F[name](wide, b:to(of[3]))
        wanted:backward()
        for _, loss in ipairs { F[name](a, b), class()(a, b) } do
          assert.are.equal(of[3], loss.dtype)
          ms.testing.assert_close(wanted, loss)
        end
        F[name](a, b):backward()
        assert.are.equal(of[1], a.grad.dtype)
        ms.testing.assert_close(wide.grad:to(of[1]), a.grad)
        assert.are.equal(of[3], F[name](a, b, { reduction = "none" }).dtype)
      end
    end)
  end

  it("mse_loss of integers is refused", function()
    refuses("mse_loss: both arguments must have a floating-point dtype, got int64 [2] cpu and int64 [2] cpu",
      F.mse_loss, ids { 1, 2 }, ids { 1, 2 })
  end)

  it("as a module has the options of its function, and its weights as buffers", function()
    local weight = ms.tensor { 1, 2, 3 }
    local loss = nn.NLLLoss { weight = weight, reduction = "sum" }
    local x, y = ms.randn(4, 3):log_softmax(2), ids { 0, 1, 2, 1 }
    assert.is_true(loss(x, y):equal(F.nll_loss(x, y, { weight = weight, reduction = "sum" })))
    assert.are.equal("NLLLoss(sum)", tostring(loss))
    assert.is_true(loss:state_dict().weight:equal(weight))
    assert.are.equal("float64", loss:double().weight.dtype)
  end)

  it("of classes is cross_entropy of the logits", function()
    local x, y = ms.randn(5, 4), ids { 0, 1, 2, 3, 0 }
    ms.testing.assert_close(F.cross_entropy(x, y), F.nll_loss(x:log_softmax(2), y))
  end)

  it("releases its intermediate results outside of scopes", function()
    local a, b = ms.randn(100, 100), ms.rand(100, 100)
    collectgarbage()
    collectgarbage "stop"
    local before = ms.memory_stats().allocated
    for _ = 1, 20 do F.binary_cross_entropy_with_logits(a, b):release() end
    local after = ms.memory_stats().allocated
    collectgarbage "restart"
    assert.is_true(after - before < 100 * 100 * 4, tostring(after - before))
  end)

  it("of saturated logits keeps small losses and gradients", function()
    for dtype, near in pairs { float32 = 1e-5, float64 = 1e-12, bfloat16 = 0.02, float16 = 0.05 } do
      local x = ms.tensor({ -12, 12, -12, 12 }, { dtype = dtype, requires_grad = true })
      local y = ms.tensor({ 0, 1, 1, 0 }, { dtype = dtype })
      local loss = F.binary_cross_entropy_with_logits(x, y, { reduction = "none", pos_weight = ms.tensor(3, { dtype = dtype }) })
      loss:sum():backward()
      local e = math.exp(-12)
      local small, p = e - e ^ 2 / 2 + e ^ 3 / 3, 1 / (1 + math.exp(12))
      for k, right in ipairs { small, 3 * small, 3 * (12 + small), 12 + small } do
        assert.is_near(right, loss[k]:item(), near * right)
      end
      for k, right in ipairs { p, -3 * p, -3 * (1 - p), 1 - p } do
        assert.is_near(right, x.grad[k]:item(), near * math.abs(right))
      end
    end
  end)

  it("of probabilities has the gradient (p - t) / max(p (1 - p), 1e-12), in every dtype", function()
    local p = { 0, 0, 1, 1, 0.25, 0.75, 0.5 }
    local t = { 0, 1, 1, 0, 1, 0.5, 0.5 }
    local weight = { 1, 2, 3, 4, 0.5, 2, 0 }
    for _, dtype in ipairs { "float32", "float64", "bfloat16", "float16" } do
      for _, how in ipairs { "none", "sum", "mean" } do
        for _, weighted in ipairs { false, true } do
          local kind = { dtype = dtype }
          local input, target = ms.tensor(p, kind):requires_grad_(), ms.tensor(t, kind):requires_grad_()
          local factors = weighted and ms.tensor(weight, kind) or nil
          F.binary_cross_entropy(input, target, { reduction = how, weight = factors }):sum():backward()
          for k, got in ipairs(input.grad:double():tolist()) do
            local right = (p[k] - t[k]) / math.max(p[k] * (1 - p[k]), 1e-12) * (weighted and weight[k] or 1) / (how == "mean" and #p or 1)
            if dtype == "float16" and math.abs(right) > 65504 then right = right / 0 end
            local near = got == right or math.abs(got - right) <= 0.01 * math.abs(right)
            assert.is_true(near, ("%s %s %d: %g, right %g"):format(dtype, how, k, got, right))
          end
          assert.is_true(target.grad:isfinite():all():item())
        end
      end
    end
  end)

  it("of saturated probabilities leaves a right model as it is", function()
    for _, dtype in ipairs { "float32", "bfloat16" } do
      local m = nn.Linear(1, 1, { dtype = dtype })
      ms.no_grad(function() m.weight:fill_(40) m.bias:zero_() end)
      local optimizer, one = ms.optim.SGD(m:parameters(), { lr = 1 }), ms.ones({ 4, 1 }, { dtype = dtype })
      nn.BCELoss()(m(one):sigmoid(), one):backward()
      optimizer:step()
      assert.are.equal(40, m.weight:item())
    end
  end)

  it("of classes does not read rows that are ignored", function()
    local inf, nan = math.huge, 0 / 0
    local rows, classes = { { -2, -1 }, { -inf, nan }, { -1, -3 } }, ids { 0, -100, 1 }
    local kept, weight = ms.tensor { rows[1], rows[3] }, ms.tensor { 2, 3 }
    for _, name in ipairs { "nll_loss", "cross_entropy" } do
      for _, given in ipairs { {}, { reduction = "sum" }, { weight = weight }, { weight = weight, reduction = "sum" } } do
        local x, y = ms.tensor(rows):requires_grad_(), kept:clone():requires_grad_()
        local loss, wanted = F[name](x, classes, given), F[name](y, ids { 0, 1 }, given)
        loss:backward()
        wanted:backward()
        ms.testing.assert_close(loss, wanted)
        ms.testing.assert_close(x.grad:index_select(1, ids { 0, 2 }), y.grad)
        assert.are.same({ 0, 0 }, x.grad[2]:tolist())
      end
      local image = ms.tensor(rows):t():unsqueeze(1):unsqueeze(3)                   -- [1, 2, 1, 3]
      ms.testing.assert_close(F[name](image, classes:reshape(1, 1, 3)), F[name](kept, ids { 0, 1 }))
      assert.are.equal(0, F[name](image, classes:reshape(1, 1, 3), { reduction = "none" })[1][1][2]:item())
    end
  end)

  it("of a single row or number has the shape of its target", function()
    local none = { reduction = "none" }
    for _, case in ipairs { { ms.tensor { 0.1, 0.2, 0.7 }, {}, 0.8 }, { ms.tensor { 0.1, 0.2, 0.7 }, { 1 }, 0.8 },
      { ms.tensor { { 0.1, 0.2, 0.7 } }, { 1 }, 0.8 } } do
      local loss = F.multi_margin_loss(case[1], ids { 1 }:reshape(case[2]), none)
      assert.are.equal(("[%s]"):format(case[2][1] or ""), tostring(loss.shape))
      assert.near(case[3], loss:sum():item(), 1e-6)
    end
    assert.are.equal("[]", tostring(F.multi_margin_loss(ms.tensor(0.5), ids { 0 }:reshape {}, none).shape))
    assert.are.equal(0, F.multi_margin_loss(ms.zeros(0, 3), ids {}):item())
    for _, how in ipairs { "none", "mean", "sum", "batchmean" } do
      local loss = F.kl_div(ms.tensor(-1), ms.tensor(0.5), { reduction = how })
      assert.are.equal("[]", tostring(loss.shape))
      assert.near(0.5 * (math.log(0.5) + 1), loss:item(), 1e-6)
    end
  end)

  it("cosine_similarity broadcasts before it takes norms", function()
    local a, b = ms.tensor { { 1, 2, 3 } }, ms.tensor { { 1 }, { 2 } }
    for d = 1, 2 do
      local x, y = a:expand(2, 3), b:expand(2, 3)
      local wanted = (x * y):sum(d) / (x:norm(2, d) * y:norm(2, d))
      ms.testing.assert_close(F.cosine_similarity(a, b, { dim = d }), wanted)
    end
    assert.is_true(ms.testing.gradcheck(function(x, y) return F.cosine_similarity(x, y, { dim = 2 }) end,
      { ms.randn({ 1, 3 }, { dtype = "float64" }):requires_grad_(), ms.randn({ 2, 1 }, { dtype = "float64" }):requires_grad_() }))
  end)

  it("without classes that count is nan for mean, 0 for sum", function()
    local x, y = ms.randn(2, 3), ids { 1, 1 }
    for _, name in ipairs { "nll_loss", "cross_entropy" } do
      assert.is_true(F[name](x, y, { ignore_index = 1 }):isnan():item())
      assert.are.equal(0, F[name](x, y, { ignore_index = 1, reduction = "sum" }):item())
    end
  end)
end)

describe("cross_entropy", function()
  before_each(function() ms.manual_seed(2) end)

  it("is its formula with each of its options", function()
    local x, y = ms.randn(5, 4, f64), ids { 2, 0, 3, 2, 1 }
    local logs, weight = -x:log_softmax(2), ms.tensor({ 0.5, 2, 1.5, 0.25 }, f64)
    local function check(o)
      local w, kept, s = o.weight or ms.ones(4, f64), y:ne(o.ignore_index):double(), o.label_smoothing
      local own = w:index_select(1, y) * kept
      local each = logs:gather(2, y:unsqueeze(2)):squeeze(2) * own * (1 - s) + (logs * w):sum(2) * kept * (s / 4)
      local sums = { none = each, sum = each:sum(), mean = each:sum() / own:sum() }
      for reduction, wanted in pairs(sums) do
        o.reduction = reduction
        ms.testing.assert_close(F.cross_entropy(x, y, o), wanted, { rtol = 1e-12, atol = 1e-12 })
        ms.testing.assert_close(nn.CrossEntropyLoss(o)(x, y), wanted, { rtol = 1e-12, atol = 1e-12 })
        assert.is_true(ms.testing.gradcheck(function(t) return F.cross_entropy(t, y, o) end,
          { x:clone():requires_grad_() }))
      end
    end
    for _, ignore in ipairs { -100, 2 } do
      for _, smoothing in ipairs { 0, 0.1, 1 } do
        check { ignore_index = ignore, label_smoothing = smoothing }
        check { ignore_index = ignore, label_smoothing = smoothing, weight = weight }
      end
    end
  end)

  it("takes one sample without a batch, and further dimensions after that of the classes", function()
    local x = ms.randn(2, 3, 4, 5, f64)
    local y = ms.randint(0, 3, { 2, 4, 5 })
    local each = F.cross_entropy(x, y, { reduction = "none" })
    assert.are.same({ 2, 4, 5 }, { unpack(each.shape) })
    local one = F.cross_entropy(x[2]:select(2, 3):select(2, 4), y[2][3][4])
    assert.are.equal("[]", tostring(one.shape))
    ms.testing.assert_close(one, each[2][3][4])
    ms.testing.assert_close(F.cross_entropy(x, y), each:mean())
  end)

  -- The expected values are PyTorch 2.1.1's.
  it("takes probabilities of the classes instead of one class", function()
    local x = ms.tensor({ { 0.5, -1, 2 }, { 0, 3, -2 } }, f64)
    local p = ms.tensor({ { 0.2, 0.3, 0.5 }, { 0, 0.9, 0.1 } }, f64)
    local more = { weight = ms.tensor({ 1, 2, 0.5 }, f64), label_smoothing = 0.1 }
    local expected = {
      mean = { 0.9981482660171521, 1.4512454271573163 }, sum = { 1.9962965320343042, 2.9024908543146326 },
      none = { { 1.441311296657157, 0.5549852353771473 }, { 2.396192159951015, 0.5062986943636174 } },
    }
    for reduction, want in pairs(expected) do
      more.reduction = reduction
      ms.testing.assert_close(F.cross_entropy(x, p, { reduction = reduction }), ms.tensor(want[1], f64),
        { rtol = 1e-12, atol = 1e-12 })
      ms.testing.assert_close(nn.CrossEntropyLoss(more)(x, p), ms.tensor(want[2], f64), { rtol = 1e-12, atol = 1e-12 })
      assert.is_true(ms.testing.gradcheck(function(t, q) return F.cross_entropy(t, q, more) end,
        { x:clone():requires_grad_(), p:clone():requires_grad_() }))
    end
    assert.near(1.441311296657157, F.cross_entropy(x[1], p[1]):item(), 1e-12)
    assert.near(1.1287524183710222, F.cross_entropy(x:reshape(1, 3, 2), p:reshape(1, 3, 2)):item(), 1e-12)
  end)

  it("names arguments that do not fit", function()
    local x = ms.randn(2, 3)
    for _, row in ipairs { { "id 3 (row 2) is neither in 0 .. 2", ids { 0, 3 } }, { "cross_entropy", ids { 0, 1, 2 } },
      { "did you mean 'mean'?", ids { 0, 1 }, { reduction = "men" } },
      { "weight", ids { 0, 1 }, { weight = ms.ones(2) } },
      { "label_smoothing", ids { 0, 1 }, { label_smoothing = 1.5 } } } do
      assert.truthy(message(F.cross_entropy, x, row[2], row[3]):find(row[1], 1, true))
    end
  end)
end)
