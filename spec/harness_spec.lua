-- SPDX-License-Identifier: MIT
--- The test harness: busted's set-up, and failure of runs that test nothing.
local ffi = require "ffi"
local lfs = require "lfs"
local process = require "spec.support.process"

--- Runs busted on one spec made of `text`; returns its output and exit status.
local function run_busted(text)
  local path = os.tmpname()
  local spec = path .. "_spec.lua"
  process.write(spec, text)
  local out, rc = process.shell("busted " .. spec)
  os.remove(path)
  os.remove(spec)
  return out, rc
end

describe("plain busted", function()
  it("runs every file that describes something: busted takes those named *_spec.lua", function()
    local files = assert(io.popen(("cd '%s' && grep -rlE '^(ranks\\.)?describe\\(' spec --include='*.lua'"):format(process.root)))
    for path in files:lines() do assert.matches("_spec%.lua$", path) end
    files:close()
  end)

  it("runs under LuaJIT", function()
    assert.is_string(jit.version)
  end)

  it("gives each ffi.typeof its own parameters", function()
    local int_pointer = ffi.typeof("$ *", ffi.typeof "int")
    local double_pointer = ffi.typeof("$ *", ffi.typeof "double")
    assert.are_not.equal(tonumber(int_pointer), tonumber(double_pointer))
  end)

  it("counts what passed and what failed, and fails", function()
    local out, rc = run_busted [[
      it("a", function() end)
      it("b", function() end)
      it("c", function() assert.are.equal(1, 2) end)
      it("d", function() error "an error" end)
    ]]
    assert.matches("\n2 passed, 2 failed\n$", out)
    assert.are.equal(1, rc)
  end)

  it("passes when everything passed", function()
    local out, rc = run_busted 'it("a", function() end)'
    assert.matches("\n1 passed, 0 failed\n$", out)
    assert.are.equal(0, rc)
  end)

  it("fails when no test ran", function()
    local out, rc = run_busted 'describe("nothing", function() end)'
    assert.matches("no test ran", out)
    assert.matches("\n0 passed, 1 failed\n$", out)
    assert.are.equal(1, rc)
  end)

  it("fails when a file does not load", function()
    local out, rc = run_busted 'it("a", function() end) end'
    assert.are.equal(1, rc)
    assert.matches("\n0 passed, %d failed\n$", out)
  end)

  it("fails the test that calls os.exit and runs the others", function()
    local out, rc = run_busted [[
      it("leaves", function() os.exit(0) end)
      it("stays", function() end)
    ]]
    assert.matches("os.exit%(0%) in a spec", out)
    assert.matches("\n1 passed, 1 failed\n$", out)
    assert.are.equal(1, rc)
  end)

  it("runs each file in one of several runs beside each other, whatever their order", function()
    local folder = process.temp_folder()
    finally(function() process.remove_folder(folder) end)
    assert(lfs.mkdir(folder .. "/lanes"))
    local files = {}
    for k = 1, 5 do
      files[k] = ("%s/file%d_spec.lua"):format(folder, k)
      process.write(files[k], ('it("is test %d", function() os.execute "sleep 0.05" end)'):format(k))
    end
    local runs, passed = {}, 0
    for k = 1, 2 do
      runs[k] = process.start({ "busted", unpack(files) }, { stdout = folder .. "/out" .. k,
        env = { MOONSHARD_SPEC_LANES = folder .. "/lanes" } })
    end
    for k = 1, 2 do
      assert.are.equal(0, runs[k]:wait(60))
      local n, m = process.read(folder .. "/out" .. k):match "\n(%d+) passed, (%d+) failed\n$"
      assert.are.equal("0", m)
      passed = passed + n
    end
    assert.are.equal(5, passed)
  end)

  it("fails when describe raises", function()
    local out, rc = run_busted [[
      it("a", function() end)
      describe("b", function() error "no" end)
    ]]
    assert.matches("\n1 passed, 1 failed\n$", out)
    assert.are.equal(1, rc)
  end)
end)

--- Runs busted on a spec. Returns name -> "passed" or the text under its name, and the whole output.
local function results_of(text)
  local out, rc = run_busted(text)
  local said = {}
  for block in (out .. "\n\n"):gmatch "Failure %-> (.-)\n\n" do
    said[block:match "\n%S+ ([^\n]*)"] = block
  end
  return said, out, rc
end

describe("ranks.describe", function()
  it("attributes a crash, an exit, a failure of one rank or of all, and a hang to their tests, and runs the others", function()
    local said, out, rc = results_of [[
      local ranks = require "spec.support.ranks"
      -- The crash is intended; a sanitizer must not report it.
      local env = require("spec.support.process").crash_env()
      ranks.describe(3, "planted", { timeout = 3, grace = 2, env = env }, function(_, world)
        it("is well", function(rank, n) assert.is_true(rank < 3 and n == 3 and world == 3) end)
        it("crashes", function(rank) if rank == 2 then require("ffi").cast("int *", 0)[0] = 1 end end)
        it("leaves", function(rank) if rank == 1 then os.exit(0) end end)
        it("is well between", function() end)
        it("fails alone", function(rank) if rank == 0 then error "lonely" end end)
        it("fails everywhere", function() assert.are.equal("left", "right") end)
        it("hangs", function(rank) while rank == 1 do end end)
        it("fails while the others wait for it", function(rank) if rank == 1 then error "absent" end while true do end end)
        it("is well at the end", function() end)
      end)
    ]]
    assert.matches("rank 2 of 3: died: ex", said["crashes"])
    assert.matches("rank 1 of 3: left the test by os.exit%(0%)", said["leaves"])
    assert.matches("rank 0 of 3: [^\n]*:9: lonely\n", said["fails alone"])
    assert.matches("ranks 1, 2 of 3: passed", said["fails alone"])
    assert.matches("all 3 ranks: [^\n]*:10: Expected objects to be equal", said["fails everywhere"])
    assert.matches("not every rank finished within [%d.]+ s\nrank 1 of 3: was still inside the test", said["hangs"])
    assert.matches("rank 1 of 3: [^\n]*:12: absent\n.*ranks 0, 2 of 3: was still inside",
      said["fails while the others wait for it"])
    assert.matches("\n3 passed, 6 failed\n$", out)
    assert.are.equal(1, rc)
  end)

  it("runs hooks and nested describes on every rank, in one process per rank", function()
    local _, out = results_of [[
      local ranks = require "spec.support.ranks"
      ranks.describe(2, "hooks", function()
        local log = {}
        setup(function() log[#log + 1] = "setup" end)
        before_each(function() log[#log + 1] = "before" end)
        after_each(function() log[#log + 1] = "after" end)
        it("first", function() finally(function() log[#log + 1] = "finally" end) end)
        it("second", function() assert.are.equal("setup before finally after before", table.concat(log, " ")) end)
        it("waits", function() pending "for later" end)
        describe("nested", function()
          before_each(function() log[#log + 1] = "inner" end)
          it("third", function() assert.are.equal("setup before inner", table.concat(log, " ")) end)
        end)
      end)
    ]]
    assert.matches("3 successes / 0 failures / 0 errors / 1 pending", out)
  end)

  it("fails the last test when the gang ends with an error", function()
    local said = results_of [[
      local ranks = require "spec.support.ranks"
      ranks.describe(2, "end", function()
        teardown(function() error "no way out" end)
        it("is well", function() end)
        it("is last", function() end)
      end)
    ]]
    assert.is_nil(said["is well"])
    assert.matches("after the last test the gang ended with status 1\n.*no way out", said["is last"])
  end)

  it("reports why a rank cannot load the file", function()
    local said, out = results_of [[
      local ranks = require "spec.support.ranks"
      if os.getenv "OMPI_COMM_WORLD_RANK" == "1" then error "not here" end
      ranks.describe(2, "load", function() it("runs", function() end) end)
    ]]
    assert.matches("rank 1 of 2: loading the spec: [^\n]*not here", said["runs"])
    assert.matches("\n0 passed, 1 failed\n$", out)
  end)

  it("is quick: 100 tests on 4 ranks", function()
    process.within(20, function()
      local begun = process.now()
      local _, out = results_of [[
        local ranks = require "spec.support.ranks"
        ranks.describe(4, "many", function()
          for k = 1, 100 do it("test " .. k, function() end) end
        end)
      ]]
      assert.matches("\n100 passed, 0 failed\n$", out)
      return process.now() - begun
    end)
  end)
end)

describe("ranks.run", function()
  local ranks = require "spec.support.ranks"

  it("runs a script on n ranks and returns status, output and time", function()
    local r = ranks.run(2, [[
      io.stdout:write("rank ", os.getenv "OMPI_COMM_WORLD_RANK", " ", arg[1], "\n")
      io.stderr:write("to stderr\n")
    ]], { args = { "given" } })
    assert.are.equal(0, r.code)
    assert.matches("rank 0 given", r.stdout)
    assert.matches("rank 1 given", r.stdout)
    assert.matches("to stderr", r.stderr)
    assert.is_true(r.seconds > 0 and not r.timed_out)
  end)

  it("returns the status of a rank that fails", function()
    assert.are.equal(3, ranks.run(2, function() os.exit(os.getenv "OMPI_COMM_WORLD_RANK" == "1" and 3 or 0) end).code)
  end)

  it("runs one plain process without mpirun, with its own environment and input", function()
    local r = ranks.run(nil, 'print(os.getenv "PLANTED", io.read "*a")', { env = { PLANTED = "x" }, stdin = "typed" })
    assert.are.equal("x\ttyped\n", r.stdout)
  end)

  it("ends a job that takes too long", function()
    process.within(6, function()
      local r = ranks.run(2, "while true do end", { timeout = 1 })
      assert.is_true(r.timed_out)
      assert.are_not.equal(0, r.code)
      return r.seconds
    end)
  end)

  it("reports a signal as 128 plus its number", function()
    local ffi_kill = 'local ffi = require "ffi"; ffi.cdef "int raise(int);"; ffi.C.raise(%d)'
    assert.are.equal(128 + 9, ranks.run(nil, ffi_kill:format(9)).code)
    assert.are.equal(128 + 15, ranks.run(nil, ffi_kill:format(15)).code)
  end)
end)

describe("scripts/mutate", function()
  it("finds what each of its mutations changes", function()
    for _, m in ipairs(dofile(process.root .. "/spec/support/mutations.lua")) do
      local text, n, at = process.read(process.root .. "/" .. m.file), 0, 1
      while at do
        local first, last = text:find(m.old, at, true)
        n, at = first and n + 1 or n, last and last + 1
      end
      if m.nth then assert.is_true(n >= m.nth, m.name) else assert.are.equal(1, n, m.name) end
    end
  end)
end)
