-- SPDX-License-Identifier: MIT
--- The prompt over ranks, in a terminal of its own.
local process = require "spec.support.process"
local prompt = require "spec.support.prompt"

local ask, answer = prompt.ask, prompt.answer
teardown(prompt.remove)

local function open(world) return prompt.open { "luajit", prompt.program, "--ranks", tostring(world) } end

-- The text of a line's result on all ranks: once where equal, else by rank.
local function by_rank(world, text_of)
  local list = {}
  for r = 0, world - 1 do list[r + 1] = ("rank %d: %s"):format(r, text_of(r)) end
  return table.concat(list, "\n")
end

for world = 1, 4 do
  describe(("the prompt over %d ranks"):format(world), function()
    local p
    lazy_setup(function()
      p = open(world)
      ask(p, "t = ms.ones(2) * ms.dist.rank(); kept = ms.tensor{7}")
    end)
    lazy_teardown(function() p:finish(0) end)

    it("prints once what is equal, by rank what is not", function()
      assert.are.equal("3", ask(p, "1 + 2"))
      assert.are.equal(tostring(world), ask(p, "ms.dist.world_size()"))
      assert.are.equal(world == 1 and "0" or by_rank(world, tostring), ask(p, "ms.dist.rank()"))
      assert.are.equal("", ask(p, "t = ms.ones(2) * ms.dist.rank()"))
      assert.are.equal("nil", ask(p, "ms.dist.all_reduce(t)"))
      local sum = world * (world - 1) / 2
      assert.are.equal(("Tensor float32 [2] cpu\n[%d., %d.]"):format(sum, sum), ask(p, "t"))
      assert.are.equal("hello", ask(p, "print 'hello'"))
      if world > 1 then
        assert.are.equal("rank 0: zero", ask(p, "if ms.dist.rank() == 0 then print 'zero' end"))
        local others = world == 2 and "rank 1" or world == 3 and "ranks 1, 2" or "ranks 1-3"
        assert.are.equal(("rank 0: %s\n        [0.]\n%s: %s\n%s[1.]"):format("Tensor float32 [1] cpu", others,
          "Tensor float32 [1] cpu", (" "):rep(#others + 2)), ask(p, "ms.tensor{math.min(ms.dist.rank(), 1)}"))
      end
    end)

    it("takes statements of several lines", function()
      assert.are.equal("10\n20", prompt.ask_lines(p, { "for k = 1, 2 do", "print(k * 10)", "end" }))
      assert.are.equal("", prompt.ask_lines(p, { "s = 0; for k = 1, 3 do", "s = s + k end" }))
      assert.are.equal("6", ask(p, "s"))
    end)

    it("refuses a string that is not closed on its line at once, and runs the next line", function()
      assert.are.equal("prompt:1: unfinished string near '\"half'", ask(p, '"half'))
      assert.are.equal("3", ask(p, "1 + 2"))
    end)

    it("completes names of the session and explains names", function()
      ask(p, "some_tensor = ms.tensor{1, 2, 3}")
      assert.are.equal("3", ask(p, "some_ten\t:nume\t()"))
      assert.matches("Concatenates tensors along d", ask(p, "? ms.cat"))
      assert.truthy(ask(p, "help()"):find("ms is the library", 1, true))
    end)

    if world == 2 then
      it("describes sharded tensors by rank", function()
        ask(p, "m = ms.nn.Linear(4, 6); ms.fsdp.fully_shard(m)")
        local text = ask(p, "? m.weight")
        for r = 0, 1 do
          assert.truthy(text:find(("rank %d: Parameter float32 [6, 4] cpu, requires_grad, rows %d-%d of 6"):format(r, 3 * r + 1,
            3 * r + 3), 1, true), text)
        end
        assert.matches("placement: Shard%(1%) over 2 ranks, 12 of 24 elements here; 48 bytes", text)
        assert.matches("Every line runs on all ranks; @2 line", ask(p, "?"))
      end)
    end

    it("prints an error that all ranks have once, and continues", function()
      process.within(1, function()                      -- a rank that is slow to start is interrupted instead
        local text = ask(p, "nothing.x")
        return text == "prompt:1: attempt to index global 'nothing' (a nil value)" and 0 or math.huge, text
      end)
      assert.are.equal("7", ask(p, "3 + 4"))
      assert.matches("^Tensor float32 %[1%] cpu\n%[7%.%]$", ask(p, "kept"))
    end)

    if world > 1 then
      it("ends a line on all ranks when one fails #timed", function()
        local last = world - 1
        for _, line in ipairs {
          "if ms.dist.rank() == LAST then error 'boom' end; ms.dist.barrier()",
          "if ms.dist.rank() == LAST then error 'boom' end; ms.dist.all_reduce(ms.ones(3))",
          "if ms.dist.rank() == LAST then error 'boom' end; while true do end",
          "if ms.dist.rank() == LAST then error 'boom' end; while true do t = t + 0 end",
        } do
          process.within(0.2, function()
            local before = process.now()
            local text = ask(p, (line:gsub("LAST", last)))
            local seconds = process.now() - before
            assert.are.equal(("prompt:1: boom"):rep(1), text:match("rank " .. last .. ": ([^\n]*)"))
            assert.truthy(text:find(("stopped, because rank %d failed"):format(last), 1, true), text)
            return seconds
          end)
          assert.are.equal("", ask(p, "ms.dist.barrier()"))
          assert.matches("^Tensor float32 %[1%] cpu\n%[7%.%]$", ask(p, "kept"))
        end
      end)

      it("refuses a collective that some ranks do not call", function()
        local text = ask(p, "if ms.dist.rank() == 0 then ms.dist.barrier() end")
        assert.matches("^rank 0: prompt:1: barrier: collective #%d+ of .*: rank %d has ended its line at the prompt$", text)
        assert.are.equal("", ask(p, "ms.dist.barrier()"))
        text = ask(p, "if ms.dist.rank() == 0 then w = ms.dist.all_reduce(ms.ones(2), { async = true }) end")
        assert.are.equal("", text)
        process.sleep(0.2)
        ask(p, "if w then pcall(w.wait, w) end")
        ask(p, "ms.dist.recover()")
        assert.are.equal("", ask(p, "ms.dist.barrier(); x = 1"))
      end)

      it("runs a line on one rank and refuses collectives there", function()
        local r = world - 1
        assert.matches("on rank " .. r .. " alone: collectives are refused", ask(p, "@" .. r .. " only = 5"))
        assert.are.equal("5", ask(p, "@" .. r .. " only"))
        assert.are.equal("nil", ask(p, "@0 only"))
        assert.matches("^prompt:1: barrier: this line runs on rank 0 alone", ask(p, "@0 ms.dist.barrier()"))
        assert.matches("^prompt:1: all_reduce: this line runs on rank 0 alone", ask(p, "@0 ms.dist.all_reduce(ms.ones(3))"))
        assert.are.equal("", ask(p, "ms.dist.barrier()"))
        assert.are.equal("1\n2", prompt.ask_lines(p, { "@0 for k = 1, 2 do", "print(k) end" }))
        assert.matches("expected a rank from 0 to " .. r, ask(p, "@" .. world .. " x"))
      end)
    end

    -- On 3 ranks an interrupt takes the way of 2 and 4 ranks.
    if world ~= 3 then
      it("returns within 200 ms of Ctrl-C, with tensors and collectives intact #timed", function()
        ask(p, "big = ms.randn(2500, 2500)", 60)
        for _, line in ipairs {
          "while true do end",
          "while true do t = t + 1 end",
          "while true do pcall(function() while true do end end) end",
          "while true do print 'flood' end",
          "for k = 1, 100 do local x = big:matmul(big) end",                 -- seconds each
          world > 1 and "if ms.dist.rank() == 0 then while true do end end; ms.dist.barrier()" or nil,
          world > 1 and "if ms.dist.rank() ~= 0 then while true do end end; ms.dist.all_reduce(ms.ones(5))" or nil,
          world > 1 and "while true do ms.dist.all_reduce(ms.ones(1000)) end" or nil,
          world > 1 and "if ms.dist.rank() == 0 then while true do end end; w = ms.dist.all_reduce(ms.ones(5), { async = true }); w:wait()" or nil,
        } do
          process.within(0.2, function() return prompt.interrupt(p, line) end)
          assert.are.equal("7", ask(p, "3 + 4"))
          assert.matches("^Tensor float32 %[1%] cpu\n%[7%.%]$", ask(p, "kept"))
          assert.are.equal(("Tensor float32 [1] cpu\n[%d.]"):format(world), ask(p, "one = ms.ones(1); ms.dist.all_reduce(one); one"))
        end
      end)
    end

    it("leaves", function()
      p:type "exit\n"
      assert.are.equal(0, (p:finish(10)))
    end)
  end)
end

describe("sharded training at the prompt over ranks", function()
  it("continues after Ctrl-C at any moment of a step", function()
    local p = open(4)
    finally(function() p:finish(0) end)
    for _, line in ipairs {
      "nn = ms.nn; m = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))",
      "ms.fsdp.fully_shard(m[1]); ms.fsdp.fully_shard(m[3]); ms.fsdp.fully_shard(m)",
      "opt = ms.optim.AdamW(m:parameters(), { lr = 1e-4 })",
      "function step() local loss = m(ms.randn(8, 64)):pow(2):mean(); loss:backward(); opt:step(); opt:zero_grad(); count = (count or 0) + 1 end",
      "step()",
    } do assert.are.equal("", ask(p, line)) end
    for k = 1, 15 do
      prompt.interrupt(p, "for _ in ms.steps(1e9) do step() end", 0.15 + k * 0.0037)       -- somewhere in a step
      assert.are.equal("", ask(p, "opt:zero_grad(); step()"))
      assert.are.equal("", ask(p, "w = m[1].weight:full_tensor(); b = ms.zeros_like(w):copy_(w); ms.dist.broadcast(b, { src = 0 })"))
      assert.are.equal("true", ask(p, "w:equal(b) and w:isfinite():all():item() ~= 0"))
    end
  end)
end)

describe("a rank of the prompt that ends", function()
  local function pid_of(p, r)
    ask(p, "require 'ffi'.cdef 'int getpid(void);'")
    return tonumber(ask(p, ("@%d require 'ffi'.C.getpid()"):format(r)):match "%d+$")
  end

  it("is named while the prompt waits, and restart starts the ranks again", function()
    local p = open(3)
    finally(function() p:finish(0) end)
    ask(p, "x = 5")
    local pid = pid_of(p, 2)
    process.kill(pid, process.SIGKILL)
    assert(p:expect(("rank 2 (process %d) died: signal 9 (Killed). The job has ended"):format(pid), 20))
    assert.matches("Enter restart to start 3 new ranks, or exit to leave.$", answer(p))
    assert.matches("there are no ranks: enter restart", ask(p, "x"))
    assert.matches("Concatenates tensors", ask(p, "? ms.cat"))
    assert.are.equal("", ask(p, "restart", 60))
    assert.are.equal("nil", ask(p, "x"))
    assert.are.equal("", ask(p, "ms.dist.barrier()"))
    assert.are.equal(by_rank(3, tostring), ask(p, "ms.dist.rank()"))
    p:type "\4"
    assert.are.equal(0, (p:finish(10)))
  end)

  it("is named while a line runs", function()
    local p = open(2)
    finally(function() p:finish(0) end)
    local pid = pid_of(p, 1)
    prompt.run(p, "while true do ms.dist.barrier() end")
    process.kill(pid, process.SIGKILL)
    assert(p:expect(("rank 1 (process %d) died: signal 9 (Killed)"):format(pid), 20))
    assert.matches("Enter restart", answer(p))
    p:type "exit\n"
    assert.are.equal(0, (p:finish(10)))
  end)

  it("is named if the line called os.exit", function()
    local p = open(2)
    finally(function() p:finish(0) end)
    assert.matches("rank 1 %(process %d+%) called os.exit %(status 3%)",
      ask(p, "if ms.dist.rank() == 1 then os.exit(3) end; ms.dist.barrier()", 20))
    p:type "exit\n"
    assert.are.equal(0, (p:finish(10)))
  end)

  it("is ended by a second Ctrl-C if it does not return", function()
    local p = open(2)
    finally(function() p:finish(0) end)
    local pid = pid_of(p, 1)
    process.kill(pid, 19)                               -- SIGSTOP
    p:type "print('it ' .. 'runs')\n"
    assert(p:expect "rank 0: it runs\r\n")
    p:type "\3"
    assert(p:expect "rank 1 has not returned yet from a long operator or another program; a second Ctrl-C ends the ranks")
    p:type "\3"
    assert(p:expect(("rank 1 (process %d) died: signal 9 (Killed)"):format(pid), 20))
    assert.matches("Enter restart", answer(p))
    assert.are.equal("", ask(p, "restart", 60))
    assert.are.equal("2", ask(p, "1 + 1"))
    prompt.run(p, "os.execute 'sleep 100'; x = 6")      -- a program that a rank runs is interrupted
    p:read(0.2)
    p:type "\3"
    assert(p:expect "> ")
    assert.are.equal("6", ask(p, "x"))
  end)

  it("ends when the prompt is killed", function()
    local p = open(2)
    finally(function() p:finish(0) end)
    local pids = { pid_of(p, 0), pid_of(p, 1) }
    prompt.run(p, "while true do end")
    process.kill(p.pid, process.SIGKILL)
    local limit = process.now() + 10 * process.patience
    while (process.runs(pids[1]) or process.runs(pids[2])) and process.now() < limit do process.sleep(0.02) end
    assert.is_false(process.runs(pids[1]) or process.runs(pids[2]))
  end)
end)

describe("a paste at the prompt over ranks", function()
  it("runs line after line", function()
    local p = prompt.open({ "luajit", prompt.program, "--ranks", "2" }, nil, { INPUTRC = prompt.pasting.INPUTRC })
    finally(function() p:finish(0) end)
    assert.are.equal(by_rank(2, tostring) .. "\n4", prompt.paste(p, { "y = 4", "ms.dist.rank()", "y" }))
    assert.are.equal("rank 1: 9", prompt.paste(p, { "for k = 9, 9 do", "\tif ms.dist.rank() == 1 then print(k) end", "end" }))
    p:type "exit\n"
    assert.are.equal(0, (p:finish(10)))
  end)
end)

describe("what ranks print", function()
  local merge = require "moonshard.tools.prompt.merge"
  local shown, out
  before_each(function()
    shown = {}
    out = merge.output({ 0, 1, 2 }, 1, function(text) shown[#shown + 1] = text end)
  end)
  local all = { [0] = true, true, true }

  it("is shown once where the ranks' lines are equal, and held until all have one", function()
    out:add(0, "a\nb\n", 10)
    out:add(1, "a\nb", 10)
    out:tick(10.5, all)
    assert.are.same({}, shown)
    out:add(2, "a\nc\n", 10.6)
    out:tick(10.6, all)
    assert.are.same({ "a" }, shown)
    out:add(1, "\n", 10.7)
    out:tick(10.7, all)
    assert.are.same({ "a", "ranks 0, 1: b", "rank 2: c" }, shown)
  end)

  it("is shown with its rank after a second, at the rate at which it was printed", function()
    for k = 1, 50 do out:add(0, ("step %d\n"):format(k), 10 + k / 10) end
    out:tick(13.05, all)
    assert.are.equal(20, #shown)
    assert.are.equal("rank 0: step 20", shown[20])
  end)

  it("is shown at the end of the line, complete or not", function()
    out:add(1, "half", 10)
    out:tick(10, { true })
    assert.are.same({}, shown)
    out:tick(10)
    assert.are.same({ "rank 1: half" }, shown)
  end)

  it("is dropped after Ctrl-C if there is much of it", function()
    out:add(0, ("x\n"):rep(1000), 10)
    out:add(1, "y\n", 10)
    out:hurry()
    out:tick(10)
    assert.are.same({ "rank 1: y", "(1000 lines that were printed before Ctrl-C are not shown)" }, shown)
  end)

  it("is grouped by rank, without regard to addresses", function()
    assert.are.same({ "function: 0x12" }, merge.lines({ [0] = "function: 0x12", "function: 0x34" }, { 0, 1 }))
    assert.are.equal("ranks 0-2, 4, 5, 7", merge.names { 0, 1, 2, 4, 5, 7 })
  end)
end)

describe("the start of a prompt over ranks", function()
  local folder = process.temp_folder()
  teardown(function() process.remove_folder(folder) end)

  it("runs files on every rank, again after restart", function()
    process.write(folder .. "/one.lua", "mine = 10 * ms.dist.rank(); ms.dist.barrier(); print('hello'); return 'given'")
    local p = prompt.open { "luajit", prompt.program, "--ranks=2", folder .. "/one.lua" }
    finally(function() p:finish(0) end)
    assert.are.equal("rank 0: 0\nrank 1: 10", ask(p, "mine"))
    ask(p, "mine = nil")
    assert.are.equal("hello\ngiven", ask(p, "restart", 60))
    assert.are.equal("rank 0: 0\nrank 1: 10", ask(p, "mine"))
  end)

  it("reports that mpirun is missing, or that a file cannot be compiled", function()
    process.write(folder .. "/bad.lua", "x = = 1")
    local bin = folder .. "/bin"
    require("lfs").mkdir(bin)
    assert.are.equal(0, os.execute(("ln -s \"$(command -v luajit)\" '%s/luajit'"):format(bin)))
    for _, case in ipairs {
      { { "--ranks", "2" }, { PATH = bin }, "^repl: mpirun cannot be started %(No such file or directory%); more than one rank needs" },
      { { "--ranks", "2", folder .. "/bad.lua" }, {}, "bad.lua:1: unexpected symbol near '='" },
    } do
      local child = process.start({ bin .. "/luajit", prompt.program, unpack(case[1]) },
        { stdout = folder .. "/out", stderr = folder .. "/err", env = case[2] })
      assert.are.equal(1, child:wait(20) or child:stop())
      assert.matches(case[3], process.read(folder .. "/err"))
    end
  end)

  it("refuses --ranks in a process that a launcher started", function()
    local child = process.start({ "mpirun", "-n", "1", "luajit", prompt.program, "--ranks", "2" },
      { stdout = folder .. "/out", stderr = folder .. "/err", env = process.mpirun_env() })
    assert.are.equal(2, child:wait(20) or child:stop())
    assert.matches("repl: %-%-ranks 2 starts ranks, but mpirun has started this process", process.read(folder .. "/err"))
  end)
end)

describe("the number of ranks of the prompt", function()
  local out = process.temp_folder()
  teardown(function() process.remove_folder(out) end)
  for _, case in ipairs {
    { { "--ranks", "0" }, "repl: --ranks '0' is not a whole number from 1\n" },
    { { "--ranks", "x" }, "repl: --ranks 'x' is not a whole number from 1\n" },
    { { "--ranks=-1" }, "repl: --ranks '-1' is not a whole number from 1\n" },
    { { "--ranks" }, "repl: --ranks '' is not a whole number from 1\n" },
    { { "--ranks", "99999" }, "^repl: %-%-ranks 99999: at most %d+ ranks are possible here: 16 for each core, and no more than 1024\n" },
    { { "--rank", "2" }, "repl: unknown option '--rank'; scripts/repl --help lists the options\n" },
  } do
    it("is checked: " .. table.concat(case[1], " "), function()
      local child = process.start({ "luajit", prompt.program, unpack(case[1]) }, { stdout = out .. "/out", stderr = out .. "/err" })
      assert.are.equal(2, child:wait(20) or child:stop())
      local text = process.read(out .. "/err")
      if case[2]:sub(1, 1) == "^" then assert.matches(case[2], text) else assert.are.equal(case[2], text) end
    end)
  end
end)
