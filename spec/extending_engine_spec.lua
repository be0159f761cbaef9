-- SPDX-License-Identifier: MIT
--- The recipes of docs/extending.md that change the engine: their `diff` blocks are applied to a copy of the sources,
--- the files that they change are compiled as the build does but without optimization, and each section's program runs
--- with that engine. A section's `c` block is a new file, the plugin of a transport. CUDA files are compiled for the
--- emulated GPU.
local engine = require "moonshard.core.ffi"
local lfs = require "lfs"
local process = require "spec.support.process"

local text = process.read(process.root .. "/docs/extending.md")

-- Sections with a diff: heading, diffs, program, what it prints.
local recipes = {}
for heading, section in (text:gsub("\n## ", "\n\1") .. "\1"):gmatch "\1([^\n]+)([^\1]*)" do
  local diffs = {}
  for diff in section:gmatch "\n```diff\n(.-)```" do diffs[#diffs + 1] = diff end
  if #diffs > 0 then
    recipes[#recipes + 1] = { heading = heading, diffs = diffs, plugin = section:match "\n```c\n(.-)```",
      program = section:match "\n```lua[^\n]*\n(.-)```", printed = section:match "\n```text\n(.-)```" }
  end
end

-- Files: C, those that include the lists of operators, optimizers and transports, and those that recipes add; CUDA.
local sources = { "kernels/rows/elementwise.c", "kernels/cpu/elementwise/elementwise.c", "runtime/train/optim.c",
  "runtime/comm/transport/transport.c" }
local cuda_sources = {}
for _, recipe in ipairs(recipes) do
  for _, diff in ipairs(recipe.diffs) do
    for path in diff:gmatch "%-%-%- /dev/null\n%+%+%+ b/(%S+%.c)\n" do sources[#sources + 1] = path end
    for path in diff:gmatch "\n%+%+%+ b/(%S+%.cu)\n" do cuda_sources[#cuda_sources + 1] = path end
  end
end

local function run(command)
  local output, code = process.shell(command)
  assert.are.equal(0, code, command .. "\n" .. output)
  return output
end

local build = engine.folder
local ninja = io.open(build .. "build.ninja")
local rules = ninja and ninja:read "*a"
if ninja then ninja:close() end

local function of_rule(output, name)
  local rule = rules:match("\nbuild " .. output:gsub("%p", "%%%0") .. "[ :].-\n\n")
  local flags = (rule:match("\n  " .. name .. " = ([^\n]*)") or ""):gsub("%-O%d", "-O0"):gsub("%-g1? ", "")
  return (flags:gsub("%-include %S+cmake_pch%.hxx", ""))                        -- it was parsed with optimization
end

-- Links the shared library whose file the pattern of ninja's rule gives, with other objects in place of the build's.
local function link(compiler, pattern, name, folder, objects, added)
  local library, inputs = rules:match("\nbuild (" .. pattern .. "): %w+_SHARED%S+ ([^|\n]*)")
  inputs = inputs:gsub("%S+", function(object) return objects[object] or build .. object end)
  run(("%s -shared -o %s/%s %s %s %s"):format(compiler, folder, name, inputs .. added, of_rule(library, "LINK_FLAGS"),
    of_rule(library, "LINK_LIBRARIES")))
end

describe("docs/extending.md, where it changes the engine,", function()
  if not rules then
    pending("needs an engine that was built with ninja")
    return
  end

  local folder = process.temp_folder()
  teardown(function() process.remove_folder(folder) end)

  it("has changes that apply and compile", function()
    run(("cd %s && cp -r cmake runtime kernels lua scripts CMakeLists.txt %s"):format(process.root, folder))
    for _, recipe in ipairs(recipes) do
      for _, diff in ipairs(recipe.diffs) do
        process.write(folder .. "/change.diff", diff)
        run(("cd %s && patch -p1 -s -F0 --no-backup-if-mismatch <change.diff"):format(folder))
      end
      if recipe.plugin then
        local path = folder .. "/runtime/" .. recipe.plugin:match "^// (%S+)"
        lfs.mkdir(path:match "^(.*)/")
        process.write(path, recipe.plugin)
      end
    end
    local objects, compile, added = {}, {}, ""
    for _, source in ipairs(sources) do
      local object = "CMakeFiles/moonshard.dir/" .. source .. ".o"
      local known = rules:find("\nbuild " .. object, 1, true) and object or "CMakeFiles/moonshard.dir/" .. sources[1] .. ".o"
      objects[object] = folder .. "/" .. source:gsub("/", "_") .. ".o"
      compile[#compile + 1] = ("cc %s %s -DMS_NO_CLONES -I%s/runtime -I%s/kernels -c %s/%s -o %s"):format(
        of_rule(known, "DEFINES"), of_rule(known, "FLAGS"), folder, folder, folder, source, objects[object])
      if known ~= object then added = added .. " " .. objects[object] end
    end
    assert.are.equal("", run(table.concat(compile, " & ") .. " & wait"))
    link("cc", "libmoonshard%.so[%d.]*", "libmoonshard.so", folder, objects, added)
    run(("cp %smoonshard_cdef.h %s"):format(build, folder))
  end)

  it("has kernels that give the CPU's bits on a GPU #cuda", function()
    if not rules:find "\nbuild libmoonshard_cuda_emulated" then pending "this build has no emulated GPU" end
    local objects, compile = {}, {}
    for _, source in ipairs(cuda_sources) do
      local name = source:match "([^/]+)%.cu$"
      local object = "CMakeFiles/moonshard_cuda_emulated.dir/emulated/" .. name .. ".cpp.o"
      objects[object] = folder .. "/" .. name .. ".o"
      compile[#compile + 1] = ("c++ -x c++ %s %s -I%s/runtime -I%s/kernels -I%s/kernels/cuda %s -c %s/%s -o %s"):format(
        of_rule(object, "DEFINES"), of_rule(object, "FLAGS"), folder, folder, folder, of_rule(object, "INCLUDES"), folder,
        source, objects[object])
    end
    assert.are.equal("", run(table.concat(compile, " & ") .. " & wait"))
    link("c++", "libmoonshard_cuda_emulated%.so", "libmoonshard_cuda_emulated.so", folder, objects, "")
    process.write(folder .. "/gpu.lua", [[
      local ms = require "moonshard"
      local t = ms.randn(300, 7)
      for _, back in ipairs { false, true } do
        print(ms.equal(t:ema(0.3, { back = back }), t:to "cuda":ema(0.3, { back = back }):to "cpu"))
      end
    ]])
    assert.are.equal("true\ntrue\n", run(("cd %s && MOONSHARD_CUDA=emulated LUA_PATH='lua/?.lua;lua/?/init.lua' "
      .. "MOONSHARD_LIB=%s/libmoonshard.so luajit gpu.lua"):format(folder, folder)))
  end)

  it("has a folder that becomes a transport's plugin", function()
    run(("cd %s && unset LD_PRELOAD; cmake -S . -B configured -G Ninja -D CMAKE_CXX_COMPILER=NOTFOUND -D NVCC=NVCC-NOTFOUND "
      .. "&& ninja -C configured transports && cp configured/libmoonshard_files.so . && mkdir messages"):format(folder))
  end)

  for _, recipe in ipairs(recipes) do
    it(("has a program for '%s' that prints the documented output"):format(recipe.heading), function()
      assert.is_truthy(lfs.attributes(folder .. "/libmoonshard.so"))
      process.write(folder .. "/program.lua", recipe.program)
      local command = ("LUA_PATH='%s/lua/?.lua;%s/lua/?/init.lua' MOONSHARD_LIB=%s/libmoonshard.so luajit program.lua")
        :format(folder, folder, folder)
      if recipe.plugin then                                                    -- two processes, as on two nodes
        local rank = "PMI_RANK=%d PMI_SIZE=2 MPI_LOCALRANKID=%d MPI_LOCALNRANKS=2 MOONSHARD_COMM_NODES=2 MESSAGES=messages "
          .. "timeout 60 env " .. command
        command = rank:format(1, 1) .. " & " .. rank:format(0, 0) .. " && wait $!"
      end
      assert.are.equal(recipe.printed, run("cd " .. folder .. " && { " .. command .. "; }"))
    end)
  end

  it("has all recipes", function() assert.are.equal(5, #recipes) end)
end)
