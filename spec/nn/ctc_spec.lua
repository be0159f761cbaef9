-- SPDX-License-Identifier: MIT
--- nn.CTCLoss: compared with the sum over all paths, gradients by finite differences, and errors.
local ms = require "moonshard"
local nn, F = ms.nn, ms.nn.F

local function ids(list) return ms.tensor(list, { dtype = "int64" }) end

-- Minus the logarithm of the probability of the target: the sum over all C^T paths that give it.
local function by_paths(log_probs, target, blank)
  local rows = log_probs:tolist()
  local times, classes = #rows, #rows[1]
  local total = 0
  local path = {}
  local function walk(t, logarithm)
    if t <= times then
      for c = 1, classes do
        path[t] = c - 1
        walk(t + 1, logarithm + rows[t][c])
      end
      return
    end
    local got, last = {}, nil
    for k = 1, times do
      if path[k] ~= last and path[k] ~= blank then got[#got + 1] = path[k] end
      last = path[k]
    end
    if table.concat(got, " ") == table.concat(target, " ") then total = total + math.exp(logarithm) end
  end
  walk(1, 0)
  return -math.log(total)
end

describe("ctc_loss", function()
  it("is the sum over all paths", function()
    ms.manual_seed(2)
    for _, case in ipairs { { {}, 0 }, { { 1 }, 0 }, { { 1, 1 }, 0 }, { { 2, 1 }, 0 }, { { 1, 2, 1 }, 0 },
      { { 0, 1 }, 2 }, { { 0, 0 }, 1 } } do
      local target, blank = case[1], case[2]
      local x = ms.randn(5, 3, { dtype = "float64" }):log_softmax(-1)
      local got = F.ctc_loss(x, ids(#target > 0 and target or { 0 }), 5, #target, { blank = blank, reduction = "none" })
      local expected = by_paths(x, target, blank)
      assert(math.abs(got:item() - expected) < 1e-10, ("%g, expected %g"):format(got:item(), expected))
    end
  end)

  it("has exact gradients of log-probabilities that are not normalised", function()
    local x = ms.randn(6, 3, 4, { dtype = "float64" }):requires_grad_(true)
    for _, how in ipairs { "mean", "sum", "none" } do
      assert.is_true(ms.testing.gradcheck(function(t)
        return F.ctc_loss(t, ids { { 1, 1 }, { 3, 2 }, { 2, 0 } }, { 6, 4, 5 }, { 2, 2, 1 }, { reduction = how })
      end, x))
    end
  end)

  it("gives an infinite loss, or none with zero_infinity, if the input is too short", function()
    local x = ms.zeros(2, 1, 3):log_softmax(-1):requires_grad_(true)
    assert.are.equal(math.huge, F.ctc_loss(x, ids { { 1, 1 } }, { 2 }, { 2 }):item())
    local zero = nn.CTCLoss { zero_infinity = true } (x, ids { { 1, 1 } }, { 2 }, { 2 })
    assert.are.equal(0, zero:item())
    zero:backward()
    assert.are.equal(0, x.grad:abs():sum():item())
    assert.are.equal(0, F.ctc_loss(ms.zeros(0, 1, 3), ids { { 1 } }, { 0 }, { 0 }):item())
  end)

  it("takes targets one after the other, views, and lengths as tensors", function()
    local x = ms.randn(3, 5, 2, { dtype = "float64" }):permute(2, 3, 1)
    local a = F.ctc_loss(x, ids { { 1, 2 }, { 2, 0 } }, { 5, 4 }, { 2, 1 })
    local b = F.ctc_loss(x:contiguous(), ids { 1, 2, 2 }, ids { 5, 4 }, ids { 2, 1 })
    assert.are.equal(a:item(), b:item())
  end)

  for _, device in ipairs(ms.cuda.is_available() and { "cpu", "cuda" } or { "cpu" }) do
    it("names what is wrong on " .. device, function()
      local function there(list) return ids(list):to(device) end
      local x = ms.zeros(4, 2, 3, { device = device })
      local wrong = {
        { function() F.ctc_loss(x, there { { 1 }, { 3 } }, { 4, 4 }, { 1, 1 }) end, "ctc_loss: target 1 of sample 2 is 3, expected 0 to 2 except the blank, 0" },
        { function() F.ctc_loss(x, there { { 1 }, { 0 } }, { 4, 4 }, { 1, 1 }) end, "ctc_loss: target 1 of sample 2 is 0, expected 0 to 2 except the blank" },
        { function() F.ctc_loss(x, there { { 1 }, { 2 } }, { 4, 5 }, { 1, 1 }) end, "ctc_loss: input_lengths contains 5, expected at most 4" },
        { function() F.ctc_loss(x, there { { 1 }, { 2 } }, { 4, 4 }, { 1, 2 }) end, "ctc_loss: target_lengths contains 2, expected at most 1" },
        { function() F.ctc_loss(x, there { 1, 2 }, { 4, 4 }, { 2, 1 }) end, "ctc_loss: the target length of sample 2 is 1, expected 0 to 0, the number of targets left for it in int64 [2] " .. ms.device(device) },
        { function() F.ctc_loss(x, there { { 1 }, { 2 } }, { 4 }, { 1, 1 }) end, "ctc_loss: input_lengths have shape [1], expected [2]" },
        { function() F.ctc_loss(x, there { { 1 }, { 2 } }, { 4, 4 }, { 1, 1 }, { blank = 3 }) end, "ctc_loss: the blank is 3, expected 0 to 2" },
        { function() F.ctc_loss(x:half(), there { { 1 }, { 2 } }, { 4, 4 }, { 1, 1 }) end, "ctc_loss: log probabilities are float16" },
        { function() F.ctc_loss(ms.zeros(4, { device = device }), there { 1 }, { 4 }, { 1 }) end, "ctc_loss: log_probs have shape [4], expected [T, N, C] or [T, C]" },
      }
      for _, case in ipairs(wrong) do
        local ok, text = pcall(case[1])
        assert.is_false(ok)
        assert(text:find(case[2], 1, true), text)
        assert(text:find("ctc_spec.lua:", 1, true), text)
      end
      -- What lies behind a target's length is not looked at.
      local loss = F.ctc_loss(x:log_softmax(-1), there { { 1, 99 }, { 2, -5 } }, { 4, 4 }, { 1, 1 })
      assert.is_true(loss:item() < math.huge)
    end)
  end
end)
