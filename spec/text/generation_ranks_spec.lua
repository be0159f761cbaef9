-- SPDX-License-Identifier: MIT
--- Sharded models generate on all ranks, each its own texts.
local folders = require "spec.support.hf_folders"
local golden = require "spec.support.golden"
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local cases = golden.load "generation"

local function load(name)
  local folder = folders.make(name, nil, cases)
  local model = ms.hf.load(folder)
  process.remove_folder(folder)
  return model
end

local ways = {
  fully_shard = function(model)
    for _, layer in ipairs(model.model.layers) do ms.fsdp.fully_shard(layer) end
    return ms.fsdp.fully_shard(model)
  end,
  FSDP = function(model) return ms.fsdp.FSDP(model) end,
}

ranks.describe(2, "generate over 2 ranks #mpi", function(rank)
  rank = rank or 0                                       -- busted registers the tests without ranks
  -- Rank 1 has more texts, longer ones, and generates more tokens.
  local texts = rank == 0 and { { 3, 4, 5 } } or { { 9, 8, 7, 6 }, { 1, 2 } }
  local runs = {
    greedy = { max_new_tokens = 4 + 9 * rank, eos_token_id = {} },
    sampled = { max_new_tokens = 12 - 7 * rank, temperature = 1.2, seed = 3 + rank, eos_token_id = {} },
    beams = { max_new_tokens = 6 + 3 * rank, num_beams = 3, eos_token_id = {} },
  }
  for way, shard in ms.sorted_pairs(ways) do
    for _, name in ipairs { "gpt2", "mistral" } do
      it(("gives each rank the tokens of one process: %s, %s"):format(name, way), function()
        local whole, model = load(name), shard(load(name))
        for run, o in ms.sorted_pairs(runs) do
          local _, want = whole:generate(texts, o)
          local _, got = model:generate(texts, o)
          assert.are.same(want, got, run)
        end
        local list = {}
        for id in model:stream(texts[1], runs.greedy) do list[#list + 1] = id end
        assert.are.same(select(2, whole:generate({ texts[1] }, runs.greedy))[1], list)
      end)
    end
  end

  it("gives each rank the tokens of one process: an encoder and a decoder", function()
    local function sharded(model)
      for _, part in ipairs { model.encoder, model.decoder } do
        for _, layer in ipairs(part.layers) do ms.fsdp.fully_shard(layer) end
      end
      return ms.fsdp.fully_shard(model)
    end
    local whole, model = load "t5", sharded(load "t5")
    local inputs = (ms.arange(0, 6 + 6 * rank, { dtype = "int64" }) * 5 + 1):remainder(32):reshape(1 + rank, 6)
    local mask = ms.ones({ 1 + rank, 6 }, { dtype = "int64" })
    mask:narrow(2, 5, 2):narrow(1, 1, 1):zero_()
    for run, o in ms.sorted_pairs(runs) do
      o.attention_mask = mask
      local _, want = whole:generate(inputs, o)
      local _, got = model:generate(inputs, o)
      assert.are.same(want, got, run)
    end
  end)

  it("raises on all ranks if one of them fails", function()
    local model = ways.fully_shard(load "gpt2")
    local ok, err = pcall(model.generate, model, texts, { max_new_tokens = 3, top_k = rank == 1 and -1 or nil })
    assert.is_false(ok)
    assert.matches("top_k", err)
  end)
end)
