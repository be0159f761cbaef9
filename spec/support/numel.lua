-- SPDX-License-Identifier: MIT
--- numel(shape): how many elements a tensor of these sizes has.
return function(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end
