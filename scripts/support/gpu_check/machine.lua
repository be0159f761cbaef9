-- SPDX-License-Identifier: MIT
--- What scripts/gpu_check runs on: the GPUs, the driver, the CUDA libraries and tools, PyTorch.
local ms = require "moonshard"

local function output(line)
  local f = io.popen("{ " .. line .. "; } 2>&1")
  local text = f:read "*a":gsub("%s+$", "")
  f:close()
  return text ~= "" and text or "not installed"
end

print("moonshard " .. ms.version .. ", commit " .. output "cat COMMIT 2>/dev/null || git log -1 --format='%h %cs'")
print("driver: " .. output [[command -v nvidia-smi >/dev/null &&
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader]])
for _, name in ipairs { "nvcc", "ncu", "compute-sanitizer" } do
  print(("%s: %s"):format(name, output(("command -v %s >/dev/null && %s --version | tail -n 1"):format(name, name))))
end
print("PyTorch: " .. output "python3 -c 'import torch; print(torch.__version__)' 2>/dev/null")
print("LD_LIBRARY_PATH: " .. (os.getenv "LD_LIBRARY_PATH" or "not set"))
if not ms.cuda.is_available() then
  io.stderr:write("cuda: ", ms.cuda.why_unavailable(), "\n")
  os.exit(1)
end
for k = 0, ms.cuda.device_count() - 1 do print(("cuda:%d %s"):format(k, ms.cuda.device_name(k))) end
