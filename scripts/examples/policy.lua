-- SPDX-License-Identifier: MIT
--- Reinforcement learning: REINFORCE with a baseline balances a pole on a cart (Barto, Sutton & Anderson 1983).
--- luajit scripts/examples/policy.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local nn, optim, Categorical = ms.nn, ms.optim, ms.distributions.Categorical

-- N carts at once: position, speed, angle and angular speed in columns; actions are 0 (push left) and 1 (right).
-- Returns the next states and which poles are still up.
local function push(s, actions)
  local x, v, a, w = s:select(2, 1), s:select(2, 2), s:select(2, 3), s:select(2, 4)
  local force = actions:float() * 20 - 10
  local pull = (force + w:square() * a:sin() * 0.05) / 1.1
  local turn = (a:sin() * 9.8 - a:cos() * pull) / (a:cos():square() * (-0.1 / 1.1) + 4 / 3) / 0.5
  local speed = pull - turn * a:cos() * (0.05 / 1.1)
  local next_s = ms.stack({ x + v * 0.02, v + speed * 0.02, a + w * 0.02, w + turn * 0.02 }, 2)
  return next_s, next_s:select(2, 1):abs():lt(2.4):logical_and(next_s:select(2, 3):abs():lt(0.21))
end

ms.manual_seed(1)
local N, LIMIT, UPDATES = 16, 200, 40
local policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
local optimizer = optim.Adam(policy:parameters(), { lr = 0.02 })
local first, last
for update in ms.steps(UPDATES) do
  local s, alive = (ms.rand(N, 4) - 0.5) * 0.1, ms.ones(N)
  local states, actions, up = {}, {}, {}
  ms.no_grad(function()
    for t = 1, LIMIT do
      states[t], up[t] = s, alive
      actions[t] = Categorical({ logits = policy(s) }):sample()
      local there
      s, there = push(s, actions[t])
      alive = alive * there:float()
      if alive:sum():item() == 0 then break end
    end
  end)
  -- The return of a step is the number of steps until the pole falls; its mean over the carts is the baseline.
  local alive_at = ms.stack(up, 1)                                  -- [steps, N]
  local returns = alive_at:flip(1):cumsum(1):flip(1)
  local mean = (returns * alive_at):sum(2, { keepdim = true }) / alive_at:sum(2, { keepdim = true })
  local advantage = (returns - mean) * alive_at / returns:std()
  local chosen = Categorical { logits = policy(ms.stack(states, 1)) }                     -- [steps, N]
  local loss = -(chosen:log_prob(ms.stack(actions, 1)) * advantage):sum() / alive_at:sum()
  optimizer:zero_grad()
  loss:backward()
  optimizer:step()
  last = alive_at:sum():item() / N                                  -- mean number of steps that a pole stayed up
  first = first or last
  if update % 10 == 0 then print(("update %d  steps %.0f"):format(update, last)) end
end
print(last > 4 * first and "poles stay up more than four times as long" or ("from %.0f to %.0f"):format(first, last))
