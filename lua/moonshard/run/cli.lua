-- SPDX-License-Identifier: MIT
--- Command lines of scripts: one table describes the options; rank 0 prints errors, with the most similar option;
--- Ctrl-C ends a script with a one-line message.
local argparse = require "argparse"
local ffi = require "ffi"

ffi.cdef "int usleep(unsigned int microseconds);"

local M = {}

local function load() return require "moonshard.core.launcher"() end    -- at need: --help works without the engine

--- This process's rank and the number of ranks, from the launcher's variables; known before the ranks connect. Ends the
--- process if the engine cannot be loaded, as with a wrong variable.
---@return integer rank
---@return integer world
function M.launched()
  local loaded, launch = pcall(load)
  if loaded then return launch.rank, launch.world end
  io.stderr:write(launch, "\n")
  os.exit(2, true)
end

--- Ends this process; to be called on every rank. Rank 0 prints the reason. The ranks join, if they have not yet, and
--- leave in order, so that none of them reports that another one has ended.
---@param script string  the script's name in messages
---@param format string  for string.format, with the arguments that follow
function M.stop(script, format, ...)
  local rank, world = M.launched()
  if rank == 0 then io.stderr:write(("%s: %s\n"):format(script, format:format(...))) end
  local ordered = world > 1 and pcall(function()
    local dist = require "moonshard.dist"
    -- mpirun's SIGTERM to the ranks that have not ended yet is no news.
    require "moonshard.core.ffi".lib.ms_catch_checkpoint_signals(1)
    if not dist.is_initialized() then dist.init() end
    dist.finalize()
  end)
  if rank > 0 and not ordered then ffi.C.usleep(1e6) end -- the first rank that ends ends the job
  os.exit(2, true)
end

--- An error of the library without its place, whose advice names the script's options.
---@param err any
---@return string
function M.advice(err)
  local text = tostring(err):gsub("^[^\n]-:%d+: ", "")
  return (text:gsub("pass option 'chat': (.-), or a table such as .*$", "pass --chat with one of %1"))
end

local function number(text, accepts, expected)
  local n = tonumber(text)
  if n and n == n and accepts(n) then return n end
  return nil, ("'%s' is not %s"):format(text, expected)
end

--- Kinds of options: functions that convert text to a value, or return nil and the reason.
M.kinds = {
  text = function(text) return text end,
  path = function(text)
    if text ~= "" then return text end
    return nil, "the path is empty"
  end,
  existing = function(text)
    if require "lfs".attributes(text, "mode") then return text end
    return nil, ("there is no file or folder '%s'"):format(text)
  end,
  number = function(text) return number(text, function() return true end, "a number") end,
  positive = function(text) return number(text, function(n) return n > 0 and n < math.huge end, "a number above 0") end,
  share = function(text) return number(text, function(n) return n >= 0 and n <= 1 end, "a number from 0 to 1") end,
  whole = function(text) return number(text, function(n) return n >= 0 and n % 1 == 0 and n < 2 ^ 53 end,
  "a whole number from 0") end,
  count = function(text) return number(text, function(n) return n >= 1 and n % 1 == 0 and n < 2 ^ 53 end,
  "a whole number from 1") end,
  list = function(text) return text end,
  chat = function(text)
    if require "moonshard.text.chat_formats".FORMATS[text] then return text end
    return nil, ("'%s' is unknown, expected %s"):format(text, M.formats())
  end,
}
M.kinds.format = M.kinds.chat

-- The word for an option's value in --help, by its kind.
local value_of = { text = "TEXT", path = "PATH", existing = "PATH", list = "PATH...", number = "X", positive = "X",
  share = "X", whole = "N", count = "N", chat = "FORMAT", format = "[FORMAT]" }

--- Returns a kind of option that accepts one of the given words.
function M.one_of(...)
  local names = { ... }
  local function kind(text)
    for _, name in ipairs(names) do
      if name == text then return text end
    end
    return nil, ("'%s' is unknown, expected one of %s"):format(text, table.concat(names, ", "))
  end
  value_of[kind] = table.concat(names, "|")
  return kind
end

---@class CliOption
---@field [1] string   name, without the dashes
---@field [2] string|function  kind: "flag" (true if given), a name of M.kinds, or one_of(...); "format": as "chat", or
---   true without a name
---@field [3] any      default, which the script itself applies; nil for none
---@field [4] string   its description in --help

-- Changes "--lr -1" to "--lr=-1", because argparse treats a negative number as an option.
local function with_negatives(words)
  local out = {}
  for k = 1, #words do
    local before = out[#out]
    if words[k]:find "^%-%.?%d" and before and before:find "^%-%-[^=]+$" then
      out[#out] = before .. "=" .. words[k]
    else
      out[#out + 1] = words[k]
    end
  end
  return out
end

local WIDTH, COLUMN = 110, 28           -- the width of --help, and the column at which descriptions begin

-- The text of --help. scripts/support/usage.lua reads it for completion and the manual page.
local function help(about, options)
  local lines = { ("usage: scripts/%s [OPTION]..."):format(arg[0]:match "[^/]*$"), about }
  for _, option in ipairs(options) do
    local name, kind, default, text = unpack(option, 1, 4)
    if default ~= nil and kind ~= "flag" then text = ("%s (%s)"):format(text, tostring(default)) end
    local line = kind == "flag" and "  --" .. name or ("  --%s %s"):format(name, value_of[kind])
    line = line .. (" "):rep(COLUMN - 1 - #line)
    for word in text:gmatch "%S+" do
      if #line + 1 + #word > WIDTH then
        lines[#lines + 1] = line
        line = (" "):rep(COLUMN - 1)
      end
      line = line .. " " .. word
    end
    lines[#lines + 1] = line
  end
  return table.concat(lines, "\n") .. "\n"
end

-- What other programs call options, and the names here.
local OTHER = {
  ["learning-rate"] = "lr", ["batch-size"] = "batch", ["num-train-epochs"] = "epochs", ["num-epochs"] = "epochs",
  ["max-steps"] = "steps", tokens = "length", ["max-tokens"] = "length", ["max-new-tokens"] = "length",
  ["max-length"] = "length", ["max-seq-length"] = "length", ["output-dir"] = "out", output = "out", dataset = "data",
  ["train-file"] = "data", ["validation-file"] = "validation", ["eval-steps"] = "eval-every", ["save-steps"] = "save",
  ["lora-r"] = "lora", ["lora-rank"] = "lora", rank = "lora", ["gradient-accumulation-steps"] = "accumulate",
  ["gradient-checkpointing"] = "recompute", ["max-grad-norm"] = "clip", precision = "dtype",
  ["system-prompt"] = "system", ["chat-template"] = "chat",
}

-- argparse's message, with the option that was meant if that is known.
local function hinted(message, kinds)
  local name = message:match "^unknown option '%-%-?([^']+)'$"
  local meant = name and OTHER[name:lower():gsub("_", "-")]
  return meant and kinds[meant] and ("%s. Did you mean '--%s'?"):format(message, meant) or message
end

--- Reads a command line. Options that were not given are absent from the result.
---@param script string  the script's name in --help and messages
---@param about string  one sentence for --help
---@param options CliOption[]  the options that the script accepts
---@param words string[]  the words of the command line
---@return table<string, any>
function M.parse(script, about, options, words)
  local parser, kinds = argparse(script, about):add_help(false), {}
  function parser.error(_, message)
    message = message:gsub("\n", ". "):gsub("^%u", string.lower)
    M.stop(script, "%s (%s --help lists the options)", hinted(message, kinds), script)
  end
  parser:flag("-h --help"):action(function()
    local loaded, launch = pcall(load)
    if not loaded or launch.rank == 0 then io.stdout:write(help(about, options)) end
    os.exit(0, true)
  end)
  for _, option in ipairs(options) do
    local name, kind = option[1], option[2]
    kinds[name] = kind
    if kind == "flag" then
      parser:flag("--" .. name):target(name)
    else
      local convert = type(kind) == "function" and kind or M.kinds[kind]
      local o = parser:option("--" .. name):target(name)
      o:convert(function(text)
        local value, why = convert(text)
        return value, why and ("--%s: %s"):format(name, why)
      end)
      if kind == "list" then o:args "+" end
      if kind == "format" then o:args "?" end
    end
  end
  local given = {}
  for name, value in pairs(parser:parse(with_negatives(words))) do
    if kinds[name] == "format" then value = value[1] or true end
    if name ~= "help" then given[name] = value end
  end
  M.launched()                                           -- a wrong variable is named before the script goes on
  return given
end

--- The names of the formats of chats, for --help.
---@return string
function M.formats()
  local list = {}
  for name in pairs(require "moonshard.text.chat_formats".FORMATS) do list[#list + 1] = name end
  table.sort(list)
  return table.concat(list, ", ", 1, #list - 1) .. " or " .. list[#list]
end

--- Runs fn. Ctrl-C ends the script with a one-line message; any other error ends it with a traceback and status 1,
--- after which the launcher ends the job.
---@param script string  the script's name in messages
---@param fn function  the body of the script, called without arguments
---@param where fun(): string   describes the script's position, for the one-line message
function M.run(script, fn, where)
  local engine = require "moonshard.core.ffi"                -- required here, so that --help works before the engine is built
  local lib, C = engine.lib, engine.ffi.C
  lib.ms_catch_sigint(1)
  local ok, err = xpcall(fn, function(e)
    if lib.ms_error_code() == C.MS_EINTR and tostring(e):find "interrupted$" then return { interrupted = true } end
    return debug.traceback(tostring(e), 2)
  end)
  if ok then return end
  if type(err) == "table" and err.interrupted then
    if M.launched() == 0 then io.stderr:write("\n", script, ": interrupted ", where(), "\n") end
    os.exit(130, true)
  end
  io.stderr:write(script, ": ", tostring(err), "\n")
  os.exit(1, true)
end

return M
