-- SPDX-License-Identifier: MIT
--- Reads the usage texts that the programs print with --help. Two things are made of them, so neither can go stale:
---   usage.lua complete PROGRAM WORD...   candidates for the last word, each with a tab and its description. The exit
---                                        status is 1 if that word is a path, which the shell completes
---   usage.lua manual MOONSHARD VERSION   the manual page of the command MOONSHARD
--- A usage text begins with "usage: NAME ...", whose options may go on in lines that begin with a bracket. Sentences follow,
--- then lines "  --option VALUE  description" or "  command  description", which may go on in lines that are further
--- indented.
local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local function output(...)
  local words = { ... }
  for k, word in ipairs(words) do words[k] = quoted(word) end
  local pipe = io.popen(table.concat(words, " ") .. " 2>/dev/null")
  local text = pipe:read "*a"
  pipe:close()
  return text
end

---@class Usage
---@field synopsis string[]  the lines that say how the program is called, without its name
---@field about string[]  sentences
---@field entries { names: string[], value?: string, about: string }[]  options and commands, in the text's order

---@param text string
---@return Usage
local function read(text)
  local usage, known = { synopsis = {}, about = {}, entries = {} }, {}
  local function add(names, value, about)
    usage.entries[#usage.entries + 1] = { names = names, value = value ~= "" and value or nil, about = about }
    for _, name in ipairs(names) do known[name] = true end
  end
  for line in text:gmatch "[^\n]+" do
    local last = usage.entries[#usage.entries]
    local left, right = (line .. "  "):match "^  (%-%S.-)   *(.*)$"
    local command, about = line:match "^  (%l+)  +(%S.*)$"
    if line:find "^usage: " or #usage.about == 0 and line:find "^ +%[" then
      usage.synopsis[#usage.synopsis + 1] = line:gsub("^usage: ", ""):gsub("^ +", "")
    elseif left then
      local names, value = {}, left
      for name in left:gmatch "%f[%w-]%-[%w-]+" do
        names[#names + 1] = name
        value = value:gsub(name:gsub("%-", "%%-") .. ",? ?", "", 1)
      end
      add(names, value, (right:gsub(" +$", "")))
    elseif command then
      add({ command }, nil, about)
    elseif last and line:find "^     +%S" then
      last.about = last.about .. " " .. line:match "^ +(.*)$"
    else
      usage.about[#usage.about + 1] = line:match "^ *(.*)$"
    end
  end
  for option, value in table.concat(usage.synopsis, " "):gmatch "%f[-](%-%-[%w-]+)[ =]?([%u|-]*)" do
    if not known[option] then add({ option }, value, "") end
  end
  return usage
end

-- ---- completion ----------------------------------------------------------------------------------------

-- Whether an option's value, as the usage text names it, is a path.
local function is_path(value)
  for _, word in ipairs { "PATH", "FILE", "FOLDER", "DIR", "RUN" } do
    if value:find(word, 1, true) then return true end
  end
end

-- Prints the candidates for the last of `words`, a program and its arguments; exits with 1 if that word is a path.
local function complete(words)
  local program, current = table.remove(words, 1), table.remove(words)
  local before, words_of = words[#words], { program, "--help" }
  if program:match "[^/]*$" == "moonshard" then
    words_of[2] = "help"
    if words[1] ~= "help" then words_of[3] = words[1] end
  end
  local usage = read(output(unpack(words_of)))
  local function offer(candidate, about)
    if candidate:sub(1, #current) == current then print(candidate .. "\t" .. about) end
  end
  local commands = false
  for _, entry in ipairs(usage.entries) do
    for _, name in ipairs(entry.names) do
      commands = commands or not name:find "^%-"
      if name == before and entry.value then
        if is_path(entry.value) then os.exit(1) end
        if entry.value:find "|" then                    -- numbers and texts have no candidates
          for choice in entry.value:gmatch "[^|]+" do offer(choice, "") end
        end
        return
      end
    end
  end
  if not commands and not current:find "^%-" then os.exit(1) end
  for _, entry in ipairs(usage.entries) do
    for _, name in ipairs(entry.names) do offer(name, entry.about) end
  end
end

-- ---- the manual page -----------------------------------------------------------------------------------

local function roff(text) return (text:gsub("\\", "\\e"):gsub("%-", "\\-"):gsub("^[.']", "\\&%0")) end

local function manual(moonshard, version)
  local all = read(output(moonshard, "help"))
  local function entries(usage)
    for _, entry in ipairs(usage.entries) do
      local names = {}
      for k, each in ipairs(entry.names) do names[k] = "\\fB" .. roff(each) .. "\\fR" end
      print((".TP\n%s%s\n%s"):format(table.concat(names, ", "), entry.value and " \\fI" .. roff(entry.value) .. "\\fR" or "",
        roff(entry.about)))
    end
  end
  print((".TH MOONSHARD 1 \"\" \"Moonshard %s\"\n.SH NAME\nmoonshard \\- train neural networks from LuaJIT, sharded over ranks"):format(version))
  print(".SH SYNOPSIS")
  for _, line in ipairs(all.synopsis) do print(roff(line)) end
  print(".SH DESCRIPTION\n" .. roff(table.concat(all.about, " ")))
  print ".SH COMMANDS"
  entries(all)
  print ".SH OPTIONS"
  for _, entry in ipairs(all.entries) do
    local command = entry.names[1]
    if command ~= "help" and command ~= "version" then
      local usage = read(output(moonshard, "help", command))
      print(".SS " .. roff(table.concat(usage.synopsis, " ")))
      print(".PP\n" .. roff(table.concat(usage.about, " ")))
      entries(usage)
    end
  end
end

if arg[1] == "complete" then complete { unpack(arg, 2) } else manual(arg[2], arg[3]) end
