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

  -- A loss of power keeps what was synced, and of the rest anything. Follows the calls of a trace: `dirty` has the files written and
  -- the folders whose entries changed since their last fsync. Returns how often something of `path` became visible under its name.
  local function follow(trace, path)
    local dirty, waiting, seen, inside = {}, {}, 0, false
    local function parent(p) return p:match "^(.*)/[^/]*$" end
    local function clean_below(p, line)
      for name in pairs(dirty) do
        if name == p or name:sub(1, #p + 1) == p .. "/" then error(("%s is not on the disk yet at: %s"):format(name, line), 0) end
      end
    end
    local function did(call, rest, line)
      local at = rest:match "^%d+<(.-)>"
      local first, second = rest:match '"(.-)"', rest:match '".-".-"(.-)"'
      if call:find "^p?writev?2?" or call == "pwrite64" or call == "ftruncate" then dirty[at] = true
      elseif call == "openat" and line:find "O_CREAT" then dirty[first], dirty[parent(first)] = true, true
      elseif call == "mkdir" then dirty[first], dirty[parent(first)] = true, true
      elseif call:find "^rename" then
        if second == path then
          clean_below(first, line)
          seen = seen + 1
        end
        dirty[second], dirty[first] = dirty[first], nil
        dirty[parent(first)], dirty[parent(second)] = true, true
      elseif call == "unlink" or call == "unlinkat" or call == "rmdir" then
        -- What the name meant before goes when the name means the new one for good.
        local gone = at and at .. "/" .. first or first
        if seen > 0 and dirty[parent(path)] then error(("the new name is not on the disk yet at: %s"):format(line), 0) end
        dirty[gone] = nil
        if parent(gone) ~= parent(path) then dirty[parent(gone)] = true end
      elseif call == "fsync" or call == "fdatasync" then dirty[at] = nil
      end
    end
    for line in io.lines(trace) do
      inside = inside or line:find("/moonshard-save-begins", 1, true) ~= nil
      local pid, call, rest = line:match "^(%d+) +([%w_]+)%((.*)$"
      if inside and call and (rest:find(path, 1, true) or rest:find("<" .. parent(path) .. ">", 1, true)) then
        if line:find "<unfinished" and call:find "sync" then waiting[pid] = { call, rest, line }     -- done when it is over
        elseif not line:find "= %-1" and not line:find "O_RDONLY" then did(call, rest, line) end
      elseif line:find "sync resumed.*= 0" then
        local sync = waiting[line:match "^%d+"]
        if sync then did(unpack(sync)) end
        waiting[line:match "^%d+"] = nil
      end
    end
    -- And what it said is saved stays so.
    if next(dirty) then error(next(dirty) .. " is not on the disk when the save is over", 0) end
    return seen
  end

  for _, case in ipairs { { "file", 1 }, { "folder", 1 }, { "large", 1 }, { "folder", 2 } } do
    local kind, world = case[1], case[2]
    it(("is on the disk before its name means it, and before the old one goes: %s over %d rank%s"):format(kind, world, world > 1 and "s" or ""), function()
      if not strace_works() then return pending "strace cannot trace here" end
      local path, trace = ("%s/power-%s%d"):format(work, kind, world), work .. "/trace"
      save_once.save(kind, path, OLD)()
      local argv = { "strace", "-f", "-y", "-qq", "-o", trace, "-e", "trace=" .. table.concat(CALLS, ",") }
      if world > 1 then for _, w in ipairs { "mpirun", "-n", "2" } do argv[#argv + 1] = w end end
      for _, w in ipairs { "luajit", process.root .. "/spec/support/save_once.lua", kind, path, tostring(NEW) } do argv[#argv + 1] = w end
      local child = process.start(argv, { stdout = work .. "/out", stderr = work .. "/out.err",
        env = { LD_PRELOAD = false, OMPI_ALLOW_RUN_AS_ROOT = "1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = "1", OMPI_MCA_rmaps_base_oversubscribe = "1" } })
      assert.are.equal(0, child:wait(60) or child:stop(), process.read(work .. "/out.err"))
      assert.are.equal(1, follow(trace, path))
      assert.are.equal(NEW, value_of(kind, path))
    end)
  end
end)
