--- The README's program runs and prints what the README says; the files and commands it names exist.
local lfs = require "lfs"
local process = require "spec.support.process"

local readme = process.read(process.root .. "/README.md")

describe("the README", function()
  it("has a program that prints what it says", function()
    local program, printed = readme:match "```lua\n(.-)```\n.-```text\n(.-)```"
    assert.is_string(program)
    local _, lines = program:gsub("\n", "")
    assert.is_true(lines <= 24)
    local out, script = os.tmpname(), os.tmpname()
    finally(function()
      os.remove(out)
      os.remove(script)
    end)
    process.write(script, program)
    local child = process.start({ "sh", "-c", 'cd "$0" && luajit "$1" 2>&1', process.root, script }, { stdout = out })
    child:wait(60)
    assert.are.equal(printed, process.read(out))
  end)

  it("names only files that are there", function()
    local n = 0
    for path in readme:gmatch "`([%w_/.]+)`" do
      local top = path:match "^([%w_.]+)/"
      if top == "runtime" or top == "kernels" or top == "lua" or top == "scripts" or top == "spec" then
        n = n + 1
        assert.is_not_nil(lfs.attributes(process.root .. "/" .. path, "mode"), path)
      end
    end
    assert.is_true(n > 10)
  end)

  it("names every option of the training script that the script has", function()
    local p = io.popen(("cd '%s' && luajit scripts/train.lua --help"):format(process.root))
    local help = p:read "*a"
    p:close()
    local n = 0
    for option in readme:gmatch "`(%-%-[%w-]+)" do
      if option ~= "--ranks" and option ~= "--no-install" and option ~= "--from" and option ~= "--prompt" then
        n = n + 1
        assert.is_truthy(help:find(option, 1, true), option)
      end
    end
    assert.is_true(n > 5)
  end)
end)
