-- SPDX-License-Identifier: MIT
--- Causal models of Hugging Face's folders: results equal to transformers', and the same file back.
local cache = require "moonshard.text.generation.cache"
local cjson = require "cjson"
local ms = require "moonshard"
local folders = require "spec.support.hf_folders"
local names = require "moonshard.hf.names"
local process = require "spec.support.process"

local TOLERANCE = 1e-5
local S = 8

describe("a causal model of transformers", function()
  local folder, case
  after_each(function()
    if folder then process.remove_folder(folder) end
    folder = nil
  end)

  for name, row in ms.sorted_pairs(folders.cases) do
    if row.greedy and row.padded then
      it("has its logits, loss and gradients: " .. name, function()
        folder, case = folders.make(name)
        local model, ids = ms.hf.load(folder), folders.ids(S)
        assert.is_true(folders.off(model(ids), case.logits) < TOLERANCE)
        local loss = model(ids, { labels = ids })
        assert.is_true(math.abs(loss:item() - case.loss) < TOLERANCE)
        loss:backward()
        local norms, n = {}, 0
        for _, t in ipairs(case.tensors) do norms[t[1]] = t[3] end
        for _, e in ipairs(names.entries(model)) do
          if norms[e.file] ~= cjson.null then
            n = n + 1
            assert.is_true(math.abs(e.t.grad:norm():item() - norms[e.file]) < TOLERANCE, e.file)
          end
        end
        assert.is_true(n > 10)
        -- Targets are labels that are shifted already.
        local shifted = ms.cat({ ids:narrow(2, 2, S - 1), ms.full({ 2, 1 }, -100, { dtype = "int64" }) }, 2)
        assert.is_true(math.abs(model(ids, shifted):item() - case.loss) < TOLERANCE)
      end)

      it("continues texts with a cache, and skips padding: " .. name, function()
        folder, case = folders.make(name)
        local model, ids = ms.hf.load(folder), folders.ids(S)
        local store, now, out = cache.new(), ids, {}
        ms.no_grad(function()
          for t = 1, 12 do
            now = model(now, { cache = store, last = 1 }):argmax(-1)
            out[t] = now
          end
          assert.are.equal(S + 11, store.length)
          assert.are.same(case.greedy, ms.cat(out, 2):reshape(-1):tolist())
          -- The first text has three tokens less, and is padded on the left.
          local mask = ms.ones({ 2, S }, { dtype = "int64" })
          mask:narrow(1, 1, 1):narrow(2, 1, 3):zero_()
          local places = (mask:cumsum(2) - 1):clamp(0)
          local padded = model(ids, { attention_mask = mask, positions = places, last = 1 })
          assert.is_true(folders.off(padded, case.padded) < TOLERANCE)
          -- Two documents in one sequence are as two sequences.
          local segments = ms.cat({ ms.zeros({ 1, S }, { dtype = "int64" }), ms.ones({ 1, S }, { dtype = "int64" }) }, 2)
          local twice = ms.cat({ ms.arange(S), ms.arange(S) }, 1)
          local packed = model(ids:reshape(1, -1), { segments = segments, positions = twice })
          assert.is_true(folders.off(packed, case.logits) < TOLERANCE)
        end)
      end)

      it("computes in bfloat16, and is written in it: " .. name, function()
        folder, case = folders.make(name)
        local model = ms.hf.load(folder, { dtype = "bfloat16" })
        local logits = model(folders.ids(S))
        assert.are.equal("bfloat16", logits.dtype)
        local want = ms.tensor(case.logits, { dtype = "float64" })
        local off = (logits:to("float64"):reshape(-1) - want):square():mean():sqrt():item()
        assert.is_true(off < 0.02 * want:square():mean():sqrt():item(), off)
        -- The loss is float32, as in transformers.
        local ids = ms.cat({ folders.ids(S), folders.ids(S):repeat_interleave(9, 1) }, 1)
        local loss = model(ids, ids)
        assert.are.equal("float32", loss.dtype)
        local plain = ms.nn.F.cross_entropy(model(ids):float():flatten(1, 2), ids:reshape(-1))
        assert.is_true(math.abs(loss:item() - plain:item()) < 1e-5 * plain:item())
        ms.hf.save(model, folder .. "/out")
        assert.matches('"dtype":%s*"bfloat16"', process.read(folder .. "/out/config.json"))
        assert.is_true(ms.hf.load(folder .. "/out")(folders.ids(S)):equal(logits))
      end)

      it("is written as it was read, in one file and in several: " .. name, function()
        folder, case = folders.make(name)
        process.write(folder .. "/tokenizer.json", "{}")
        local model = ms.hf.load(folder)
        local out = folder .. "/out"
        ms.hf.save(model, out)
        local want, got, metadata = ms.load(folder .. "/model.safetensors"), ms.load(out .. "/model.safetensors")
        assert.are.equal("pt", metadata.format)
        for key, t in pairs(want) do assert.is_true(t:equal(got[key]), key) end
        for key in pairs(got) do assert.is_truthy(want[key], key) end
        assert.are.equal(process.read(folder .. "/config.json"), process.read(out .. "/config.json"))
        assert.are.equal("{}", process.read(out .. "/tokenizer.json"))

        ms.hf.save(model, out, { max_shard_size = 4000 })
        local index, files, n = cjson.decode(process.read(out .. "/model.safetensors.index.json")), {}, 0
        for _, at in ms.sorted_pairs(index.weight_map) do
          if not files[at] then n = n + 1 end
          files[at] = true
        end
        assert.is_true(n > 2)
        assert.is_nil(io.open(out .. "/model.safetensors"))
        local all = ms.load(out .. "/model.safetensors.index.json")
        for key, t in pairs(want) do assert.is_true(t:equal(all[key]), key) end
        local again = ms.hf.load(out)
        assert.is_true(folders.off(again(folders.ids(S)), case.logits) < TOLERANCE)
      end)
    end
  end
end)

describe("a configuration without a key", function()
  local function made(model_type, changes)
    local config = { model_type = model_type, vocab_size = 40, hidden_size = 16, intermediate_size = 24, head_dim = 4,
      num_hidden_layers = 2, num_attention_heads = 4 }
    for key, value in pairs(changes or {}) do config[key] = value end
    local model = ms.hf.create(config)
    local attn, mlp = model.model.layers[1].attn, model.model.layers[1].mlp
    return { attn.softcap, attn.window or nil, model.softcap, mlp.act, model.model.norm.eps }
  end

  it("means what it means in transformers, and null means none", function()
    assert.are.same({ 50, 4096, 30, "gelu_pytorch_tanh", 1e-6 }, made "gemma2")
    local none = made("gemma2", { attn_logit_softcapping = cjson.null, final_logit_softcapping = cjson.null })
    assert.are.same({ [2] = 4096, [4] = "gelu_pytorch_tanh", [5] = 1e-6 }, none)
    assert.are.same({ [4] = "gelu_pytorch_tanh", [5] = 1e-6 }, made "gemma")
    assert.are.same({ [2] = 4096, [4] = "silu", [5] = 1e-6 }, made "mistral")
    assert.are.same({ [4] = "silu", [5] = 1e-6 }, made("mistral", { sliding_window = cjson.null }))
    assert.are.same({ [4] = "silu", [5] = 1e-5 }, made "phi3")
    assert.are.same({ [4] = "relu", [5] = 1e-6 }, made("gemma", { hidden_act = "relu", hidden_activation = "relu" }))
    assert.has_error(function() made("gemma", { hidden_act = "relu", hidden_activation = "silu" }) end,
      "hf: 'config': key 'hidden_activation' is 'silu'; only 'relu' is supported")
  end)
end)

describe("rotary positions", function()
  it("are those of float32 where mixed precision has rounded the cosines", function()
    local rotary = require "moonshard.hf.rotary"
    local x, angles = ms.randn(1, 2, 5, 8):bfloat16(), ms.rand(5, 4)
    local at = { cos = angles:cos():bfloat16(), sin = angles:sin():bfloat16() }
    assert.is_true(rotary.turn(x, at):equal(rotary.turn(x, { cos = at.cos:float(), sin = at.sin:float() })))
  end)
end)
