-- SPDX-License-Identifier: MIT
--- Moonshard: `local ms = require "moonshard"`. Submodules are loaded when they are first used; an unknown name is an
--- error that suggests the most similar one.
-- Training programs need more traces and machine code than LuaJIT allows by default. -fuse turns operand fusion off: on
-- x86, LuaJIT 2.1.0-beta3 moves the load of a C struct's field into the instruction that uses it, also past a C call
-- that changes the field. `a.ndim ~= b.ndim - 1` then compared b's number with itself (spec/core/compiled_spec;
-- github.com/LuaJIT/LuaJIT/issues/1117 is of the same kind).
-- On ARM64 a test of one bit or of a sign jumps at most 32 KiB, and LuaJIT does not check it: longer machine code went
-- on at a wrong place and crashed. An instruction takes 12 to 18 bytes: maxrecord=1500 keeps code below that. What
-- beta3 compiles for ARM64 loses values now and then, with all optimizations and without any: its compiler stays off.
jit.opt.start("maxtrace=8000", "maxrecord=16000", "maxsnap=2000", "maxmcode=32768", "sizemcode=256", "-fuse")
if jit.arch == "arm64" then
  jit.opt.start "maxrecord=1500"
  if jit.version == "LuaJIT 2.1.0-beta3" then jit.off() end
end

local errors = require "moonshard.core.errors"
local tensor = require "moonshard.tensor"

local engine = require "moonshard.core.ffi"
local opts = require "moonshard.core.opts"

---@class moonshard
local ms = { version = engine.ffi.string(engine.lib.ms_release_name()) }

local function merge(module, ...)
  for k = 1, select("#", ...) do
    local name = select(k, ...)
    ms[name] = module[name]
  end
end

ms.Tensor = tensor.Tensor
ms.is_tensor = tensor.is_tensor
require "moonshard.autograd.methods"
merge(require "moonshard.tensor.ops", "where")
merge(require "moonshard.tensor.shape", "cat", "stack")
merge(require "moonshard.tensor.rearrange", "hstack", "vstack", "meshgrid")
merge(require "moonshard.tensor.products", "einsum")
merge(require "moonshard.tensor.draws", "randperm", "normal")
for name, fn in pairs(require "moonshard.tensor.diagonals") do ms[name] = fn end
for name, fn in pairs(require "moonshard.tensor.number_types") do ms[name] = fn end
for name, fn in pairs(require "moonshard.tensor.free") do ms[name] = fn end
for name, fn in pairs(require "moonshard.tensor.create") do ms[name] = fn end
merge(require "moonshard.core.dtypes", "default_dtype", "set_default_dtype", "default_device", "set_default_device")
merge(require "moonshard.tensor.scope", "scope", "steps", "keep")
merge(require "moonshard.autograd", "grad", "no_grad", "enable_grad", "inference_mode", "is_grad_enabled",
  "set_grad_enabled")
merge(require "moonshard.autograd.anomaly", "detect_anomaly", "set_detect_anomaly")
merge(require "moonshard.autograd.function", "Function", "checkpoint")
merge(require "moonshard.autograd.capture", "capture")
merge(require "moonshard.autograd.sparse", "sparse_coo")
merge(require "moonshard.tensor.random", "manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
merge(require "moonshard.core.log", "warn", "log", "catch_warnings")
for name, fn in pairs(require "moonshard.tensor.util") do ms[name] = fn end

opts.seal(ms)

local slow = require "moonshard.core.processor".warning(jit.arch, engine.ffi.string(engine.lib.ms_cpu_isa()),
  os.getenv "MOONSHARD_ISA", require "moonshard.core.launcher"().rank)
if slow then ms.warn(slow) end

-- Names that are loaded at their first use: modules, and functions in modules.
local modules = { "nn", "dist", "fsdp", "optim", "amp", "data", "profiler", "run", "plot", "metrics", "testing",
  "distributions", "text", "hf" }
local moved = { fsdp = "parallel.fsdp", profiler = "tools.profiler", metrics = "tools.metrics",
  testing = "tools.testing" }
local functions = { save = "io.files", load = "io.files", memory_report = "tools.memory",
  record_memory_history = "tools.memory", lr_range_test = "tools.lr_range" }
local parts = { nn = { "F", "init", "utils", "Module" }, optim = { "lr_scheduler", "swa_utils" }, fsdp = { "wrap" },
  data = { "transforms" } }
local elsewhere = { doctor = "tools.doctor", cuda = "tools.cuda" }
-- Names of version 1.0 whose functions are in another module now.
local former = { data = { tokenizer = function() return ms.text.tokenizer end,
  train_tokenizer = function() return ms.text.train_bpe end } }
for name, from in pairs(functions) do elsewhere[name] = from end
for _, name in ipairs(modules) do elsewhere[name] = moved[name] or name end

setmetatable(ms, {
  __name = "moonshard",
  modules = modules,
  __tostring = function() return "moonshard: tensors " .. table.concat(modules, " ") end,
  __index = function(_, name)
    local from = elsewhere[name]
    if from then
      local path = "moonshard." .. from
      if not package.loaded[path] and not package.searchpath(path, package.path) then
        errors.raise("'%s' is not in this version of moonshard", name)
      end
      local module = require(path)
      if type(module) == "table" then opts.seal(module) end
      for _, part in ipairs(parts[name] or {}) do opts.seal(module[part]) end
      local value = functions[name] and module[name] or module
      if former[name] or value == module and type(module) == "table" and getmetatable(module) == nil then
        errors.closed(module, name, former[name])
      end
      rawset(ms, name, value)
      return value
    end
    errors.raise("%s", errors.unknown_in("moonshard", name, errors.names(ms, elsewhere)))
  end,
})

package.loaded.moonshard = ms

local profile = os.getenv "MOONSHARD_PROFILE"
if profile and profile ~= "" then ms.profiler._whole_script(profile) end

-- Under `luajit -i`, tools/repl.lua replaces LuaJIT's prompt.
for at = -1, -16, -1 do
  if arg and arg[at] == "-i" then
    local path = "moonshard.tools.repl"
    require(path).take_over()
  end
end

return ms
