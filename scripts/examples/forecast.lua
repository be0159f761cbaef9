-- SPDX-License-Identifier: MIT
--- A forecaster: a GRU that continues a noisy series, with early stopping. luajit scripts/examples/forecast.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local data, metrics, nn, optim = ms.data, ms.metrics, ms.nn, ms.optim

-- A year's and a week's rhythm, a trend and noise, as 1000 daily values.
ms.manual_seed(1)
local day = ms.arange(0, 1000):float()
local series = (day * (2 * math.pi / 365)):sin() + (day * (2 * math.pi / 7)):sin() * 0.5 + day * 0.001
  + ms.randn(1000) * 0.1

-- An item is PAST values and the next AHEAD values, which are its target; the last 200 days are not trained on.
local PAST, AHEAD = 28, 7
local function windows(first, last)
  local rows = series:narrow(1, first, last - first + 1):unfold(1, PAST + AHEAD, 1)
  return data.TensorDataset(rows:narrow(2, 1, PAST):unsqueeze(3), rows:narrow(2, PAST + 1, AHEAD))
end

local Forecaster = nn.Module:extend "Forecaster"
function Forecaster:init(hidden)
  self.gru = nn.GRU(1, hidden, { batch_first = true })
  self.head = nn.Linear(hidden, AHEAD)
end
function Forecaster:forward(x)
  local _, last = self.gru(x)
  return self.head(last:select(1, 1)) + x:select(2, PAST)         -- the change since the last value
end

local training = data.DataLoader(windows(1, 800), { batch_size = 32, shuffle = true, drop_last = true })
local validation = data.DataLoader(windows(801, 1000), { batch_size = 200 })
local model = Forecaster(32)
local optimizer = optim.AdamW(model:parameters(), { lr = 1e-2 })
local schedule = optim.lr_scheduler.reduce_on_plateau(optimizer, { patience = 1, factor = 0.3 })
local stopping = metrics.EarlyStopping { patience = 3 }

local function evaluate(forecast)
  local error = metrics.Mean()
  ms.no_grad(function()
    for x, y in validation:epoch() do error:update((forecast(x) - y):abs()) end
  end)
  return error:compute()
end

for _ = 1, 20 do
  for x, y in training:epoch() do
    nn.F.smooth_l1_loss(model(x), y):backward()
    nn.utils.clip_grad_norm_(model:parameters(), 1)
    optimizer:step()
    optimizer:zero_grad()
  end
  local error = evaluate(model)
  schedule:step(error)
  if stopping:update(error) then break end
end
local naive = evaluate(function(x) return x:select(3, 1):narrow(2, PAST - 6, AHEAD) end)    -- repeats the last week
print(("mean error %.3f, naive %.3f"):format(stopping.best, naive))
print(stopping.best < naive and "better than the naive forecast" or "no better than the naive forecast")
