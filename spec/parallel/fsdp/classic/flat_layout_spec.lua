-- SPDX-License-Identifier: MIT
--- The part of each parameter on each rank: parameters are consecutive in the flat parameter or, with use_orig_params,
--- each begins at a multiple of 16 bytes.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local SHAPES = { { 7, 3 }, { 5, 7 }, { 5, 5 } }

local function net(dtype)
  local ms, nn = load()
  ms.manual_seed(0)
  local layers = {}
  for k, shape in ipairs(SHAPES) do layers[k] = nn.Linear(shape[2], shape[1], { bias = false, dtype = dtype }) end
  return nn.Sequential(layers)
end

-- The { beginning, end } of each parameter, and the end of the last one, if each begins at a multiple of `to` elements.
local function places(to)
  local at, list = 0, {}
  for k, shape in ipairs(SHAPES) do
    at = math.ceil(at / to) * to
    list[k] = { at, at + shape[1] * shape[2] }
    at = list[k][2]
  end
  return list, at
end

for world = 1, 4 do
  ranks.describe(world, ("a flat parameter on %d ranks"):format(world), function(rank)
    -- The elements from..to (from 0) of a whole parameter on this rank, if the flat parameter of `total` elements is
    -- sharded evenly.
    local function share(place, total)
      local each = math.ceil(total / world)
      return math.max(rank * each, place[1]) - place[1], math.min((rank + 1) * each, place[2]) - place[1]
    end

    it("has consecutive parameters, sharded evenly", function()
      local ms, _, fsdp, _, quietly = load()
      for _, dtype in ipairs { "float32", "float64", "bfloat16" } do
        local whole, model = net(dtype), quietly(fsdp.FSDP, net(dtype))
        local list, total = places(1)
        assert.equal(math.ceil(total / world), model.flat_param:numel())
        local want = {}
        for k, place in ipairs(list) do
          local from, to = share(place, total)
          if to > from then want[#want + 1] = whole[k].weight:detach():reshape(-1):narrow(1, from + 1, to - from) end
        end
        want = ms.cat(want, 1)
        assert.is_true(model.flat_param:detach():narrow(1, 1, want:numel()):equal(want))
      end
    end)

    it("has pieces that begin at multiples of 16 bytes", function()
      local _, _, fsdp, _, quietly = load()
      for _, case in ipairs { { "float32", 4 }, { "float64", 2 }, { "bfloat16", 8 } } do
        local dtype, to = case[1], case[2]
        local whole, model = net(dtype), quietly(fsdp.FSDP, net(dtype), { use_orig_params = true })
        local list, total = places(to)
        for k, place in ipairs(list) do
          local from, upto = share(place, total)
          local piece = model[k].weight:detach():reshape(-1)
          assert.equal(math.max(upto - from, 0), piece:numel())
          if upto > from then
            assert.is_true(piece:equal(whole[k].weight:detach():reshape(-1):narrow(1, from + 1, upto - from)))
          end
        end
      end
    end)
  end)
end
