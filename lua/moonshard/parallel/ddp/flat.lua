-- SPDX-License-Identifier: MIT
--- Returns the gradients of a bucket as one 1-d tensor; checks the argument that a script gave to a built-in
--- communication hook of nn.DDP.
local opts = require "moonshard.core.opts"
local is_tensor = require "moonshard.tensor".is_tensor

---@param who string  the hook's name
---@param bucket table  the hook's second argument
---@return Tensor
return function(who, bucket)
  local flat = type(bucket) == "table" and rawget(bucket, "flat")
  opts.need(is_tensor(flat), bucket, "a bucket of gradients; hooks are called as hook(state, bucket)", "%s: bucket",
    who)
  return flat
end
