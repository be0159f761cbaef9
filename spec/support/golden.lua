-- SPDX-License-Identifier: MIT
--- Reads the reference numbers of spec/golden/data, and makes the same weights, inputs and ids in Lua (the formulas are
--- in make_golden.py there). MOONSHARD_GOLDEN names another folder of the same form.
local cjson = require "cjson"
local ms = require "moonshard"
local numel = require "spec.support.numel"
local process = require "spec.support.process"

local M = { dtype = "float64" }

local function folder()
  local env = os.getenv "MOONSHARD_GOLDEN"
  if env and env ~= "" then return env end
  return process.root .. "/spec/golden/data"
end
M.folder = folder()

--- Reads a golden file into a table. Weights and inputs that are made afterwards have the file's phase.
function M.load(name)
  local value = cjson.decode(process.read(M.folder .. "/" .. name .. ".json"))
  M.phase = value.phase
  return value
end

--- A tensor whose element i, counted from 0 in memory order, is c + a sin(freq i + offset + phase).
function M.wave(shape, offset, c, a, freq)
  local list = {}
  for i = 0, numel(shape) - 1 do
    list[i + 1] = (c or 0) + (a or 1) * math.sin((freq or 0.13) * i + offset + M.phase)
  end
  return ms.tensor(list, { dtype = M.dtype }):reshape(shape)
end

function M.x_of(shape, rank, step)
  return M.wave(shape, 0.7 * (rank or 0) + 0.29 * (step or 0))
end

--- Token ids as a flat Lua array.
function M.id_list(n, vocab, rank, step)
  local list = {}
  for i = 0, n - 1 do
    list[i + 1] = (7 * i + 3 * rank + 5 * step + math.floor(10 * M.phase)) % vocab
  end
  return list
end

--- Fills every parameter with numbers that follow from its position among named_parameters.
function M.fill(model)
  local owner = {}
  for _, m in ipairs(model:modules()) do
    for name, p in m:named_parameters { recurse = false } do
      owner[p] = owner[p] or { m, name }
    end
  end
  local k = 0
  ms.no_grad(function()
    for _, p in model:named_parameters() do
      local m, name = owner[p][1], owner[p][2]
      local c, a = 0, 0.1
      if #p.shape > 1 then
        a = 0.5 / math.sqrt(p:numel() / p.shape[1])
      elseif (m:isa(ms.nn.LayerNorm) or m:isa(ms.nn.BatchNorm1d)) and name == "weight" then
        c = 1
      end
      p:copy_(M.wave(p.shape, 1.3 * k + 0.5, c, a, 0.37))
      k = k + 1
    end
  end)
  return model
end

--- Converts a PyTorch name, which counts children from 0, to Moonshard's, which counts from 1.
function M.our_name(name)
  return (("." .. name):gsub("%.(%d+)%f[.%z]", function(d) return "." .. (tonumber(d) + 1) end):sub(2))
end

function M.close(what, expected, got, rtol, atol)
  local off = math.abs(got - expected)
  if off ~= off or off > (atol or 0) + rtol * math.abs(expected) then
    error(("%s: %.17g expected, got %.17g (off by %.3g, tolerance %g + %g times the expected number)"):format(what, expected,
      got, off, atol or 0, rtol),
      2)
  end
end

--- Compares an unsharded tensor with a flat list of numbers.
function M.close_list(what, expected, t, rtol, atol)
  local got = t:detach():reshape(-1):tolist()
  assert(#got == #expected, ("%s: %d numbers expected, got %d"):format(what, #expected, #got))
  for i, e in ipairs(expected) do M.close(("%s [%d]"):format(what, i), e, got[i], rtol, atol) end
end

-- A key's bias adds the same number to all scores of a query, so its gradient is 0 except for rounding errors, which
-- Adam normalises to full steps. In float32, 16 of 48 numbers move by 6 steps of 0.01; in float64 the rounding errors
-- are small compared with Adam's eps.
local key_bias_noise = { float64 = 5e-9, float32 = 16 * 6 * 0.01 }

--- Compares a whole parameter with its recorded digest: number of elements, sums, first elements, last element.
function M.close_digest(digest, t, rtol, atol)
  local list = t:detach():reshape(-1):tolist()
  local sum, sumsq = 0, 0
  for _, v in ipairs(list) do sum, sumsq = sum + v, sumsq + v * v end
  local name = digest.name
  M.close(name .. " numel", digest.numel, #list, 0)
  local noise = name:find "in_proj_bias$" and key_bias_noise[M.dtype] or 0
  M.close(name .. " sumsq", digest.sumsq, sumsq, rtol, atol + noise)
  M.close(name .. " sum", digest.sum, sum, rtol, atol * math.sqrt(#list) + noise)
  for i, e in ipairs(digest.first) do M.close(("%s [%d]"):format(name, i), e, list[i], rtol, atol) end
  M.close(name .. " last", digest.last, list[#list], rtol, atol)
end

--- Models of the golden runs, by name: make(kind), loss(model, rank, step, golden), optim(params), and units(model),
--- the modules to wrap.
M.models = {}
for _, name in ipairs { "net", "nested_wrapped_module", "non_uniform_req_grad", "mlp_stack", "exec_order",
  "transformer_lm",
  "transformer_with_shared_params" } do
  M.models[name] = require("spec.support.models." .. name)
  M.models[#M.models + 1] = name
end

--- The recorded run for `world` ranks.
function M.run_of(name, world)
  for _, run in ipairs(M.load("train_" .. name).runs) do
    if run.world == world then return run end
  end
  error(("no golden run of %s for %d ranks"):format(name, world))
end

function M.trainable(model)
  local list = {}
  for _, p in ipairs(model:parameters()) do
    if p.requires_grad then list[#list + 1] = p end
  end
  return list
end

--- The 2-norm of all gradients together; parameters without a gradient are skipped. The gradients must not be sharded.
function M.grad_norm(params)
  local sum = 0
  for _, p in ipairs(params) do
    if p.grad then sum = sum + (p.grad * p.grad):sum():item() end
  end
  return math.sqrt(sum)
end

--- Compares names, order, shapes, requires_grad and digests with the recorded parameters; whole(p) returns the whole
--- parameter as an unsharded tensor.
function M.close_params(run, model, whole, rtol, atol)
  local k = 0
  for name, p in model:named_parameters() do
    k = k + 1
    local digest = run.params[k]
    assert(digest, ("parameter %d, '%s', is not in the reference"):format(k, name))
    assert(M.our_name(digest.name) == name, ("parameter %d: '%s' expected, got '%s'"):format(k, M.our_name(digest.name),
      name))
    assert(table.concat(digest.shape, ",") == table.concat(p.shape, ","), name .. ": shape " .. tostring(p.shape))
    assert(digest.requires_grad == p.requires_grad, name .. ": requires_grad")
    M.close_digest(digest, whole(p), rtol, atol)
  end
  assert(k == #run.params, ("%d parameters expected, got %d"):format(#run.params, k))
end

return M
