-- SPDX-License-Identifier: MIT
--- set_post_optim_event (docs/semantics.md#overlap): the first gather of the next forward starts after the optimizer's
--- step and overlaps with the work before that forward.
local ranks = require "spec.support.ranks"

-- How each front end makes a module a unit.
local WRAPS = {
  { "fully_shard", function(m) return require("moonshard").fsdp.fully_shard(m) end },
  { "FSDP", function(m) return require("moonshard").fsdp.FSDP(m, { sharding_strategy = "shard_grad_op" }) end },
  { "FSDP with original parameters", function(m)
    return require("moonshard").fsdp.FSDP(m, { sharding_strategy = "shard_grad_op", use_orig_params = true })
  end },
}

ranks.describe(2, "the event after the optimizer's step", function()
  -- A slow layer outside of any unit, followed by a unit.
  local function make()
    local ms = require "moonshard"
    local overlap, naps = require "spec.support.overlap", {}
    local slow = require("spec.support.models.linear_with_sleep").LinearWithSleep(overlap.WIDTH, 0, naps)
    local unit = WRAPS[1][2](ms.nn.Linear(overlap.WIDTH, overlap.WIDTH))
    return overlap, ms.nn.Sequential(slow, unit), { slow }, naps, unit
  end

  it("overlaps the gather of a unit after a slow layer with that layer", function()
    local overlap, model, layers, naps, unit = make()
    overlap.check(model, layers, naps, 0, 0, function() unit:set_post_optim_event() end)
  end)

  it("is the cause: without it the gather's time shows", function()
    local overlap, model, layers, naps = make()
    local forward = overlap.exposed(model, layers, naps, { 1, 0 })
    assert.is_true(forward >= 0.5, ("%.2f delays of a collective are not hidden, expected 1"):format(forward))
  end)
end)

for world = 1, 3 do
  ranks.describe(world, ("the event after the optimizer's step, %d ranks"):format(world), function()
    -- A root with parameters of its own around two units.
    local function make(wrap)
      local ms = require "moonshard"
      ms.manual_seed(2)
      local Net = ms.nn.Module:extend "Net"
      function Net:init()
        self.gain = ms.nn.Parameter(ms.rand(6))
        self.first = wrap(ms.nn.Linear(4, 6))
        self.last = wrap(ms.nn.Linear(6, 3))
      end
      function Net:forward(x) return self.last(self.first(x):tanh() * self.gain) end
      return wrap(Net()), ms
    end

    local function train(model, ms, rank, between)
      local optimizer = ms.optim.SGD(model:parameters(), { lr = 0.1, momentum = 0.9 })
      local losses = {}
      for step = 1, 4 do
        ms.scope(function()
          local loss = model(ms.ones(2, 4) * (rank + step)):pow(2):mean()
          losses[step] = loss:item()
          loss:backward()
        end)
        optimizer:step()
        optimizer:zero_grad()
        between(step, optimizer)
      end
      return losses
    end

    for _, front in ipairs(WRAPS) do
      local name, wrap = front[1], require("spec.support.wrapped").quietly
      local function quiet(m) return wrap(front[2], m) end

      it("changes no number: " .. name, function(rank)
        local plain, ms = make(quiet)
        local want = train(plain, ms, rank, function() end)
        local model = make(quiet)
        local early = 0
        local got = train(model, ms, rank, function()
          local events = ms.fsdp.record(function() model:set_post_optim_event() end)
          if #events > 0 then
            early = early + 1
            -- The gather of the root, which the forward enters first.
            assert.same({ { event = "unshard", unit = "", prefetched = true } }, events)
          end
        end)
        assert.same(want, got)
        assert.equal(world > 1 and 4 or 0, early)               -- one rank has nothing to gather
      end)

      it("can be set on any unit, applies to one forward, and is idempotent: " .. name, function(rank)
        if world == 1 then return end
        local model, ms = make(quiet)
        local inner = model.last
        inner:set_post_optim_event()                            -- no effect: the first unit is not known yet
        local function gathers(fn) return #ms.fsdp.record(fn) end
        local function forward() return ms.no_grad(function() return ms.scope(function() return model(ms.ones(2,
          4) * rank):sum():item() end) end) end
        forward()
        assert.equal(1, gathers(function() inner:set_post_optim_event() end))
        assert.equal(0, gathers(function() model:set_post_optim_event() end))
        local _, want = ms.fsdp.record(forward)
        assert.equal(want, forward())
        local events = ms.fsdp.record(forward)
        assert.is_false(events[1].prefetched)
      end)

      it("does not hide changes of parameters after it: " .. name, function(rank)
        local plain, ms = make(quiet)
        local model = make(quiet)
        local function change(m)
          ms.no_grad(function()
            for _, p in ipairs(m:parameters()) do p:mul_(1.5) end
          end)
        end
        local want = train(plain, ms, rank, function() change(plain) end)
        local got = train(model, ms, rank, function()
          model:set_post_optim_event()
          change(model)
        end)
        assert.same(want, got)
      end)

      it("does not affect saving, loading and whole parameters: " .. name, function()
        local model, ms = make(quiet)
        local x = ms.ones(2, 4)
        ms.no_grad(function() model(x) end)
        local want = ms.fsdp.state_dict(model)
        model:set_post_optim_event()
        local got = ms.fsdp.state_dict(model)
        for key, t in ms.sorted_pairs(want) do assert.is_true(t:equal(got[key]), key) end
        for _, t in ms.sorted_pairs(got) do t:mul_(2) end
        local before = ms.no_grad(function() return model(x):sum():item() end)
        model:set_post_optim_event()
        ms.fsdp.load_state_dict(model, got)
        local after = ms.no_grad(function() return model(x):sum():item() end)
        ms.fsdp.load_state_dict(model, want)
        assert.not_equal(before, after)
        assert.equal(before, ms.no_grad(function() return model(x):sum():item() end))
      end)
    end

    it("takes no argument", function()
      local model = make(WRAPS[1][2])
      require "spec.support.raises"(
        "set_post_optim_event: argument is a number (1), expected no argument; the call itself marks the end of the optimizer's step",
        model.set_post_optim_event, model, 1)
    end)
  end)
end
