-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local nn = ms.nn

local message = require "spec.support.message"
local names = require "spec.support.names"

local function model(dtype)
  ms.manual_seed(1)
  local m = nn.Sequential(nn.Linear(5, 4, { dtype = dtype }), nn.Tanh(), nn.Linear(4, 3, { dtype = dtype }))
  return m
end

-- Gives B values, which begin as zeros.
local function fill(lora)
  ms.manual_seed(7)
  for _, p in ipairs(lora:parameters()) do nn.init.normal_(p, 0, 0.3) end
end

describe("nn.lora", function()
  it("changes nothing at first, and keeps the layers, their names and their classes", function()
    local m, plain = model(), model()
    local first = m[1]
    local lora = nn.lora(m, { target = "%d", rank = 2 })
    local x = ms.randn(6, 5)
    assert.is_true(m(x):equal(plain(x)))
    assert.are.equal(first, m[1])
    assert.is_true(m[1]:isa(nn.Linear))
    assert.are.equal("LoRALinear(5 -> 4, bias, adapters of rank 2)", tostring(m[1]))
    assert.are.equal("1.weight 1.bias 1.lora_A 1.lora_B 3.weight 3.bias 3.lora_A 3.lora_B",
      names(m:named_parameters()))
    local missing = m:load_state_dict(plain:state_dict(), { strict = false })
    assert.are.same({ "1.lora_A", "1.lora_B", "3.lora_A", "3.lora_B" }, missing)
    assert.are.equal("LoRA(rank 2, alpha 2, 2 layers, 32 of 71 elements are trained)", tostring(lora))
    assert.are.same({ 32, 71 }, { lora:count() })
  end)

  it("freezes all but the adapters and what `trainable` chooses", function()
    local m = model()
    local lora = nn.lora(m, { target = "1", trainable = { "3%.bias" } })
    local trained = {}
    for name, p in m:named_parameters() do
      if p.requires_grad then trained[#trained + 1] = name end
    end
    assert.are.same({ "1.lora_A", "1.lora_B", "3.bias" }, trained)
    assert.are.equal(3, #lora:parameters())
    m(ms.randn(2, 5)):sum():backward()
    assert.is_nil(m[1].weight.grad)
    assert.is_not_nil(m[1].lora_B.grad)
  end)

  it("computes W x + b + alpha / rank B A x, with its gradients", function()
    local m = nn.Linear(5, 4, { dtype = "float64" })
    local box = nn.Sequential(m)
    local lora = nn.lora(box, { target = "1", rank = 3, alpha = 6 })
    fill(lora)
    local x = ms.randn(7, 5, { dtype = "float64" })
    local y = box(x)
    local W = m.weight:detach() + m.lora_B:detach():matmul(m.lora_A:detach()) * 2
    assert.is_true(y:allclose(x:matmul(W:t()) + m.bias:detach(), { rtol = 1e-12, atol = 1e-12 }))
    local g = ms.randn(7, 4, { dtype = "float64" })
    y:backward(g)
    local dW = g:t():matmul(x) * 2
    assert.is_true(m.lora_A.grad:allclose(m.lora_B:detach():t():matmul(dW), { rtol = 1e-12, atol = 1e-12 }))
    assert.is_true(m.lora_B.grad:allclose(dW:matmul(m.lora_A:detach():t()), { rtol = 1e-12, atol = 1e-12 }))
  end)

  it("adapts embeddings, except for their padding row", function()
    local box = nn.Sequential(nn.Embedding(6, 4, { padding_idx = 2, dtype = "float64" }))
    local lora = nn.lora(box, { target = "1", rank = 2 })
    local ids = ms.tensor({ { 0, 2, 5 } }, { dtype = "int64" })
    local before = box(ids)
    fill(lora)
    local m = box[1]
    local want = before + m.lora_B:detach():matmul(m.lora_A:detach()):t():index_select(1, ids:reshape(-1)):unsqueeze(1)
    local y = box(ids)
    assert.is_true(y:allclose(want, { rtol = 1e-12, atol = 1e-12 }))
    y:sum():backward()
    assert.are.equal(0, m.lora_A.grad:select(2, 3):abs():sum():item())
    assert.is_true(m.lora_A.grad:select(2, 1):abs():sum():item() > 0)
    lora:merge()
    assert.is_true(box(ids):allclose(want, { rtol = 1e-12, atol = 1e-12 }))
  end)

  for _, case in ipairs {
    { "Conv1d", { 3, 5, 3, { stride = 2, padding = 1, dtype = "float64" } }, { 2, 3, 9 } },
    { "Conv2d", { 3, 5, { 3, 2 }, { dilation = 2, padding = 1, padding_mode = "reflect", dtype = "float64" } },
      { 2, 3, 7, 6 } },
    { "Conv3d", { 2, 3, 2, { bias = false, dtype = "float64" } }, { 1, 2, 4, 3, 3 } },
  } do
    it("adapts " .. case[1] .. ", as the same convolution with the weight W + alpha / rank B A", function()
      local box = nn.Sequential(nn[case[1]](unpack(case[2])))
      local lora = nn.lora(box, { target = "1", rank = 2, alpha = 3 })
      fill(lora)
      local m, x = box[1], ms.randn(unpack(case[3])):double()
      local A, B = m.lora_A:detach(), m.lora_B:detach()
      local W = m.weight:detach() + (B:flatten(2):matmul(A:flatten(2)) * 1.5):reshape(m.weight.shape)
      local plain = nn[case[1]](unpack(case[2]))
      plain:load_state_dict { weight = W, bias = m.bias }
      local close = { rtol = 1e-11, atol = 1e-11 }
      assert.is_true(box(x):allclose(plain(x), close))
      box(x):sum():backward()
      assert.is_true(m.lora_A.grad:abs():sum():item() > 0 and m.lora_B.grad:abs():sum():item() > 0)
      lora:merge()
      assert.is_true(m.weight:allclose(W, close))
      assert.is_true(box(x):allclose(plain(x), close))
    end)
  end

  it("drops inputs of the adapters in training only", function()
    local box = nn.Sequential(nn.Linear(50, 4))
    local lora = nn.lora(box, { target = "1", dropout = 0.5 })
    fill(lora)
    local x = ms.ones(1, 50)
    assert.is_false(box(x):equal(box(x)))
    box:eval()
    assert.is_true(box(x):equal(box(x)))
  end)

  it("rounds a weight of fewer bits once when it merges", function()
    local m = nn.Linear(24, 40, { dtype = "bfloat16" })
    local before = m.weight:detach():float()
    local lora = nn.lora(m, { target = function() return true end, rank = 2, alpha = 6, dtype = "float32" })
    nn.init.normal_(m.lora_B)
    local right = before:add(m.lora_B:detach():matmul(m.lora_A:detach()), { alpha = 3 }):to "bfloat16"
    lora:merge()
    assert.is_true(m.weight:detach():equal(right))
  end)

  it("merges and unmerges, and removes the adapters", function()
    local m, plain = model "float64", model "float64"
    local lora = nn.lora(m, { target = ".*" })
    fill(lora)
    local x = ms.randn(3, 5, { dtype = "float64" })
    local want, close = m(x), { rtol = 1e-12, atol = 1e-12 }
    assert.are.equal(lora, lora:merge())
    assert.is_true(m(x):allclose(want, close))
    assert.truthy(tostring(m[1]):find("rank 8, merged", 1, true))
    lora:merge()                                        -- a second merge does nothing
    assert.is_true(m(x):allclose(want, close))
    lora:unmerge()
    assert.is_true(m(x):allclose(want, close))
    assert.is_true(m[1].weight:allclose(plain[1].weight, close))
    lora:merge():remove()
    assert.is_true(m(x):allclose(want, close))
    assert.are.equal("Linear", m[1]:class_name())
    assert.are.equal("1.weight 1.bias 3.weight 3.bias", names(m:named_parameters()))
    plain:load_state_dict(m:state_dict())
    assert.is_true(plain(x):allclose(want, close))
  end)

  it("saves and loads the adapters alone", function()
    local a, b = model(), model()
    local from = nn.lora(a, { target = "%d", rank = 2, trainable = "3.bias" })
    local to = nn.lora(b, { target = "%d", rank = 2, trainable = "3.bias" })
    fill(from)
    local path = os.tmpname()
    ms.save(path, from:state_dict())
    local sd = ms.load(path)
    os.remove(path)
    local listed = {}
    for name in ms.sorted_pairs(sd) do listed[#listed + 1] = name end
    assert.are.same({ "1.lora_A", "1.lora_B", "3.bias", "3.lora_A", "3.lora_B", "lora_alpha" }, listed)
    to:load_state_dict(sd)
    local x = ms.randn(2, 5)
    assert.is_true(a(x):equal(b(x)))

    assert.are.equal("load_state_dict: '3.bias' is missing", message(function()
      to:load_state_dict { ["1.lora_A"] = sd["1.lora_A"], ["1.lora_B"] = sd["1.lora_B"] }
    end))
    sd["1.lora_A"] = ms.zeros(3, 5)
    assert.are.equal("load_state_dict: '1.lora_A' has shape [3, 5], expected [2, 5]",
      message(function() to:load_state_dict(sd) end))
    sd["1.lora_A"], sd.more = ms.zeros(2, 5), ms.zeros(1)
    assert.are.equal("load_state_dict: unknown name 'more'", message(function() to:load_state_dict(sd) end))
    assert.is_true(a(x):equal(b(x)))                    -- nothing has changed
    sd.more = nil
    to:merge()
    assert.are.equal("load_state_dict: the adapters are merged; unmerge() first",
      message(function() to:load_state_dict(sd) end))
  end)

  it("gets layers, rank, alpha and values from the state of adapters", function()
    local convs = function()
      ms.manual_seed(2)
      return nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(12, 4), nn.Unflatten(2, { 1, 4 }),
        nn.Conv1d(1, 2, 3))
    end
    local a, b = convs(), convs()
    local from = nn.lora(a, { target = { "1", "5" }, rank = 2, alpha = 6, trainable = "3%.bias" })
    fill(from)
    local to = nn.lora(b, { state = from:state_dict(), dropout = 0.5 })
    assert.are.equal(tostring(from), tostring(to))
    assert.are.equal("LoRA(rank 2, alpha 6, 2 layers, 44 of 154 elements are trained)", tostring(to))
    assert.are.equal("Linear", b[3]:class_name())
    local ids = ms.tensor({ { 1, 2 }, { 0, 8 } }, { dtype = "int64" })
    assert.is_true(a(ids):equal(b:eval()(ids)))
    assert.is_true(b[3].bias.requires_grad)
    assert.is_false(b[3].weight.requires_grad)
  end)

  it("does not load adapters of another alpha, but those of files without alpha", function()
    local from, to = nn.lora(model(), { target = "1", alpha = 4 }), nn.lora(model(), { target = "1", alpha = 2 })
    local sd = from:state_dict()
    assert.are.equal("load_state_dict: 'lora_alpha' is 4, expected 2, the adapters' alpha",
      message(function() to:load_state_dict(sd) end))
    sd.lora_alpha = nil
    fill(from)
    to:load_state_dict(sd)
    assert.is_true(to.model[1].lora_B:equal(from.model[1].lora_B))
  end)

  it("is initialised again by reset_parameters, also after meta", function()
    local box = nn.Sequential(nn.Linear(50, 4, { device = "meta" }))
    nn.lora(box, { target = "1", rank = 4 })
    box:to_empty "cpu"
    box[1]:reset_parameters()
    assert.are.equal(0, box[1].lora_B:abs():sum():item())
    local A = box[1].lora_A:abs():max():item()
    assert.is_true(A > 0.5 / math.sqrt(50) and A <= 1 / math.sqrt(50))
  end)

  it("is copied with the model", function()
    local m = model()
    fill(nn.lora(m, { target = "1" }))
    local copy, x = ms.deepcopy(m), ms.randn(2, 5)
    assert.is_true(copy(x):equal(m(x)))
    ms.no_grad(function() m[1].lora_B:zero_() end)
    assert.is_false(copy(x):equal(m(x)))
  end)

  it("learns what a full matrix cannot forget: training changes only the adapters", function()
    local m, plain = model(), model()
    local lora = nn.lora(m, { target = "%d", rank = 4 })
    local optimizer = ms.optim.AdamW(lora:parameters(), { lr = 0.05 })
    ms.manual_seed(3)
    local x, y = ms.randn(32, 5), ms.randn(32, 3)
    local first, last
    for _ in ms.steps(100) do
      local loss = nn.F.mse_loss(m(x), y)
      loss:backward()
      optimizer:step()
      optimizer:zero_grad()
      last = loss:item()
      first = first or last
    end
    assert.is_true(last < 0.7 * first, ("%g -> %g"):format(first, last))
    for name, p in plain:named_parameters() do assert.is_true(m:get_parameter(name):equal(p), name) end
  end)
end)

describe("errors of nn.lora", function()
  local function said(given, m) return message(function() nn.lora(m or model(), given) end) end

  it("name the option, its value and what was expected", function()
    assert.are.equal("lora: option 'target' is missing", said {})
    assert.are.equal("lora: option 'target' is a number (3), expected a pattern of names, a list of them, or a function",
      said { target = 3 })
    assert.are.equal("lora: option 'target' is an empty list, expected a pattern of names, a list of them, or a function",
      said { target = {} })
    assert.are.equal("lora: option 'target': '[' is not a Lua pattern", said { target = "[" })
    assert.are.equal("lora: option 'target': element 2 is a boolean, expected a string",
      (said { target = { "1", true } }:gsub(" %(true%)", "")))
    assert.are.equal("lora: option 'rank' is a number (0), expected a whole number from 1",
      said { target = "1", rank = 0 })
    assert.are.equal("lora: option 'dropout' is a number (1), expected a number from 0 to below 1",
      said { target = "1", dropout = 1 })
    assert.are.equal("lora: option 'alpha' is a number (0), expected a number > 0", said { target = "1", alpha = 0 })
    assert.truthy(said { target = "1", rnk = 1 }:find("did you mean 'rank'?", 1, true))
    assert.are.equal("lora: argument 1 is a table, expected a module", said({ target = "1" }, {}))
    assert.are.equal("lora: option 'trainable': the pattern 'head' matches no parameter",
      said { target = "1", trainable = "head" })
  end)

  it("say how a state does not fit, and that nothing changed", function()
    local m = model()
    local function refused(change, given)
      local sd = nn.lora(model(), { target = "%d", rank = 2, trainable = "3%.bias" }):state_dict()
      if change then change(sd) end
      given = given or {}
      given.state = sd
      local said_so = said(given, m)
      assert.is_true(m[1].weight.requires_grad)
      assert.are.equal("Linear", m[1]:class_name())
      return said_so
    end
    assert.are.equal("lora: options 'state' and 'rank' are both given, expected only 'state', which determines 'rank'", refused(nil, { rank = 2 }))
    assert.are.equal("lora: option 'state' is a number (3), expected a result of state_dict", said { state = 3 })
    assert.are.equal("lora: option 'state': 'x' is a number (1), expected a tensor", said { state = { x = 1 } })
    assert.are.equal("lora: option 'state': it lacks 'lora_alpha': give the options target, rank and alpha, and call load_state_dict",
      refused(function(sd) sd.lora_alpha = nil end))
    assert.are.equal("lora: option 'state': the model has no adapter or trained parameter '4.lora_A'",
      refused(function(sd) sd["4.lora_A"] = ms.zeros(2, 5) end))
    assert.are.equal("lora: option 'state': '3.lora_B' is missing", refused(function(sd) sd["3.lora_B"] = nil end))
    assert.are.equal("lora: option 'state': '1.lora_A' has shape [2, 6], expected [2, 5]",
      refused(function(sd) sd["1.lora_A"] = ms.zeros(2, 6) end))
    m = nn.lora(model(), { target = "1" })
    assert.truthy(said({ state = m:state_dict() }, ms.with_device("meta", model)):find("'1' is on meta", 1, true))
  end)

  it("say what a pattern chooses instead, and that nothing changed", function()
    assert.are.equal("lora: target '2' matches no layer that can have adapters (Linear, Int8Linear, Embedding, or a convolution with groups = 1; no subclass with a forward of its own; no layer that an earlier pattern matches); it matches '2', a Tanh",
      said { target = { "1", "2" } })
    assert.are.equal("lora: target 'qkv' matches no layer that can have adapters (Linear, Int8Linear, Embedding, or a convolution with groups = 1; no subclass with a forward of its own)",
      said { target = "qkv" })
    local encoder = nn.TransformerEncoderLayer(4, 2, { dim_feedforward = 4 })
    assert.truthy(said({ target = "self_attn" }, encoder):find(
      "it matches 'self_attn', a MultiheadAttention, of which only 'out_proj' can have adapters", 1, true))
    assert.are.equal(1, #nn.lora(encoder, { target = "self_attn%.out_proj" }).layers)
    assert.are.equal("lora: the function 'target' accepts no layer that can have adapters",
      said { target = function() return false end })
    local m = model()
    said({ target = { "1", "2" } }, m)
    said({ target = "1", trainable = "x" }, m)
    assert.is_true(m[1].weight.requires_grad)
    assert.are.equal("Linear", m[1]:class_name())
    assert.truthy(said({ target = "1" }, nn.Sequential(nn.Conv2d(2, 2, 1, { groups = 2 })))
      :find("it matches '1', a Conv2d", 1, true))
    local Own = nn.Linear:extend "Own"
    function Own:forward(x) return nn.F.linear(x, self.weight) end
    assert.truthy(said({ target = "1" }, nn.Sequential(Own(2, 2))):find("it matches '1', a Own", 1, true))
  end)

  it("refuse a second time, sharded parameters, and to merge a shared weight", function()
    local m = model()
    nn.lora(m, { target = "1" })
    assert.are.equal("lora: '1' has adapters already", said({ target = "%d" }, m))
    local sharded = ms.fsdp.fully_shard(model())
    assert.are.equal("lora: parameter '1.weight' belongs to a sharded module already; call nn.lora before "
      .. "sharding or wrapping",
      said({ target = "1" }, sharded))
    local tied = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, { bias = false }))
    tied[2].weight = tied[1].weight
    local lora = nn.lora(tied, { target = "2" })
    assert.are.equal("merge: the weight of '2' has several names ('1.weight', '2.weight'), but the adapters change it for one layer only",
      message(function() lora:merge() end))
  end)
end)
