-- SPDX-License-Identifier: MIT
--- Functions of nn.F that move pixels: sampling at the places of a grid, grids of affine maps, channels
--- to space and back. All are made of other operators.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"

local a_tensor, raise, run = tensor.a_tensor, errors.raise, scope.scope
local M = {}

-- ---- grid_sample ------------------------------------------------------------------------------------

-- Converts coordinates c to positions in elements, from 0. -1 and 1 are the borders: the centres of the first and last
-- elements if `align`, else their edges.
local function places_of(c, size, align)
  if align then return (c + 1) / 2 * (size - 1) end
  return ((c + 1) * size - 1) / 2
end

-- Clamps places to [0, size - 1]; as in PyTorch, places at the limits get no gradient.
local function clipped(at, size)
  local inside = at:gt(0):logical_and(at:lt(size - 1))
  return at:where(inside, at:detach():clamp(0, size - 1))
end

-- Mirrors places at the borders: the centres of the first and last elements if `align`, else their edges.
local function reflected(at, size, align)
  local low, span = align and 0 or -0.5, align and size - 1 or size
  if span == 0 then return at * 0 end
  local far = (at - low):abs()
  local turns = (far / span):detach():floor()
  local rest = far - turns * span
  local odd = turns:remainder(2):eq(1)
  return (span - rest):where(odd, rest) + low
end

local function inside_of(at, size, mode, align)
  if mode == "reflection" then at = reflected(at, size, align) end
  return mode == "zeros" and at or clipped(at, size)
end

-- The elements of x [N, C, ...] at integer positions, 0 outside of x. at[d]: positions along dimension 2 + d, [N, P].
local function elements_at(x, at)
  local dims = #at
  local index, valid
  for d = 1, dims do
    local size = x:size(2 + d)
    local here = at[d]:ge(0):logical_and(at[d]:le(size - 1))
    valid = valid and valid:logical_and(here) or here
    index = index and index * size + at[d] or at[d]
  end
  index = index:where(valid, create.zeros({}, { dtype = index.dtype, device = index.device })):long()
  local N, C, P = x:size(1), x:size(2), index:size(2)
  local found = x:reshape(N, C, x:size(3) * x:size(4) * (dims == 3 and x:size(5) or 1))
    :gather(3, index:unsqueeze(2):expand(N, C, P))
  return found * valid:unsqueeze(2):to(x.dtype)
end

-- Linear interpolation: the sum of the elements at the corners around each place, weighted by distance. floors, rests:
-- the integer positions below, and the distances from them.
local function linear_sample(x, at)
  local dims, sum = #at, nil
  local floors, rests = {}, {}
  for d = 1, dims do
    floors[d] = at[d]:detach():floor()
    rests[d] = at[d] - floors[d]
  end
  for corner = 0, 2 ^ dims - 1 do
    local place, weight = {}, nil
    for d = 1, dims do
      local upper = math.floor(corner / 2 ^ (dims - d)) % 2
      place[d] = floors[d] + upper
      local w = upper == 1 and rests[d] or 1 - rests[d]
      weight = weight and weight * w or w
    end
    local part = elements_at(x, place) * weight:unsqueeze(2)
    sum = sum and sum + part or part
  end
  return sum
end

-- Weights of the four elements around a place at distance t from the second (Keys 1981, a = -3/4).
local function cubic_weights(t)
  local a = -0.75
  local function near(s) return ((s * (a + 2) - (a + 3)) * s * s) + 1 end
  local function far(s) return ((s * a - 5 * a) * s + 8 * a) * s - 4 * a end
  return { far(t + 1), near(t), near(1 - t), far(2 - t) }
end

local function cubic_sample(x, at, mode, align)
  local floors, weights = {}, {}
  for d = 1, 2 do
    floors[d] = at[d]:detach():floor()
    weights[d] = cubic_weights(at[d] - floors[d])
  end
  local function place(d, k) return inside_of(floors[d] + (k - 2), x:size(2 + d), mode, align) end
  local sum
  for row = 1, 4 do
    local y, line = place(1, row), nil
    for column = 1, 4 do
      local part = elements_at(x, { y, place(2, column) }) * weights[2][column]:unsqueeze(2)
      line = line and line + part or part
    end
    local part = line * weights[1][row]:unsqueeze(2)
    sum = sum and sum + part or part
  end
  return sum
end

local sample_spec = { mode = opts.one_of({ "bilinear", "nearest", "bicubic" }, "bilinear"),
  padding_mode = opts.one_of({ "zeros", "border", "reflection" }, "zeros"), align_corners = false }

--- Reads x at the places of a grid (Jaderberg et al. 2015), interpolating between elements of x where necessary.
---@param x Tensor  [N, C, H, W] or [N, C, D, H, W], floating point
---@param grid Tensor  [N, H', W', 2] or [N, D', H', W', 3], of x's dtype: x, y (and z) of each place, where -1 and 1 are
---   the borders of x
---@param given? { mode: "bilinear"|"nearest"|"bicubic", padding_mode: "zeros"|"border"|"reflection", align_corners: boolean }
---   mode: how elements are computed (default: "bilinear", over volumes trilinear; "bicubic" only over images);
---   padding_mode: what is outside of x: zeros, the border, or x mirrored (default: "zeros"); align_corners: -1 and 1 are
---   the centres of the first and last elements, not their edges
---@return Tensor  [N, C, H', W'] or [N, C, D', H', W']
function M.grid_sample(x, grid, given)
  local o = opts("grid_sample", given, sample_spec)
  opts.expect(x, a_tensor, "grid_sample: argument 1")
  opts.expect(grid, a_tensor, "grid_sample: argument 2, the grid,")
  local dims = x.ndim - 2
  if dims ~= 2 and dims ~= 3 or grid.ndim ~= x.ndim or grid:size(1) ~= x:size(1) or grid:size(-1) ~= dims then
    raise("grid_sample: input %s and grid %s, expected [N, C, H, W] and [N, H', W', 2], or [N, C, D, H, W] and [N, D', H', W', 3]",
      tostring(x.shape), tostring(grid.shape))
  end
  if grid.dtype ~= x.dtype then
    raise("grid_sample: the input is %s and the grid %s, expected the same dtype", x.dtype, grid.dtype)
  end
  for d = 1, dims do
    if x:size(2 + d) == 0 then raise("grid_sample: the input %s has no elements along dimension %d", tostring(x.shape), 2 + d) end
  end
  if o.mode == "bicubic" and dims == 3 then raise "grid_sample: mode 'bicubic' only supports 4-D input" end
  local out, P = { x:size(1), x:size(2) }, 1
  for d = 2, x.ndim - 1 do
    out[#out + 1] = grid:size(d)
    P = P * grid:size(d)
  end
  return run(function()
    local flat, at = grid:reshape(x:size(1), P, dims), {}
    for d = 1, dims do
      at[d] = places_of(flat:select(3, dims + 1 - d), x:size(2 + d), o.align_corners)
      if o.mode ~= "bicubic" then at[d] = inside_of(at[d], x:size(2 + d), o.padding_mode, o.align_corners) end
      if o.mode == "nearest" then at[d] = at[d]:detach():round() end
    end
    local y
    if o.mode == "nearest" then
      y = elements_at(x, at)
    elseif o.mode == "bilinear" then
      y = linear_sample(x, at)
    else
      y = cubic_sample(x, at, o.padding_mode, o.align_corners)
    end
    return y:reshape(out)
  end)
end

--- The grid with which grid_sample applies an affine map to each image.
---@param theta Tensor  [N, 2, 3], or [N, 3, 4] for volumes: the output at (x, y) is read at theta times (x, y, 1)
---@param size integer[]  of the output: { N, C, H, W } or { N, C, D, H, W }
---@param given? { align_corners: boolean }  align_corners: -1 and 1 are the centres of the first and last elements, not their edges
---@return Tensor  [N, H, W, 2] or [N, D, H, W, 3]
function M.affine_grid(theta, size, given)
  local align = opts("affine_grid", given, { align_corners = false }).align_corners
  opts.expect(theta, a_tensor, "affine_grid: argument 1")
  local n = type(size) == "table" and #size or 0
  opts.need(n == 4 or n == 5, size, "a list of 4 or 5 sizes", "affine_grid: argument 2")
  for k = 1, n do opts.expect(size[k], opts.whole_from(1), "affine_grid: size %d", k) end
  local dims = n - 2
  if theta.ndim ~= 3 or theta:size(1) ~= size[1] or theta:size(2) ~= dims or theta:size(3) ~= dims + 1 then
    raise("affine_grid: theta has shape %s, expected [%d, %d, %d] for size [%s]", tostring(theta.shape), size[1], dims,
      dims + 1, table.concat(size, ", "))
  end
  return run(function()
    local kind = { dtype = theta.dtype, device = theta.device }
    local whole, parts = {}, {}
    for d = 1, dims do whole[d] = size[2 + d] end
    whole[dims + 1] = 1
    for d = dims, 1, -1 do                                -- x, which is the last dimension, comes first
      local count, sizes = size[2 + d], {}
      local line = create.arange(count, kind)
      if align then line = count > 1 and line * (2 / (count - 1)) - 1 or line * 0
      else line = (line * 2 + (1 - count)) / count end
      for e = 1, dims + 1 do sizes[e] = e == d and count or 1 end
      parts[#parts + 1] = line:reshape(sizes):expand(whole)
    end
    parts[#parts + 1] = create.ones(whole, kind)
    local base = shapes.cat(parts, -1):reshape(-1, dims + 1)
    local out = { size[1] }
    for d = 1, dims do out[1 + d] = size[2 + d] end
    out[dims + 2] = dims
    return base:unsqueeze(1):matmul(theta:transpose(2, 3)):reshape(out)
  end)
end

-- ---- channels and space -----------------------------------------------------------------------------

--- Moves channels into space: groups of r * r channels become blocks of r x r pixels (Shi et al. 2016). Errors: the
--- channels are not divisible by r * r.
---@param x Tensor  [..., C * r * r, H, W]
---@param r integer  the factor by which height and width grow
---@return Tensor  [..., C, H * r, W * r]
function M.pixel_shuffle(x, r)
  opts.expect(x, a_tensor, "pixel_shuffle: argument 1")
  opts.expect(r, opts.whole_from(1), "pixel_shuffle: argument 2, the factor,")
  local n = x.ndim
  if n < 3 then
    raise("pixel_shuffle expects input to have at least 3 dimensions, but got input with %d dimension(s)", n)
  end
  local C, H, W = x:size(-3), x:size(-2), x:size(-1)
  if C % (r * r) ~= 0 then
    raise("pixel_shuffle expects its input's 'channel' dimension to be divisible by the square of upscale_factor, but input.size(-3)=%d is not divisible by %d", C, r * r)
  end
  local sizes, order, out = {}, {}, {}
  for d = 1, n - 3 do sizes[d], order[d], out[d] = x:size(d), d, x:size(d) end
  for k, size in ipairs { C / (r * r), r, r, H, W } do sizes[n - 3 + k] = size end
  for k, d in ipairs { 1, 4, 2, 5, 3 } do order[n - 3 + k] = n - 3 + d end
  for k, size in ipairs { C / (r * r), H * r, W * r } do out[n - 3 + k] = size end
  return run(function() return x:reshape(sizes):permute(order):reshape(out) end)
end

--- Moves space into channels: blocks of r x r pixels become groups of r * r channels; the inverse of pixel_shuffle.
--- Errors: height or width is not divisible by r.
---@param x Tensor  [..., C, H, W]
---@param r integer  the factor by which height and width shrink
---@return Tensor  [..., C * r * r, H / r, W / r]
function M.pixel_unshuffle(x, r)
  opts.expect(x, a_tensor, "pixel_unshuffle: argument 1")
  opts.expect(r, opts.whole_from(1), "pixel_unshuffle: argument 2, the factor,")
  local n = x.ndim
  if n < 3 then
    raise("pixel_unshuffle expects input to have at least 3 dimensions, but got input with %d dimension(s)", n)
  end
  local C, H, W = x:size(-3), x:size(-2), x:size(-1)
  if H % r ~= 0 or W % r ~= 0 then
    raise("pixel_unshuffle: height %d and width %d of input %s, expected multiples of %d", H, W, tostring(x.shape), r)
  end
  local sizes, order, out = {}, {}, {}
  for d = 1, n - 3 do sizes[d], order[d], out[d] = x:size(d), d, x:size(d) end
  for k, size in ipairs { C, H / r, r, W / r, r } do sizes[n - 3 + k] = size end
  for k, d in ipairs { 1, 3, 5, 2, 4 } do order[n - 3 + k] = n - 3 + d end
  for k, size in ipairs { C * r * r, H / r, W / r } do out[n - 3 + k] = size end
  return run(function() return x:reshape(sizes):permute(order):reshape(out) end)
end

--- Divides the channels into groups and interleaves them: the first of each group, then the second, and so on (Zhang et
--- al. 2018). Errors: the channels are not divisible by groups.
---@param x Tensor  [N, C, ...]
---@param groups integer  divides C
---@return Tensor  of x's shape
function M.channel_shuffle(x, groups)
  opts.expect(x, a_tensor, "channel_shuffle: argument 1")
  opts.expect(groups, opts.whole_from(1), "channel_shuffle: argument 2, the number of groups,")
  if x.ndim < 3 then
    raise("channel_shuffle expects input with > 2 dims, but got input with sizes %s", tostring(x.shape))
  end
  local N, C = x:size(1), x:size(2)
  if C % groups ~= 0 then
    raise("channel_shuffle: the number of channels is %d, expected a multiple of the number of groups, %d", C, groups)
  end
  if x:numel() == 0 then return x:clone() end
  return run(function() return x:reshape(N, groups, C / groups, -1):transpose(2, 3):reshape(x.shape) end)
end

opts.fix(M, { "pixel_shuffle", "pixel_unshuffle", "channel_shuffle" })

return M
