-- SPDX-License-Identifier: MIT
--- Returns the gradients of a bucket as one 1-d tensor; checks the argument that a script gave to a built-in
--- communication hook of nn.DDP.
local errors = require "moonshard.core.errors"
local is_tensor = require "moonshard.tensor".is_tensor

---@param who string  the hook's name
---@param bucket table
---@return Tensor
return function(who, bucket)
  local flat = type(bucket) == "table" and rawget(bucket, "flat")
  if not is_tensor(flat) then
    errors.raise("%s: bucket is %s, expected a bucket of gradients; hooks are called as hook(state, bucket)", who,
      errors.kind(bucket))
  end
  return flat
end
