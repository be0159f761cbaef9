-- SPDX-License-Identifier: MIT
--- Where this rank's part of a tensor lies in the whole, and how it is read from files that hold pieces of the whole.
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local sharded = require "moonshard.parallel.fsdp.sharded"

local C = engine.ffi.C

local M = {}

--- The position of this rank's part in the whole tensor t. dim: the dimension along which t is sharded, from 1; 0: the
--- part is a range of elements in row-major order. first: the first position along dim, or the first element, from 0.
--- here: the number of positions or elements. row: the number of elements per row if dim is 1.
function M.of(t)
  if not sharded.is_sharded(t) then return { dim = 0, first = 0, here = t:numel(), row = 1 } end
  local s = sharded.shard_info(t)
  local elements = s.layout == C.MS_LAYOUT_FLAT
  return { dim = elements and 0 or s.dim + 1, first = tonumber(s.first), here = tonumber(s.here), row = elements and 1
    or tonumber(s.row_numel) }
end

-- The first element (from 0) at this position and the number of elements; nil if they are not contiguous.
local function range_of(place)
  if place.dim > 1 then return nil end
  return place.first * place.row, place.here * place.row
end

--- Whether every rank holds all of t: it is not sharded, or sharded over this rank alone.
function M.is_shared(t) return not sharded.is_sharded(t) or sharded.shard_info(t).world == 1 end

-- Requests the parts of an entry's pieces that this rank needs in `target` (contiguous, of the entry's dtype), which
-- receives the range [first, first + n) of elements of the whole tensor.
local function want_range(readers, name, entry, target, first, n)
  local row = 1
  for d = 2, #entry.shape do row = row * entry.shape[d] end
  for _, piece in ipairs(entry.pieces) do
    local step = piece[2] == 1 and row or 1
    local begin_at, count = piece[3] * step, piece[4] * step
    local from, to = math.max(first, begin_at), math.min(first + n, begin_at + count)
    if to > from then readers[piece[1]]:want(name, from - begin_at, to - from, target, from - first) end
  end
end

--- Requests the reads for one tensor. Returns a function to call after the reads, which copies the data; nil if nothing
--- is to be copied, because the reads write to the tensor directly or read no elements.
function M.plan(readers, name, entry, e)
  local place, part = e.place, e.part
  local dim = entry.pieces[1][2]
  local first, n = range_of(place)
  if first and dim <= 1 then
    local direct = entry.dtype == part.dtype and part:is_contiguous() and part.device:match "^cpu"
    local target = direct and part or create.empty(part.shape, { dtype = entry.dtype, device = "cpu" })
    want_range(readers, name, entry, target, first, n)
    return not direct and n > 0 and function() part:copy_(target) end or nil
  end
  -- The tensor is sharded along a dimension after the first, in the checkpoint or in the model: assemble the whole from
  -- its pieces.
  local whole = create.empty(entry.shape, { dtype = entry.dtype, device = "cpu" })
  local pieces = {}
  for k, piece in ipairs(entry.pieces) do
    if dim <= 1 then break end
    local shape = { unpack(entry.shape) }
    shape[dim] = piece[4]
    pieces[k] = create.empty(shape, { dtype = entry.dtype, device = "cpu" })
    readers[piece[1]]:want(name, 0, pieces[k]:numel(), pieces[k], 0)
  end
  if dim <= 1 then want_range(readers, name, entry, whole, 0, whole:numel()) end
  return function()
    for k, piece in ipairs(entry.pieces) do
      if pieces[k] then whole:narrow(dim, piece[3] + 1, piece[4]):copy_(pieces[k]) end
    end
    part:copy_((e.shared and whole or sharded.part_of(e.like, whole)):reshape(part.shape))
  end
end

return M
