-- SPDX-License-Identifier: MIT
--- The parts of scripts/gpu_check, the most important ones first, because a call with little time runs only some.
local lfs = require "lfs"
local gpt2 = require "gpt2_step"
local process = require "spec.support.process"
local M = {}

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end
local function output(line) return process.output("{ " .. line .. "; } 2>/dev/null") end
local function build()
  local folder = os.getenv "MOONSHARD_BUILD" or "build"
  return folder:sub(1, 1) == "/" and folder or process.root .. "/" .. folder
end

--- The file of predicted times, made on any machine with nvcc.
function M.predictions() return build() .. "/predictions.json" end

--- The file of what operators give on the executor of the kernels' PTX, made on any machine with nvcc and gcc; and
--- whether it is there and not older than the kernels.
function M.results()
  local path = build() .. "/results.txt"
  local made, kernels = lfs.attributes(path, "modification"), lfs.attributes(build() .. "/libmoonshard_cuda.so", "modification")
  return path, made and made >= (kernels or 0)
end

--- Returns a function that returns why a part cannot be measured: which of these programs is not installed; nil if all
--- are installed. "python3:NAME" is a module of Python.
local function needs(...)
  local names = { ... }
  return function()
    for _, name in ipairs(names) do
      local module = name:match "^python3:(.*)$"
      local found
      if module then
        found = output("python3 -c 'import " .. module .. "; print(1)'"):find "1"
      else
        found = output("PATH=$PATH:/usr/local/cuda/bin command -v " .. name) ~= ""
      end
      if not found then return (module and "Python's " .. module or name) .. " is not installed" end
    end
  end
end

--- Folders of CUDA's libraries that the loader does not search: of the toolkit, and of Python's packages nvidia/*/lib.
function M.library_folders()
  local known = output [[ldconfig -p; ls $(echo "$LD_LIBRARY_PATH" | tr : ' ')]]
  local sites = output [[python3 -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))']]
  local patterns = { "/usr/local/cuda/lib64", "/usr/local/cuda/lib", "/usr/local/cuda/targets/*/lib" }
  for site in sites:gmatch "[^\n]+" do table.insert(patterns, quoted(site) .. "/nvidia/*/lib") end
  local folders, seen = {}, {}
  for _, name in ipairs { "libcublasLt.so.", "libcudnn.so." } do
    if not known:find(name, 1, true) then
      for _, pattern in ipairs(patterns) do
        local folder = output(("ls %s/%s[0-9]*"):format(pattern, name)):match "^([^\n]*)/[^/\n]*\n"
        if folder then
          if not seen[folder] then table.insert(folders, folder) end
          seen[folder] = true
          break
        end
      end
    end
  end
  return folders
end

-- These specs do not use the device under test: they choose the emulated GPU or the null device, or need none.
local ELSEWHERE = { emulator_spec = true, null_spec = true, kernel_table_spec = true, plugin_spec = true,
  cublaslt_spec = true, gpt2_bench_spec = true, gpu_check_spec = true, cudnn_spec = true, ptx_spec = true,
  ptx_forms_spec = true, ptx_checks_spec = true, ptx_machine_spec = true, results_spec = true }

--- The spec files that use device cuda, the most important ones first.
local function specs()
  local first = { "spec/cuda/copies_spec.lua", "spec/cuda/capture_spec.lua", "spec/cuda/device_spec.lua",
    "spec/kernels/ops_spec.lua" }
  local found, seen = {}, {}
  for _, path in ipairs(first) do seen[path] = true end
  for _, folder in ipairs { "spec/cuda", "spec/kernels", "spec/amp", "spec/nn", "spec/optim" } do
    local names = {}
    for name in lfs.dir(process.root .. "/" .. folder) do
      local path = folder .. "/" .. name
      if name:find "_spec%.lua$" and not ELSEWHERE[name:sub(1, -5)] and not seen[path] then
        local text = process.read(process.root .. "/" .. path)
        if folder == "spec/cuda" or text:find('"cuda', 1, true) or text:find("ms.cuda", 1, true) then
          table.insert(names, path)
        end
      end
    end
    table.sort(names)
    for _, path in ipairs(names) do table.insert(found, path) end
  end
  return first, found
end

--- The parts for a device; with spec files, only those.
---@return table[]  name, limit, command, env, spec (whether it is a spec file), missing (a function: why it cannot run),
---  step (rate, the name of what is measured, and tokens; if the part prints the lines of gpt2_measure.lua), vital (if
---  the part fails, no later one runs)
function M.list(device, files)
  local list, env, peers = {}, {}, {}
  local folders = M.library_folders()
  if #folders > 0 then
    local before = os.getenv "LD_LIBRARY_PATH"
    peers.LD_LIBRARY_PATH = before or false            -- PyTorch finds its own libraries
    env.LD_LIBRARY_PATH = table.concat(folders, ":") .. (before and ":" .. before or "")
  end
  env.PATH = (os.getenv "PATH" or "/usr/bin:/bin") .. ":/usr/local/cuda/bin"
  if output "id -u" == "0\n" then env.OMPI_ALLOW_RUN_AS_ROOT, env.OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1, 1 end
  env.OMPI_MCA_rmaps_base_oversubscribe, env.OMPI_MCA_hwloc_base_binding_policy = 1, "none"
  local function part(name, limit, command, more)
    more = more or {}
    local p = { name = name, limit = limit, command = command, spec = more.spec, missing = more.missing,
      step = more.step, vital = more.vital, env = {} }
    for key, value in pairs(env) do p.env[key] = value end
    for key, value in pairs(more.env or {}) do p.env[key] = value end
    table.insert(list, p)
  end
  local function spec(path, limit)
    part("spec " .. path, limit, { "busted", path }, { spec = true })
  end
  if #files > 0 then
    for _, path in ipairs(files) do spec(path, 120) end
    return list
  end

  local quick = device ~= "real" and "--quick" or nil
  local bench = process.root .. "/scripts/bench/"
  local function rates(group, limit, what, set)
    part("rates: " .. group .. (what or ""), limit, { "luajit", bench .. "support/gpu.lua", "--group", group, quick },
      { env = set })
  end
  local function torch(group, limit)
    part("PyTorch: " .. group, limit, { "python3", bench .. "support/peer_gpu.py", "--group", group, quick },
      { missing = needs("python3", "python3:torch"), env = peers })
  end
  local function checker(tool, limit)
    part("compute-sanitizer " .. tool, limit, { "compute-sanitizer", "--tool", tool, "--target-processes", "all",
      "--error-exitcode", "9", "luajit", bench .. "support/gpu.lua", "--quick" },
      { missing = needs "compute-sanitizer", env = { MOONSHARD_RATES = "/dev/null" } })
  end

  part("machine", 30, { "luajit", process.root .. "/scripts/support/gpu_check/machine.lua" }, { vital = true })
  if not lfs.attributes(M.predictions()) then
    part("predictions", 90, { "luajit", bench .. "support/gpu.lua", "--predict", M.predictions() },
      { env = { MOONSHARD_CUDA = "null" }, missing = needs("nvcc", "c++filt") })
  end
  if device == "null" then return list end
  local first, other = specs()
  -- The first minutes say which assumption about the GPU fails: copies, captured steps, then each operator's bits.
  local program, results, fresh = process.root .. "/scripts/support/gpu_check/results.lua", M.results()
  spec(first[1], 60)
  spec(first[2], 60)
  if not fresh then
    part("results of the PTX executor", 400, { "luajit", program, "--expected", results }, { missing = needs("nvcc", "gcc") })
  end
  -- Seconds on a GPU; the emulated one needs minutes on a loaded machine.
  part("results beside the PTX executor's", device == "real" and 150 or 900, { "luajit", program, results }, { missing = function()
    if not lfs.attributes(results) then return "there are no results of the PTX executor" end
  end })
  spec(first[3], 60)
  rates("memory", 20)
  rates("products", 30)
  spec(first[4], 150)
  local shape = quick and "tiny" or "124M"
  local step = { rate = ("step of GPT-2 %s, bfloat16"):format(shape), tokens = quick and 32 or 8192, shape = shape }
  local measure = { "luajit", bench .. "support/gpt2_measure.lua", shape, quick and "2" or "10" }
  part("GPT-2", 40, measure, { step = step })
  local function sharded(n)
    local what = n == 1 and "fully_shard in a world of one" or ("fully_shard, %d ranks"):format(n)
    local launch = n == 1 and {} or { "mpirun", "-n", tostring(n) }
    for _, word in ipairs(measure) do table.insert(launch, word) end
    table.insert(launch, "sharded")
    part("GPT-2, " .. what, 40, launch, { missing = n > 1 and needs "mpirun" or nil,
      step = { rate = step.rate .. ", " .. what, tokens = n * step.tokens } })
  end
  rates("attention", 30)
  rates("attention", 30, ", own kernels", { MOONSHARD_CUDNN = "off" })
  rates("kernels", 40)
  rates("steps", 20)
  sharded(1)
  sharded(2)
  local function peer(mode, limit)
    local words = { "python3", bench .. "support/peer_gpt2.py", "--mode", mode, "--runs", "10" }
    for name, value in pairs(gpt2.SHAPES[shape]) do
      table.insert(words, "--" .. name)
      table.insert(words, tostring(value))
    end
    part("PyTorch: GPT-2 " .. mode, limit, words, { step = step, env = peers,
      missing = needs("python3", "python3:torch") })
  end
  if device == "real" then
    torch("memory", 25)
    torch("products", 30)
    peer("eager", 40)
    torch("attention", 30)
    torch("kernels", 30)
    torch("steps", 20)
    part("ncu: kernels of GPT-2", 60, { "luajit", process.root .. "/scripts/support/gpu_check/kernels.lua" },
      { missing = needs "ncu" })
    checker("memcheck", 60)
  end
  part("GPT-2 by operator", 40, { measure[1], measure[2], measure[3], measure[4], "by-operator" },
    { step = step, env = { MOONSHARD_CUDA_SYNC = 1 } })
  for _, path in ipairs(other) do spec(path, 40) end
  if device == "real" then
    checker("racecheck", 60)
    peer("compiled", 90)
    part("products without cuBLASLt", 60, { "busted", "--filter=linear", first[4] },
      { spec = true, env = { MOONSHARD_CUBLAS = "off" } })
  end
  local runs = os.tmpname()
  os.remove(runs)
  local function training(name, launch, missing)
    part(name, 60, { "sh", "-c", [[
      out=$1 bytes=$2 launch=$3; shift 3; mkdir "$out" && trap 'rm -rf "$out"' EXIT
      cat docs/*.md docs/api/*.md | head -c "$bytes" >"$out/text" &&
        $launch luajit scripts/train.lua --device cuda --out "$out/run" --data "$out/text" --sample 0 "$@"]], "sh",
      runs, quick and "3000" or "10000000", launch, unpack(quick and { "--steps", "2", "--layers", "1", "--heads", "2",
        "--dim", "16", "--context", "16", "--batch", "2" } or { "--steps", "200", "--dtype", "bfloat16" }) },
      { missing = missing })
  end
  training("training", "")
  training("training, 2 ranks", "mpirun -n 2", needs "mpirun")
  return list
end

return M
