-- SPDX-License-Identifier: MIT
--- A corpus: a list of files, and which of their tokens are for training and which for validation.
---
--- Text: every regular file is used once, one token per byte. Links in folders and copies of files are skipped, because
--- they would put validation text into training. The last tenth of each file is for validation, unless the script gives
--- another share. llm.c's shards (`.bin`): a header of 256 int32, then token ids of 2 or 4 bytes. Shards with "val" in
--- their name are for validation, all others for training; if there is no such name, each shard is divided as a
--- text file is.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local raw = require "moonshard.data.raw"
local task = require "moonshard.core.task"
local lfs = require "lfs"

local ffi, lib = engine.ffi, engine.lib

local HEADER = 1024
-- Maps the magic number of a shard to its bytes per token and vocabulary size (GPT-2's and Llama 3's, as llm.c writes
-- them).
local SHARDS = { [20240520] = { bytes = 2, vocab = 50257 }, [20240801] = { bytes = 4, vocab = 128256 } }

---@class Document
---@field name string  the file's name, without its folder
---@field path string  path of the file
---@field bytes integer    bytes per token
---@field offset integer   where its tokens begin in the file
---@field count integer    number of tokens
---@field train integer    number of tokens, from the first on, that are for training
---@field first integer    position of its first token in the corpus's field `all`, from 0

---@class Corpus
---@field kind "text"|"tokens"  "text": one token per byte; "tokens": token shards
---@field vocab integer  number of token ids
---@field documents Document[]   in the order of the given paths; those of a folder by name
---@field train ffi.cdata*       ms_tokens: training tokens of all documents, one after the other
---@field all ffi.cdata*         ms_tokens: whole documents, one after the other
---@field train_count integer  number of training tokens
---@field validation_count integer  number of validation tokens
local Corpus = {}
Corpus.__index = Corpus

local M = { Corpus = Corpus }

local function read(path, n)
  local f, err = io.open(path, "rb")
  if not f then return nil, err end
  local text = f:read(n or "*a") or ""
  f:close()
  return text
end

--- The regular files at a path: the file itself, or those directly in the folder, without links, sorted by the bytes of
--- their names. Returns nil and the reason if the path is neither a file nor a folder.
local function regular_files(path)
  local mode = lfs.attributes(path, "mode")
  if not mode then return nil, ("there is no file or folder '%s'"):format(path) end
  if mode ~= "directory" and mode ~= "file" then
    return nil, ("'%s' is a %s, expected a file or folder"):format(path, mode)
  end
  -- A link that is given by name is followed.
  if mode == "file" then return { { name = path:match "[^/]*$", path = path } } end
  local names, files = {}, {}
  for name in lfs.dir(path) do
    if lfs.symlinkattributes(path .. "/" .. name, "mode") == "file" then names[#names + 1] = name end
  end
  table.sort(names)                                   -- LuaJIT compares strings byte by byte
  for _, name in ipairs(names) do files[#files + 1] = { name = name, path = path .. "/" .. name } end
  return files
end

--- Skips files whose contents equal those of an earlier file. Reads only files of equal size.
local function once(files)
  local by_size, kept = {}, {}
  for k, file in ipairs(files) do
    task.report("reading", k - 1, #files)
    local size = lfs.attributes(file.path, "size")
    local same_size = by_size[size] or {}
    by_size[size] = same_size
    local text = #same_size > 0 and assert(read(file.path))
    local seen = false
    for _, other in ipairs(same_size) do
      other.text = other.text or assert(read(other.path))
      if other.text == text then seen = true end
    end
    if not seen then
      same_size[#same_size + 1] = { path = file.path, text = text or nil }
      file.size = size
      kept[#kept + 1] = file
    end
  end
  task.report("reading", #files, #files)
  return kept
end

--- Reads the header of a `.bin` file. Returns its row of SHARDS and the number of tokens; nil and the reason if it is
--- not valid.
local function shard_header(file)
  local head, err = read(file.path, HEADER)
  if not head then return nil, err end
  local n = #head == HEADER and ffi.cast("const int32_t *", head)
  local kind = n and SHARDS[n[0]]
  if not kind then return nil, ("'%s' is not a token shard of llm.c: its header does not match"):format(file.path) end
  local count = tonumber(n[2])
  if count < 0 or HEADER + count * kind.bytes > file.size then
    return nil, ("the header of '%s' gives %d tokens, which need %d bytes, but the file has only %d"):format(file.path,
      count, HEADER + count * kind.bytes, file.size)
  end
  return kind, count
end

local function document(file, vocab)
  if not file.name:find "%.bin$" then
    local encoding = raw.marked_encoding(read(file.path, 4) or "")
    if encoding then
      return nil, ("'%s' is text in %s, expected UTF-8; `iconv -f %s -t UTF-8 FILE` converts it"):format(file.path, encoding,
        encoding)
    end
    return { name = file.name, path = file.path, bytes = 1, offset = 0, count = file.size }, 256
  end
  local kind, count = shard_header(file)
  if not kind then return nil, count end
  return { name = file.name, path = file.path, bytes = kind.bytes, offset = HEADER, count = count }, vocab or kind.vocab
end

local function tokens(documents, whole)
  local t = lib.ms_tokens_new()
  if t == nil then return nil, ffi.string(lib.ms_error()) end
  t = ffi.gc(t, lib.ms_tokens_free)
  for _, d in ipairs(documents) do
    if lib.ms_tokens_add(t, d.path, d.bytes, d.offset, whole and d.count or d.train) ~= 0 then
      return nil, ffi.string(lib.ms_error())
    end
  end
  return t
end

-- Opens the files and makes the corpus. Returns nil and the reason if that fails.
local function open(paths, given)
  local o = opts("corpus", given, { vocab = opts.whole_from(1), validation = 0.1 })
  opts.need(o.validation >= 0 and o.validation < 1, o.validation, "a number from 0 to below 1",
    "corpus: option 'validation'")
  local list = type(paths) == "table" and paths or { paths }
  if list[1] == nil then opts.wrong(paths, "the path of a file or folder, or a list of them", "corpus: argument 1") end
  local files = {}
  for k, path in ipairs(list) do
    opts.expect(path, opts.string, "corpus: path %d", k)
    local found, err = regular_files(path)
    if not found then return nil, err end
    for _, file in ipairs(found) do files[#files + 1] = file end
  end
  local self = setmetatable({ documents = {}, validation_count = 0, train_count = 0 }, Corpus)
  local named_validation = false
  local ok, kept = pcall(once, files)
  if not ok then return nil, kept end
  for _, file in ipairs(kept) do
    local d, vocab = document(file, o.vocab)
    if not d then return nil, vocab end
    local kind = d.bytes == 1 and "text" or "tokens"
    if self.kind and (self.kind ~= kind or self.vocab ~= vocab) then
      return nil, ("'%s' contains %s with a vocabulary of %d, but the files before it contain %s with %d"):format(d.path, kind, vocab, self.kind,
        self.vocab)
    end
    self.kind, self.vocab = kind, vocab
    if kind == "tokens" and d.name:find "val" then named_validation = true end
    self.documents[#self.documents + 1] = d
  end
  local place = 0
  for _, d in ipairs(self.documents) do
    if named_validation then
      d.train = d.name:find "val" and 0 or d.count
    else
      d.train = d.count - math.floor(d.count * o.validation)
    end
    d.first = place
    place = place + d.count
    self.train_count = self.train_count + d.train
    self.validation_count = self.validation_count + d.count - d.train
  end
  if self.train_count < 2 then
    return nil, ("the number of training tokens in '%s' is %d, expected at least 2"):format(type(paths) == "table"
      and table.concat(paths, "', '") or paths, self.train_count)
  end
  local err
  self.train, err = tokens(self.documents, false)
  if not self.train then return nil, err end
  self.all, err = tokens(self.documents, true)
  if not self.all then return nil, err end
  return self
end

--- The texts of a corpus, for the n-gram model and for counting known words.
---@return {text: string, train: integer}[]
function Corpus:texts()
  local list = {}
  for _, d in ipairs(self.documents) do
    local buffer = ffi.new("uint8_t[?]", math.max(d.count, 1))
    if lib.ms_tokens_read(self.all, d.first, d.count, buffer) ~= 0 then error(ffi.string(lib.ms_error()), 0) end
    list[#list + 1] = { text = ffi.string(buffer, d.count), train = d.train }
  end
  return list
end

local PIECE, PIECES = 65536, 256

--- A hash of the sizes and contents of the documents, to distinguish corpora. With n documents it covers
--- the whole of a document of at most about 16 / n MiB (or 128 KiB, if that is more). A larger document is covered by
--- pieces at equal distances, from its beginning to its end.
---@return integer
function Corpus:fingerprint()
  local h = 0
  local function add(x) h = lib.ms_hash_below(h, x, 4, 2 ^ 52) end
  local buffer = ffi.new("uint8_t[?]", PIECE)
  local words = ffi.cast("const uint32_t *", buffer)
  local limit = math.max(2, math.floor(PIECES / #self.documents))
  for n, d in ipairs(self.documents) do
    task.report("comparing", n - 1, #self.documents)
    add(d.count)
    add(d.train)
    local bytes = d.count * d.bytes
    local pieces = math.min(limit, math.ceil(bytes / PIECE))
    local distance = pieces < limit and PIECE or math.max(0, bytes - PIECE) / (limit - 1)
    local f = assert(io.open(d.path, "rb"))
    for k = 0, pieces - 1 do
      local at = math.floor(k * distance)
      f:seek("set", d.offset + at)
      local text = f:read(math.min(PIECE, bytes - at)) or ""
      ffi.fill(buffer, PIECE)
      ffi.copy(buffer, text, #text)
      for j = 0, math.ceil(#text / 4) - 1 do add(words[j]) end
    end
    f:close()
  end
  task.report("comparing", #self.documents, #self.documents)
  return h
end

--- Opens files and folders as one corpus. Errors: a file that cannot be read; text in UTF-16 or UTF-32; text together
--- with token shards, or shards of different vocabularies; fewer than 2 training tokens.
---@param paths string|string[]  files or folders
---@param given? {vocab: integer, validation: number}
---   vocab: size of the vocabulary of token shards (default: that of GPT-2 or Llama 3, by their header); validation:
---   share of each file that is for validation, from 0 to below 1; unused where shards have names with "val"
---@return Corpus
function M.open(paths, given)
  local corpus, err = open(paths, given)
  if not corpus then errors.raise("corpus: %s", err) end
  return corpus
end

return M
