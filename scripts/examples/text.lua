-- SPDX-License-Identifier: MIT
--- A language model of LSTMs, on the text of a licence that every Debian has. luajit scripts/examples/text.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local metrics, nn, optim = ms.metrics, ms.nn, ms.optim
local LanguageModel = require "moonshard.models.lstm_lm"

local text = assert(io.open "/usr/share/common-licenses/GPL-2"):read "*a"
local characters, number = {}, {}                       -- the text's characters, and their ids from 0
for c in text:gmatch "." do
  if not number[c] then
    number[c] = #characters
    characters[#characters + 1] = c
  end
end
local ids = {}
for k = 1, #text do ids[k] = number[text:sub(k, k)] or number[" "] end

-- B streams of text side by side; each step continues all of them by T characters, with the state that the step before
-- has left.
local B, T, STEPS = 16, 48, 120
local long = math.floor(#ids / B)
local streams = ms.tensor(ids, { dtype = "int64" }):narrow(1, 1, B * long):reshape(B, long)

ms.manual_seed(1)
local model = LanguageModel { vocab = #characters, dim = 96, layers = 1 }
local optimizer = optim.AdamW(model:parameters(), { lr = 1e-2 })
local perplexity, state = metrics.Perplexity()
for step in ms.steps(STEPS) do
  local at = 1 + (step - 1) * T % (long - T - 1)
  local logits, last = model(streams:narrow(2, at, T), state)
  local loss = nn.F.cross_entropy(logits:flatten(1, 2), streams:narrow(2, at + 1, T):reshape(-1))
  loss:backward()
  nn.utils.clip_grad_norm_(model:parameters(), 1)
  optimizer:step()
  optimizer:zero_grad()
  state = { last[1]:detach():keep(), last[2]:detach():keep() }     -- outlives the step
  perplexity:update(loss, B * T)
  if step % 40 == 0 then
    print(("step %d  perplexity %.1f"):format(step, perplexity:compute()))
    perplexity:reset()
  end
end

-- Draws characters one by one, each from the model's distribution after the characters before it.
local out, h, id = {}, nil, ms.tensor({ { number.T } }, { dtype = "int64" })
ms.no_grad(function()
  for k = 1, 60 do
    local logits
    logits, h = model(id, h)
    id = (logits:reshape(1, -1) / 0.5):softmax(2):multinomial(1)
    out[k] = characters[id:item() + 1]:gsub("%c", " ")
  end
end)
print("T" .. table.concat(out))
