-- SPDX-License-Identifier: MIT
--- More of nn.init: identities, orthogonal and sparse matrices. Like the other functions they change the tensor in
--- place, without a graph, and return it. They need the whole tensor: a sharded one is an error.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local no_grad = require "moonshard.autograd".no_grad
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local M = {}

local function check(who, t, least, most)
  opts.expect(t, tensor.a_tensor, "%s: argument 1", who)
  if t.to_local then                                         -- only sharded tensors have to_local
    errors.raise("%s: the tensor, shape %s, is sharded; fill it before it is sharded", who, tostring(t.shape))
  end
  if t.ndim < least or t.ndim > most then
    errors.raise("%s: the tensor has shape %s, expected %s dimensions", who, tostring(t.shape),
      least == most and least or most == math.huge and "at least " .. least or least .. " to " .. most)
  end
end

-- Copies the tensor that fn returns into t, reshaped.
local function fill(t, fn)
  no_grad(scope.scope, function() t:detach():copy_(fn():reshape(t.shape)) end)
  return t
end

--- Fills a matrix with ones on the diagonal and zeros elsewhere.
---@param t Tensor  [rows, columns]
---@return Tensor t
function M.eye_(t)
  check("eye_", t, 2, 2)
  return fill(t, function() return create.eye(t:size(1), t:size(2), { dtype = t.dtype, device = t.device }) end)
end

--- Fills the weight of a convolution so that output channel k of each group equals the group's input channel k; output
--- channels without such an input are 0. Errors: the number of output channels is not divisible by groups.
---@param t Tensor  [out, in / groups, ...] with 1 to 3 dimensions of a kernel
---@param given? { groups: integer }  groups: the groups of the convolution (default: 1)
---@return Tensor t
function M.dirac_(t, given)
  local groups = opts("dirac_", given, { groups = opts.option(opts.whole_from(1), 1) }).groups
  check("dirac_", t, 3, 5)
  local out = t:size(1)
  if out % groups ~= 0 then
    errors.raise("dirac_: the number of output channels, %d, is not divisible by the number of groups, %d", out, groups)
  end
  local size_in, kernel, middle = t:size(2), 1, 0
  for d = 3, t.ndim do
    local n = t:size(d)
    kernel, middle = kernel * n, middle * n + math.floor(n / 2)
  end
  return fill(t, function()
    local x = create.zeros(t:numel(), { dtype = t.dtype, device = t.device })
    local places, each = {}, out / groups
    for g = 0, groups - 1 do
      for d = 0, math.min(each, size_in) - 1 do
        places[#places + 1] = ((g * each + d) * size_in + d) * kernel + middle
      end
    end
    if kernel == 0 or #places == 0 then return x end
    return x:scatter_(1, create.tensor(places, { dtype = "int64", device = t.device }), 1)
  end)
end

-- Makes the rows of a float64 matrix [m, n], m <= n, orthonormal: Gram-Schmidt, where a second pass removes what the
-- rounding of the first has left (Giraud et al. 2005).
local function orthonormal_rows(a)
  for k = 1, a:size(1) do
    local row = a:narrow(1, k, 1)
    if k > 1 then
      local before = a:narrow(1, 1, k - 1)
      for _ = 1, 2 do row:sub_(row:matmul(before:t()):matmul(before)) end
    end
    row:div_(row:norm())
  end
  return a
end

--- Fills t with an orthogonal matrix times gain (Saxe et al. 2013), drawn uniformly; the rows are orthonormal if there
--- are fewer rows than columns, else the columns. Further dimensions count as columns.
---@param t Tensor  [rows, columns, ...], floating point
---@param given? { gain: number }  gain: factor of the matrix (default: 1)
---@return Tensor t
function M.orthogonal_(t, given)
  local gain = opts("orthogonal_", given, { gain = 1 }).gain
  check("orthogonal_", t, 2, math.huge)
  if t:numel() == 0 then return t end
  local rows = t:size(1)
  local columns = t:numel() / rows
  return fill(t, function()
    local q = orthonormal_rows(create.randn({ math.min(rows, columns), math.max(rows, columns) },
      { dtype = "float64", device = "cpu" })):mul_(gain)
    return (rows > columns and q:t() or q):to(t.device, t.dtype)
  end)
end

--- Fills a matrix with normal random numbers, then sets a fraction of the elements of each column, drawn at random, to
--- 0 (Martens 2010).
---@param t Tensor  [rows, columns], floating point
---@param sparsity number  the fraction of zeros, from 0 to 1; rounded up to whole elements
---@param std? number  standard deviation of the others (default: 0.01)
---@return Tensor t
function M.sparse_(t, sparsity, std)
  check("sparse_", t, 2, 2)
  opts.need(type(sparsity) == "number" and sparsity >= 0 and sparsity <= 1, sparsity, "a number from 0 to 1",
    "sparse_: sparsity")
  std = std == nil and 0.01 or opts.expect(std, opts.number_from(0), "sparse_: std")
  local rows, columns = t:size(1), t:size(2)
  local zeros = math.ceil(sparsity * rows)
  return fill(t, function()
    local x = create.randn({ rows, columns }, { dtype = t.dtype, device = t.device }):mul_(std)
    if zeros == 0 or x:numel() == 0 then return x end
    -- In each column, the elements to set to 0 are those whose uniform random numbers are the smallest.
    local draws, places = create.rand({ columns, rows }, { dtype = "float64", device = "cpu" }):tolist(), {}
    for c = 1, columns do
      local draw, order = draws[c], {}
      for r = 1, rows do order[r] = r end
      table.sort(order, function(a, b) return draw[a] < draw[b] end)
      for k = 1, zeros do places[#places + 1] = (order[k] - 1) * columns + c - 1 end
    end
    return x:reshape(-1):scatter_(1, create.tensor(places, { dtype = "int64", device = t.device }), 0)
  end)
end

opts.fix(M, { "eye_", "sparse_" })

return M
