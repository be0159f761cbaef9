-- SPDX-License-Identifier: MIT
--- The plugin that nvcc builds: its target processors, exported symbols and dependencies.
local process = require "spec.support.process"
local it_built = require "spec.support.it_built"("libmoonshard_cuda.so", "this build has no CUDA plugin")

local build = process.build
local plugin = build .. "/libmoonshard_cuda.so"

describe("the CUDA plugin", function()
  it_built("is compiled for sm_80 and sm_90, and as PTX for compute_80", function()
    local rules = io.open(build .. "/build.ninja")
    if not rules then return pending "not built by ninja" end
    local text = rules:read "*a"
    rules:close()
    local sources = 0
    for flags in text:gmatch "build [^\n]*moonshard_cuda%.dir/[^\n]*%.cu%.o: [^\n]*\n(.-)\n\n" do
      sources = sources + 1
      assert.is_truthy(flags:find("arch=compute_80,code=[compute_80,sm_80,sm_90]", 1, true), flags)
    end
    assert.is_true(sources >= 5, sources)
  end)

  it_built("exports its versioned table, and needs neither the toolkit's libraries nor the driver to load", function()
    local exported = {}
    for name in process.shell(("nm -D --defined-only '%s'"):format(plugin)):gmatch "%x+ %u ([^\n]+)" do
      exported[#exported + 1] = name
    end
    assert.are.same({ "ms_cuda_table_v1" }, exported)
    local needed = process.shell(("objdump -p '%s'"):format(plugin))
    assert.is_truthy(needed:find "NEEDED +libc%.so")
    assert.is_nil(needed:find "NEEDED +libcud")
  end)

  describe("without a usable driver", function()
    local folder
    setup(function() folder = process.temp_folder() end)
    teardown(function() os.execute(("rm -rf '%s'"):format(folder)) end)

    for _, case in ipairs {
      { "none", "no NVIDIA driver is installed (libcuda.so.1 is not found)" },
      { "one older than the plugin's CUDA", "the NVIDIA driver is too old: it supports CUDA 12.4, the plugin was built with",
        "-DDRIVER=12040" },
      { "one in which every call fails", "there is no CUDA device: ", "-DNOTHING" },
    } do
      it_built(("starts with %s, and gives the reason why the GPU is not used"):format(case[1]), function()
        if case[3] then
          local made = process.shell(("'%s/spec/support/cuda/cudnn/driver.sh' '%s' %s"):format(process.root, folder, case[3]))
          if made ~= "" then return pending(made) end
        elseif process.shell "ldconfig -p":find("libcuda.so.1", 1, true) then
          return pending "this machine has a driver"
        end
        process.write(folder .. "/script.lua", [[
          local ms = require "moonshard"
          print(ms.cuda.is_available(), ms.cuda.why_unavailable())
          print(select(2, pcall(ms.zeros, 2, { device = "cuda" })))
          print(ms.ones(2):sum():item())]])
        local text = process.shell(("cd '%s' && MOONSHARD_CUDA=real LD_LIBRARY_PATH=%s luajit '%s/script.lua'"):format(process.root,
          case[3] and folder or "''", folder))
        assert.is_truthy(text:find("false\t" .. case[2], 1, true), text)
        assert.is_truthy(text:find("device 'cuda:0' is not available: " .. case[2], 1, true), text)
        assert.matches("\n2\n$", text)
      end)
    end
  end)
end)
