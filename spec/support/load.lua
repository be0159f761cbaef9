-- SPDX-License-Identifier: MIT
--- load(): loads Moonshard in the calling process, which may be a rank; returns ms, ms.nn, ms.dist and ms.fsdp.
return function()
  local ms = require "moonshard"
  return ms, ms.nn, ms.dist, ms.fsdp
end
