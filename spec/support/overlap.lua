-- SPDX-License-Identifier: MIT
--- Overlap (docs/semantics.md#overlap), for specs: the time of a forward or backward of slow layers beyond the layers'
--- own time, when every collective is delayed. The sleep of each layer is measured, and the bound is counted in delays
--- of the same run. If a rank is preempted, the run takes longer, or a sleep does and then hides more of a collective.
--- Runs are therefore repeated, with longer delays, until the expected numbers are met.
local assert = require "luassert"

-- In the first run, milliseconds of a collective's delay (DELAY) and of a layer's forward (LAYER; its backward takes
-- twice that). LAYERS: number of layers. WIDTH: of a layer, whose unit is too large to be gathered at once, without
-- overlap.
local M = { DELAY = 40, LAYER = 50, LAYERS = 3, WIDTH = 160 }

--- The layers, and the list of their sleep times.
---@param device? string  (default: "cpu"); on cuda the GPU's stream sleeps, and the host runs ahead of it
function M.layers(device)
  local LinearWithSleep = require("spec.support.models.linear_with_sleep").LinearWithSleep
  local layers, naps = {}, {}
  -- On a GPU all units use the streams; its products take time where it is emulated.
  for k = 1, M.LAYERS do layers[k] = LinearWithSleep(device and 4 or M.WIDTH, 0, naps):to(device or "cpu") end
  return layers, naps
end

-- The sum over all sleeps of the sleep's longest time on any rank: a step waits for the slowest rank.
local function slept(naps)
  local dist = require("moonshard").dist
  local total = 0
  local all = dist.all_gather_object(naps)
  for k = 1, #naps do
    local longest = 0
    for _, list in ipairs(all) do longest = math.max(longest, list[k]) end
    total = total + longest
  end
  return total
end

--- How many delays are not hidden in a forward and in the backward after it: the time beyond the layers' sleeps on the
--- slowest rank, divided by the delay of a collective. Makes up to 10 runs, with delays that double after every second
--- run up to a factor of 8; returns the two numbers nearest to those of `want`. Stops when both are within 0.5 of them.
--- before: called first, within the measured forward.
---@return number forward, number backward
function M.exposed(model, layers, naps, want, before)
  local ms = require "moonshard"
  local dist, lib = ms.dist, require("moonshard.core.ffi").lib
  local device = model:parameters()[1].device
  local there = device:find "^cuda" ~= nil
  local x = ms.rand(2, layers[1].dim, { requires_grad = true, device = device })
  for _ = 1, 2 do ms.scope(function() model(x):sum():backward() end) end        -- records the order of the units
  local best = { math.huge, math.huge }
  local function off(phase) return math.abs(best[phase] - want[phase]) end
  local ok, e = pcall(function()
    for run = 0, 9 do
      local slow = 2 ^ math.min(math.floor(run / 2), 3)
      local delay = M.DELAY * slow
      for _, layer in ipairs(layers) do layer.sleep_ms = M.LAYER * slow end
      ms.scope(function()
        local loss
        local function forward()
          if before then before() end
          loss = model(x):sum()
        end
        for phase, fn in ipairs { forward, function() loss:backward() end } do
          for k = #naps, 1, -1 do naps[k] = nil end
          if there then ms.cuda.synchronize() end
          dist.barrier()
          lib.ms_dist_set_delay(-1, delay / 1000)
          local begun = lib.ms_time()
          fn()
          if there then ms.cuda.synchronize() end
          local took = (lib.ms_time() - begun) * 1000
          lib.ms_dist_set_delay(-1, 0)
          assert.equal(#layers, #naps)
          took = math.max(unpack(dist.all_gather_object(took))) - slept(naps)
          if math.abs(took / delay - want[phase]) < off(phase) then best[phase] = took / delay end
        end
      end)
      if off(1) <= 0.5 and off(2) <= 0.5 then break end
    end
  end)
  lib.ms_dist_set_delay(-1, 0)
  if not ok then error(e, 0) end
  return best[1], best[2]
end

--- Asserts that `forward` delays are visible in the forward and `backward` delays in the backward, within half a delay.
function M.check(model, layers, naps, forward, backward, before)
  local f, b = M.exposed(model, layers, naps, { forward, backward }, before)
  for _, case in ipairs { { "forward", forward, f }, { "backward", backward, b } } do
    assert.is_true(math.abs(case[3] - case[2]) <= 0.5,
      ("%s: %.2f delays of a collective are not hidden, expected %d"):format(case[1], case[3], case[2]))
  end
end

return M
