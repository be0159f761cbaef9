-- SPDX-License-Identifier: MIT
--- Worker processes: started by posix_spawn (a process with MPI's and the engine's threads must not fork), connected by
--- a socket for short messages and by blocks of shared memory for batches. The blocks are anonymous (memfd_create), so
--- no file is left behind. A worker is killed by the kernel when its parent ends.
local bit = require "bit"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local lfs = require "lfs"
local ffi = engine.ffi

ffi.cdef [[
typedef struct { int32_t kind, slot; double epoch, number, seed, count; } moonshard_message;
typedef struct { int pid, fd; } moonshard_worker;
typedef struct { int fd; short events, revents; } moonshard_worker_poll;
typedef struct { char opaque[512]; } moonshard_worker_actions;
int moonshard_worker_pair(int, int, int, int *) __asm__("socketpair");
int moonshard_worker_memory(const char *, unsigned) __asm__("memfd_create");
int moonshard_worker_resize(int, int64_t) __asm__("ftruncate");
int64_t moonshard_worker_seek(int, int64_t, int) __asm__("lseek");
void *moonshard_worker_map(void *, size_t, int, int, int, int64_t) __asm__("mmap");
int moonshard_worker_unmap(void *, size_t) __asm__("munmap");
long moonshard_worker_send(int, const void *, size_t, int) __asm__("send");
long moonshard_worker_receive(int, void *, size_t, int) __asm__("recv");
int moonshard_worker_wait(moonshard_worker_poll *, unsigned long, int) __asm__("poll");
int moonshard_worker_close(int) __asm__("close");
int moonshard_worker_kill(int, int) __asm__("kill");
int moonshard_worker_reap(int, int *, int) __asm__("waitpid");
int moonshard_worker_fcntl(int, int, ...) __asm__("fcntl");
int moonshard_worker_prctl(int, unsigned long, unsigned long, unsigned long, unsigned long) __asm__("prctl");
int moonshard_worker_parent(void) __asm__("getppid");
int moonshard_worker_self(void) __asm__("getpid");
void (*moonshard_worker_signal(int, void (*)(int)))(int) __asm__("signal");
int moonshard_worker_actions_init(moonshard_worker_actions *) __asm__("posix_spawn_file_actions_init");
int moonshard_worker_actions_free(moonshard_worker_actions *) __asm__("posix_spawn_file_actions_destroy");
int moonshard_worker_actions_dup(moonshard_worker_actions *, int, int) __asm__("posix_spawn_file_actions_adddup2");
int moonshard_worker_actions_open(moonshard_worker_actions *, int, const char *, int, unsigned)
  __asm__("posix_spawn_file_actions_addopen");
int moonshard_worker_spawn(int *, const char *, const moonshard_worker_actions *, const void *, const char *const *,
  char *const *) __asm__("posix_spawnp");
char *moonshard_worker_text(int) __asm__("strerror");
extern char **moonshard_worker_environ __asm__("environ");
]]
local C = ffi.C

local M = { ASK = 1, BATCH = 2, FAILED = 3, NO_BATCH = 4, SOCKET = 3, SETUP = 4, SLOTS = 5, HEAD = 64 }

local CLOEXEC, NOSIGNAL, EINTR = 0x80000, 0x4000, 4

local function reason() return ffi.string(C.moonshard_worker_text(ffi.errno())) end

-- ---- shared memory ---------------------------------------------------------------------------------------

---@class Block
---@field fd integer
---@field data ffi.cdata*?  char *; nil: nothing is mapped
---@field size integer  bytes mapped
local Block = {}
Block.__index = Block

-- Maps a whole block: either process may have made it larger.
local function map(self)
  local size = tonumber(C.moonshard_worker_seek(self.fd, 0, 2))                 -- SEEK_END
  local p = C.moonshard_worker_map(nil, size, 3, 1, self.fd, 0)                 -- read and write, shared
  if ffi.cast("intptr_t", p) == -1 then
    errors.raise("DataLoader: cannot map %d bytes of shared memory: %s", size, reason())
  end
  self.data = ffi.gc(ffi.cast("char *", p), function(data) C.moonshard_worker_unmap(data, size) end)
  self.size = size
end

local function unmap(self)
  local data, size = self.data, self.size
  self.data, self.size = nil, 0
  if data ~= nil then C.moonshard_worker_unmap(ffi.gc(data, nil), size) end
end

--- Makes a block, or takes the one of an open descriptor.
---@param fd? integer  the descriptor; nil: makes a block
---@return Block
function M.block(fd)
  if not fd then
    local low = C.moonshard_worker_memory("moonshard", 1)                       -- MFD_CLOEXEC
    if low < 0 then errors.raise("DataLoader: cannot make shared memory: %s", reason()) end
    -- A high number does not collide with the descriptors that a worker gets.
    fd = C.moonshard_worker_fcntl(low, 1030, ffi.new("int", 256))              -- F_DUPFD_CLOEXEC
    C.moonshard_worker_close(low)
    if fd < 0 then errors.raise("DataLoader: cannot make shared memory: %s", reason()) end
  end
  return setmetatable({ fd = fd, size = 0 }, Block)
end

--- Makes the block at least `size` bytes large, with room to grow, and maps it.
function Block:grow(size)
  if size <= self.size then return end
  unmap(self)
  -- Never makes it smaller: the other process has it mapped.
  if tonumber(C.moonshard_worker_seek(self.fd, 0, 2)) < size then
    size = math.ceil(size * 1.25 / 65536) * 65536
    if C.moonshard_worker_resize(self.fd, size) ~= 0 then
      errors.raise("DataLoader: cannot make %d bytes of shared memory: %s", size, reason())
    end
  end
  map(self)
end

--- Maps the block again if the other process has made it larger.
function Block:follow(size)
  if size > self.size then
    unmap(self)
    map(self)
  end
end

function Block:close()
  unmap(self)
  if self.fd >= 0 then C.moonshard_worker_close(self.fd) end
  self.fd = -1
end

-- ---- messages --------------------------------------------------------------------------------------------

local size_of_message = ffi.sizeof "moonshard_message"

--- Sends a message. Returns false if that is impossible, as when the other process has ended.
function M.send(fd, message)
  local at = ffi.cast("const char *", message)
  local left = size_of_message
  while left > 0 do
    local n = tonumber(C.moonshard_worker_send(fd, at, left, NOSIGNAL))
    if n < 0 and ffi.errno() ~= EINTR then return false end
    if n > 0 then at, left = at + n, left - n end
  end
  return true
end

--- Waits for a message and receives it. Returns false if the stream has ended or cannot be read.
function M.receive(fd, message)
  local at, left = ffi.cast("char *", message), size_of_message
  while left > 0 do
    local n = tonumber(C.moonshard_worker_receive(fd, at, left, 0))
    if n == 0 or n < 0 and ffi.errno() ~= EINTR then return false end
    if n > 0 then at, left = at + n, left - n end
  end
  return true
end

local one = ffi.new "moonshard_worker_poll[1]"
--- Waits until a descriptor has input or its stream has ended. Returns false after a signal or when the time is over.
---@param fd integer
---@param ms integer  -1: without limit
function M.wait(fd, ms)
  one[0].fd, one[0].events = fd, 1
  return C.moonshard_worker_wait(one, 1, ms) > 0
end
-- Not compiled: compiled code does not call LuaJIT's hook, which reports Ctrl-C.
jit.off(M.wait)

-- ---- processes -------------------------------------------------------------------------------------------

-- Kills a worker at once: it has nothing to finish.
local function finish(w)
  if w.fd >= 0 then C.moonshard_worker_close(w.fd) end
  if w.pid > 0 then
    C.moonshard_worker_kill(w.pid, 9)
    while C.moonshard_worker_reap(w.pid, nil, 0) < 0 and ffi.errno() == EINTR do end
  end
  w.fd, w.pid = -1, 0
end
M.finish = finish

-- The interpreter to start: that of this process. In a bundle, whose interpreter runs under a loader of its own, and in
-- a C program, which embeds one, the first luajit in PATH.
local function program()
  local exe = lfs.symlinkattributes("/proc/self/exe", "target") or ""
  return exe:find "luajit[^/]*$" and exe or "luajit"
end

local script = debug.getinfo(1, "S").source:match "^@(.*/)" .. "worker.lua"

--- Starts a worker.
---@param setup Block  the packed arguments of the worker
---@param bytes integer  their size
---@param slots Block[]  for its batches
---@return ffi.cdata* worker  pid, and fd of its socket; ended when it is collected
function M.start(setup, bytes, slots)
  local pair = ffi.new "int[2]"
  if C.moonshard_worker_pair(1, bit.bor(1, CLOEXEC), 0, pair) ~= 0 then        -- AF_UNIX, SOCK_STREAM
    errors.raise("DataLoader: cannot start a worker: %s", reason())
  end
  local there = C.moonshard_worker_fcntl(pair[1], 1030, ffi.new("int", 256))
  C.moonshard_worker_close(pair[1])
  local w, actions = ffi.gc(ffi.new "moonshard_worker", finish), ffi.new "moonshard_worker_actions"
  w.fd = pair[0]
  C.moonshard_worker_actions_init(actions)
  C.moonshard_worker_actions_open(actions, 0, "/dev/null", 0, 0)
  C.moonshard_worker_actions_dup(actions, there, M.SOCKET)
  C.moonshard_worker_actions_dup(actions, setup.fd, M.SETUP)
  for k, slot in ipairs(slots) do C.moonshard_worker_actions_dup(actions, slot.fd, M.SLOTS + k - 1) end
  local words = { program(), script, tostring(#slots), ("%d"):format(bytes), tostring(C.moonshard_worker_self()),
    package.path, package.cpath }
  local argv = ffi.new("const char *[?]", #words + 1)
  for k, text in ipairs(words) do argv[k - 1] = text end
  local pid = ffi.new "int[1]"
  local failed = C.moonshard_worker_spawn(pid, words[1], actions, nil, argv, C.moonshard_worker_environ)
  C.moonshard_worker_actions_free(actions)
  C.moonshard_worker_close(there)
  if failed ~= 0 then
    errors.raise("DataLoader: cannot start a worker ('%s'): %s", words[1], ffi.string(C.moonshard_worker_text(failed)))
  end
  w.pid = pid[0]
  return w
end

--- How a worker ended: "was killed by signal 9", "ended with status 1". To be called when its stream has ended.
function M.ending(w)
  local status = ffi.new "int[1]"
  while C.moonshard_worker_reap(w.pid, status, 0) < 0 and ffi.errno() == EINTR do end
  w.pid = 0
  local signal = bit.band(status[0], 127)
  if signal ~= 0 then return ("was killed by signal %d"):format(signal) end
  return ("ended with status %d"):format(bit.band(bit.rshift(status[0], 8), 255))
end

--- To be called in a worker: makes it end with its parent and ignore Ctrl-C, which the parent handles. Returns false if
--- the parent has already ended.
function M.follow_parent(parent)
  C.moonshard_worker_prctl(1, 9, 0, 0, 0)                                       -- PR_SET_PDEATHSIG, SIGKILL
  C.moonshard_worker_signal(2, ffi.cast("void (*)(int)", 1))                    -- SIGINT, SIG_IGN
  return C.moonshard_worker_parent() == parent
end

return M
