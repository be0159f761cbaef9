-- SPDX-License-Identifier: MIT
--- Reads lines at the prompt with GNU readline: editing, history, completion. Used only if the library is installed and
--- the input is a terminal other than a "dumb" one. line.lua declares moonshard_wait and moonshard_is_terminal.
local bit = require "bit"
local ffi = require "ffi"
local engine = require "moonshard.core.ffi"

local declared, library
local function load()
  if not declared then
    ffi.cdef [[
      void moonshard_free(void *) __asm__("free");
      void *moonshard_malloc(size_t) __asm__("malloc");
      long moonshard_read(int, void *, size_t) __asm__("read");
      char *readline(const char *prompt);
      void add_history(const char *line);
      int read_history(const char *);
      int write_history(const char *);
      void stifle_history(int);
      extern char **(*rl_attempted_completion_function)(const char *, int, int);
      extern int rl_attempted_completion_over;
      extern int rl_completion_append_character;
      extern const char *rl_completer_word_break_characters;
      extern const char *rl_completer_quote_characters;
      extern const char *rl_basic_word_break_characters;
      extern int (*rl_getc_function)(void *);
      extern int rl_catch_signals;
      extern char *rl_line_buffer;
      extern const char *rl_readline_name;
      void rl_replace_line(const char *, int);
      int rl_forced_update_display(void);
      extern unsigned long rl_readline_state;
      typedef struct moonshard_history_entry moonshard_history_entry;
      moonshard_history_entry *remove_history(int);
      void *free_history_entry(moonshard_history_entry *);
      extern int history_length, history_write_timestamps;
      extern char history_comment_char;
    ]]
    declared = true
  end
  if ffi.C.moonshard_is_terminal(0) == 0 or os.getenv "TERM" == "dumb" then return nil end
  for _, name in ipairs { "libreadline.so.8", "libreadline.so.7", "readline" } do
    local ok, found = pcall(ffi.load, name)
    if ok then
      library = found
      return found
    end
  end
end

local COMPLETING = 0x4000                               -- a bit of rl_readline_state

local anchors = {}                                      -- callbacks and strings to which readline has pointers

local function c_string(text)
  local p = ffi.cast("char *", ffi.C.moonshard_malloc(#text + 1))
  ffi.copy(p, text)
  return p
end

-- Converts matches to readline's format: the longest common prefix, the matches if there are several, and NULL; all of
-- them are allocated by malloc.
local function c_matches(list)
  local common = list[1]
  for k = 2, #list do
    local n = 0
    while n < #common and common:byte(n + 1) == list[k]:byte(n + 1) do n = n + 1 end
    common = common:sub(1, n)
  end
  local several = #list > 1
  local out = ffi.cast("char **", ffi.C.moonshard_malloc((several and #list + 2 or 2) * ffi.sizeof "char *"))
  out[0] = c_string(common)
  if several then
    for k = 1, #list do out[k] = c_string(list[k]) end
  end
  out[several and #list + 1 or 1] = nil
  return out
end

-- Whether the word that starts at `first` is inside quotes, and is therefore a file name.
local function quoted(line, first)
  local quote
  for k = 1, first do
    local c = line:sub(k, k)
    if quote then
      if c == quote then quote = nil end
    elseif c == '"' or c == "'" then
      quote = c
    end
  end
  return quote ~= nil
end

local function attach(repl, session)
  local function complete(text, first)
    library.rl_completion_append_character = 0
    local line = ffi.string(library.rl_line_buffer)
    if quoted(line, first) then return nil end          -- readline completes file names
    library.rl_attempted_completion_over = 1
    -- "/" does not separate words, because file names contain it.
    local before, word = ffi.string(text):match "^(.-)([^/]*)$"
    local list = session:complete(word)
    for k = 1, #list do list[k] = before .. list[k] end
    if #list == 0 then return nil end
    return c_matches(list)
  end
  anchors.complete = ffi.cast("char **(*)(const char *, int, int)", function(text, first)
    local ok, matches = pcall(complete, text, first)
    return ok and matches or nil
  end)
  -- Ctrl-C at the prompt: the engine's handler sets a flag, and the line is discarded. The flag is polled ten times a
  -- second, because a signal that arrives just before the wait does not interrupt it.
  local key = ffi.new "unsigned char[1]"
  local function begin_line() io.stdout:write "\n" end                -- what ranks print gets lines of its own
  anchors.getc = ffi.cast("int (*)(void *)", function()
    while true do
      local ready = ffi.C.moonshard_wait(repl.input, 1, engine.state.interrupted ~= 0 and 0 or 100)
      if session.idle and session:idle(begin_line) then library.rl_forced_update_display() end
      if engine.state.interrupted ~= 0 then
        -- readline asks whether to show all completions, and shows them page by page: the key "n" ends both; the next
        -- key is the newline.
        if bit.band(tonumber(library.rl_readline_state), COMPLETING) ~= 0 then return ("n"):byte() end
        repl.settle()
        library.rl_replace_line("", 0)
        return 10
      end
      if ready > 0 then
        local n = ffi.C.moonshard_read(0, key, 1)
        if n == 1 then return key[0] end
        if n == 0 or n < 0 and ffi.errno() ~= 4 then return -1 end      -- EINTR: another signal
      end
    end
  end)
  library.rl_catch_signals = 0
  anchors.breaks = ffi.new("char[64]", " \t\n\"\\'`><=;+-*%^~#{}()[],|&")
  library.rl_attempted_completion_function = anchors.complete
  library.rl_getc_function = anchors.getc
  library.rl_basic_word_break_characters = anchors.breaks
  library.rl_completer_word_break_characters = anchors.breaks
  anchors.quotes = ffi.new("char[3]", "\"'")
  library.rl_completer_quote_characters = anchors.quotes
  anchors.name = ffi.new("char[16]", "moonshard")
  library.rl_readline_name = anchors.name
end

local function history_file()
  local name = os.getenv "MOONSHARD_HISTORY"
  if name then return name ~= "" and name or nil end
  local home = os.getenv "HOME"
  return home and home .. "/.moonshard_history"
end

-- A statement of several lines is one entry in the history: each further line replaces the entry of the lines before
-- it.
local function remember(line, before)
  if not line:find "%S" then return end
  if before and library.history_length > 0 then
    library.free_history_entry(library.remove_history(library.history_length - 1))
    line = before .. "\n" .. line
  end
  library.add_history(line)
  local file = history_file()
  if file then library.write_history(file) end
end

-- Must not be compiled by the JIT, because readline calls back into Lua.
local function read(prompt, before)
  local p = library.readline(prompt)
  if engine.state.interrupted ~= 0 then
    engine.state.interrupted = 0
    if p ~= nil then ffi.C.moonshard_free(p) end
    return "", true
  end
  if p == nil then return nil end
  local line = ffi.string(p)
  ffi.C.moonshard_free(p)
  remember(line, before)
  return line
end
jit.off(read)

--- Returns read(prompt, before), which reads one line with editing; nil if that is impossible. before: earlier lines of
--- the same statement. read returns nil at the end of the input, and "" and true after Ctrl-C. session: completes
--- names, and may print while the line is read.
return function(repl, session)
  if not load() then return nil end
  attach(repl, session)
  library.stifle_history(2000)
  -- With a timestamp before each entry, the history file can contain entries of several lines.
  library.history_comment_char, library.history_write_timestamps = ("#"):byte(), 1
  local file = history_file()
  if file then library.read_history(file) end
  return read
end
