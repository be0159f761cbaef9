--- Sharded checkpoints: `fsdp.save(dir, m, optim, opts)`, `fsdp.load(dir, m, optim, opts)`. A folder with one safetensors
--- file a rank and `index.json`, which says of every tensor where its pieces are, and of every file its size and XXH64.
---
--- Writing: a new folder -> every rank its file, on disk -> the index -> the folder -> its name -> the folder around it. So a crash at
--- any moment leaves the old checkpoint or the new one. Reading: any number of ranks, by index arithmetic: a rank reads the
--- ranges of elements that it holds. Every file is read whole by one rank, which compares its hash.
local cjson = require "cjson"
local engine = require "moonshard.ffi"
local errors = require "moonshard.errors"
local class = require "moonshard.class"
local create = require "moonshard.tensor_create"
local dtypes = require "moonshard.dtypes"
local files = require "moonshard.state"
local flat = require "moonshard.fsdp.flat"
local module = require "moonshard.fsdp.module"
local nn = require "moonshard.nn"
local no_grad = require "moonshard.autograd".no_grad
local opts = require "moonshard.opts"
local scope = require "moonshard.scope"
local sharded = require "moonshard.fsdp.sharded"
local optim_state = require "moonshard.fsdp.optim_state"
local tensor = require "moonshard.tensor"
local util = require "moonshard.util"

local lib, ffi = engine.lib, engine.ffi
local C = ffi.C

local M = {}

local FORMAT = "moonshard checkpoint 1"
local LARGE = 64 * 2 ^ 20           -- bytes of a replaced checkpoint from which it is removed on the side

-- ---- JSON ----------------------------------------------------------------------------------------

-- Numbers with all their digits; keys in order. A list is a table with an element 1, or an empty one.
local function json(x)
  if type(x) == "number" then
    if x ~= x or x == math.huge or x == -math.huge then errors.raise("save: %s cannot be kept in an index", tostring(x)) end
    return ("%.17g"):format(x)
  end
  if type(x) == "boolean" then return tostring(x) end
  if type(x) == "string" then return cjson.encode(x) end
  if type(x) ~= "table" or getmetatable(x) ~= nil then errors.raise("save: %s cannot be kept in an index", errors.kind(x)) end
  local parts = {}
  if x[1] ~= nil or next(x) == nil then
    for k, v in ipairs(x) do parts[k] = json(v) end
    return "[" .. table.concat(parts, ",") .. "]"
  end
  for k, v in util.sorted_pairs(x) do parts[#parts + 1] = cjson.encode(tostring(k)) .. ":" .. json(v) end
  return "{" .. table.concat(parts, ",\n") .. "}"
end

-- ---- what is where -------------------------------------------------------------------------------

-- Where this rank's part of t lies in the whole: `dim` (from 1; 0: a range of elements in row-major order), `first`, `here`, and
-- `row`, the elements of a row where dim is 1.
local function place_of(t)
  if not sharded.is_sharded(t) then return { dim = 0, first = 0, here = t:numel(), row = 1 } end
  local s = sharded.shard_info(t)
  local elements = s.layout == C.MS_LAYOUT_FLAT
  return { dim = elements and 0 or s.dim + 1, first = tonumber(s.first), here = tonumber(s.here), row = elements and 1 or tonumber(s.row_numel) }
end

-- The range of elements that a place is, or nil where it is none.
local function range_of(place)
  if place.dim > 1 then return nil end
  return place.first * place.row, place.here * place.row
end

-- Every rank has it: not sharded, or over this rank alone.
local function is_shared(t) return not sharded.is_sharded(t) or sharded.shard_info(t).world == 1 end

local function replica(t)
  local unit = rawget(t, "_unit")
  return unit and unit.replicates and unit.mesh and unit.mesh():rank(1) or 0
end

local function whole_shape(t) return rawget(t, "_whole_shape") or t.shape end

-- Names, tensors and places of everything there is to save, in one order on every rank; each object once, under its first name.
local function entries_of(m, optim)
  local list, seen, aliases = {}, {}, {}
  local names, values = m:_state()
  for i, name in ipairs(names) do
    local t = values[i]
    if seen[t] then
      aliases["model." .. name] = seen[t]
    else
      seen[t] = "model." .. name
      list[#list + 1] = { name = seen[t], whole = whole_shape(t), place = place_of(t), replica = replica(t), like = t,
        part = (sharded.is_sharded(t) and t:to_local() or t):detach(), shared = is_shared(t) }
    end
  end
  local numbers, groups = {}, nil
  if optim then
    local by_name = {}
    for p, name in pairs(flat.names_below(m)) do by_name[name] = p end      -- order does not matter: a map
    local sd = optim_state.optim_state_dict(m, optim, { type = "local" })
    groups = sd.param_groups
    for name, entry in util.sorted_pairs(sd.state) do
      local p = by_name[name]
      for key, v in util.sorted_pairs(entry) do
        if tensor.is_tensor(v) and v.ndim > 0 then
          list[#list + 1] = { name = ("optim.%s.%s"):format(name, key), whole = whole_shape(p), place = place_of(p), replica = replica(p),
            like = p, part = v:detach(), shared = is_shared(p) }
        else
          numbers[name] = numbers[name] or {}
          numbers[name][key] = tensor.is_tensor(v) and v:item() or v
        end
      end
    end
  end
  return list, aliases, numbers, groups
end

-- ---- saving --------------------------------------------------------------------------------------

local ENOENT = 2

-- What is behind the last colon: lfs repeats the path before it.
local function reason(text) return text:match ": ([^:]+)$" or text end

local function file_name(rank) return ("rank-%05d.safetensors"):format(rank) end

local function write_file(path, list)
  local mine = {}
  for _, e in ipairs(list) do
    if e.replica == 0 and not (e.shared and e.skip) then mine[#mine + 1] = e end
  end
  -- The file's own order, in which it can be written in one go: wide elements first, then by name.
  local width = {}
  for _, e in ipairs(mine) do width[e] = lib.ms_dtype_size(dtypes.number(e.part.dtype)) end
  table.sort(mine, function(a, b)
    if width[a] ~= width[b] then return width[a] > width[b] end
    return a.name < b.name
  end)
  local declared = {}
  for k, e in ipairs(mine) do declared[k] = { name = e.name, dtype = e.part.dtype, shape = e.part.shape } end
  local saver = files.saver(path, declared)
  local ok, err = pcall(function()
    for _, e in ipairs(mine) do saver:write(e.name, e.part.device:find "^cpu" and e.part or e.part:to "cpu") end
    return saver:commit(true)
  end)
  if not ok then
    saver:abort()
    error(err, 0)
  end
  local told = {}
  for k, e in ipairs(mine) do
    told[k] = { name = e.name, dtype = e.part.dtype, shape = { unpack(e.whole) }, dim = e.place.dim, first = e.place.first, here = e.place.here }
  end
  local bytes, why = require("lfs").attributes(path, "size")
  if not bytes then errors.raise("save: cannot look at '%s': %s", path, reason(why)) end
  return { file = path:match "[^/]+$", hash = err, bytes = bytes, tensors = told }
end

local function index_of(told, aliases, numbers, groups, extra)
  local index = { format = FORMAT, world = #told, files = {}, tensors = {}, aliases = aliases, extra = extra }
  for r, t in ipairs(told) do
    index.files[r] = { name = t.file, bytes = t.bytes, hash = t.hash }
    for _, e in ipairs(t.tensors) do
      local entry = index.tensors[e.name] or { dtype = e.dtype, shape = e.shape, pieces = {} }
      index.tensors[e.name] = entry
      local last = entry.pieces[#entry.pieces]
      if last and last[4] == 0 and e.here > 0 then
        entry.pieces[#entry.pieces] = { r, e.dim, e.first, e.here }
      elseif not last or e.here > 0 and e.first >= last[3] + last[4] then         -- a replica has the same ones again
        entry.pieces[#entry.pieces + 1] = { r, e.dim, e.first, e.here }
      end
    end
  end
  if groups then index.optimizer = { state = numbers, param_groups = groups } end
  return index
end

-- Rank 0's part before anybody writes: the new folder beside the target.
local function begin(dir)
  local lfs = require "lfs"
  local mode, why, code = lfs.attributes(dir, "mode")
  if not mode and code ~= ENOENT then return nil, ("save: cannot look at '%s': %s"):format(dir, reason(why)) end
  if mode and mode ~= "directory" then return nil, ("save: '%s' is no folder"):format(dir) end
  local index = mode
  if mode then
    index, why, code = lfs.attributes(dir .. "/index.json", "mode")
    if not index and code ~= ENOENT then return nil, ("save: cannot look at '%s/index.json': %s"):format(dir, reason(why)) end
  end
  if mode and not index then
    for name in lfs.dir(dir) do
      if name ~= "." and name ~= ".." then return nil, ("save: the folder '%s' is there and is no checkpoint"):format(dir) end
    end
  end
  local made = ("%s.tmp-%d"):format(dir, ffi.C.getpid())
  lib.ms_folder_remove(made, 0)
  local ok, err = lfs.mkdir(made)
  if not ok then return nil, ("save: cannot create the folder '%s': %s"):format(made, err) end
  return made
end

pcall(ffi.cdef, "int getpid(void);")

local function check(status) if status ~= 0 then errors.fail() end end

local function finish(made, dir, index)
  local text = json(index)
  check(lib.ms_file_put(made .. "/index.json", text, #text))
  check(lib.ms_folder_sync(made))
  local replaced = ffi.new "int[1]"
  check(lib.ms_folder_put(made, dir, replaced))
  if replaced[0] == 0 then return end
  local lfs, bytes = require "lfs", 0                    -- of what had the name before
  pcall(function()                                       -- the checkpoint is written: nothing here is a reason to say it is not
    for name in lfs.dir(made) do bytes = bytes + (lfs.attributes(made .. "/" .. name, "size") or 0) end
  end)
  lib.ms_folder_remove(made, bytes > LARGE and 1 or 0)
end

-- One result for all: the first failure in rank order is everybody's.
local function agree(dist, ok, value)
  local all = dist.all_gather_object { ok = ok, value = ok and value or tostring(value) }
  if not ok then errors.raise("%s", (tostring(value):gsub("^[^\n]-:%d+: ", ""))) end
  for r, told in ipairs(all) do
    if not told.ok then
      errors.raise("%s (on rank %d)", told.value:gsub("^[^\n]-:%d+: ", ""), r - 1)
    end
  end
  local values = {}
  for r, told in ipairs(all) do values[r] = told.value end
  return values
end

local function check_arguments(who, dir, m, optim)
  if type(dir) ~= "string" or dir == "" then errors.raise("%s: the folder is %s, expected a path", who, errors.kind(dir)) end
  if dir:find("%z") then errors.raise("%s: the folder %s has a zero byte in its name", who, ("%q"):format(dir)) end
  if not class.isa(m, nn.Module) then errors.raise("%s: argument 2 is %s, expected a module", who, errors.kind(m)) end
  if optim ~= nil and (type(optim) ~= "table" or type(optim.param_groups) ~= "table") then
    errors.raise("%s: argument 3 is %s, expected an optimizer or nil", who, errors.kind(optim))
  end
  return (dir:gsub("(.)/+$", "%1"))
end

--- Writes a model, and an optimizer's state, as a sharded checkpoint. Collective; every rank sees the same file system.
--- `extra` is kept beside them: numbers, strings, booleans and tables of them, which load gives back.
---@param dir string
---@param m Module
---@param optim? table
---@param given? {extra: table}
function M.save(dir, m, optim, given)
  if given == nil and opts.is(optim) and optim.param_groups == nil then optim, given = nil, optim end
  local o = opts("save", given, { extra = opts.table })
  dir = check_arguments("save", dir, m, optim)
  local dist = require "moonshard.dist"
  module.reshard_all(m)
  scope.scope(function()
    no_grad(function()
      local list, aliases, numbers, groups = entries_of(m, optim)
      for _, e in ipairs(list) do e.skip = dist.rank() ~= 0 end          -- what every rank has, rank 0 writes
      local made, problem
      if dist.rank() == 0 then made, problem = begin(dir) end
      made = agree(dist, problem == nil, problem or made or "")[1]
      local ok, told = pcall(write_file, made .. "/" .. file_name(dist.rank()), list)
      local all
      ok, all = pcall(agree, dist, ok, told)
      if not ok then
        if dist.rank() == 0 then lib.ms_folder_remove(made, 0) end
        error(all, 0)
      end
      local finished, err = true, nil
      if dist.rank() == 0 then
        finished, err = pcall(function() finish(made, dir, index_of(all, aliases, numbers, groups, o.extra)) end)
        if not finished then lib.ms_folder_remove(made, 0) end
      end
      agree(dist, finished, err)
    end)
  end)
end

-- ---- checkpoints on request ------------------------------------------------------------------------

local agreed
local signalled = ffi.new "double[1]"
-- A signal to all ranks reaches them one after the other: where it had not come yet when the ranks agreed, it is owed until then.
local owed_until, GRACE = 0, 2

--- From now on SIGUSR1 (a checkpoint, and go on) and SIGUSR2 (a checkpoint, and end with status 75) are noted for checkpoint_wanted.
--- mpirun and srun hand both to all ranks.
---@param on? boolean  false: they end the process again
function M.catch_checkpoint_signals(on)
  lib.ms_catch_checkpoint_signals(on == false and 0 or 1)
  owed_until = 0
end

--- Whether some rank was sent a signal since the last call: "go_on", "stop", or nil; the same on every rank. Collective: once a step.
---@return "go_on"|"stop"|nil
function M.checkpoint_wanted()
  local dist = require "moonshard.dist"
  local mine = lib.ms_checkpoint_signal(signalled)
  if dist.world_size() > 1 then
    if mine == 1 and signalled[0] < owed_until then mine, owed_until = 0, 0 end
    local own = mine
    agreed = agreed or create.zeros(1, { dtype = "int32", device = "cpu" }):keep()
    no_grad(function() agreed:fill_(mine) end)
    dist.all_reduce(agreed, { op = "max" })
    mine = agreed:item()
    if mine == 1 and own == 0 then owed_until = lib.ms_time() + GRACE end
  end
  return mine == 1 and "go_on" or mine == 2 and "stop" or nil
end

-- ---- the index, read -----------------------------------------------------------------------------

local function bad(dir, format, ...)
  errors.raise("load: '%s' is no valid checkpoint: " .. format, dir, ...)
end

local function whole_number(x, least) return type(x) == "number" and x % 1 == 0 and x >= least and x < 2 ^ 53 end

-- The pieces of a tensor fill it without gap or overlap.
local function check_pieces(dir, name, entry, world)
  local total = 1
  for d, size in ipairs(entry.shape) do
    if not whole_number(size, 0) then bad(dir, "tensor '%s': size %d is %s", name, d, tostring(size)) end
    total = total * size
  end
  if type(entry.pieces) ~= "table" or #entry.pieces == 0 then bad(dir, "tensor '%s' has no pieces", name) end
  local dim, at = entry.pieces[1][2], 0
  for k, piece in ipairs(entry.pieces) do
    if type(piece) ~= "table" or #piece ~= 4 then bad(dir, "piece %d of tensor '%s' is no list of 4 numbers", k, name) end
    for i = 1, 4 do
      if not whole_number(piece[i], i == 1 and 1 or 0) then bad(dir, "piece %d of tensor '%s' has %s at %d", k, name, tostring(piece[i]), i) end
    end
    if piece[1] > world then bad(dir, "piece %d of tensor '%s' is in file %d of %d", k, name, piece[1], world) end
    if piece[2] ~= dim or dim > math.max(#entry.shape, 0) then bad(dir, "piece %d of tensor '%s' is cut along dimension %d", k, name, piece[2]) end
    if piece[3] ~= at then bad(dir, "piece %d of tensor '%s' begins at %d, the one before ends at %d", k, name, piece[3], at) end
    at = at + piece[4]
  end
  local size = dim == 0 and total or entry.shape[dim]
  if at ~= size then bad(dir, "the pieces of tensor '%s' end at %d of %d", name, at, size) end
end

local function read_index(dir)
  local f, err = io.open(dir .. "/index.json", "rb")
  if not f then errors.raise("load: cannot open '%s/index.json': %s", dir, (tostring(err):gsub("^.*: ", ""))) end
  local text = f:read "*a"
  f:close()
  local ok, index = pcall(cjson.decode, text)
  if not ok or type(index) ~= "table" then bad(dir, "index.json is no JSON: %s", tostring(index)) end
  if index.format ~= FORMAT then bad(dir, "its format is %s, expected '%s'", errors.show(index.format), FORMAT) end
  if type(index.files) ~= "table" or type(index.tensors) ~= "table" then bad(dir, "index.json lacks files or tensors") end
  if not whole_number(index.world, 1) or index.world ~= #index.files then bad(dir, "%s files, %s ranks", #index.files, tostring(index.world)) end
  for k, file in ipairs(index.files) do
    if type(file) ~= "table" then bad(dir, "file %d is %s", k, errors.kind(file)) end
    if file.name ~= file_name(k - 1) then bad(dir, "file %d is named %s", k, errors.show(file.name)) end
    if not whole_number(file.bytes, 8) then bad(dir, "file '%s' has %s bytes", file.name, tostring(file.bytes)) end
    if type(file.hash) ~= "string" or not file.hash:match "^%x+$" or #file.hash ~= 16 then
      bad(dir, "file '%s' has the hash %s", file.name, errors.show(file.hash))
    end
  end
  for name, entry in util.sorted_pairs(index.tensors) do
    if type(entry) ~= "table" or type(entry.shape) ~= "table" or type(entry.dtype) ~= "string" then
      bad(dir, "tensor '%s' lacks its shape or dtype", name)
    end
    check_pieces(dir, name, entry, index.world)
  end
  return index
end

-- A file's header says what the index says of it.
local function check_file(dir, index, r, reader)
  local function shape_of(entry, piece)
    local shape = { unpack(entry.shape) }
    if piece[2] > 0 then shape[piece[2]] = piece[4] end
    return shape
  end
  for name, entry in util.sorted_pairs(index.tensors) do
    for _, piece in ipairs(entry.pieces) do
      if piece[1] == r then
        if not reader:has(name) then bad(dir, "file '%s' lacks tensor '%s'", index.files[r].name, name) end
        local shape, dtype = reader:info(name)
        local want, count = shape_of(entry, piece), 1
        for _, size in ipairs(shape) do count = count * size end
        local fits = piece[2] == 0 and count == piece[4] or table.concat(shape, ",") == table.concat(want, ",")
        if not fits or dtype ~= entry.dtype then
          bad(dir, "tensor '%s' in file '%s' is %s [%s], the index says %s [%s]", name, index.files[r].name, dtype, table.concat(shape, ", "),
            entry.dtype, table.concat(want, ", "))
        end
      end
    end
  end
end

-- ---- loading -------------------------------------------------------------------------------------

-- What of an entry's pieces this rank wants in `target` (contiguous, of the entry's dtype), which is the range [first, first + n) of
-- elements of the whole: told to the readers.
local function want_range(readers, name, entry, target, first, n)
  local row = 1
  for d = 2, #entry.shape do row = row * entry.shape[d] end
  for _, piece in ipairs(entry.pieces) do
    local step = piece[2] == 1 and row or 1
    local begin_at, count = piece[3] * step, piece[4] * step
    local from, to = math.max(first, begin_at), math.min(first + n, begin_at + count)
    if to > from then readers[piece[1]]:want(name, from - begin_at, to - from, target, from - first) end
  end
end

-- Plans the reading of one tensor: what happens after the files were read.
local function plan(readers, name, entry, e)
  local place, part = e.place, e.part
  local dim = entry.pieces[1][2]
  local first, n = range_of(place)
  if first and dim <= 1 then
    local direct = entry.dtype == part.dtype and part:is_contiguous() and part.device:match "^cpu"
    local target = direct and part or create.empty(part.shape, { dtype = entry.dtype, device = "cpu" })
    want_range(readers, name, entry, target, first, n)
    return not direct and n > 0 and function() part:copy_(target) end or nil
  end
  -- Cut along a later dimension, there or here: pieces as they are in the files, put together.
  local whole = create.empty(entry.shape, { dtype = entry.dtype, device = "cpu" })
  local pieces = {}
  for k, piece in ipairs(entry.pieces) do
    if dim <= 1 then break end
    local shape = { unpack(entry.shape) }
    shape[dim] = piece[4]
    pieces[k] = create.empty(shape, { dtype = entry.dtype, device = "cpu" })
    readers[piece[1]]:want(name, 0, pieces[k]:numel(), pieces[k], 0)
  end
  if dim <= 1 then want_range(readers, name, entry, whole, 0, whole:numel()) end
  return function()
    for k, piece in ipairs(entry.pieces) do
      if pieces[k] then whole:narrow(dim, piece[3] + 1, piece[4]):copy_(pieces[k]) end
    end
    part:copy_((e.shared and whole or sharded.part_of(e.like, whole)):reshape(part.shape))
  end
end

-- The optimizer's state tensors, uninitialised, where the index has some; and the numbers. Last: refuses those of another optimizer.
local function empty_state(dir, index, m, optim)
  local told = index.optimizer
  if type(told) ~= "table" or type(told.param_groups) ~= "table" then bad(dir, "it has no optimizer's state") end
  local sd, list = { state = {}, param_groups = told.param_groups }, {}
  local by_name, prefixes = {}, {}
  for p, name in pairs(flat.names_below(m)) do              -- order does not matter: sorted below
    by_name[name] = p
    prefixes[#prefixes + 1] = name
  end
  table.sort(prefixes, function(a, b) return #a > #b end)
  for name, numbers in util.sorted_pairs(told.state) do
    sd.state[name] = {}
    for key, v in util.sorted_pairs(numbers) do sd.state[name][key] = v end
  end
  for full, entry in util.sorted_pairs(index.tensors) do
    local rest = full:match "^optim%.(.*)$"
    if rest then
      local found
      for _, name in ipairs(prefixes) do
        if rest:sub(1, #name + 1) == name .. "." and not rest:sub(#name + 2):find(".", 1, true) then found = name break end
      end
      if found then
        local p, key = by_name[found], rest:sub(#found + 2)
        local part = sharded.is_sharded(p) and p:to_local() or p
        local t = create.empty(part.shape, { dtype = entry.dtype, device = part.device })
        sd.state[found] = sd.state[found] or {}
        sd.state[found][key] = t
        list[#list + 1] = { name = full, whole = whole_shape(p), place = place_of(p), like = p, part = t, shared = is_shared(p) }
      end
    end
  end
  return sd, list, function()
    for name, entry in util.sorted_pairs(sd.state) do
      if by_name[name] and optim._check_entry then optim:_check_entry("load", ("'%s'"):format(name), entry) end
    end
  end
end

local function names_text(list)
  for k, name in ipairs(list) do list[k] = "'" .. name .. "'" end
  return table.concat(list, ", ")
end

-- Reads everything that `list` wants; files are read whole, and their hashes compared, by one rank each.
local function read_files(dir, index, list, verify, dist, fits)
  local readers, after = {}, {}
  local ok, err = pcall(function()
    for r, file in ipairs(index.files) do
      local path = dir .. "/" .. file.name
      local size = require("lfs").attributes(path, "size")
      if not size then bad(dir, "file '%s' is missing", file.name) end
      if size ~= file.bytes then bad(dir, "file '%s' has %s bytes, the index says %d", file.name, tostring(size), file.bytes) end
      readers[r] = files.reader(path)
      check_file(dir, index, r, readers[r])
    end
    fits()
    for _, e in ipairs(list) do
      local done = plan(readers, e.name, index.tensors[e.name], e)
      if done then after[#after + 1] = done end
    end
    local world, me = dist.world_size(), dist.rank()
    for r, file in ipairs(index.files) do
      local hash = readers[r]:fetch(verify and (r - 1) % world == me)
      if hash and hash ~= file.hash then bad(dir, "the contents of file '%s' have the hash %s, the index says %s", file.name, hash, file.hash) end
    end
  end)
  for _, reader in pairs(readers) do reader:close() end       -- order does not matter
  if not ok then error(err, 0) end
  return after
end

--- Reads what save wrote into a model, and an optimizer, on any number of ranks, sharded in whatever way. Collective. Gives back `extra`.
--- What does not fit is refused before anything changes; `strict = false` takes the tensors that both have. A file of which only the
--- hash is wrong is found when it has been read: it raises, and the model is to be loaded again.
---@param dir string
---@param m Module
---@param optim? table
---@param given? {strict: boolean, verify: boolean}  verify: compare the files' hashes (true)
---@return table? extra
---@return string[] missing, string[] unexpected
function M.load(dir, m, optim, given)
  if given == nil and opts.is(optim) and optim.param_groups == nil then optim, given = nil, optim end
  local o = opts("load", given, { strict = true, verify = true })
  dir = check_arguments("load", dir, m, optim)
  local dist = require "moonshard.dist"
  module.reshard_all(m)
  local extra, missing, unexpected = nil, {}, {}
  scope.scope(function()
    no_grad(function()
      local ok, result = pcall(function()
        local index = read_index(dir)
        local list, known = entries_of(m, nil), {}
        local wanted, sd, fits = {}, nil, function() end
        for _, e in ipairs(list) do
          local entry = index.tensors[e.name] or (index.aliases and index.tensors[index.aliases[e.name] or ""])
          if not entry then
            missing[#missing + 1] = e.name:sub(#"model." + 1)
          elseif table.concat(entry.shape, ",") ~= table.concat(e.whole, ",") then
            errors.raise("load: '%s' has shape [%s] in '%s', %s in the model", e.name:sub(#"model." + 1), table.concat(entry.shape, ", "), dir,
              tostring(e.whole))
          else
            index.tensors[e.name] = entry
            wanted[#wanted + 1] = e
          end
        end
        for i, name in ipairs((m:_state())) do known["model." .. name] = i end
        for name in util.sorted_pairs(index.tensors) do
          if name:find "^model%." and not known[name] then unexpected[#unexpected + 1] = name:sub(#"model." + 1) end
        end
        if o.strict and #missing > 0 then errors.raise("load: '%s' lacks %s", dir, names_text(missing)) end
        if o.strict and #unexpected > 0 then errors.raise("load: '%s' has %s, which the model has not", dir, names_text(unexpected)) end
        if optim then
          local more
          sd, more, fits = empty_state(dir, index, m, optim)
          for _, e in ipairs(more) do wanted[#wanted + 1] = e end
        end
        local after = read_files(dir, index, wanted, o.verify, dist, fits)
        for _, fn in ipairs(after) do fn() end
        if optim then optim_state.load_parts(m, optim, sd) end
        return index.extra
      end)
      agree(dist, ok, not ok and result or nil)
      extra = result
    end)
  end)
  return extra, missing, unexpected
end

return M
