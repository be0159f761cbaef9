-- SPDX-License-Identifier: MIT
local autocast = require("moonshard.amp.autocast").autocast
local F = require("moonshard.nn").F

--- The mean loss of a language model's last states. That of half-precision logits is float32, as in transformers: a
--- mean in bfloat16 is off by up to 0.4 %. In bfloat16 it is made in chunks, because all logits in float32 would take
--- more memory than the rest.
---@param x Tensor  [B, T, C]
---@param w Tensor  [vocab, C], the head's weight
---@param targets Tensor  int64 [B, T]; -100: none
---@return Tensor  []
return function(x, w, targets)
  local half = (x.dtype == "bfloat16" or x.dtype == "float16") and x.dtype
  if not half then return F.linear_cross_entropy(x, w, targets) end
  local rows = math.max(64, math.min(math.ceil(targets:numel() / 2), math.floor(2 ^ 27 / w:size(1))))
  return autocast(half, F.linear_cross_entropy, x, w, targets, half == "bfloat16" and { batch_chunk_size = rows } or nil)
end
