-- SPDX-License-Identifier: MIT
--- Checks of the GPU, its driver, and CUDA's libraries.
local engine = require "moonshard.core.ffi"
local lfs = require "lfs"
local rates = require "moonshard.run.rate"
local read = require "moonshard.tools.doctor.read"

local ffi, lib = engine.ffi, engine.lib

local M = {}

-- The number of NVIDIA GPUs on the PCI bus: vendor 0x10de, class 03 (display) of any kind.
local function on_bus()
  local n, folder = 0, "/sys/bus/pci/devices"
  if lfs.attributes(folder, "mode") ~= "directory" then return 0 end
  for name in lfs.dir(folder) do
    local at = folder .. "/" .. name
    if read.find(at .. "/vendor") == "0x10de" and (read.find(at .. "/class") or ""):find "^0x03" then n = n + 1 end
  end
  return n
end

function M.device(line)
  local driver = read.find("/proc/driver/nvidia/version", "Kernel Module%s+(%S+)")
  local present = on_bus()
  local count = lib.ms_cuda_count()
  if count == 0 then
    local why = ffi.string(lib.ms_cuda_why())
    if present == 0 and not driver then
      return line("good", "GPU", "none in this machine; the CPU is used")
    end
    return line("broken", "GPU", ("NVIDIA GPUs on the PCI bus: %d; driver %s; %s"):format(present, driver or "not loaded", why),
      driver and "fix the cause given above; scripts/setup builds the CUDA plugin if nvcc is installed"
        or "install the NVIDIA driver; start a container with --gpus all")
  end
  for k = 0, count - 1 do
    local name = lib.ms_cuda_name(k)
    local device = "cuda:" .. k
    local model = name ~= nil and ffi.string(name) or "?"
    if model:lower():find "emulated" or os.getenv "MOONSHARD_CUDA" == "null" then
      line("good", "GPU " .. k, model .. "; not measured")
    else
      local ok, rate = pcall(rates.measure, device, "bfloat16")
      if ok then
        line("good", "GPU " .. k, ("%s, driver %s; bfloat16 products %.0f TFLOP/s"):format(model, driver or "?",
          rate / 1e12))
      else
        line("broken", "GPU " .. k, ("%s: %s"):format(model, tostring(rate)), "nvidia-smi shows the device's state")
      end
    end
  end
end

-- The path of the first library that the loader finds whose name begins with `name`; nil if there is none. cache: the
-- output of ldconfig -p.
local function where(name, cache)
  for folder in (os.getenv "LD_LIBRARY_PATH" or ""):gmatch "[^:]+" do
    if lfs.attributes(folder, "mode") == "directory" then
      for entry in lfs.dir(folder) do
        if entry:sub(1, #name) == name then return folder .. "/" .. entry end
      end
    end
  end
  return cache:match("\n%s*" .. name:gsub("%p", "%%%0") .. "[%d.]* [^\n]*=> ([^\n]*)")
end

function M.libraries(line)
  local cache = "\n" .. read.run({ read.has "ldconfig" and "ldconfig" or "/sbin/ldconfig", "-p" }, 10)
  local found, missing = {}, {}
  for _, name in ipairs { "libcuda.so", "libcublasLt.so", "libcudnn.so", "libnccl.so" } do
    local path = where(name, cache)
    if path then found[#found + 1] = path else missing[#missing + 1] = name:sub(1, -4) end
  end
  local text = #found > 0 and table.concat(found, ", ") or "none found"
  if #missing > 0 and #found > 0 then text = text .. "; not found: " .. table.concat(missing, ", ") end
  if lib.ms_cuda_count() > 0 and not text:find "libcublasLt%.so" and os.getenv "MOONSHARD_CUDA" == nil then
    line("slow", "CUDA libraries", text, "install cuBLAS of the CUDA Toolkit; without it products are slow")
  else
    line("good", "CUDA libraries", text)
  end
end

return M
