-- SPDX-License-Identifier: MIT
--- The test harness of PyTorch's FSDP suites: checks that FSDP trains as DDP does, and both as one process. It compares
--- the scales in every iteration, in float32 also the scaled losses (PyTorch compares the last one), and the parameters
--- in half precision, too (which PyTorch does not).
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

-- Casts the floating point tensors among the inputs.
local function cast(input, dtype)
  for k, t in ipairs(input) do
    if t.dtype:find "float" then input[k] = t:to(dtype) end
  end
  return input
end

-- For what is checked of each parameter in each step: luassert walks the stack in each call, and takes a text that is
-- made even if it is not needed.
local function expect(ok, text, ...)
  if not ok then error(text:format(...), 2) end
end

local function on_cpu(model, when)
  local checked = 0
  for name, p in model:named_parameters() do
    checked = checked + 1
    expect(p.device:find "^cpu", "%s: parameter '%s' is on %s", when, name, p.device)
    local grad = p.grad
    if grad then expect(grad.device:find "^cpu", "%s: the gradient of '%s' is on %s", when, name, grad.device) end
  end
  assert.is_true(checked > 0)
end

-- Asserts that every instance has finished its forwards and backwards and vacated its gathered parameters.
local function idle(model)
  local ms, fsdp = load()
  local lib, unit_of = require("moonshard.core.ffi").lib, require("moonshard.parallel.fsdp.module").unit_of
  for _, m in ipairs(fsdp.fsdp_modules(model)) do
    local unit = unit_of(m)
    expect(lib.ms_unit_get_state(unit.handle).is_idle == 1, "%s is not idle", m:class_name())
    local sharded = unit.placed.strategy ~= "no_shard" and ms.dist.world_size(unit.placed.group) > 1
    expect(not sharded or #unit.originals == 0 or lib.ms_unit_get_state(unit.handle).is_gathered == 0, "%s is gathered",
      m:class_name())
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

--- Trains with SGD with momentum for some steps ("Adam is scale invariant and bad for tests"). o: num_iters, autocast
--- (dtype or nil), half_input (dtype), loss_dtype, module (default: model.module), scaler (options of a
--- ShardedGradScaler, or nil), save_model (save, zero and load it after the first step), one_process (world size),
--- device, offload (parameters are on the CPU; "after backward": during forward they are on the compute device). Returns
--- lists with an entry per iteration: this rank's losses, scaled losses, and scales after each update. steps: number of
--- steps that were not skipped.
---@return { losses: number[], scaled: number[], scales: number[], steps: integer }
function M.train(model, o)
  local ms, _, _, amp = load()
  local module = o.module or model.module
  local home = model:parameters()[1].device
  local optim = ms.optim.SGD(model:parameters(), { lr = 0.01, momentum = 0.9 })
  local scaler = amp.ShardedGradScaler { enabled = o.scaler ~= nil, init_scale = o.scaler and o.scaler.init_scale }
  local history = { losses = {}, scaled = {}, scales = {}, steps = 0 }
  for k = 1, o.num_iters or 2 do
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
          loss = module:get_loss(input, unpack(output, 1, output.n)):to(home)
        end)
        local scaled = scaler:scale(o.one_process and loss / o.one_process or loss)
        assert.equal(o.loss_dtype, scaled.dtype)
        if r == rank then history.losses[k], history.scaled[k] = loss:item(), scaled:item() end
        module:run_backward(scaled)
        if o.offload then on_cpu(model, "after backward") end
        if is_fsdp(model) then idle(model) end
      end
      module.rank = rank
      local before = scaler:get_scale()
      scaler:step(optim)
      scaler:update()
      history.scales[k] = scaler:get_scale()
      if history.scales[k] >= before then history.steps = history.steps + 1 end
    end)
    if o.save_model and k == 1 and is_fsdp(model) then reload(model) end
  end
  return history
end

--- Copies of the whole parameters, under their original names.
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

-- References for sharded training: DDP and one process. They do not depend on the strategy, so each gang trains them
-- once.
local references = {}

local function reference_of(model, o, low, init)
  local ms, _, nn = load()
  local by = references[model] or {}
  references[model] = by
  local key = ("%s %s %s %s %s %s"):format(tostring(low), tostring(o.scaler and (o.scaler.init_scale or "default")),
    tostring(o.num_iters), tostring(o.given), tostring(o.device), tostring(o.convert))
  if by[key] then return by[key] end
  local ref = {}
  by[key] = ref
  local wrapper = o.reference or nn.DDP
  local m = init("no_fsdp", "before")
  ref.model = wrapper(o.convert and m:to(o.convert) or m)
  ref.names, ref.first = M.full_params(ref.model)
  ref.history = M.train(ref.model, {
    num_iters = o.num_iters, autocast = low, half_input = low or o.convert, scaler = o.scaler, device = o.device,
    loss_dtype = o.convert or "float32",
  })
  ref.names, ref.params = M.full_params(ref.model)
  if o.one_process and not low then
    ref.alone = o.one_process ~= true and o.one_process(init) or init("no_fsdp", "before")
    ref.alone_history = M.train(ref.alone, {
      num_iters = o.num_iters, one_process = ms.dist.world_size(), module = ref.alone, device = o.device,
      loss_dtype = "float32",
    })
  end
  return ref
end

-- FSDP rounds to the half dtype where autocast does not: a parameter may differ by this fraction of its change (float16
-- has three bits more). In models with kinks, an input near 0 may pass a ReLU in one model and not in the other, which
-- changes a large part of the gradients of a few inputs.
local HALF, KINKS = { bfloat16 = 3.2e-2, float16 = 4e-3 }, 0.25

local function check_half(ref, params, bound)
  local off, way = 0, 0
  for k, p in ipairs(params) do
    local d = (p - ref.params[k]):double():norm():item()
    local u = (ref.params[k] - ref.first[k]):double():norm():item()
    off, way = off + d ^ 2, way + u ^ 2
    expect(d <= bound * u + 1e-6, "'%s' differs by %.3g from the reference's, which training moved by %.3g",
      ref.names[k], d, u)
  end
  assert.is_true(math.sqrt(off) <= bound * math.sqrt(way),
    ("all parameters differ by %.3g from the reference's, which training moved by %.3g"):format(math.sqrt(off),
      math.sqrt(way)))
end

-- Copies the reference's parameters and gradients to `twin`, the same model on the CPU, where offloaded shards are.
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

--- Trains a model of spec/support/models in FSDP, and asserts that it agrees with the references. o: strategy, dtype
--- ("float32", or a half type: mixed precision), use_orig_params, cpu_offload, device_init_mode, num_iters, save_model,
--- scaler, reference (function(model) -> wrapper), one_process (also compare with one process; may be a function that
--- returns it), backward_prefetch, device_mesh (for hybrid strategies), given (a table that is passed to the model's
--- init), loss_dtype (if it differs from the computing dtype), unmanaged (name of a child that belongs to no unit),
--- device (where it computes; default: the default device), kinks (true: see KINKS), units (number of FSDP instances
--- that the model's init makes in float32), steps (number of steps that the scaler does not skip, if not all),
--- convert (dtype that both models are converted to after wrapping, without autocast), tolerance ({ rtol, atol }).
function M.check(model, o)
  local ms, fsdp = load()
  local quietly = require("spec.support.wrapped").quietly
  local group = ms.dist.default_group()
  local low = o.dtype ~= "float32" and o.dtype or nil
  local mode, device = o.device_init_mode or "after", o.device or ms.default_device()
  local function init(fsdp_mode, device_mode, options, where)
    local given = { deterministic = true, fsdp = options, device = where or o.device }
    for key, value in ms.sorted_pairs(o.given or {}) do given[key] = value end
    return model.init(group, fsdp_mode, device_mode, given)
  end
  local ref = reference_of(model, o, low, init)

  local options = {
    sharding_strategy = o.strategy, use_orig_params = o.use_orig_params or nil, cpu_offload = o.cpu_offload,
    backward_prefetch = o.backward_prefetch, device_mesh = o.device_mesh or nil, device_id = mode == "never"
    and o.device or nil,
    mixed_precision = low and fsdp.MixedPrecision { param_dtype = low, reduce_dtype = low, buffer_dtype = low } or nil,
  }
  local sharded = quietly(function()
    local m = init("recursive", mode, options)
    if o.units and not low then assert.equal(o.units, #fsdp.fsdp_modules(m)) end
    if is_fsdp(m) then return m end
    local with = { process_group = not o.device_mesh and group or nil }
    for key, value in ms.sorted_pairs(options) do with[key] = value end
    return fsdp.FSDP(m, with)
  end)
  if mode == "after" then sharded = sharded:to(device) end
  if o.convert then sharded = sharded:to(o.convert) end
  local strategy, loss_dtype = o.strategy or "full_shard", o.loss_dtype or low or o.convert or "float32"
  local reshards = strategy == "full_shard" or strategy == "hybrid_shard"
  local managed = not o.unmanaged         -- unmanaged parameters stay on the device of the model
  local function train()
    return M.train(sharded, {
      num_iters = o.num_iters, scaler = o.scaler, save_model = o.save_model ~= false, loss_dtype = loss_dtype,
      device = o.device, half_input = o.convert,
      offload = o.cpu_offload and managed and (reshards or "after backward"),
    })
  end
  if o.cpu_offload and mode == "after" and not device:find "^cpu" then
    require "spec.support.raises"(
      ("An FSDP-managed module with parameter CPU offloading enabled has parameters on %s. Make sure to not move the "
      .. "module from CPU when offloading parameters."):format(device), train)
    return
  end
  if o.cpu_offload and managed then on_cpu(sharded, "before training") end
  local history = train()
  if o.cpu_offload and managed then on_cpu(sharded, "after training") end

  local tolerance = o.tolerance or low == "bfloat16" and { rtol = 1.6e-2, atol = 1e-5 } or low and { rtol = 1e-3, atol = 1e-5 }
    or { rtol = 1.3e-6, atol = 1e-5 }
  local function near(what, wants, gots)
    for k, want in pairs(wants) do                -- any order: each entry is checked separately
      expect(want == gots[k] or math.abs(want - gots[k]) <= tolerance.atol + tolerance.rtol * math.abs(want),
        "%s of iteration %d: %.9g, the reference's %.9g", what, k, gots[k], want)
    end
  end
  -- In a half dtype compares only the last scaled loss, as PyTorch does: FSDP computes more in half precision than
  -- autocast does, and an earlier scaled loss may overflow.
  local n = #history.losses
  if low then near("scaled loss", { [n] = ref.history.scaled[n] }, history.scaled) end
  if not low then near("scaled loss", ref.history.scaled, history.scaled) end
  assert.same(ref.history.scales, history.scales)
  assert.equal(o.steps or #history.losses, history.steps)
  local names, params = M.full_params(sharded)
  assert.same(ref.names, names)
  for k, p in ipairs(params) do
    local want = ref.params[k]
    expect(want.dtype == p.dtype and want.device == p.device, "'%s' is %s on %s, the reference's is %s on %s", names[k],
      p.dtype, p.device, want.dtype, want.device)
    if o.convert and names[k]:find "in_proj_bias$" then           -- the gradient of a key's bias is only rounding
      p, want = p:narrow(1, 1, p:size(1) / 3), want:narrow(1, 1, p:size(1) / 3)
    end
    if not low then ms.testing.assert_close(p, want, o.tolerance) end
  end
  local moved = false
  for k, p in ipairs(params) do moved = moved or not p:to(ref.first[k].device):equal(ref.first[k]) end
  assert.equal(history.steps > 0, moved)
  if low then return check_half(ref, params, o.kinks and KINKS or HALF[low]) end
  if o.convert then return end
  -- Compares each shard, and its gradient.
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
    near("loss", ref.alone_history.losses, history.losses)
    local alone = ref.alone:parameters()
    for k, p in ipairs(params) do ms.testing.assert_close(p, alone[k]:detach()) end
  end
end

return M
