-- SPDX-License-Identifier: MIT
--- Process groups and collectives. The same script runs under `mpirun` or `srun`, and under `luajit` alone, where the
--- world has one rank and collectives are copies. Ranks are numbered from 0 in the world. Reductions run in rank order,
--- except those of NCCL.
require "moonshard.autograd.methods"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local dtypes = require "moonshard.core.dtypes"
local calls = require "moonshard.dist.calls"
local context = require "moonshard.core.context"
local mesh = require "moonshard.dist.mesh"
local object = require "moonshard.dist.object"
local a_tensor = tensor.a_tensor

local lib, ffi = engine.lib, engine.ffi
local fail, user_line, is_tensor = errors.fail, errors.user_line, tensor.is_tensor
local Group, ensure = calls.Group, calls.ensure

local dist = {}
mesh.use(dist)

-- ---- groups -------------------------------------------------------------------------------------

local groups = {}                                       -- by id: there is one object per group

local function group_of(id)
  local g = groups[id]
  if not g then
    g = setmetatable({ id = id }, Group)
    groups[id] = g
  end
  return g
end

function Group.__tostring(g)
  local n, members = lib.ms_dist_size(g.id), {}
  if n < 0 then return "Group(freed)" end
  for k = 0, n - 1 do members[k + 1] = lib.ms_dist_member(g.id, k) end
  return ("Group(ranks %s)"):format(table.concat(members, ", "))
end

--- Whether x is a process group.
---@param x any  any value
---@return boolean
function dist.is_group(x) return getmetatable(x) == Group end
dist._a_group = opts.kind("a group", dist.is_group)

local function id_of_group(group, who)
  ensure()
  if group == nil then return 0 end
  if getmetatable(group) ~= Group then opts.wrong(group, "a group made by dist.new_group", "%s: the group", who) end
  return group.id
end

--- Joins the job. Idempotent; the first call of a dist function that needs the job, such as dist.rank, joins it, too.
--- Under mpirun, mpiexec, srun or PMIx the world consists of the job's processes, unless the backend is "self"; without
--- a launcher it is this process. Errors: torchrun started this process, unless a backend is given.
---@param given? {backend: string, timeout: number}
---   backend: "auto" (chosen by the launcher, or by MOONSHARD_BACKEND), "mpi", "nccl" (collectives of tensors on GPUs
---   by NCCL) or "self"; timeout: seconds to wait for a missing rank (default: MOONSHARD_TIMEOUT, or 60; math.huge: no
---   limit)
function dist.init(given)
  local o = opts("dist.init", given, { backend = opts.one_of({ "auto", "mpi", "nccl", "self" }, "auto"),
    timeout = opts.positive })
  calls.join(o.backend, o.timeout or 0)
end

--- Leaves the job. The end of a script does so automatically. No collective may be called afterwards.
function dist.finalize() lib.ms_dist_finalize() end

--- Whether this process has joined the job.
---@return boolean
function dist.is_initialized() return lib.ms_dist_is_initialized() ~= 0 end

--- This rank's number in the group, from 0; nil if it is not a member.
---@param group? Group  default: the world
---@return integer?
function dist.rank(group)
  local r = lib.ms_dist_rank(id_of_group(group, "dist.rank"))
  if r == -2 then fail() end
  return r >= 0 and r or nil
end

--- The number of ranks in the group.
---@param group? Group  default: the world
---@return integer
function dist.world_size(group)
  local n = lib.ms_dist_size(id_of_group(group, "dist.world_size"))
  if n < 0 then fail() end
  return n
end

--- This rank's number among the ranks of its node, from 0.
---@return integer
function dist.local_rank()
  ensure()
  return lib.ms_dist_local_rank()
end

--- The group of all ranks.
---@return Group
function dist.default_group()
  ensure()
  return group_of(0)
end

--- The group that contains only this rank.
---@return Group
function dist.self_group()
  ensure()
  return group_of(1)
end

--- The ranks of a group, as ranks of the world, in the group's order.
---@param group? Group  default: the world
---@return integer[]
function dist.group_ranks(group)
  local id, list = id_of_group(group, "dist.group_ranks"), {}
  for k = 0, dist.world_size(group) - 1 do list[k + 1] = lib.ms_dist_member(id, k) end
  return list
end

-- Whether rank is a whole number in the range of the engine's integers.
local function is_whole(rank) return rank % 1 == 0 and rank > -2 ^ 31 and rank < 2 ^ 31 end

--- Makes a group of some ranks; its members are numbered in ascending order of rank. Collective over the world; every
--- rank must pass the same list.
---@param ranks integer[]  ranks of the world, from 0
---@return Group
function dist.new_group(ranks)
  ensure()
  opts.need(type(ranks) == "table", ranks, "a list of ranks", "dist.new_group: argument 1")
  local n = #ranks
  local list = ffi.new("int32_t[?]", math.max(n, 1))
  for k = 1, n do
    opts.need(type(ranks[k]) == "number" and is_whole(ranks[k]), ranks[k], "a rank of the world",
      "dist.new_group: entry %d", k)
    list[k - 1] = ranks[k]
  end
  local id = lib.ms_dist_new_group(n, list, user_line(2))
  if id < 0 then fail() end
  return group_of(id)
end

--- Frees a group made by dist.new_group: waits for this rank's collectives in it and frees its memory. Collective over
--- the world, in the same order as other such calls. Later calls that use the group, or a model sharded over it, raise
--- an error.
---@param group Group  a result of dist.new_group
function dist.free_group(group)
  if group == nil then
    errors.raise "dist.free_group: group is nil, expected a group made by dist.new_group; dist.finalize leaves the job"
  end
  local id = id_of_group(group, "dist.free_group")
  if lib.ms_dist_free_group(id, user_line(2)) ~= 0 then fail() end
  groups[id] = nil
end

opts.fix(dist, { "new_group", "free_group" }, "dist.")

--- Makes broken groups whole again. An error in a collective, or a call refused on some ranks only, breaks its group:
--- this and every later collective of the group fails on all members, until all ranks of the world have called this
--- function. Collectives in the background end then; gradients and state that a failed step has left are for the script
--- to clear.
function dist.recover()
  ensure()
  if lib.ms_dist_recover(user_line(2), 1) ~= 0 then fail() end
end

-- ---- works --------------------------------------------------------------------------------------

--- A collective that may still be running.
---@class Work
local Work = {}
Work.__index = Work
Work.__name = "Work"

--- Waits until the collective is complete on this rank; for tensors on GPUs the compute stream waits, not the host.
--- Raises the collective's error, if it has failed.
function Work:wait()
  local w = self.work
  if w ~= nil and lib.ms_work_wait(w) ~= 0 then fail() end
end

--- Whether the collective is complete or, for tensors on GPUs, has been waited for. Does not wait.
---@return boolean
function Work:done()
  local w = self.work
  return w == nil or lib.ms_work_done(w) ~= 0
end

function Work.__tostring(w) return ("Work(%s, %s)"):format(w.op, w:done() and "done" or "under way") end

-- ---- collectives ----------------------------------------------------------------------------------

local C = ffi.C
local reductions = { sum = C.MS_DIST_SUM, avg = C.MS_DIST_AVG, max = C.MS_DIST_MAX, min = C.MS_DIST_MIN,
  prod = C.MS_DIST_PROD }
local reduction_names = { "sum", "avg", "max", "min", "prod" }
-- The collectives, by their numbers. by_inner: the first argument is a tensor; an instance of a tensor class is sent as
-- its inner tensors.
local collectives = { [0] = { name = "barrier" },
  { name = "all_reduce", by_inner = true }, { name = "all_gather", by_inner = true },
  { name = "reduce_scatter", by_inner = true }, { name = "broadcast", by_inner = true },
  { name = "reduce", by_inner = true }, { name = "gather" }, { name = "scatter" },
  { name = "all_to_all", by_inner = true } }
assert(#collectives == C.MS_DIST_SEND - 1, "dist: a collective of moonshard.h is not among those of dist/init.lua")

local call = ffi.new "ms_dist_call"
local work_out = ffi.new "ms_work *[1]"

local function tensor_id(who, what, t)
  opts.expect(t, a_tensor, "%s: %s", who, what)
  return t.id
end

local plain = { group = opts.any, async = opts.boolean }
local with_op = { group = opts.any, async = opts.boolean, op = opts.one_of(reduction_names, "sum") }
local with_src = { group = opts.any, async = opts.boolean, src = opts.number }
local with_dst = { group = opts.any, async = opts.boolean, dst = opts.number }
local with_dst_and_op = { group = opts.any, async = opts.boolean, dst = opts.number,
  op = opts.one_of(reduction_names, "sum") }
local nothing = {}

-- Issues a collective. root: its source or target, as a rank of the world.
local function run(name, op, spec, given, out, input, root, list, n_list)
  local o = given == nil and nothing or opts(name, given, spec)
  local id = id_of_group(o.group, name)
  root = root or o.src or o.dst
  if root ~= nil and not is_whole(root) then errors.raise("%s: rank is %s, expected a whole number", name, tostring(root)) end
  local site = calls.site
  call.op, call.reduction, call.root, call.async = op, reductions[o.op or "sum"], root or 0, o.async and 1 or 0
  call.group, call.out, call["in"] = id, out or 0, input or 0
  call.n_list, call.list = n_list or 0, list
  call.site = site
  local status = lib.ms_dist_run(call, work_out)
  call.site = nil
  call.list = nil
  if status ~= 0 then fail() end
  if not o.async then return nil end
  local w = work_out[0]
  return setmetatable({ op = name, site = site, work = w ~= nil and ffi.gc(w, lib.ms_work_free) or nil }, Work)
end

--- Reduces t over ranks, in place; in rank order, except by NCCL. Errors: shapes, dtypes or operations that differ
--- between ranks.
---@param t Tensor  of the same shape and dtype on every rank
---@param given? { op: "sum"|"avg"|"max"|"min"|"prod", group: Group, async: boolean }
---@return Work?  only with async
function dist.all_reduce(t, given)
  return (run("all_reduce", C.MS_DIST_ALL_REDUCE, with_op, given, tensor_id("all_reduce", "the tensor", t)))
end

--- Concatenates every rank's input into out, in rank order. Errors: sizes that do not match.
---@param out Tensor  as many elements as all inputs together, of input's dtype
---@param input Tensor  of the same size on every rank; it may be this rank's block of out
---@param given? { group: Group, async: boolean }
---@return Work?  only with async
function dist.all_gather(out, input, given)
  return (run("all_gather", C.MS_DIST_ALL_GATHER, plain, given, tensor_id("all_gather", "out", out),
    tensor_id("all_gather", "the input", input)))
end

--- Reduces input over ranks and writes this rank's block of the result, along dimension 1, to out.
---@param out Tensor  as many elements as a block, of input's dtype
---@param input Tensor  of the same shape on every rank
---@param given? { op: "sum"|"avg"|"max"|"min"|"prod", group: Group, async: boolean }
---@return Work?  only with async
function dist.reduce_scatter(out, input, given)
  return (run("reduce_scatter", C.MS_DIST_REDUCE_SCATTER, with_op, given, tensor_id("reduce_scatter", "out", out),
    tensor_id("reduce_scatter", "the input", input)))
end

local function need_root(name, given, key)
  if given ~= nil and not opts.is(given) then
    errors.raise("%s: options are %s, expected a table: { %s = RANK }", name, errors.kind(given), key)
  end
  if given == nil or given[key] == nil then
    errors.raise("%s: option '%s' is missing, expected a rank of the world", name, key)
  end
end

--- Copies rank src's t to t on every rank.
---@param t Tensor  of the same shape and dtype on every rank
---@param given { src: integer, group: Group, async: boolean }  src: a rank of the world
---@return Work?  only with async
function dist.broadcast(t, given)
  need_root("broadcast", given, "src")
  return (run("broadcast", C.MS_DIST_BROADCAST, with_src, given, tensor_id("broadcast", "the tensor", t)))
end

--- Reduces t over ranks and stores the result in t on rank dst; t on other ranks does not change.
---@param t Tensor  of the same shape and dtype on every rank
---@param given { dst: integer, op: "sum"|"avg"|"max"|"min"|"prod", group: Group, async: boolean }  dst: a rank of the world
---@return Work?  only with async
function dist.reduce(t, given)
  need_root("reduce", given, "dst")
  return (run("reduce", C.MS_DIST_REDUCE, with_dst_and_op, given, tensor_id("reduce", "the tensor", t)))
end

--- Gathers every rank's t on rank dst.
---@param t Tensor  of the same shape and dtype on every rank
---@param given { dst: integer, group: Group, async: boolean }  dst: a rank of the world
---@return Tensor[]? list  on rank dst: the tensors in rank order, on the CPU; nil on the other ranks
---@return Work? work  only with async
function dist.gather(t, given)
  need_root("gather", given, "dst")
  local id = tensor_id("gather", "the tensor", t)
  local list, out
  if dist.rank() == given.dst then
    local n = dist.world_size(given.group)
    local shape = { n }
    for d, size in ipairs(t.shape) do shape[d + 1] = size end
    local sizes = ffi.new "int64_t[8]"
    if #shape > 8 then errors.raise("gather: the tensor has %d dimensions, expected at most 7", #shape - 1) end
    for d, size in ipairs(shape) do sizes[d - 1] = size end
    out = tensor.wrap_new(lib.ms_empty(dtypes.number(t.dtype), C.MS_CPU, #shape, sizes))
    list = {}
    for k = 1, n do list[k] = out[k] end
  end
  local w = run("gather", C.MS_DIST_GATHER, with_dst, given, out and out.id, id)
  return list, w
end

--- Rank src passes a list with one tensor per rank; each rank receives its tensor in out.
---@param out Tensor  written; this rank's entry of list
---@param list Tensor[]?  on rank src: a tensor of out's shape and dtype for each rank; nil on the other ranks
---@param given { src: integer, group: Group, async: boolean }  src: a rank of the world
---@return Work?  only with async
function dist.scatter(out, list, given)
  if given == nil and opts.is(list) then list, given = nil, list end
  need_root("scatter", given, "src")
  local id, ids, n = tensor_id("scatter", "out", out), nil, 0
  if dist.rank() == given.src then
    if type(list) ~= "table" then
      errors.raise("scatter: argument 2 is %s on rank %d, the source, expected a list of tensors", errors.kind(list),
        given.src)
    end
    n = #list
    ids = ffi.new("double[?]", math.max(n, 1))
    for k = 1, n do ids[k - 1] = tensor_id("scatter", ("element %d of the list"):format(k), list[k]) end
  end
  return (run("scatter", C.MS_DIST_SCATTER, with_src, given, id, nil, nil, ids, n))
end

--- Sends block r of input (along dimension 1) to rank r, and receives block r of out from rank r.
---@param out Tensor  of input's shape and dtype
---@param input Tensor  a block along dimension 1 for each rank
---@param given? { group: Group, async: boolean }
---@return Work?  only with async
function dist.all_to_all(out, input, given)
  return (run("all_to_all", C.MS_DIST_ALL_TO_ALL, plain, given, tensor_id("all_to_all", "out", out),
    tensor_id("all_to_all", "the input", input)))
end

local function peer(name, rank)
  opts.expect(rank, opts.number, "%s: the rank", name)
  return rank
end

--- Sends t to a rank that calls recv. Complete when that rank has read it.
---@param t Tensor  any shape; read in place
---@param dst integer  a rank of the world
---@param given? { group: Group, async: boolean }
---@return Work?  only with async
function dist.send(t, dst, given)
  return (run("send", C.MS_DIST_SEND, plain, given, nil, tensor_id("send", "the tensor", t), peer("send", dst)))
end

--- Receives t from a rank that calls send. Errors: the sent tensor has another size or dtype.
---@param t Tensor  written; has the dtype and number of elements of the sent tensor
---@param src integer  a rank of the world
---@param given? { group: Group, async: boolean }
---@return Work?  only with async
function dist.recv(t, src, given)
  return (run("recv", C.MS_DIST_RECV, plain, given, tensor_id("recv", "the tensor", t), nil, peer("recv", src)))
end

--- Waits until every rank of the group has called it.
---@param group? Group  default: the world
function dist.barrier(group)
  run("barrier", C.MS_DIST_BARRIER, plain, group ~= nil and { group = group } or nil)
end

-- ---- Lua values -----------------------------------------------------------------------------------

local chars, lengths, length = ffi.new "const char *[1]", ffi.new "const double *[1]", ffi.new "double[1]"

local bytes_call = ffi.new "ms_bytes_call"

-- Describes a call of a function of dist, and whether the library made it: the caller's frame follows those of
-- describe, the function of dist, pcall and the wrapper of dist.calls.
local function describe(id, site)
  bytes_call.group, bytes_call.site, bytes_call.inside = id, site, errors.is_library(5) and 1 or 0
  return bytes_call
end

--- Gathers a Lua value from every rank. Errors: functions and userdata, which cannot be sent.
---@param value any  nil, booleans, numbers, strings, tensors on the CPU, tables of them
---@param given? { group: Group }
---@return any[]  the value of rank r at index r + 1
function dist.all_gather_object(value, given)
  local o = opts("all_gather_object", given, { group = opts.any })
  local id = id_of_group(o.group, "all_gather_object")
  local bytes, site = object.encode(value, "all_gather_object"), user_line(2)
  if lib.ms_dist_gather_bytes(describe(id, site), bytes, #bytes, chars, lengths) ~= 0 then fail() end
  local out, at = {}, 0
  for k = 1, lib.ms_dist_size(id) do
    local n = lengths[0][k - 1]
    out[k] = ffi.string(chars[0] + at, n)
    at = at + n
  end
  for k = 1, #out do out[k] = object.decode(out[k]) end
  return out
end

--- Broadcasts rank src's Lua value to every rank. Errors: functions and userdata, which cannot be sent.
---@param value any  read on rank src alone
---@param given { src: integer, group: Group }  src: a rank of the world
---@return any
function dist.broadcast_object(value, given)
  need_root("broadcast_object", given, "src")
  local o = opts("broadcast_object", given, { group = opts.any, src = opts.number })
  if not is_whole(o.src) then errors.raise("broadcast_object: rank is %s, expected a whole number", tostring(o.src)) end
  local id = id_of_group(o.group, "broadcast_object")
  local bytes = dist.rank() == o.src and object.encode(value, "broadcast_object") or ""
  local site = user_line(2)
  chars[0], length[0] = bytes, #bytes
  if lib.ms_dist_broadcast_bytes(describe(id, site), o.src, chars, length) ~= 0 then fail() end
  if dist.rank() == o.src then return value end
  return object.decode(ffi.string(chars[0], length[0]))
end

-- The works of a collective that runs once per inner tensor of an instance of a tensor class.
local Works = {}
Works.__index = Works
function Works:wait()
  for k = 1, #self do self[k]:wait() end
end
function Works:done()
  for k = 1, #self do
    if not self[k]:done() then return false end
  end
  return true
end

-- Makes dist[name] run once per inner tensor if its first argument is an instance of a tensor class; then a second
-- tensor must be one, too.
local function run_by_inner(name)
  local plain_call = dist[name]
  local function call_by_inner(a, b, c)
    local parts, others = is_tensor(a) and tensor.inner(a), is_tensor(b) and tensor.inner(b)
    if not parts and not others then return plain_call(a, b, c) end
    if not parts or is_tensor(b) and (not others or #others ~= #parts) then
      errors.raise("%s: %s and %s do not match, expected the same number of inner tensors", name, errors.kind(a),
        errors.kind(b))
    end
    local works = setmetatable({}, Works)
    for k = 1, #parts do works[k] = dist[name](parts[k], others and others[k] or b, c) end
    return works[1] and works or nil
  end
  opts.original[call_by_inner], dist[name] = plain_call, call_by_inner
end
run_by_inner "send"
run_by_inner "recv"
for k = 0, #collectives do
  local name = collectives[k].name
  if collectives[k].by_inner then run_by_inner(name) end
  dist[name] = calls.one(dist[name])
end
for _, name in ipairs { "all_gather_object", "broadcast_object" } do dist[name] = calls.one(dist[name]) end

-- The group id of the two ranks of a send or receive; that of the world if they are invalid.
local function pair(from, to)
  local n = dist.world_size()
  local function is_rank(r) return type(r) == "number" and r >= 0 and r < n and r % 1 == 0 end
  return is_rank(from) and is_rank(to) and from ~= to and -1 - from * n - to or 0
end
dist.send = calls.one(dist.send, function(_, dst) return pair(dist.rank(), dst) end)
dist.recv = calls.one(dist.recv, function(_, src) return pair(src, dist.rank()) end)

local function of_world() return 0 end
dist.new_group, dist.free_group = calls.one(dist.new_group, of_world), calls.one(dist.free_group, of_world)

-- ---- records of collectives, debug levels -----------------------------------------------------------

local n_entries = ffi.new "int[1]"

local function ledger(first)
  local list, entries = {}, lib.ms_dist_record(n_entries)
  for k = first, n_entries[0] - 1 do
    local entry = entries[k]
    list[#list + 1] = {
      op = collectives[entry.op] and collectives[entry.op].name or (entry.output_numel > 0 and "recv" or "send"),
      dtype = dtypes.name(entry.dtype),
      input_numel = entry.input_numel, output_numel = entry.output_numel, bytes = entry.bytes,
      group = groups[entry.group] or (entry.group >= 0 and group_of(entry.group) or nil),
      unit = entry.unit ~= nil and ffi.string(entry.unit) or nil,
    }
  end
  return list
end

local function finish_record(first, ok, ...)
  local list = ledger(first)
  lib.ms_dist_record_end()
  if not ok then error((...), 0) end
  return list, ...
end

--- Runs fn(…) and lists the collectives that this rank issues during the call, in order.
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return { op: string, dtype: string, input_numel: integer, output_numel: integer, bytes: integer, group: Group, unit: string? }[] list  bytes: size of the larger of input and output; unit: name of the unit, if any
---@return any  the results of fn
function dist.record(fn, ...)
  opts.expect(fn, opts.fn, "dist.record: argument")
  ensure()
  return finish_record(lib.ms_dist_record_begin(), pcall(context.block, "dist.record", fn, ...))
end

local levels = { "off", "info", "detail" }

--- "info" logs every collective to stderr. The environment variable MOONSHARD_DEBUG sets the initial level.
---@param level "off"|"info"|"detail"  "detail" also compares the order of units over ranks
function dist.set_debug_level(level)
  for k, name in ipairs(levels) do
    if name == level then
      tensor.record_sites(level ~= "off")
      engine.state.debug_level = k - 1
      return
    end
  end
  errors.raise("set_debug_level: level is %s, expected 'off', 'info' or 'detail'", errors.show(level))
end

--- The current level; initially that of the environment variable MOONSHARD_DEBUG, or "off".
---@return "off"|"info"|"detail"
function dist.debug_level() return levels[engine.state.debug_level + 1] end

--- How ranks reach each other: the backend that dist.init or MOONSHARD_BACKEND chose; by default "mpi" if mpirun,
--- mpiexec, srun or PMIx started this process, else "self".
---@return "self"|"mpi"|"nccl"
function dist.backend()
  ensure()
  return ffi.string(lib.ms_dist_backend())
end

dist.init_device_mesh, dist.mesh_from_group, dist.is_mesh = calls.one(mesh.init_device_mesh, of_world),
  mesh.mesh_from_group, mesh.is_mesh

require "moonshard.dist.objects"(dist)
require "moonshard.dist.names"(dist, function(name, op, has_op)
  local function call_named(out, input, given)
    return (run(name, op, has_op and with_op or plain, given, tensor_id(name, "out", out), tensor_id(name, "the input", input)))
  end
  dist[name] = call_named
  run_by_inner(name)
  return calls.one(dist[name])
end)
require "moonshard.dist.coalesced"(dist)

setmetatable(dist, {
  __name = "moonshard.dist",
  __index = function(_, name)
    local names = {}
    for known in pairs(dist) do names[#names + 1] = known end
    table.sort(names)
    errors.raise("%s", errors.unknown_in("moonshard.dist", name, names))
  end,
})

package.loaded["moonshard.dist"] = dist
return dist
