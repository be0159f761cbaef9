-- SPDX-License-Identifier: MIT
--- The summary of scripts/gpu_check: the result of each part of it, and the measured rates beside predictions,
--- PyTorch's times and targets.
local cjson = require "cjson"
local M = {}

local function us(seconds) return seconds and ("%.1f"):format(seconds * 1e6) or "not measured" end
local function ratio(a, b) return a and b and ("%.2f"):format(a / b) or "" end

--- Targets on an H200: the share of the measured copy rate, or of PyTorch's rate, that a case must reach.
local TARGETS = { copy = 0.85, copy_backward = 0.70, products = 0.95, attention = 0.95, attention_forward = 0.75,
  attention_backward = 0.50, step = 1 }

---@param text string         the lines of gpu_check.jsonl
---@param predictions string  the file of predictions; "" if there is none
---@return string  Markdown
function M.write(text, predictions)
  local out, parts, names, ours, torch, kernels, operators = {}, {}, {}, {}, {}, {}, {}
  local head = {}
  local function add(...) table.insert(out, (...):format(select(2, ...))) end
  for line in text:gmatch "[^\n]+" do
    local ok, r = pcall(cjson.decode, line)
    if ok and r.part then
      table.insert(parts, r)
    elseif ok and r.rate then
      local list = r.torch and torch or ours
      if not ours[r.rate] and not torch[r.rate] then table.insert(names, r.rate) end
      if not list[r.rate] or r.seconds < list[r.rate].seconds then list[r.rate] = r end
    elseif ok and r.kernel then
      table.insert(kernels, r)
    elseif ok and r.operator then
      table.insert(operators, r)
    elseif ok and r.device then
      head = r
    end
  end
  local predicted = predictions ~= "" and cjson.decode(predictions) or {}
  local cases, gpt2 = predicted.cases or {}, predicted.gpt2
  if gpt2 then cases["step of GPT-2 124M, bfloat16"] = gpt2.seconds end
  local quick = head.device ~= "real"
  add("# GPU check, %s", head.time or "")
  add("")
  if quick then
    add("Device `%s`, reduced sizes: the times below say nothing about a GPU.", head.device or "?")
    add("")
  end
  if parts[1] and parts[1].part == "machine" then
    table.insert(out, "```\n" .. parts[1].last:gsub("%s+$", "") .. "\n```\n")
  end
  add("| part | result | seconds | |")
  add("|---|---|---|---|")
  for _, p in ipairs(parts) do
    add("| %s | %s | %s | %s%s |", p.part, p.status, p.seconds and ("%.1f"):format(p.seconds) or "",
      p.passed and ("%d passed, %d failed "):format(p.passed, p.failed) or "", p.why or "")
  end
  add("")
  add(next(cases) and "Predicted: for an H200, by the formula of scripts/bench/gpt2, without a GPU. A prediction is not a measurement."
    or "No predictions were made; the row of the part 'predictions' gives the reason.")
  add("")
  add("| case | measured us | rate | predicted us | measured / predicted | PyTorch us | PyTorch / measured | target |")
  add("|---|---|---|---|---|---|---|---|")
  local copy = ours["copy on the device"]
  if head.device == "null" then
    for name in pairs(cases) do table.insert(names, name) end
    table.sort(names)
  elseif quick then
    cases = {}                                         -- predictions are for the full sizes
  end
  for _, name in ipairs(names) do
    local r, t = ours[name], torch[name]
    local share, of = nil, ""
    local target = r and TARGETS[r.bar]
    if target and r.bar:find "^copy" then
      share, of = copy and r.value / copy.value, "of the copy rate"
    elseif target then
      share, of = t and t.seconds / r.seconds, "of PyTorch's rate"
    end
    local verdict = target and (share and not quick and ("%.2f %s; target %.2f %s"):format(share, of, target,
      share >= target and "met" or "missed") or "not measured") or ""
    add("| %s | %s | %s | %s | %s | %s | %s | %s |", name, us(r and r.seconds),
      r and r.value and ("%.1f %s"):format(r.value, r.unit) or "", cases[name] and us(cases[name]) or "",
      ratio(r and r.seconds, cases[name]), us(t and t.seconds), ratio(t and t.seconds, r and r.seconds), verdict)
  end
  if #operators > 0 then
    local times = {}
    for _, r in ipairs(gpt2 and not quick and gpt2.operators or {}) do times[r.name] = r.seconds end
    table.sort(operators, function(a, b) return a.seconds > b.seconds end)
    add("")
    add("Operators of a step of GPT-2, with the GPU synchronized after each:")
    add("")
    add("| operator | calls | measured us | predicted us | measured / predicted |")
    add("|---|---|---|---|---|")
    for _, r in ipairs(operators) do
      local t = times[r.operator]
      add("| %s | %d | %s | %s | %s |", r.operator, r.calls, us(r.seconds), t and us(t) or "", ratio(r.seconds, t))
    end
  end
  if gpt2 then
    add("")
    add("Kernels of a step of GPT-2 124M, mean of a launch (measured with two layers of twelve); predicted for the whole "
      .. "step: %.1f ms.", gpt2.seconds * 1e3)
    add("")
    add("| kernel | launches predicted | measured us | predicted us | measured / predicted |")
    add("|---|---|---|---|---|")
    local measured = {}
    for _, r in ipairs(kernels) do
      local name = predicted.symbols[r.kernel] or r.kernel
      local m = measured[name] or { launches = 0, seconds = 0 }
      measured[name] = m
      m.launches, m.seconds = m.launches + r.launches, m.seconds + r.seconds * r.launches
    end
    for _, r in ipairs(gpt2.kernels) do
      local m = measured[r.name]
      local each = m and m.seconds / m.launches
      add("| %s | %d | %s | %s | %s |", r.name, r.launches, us(each), us(r.seconds / r.launches),
        ratio(each, r.seconds / r.launches))
    end
  end
  return table.concat(out, "\n") .. "\n"
end

return M
