-- SPDX-License-Identifier: MIT
--- ms.profiler: ranges of time, nesting, sums, files.
local ms = require "moonshard"
local cjson = require "cjson"
local golden = require "spec.support.golden"
local message = require "spec.support.message"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local nn, optim, profiler = ms.nn, ms.optim, ms.profiler

-- Events of a category as "name" or "name|detail", in the order of their starts.
local function names(p, category, with_detail)
  local events, out = p:events(), {}
  for k, e in ipairs(events) do e.place = k end
  table.sort(events, function(a, b)
    if a.start ~= b.start then return a.start < b.start end
    return a.place > b.place                            -- of two that begin together, the outer one ends last
  end)
  for _, e in ipairs(events) do
    if e.category == category then out[#out + 1] = with_detail and e.name .. "|" .. e.detail or e.name end
  end
  return out
end

local function find(p, name)
  for _, e in ipairs(p:events()) do
    if e.name == name then return e end
  end
end

local function row(averages, key)
  for _, r in ipairs(averages) do
    if r.key == key then return r end
  end
end

local function inside(a, b) return a.start >= b.start and a.start + a.duration <= b.start + b.duration end

describe("the profiler", function()
  it("records the operators of a function, in order, and gives its results", function()
    local p, a, b = profiler.profile(function()
      local x = ms.ones(2, 3)
      return x:exp():sum():item(), "b"
    end)
    assert.is_true(math.abs(a - 6 * math.exp(1)) < 1e-5)
    assert.are.equal("b", b)
    local ops = table.concat(names(p, "operator"), " ")
    assert.matches("exp sum", ops)
  end)

  it("records nothing before and after", function()
    local x = ms.ones(3)
    x:exp()
    local p = profiler.start()
    x:log()
    p:stop()
    x:exp()
    assert.are.same({ "log" }, names(p, "operator"))
    assert.are.equal(p, p:stop())
  end)

  it("puts a backward's operators inside the backward of the operator that was recorded", function()
    local w = ms.ones(4, 4):requires_grad_()
    local p = profiler.profile(function() (ms.ones(2, 4):matmul(w)):sum():backward() end)
    local whole, node = find(p, "backward"), find(p, "backward of matmul")
    assert.is_true(inside(node, whole))
    local within = 0
    for _, e in ipairs(p:events()) do
      if e.category == "operator" and inside(e, node) then within = within + 1 end
    end
    assert.is_true(within > 0)
  end)

  it("names modules by their paths from the one that is called, unless told not to", function()
    local Net = nn.Module:extend "Net"
    function Net:init() self.body = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1))) end
    function Net:forward(x) return self.body(x) end
    local net = Net()
    local seen = 0
    net.body[1]:register_forward_hook(function() seen = seen + 1 end)
    local p = profiler.profile(function() net(ms.ones(1, 2)) end)
    assert.are.same({ "Net", "body (Sequential)", "body.1 (Linear)", "body.2 (Sequential)", "body.2.1 (ReLU)",
      "body.2.2 (Linear)" }, names(p, "module"))
    assert.is_true(inside(find(p, "body.2.2 (Linear)"), find(p, "body.2 (Sequential)")))
    assert.are.equal(1, seen)
    assert.are.same({ "Sequential", "1 (ReLU)", "2 (Linear)" },
      names(profiler.profile(function() net.body[2](ms.ones(1, 3)) end), "module"))
    assert.are.same({}, names(profiler.profile({ with_modules = false }, function() net(ms.ones(1, 2)) end), "module"))
  end)

  it("searches once for an unregistered module", function()
    local stray, walks, Net = nn.Linear(2, 2), 0, nn.Module:extend "Net"
    function Net:init() self.own = nn.Linear(2, 2) end
    function Net:forward(x) return self.own(stray(stray(stray(x)))) end
    function Net:named_modules(...)
      walks = walks + 1
      return nn.Module.named_modules(self, ...)
    end
    local net = Net()
    local p = profiler.profile(function() for _ = 1, 3 do net(ms.ones(1, 2)) end end)
    assert.are.same({ "Net", "Linear", "Linear", "Linear", "own (Linear)" }, { unpack(names(p, "module"), 1, 5) })
    assert.are.equal(1, walks)
  end)

  it("records the shapes of inputs on request, and sums by them", function()
    local function run() for _ = 1, 2 do ms.ones(2, 3):matmul(ms.ones(3, 4)):add(ms.ones(4)) end ms.ones(5,
      3):matmul(ms.ones(3, 4)) end
    local p = profiler.profile({ record_shapes = true }, run)
    assert.are.equal("[2, 3] float32, [3, 4] float32", find(p, "matmul").detail)
    assert.are.equal("[2, 4] float32, [4] float32", find(p, "add").detail)
    assert.are.equal(3, row(p:key_averages(), "matmul").count)
    local counts = {}
    for _, r in ipairs(p:key_averages { group_by_input_shape = true }) do
      if r.key == "matmul" then counts[r.detail] = r.count end
    end
    assert.are.same({ ["[2, 3] float32, [3, 4] float32"] = 2, ["[5, 3] float32, [3, 4] float32"] = 1 }, counts)
    assert.are.equal("", find(profiler.profile(run), "matmul").detail)
  end)

  it("adds up: the ranges' own times sum to the total, which does not exceed the recorded time", function()
    local net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    local o = optim.AdamW(net:parameters())
    local p = profiler.profile(function()
      for _ in ms.steps(20) do
        net(ms.ones(4, 16)):sum():backward()
        o:step()
        o:zero_grad()
      end
    end)
    local averages, own = p:key_averages(), 0
    for _, r in ipairs(averages) do
      assert.is_true(r.self_cpu_time_total >= -1e-3 and r.self_cpu_time_total <= r.cpu_time_total + 1e-3)
      assert.is_true(math.abs(r.cpu_time * r.count - r.cpu_time_total) < 1e-6 * r.cpu_time_total + 1e-9)
      own = own + r.self_cpu_time_total
    end
    local top = row(averages, "step").cpu_time_total
    assert.is_true(math.abs(own - averages.covered) < 1e-3 * own)
    assert.is_true(top <= averages.covered + 1e-3 and averages.covered <= averages.recorded)
    assert.are.equal(20, row(averages, "step").count)
    assert.are.equal(20, row(averages, "AdamW.step").count)
    assert.are.equal(40, row(averages, "backward of linear").count)
  end)

  it("counts no time twice where ranges overlap: in coroutines that take turns, in a step that was left", function()
    local function busy(seconds)
      local from = os.clock()
      while os.clock() - from < seconds do end
    end
    local function adds_up(p)
      local averages, own = p:key_averages(), 0
      for _, r in ipairs(averages) do
        assert.is_true(r.self_cpu_time_total >= -1e-3 and r.self_cpu_time_total <= r.cpu_time_total + 1e-3,
          tostring(averages))
        own = own + r.self_cpu_time_total
      end
      assert.is_true(math.abs(own - averages.covered) < 1e-3 * own, tostring(averages))
      assert.is_true(averages.covered <= averages.recorded, tostring(averages))
    end
    local function range(name)
      return coroutine.wrap(function() profiler.record_function(name,
        function() busy(1e-3) coroutine.yield() busy(1e-3) end) end)
    end
    adds_up(profiler.profile(function()
      profiler.record_function("around", function()
        local a, b = range "a", range "b"
        a() b() busy(5e-3) a() b()
      end)
    end))
    adds_up(profiler.profile(function()
      profiler.record_function("around", function()
        for step in ms.steps(3) do
          if step == 2 then break end
        end
        busy(3e-3)
      end)
      busy(2e-3)
      for _ in ms.steps(2) do busy(1e-3) end
    end))
  end)

  it("has a range for each step of ms.steps, in both of its forms, the outer loop's", function()
    local p = profiler.profile(function()
      for _ in ms.steps(2) do ms.steps(3, function() end) end
      ms.steps(2, function() ms.steps(3, function() end) end)
      pcall(ms.steps, 2, function() error "on purpose" end)
      ms.steps(1, function() end)
    end)
    assert.are.same({ "step 1", "step 2", "step 1", "step 2", "step 1", "step 1" }, names(p, "step"))
  end)

  it("records in several profiles at once, each what began in it and what it asked for", function()
    local net, inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), nil
    net[2]:register_forward_pre_hook(function() inner = inner or profiler.start { with_modules = false,
      record_shapes = true } end)
    local outer = profiler.profile(function()
      net(ms.ones(1, 2))
      inner:stop()
      net[1](ms.ones(3, 2))
    end)
    assert.are.same({ "Sequential", "1 (Linear)", "2 (Sequential)", "2.1 (Linear)", "Linear" }, names(outer, "module"))
    assert.are.same({}, names(inner, "module"))
    assert.are.same({ "fill_|", "linear|", "linear|", "fill_|", "linear|" }, names(outer, "operator", true))
    assert.are.same({ "linear|[1, 2] float32, [2, 2] float32, [2] float32" }, names(inner, "operator", true))
    inner = nil                                         -- its texts stay until no other profiler needs them
    collectgarbage()
    assert.are.equal("Linear", names(outer, "module")[5])
  end)

  it("ends with a profile that can no longer be stopped", function()
    local thread = coroutine.create(function() profiler.profile(coroutine.yield) end)
    assert.is_true(coroutine.resume(thread))
    local lib = require "moonshard.core.ffi".lib
    assert.are_not.equal(0, lib.ms_trace_wanted())
    thread = nil                                        -- luacheck: ignore
    collectgarbage()
    assert.are.equal(0, lib.ms_trace_wanted())
    assert.are.equal("exp", names(profiler.profile(function() ms.ones(2):exp() end), "operator")[2])
  end)

  it("releases memory that a profile did not need", function()
    local function mapped() return tonumber(process.read "/proc/self/status":match "VmSize:%s*(%d+)") end
    profiler.profile(function() ms.ones(2):exp() end)
    local kept, before = {}, mapped()
    for k = 1, 20 do kept[k] = profiler.profile(function() ms.ones(2):exp() end) end
    assert.is_true(mapped() - before < 10 * 56e6 / 1024, mapped() - before)     -- limit = 1000000: 56 MB each
    assert.are.equal(2, #kept[20]:events())
  end)

  it("counts the bytes that an operator's results take, and what the end of a scope releases", function()
    local p = profiler.profile(function() ms.scope(function() ms.ones(1000):exp() end) end)
    assert.are.equal(4000, find(p, "exp").memory)
    -- A range counts all devices, including tensors of earlier specs that wait for garbage collection, also on a GPU.
    collectgarbage()
    collectgarbage()
    local before = ms.memory_stats("cpu").allocated + ms.memory_stats("cuda").allocated
    local x
    local q = profiler.profile(function() x = profiler.record_function("mine", function() return ms.ones(500) end) end)
    assert.are.equal(2000, find(q, "mine").memory)
    assert.are.equal(before + 2000, find(q, "mine").allocated)
    assert.are.equal(500, x:numel())
  end)

  it("has ranges of the script's own, with results and errors passed on", function()
    assert.are.same({ 3, "x" }, { profiler.record_function("off", function(...) return select("#", ...), (...) end, "x",
      nil, 2) })
    local ok, why
    local p = profiler.profile(function()
      profiler.record_function("outer", function() profiler.record_function("inner",
        function() ms.ones(2):exp() end) end)
      ok, why = pcall(profiler.record_function, "bad", function() error("on purpose", 0) end)
    end)
    assert.are.same({ false, "on purpose" }, { ok, why })
    assert.are.same({ "outer", "inner", "bad" }, names(p, "user"))
    assert.is_true(inside(find(p, "exp"), find(p, "inner")) and inside(find(p, "inner"), find(p, "outer")))
  end)

  it("changes no number and no message", function()
    local function train()
      ms.manual_seed(3)
      local net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
      local o, losses = optim.Adam(net:parameters(), { lr = 0.01 }), {}
      for step in ms.steps(5) do
        local loss = net(ms.randn(4, 8)):pow(2):mean()
        loss:backward()
        o:step()
        o:zero_grad()
        losses[step] = loss:item()
      end
      return losses, select(2, pcall(function() return net(ms.ones(2, 3)) end))
    end
    local plain, said = train()
    local _, profiled, same = profiler.profile(train)
    assert.are.same(plain, profiled)
    assert.are.equal(said, same)
    assert.matches("sequential.1: linear", said)
    -- A failed call leaves no module open: the next call is the outermost.
    local net = nn.Sequential(nn.Linear(2, 2))
    local p = profiler.profile(function()
      pcall(net, ms.ones(1, 3))
      net[1](ms.ones(1, 2))
    end)
    assert.are.same({ "Sequential", "1 (Linear)", "Linear" }, names(p, "module"))
    -- A call in a coroutine that never resumes leaves no module open, either.
    local Waits = nn.Module:extend "Waits"
    function Waits.forward() coroutine.yield() end
    profiler.profile(function() coroutine.resume(coroutine.create(function() Waits()() end)) end)
    assert.are.same({ "Sequential", "1 (Linear)" }, names(profiler.profile(function() net(ms.ones(1, 2)) end),
      "module"))
  end)

  it("keeps as many ranges as its limit, and reports the number of dropped ones", function()
    local p = profiler.profile({ limit = 10 }, function() for _ = 1, 25 do ms.ones(1):exp() end end)
    assert.are.equal(10, #p:events())
    local text = tostring(p)
    local dropped = tonumber(text:match "dropped (%d+) ranges? %(limit = 10%)")
    assert.is_true(dropped >= 15, text)
  end)

  it("prints a table, sorted by the given column and cut at the given number of rows", function()
    local p = profiler.profile(function()
      for _ = 1, 3 do ms.ones(4):exp() end
      ms.ones(4):log()
    end)
    local text = p:key_averages():table { sort_by = "count", row_limit = 1 }
    local lines = {}
    for line in text:gmatch "[^\n]+" do lines[#lines + 1] = line end
    assert.matches("^name +self +self %% +total +total %% +mean +calls +self memory$", lines[1])
    assert.matches("more rows$", lines[3])
    assert.matches("^recorded .+, of which .+ in ranges of the script's thread$", lines[4])
    local by_name = p:key_averages():table { sort_by = "key" }
    assert.is_true(by_name:find("\nexp ", 1, true) < by_name:find("\nlog ", 1, true))
    assert.matches("\nname_that_i.%.%. ", "\n" .. profiler.profile(function()
      profiler.record_function("name_that_is_longer_than_fits", function() end)
    end):key_averages():table { max_name_column_width = 14 })
  end)

  it("writes Chrome's trace format, whatever the names", function()
    local path = process.temp_folder() .. "/trace.json"
    local odd = 'a "b" \\ c\n\1'
    local p = profiler.profile({ record_shapes = true }, function()
      profiler.record_function(odd, function() ms.ones(300):exp() end)
    end)
    assert.are.equal(path, p:export_chrome_trace(path))
    local trace = cjson.decode(process.read(path))
    local complete, found, memory = 0, nil, nil
    for _, e in ipairs(trace.traceEvents) do
      if e.ph == "X" then
        complete = complete + 1
        assert.is_true(e.dur >= 0 and e.ts > 0 and e.pid == 0 and e.tid == 0)
        if e.name == odd then found = e end
        if e.name == "exp" then assert.are.equal("[300] float32", e.args.detail) end
      elseif e.ph == "C" then
        memory = math.max(memory or 0, e.args.other)
      end
    end
    -- Invalid UTF-8 would make the whole file unreadable.
    local bytes = "caf\xe9 \xc3\xa9 \xed\xa0\x80"
    profiler.profile(function() profiler.record_function(bytes, function() end) end):export_chrome_trace(path)
    assert.truthy(process.read(path):find('"caf\\ufffd \xc3\xa9 \\ufffd\\ufffd\\ufffd"', 1, true))
    assert.are.equal(#p:events(), complete)
    assert.are.equal("user", found.cat)
    assert.is_true(memory >= 1200)
  end)

  it("refuses wrong calls by name", function()
    local path = process.temp_folder() .. "/missing/trace.json"
    local function says(pattern, fn) assert.matches(pattern, select(2, pcall(fn))) end
    local p = profiler.start()
    says("profiler.start: called with a colon", function() profiler:start() end)
    says("events: the profile is still recording; call stop%(%) first", function() p:events() end)
    assert.are.equal("Profile(recording)", tostring(p))
    p:stop()
    says("cannot write '.*missing/trace.json': No such file or directory", function() p:export_chrome_trace(path) end)
    says("export_chrome_trace: argument 1 is a number %(3%), expected a path", function() p:export_chrome_trace(3) end)
    says("profiler.start: option 'limit' is a number %(0.5%), expected a whole number from 1",
      function() profiler.start { limit = 0.5 } end)
    says("unknown option 'shapes'", function() profiler.start { shapes = true } end)
    says("table: option 'sort_by' is 'time', expected one of",
      function() p:key_averages():table { sort_by = "time" } end)
    says("export_chrome_trace: the path .* contains a zero byte", function() p:export_chrome_trace(path .. "\0x") end)
    says("table: row_limit is a number %(0.5%), expected a whole number of rows, or %-1 for all",
      function() p:key_averages():table { row_limit = 0.5 } end)
    says("table: option 'max_name_column_width' is a number %(3%), expected a number from 4",
      function() p:key_averages():table { max_name_column_width = 3 } end)
    says("table: self is nil, expected the averages of a profile", function() p:key_averages().table() end)
    says("profiler_spec.lua:%d+: stop: self is nil, expected a profile", function() p.stop() end)
    says("record_function: argument 1 is a function, expected a name", function() profiler.record_function(print) end)
    says("record_function: argument 2 is nil, expected a function", function() profiler.record_function "x" end)
    says("profiler.profile: the last argument is nil, expected a function", function() profiler.profile() end)
    says("profiler.profile: the last argument is nil, expected a function",
      function() profiler.profile { limit = 3 } end)
    says("events: self is nil, expected a profile", function() p.events() end)
    says("on purpose", function() profiler.profile(function() error("on purpose", 0) end) end)
    profiler.profile(function() end)                    -- the failed profile has ended
  end)
end)

ranks.describe(2, "the profiler over ranks #timed", function()
  local fsdp, dist = ms.fsdp, ms.dist
  local rank = dist.rank()

  it("names the phases of units as PyTorch does", function()
    local model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 2))
    local precision = fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16", output_dtype = "bfloat16" }
    for k = 1, 2 do fsdp.fully_shard(model[k], { mp_policy = precision }) end
    fsdp.fully_shard(model, { mp_policy = precision })
    local input = ms.ones(2, 64):requires_grad_()
    local function step() model(input):sum():backward() end
    step()
    local p = profiler.profile(step)
    local seen = {}
    for _, name in ipairs(names(p, "fsdp")) do seen[name] = (seen[name] or 0) + 1 end
    for _, unit in ipairs { "", " (1)", " (2)" } do
      local again = unit == "" and 1 or 2               -- the root stays gathered for its backward
      assert.are.equal(again, seen["FSDP::all_gather" .. unit], unit)
      assert.are.equal(again, seen["FSDP::all_gather_copy_out" .. unit], unit)
      for _, phase in ipairs { "pre_forward", "post_forward", "pre_backward", "post_backward_accumulate",
        "post_backward_reshard", "post_backward_reduce", "post_backward_rs_wait" } do
        assert.are.equal(1, seen["FSDP::" .. phase .. unit], phase .. unit)
      end
    end
    assert.are.equal(1, seen["FSDP::inputs_to_device"])
    assert.are.equal(3, seen["FSDP::cast_forward_inputs"])
    assert.are.equal(3, seen["FSDP::cast_forward_outputs"])
    assert.are.equal(1, seen["FSDP::root_post_backward"])
    assert.are.equal(1, seen["FSDP::backward_prefetch for 1"])
    assert.are.equal(1, seen["FSDP::forward_prefetch for 2"])
    assert.is_true(inside(find(p, "FSDP::all_gather (2)"), find(p, "FSDP::forward_prefetch for 2")))
    assert.is_true(inside(find(p, "FSDP::all_gather_copy_out (1)"), find(p, "FSDP::pre_forward (1)")))
  end)

  it("shows collectives on the queue that ran them, with their unit", function()
    local model = nn.Sequential(nn.Linear(64, 512))     -- more than the 64 KiB that are reduced at once
    fsdp.fully_shard(model[1])
    fsdp.fully_shard(model)
    local p = profiler.profile(function() model(ms.ones(2, 64)):sum():backward() end)
    local reduce = find(p, "reduce_scatter")
    assert.are.equal("reduce queue", reduce.thread)
    assert.matches("unit 1$", reduce.detail)
    local gather = find(p, "all_gather")
    assert.are.equal("script", gather.thread)           -- nothing hides the first gather
    assert.is_true(inside(gather, find(p, "FSDP::all_gather (1)")))
    assert.matches(" reduce queue", tostring(p))
  end)

  it("names the rank that arrived last, and the time spent waiting for it", function()
    dist.barrier()
    local p = profiler.profile(function()
      if rank == 1 then
        local from = ms.time and ms.time() or os.clock()
        while (ms.time and ms.time() or os.clock()) - from < 0.05 do end
      end
      dist.all_reduce(ms.ones(3))
    end)
    local wait = find(p, "waiting for ranks")
    assert.is_true(inside(wait, find(p, "all_reduce")))
    if rank == 0 then
      assert.are.equal("rank 1 arrived last", wait.detail)
      assert.is_true(wait.duration > 0.02)
    end
  end)
end)

describe("a profile with a schedule", function()
  local function recorded(schedule, steps)
    local list, seen = {}, {}
    local last, result = profiler.profile({ schedule = schedule, with_modules = false, on_trace_ready = function(p)
      local of = {}
      for _, e in ipairs(p:events()) do of[#of + 1] = e.name end
      list[#list + 1], seen[p] = table.concat(of, " "), #list + 1
    end }, function(p)
      for k = 1, steps do
        assert.equal(k - 1, p.step_num)
        profiler.record_function(tostring(k), function() end)
        p:step()
      end
      return "done"
    end)
    assert.equal("done", result)
    return list, last and seen[last]
  end

  it("records the active steps of each cycle as one profile", function()
    local schedule = profiler.schedule { wait = 1, warmup = 1, active = 2, skip_first = 1 }
    local list, last = recorded(schedule, 9)
    assert.same({ "4 5", "8 9" }, list)
    assert.equal(2, last)
    -- A loop that ends inside a cycle leaves a profile of the steps so far.
    assert.same({ "4" }, (recorded(schedule, 4)))
  end)

  it("ends after its repeats, and gives no profile if no step was recorded", function()
    local list, last = recorded(profiler.schedule { active = 1, repeats = 2 }, 6)
    assert.same({ "1", "2" }, list)
    assert.equal(2, last)
    list, last = recorded(profiler.schedule { wait = 5, active = 1 }, 3)
    assert.same({}, list)
    assert.is_nil(last)
  end)

  it("gives as many profiles as PyTorch, for each schedule and length of the loop", function()
    for _, case in ipairs(golden.load("profiles").cases) do
      local wait, warmup, active, repeats, skip_first = unpack(case.schedule)
      local schedule = profiler.schedule { wait = wait, warmup = warmup, active = active, repeats = repeats,
        skip_first = skip_first }
      local counts = {}
      for steps = 0, #case.counts - 1 do counts[steps + 1] = #recorded(schedule, steps) end
      assert.same(case.counts, counts, table.concat(case.schedule, " "))
    end
  end)

  it("drops a recording that the schedule does not end, with a warning", function()
    local actions = { [0] = "none", "record", "none", "record", "record_and_save" }
    local warnings, list = ms.catch_warnings(recorded, function(k) return actions[k] or "none" end, 6)
    assert.same({ "4 5" }, list)
    assert.same({ "profiler.profile: the schedule returned 'record' and then 'none', so the recording is dropped; its last step needs "
      .. "'record_and_save'" }, warnings)
  end)

  it("has PyTorch's actions", function()
    local schedule = profiler.schedule { wait = 1, warmup = 1, active = 2, repeats = 2, skip_first = 1 }
    local actions = {}
    for k = 0, 10 do actions[k + 1] = schedule(k) end
    assert.same({ "none", "none", "warmup", "record", "record_and_save", "none", "warmup", "record", "record_and_save",
      "none", "none" }, actions)
  end)

  it("refuses wrong schedules, and stops recording at an error", function()
    assert.matches("profiler.schedule: option 'active' is missing", message(profiler.schedule, {}))
    assert.matches("option 'schedule' is a number %(3%), expected a function", message(profiler.profile,
      { schedule = 3 }, function() end))
    assert.matches("the result of the schedule is 'all', expected one of", message(profiler.profile,
      { schedule = function() return "all" end }, function() end))
    assert.matches("in the step", message(profiler.profile, { schedule = profiler.schedule { active = 9 } },
      function() error "in the step" end))
  end)

  it("has the memory of the script by PyTorch's name", function()
    local report = profiler.memory_snapshot { device = "cpu" }
    assert.matches("^MemoryReport of cpu", tostring(report))
  end)
end)
