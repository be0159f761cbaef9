-- SPDX-License-Identifier: MIT
--- Models of Hugging Face's folders over ranks: from the files to shards, five steps as transformers', and back; and
--- what a rank allocates meanwhile.
local dist = require "moonshard.dist"
local folders = require "spec.support.hf_folders"
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local S = 8

-- Rank 0 makes a folder; all ranks get its path.
local function shared_folder(make)
  local path = dist.rank() == 0 and make() or nil
  return dist.broadcast_object(path, { src = 0 })
end

local function shard(model)
  for _, layer in ipairs(model.model.layers) do ms.fsdp.fully_shard(layer) end
  return ms.fsdp.fully_shard(model)
end

for _, world in ipairs { 1, 2, 4 } do
  ranks.describe(world, ("a model of transformers over %d ranks #mpi"):format(world), function(rank)
    for name, case in ms.sorted_pairs(folders.cases) do
      if case.losses then
        it("trains as in transformers, and goes back: " .. name, function()
          local folder = shared_folder(function() return (folders.make(name)) end)
          local model = shard(ms.hf.load(folder, { device = "meta" }))
          ms.hf.load_weights(model)
          local ids = (ms.arange(0, 4 * S, { dtype = "int64" }):reshape(4, S) * 5 + 1):remainder(32)
          ids = ids:narrow(1, rank * 4 / world + 1, 4 / world):contiguous()
          local p = model:parameters()
          local optimizer = name == "trained_gpt2" and ms.optim.SGD(p, { lr = 0.1, momentum = 0.9 })
            or ms.optim.AdamW(p, { lr = 1e-2, weight_decay = 0.1 })
          for step = 1, 5 do
            local loss = model(ids, { labels = ids })
            local mean = loss:detach():clone()
            dist.all_reduce(mean, { op = "avg" })
            assert.is_true(math.abs(mean:item() - case.losses[step]) < 1e-5)
            optimizer:zero_grad()
            loss:backward()
            optimizer:step()
          end
          ms.hf.save(model, folder .. "/out", { max_shard_size = 4000 })
          ms.fsdp.save(folder .. "/same", model, { format = "hf" })
          local ok, message = pcall(ms.fsdp.save, folder .. "/same", model, optimizer, { format = "hf" })
          assert.is_false(ok)
          assert.matches("format = 'hf' is a model alone", message)
          if rank == 0 then
            for key, t in pairs(ms.load(folder .. "/same/model.safetensors")) do
              assert.is_true(t:equal(ms.load(folder .. "/out/model.safetensors.index.json")[key]), key)
            end
            local tensors = ms.load(folder .. "/out/model.safetensors.index.json")
            for _, want in ipairs(case["end"]) do
              local t = tensors[want[1]]
              assert.is_true(math.abs(t:norm():item() - want[2]) < 1e-5 * math.max(1, want[2]), want[1])
              assert.is_true(folders.off(t:reshape(-1):narrow(1, 1, 3), want[3]) < 1e-5, want[1])
              tensors[want[1]] = nil
            end
            assert.is_nil(next(tensors))
            process.remove_folder(folder)
          end
        end)
      end
    end

    for _, name in ipairs { "bert_masked", "clip", "t5", "vit_classes", "whisper" } do
      it("reads its shards of the file, and writes it back: " .. name, function()
        local folder = shared_folder(function() return (folders.make(name)) end)
        local model = ms.fsdp.fully_shard(ms.hf.load(folder, { device = "meta" }))
        ms.hf.load_weights(model)
        ms.hf.save(model, folder .. "/out")
        if rank == 0 then
          local a, b = ms.load(folder .. "/model.safetensors"), ms.load(folder .. "/out/model.safetensors")
          for key, t in pairs(a) do assert.is_true(t:equal(b[key]), key) end
          process.remove_folder(folder)
        end
      end)
    end

    it("reads and writes without a rank that has the whole", function()
      local config = { model_type = "llama", vocab_size = 2000, hidden_size = 128, intermediate_size = 256,
        num_hidden_layers = 6, num_attention_heads = 4, tie_word_embeddings = true }
      local folder = shared_folder(process.temp_folder)
      if rank == 0 then ms.hf.save(ms.hf.create(config), folder .. "/whole", { max_shard_size = 1e6 }) end
      dist.barrier()
      local model = shard(ms.hf.load(folder .. "/whole", { device = "meta" }))
      local bytes, largest = 0, 0
      for _, p in ipairs(model:parameters()) do
        bytes, largest = bytes + p:numel() * 4, math.max(largest, p:numel() * 4)
      end
      assert.is_true(bytes > 4e6)
      local function peak_of(fn)
        collectgarbage()
        collectgarbage()
        local before = ms.memory_stats "cpu".allocated
        ms.reset_peak_memory_stats "cpu"
        fn()
        return ms.memory_stats "cpu".peak_allocated - before
      end
      local shares = bytes / world + 65536
      assert.is_true(peak_of(function() ms.hf.load_weights(model) end) <= shares + largest)
      assert.is_true(peak_of(function() ms.hf.save(model, folder .. "/out") end) <= 2 * largest + 65536)
      ms.hf.save(model, folder .. "/out.gguf", { dtype = "q8_0" })
      dist.barrier()
      if rank == 0 then
        ms.hf.save(ms.hf.load(folder .. "/whole"), folder .. "/whole.gguf", { dtype = "q8_0" })
        assert.is_true(process.read(folder .. "/whole.gguf") == process.read(folder .. "/out.gguf"))
        local a, b = ms.load(folder .. "/whole/model.safetensors.index.json"), ms.load(folder .. "/out/model.safetensors")
        for name, t in ms.sorted_pairs(a) do assert.is_true(t:equal(b[name]), name) end
        process.remove_folder(folder)
      end
    end)

    it("reads the weights beside adapters, and writes them after a merge", function()
      local folder = shared_folder(function() return (folders.make "llama") end)
      local model = ms.hf.load(folder, { device = "meta" })
      local lora = ms.nn.lora(model, { target = { "attn.q", "mlp.up" }, rank = 2 })
      shard(model)
      ms.hf.load_weights(model)
      local ids = folders.ids(S)
      assert.is_true(folders.off(model(ids), folders.cases.llama.logits) < 1e-5)   -- adapters begin with a product of 0
      assert.is_true(model.model.layers[1].attn.q.lora_A:full_tensor():abs():max():item() > 0)
      local ok, err = pcall(ms.hf.save, model, folder .. "/out")
      assert.is_false(ok)
      assert.is_truthy(err:find("the model has 'model.layers.1.attn.q.lora_A', which its architecture lacks", 1, true), err)
      ms.no_grad(function() model.model.layers[1].attn.q.lora_B:fill_(0.1) end)
      local want = model(ids):clone()
      lora:merge()
      ms.hf.save(model, folder .. "/out")
      dist.barrier()
      assert.is_true((ms.hf.load(folder .. "/out")(ids) - want):abs():max():item() < 1e-5)
      dist.barrier()
      if rank == 0 then process.remove_folder(folder) end
    end)

    it("raises on every rank what one rank reports", function()
      local folder = shared_folder(function() return (folders.make "llama") end)
      local model = shard(ms.hf.load(folder, { device = "meta" }))
      dist.barrier()
      if rank == 0 then os.remove(folder .. "/model.safetensors") end
      dist.barrier()
      local ok, err = pcall(ms.hf.load_weights, model)
      assert.is_false(ok)
      assert.is_truthy(err:find("has neither model.safetensors nor", 1, true), err)
      ok, err = pcall(ms.hf.save, model, folder .. "/out")
      assert.is_false(ok)
      assert.is_truthy(err:find("is on meta and has no values", 1, true), err)
      model:to_empty "cpu"
      ok, err = pcall(ms.hf.save, model, "/nowhere/at/all")
      assert.is_false(ok)
      assert.is_truthy(err:find("/nowhere/at/all", 1, true), err)
      dist.recover()
      dist.barrier()
      if rank == 0 then process.remove_folder(folder) end
    end)
  end)
end
