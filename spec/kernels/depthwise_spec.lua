-- SPDX-License-Identifier: MIT
--- Convolutions whose groups have one input channel, beside the same without groups, whose weight has zeros between
--- other channels.
local ms = require "moonshard"
local F = ms.nn.F

local function gradients(call, leaves, g)
  for k, leaf in ipairs(leaves) do leaves[k] = leaf:detach():clone():requires_grad_() end
  local y = call(unpack(leaves))
  return y:detach(), ms.grad(y, leaves, { grad_outputs = g(y) })
end

describe("a depthwise convolution", function()
  -- the input's shape, outputs of each channel, kernel, options
  for _, case in ipairs {
    { { 2, 3, 5 }, 1, { 3 }, {} },
    { { 1, 2, 40 }, 2, { 5 }, { stride = 3, padding = 2 } },
    { { 2, 4, 6, 17 }, 1, { 3, 3 }, { padding = 1 } },
    { { 1, 3, 9, 33 }, 2, { 3, 2 }, { stride = 2, padding = { 1, 0 } } },
    { { 2, 2, 12, 16 }, 1, { 3, 3 }, { padding = 4, dilation = 3 } },
    { { 1, 2, 20, 35 }, 1, { 7, 7 }, { padding = 3 } },
    { { 2, 2, 7, 9 }, 1, { 2, 3 }, { stride = { 3, 4 } } },
    { { 1, 2, 4, 5, 18 }, 1, { 2, 3, 3 }, { padding = 1, stride = { 1, 2, 1 } } },
    { { 2, 2, 1, 1 }, 1, { 1, 1 }, { padding = 2 } },
    { { 1, 2, 3, 3 }, 1, { 3, 3 }, { padding = 60, stride = 7 } },
    { { 0, 2, 3, 3 }, 1, { 3, 3 }, {} },
  } do
    for _, dtype in ipairs { "float32", "float64", "bfloat16" } do
      it(("of [%s] by [%s] in %s"):format(table.concat(case[1], ", "), table.concat(case[3], ", "), dtype), function()
        ms.manual_seed(1)
        local shape, M, kernel, given = unpack(case)
        local dims, channels = #kernel, shape[2]
        local conv = F["conv" .. dims .. "d"]
        local x, w = ms.randn(shape):to(dtype), ms.randn(channels * M, 1, unpack(kernel)):to(dtype)
        local b = ms.randn(channels * M):to(dtype)
        local mask = ms.zeros { channels * M, channels }
        for o = 1, channels * M do mask[{ o, math.ceil(o / M) }] = 1 end
        for _ = 1, dims do mask = mask:unsqueeze(-1) end
        mask = mask:to(dtype)
        local function with(groups)
          local o = { groups = groups }
          for k, v in pairs(given) do o[k] = v end
          return o
        end
        local seed
        local function g(y)
          seed = seed or ms.randn(y.shape):to(dtype)
          return seed
        end
        local y, got = gradients(function(a, k, c) return conv(a, k, c, with(channels)) end, { x, w, b }, g)
        local want_y, want = gradients(function(a, k, c) return conv(a, k * mask, c, with(1)) end, { x, w, b }, g)
        local near = dtype == "bfloat16" and { rtol = 3e-2, atol = 1e-1 } or { rtol = 1e-4, atol = 1e-4 }
        assert.is_true(y:allclose(want_y, near))
        for k = 1, 3 do assert.is_true(got[k]:allclose(want[k], near), "gradient " .. k) end
        -- A transposed convolution is the gradient of the image.
        if shape[1] > 0 and not given.dilation then
          local back = F["conv_transpose" .. dims .. "d"](g(y):to(dtype), w, nil, { stride = given.stride,
            padding = given.padding, groups = channels })
          local fits = true
          for d = 1, dims do fits = fits and back:size(2 + d) == shape[2 + d] end
          if fits then assert.is_true(back:allclose(got[1], near)) end
        end
      end)
    end
  end
end)
