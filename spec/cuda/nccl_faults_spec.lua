-- SPDX-License-Identifier: MIT
--- How a job over NCCL ends when a call of NCCL fails, at once or later, when what it started never ends, and when a
--- rank is killed in it: every rank raises an error that names the rank and the call, or ends, within the limit.
local lfs = require "lfs"
local ranks = require "spec.support.ranks"
local process = require "spec.support.process"
local within = process.within

local build = process.build
local built = lfs.attributes(build .. "/standin/libnccl_standin.so.2") ~= nil
local LIMIT, HANG = 1, 0.5              -- HANG, times the patience: from dist.init on, where a call hangs

-- Makes every call of NCCL in turn, the gathers of a sharded model among them: its parameters do not divide evenly, so
-- their blocks are sent in a group. A rank that gets an error writes when it began the call, when it got the error, and
-- the error.
local SCRIPT = ([[
  local ms = require "moonshard"
  local dist, nn = ms.dist, ms.nn
  local rank = tonumber(os.getenv "OMPI_COMM_WORLD_RANK")
  local function step(fn)
    local begun = ms.time()
    local ok, why = pcall(fn)
    if ok then return end
    io.write(("@%%d %%.6f %%.6f %%s\n"):format(rank, begun, ms.time(), (why:gsub("\n", " "))))
    io.flush()
    error(why, 0)
  end
  step(function() dist.init { backend = "nccl", timeout = %d } end)
  if os.getenv "MOONSHARD_NCCL_STANDIN":find "^hang" then
    local seconds = %g
    require "moonshard.core.ffi".lib.ms_dist_set_timeout(seconds)
  end
  local world, group = dist.world_size(), nil
  local function cuda(n) return ms.ones(n, { device = "cuda" }) end
  step(function() group = dist.new_group { 0, 1 } end)
  if rank < 2 then step(function() dist.all_reduce(cuda(1000), { group = group }) end) end
  step(function() dist.all_gather(cuda(1000 * world), cuda(1000)) end)
  step(function() dist.reduce_scatter(cuda(1000), cuda(1000 * world)) end)
  step(function() dist.broadcast(cuda(1000), { src = 0 }) end)
  step(function() dist.reduce(cuda(1000), { dst = 1 }) end)
  step(function() dist.all_to_all(cuda(1000 * world), cuda(1000 * world)) end)
  step(function() dist.all_reduce(cuda(300000), { async = true }):wait() end)
  step(function()
    local model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)):to "cuda"
    ms.fsdp.fully_shard(model)
    model(cuda(6):reshape(2, 3)):sum():backward()
  end)
  step(function() dist.free_group(group) end)
  print "all done"
]]):format(LIMIT, HANG * process.patience)

local function job(n, fault)
  return ranks.run(n, SCRIPT, { timeout = 60 * process.patience,
    env = { MOONSHARD_CUDA = "emulated", MOONSHARD_NCCL_STANDIN = fault } })
end

-- What each rank raised: { seconds, text }, by rank.
local function raised(done)
  local list = {}
  for r, begun, at, text in done.stdout:gmatch "@(%d+) (%S+) (%S+) ([^\n]*)" do
    list[tonumber(r)] = { seconds = tonumber(at) - tonumber(begun), text = text }
  end
  return list
end

describe("a call of NCCL #cuda #timed", function()
  local function check(n, fault, pattern, limit)
    it(("that has the fault %s%s"):format(fault, n > 2 and (", over %d ranks"):format(n) or ""), function()
      if not built then return pending "this build has no emulated GPU: there is no g++" end
      within(limit, function()
        local done = job(n, fault)
        assert.are_not.equal(0, done.code, done.stdout)
        assert.is_false(done.timed_out)
        local told, longest = raised(done), 0
        assert.matches(pattern, done.stderr .. done.stdout)
        -- A rank that did not raise was ended by the error of another.
        assert.is_not_nil(next(told) or fault:find "^die:.*Comm" and {}, done.stderr)
        for _, entry in pairs(told) do
          assert.matches(pattern, entry.text)
          longest = math.max(longest, entry.seconds)
        end
        return longest, done.stdout
      end)
    end)
  end

  -- Every rank raises the error of the rank whose call failed, at once. NCCL's errors about a peer are raised after the
  -- peer's own error, if it has one.
  for _, case in ipairs {
    { "fail:ncclGetUniqueId:1:0:3", "ncclGetUniqueId: internal error .*NCCL error 3" },
    { "fail:ncclCommInitRankConfig:1:1:2", "dist%.init: ncclCommInitRankConfig: unhandled system error .*NCCL error 2" },
    { "async:ncclCommInitRankConfig:1:1:6", "dist%.init: ncclCommInitRankConfig: remote process exited" },
    { "fail:ncclCommSplit:1:1:3", "dist%.new_group: ncclCommSplit: internal error .*NCCL error 3" },
    { "async:ncclCommSplit:1:0:1", "dist%.new_group: ncclCommSplit: unhandled cuda error .*NCCL error 1" },
    { "fail:ncclAllReduce:1:1:3", "rank 1 failed: all_reduce: collective #1 of ranks 0, 1 .*ncclAllReduce: internal error" },
    { "async:ncclAllReduce:1:0:1", "rank 0 failed: all_reduce: collective #1 of ranks 0, 1 .*ncclAllReduce: unhandled cuda error" },
    { "fail:ncclAllGather:1:1:2", "rank 1 failed: all_gather: collective #%d of the world .*ncclAllGather: " },
    { "fail:ncclReduceScatter:1:0:2", "rank 0 failed: reduce_scatter: collective .*ncclReduceScatter: " },
    { "async:ncclReduceScatter:1:1:6", "rank 1 failed: reduce_scatter: .*remote process exited" },
    { "fail:ncclBroadcast:1:1:4", "rank 1 failed: broadcast: .*ncclBroadcast: invalid argument" },
    { "fail:ncclReduce:1:1:5", "rank 1 failed: reduce: .*ncclReduce: invalid usage" },
    { "fail:ncclAlltoAll:1:1:3", "rank 1 failed: all_to_all: .*ncclAlltoAll: internal error" },
    { "async:ncclAllReduce:2:1:1", "rank 1 failed: all_reduce: .* of 300000 float32.*ncclAllReduce: unhandled cuda error" },
    { "fail:ncclGroupStart:1:1:3", "rank 1 failed: all_gather: .*unit '.*ncclGroupStart: internal error" },
    { "fail:ncclGroupEnd:1:1:2", "rank 1 failed: all_gather: .*unit '.*ncclGroupEnd: unhandled system error" },
    { "async:ncclBroadcast:2:1:2", "rank 1 failed: all_gather: .*unit '.*unhandled system error" },
    { "fail:ncclCommGetAsyncError:5:1:2", "ncclCommGetAsyncError: unhandled system error" },
    { "fail:ncclCommFinalize:1:1:3", "dist%.free_group: ncclCommFinalize: internal error" },
  } do
    check(2, case[1], case[2], 0.3 + 0.3)
  end
  check(4, "fail:ncclAllGather:1:3:2", "rank 3 failed: all_gather: collective .*ncclAllGather: unhandled system error", 0.6)

  for _, case in ipairs {
    { "hang:ncclCommInitRankConfig:1:1", "dist%.init: 1%.%d s have passed and the GPUs of the ranks are not connected", LIMIT },
    { "hang:ncclCommSplit:1:1", "dist%.new_group: %d%.%d s have passed and the GPUs of the ranks are not connected" },
    { "hang:ncclAllReduce:1:1", "all_reduce: .*: %d%.%d s have passed and rank %d has not finished its part" },
    { "hang:ncclBroadcast:2:0", "all_gather: .*unit '.*: %d%.%d s have passed and rank %d has not finished its part" },
    { "hang:ncclCommFinalize:1:1", "dist%.free_group: %d%.%d s have passed" },
  } do
    check(2, case[1], case[2], (case[3] or HANG) + 0.3)
  end

  -- A rank that is killed is named at once.
  for _, case in ipairs {
    { 2, "die:ncclCommInitRankConfig:1:1" }, { 2, "die:ncclCommSplit:1:1" }, { 2, "die:ncclAllReduce:2:1" },
    { 3, "die:ncclAllGather:1:1" }, { 4, "die:ncclReduceScatter:1:1" }, { 2, "die:ncclBroadcast:2:1" },
  } do
    check(case[1], case[2], "rank 1 %(process %d+%) died", 0.3)
  end
end)
