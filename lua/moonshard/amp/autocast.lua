--- amp.autocast: inside its function products (linear, matmul, convolutions, attention) cast their floating inputs to a
--- half dtype, and normalisations, softmax and losses to float32; everything else goes by its inputs. The rows of the
--- engine's operator table say which (MS_OP_LOW, MS_OP_WIDE); float64 stays as it is, and so do changes in place.
local dtypes = require "moonshard.dtypes"
local engine = require "moonshard.ffi"
local errors = require "moonshard.errors"

local lib = engine.lib

local function restore(mode, ok, ...)
  lib.ms_set_autocast(mode)
  if not ok then error((...), 0) end
  return ...
end

--- Runs fn(…) with this half dtype for products; nil turns it off inside an outer one. Call backward outside.
---@param dtype "bfloat16"|"float16"|nil
---@param fn function
local function autocast(dtype, fn, ...)
  if dtype ~= nil and dtype ~= "bfloat16" and dtype ~= "float16" then
    errors.raise("autocast: dtype is %s, expected 'bfloat16', 'float16' or nil", errors.show(dtype))
  end
  if type(fn) ~= "function" then errors.raise("autocast: argument 2 is %s, expected a function", errors.kind(fn)) end
  return restore(lib.ms_set_autocast(dtype and dtypes.number(dtype) + 1 or 0), pcall(fn, ...))
end

return { autocast = autocast }
