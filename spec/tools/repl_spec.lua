-- SPDX-License-Identifier: MIT
--- The prompt, run in a terminal of its own.
local process = require "spec.support.process"
local prompt = require "spec.support.prompt"

local ways = {
  ["scripts/repl without readline"] = { "env", "TERM=dumb", "luajit", process.root .. "/scripts/repl" },
  ["scripts/repl"] = { "luajit", process.root .. "/scripts/repl" },
  ["luajit -i"] = { "luajit", "-i", "-e", "package.path = '" .. process.root
    .. "/?.lua;' .. package.path; require 'moonshard'" },
}

local own_folder = process.temp_folder()
teardown(function()
  process.remove_folder(own_folder)
  prompt.remove()
end)

local open, ask = prompt.open, prompt.ask

-- After several Ctrl-C, some may be handled late: each prints a prompt and discards typed input. Types a line
-- repeatedly, until it is executed and nothing else is printed.
local function again(p)
  for k = 1, 20 do
    p:type(("print('call ' .. %d)\n"):format(k))
    if p:expect(("call %d\r\n"):format(k), 1) and p:expect("> ", 1) then
      if not p:read(0.3) then return end
    end
  end
  error("no answer: " .. p.text)
end

for name, command in require("moonshard").sorted_pairs(ways) do
  describe("the prompt of " .. name, function()
    local p
    before_each(function() p = open(command) end)
    after_each(function() p:finish(0) end)

    it("prints the values of expressions", function()
      assert.are.equal("3", ask(p, "1 + 2"))
      ask(p, "t = ms.tensor{{1, 2}, {3, 4}}")
      assert.are.equal("Tensor float32 [2, 2] cpu\n[[1., 2.],\n [3., 4.]]", ask(p, "t"))
      assert.are.equal("[2, 2]", ask(p, "t.shape"))
      assert.are.equal("5", ask(p, "local n = 5; print(n)"))
    end)

    it("takes statements of several lines", function()
      assert.are.equal("10\n20", prompt.ask_lines(p, { "for k = 1, 2 do", "print(k * 10)", "end" }))
    end)

    it("refuses a string that is not closed on its line at once, and runs the next line", function()
      for _, line in ipairs { '"half', "x = 'half", "print('half", "for k = 1, 2 do print('half" } do
        assert.matches("^prompt:1: unfinished string near '.*half'$", ask(p, line))
        assert.are.equal("3", ask(p, "1 + 2"))
      end
      assert.are.equal("a\nb", prompt.ask_lines(p, { "x = [[a", "b]] print(x)" }))
      assert.are.equal("a\nb", prompt.ask_lines(p, { "x = 'a\\", "b' print(x)" }))
    end)

    it("keeps the session and its tensors after an error", function()
      ask(p, "t = ms.tensor{1, 2}")
      assert.matches("expected a tensor", ask(p, "ms.cat{t, 'x'}"))
      assert.matches("^prompt:1: matmul: ", ask(p, "t:matmul(ms.ones(3))"))
      assert.are.equal("2", ask(p, "t:numel()"))
      ask(p, "for step in ms.steps(5) do kept = ms.tensor{step} break end")
      assert.are.equal("true", ask(p, "kept:is_released()"))
      ask(p, "u = ms.tensor{3}")
      assert.are.equal("false", ask(p, "u:is_released()"))
    end)

    it("returns within 200 ms of Ctrl-C #timed", function()
      ask(p, "t = ms.zeros(4)")
      for _, line in ipairs {
        "while true do t = t + 1 end",
        "while true do end",                            -- no operator checks for the interrupt
      } do
        process.within(0.2, function() return prompt.interrupt(p, line) end)
        assert.are.equal("7", ask(p, "3 + 4"))
      end
      p:type "x = 'half a li\3"                         -- at the prompt it discards the line
      assert(p:expect "> ")
      assert.are.equal("nil", ask(p, "x"))
    end)

    -- Deterministic: the session itself raises the signal, at every step from reading the line to its execution.
    local raise_once = [[for _, at in ipairs { { require "moonshard.tools.repl", "compile" }, { require "moonshard.tools.repl", "execute" }, { jit, "off" } } do
      if at[2] == point then
        local owner, name, fn = at[1], at[2], at[1][at[2] ]
        owner[name] = function(...)
          if name == "off" and select("#", ...) < 2 then return fn(...) end
          owner[name] = fn
          require "ffi".C.raise(2)
          return fn(...)
        end
      end
    end]]
    it("reacts to Ctrl-C between Enter and the line's first step #timed", function()
      ask(p, "require 'ffi'.cdef 'int raise(int);'")
      for _, point in ipairs { "compile", "execute", "off" } do
        process.within(0.2, function()
          ask(p, ("point = '%s' "):format(point) .. raise_once:gsub("%s+", " "))
          p:type "while true do end\n"
          assert(p:expect("while true do end\r\n"))
          local before = process.now()
          assert(p:expect("interrupted\r\n"), point)
          assert(p:expect("> "), point)
          return process.now() - before
        end)
        assert.are.equal("7", ask(p, "3 + 4"))
      end
      ask(p, "point = 'compile' " .. raise_once:gsub("%s+", " "))
      p:type "for k = 1, 2 do\n"                        -- needs more lines, and is discarded
      assert(p:expect "for k = 1, 2 do")
      assert(p:expect "\n> ")
      assert.are.equal("7", ask(p, "3 + 4"))
    end)

    if name:find "without" then it("hears Ctrl-C between the prompt and the waiting for a line", function()
      ask(p, "require 'ffi'.cdef 'int raise(int);'")
      p:type("of = debug.getmetatable(io.stdout).__index; flush, left = of.flush, 2; of.flush = function(file) flush(file); left = left - 1; "
        .. "if left == 0 then of.flush = flush; require 'ffi'.C.raise(2) end end\n")
      assert(p:expect "raise(2) end end\r\n> \r\n> ")       -- the second prompt appears without a key press
      assert.are.equal("7", ask(p, "3 + 4"))
    end) end

    it("returns although a pcall surrounds what Ctrl-C ends, and survives repeated Ctrl-C", function()
      for _, line in ipairs {
        "while true do pcall(function() while true do end end) end",
        "while true do pcall(function() local x = ms.ones(64, 64) return x:matmul(x) end) end",
        "for _ in ms.steps(1e9) do pcall(ms.no_grad, function() while true do end end) end",
      } do
        prompt.run(p, line)
        p:read(0.1)
        p:type "\3\3\3"
        assert(p:expect "interrupted", line)
        again(p)                                        -- the other two may each discard a line
        assert.are.equal("4", ask(p, "2 + 2"))
        assert.are.equal("true", ask(p, "ms.is_grad_enabled()"))
      end
    end)

    it("survives errors without a text, and assignments to names that it uses itself", function()
      assert.are.equal("an error that has no text (table)",
        ask(p, "error(setmetatable({}, { __tostring = function() error 'no' end }))"))
      ask(p, "tostring, pcall, io, debug = nil")
      assert.are.equal("4", ask(p, "2 + 2"))
    end)

    it("keeps memory bounded in a loop", function()
      ask(p, "t = ms.zeros(256, 1024)")                 -- 1 MiB each: 10,000 of them would be 10 GiB
      ask(p, "for k = 1, 10000 do local u = t + k end", 60)
      local peak = tonumber(ask(p, "ms.memory_stats().peak_allocated"))
      assert.is_true(peak < 512 * 2 ^ 20, "peak " .. tostring(peak))
    end)

    it("explains names, with or without the library's before them", function()
      assert.truthy(ask(p, "? nn.Linear"):find("Linear", 1, true))
      assert.truthy(ask(p, "? fully_shard"):find("fully_shard(", 1, true))
      assert.truthy(ask(p, "help"):find("ms is the library", 1, true))
      assert.matches("Concatenates tensors along d", ask(p, "? ms.cat"))
      assert.matches("Exponentials that add up to 1", ask(p, "? softmax"))
      assert.matches("did you mean 'narrow'", ask(p, "? narow"))
    end)

    it("searches names and texts, and lists modules and methods", function()
      local text = ask(p, "? *soft*")
      local names, texts = text:match "^names:\n(.*)\ntexts:\n(.*)$"
      assert.truthy(names:find("ms.nn.F.softmax ", 1, true) and names:find("t:log_softmax ", 1, true), text)
      assert.truthy(texts:find("ms.nn.F.cross_entropy ", 1, true), text)     -- its text says softmax
      assert.is_nil(names:find("cross_entropy", 1, true))
      assert.matches("^names:\n  ms.nn.F.relu +max", ask(p, "? nn.F.rel*"))
      assert.are.equal("no name and no text matches '*qqq*'", ask(p, "? *qqq*"))
      assert.matches("\n  ms.optim.lr_scheduler.%S+ +%S", ask(p, "? optim"))
      text = ask(p, "? nn.Module")
      assert.matches("\nmethods:\n.*\n  named_parameters%(.-%) +%S", text)
      text = ask(p, "? nn.Linear")
      assert.matches("\nmethods:\n.*\n  reset_parameters%(%) +Initialises", text)
      assert.matches("\nmethods of Module:\n.* named_parameters ", text)
      assert.matches("\nmethods %(%? name explains one%):\n.* softmax ", ask(p, "? Tensor"))
    end)

    it("describes a tensor, with a histogram of its values", function()
      ask(p, "t = ms.arange(100):float()")
      assert.are.equal("Tensor float32 [100] cpu\n  placement: whole on this rank; 400 bytes\n"
        .. "  min 0, max 99, mean 49.5, standard deviation 28.87, zeros 1",
        ask(p, "? t"):match "^[^\n]*\n[^\n]*\n[^\n]*")
      local bins = 0
      for count in ask(p, "? t"):gmatch " to [^\n]- (%d+)%f[\n%z]" do
        assert.are.equal("10", count)
        bins = bins + 1
      end
      assert.are.equal(10, bins)
      ask(p, "t = ms.tensor{1, 0/0, 1/0, -1/0, 3}")
      assert.matches("\n  not finite: 1 nan, 2 infinite\n  min 1, max 3, mean 2, standard deviation 1, zeros 0\n", ask(p, "? t"))
      ask(p, "t = ms.zeros(3):eq(0); u = ms.full({2}, 7); v = ms.empty(0); w = ms.ones(2, { device = 'meta' })")
      assert.matches("\n  true 3, false 0$", ask(p, "? t"))
      assert.matches("\n  all 7$", ask(p, "? u"))
      assert.are.equal("Tensor float32 [0] cpu\n  placement: whole on this rank; 0 bytes", ask(p, "? v"))
      assert.matches("^Tensor float32 %[2%] meta\n", ask(p, "? w"))
      ask(p, "w:release()")
      assert.matches("^Tensor %(released%)", ask(p, "? w"))
      assert.are.equal("true", ask(p, "ms.is_grad_enabled()"))
    end)

    if not name:find "without" then it("completes names, fields and files", function()
      assert.are.equal("true", ask(p, "ms.is_ten\t(ms.tensor{1})"))
      ask(p, "t = ms.tensor{1, 2, 3}")
      assert.are.equal("3", ask(p, "t:nume\t()"))
      local folder = process.temp_folder()
      finally(function() process.remove_folder(folder) end)
      process.write(folder .. "/unmistakable.lua", "return 41 + 1")
      assert.are.equal("42", ask(p, "dofile('" .. folder .. "/unmis\t)"))
      os.remove(folder .. "/unmistakable.lua")
    end) end

    if not name:find "without" then it("gives the line up at Ctrl-C in readline's question and in its pager", function()
      ask(p, "t = ms.ones(2)")
      for _, answer in ipairs { "", "y" } do            -- y: prints six lines of names, then the pager waits
        p:type "t:\t\t"
        assert(p:expect "possibilities? (y or n)")
        p:type(answer)
        if answer == "y" then assert(p:expect "--More--") end
        p:type "\3"
        assert(p:expect "> t:")                         -- redrawn, then discarded
        assert(p:expect "\n> ")
        assert.are.equal("7", ask(p, "3 + 4"))
      end
    end) end

    it("leaves at Ctrl-D", function()
      p:type "\4"
      assert.are.equal(0, (p:finish(5)))
    end)

    for _, word in ipairs { "exit", "quit", "exit()", "quit();" } do
      it("leaves at " .. word, function()
        p:type(word .. "\n")
        assert.are.equal(0, (p:finish(5)))
      end)
    end

    it("does not leave at restart, a word of prompts over ranks", function()
      assert.truthy(ask(p, "restart"):find "nil")
      assert.are.equal("4", ask(p, "2 + 2"))
    end)

    it("accepts help(name) as ? name, and respects the session's own names", function()
      assert.truthy(ask(p, "help()"):find("ms is the library", 1, true))
      for _, line in ipairs { "help(ms.cat)", "help 'ms.cat'", "help ms.cat", "help(cat)" } do
        assert.matches("Concatenates tensors along d", ask(p, line))
      end
      ask(p, "help, exit = 5, 6")
      assert.are.equal("5", ask(p, "help"))
      assert.are.equal("6", ask(p, "exit"))
    end)
  end)
end

describe("lines pasted at the prompt", function()
  local p
  local paste = prompt.paste
  before_each(function() p = open(ways["scripts/repl"], nil, prompt.pasting) end)
  after_each(function() p:finish(0) end)

  it("run one after the other", function()
    assert.are.equal("4", paste(p, { "y = 4", "y" }))
    assert.are.equal("1\n2\n6", paste(p, { "for k = 1, 2 do", "\tprint(k)", "end", "", "local w = y", "w + 2", "" }))
    assert.are.equal("nil\n7", paste(p, { "nothing", "3 + 4" }))
    assert.are.equal("prompt:1: unfinished string near ''half'\n7", paste(p, { "x = 'half", "3 + 4" }))
  end)

  it("may hold empty lines, and lines that continue the one before", function()
    assert.are.equal("9", paste(p, { "function f()", "", "", "", "  return 9", "end", "f()" }))
    assert.are.equal("12", paste(p, { "z = 5", "  + 7", "z" }))
    assert.are.equal("Tensor float32 [] cpu\n8.", paste(p, { "t = ms.ones(2, 4)", "  :sum()", "t" }))
    assert.are.equal("true", paste(p, { "z == 12", "  and t:item() == 8" }))
    assert.are.equal("-12", paste(p, { "t = nil", "-z" }))
  end)

  it("are dropped by Ctrl-C where they have not run", function()
    p:type("\27[200~while true do end\nprint 'not run'\27[201~\n")
    assert(p:expect "\27[?2004l")
    p:read(0.2)
    p:type "\3"
    local text = assert(p:expect "> ")
    assert.matches("interrupted", text)
    assert.is_nil(text:find "not run")
    assert.are.equal("7", paste(p, { "3 + 4" }))
  end)
end)

describe("the history of the prompt", function()
  local up = "\27[A"
  it("recalls a statement of several lines as one, in this session and the next", function()
    local history = own_folder .. "/history"
    local p = open(ways["scripts/repl"], history)
    assert.are.equal("5", ask(p, "2 + 3"))
    assert.are.equal("10\n20", prompt.ask_lines(p, { "for k = 1, 2 do -- twice", "", "print(k * 10)", "end" }))
    assert.are.equal("6", ask(p, "3 + 3"))
    p:type(up .. up)
    assert(p:expect "for k = 1, 2 do -- twice\r\n")
    p:type "\n"
    assert(p:expect "10\r\n20\r\n> ")
    p:type "\4"
    assert.are.equal(0, (p:finish(5)))

    p = open(ways["scripts/repl"], history)
    p:type(up .. up)                                    -- the last history entry is the block again
    assert(p:expect "3 + 3")
    p:type(up .. "\n")
    assert(p:expect "10\r\n20\r\n> ")
    p:type(up .. up .. up .. up .. up .. "\n")
    assert(p:expect "5\r\n> ")
    p:finish(0)
  end)
end)

for way, words in pairs(ways) do
  describe(way .. " under mpirun", function()
    it("refuses at once on every rank", function()
      local out = own_folder .. "/out"
      local child = process.start({ "mpirun", "-n", "2", unpack(words) },
        { stdout = out, stderr = out .. ".err", env = process.mpirun_env() })
      assert.are.equal(2, child:wait(20) or child:stop())
      local text = process.read(out .. ".err")
      assert.matches("repl: this prompt is for one process, and this is a job of 2 ranks: start scripts/repl %-%-ranks 2", text)
      assert.are.equal(1, select(2, text:gsub("repl: ", "")))
      assert.is_nil(process.read(out):find("the library is ms", 1, true))
    end)
  end)
end

describe("showing values at the prompt", function()
  local repl = require "moonshard.tools.repl"
  it("opens plain tables", function()
    assert.are.equal('{ 1, "a", k = true }', repl.show { 1, "a", k = true })
    assert.are.equal("{}", repl.show {})
    assert.are.equal("text", repl.show "text")
  end)
  it("distinguishes incomplete from invalid input", function()
    local _, _, more = repl.compile "for k = 1, 2 do"
    assert.is_true(more)
    _, _, more = repl.compile "for for"
    assert.is_falsy(more)
    _, _, more = repl.compile "1 +"
    assert.is_true(more)
    _, _, more = repl.compile "m.weight ="
    assert.is_true(more)
  end)
  it("accepts statements followed by an expression", function()
    assert.are.equal(7, repl.compile "repl_spec_x = 3; repl_spec_x + 4"())
    rawset(_G, "repl_spec_x", nil)
  end)
end)
