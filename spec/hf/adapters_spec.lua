-- SPDX-License-Identifier: MIT
--- Adapters in PEFT's files: results equal to PEFT's, and the same files back.
local lfs = require "lfs"
local folders = require "spec.support.hf_folders"
local golden = require "spec.support.golden"
local message = require "spec.support.message"
local ms = require "moonshard"
local process = require "spec.support.process"

local cases = golden.load "peft"
local json = require "cjson"

describe("adapters of PEFT", function()
  local made
  before_each(function() made = {} end)
  after_each(function()
    for _, folder in ipairs(made) do process.remove_folder(folder) end
  end)
  local function keep(folder)
    made[#made + 1] = folder
    return folder
  end

  for name, case in ms.sorted_pairs(cases) do
    it("give its logits, and the same files back: " .. name, function()
      local model = ms.hf.load(keep((folders.make(name))))
      local from, to = keep(folders.adapter(case)), keep(process.temp_folder())
      local adapters = ms.hf.load_adapter(model, from)
      assert.is_true(folders.off(model(folders.ids(8)), case.logits) < 1e-5)
      ms.hf.save_adapter(adapters, to .. "/new")
      local before, after = ms.load(from .. "/adapter_model.safetensors"), ms.load(to .. "/new/adapter_model.safetensors")
      local n = 0
      for key, t in pairs(after) do
        n = n + 1
        assert.are.same(before[key]:tolist(), t:tolist(), key)
      end
      assert.are.equal(#case.tensors, n)
      local config = json.decode(process.read(to .. "/new/adapter_config.json"))
      for _, key in ipairs { "r", "lora_alpha", "fan_in_fan_out", "peft_type", "task_type" } do
        assert.are.equal(case.config[key], config[key], key)
      end
      table.sort(case.config.target_modules)
      assert.are.same(case.config.target_modules, config.target_modules)
      -- The merged model has the same results; an unmerged one is not a model's folder.
      assert.is_truthy(message(ms.hf.save, model, to .. "/model"):find "of adapters, call merge%(%) first")
      adapters:merge()
      ms.hf.save(model, to .. "/model")
      assert.is_true(folders.off(ms.hf.load(to .. "/model")(folders.ids(8)), case.logits) < 1e-5)
      local direct = ms.hf.load(model.family.folder, { adapter = from })
      assert.is_true(folders.off(direct(folders.ids(8)), case.logits) < 1e-5)
      for _, p in ipairs(direct:parameters()) do assert.is_true(p.requires_grad) end
    end)
  end

  it("that name another model get a warning, which names both", function()
    local base = keep((folders.make "llama"))
    local same = "other/" .. base:match "[^/]*$" .. "/"
    local link = base .. "-link"
    lfs.link(base, link, true)
    finally(function() os.remove(link) end)
    for name, expected in pairs { [base] = 0, [same] = 0, [link] = 0, ["."] = 0, model = 0, ["meta-llama/Llama-9"] = 1 } do
      local from = keep(folders.adapter(cases.llama, { base_model_name_or_path = name }))
      local warnings = ms.catch_warnings(function() return ms.hf.load(base, { adapter = from }) end)
      assert.are.equal(expected, #warnings, name)
      if expected == 1 then
        assert.are.equal(("hf.load_adapter: '%s' has adapters for the model '%s', but gets '%s': are these the same weights?")
          :format(from, name, base), warnings[1])
      end
    end
  end)

  it("are no model alone, and need one with weights", function()
    local from = keep(folders.adapter(cases[next(cases)]))
    for _, fn in ipairs { ms.hf.load, ms.text.tokenizer } do
      assert.matches("' has only adapters; ms.hf.load%(FOLDER, { adapter = '", message(fn, from))
    end
    assert.matches("option 'device' is a string %('meta'%), expected a device with the weights",
      message(ms.hf.load, "any", { adapter = from, device = "meta" }))
  end)

  for label, row in ms.sorted_pairs {
    ["another kind of adapters"] = { { peft_type = "IA3" }, "key 'peft_type' is 'IA3'; only 'LORA' is supported" },
    ["an option that Moonshard lacks"] = { { use_dora = true }, "key 'use_dora' is true, which Moonshard does not have" },
    ["initial adapters that change the weights"] = { { init_lora_weights = "pissa_niter_4" },
      "key 'init_lora_weights' is 'pissa_niter_4', which changes the model's weights, too" },
    ["ranks by layer"] = { { rank_pattern = { q_proj = 4 } }, "key 'rank_pattern' is" },
    ["another rank than the tensors'"] = { { r = 4 }, "key 'r' is 4, but 'base_model.model.model.layers.0." },
    ["a missing rank"] = { { r = json.null }, "key 'r' is missing" },
  } do
    it("are refused for " .. label, function()
      local model = ms.hf.load(keep((folders.make "llama")))
      local text = message(ms.hf.load_adapter, model, keep(folders.adapter(cases.llama, row[1])))
      assert.is_truthy(text:find(row[2], 1, true), text)
      assert.is_truthy(text:find("adapter_config.json", 1, true), text)
    end)
  end

  it("are refused for a model without their layers", function()
    local model = ms.hf.load(keep((folders.make "gpt2")))
    local text = message(ms.hf.load_adapter, model, keep(folders.adapter(cases.llama)))
    assert.is_truthy(text:find("the model has no layer for 'base_model.model.model.layers.0", 1, true), text)
  end)

  it("of a run are found in its folder, and refused for its model, which has them", function()
    local run = keep(process.temp_folder())
    assert(os.rename(folders.make "llama", run .. "/model"))
    assert(os.rename(folders.adapter(cases.llama), run .. "/adapter"))
    assert.are.equal(("hf.load_adapter: '%s/model' has the adapters of '%s/adapter' already: they belong to the model "
      .. "that the run began with"):format(run, run), message(ms.hf.load, run .. "/model", { adapter = run }))
    local base = ms.hf.load(keep((folders.make "llama")), { adapter = run })
    assert.is_true(folders.off(base(folders.ids(8)), cases.llama.logits) < 1e-5)
  end)

  it("are refused for a layer that is no target", function()
    local model = ms.hf.load(keep((folders.make "llama")))
    local targets = { unpack(cases.llama.config.target_modules) }
    local gone = table.remove(targets, 1)
    local text = message(ms.hf.load_adapter, model, keep(folders.adapter(cases.llama, { target_modules = targets })))
    assert.matches("adapter_model.safetensors' has 'base_model.model.[^']*%." .. gone
      .. ".lora_A.weight', whose layer is not among target_modules in adapter_config.json", text)
  end)

  it("are refused if a layer is missing or a number is not finite", function()
    local model = ms.hf.load(keep((folders.make "llama")))
    local folder = keep(folders.adapter(cases.llama))
    local path = folder .. "/adapter_model.safetensors"
    local all, names = ms.load(path), {}
    for name in ms.sorted_pairs(all) do names[#names + 1] = name end
    local layer = names[1]:match "^(.*)lora_[AB]"
    for gone, text in pairs { ["lora_B"] = "has no '" .. layer .. "lora_B", ["lora_[AB]"] = "and lacks" } do
      local some = {}
      for name, t in pairs(all) do
        if not name:find("^" .. layer:gsub("%p", "%%%0") .. gone) then some[name] = t end
      end
      ms.save(path, some)
      local said = message(ms.hf.load_adapter, model, folder)
      assert.is_truthy(said:find(text, 1, true), said)
      assert.is_truthy(said:find("adapter_model.safetensors", 1, true), said)
    end
    for _, value in ipairs { 0 / 0, math.huge } do
      local some = {}
      for name, t in pairs(all) do some[name] = t:clone() end
      some[names[1]]:select(1, 1):narrow(1, 1, 1):fill_(value)
      ms.save(path, some)
      local said = message(ms.hf.load_adapter, model, folder)
      assert.is_truthy(said:find("'" .. names[1] .. "' has NaN or an infinity", 1, true), said)
    end
  end)
end)
