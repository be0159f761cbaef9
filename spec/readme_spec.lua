-- SPDX-License-Identifier: MIT
--- The README's program runs and prints what the README says; docs/launching.md has every option of the training script
--- and every variable of the environment.
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local readme = process.read(process.root .. "/README.md")
local launching = process.read(process.root .. "/docs/launching.md")

describe("the README", function()
  it("fits on two screens", function()
    local _, lines = readme:gsub("\n", "")
    assert.is_true(lines <= 100, lines .. " lines")
  end)

  for _, world in ipairs { 0, 2 } do
    it("has a program that prints the documented output, " .. (world == 0 and "alone" or "over two ranks"), function()
      local program, printed = readme:match "```lua\n(.-)```\n.-```text\n(.-)```"
      assert.is_string(program)
      local _, lines = program:gsub("\n", "")
      assert.is_true(lines <= 24)
      local job = ranks.run(world, program, { timeout = 60 })
      assert.are.equal(printed, job.stdout .. job.stderr)
    end)
  end
end)

describe("docs/launching.md", function()
  it("has one table of all MOONSHARD_ variables that anything here reads", function()
    local listed, read = {}, {}
    for name in launching:gmatch "\n| `(MOONSHARD_[%u_]+)` |" do
      assert.is_nil(listed[name], name)
      listed[name] = true
    end
    local reads = "getenv|ms__env|environ|\\$\\{?MOONSHARD_|export |^ *MOONSHARD_"
    for line in process.shell(("grep -rIhE '%s' runtime kernels lua scripts spec"):format(reads)):gmatch "[^\n]+" do
      for before, name in line:gmatch "(.?)(MOONSHARD_[%u_]+)" do
        if before ~= "-" and name ~= "MOONSHARD_H" then read[name] = true end
      end
    end
    assert.is_true(read.MOONSHARD_THREADS and read.MOONSHARD_TIMEOUT and read.MOONSHARD_LIB and read.MOONSHARD_ISA)
    for name in ms.sorted_pairs(read) do assert.is_true(listed[name], name .. " is not in the table") end
    for name in ms.sorted_pairs(listed) do assert.is_true(read[name], "nothing reads " .. name) end
  end)

  it("names the options that the training script has, all of them", function()
    local help = process.shell "luajit scripts/train.lua --help"
    local documented = launching:match "\n## The training script\n.-\n\n(|.-)\n\n"
    local n, missing = 0, {}
    for option in documented:gmatch "`(%-%-[%l%d-]+)" do
      n = n + 1
      assert.is_truthy(help:find(option, 1, true), option)
    end
    for option in help:gmatch "%f[-](%-%-[%l%d-]+)" do
      local there = documented:find("`" .. option .. "`", 1, true) or documented:find("`" .. option .. " ", 1, true)
      if option ~= "--help" and not there then missing[#missing + 1] = option end
    end
    assert.are.equal("", table.concat(missing, " "))
    assert.is_true(n > 5)
  end)
end)

describe("scripts/train", function()
  -- Runs in a copy of the tree whose scripts/setup fails, with a luajit that works and with one that fails.
  it("prints its options without installing or building", function()
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    assert.are.equal(0, os.execute(
      ("cd '%s' && mkdir -p '%s/scripts' '%s/none' && cp scripts/train scripts/train.lua '%s/scripts' && cp -r lua '%s'")
      :format(process.root, folder, folder, folder, folder)))
    process.write(folder .. "/scripts/setup", "#!/bin/sh\necho set up\nexit 7\n")
    process.write(folder .. "/none/luajit", "#!/bin/sh\nexit 127\n")
    assert.are.equal(0, os.execute(("chmod +x '%s/scripts/setup' '%s/none/luajit'"):format(folder, folder)))
    for _, path in ipairs { "", folder .. "/none:" } do
      for _, word in ipairs { "--help", "-h" } do
        local help = process.shell(("PATH='%s'\"$PATH\" MOONSHARD_LIB=/nowhere '%s/scripts/train' --steps 3 %s"):format(
          path, folder, word))
        assert.is_nil(help:find("set up", 1, true))
        for option in ("--ranks --no-install --steps --layers --temperature"):gmatch "%S+" do
          assert.is_truthy(help:find("\n *" .. option:gsub("%-", "%%-")), option .. " is missing in " .. help)
        end
      end
    end
  end)
end)
