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

      -- The files of each set of options, and the sets in order. One process parses many files, which `clang -cc1` can
      -- do and the driver cannot: to start a process for each takes as long as to parse them.
      local options, files, count = {}, {}, 0
      for _, c in ipairs(json.decode(text:match "%[\n.*$")) do
        local before = c.command:match "(%S*clang.*) %-o %S+ %-c "
        if before then
          before = before:gsub(" %-M[TF] %S+", ""):gsub(" %-MD", "")
          if c.file:find("/emulated/", 1, true) then before = before .. " -include-pch cuda.pch" end
          if not files[before] then
            options[#options + 1], files[before] = before, {}
          end
          table.insert(files[before], c.file)
          count = count + 1
        end
      end
      assert.is_true(count > 100, "only " .. count .. " files")

      -- The line that parses files with these options.
      local function parse(before, list)
        local driver, lines = sh(("cd %s && %s -fsyntax-only '-###' %s"):format(build, before, list[1]))
        assert.are.equal(0, driver, lines)
        local front, last = lines:match '\n ("[^\n]*) ("[^"]*")\n$'
        assert.are.equal(('"%s"'):format(list[1]), last)
        return ("%s '%s'"):format(front, table.concat(list, "' '"))
      end

      local planted = folder .. "/planted.c"
      process.write(planted, "int f(void) { int never_read = 1; return 0; }\n")
      local lines, planted_lines = {}, {}
      for _, before in ipairs(options) do
        local list = files[before]
        -- The emulated GPU's files begin with one header, which takes most of the time of each: it is parsed once, with
        -- the templates that it uses.
        local header, found = before:gsub("%-include%-pch (%S+)$",
          ("-Xclang -fpch-instantiate-templates -x c++-header '%s/kernels/cuda/cuda.h' -o %%1"):format(process.root))
        if found == 1 then
          assert.is_true(#list > 20, #list .. " files of the emulated GPU")
          status, text = sh(("cd %s && %s"):format(build, header))
          assert.are.equal(0, status, text)
        end
        if #list > 20 then
          planted_lines[#planted_lines + 1] = parse(before, { list[1], planted })
        end
        for k = 1, #list, 12 do
          lines[#lines + 1] = parse(before, { unpack(list, k, math.min(k + 11, #list)) })
        end
      end
      process.write(build .. "/lines", table.concat(lines, "\n") .. "\n")
      status, text = sh(("cd %s && tr '\\n' '\\0' <lines | xargs -0 -n 1 -P 2 sh -c"):format(build))
      assert.are.equal(0, status, text)

      assert.is_true(#planted_lines > 1)                -- C, and C++ with the parsed header
      for _, line in ipairs(planted_lines) do
        status, text = sh(("cd %s && %s"):format(build, line))
        assert.are_not.equal(0, status)
        assert.matches("unused variable 'never_read'", text, nil, true)
      end
    end)
  end
end)
