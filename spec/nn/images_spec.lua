-- SPDX-License-Identifier: MIT
--- Interpolation, padding, sampling and columns: what golden/images_spec.lua does not compare, which is dtypes,
--- identities, printing and errors.
local ms = require "moonshard"
local nn, F = ms.nn, ms.nn.F
local raises = require "spec.support.raises"

describe("interpolate", function()
  it("returns the same numbers for the same size, and reverses nearest upsampling", function()
    local x = ms.randn(2, 3, 4, 5)
    for _, mode in ipairs { "nearest", "nearest-exact", "area", "bilinear", "bicubic" } do
      assert.is_true(F.interpolate(x, { size = { 4, 5 }, mode = mode }):equal(x), mode)
    end
    assert.is_true(F.interpolate(F.interpolate(x, { scale_factor = 3 }), { size = { 4, 5 } }):equal(x))
  end)

  it("keeps a constant, with antialias as well", function()
    local x = ms.full({ 1, 1, 9, 7 }, 0.75)
    for _, mode in ipairs { "bilinear", "bicubic" } do
      for _, antialias in ipairs { false, true } do
        local y = F.interpolate(x, { size = { 4, 11 }, mode = mode, antialias = antialias })
        ms.testing.assert_close(y, ms.full({ 1, 1, 4, 11 }, 0.75))
      end
    end
  end)

  it("gives the same bits for any number of threads", function()
    local x, before, got = ms.randn(3, 5, 30, 31), ms.get_num_threads(), {}
    for threads = 1, 2 do
      ms.set_num_threads(threads)
      local leaf = x:clone():requires_grad_()
      local y = F.interpolate(leaf, { scale_factor = 1.7, mode = "bicubic" })
      y:pow(2):sum():backward()
      got[threads] = { y:detach(), leaf.grad }
    end
    ms.set_num_threads(before)
    assert.is_true(got[1][1]:equal(got[2][1]) and got[1][2]:equal(got[2][2]))
  end)

  it("names what does not fit", function()
    local x = ms.rand(1, 1, 4, 4)
    raises("interpolate: either size or scale_factor should be defined", F.interpolate, x, { mode = "bilinear" })
    raises("interpolate: only one of size or scale_factor should be defined", F.interpolate, x,
      { size = 2, scale_factor = 2 })
    raises("interpolate: option 'mode' is 'bilinar', expected one of 'nearest', 'nearest-exact', 'area', 'linear', "
      .. "'bilinear', 'trilinear', 'bicubic'; did you mean 'bilinear'?",
      F.interpolate, x, { size = 2, mode = "bilinar" })
    raises("interpolate: the input has shape [1, 1, 4, 4], expected 3 dimensions: batch, channels and 1 more for mode 'linear'",
      F.interpolate, x, { size = 2, mode = "linear" })
    raises("interpolate: align_corners option can only be set with the interpolating modes: linear | bilinear | bicubic | trilinear; mode is 'nearest'",
      F.interpolate, x, { size = 2, align_corners = true })
    raises("interpolate: antialias is only supported with the modes bilinear and bicubic, mode is 'nearest'",
      F.interpolate, x, { size = 2, antialias = true })
    raises("interpolate: recompute_scale_factor is not meaningful with an explicit size", F.interpolate, x,
      { size = 2, recompute_scale_factor = true })
    raises("interpolate: option 'size' is a table, expected a whole number from 1, or a list of 2 of them",
      F.interpolate, x, { size = { 2, 3, 4 } })
    raises("interpolate: option 'scale_factor' is a number (0), expected a number above 0, or a list of 2 of them",
      F.interpolate, x, { scale_factor = 0 })
    raises("interpolate: the output's size along dimension 3 would be 0: input [1, 1, 4, 4], scale_factor 0.1",
      F.interpolate, x, { scale_factor = 0.1 })
    raises("interpolate: the input is int64, expected a floating-point dtype; cast it first", F.interpolate, x:long(),
      { size = 2 })
  end)
end)

describe("pad", function()
  it("repeats elements of integers and booleans too", function()
    local x = ms.tensor({ { 1, 2, 3 } }, { dtype = "int64" })
    assert.are.same({ { 3, 2, 1, 2, 3, 2 } }, F.pad(x, { 2, 1 }, { mode = "reflect" }):tolist())
    assert.are.same({ { 1, 1, 1, 2, 3, 3 } }, F.pad(x, { 2, 1 }, { mode = "replicate" }):tolist())
    assert.are.same({ { 2, 3, 1, 2, 3, 1 } }, F.pad(x, { 2, 1 }, { mode = "circular" }):tolist())
    assert.are.equal("bool", F.pad(x:gt(1), { 1, 1 }, { mode = "circular" }).dtype)
    local y = ms.arange(6):reshape(1, 2, 3)
    assert.is_true(F.pad(y, { 1, 2, 1, 0 }, { mode = "reflect" })
      :equal(F.pad(y:float(), { 1, 2, 1, 0 }, { mode = "reflect" }):long()))
  end)

  it("pads several dimensions as one after the other, whichever of them change", function()
    local x = ms.randn(2, 3, 5, 6, 41)
    for _, mode in ipairs { "reflect", "replicate", "circular" } do
      for _, pad in ipairs {
        { 1, 2, 3, 1, 2, 1 }, { 4, 3, 0, 0, 1, 2 }, { 1, 1, 2, 0 }, { 0, 0, 1, 1, 1, 1 }, { -3, 2, -1, 3 },
      } do
        local expected, all = x, { unpack(pad) }
        for k = 1, 5, 2 do
          local one = { 0, 0, 0, 0, 0, 0 }
          one[k], one[k + 1] = pad[k] or 0, pad[k + 1] or 0
          expected = F.pad(expected, one, { mode = mode })
          all[k], all[k + 1] = one[k], one[k + 1]
        end
        assert.is_true(F.pad(x, all, { mode = mode }):equal(expected), mode)
      end
    end
  end)

  it("gives memory of its own, also where it only removes elements", function()
    local x = ms.zeros(2, 3)
    F.pad(x, { -1, -1 }):fill_(9)
    assert.are.equal(0, x:sum():item())
  end)

  it("removes elements before the remaining ones go round", function()
    local x = ms.arange(24, { dtype = "float32" }):reshape(1, 2, 3, 4)
    for _, dtype in ipairs { "float32", "float64", "int32" } do
      for _, pad in ipairs { { -1, 1 }, { 1, -1 }, { -1, 2, 2, -1 }, { 2, -2, -1, -1 }, { -1, 3, 1, -2, 2, 0 } } do
        local t, extra = x:to(dtype), { unpack(pad) }
        for k = 1, #pad, 2 do
          local d, n = t.ndim - (k - 1) / 2, t:size(t.ndim - (k - 1) / 2)
          local from, to = math.max(-pad[k], 0) + 1, n - math.max(-pad[k + 1], 0)
          t = t:narrow(d, from, to - from + 1)
          extra[k], extra[k + 1] = math.max(pad[k], 0), math.max(pad[k + 1], 0)
        end
        local wanted = F.pad(t, extra, { mode = "circular" })
        local got = F.pad(x:to(dtype), pad, { mode = "circular" })
        assert.is_true(got:equal(wanted), table.concat(pad, " "))
      end
    end
    assert.are.same({ { 1, 2, 3, 1 } }, F.pad(ms.arange(4):reshape(1, 4), { -1, 1 }, { mode = "circular" }):tolist())
    assert.are.same({ { 2, 0, 1, 2 } }, F.pad(ms.arange(4):reshape(1, 4), { 1, -1 }, { mode = "circular" }):tolist())
    assert.are.same({ { 1, 2, 3, 2 } }, F.pad(ms.arange(4):reshape(1, 4), { -1, 1 }, { mode = "reflect" }):tolist())
    assert.are.same({ { 0, 0, 1, 2 } }, F.pad(ms.arange(4):reshape(1, 4), { 1, -1 }, { mode = "replicate" }):tolist())
    local leaf = ms.zeros(1, 4):requires_grad_()
    F.pad(leaf, { -1, 2 }, { mode = "circular" }):backward(ms.tensor { { 1, 2, 3, 4, 5 } })
    assert.are.same({ { 0, 5, 7, 3 } }, leaf.grad:tolist())
  end)

  it("names what does not fit", function()
    local x = ms.rand(1, 4, 3)
    raises("pad: Padding size should be less than the corresponding input dimension, but got: padding (3, 0) at dimension 3 of input [1, 4, 3] with mode 'reflect'",
      F.pad, x, { 3, 0 }, { mode = "reflect" })
    raises("pad: Padding size should be at most the corresponding input dimension, but got: padding (4, 0) at dimension 3 of input [1, 4, 3] with mode 'circular'",
      F.pad, x, { 4, 0 }, { mode = "circular" })
    raises("pad: -2 and -1 elements added at dimension 3 of size 3 leave no elements of the input", F.pad, x, { -2, -1 }, { mode = "replicate" })
    raises('pad: Padding mode "reflect" doesn\'t take in value argument', F.pad, x, { 1, 1 },
      { mode = "reflect", value = 1 })
    raises("pad: 8 sizes with mode 'reflect', expected 2, 4 or 6: up to 3 dimensions", F.pad, ms.rand(2, 2, 2, 2),
      { 0, 0, 0, 0, 0, 0, 1, 1 }, { mode = "reflect" })
  end)
end)

describe("padding layers", function()
  it("do what pad does", function()
    for n = 1, 3 do
      local x = ms.rand(unpack({ 2, 3, 4, 5, 6 }, 1, n + 2))
      local pad = { unpack({ 1, 2, 0, 1, 2, 1 }, 1, 2 * n) }
      for name, mode in pairs { ReflectionPad = "reflect", ReplicationPad = "replicate", CircularPad = "circular",
        ZeroPad = "constant" } do
        local layer = nn[name .. n .. "d"](pad)
        assert.is_true(layer(x):equal(F.pad(x, pad, { mode = mode })), tostring(layer))
      end
      assert.is_true(nn["ConstantPad" .. n .. "d"](1, 0.5)(x):equal(F.pad(x, { unpack({ 1, 1, 1, 1, 1, 1 }, 1, 2 * n) },
        { value = 0.5 })))
    end
    assert.equal("ReflectionPad2d([1, 1, 2, 2])", tostring(nn.ReflectionPad2d { 1, 1, 2, 2 }))
    raises("CircularPad1d: argument 1, the padding, is a table, expected a whole number or a list of 2",
      nn.CircularPad1d, { 1 })
  end)
end)

describe("grid_sample", function()
  it("reads the input itself at the grid of the identity", function()
    local x = ms.randn(2, 3, 4, 5)
    local theta = ms.tensor { { 1, 0, 0 }, { 0, 1, 0 } }:unsqueeze(1):expand(2, 2, 3)
    for _, align in ipairs { false, true } do
      local grid = F.affine_grid(theta, { 2, 3, 4, 5 }, { align_corners = align })
      for _, mode in ipairs { "bilinear", "nearest", "bicubic" } do
        local y = F.grid_sample(x, grid, { mode = mode, padding_mode = "border", align_corners = align })
        ms.testing.assert_close(y, x, { rtol = 1e-5, atol = 1e-5 })
      end
    end
  end)

  it("reads zeros far outside and at places that are no numbers", function()
    local grid = ms.tensor { { { { 1e30, 0 }, { 0, -1e30 }, { 0 / 0, 0 } } } }
    assert.are.same({ { { { 0, 0, 0 } } } }, F.grid_sample(ms.ones(1, 1, 2, 2), grid, { mode = "nearest" }):tolist())
  end)

  it("names what does not fit", function()
    raises("grid_sample: input [1, 1, 2, 2] and grid [1, 2, 2, 3], expected [N, C, H, W] and [N, H', W', 2], or [N, C, D, H, W] and [N, D', H', W', 3]",
      F.grid_sample, ms.ones(1, 1, 2, 2), ms.ones(1, 2, 2, 3))
    raises("grid_sample: the input is float32 and the grid float64, expected the same dtype", F.grid_sample,
      ms.ones(1, 1, 2, 2), ms.ones(1, 2, 2, 2):double())
    raises("grid_sample: mode 'bicubic' only supports 4-D input", F.grid_sample, ms.ones(1, 1, 2, 2, 2),
      ms.ones(1, 2, 2, 2, 3), { mode = "bicubic" })
    raises("affine_grid: theta has shape [1, 3, 3], expected [1, 2, 3] for size [1, 1, 4, 4]", F.affine_grid,
      ms.ones(1, 3, 3), { 1, 1, 4, 4 })
  end)
end)

describe("unfold and fold", function()
  it("count how many windows contain each pixel", function()
    local ones = ms.ones(1, 1, 3, 3)
    assert.are.same({ { { { 1, 2, 1 }, { 2, 4, 2 }, { 1, 2, 1 } } } }, F.fold(F.unfold(ones, 2), 3, 2):tolist())
  end)

  it("make a convolution of a product", function()
    local x, w = ms.randn(2, 3, 6, 5), ms.randn(4, 3, 3, 2)
    local y = w:reshape(4, 18):matmul(F.unfold(x, { 3, 2 }, { padding = 1 })):reshape(2, 4, 6, 6)
    ms.testing.assert_close(y, F.conv2d(x, w, nil, { padding = 1 }), { rtol = 1e-5, atol = 1e-5 })
  end)

  it("name what does not fit", function()
    raises("unfold: the input has shape [3, 3], expected [N, C, H, W] or [C, H, W]", F.unfold, ms.ones(3, 3), 2)
    raises("unfold: windows of 4 x 4 elements with dilation (1, 1) and padding (0, 0) do not fit images of 3 x 3", F.unfold,
      ms.ones(1, 3, 3), 4)
    raises("fold: the input has shape [1, 5, 4], expected [N, C x 4, 4] or [C x 4, 4] for images of 3 x 3", F.fold,
      ms.ones(1, 5, 4), 3, 2)
  end)
end)

describe("image layers", function()
  it("do what their functions do", function()
    local x = ms.rand(2, 4, 6, 6)
    for _, case in ipairs {
      { nn.Upsample { scale_factor = 2, mode = "bilinear", align_corners = true }, F.interpolate, x,
        { scale_factor = 2, mode = "bilinear", align_corners = true } },
      { nn.Upsample { size = { 3, 4 } }, F.interpolate, x, { size = { 3, 4 } } },
      { nn.UpsamplingNearest2d { scale_factor = 2 }, F.upsample, x, { scale_factor = 2 } },
      { nn.UpsamplingBilinear2d { size = 9 }, F.interpolate, x, { size = 9, mode = "bilinear", align_corners = true } },
      { nn.PixelUnshuffle(2), F.pixel_unshuffle, x, 2 }, { nn.ChannelShuffle(2), F.channel_shuffle, x, 2 },
      { nn.Unfold(3, { padding = 1 }), F.unfold, x, 3, { padding = 1 } },
      { nn.Fold(3, 2), F.fold, ms.rand(1, 8, 4), 3, 2 },
      { nn.LocalResponseNorm(3, { k = 2 }), F.local_response_norm, x, 3, { k = 2 } },
    } do
      local layer, fn = case[1], case[2]
      assert.is_true(layer(case[3]):equal(fn(unpack(case, 3))), tostring(layer))
    end
    assert.is_true(F.pixel_shuffle(F.pixel_unshuffle(x, 3), 3):equal(x))
  end)

  it("print their sizes", function()
    assert.equal("Upsample(scale factor 2, mode bilinear, align corners)",
      tostring(nn.Upsample { scale_factor = 2, mode = "bilinear", align_corners = true }))
    assert.equal("UpsamplingNearest2d(size [3, 4], mode nearest)", tostring(nn.UpsamplingNearest2d { size = { 3, 4 } }))
    assert.equal("Unfold(kernel 3, stride 2x1)", tostring(nn.Unfold(3, { stride = { 2, 1 } })))
    assert.equal("Fold(4, kernel 2x3, padding 1)", tostring(nn.Fold(4, { 2, 3 }, { padding = 1 })))
    assert.equal("LocalResponseNorm(3, alpha 0.0001, beta 0.75, k 1)", tostring(nn.LocalResponseNorm(3)))
  end)
end)
