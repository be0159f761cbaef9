-- SPDX-License-Identifier: MIT
--- amp.autocast: chooses the dtypes in which operations compute. Its two lists of operations follow those that PyTorch
--- has for CUDA, and hold on all devices:
---
---   half dtype  linear, matmul, convolutions (also transposed), scaled_dot_product_attention, rnn, lstm, gru,
---               linear_cross_entropy, gelu_mlp
---   float32     sum, prod, cumsum, cumprod, norm, logsumexp, logcumsumexp, softmax, log_softmax; exp, exp2, expm1,
---               log, log2, log10, log1p, logaddexp, xlogy, pow (also t ^ p and p ^ t), reciprocal (also p / t), rsqrt;
---               tan, asin, acos, sinh, cosh, erfinv, softplus, lgamma, digamma, polygamma; layer_norm, rms_norm,
---               batch_norm; cross_entropy, mse_loss, ctc_loss; the operators of ms.fft, and those of ms.linalg that
---               call LAPACK
---
--- An operation in one of the lists converts its floating point inputs, except float64. All other operations, and
--- operations in place (pow_), compute in the dtypes of their inputs. The lists are stored as flags in the engine's
--- table of operators: MS_OP_LOW, MS_OP_WIDE. Functions made of these operators follow them.
local dtypes = require "moonshard.core.dtypes"
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"

local lib, state = engine.lib, engine.state

local function restore(mode, ...)
  lib.ms_set_autocast(mode)
  return context.results(...)
end

local HALF = opts.one_of { "bfloat16", "float16" }

--- Runs fn(…) with mixed precision: products (linear, matmul, convolutions, attention) compute in the given half dtype;
--- sums, norms, losses, softmax, exponentials, logarithms and powers in float32; most other operations in the dtypes of
--- their inputs. nil turns off an enclosing autocast. Call backward outside of it.
---@param dtype "bfloat16"|"float16"|nil  dtype of products inside fn; nil turns autocast off
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
local function autocast(dtype, fn, ...)
  if dtype ~= nil and not HALF.test(dtype) then
    local kind = type(dtype) == "string" and dtype:match "^%l+"
    if kind == "cpu" or kind == "cuda" then
      opts.wrong(dtype, "the dtype, 'bfloat16' or 'float16'; autocast acts on all devices", "autocast: argument 1")
    end
    opts.expect(dtype, HALF, "autocast: dtype")
  end
  opts.expect(fn, opts.fn, "autocast: argument 2")
  return restore(lib.ms_set_autocast(dtype and dtypes.number(dtype) + 1 or 0), pcall(fn, ...))
end

--- Whether autocast is on, and its dtype.
---@return boolean on
---@return "bfloat16"|"float16"|nil dtype
local function is_autocast_enabled()
  local mode = state.autocast
  return mode ~= 0, mode ~= 0 and dtypes.name(mode - 1) or nil
end

-- Returns the n arguments; floating point tensors other than float64 ones are converted to dtype.
local function converted(dtype, n, first, ...)
  if n == 0 then return end
  if tensor.is_tensor(first) and dtypes.is_float(dtypes.number(first.dtype)) and first.dtype ~= "float64" then
    first = first:to(dtype)
  end
  return first, converted(dtype, n - 1, ...)
end

--- Wraps the forward of an ms.Function, whose backward is wrapped by custom_bwd: backward then computes with the
--- autocast of forward. With cast_inputs, and if autocast is on, floating point inputs except float64 are converted,
--- and forward and backward compute without autocast.
---@param forward fun(ctx: FunctionContext, ...: any): any  as in ms.Function
---@param given? { cast_inputs: string }  cast_inputs: dtype of the inputs under autocast
---@return fun(ctx: FunctionContext, ...: any): any
local function custom_fwd(forward, given)
  opts.expect(forward, opts.fn, "custom_fwd: argument 1")
  local dtype = opts("custom_fwd", given, { cast_inputs = opts.string }).cast_inputs
  if dtype and not dtypes.is_float(dtypes.number(dtype, "custom_fwd: option 'cast_inputs'")) then
    opts.wrong(dtype, "a floating point dtype", "custom_fwd: option 'cast_inputs'")
  end
  return function(ctx, ...)
    local mode = state.autocast
    if not dtype then
      ctx._autocast = mode
      return forward(ctx, ...)
    end
    ctx._autocast = 0
    if mode == 0 then return forward(ctx, ...) end
    return restore(lib.ms_set_autocast(0), pcall(forward, ctx, converted(dtype, select("#", ...), ...)))
  end
end

--- Wraps the backward of an ms.Function whose forward is wrapped by custom_fwd: it computes with the autocast of
--- forward.
---@param backward fun(ctx: FunctionContext, ...: any): any  as in ms.Function
---@return fun(ctx: FunctionContext, ...: any): any
local function custom_bwd(backward)
  opts.expect(backward, opts.fn, "custom_bwd: argument 1")
  return function(ctx, ...)
    return restore(lib.ms_set_autocast(ctx._autocast or 0), pcall(backward, ctx, ...))
  end
end

return {
  autocast = autocast, is_autocast_enabled = is_autocast_enabled, custom_fwd = custom_fwd,
  custom_bwd = custom_bwd,
}
