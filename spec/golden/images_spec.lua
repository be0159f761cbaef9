-- SPDX-License-Identifier: MIT
--- Interpolation, padding, sampling and columns, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"
local F = ms.nn.F

local function interpolated(given) return function(x) return F.interpolate(x, given) end end
local function padded(pad, mode, value)
  return function(x) return F.pad(x, pad, { mode = mode, value = value }) end
end

local cases = {
  nearest1d = interpolated { size = 10 },
  nearest2d = interpolated { size = { 7, 3 } },
  nearest2d_scale = interpolated { scale_factor = { 1.7, 2.3 } },
  nearest3d = interpolated { scale_factor = 2 },
  nearest_exact = interpolated { size = { 7, 3 }, mode = "nearest-exact" },
  nearest_exact_scale = interpolated { scale_factor = 0.6, mode = "nearest-exact" },
  linear = interpolated { size = 11, mode = "linear" },
  linear_scale = interpolated { scale_factor = 1.6, mode = "linear" },
  linear_recomputed = interpolated { scale_factor = 1.6, mode = "linear", recompute_scale_factor = true },
  linear_aligned = interpolated { size = 4, mode = "linear", align_corners = true },
  bilinear = interpolated { size = { 9, 3 }, mode = "bilinear" },
  bilinear_scale = interpolated { scale_factor = { 2, 0.7 }, mode = "bilinear" },
  bilinear_aligned = interpolated { size = { 7, 1 }, mode = "bilinear", align_corners = true },
  bicubic = interpolated { size = { 9, 3 }, mode = "bicubic" },
  bicubic_aligned = interpolated { scale_factor = 1.8, mode = "bicubic", align_corners = true },
  trilinear = interpolated { size = { 5, 3, 8 }, mode = "trilinear" },
  trilinear_aligned = interpolated { scale_factor = 2, mode = "trilinear", align_corners = true },
  area = interpolated { size = { 3, 7 }, mode = "area" },
  area3d = interpolated { scale_factor = 0.7, mode = "area" },
  bilinear_antialias = interpolated { size = { 3, 7 }, mode = "bilinear", antialias = true },
  bicubic_antialias = interpolated { size = { 3, 7 }, mode = "bicubic", antialias = true },
  bicubic_antialias_scale = interpolated { scale_factor = 0.4, mode = "bicubic", antialias = true, align_corners = true },
  reflect1d = padded({ 6, 3 }, "reflect"),
  reflect2d = padded({ 1, 4, 3, 0 }, "reflect"),
  reflect3d = padded({ 1, 4, 3, 0, 2, 1 }, "reflect"),
  replicate1d = padded({ 8, 1 }, "replicate"),
  replicate2d = padded({ 1, 6, 3, -1 }, "replicate"),
  replicate3d = padded({ 1, 4, 3, 0, 2, 1 }, "replicate"),
  circular1d = padded({ 7, 3 }, "circular"),
  circular2d = padded({ 1, 5, 4, 0 }, "circular"),
  circular3d = padded({ 1, 4, -1, 0, 2, 1 }, "circular"),
  constant3d = padded({ 1, 0, -1, 2, 0, 1 }, "constant", 0.5),
  unfold = function(x) return F.unfold(x, { 2, 3 }, { padding = 1, stride = { 1, 2 } }) end,
  unfold_dilated = function(x) return F.unfold(x, 2, { dilation = { 3, 2 }, padding = { 1, 0 } }) end,
  unfold_alone = function(x) return F.unfold(x, 2) end,
  fold = function(x) return F.fold(x, { 4, 5 }, { 2, 3 }, { padding = 1, stride = { 1, 2 } }) end,
  fold_alone = function(x) return F.fold(x, 4, 2, { stride = 2 }) end,
  local_response_norm = function(x) return F.local_response_norm(x, 3, { alpha = 0.5, beta = 0.8, k = 1.5 }) end,
  local_response_norm_even = function(x) return F.local_response_norm(x, 4) end,
  pixel_unshuffle = function(x) return F.pixel_unshuffle(x, 2) end,
  channel_shuffle = function(x) return F.channel_shuffle(x, 3) end,
  affine_grid = function(t) return F.affine_grid(t, { 2, 3, 4, 5 }) end,
  affine_grid_aligned = function(t) return F.affine_grid(t, { 2, 3, 4, 1 }, { align_corners = true }) end,
  affine_grid3d = function(t) return F.affine_grid(t, { 1, 3, 2, 3, 4 }) end,
}

local function sampled(mode, padding, align)
  return function(x, grid)
    return F.grid_sample(x, grid, { mode = mode, padding_mode = padding, align_corners = align })
  end
end
for _, mode in ipairs { "bilinear", "nearest", "bicubic" } do
  for _, padding in ipairs { "zeros", "border", "reflection" } do
    local name = ("grid_%s_%s"):format(mode, padding)
    cases[name], cases[name .. "_aligned"] = sampled(mode, padding, false), sampled(mode, padding, true)
  end
end
cases.grid3d = sampled("bilinear", "zeros", false)
cases.grid3d_reflection = sampled("bilinear", "reflection", true)
cases.grid3d_nearest = sampled("nearest", "border", false)

golden_cases("images", cases)
