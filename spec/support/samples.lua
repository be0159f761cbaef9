-- SPDX-License-Identifier: MIT
--- Calls operators with the samples of the operator table (their grammar is in runtime/ops/op.h), through the C
--- interface alone. samples.of parses the samples into descriptions (shapes, kinds, numbers); samples.evaluate makes
--- tensors from a description, and calls the operator.
local F = require "moonshard.core.ffi"
local ffi, lib = F.ffi, F.lib
local E = ffi.C

local samples = {}

-- ---- reading ------------------------------------------------------------------------------------

local function numbers(text)
  local list = {}
  for word in text:gmatch "[^,]+" do
    list[#list + 1] = word:match "^%-inf" and -math.huge or word:match "^%+?inf" and math.huge
      or assert(tonumber(word), word)
  end
  return list
end

local function parse(text)
  local sample = { text = text, inputs = {}, i = {}, f = {} }
  for word in text:gmatch "%S+" do
    local shape, kind, high = word:match "^%[([%d,]*)%]([+aupibsqc]?)(%d*)$"
    if word == "-" then
      table.insert(sample.inputs, { absent = true })
    elseif word:find "^i=" then
      sample.i = numbers(word:sub(3))
    elseif word:find "^f=" then
      sample.f = numbers(word:sub(3))
    elseif shape then
      table.insert(sample.inputs, { shape = numbers(shape), kind = kind, high = tonumber(high) })
    else
      error(("sample '%s': cannot read '%s'"):format(text, word))
    end
  end
  return sample
end

--- Parses the samples of operator number `op`.
function samples.of(op)
  local list = {}
  for text in ffi.string(lib.ms_op_at(op).samples):gmatch "[^;]+" do
    if text:find "%S" then list[#list + 1] = parse(text:match "^%s*(.-)%s*$") end
  end
  return list
end

--- Whether operator number `op` can run on a type of device.
function samples.has_kernel(op, device) return bit.band(lib.ms_op_at(op).kernels, bit.lshift(1, device)) ~= 0 end

--- All operators: array of { op, name, samples, differentiable, inplace, view, random }.
function samples.operators()
  local list = {}
  for op = 0, lib.ms_op_count() - 1 do
    local row = lib.ms_op_at(op)
    local flags = row.flags
    local function has(flag) return bit.band(flags, flag) ~= 0 end
    list[#list + 1] = {
      op = op, name = ffi.string(row.name), samples = samples.of(op),
      differentiable = has(E.MS_OP_DIFFERENTIABLE), inplace = has(E.MS_OP_INPLACE), view = has(E.MS_OP_VIEW),
      random = has(E.MS_OP_RANDOM),
    }
  end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

-- ---- values -------------------------------------------------------------------------------------

-- Park and Miller's generator: the same values in every run, and independent of the engine's generator.
local seed = 1
local function uniform()
  seed = seed * 16807 % 2147483647
  return (seed - 1) / 2147483646
end

local function normal()
  return math.sqrt(-2 * math.log(1 - uniform())) * math.cos(2 * math.pi * uniform())
end

-- Rounds to 7 significant bits, so that bfloat16 and float16 represent x exactly and results can be compared across
-- dtypes.
local function short(x)
  if x == 0 then return 0 end
  local _, e = math.frexp(x)
  local unit = 2 ^ (e - 7)
  return math.floor(x / unit + 0.5) * unit
end

local product = require "spec.support.numel"
samples.product = product

-- Makes matrices symmetric, and positive-definite by a large diagonal.
local function make_definite(list, n)
  for at = 1, #list do
    local within = (at - 1) % (n * n)
    local row, column = math.floor(within / n), within % n
    if row > column then list[at] = list[at - within + column * n + row] end
    if row == column then list[at] = short(2 * n + math.abs(list[at])) end
  end
end

--- The position of the element that mirrors element `at` of a symmetric input; nil for other inputs.
function samples.mirror(input, at)
  if input.kind ~= "s" then return nil end
  local n = input.shape[#input.shape]
  local within = (at - 1) % (n * n)
  return at - within + within % n * n + math.floor(within / n)
end

--- Values of every input of a sample, equal at every call for the same sample. Floats stay away from 0 and from
--- the numbers in sample.f, and up to 64 all differ: kinks (relu, abs, max, clamp) would disturb finite differences.
function samples.values(sample, salt)
  seed = 12345 + (salt or 0)
  for k = 1, #sample.text do seed = (seed * 31 + sample.text:byte(k)) % 2147483646 + 1 end
  local taken, all, floats = {}, {}, 0
  local function clear(x)
    if floats < 64 and taken[x] or math.abs(x) < 0.03 then return false end
    for _, f in ipairs(sample.f) do
      if math.abs(x - f) < 0.02 then return false end
    end
    return true
  end
  for k, input in ipairs(sample.inputs) do
    local list = {}
    for n = 1, input.absent and 0 or product(input.shape) do
      local x
      if input.kind == "i" then
        x = math.floor(uniform() * input.high)
      elseif input.kind == "b" then
        x = uniform() < 0.5 and 0 or 1
      elseif input.kind == "q" then
        x = math.floor(255 * uniform()) - 127
      elseif input.kind == "c" then
        x = short(0.002 + 0.018 * uniform())
      else
        local tries = 0
        repeat
          x = short(input.kind == "+" and 0.2 + 2 * uniform() or input.kind == "u" and 1.8 * uniform() - 0.9
            or input.kind == "a" and 1.1 + 2 * uniform() or input.kind == "p" and 0.05 + 0.9 * uniform()
            or normal())
          tries = tries + 1
        until clear(x) or tries > 1000
        taken[x] = true
        floats = floats + 1
      end
      list[n] = x
    end
    if input.kind == "s" then make_definite(list, input.shape[#input.shape]) end
    -- Ids are all different where possible (for equal ids scatter_ does not define which write is last).
    if input.kind == "i" and #list <= input.high then
      local pool = {}
      for id = 0, input.high - 1 do pool[#pool + 1] = id end
      for n = 1, #list do list[n] = table.remove(pool, 1 + math.floor(uniform() * #pool)) end
    end
    all[k] = list
  end
  return all
end

-- ---- tensors ------------------------------------------------------------------------------------

--- Fails the test with the engine's text unless ok.
local function must(ok, what)
  if not ok or ok == 0 then error(("%s: %s"):format(what, ffi.string(lib.ms_error())), 0) end
  return ok
end
samples.must = must

local info = ffi.new "ms_info"
function samples.info(id)
  must(lib.ms_tensor_info(id, info) == 0, "ms_tensor_info")
  local shape = {}
  for d = 1, info.ndim do shape[d] = tonumber(info.shape[d - 1]) end
  return {
    dtype = info.dtype, device = info.device, shape = shape, numel = tonumber(info.numel), version = info.version,
    requires_grad = info.requires_grad ~= 0, contiguous = info.is_contiguous ~= 0,
  }
end

--- All elements as Lua numbers, row-major.
function samples.read(id)
  local n = samples.info(id).numel
  local buffer = ffi.new("double[?]", math.max(n, 1))
  must(lib.ms_read(id, buffer, n) == 0, "ms_read")
  local list = {}
  for k = 1, n do list[k] = buffer[k - 1] end
  return list
end

local function int64s(list)
  return ffi.new("int64_t[?]", #list + 1, list)
end

local on_device                                                   -- device of new tensors; nil: cpu
function samples.tensor(dtype, shape, values)
  local id = must(lib.ms_from_data(dtype, #shape, int64s(shape), ffi.new("double[?]", #values + 1, values)),
    "ms_from_data")
  if not on_device then return id end
  local there = samples.one("to_device", { id }, { on_device })
  lib.ms_release(id)
  return there
end

local call_args = ffi.new "ms_args"
--- Calls operator `op` (number or name), with n_i and n_f of the integers and numbers (default: all). Returns an array
--- of output ids, or nil, code, text.
function samples.call(op, inputs, i, f, n_i, n_f)
  local name = op
  if type(op) == "string" then op = lib.ms_op_find(op) end
  if op < 0 then error("no operator " .. name, 0) end
  local a = call_args
  a.n_in, a.n_out, a.n_i, a.n_f = #inputs, 0, n_i or i and #i or 0, n_f or f and #f or 0
  for k, id in ipairs(inputs) do a["in"][k - 1] = id end
  for k = 1, a.n_i do a.i[k - 1] = i[k] end
  for k = 1, a.n_f do a.f[k - 1] = f[k] end
  local code = lib.ms_call_op(op, a)
  if code ~= 0 then return nil, tonumber(code), ffi.string(lib.ms_error()) end
  local out = {}
  for k = 1, a.n_out do out[k] = a.out[k - 1] end
  return out
end

local function one(...)
  local out, _, text = samples.call(...)
  if not out then error(text, 0) end
  return out[1]
end
samples.one = one

--- The given values with other strides: dimensions reversed in memory, every second element. Returns a contiguous base,
--- a map from element k to its position in the base, and a function that makes the tensor, a view of the base.
function samples.strided(dtype, shape, values)
  local n = #shape
  local base_shape = {}
  for d = 1, n do base_shape[d] = shape[n + 1 - d] end
  base_shape[n + 1] = 2
  local count = product(shape)
  local base_values, map = {}, {}
  for k = 1, 2 * count do base_values[k] = 1 end
  local index = {}
  for d = 1, n do index[d] = 0 end
  for k = 1, count do
    local place = 0
    for d = n, 1, -1 do place = place * shape[d] + index[d] end
    map[k] = place * 2 + 2                                    -- the second of each pair
    base_values[map[k]] = values[k]
    for d = n, 1, -1 do
      index[d] = index[d] + 1
      if index[d] < shape[d] then break end
      index[d] = 0
    end
  end
  local base = samples.tensor(dtype, base_shape, base_values)
  return base, map, function()
    local order = {}
    for d = 1, n do order[d] = n - d end
    order[n + 1] = n
    return one("select", { one("permute", { base }, order) }, { n, 1 })
  end
end

-- ---- whole evaluations --------------------------------------------------------------------------

local function is_float(input)
  return not input.absent and (input.kind == "" or input.kind == "+" or input.kind == "u" or input.kind == "a"
    or input.kind == "p" or input.kind == "s")
end
samples.is_float = is_float
-- The dtypes of the other kinds.
local fixed_dtype = { i = E.MS_I64, b = E.MS_BOOL, q = E.MS_I8, c = E.MS_F32 }
samples.fixed_dtype = fixed_dtype

--- Runs a backward to its end; there must be no hooks.
function samples.backward(roots, grads)
  local r = ffi.new("double[?]", #roots + 1, roots)
  local g = ffi.new("double[?]", #grads + 1, grads)
  local run = lib.ms_backward(#roots, r, g, 0)
  if run == nil then error("ms_backward: " .. ffi.string(lib.ms_error()), 0) end
  local event = ffi.new "ms_event"
  local state = lib.ms_run_next(run, event)
  if state == E.MS_RUN_FAILED then
    local text = ffi.string(lib.ms_error())
    lib.ms_run_abort(run, nil)
    error("backward: " .. text, 0)
  end
  assert(state == E.MS_RUN_DONE, "backward: the run raised an event, but there are no hooks")
  lib.ms_run_free(run)
end

--- Evaluates a sample. opts:
---   dtype     of the float inputs (float64)
---   values    from samples.values (possibly changed)
---   need      true: gradients of all float inputs; { [k] = true }: of these; nil: none
---   strided   inputs, and the gradients of outputs, are not contiguous (samples.strided)
---   gout      "weights" (default): fixed numbers; "ones": ones; "expanded": ones of stride 0
---   device    of inputs without values (meta); shapes: other shapes of the inputs
---   on        device to run on
--- Returns { out = {values by output}, info = {…}, grad = {values by input} }, or nil, code, text if the call is
--- refused.
function samples.evaluate(op, sample, opts)
  if opts.on then
    on_device = opts.on
    local ok, result, code, text = pcall(samples.evaluate, op, sample, setmetatable({ on = false }, { __index = opts }))
    on_device = nil
    if not ok then error(result, 0) end
    return result, code, text
  end
  local dtype = opts.dtype or E.MS_F64
  local inputs, leaves, maps = {}, {}, {}
  local values = opts.values
  lib.ms_rng_set(7, 0)
  for k, input in ipairs(sample.inputs) do
    local shape = opts.shapes and opts.shapes[k] or input.shape
    local kind = is_float(input) and dtype or fixed_dtype[input.kind]
    local need = opts.need and is_float(input) and (opts.need == true or opts.need[k])
    if input.absent then
      inputs[k] = 0
    elseif opts.device then
      inputs[k] = must(lib.ms_empty(kind, opts.device, #shape, int64s(shape)), "ms_empty")
    elseif opts.strided and #shape > 0 then
      local base, map, view = samples.strided(kind, shape, values[k])
      if need then must(lib.ms_set_requires_grad(base, 1) == 0, "requires_grad") end
      leaves[k], maps[k] = base, map
      inputs[k] = view()
    else
      inputs[k] = samples.tensor(kind, shape, values[k])
      leaves[k] = inputs[k]
      if need then must(lib.ms_set_requires_grad(inputs[k], 1) == 0, "requires_grad") end
    end
  end
  -- A leaf that requires grad must not be changed in place, so the operator runs on a copy.
  if op.inplace and opts.need and not opts.device then inputs[1] = one("clone", { inputs[1] }) end
  local before = {}
  for k, id in ipairs(inputs) do before[k] = id ~= 0 and samples.info(id).version or 0 end
  local out, code, text = samples.call(op.op, inputs, sample.i, sample.f)
  if not out then return nil, code, text end
  local result = { out = {}, info = {}, grad = {}, inputs = inputs, ids = out, before = before }
  for k, id in ipairs(out) do
    result.info[k] = samples.info(id)
    if not opts.device then result.out[k] = samples.read(id) end
  end
  if opts.need then
    local roots, grads = {}, {}
    for k, id in ipairs(out) do
      local about = result.info[k]
      if about.requires_grad then
        local weights = samples.weights(about.numel, k)
        local g
        local before_it = on_device
        on_device = about.device ~= E.MS_CPU and about.device or nil
        if opts.gout == "expanded" then
          g = one("expand", { samples.tensor(about.dtype, {}, { 1 }) }, about.shape)
        elseif opts.gout == "ones" then
          for n = 1, #weights do weights[n] = 1 end
          g = samples.tensor(about.dtype, about.shape, weights)
        elseif opts.strided and #about.shape > 0 then
          local _, _, view = samples.strided(about.dtype, about.shape, weights)
          g = view()
        else
          g = samples.tensor(about.dtype, about.shape, weights)
        end
        on_device = before_it
        roots[#roots + 1], grads[#grads + 1] = id, g
      end
    end
    if #roots > 0 then samples.backward(roots, grads) end
    for k, leaf in pairs(leaves) do
      local g = lib.ms_get_grad(leaf)
      if g ~= 0 then
        local read = samples.read(g)
        local about = samples.info(g)
        if maps[k] then
          local picked = {}
          for n, place in ipairs(maps[k]) do picked[n] = read[place] end
          read = picked
        end
        result.grad[k] = read
        result.grad_info = result.grad_info or {}
        result.grad_info[k] = about
      end
    end
    result.recorded = #roots > 0
  end
  return result
end

--- The numbers used as gradient of output k.
function samples.weights(n, k)
  local list = {}
  for j = 1, n do list[j] = short(0.3 + (j * 7 + k * 3) % 11 / 8) * (j % 3 == 0 and -1 or 1) end
  return list
end

--- Sum over float outputs of weights times values: the function that finite differences differentiate.
function samples.total(result)
  local sum = 0
  for k, list in ipairs(result.out) do
    local dtype = result.info[k].dtype
    if dtype == E.MS_F64 or dtype == E.MS_F32 then
      for j, w in ipairs(samples.weights(#list, k)) do sum = sum + w * list[j] end
    end
  end
  return sum
end

return samples
