-- SPDX-License-Identifier: MIT
--- Pooling, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"
local F = ms.nn.F

-- The second result of a pooling with return_indices; the options are the last argument.
local function positions(pool, x, ...)
  local arguments = { ... }
  arguments[#arguments].return_indices = true
  local _, at = pool(x, unpack(arguments))
  return at
end

local function unpool(pool, back, kernel, given)
  return function(x)
    local y, at = pool(x, kernel, { return_indices = true })
    return back(y * y, at, kernel, given)
  end
end

local cases = {
  max_pool1d = function(x) return F.max_pool1d(x, 3, 2, { padding = 1 }) end,
  max_pool1d_ceil_dilated = function(x)
    return F.max_pool1d(x, 3, { stride = 2, padding = 1, dilation = 2, ceil_mode = true })
  end,
  max_pool1d_alone = function(x) return F.max_pool1d(x, 2) end,
  max_pool2d = function(x) return F.max_pool2d(x, 3, { stride = 2, padding = 1 }) end,
  max_pool2d_2x2 = function(x) return F.max_pool2d(x, 2) end,
  max_pool2d_ceil = function(x) return F.max_pool2d(x, { 2, 3 }, { 3, 2 }, { padding = 1, ceil_mode = true }) end,
  max_pool2d_dilated = function(x)
    return F.max_pool2d(x, { 3, 2 }, { stride = { 1, 2 }, padding = { 1, 0 }, dilation = { 2, 3 } })
  end,
  max_pool3d = function(x) return F.max_pool3d(x, { 2, 3, 2 }, { 1, 2, 3 }, { padding = { 1, 1, 0 } }) end,
  max_pool3d_ceil = function(x) return F.max_pool3d(x, 2, 2, { padding = 1, ceil_mode = true }) end,
  avg_pool1d = function(x) return F.avg_pool1d(x, 3, 2, { padding = 1 }) end,
  avg_pool1d_ceil = function(x)
    return F.avg_pool1d(x, 4, 3, { padding = 2, ceil_mode = true, count_include_pad = false })
  end,
  avg_pool2d = function(x) return F.avg_pool2d(x, 3, 2, { padding = 1 }) end,
  avg_pool2d_uncounted = function(x)
    return F.avg_pool2d(x, { 2, 3 }, { 3, 2 }, { padding = 1, count_include_pad = false })
  end,
  avg_pool2d_ceil = function(x) return F.avg_pool2d(x, { 2, 3 }, { 3, 2 }, { padding = 1, ceil_mode = true }) end,
  avg_pool2d_divisor = function(x) return F.avg_pool2d(x, 3, 1, { padding = 1, divisor_override = 7 }) end,
  avg_pool3d = function(x) return F.avg_pool3d(x, { 2, 3, 2 }, { 1, 2, 3 }, { padding = { 1, 1, 0 } }) end,
  avg_pool3d_ceil = function(x)
    return F.avg_pool3d(x, 2, { padding = 1, ceil_mode = true, count_include_pad = false })
  end,
  adaptive_avg_pool1d = function(x) return F.adaptive_avg_pool1d(x, 4) end,
  adaptive_avg_pool2d = function(x) return F.adaptive_avg_pool2d(x, { 3, 5 }) end,
  adaptive_avg_pool2d_one = function(x) return F.adaptive_avg_pool2d(x, 1) end,
  adaptive_avg_pool2d_larger = function(x) return F.adaptive_avg_pool2d(x, { 9, false }) end,
  adaptive_avg_pool3d = function(x) return F.adaptive_avg_pool3d(x, { 2, 4, 3 }) end,
  adaptive_max_pool1d = function(x) return F.adaptive_max_pool1d(x, 4) end,
  adaptive_max_pool2d = function(x) return F.adaptive_max_pool2d(x, { 3, 5 }) end,
  adaptive_max_pool3d = function(x) return F.adaptive_max_pool3d(x, { 2, 4, 3 }) end,
  lp_pool1d = function(x) return F.lp_pool1d(x, 2, 3, 2) end,
  lp_pool2d = function(x) return F.lp_pool2d(x, 3, { 2, 3 }, 2, { ceil_mode = true }) end,
  lp_pool3d = function(x) return F.lp_pool3d(x, 2, 2) end,
  indices = function(x)
    return ms.cat {
      positions(F.max_pool2d, x, 3, 2, { padding = 1 }):flatten(),
      positions(F.adaptive_max_pool2d, x, { 3, 5 }, {}):flatten(),
      positions(F.max_pool2d, x, { 3, 2 }, { 1, 2 }, { padding = { 1, 0 }, dilation = { 2, 3 } }):flatten() }
  end,
  indices3d = function(x) return positions(F.max_pool3d, x, 2, 2, { padding = 1, ceil_mode = true }) end,
  max_unpool1d = unpool(F.max_pool1d, F.max_unpool1d, 2),
  max_unpool2d = unpool(F.max_pool2d, F.max_unpool2d, 2, { output_size = { 7, 8 } }),
  max_unpool3d = unpool(F.max_pool3d, F.max_unpool3d, { 1, 2, 2 }, { output_size = { 5, 6, 7 } }),
}

golden_cases("pooling", cases)
