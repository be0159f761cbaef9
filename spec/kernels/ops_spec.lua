-- SPDX-License-Identifier: MIT
--- Tests every operator of the table with its own samples, so a new row needs no spec of its own.
local F = require "moonshard.core.ffi"
local samples = require "spec.support.samples"
local ffi, lib = F.ffi, F.lib
local E = ffi.C
local operators = samples.operators()

-- Exceptions for single operators, with their reasons; everything else is generic. (Rows named *_backward are gradients
-- of other operators and are tested with these.)
--
-- Operators that refuse every sample with an empty dimension, on purpose (a maximum of nothing …).
local refuses_empty = { max_all = "no largest of none", min_all = "no smallest of none" }
-- Operators that may refuse inputs with strides, on purpose.
local refuses_strides = { view = "a view cannot copy", as_strided = "strides count elements of contiguous memory" }
local no_meta = { to_device = "there is no data to move" }
-- Operators whose gradient is no derivative of what they compute.
local no_differences = { gamma_draw = "that of the distribution function (spec/distributions/draws_spec.lua)" }
-- Steps of the finite differences: with smaller ones the rounding of float32 dominates.
local step = { cast = 0.125 }
-- Operators that training in half precision depends on.
local half_needed = {}
for name in ([[add sub mul div neg exp sqrt rsqrt relu gelu silu tanh sigmoid add_ sub_ mul_ div_ mul_scalar add_scalar
    mul_scalar_ copy_ clone contiguous fill_ zero_ sum mean matmul linear softmax log_softmax attention layer_norm
    rms_norm
    embedding cross_entropy mse_loss dropout batch_norm conv2d where masked_fill cat stack transpose permute view
    reshape narrow select expand
    index_select norm isfinite]]):gmatch "%S+" do half_needed[name] = true end

-- Operators with one formula per element, of +, -, *, /, sqrt, fma: equal bits on every device.
local one_formula = {}
for name in ([[neg abs relu sign reciprocal sqrt rsqrt add sub mul div maximum minimum add_ sub_ mul_ div_ add_scalar mul_scalar rsub_scalar div_scalar
    rdiv_scalar add_scalar_ mul_scalar_ div_scalar_ eq ne lt le gt ge where masked_fill clamp copy_ cast clone
    contiguous fill_ zero_ arange_ eye_
    cat stack tile tril triu rand_ randint_ dropout index_select gather scatter_ embedding sort topk slice unfold
    im2col gamma_draw poisson_draw]]):gmatch "%S+" do one_formula[name] = true end

-- Operators whose result is computed from an intermediate result, after its rounding: the absolute error that this
-- causes, in units of the last place of 1.
local rounds_twice = { add_layer_norm = 6, add_rms_norm = 6, gelu_mlp = 24 }

local scope
local function in_scope()
  before_each(function() scope = lib.ms_scope_open "ops_spec" end)
  after_each(function() lib.ms_scope_close(scope, nil, 0) end)
end

local function say(sample, text, ...)
  error(("sample '%s': %s"):format(sample.text, text:format(...)), 0)
end

-- Here NaN equals NaN, and an infinity equals itself.
local function close(a, b, rtol, atol)
  if a == b or (a ~= a and b ~= b) then return true end
  return math.abs(a - b) <= atol + rtol * math.abs(b)
end

local function compare(sample, what, got, expected, rtol, atol)
  if #got ~= #expected then say(sample, "%s has %d elements, not %d", what, #got, #expected) end
  for k = 1, #got do
    if not close(got[k], expected[k], rtol, atol) then
      say(sample, "%s, element %d: %.17g, expected %.17g", what, k - 1, got[k], expected[k])
    end
  end
end

local function evaluate(op, sample, opts)
  local result, code, text = samples.evaluate(op, sample, opts)
  if not result then error(("sample '%s': %s (status %d)"):format(sample.text, text, code), 0) end
  return result
end

-- The float inputs of a sample as an array, and in the form that evaluate takes.
local function differentiated(op, sample)
  local list, need = {}, {}
  for k, input in ipairs(sample.inputs) do
    if samples.is_float(input) then
      list[#list + 1] = k
      need[k] = true
    end
  end
  return list, op.differentiable and #list > 0 and need or nil
end

local function each_sample(op, fn)
  return function()
    for _, sample in ipairs(op.samples) do
      fn(sample, samples.values(sample))
    end
  end
end

local function any_float(sample)
  for _, input in ipairs(sample.inputs) do
    if samples.is_float(input) then return true end
  end
  return false
end

-- Fills the pool's blocks of this size with numbers, so that an operator that does not write its whole output shows
-- them.
local function dirty(result, number)
  local held = {}
  for _, about in ipairs(result.info) do
    if about.device == E.MS_CPU and about.numel > 0 then
      local list = {}
      for k = 1, about.numel do list[k] = number end
      held[#held + 1] = samples.tensor(about.dtype, about.shape, list)
    end
  end
  for _, id in ipairs(held) do lib.ms_release(id) end
end

describe("the operator table", function()
  it("has operators", function()
    assert.is_true(#operators > 0)
  end)

  it("has samples for every operator", function()
    local without = {}
    for _, op in ipairs(operators) do
      if #op.samples == 0 and not op.name:find "_backward$" then without[#without + 1] = op.name end
    end
    assert.are.equal("", table.concat(without, " "))
  end)

  it("has a kernel on cuda for every operator", function()
    if lib.ms_cuda_count() == 0 then return pending(ffi.string(lib.ms_cuda_why())) end
    local without = {}
    for _, op in ipairs(operators) do
      if not samples.has_kernel(op.op, E.MS_CUDA) then without[#without + 1] = op.name end
    end
    assert.are.equal("", table.concat(without, " "))
  end)

  it("finds each operator under its name, once", function()
    for k, op in ipairs(operators) do
      assert.are.equal(op.op, lib.ms_op_find(op.name))
      assert.are_not.equal(op.name, operators[k + 1] and operators[k + 1].name)
    end
    assert.are.equal(-1, lib.ms_op_find "no such operator")
  end)
end)

-- The reason why an operator cannot run on this machine at all; nil if it can. ms.linalg needs LAPACK, which a machine
-- may lack.
local function missing(op)
  if not op.name:find "^linalg_" or #op.samples == 0 then return nil end
  local opened = lib.ms_scope_open "ops_spec"
  local sample = op.samples[1]
  local result, code, text = samples.evaluate(op, sample, { values = samples.values(sample) })
  lib.ms_scope_close(opened, nil, 0)
  return not result and code == tonumber(E.MS_EUNSUPPORTED) and text or nil
end

local tested = {}
for _, op in ipairs(operators) do
  local why = missing(op)
  if why then
    describe("operator " .. op.name, function() it("cannot run here", function() pending(why) end) end)
  else
    tested[#tested + 1] = op
  end
end

for _, op in ipairs(tested) do
  describe("operator " .. op.name, function()
    in_scope()

    it("has the gradients of finite differences, in float64", each_sample(op, function(sample, values)
      if no_differences[op.name] then return end
      local floats, need = differentiated(op, sample)
      -- An operator that has no gradient must have a derivative of zero.
      if not op.differentiable and #floats > 0 then need = true end
      local result = evaluate(op, sample, { values = values, need = need })
      if op.differentiable and need and not result.recorded then
        local float_out = false
        for _, about in ipairs(result.info) do
          float_out = float_out or about.dtype == E.MS_F64 or about.dtype == E.MS_F32
        end
        if float_out then say(sample, "differentiable, but no output requires grad") end
      end
      local sum = 0
      for _, list in ipairs(result.out) do
        for _, x in ipairs(list) do sum = sum + math.abs(x) end
      end
      -- The sum of weighted outputs when input k is moved by h times `direction`.
      local function moved(k, direction, h)
        local original = values[k]
        values[k] = {}
        for n, x in ipairs(original) do values[k][n] = x + h * (direction[n] or 0) end
        local total = samples.total(evaluate(op, sample, { values = values }))
        values[k] = original
        return total
      end
      local function along(k, direction, what)
        local h = step[op.name] or 1e-5
        local expected = (moved(k, direction, h) - moved(k, direction, -h)) / (2 * h)
        local got = 0
        for n, d in pairs(direction) do got = got + d * (result.grad[k] and result.grad[k][n] or 0) end
        if not close(got, expected, 1e-5, 1e-6 + 1e-10 * sum) then
          say(sample, "d/d input %d, %s: %.12g, finite differences say %.12g%s", k - 1, what, got, expected,
            result.grad[k] and "" or " (no gradient arrived)")
        end
      end
      -- Tests element by element; of large inputs some elements, and all of them along one direction.
      for _, k in ipairs(floats) do
        local count = #values[k]
        for n = 1, count, math.max(1, math.floor(count / 24)) do
          local direction, mirror = { [n] = 1 }, samples.mirror(sample.inputs[k], n)
          if mirror then direction[mirror] = 1 end                -- a symmetric matrix remains symmetric
          along(k, direction, "element " .. n - 1)
        end
        if count > 24 and sample.inputs[k].kind ~= "s" then
          local direction = samples.weights(count, k)
          for n = 1, count do direction[n] = direction[n] / math.sqrt(count) end
          along(k, direction, "all of it")
        end
      end
    end))

    if op.differentiable then
      it("gives an input its gradient when only that one needs it", each_sample(op, function(sample, values)
        local floats, need = differentiated(op, sample)
        local all = evaluate(op, sample, { values = values, need = need })
        for _, k in ipairs(floats) do
          local alone = evaluate(op, sample, { values = values, need = { [k] = true } })
          for _, other in ipairs(floats) do
            if other ~= k and alone.grad[other] then
              say(sample, "input %d got a gradient it did not ask for", other - 1)
            end
          end
          if (alone.grad[k] == nil) ~= (all.grad[k] == nil) then
            say(sample, "input %d: gradient there only sometimes", k - 1)
          end
          if all.grad[k] then
            compare(sample, "gradient of input " .. k - 1, alone.grad[k], all.grad[k], 1e-12, 1e-13)
          end
        end
      end))

      it("takes an expanded gradient", each_sample(op, function(sample, values)
        local _, need = differentiated(op, sample)
        local ones = evaluate(op, sample, { values = values, need = need, gout = "ones" })
        local expanded = evaluate(op, sample, { values = values, need = need, gout = "expanded" })
        for k, g in pairs(ones.grad) do
          compare(sample, "gradient of input " .. k - 1, expanded.grad[k], g, 1e-12, 1e-13)
        end
      end))

      it("gives gradients of the input's shape and dtype", each_sample(op, function(sample, values)
        for _, dtype in ipairs { E.MS_F64, E.MS_F32 } do
          local _, need = differentiated(op, sample)
          local result = evaluate(op, sample, { values = values, need = need, dtype = dtype })
          for k, about in pairs(result.grad_info or {}) do
            assert.are.same(sample.inputs[k].shape, about.shape)
            assert.are.equal(tonumber(dtype), about.dtype)
          end
        end
      end))
    end

    if not op.random then
      it("gives the same in float32 as in float64, gradients too", each_sample(op, function(sample, values)
        local _, need = differentiated(op, sample)
        local double = evaluate(op, sample, { values = values, need = need })
        local single = evaluate(op, sample, { values = values, need = need, dtype = E.MS_F32 })
        for k, list in ipairs(double.out) do
          compare(sample, "output " .. k - 1, single.out[k], list, 2e-5, 1e-5)
        end
        for k, list in pairs(double.grad) do
          if not single.grad[k] then say(sample, "no float32 gradient of input %d", k - 1) end
          compare(sample, "gradient of input " .. k - 1, single.grad[k], list, 1e-4, 5e-5)
        end
      end))
    end

    it("does the same with strides", each_sample(op, function(sample, values)
      local need = op.differentiable and not op.inplace or nil
      local plain = evaluate(op, sample, { values = values, need = need })
      local strided, code, text = samples.evaluate(op, sample, { values = values, need = need, strided = true })
      if not strided then
        if not refuses_strides[op.name] then say(sample, "%s (status %d)", text, code) end
        assert.are.equal(tonumber(E.MS_EINVAL), code)
        return
      end
      for k, list in ipairs(plain.out) do
        assert.are.same(plain.info[k].shape, strided.info[k].shape)
        compare(sample, "output " .. k - 1, strided.out[k], list, 1e-12, 1e-13)
      end
      for k, list in pairs(plain.grad) do
        if not strided.grad[k] then say(sample, "no gradient of input %d", k - 1) end
        compare(sample, "gradient of input " .. k - 1, strided.grad[k], list, 1e-12, 1e-13)
      end
    end))

    it("writes all of its output, and only that", each_sample(op, function(sample, values)
      local first = evaluate(op, sample, { values = values })
      dirty(first, 1)
      local second = evaluate(op, sample, { values = values })
      dirty(first, 0)
      local third = evaluate(op, sample, { values = values })
      for k in ipairs(first.out) do
        compare(sample, "output " .. k - 1, second.out[k], first.out[k], 0, 0)
        compare(sample, "output " .. k - 1, third.out[k], first.out[k], 0, 0)
      end
      for k, id in ipairs(first.inputs) do
        if id ~= 0 and not (op.inplace and k == 1) then
          compare(sample, "input " .. k - 1, samples.read(id), values[k], 0, 0)
          if samples.info(id).version ~= first.before[k] then say(sample, "the version of input %d changed", k - 1) end
        end
      end
    end))

    if op.inplace then
      it("bumps the version of what it changes, and returns it", each_sample(op, function(sample, values)
        local result = evaluate(op, sample, { values = values })
        local changed = result.inputs[1]
        assert.is_true(samples.info(changed).version > result.before[1])
        assert.are.equal(changed, result.ids[1])
      end))

      it("refuses to change a leaf that requires grad", each_sample(op, function(sample, values)
        if not samples.is_float(sample.inputs[1]) then return end
        local inputs = {}
        for k, input in ipairs(sample.inputs) do
          inputs[k] = input.absent and 0 or samples.tensor(samples.is_float(input) and E.MS_F32
            or samples.fixed_dtype[input.kind], input.shape, values[k])
        end
        lib.ms_set_requires_grad(inputs[1], 1)
        local out, code = samples.call(op.op, inputs, sample.i, sample.f)
        assert.is_nil(out)
        assert.is_true(code == tonumber(E.MS_ESTATE) or code == tonumber(E.MS_EINVAL))
        compare(sample, "the leaf", samples.read(inputs[1]), values[1], 0, 1e-6)
        -- Without a graph, in-place operators on leaves are how parameters are initialized.
        local mode = lib.ms_set_grad_mode(0)
        out = samples.call(op.op, inputs, sample.i, sample.f)
        lib.ms_set_grad_mode(mode)
        assert.is_truthy(out)
      end))
    end

    it("accepts empty dimensions, or gives a reason", function()
      local taken, tried, why = 0, 0, nil
      for _, sample in ipairs(op.samples) do
        local sizes = {}
        for _, input in ipairs(sample.inputs) do
          for _, d in ipairs(input.shape or {}) do sizes[d] = true end
        end
        for size in require("pl.tablex").sort(sizes) do
          if size > 0 then
            tried = tried + 1
            local shapes, values = {}, {}
            for k, input in ipairs(sample.inputs) do
              shapes[k] = {}
              for d, n in ipairs(input.shape or {}) do shapes[k][d] = n == size and 0 or n end
            end
            local full = samples.values(sample)
            for k in ipairs(sample.inputs) do
              values[k] = {}
              for n = 1, samples.product(shapes[k]) do values[k][n] = full[k][n] end
            end
            -- Sizes of a view depend on the shape; other numbers keep their values.
            local numbers = {}
            for k, n in ipairs(sample.i) do numbers[k] = op.view and n == size and 0 or n end
            local empty = setmetatable({ i = numbers }, { __index = sample })
            local _, need = differentiated(op, sample)
            local result, code, text = samples.evaluate(op, empty, { values = values, shapes = shapes, need = need })
            if result then
              taken = taken + 1
              dirty(result, 3)
              local again = evaluate(op, empty, { values = values, shapes = shapes, need = need })
              dirty(result, 5)
              again = evaluate(op, empty, { values = values, shapes = shapes, need = need }) or again
              for k, list in ipairs(result.out) do compare(empty, "output " .. k - 1, again.out[k], list, 0, 0) end
              for k, list in pairs(result.grad) do
                assert.are.equal(samples.product(shapes[k]), #list)
                for _, x in ipairs(list) do
                  if x ~= 0 and x == x and #result.out[1] == 0 then say(empty, "a gradient of %g out of nothing", x) end
                end
              end
            else
              why = text
              if code ~= tonumber(E.MS_EINVAL) or #text < 10 then say(empty, "status %d: %s", code, text) end
            end
          end
        end
      end
      if tried > 0 and taken == 0 and not refuses_empty[op.name] then
        error("refuses every empty sample: " .. why, 0)
      end
      assert.is_false(taken > 0 and refuses_empty[op.name] ~= nil)
    end)

    if not no_meta[op.name] then
      it("gives its shapes on meta", each_sample(op, function(sample, values)
        local real = evaluate(op, sample, { values = values })
        local result = evaluate(op, sample, { values = values, device = E.MS_META })
        assert.are.equal(#real.info, #result.info)
        for k, about in ipairs(real.info) do
          assert.are.same(about.shape, result.info[k].shape)
          assert.are.equal(about.dtype, result.info[k].dtype)
          if op.name ~= "to_device" then assert.are.equal(tonumber(E.MS_META), result.info[k].device) end
        end
      end))
    end

    if samples.has_kernel(op.op, E.MS_CUDA) and lib.ms_cuda_count() > 0 then
      -- Sums run in another order on a GPU; operators with one formula per element give the same bits.
      local function agree(sample, values, need, dtype, strided, rtol, atol)
        local opts = { values = values, need = need, dtype = dtype, strided = strided or nil }
        local here, code = samples.evaluate(op, sample, opts)
        opts.on = tonumber(E.MS_CUDA)
        local there, code_there, text = samples.evaluate(op, sample, opts)
        if not here then
          assert.are.equal(code, code_there)
          return
        end
        if not there then say(sample, "%s (status %d)", text, code_there) end
        local exact = one_formula[op.name]
        for k, list in ipairs(here.out) do
          assert.are.same(here.info[k].shape, there.info[k].shape)
          assert.are.equal(here.info[k].dtype, there.info[k].dtype)
          if op.name ~= "to_device" then assert.are.equal(tonumber(E.MS_CUDA), there.info[k].device) end
          local whole = exact or here.info[k].dtype > E.MS_BF16
          compare(sample, "output " .. k - 1, there.out[k], list, whole and 0 or rtol, whole and 0 or atol)
        end
        for k, list in pairs(here.grad) do
          if not there.grad[k] then say(sample, "no gradient of input %d on cuda", k - 1) end
          assert.are.same(here.grad_info[k].shape, there.grad_info[k].shape)
          assert.are.equal(here.grad_info[k].dtype, there.grad_info[k].dtype)
          local largest = 0
          for _, x in ipairs(list) do
            if math.abs(x) < math.huge then largest = math.max(largest, math.abs(x)) end
          end
          compare(sample, "gradient of input " .. k - 1, there.grad[k], list, 2 * rtol, 2 * atol * math.max(largest, 1))
        end
      end
      for _, case in ipairs { { E.MS_F64, "float64", 1e-12, 1e-12 }, { E.MS_F32, "float32", 2e-5, 1e-5 },
        { E.MS_BF16, "bfloat16", 2 ^ -7, 2 ^ -8 }, { E.MS_F16, "float16", 2 ^ -9, 2 ^ -10 } } do
        local dtype, name, rtol, atol = case[1], case[2], case[3], case[4]
        for _, strided in ipairs { false, true } do
          it(("gives on cuda what it gives on the cpu, in %s%s"):format(name, strided and ", with strides" or ""),
            each_sample(op, function(sample, values)
            if dtype ~= E.MS_F64 and not any_float(sample) then return end
            local _, need = differentiated(op, sample)
            agree(sample, values, need, dtype, strided, rtol, atol)
          end))
        end
      end
      -- Numbers at which conversions of half types, and formulas, change their way. What sums of them are depends on
      -- the order, so only refusals are compared here; the mode `compare` of MOONSHARD_CUDA=ptx compares bits.
      for _, case in ipairs { { E.MS_F16, "float16" }, { E.MS_BF16, "bfloat16" }, { E.MS_F32, "float32" },
        { E.MS_F64, "float64" } } do
        it("runs on cuda with the largest, the smallest and no numbers, in " .. case[2],
          each_sample(op, function(sample, values)
          if not any_float(sample) or op.name:find "^linalg" then return end      -- matrices must be finite
          local edges = { 0, 65504, 2 ^ -14, 1, 2 ^ -24, -2, 65520, 2 ^ -15, math.huge, 0 / 0, 0.5, -2 ^ -25,
            3 * 2 ^ -25, -110, 2 ^ -140, 1e30, 20, -9, -math.huge }
          for k, list in ipairs(values) do
            for n in ipairs(samples.is_float(sample.inputs[k]) and list or {}) do
              list[n] = edges[(n + k) % #edges + 1]
            end
          end
          local opts = { values = values, need = select(2, differentiated(op, sample)), dtype = case[1] }
          local here = samples.evaluate(op, sample, opts)
          opts.on = tonumber(E.MS_CUDA)
          assert.equal(here == nil, samples.evaluate(op, sample, opts) == nil)
        end))
      end
      -- Operators whose inputs have one shape, with a thread's several elements.
      for _, case in ipairs { { E.MS_F64, "float64" }, { E.MS_F32, "float32" }, { E.MS_BF16, "bfloat16" },
        { E.MS_F16, "float16" }, { E.MS_I64, "int64" } } do
        it("gives on cuda what it gives on the cpu for 1320 elements, with strides, in " .. case[2],
          each_sample(op, function(sample, values)
          local large, all = { text = sample.text, i = sample.i, f = sample.f, inputs = {} }, {}
          for k, input in ipairs(sample.inputs) do
            local one = sample.inputs[1]
            local same = not input.absent and #input.shape > 0 and
              table.concat(input.shape, ",") == table.concat(one.shape, ",")
            if not same then return end
            large.inputs[k], all[k] = setmetatable({ shape = { 33, 40 } }, { __index = input }), {}
            for n = 1, #values[k] > 0 and 1320 or 0 do
              local x = values[k][(n - 1) % #values[k] + 1]
              all[k][n] = case[1] == E.MS_I64 and math.floor(3 * x) or x
            end
            if #all[k] == 0 then return end
          end
          -- Large products overflow in one order and not in another; matrices of samples must not repeat.
          if not any_float(sample) or op.random or op.name == "prod" or op.name:find "^linalg" then return end
          local loose = case[1] == E.MS_F64 and 1e-12 or case[1] == E.MS_F32 and 2e-5 or 2 ^ -5
          local need = case[1] <= E.MS_BF16 and select(2, differentiated(op, sample))
          agree(large, all, need, case[1], true, loose, loose)
        end))
      end
      -- Whole numbers, so that many are equal, and some are 0.
      for _, case in ipairs { { E.MS_F64, "float64" }, { E.MS_F32, "float32" }, { E.MS_BF16, "bfloat16" },
        { E.MS_I64, "int64" }, { E.MS_I32, "int32" }, { E.MS_I16, "int16" }, { E.MS_I8, "int8" }, { E.MS_U8, "uint8" },
        { E.MS_BOOL, "bool" } } do
        it("gives on cuda what it gives on the cpu for equal numbers, in " .. case[2],
          each_sample(op, function(sample, values)
          if not any_float(sample) then return end
          for k, list in ipairs(values) do
            for n, x in ipairs(samples.is_float(sample.inputs[k]) and list or {}) do
              list[n] = math.floor(case[1] == E.MS_BOOL and math.abs(x) % 2 or case[1] == E.MS_U8 and math.abs(2 * x) or 2 * x)
            end
          end
          local float = case[1] <= E.MS_BF16
          local loose = case[1] == E.MS_F64 and 1e-12 or case[1] == E.MS_F32 and 2e-5 or 2 ^ -5
          agree(sample, values, float and select(2, differentiated(op, sample)), case[1], false, loose, loose)
        end))
      end
    end

    -- An operator is registered for half types if a kernel accepts them; half_needed lists those that must.
    local supported = {}
    for _, dtype in ipairs { E.MS_BF16, E.MS_F16 } do
      local opened = lib.ms_scope_open "ops_spec"
      for _, sample in ipairs(op.samples) do
        if any_float(sample) then
          local result, code = samples.evaluate(op, sample, { values = samples.values(sample), dtype = dtype })
          if result or code ~= tonumber(E.MS_EUNSUPPORTED) then supported[tonumber(dtype)] = true end
        end
      end
      lib.ms_scope_close(opened, nil, 0)
    end
    if half_needed[op.name] then
      it("works in bfloat16 and float16", function()
        assert.is_true(supported[tonumber(E.MS_BF16)])
        assert.is_true(supported[tonumber(E.MS_F16)])
      end)
    end
    for _, half in ipairs { { E.MS_BF16, "bfloat16", 2 ^ -8 }, { E.MS_F16, "float16", 2 ^ -11 } } do
      local dtype, name, unit = half[1], half[2], half[3]
      if supported[tonumber(dtype)] and not op.random then
        it("rounds float64's results to " .. name .. ", gradients too", each_sample(op, function(sample, values)
          if not any_float(sample) then return end
          local _, need = differentiated(op, sample)
          local double = evaluate(op, sample, { values = values, need = need })
          local result = evaluate(op, sample, { values = values, need = need, dtype = dtype })
          for k, list in ipairs(double.out) do
            local int = result.info[k].dtype == double.info[k].dtype
            -- Rounded once, from float32: half an ulp; reductions and exponentials get a little more.
            local atol = (rounds_twice[op.name] or 0.2) * unit
            compare(sample, "output " .. k - 1, result.out[k], list, int and 0 or 1.5 * unit, int and 0 or atol)
          end
          for k, list in pairs(double.grad) do
            if not result.grad[k] then say(sample, "no %s gradient of input %d", name, k - 1) end
            local largest = 0
            for _, x in ipairs(list) do largest = math.max(largest, math.abs(x)) end
            compare(sample, "gradient of input " .. k - 1, result.grad[k], list, 3 * unit,
              2 * unit * math.max(largest, 0.1))
          end
        end))
      end
    end
  end)
end
