-- SPDX-License-Identifier: MIT
--- Merges what several ranks print, and their results, into one text: once where all ranks agree, else by rank.
-- Copies of globals that a session may overwrite.
local table, math, ipairs, pairs, setmetatable, tonumber = table, math, ipairs, pairs, setmetatable, tonumber

local M = {}

--- Ranks in a message: "rank 2", "ranks 0, 2", "ranks 0, 2-4".
---@param list integer[]  ascending
---@return string
function M.names(list)
  local parts, k = {}, 1
  while k <= #list do
    local last = k
    while list[last + 1] == list[last] + 1 do last = last + 1 end
    parts[#parts + 1] = last == k and list[k] or list[k] .. (last == k + 1 and ", " or "-") .. list[last]
    k = last + 1
  end
  return (#list == 1 and "rank " or "ranks ") .. table.concat(parts, ", ")
end

-- A text without its addresses, which differ between processes.
local function key_of(text) return (text:gsub("0x%x+", "0x")) end

--- Groups ranks by their text: { { ranks = { 0, 2 }, text = "…" }, … }, in the order of each group's lowest rank.
---@param texts table<integer, string>  by rank
---@param ranks integer[]  ascending
---@return { ranks: integer[], text: string }[]
function M.group(texts, ranks)
  local groups, by_key = {}, {}
  for _, r in ipairs(ranks) do
    local text = texts[r]
    local key = text and key_of(text)
    if key and not by_key[key] then
      by_key[key] = { ranks = {}, text = text }
      groups[#groups + 1] = by_key[key]
    end
    if key then table.insert(by_key[key].ranks, r) end
  end
  return groups
end

--- The texts of ranks, each after the names of the ranks that have it; without names if all `ranks` have the same text
--- or if the text itself begins with a rank.
---@param texts table<integer, string>
---@param ranks integer[]
---@return string[]
function M.lines(texts, ranks)
  local out = {}
  for _, g in ipairs(M.group(texts, ranks)) do
    if #g.ranks == #ranks or g.text:find "^rank %d+: " then
      out[#out + 1] = g.text
    else
      local prefix = M.names(g.ranks) .. ": "
      out[#out + 1] = prefix .. g.text:gsub("\n", "\n" .. (" "):rep(#prefix))
    end
  end
  return out
end

-- ---- results --------------------------------------------------------------------------------------

---@class Reply
---@field ok boolean  the line ran without error
---@field text string  its results, or its error's message
---@field trace string  lines of the traceback; "": none
---@field ended boolean?  true: the prompt interrupted this rank, because another one had failed

local function is_interrupt(text)
  return text:find "interrupted$" ~= nil or text:find("interrupted (Ctrl-C)", 1, true) ~= nil
end

-- The other rank whose error ended the line on rank r, as the text of rank r's error says; nil if there is none.
local function culprit(replies, r)
  local k = tonumber(replies[r].text:match "rank (%d+) failed: ")
  return k ~= r and k and replies[k] and not replies[k].ok and k or nil
end

--- The lines to print for the ranks' replies to a line.
---@param replies table<integer, Reply>  by rank
---@param ranks integer[]  ascending
---@return string[] lines
function M.replies(replies, ranks)
  local texts, first = {}, nil
  for _, r in ipairs(ranks) do
    local reply = replies[r]
    if not reply.ok and not reply.ended and not culprit(replies, r) then first = first or r end
  end
  for _, r in ipairs(ranks) do
    local reply = replies[r]
    local by = not reply.ok and (culprit(replies, r) or reply.ended and first ~= r and first) or nil
    if reply.ok then
      texts[r] = reply.text ~= "" and reply.text or nil
    elseif by and not is_interrupt(replies[by].text) then
      texts[r] = ("stopped, because rank %d failed"):format(by)
    elseif is_interrupt(reply.text) then
      texts[r] = "interrupted"
    else
      texts[r] = reply.text .. (reply.trace ~= "" and "\n" .. reply.trace or "")
    end
  end
  return M.lines(texts, ranks)
end

-- ---- output ---------------------------------------------------------------------------------------

local BACKLOG = 100         -- lines that may wait to be printed after Ctrl-C

---@class Output
local Output = {}
Output.__index = Output

--- Collects what ranks print, line by line. A line is given to `print` as soon as every rank that still runs has
--- printed one; lines that differ are preceded by their ranks. A rank's line waits at most `hold` seconds for the
--- others'.
---@param ranks integer[]
---@param hold number
---@param print fun(text: string)
---@return Output
function M.output(ranks, hold, print)
  local o = setmetatable({ ranks = ranks, hold = hold, print = print, dropped = 0 }, Output)
  -- By rank: the lines that wait, from index `first` on; when they arrived; and the beginning of the next line.
  o.lines, o.times, o.first, o.parts = {}, {}, {}, {}
  for _, r in ipairs(ranks) do o.lines[r], o.times[r], o.first[r], o.parts[r] = {}, {}, 1, "" end
  return o
end

--- Adds what a rank has printed. now: lib.ms_time(), in seconds.
function Output:add(r, text, now)
  text = self.parts[r] .. text
  local lines, times = self.lines[r], self.times[r]
  local at = 1
  for one, after in text:gmatch "([^\n]*)\n()" do
    lines[#lines + 1], times[#times + 1], at = one, now, after
  end
  self.parts[r] = text:sub(at)
end

local function clear(self, r) self.lines[r], self.times[r], self.first[r] = {}, {}, 1 end

--- To be called after Ctrl-C: a loop that prints may have printed thousands of lines more than the terminal has shown.
--- A rank's lines are dropped if more than BACKLOG wait, so that the prompt returns.
function Output:hurry()
  for _, r in ipairs(self.ranks) do
    local waiting = #self.lines[r] - self.first[r] + 1
    if waiting > BACKLOG then
      self.dropped = math.max(self.dropped, waiting)
      clear(self, r)
    end
  end
end

--- Prints what is due. running: the set of ranks that may print more; nil: none may, and unfinished lines are ended.
---@param now number
---@param running? table<integer, any>
function Output:tick(now, running)
  if not running then
    for _, r in ipairs(self.ranks) do
      if self.parts[r] ~= "" then self:add(r, "\n", now) end
    end
  end
  while true do
    local heads, any, wait, due = {}, false, false, false
    for _, r in ipairs(self.ranks) do
      heads[r] = self.lines[r][self.first[r]]
      any = any or heads[r] ~= nil
      wait = wait or heads[r] == nil and running ~= nil and running[r] ~= nil
      due = due or heads[r] ~= nil and now - self.times[r][self.first[r]] > self.hold
    end
    if not any or wait and not due then break end
    for _, text in ipairs(M.lines(heads, self.ranks)) do self.print(text) end
    for r in pairs(heads) do
      self.first[r] = self.first[r] + 1
      if self.first[r] > #self.lines[r] then clear(self, r) end
    end
  end
  if not running and self.dropped > 0 then
    self.print(("(%d lines that were printed before Ctrl-C are not shown)"):format(self.dropped))
    self.dropped = 0
  end
end

return M
