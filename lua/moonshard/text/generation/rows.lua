-- SPDX-License-Identifier: MIT
--- The texts that a generation begins with.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local is_tensor = require("moonshard.tensor").is_tensor

local function row_of(ids, width)
  return { ids = ids, prompt = #ids, width = width, sample = 0, done = false }
end

-- Rows of lists of tokens.
local function from_lists(who, lists)
  opts.need(opts.is_plain(lists) and #lists > 0, lists, "token ids [B, T], or a list of lists of ids", "%s: the ids",
    who)
  local width, rows = 0, {}
  for _, list in ipairs(lists) do
    if is_tensor(list) then list = list:tolist() end
    opts.need(type(list) == "table" and list[1] ~= nil, list, "a list of at least one id", "%s: an element of the ids",
      who)
    width = math.max(width, #list)
  end
  for r, list in ipairs(lists) do
    local ids = {}
    for k, id in ipairs(is_tensor(list) and list:tolist() or list) do ids[k] = opts.expect(id, opts.whole_from(0),
      "%s: token %d of row %d", who, k, r) end
    rows[r] = row_of(ids, width)
  end
  return rows, "cpu"
end

--- The rows: { ids: the tokens without padding; prompt: their number; width: the number with padding; padding: the
--- padded tokens' ids; sample: number among the rows of the same text, from 0 }.
---@param who string
---@param ids Tensor|integer[][]
---@param mask? Tensor  [B, T]
---@param pad? integer  without a mask, the token of which there is none, as in transformers
---@return table[] rows
---@return string device
return function(who, ids, mask, pad)
  if not is_tensor(ids) then
    if mask then errors.raise("%s: lists of ids need no attention_mask", who) end
    return from_lists(who, ids)
  end
  opts.need((ids.ndim == 1 or ids.ndim == 2) and ids.dtype == "int64" and ids:numel() > 0, ids,
    "int64 [T] or [B, T], not empty", "%s: the ids", who)
  local lists = ids.ndim == 1 and { ids:tolist() } or ids:tolist()
  local seen
  if mask then
    opts.need(is_tensor(mask) and mask.ndim == ids.ndim and mask:numel() == ids:numel(), mask, "shape " .. tostring(
      ids.shape), "%s: option 'attention_mask'", who)
    seen = mask:ne(0):tolist()
    if ids.ndim == 1 then seen = { seen } end
  end
  local rows = {}
  for r, list in ipairs(lists) do
    local own, padding = {}, {}
    for k, id in ipairs(list) do
      if seen and not seen[r][k] or not seen and id == pad then
        padding[#padding + 1] = id
        if #own > 0 and not seen then
          errors.raise("%s: row %d has the padding token %d after others; pad on the left, or pass option 'attention_mask'",
            who, r, id)
        elseif #own > 0 then
          errors.raise("%s: row %d of the attention_mask is padded on the right; pad on the left, as encode_batch does with side = 'left'", who, r)
        end
      else
        own[#own + 1] = id
      end
    end
    if #own == 0 then errors.raise("%s: row %d %shas no token", who, r, seen and "of the attention_mask " or "") end
    rows[r] = row_of(own, #list)
    rows[r].padding = padding
  end
  return rows, ids.device
end
