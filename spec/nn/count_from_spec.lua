-- SPDX-License-Identifier: MIT
--- State dicts of PyTorch, whose containers count their elements from 0 and ours from 1: the error says so, and
--- count_from = 0 loads them.
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load
local message = require "spec.support.message"

-- Lists in lists, a numeric name that is no position, a module in two places, and one outside of any list.
local function build(seed)
  local ms, nn = load()
  ms.manual_seed(seed)
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    self.by_key = nn.ModuleDict { ["1"] = nn.Linear(3, 3) }
    self.twice = nn.ModuleList { self.net[1] }
    self.head = nn.Linear(3, 1)
  end
  function Net:forward(x) return self.head(self.by_key["1"](self.net(x))) end
  return Net()
end

local FROM_0 = { ["net.1"] = "net.0", ["net.3.1"] = "net.2.0", ["net.3.2"] = "net.2.1", ["by_key.1"] = "by_key.1",
  ["twice.1"] = "twice.0", head = "head" }

-- The state dict that PyTorch would save of that model.
local function from_0(model)
  local sd = {}
  for name, t in pairs(model:state_dict()) do
    local module, field = name:match "^(.*)%.(%a+)$"
    sd[FROM_0[module] .. "." .. field] = t.placements and t or t:contiguous()
  end
  return sd
end

local function assert_same(want, model)
  local _, _, fsdp = load()
  local got = fsdp.state_dict(model)
  for name, t in pairs(want:state_dict()) do assert.is_true(t:equal(got[name]), name) end
end

local HINT = 'The state dict counts the elements of containers from 0 (it has "net.0.bias", the model "net.1.bias"): load it with { count_from = 0 }.'

describe("a state dict that counts from 0", function()
  it("is named in the error, and in the warning if not strict", function()
    local ms = load()
    local model = build(1)
    local text = message(model.load_state_dict, model, from_0(build(2)))
    assert.truthy(text:find("Error(s) in loading state_dict for Net:", 1, true), text)
    assert.equal(HINT, text:match "\n\t([^\n]*)$")
    local warned = ms.catch_warnings(function() model:load_state_dict(from_0(build(2)), { strict = false }) end)
    assert.same({ "load_state_dict: " .. HINT }, warned)
  end)

  it("is loaded with count_from = 0, from a file too", function()
    local ms = load()
    local want, folder = build(2), process.temp_folder()
    ms.save(folder .. "/model.safetensors", from_0(want), { metadata = { format = "pt" } })
    local model = build(1)
    local missing, unexpected = model:load_state_dict(ms.load(folder .. "/model.safetensors"), { count_from = 0 })
    assert.same({ {}, {} }, { missing, unexpected })
    assert_same(want, model)
    model = build(1)
    model:load_state_dict(from_0(want), { count_from = 0, assign = true })
    assert_same(want, model)
    process.remove_folder(folder)
  end)

  it("may lack names or have further ones, which are reported as this model's names", function()
    local model, sd = build(1), from_0(build(2))
    sd["net.2.1.bias"], sd["net.3.weight"], sd.other = nil, sd["net.0.weight"], sd["head.bias"]
    local missing, unexpected = model:load_state_dict(sd, { count_from = 0, strict = false })
    assert.same({ { "net.3.2.bias" }, { "net.4.weight", "other" } }, { missing, unexpected })
    local text = message(model.load_state_dict, model, sd, { count_from = 0 })
    assert.truthy(text:find('Missing key(s) in state_dict: "net.3.2.bias". ', 1, true), text)
    assert.truthy(text:find('Unexpected key(s) in state_dict: "net.4.weight", "other". ', 1, true), text)
  end)

  it("is not suggested if other names differ too, or the model itself counts so", function()
    local ms = load()
    local model, sd = build(1), build(2):state_dict()
    sd["net.7.weight"] = sd["net.1.weight"]
    sd["head.bias"] = nil
    local text = message(model.load_state_dict, model, sd)
    assert.is_nil(text:find("count", 1, true))
    assert.same({}, (ms.catch_warnings(function() model:load_state_dict(sd, { strict = false }) end)))
    for _, n in ipairs { 2, -1, 0.5 } do
      assert.equal(("load_state_dict: option 'count_from' is a number (%s), expected 0 or 1"):format(n),
        message(model.load_state_dict, model, sd, { count_from = n }))
    end
  end)
end)

for world = 1, 3 do
  ranks.describe(world, ("a state dict that counts from 0, on %d ranks"):format(world), function(rank)
    for _, way in ipairs {
      { "FSDP", function(m)
        local _, _, fsdp, _, quietly = load()
        m.net[3] = quietly(fsdp.FSDP, m.net[3])
        return quietly(fsdp.FSDP, m)
      end },
      { "fully_shard", function(m)
        local _, _, fsdp = load()
        fsdp.fully_shard(m.net[3])
        return fsdp.fully_shard(m)
      end },
    } do
      it("is loaded into a sharded model: " .. way[1], function()
        local shard = way[2]
        local _, _, fsdp = load()
        local want = build(2)
        for _, given in ipairs { {}, { broadcast_from_rank0 = true } } do
          local model, sd = shard(build(1)), from_0(want)
          given.count_from = 1
          local text = message(fsdp.load_state_dict, model, sd, given)
          assert.truthy(text:find(HINT, 1, true), text)
          given.count_from = 0
          if given.broadcast_from_rank0 and rank > 0 then sd = {} end
          fsdp.load_state_dict(model, sd, given)
          assert_same(want, model)
        end
        local model = shard(build(1))
        model:load_state_dict(from_0(shard(build(2))), { count_from = 0 })
        assert_same(want, model)
      end)
    end
  end)
end
