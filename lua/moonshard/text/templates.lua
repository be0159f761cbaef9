-- SPDX-License-Identifier: MIT
--- Post-processors: what surrounds the tokens of a text, such as [CLS] and [SEP], and offsets without spaces. A template
--- is a list of { sequence = 1 or 2, type = integer } and { ids = integer[], type = integer }.
local nodes = require "moonshard.text.node"
local opts = require "moonshard.core.opts"
local splitters = require "moonshard.text.splitters"

local M = {}

local A, B = { sequence = 1, type = 0 }, { sequence = 2, type = 0 }

local kinds = {}

-- One token of [text, id].
local function token(node, key)
  return { ids = { node:child(key, true):get(2, nodes.ID, true) }, type = 0 }
end

function kinds.ByteLevel(node, o)
  if node:get("trim_offsets", opts.boolean) ~= false then
    o.trim = { prefix = node:get("add_prefix_space", opts.boolean) ~= false,
      left = splitters.regex_of(node, "type", [[\A\s+]]), right = splitters.regex_of(node, "type", [[\s+\z]]) }
  end
end

function kinds.RobertaProcessing(node, o)
  local cls, sep = token(node, "cls"), token(node, "sep")
  o.single, o.pair = { cls, A, sep }, { cls, A, sep, sep, B, sep }
  kinds.ByteLevel(node, o)
end

function kinds.BertProcessing(node, o)
  local cls, sep = token(node, "cls"), token(node, "sep")
  o.single = { cls, A, sep }
  o.pair = { cls, A, sep, { sequence = 2, type = 1 }, { ids = sep.ids, type = 1 } }
end

-- A template that a file writes out.
local function template(node, key)
  local tokens, list = node:child "special_tokens", {}
  for k, part in ipairs(node:list(key, true)) do
    local sequence, special = part:child "Sequence", part:child "SpecialToken"
    local of = sequence or special or part:fail(nil, "is neither a Sequence nor a SpecialToken")
    local kind = of:get("type_id", nodes.ID) or 0
    if sequence then
      list[k] = { sequence = of:one_of("id", { "A", "B" }, true) == "A" and 1 or 2, type = kind }
    else
      local name, ids = of:get("id", opts.string, true), {}
      local known = tokens and tokens:child(name) or of:fail("id", ("is '%s', which special_tokens lacks"):format(name))
      local given = known:child("ids", true)
      for i = 1, #given.value do ids[i] = given:get(i, nodes.ID, true) end
      list[k] = { ids = ids, type = kind }
    end
  end
  return list
end

function kinds.TemplateProcessing(node, o) o.single, o.pair = template(node, "single"), template(node, "pair") end

--- The templates of a node of tokenizer.json.
---@param node? table
---@param o? table  to be filled
---@return table  { single =, pair =, trim = }
function M.read(node, o)
  o = o or { single = { A }, pair = { A, { sequence = 2, type = 1 } } }
  if not node then return o end
  local kind = node:get("type", opts.string, true)
  if kind == "Sequence" then
    for _, of in ipairs(node:list("processors", true)) do M.read(of, o) end
  elseif kinds[kind] then
    kinds[kind](node, o)
  else
    node:fail("type", ("is '%s', which Moonshard does not have"):format(kind))
  end
  return o
end

return M
