--- The reference suites' harness (behaviour.md 2.3): FSDP trains as DDP does, and both as one process.
---
--- Of 2.3 one assertion has nothing to hold on to: that an offloading model which is moved to a device is refused. It isn't, as
--- its shards stay on the CPU and it computes there from then on: it has to train like the others.
local assert = require "luassert"

local M = {}

local function pack(...) return { n = select("#", ...), ... } end

local function load()
  local ms = require "moonshard"
  return ms, ms.fsdp, ms.nn, ms.amp
end

local function is_fsdp(m)
  local _, fsdp = load()
  return m:isa(fsdp.FSDP)
end

-- Floating tensors among the inputs in dtype.
local function cast(input, dtype)
  for k, t in ipairs(input) do
    if t.dtype:find "float" then input[k] = t:to(dtype) end
  end
  return input
end

local function on_cpu(model, when)
  local checked = 0
  for name, p in model:named_parameters() do
    checked = checked + 1
    assert.truthy(p.device:find "^cpu", ("%s: parameter '%s' is on %s"):format(when, name, p.device))
    if p.grad then assert.truthy(p.grad.device:find "^cpu", ("%s: the gradient of '%s' is on %s"):format(when, name, p.grad.device)) end
  end
  assert.is_true(checked > 0)
end

-- Every instance is through with its forwards and backwards, and what it had gathered is gone.
local function idle(model)
  local ms, fsdp = load()
  local lib, unit_of = require("moonshard.ffi").lib, require("moonshard.fsdp.module").unit_of
  for _, m in ipairs(fsdp.fsdp_modules(model)) do
    local unit = unit_of(m)
    assert.equal(1, lib.ms_unit_is_idle(unit.handle), m:class_name())
    local sharded = unit.placed.strategy ~= "no_shard" and ms.dist.world_size(unit.placed.group) > 1
    if sharded and #unit.originals > 0 then assert.equal(0, lib.ms_unit_is_gathered(unit.handle), m:class_name()) end
  end
end

local function reload(model)
  local ms, fsdp = load()
  local saved = {}
  for name, t in ms.sorted_pairs(fsdp.state_dict(model)) do saved[name] = t:clone() end
  fsdp.summon_full_params(model, function()
    ms.no_grad(function()
      for _, p in ipairs(model:parameters()) do p:zero_() end
    end)
  end)
  model:load_state_dict(saved)
end

--- SGD with momentum for some steps ("Adam is scale invariant and bad for tests"). o: num_iters, autocast (dtype or nil), half_input (dtype),
--- loss_dtype, module (inside of the model; its `module`), scaler (options of a ShardedGradScaler, or nil), save_model,
--- one_process (world size), device, offload (parameters are on the CPU; "after backward": in forward they are where they compute).
--- Returns the last loss.
function M.train(model, o)
  local ms, _, _, amp = load()
  local module = o.module or model.module
  local optim = ms.optim.SGD(model:parameters(), { lr = 0.01, momentum = 0.9 })
  local scaler = amp.ShardedGradScaler { enabled = o.scaler ~= nil, init_scale = o.scaler and o.scaler.init_scale }
  local last
  for _ = 1, o.num_iters or 2 do
    ms.scope(function()
      optim:zero_grad()
      local rank = module.rank
      for r = o.one_process and 0 or rank, o.one_process and o.one_process - 1 or rank do
        local loss
        module.rank = r
        amp.autocast(o.autocast, function()
          local input = module:get_input(o.device or ms.default_device())
          if o.half_input then cast(input, o.half_input) end
          local output = pack(model(unpack(input)))
          if o.offload == true then on_cpu(model, "after forward") end
          loss = module:get_loss(input, unpack(output, 1, output.n))
        end)
        if o.loss_dtype then assert.equal(o.loss_dtype, loss.dtype) end
        if r == rank then last = loss:item() end
        if o.one_process then loss = loss / o.one_process end
        module:run_backward(scaler:scale(loss))
        if o.offload then on_cpu(model, "after backward") end
        if is_fsdp(model) then idle(model) end
      end
      module.rank = rank
      scaler:step(optim)
      scaler:update()
    end)
    if o.save_model and is_fsdp(model) then reload(model) end
  end
  return last
end

--- Whole parameters, copies, under their original names.
function M.full_params(model)
  local ms, fsdp = load()
  return fsdp.summon_full_params(model, function()
    local names, list, seen = {}, {}, {}
    for name, p in (model.module and not is_fsdp(model) and model.module or model):named_parameters() do
      if not seen[p] then
        seen[p] = true
        names[#names + 1], list[#list + 1] = name, p:detach():clone():keep()
      end
    end
    return names, list, ms
  end)
end

-- What sharded training is compared with: DDP and one process, trained once a gang for all strategies, as neither knows of them.
local references = {}

local function reference_of(model, o, low, init)
  local ms, _, nn = load()
  local by = references[model] or {}
  references[model] = by
  local key = ("%s %s %s %s %s"):format(tostring(low), tostring(o.scaler and (o.scaler.init_scale or "default")), tostring(o.num_iters),
    tostring(o.given), tostring(o.device))
  if by[key] then return by[key] end
  local ref = {}
  by[key] = ref
  local wrapper = o.reference or nn.DDP
  ref.model = wrapper(init("no_fsdp", "before"))
  ref.names, ref.first = M.full_params(ref.model)
  ref.loss = M.train(ref.model, { num_iters = o.num_iters, autocast = low, half_input = low, scaler = o.scaler, device = o.device })
  ref.names, ref.params = M.full_params(ref.model)
  if o.one_process and not low then
    ref.alone = o.one_process ~= true and o.one_process(init) or init("no_fsdp", "before")
    ref.alone_loss = M.train(ref.alone, { num_iters = o.num_iters, one_process = ms.dist.world_size(), module = ref.alone, device = o.device })
  end
  return ref
end

-- A half dtype rounds where FSDP computes and autocast does not: of the way that a parameter went, so much may differ (float16
-- has three bits more). Where a model has kinks, a ReLU whose input is as good as 0 may let through here and not there, which is
-- a large part of few inputs' gradients.
local HALF, KINKS = { bfloat16 = 3.2e-2, float16 = 4e-3 }, 0.25

local function check_half(ref, params, bound, scaled)
  local off, way = 0, 0
  for k, p in ipairs(params) do
    local d = (p - ref.params[k]):double():norm():item()
    local u = (ref.params[k] - ref.first[k]):double():norm():item()
    off, way = off + d ^ 2, way + u ^ 2
    assert.is_true(d <= bound * u + 1e-6, ("'%s' is %.3g off its reference's, which went %.3g"):format(ref.names[k], d, u))
  end
  assert.is_true(way > 0 or scaled)               -- a scaler skips steps until its scale fits
  assert.is_true(math.sqrt(off) <= bound * math.sqrt(way), ("all are %.3g off their reference's, which went %.3g"):format(math.sqrt(off), math.sqrt(way)))
end

-- The reference's parameters and gradients in a twin that is on the CPU, where offloaded shards are.
local function twin_on_cpu(reference, twin)
  local ms = load()
  ms.no_grad(function()
    local params = reference:parameters()
    for k, p in ipairs(twin:parameters()) do
      p:copy_(params[k]:detach():to "cpu")
      p.grad = params[k].grad and params[k].grad:to "cpu" or nil
    end
  end)
  return twin
end

--- model: of spec/support/models. o: strategy, dtype ("float32", or a half one: mixed precision), use_orig_params, cpu_offload, device_init_mode,
--- num_iters, save_model, scaler, reference (function(model) -> wrapper), one_process (compare with one process too; a function
--- gives that), backward_prefetch,
--- device_mesh (hybrid strategies'), given (a table that goes to the model's init), loss_dtype (where it isn't the computing dtype),
--- unmanaged (name of a child that is in no unit), device (where it computes; the default one), kinks (see check_half).
function M.check(model, o)
  local ms, fsdp = load()
  local quietly = require("spec.support.wrapped").quietly
  local group = ms.dist.default_group()
  local low = o.dtype ~= "float32" and o.dtype or nil
  local mode = o.device_init_mode or "after"
  local function init(fsdp_mode, device_mode, options, device)
    local given = { deterministic = true, fsdp = options, device = device or o.device }
    for key, value in ms.sorted_pairs(o.given or {}) do given[key] = value end
    return model.init(group, fsdp_mode, device_mode, given)
  end
  local ref = reference_of(model, o, low, init)

  local options = {
    sharding_strategy = o.strategy, use_orig_params = o.use_orig_params or nil, cpu_offload = o.cpu_offload,
    backward_prefetch = o.backward_prefetch, device_mesh = o.device_mesh or nil, device_id = mode == "never" and o.device or nil,
    mixed_precision = low and fsdp.MixedPrecision { param_dtype = low, reduce_dtype = low, buffer_dtype = low } or nil,
  }
  local sharded = quietly(function()
    local m = init("recursive", mode, options)
    if is_fsdp(m) then return m end
    local with = { process_group = not o.device_mesh and group or nil }
    for key, value in ms.sorted_pairs(options) do with[key] = value end
    return fsdp.FSDP(m, with)
  end)
  if mode == "after" then sharded = sharded:to(o.device or ms.default_device()) end
  local reshards = o.strategy == "full_shard" or o.strategy == "hybrid_shard"
  local managed = not o.unmanaged         -- what no unit manages is where the model was moved
  if o.cpu_offload and managed then on_cpu(sharded, "before training") end
  local loss = M.train(sharded, {
    num_iters = o.num_iters, scaler = o.scaler, save_model = o.save_model ~= false, loss_dtype = o.loss_dtype or low or "float32", device = o.device,
    offload = o.cpu_offload and managed and (reshards or "after backward"),
  })

  local tolerance = low == "bfloat16" and { rtol = 1.6e-2, atol = 1e-5 } or low and { rtol = 1e-3, atol = 1e-5 } or { rtol = 1.3e-6, atol = 1e-5 }
  local function near(want, got)
    assert.is_true(math.abs(want - got) <= tolerance.atol + tolerance.rtol * math.abs(want), ("loss %.9g, the reference's %.9g"):format(got, want))
  end
  near(ref.loss, loss)
  local names, params = M.full_params(sharded)
  assert.same(ref.names, names)
  for k, p in ipairs(params) do
    assert.equal(ref.params[k].dtype, p.dtype)
    assert.equal(ref.params[k].device, p.device)
    if not low then ms.testing.assert_close(p, ref.params[k]) end
  end
  if low then return check_half(ref, params, o.kinks and KINKS or HALF[low], o.scaler ~= nil) end
  -- Each shard, and its gradient.
  local reference, held = ref.model.module, {}
  if o.cpu_offload and o.device then
    reference = twin_on_cpu(reference, init("no_fsdp", "before", nil, "cpu"))
  end
  if o.unmanaged then
    for k, m in ipairs { reference, sharded.module } do held[k], m[o.unmanaged] = m[o.unmanaged], nil end
    for k, p in ipairs(held[1]:parameters()) do
      local q = held[2]:parameters()[k]
      ms.testing.assert_close(q.grad, p.grad)
    end
  end
  fsdp.check_sharded_parity(reference, sharded)
  if o.unmanaged then reference[o.unmanaged], sharded.module[o.unmanaged] = held[1], held[2] end
  if ref.alone then
    near(ref.alone_loss, loss)
    local alone = ref.alone:parameters()
    for k, p in ipairs(params) do ms.testing.assert_close(p, alone[k]:detach()) end
  end
end

return M
