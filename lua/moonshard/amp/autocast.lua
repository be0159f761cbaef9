-- SPDX-License-Identifier: MIT
--- amp.autocast: chooses the dtypes in which operations compute. Its two lists of operations are PyTorch's for CUDA;
--- they hold on all devices:
---
---   half dtype  linear, matmul, conv2d, scaled_dot_product_attention, linear_cross_entropy
---   float32     sum, prod, cumsum, norm, logsumexp, softmax, log_softmax; exp, exp2, expm1, log, log2, log10, log1p,
---               logaddexp, xlogy, pow (also t ^ p and p ^ t), reciprocal (also p / t), rsqrt; tan, asin, acos, sinh,
---               cosh, erfinv, softplus; layer_norm, rms_norm, batch_norm; cross_entropy, mse_loss
---
--- An operation in one of the lists converts its floating point inputs, except float64. All other operations, and
--- operations in place (pow_), compute in the dtypes of their inputs. The lists are stored as flags in the engine's
--- table of operators: MS_OP_LOW, MS_OP_WIDE. Functions made of these operators follow them.
local dtypes = require "moonshard.core.dtypes"
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local opts = require "moonshard.core.opts"
local position = require "moonshard.core.position"

local lib = engine.lib

local function restore(mode, ...)
  lib.ms_set_autocast(mode)
  return context.results(...)
end

local HALF = opts.one_of { "bfloat16", "float16" }

--- Runs fn(…) with mixed precision: products (linear, matmul, conv2d, attention) compute in the given half dtype; sums,
--- norms, losses, softmax, exponentials, logarithms and powers in float32; most other operations in the dtypes of their
--- inputs. nil turns off an enclosing autocast. Call backward outside of it.
---@param dtype "bfloat16"|"float16"|nil  dtype of products inside fn; nil turns autocast off
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
local function autocast(dtype, fn, ...)
  if dtype ~= nil then opts.expect(dtype, HALF, "autocast: dtype") end
  opts.expect(fn, opts.fn, "autocast: argument 2")
  return restore(lib.ms_set_autocast(dtype and dtypes.number(dtype) + 1 or 0), pcall(fn, ...))
end

return { autocast = position.calls_once(autocast) }
