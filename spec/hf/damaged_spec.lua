-- SPDX-License-Identifier: MIT
--- Truncated, flipped and hostile files of models and tokenizers: they are read, or an error names them, soon and
--- without much memory. 250 of each kind; MOONSHARD_LONG=1: 10,000. Some give NaNs that LuaJIT takes for other values.
local data = require "spec.support.tokenizer_data"
local ffi = require "ffi"
local folders = require "spec.support.hf_folders"
local ms = require "moonshard"
local process = require "spec.support.process"

local COUNT = os.getenv "MOONSHARD_LONG" and 10000 or 250
-- MiB more than before, at most. AddressSanitizer keeps 256 MiB of what is freed.
local MEMORY = os.getenv "MOONSHARD_TOOL" == "sanitize" and 768 or 256

-- What hostile files have in place of a value.
local VALUES = { "null", "[]", "{}", "-1", "0", "1e308", "1e9", '"x"', "true", "[[[[", '"', "}", "99999999999999999999",
  "\\u0000", "\239\187\191", '{"a":{"a":1}}', "0.5", "[null]" }

local function tokenizes(path)
  local t = ms.text.tokenizer(path)
  t:decode((t:encode("Hello wörld 12 to deal\255", { offsets = true })))
end

-- By kind: the file's name, what reads it, how the folder is made, and whether the file is binary, whose first bytes are
-- damaged more often than the others.
local KINDS = {
  ["config.json"] = { read = function(path) ms.hf.load(path:match "^(.*)/") end, make = function() end },
  ["model.safetensors.index.json"] = { read = function(path) ms.hf.load(path:match "^(.*)/") end,
    make = function(folder)
      local model = ms.hf.load(folder)
      os.remove(folder .. "/model.safetensors")
      ms.hf.save(model, folder, { max_shard_size = 4000 })
    end },
  ["model.safetensors"] = { read = function(path) ms.hf.load(path:match "^(.*)/") end, make = function() end, head = 1500 },
  ["model.gguf"] = { head = 2500, needs_pcre = true,
    read = function(path)
      ms.hf.load(path)
      tokenizes(path)
    end,
    make = function(folder)
      local model = ms.hf.create { model_type = "llama", vocab_size = 400, hidden_size = 16, intermediate_size = 24,
        num_hidden_layers = 1, num_attention_heads = 2 }
      process.write(folder .. "/tokenizer.json", data.read "llama3.json")
      model.family.folder = folder
      ms.hf.save(model, folder .. "/model.gguf")
    end },
}
for _, kind in ipairs { "gpt2", "llama2", "bert_cased", "t5" } do
  KINDS[kind .. ".json"] = { read = tokenizes, needs_pcre = true,
    make = function(folder) process.write(folder .. "/" .. kind .. ".json", data.read(kind .. ".json")) end }
end
for _, kind in ipairs { "unigram", "bpe" } do
  KINDS[kind .. ".model"] = { read = tokenizes, needs_pcre = true, head = 6000,
    make = function(folder) process.write(folder .. "/" .. kind .. ".model", data.read(kind .. ".model")) end }
end

-- Returns a function that makes numbers from 0 to n - 1.
local function numbers(seed)
  return function(n)
    seed = seed * 16807 % 2147483647
    return seed % n
  end
end

local function damaged(text, random, kind)
  local way, n = random(4), #text
  if kind.head and random(4) > 0 then n = math.min(n, kind.head) end
  local at = 1 + random(n)
  if way == 0 then return text:sub(1, at - 1) end
  if way == 1 then
    for _ = 0, random(3) do
      at = 1 + random(n)
      text = text:sub(1, at - 1) .. string.char(random(256)) .. text:sub(at + 1)
    end
    return text
  end
  local value = VALUES[1 + random(#VALUES)]
  if way == 2 then return text:sub(1, at) .. value .. text:sub(at + random(20)) end
  local first, last = text:find(kind.head and "...." or ":%s*[^,{}%[%]]+", at)
  if not first then return text:sub(1, at) end
  return text:sub(1, first - 1) .. (kind.head and "\255\255\255\127" or ": " .. value) .. text:sub(last + 1)
end

local function resident()
  local pages = tonumber(process.read("/proc/self/statm"):match "%d+ (%d+)")
  return pages * 4096 / 2 ^ 20
end

describe("a damaged file", function()
  local has_pcre = pcall(ffi.load, "libpcre2-8.so.0")
  for name, kind in ms.sorted_pairs(KINDS) do
    if not kind.needs_pcre or has_pcre then
      it(("is read, or named: %s"):format(name), function()
        local folder = folders.make "llama"
        finally(function() process.remove_folder(folder) end)
        kind.make(folder)
        local path = folder .. "/" .. name
        local text, random, failures = process.read(path), numbers(11), 0
        kind.read(path)
        collectgarbage()
        local before, slow = resident(), 0
        for k = 1, COUNT do
          process.write(path, damaged(text, random, kind))
          local start = os.clock()
          local ok, err = pcall(kind.read, path)
          slow = math.max(slow, os.clock() - start)
          if not ok then
            failures = failures + 1
            err = tostring(err)
            assert.is_truthy(err:find(folder, 1, true), err)
            assert.is_nil(err:find("attempt to", 1, true), err)
          end
          if k % 100 == 0 then collectgarbage() end
        end
        assert.is_true(failures > COUNT / 4, failures .. " files of " .. COUNT .. " were refused")
        assert.is_true(slow < 5, ("a file took %.1f s of the processor"):format(slow))
        assert.is_true(resident() < before + MEMORY, ("%.0f MiB more than before"):format(resident() - before))
      end)
    end
  end
end)
