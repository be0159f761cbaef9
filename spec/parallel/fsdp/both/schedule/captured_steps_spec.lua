-- SPDX-License-Identifier: MIT
--- Captured steps of sharded modules: the bits of uncaptured ones on 1 to 4 ranks, and the errors of collectives.
local ranks = require "spec.support.ranks"

-- The same training with every kind of sharding, captured or not. Returns results, local parameters and states.
local function train(kind, capture, rank)
  local ms = require "moonshard"
  local nn, fsdp = ms.nn, ms.fsdp
  ms.manual_seed(5)
  local model = nn.Sequential(nn.Sequential(nn.Linear(7, 12), nn.GELU()), nn.Sequential(nn.Linear(12, 12), nn.ReLU()),
    nn.Linear(12, 3))
  if kind:find "^FSDP" then
    model = fsdp.FSDP(model, { auto_wrap_policy = function(m, recurse) return recurse or m:isa(nn.Linear) end })
  elseif kind:find "^DDP" then
    model = nn.DDP(model, { gradient_as_bucket_view = kind == "DDP, gradients in buckets", bucket_cap_mb = 2 ^ -12 })
  elseif kind ~= "a collective of the script" then
    local given = kind == "fully_shard, bfloat16" and { mp_policy = fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16",
      reduce_dtype = "float32" } } or { reshard_after_forward = kind ~= "fully_shard, whole after forward" }
    for k = 1, 2 do fsdp.fully_shard(model[k], given) end
    fsdp.fully_shard(model, given)
  end
  local opt = ms.optim.AdamW(model:parameters(), { lr = 1e-2 })
  -- The scaled gradients overflow whenever the scale has grown.
  local scaler = kind:find "scaler" and (kind:find "FSDP" and ms.amp.ShardedGradScaler or ms.amp.GradScaler) {
    init_scale = 2 ^ 124, growth_factor = 4, growth_interval = 2 }
  local function fn(x, y)
    local loss = nn.F.mse_loss(nn.F.dropout(model(x):float(), 0.2), y)
    if scaler then
      scaler:scale(loss * 100):backward()
      scaler:unscale_(opt)
    else
      loss:backward()
    end
    if kind == "a collective of the script" then
      for _, p in ipairs(model:parameters()) do ms.dist.all_reduce(p.grad, { op = "avg" }) end
    end
    local norm = nn.utils.clip_grad_norm_(model:parameters(), 0.1)
    if scaler then
      scaler:step(opt)
      scaler:update()
    else
      opt:step()
    end
    opt:zero_grad()
    return loss, norm, scaler and scaler.scale_tensor
  end
  local step = capture and ms.capture(fn, { warmup = 2 }) or fn
  local seen, counts = {}, {}
  ms.manual_seed(100 + rank)
  for k in ms.steps(ms.default_device() == "cpu" and 12 or 6) do
    local x, y = ms.randn(4, 7), ms.randn(4, 3)
    -- One rank has an infinity in its data; all of them skip the step.
    if scaler and k == 5 and rank == 0 then x = x / ms.zeros(1) end
    local loss, norm, scale = step(x, y)
    local n = norm:item()
    local l = loss:item()
    seen[#seen + 1], seen[#seen + 2] = l == l and l or "nan", n == n and n or "nan"     -- of infinite gradients
    if scale then seen[#seen + 1] = scale:item() end
    if k == 6 then
      ms.no_grad(function() seen[#seen + 1] = model(ms.ones(2, 7)):sum():item() end)
    end
  end
  for _, p in ipairs(model:parameters()) do
    local part = p.to_local and p:to_local() or p
    for _, v in ipairs(part:detach():reshape(-1):tolist()) do seen[#seen + 1] = v end
    counts[#counts + 1] = (opt:state_of(p) or {}).step or 0
  end
  seen[#seen + 1], seen[#seen + 2] = counts, scaler and scaler:state_dict()
  return seen, step
end

local KINDS = { "fully_shard", "fully_shard, whole after forward", "fully_shard, bfloat16", "FSDP",
  "fully_shard, a gradient scaler", "FSDP, a gradient scaler", "a collective of the script", "DDP", "DDP, gradients in buckets" }

for _, world in ipairs { 1, 3, 4 } do                   -- 2: on cuda, below
  ranks.describe(world, "captured steps", function()
    for _, kind in ipairs(KINDS) do
      it("have the bits of uncaptured ones: " .. kind, function(rank)
        assert.are.same(train(kind, false, rank), (train(kind, true, rank)))
      end)
    end
  end)
end

-- Through mapped memory of GPUs, where ranks cannot map it, and by NCCL.
for _, env in ipairs { {}, { MOONSHARD_EMULATOR = "chunks" }, { MOONSHARD_CUDA_SHARE = "staging" },
  { MOONSHARD_CUDA = "emulated", MOONSHARD_BACKEND = "nccl" } } do
  local how = env.MOONSHARD_EMULATOR or env.MOONSHARD_CUDA_SHARE or env.MOONSHARD_BACKEND or "as it is"
  ranks.describe(2, ("captured steps on cuda, %s #cuda"):format(how), { env = env }, function()
    for _, kind in ipairs(KINDS) do
      it("have the bits of uncaptured ones: " .. kind, function(rank)
        local ms = require "moonshard"
        ms.with_device("cuda", function()
          assert.are.same(train(kind, false, rank), (train(kind, true, rank)))
        end)
      end)
    end
  end)
end

ranks.describe(2, "captured steps of two ranks", function()
  it("meet a rank that runs the function itself", function(rank)
    local plain = train("fully_shard", false, rank)
    assert.are.same(plain, (train("fully_shard", rank == 0, rank)))
  end)

  it("make the recorded collectives, in order", function(rank)
    local ms = require "moonshard"
    local _, step = train("fully_shard", true, rank)
    local function names()
      local out = {}
      for _, e in ipairs(ms.dist.record(function() step(ms.ones(4, 7), ms.ones(4, 3)) end)) do
        out[#out + 1] = e.op .. " " .. tostring(e.unit)
      end
      return out
    end
    local first = names()
    assert.is_true(#first >= 3 * 2)
    assert.are.same(first, names())
  end)

  it("are refused where gradients stay unreduced", function()
    local ms = require "moonshard"
    local model = ms.fsdp.FSDP(ms.nn.Linear(4, 4))
    local step = ms.capture(function(x) model:no_sync(function() model(x):sum():backward() end) end, { warmup = 0 })
    local ok, message = pcall(step, ms.ones(2, 4))
    assert.is_false(ok)
    assert.matches("captured step: .*no_sync", message)
  end)

  it("are refused where DDP's work is not the same each time, or a script's function does it", function()
    local ms = require "moonshard"
    local function refusal(prepare, change, warmup)
      local model = ms.nn.DDP(ms.nn.Linear(4, 4))
      prepare(model)
      local step = ms.capture(function(x)
        model(x):sum():backward()
        for _, p in ipairs(model:parameters()) do p.grad = nil end
      end, { warmup = warmup or 2 })
      local ok, message = pcall(function()
        for k = 1, 4 do
          if k == 4 then change(model, step) end
          step(ms.ones(2, 4))
        end
      end)
      assert.is_false(ok)
      return message
    end
    local function nothing() end
    assert.matches("warmup = 2", refusal(nothing, nothing, 1))
    assert.matches("it calls a communication hook of DDP %(.-captured_steps_spec.lua:%d+%)", refusal(function(model)
      model:register_comm_hook(nil, function(_, bucket) ms.dist.all_reduce(bucket.flat) end)
    end, nothing))
    assert.matches("no_sync, join or .- was used after", refusal(nothing, function(model, step)
      model:no_sync(function() step(ms.ones(2, 4)) end)
    end))
  end)

  it("are refused where they send values of the script", function()
    local ms = require "moonshard"
    local step = ms.capture(function(x) return x * ms.dist.broadcast_object(2, { src = 0 }) end, { warmup = 0 })
    local ok, message = pcall(step, ms.ones(2))
    assert.is_false(ok)
    assert.matches("captured step: .*broadcast_object", message)
  end)

  it("report a peer that makes another collective", function(rank)
    local ms = require "moonshard"
    local x = ms.ones(4)
    local step = ms.capture(function(t)
      local sum = t:clone()
      ms.dist.all_reduce(sum)
      return sum
    end, { warmup = 0 })
    for _ = 1, 3 do assert.are.equal(2, step(x)[1]:item()) end
    local ok, message = pcall(function()
      if rank == 0 then return step(x) end
      ms.dist.all_reduce(ms.ones(5))
    end)
    assert.is_false(ok)
    assert.matches("all_reduce", message)
    ms.dist.recover()
    assert.are.equal(2, step(x)[1]:item())
  end)

  it("pass an operator's error on to peers that wait", function(rank)
    local ms = require "moonshard"
    local weight = ms.ones(3, 2)
    local step = ms.capture(function(ids)
      local sum = ms.nn.F.embedding(ids, weight):sum()
      ms.dist.all_reduce(sum)
      return sum
    end, { warmup = 0 })
    local good, bad = ms.tensor({ 1, 2 }, { dtype = "int64" }), ms.tensor({ 1, 9 }, { dtype = "int64" })
    for _ = 1, 3 do assert.are.equal(8, step(good):item()) end
    local ok, message = pcall(step, rank == 1 and bad or good)
    assert.is_false(ok)
    assert.matches("embedding", message)
    ms.dist.recover()
    assert.are.equal(8, step(good):item())
  end)
end)

describe("a rank that dies in a captured step", function()
  it("is named by its peers, which end", function()
    local r = ranks.run(2, [[
      local ffi = require "ffi"
      ffi.cdef "int kill(int, int); int getpid(void);"
      local ms = require "moonshard"
      ms.dist.init { timeout = 20 }
      local model = ms.nn.Sequential(ms.nn.Linear(64, 64), ms.nn.Linear(64, 64))
      ms.fsdp.fully_shard(model[1])
      ms.fsdp.fully_shard(model)
      local opt = ms.optim.SGD(model:parameters(), { lr = 0.1 })
      local step = ms.capture(function(x)
        model(x):sum():backward()
        opt:step()
        opt:zero_grad()
      end)
      for k = 1, 30 do
        if k == 20 and ms.dist.rank() == 1 then ffi.C.kill(ffi.C.getpid(), 9) end
        step(ms.ones(4, 64))
      end
      print "not reached"
    ]])
    assert.are_not.equal(0, r.code)
    assert.is_false(r.timed_out)
    assert.is_nil(r.stdout:find "not reached")
    assert.matches("rank 1", r.stderr)
    assert.is_true(r.seconds < 15)
  end)
end)
