-- SPDX-License-Identifier: MIT
--- names(iterator): the names that named_parameters or a similar iterator lists, in order, in one line.
return function(iterator)
  local out = {}
  for name in iterator do out[#out + 1] = name end
  return table.concat(out, " ")
end
