-- SPDX-License-Identifier: MIT
--- prepare.lua FOLDER [LIBRARY | --all | --module NAME]: translates the PTX of the build (../sm_90) into FOLDER and
--- writes FOLDER/index, the list of kernels; only files of PTX that changed, unless the translator did. With LIBRARY
--- compiles FOLDER/LIBRARY.c, with --all whatever is not compiled, in parallel, with --module translates one file. A
--- kernel's C is named by its hash, so it is compiled once. A folder `functions` has those of functions.cu instead, compiled.
local source = arg[0]:match "^(.*)/"
local root = source .. "/../../../.."
package.path = ("%s/?.lua;%s/?.lua;%s"):format(source, root, package.path)
local output = require "spec.support.process".output

local folder, what = arg[1], arg[2]
local of_functions = folder:find "/functions$" ~= nil
-- Contraction is off, as a PTX instruction rounds once; words of memory may be of any type; integers wrap around.
local FLAGS = "-std=gnu11 -ffp-contract=off -fno-math-errno -fno-trapping-math -fno-strict-aliasing -fwrapv -w -fPIC"

local function read(path)
  local f = io.open(path)
  local text = f and f:read "*a"
  if f then f:close() end
  return text
end
local function write(path, text)
  local f = assert(io.open(path .. ".new", "w"))
  f:write(text)
  f:close()
  os.rename(path .. ".new", path)
end
local function run(command)
  if os.execute(command) == 0 then return end
  io.stderr:write(("prepare.lua: '%s' failed\n"):format(command))
  os.exit(1)
end
--- Runs this script with each of the arguments, a process per processor.
local function each(arguments)
  local f = assert(io.popen(("xargs -P $(nproc) -L 1 luajit '%s' '%s'"):format(arg[0], folder), "w"))
  for _, a in ipairs(arguments) do f:write(a, "\n") end
  if not f:close() then os.exit(1) end
end

local function compile(library)
  local fma = (read "/proc/cpuinfo" or ""):find "%f[%w]fma%f[%W]" and "-mfma" or ""
  local at = ("%s/%s"):format(folder, library)
  -- A kernel with all formulas of elementwise operators would take a minute with -O1.
  local level = #read(at .. ".c") > 1000000 and "-O0" or "-O1"
  run(("gcc %s %s %s -shared -I'%s' -o '%s.so.'$$ '%s.c' -lm && mv '%s.so.'$$ '%s.so'"):format(level, FLAGS, fma, source, at, at, at, at))
end

--- Registers of each kernel on sm_80 and sm_90, from ptxas' reports.
local function registers(module)
  local out = {}
  for k, name in ipairs { ".sm_80.log", ".log" } do
    local kernel
    for line in (read(("%s/../sm_90/%s%s"):format(folder, module, name)) or ""):gmatch "[^\n]+" do
      kernel = line:match "Compiling entry function '([^']+)'" or kernel
      local n = line:match "Used (%d+) registers"
      if n and kernel then
        out[kernel] = out[kernel] or { 0, 0 }
        out[kernel][k] = tonumber(n)
      end
    end
  end
  return out
end

--- Translates a file of PTX: a line of the module's index for each kernel, "symbol module sizes shared threads
--- registers-on-sm_80 registers-on-sm_90 library".
local function module(name)
  local kernels, forms = require "translate".translate(read(("%s/../sm_90/%s.ptx"):format(folder, name)), name .. ".ptx")
  local stamp = output(("sha256sum '%s/runtime.h'"):format(source)):sub(1, 16)
  local used, index, list = registers(name), {}, {}
  for n, k in ipairs(kernels) do
    write(("%s/%s-%d.c"):format(folder, name, n), ("// %s\n// %s, runtime.h %s\n%s"):format(k.name, FLAGS, stamp, k.c))
  end
  for hash, n in (#kernels > 0 and output(("cd '%s' && sha256sum '%s'-*.c"):format(folder, name)) or ""):gmatch "(%x+)%s+[^\n]-%-(%d+)%.c" do
    local k = kernels[tonumber(n)]
    local r = used[k.name] or { 0, 0 }
    os.rename(("%s/%s-%s.c"):format(folder, name, n), ("%s/%s.c"):format(folder, hash:sub(1, 16)))
    index[tonumber(n)] = ("%s %s %s %d %d %d %d %s\n"):format(k.name, name, k.sizes[1] and table.concat(k.sizes, ",") or "-",
      k.shared, k.threads or 0, r[1], r[2], hash:sub(1, 16))
  end
  for op, n in pairs(forms) do list[#list + 1] = ("%s %d\n"):format(op, n) end
  table.sort(list)
  write(("%s/%s.opcodes"):format(folder, name), table.concat(list))
  write(("%s/%s.index"):format(folder, name), table.concat(index))
end

-- A compiler cache gives objects without PTX: then it is made now. A file of PTX with a key is up to date, but that of
-- functions.cu, which is no part of the build, only while the hash in the last key is `same`.
local function complete(same)
  local sources = of_functions and source .. "/functions.cu" or root .. "/kernels/cuda"
  for name in output(("find '%s' -name '*.cu'"):format(sources)):gmatch "([%w_]+)%.cu\n" do
    if of_functions and not same or not read(("%s/../sm_90/%s.key"):format(folder, name)) then
      run(("'%s/scripts/bench/support/ptx.sh' '%s/../sm_90' %s"):format(root, folder, name))
    end
  end
end

-- Compiles whatever is not compiled, the largest first.
local function compile_all()
  local missing, arguments = {}, {}
  for line in io.lines(folder .. "/index") do
    local library = line:match "%S+$"
    local size = #(read(("%s/%s.c"):format(folder, library)))
    if not read(("%s/%s.so"):format(folder, library)) then missing[#missing + 1] = { size, library } end
  end
  table.sort(missing, function(a, b) return a[1] > b[1] end)
  for k, m in ipairs(missing) do arguments[k] = m[2] end
  each(arguments)
end

local function translate()
  local translator = output(("cd '%s' && cat forms.lua translate.lua prepare.lua runtime.h functions.* | sha256sum"):format(source)):sub(1, 16)
  local before, modules = read(folder .. "/key") or "", {}
  complete(before:sub(1, 16) == translator)
  local key = translator .. "\n" .. output(("cd '%s/../sm_90' && sha256sum *.ptx"):format(folder))
  if key == before and read(folder .. "/index") then return end
  local same = before:sub(1, 16) == translator
  local known = {}
  for line in before:gmatch "[^\n]+" do known[line] = same end
  local all = {}
  for line, name in key:gmatch "(%x+%s+([%w_]+)%.ptx)" do
    all[#all + 1] = ("'%s/%s.index'"):format(folder, name)
    if not known[line] then modules[#modules + 1] = "--module " .. name end
  end
  if #all == 0 then
    io.stderr:write(("prepare.lua: there is no PTX in %s/../sm_90: the kernels are not compiled by nvcc\n"):format(folder))
    os.exit(1)
  end
  os.remove(folder .. "/key")
  each(modules)
  write(folder .. "/index", output("cat " .. table.concat(all, " ")))
  -- What an earlier translation left.
  local kept = {}
  for line in io.lines(folder .. "/index") do kept[line:match "%S+$"] = true end
  for file in output(("ls '%s'"):format(folder)):gmatch "[^\n]+" do
    local library = file:match "^(%x+)%.s?[co]$"
    if library and not kept[library] then os.remove(folder .. "/" .. file) end
  end
  if of_functions then compile_all() end
  write(folder .. "/key", key)
end

if not what then
  -- One process translates, the others wait.
  if os.getenv "MOONSHARD_PTX_LOCKED" then translate()
  else
    run(("mkdir -p '%s' && MOONSHARD_PTX_LOCKED=1 flock '%s/lock' luajit '%s' '%s'"):format(folder, folder, arg[0], folder))
  end
elseif what == "--module" then
  module(arg[3])
elseif what == "--all" then
  compile_all()
else
  compile(what)
end
