-- SPDX-License-Identifier: MIT
--- Saves that are killed, or get an error, at one of their system calls: for durability_spec and
--- scripts/bench/durability.
---
--- strace kills the process at the n-th call of a kind, or makes that call fail. The kinds of saves are listed in
--- save_once; "inside" is a folder where renameat2 supports no flags, as on NFS: all its calls fail with EINVAL.
local lfs = require "lfs"
local ms = require "moonshard"
local process = require "spec.support.process"
local save_once = require "spec.support.save_once"

local M = { OLD = 1, NEW = 2 }
local OLD, NEW = M.OLD, M.NEW

-- System calls that concern files. mmap and the like concern memory; futex and signals concern threads.
M.CALLS = { "openat", "open", "creat", "read", "pread64", "write", "pwrite64", "writev", "pwritev2", "close", "fsync",
  "fdatasync", "ftruncate",
                "fallocate", "rename", "renameat", "renameat2", "link", "unlink", "unlinkat", "mkdir", "mkdirat",
                "rmdir", "newfstatat",
                "fstat", "stat", "lstat", "getdents64", "lseek", "statx", "readlink", "readlinkat" }

--- Whether strace can trace on this machine; tries it. Returns false if scripts/test runs the specs under valgrind or a
--- sanitizer, whose leak check traces the process, too.
function M.works()
  return not os.getenv "MOONSHARD_TOOL"
    and os.execute "strace -f -o /dev/null -e trace=openat true >/dev/null 2>&1" == 0
end

local NO_FLAGS = "inject=renameat2:error=EINVAL"

--- Whether a call of a save changes a file or a folder. Killing the process at any other call leaves the same state as
--- killing it at the next call that does.
function M.changes(point)
  local call = point.call
  return call:find "write" or call:find "sync" or call:find "^rename" or call:find "^unlink" or call:find "^mkdir"
    or call == "rmdir"
    or call == "openat" and point.line:find "O_CREAT" ~= nil
end

--- Makes an object that runs saves in the folder `work`.
function M.new(work)
  local self = { work = work }

  --- Runs the save of `value` under strace with these options; returns its status and output. With two ranks, traces
  --- rank 1.
  function self.start(kind, path, value, options, world)
    local words = { "luajit", process.root .. "/spec/support/save_once.lua", kind, path, tostring(value) }
    local traced = { "strace", "-f", "-qq", unpack(options) }
    if kind == "inside" then
      traced[#traced + 1] = "-e"
      traced[#traced + 1] = NO_FLAGS
    end
    for _, w in ipairs(words) do traced[#traced + 1] = w end
    local out, env = work .. "/out", { LD_PRELOAD = false }
    local argv = traced
    if world > 1 then
      argv = { "mpirun", "--mca", "odls_base_sigkill_timeout", "0", "-n", "1" }
      env = process.mpirun_env(env)
      for _, w in ipairs(words) do argv[#argv + 1] = w end
      argv[#argv + 1] = ":"
      argv[#argv + 1] = "-n"
      argv[#argv + 1] = "1"
      for _, w in ipairs(traced) do argv[#argv + 1] = w end
    end
    local child = process.start(argv, { stdout = out, stderr = out .. ".err", env = env })
    local code = child:wait(60) or child:stop()
    return code, process.read(out), process.read(out .. ".err")
  end

  --- Runs the save without strace; kills it if it has not ended after `seconds`.
  function self.plain(kind, path, value, seconds)
    local child = process.start({ "luajit", process.root .. "/spec/support/save_once.lua", kind, path,
      tostring(value) },
      { stdout = work .. "/out", stderr = work .. "/out.err", env = { LD_PRELOAD = false } })
    local code = child:wait(seconds or 60)
    if code then return code end
    process.kill(child.pid, 9)
    return child:wait(10)
  end

  local function is_folder(kind) return kind == "folder" or kind == "inside" end

  --- The value stored in the checkpoint at path; raises if it is incomplete.
  function self.value_of(kind, path)
    local values = {}
    if is_folder(kind) then
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
      assert(#values == 5, "the file does not hold two tensors")
    end
    for _, v in ipairs(values) do assert(v == values[1], "the file mixes values of two saves") end
    return values[1]
  end

  --- What a save left behind: names beside the checkpoint that begin with its name, and names inside the checkpoint's
  --- folder that its index does not list.
  function self.leftovers(kind, path)
    local list = {}
    for name in lfs.dir(work) do
      local there = work .. "/" .. name
      if there ~= path and there:sub(1, #path) == path and not there:find("%.other", #path) then
        list[#list + 1] = name
      end
    end
    if is_folder(kind) then
      local listed = require("moonshard.io.checkpoint_index").read(path, true)
      local own = { ["index.json"] = true, ["."] = true, [".."] = true }
      for _, file in ipairs(listed.files) do own[file.name] = true end
      for name in lfs.dir(path) do
        if not own[name] then list[#list + 1] = name end
      end
    end
    return list
  end

  function self.clean(path)
    for name in lfs.dir(work) do
      local there = work .. "/" .. name
      if there:sub(1, #path) == path and name ~= "." and name ~= ".." then
        if lfs.attributes(there, "mode") == "directory" then process.remove_folder(there) else os.remove(there) end
      end
    end
  end

  --- The calls of a save, between the two marks of save_once.lua: a list of { call, n, line }, call number n of its
  --- kind in its thread. `renames`: index of the first call after an attempt to rename folders.
  function self.calls_of(kind, path, world)
    local trace = work .. "/trace"
    local code, out, err = self.start(kind, path, NEW, { "-o", trace, "-e", "trace=" .. table.concat(M.CALLS, ",") },
      world)
    assert(code == 0, out .. err)
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
        elseif inside and kind == "inside" and call == "renameat2" then
          list.renames = list.renames or #list + 1        -- the call itself is not listed: strace makes all fail
        elseif inside and (pid == main or counts[pid][call] > (before[call] or 0)) then
          list[#list + 1] = { call = call, n = counts[pid][call], line = line }
        end
      end
    end
    assert(#list > 8, ("strace has recorded only %d calls of a save"):format(#list))
    return list
  end

  --- Saves a checkpoint, runs a second save with `injection` at the call `point`, then reads. Returns the value found
  --- (nil if no complete checkpoint is found), the second save's status and output, and all of this as a text.
  function self.disturb(kind, path, point, injection, world)
    self.clean(path)
    save_once.save(kind, path, OLD)()
    local traced = kind == "inside" and point.call .. ",renameat2" or point.call
    local options = { "-o", "/dev/null", "-e", "trace=" .. traced, "-e", ("inject=%s:%s:when=%d"):format(point.call,
      injection, point.n) }
    -- With this option the process stops at the traced calls only, but strace injects no signals.
    if injection:find "^error=" then options[#options + 1] = "--seccomp-bpf" end
    local code, out, err = self.start(kind, path, NEW, options, world)
    local what = ("%s at call %d of %s: %s\n%s%s"):format(injection, point.n, point.call, point.line, out, err)
    local ok, value = pcall(self.value_of, kind, path)
    return ok and value or nil, code, out, ok and what or what .. tostring(value)
  end

  return self
end

return M
