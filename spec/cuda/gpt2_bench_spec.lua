-- SPDX-License-Identifier: MIT
--- The measuring part of scripts/bench/gpt2, on the emulated GPU, with a stub in place of the Python that has PyTorch.
local lfs = require "lfs"
local process = require "spec.support.process"


--- The output of the benchmark on a tiny shape; peer: the stub, a shell script; options: further ones.
local function measured(peer, options)
  local folder = process.temp_folder()
  process.write(folder .. "/python", "#!/bin/sh\n" .. (peer or "exit 1\n"))
  os.execute(("chmod +x '%s/python'"):format(folder))
  local child = process.start({ "sh", "-c", 'cd "$0" && exec scripts/bench/gpt2 --quick ' .. (options or ""), process.root },
    { stdout = folder .. "/out", stderr = folder .. "/err",
      env = { MOONSHARD_CUDA = "emulated", MOONSHARD_PEER_PYTHON = folder .. "/python", MOONSHARD_BUILD = process.build } })
  local code = child:wait(300)
  local out, err = process.read(folder .. "/out"), process.read(folder .. "/err")
  process.remove_folder(folder)
  assert.are.equal(0, code, out .. err)
  return out
end

describe("scripts/bench/gpt2", function()
  it("measures a step, its memory and its operators on the device", function()
    local out = measured()
    assert.matches("\ncase: step of GPT%-2 tiny on emulated GPU .- best +[%d.]+ m?s", out)
    assert.matches("\n# measured: %d+ tokens/s; [%d.]+ %% of the rate of a large product %(%d+ TF/s%); peak %d+ MiB\n",
      out)
    for _, operator in ipairs { "attention_backward", "linear", "layer_norm", "AdamW.step" } do
      assert.matches("\n# " .. operator .. " +%d+ +[%d.]+ +%-\n", out)
    end
    assert.not_matches("PyTorch", out)
  end)

  it("compares with PyTorch eager and compiled, and reports why one of them was not measured", function()
    local out = measured [[
      case "$*" in
        "-c import torch") exit 0 ;;
        *"--mode eager"*"--batch 2"*"--dim 16"*"--vocab 64"*)
          echo "version 2.9"; echo "step 0.5"; echo "step 0.25"; echo "peak 4194304" ;;
        *) echo "version 2.9"; echo "unavailable PyTorch 2.9 has no GPU" ;;
      esac
    ]]
    assert.matches("\ncase: step of GPT%-2 tiny, PyTorch 2%.9, eager +best +250%.000 ms +median +375%.000 ms\n", out)
    assert.matches("\n# measured: PyTorch, eager: 128 tokens/s; peak 4 MiB\n", out)
    assert.matches("\nbar: GPT%-2 tiny: speed relative to PyTorch, eager +[%d.]+ >= 1 ", out)
    assert.matches("\n# measured: PyTorch 2%.9, compiled: not available: PyTorch 2%.9 has no GPU\n", out)
  end)

  for n, words in ipairs { "1 rank", "2 ranks" } do
    it("measures the step sharded over " .. words .. " beside the unsharded one", function()
      local out = measured(nil, "--ranks " .. n)
      assert.matches("\ncase: step of GPT%-2 tiny on emulated GPU .- best +[%d.]+ m?s", out)
      assert.matches("\ncase: the same, sharded over " .. words .. " +best +[%d.]+ m?s", out)
      assert.matches("\n# measured: %d+ tokens/s on " .. words .. ", %d+ unsharded; peak of rank 0 %d+ MiB, unsharded %d+\n", out)
      assert.are.equal(n == 1, out:find("time of a world of one / unsharded", 1, true) ~= nil)
    end)
  end

  it("counts the step sharded over ranks of a node, on the null device", function()
    if not lfs.attributes(process.build .. "/libmoonshard_cuda_null.so") then
      return pending "this build has no null device: there is no nvcc"
    end
    -- --quick: otherwise the emulated GPU, if specs run on it, would compute the step of 124M.
    local command = "MOONSHARD_BUILD='%s' env -u MOONSHARD_CUDA scripts/bench/gpt2 --quick --ranks 2"
    local out = process.shell(command:format(process.build))
    assert.matches("# counted on rank 0 of 2: %d+ launches, 150 products, %d+ copies on the device of %d+ MB; peak %d+ MiB\n",
      out)
    for _, bar in ipairs { "waits by the host", "bytes to the host" } do
      assert.matches(("\nbar: %s +0 <= 0 "):format(bar), out)
    end
  end)
end)
