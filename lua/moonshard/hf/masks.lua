-- SPDX-License-Identifier: MIT
--- Masks of padding and of documents in one sequence, made once a forward. The causal order and windows need no mask.
-- Sizes: B batch, T queries, S keys, which end with the queries' own.
local errors = require "moonshard.core.errors"

local M = {}

local function expect_shape(who, name, t, B, n)
  if t.ndim ~= 2 or t:size(1) ~= B or t:size(2) ~= n then
    errors.raise("%s: option '%s' has shape %s, expected [%d, %d]", who, name, tostring(t.shape), B, n)
  end
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
---@param o { B: integer, T: integer, S: integer, attention_mask?: Tensor, segments?: Tensor, who: string }
---@return { is_causal: boolean, attn_mask?: Tensor }
function M.causal(o)
  local mask = M.padding(o.who, o.attention_mask, o.B, o.S)
  if o.segments then
    expect_shape(o.who, "segments", o.segments, o.B, o.S)
    local of_queries = o.segments:narrow(2, o.S - o.T + 1, o.T):unsqueeze(3)
    local same = of_queries:eq(o.segments:unsqueeze(2)):unsqueeze(2)
    mask = mask and mask:logical_and(same) or same
  end
  return { is_causal = true, attn_mask = mask }
end

return M
