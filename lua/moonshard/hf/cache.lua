-- SPDX-License-Identifier: MIT
--- Keys and values of earlier positions, so that a forward computes only the new ones. What a model asks of a cache:
---   cache.length               positions that it holds, of every layer; the model adds T at the end of a forward
---   cache:update(layer, k, v)  adds the keys and values [B, K, T, D] of T new positions, rotated already, and returns
---                              all keys and values to attend to [B, K, S, D]. A cache may leave out the oldest ones of
---                              a layer with a window, as the mask is cut to the last S.
---   cache:memory(layer, make)  the keys and values of cross-attention: make() at the first call, then the same
--- update and memory are called inside a module, whose scope releases the tensors made there: a cache keeps its own by
--- ms.keep, or copies into tensors that it made before. This cache grows by concatenation.
local keep = require("moonshard.tensor.scope").keep
local shape = require "moonshard.tensor.shape"

---@class HFCache
---@field length integer  positions so far
local Cache = {}
Cache.__index = Cache

---@return HFCache
local function new() return setmetatable({ length = 0, keys = {}, values = {}, memories = {} }, Cache) end

---@param layer integer  from 1
---@param k Tensor
---@param v Tensor
---@return Tensor keys
---@return Tensor values
function Cache:update(layer, k, v)
  local old_k, old_v = self.keys[layer], self.values[layer]
  local all_k, all_v = old_k and shape.cat({ old_k, k }, 3) or k, old_v and shape.cat({ old_v, v }, 3) or v
  self.keys[layer], self.values[layer] = keep(all_k), keep(all_v)
  if old_k then
    old_k:release()
    old_v:release()
  end
  return all_k, all_v
end

---@param layer integer  from 1
---@param make fun(): Tensor, Tensor
---@return Tensor keys
---@return Tensor values
function Cache:memory(layer, make)
  if not self.memories[layer] then
    local k, v = make()
    self.memories[layer] = { keep(k), keep(v) }
  end
  return unpack(self.memories[layer])
end

return { new = new }
