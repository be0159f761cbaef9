-- SPDX-License-Identifier: MIT
--- numel(shape): the number of elements of a tensor with these sizes.
return function(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end
