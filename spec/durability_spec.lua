--- A save that is killed, or that meets a failing call, at every one of its system calls: the checkpoint of before is there, or the
--- new one is, and each is whole; an error says what could not be done, to which file and why.
---
--- strace ends the process at the n-th call of a kind, or makes that call fail. Normally every call of the small saves is tried once,
--- within some seconds; MOONSHARD_SWEEP=1 tries the large file and saves of two ranks as well, each with several errors.
local process = require "spec.support.process"
local ms = require "moonshard"
local save_once = require "spec.support.save_once"

local SWEEP = os.getenv "MOONSHARD_SWEEP" ~= nil
local OLD, NEW = 1, 2
-- Calls that can touch files. mmap and the like are memory's; futex and signals are the threads'.
local CALLS = { "openat", "open", "creat", "read", "pread64", "write", "pwrite64", "writev", "pwritev2", "close", "fsync", "fdatasync", "ftruncate",
                "fallocate", "rename", "renameat", "renameat2", "link", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "newfstatat",
                "fstat", "stat", "getdents64", "lseek", "statx" }
local WORDS = { EIO = "Input/output error", ENOSPC = "No space left on device", EACCES = "Permission denied" }

-- Whether this machine lets strace trace; it is looked for by running it. Not under a tool, whose leak check traces as well.
local function strace_works()
  return not os.getenv "MOONSHARD_TOOL" and os.execute "strace -f -o /dev/null -e trace=openat true >/dev/null 2>&1" == 0
end

describe("a save that is disturbed", function()
  local work, runs

  setup(function()
    work, runs = process.temp_folder(), 0
  end)
  teardown(function() process.remove_folder(work) end)

  -- The process of a save of `value` under strace with these options. With two ranks, rank 1 is the one that is traced.
  local function start(kind, path, value, options, world)
    runs = runs + 1
    local words = { "luajit", process.root .. "/spec/support/save_once.lua", kind, path, tostring(value) }
    local traced = { "strace", "-f", "-qq", unpack(options) }
    for _, w in ipairs(words) do traced[#traced + 1] = w end
    local out, env = work .. "/out", { LD_PRELOAD = false }
    local argv = traced
    if world > 1 then
      argv = { "mpirun", "--mca", "odls_base_sigkill_timeout", "0", "-n", "1" }
      for k, v in pairs { OMPI_ALLOW_RUN_AS_ROOT = "1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = "1", OMPI_MCA_rmaps_base_oversubscribe = "1" } do env[k] = v end
      for _, w in ipairs(words) do argv[#argv + 1] = w end
      argv[#argv + 1] = ":"
      argv[#argv + 1] = "-n"
      argv[#argv + 1] = "1"
      for _, w in ipairs(traced) do argv[#argv + 1] = w end
    end
    local child = process.start(argv, { stdout = out, stderr = out .. ".err", env = env })
    local code = child:wait(30) or child:stop()
    return code, process.read(out), process.read(out .. ".err")
  end

  -- The value that the checkpoint at path has; an error when it is not whole.
  local function value_of(kind, path)
    local values = {}
    if kind == "folder" then
      local model = ms.nn.Sequential(ms.nn.Linear(3, 4), ms.nn.Linear(4, 2))
      values[1] = ms.fsdp.load(path, model).value
      for _, p in ipairs(model:parameters()) do
        values[#values + 1] = p:min():item()
        values[#values + 1] = p:max():item()
      end
    else
      local tensors, metadata = ms.load(path)
      values[1] = tonumber(metadata.value)
      for _, t in ms.sorted_pairs(tensors) do
        values[#values + 1] = t:min():item()
        values[#values + 1] = t:max():item()
      end
      assert.are.equal(5, #values)
    end
    for _, v in ipairs(values) do assert.are.equal(values[1], v) end
    return values[1]
  end

  local function clean(path)
    for name in require("lfs").dir(work) do
      local there = work .. "/" .. name
      if there:sub(1, #path) == path and name ~= "." and name ~= ".." then
        if require("lfs").attributes(there, "mode") == "directory" then process.remove_folder(there) else os.remove(there) end
      end
    end
  end

  -- { call, n, line }: every call between the two marks, as the n-th of its kind in its thread.
  local function calls_of(kind, path, world)
    local trace = work .. "/trace"
    local code, out, err = start(kind, path, NEW, { "-o", trace, "-e", "trace=" .. table.concat(CALLS, ",") }, world)
    assert.are.equal(0, code, out .. err)
    local counts, before, inside, list, main = {}, nil, false, {}, nil
    for line in io.lines(trace) do
      local pid, call = line:match "^(%d+) +([%w_]+)%("
      if pid then
        counts[pid] = counts[pid] or {}
        counts[pid][call] = (counts[pid][call] or 0) + 1
        if line:find("/moonshard-save-begins", 1, true) then
          inside, main, before = true, pid, {}
          for k, n in pairs(counts[pid]) do before[k] = n end
        elseif line:find("/moonshard-save-ends", 1, true) then
          inside = false
        elseif inside and (pid == main or counts[pid][call] > (before[call] or 0)) then
          list[#list + 1] = { call = call, n = counts[pid][call], line = line }
        end
      end
    end
    assert.is_true(#list > 8, #list)
    return list
  end

  local kinds = SWEEP and { { "file", 1 }, { "folder", 1 }, { "large", 1 }, { "folder", 2 } } or { { "file", 1 }, { "folder", 1 } }
  for _, case in ipairs(kinds) do
    local kind, world = case[1], case[2]
    local name = ("%s%s"):format(kind, world > 1 and " of 2 ranks" or "")

    -- The checkpoint of before, then a disturbed save, then a look.
    local function disturb(path, point, injection)
      clean(path)
      save_once.save(kind, path, OLD)()
      local code, out, err = start(kind, path, NEW, { "-o", "/dev/null", "-e", "trace=" .. point.call,
        "-e", ("inject=%s:%s:when=%d"):format(point.call, injection, point.n) }, world)
      local what = ("%s at call %d of %s: %s\n%s%s"):format(injection, point.n, point.call, point.line, out, err)
      local ok, value = pcall(value_of, kind, path)
      assert.is_true(ok, what .. tostring(value))
      return value, code, out, what
    end

    it("leaves the old checkpoint or the new one when it is killed at any call: " .. name, function()
      if not strace_works() then return pending "strace cannot trace here" end
      local path = ("%s/killed-%s%d"):format(work, kind, world)
      save_once.save(kind, path, OLD)()
      local seen, killed = {}, 0
      for _, point in ipairs(calls_of(kind, path, world)) do
        local value, code = disturb(path, point, "signal=KILL")
        seen[value] = (seen[value] or 0) + 1
        if code ~= 0 then killed = killed + 1 end
        if code == 0 then assert.are.equal(NEW, value) end
        -- And what was left lying about is in nobody's way.
        save_once.save(kind, path, NEW)()
        assert.are.equal(NEW, value_of(kind, path))
      end
      local old, new = seen[OLD] or 0, seen[NEW] or 0
      -- Rank 0 puts the new checkpoint in its place when rank 1, which is killed, has made all its calls.
      assert.is_true(old > 4 and (new > 1 or world > 1) and killed > 6, ("%d old, %d new, %d killed"):format(old, new, killed))
    end)

    for _, word in ipairs(SWEEP and { "EIO", "ENOSPC", "EACCES" } or { "EIO" }) do
      it(("says what failed when any call gives %s, and keeps the old checkpoint: %s"):format(word, name), function()
        if not strace_works() then return pending "strace cannot trace here" end
        local path = ("%s/failed-%s%d"):format(work, kind, world)
        save_once.save(kind, path, OLD)()
        local failed, committed = 0, false
        for _, point in ipairs(calls_of(kind, path, world)) do
          local value, code, out, what = disturb(path, point, "error=" .. word)
          if code == 0 then
            assert.are.equal("saved", out:match "^%l+", what)
            assert.are.equal(NEW, value, what)
          else
            failed = failed + 1
            local message = out:match "failed: [^\n]*"
            assert.is_truthy(message, what)
            assert.is_truthy(message:find "save: cannot %l+ [^']*'[^']+'", what)
            assert.is_truthy(message:find(WORDS[word], 1, true), what)
            -- Once the new name is on its way to the disk, the new one may be what is found.
            assert.is_true(value == OLD or committed, what)
          end
          committed = committed or point.call:find "^rename" ~= nil and not point.line:find "EEXIST"
        end
        assert.is_true(failed > 5, failed)
      end)
    end
  end
end)
