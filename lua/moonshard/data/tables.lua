-- SPDX-License-Identifier: MIT
--- Tables and texts in files: CSV (RFC 4180), JSON lines, lines; and sound as WAV.
local engine = require "moonshard.core.ffi"
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local errors = require "moonshard.core.errors"
local json = require "moonshard.core.json"
local number_types = require "moonshard.tensor.number_types"
local opts = require "moonshard.core.opts"
local raw = require "moonshard.data.raw"
local zlib = require "moonshard.data.zlib"
local ffi = engine.ffi

local M = {}

-- ---- CSV -------------------------------------------------------------------------------------------------

-- The field that begins at `at`, and the position of the separator or line end after it. Inside a quoted field, quotes
-- are doubled.
local function field(text, at, stop, path, line)
  if text:byte(at) ~= 34 then
    local finish = text:find(stop, at) or #text + 1
    return text:sub(at, finish - 1), finish
  end
  local from = at + 1
  while true do
    local quote = text:find('"', from, true)
    if not quote then errors.raise("read_csv: '%s', line %d: a quoted field does not end", path, line) end
    if text:byte(quote + 1) ~= 34 then
      return text:sub(at + 1, quote - 1):gsub('""', '"'), quote + 1
    end
    from = quote + 2
  end
end

local function lines_before(text, at) return select(2, text:sub(1, at - 1):gsub("\n", "")) + 1 end

local function rows_of(text, separator, path)
  local rows, at, line = {}, 1, 1
  local stop, comma = "[" .. (separator:gsub("%p", "%%%0")) .. "\r\n]", separator:byte()
  local zero = text:find("\0", 1, true)
  if zero then
    errors.raise("read_csv: '%s', line %d: a zero byte, which text does not have", path, lines_before(text, zero))
  end
  while at <= #text do
    local row, here, empty = { line = line }, at, text:find("^[\r\n]", at)
    repeat
      row[#row + 1], here = field(text, here, stop, path, line)
      local c = text:byte(here)
      if c and c ~= comma and c ~= 10 and c ~= 13 then
        errors.raise("read_csv: '%s', line %d: text after a quoted field, expected a separator or the end of the line", path, line)
      end
      local more = c == comma
      if more then here = here + 1 end
    until not more
    if text:byte(here) == 13 then here = here + 1 end
    if text:byte(here) == 10 then here = here + 1 end
    for _ in text:sub(at, here - 1):gmatch "\n" do line = line + 1 end
    if not empty then rows[#rows + 1] = row end                         -- a line with "" is not empty
    at = math.max(here, at + 1)
  end
  return rows
end

local WORDS = {}
for word, value in pairs { nan = 0 / 0, inf = math.huge, infinity = math.huge } do
  WORDS[word], WORDS["+" .. word], WORDS["-" .. word] = value, value, -value
end

-- The number in a field, in decimal notation; NaN for an empty field, nil for one that is no number.
local function number_of(text)
  if text == "" then return 0 / 0 end
  local lower = text:lower():match "^%s*(.-)%s*$"
  if lower:find "^[+-]?[%d.]+$" or lower:find "^[+-]?[%d.]+e[+-]?%d+$" then return tonumber(lower) end
  return WORDS[lower]
end

local function texts_of(rows, k, first)
  local texts = {}
  for j = first, #rows do texts[j - first + 1] = rows[j][k] end
  return texts
end

-- The whole number in a field, of 64 bits; nil and what is wrong with the field.
local function int64_of(text)
  local sign, digits = text:match "^%s*([+-]?)0*(%d+)%.?0*%s*$"
  if not digits then
    local v = number_of(text)
    if v % 1 ~= 0 then return nil, "is not a whole number" end
    if math.abs(v) > 2 ^ 53 then return nil, "is not exact; write all its digits" end
    return v
  end
  if #digits < 16 then return tonumber(sign .. digits) end
  local most = sign == "-" and "9223372036854775808" or "9223372036854775807"
  if #digits > 19 or #digits == 19 and digits > most then
    return nil, "is outside of -9223372036854775808 to 9223372036854775807"
  end
  local v = 0LL                                          -- negative: -2^63 has no positive counterpart
  for j = 1, #digits do v = v * 10 - (digits:byte(j) - 48) end
  return sign == "-" and v or -v
end

-- A column of numbers as a tensor of an integer dtype. Raises at the first number that the dtype cannot hold. where:
-- the file and the column.
local function integers_of(rows, k, first, dtype, where)
  local wide = dtype == "int64"
  local limits = number_types.iinfo(dtype)
  local values = wide and ffi.new("int64_t[?]", math.max(1, #rows - first + 1)) or {}
  for j = first, #rows do
    local text = rows[j][k]
    local v, fault
    if wide then
      v, fault = int64_of(text)
    else
      v = number_of(text)
      fault = v % 1 ~= 0 and "is not a whole number"
        or (v < limits.min or v > limits.max) and ("is outside of %d to %d"):format(limits.min, limits.max)
    end
    if fault then
      errors.raise("read_csv: %s, line %d: '%s' %s, but option 'dtype' is '%s'; without it columns of numbers are "
        .. "floating point", where, rows[j].line, text, fault, dtype)
    end
    values[wide and j - first or j - first + 1] = v
  end
  if wide then return (raw.tensor(dtype, { #rows - first + 1 }, values)) end
  return create.tensor(values, { dtype = dtype })
end

local function is_integer(dtype)
  return dtype and dtype ~= "bool" and not dtypes.is_float(dtypes.number(dtype, "read_csv"))
end

-- A column as a tensor, if all its fields are numbers (an empty one is NaN) and not all of them NaN, else as strings.
-- asked: the dtype was given for this column, which then must be one of numbers.
local function column_of(rows, k, first, dtype, where, asked)
  local numbers, any, rounded = {}, asked or false
  for j = first, #rows do
    local v = number_of(rows[j][k])
    if not v and asked then
      errors.raise("read_csv: %s, line %d: '%s' is not a number, but option 'dtype' makes it a column of %s", where,
        rows[j].line, rows[j][k], dtype)
    end
    if not v then return texts_of(rows, k, first) end
    local digits = dtype == nil and math.abs(v) >= 2 ^ 53 and rows[j][k]:match "^%s*[+-]?0*(%d+)%.?0*%s*$"
    if digits and digits ~= ("%.0f"):format(math.abs(v)) then rounded = rounded or rows[j] end
    numbers[j - first + 1], any = v, any or v == v
  end
  if not any then return texts_of(rows, k, first) end
  if is_integer(dtype) then return integers_of(rows, k, first, dtype, where) end
  if rounded then
    errors.raise("read_csv: %s, line %d: '%s' is not exact as float64; option 'dtype' \"int64\" keeps it, "
      .. "\"float64\" rounds it", where, rounded.line, rounded[k])
  end
  return create.tensor(numbers, { dtype = dtype })
end

-- The distinct fields of a column, without the empty one: in ascending order if all are numbers, else by their bytes.
local function names_in(rows, k, first)
  local seen, list, numbers = { [""] = true }, {}, true
  for j = first, #rows do
    local text = rows[j][k]
    if not seen[text] then
      seen[text], list[#list + 1] = true, text
      numbers = numbers and number_of(text) ~= nil
    end
  end
  table.sort(list, function(a, b)
    local x, y = number_of(a), number_of(b)
    if not numbers or x == y then return a < b end
    return x < y
  end)
  return list
end

local MISSING = -100                                      -- the default ignore_index of nn.F.cross_entropy

-- A column as ids of classes, from 0. list: the names of the classes.
local function ids_of(rows, k, first, list, where)
  local id, ids = { [""] = MISSING }, {}
  for n, name in ipairs(list) do id[name] = n - 1 end
  for j = first, #rows do
    local text = rows[j][k]
    if not id[text] then
      errors.raise("read_csv: %s, line %d: '%s' is not a class, expected one of '%s'%s", where, rows[j].line, text,
        table.concat(list, "', '", 1, math.min(#list, 10)), #list > 10 and (", ... (%d classes)"):format(#list) or "")
    end
    ids[j - first + 1] = id[text]
  end
  return create.tensor(ids, { dtype = "int64" })
end

-- Raises unless the file has a column. option: the option that names it.
local function expect_column(column, option, names, count, path)
  local known = type(column) == "number" and #names == 0 and column % 1 == 0 and column >= 1 and column <= count
  for _, name in ipairs(names) do known = known or name == column end
  if known then return end
  local near = type(column) == "string" and errors.nearest(column, names)
  errors.raise("read_csv: option '%s': '%s' has no column %s%s", option, path, errors.show(column),
    near and ("; did you mean '%s'?"):format(near) or "")
end

-- Maps each column that option 'classes' names to its list of classes, or to false if the file gives them.
local function wanted_classes(given, names, count, path)
  local wanted = {}
  for key, value in pairs(given or {}) do
    local column, list = key, value
    if type(value) ~= "table" then column, list = value, false end
    expect_column(column, "classes", names, count, path)
    for k, name in ipairs(list or {}) do
      opts.expect(name, opts.string, "read_csv: option 'classes': class %d of column %s", k, errors.show(column))
    end
    wanted[column] = list
  end
  return wanted
end

-- The metatable of the columns, a field of the module because packing.lua sends it to the workers of a DataLoader by
-- name. `__tensors`: scopes keep the columns that they return.
M._Columns = { __tensors = true }
function M._Columns.__index(columns, name)
  local names = errors.names(columns)
  if type(name) ~= "string" or #names == 0 or type(names[1]) ~= "string" then
    errors.raise("read_csv: no column %s", errors.show(name))
  end
  local near = errors.nearest(name, names)
  errors.raise("read_csv: no column '%s'%s", name, near and ("; did you mean '%s'?"):format(near)
    or ", expected one of '" .. table.concat(names, "', '") .. "'")
end

-- The words for a missing value that pandas knows without being told.
local PANDAS = { "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A",
  "NA", "NULL", "NaN", "None", "n/a", "nan", "null" }

-- Makes fields that are words for a missing value empty.
local function clear_missing(rows, first, given)
  if not given then return end
  local words = {}
  for k, word in ipairs(given == true and PANDAS or given) do
    words[opts.expect(word, opts.string, "read_csv: option 'missing': word %d", k)] = true
  end
  for j = first, #rows do
    local row = rows[j]
    for k = 1, #row do
      if words[row[k]] then row[k] = "" end
    end
  end
end

-- The dtypes of single columns in option 'dtype', and the one of all others.
local function wanted_dtypes(given, names, count, path)
  if type(given) ~= "table" then return {}, given end
  for column, dtype in pairs(given) do
    expect_column(column, "dtype", names, count, path)
    dtypes.number(opts.expect(dtype, opts.string, "read_csv: option 'dtype': column %s", errors.show(column)), "read_csv")
  end
  return given, nil
end

local OPTIONS = { header = true, separator = ",", classes = opts.table,
  dtype = opts.kind("a string or a table", function(v) return type(v) == "string" or type(v) == "table" end),
  missing = opts.kind("a boolean or a list of strings", function(v) return type(v) == "boolean" or type(v) == "table" end) }

--- Reads a CSV file. A column of numbers becomes a tensor, any other a list of strings; an empty field among numbers
--- is NaN. A column of classes becomes a tensor of their ids, int64 from 0; an empty field has the id -100, which
--- nn.F.cross_entropy ignores. Empty lines are skipped. Errors: no rows; rows of different lengths; columns of the
--- same name; text after a quoted field, or a quoted field that does not end; a field that is none of the classes
--- given; a number that an integer dtype cannot hold exactly; without a dtype, a whole number beyond 2^53 that float64
--- would round; text in UTF-16 or UTF-32; reading a column that the file lacks, such as columns.pice.
---@param path string  the file, also compressed by gzip
---@param given? {header: boolean, separator: string, dtype: string|table, classes: table, missing: boolean|string[]}
---   header: the first row has the columns' names; separator: one character; dtype: dtype of columns of numbers
---   (default: the default dtype), or of single ones, as { id = "int64" }, which must then be numbers; classes: the
---   columns of classes, as { "species" }; their classes are the different fields, in ascending order; or with the
---   classes in the order of their ids, as { species = { "cat", "dog" } }; missing: fields that count as empty: true: the
---   words that pandas takes (NA, N/A, null, NaN, None and others), or a list of words (default: false)
---@return table<string|integer, Tensor|string[]> columns  by name; by position, from 1, if there is no header
---@return string[] names  the names of the columns, in order; empty without header
---@return table<string|integer, string[]> classes  the names of the classes of columns of classes; as option classes it
---   gives the same ids in another file
function M.read_csv(path, given)
  local o = opts("read_csv", given, OPTIONS)
  if #o.separator ~= 1 or o.separator:find '["\r\n]' then
    opts.wrong(o.separator, "one character, not a quote or a line end", "read_csv: option 'separator'")
  end
  local rows = rows_of(zlib.read_text(path, "read_csv"), o.separator, path)
  if #rows == 0 then errors.raise("read_csv: '%s' has no rows", path) end
  for _, row in ipairs(rows) do
    if #row ~= #rows[1] then
      errors.raise("read_csv: '%s', line %d: fields: %d, expected %d, as in line %d", path, row.line, #row, #rows[1], rows[1].line)
    end
  end
  local columns, names, classes, first = {}, {}, {}, o.header and 2 or 1
  for k = 1, o.header and #rows[1] or 0 do names[k] = rows[1][k] end
  clear_missing(rows, first, o.missing)
  local wanted = wanted_classes(o.classes, names, #rows[1], path)
  local dtype_of, dtype = wanted_dtypes(o.dtype, names, #rows[1], path)
  for k = 1, #rows[1] do
    local key = names[k] or k
    local where = ("'%s', column %s"):format(path, errors.show(key))
    if rawget(columns, key) then errors.raise("read_csv: '%s': two columns have the name '%s'", path, key) end
    if wanted[key] == nil then
      columns[key] = column_of(rows, k, first, dtype_of[key] or dtype, where, dtype_of[key] ~= nil)
    else
      classes[key] = wanted[key] or names_in(rows, k, first)
      columns[key] = ids_of(rows, k, first, classes[key], where)
    end
  end
  return setmetatable(columns, M._Columns), names, classes
end

-- ---- lines -----------------------------------------------------------------------------------------------

local function lines_of(path, who)
  local list, text = {}, zlib.read_text(path, who)
  if text ~= "" and text:sub(-1) ~= "\n" then text = text .. "\n" end
  for line in text:gmatch "([^\n]*)\n" do list[#list + 1] = line:gsub("\r$", "") end
  return list
end

--- The lines of a text file, without their ends and the byte order mark of UTF-8. Errors: text in UTF-16 or UTF-32.
---@param path string  the file, also compressed by gzip
---@return string[]
function M.read_lines(path) return lines_of(path, "read_lines") end

--- The values of a file with one JSON value in each line; empty lines are skipped. Errors: invalid JSON, by line, also
--- numbers such as NaN, 01 and 0x10, which JSON lacks; text in UTF-16 or UTF-32.
---@param path string  the file, also compressed by gzip
---@param given? {exact: boolean}  exact: whole numbers beyond 2^53 that a Lua number cannot hold are errors (default:
---   true); false: they are rounded
---@return any[]  JSON's null is cjson.null
function M.read_json_lines(path, given)
  return (M._json_lines(path, "read_json_lines", opts("read_json_lines", given, { exact = true }).exact))
end

-- The values, and the number of each one's line. who: the function that errors name.
function M._json_lines(path, who, exact)
  local list, numbers = {}, {}
  for k, line in ipairs(lines_of(path, who)) do
    if line:find "%S" then
      local ok, value = pcall(json.decode, line, exact)
      if not ok then
        errors.raise("%s: '%s', line %d: %s%s", who, path, k, value, value:find "is not exact"
          and "; { exact = false } rounds it" or line:find "^%s*[%[{]%s*$" and "; expected one JSON value in each line" or "")
      end
      list[#list + 1], numbers[#numbers + 1] = value, k
    end
  end
  return list, numbers
end

-- ---- WAV -------------------------------------------------------------------------------------------------

local little = raw.little

-- Reads a sample of PCM, of 1 to 4 bytes, as a number from -1 to below 1.
local function sample(data, bytes)
  if bytes == 1 then return (data[0] - 128) / 128 end
  local n = 0
  for k = bytes - 1, 0, -1 do n = n * 256 + data[k] end
  if n >= 2 ^ (8 * bytes - 1) then n = n - 2 ^ (8 * bytes) end
  return n / 2 ^ (8 * bytes - 1)
end

--- Reads a WAV file of PCM (8, 16, 24 or 32 bits) or floating point (32 or 64 bits). Errors: other formats; a file that
--- is cut off.
---@param path string  the file, also compressed by gzip
---@return Tensor  float32 [channels, samples]: PCM from -1 to 1, floating point as in the file
---@return integer rate  samples per second
function M.read_wav(path)
  local text = zlib.read(path, "read_wav")
  local function bad(what) errors.raise("read_wav: '%s' %s", path, what) end
  if text:sub(1, 4) ~= "RIFF" or text:sub(9, 12) ~= "WAVE" then bad "is not a WAV file" end
  local at, format, channels, rate, bits = 13, nil, nil, nil, nil
  while at + 7 <= #text do
    local name, size = text:sub(at, at + 3), little(text, at + 4, 4)
    if name == "fmt " then
      format, channels, rate, bits = little(text, at + 8, 2), little(text, at + 10, 2), little(text, at + 12, 4),
        little(text, at + 22, 2)
      if format == 0xfffe then format = little(text, at + 32, 2) end       -- WAVE_FORMAT_EXTENSIBLE: the format follows
    elseif name == "data" then
      if not format or channels < 1 then bad "has no 'fmt ' chunk with at least 1 channel before its samples" end
      local real = format == 3
      if not (real and (bits == 32 or bits == 64) or format == 1 and bits % 8 == 0 and bits >= 8 and bits <= 32) then
        bad(("has samples of format %d with %d bits, expected PCM (1) of 8, 16, 24 or 32 bits or floating point (3) of "
          .. "32 or 64"):format(format, bits))
      end
      local bytes = bits / 8
      local available = math.min(size, #text - at - 7)
      -- Programs that write to a pipe do not know the size, and give the largest.
      if available < size and size < 0x7fff0000 then
        bad(("has %d bytes of samples, but its header gives %d"):format(available, size))
      end
      local n = math.floor(available / (bytes * channels))
      local from = ffi.cast("const uint8_t *", text) + at + 7
      if real then                              -- not through Lua's numbers, which take some NaNs for other values
        local rows = raw.tensor(bits == 64 and "float64" or "float32", { n, channels }, from)
        return rows:t():to("float32"):contiguous(), rate
      end
      local t, out = raw.tensor("float32", { channels, n })
      local to = ffi.cast("float *", out)
      for k = 0, n * channels - 1 do
        to[k % channels * n + math.floor(k / channels)] = sample(from + k * bytes, bytes)
      end
      return t, rate
    end
    at = at + 8 + size + size % 2
  end
  bad "has no 'data' chunk, which holds the samples"
end

opts.fix(M, { "read_lines", "read_json_lines", "read_wav" })

return M
