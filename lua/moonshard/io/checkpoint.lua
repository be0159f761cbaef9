-- SPDX-License-Identifier: MIT
--- Sharded checkpoints: `fsdp.save(dir, m, optim, opts)`, `fsdp.load(dir, m, optim, opts)`. A checkpoint is a folder
--- with one safetensors file per rank and `index.json`, which lists where the pieces of every tensor are, and the size
--- and checksum of every file.
---
--- Order of writing: make a new folder; every rank writes and syncs its file; write the index; sync the folder; rename
--- it; sync the parent folder. After a crash at any moment, either the old or the new checkpoint exists. Only a
--- checkpoint or an empty folder is replaced; a symbolic link remains and its target is replaced.
---
--- Any number of ranks can read a checkpoint: each rank computes from the index which ranges of elements it needs,
--- reads them and verifies checksums. One rank reads each file completely, unless load has the option verify = false.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local checkpoint_index = require "moonshard.io.checkpoint_index"
local create = require "moonshard.tensor.create"
local files = require "moonshard.io.files"
local flat = require "moonshard.parallel.fsdp.flat"
local module = require "moonshard.parallel.fsdp.module"
local no_grad = require "moonshard.autograd".no_grad
local opts = require "moonshard.core.opts"
local placement = require "moonshard.io.placement"
local scope = require "moonshard.tensor.scope"
local named_states = require "moonshard.io.states"
local sharded = require "moonshard.parallel.fsdp.sharded"
local optim_state = require "moonshard.parallel.fsdp.optim_state"
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"
local a_module = require("moonshard.nn.module.register").a_module
local task = require "moonshard.core.task"

local lib, ffi, averages = engine.lib, engine.ffi, named_states.averages
local C = ffi.C

local M = {}

local LARGE = 64 * 2 ^ 20           -- a replaced checkpoint larger than this is removed in the background

local bad, reason, file_name = checkpoint_index.bad, checkpoint_index.reason, checkpoint_index.file_name

-- ---- positions of tensors in a checkpoint -------------------------------------------------------

local function replica(t)
  local unit = rawget(t, "_unit")
  return unit and unit.replicates and unit.mesh and unit.mesh():rank(1) or 0
end

local function whole_shape(t) return rawget(t, "_whole_shape") or t.shape end

-- The checkpoint's entry of the state `key` that an optimizer keeps for parameter p. part: its tensor on this rank.
local function state_entry(optim, p, name, key, part)
  local like = optim_state.keeps_whole(optim, p, key) and part or p
  return { name = name, whole = whole_shape(like), place = placement.of(like), replica = replica(like), like = like,
    part = part, shared = placement.is_shared(like) }
end

-- The checkpoint's entries of the averages of the model's parameters; none without `ema`.
local function averages_of(who, m, ema)
  local names, list = ema and flat.names_below(m), {}
  for k, p in ipairs(ema and ema._params or {}) do
    if not names[p] then errors.raise("%s: option 'ema': parameter %d of the averages is not a parameter of the model", who, k) end
    list[k] = { name = "ema." .. names[p], whole = whole_shape(p), place = placement.of(p), replica = replica(p), like = p,
      part = ema._averages[k], shared = placement.is_shared(p) }
  end
  return list
end

-- Returns a list with the name, tensor and position of everything to save, in the same order on every rank; each object
-- occurs once, under its first name. Further results: a table from an object's other names to its first one; the
-- optimizer's state that is not in tensors with dimensions, by the parameter's name; its parameter groups.
local function entries_of(m, optim)
  local list, seen, aliases = {}, {}, {}
  local names, values = m:_state()
  for i, name in ipairs(names) do
    local t = values[i]
    if seen[t] then
      aliases["model." .. name] = seen[t]
    else
      seen[t] = "model." .. name
      list[#list + 1] = { name = seen[t], whole = whole_shape(t), place = placement.of(t), replica = replica(t), like = t,
        part = (sharded.is_sharded(t) and t:to_local() or t):detach(), shared = placement.is_shared(t) }
    end
  end
  local numbers, groups = {}, nil
  if optim then
    local by_name = {}
    for p, name in pairs(flat.names_below(m)) do by_name[name] = p end
    local sd = optim_state.optim_state_dict(m, optim, { type = "local" })
    groups = sd.param_groups
    for name, entry in util.sorted_pairs(sd.state) do
      local p = by_name[name]
      for key, v in util.sorted_pairs(entry) do
        if tensor.is_tensor(v) and v.ndim > 0 then
          list[#list + 1] = state_entry(optim, p, ("optim.%s.%s"):format(name, key), key, v:detach())
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
    for k, e in ipairs(mine) do
      task.report("saving", k - 1, #mine)
      saver:write(e.name, e.part.device:find "^cpu" and e.part or e.part:to "cpu")
    end
    local sum = saver:commit()
    task.report("saving", #mine, #mine)
    return sum
  end)
  if not ok then
    saver:abort()
    error(err, 0)
  end
  local written = {}
  for k, e in ipairs(mine) do
    written[k] = { name = e.name, dtype = e.part.dtype, shape = { unpack(e.whole) }, dim = e.place.dim,
      first = e.place.first, here = e.place.here }
  end
  local bytes, why = require("lfs").attributes(path, "size")
  if not bytes then errors.raise("save: cannot access '%s': %s", path, reason(why)) end
  return { file = path:match "[^/]+$", hash = err, bytes = bytes, tensors = written }
end

-- The table that index.json contains. more: its fields extra, extra_state, ema and state.
local function index_of(written, aliases, numbers, groups, more)
  local index = { format = checkpoint_index.FORMAT, world = #written, files = {}, tensors = {}, aliases = aliases,
    extra = more.extra, extra_state = more.extra_state, ema = more.ema, state = more.state }
  for r, t in ipairs(written) do
    index.files[r] = { name = t.file, bytes = t.bytes, hash = t.hash }
    for _, e in ipairs(t.tensors) do
      local entry = index.tensors[e.name] or { dtype = e.dtype, shape = e.shape, pieces = {} }
      index.tensors[e.name] = entry
      local last = entry.pieces[#entry.pieces]
      if last and last[4] == 0 and e.here > 0 then
        entry.pieces[#entry.pieces] = { r, e.dim, e.first, e.here }
      -- Skips empty pieces after the first one, and replicas, which repeat elements of earlier pieces.
      elseif not last or e.here > 0 and e.first >= last[3] + last[4] then
        entry.pieces[#entry.pieces + 1] = { r, e.dim, e.first, e.here }
      end
    end
  end
  if groups then index.optimizer = { state = numbers, param_groups = groups } end
  return index
end

local function check(status) if status ~= 0 then errors.fail() end end

-- Calls checkpoint_index.replaceable for the folder at the target's path. If another save replaces that folder during
-- the check, the check may have read parts of two folders, so a refusal is checked again.
local function examine(folder)
  local path, same = ffi.string(lib.ms_folder_path(folder, 0)), ffi.new "int[1]"
  repeat
    check(lib.ms_folder_look(folder, nil))
    local names, why, unused = checkpoint_index.replaceable(path)
    if names then return names, unused end
    check(lib.ms_folder_look(folder, same))
    if same[0] ~= 0 then errors.raise_text(why) end
  until false
end

-- Removes temporary folders beside the target whose processes have ended. A save also gives the folder that it replaces
-- a temporary name; that folder may be the user's, so it is removed only if it is a checkpoint.
local function sweep(folder)
  local path = ffi.string(lib.ms_folder_path(folder, 0))
  local parent, name = path:match "^(.*/)([^/]*)$"
  for _, entry in ipairs(checkpoint_index.entries_in(parent) or {}) do
    local left = lib.ms_folder_left(entry, name)
    if left == C.MS_LEFT_UNFINISHED
      or left == C.MS_LEFT_REPLACED and checkpoint_index.replaceable(parent .. entry, path) then
      lib.ms_folder_discard(folder, entry)
    end
  end
end

-- Rank 0's work before any rank writes: checks the target, removes what ended saves have left, and makes the temporary
-- folder beside the target. Returns the ms_folder.
local function begin(dir)
  local folder = lib.ms_folder_new(dir)
  if folder == nil then errors.fail() end
  ffi.gc(folder, lib.ms_folder_free)
  local ok, err = pcall(function()
    local _, unused = examine(folder)
    for _, name in ipairs(unused) do check(lib.ms_folder_remove(folder, name)) end
    sweep(folder)
    check(lib.ms_folder_make(folder))
  end)
  if ok then return folder end
  lib.ms_folder_free(ffi.gc(folder, nil))
  return error(err, 0)
end

-- Used where the file system cannot exchange two folders (NFS, some FUSE file systems): moves the new files beside the
-- old ones, under unique names, then renames the new index over the old one. That rename makes the new checkpoint
-- valid. After a crash, files of the old or of the new checkpoint may remain unused; the index lists the old ones, and
-- names of new ones contain the digits of the temporary folder. The next save removes them.
local function replace_inside(folder, made, path, index)
  local id, moved = made:match "%.tmp%-(%x+)%-%x+%-%d+%-%d+$", {}
  local NAME = checkpoint_index.NAME
  local final = NAME .. ".inside"
  local old = examine(folder)
  local ok, err = pcall(function()
    for r, file in ipairs(index.files) do
      local name = file_name(r - 1, id)
      check(lib.ms_folder_move_in(folder, file.name, name))
      moved[r], file.name = name, name
    end
    index.replaces = old
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
  -- The checkpoint is complete: errors in this cleanup must not fail the save.
  for _, name in ipairs(old) do
    if name ~= NAME then lib.ms_folder_remove(folder, name) end
  end
  lib.ms_folder_sync(path)
end

-- Checks the folder that this save replaced, whose temporary name is `made`: under that name, no other save can replace
-- it. If it is no checkpoint that may be replaced, moves it back to path and raises the reason.
local function settle(folder, made, path)
  local ok, names, bytes = pcall(checkpoint_index.replaceable, made, path)
  local why = not ok and names or not names and bytes
  if not why then return check(lib.ms_folder_settle(folder, 1, bytes > LARGE and 1 or 0)) end
  if lib.ms_folder_settle(folder, 0, 0) ~= 0 then
    why = ("%s; the folder that was there is now '%s', because it could not be moved back: %s"):format(why, made, errors.last())
  end
  return errors.raise_text(why)
end

local how = ffi.new "int[1]"

local function finish(folder, index)
  local path, made = ffi.string(lib.ms_folder_path(folder, 0)), ffi.string(lib.ms_folder_path(folder, 1))
  local text = checkpoint_index.text(index)
  check(lib.ms_file_put(made .. "/" .. checkpoint_index.NAME, text, #text))
  check(lib.ms_folder_sync(made))
  check(lib.ms_folder_commit(folder, how))
  if how[0] == C.MS_COMMIT_EXCHANGED then settle(folder, ffi.string(lib.ms_folder_path(folder, 1)), path) end
  if how[0] == C.MS_COMMIT_INSIDE then replace_inside(folder, made, path, index) end
end

-- Makes the outcome equal on all ranks: all fail if a rank's path differs from rank 0's, or if a rank failed; ranks that
-- did not fail themselves raise the first error in rank order. Returns the values of all ranks.
local function agree(dist, who, dir, ok, value)
  local all = dist.all_gather_object { dir = dir, ok = ok, value = ok and value or tostring(value) }
  for r, result in ipairs(all) do
    if result.dir ~= all[1].dir then
      errors.raise("%s: the ranks name different folders: '%s' on rank 0, '%s' on rank %d", who, all[1].dir, result.dir,
        r - 1)
    end
  end
  if not ok then errors.raise("%s", (tostring(value):gsub("^[^\n]-:%d+: ", ""))) end
  for r, result in ipairs(all) do
    if not result.ok then errors.raise("%s (on rank %d)", result.value:gsub("^[^\n]-:%d+: ", ""), r - 1) end
  end
  local values = {}
  for r, result in ipairs(all) do values[r] = result.value end
  return values
end

local function check_arguments(who, dir, m, optim)
  if type(dir) ~= "string" or dir == "" then opts.wrong(dir, "a path", "%s: the folder", who) end
  if dir:find("%z") then errors.raise("%s: the folder's path %s contains a zero byte", who, ("%q"):format(dir)) end
  opts.expect(m, a_module, "%s: argument 2", who)
  opts.need(optim == nil or type(optim) == "table" and type(optim.param_groups) == "table", optim,
    "an optimizer or nil", "%s: argument 3", who)
  return (dir:gsub("(.)/+$", "%1"))
end

--- Writes a model, and optionally an optimizer's state, as a sharded checkpoint. Collective; all ranks must see the
--- same file system. `extra` (numbers, strings, booleans and tables of these) is stored too, and load returns it.
---@param dir string  a new or empty folder, or a checkpoint to replace
---@param m Module  sharded, or equal on all ranks
---@param optim? table  its state is saved, too
---@param given? {extra: table, ema: EMA, state: table<string, any>, format: "hf"}  extra: stored with the tensors; ema: averages of the
---   model's parameters, which are saved, too; state: objects with state_dict and load_state_dict, by name, such as a
---   schedule, a DataLoader or a GradScaler, and tables of numbers, strings and booleans; format: "hf" writes a model
---   of ms.hf.load as ms.hf.save does, for transformers, tensor by tensor, so that no rank holds the whole. It takes
---   neither an optimizer nor the other options
function M.save(dir, m, optim, given)
  if given == nil and opts.is(optim) and optim.param_groups == nil then optim, given = nil, optim end
  local o = opts("save", given, { extra = opts.table, ema = averages, state = opts.table,
    format = opts.one_of { "hf" } })
  dir = check_arguments("save", dir, m, optim)
  if o.format then
    if optim or o.extra or o.ema or o.state then
      errors.raise "save: format = 'hf' is a model alone; save the optimizer, extra, ema and state without format"
    end
    opts.need(type(m.family) == "table" and m.family.save, m, "a model of ms.hf.load for format = 'hf'",
      "save: argument 2")
    return m.family.save(m, dir)
  end
  local dist = require "moonshard.dist"
  m:_before_saving()
  module.reshard_all(m)
  scope.scope(function()
    no_grad(function()
      local list, aliases, numbers, groups = entries_of(m, optim)
      for _, e in ipairs(averages_of("save", m, o.ema)) do list[#list + 1] = e end
      for _, e in ipairs(list) do e.skip = dist.rank() ~= 0 end          -- rank 0 writes tensors that every rank holds
      local ok, folder = true, nil
      local more = { extra = o.extra, ema = o.ema and { updates = o.ema.updates },
        state = named_states.text("save", o.state) }
      if dist.rank() == 0 then
        ok, folder = pcall(function()
          local states = m:_extra_states()
          if next(states) then more.extra_state = states end
          return begin(dir)
        end)
      end
      local mine = ok and folder and ffi.string(lib.ms_folder_path(folder, 1)) or folder or ""
      local all, written
      ok, all = pcall(agree, dist, "save", dir, ok, mine)
      local agreed_to_begin = ok
      if ok then
        ok, written = pcall(write_file, all[1] .. "/" .. file_name(dist.rank()), list)
        ok, all = pcall(agree, dist, "save", dir, ok, written)
        if ok and folder then ok, all = pcall(finish, folder, index_of(all, aliases, numbers, groups, more)) end
      end
      if type(folder) == "cdata" then lib.ms_folder_free(ffi.gc(folder, nil)) end
      if not agreed_to_begin then error(all, 0) end
      agree(dist, "save", dir, ok, all)
    end)
  end)
end

-- ---- loading -------------------------------------------------------------------------------------

-- Returns a state dict with the optimizer's numbers and with uninitialized tensors for the state that the index lists,
-- a list of these tensors, and a function that raises if the optimizer does not accept this state or its options.
local function empty_state(dir, index, m, optim)
  local saved = index.optimizer
  if not saved then
    errors.raise("load: '%s' has no optimizer state; fsdp.save stores it if the optimizer is passed to it", dir)
  end
  local sd, list = { state = {}, param_groups = saved.param_groups }, {}
  local by_name, prefixes = {}, {}
  for p, name in pairs(flat.names_below(m)) do
    by_name[name] = p
    prefixes[#prefixes + 1] = name
  end
  table.sort(prefixes, function(a, b) return #a > #b end)
  for name, numbers in util.sorted_pairs(saved.state) do
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
        local shape = optim_state.keeps_whole(optim, p, key) and entry.shape or part.shape
        local t = create.empty(shape, { dtype = entry.dtype, device = part.device })
        sd.state[found] = sd.state[found] or {}
        sd.state[found][key] = t
        list[#list + 1] = state_entry(optim, p, full, key, t)
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

-- Reads all parts that `list` needs. With verify, one rank reads each file completely and compares its checksum. fits:
-- called before the reads; raises if the state does not fit the optimizer. Returns functions that copy the data read.
local function read_files(dir, index, list, verify, dist, fits)
  local readers, after = {}, {}
  local ok, err = pcall(function()
    for r, file in ipairs(index.files) do
      local path = dir .. "/" .. file.name
      local size = require("lfs").attributes(path, "size")
      if not size then bad(dir, "file '%s' is missing", file.name) end
      if size ~= file.bytes then
        bad(dir, "file '%s' has %s bytes, but %d in the index", file.name, tostring(size), file.bytes)
      end
      readers[r] = files.reader(path, { verify = verify })
      if verify and index.version > 1 and readers[r]:sum() ~= file.hash then
        bad(dir, "file '%s' is not the one that was saved: its checksum is %s, but %s in the index", file.name,
          readers[r]:sum() or "missing", file.hash)
      end
      checkpoint_index.check_file(dir, index, r, readers[r])
    end
    fits()
    for _, e in ipairs(list) do
      local done = placement.plan(readers, e.name, index.tensors[e.name], e)
      if done then after[#after + 1] = done end
    end
    local world, me = dist.world_size(), dist.rank()
    for r, file in ipairs(index.files) do
      task.report("loading", r - 1, #index.files)
      local hash = readers[r]:fetch(verify and (r - 1) % world == me)
      if hash and index.version == 1 and hash ~= file.hash then
        bad(dir, "the contents of file '%s' have the hash %s, but %s in the index", file.name, hash, file.hash)
      end
    end
    task.report("loading", #index.files, #index.files)
  end)
  for _, reader in pairs(readers) do reader:close() end
  if not ok then error(err, 0) end
  return after
end

--- Reads a checkpoint of fsdp.save into a model, and optionally an optimizer, which may be sharded in any way over any
--- number of ranks. Collective. Returns `extra`. A checkpoint that does not match is refused before anything changes;
--- `strict = false` reads the tensors that checkpoint and model share. Damage that only the hash of a file shows is
--- found after reading: load then raises, and the model must be loaded again.
---@param dir string  a checkpoint of fsdp.save
---@param m Module  sharded, or equal on all ranks
---@param optim? table  its state is loaded, too
---@param given? {strict: boolean, verify: boolean, ema: EMA, state: table<string, any>}  verify: compare the checksums
---   (default: true); ema: its averages are loaded, too; state: the objects and tables of save's option, whose state is
---   loaded
---@return table? extra
---@return string[] missing, string[] unexpected
function M.load(dir, m, optim, given)
  if given == nil and opts.is(optim) and optim.param_groups == nil then optim, given = nil, optim end
  local o = opts("load", given, { strict = true, verify = true, ema = averages, state = opts.table })
  dir = check_arguments("load", dir, m, optim)
  named_states.check("load", o.state)
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
            errors.raise("load: '%s' has shape [%s] in '%s', but %s in the model", e.name:sub(#"model." + 1),
              table.concat(entry.shape, ", "), dir, tostring(e.whole))
          else
            index.tensors[e.name] = entry
            wanted[#wanted + 1] = e
          end
        end
        for i, name in ipairs((m:_state())) do known["model." .. name] = i end
        local states, has = index.extra_state or {}, {}
        for _, name in ipairs((m:_extras())) do
          has[name] = true
          if states[name] == nil then missing[#missing + 1] = name end
        end
        for name in util.sorted_pairs(states) do
          if not has[name] then unexpected[#unexpected + 1] = name end
        end
        for name in util.sorted_pairs(index.tensors) do
          if name:find "^model%." and not known[name] then unexpected[#unexpected + 1] = name:sub(#"model." + 1) end
        end
        if o.strict and #missing > 0 then
          errors.raise("load: '%s' lacks '%s', which the model has", dir, table.concat(missing, "', '"))
        end
        if o.strict and #unexpected > 0 then
          errors.raise("load: '%s' has '%s', which the model lacks", dir, table.concat(unexpected, "', '"))
        end
        if optim then
          local more
          sd, more, fits = empty_state(dir, index, m, optim)
          for _, e in ipairs(more) do wanted[#wanted + 1] = e end
        end
        if o.ema and not index.ema then errors.raise("load: '%s' has no averages; fsdp.save stores them if it gets the option 'ema'", dir) end
        for _, e in ipairs(averages_of("load", m, o.ema)) do
          local entry = index.tensors[e.name]
          if entry and table.concat(entry.shape, ",") == table.concat(e.whole, ",") then
            wanted[#wanted + 1] = e
          elseif o.strict or entry then
            errors.raise("load: '%s' has no average of the shape %s for '%s'", dir, tostring(e.whole), e.name:sub(#"ema." + 1))
          end
        end
        local contents, lacks = named_states.read(dir, o.state, index.state)
        if not contents then errors.raise("load: %s", lacks) end
        local after = read_files(dir, index, wanted, o.verify, dist, fits)
        for _, fn in ipairs(after) do fn() end
        if optim then optim_state.load_parts(m, optim, sd) end
        if o.ema then o.ema.updates = index.ema.updates end
        named_states.restore("load", dir, o.state, contents)
        m:_after_loading(function(name) return states[name] end, missing, unexpected)
        return index.extra
      end)
      for r, other in ipairs(agree(dist, "load", dir, ok, ok and fingerprint or result)) do
        if other ~= fingerprint then
          bad(dir, "it was replaced during loading (rank %d read a different index)", r - 1)
        end
      end
      extra = result
    end)
  end)
  return extra, missing, unexpected
end

return M
