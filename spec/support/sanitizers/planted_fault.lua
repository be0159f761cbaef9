-- SPDX-License-Identifier: MIT
--- Commits a fault of planted.c in a spec: what scripts/test's way of running specs under a tool must find as well.
--- MOONSHARD_PLANTED names library and fault, MOONSHARD_PLANTED_RANKS a number of ranks that commit it (none: busted
--- itself).
local ffi = require "ffi"

local library, fault = os.getenv "MOONSHARD_PLANTED":match "^(.*):([%w_]+)$"
local function commit()
  ffi.cdef(("int %s(int);"):format(fault))
  ffi.load(library)[fault](0)
end

local world = tonumber(os.getenv "MOONSHARD_PLANTED_RANKS")
if world then
  require("spec.support.ranks").describe(world, "what was planted", function()
    it("is committed", commit)
  end)
else
  it("commits what was planted", commit)
end
