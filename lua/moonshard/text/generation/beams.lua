-- SPDX-License-Identifier: MIT
--- Beam search as transformers' (5.24): the best continuations of all beams of a text are found together; those that end
--- the text leave the beams and compete by score / length^length_penalty.
local create = require "moonshard.tensor.create"
local sample = require "moonshard.text.generation.sample"

local M = {}

local NEVER = -1e9                       -- score of a beam that must not be chosen

local function extended(ids, id)
  local copy = {}
  for k = 1, #ids do copy[k] = ids[k] end
  copy[#copy + 1] = id
  return copy
end

-- Puts a text that has ended among the best N.
local function finish(text, candidate, score, N)
  local at = #text.finished + 1
  while at > 1 and text.finished[at - 1].score < score do at = at - 1 end
  table.insert(text.finished, at, { ids = candidate.ids, score = score })
  text.finished[N + 1] = nil
end

-- Chooses the beams of a text among its continuations, the best first: { score, beam, id }.
local function advance(text, found, run, ends)
  local o, N, prompt = run.o, run.o.num_beams, text.row.prompt
  local going, stopped = {}, {}
  local new = #text.beams[1].ids - prompt + 1
  local closed = o.early_stopping == true and #text.finished == N
  for k, c in ipairs(found) do
    c.ids = extended(text.beams[c.beam].ids, c.id)
    if new >= o.max_new_tokens or ends(o, c.ids, prompt) then
      if k <= N and not closed then finish(text, c, c.score / new ^ o.length_penalty, N) end
      c.score = c.score + NEVER
      stopped[#stopped + 1] = c
    else
      going[#going + 1] = c
    end
  end
  for _, c in ipairs(stopped) do going[#going + 1] = c end
  for k = 1, N do text.beams[k] = going[k] end
  local longest = o.early_stopping == "never" and o.length_penalty > 0 and o.max_new_tokens or new
  local full = #text.finished == N
  text.open = new < o.max_new_tokens and not (full and (o.early_stopping == true
    or text.beams[1].score / longest ^ o.length_penalty <= text.finished[N].score))
end

-- The best `count` continuations of each text: logits [texts * N, V] and the beams' scores.
local function best(logits, texts, run, count)
  local N, V, scores = run.o.num_beams, logits:size(2), {}
  sample.likeliest(logits, run.o.who)
  local shares = logits:log_softmax(2):contiguous()
  for _, text in ipairs(texts) do
    for _, beam in ipairs(text.beams) do scores[#scores + 1] = beam.score end
  end
  if run.o.repetition_penalty ~= 1 then sample.penalize_(shares, run.rows, run.o.repetition_penalty) end
  sample.forbid_(shares, run.rows, run.o)
  local all = (shares + create.tensor(scores, { dtype = "float32" }):unsqueeze(2)):reshape(#texts, N * V)
  local values, places = all:topk(math.min(count, N * V), 2)
  values, places = values:tolist(), places:tolist()
  local lists = {}
  for t = 1, #texts do
    lists[t] = {}
    for k, place in ipairs(places[t]) do
      lists[t][k] = { score = values[t][k], beam = math.floor(place / V) + 1, id = place % V }
    end
  end
  return lists
end

--- Searches texts of the run's rows.
---@param run Steps
---@param ends fun(o: table, ids: integer[], prompt: integer): boolean  whether the last token ends a text
---@return table[] rows  the best num_return_sequences of each text
function M.search(run, ends)
  local o, N, texts = run.o, run.o.num_beams, {}
  for r, row in ipairs(run.rows) do
    texts[r] = { row = row, beams = {}, finished = {}, open = true }
    -- All beams are equal at first: only one of them may go on.
    for k = 1, N do texts[r].beams[k] = { ids = row.ids, score = k == 1 and 0 or NEVER, beam = k } end
  end
  -- Beams of transformers take a padding token of 0 for none.
  run.fill = o.pad == 0 and o.eos_list[1] or o.pad
  run:repeated(N)
  local count = math.max(2, 1 + #o.eos_list) * N
  while run:step(function(logits)
    local lists, from = best(logits, texts, run, count), {}
    run.done = true
    for t, text in ipairs(texts) do
      if text.open then advance(text, lists[t], run, ends) end
      run.done = run.done and not text.open
      for k, beam in ipairs(text.beams) do
        local r = (t - 1) * N + k
        from[r] = (t - 1) * N + (text.open and beam.beam or k)
        run.rows[r].ids = beam.ids
      end
    end
    if not run.done then run:reorder(from) end
    return true
  end) do end
  local rows = {}
  for _, text in ipairs(texts) do
    for k = 1, o.num_return_sequences do
      local row = {}
      for key, value in pairs(text.row) do row[key] = value end
      row.ids = text.finished[k].ids
      rows[#rows + 1] = row
    end
  end
  return rows
end

return M
