-- SPDX-License-Identifier: MIT
--- Pooling beside plain loops, at the edges of the CPU kernels' vectors, and resampling in one call beside one call per
--- dimension.
local ms = require "moonshard"
local F = ms.nn.F

local NAN = 0 / 0

--- The largest element of a window and its position in the plane, and the mean; the last NaN wins.
local function window(x, h, w, oh, ow, k, s, p, d)
  local best, at, sum = -math.huge, nil, 0
  for i = 0, k - 1 do
    for j = 0, k - 1 do
      local r, c = oh * s - p + i * d, ow * s - p + j * d
      if r >= 0 and r < h and c >= 0 and c < w then
        local v = x[r * w + c + 1]
        if not at or v > best or v ~= v then best, at = v, r * w + c end
        sum = sum + v
      end
    end
  end
  return best, at, sum / (k * k)
end

describe("pooling on the CPU", function()
  -- height, width, kernel, stride, padding, dilation
  for _, case in ipairs {
    { 1, 1, 1, 1, 0, 1 }, { 4, 32, 2, 2, 0, 1 }, { 5, 33, 3, 2, 1, 1 }, { 7, 70, 3, 1, 1, 1 }, { 6, 19, 3, 3, 0, 1 },
    { 9, 41, 3, 2, 1, 2 }, { 8, 17, 2, 5, 1, 3 }, { 3, 2, 40, 1, 20, 1 }, { 2, 5, 1, 4, 0, 1 },
    { 3, 6, 1000, 7, 500, 1 },                                         -- windows far larger than the input
  } do
    local h, w, k, s, p, d = unpack(case)
    for _, dtype in ipairs { "float32", "float64" } do
      it(("of %d x %d by %d, stride %d, padding %d, dilation %d, in %s"):format(h, w, k, s, p, d, dtype), function()
        local numbers = {}
        for n = 1, 2 * h * w do numbers[n] = n * 7 % 5 - n % 3 end                -- many are equal
        for n = 11, #numbers, 23 do numbers[n] = n % 2 == 0 and -math.huge or NAN end
        local x = ms.tensor(numbers, { dtype = dtype }):reshape(2, 1, h, w)
        local given = { stride = s, padding = p, dilation = d, return_indices = true }
        local y, at = F.max_pool2d(x, k, given)
        local out_h, out_w = y:size(3), y:size(4)
        local mean = d == 1 and F.avg_pool2d(x, k, { stride = s, padding = p })
        local got, places, means = y:flatten():tolist(), at:flatten():tolist(), mean and mean:flatten():tolist()
        for plane = 0, 1 do
          local one = {}
          for n = 1, h * w do one[n] = numbers[plane * h * w + n] end
          for o = 0, out_h * out_w - 1 do
            local best, place, average = window(one, h, w, math.floor(o / out_w), o % out_w, k, s, p, d)
            local n = plane * out_h * out_w + o + 1
            assert.are.equal(tostring(best), tostring(got[n]))
            assert.are.equal(place, tonumber(places[n]))
            if means then
              local near = means[n] == average or math.abs(means[n] - average) < 1e-5
              assert.is_true(near or means[n] ~= means[n] and average ~= average)
            end
          end
        end
      end)
    end
  end
end)

describe("resampling on the CPU", function()
  for _, mode in ipairs { "nearest", "bilinear", "bicubic" } do
    -- The planes between the passes of the last two are larger than what is kept in the cache.
    for _, sizes in ipairs { { 5, 7, 11, 19 }, { 40, 33, 7, 90 }, { 600, 500, 610, 600 }, { 620, 600, 80, 500 } } do
      it(("by %s of %d x %d to %d x %d has the bits of one dimension after the other"):format(mode, unpack(sizes)), function()
        local h, w, to_h, to_w = unpack(sizes)
        ms.manual_seed(1)
        local x = ms.randn(1, 2, h, w)
        local wide = F.interpolate(x, { size = { h, to_w }, mode = mode })
        local both = F.interpolate(wide, { size = { to_h, to_w }, mode = mode })
        assert.is_true(F.interpolate(x, { size = { to_h, to_w }, mode = mode }):equal(both))
        local function gradient(f)
          local leaf = x:clone():requires_grad_()
          f(leaf):backward(both)
          return leaf.grad
        end
        assert.is_true(gradient(function(t) return F.interpolate(t, { size = { to_h, to_w }, mode = mode }) end):equal(
          gradient(function(t)
            return F.interpolate(F.interpolate(t, { size = { h, to_w }, mode = mode }),
              { size = { to_h, to_w }, mode = mode })
          end)))
      end)
    end
  end
end)
