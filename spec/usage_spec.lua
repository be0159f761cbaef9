-- SPDX-License-Identifier: MIT
--- The usage texts of the programs in scripts/, and what is made of them (scripts/support/usage.lua): completion in
--- three shells, and the manual page.
local lfs = require "lfs"
local process = require "spec.support.process"
local Pty = require "spec.support.pty"

-- The programs of scripts/ and scripts/bench.
local programs = {}
for _, folder in ipairs { "scripts", "scripts/bench" } do
  for name in lfs.dir(process.root .. "/" .. folder) do
    local path = folder .. "/" .. name
    local at = lfs.attributes(process.root .. "/" .. path)
    if at.mode == "file" and at.permissions:find "x" then programs[#programs + 1] = path end
  end
end
table.sort(programs)

-- internal: options that a program passes only to processes of its own. accepted: the others with which its source
-- compares its arguments.
local internal = { ["--ranks scripts/docs"] = true, ["--child scripts/bench/start"] = true }
local function accepted(path)
  local options, text = {}, process.read(process.root .. "/" .. path)
  local function add(option)
    if option and not internal[option .. " " .. path] and option ~= "--help" then options[option] = true end
  end
  if text:find "^#![^\n]*sh\n" then
    for line in text:gmatch "[^\n]+" do
      for word in (line:match "^%s*([^()]*)%)" or ""):gmatch "%s*([^|]*)" do      -- a pattern of `case`
        add(word:match "^(%-%-[%w-]+)[=*]*%s*$")
      end
    end
  else
    for option in text:gmatch '== "(%-%-[%w-]+)"' do add(option) end
  end
  return options
end

local function complete(line)
  local out, status = process.shell("PATH=\"$PWD/scripts:$PATH\" scripts/moonshard complete " .. line)
  local names = {}
  for name in out:gmatch "([^\t\n]+)\t[^\n]*\n" do names[#names + 1] = name end
  return names, status, out
end

describe("the usage text", function()
  for _, path in ipairs(programs) do
    it(("of %s names the program and the options that its source accepts"):format(path), function()
      local text, status = process.shell(path .. " --help")
      assert.are.equal(0, status, text)
      local name = path == "scripts/moonshard" and "moonshard" or path
      assert.are.equal(1, text:find("usage: " .. name, 1, true), text)
      for option in pairs(accepted(path)) do           -- any order: each is looked for by itself
        assert.is_truthy(text:find(option:gsub("%-", "%%-") .. "%f[^%w-]"), option .. " is not in " .. text)
      end
    end)
  end

  it("is compared with at least 20 options of the sources", function()
    local n = 0
    for _, path in ipairs(programs) do
      for _ in pairs(accepted(path)) do n = n + 1 end   -- any order: they are counted
    end
    assert.is_true(n >= 20, n .. " options")
  end)

  it("has the options of a table, with their defaults and values", function()
    local text = process.shell "luajit scripts/train.lua --help"
    assert.is_truthy(text:find("\n  --steps N                 optimizer steps (1500)\n", 1, true), text)
    assert.is_truthy(text:find("\n  --dtype float32|bfloat16  ", 1, true), text)
    assert.is_truthy(text:find("\n  --quiet                   print only errors\n", 1, true), text)
  end)

  it("of the command `moonshard` has the command's name", function()
    local text = process.shell "scripts/moonshard generate --help"
    assert.are.equal(1, text:find("usage: moonshard generate [OPTION]...\nContinues a text with a model's folder or a run of moonshard train, ",
      1, true), text)
    assert.are.same({ "moonshard: unknown command 'trian'; moonshard help lists the commands\n", 2 },
      { process.shell "scripts/moonshard trian" })
  end)
end)

describe("completion", function()
  it("offers commands, options that begin with the word, and the words that an option accepts", function()
    assert.are.same({ "train" }, (complete "moonshard t"))
    assert.are.same({ "train", "finetune", "generate", "repl", "compare", "doctor", "help", "version" },
      (complete "moonshard ''"))
    assert.are.same({ "--dim", "--dropout", "--dtype", "--device", "--data" }, (complete "moonshard train --d"))
    assert.are.same({ "--no-install", "--no-bench" }, (complete "scripts/test --no"))
    assert.are.same({ "real", "emulated", "null" }, (complete "scripts/gpu_check --device ''"))
    assert.are.same({ "--for" }, (complete "scripts/stall --f"))
    assert.are.same({ "--quick" }, (complete "scripts/bench/step --q"))
  end)

  it("offers all options of the table of scripts/train.lua", function()
    local names = complete "scripts/train --"
    local source, n = process.read(process.root .. "/scripts/train.lua"):match "OPTIONS = (%b{})", 0
    for name in source:gmatch '\n  { "([%w-]+)"' do
      n = n + 1
      assert.is_truthy((" " .. table.concat(names, " ") .. " "):find(" --" .. name .. " ", 1, true), name)
    end
    assert.is_true(n > 25)
    assert.are.equal(n + 2, #names)                     -- and those of scripts/train: --ranks and --no-install
  end)

  it("leaves paths to the shell, and offers nothing for numbers", function()
    for _, line in ipairs { "moonshard train --resume ''", "scripts/compare ''", "scripts/setup --build b" } do
      local names, status = complete(line)
      assert.are.same({ {}, 1 }, { names, status }, line)
    end
    local names, status = complete "moonshard train --steps ''"
    assert.are.same({ {}, 0 }, { names, status })
  end)

  -- Typed in a terminal, from the source tree.
  local shells = {
    bash = { "bash", "--norc", "--noprofile", "-i" },
    zsh = { "zsh", "-f", "-i" },
    fish = { "fish", "--no-config", "--private", "-i" },
  }
  for _, shell in ipairs { "bash", "zsh", "fish" } do
    it("works in " .. shell, function()
      if process.tool then return pending "is not run under sanitizers or valgrind" end
      if os.execute(("command -v %s >/dev/null"):format(shell)) ~= 0 then
        return pending(("%s is not installed: apt-get install %s"):format(shell, shell))
      end
      local folder = process.temp_folder()
      finally(function() process.remove_folder(folder) end)
      local p = Pty.start(shells[shell], { HOME = folder, TERM = "xterm", PATH = process.root .. "/scripts:" .. os.getenv "PATH" })
      p:type(("cd '%s'\n"):format(process.root))
      if shell == "zsh" then p:type "autoload -U compinit; compinit -D -u\n" end
      p:type(("source scripts/packaging/completion.%s; echo rea''dy\n"):format(shell))
      assert(p:expect "ready")
      for _, case in ipairs { { "moonshard gen", "erate" }, { "scripts/test --val", "grind" },
        { "./scripts/bench/step --qui", "ck" }, { "moonshard train --dtype bf", "loat16" },
        { "moonshard doctor CONTRIB", "UTING.md" } } do
        p:type(case[1] .. "\t")
        assert(p:expect(case[2]))
        p:type "\21"                                    -- Ctrl-U: the line is not run
      end
      p:type "exit\n"
      p:finish()
    end)
  end
end)

describe("the manual page", function()
  it("has every option of every command, and no fault that troff finds", function()
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    local page = folder .. "/moonshard.1"
    local _, status = process.shell(("luajit scripts/support/usage.lua manual scripts/moonshard 1.2.3 >'%s'"):format(page))
    assert.are.equal(0, status)
    local text = process.read(page):gsub("\\%-", "-")
    assert.is_truthy(text:find('"Moonshard 1.2.3"', 1, true))
    local n = 0
    for _, command in ipairs { "train", "finetune", "generate", "repl", "compare", "doctor" } do
      for _, option in ipairs((complete(("moonshard %s --"):format(command)))) do
        n = n + 1
        assert.is_truthy(text:find("\\fB" .. option .. "\\fR", 1, true), option)
      end
    end
    assert.is_true(n > 40)
    if os.execute "command -v groff >/dev/null" == 0 then
      -- A sanitizer that watches the specs would report faults of groff's own.
      assert.are.equal("", (process.shell(("env -u LD_PRELOAD groff -man -Tutf8 -ww -z '%s'"):format(page))))
    end
  end)
end)
