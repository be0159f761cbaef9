-- SPDX-License-Identifier: MIT
--- The plugin that nvcc builds: its target processors, exported symbols and dependencies.
local process = require "spec.support.process"

local build = os.getenv "MOONSHARD_BUILD" or "build"
if build:sub(1, 1) ~= "/" then build = process.root .. "/" .. build end
local plugin = build .. "/libmoonshard_cuda.so"

local function output(line)
  local f = assert(io.popen(line .. " 2>&1"))
  local text = f:read "*a"
  f:close()
  return text
end

local function it_built(name, fn)
  it(name, function()
    if not require("lfs").attributes(plugin) then return pending "this build has no CUDA plugin" end
    fn()
  end)
end

describe("the CUDA plugin", function()
  it_built("is compiled for sm_80 and sm_90a, with PTX for compute_90", function()
    local rules = io.open(build .. "/build.ninja")
    if not rules then return pending "not built by ninja" end
    local text = rules:read "*a"
    rules:close()
    local sources = 0
    for flags in text:gmatch "build [^\n]*moonshard_cuda%.dir/[^\n]*%.cu%.o: [^\n]*\n(.-)\n\n" do
      sources = sources + 1
      for _, code in ipairs { "arch=compute_80,code=[sm_80]", "arch=compute_90a,code=[sm_90a]",
        "arch=compute_90,code=[compute_90]" } do
        assert.is_truthy(flags:find(code, 1, true), code .. " is not in " .. flags)
      end
    end
    assert.is_true(sources >= 5, sources)
  end)

  it_built("exports its versioned table, and needs neither the toolkit's libraries nor the driver to load", function()
    local exported = {}
    for name in output(("nm -D --defined-only '%s'"):format(plugin)):gmatch "%x+ %u ([^\n]+)" do
      exported[#exported + 1] = name
    end
    assert.are.same({ "ms_cuda_table_v1" }, exported)
    local needed = output(("objdump -p '%s'"):format(plugin))
    assert.is_truthy(needed:find "NEEDED +libc%.so")
    assert.is_nil(needed:find "NEEDED +libcud")
  end)
end)
