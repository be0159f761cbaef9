-- SPDX-License-Identifier: MIT
--- A save that is killed, or has a failing call, at every one of its system calls: the old checkpoint or the new one is
--- complete afterwards; an error says which operation failed, on which file, and why.
---
--- Small saves are killed at every call that changes something, and calls fail at these and some others;
--- scripts/bench/durability tries all calls, large files, saves of two ranks and other errors.
local disturbed = require "spec.support.disturbed"
local process = require "spec.support.process"
local save_once = require "spec.support.save_once"

local OLD, NEW = disturbed.OLD, disturbed.NEW

describe("a save that is disturbed", function()
  local work, saves

  setup(function()
    work = process.temp_folder()
    saves = disturbed.new(work)
  end)
  teardown(function() process.remove_folder(work) end)

  -- Calls that change something and, with `more`, reads of folders and every `more`-th other call; for a folder
  -- replaced from inside, only the calls after the failed rename, because those before it are the same for `folder`.
  local function points_of(kind, path, more)
    local list, some = saves.calls_of(kind, path, 1), {}
    for k, point in ipairs(list) do
      if k >= (list.renames or 1) and (disturbed.changes(point) or more
        and (k % more == 0 or point.call == "getdents64")) then
        some[#some + 1] = point
      end
    end
    return some
  end

  for _, kind in ipairs { "file", "folder", "inside" } do
    it("leaves the old checkpoint or the new one when it is killed at any call: " .. kind, function()
      if not disturbed.works() then return pending "strace cannot trace here" end
      local path = ("%s/killed-%s"):format(work, kind)
      save_once.save(kind, path, OLD)()
      local seen, killed = {}, 0
      for _, point in ipairs(points_of(kind, path)) do
        local value, code, _, what = saves.disturb(kind, path, point, "signal=KILL", 1)
        assert.is_truthy(value, what)
        seen[value] = (seen[value] or 0) + 1
        if code ~= 0 then killed = killed + 1 end
        if code == 0 then assert.are.equal(NEW, value) end
        -- Leftovers do not disturb the next save, which removes them.
        save_once.save(kind, path, NEW)()
        assert.are.equal(NEW, saves.value_of(kind, path))
        assert.are.same({}, saves.leftovers(kind, path), what)
      end
      local old, new = seen[OLD] or 0, seen[NEW] or 0
      assert.is_true(old > 1 and new > 0 and killed > 6, ("%d old, %d new, %d killed"):format(old, new, killed))
    end)

    it("reports what failed if any call returns EIO, and keeps the old checkpoint: " .. kind, function()
      if not disturbed.works() then return pending "strace cannot trace here" end
      local path = ("%s/failed-%s"):format(work, kind)
      save_once.save(kind, path, OLD)()
      local failed, committed = 0, false
      for _, point in ipairs(points_of(kind, path, 8)) do
        local value, code, out, what = saves.disturb(kind, path, point, "error=EIO", 1)
        assert.is_truthy(value, what)
        if code == 0 then
          assert.are.equal("saved", out:match "^begins\n(%l+)", what)
          assert.are.equal(NEW, value, what)
        else
          failed = failed + 1
          local message = out:match "failed: [^\n]*"
          assert.is_truthy(message, what)
          assert.is_truthy(message:find "save: cannot %l+ [^']*'[^']+'", what)
          assert.is_truthy(message:find("Input/output error", 1, true), what)
          -- Once the rename has begun, the new checkpoint may be found.
          assert.is_true(value == OLD or committed, what)
        end
        save_once.save(kind, path, NEW)()
        assert.are.same({}, saves.leftovers(kind, path), what)
        committed = committed or point.call:find "^rename" ~= nil and not point.line:find "EEXIST"
      end
      assert.is_true(failed > 5, failed)
    end)
  end

  it("creates temporary files through no link, and removes nothing through a link", function()
    if not disturbed.works() then return pending "strace cannot trace here" end
    for _, kind in ipairs { "file", "folder", "inside" } do
      local path = ("%s/names-%s"):format(work, kind)
      save_once.save(kind, path, OLD)()
      local made, seen = 0, {}
      for _, point in ipairs(saves.calls_of(kind, path, 1)) do
        local line = point.line
        if point.call == "openat" and line:find("O_CREAT", 1, true) then
          made = made + 1
          assert.is_truthy(line:find("O_EXCL", 1, true) and line:find("O_NOFOLLOW", 1, true), line)
          local name = line:match '"([^"]*)"'
          assert.is_nil(seen[name], line)
          seen[name] = true
        end
        assert.is_false(point.call == "unlink" or point.call == "rmdir", line)
        if point.call == "unlinkat" then assert.is_nil(line:match "unlinkat%(AT_FDCWD", line) end
      end
      assert.is_true(made > 0, kind)
    end
  end)

  -- A power failure keeps synced data and, of the rest, anything. Follows the calls of a trace: `dirty` contains the
  -- files written, and the folders whose entries changed, since their last fsync. Returns how often a part of `path`
  -- became visible under its name.
  local function follow(trace, path, kind)
    local dirty, waiting, seen, inside = {}, {}, 0, false
    local function parent(p) return p:match "^(.*)/[^/]*$" end
    local around = kind == "inside" and path or parent(path)
    local function clean_below(p, line)
      for name in pairs(dirty) do
        if name == p or name:sub(1, #p + 1) == p .. "/" then
          error(("%s is not on the disk yet at: %s"):format(name, line), 0)
        end
      end
    end
    -- The paths in the text of a call, each relative to the folder whose descriptor precedes it.
    local function names_in(rest)
      local names, folder = {}, nil
      for open, text in rest:gmatch '([<"])([^>"]*)[>"]' do
        if open == "<" then folder = text
        else names[#names + 1] = text:sub(1, 1) == "/" and text or tostring(folder) .. "/" .. text end
      end
      return names[1], names[2]
    end
    local function did(call, rest, line)
      local at = rest:match "^%d+<(.-)>"
      local first, second = names_in(rest)
      if call:find "^p?writev?2?" or call == "pwrite64" or call == "ftruncate" then dirty[at] = true
      elseif call == "openat" and line:find "O_CREAT" then dirty[first], dirty[parent(first)] = true, true
      elseif call:find "^mkdir" then dirty[first], dirty[parent(first)] = true, true
      elseif call:find "^rename" then
        if second == path or kind == "inside" and second == path .. "/index.json" then
          clean_below(kind == "inside" and path or first, line)
          seen = seen + 1
        end
        dirty[second], dirty[first] = dirty[first], nil
        dirty[parent(first)], dirty[parent(second)] = true, true
      elseif call == "unlink" or call == "unlinkat" or call == "rmdir" then
        -- The old checkpoint is removed only when the name refers to the new one durably.
        local gone = first
        if seen > 0 and dirty[around] then error(("the new name is not on the disk yet at: %s"):format(line), 0) end
        dirty[gone] = nil
        if parent(gone) ~= parent(path) then dirty[parent(gone)] = true end
      elseif call == "fsync" or call == "fdatasync" then dirty[at] = nil
      end
    end
    for line in io.lines(trace) do
      inside = inside or line:find("/moonshard-save-begins", 1, true) ~= nil
      local pid, call, rest = line:match "^(%d+) +([%w_]+)%((.*)$"
      if inside and call and (rest:find(path, 1, true) or rest:find("<" .. parent(path) .. ">", 1, true)) then
        -- the sync completes in a later line
        if line:find "<unfinished" and call:find "sync" then waiting[pid] = { call, rest, line }
        elseif not line:find "= %-1" and not line:find "O_RDONLY" then did(call, rest, line) end
      elseif line:find "sync resumed.*= 0" then
        local sync = waiting[line:match "^%d+"]
        if sync then did(unpack(sync)) end
        waiting[line:match "^%d+"] = nil
      end
    end
    -- A checkpoint reported as saved stays saved.
    if kind == "inside" then dirty[parent(path)] = nil end
    if next(dirty) then error(next(dirty) .. " is not on the disk when the save is over", 0) end
    return seen
  end

  for _, case in ipairs { { "file", 1 }, { "folder", 1 }, { "inside", 1 }, { "large", 1 }, { "folder", 2 } } do
    local kind, world = case[1], case[2]
    it(("is on the disk before its name refers to it, and before the old one is removed: %s over %d rank%s"):format(kind, world,
      world > 1 and "s" or ""), function()
      if not disturbed.works() then return pending "strace cannot trace here" end
      local path, trace = ("%s/power-%s%d"):format(work, kind, world), work .. "/trace"
      save_once.save(kind, path, OLD)()
      local argv = { "strace", "-f", "-y", "-qq", "-o", trace, "-e", "trace=" .. table.concat(disturbed.CALLS, ",") }
      if kind == "inside" then for _, w in ipairs { "-e", "inject=renameat2:error=EINVAL" } do
        argv[#argv + 1] = w end end
      if world > 1 then for _, w in ipairs { "mpirun", "-n", "2" } do argv[#argv + 1] = w end end
      for _, w in ipairs { "luajit", process.root .. "/spec/support/save_once.lua", kind, path, tostring(NEW) } do
        argv[#argv + 1] = w
      end
      local child = process.start(argv, { stdout = work .. "/out", stderr = work .. "/out.err",
        env = process.mpirun_env { LD_PRELOAD = false } })
      assert.are.equal(0, child:wait(60) or child:stop(), process.read(work .. "/out.err"))
      assert.are.equal(1, follow(trace, path, kind))
      assert.are.equal(NEW, saves.value_of(kind, path))
    end)
  end
end)
