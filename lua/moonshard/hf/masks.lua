-- SPDX-License-Identifier: MIT
--- What the queries of a call attend to. Masks are made once a forward, only where one is needed: without padding,
--- segments, window and cache, attention is causal by its own option.
-- Sizes: B batch, T queries, S keys, which end with the queries' own.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"

local M = {}

local function expect_shape(who, name, t, B, n)
  if t.ndim ~= 2 or t:size(1) ~= B or t:size(2) ~= n then
    errors.raise("%s: option '%s' has shape %s, expected [%d, %d]", who, name, tostring(t.shape), B, n)
  end
end

local function both(a, b)
  if a and b then return a:logical_and(b) end
  return a or b
end

-- [T, S]: true where a query may attend to a key of its own position, earlier ones, and not beyond the window.
local function banded(T, S, window, device)
  local at = create.arange(S - T, S, { dtype = "int64", device = device }):unsqueeze(2)
  local keys = create.arange(0, S, { dtype = "int64", device = device }):unsqueeze(1)
  return both(keys:le(at), window and window < S and keys:gt(at - window) or nil)
end

--- A mask [B, 1, 1, S] from one that is true, or not 0, where there is a token; nil without.
---@param attention_mask? Tensor  [B, S]
function M.padding(who, attention_mask, B, S)
  if not attention_mask then return nil end
  expect_shape(who, "attention_mask", attention_mask, B, S)
  if attention_mask.dtype ~= "bool" then attention_mask = attention_mask:ne(0) end
  return attention_mask:unsqueeze(2):unsqueeze(2)
end

--- What the layers of a causal model attend to.
---@param o { B: integer, T: integer, S: integer, window?: integer, attention_mask?: Tensor, segments?: Tensor, device: string, who: string, always?: boolean }
---   always: makes a mask in any case
---@return { is_causal: boolean, attn_mask?: Tensor }
function M.causal(o)
  local mask = M.padding(o.who, o.attention_mask, o.B, o.S)
  if o.segments then
    expect_shape(o.who, "segments", o.segments, o.B, o.S)
    local of_keys = o.segments:unsqueeze(2)
    local of_queries = o.segments:narrow(2, o.S - o.T + 1, o.T):unsqueeze(3)
    mask = both(mask, of_queries:eq(of_keys:unsqueeze(2):reshape(o.B, 1, o.S)):unsqueeze(2))
  end
  local window = o.window and o.window < o.S and o.window or nil
  if not mask and not window and not o.always then
    if o.T == o.S then return { is_causal = true } end
    if o.T == 1 then return { is_causal = false } end
  end
  return { is_causal = false, attn_mask = both(mask, banded(o.T, o.S, window, o.device)) }
end

return M
