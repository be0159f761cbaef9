-- SPDX-License-Identifier: MIT
--- SIGUSR1 and SIGUSR2 as requests for checkpoints, equal on all ranks.
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"

ranks.describe(2, "requests for checkpoints", function()
  local ms = require "moonshard"
  local fsdp, dist = ms.fsdp, ms.dist
  local rank = dist.rank()
  local SIGUSR1, SIGUSR2 = 10, 12
  local function send(to, signal)
    if rank == to then process.kill(process.pid(), signal) end
  end

  before_each(function()
    fsdp.catch_checkpoint_signals()
    while fsdp.checkpoint_wanted() do end
  end)
  after_each(function() fsdp.catch_checkpoint_signals(false) end)

  it("reach all ranks once from any rank", function()
    assert.is_nil(fsdp.checkpoint_wanted())
    for to = 0, 1 do
      send(to, SIGUSR1)
      assert.are.equal("go_on", fsdp.checkpoint_wanted())
      assert.is_nil(fsdp.checkpoint_wanted())
      send(to, SIGUSR1)                                 -- the same rank again: a new request
      assert.are.equal("go_on", fsdp.checkpoint_wanted())
      assert.is_nil(fsdp.checkpoint_wanted())
      fsdp.catch_checkpoint_signals()                   -- discards the other rank's copy that is still expected
    end
    send(1, SIGUSR2)
    assert.are.equal("stop", fsdp.checkpoint_wanted())
  end)

  it("are one request if a signal to all ranks reaches one of them after the step", function()
    send(0, SIGUSR1)
    assert.are.equal("go_on", fsdp.checkpoint_wanted())
    send(1, SIGUSR1)
    assert.is_nil(fsdp.checkpoint_wanted())
    send(1, SIGUSR1)                                    -- the next request
    assert.are.equal("go_on", fsdp.checkpoint_wanted())
  end)

  it("end the job if both have arrived, in either order", function()
    for _, order in ipairs { { SIGUSR1, SIGUSR2 }, { SIGUSR2, SIGUSR1 } } do
      for _, signal in ipairs(order) do send(0, signal) end
      assert.are.equal("stop", fsdp.checkpoint_wanted())
      assert.is_nil(fsdp.checkpoint_wanted())
    end
  end)

  it("to stop are accepted while a copy of a request to continue is expected", function()
    send(0, SIGUSR1)
    assert.are.equal("go_on", fsdp.checkpoint_wanted())
    send(1, SIGUSR2)
    assert.are.equal("stop", fsdp.checkpoint_wanted())
  end)
end)
