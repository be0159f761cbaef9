-- SPDX-License-Identifier: MIT
--- The models of lua/moonshard/models compared with PyTorch's on the same weights, and what they refuse.
local ms = require "moonshard"
local golden = require "spec.support.golden"
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"

local function model(name) return require("moonshard.models." .. name) end
local double = { dtype = "float64" }

local function ids(shape, vocab)
  local list = {}
  for i = 0, shape[1] * shape[2] - 1 do list[i + 1] = 7 * i % vocab end
  return ms.tensor(list, { dtype = "int64" }):reshape(shape)
end

local function wave(shape, offset, c, a)
  golden.dtype = "float64"
  return golden.wave(shape, offset, c, a)
end

-- The models, small; each returns the outputs that the reference has.
local cases = {
  mlp = function()
    local m = model "mlp"({ 5, 7, 6, 3 }, { activation = "Tanh", dtype = "float64" })
    return m, function() return m(wave({ 4, 5 }, 0)) end
  end,
  lstm_lm = function()
    local m = model "lstm_lm" { vocab = 11, dim = 6, tie = false, dtype = "float64" }
    return m, function()
      local y, state = m(ids({ 2, 5 }, 11))
      return y, state[1], state[2]
    end
  end,
  vae = function()
    local m = model "vae" { input = 12, hidden = 8, latent = 3, dtype = "float64" }
    return m, function()
      local x = wave({ 4, 12 }, 0, 0.5, 0.5)
      local y, mean, log_var = m(x)
      return y, mean, log_var, m:loss(x)
    end
  end,
  vit = function()
    local m = model "vit" { image = 8, patch = 4, layers = 2, heads = 2, dim = 8, mlp_dim = 12, classes = 5,
      dtype = "float64" }
    return m, function() return m(wave({ 2, 3, 8, 8 }, 0.2)) end
  end,
  llama = function()
    local m = model "llama" { vocab = 17, layers = 2, heads = 4, kv_heads = 2, dim = 16, mlp_dim = 24,
      dtype = "float64" }
    return m, function() return m(ids({ 2, 6 }, 17)) end
  end,
}

describe("golden models", function()
  local reference = golden.load "models"
  for name, case in ms.sorted_pairs(reference.cases) do
    it("have PyTorch's names and outputs: " .. name, function()
      golden.phase, golden.dtype = reference.phase, "float64"
      local m, run = cases[name]()
      local names = {}
      for own in m:named_parameters() do names[#names + 1] = own end
      for k, theirs in ipairs(case.names) do assert.are.equal(golden.our_name(theirs), names[k]) end
      assert.are.equal(#case.names, #names)
      golden.fill(m)
      m:eval()
      local outputs = { run() }
      for k, expected in ipairs(case.outputs) do
        golden.close_list(("output %d"):format(k), expected, outputs[k], 1e-9, 1e-11)
      end
    end)

    it("learn in float32: " .. name, function()
      ms.manual_seed(1)
      local m = (cases[name]()):float()
      local p = m:parameters()
      local function loss()
        if name == "vae" then return m:loss(wave({ 4, 12 }, 0, 0.5, 0.5):float()) end
        if name == "vit" then
          return ms.nn.F.cross_entropy(m(wave({ 2, 3, 8, 8 }, 0.2):float()), ms.tensor({ 1, 3 }, { dtype = "int64" }))
        end
        if name == "mlp" then return (m(wave({ 4, 5 }, 0):float()) - 1):pow(2):mean() end
        local x = ids({ 2, 6 }, 11)
        if name == "llama" then return m(x, x) end
        return ms.nn.F.cross_entropy((m(x)):reshape(12, -1), x:reshape(-1))
      end
      local o = ms.optim.AdamW(p, { lr = 0.01 })
      local first = loss():item()
      for _ = 1, 20 do
        o:zero_grad()
        loss():backward()
        o:step()
      end
      local last = loss():item()
      assert.is_true(last < 0.99 * first, ("%g, then %g"):format(first, last))
    end)
  end

  it("goes on from a state: the language model of LSTMs", function()
    ms.manual_seed(1)
    local m = model "lstm_lm" { vocab = 11, dim = 6, dtype = "float64" }
    local x = ids({ 2, 6 }, 11)
    local whole = m(x)
    local first, state = m(x:narrow(2, 1, 4))
    local second = m(x:narrow(2, 5, 2), state)
    ms.testing.assert_close(ms.cat({ first, second }, 2), whole)
  end)

  it("draws codes in training only, and samples: the VAE", function()
    ms.manual_seed(1)
    local m = model "vae" { input = 12, hidden = 8, latent = 3 }
    local x = ms.rand(4, 12)
    assert.is_false((m(x)):equal((m(x))))
    m:eval()
    assert.is_true((m(x)):equal((m(x))))
    local drawn = m:sample(5)
    assert.are.equal("[5, 12]", tostring(drawn.shape))
    assert.is_true(drawn:ge(0):all():item() and drawn:le(1):all():item())
  end)

  for _, case in ipairs {
    { "mlp", { 3 }, nil, "MLP: argument 1 is" },
    { "mlp", { 3, 2 }, { activation = "Relu" }, "expected the name of a layer, such as 'ReLU'" },
    { "vit", { image = 10, patch = 4 }, nil, "image size 10 is not a multiple of the patch size 4" },
    { "llama", { heads = 4, kv_heads = 3 }, nil, "heads is 4, expected a multiple of kv_heads, 3" },
    { "llama", { dim = 12, heads = 4 }, nil, "dim is 12, expected a multiple of 8, twice the number of heads" },
  } do
    it(("refuse sizes that do not fit: %s"):format(case[4]), function()
      local text = message(model(case[1]), case[2], case[3])
      assert.truthy(text:find(case[4], 1, true), text)
    end)
  end
end)

-- Ways to shard a model: a unit for each block of its list, and the rest; LSTMs have no blocks.
local function blocks_of(name, m)
  return name == "llama" and m.model.layers or name == "vit" and m.encoder.layers:children() or { name == "lstm_lm" and m.lstm }
end
local ways = {
  fully_shard = function(name, m)
    for _, block in ipairs(blocks_of(name, m)) do ms.fsdp.fully_shard(block) end
    return ms.fsdp.fully_shard(m)
  end,
  FSDP = function(name, m)
    local wrapped = {}
    for _, block in ipairs(blocks_of(name, m)) do wrapped[block] = true end
    return ms.fsdp.FSDP(m, { use_orig_params = true, auto_wrap_policy = function(module, recurse)
      return recurse or wrapped[module] == true
    end })
  end,
}

for world = 1, 4 do
  ranks.describe(world, "models over shards", function()
    for way, shard in ms.sorted_pairs(ways) do
      for _, name in ipairs { "lstm_lm", "vit", "llama" } do
        it(("train as whole ones for 20 steps, to 1e-5: %s by %s"):format(name, way), function(rank)
          local function make()
            ms.manual_seed(1)
            return (cases[name]())
          end
          local whole, sharded = make(), make()
          sharded = shard(name, sharded)
          local function loss(m, step, r)
            ms.manual_seed(10 * step + r)
            if name == "vit" then
              return ms.nn.F.cross_entropy(m(ms.rand(2, 3, 8, 8, double)), ms.randint(0, 5, { 2 }))
            end
            local x = ms.randint(0, 11, { 2, 6 })
            if name == "llama" then return m(x, x) end
            return ms.nn.F.cross_entropy((m(x)):reshape(12, -1), x:reshape(-1))
          end
          local a = ms.optim.AdamW(whole:parameters(), { lr = 0.01 })
          local b = ms.optim.AdamW(sharded:parameters(), { lr = 0.01 })
          for step = 1, 20 do
            for r = 0, world - 1 do (loss(whole, step, r) / world):backward() end
            loss(sharded, step, rank):backward()
            a:step()
            b:step()
            a:zero_grad()
            b:zero_grad()
          end
          local want = whole:state_dict()
          for key, t in ms.sorted_pairs(ms.fsdp.state_dict(sharded)) do
            ms.testing.assert_close(t, want[key], { rtol = 1e-5, atol = 1e-7 })
          end
        end)
      end
    end
  end)
end
