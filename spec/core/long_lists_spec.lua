-- SPDX-License-Identifier: MIT
--- Lists of more elements than Lua's functions take arguments or return results (about 8,000).
local ms = require "moonshard"
local ranks = require "spec.support.ranks"
local raises = require "spec.support.raises"
local nn, optim, data = ms.nn, ms.optim, ms.data

local MANY = 9000
local params

-- 9000 parameters of 1, with gradients of 1.
local function fresh()
  ms.no_grad(function()
    for _, p in ipairs(params) do
      p:fill_(1)
      p.grad = ms.ones(1)
    end
  end)
  return params
end

describe("a list of 9000", function()
  setup(function()
    params = {}
    for k = 1, MANY do params[k] = nn.Parameter(ms.ones(1)):keep() end
  end)
  teardown(function()
    for _, p in ipairs(params) do p:release() end
    params = nil
  end)
  before_each(fresh)

  it("parameters is stepped, saved and loaded by an optimizer", function()
    local opt = optim.Adam(params, { lr = 0.5 })
    opt:step()
    assert.is_true(params[1]:item() < 1 and params[1]:item() == params[MANY]:item())
    local again = optim.Adam(params, { lr = 0.5 })
    again:load_state_dict(opt:state_dict())
    again:zero_grad()
  end)

  it("parameters of which one was released is refused", function()
    local list = {}
    for k = 1, MANY do list[k] = params[k] end
    list[MANY] = ms.ones(1):requires_grad_()
    local opt = optim.SGD(list, { lr = 1 })
    opt:step()
    list[MANY]:release()
    assert.is_false(pcall(opt.step, opt))
    assert.is_false(pcall(nn.utils.clip_grad_norm_, list, 1))
  end)

  it("parameters is clipped, flattened, averaged and scaled", function()
    ms.testing.assert_close(nn.utils.clip_grad_norm_(params, 3):item(), math.sqrt(MANY), { rtol = 1e-6 })
    ms.testing.assert_close(params[MANY].grad:item(), 3 / math.sqrt(MANY), { rtol = 1e-5 })
    nn.utils.clip_grad_value_(params, 0.01)
    assert.are.equal(MANY, nn.utils.parameters_to_vector(params):numel())
    nn.utils.vector_to_parameters(ms.arange(MANY):float(), params)
    assert.are.equal(MANY - 1, params[MANY]:item())
    local ema = optim.EMA(params)
    ema:update()
    ema:load_state_dict(ema:state_dict())
    local scaler, opt = ms.amp.GradScaler { init_scale = 2 }, optim.SGD(params, { lr = 1 })
    fresh()
    scaler:scale(ms.stack(params):sum()):backward()
    scaler:unscale_(opt)
    scaler:step(opt)
    scaler:update()
    assert.are.equal(1 - 1.5, params[MANY]:item())               -- (1 + 2) / 2
  end)

  it("groups has a schedule", function()
    local groups = {}
    for k = 1, MANY do groups[k] = { params = { params[k] } } end
    local opt = optim.SGD(groups, { lr = 1 })
    local schedule = optim.lr_scheduler.exponential(opt, { gamma = 0.5 })
    opt:step()
    schedule:step()
    schedule:load_state_dict(schedule:state_dict())
    assert.are.equal(0.5, opt.param_groups[MANY].lr)
  end)

  it("inputs has gradients", function()
    local grads = ms.grad((ms.stack(params) * 3):sum(), params)
    assert.are.same({ MANY, 3 }, { #grads, grads[MANY]:item() })
    assert.are.equal(MANY, #nn.ParameterDict((function()
      local named = {}
      for k = 1, MANY do named["p" .. k] = params[k] end
      return named
    end)()):keys())
  end)

  it("items is a batch, and one of fields is refused", function()
    local items = {}
    for k = 1, MANY do items[k] = { k, ms.ones(2) } end
    local x, y = data.default_collate(items)
    assert.are.same({ MANY, 2 * MANY }, { x:numel(), y:numel() })
    for a in data.DataLoader(items, { batch_size = MANY }):epoch() do assert.are.equal(MANY, a:numel()) end
    local wide = {}
    for k = 1, MANY do wide[k] = k end
    local text = ": item 1 is a list of 9000 values, which are as many results, expected at most 7500; make it a tensor, "
      .. "as in ms.tensor(list)"
    raises("default_collate" .. text, data.default_collate, { wide, wide })
    raises("Dataset" .. text, function() return data.Dataset({ wide }):get(1) end)
  end)

  it("counts is a confusion matrix, which is saved and loaded", function()
    local one = ms.metrics.ConfusionMatrix { classes = 100 }
    one:update(ms.tensor({ 1, 99 }, { dtype = "int64" }), ms.tensor({ 1, 3 }, { dtype = "int64" }))
    local two = ms.metrics.ConfusionMatrix { classes = 100 }
    two:load_state_dict(one:state_dict())
    assert.are.same({ 1, 1, 0, 1 }, { two:compute()[2][2], two:compute()[4][100], two:compute()[4][4], two.updates })
  end)

  it("bytes without a space is one word for a tokenizer", function()
    local word = ("ab"):rep(MANY / 2)
    local t = ms.text.train_bpe({ word }, { vocab_size = 257 })
    assert.are.equal(word, t:decode(t:encode(word)))
    assert.are.equal(MANY / 2, t:encode(word):numel())
  end)
end)

ranks.describe(2, "a model of 9000 parameters", function()
  for name, wrap in pairs {
    fully_shard = function(m) return ms.fsdp.fully_shard(m) end,
    DDP = function(m) return nn.DDP(m) end,
  } do
    it("is trained by " .. name, function()
      local Many = nn.Module:extend "Many"
      function Many:init()
        for k = 1, MANY do self["p" .. k] = nn.Parameter(ms.ones(2)) end
      end
      function Many:forward(x)
        local list = {}
        for k = 1, MANY do list[k] = self["p" .. k] end
        return ms.stack(list):sum() * x:sum()
      end
      local m = Many()
      m = wrap(m) or m
      local opt = optim.SGD(m:parameters(), { lr = 0.5 })
      m(ms.ones(1)):backward()
      local norm = m.clip_grad_norm_ and m:clip_grad_norm_(1e9) or nn.utils.clip_grad_norm_(m:parameters(), 1e9)
      ms.testing.assert_close(norm:item(), math.sqrt(2 * MANY), { rtol = 1e-6 })
      opt:step()
      assert.are.equal(MANY, (m(ms.ones(1))):item())
    end)
  end
end)
