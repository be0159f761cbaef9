-- SPDX-License-Identifier: MIT
--- Other compilers than this build's: each clang that is installed parses every C and C++ file with the options that
--- CMake gives it, warnings being errors. `scripts/test --clang N` also runs what that clang builds.
local json = require "cjson"
local process = require "spec.support.process"

describe("clang", function()
  local folder

  setup(function() folder = process.temp_folder() end)
  teardown(function() os.execute(("rm -rf '%s'"):format(folder)) end)

  --- Runs a shell line; returns its exit status and what it printed.
  local function sh(line)
    local out = folder .. "/out"
    local child = process.start({ "sh", "-c", line .. " 2>&1" }, { stdout = out })
    return child:wait(600) or child:stop(), process.read(out)
  end

  for _, version in ipairs { "14", "16" } do
    it(version .. " accepts every C and C++ file without a warning, and refuses a planted one", function()
      if process.tool then return pending "is not run under sanitizers or valgrind" end
      if sh("command -v clang++-" .. version) ~= 0 then return pending(("clang-%s is not installed"):format(version)) end
      local build = folder .. "/build" .. version
      local status, text = sh(("CC=clang-%s CXX=clang++-%s cmake -S '%s' -B %s -G Ninja -D MS_WERROR=ON"):format(version,
        version, process.root, build))
      assert.are.equal(0, status, text)
      status, text = sh(("ninja -C %s -t compdb"):format(build))
      assert.are.equal(0, status, text)

      local planted = folder .. "/planted.c"
      process.write(planted, "int f(void) { int never_read = 1; return 0; }\n")
      local lines, planted_line = {}, nil
      for _, c in ipairs(json.decode(text:match "%[\n.*$")) do
        local parse = c.command:match " %-c " and c.command:gsub(" %-c ", " -fsyntax-only "):gsub(" %-o %S+", "")
          :gsub(" %-M[TF] %S+", ""):gsub(" %-MD", "")
        if parse then lines[#lines + 1] = parse end
        if c.file:match "/runtime/base/base%.c$" then planted_line = parse:gsub("%S+/runtime/base/base%.c", planted) end
      end
      assert.is_true(#lines > 100, "only " .. #lines .. " files")
      -- The emulated GPU's files begin with one header, which takes most of the time of each: it is parsed once.
      local header, emulated = build .. "/cuda.pch", 0
      for k, line in ipairs(lines) do
        local before, file = line:match "^(.*) %-fsyntax%-only (%S+/emulated/%S+)$"
        if file then
          if emulated == 0 then
            status, text = sh(("%s -x c++-header '%s/kernels/cuda/cuda.h' -o %s"):format(before, process.root, header))
            assert.are.equal(0, status, text)
          end
          emulated = emulated + 1
          lines[k] = ("%s -include-pch %s -fsyntax-only %s"):format(before, header, file)
        end
      end
      assert.is_true(emulated > 20, emulated)
      process.write(build .. "/lines", table.concat(lines, "\n") .. "\n")
      status, text = sh(("cd %s && tr '\\n' '\\0' <lines | xargs -0 -n 1 -P 2 sh -c"):format(build))
      assert.are.equal(0, status, text)

      status, text = sh(planted_line)
      assert.are_not.equal(0, status)
      assert.matches("unused variable 'never_read'", text, nil, true)
    end)
  end
end)
