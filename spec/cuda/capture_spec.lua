-- SPDX-License-Identifier: MIT
--- Captured steps on a GPU: bitwise the function itself, by CUDA graphs and without them.
local ms = require "moonshard"
local process = require "spec.support.process"
local training = require "spec.support.captured_training"
local nn, optim = ms.nn, ms.optim

local function there(fn) return ms.with_device("cuda", fn) end
local function allocated() return ms.memory_stats("cuda").allocated end

describe("a captured step on a GPU #cuda", function()
  for name, make in pairs(training.kinds) do
    it("gives the bits of 9 uncaptured steps: " .. name, function()
      there(function() training.same(training.train(make, 9, false), (training.train(make, 9, true))) end)
    end)
  end

  it("gives the bits of uncaptured steps of a sharded model in a world of one", function()
    local function make()
      local model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
      for _, part in ipairs { model[1], model[3], model } do ms.fsdp.fully_shard(part) end
      local opt = optim.AdamW(model:parameters(), { lr = 1e-2 })
      return model, opt, function(x, y)
        local loss = nn.F.mse_loss(model(x), y)
        loss:backward()
        local norm = nn.utils.clip_grad_norm_(model:parameters(), 0.05)
        opt:step()
        opt:zero_grad()
        return loss, norm
      end
    end
    there(function()
      local function losses(capture)
        ms.manual_seed(3)
        local model, _, step = make()
        if capture then step = ms.capture(step) end
        local list = {}
        for _ in ms.steps(8) do
          local loss, norm = step(ms.randn(8, 6), ms.randn(8, 3))
          list[#list + 1], list[#list + 2] = loss:item(), norm:item()
        end
        for _, p in ipairs(model:parameters()) do list[#list + 1] = p:to_local():detach():cpu():sum():item() end
        return list
      end
      assert.are.same(losses(false), losses(true))
    end)
  end)

  for name, make in pairs(training.kinds) do
    it("is one CUDA graph: " .. name, function()
      there(function()
        local _, step = training.train(make, 9, true)
        local all, within, graphs = tostring(step):match "(%d+) pieces of work, (%d+) in (%d+) CUDA graph"
        assert.is_not_nil(all, tostring(step))
        assert.are.same({ all, "1" }, { within, graphs })
      end)
    end)
  end

  it("draws the numbers of a seed that is set between its calls, and steps with options that are set there", function()
    there(function()
      local function losses(capture)
        ms.manual_seed(1)
        local model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        local opt = optim.AdamW(model:parameters(), { lr = 1e-2 })
        local fn = function(x)
          local loss = model(x + ms.rand(8, 6)):pow(2):mean()
          loss:backward()
          opt:step()
          opt:zero_grad()
          return loss
        end
        local step, list = capture and ms.capture(fn) or fn, {}
        for k = 1, 8 do
          if k == 6 then ms.manual_seed(7) end
          if k == 7 then opt.param_groups[1].betas = { 0.5, 0.9 } end
          list[k] = ms.scope(function() return step(ms.ones(8, 6)):item() end)
        end
        return list, capture and tostring(step)
      end
      local captured, text = losses(true)
      assert.are.same(losses(false), captured)
      assert.matches("in 1 CUDA graph", text)
    end)
  end)

  it("copies arguments from the CPU to the GPU, and results back", function()
    local w = ms.full({ 3 }, 2, { device = "cuda" })
    local step = ms.capture(function(x) return (x:to "cuda" * w + 1):to "cpu", x * 2 end)
    for k = 1, 5 do
      local a, b = step(ms.full({ 3 }, k))
      assert.are.same({ 2 * k + 1, 2 * k + 1, 2 * k + 1 }, a:tolist())
      assert.are.same({ 2 * k, 2 * k, 2 * k }, b:tolist())
    end
  end)

  it("knows its memory, which is constant and freed with it", function()
    there(function()
      collectgarbage()
      local _, _, fn = training.kinds["dropout, clipping and SGD with momentum, zero_grad last"]()
      local x, y = ms.randn(8, 6), ms.randn(8, 3)
      local step = ms.capture(fn)
      ms.scope(function() step(x, y) end)
      local before = allocated()
      ms.scope(function() step(x, y) end)
      local bytes = step:memory()
      assert.is_true(bytes > 8 * 16 * 4)
      assert.are.equal(before + bytes, allocated())
      ms.scope(function() step(x, y) end)
      local made = allocated()                          -- with the temporary memory of the graphs' kernels
      ms.scope(function() for _ = 1, 5 do step(x, y) end end)
      assert.are.equal(made, allocated())
      step:release()
      assert.are.equal(before, allocated())
    end)
  end)

  it("refuses to read values, and takes only arguments on the device of the recording", function()
    there(function()
      local ok, message = pcall(ms.capture(function(x) return x:sum():item() end, { warmup = 0 }), ms.ones(2))
      assert.is_false(ok)
      assert.matches("reads values", message)
      local step = ms.capture(function(x) return x * 2 end, { warmup = 0 })
      step(ms.ones(2))
      ok, message = pcall(step, ms.ones(2, { device = "cpu" }))
      assert.is_false(ok)
      assert.matches("argument 1 is float32 %[2%] cpu, expected float32 %[2%] cuda:0", message)
    end)
  end)

  -- What a training prints in a process of its own, on the emulated GPU in the given environment.
  local function printed(env)
    local folder = process.temp_folder()
    process.write(folder .. "/script.lua", [[
      local ms = require "moonshard"
      local training = require "spec.support.captured_training"
      ms.with_device("cuda", function()
        local make = training.kinds["dropout, clipping and SGD with momentum, zero_grad last"]
        for k, t in ipairs((training.train(make, 5, true))) do
          print(k, ("%.17g"):format(t:double():cpu():sum():item()))
        end
      end)
    ]])
    env.MOONSHARD_CUDA = process.gpu
    local child = process.start({ "sh", "-c", 'cd "$0" && exec luajit "$1"', process.root, folder .. "/script.lua" },
      { stdout = folder .. "/out", stderr = folder .. "/err", env = env })
    local code = child:wait(60)
    local out, err = process.read(folder .. "/out"), process.read(folder .. "/err")
    process.remove_folder(folder)
    return code, out, err
  end

  it("launches graphs, and queues its work piece by piece where there can be none, with the same bits", function()
    local code, graphs, err = printed {}
    assert.are.equal(0, code, err)
    assert.is_true(#graphs > 200)
    local _, _, launch = printed { MOONSHARD_EMULATOR = "fail:cudaGraphLaunch:1:719" }
    assert.matches("cuda:0: cudaGraphLaunch, launching a graph: .*CUDA error 719", launch)
    for _, env in ipairs { { MOONSHARD_CUDA_GRAPHS = "off" }, { MOONSHARD_CUDA_SYNC = "1" },
      { MOONSHARD_EMULATOR = "fail:cudaStreamBeginCapture:1:1" }, { MOONSHARD_EMULATOR = "fail:cudaStreamEndCapture:1:1" },
      { MOONSHARD_EMULATOR = "fail:cudaGraphInstantiateWithFlags:1:2" }, { MOONSHARD_EMULATOR = "late" },
      { MOONSHARD_EMULATOR = "seed:7,late,chunks" } } do
      local status, out, why = printed(env)
      assert.are.equal(0, status, why)
      assert.are.equal(graphs, out)
    end
  end)
end)
