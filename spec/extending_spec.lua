-- SPDX-License-Identifier: MIT
--- The programs of docs/extending.md: the `lua` blocks of a section, in order, are one script; it runs alone, or over
--- as many ranks as `lua ranks=N` says, and prints the section's `text` block.
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local text = process.read(process.root .. "/docs/extending.md")

describe("docs/extending.md", function()
  local run = 0
  for heading, section in (text:gsub("\n## ", "\n\1") .. "\1"):gmatch "\1([^\n]+)([^\1]*)" do
    local script, world = {}, nil
    for info, block in section:gmatch "\n```lua([^\n]*)\n(.-)\n```" do
      script[#script + 1] = block
      world = world or tonumber(info:match "ranks=(%d+)")
    end
    -- extending_engine_spec.lua checks sections with diffs.
    if #script > 0 and not section:find("\n```diff", 1, true) then
      run = run + 1
      it(("has a program for '%s' that prints the documented output"):format(heading), function()
        local printed = section:match "\n```text\n(.-)```"
        assert.is_string(printed)
        local job = ranks.run(world, table.concat(script, "\n"))
        assert.are.equal(0, job.code, job.stderr)
        assert.are.equal(printed, job.stdout)
        assert.are.equal("", job.stderr)
      end)
    end
  end

  it("has a program for each recipe that needs no C", function()
    assert.is_true(run >= 5)
  end)
end)
