-- SPDX-License-Identifier: MIT
--- ms.cuda's streams, events, graphs and figures of memory: PyTorch's names for what the engine does by itself.
local ms = require "moonshard"
local collected = require "spec.support.collected"
local message = require "spec.support.message"
local cuda, nn = ms.cuda, ms.nn

describe("ms.cuda #cuda", function()
  it("counts the bytes of tensors, their peak, and what is reserved", function()
    collected()
    cuda.reset_peak_memory_stats()
    local before = cuda.memory_allocated()
    local t = ms.ones(1000, 1000, { device = "cuda" })
    assert.is_true(cuda.memory_allocated() - before >= 4e6)
    assert.equal(cuda.memory_allocated(), cuda.memory_allocated "cuda:0")
    assert.is_true(cuda.memory_reserved() >= cuda.memory_allocated())
    t:release()
    assert.equal(before, cuda.memory_allocated(0))
    assert.is_true(cuda.max_memory_allocated() - before >= 4e6)
    assert.is_true(cuda.max_memory_reserved() >= cuda.max_memory_allocated())
    cuda.reset_peak_memory_stats()
    assert.equal(before, cuda.max_memory_allocated())
    assert.matches("^MemoryReport of cuda:0: ", cuda.memory_summary())
    cuda.empty_cache()
    assert.matches("device 77 does not exist", message(function() cuda.memory_allocated(77) end))
  end)

  it("seeds the generator of all devices", function()
    cuda.manual_seed(5)
    local a = ms.rand(3, { device = "cuda" }):tolist()
    ms.manual_seed(5)
    assert.same(a, ms.rand(3, { device = "cuda" }):tolist())
  end)

  it("measures time between events, and refuses events that have none", function()
    local first, last, plain = cuda.Event { enable_timing = true }, cuda.Event { enable_timing = true }, cuda.Event()
    first:record()
    local from = ms.time()
    local x = ms.ones(300, 300, { device = "cuda" })
    for _ = 1, 3 do x = x:matmul(x) * 1e-3 end
    cuda.synchronize()
    local took = 1000 * (ms.time() - from)
    last:record()
    assert.is_true(first:elapsed_time(last) >= took)
    assert.is_true(last:elapsed_time(first) < 0)
    plain:record()
    plain:synchronize()
    assert.equal("elapsed_time: event 2 has no time; write cuda.Event { enable_timing = true }",
      message(function() first:elapsed_time(plain) end))
    assert.equal("elapsed_time: event 1 was not recorded",
      message(function() cuda.Event { enable_timing = true }:elapsed_time(first) end))
  end)

  it("runs the work of all streams in the order of calls", function()
    local side, main = cuda.Stream(), cuda.current_stream()
    local x = ms.zeros(4, { device = "cuda" })
    side:wait_stream(main)
    local y = cuda.stream(side, function(by)
      x:add_(by)
      return x * 2
    end, 3)
    side:record_event():synchronize()
    main:wait_event(side:record_event())
    main:synchronize()
    x:add_(1)
    assert.same({ 6, 6, 6, 6 }, y:tolist())
    assert.same({ 4, 4, 4, 4 }, x:tolist())
    assert.equal("wait_stream: argument 1 is a number (1), expected a stream (cuda.Stream)",
      message(function() side:wait_stream(1) end))
  end)

  for _, device in ipairs { "cuda", "cpu" } do
    it("replays a training step as a graph on " .. device, function()
      local function train(with_graph)
        ms.manual_seed(2)
        local model = nn.Linear(3, 2, { device = device })
        local optimizer = ms.optim.SGD(model:parameters(), { lr = 0.1, momentum = 0.9 })
        local x, losses = ms.zeros(4, 3, { device = device }), {}
        local function step()
          local loss = model(x):square():mean()
          loss:backward()
          optimizer:step()
          optimizer:zero_grad()
          return loss
        end
        local graph, loss = cuda.CUDAGraph(), nil
        for k = 1, 5 do
          x:copy_(ms.full({ 4, 3 }, k, { device = device }))
          if not with_graph or k == 1 then loss = step()
          elseif k == 2 then loss = cuda.graph(graph, step)
          else graph:replay() end
          losses[k] = loss:item()
        end
        graph:reset()
        return losses
      end
      local by_graph = train(true)
      assert.same(train(false), by_graph)
      assert.is_true(by_graph[3] ~= by_graph[4])
    end)
  end

  it("refuses to replay a graph without a recording", function()
    assert.equal("CUDAGraph:replay: nothing was recorded; call cuda.graph(graph, fn) first",
      message(function() cuda.CUDAGraph():replay() end))
  end)

  it("has nested ranges of the profiler under nvtx's names", function()
    local nvtx = cuda.nvtx
    local p = ms.profiler.profile(function()
      assert.equal(0, nvtx.range_push "outer")
      assert.equal(1, nvtx.range_push "inner")
      nvtx.mark "here"
      assert.equal(1, nvtx.range_pop())
      assert.equal(0, nvtx.range_pop())
      assert.equal(7, nvtx.range("last", function(x) return x + 1 end, 6))
    end)
    local names = {}
    for k, e in ipairs(p:events()) do names[k] = e.name end
    assert.same({ "here", "inner", "outer", "last" }, names)
    assert.equal("range_pop: no range is open; range_push begins one", message(nvtx.range_pop))
  end)
end)
