-- SPDX-License-Identifier: MIT
--- Commits a fault of planted.c in a spec, to show that scripts/test finds it when it runs specs under a sanitizer or
--- valgrind. MOONSHARD_PLANTED names library and fault; MOONSHARD_PLANTED_RANKS is the number of ranks that commit it
--- (if unset, busted itself does).
local ffi = require "ffi"

local library, fault = os.getenv "MOONSHARD_PLANTED":match "^(.*):([%w_]+)$"
local function commit()
  ffi.cdef(("int %s(int);"):format(fault))
  ffi.load(library)[fault](0)
end

local world = tonumber(os.getenv "MOONSHARD_PLANTED_RANKS")
if world then
  require("spec.support.ranks").describe(world, "the planted fault", function()
    it("is committed on every rank", commit)
  end)
else
  it("commits the planted fault", commit)
end
