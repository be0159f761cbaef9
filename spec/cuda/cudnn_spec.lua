-- SPDX-License-Identifier: MIT
--- cuDNN compiles plans of flash attention for an H200 on a machine without a GPU: the library is real, the driver is a
--- stand-in, the device is a file of properties (spec/support/cuda/cudnn).
local process = require "spec.support.process"

local here = process.root .. "/spec/support/cuda/cudnn"

local function output(line)
  local f = assert(io.popen(line .. " 2>&1"))
  local text = f:read "*a"
  f:close()
  return text
end

describe("cuDNN's flash attention", function()
  local folder, missing

  setup(function()
    folder = process.temp_folder()
    missing = output(("'%s/driver.sh' '%s'"):format(here, folder))
    if missing == "" then
      missing = output(("gcc -O1 -Wall -Wextra -Werror -I/usr/local/cuda/include '%s/plans.c' -o '%s/plans' "
        .. "-L/usr/local/cuda/lib -L/usr/local/cuda/lib64 -lcudnn"):format(here, folder))
      if missing:find "cudnn%.h: No such file" or missing:find "cannot find %-lcudnn" then
        missing = "cuDNN is not installed"
      end
      assert.is_true(missing == "" or missing == "cuDNN is not installed", missing)
    end
  end)
  teardown(function() process.remove_folder(folder) end)

  --- The output of `plans` for a kind, with 8 x 12 heads of 1024 x `size`. driver: folder of the driver (default: the
  --- stand-in's).
  local function plan(kind, size, causal, driver)
    return output(("LD_LIBRARY_PATH='%s' '%s/plans' '%s/h200.json' %s 8 12 1024 %d %d"):format(driver or folder, folder,
      here, kind, size, causal and 1 or 0))
  end
  local function it_installed(name, fn)
    it(name, function()
      if missing ~= "" then return pending("not measured: " .. missing) end
      if process.tool then return pending "is not run under sanitizers or valgrind" end
      fn()
    end)
  end

  local scores = 2 * 8 * 12 * 1024 ^ 2
  for _, case in ipairs {
    { "forward", 64, true, 2 ^ 20 }, { "forward", 64, false, 2 ^ 20 }, { "forward", 128, true, 2 ^ 20 },
    { "backward", 64, true, 2 ^ 25 }, { "backward", 128, true, 2 ^ 25 },
    -- The deterministic backward has a workspace for the scores.
    { "deterministic", 64, true, scores + 2 ^ 20, scores }, { "deterministic", 128, true, scores + 2 ^ 20, scores },
  } do
    local kind, size, causal, most, least = unpack(case, 1, 5)
    local name = ("%s, heads of %d%s"):format(kind, size, causal and ", causal" or "")
    it_installed("has a plan for an H200: " .. name, function()
      local text = plan(kind, size, causal)
      local bytes = tonumber(text:match "^plan %d+ (%d+)\n$")
      assert.is_truthy(bytes, text)
      assert.is_true(bytes <= most and bytes >= (least or 0), text)
    end)
  end

  it_installed("is refused for heads that are not a multiple of 8, and without a driver", function()
    assert.matches("^refused all 0 engines", plan("forward", 65, true))
    if not output "ldconfig -p":find("libcuda.so.1", 1, true) then
      assert.matches("^refused", plan("forward", 64, true, "/"))
    end
  end)
end)
