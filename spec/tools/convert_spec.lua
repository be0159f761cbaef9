-- SPDX-License-Identifier: MIT
--- scripts/convert: files of torch.save as safetensors. What it reads is written by PyTorch, where there is one.
local ms = require "moonshard"
local process = require "spec.support.process"

local python = os.getenv "MOONSHARD_PEER_PYTHON" or "python3"
local folder

local function sh(line)
  local pipe = io.popen(("cd '%s' && { %s; } 2>&1; echo \" status $?\""):format(process.root, line))
  local text = pipe:read "*a"
  pipe:close()
  local out, status = text:match "^(.*) status (%d+)\n$"
  return out, tonumber(status)
end

local function convert(words) return sh(("'%s' scripts/convert %s"):format(python, words)) end

before_each(function() folder = process.temp_folder() end)
after_each(function() process.remove_folder(folder) end)

describe("scripts/convert", function()
  local has_torch = select(2, sh(("'%s' -c 'import torch'"):format(python))) == 0

  it("refuses words that it does not know, and says what it needs", function()
    assert.are.same({ "scripts/convert: unknown option '--kye'; --help lists the options\n", 1 }, { convert "--kye a b" })
    assert.are.equal(2, select(2, convert "a"))
    process.write(folder .. "/torch.py", "raise ImportError")            -- as if there was none
    local out, status = sh(("PYTHONPATH='%s' '%s' scripts/convert a b"):format(folder, python))
    assert.are.equal(1, status)
    assert.matches("PyTorch is missing in [^\n]*, and only it reads files of torch%.save: pip install torch\n$", out)
  end)

  local function it_with_torch(name, fn)
    it(name, function()
      if not has_torch then return pending "PyTorch is missing; MOONSHARD_PEER_PYTHON names an interpreter that has it" end
      fn()
    end)
  end

  it_with_torch("writes tensors of every dtype, views and nested tables", function()
    process.write(folder .. "/make.py", [[
import sys, torch
x = torch.arange(6.).reshape(2, 3)
torch.save({"model": {"w": x.t(), "half": x.bfloat16(), "n": torch.tensor(3), "empty": torch.zeros(0, 2)},
            "list": [torch.tensor([True, False]), 5], "epoch": 7}, sys.argv[1])
]])
    local pt, out = folder .. "/a.pt", folder .. "/a.safetensors"
    assert.are.equal(0, select(2, sh(("'%s' '%s/make.py' '%s'"):format(python, folder, pt))))
    assert.are.same({ "scripts/convert: left out 2 values that are not tensors: list.1, epoch\n", 0 },
      { convert(("'%s' '%s'"):format(pt, out)) })
    local tensors = ms.load(out)
    assert.are.same({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, tensors["model.w"]:tolist())
    assert.are.equal("bfloat16", tensors["model.half"].dtype)
    assert.are.same({ { 0, 1, 2 }, { 3, 4, 5 } }, tensors["model.half"]:tolist())
    assert.are.equal(3, tensors["model.n"]:item())
    assert.are.equal("[0, 2]", tostring(tensors["model.empty"].shape))
    assert.are.same({ true, false }, tensors["list.0"]:tolist())
    assert.are.same({ "", 0 }, { convert(("--key model '%s' '%s'"):format(pt, out)) })
    assert.are.equal(3, ms.load(out).n:item())
    assert.are.same({ ("scripts/convert: '%s' has no entry 'net' (entries: model, list, epoch)\n"):format(pt), 1 },
      { convert(("--key net '%s' '%s'"):format(pt, out)) })
  end)

  it_with_torch("says why a file cannot be read or written", function()
    process.write(folder .. "/bad.pt", "this is no file of torch.save")
    local out, status = convert(("'%s/bad.pt' '%s/b'"):format(folder, folder))
    assert.are.equal(1, status)
    assert.is_truthy(out:find(("scripts/convert: PyTorch cannot read '%s/bad.pt' as tensors: "):format(folder), 1, true), out)
    assert.are.same({ ("scripts/convert: there is no file '%s/none'\n"):format(folder), 1 },
      { convert(("'%s/none' '%s/b'"):format(folder, folder)) })
  end)
end)
