-- SPDX-License-Identifier: MIT
--- Keys and values of earlier positions, so that a forward computes only the new ones. What a model asks of a cache:
---   cache.length               positions that it holds, of every layer; the model adds T at the end of a forward
---   cache:update(layer, k, v, window)  adds the keys and values [B, K, T, D] of T new positions, rotated already, and
---                              returns all keys and values to attend to [B, K, S, D]. With a window, the oldest ones
---                              may be left out, as the mask is cut to the last S; for one query (T = 1) they are those
---                              of the window, so that it needs no mask.
---   cache:memory(layer, make)  the keys and values of cross-attention: make() at the first call, then the same
--- update and memory are called inside a module, whose scope releases the tensors made there: the cache keeps its own.
--- Its buffers double when they are full, and layers with a window drop what it has passed: a position is copied about
--- once more, whatever the length. A cache of a fixed length allocates them once. No gradients flow through it.
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"

---@class Cache
---@field length integer  positions so far
local Cache = {}
Cache.__index = Cache

---@param fixed? integer  positions to allocate at once; nil: the buffers grow
---@return Cache
local function new(fixed) return setmetatable({ length = 0, layers = {}, memories = {}, fixed = fixed }, Cache) end

-- Makes room for `more` positions in a layer's buffers, and leaves the last `kept` there.
local function make_room(at, k, v, kept, more, fixed)
  local B, K, D, dropped = k:size(1), k:size(2), k:size(4), at.held - kept
  local old_k, old_v, in_place = at.k, at.v, at.capacity >= 2 * kept + more and dropped >= kept
  if not in_place then
    at.capacity = fixed or math.max(32, 2 * (kept + more))
    local kind = { dtype = k.dtype, device = k.device }
    at.k = create.empty({ B, K, at.capacity, D }, kind):keep()
    at.v = create.empty({ B, K, at.capacity, v:size(4) }, kind):keep()
  end
  if kept > 0 then
    at.k:narrow(3, 1, kept):copy_(old_k:narrow(3, dropped + 1, kept))
    at.v:narrow(3, 1, kept):copy_(old_v:narrow(3, dropped + 1, kept))
  end
  if old_k and not in_place then
    old_k:release()
    old_v:release()
  end
  at.held, at.dropped = kept, at.dropped + dropped
end

---@param layer integer  from 1
---@param k Tensor
---@param v Tensor
---@param window? integer  positions to which a query of this layer attends, its own with them
---@return Tensor keys
---@return Tensor values
function Cache:update(layer, k, v, window)
  if k.requires_grad and autograd.is_grad_enabled() then
    errors.raise "a cache keeps no gradients; call the model inside ms.no_grad"
  end
  local T, at = k:size(3), self.layers[layer]
  if not at then
    at = { held = 0, dropped = 0, capacity = 0, window = window }
    self.layers[layer] = at
  end
  if at.held + T > at.capacity then
    make_room(at, k, v, window and math.min(at.held, window - 1) or at.held, T, self.fixed)
  end
  at.k:narrow(3, at.held + 1, T):copy_(k)
  at.v:narrow(3, at.held + 1, T):copy_(v)
  at.held = at.held + T
  local n = window and T == 1 and math.min(at.held, window) or at.held
  return at.k:narrow(3, at.held - n + 1, n), at.v:narrow(3, at.held - n + 1, n)
end

---@param layer integer  from 1
---@param make fun(): Tensor, Tensor
---@return Tensor keys
---@return Tensor values
function Cache:memory(layer, make)
  if not self.memories[layer] then
    local k, v = make()
    self.memories[layer] = { k = k:keep(), v = v:keep() }
  end
  return self.memories[layer].k, self.memories[layer].v
end

local function replace(at, key, t)
  local old = at[key]
  at[key] = t:keep()
  old:release()
end

--- Makes row r of the batch a copy of the former row rows[r].
---@param rows integer[]  from 1
function Cache:reorder(rows)
  local first = self.layers[1] or self.memories[1]
  local same = first and first.k:size(1) == #rows
  for r, from in ipairs(rows) do same = same and r == from end
  if same or not first then return end
  local index = create.tensor(rows, { dtype = "int64", device = first.k.device }) - 1
  for _, list in ipairs { self.layers, self.memories } do
    for _, at in pairs(list) do
      for _, key in ipairs { "k", "v" } do replace(at, key, at[key]:index_select(1, index)) end
    end
  end
end

--- Forgets all positions after the first `length`. Returns false if a layer with a window has dropped some that the
--- next position would attend to; then nothing has changed.
---@param length integer  at most self.length
---@return boolean
function Cache:truncate(length)
  for _, at in pairs(self.layers) do
    if at.dropped > 0 and length - at.dropped < math.min(length, at.window - 1) then return false end
  end
  for _, at in pairs(self.layers) do at.held = length - at.dropped end
  self.length = length
  return true
end

--- Releases the tensors.
function Cache:release()
  for _, list in ipairs { self.layers, self.memories } do
    for _, at in pairs(list) do
      at.k:release()
      at.v:release()
    end
  end
  self.length, self.layers, self.memories = 0, {}, {}
end

return { new = new }
