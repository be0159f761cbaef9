-- SPDX-License-Identifier: MIT
--- Pieces of a text, on their way from the text to its tokens. A piece is { s = string, at = integer, first = table?,
--- last = table?, plain = boolean? }. Byte k of s comes from the text's byte at + k; if a normalizer has changed the piece, from its bytes
--- first[at + k] to last[at + k]; of a plain piece, nobody asks.
local M = {}

--- The piece of a text that begins at its byte `at`.
---@param plain? boolean  where the bytes come from does not matter
function M.new(s, at, plain) return { s = s, at = at - 1, plain = plain } end

--- Bytes i to j of a piece.
function M.part(piece, i, j)
  if i == 1 and j == #piece.s then return piece end
  return { s = piece.s:sub(i, j), at = piece.at + i - 1, first = piece.first, last = piece.last,
    plain = piece.plain }
end

--- Where bytes i to j of a piece come from: the first and the last byte in the text.
---@return integer first
---@return integer last
function M.origin(piece, i, j)
  local at = piece.at
  if not piece.first then return at + i, at + j end
  return piece.first[at + i], piece.last[at + j]
end

--- A piece with changes. Each is { i, j, new, p }: bytes i to j (j = i - 1: none) become the string `new`, which counts
--- as coming from where byte p does.
---@param piece table
---@param changes table[]  in the order of the text; they do not overlap
---@return table
function M.change(piece, changes)
  if #changes == 0 then return piece end
  local s, out, first, last, n, done = piece.s, {}, {}, {}, 0, 0
  local function keep(to)
    out[#out + 1] = s:sub(done + 1, to)
    for k = done + 1, piece.plain and 0 or to do
      n = n + 1
      first[n], last[n] = M.origin(piece, k, k)
    end
  end
  for _, c in ipairs(changes) do
    keep(c[1] - 1)
    out[#out + 1], done = c[3], c[2]
    if #c[3] > 0 and not piece.plain then
      local a, b = M.origin(piece, c[4], c[4])
      for _ = 1, #c[3] do
        n = n + 1
        first[n], last[n] = a, b
      end
    end
  end
  keep(#s)
  return { s = table.concat(out), at = 0, first = first, last = last, plain = piece.plain }
end

-- The bounds of the second byte of a character, by the first one, where they are not 128 and 191: without these, longer
-- forms than needed, surrogates, and numbers above U+10FFFF (Unicode 15, table 3-7).
local LEAST, MOST = { [0xe0] = 0xa0, [0xf0] = 0x90 }, { [0xed] = 0x9f, [0xf4] = 0x8f }

--- The end of the character of UTF-8 that begins at byte k of s; k for a byte that begins none.
---@param s string
---@param k integer
---@return integer
function M.char_end(s, k)
  local c = s:byte(k)
  if c < 0xc2 or c > 0xf4 then return k end
  local stop = k + (c < 0xe0 and 1 or c < 0xf0 and 2 or 3)
  local second = s:byte(k + 1)
  if not second or second < (LEAST[c] or 128) or second > (MOST[c] or 191) then return k end
  for i = k + 2, stop do
    local d = s:byte(i)
    if not d or d < 128 or d > 191 then return k end
  end
  return stop
end

--- The number of bytes at the end of s that begin a character but do not end it.
---@param s string
---@return integer
function M.incomplete(s)
  for back = 1, math.min(3, #s) do
    local c = s:byte(-back)
    if c >= 0xc2 then
      local size = c < 0xe0 and 2 or c < 0xf0 and 3 or c < 0xf5 and 4 or 1
      return size > back and back or 0
    elseif c < 128 then
      return 0
    end
  end
  return 0
end

return M
