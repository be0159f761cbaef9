-- SPDX-License-Identifier: MIT
--- Sharded checkpoints: `fsdp.save(dir, m, optim, opts)`, `fsdp.load(dir, m, optim, opts)`. A folder with one
--- safetensors file a rank and `index.json`, which says of every tensor where its pieces are, and of every file its
--- size and sum.
---
--- Writing: a new folder -> every rank its file, on disk -> the index -> the folder -> its name -> the folder around
--- it. So a crash at any moment leaves the old checkpoint or the new one. Only a checkpoint or an empty folder is
--- replaced; a link stays, and what it leads to is replaced. Reading: any number of ranks, by index arithmetic: a rank
--- reads the ranges of elements that it holds, and compares their sums. Every file is read whole by one rank.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local class = require "moonshard.core.class"
local checkpoint_index = require "moonshard.io.checkpoint_index"
local create = require "moonshard.tensor.create"
local files = require "moonshard.io.files"
local flat = require "moonshard.parallel.fsdp.flat"
local module = require "moonshard.parallel.fsdp.module"
local nn = require "moonshard.nn"
local no_grad = require "moonshard.autograd".no_grad
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local sharded = require "moonshard.parallel.fsdp.sharded"
local optim_state = require "moonshard.parallel.fsdp.optim_state"
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"

local lib, ffi = engine.lib, engine.ffi
local C = ffi.C

local M = {}

local LARGE = 64 * 2 ^ 20           -- bytes of a replaced checkpoint from which it is removed on the side

local bad, reason, file_name = checkpoint_index.bad, checkpoint_index.reason, checkpoint_index.file_name

-- ---- what is where -------------------------------------------------------------------------------

-- Where this rank's part of t lies in the whole: `dim` (from 1; 0: a range of elements in row-major order), `first`,
-- `here`, and
-- `row`, the elements of a row where dim is 1.
local function place_of(t)
  if not sharded.is_sharded(t) then return { dim = 0, first = 0, here = t:numel(), row = 1 } end
  local s = sharded.shard_info(t)
  local elements = s.layout == C.MS_LAYOUT_FLAT
  return { dim = elements and 0 or s.dim + 1, first = tonumber(s.first), here = tonumber(s.here), row = elements and 1
    or tonumber(s.row_numel) }
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

-- Names, tensors and places of everything there is to save, in one order on every rank; each object once, under its
-- first name.
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
          list[#list + 1] = { name = ("optim.%s.%s"):format(name, key), whole = whole_shape(p), place = place_of(p),
            replica = replica(p),
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

local function write_file(path, list)
  local mine = {}
  for _, e in ipairs(list) do
    if e.replica == 0 and not (e.shared and e.skip) then mine[#mine + 1] = e end
  end
  files.sort(mine, function(e) return e.part.dtype end)
  local declared = {}
  for k, e in ipairs(mine) do declared[k] = { name = e.name, dtype = e.part.dtype, shape = e.part.shape } end
  local saver = files.saver(path, declared)
  local ok, err = pcall(function()
    for _, e in ipairs(mine) do saver:write(e.name, e.part.device:find "^cpu" and e.part or e.part:to "cpu") end
    return saver:commit()
  end)
  if not ok then
    saver:abort()
    error(err, 0)
  end
  local told = {}
  for k, e in ipairs(mine) do
    told[k] = { name = e.name, dtype = e.part.dtype, shape = { unpack(e.whole) }, dim = e.place.dim,
      first = e.place.first, here = e.place.here }
  end
  local bytes, why = require("lfs").attributes(path, "size")
  if not bytes then errors.raise("save: cannot look at '%s': %s", path, reason(why)) end
  return { file = path:match "[^/]+$", hash = err, bytes = bytes, tensors = told }
end

local function index_of(told, aliases, numbers, groups, extra)
  local index = { format = checkpoint_index.FORMAT, world = #told, files = {}, tensors = {}, aliases = aliases,
    extra = extra }
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

local function check(status) if status ~= 0 then errors.fail() end end

-- Rank 0's part before any rank writes: the new folder beside the target.
local function begin(dir)
  local folder = lib.ms_folder_new(dir)
  if folder == nil then errors.fail() end
  ffi.gc(folder, lib.ms_folder_free)
  local ok, err = pcall(function()
    local names, why = checkpoint_index.replaceable(ffi.string(lib.ms_folder_path(folder)))
    if not names then errors.raise_text(why) end
    check(lib.ms_folder_make(folder))
  end)
  if ok then return folder end
  lib.ms_folder_free(ffi.gc(folder, nil))
  return error(err, 0)
end

-- Where the file system cannot exchange two folders (NFS, some of FUSE) the new files move in beside the old ones,
-- under names of their own, and the new index takes the place of the old one: that rename is the moment the new
-- checkpoint exists. A crash may leave files that the index does not use, but lists or knows by their names; the next
-- save removes them.
local function replace_inside(folder, made, path, index, old)
  local id, moved = made:match "%.tmp%-(%x+)/checkpoint$", {}
  local NAME = checkpoint_index.NAME
  local final = NAME .. ".tmp-" .. id
  local ok, err = pcall(function()
    for r, file in ipairs(index.files) do
      local name = file_name(r - 1, id)
      check(lib.ms_folder_move_in(folder, file.name, name))
      moved[r], file.name = name, name
    end
    index.replaces = {}
    for name in util.sorted_pairs(old) do index.replaces[#index.replaces + 1] = name end
    local text = checkpoint_index.text(index)
    check(lib.ms_file_put(made .. "/" .. final, text, #text))
    check(lib.ms_folder_sync(path))
    check(lib.ms_folder_move_in(folder, final, NAME))
  end)
  if not ok then
    for _, name in ipairs(moved) do lib.ms_folder_remove(folder, name) end
    error(err, 0)
  end
  check(lib.ms_folder_sync(path))
  -- the checkpoint is written: nothing here is a reason to say it is not
  pcall(function()
    local keep = { [NAME] = true }
    for _, file in ipairs(index.files) do keep[file.name] = true end
    for _, name in ipairs(checkpoint_index.entries_in(path) or {}) do
      if not keep[name] and (old[name] or checkpoint_index.is_beside(name)) then lib.ms_folder_remove(folder, name) end
    end
    check(lib.ms_folder_sync(path))
  end)
end

local inside = ffi.new "int[1]"

local function finish(folder, index)
  local path, made = ffi.string(lib.ms_folder_path(folder)), ffi.string(lib.ms_folder_made(folder))
  local text = checkpoint_index.text(index)
  check(lib.ms_file_put(made .. "/" .. checkpoint_index.NAME, text, #text))
  check(lib.ms_folder_sync(made))
  -- what is there now may be another folder than at the beginning
  check(lib.ms_folder_look(folder))
  local old, bytes = checkpoint_index.replaceable(path)
  if not old then errors.raise_text(bytes) end
  check(lib.ms_folder_commit(folder, bytes > LARGE and 1 or 0, inside))
  if inside[0] ~= 0 then replace_inside(folder, made, path, index, old) end
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
  if type(dir) ~= "string" or dir == "" then
    errors.raise("%s: the folder is %s, expected a path", who, errors.kind(dir))
  end
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
      local ok, folder = true, nil
      if dist.rank() == 0 then ok, folder = pcall(begin, dir) end
      local mine = ok and folder and ffi.string(lib.ms_folder_made(folder)) or folder or ""
      local made = agree(dist, ok, mine)[1]
      local told, all
      ok, told = pcall(write_file, made .. "/" .. file_name(dist.rank()), list)
      ok, all = pcall(agree, dist, ok, told)
      if ok and folder then ok, all = pcall(finish, folder, index_of(all, aliases, numbers, groups, o.extra)) end
      if folder then lib.ms_folder_free(ffi.gc(folder, nil)) end
      agree(dist, ok, all)
    end)
  end)
end

-- ---- checkpoints on request ------------------------------------------------------------------------

local agreed
local signalled = ffi.new "double[1]"
-- A signal to all ranks reaches them one after the other: where it had not come yet when the ranks agreed, it is owed
-- until then.
local owed_until, GRACE = 0, 2

--- From now on SIGUSR1 (a checkpoint, and go on) and SIGUSR2 (a checkpoint, and end with status 75) are noted for
--- checkpoint_wanted. mpirun and srun hand both to all ranks.
---@param on? boolean  false: they end the process again
function M.catch_checkpoint_signals(on)
  lib.ms_catch_checkpoint_signals(on == false and 0 or 1)
  owed_until = 0
end

--- Whether some rank was sent a signal since the last call: "go_on", "stop", or nil; the same on every rank.
--- Collective: once a step.
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

-- ---- files against the index -------------------------------------------------------------------------

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
          bad(dir, "tensor '%s' in file '%s' is %s [%s], the index says %s [%s]", name, index.files[r].name, dtype,
            table.concat(shape, ", "),
            entry.dtype, table.concat(want, ", "))
        end
      end
    end
  end
end

-- ---- loading -------------------------------------------------------------------------------------

-- What of an entry's pieces this rank wants in `target` (contiguous, of the entry's dtype), which is the range [first,
-- first + n) of elements of the whole: told to the readers.
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

-- The optimizer's state tensors, uninitialised, where the index has some; and the numbers. Last: refuses those of
-- another optimizer.
local function empty_state(dir, index, m, optim)
  local told = index.optimizer
  if not told then bad(dir, "it has no optimizer's state") end
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
        if rest:sub(1, #name + 1) == name .. "." and not rest:sub(#name + 2):find(".", 1, true) then
          found = name break
        end
      end
      if found then
        local p, key = by_name[found], rest:sub(#found + 2)
        local part = sharded.is_sharded(p) and p:to_local() or p
        local t = create.empty(part.shape, { dtype = entry.dtype, device = part.device })
        sd.state[found] = sd.state[found] or {}
        sd.state[found][key] = t
        list[#list + 1] = { name = full, whole = whole_shape(p), place = place_of(p), like = p, part = t,
          shared = is_shared(p) }
      end
    end
  end
  return sd, list, function()
    for name, entry in util.sorted_pairs(sd.state) do
      if by_name[name] and optim._check_entry then optim:_check_entry("load", ("'%s'"):format(name), entry) end
    end
    for g, group in ipairs(optim._check and optim.param_groups or {}) do
      local given = sd.param_groups[g] or {}
      local options = setmetatable({}, { __index = function(_, name)
        if given[name] ~= nil then return given[name] end
        return group[name]
      end })
      local ok, why = pcall(optim._check, optim, options, true)
      if not ok then errors.raise("load: '%s': %s", dir, (tostring(why):gsub("^[^\n]-:%d+: ", ""))) end
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
      if size ~= file.bytes then
        bad(dir, "file '%s' has %s bytes, the index says %d", file.name, tostring(size), file.bytes)
      end
      readers[r] = files.reader(path, { verify = verify })
      if verify and index.version > 1 and readers[r]:sum() ~= file.hash then
        bad(dir, "file '%s' is not the one that was saved: its sum is %s, the index says %s", file.name,
          readers[r]:sum() or "missing", file.hash)
      end
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
      if hash and index.version == 1 and hash ~= file.hash then
        bad(dir, "the contents of file '%s' have the hash %s, the index says %s", file.name, hash, file.hash)
      end
    end
  end)
  for _, reader in pairs(readers) do reader:close() end       -- order does not matter
  if not ok then error(err, 0) end
  return after
end

--- Reads what save wrote into a model, and an optimizer, on any number of ranks, sharded in whatever way. Collective.
--- Gives back `extra`. What does not fit is refused before anything changes; `strict = false` takes the tensors that
--- both have. A file of which only the hash is wrong is found when it has been read: it raises, and the model is to be
--- loaded again.
---@param dir string
---@param m Module
---@param optim? table
---@param given? {strict: boolean, verify: boolean}  verify: compare the sums (true)
---@return table? extra
---@return string[] missing, string[] unexpected
function M.load(dir, m, optim, given)
  if given == nil and opts.is(optim) and optim.param_groups == nil then optim, given = nil, optim end
  local o = opts("load", given, { strict = true, verify = true })
  dir = check_arguments("load", dir, m, optim)
  local dist = require "moonshard.dist"
  module.reshard_all(m)
  local extra, missing, unexpected, fingerprint = nil, {}, {}, nil
  scope.scope(function()
    no_grad(function()
      local ok, result = pcall(function()
        local index = checkpoint_index.read(dir, o.verify)
        fingerprint = index.fingerprint
        local list, known = entries_of(m, nil), {}
        local wanted, sd, fits = {}, nil, function() end
        for _, e in ipairs(list) do
          local entry = index.tensors[e.name] or (index.aliases and index.tensors[index.aliases[e.name] or ""])
          if not entry then
            missing[#missing + 1] = e.name:sub(#"model." + 1)
          elseif table.concat(entry.shape, ",") ~= table.concat(e.whole, ",") then
            errors.raise("load: '%s' has shape [%s] in '%s', %s in the model", e.name:sub(#"model." + 1),
              table.concat(entry.shape, ", "), dir,
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
        if o.strict and #unexpected > 0 then
          errors.raise("load: '%s' has %s, which the model has not", dir, names_text(unexpected))
        end
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
      for r, other in ipairs(agree(dist, ok, ok and fingerprint or result)) do
        if other ~= fingerprint then
          bad(dir, "it was replaced while it was loaded (rank %d has read another index than this one)", r - 1)
        end
      end
      extra = result
    end)
  end)
  return extra, missing, unexpected
end

return M
