-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local nn = ms.nn

local message = require "spec.support.message"
local process = require "spec.support.process"

-- A layer with a count of its calls as extra state.
local Counted = nn.Module:extend "Counted"
function Counted:init()
  self.fc = nn.Linear(2, 2)
  self.count = 0
end
function Counted:forward(x)
  self.count = self.count + 1
  return self.fc(x)
end
function Counted:get_extra_state() return { count = self.count } end
function Counted:set_extra_state(value) self.count = value.count end

describe("extra state", function()
  it("is in the state dict and comes back", function()
    local a, b = nn.Sequential(Counted(), nn.ReLU()), nn.Sequential(Counted(), nn.ReLU())
    a(ms.ones(1, 2))
    local sd = a:state_dict()
    assert.are.same({ count = 1 }, sd["1._extra_state"])
    local missing, unexpected = b:load_state_dict(sd)
    assert.are.same({}, missing)
    assert.are.same({}, unexpected)
    assert.are.equal(1, b[1].count)
    assert.is_true(b[1].fc.weight:equal(a[1].fc.weight))
  end)

  it("is missing or unexpected like any name, and renumbered with count_from", function()
    local m = nn.Sequential(Counted())
    local sd = m:state_dict()
    sd["1._extra_state"] = nil
    assert.truthy(message(function() m:load_state_dict(sd) end)
      :find('Missing key(s) in state_dict: "1._extra_state".', 1, true))
    assert.are.same({ "1._extra_state" }, (m:load_state_dict(sd, { strict = false })))
    local plain = nn.Sequential(nn.Linear(2, 2))
    local _, unexpected = plain:load_state_dict({ ["1._extra_state"] = 1 }, { strict = false })
    assert.are.same({ "1._extra_state" }, unexpected)
    m:load_state_dict({ ["0.fc.weight"] = ms.ones(2, 2), ["0.fc.bias"] = ms.ones(2),
      ["0._extra_state"] = { count = 7 } }, { count_from = 0 })
    assert.are.equal(7, m[1].count)
  end)

  it("needs both methods, and other modules have none", function()
    local Half = nn.Module:extend "Half"
    function Half.get_extra_state() return 1 end
    assert.are.equal("Half defines only one of get_extra_state and set_extra_state, expected both",
      message(function() Half():state_dict() end))
    assert.truthy(message(function() nn.ReLU():get_extra_state() end):find("ReLU has no extra state", 1, true))
    assert.are.equal("set_extra_state: ReLU has no extra state, so it cannot take a number (1)",
      message(function() nn.ReLU():set_extra_state(1) end))
  end)

  it("is in the checkpoints of fsdp.save, which need values that a file can hold", function()
    local folder = process.temp_folder()
    local a, b = nn.Sequential(Counted()), nn.Sequential(Counted())
    a[1].count = 5
    ms.fsdp.save(folder .. "/saved", a)
    ms.fsdp.load(folder .. "/saved", b)
    assert.are.equal(5, b[1].count)
    local plain = nn.Module:extend "Plain"()
    plain["1"] = nn.Module:extend "Inner"()
    plain["1"].fc = nn.Linear(2, 2)
    assert.truthy(message(function() ms.fsdp.load(folder .. "/saved", plain) end)
      :find("has '1._extra_state', which the model lacks", 1, true))
    local _, _, unexpected = ms.fsdp.load(folder .. "/saved", plain, { strict = false })
    assert.are.same({ "1._extra_state" }, unexpected)
    a[1].get_extra_state = function() return { f = print } end
    assert.are.equal("extra state '1._extra_state' is a function, expected a number, string, boolean "
      .. "or plain table of these, at most 20 levels deep, for a file",
      message(function() ms.fsdp.save(folder .. "/other", a) end))
    os.execute(("rm -r '%s'"):format(folder))
  end)
end)

describe("extra state in a run's checkpoint", function()
  it("comes back, and stays as it is if the file has none", function()
    local checkpoint = require "moonshard.run.checkpoint"
    local path = os.tmpname()
    local function save(m) checkpoint.save(path, m, ms.optim.SGD(m:parameters(), { lr = 1 }), {}, 1) end
    local a, b = nn.Sequential(Counted()), nn.Sequential(Counted())
    a[1].count = 5
    save(a)
    local opened = checkpoint.open(path)
    opened:load_model(b)
    opened:close()
    assert.are.equal(5, b[1].count)
    local plain = nn.Sequential(nn.Module:extend "Plain"())
    plain[1].fc = nn.Linear(2, 2)
    save(plain)
    opened = checkpoint.open(path)
    opened:load_model(b)
    opened:close()
    assert.are.equal(5, b[1].count)
    os.remove(path)
  end)
end)

describe("state dict hooks", function()
  it("run before parents first, and after children first, with the prefix of their module", function()
    local m = nn.Sequential(nn.Linear(1, 1))
    local seen = {}
    for name, mod in m:named_modules() do
      mod:register_state_dict_pre_hook(function(of, prefix)
        assert.are.equal(mod, of)
        seen[#seen + 1] = ("pre %s (%s)"):format(name, prefix)
      end)
      mod:register_state_dict_post_hook(function(_, sd, prefix)
        seen[#seen + 1] = ("post %s (%s)"):format(name, prefix)
        sd[prefix .. "weight"] = nil
      end)
    end
    local sd = m:state_dict()
    assert.are.same({ "pre  ()", "pre 1 (1.)", "post 1 (1.)", "post  ()" }, seen)
    assert.is_nil(sd["1.weight"])
    assert.is_not_nil(sd["1.bias"])
  end)

  it("may rename what is loaded, without changing the script's table", function()
    local m, loaded = nn.Sequential(nn.Linear(1, 1)), nil
    m[1]:register_load_state_dict_pre_hook(function(_, sd, prefix)
      sd[prefix .. "weight"], sd[prefix .. "w"] = sd[prefix .. "w"], nil
    end)
    m:register_load_state_dict_post_hook(function(of, missing, unexpected)
      assert.are.equal(m, of)
      loaded = { #missing, #unexpected }
      missing[#missing + 1] = "more"
    end)
    local sd = { ["1.w"] = ms.full({ 1, 1 }, 3), ["1.bias"] = ms.zeros(1) }
    local missing = m:load_state_dict(sd, { strict = false })
    assert.are.same({ 0, 0 }, loaded)
    assert.are.same({ "more" }, missing)
    assert.are.equal(3, m[1].weight:item())
    assert.is_not_nil(sd["1.w"])
  end)

  it("end with their handles, and are copied with the module", function()
    local m, calls = nn.Linear(1, 1), 0
    local handle = m:register_state_dict_pre_hook(function() calls = calls + 1 end)
    local copy = ms.deepcopy(m)
    copy:state_dict()
    handle:remove()
    handle:remove()
    m:state_dict()
    assert.are.equal(1, calls)
  end)

  it("return nothing, and are functions", function()
    local m = nn.Linear(1, 1)
    m:register_state_dict_post_hook(function(_, sd) return sd end)
    assert.are.equal("Linear: a state dict post-hook returned a table, expected nothing; change the state dict in place",
      message(function() m:state_dict() end))
    for _, name in ipairs { "register_state_dict_pre_hook", "register_state_dict_post_hook",
      "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook" } do
      assert.are.equal(name .. ": hook is a number (1), expected a function", message(function() m[name](m, 1) end))
    end
  end)

  it("of a load with wrong shapes do not run after it, and nothing has changed", function()
    local m, after = nn.Linear(1, 1), false
    m:register_load_state_dict_post_hook(function() after = true end)
    local before = m.weight:item()
    assert.truthy(message(function() m:load_state_dict { weight = ms.ones(2, 1), bias = ms.ones(1) } end)
      :find("size mismatch", 1, true))
    assert.is_false(after)
    assert.are.equal(before, m.weight:item())
  end)

  for name, shard in pairs { ["a module"] = function(m) return m end, ["fully_shard"] = ms.fsdp.fully_shard } do
    for _, through in ipairs { "method", "fsdp" } do
      it(("decide which names strict refuses, after loading: %s, by %s"):format(name, through), function()
        local function load(edit)
          local saved, m = nn.Linear(1, 1), shard(nn.Linear(1, 1))
          ms.no_grad(function() saved.weight:fill_(3) end)
          m:register_load_state_dict_post_hook(edit)
          local load_state_dict = through == "fsdp" and ms.fsdp.load_state_dict or m.load_state_dict
          local sd = shard(saved):state_dict()
          sd.bias, sd.more = nil, ms.ones(1)
          return m, function() return load_state_dict(m, sd) end
        end
        local m, attempt = load(function(_, missing, unexpected)
          assert.are.same({ "bias" }, missing)
          assert.are.same({ "more" }, unexpected)
          missing[1], unexpected[1] = nil, nil
        end)
        assert.are.same({ {}, {} }, { attempt() })
        assert.are.equal(3, ms.fsdp.state_dict(m).weight:item())
        m, attempt = load(function(_, missing) missing[1] = nil end)
        local said = message(attempt)
        assert.truthy(said:find('Unexpected key(s) in state_dict: "more".', 1, true))
        assert.is_nil(said:find "Missing")
        assert.are.equal(3, ms.fsdp.state_dict(m).weight:item())
      end)
    end
  end

  it("without a table run in fsdp.save and fsdp.load, too", function()
    local folder = process.temp_folder()
    local m, seen = ms.fsdp.fully_shard(nn.Linear(1, 1)), {}
    m:register_state_dict_pre_hook(function(of)
      of.bias:detach():to_local():fill_(7)
      seen[#seen + 1] = "before"
    end)
    m:register_state_dict_post_hook(function() seen[#seen + 1] = "never" end)
    m:register_load_state_dict_pre_hook(function() seen[#seen + 1] = "never" end)
    m:register_load_state_dict_post_hook(function(of, missing, unexpected)
      assert.are.same({ {}, {} }, { missing, unexpected })
      seen[#seen + 1] = ("after: %d"):format(of.bias:to_local():item())
    end)
    ms.fsdp.save(folder .. "/saved", m)
    ms.no_grad(function() m.bias:to_local():fill_(1) end)
    ms.fsdp.load(folder .. "/saved", m)
    assert.are.same({ "before", "after: 7" }, seen)
    os.execute(("rm -r '%s'"):format(folder))
  end)
end)
