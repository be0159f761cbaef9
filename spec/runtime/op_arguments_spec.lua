-- SPDX-License-Identifier: MIT
--- The table in moonshard.h of the operators' arguments in i[] and f[]: the samples of every operator match it.
local process = require "spec.support.process"
local lib = require("moonshard.core.ffi").lib
local ffi = require "ffi"

-- Entries of "dim, keepdim?, dim...": the minimum and maximum number of arguments.
local function counts(text)
  local least, most = 0, 0
  for name in (text or ""):gmatch "[^,%s]+" do
    if name:find "%.%.%.$" then most = math.huge else most = most + 1 end
    if not name:find "[?.]$" then least = least + 1 end
  end
  return { least = least, most = most }
end

local function documented()
  local rows = {}
  for names, arguments in process.read(process.root
    .. "/runtime/moonshard.h"):gmatch "\n//   ([%w_ ]-)  +([if]: [^\n]*)" do
    arguments = arguments:gsub("%b()", "")              -- remarks in parentheses
    for name in names:gmatch "%S+" do
      assert(not rows[name], name)
      rows[name] = { i = counts(arguments:match "i: ([^;]*)"), f = counts(arguments:match "f: (.*)$") }
    end
  end
  return rows
end

describe("the table of operator arguments in moonshard.h", function()
  local rows = documented()
  local none = { i = counts "", f = counts "" }

  it("fits the samples of every operator", function()
    local seen, checked = {}, 0
    for op = 0, lib.ms_op_count() - 1 do
      local name = ffi.string(lib.ms_op_name(op))
      seen[name] = true
      for sample in ffi.string(lib.ms_op_samples(op)):gmatch "[^;]+" do
        for kind, allowed in pairs(rows[name] or none) do           -- any order: each entry is checked separately
          local given = sample:match("%f[%w]" .. kind .. "=(%S+)")
          local n = given and select(2, given:gsub("[^,]+", "")) or 0
          assert.is_true(n >= allowed.least and n <= allowed.most, ("%s takes %d %s[] in '%s'"):format(name, n, kind,
            sample))
          checked = checked + 1
        end
      end
    end
    assert.is_true(checked > 500)
    -- any order: each entry is checked separately
    for name in pairs(rows) do assert.is_true(seen[name], name) end
  end)

  it("says what is needed: one fewer is an error, or another operator's row", function()
    local args = ffi.new "ms_args"
    local ms = require "moonshard"
    local t = ms.rand(2, 3)
    for op = 0, lib.ms_op_count() - 1 do
      local name = ffi.string(lib.ms_op_name(op))
      local row, sample = rows[name], ffi.string(lib.ms_op_samples(op))
      local _, inputs = sample:gsub(";.*", ""):gsub("%[", "")
      if row and inputs == 1 and (row.i.least > 0 or row.f.least > 0) then
        args.n_in, args.n_i, args.n_f = 1, math.max(0, row.i.least - 1), math.max(0, row.f.least - 1)
        args["in"][0] = t.id
        assert.are_not.equal(0, lib.ms_call_op(op, args), name)
      end
    end
  end)
end)
