-- SPDX-License-Identifier: MIT
--- The examples of the reference, docs/api/examples/PAGE.txt. A line `# name` begins the example of a name. The
--- following lines are written as at the prompt; `--> text` after an expression gives its value. `# setup` begins lines
--- that run before each example of the file. A line `ranks: 2` at the beginning of a file makes 2 ranks run it.
local ms = require "moonshard"
local annotations = require "moonshard.tools.annotations"
local opts = require "moonshard.core.opts"
local repl = require "moonshard.tools.repl"

local M = {}

-- ---- values in one line ------------------------------------------------------------------------------

local function number_text(v)
  if v ~= v then return "nan" end
  if v % 1 == 0 and math.abs(v) < 2 ^ 53 then return ("%d"):format(v) end
  return ("%.4g"):format(v)
end

local text_of

local function nested(v, open, close)
  if type(v) ~= "table" then return text_of(v) end
  local parts = {}
  for k, w in ipairs(v) do parts[k] = nested(w, open, close) end
  return open .. table.concat(parts, ", ") .. close
end

function text_of(v)
  if type(v) == "number" then return number_text(v) end
  if ms.is_tensor(v) then return nested(v:tolist(), "[", "]") end
  if type(v) ~= "table" or (getmetatable(v) and getmetatable(v).__tostring) then
    return (tostring(v):match "^[^\n]*":gsub("^cdata<.*", "cdata"))
  end
  local parts, count = {}, #v
  for k = 1, count do parts[k] = text_of(v[k]) end
  for k, w in ms.sorted_pairs(v) do
    if not (type(k) == "number" and k >= 1 and k <= count) then
      parts[#parts + 1] = tostring(k) .. " = " .. text_of(w)
    end
  end
  return "{" .. table.concat(parts, ", ") .. "}"
end

local function results_text(n, ...)
  local parts = {}
  for k = 1, n do parts[k] = text_of((select(k, ...))) end
  return table.concat(parts, ", ")
end

-- ---- running -----------------------------------------------------------------------------------------

local silent = {}
function silent:write() return self end
silent.flush = silent.write

-- Files that examples make; they are removed at the end.
local made = {}
local function tmpname()
  local path = os.tmpname()
  made[#made + 1] = ("'%s' '%s.checkpoint'"):format(path, path)
  return path
end

local function remove_made()
  if #made > 0 then os.execute("rm -rf " .. table.concat(made, " ")) end
  made = {}
end

local function environment()
  local names = { ms = ms, F = ms.nn.F, print = function() end,
    os = setmetatable({ tmpname = tmpname }, { __index = os }) }
  for _, name in ipairs { "nn", "dist", "fsdp", "optim" } do names[name] = ms[name] end
  return setmetatable(names, { __index = _G })
end

local function agrees(have, expected)
  if expected:sub(-3) == "…" then return have:sub(1, #expected - 3) == expected:sub(1, -4) end
  return have == expected
end

local function count(...) return select("#", ...), ... end

-- Runs one line or statement. Returns the text of its value, or nil and the text of its error.
local function run_chunk(chunk, env)
  setfenv(chunk, env)
  local result
  local stderr = io.stderr
  rawset(io, "stderr", silent)
  local ok, message = pcall(function() result = results_text(count(chunk())) end)
  rawset(io, "stderr", stderr)
  if ok then return result end
  return nil, "error: " .. tostring(message):gsub("^[^\n]-:%d+: ", "")
end

-- Whether results are not compared: on ranks other than the first, which may have other results.
local blind = false

--- Runs an example. Returns what is wrong with it, or nil.
local function run(example)
  local env, pending, expected = environment(), nil, nil
  for line in (example .. "\n"):gmatch "(.-)\n" do
    local code, result = line:match "^(.-)%s*%-%-> (.*)$"
    expected = result or expected
    pending = (pending and pending .. "\n" or "") .. (code or line)
    local chunk, message, more = repl.compile(pending)
    if chunk then
      local have, failure = run_chunk(chunk, env)
      have = have or failure
      if failure and not (expected and expected:sub(1, 6) == "error:") then return failure end
      if expected and not blind and not agrees(have, expected) then return ("gives %s, not %s"):format(have, expected) end
      pending, expected = nil, nil
    elseif not more then
      return message
    end
  end
  return pending and "ends in the middle of a statement" or nil
end

-- Runs fn and records the options that functions check with opts, with their defaults.
local function recording(fn)
  local seen, check = {}, opts.check
  opts.check = function(who, given, spec)
    seen[who] = seen[who] or spec
    return check(who, given, spec)
  end
  local result = fn()
  opts.check = check
  return result, seen
end

local function default_text(value)
  if type(value) == "table" and getmetatable(value) then
    value = rawget(value, "default")
    if value == nil or value == opts.required then return "" end
  end
  if type(value) == "string" then return ("%q"):format(value) end
  return type(value) == "number" and ("%.14g"):format(value) or text_of(value)
end

-- The options of the function `name`: a table from their names to their defaults as text; nil if there are none.
local function options_of(name, seen)
  local short = name:match "[%w_]+$"
  local spec = seen[name] or seen[short]
  if not spec then return nil end
  local out = {}
  for option, value in pairs(spec) do
    out[option] = type(option) == "string" and default_text(value) or nil
  end
  return next(out) and out or nil
end

local function run_entry(entry)
  local wrong, seen = recording(function()
    ms.manual_seed(1)
    return run((entry.page.setup and entry.page.setup .. "\n" or "") .. entry.example)
  end)
  return wrong, options_of(entry.name, seen)
end

-- ---- files -------------------------------------------------------------------------------------------

local function path_of(root, page) return ("%s/docs/api/examples/%s.txt"):format(root, page.file) end

--- Reads the files of examples, and assigns each example to its entry.
function M.read(root, pages, fault)
  local by_name = {}
  for _, page in ipairs(pages) do
    for _, entry in ipairs(page.entries) do by_name[entry.name] = entry end
  end
  for _, page in ipairs(pages) do
    local file = io.open(path_of(root, page), "r")
    local current
    for line in file and file:lines() or function() end do
      local name = line:match "^# (%S+)$"
      if line:find "^ranks: %d+$" then
        page.ranks = tonumber(line:match "%d+")
      elseif name == "setup" then
        page.setup = ""
        current = { setup = page }
      elseif name then
        current = by_name[name]
        if not current then fault("docs/api/examples/%s.txt: '%s' is not a public name of the library", page.file, name) end
        if current and current.example then
          fault("docs/api/examples/%s.txt: '%s' has two examples", page.file, name)
        end
        current = current or {}
        current.example = ""
      elseif current and current.setup and line ~= "" then
        page.setup = page.setup == "" and line or page.setup .. "\n" .. line
      elseif current and line ~= "" then
        current.example = current.example == "" and line or current.example .. "\n" .. line
      end
    end
    if file then file:close() end
  end
end

-- ---- several ranks -----------------------------------------------------------------------------------

--- On each rank, runs the examples of the pages for several ranks; rank 0 writes their results to `path`.
function M.rank(root, path)
  local pages = require "docs.collect".pages()
  blind = ms.dist.rank() > 0
  M.read(root, pages, function() end)
  local lines = {}
  for _, page in ipairs(pages) do
    for _, entry in ipairs(page.ranks and page.entries or {}) do
      if entry.example then
        local wrong, options = run_entry(entry)
        lines[#lines + 1] = ("{ name = %q, wrong = %s, options = {"):format(entry.name,
          wrong and ("%q"):format(wrong) or "nil")
        for option, text in pairs(options or {}) do lines[#lines + 1] = ("[%q] = %q,"):format(option, text) end
        lines[#lines + 1] = "} },"
        if wrong then break end
      end
    end
  end
  ms.dist.barrier()
  remove_made()
  if ms.dist.rank() == 0 then
    local file = assert(io.open(path, "w"))
    file:write("return {\n", table.concat(lines, "\n"), "\n}\n")
    file:close()
  end
end

local function run_ranks(root, pages)
  local n = 0
  for _, page in ipairs(pages) do n = math.max(n, page.ranks or 0) end
  if n == 0 then return {} end
  local path = os.tmpname()
  local log = path .. ".log"
  local command = ("OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 "
    .. "timeout 120 mpirun -n %d luajit '%s/scripts/docs' --ranks '%s' >'%s' 2>&1"):format(n, root, path, log)
  local ok = os.execute(command) == 0
  local chunk = loadfile(path)
  local list = ok and chunk and chunk()
  local out, text = {}, nil
  if not list then
    local file = io.open(log)
    text = file and file:read "*a" or ""
    if file then file:close() end
  end
  for _, row in ipairs(list or {}) do out[row.name] = row end
  os.remove(path)
  os.remove(log)
  return out, text
end

-- ---- all examples -------------------------------------------------------------------------------------

local tensor_options = "{ dtype: string, device: string, requires_grad: boolean }"

-- Whether a default in an annotation is a number, a boolean or a string other than the library's default.
local function contradicts(said, default)
  local a, b = tonumber(said), tonumber(default)
  if a and b then return a ~= b end
  return (a or said == "true" or said == "false" or said:find '^"') and said ~= default
end

-- Compares the options in the annotation, and their defaults, with those in the library.
local function compare_options(entry)
  local a = entry.annotation
  if not a or not entry.options then return end
  local documented, faults = {}, {}
  for _, name in ipairs(entry.arguments) do
    -- The options of another function, which has their descriptions.
    if a.params[name] and a.params[name].type == "GenerateOptions" then return end
  end
  for _, name in ipairs(entry.arguments) do
    local kind = a.params[name] and a.params[name].type:gsub("TensorOptions", tensor_options):match "^[^{]*{%s*(.-)%s*}$"
    local fields, names = annotations.fields_of(kind or ""), {}
    for _, p in ipairs(fields) do documented[p.name], names[p.name] = true, true end
    local meanings = a.params[name] and (a.params[name].meanings or annotations.meanings_of(a.params[name].text, names))
    for _, p in ipairs(fields) do
      local said, default = (meanings[p.name] or ""):match "%(default: ([^(),]*)", entry.options[p.name]
      if said and default and default ~= "" and contradicts(said, default) then
        faults[#faults + 1] = ("gives %s as the default of option '%s', which is %s"):format(said, p.name, default)
      end
    end
  end
  for option in pairs(entry.options) do
    if not documented[option] then faults[#faults + 1] = ("does not name option '%s'"):format(option) end
  end
  for option in pairs(documented) do
    if not entry.options[option] then
      faults[#faults + 1] = ("names option '%s', which the function does not accept"):format(option)
    end
  end
  table.sort(faults)
  entry.option_faults = faults
end

--- Runs all examples, and stores in each entry the options that its function accepted.
function M.run(root, pages, fault)
  local rows, log = run_ranks(root, pages)
  local ended = log                                      -- the ranks end at the first example that fails
  if log then fault("the examples of several ranks failed:\n%s", log) end
  for _, page in ipairs(pages) do
    for _, entry in ipairs(page.entries) do
      if entry.example then
        local wrong, options
        if page.ranks then
          local row = rows[entry.name] or { wrong = not ended and "did not run" or nil }
          wrong, options = row.wrong, row.options and next(row.options) and row.options
          ended = ended or wrong
        else
          wrong, options = run_entry(entry)
        end
        if wrong then fault("the example of %s (%s): %s", entry.name, page.file, wrong) end
        entry.options = options
        compare_options(entry)
      end
    end
  end
  remove_made()
end

return M
