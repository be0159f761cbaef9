-- SPDX-License-Identifier: MIT
--- FSDP, converted to another dtype after wrapping, trains the models of spec/support/models as DDP does: losses in
--- every step, whole parameters at the end. Every rank has its own input.
local ranks = require "spec.support.ranks"

local MODELS = { "nested_wrapped_module", "always_wrap_nested_wrapped_module", "non_uniform_req_grad",
  "mixture_of_experts",
  "transformer_with_shared_params" }
local STRATEGIES = { "full_shard", "shard_grad_op", "no_shard" }
local STEPS = 2

local function load()
  local ms = require "moonshard"
  return ms, ms.nn, ms.dist, ms.fsdp
end

local function zoo(name) return require("spec.support.models." .. name) end

-- Trains by calling model(unpack(input)), wrapped or not. Returns the losses and the model.
local function train(model, o)
  local ms = load()
  local optimizer = ms.optim.SGD(model:parameters(), { lr = 0.01, momentum = 0.9 })
  local losses = {}
  for step = 1, STEPS do
    ms.scope(function()
      optimizer:zero_grad()
      local input = model:get_input "cpu"
      for k, t in ipairs(input) do
        if t.dtype:find "float" then input[k] = t:to(o.input_dtype) end
      end
      local loss = model:get_loss(input, model(unpack(input)))
      if o.loss_dtype then assert.are.equal(o.loss_dtype, loss.dtype) end
      losses[step] = loss:item()
      model:run_backward(loss)
      optimizer:step()
    end)
    if o.save then                                  -- saved, zeroed, and loaded again
      local sd = {}
      for key, t in ms.sorted_pairs(model:state_dict()) do sd[key] = t:clone() end
      ms.no_grad(function()
        for _, p in ipairs(model:parameters()) do p:zero_() end
      end)
      model:load_state_dict(sd)
    end
  end
  return losses
end

-- Trains the model in DDP (not wrapped, if it reduces its gradients itself). Returns its losses and the trained model.
-- Neither depends on the strategy or on use_orig_params, so each gang trains a model once in each dtype.
local references = {}

local function reference(name, o)
  local _, nn = load()
  local key = name .. " " .. o.dtype
  if not references[key] then
    local m = zoo(name).init(nil, "no_fsdp", "before", { deterministic = true })
    m:to(o.dtype)
    references[key] = { m = m, losses = train(name == "mixture_of_experts" and m or nn.DDP(m),
      { input_dtype = o.dtype, loss_dtype = o.reference_loss }) }
  end
  return references[key].losses, references[key].m
end

local function sharded(name, strategy, orig, o)
  local _, _, dist, fsdp = load()
  local options = { sharding_strategy = strategy, use_orig_params = orig }
  local m = zoo(name).init(dist.default_group(), "recursive", "before", { deterministic = true, fsdp = options })
  if not m:isa(fsdp.FSDP) then m = fsdp.FSDP(m, options) end
  m:to(o.dtype)
  return m
end

local function compare(name, strategy, orig, o)
  local ms, _, _, fsdp = load()
  ms.catch_warnings(function()
    local expected, plain = reference(name, o)
    local model = sharded(name, strategy, orig, o)
    local got = train(model, { input_dtype = o.dtype, loss_dtype = o.loss, save = o.save })
    for step = 1, STEPS do
      assert.near(expected[step], got[step], (o.loss_tolerance or 1e-5) * math.max(1, math.abs(expected[step])),
        "loss of step " .. step)
    end
    fsdp.summon_full_params(model, function()
      local names, k = {}, 0
      for path, p in plain:named_parameters() do names[#names + 1] = { path, p } end
      for path, p in model:named_parameters() do
        k = k + 1
        assert.are.equal(names[k][1], path)
        local wanted = names[k][2]
        if path:find "in_proj_bias$" then           -- the gradient of a key's bias is only rounding
          local d = p:size(1) / 3
          p, wanted = p:narrow(1, 1, d), wanted:narrow(1, 1, d)
        end
        ms.testing.assert_close(p, wanted, o.tolerance or { rtol = 1e-4, atol = 1e-5 })
      end
      assert.are.equal(#names, k)
    end)
  end)
end

for world = 2, 3 do
  ranks.describe(world, ("FSDP moved to another dtype, beside DDP over %d ranks #mpi"):format(world), function()
    for _, name in ipairs(MODELS) do
      for _, strategy in ipairs(STRATEGIES) do
        for _, orig in ipairs { true, false } do
          -- Frozen and trained parameters can share a unit only with use_orig_params.
          if orig or name ~= "non_uniform_req_grad" then
            local title = ("%s, %s%s"):format(name, strategy, orig and ", original parameters" or "")
            it("float64: " .. title, function()
              compare(name, strategy, orig, { dtype = "float64", loss_tolerance = 1e-12,
                tolerance = { rtol = 1e-10, atol = 1e-12 },
                save = orig and name ~= "mixture_of_experts" })
            end)
            for _, half in ipairs { { "bfloat16", 5e-2 }, { "float16", 1e-2 } } do
              it(half[1] .. ": " .. title, function()
                compare(name, strategy, orig, { dtype = half[1], loss = half[1], reference_loss = half[1],
                  loss_tolerance = half[2],
                  tolerance = { rtol = half[2], atol = half[2] } })
              end)
            end
          end
        end
      end
    end
  end)
end

for _, world in ipairs { 3, 5 } do
  ranks.describe(world, ("sharded training beside DDP over %d ranks #mpi"):format(world), function(rank)
    local fronts = {
      fully_shard = function(m, fsdp) return fsdp.fully_shard(m) end,
      FSDP = function(m, fsdp) return fsdp.FSDP(m) end,
    }
    for front, wrap in require("moonshard.tensor.util").sorted_pairs(fronts) do
      for _, dtype in ipairs { "float32", "float64" } do
        it(("%s in %s has the same bits, though the mean over ranks rounds"):format(front, dtype), function()
          local ms, nn, _, fsdp = load()
          local weights = {}
          for k = 1, 2 do
            ms.manual_seed(1)
            local m = nn.Sequential(nn.Linear(37, 53, { dtype = dtype }), nn.Tanh(),
              nn.Linear(53, 29, { dtype = dtype }))
            local wrapped = k == 1 and nn.DDP(m) or wrap(m, fsdp)
            local optimizer = ms.optim.AdamW(wrapped:parameters(), { lr = 0.01 })
            for step = 1, 4 do
              ms.manual_seed(100 * step + rank)
              wrapped(ms.randn(8, 37, { dtype = dtype })):pow(2):mean():backward()
              optimizer:step()
              optimizer:zero_grad()
            end
            weights[k] = k == 1 and m:state_dict() or fsdp.state_dict(wrapped)
          end
          for name, t in ms.sorted_pairs(weights[1]) do assert.is_true(t:equal(weights[2][name]), name) end
        end)
      end
    end
  end)
end
