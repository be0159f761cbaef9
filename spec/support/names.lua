-- SPDX-License-Identifier: MIT
--- names(iterator): what named_parameters and its like list, in order, in one line.
return function(iterator)
  local out = {}
  for name in iterator do out[#out + 1] = name end
  return table.concat(out, " ")
end
