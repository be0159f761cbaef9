--- The reference suites' harness (behaviour.md 2.3): FSDP trains as DDP does, and both as one process.
local assert = require "luassert"

local M = {}

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
--- one_process (world size). Returns the last loss.
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
          local input = module:get_input(ms.default_device())
          if o.half_input then cast(input, o.half_input) end
          loss = module:get_loss(input, model(unpack(input)))
        end)
        if o.loss_dtype then assert.equal(o.loss_dtype, loss.dtype) end
        if r == rank then last = loss:item() end
        if o.one_process then loss = loss / o.one_process end
        module:run_backward(scaler:scale(loss))
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
  local key = ("%s %s %s %s"):format(tostring(low), tostring(o.scaler and (o.scaler.init_scale or "default")), tostring(o.num_iters), tostring(o.given))
  if by[key] then return by[key] end
  local ref = {}
  by[key] = ref
  local wrapper = o.reference or nn.DDP
  ref.model = wrapper(init("no_fsdp", "before"))
  ref.loss = M.train(ref.model, { num_iters = o.num_iters, autocast = low, half_input = low, scaler = o.scaler })
  ref.names, ref.params = M.full_params(ref.model)
  if o.one_process and not low then
    ref.alone = init("no_fsdp", "before")
    ref.alone_loss = M.train(ref.alone, { num_iters = o.num_iters, one_process = ms.dist.world_size(), module = ref.alone })
  end
  return ref
end

--- model: of spec/support/models. o: strategy, dtype ("float32", or a half one: mixed precision), use_orig_params, cpu_offload, device_init_mode,
--- num_iters, save_model, scaler, reference (function(model) -> wrapper), one_process (compare with one process too), backward_prefetch,
--- device_mesh (hybrid strategies'), given (a table that goes to the model's init), loss_dtype (where it isn't the computing dtype),
--- unmanaged (some parameters are no unit's).
function M.check(model, o)
  local ms, fsdp = load()
  local quietly = require("spec.support.wrapped").quietly
  local group = ms.dist.default_group()
  local low = o.dtype ~= "float32" and o.dtype or nil
  local function init(mode, device_mode, options)
    local given = { deterministic = true, fsdp = options }
    for key, value in ms.sorted_pairs(o.given or {}) do given[key] = value end
    return model.init(group, mode, device_mode, given)
  end
  local ref = reference_of(model, o, low, init)

  local options = {
    sharding_strategy = o.strategy, use_orig_params = o.use_orig_params or nil, cpu_offload = o.cpu_offload,
    backward_prefetch = o.backward_prefetch, device_mesh = o.device_mesh or nil,
    mixed_precision = low and fsdp.MixedPrecision { param_dtype = low, reduce_dtype = low, buffer_dtype = low } or nil,
  }
  local sharded = quietly(function()
    local m = init("recursive", o.device_init_mode or "after", options)
    if is_fsdp(m) then return m end
    local with = { process_group = not o.device_mesh and group or nil }
    for key, value in ms.sorted_pairs(options) do with[key] = value end
    return fsdp.FSDP(m, with)
  end)
  if (o.device_init_mode or "after") == "after" then sharded = sharded:to(ms.default_device()) end
  local loss = M.train(sharded, {
    num_iters = o.num_iters, scaler = o.scaler, save_model = o.save_model ~= false, loss_dtype = o.loss_dtype or low or "float32",
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
  if low then return end
  if not o.unmanaged then fsdp.check_sharded_parity(ref.model.module, sharded) end       -- each shard, and its gradient
  if ref.alone then
    near(ref.alone_loss, loss)
    for k, p in ipairs(ref.alone:parameters()) do ms.testing.assert_close(params[k], p:detach()) end
  end
end

return M
