-- SPDX-License-Identifier: MIT
--- Programs in documents: their fenced blocks, run as a reader runs them, and what they print.
---
---   ```lua ranks=2         a block with require "moonshard" begins a program, over ranks if it says so;
---   ```lua                 the blocks that follow continue it, also under the next headings
---   ```text                what the program has printed since the last `text` block, to the byte; … is any text
---   ```lua file=a.lua      a file of a program (also c file=a.c), whose commands are the `sh` blocks that follow
---   ```sh                  commands; without files before it, it begins a program of commands
---   ```console prompt      lines that are typed at the prompt, after `> `, and what it prints (ranks=N: over ranks)
---   ```console             a session that no spec can run: another machine, a terminal
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local M = {}

---@class DocumentBlock
---@field language string
---@field info string     what follows the language
---@field text string
---@field heading string  of the section
---@field line integer    of the block's first line

--- The fenced blocks of a document, in order.
---@param path string  from the tree's root
---@return DocumentBlock[]
function M.blocks(path)
  local blocks, heading, open, number = {}, "", nil, 0
  for line in process.read(process.root .. "/" .. path):gmatch "([^\n]*)\n" do
    number = number + 1
    local language, info = line:match "^```(%w*)(.*)$"
    if open and line == "```" then
      open.text = table.concat(open, "\n") .. "\n"
      blocks[#blocks + 1], open = open, nil
    elseif open then
      open[#open + 1] = line
    elseif language then
      open = { language = language, info = info, heading = heading, line = number + 1 }
    else
      heading = line:match "^##+ (.+)$" or heading
    end
  end
  assert(not open, path .. ": a code block is not closed")
  return blocks
end

---@class DocumentProgram
---@field path string
---@field heading string
---@field line integer
---@field world? integer        ranks; nil: one process
---@field parts { text: string, printed: string, line?: integer }[]  blocks of a script or of commands, what each prints, and where the document says it
---@field files table<string, string>
---@field shell boolean         the parts are commands
---@field prompt boolean        the part is a session of the prompt

--- The programs of a document, in order.
---@param path string  from the tree's root
---@return DocumentProgram[]
function M.programs(path)
  local list, now = {}, nil
  local function begin(block)
    now = { path = path, heading = block.heading, line = block.line, world = tonumber(block.info:match "ranks=(%d+)"),
      parts = {}, files = {}, shell = false, prompt = false }
    list[#list + 1] = now
  end
  local function add(block) now.parts[#now.parts + 1] = { text = block.text, printed = "" } end
  for _, block in ipairs(M.blocks(path)) do
    local file = block.info:match "file=(%S+)"
    if file then
      if not now or not next(now.files) or #now.parts > 0 then begin(block) end
      now.files[file] = block.text
    elseif block.language == "console" and block.info:find " prompt" then
      begin(block)
      now.prompt = true
      add(block)
    elseif block.language == "sh" then
      if not now or not (now.shell or next(now.files)) then begin(block) end
      now.shell = true
      add(block)
    elseif block.language == "lua" then
      local continues = now and not (next(now.files) or now.shell or now.prompt)
      if not continues or block.text:find('require "moonshard"', 1, true) then begin(block) end
      add(block)
    elseif block.language == "text" then
      local part = now and now.parts[#now.parts]
      assert(part and not now.prompt, ("%s:%d: this `text` block follows no program"):format(path, block.line))
      part.printed, part.line = part.printed .. block.text, block.line
    end
  end
  return list
end

-- Separates the outputs of two blocks: rank 0 writes it before the second block's first line.
local MARK = "\1"
local mark = ('if (os.getenv "OMPI_COMM_WORLD_RANK" or "0") == "0" then io.write "\\1" end; ')

-- What the prompt reads, and what it then prints: lines that do not come from a terminal are not echoed.
local function session(transcript)
  local input, printed = {}, {}
  for line in transcript:gmatch "([^\n]*)\n" do
    local sign, typed = line:match "^(>>? )(.*)$"
    if sign then input[#input + 1] = typed .. "\n" end
    printed[#printed + 1] = sign or line .. "\n"
  end
  return table.concat(input), table.concat(printed) .. "> \n"
end

--- Runs a program in an empty folder. Returns what each of its parts printed, and the job (ranks.run).
---@param program DocumentProgram
---@return string[] outputs
---@return table job
function M.run(program)
  local folder = process.temp_folder()
  local here = { "env", "-C", folder }
  local build = process.build
  local env = process.mpirun_env {
    LUA_PATH = ("@/lua/?.lua;@/lua/?/init.lua;;"):gsub("@", process.root), MOONSHARD = process.root,
    MOONSHARD_BUILD = build, MOONSHARD_THREADS = "1",
  }
  for name, text in pairs(program.files) do
    process.write(folder .. "/" .. name, text)
    if name:find "%.c$" then                             -- pkg-config names the build, not an installation
      process.write(folder .. "/moonshard.pc", ("Name: moonshard\nDescription: built\nVersion: 1\n"
        .. "Cflags: -I%s/runtime\nLibs: -L%s -Wl,-rpath,%s -lmoonshard\n"):format(process.root, build, build))
      env.PKG_CONFIG_PATH = folder
    end
  end
  local texts = {}
  for k, part in ipairs(program.parts) do
    texts[k] = (k == 1 and "" or program.shell and "printf '\\001'\n" or mark) .. part.text
  end
  local job
  if program.prompt then
    local input, printed = session(program.parts[1].text)
    job = ranks.run(nil, ("exec %s/scripts/repl --ranks %d\n"):format(process.root, program.world or 1),
      { command = "sh", env = env, through = here, timeout = 60, stdin = input })
    program.parts[1].printed, job.stdout = printed, job.stdout:gsub("^Moonshard on [^\n]*\n", "")
  elseif program.shell then
    job = ranks.run(nil, "set -e\n" .. table.concat(texts), { command = "sh", env = env, through = here, timeout = 180 })
  else
    process.write(folder .. "/program.lua", table.concat(texts))
    job = ranks.run(program.world, "program.lua", { env = env, through = here, timeout = 60 })
  end
  process.remove_folder(folder)
  local outputs = {}
  for text in (job.stdout .. MARK):gmatch "([^\1]*)\1" do outputs[#outputs + 1] = text end
  return outputs, job
end

--- Whether a text is what a `text` block says, in which … stands for any text.
function M.agrees(text, printed)
  if not printed:find("…", 1, true) then return text == printed end
  local pattern = printed:gsub("…", "\1"):gsub("%p", "%%%0"):gsub("\1", ".-")
  return text:find("^" .. pattern .. "$") ~= nil
end

--- Declares a test for each program of a document.
---@param path string  from the tree's root
---@param skip? fun(program: DocumentProgram): boolean
---@return integer count
function M.describe(path, skip)
  local busted, assert, count = require "busted", require "luassert", 0
  for _, program in ipairs(M.programs(path)) do
    if not (skip and skip(program)) then
      count = count + 1
      busted.it(("%s:%d: the program under '%s' prints what the document says"):format(path, program.line, program.heading),
        function()
          if process.tool and program.shell then
            busted.pending "commands of documents are not run under sanitizers and valgrind"
            return
          end
          local outputs, job = M.run(program)
          assert.are.equal("", job.stderr)
          assert.are.equal(0, job.code, job.stdout)
          for k, part in ipairs(program.parts) do
            if not M.agrees(outputs[k] or "", part.printed) then
              assert.are.equal(part.printed, outputs[k] or "", ("%s:%d"):format(path, part.line or program.line))
            end
          end
          assert.are.equal(#program.parts, #outputs)
        end)
    end
  end
  return count
end

return M
