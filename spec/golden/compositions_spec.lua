-- SPDX-License-Identifier: MIT
--- Tensor functions that are made of others, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"

local function ids(list) return ms.tensor(list, { dtype = "int64" }) end

-- The pieces of a split, each times its number.
local function numbered(pieces)
  for k = 1, #pieces do pieces[k] = pieces[k] * k end
  return ms.cat(pieces, 2)
end

local function grid(indexing)
  return function(a, b)
    local g = ms.meshgrid({ a, b * b }, { indexing = indexing })
    return g[1] * g[2]
  end
end

local cases = {
  flip = function(t) return t:flip(1, -1) end,
  roll = function(t) return t:roll(4) end,
  roll_dims = function(t) return t:roll({ 1, -2 }, { 1, 2 }) end,
  rot90 = function(t) return t:rot90() end,
  rot90_back = function(t) return t:rot90(-1, { 2, 3 }) end,
  rot90_twice = function(t) return t:rot90(2, { 1, 3 }) end,
  movedim = function(t) return t:movedim({ 1, 2 }, { -1, 1 }) end,
  swapaxes = function(t) return t:swapaxes(1, 3) end,
  unflatten = function(t) return t:unflatten(2, { -1, 5, 1 }) end,
  hstack = function(a, b) return ms.hstack { a, b } end,
  hstack_vectors = function(a, b) return ms.hstack { a, b } end,
  vstack = function(a, b) return ms.vstack { a, b } end,
  tensor_split = function(t) return numbered(t:tensor_split(3, 2)) end,
  tensor_split_at = function(t) return numbered(t:tensor_split({ 1, -2 }, 2)) end,
  broadcast_to = function(t) return t:broadcast_to(2, 3, 4) end,
  meshgrid = grid "ij",
  meshgrid_xy = grid "xy",
  diag = function(t) return t:diag() end,
  diag_above = function(t) return t:diag(2) end,
  diag_below = function(t) return t:diag(-1) end,
  diag_of_matrix = function(t) return t:diag(1) end,
  diagonal = function(t) return t:diagonal(1, 3, 1) end,
  diagonal_below = function(t) return t:diagonal(-1, 2, 3) end,
  repeat_interleave = function(t) return t:repeat_interleave(2) end,
  repeat_interleave_rows = function(t) return t:repeat_interleave(ids { 2, 0, 3 }, 1) end,
  take_along_dim = function(t) return t:take_along_dim(ids { { 4, 0, 0 } }, 2) end,
}

describe("golden compositions", function()
  for _, test in ipairs(golden_cases("compositions", cases)) do it(unpack(test)) end
end)
