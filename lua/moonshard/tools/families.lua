-- SPDX-License-Identifier: MIT
--- Annotations of functions and classes that exist for one, two and three dimensions and are made in a loop. The one
--- of the two-dimensional member stands in the source, with a line `---@family nn.F.max_pool2d(x, kernel)`, or
--- `---@family` for a class; words of it are replaced for the others. `---@like nn.F.max_pool2d(kernel, given)` gives a
--- class the arguments of a function of its file or of an earlier one; `---@like L1Loss nn.F.l1_loss(given)` describes
--- a class whose options are those of a function. Others that differ in words alone: `fft.fft2`
--- beside `fft.fftn`, `min` beside `max`, conversions, and functions that make tensors.
local M = {}

local sources = { "nn/pooling/functions", "nn/pooling/layers", "nn/images/padding", "nn/conv/functions",
  "nn/conv/layers", "nn/norm/batch_norm", "nn/norm/group_norm", "nn/loss/ctc", "nn/loss/functions",
  "nn/loss/layers", "tensor/special/fft", "core/types" }

-- What other members say in place of words of the one that is written, in this order.
local members = {
  ["2d"] = {
    { { "2d", "1d" }, { "integer|integer[]", "integer" },
      { "{ H', W' }, or one number for both; false instead of a number keeps the input's size",
        "L', elements of the output" },
      { "height and width of a window, or one number for both", "elements of a window" },
      { "height and width, or one number for both", "length" }, { "height, width", "length" },
      { ", divisor_override: integer", "" },
      { "; divisor_override: divisor of the sums, in place of the number of elements", "" },
      { "H' x W' windows of nearly equal sizes", "L' windows of nearly equal lengths" },
      { "images [N, C, H, W]: ", "[N, C] or [N, C, L]: " }, { "KH, KW", "K" }, { "KH", "K" }, { "{ H, W }", "L" },
      { "{ H', W' }", "{ L' }" }, { ", and so for W'", "" }, { ", and so for W)", ")" }, { "H', W'", "L'" },
      { "H, W", "L" }, { "H'", "L'" }, { "(H ", "(L " }, { "y * W + x from 0", "from 0" },
      { "{ left, right, top, bottom }", "{ before, after }" }, { "on every side", "at both ends" },
      { "rows and columns", "elements" }, { "pixels", "elements" }, { "an image", "a sequence" },
      { "image", "sequence" } },
    {},
    { { "2d", "3d" }, { "height", "depth, height" }, { "one number for both", "one number for all" },
      { "H' x W'", "D' x H' x W'" }, { ", and so for W", ", and so for D and W" }, { "D and W'", "D' and W'" },
      { "H', W'", "D', H', W'" }, { "H, W", "D, H, W" }, { "KH, KW", "KD, KH, KW" },
      { "y * W + x from 0", "(z * H + y) * W + x from 0" }, { "top, bottom", "top, bottom, front, back" },
      { "rows and columns", "elements" }, { "pixels", "elements" }, { "an image", "a volume" }, { "image", "volume" } },
  },
  ["fftn%("] = {
    {},
    { { "fftn", "fft2" }, { "several dimensions", "two dimensions" },
      { "the dimensions (default: the last #s ones, or all)", "two dimensions (default: { -2, -1 })" } },
  },
  ["max%("] = { {}, { { "max", "min" }, { "largest", "smallest" } } },
  [":float%("] = { {} },
  ["zeros"] = { {} },
}
for name, dtype in ([[double float64 half float16 bfloat16 bfloat16 long int64 int int32 short int16 char int8
  byte uint8 bool bool]]):gmatch "(%S+)%s+(%S+)" do
  table.insert(members[":float%("], { { "float32", dtype }, { ":float", ":" .. name } })
end
for _, maker in ipairs { { "empty", "An uninitialised tensor" }, { "ones", "A tensor of ones" },
  { "rand", "Numbers drawn from the uniform distribution on [0, 1)," },
  { "randn", "Numbers drawn from the normal distribution of mean 0 and standard deviation 1," } } do
  table.insert(members.zeros, { { "A tensor of zeros", maker[2] }, { ",.", "." }, { "ms.zeros", "ms." .. maker[1] } })
end

local function members_of(head)
  for pattern, list in pairs(members) do
    if head:find(pattern) then return list end
  end
  return members["2d"]
end

local function replaced(text, words)
  for _, pair in ipairs(words) do
    text = text:gsub(pair[1]:gsub("%p", "%%%0"), (pair[2]:gsub("%%", "%%%%")))
  end
  return text
end

--- Breaks text into comment lines of at most 120 columns.
---@param mark string  what the lines begin with
---@param text string
function M.comment(mark, text)
  local lines, line = {}, mark
  for word in text:gmatch "%S+" do
    if #line + 1 + #word > 120 and line ~= mark then
      lines[#lines + 1] = line
      line = mark
    end
    line = line .. " " .. word
  end
  lines[#lines + 1] = line
  return table.concat(lines, "\n")
end

-- The annotation above line `at`: its prose, its tags in order, each with the text of its further lines, and the head
-- and name of the function that it describes.
local function read(lines, at, head)
  local first = at
  while lines[first - 1]:find "^%-%-%-" do first = first - 1 end
  local prose, tags = {}, {}
  for k = first, at - 1 do
    local text = lines[k]:match "^%-%-%-(.*)$"
    if text:find "^@" then
      tags[#tags + 1] = { head = text, more = "" }
    elseif tags[1] then
      tags[#tags].more = tags[#tags].more .. text:gsub("^%s*", " ")
    else
      prose[#prose + 1] = text
    end
  end
  return { prose = table.concat(prose, " "), tags = tags, head = head, name = head:match "^[^(]*" }
end

-- The tag @overload of a class that takes arguments of a function.
local function overload(class, names, of)
  local list, meanings = {}, {}
  for argument in names:gmatch "[%w_]+" do
    for _, tag in ipairs(of.tags) do
      local name, mark, rest = tag.head:match "^@param ([%w_]+)(%??) (.*)$"
      if name == argument then
        local kind, text = rest:match "^({.*})(.*)$"
        if not kind then kind, text = rest:match "^(.-)  (.*)$" end
        text = (text or "") .. tag.more
        list[#list + 1] = ("%s%s: %s"):format(name == "given" and "opts" or name, mark, kind or rest)
        meanings[#meanings + 1] = (name == "given" and "" or name .. ": ") .. text:match "^%s*(.*)$"
      end
    end
  end
  local head = ("@overload fun(%s): %s"):format(table.concat(list, ", "), class)
  return { head = head, more = table.concat(meanings, "; ") }
end

-- The class of a layer that calls a function with fixed options.
local function layer(class, of)
  local called = of.head:match "%((.*)%)":gsub(",? given", "")
  local prose = of.prose:match "^%s*(.*)$":gsub("^%u%f[%l%s]", string.lower)
  prose = ("%s as a module, called with %s: %s"):format(of.name:gsub("^nn%.", ""), called, prose)
  return { class = class, prose = prose,
    tags = { { head = ("@class %s: Module"):format(class), more = "" }, overload(class, "given", of) } }
end

local function write(out, family, words)
  out[#out + 1] = M.comment("---", replaced(family.prose, words))
  for _, tag in ipairs(family.tags) do
    out[#out + 1] = "---" .. replaced(tag.head, words)
    if tag.more ~= "" then out[#out + 1] = M.comment("---  ", replaced(tag.more, words)) end
  end
  out[#out + 1] = family.class and ("local %s = {}\n"):format(replaced(family.class, words))
    or ("function %s end\n"):format(replaced(family.head, words))
end

local here = debug.getinfo(1, "S").source:match "^@(.*/)" or "./"

--- The annotations of all members, as the text of a Lua file.
---@return string
function M.text()
  local out, known = {}, {}
  for _, source in ipairs(sources) do
    local lines, at = {}, 0
    for line in io.lines(("%s../%s.lua"):format(here, source)) do
      at = at + 1
      lines[at] = line
      local name, arguments = line:match "^function %u%.([%w_]+)(%b())"
      local class, of = line:match "^%-%-%-@like (%w+) ([%w_.]+)%(given%)$"
      if name and (lines[at - 1] or ""):find "^%-%-%-" then
        known["nn.F." .. name] = read(lines, at, ("nn.F.%s%s"):format(name, arguments))
      elseif class then
        write(out, layer(class, known[of]), {})
      elseif line:find "^%-%-%-@family" then
        local family = read(lines, at, line:match "^%-%-%-@family%s*(.*)$")
        for k, tag in ipairs(family.tags) do
          family.class = family.class or tag.head:match "^@class ([%w_]+)"
          local like, names = tag.head:match "^@like ([%w_.]+)(%b())$"
          if like then family.tags[k] = overload(family.class, names, known[like]) end
        end
        known[family.name] = family
        for _, words in ipairs(members_of(family.head)) do write(out, family, words) end
      end
    end
  end
  return table.concat(out, "\n")
end

return M
