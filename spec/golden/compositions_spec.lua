-- SPDX-License-Identifier: MIT
--- Tensor functions that are made of others, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"

local function ids(list) return ms.tensor(list, { dtype = "int64" }) end

-- Joins the pieces of a split again, each multiplied by its position.
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
  outer = function(a, b) return a:outer(b) end,
  dot = function(a, b) return a:dot(b) end,
  mv = function(a, b) return a:mv(b) end,
  addmm = function(t, a, b) return t:addmm(a, b, { beta = 0.7, alpha = -1.3 }) end,
  baddbmm = function(t, a) return t:baddbmm(a, a:transpose(2, 3), { beta = 0.5 }) end,
  kron = function(a, b) return a:kron(b) end,
  kron_vector = function(a, b) return a:kron(b) end,
  tensordot = function(a, b) return a:tensordot(b) end,
  tensordot_lists = function(a, b) return a:tensordot(b, { { 1, 3 }, { 3, 2 } }) end,
  tensordot_none = function(a, b) return a:tensordot(b, 0) end,
  cdist = function(a, b) return a:cdist(b) end,
  cdist_1 = function(a, b) return a:cdist(b, 1) end,
  cdist_inf = function(a, b) return a:cdist(b, math.huge) end,
  cross = function(a, b) return a:cross(b) end,
  cross_last = function(a, b) return a:cross(b, -1) end,
  amax = function(t) return t:amax { 1, 3 } end,
  amax_ties = function(t) return t:round():amax(2) + (t * 0):amax(2) end,
  amin = function(t) return t:amin(2, { keepdim = true }) end,
  aminmax = function(t)
    local low, high = t:aminmax { dim = 2 }
    return low - high
  end,
  count_nonzero = function(t) return t:round():count_nonzero(2) end,
  nansum = function(t) return t:masked_fill(t:gt(1), 0 / 0):nansum(2) end,
  nanmean = function(t) return t:masked_fill(t:gt(1), 0 / 0):nanmean(2, { keepdim = true }) end,
  diff = function(t) return t:diff() end,
  diff_twice = function(t, u) return t:diff(2, 1, { prepend = u, append = u * 2 }) end,
  histc = function(t) return t:histc(7) end,
  histc_limits = function(t) return t:histc(5, -1, 1.5) end,
  bincount = function(t) return ids { 1, 4, 1, 0 }:bincount { weights = t, minlength = 7 } end,
  trace = function(t) return t:trace() end,
  diag_embed = function(t) return t:diag_embed(1) end,
  diag_embed_dims = function(t) return t:diag_embed(-2, 1, 3) end,
  fill_diagonal = function(t) return (t * 1):fill_diagonal_(0.5) end,
  fill_diagonal_wrap = function(t) return (t * 1):fill_diagonal_(0.5, true) end,
  dist = function(a, b) return a:dist(b, 3) end,
  renorm = function(t) return t:renorm(2, 1, 2.5) end,
  block_diag = function(a, b, c) return ms.block_diag { a, b, c } end,
  dstack = function(a, b) return ms.dstack { a, b } end,
  tril_indices = function() return ms.tril_indices(3, 5, 1) end,
  triu_indices = function() return ms.triu_indices(3, 5, -1) end,
  broadcast_tensors = function(a, b)
    local list = ms.broadcast_tensors { a, b }
    return list[1] * list[2]
  end,
  linspace = function(t) return t * ms.linspace(-3, 7, 4, { dtype = t.dtype }) end,
  logspace = function(t) return t * ms.logspace(-1, 2, 4, { base = 2, dtype = t.dtype }) end,
}
for name, equation in pairs { matmul = "ij,jk->ik", batch = "bij,bjk->bik", implicit = "kj,ki", trace = "ii",
  diagonal = "ii->i", outer = "i,j->ji", sum = "bij->j", dots = "...ij,...jk->...ki", dots_broadcast = "...j,jk",
  three = "bij,bjk,k->bi", lone = "ij,kl->il", elements = "ij,ij->ij", bilinear = "bn,anm,bm->ba" } do
  cases["einsum_" .. name] = function(...) return ms.einsum(equation, ...) end
end

golden_cases("compositions", cases)
