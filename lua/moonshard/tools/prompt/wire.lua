-- SPDX-License-Identifier: MIT
--- How the prompt and its ranks communicate: over local sockets with abstract names, so no file is left behind. Each
--- end accepts only processes of the same user. MPI is not used: messages must also reach a rank inside a collective.
local bit = require "bit"
local ffi = require "ffi"
require "moonshard.tools.prompt.line"                   -- declares moonshard_wait

-- Copies of globals that a session may overwrite.
local table, math, setmetatable, ipairs = table, math, setmetatable, ipairs
local tonumber, tostring, error = tonumber, tostring, error

ffi.cdef [[
typedef struct { unsigned short family; char path[108]; } moonshard_address;
typedef struct { int pid; unsigned uid, gid; } moonshard_owner;
int moonshard_socket(int, int, int) __asm__("socket");
int moonshard_bind(int, const moonshard_address *, unsigned) __asm__("bind");
int moonshard_listen(int, int) __asm__("listen");
int moonshard_accept(int, void *, void *, int) __asm__("accept4");
int moonshard_connect(int, const moonshard_address *, unsigned) __asm__("connect");
long moonshard_send(int, const char *, size_t, int) __asm__("send");
long moonshard_receive(int, char *, size_t, int) __asm__("recv");
int moonshard_close(int) __asm__("close");
char *moonshard_error_text(int) __asm__("strerror");
int moonshard_getsockopt(int, int, int, void *, unsigned *) __asm__("getsockopt");
unsigned moonshard_getuid(void) __asm__("getuid");
typedef struct { int fd; short events, revents; } moonshard_pollfd;
]]
local C = ffi.C

local M = {}

local STREAM, CLOEXEC = 1, 0x80000
local EINTR, EAGAIN = 4, 11

local function address(name)
  local a = ffi.new("moonshard_address", 1)             -- AF_UNIX; a name that begins with byte 0 is abstract
  if #name > 100 then error(("a socket's name has %d bytes, expected at most 100: %s"):format(#name, name), 0) end
  ffi.copy(a.path + 1, name, #name)
  return a, 3 + #name
end

--- The ids of the process and the user at the other end; nil if the kernel does not say.
local function peer(fd)
  local owner, size = ffi.new "moonshard_owner", ffi.new("unsigned[1]", 12)
  if C.moonshard_getsockopt(fd, 1, 17, owner, size) ~= 0 then return nil end                -- SOL_SOCKET, SO_PEERCRED
  return owner.pid, owner.uid
end

---@class Channel
---@field fd integer  descriptor; -1: closed by this end
---@field pid integer  the process at the other end
---@field closed boolean?  true: one of the ends has closed it
---@field left string  bytes that have arrived and that `next` has not returned yet
local Channel = {}
Channel.__index = Channel

local function channel(fd, pid) return setmetatable({ fd = fd, pid = pid, left = "" }, Channel) end

--- A name that no other prompt has.
---@return string
function M.fresh_name()
  local random = assert(io.open("/dev/urandom", "rb"))
  local bytes = random:read(12)
  random:close()
  return "moonshard-prompt-" .. bytes:gsub(".", function(c) return ("%02x"):format(c:byte()) end)
end

--- Listens under a name. Returns nil if the name is taken, or listening fails for another reason.
---@param name string
---@return integer? fd
function M.listen(name)
  local fd = C.moonshard_socket(1, bit.bor(STREAM, CLOEXEC), 0)
  if fd < 0 then error("a socket cannot be made: " .. ffi.string(C.moonshard_error_text(ffi.errno())), 0) end
  if C.moonshard_bind(fd, address(name)) ~= 0 or C.moonshard_listen(fd, 1024) ~= 0 then
    C.moonshard_close(fd)
    return nil
  end
  return fd
end

--- Accepts a connection; nil if there is none, or one of another user.
---@param fd integer
---@return Channel?
function M.accept(fd)
  local other = C.moonshard_accept(fd, nil, nil, CLOEXEC)
  if other < 0 then return nil end
  local pid, uid = peer(other)
  if uid == C.moonshard_getuid() then return channel(other, pid) end
  C.moonshard_close(other)
end

--- Connects to a name; nil if that fails, or a process of another user listens there.
---@param name string
---@return Channel?
function M.connect(name)
  local fd = C.moonshard_socket(1, bit.bor(STREAM, CLOEXEC), 0)
  if fd < 0 then return nil end
  if C.moonshard_connect(fd, address(name)) == 0 then
    local pid, uid = peer(fd)
    if uid == C.moonshard_getuid() then return channel(fd, pid) end
  end
  C.moonshard_close(fd)
end

--- Waits until a descriptor has input or is closed. Returns the set of such descriptors; it is empty after a timeout or
--- a signal.
---@param fds integer[]
---@param ms integer  -1: without limit
---@return table<integer, boolean>
function M.poll(fds, ms)
  local list, ready = ffi.new("moonshard_pollfd[?]", math.max(1, #fds)), {}
  for k, fd in ipairs(fds) do list[k - 1].fd, list[k - 1].events = fd, 1 end
  if C.moonshard_wait(list, #fds, ms) > 0 then
    for k, fd in ipairs(fds) do
      if list[k - 1].revents ~= 0 then ready[fd] = true end
    end
  end
  return ready
end

local chunk = ffi.new "char[65536]"

--- Reads what has arrived, without waiting. Returns nil at the end of the stream or after an error, "" if nothing has
--- arrived.
---@return string?
function Channel:read()
  if self.closed then return nil end
  local n = tonumber(C.moonshard_receive(self.fd, chunk, 65536, 0x40))                       -- MSG_DONTWAIT
  if n > 0 then return ffi.string(chunk, n) end
  if n < 0 and (ffi.errno() == EINTR or ffi.errno() == EAGAIN) then return "" end
  self.closed = true
end

--- Sends a message of several strings or numbers. Returns false if the other end is closed.
---@return boolean
function Channel:send(...)
  local parts = { ... }
  for k, v in ipairs(parts) do
    v = tostring(v)
    parts[k] = #v .. ":" .. v
  end
  local text = table.concat(parts)
  text = #text .. ":" .. text
  local at = 0
  while at < #text and not self.closed do
    local n = tonumber(C.moonshard_send(self.fd, ffi.cast("const char *", text) + at, #text - at, 0x4000))    -- MSG_NOSIGNAL
    if n >= 0 then at = at + n
    elseif ffi.errno() ~= EINTR then self.closed = true end
  end
  return not self.closed
end

--- The next whole message that has arrived, as a list of strings; nil: none.
---@return string[]?
function Channel:next()
  local size, at = self.left:match "^(%d+):()"
  if not size or #self.left < at - 1 + tonumber(size) then return nil end
  local body, fields, k = self.left:sub(at, at + size - 1), {}, 1
  self.left = self.left:sub(at + size)
  while k <= #body do
    local n, from = body:match("^(%d+):()", k)
    if not n then break end
    fields[#fields + 1] = body:sub(from, from + n - 1)
    k = from + n
  end
  return fields
end

--- Reads what has arrived. Afterwards `next` returns whole messages. Returns false at the end of the stream.
function Channel:fill()
  local text = self:read()
  if text then self.left = self.left .. text end
  return text ~= nil
end

--- Waits for a message; nil at the end of the stream. Signals do not end the wait.
---@return string[]?
function Channel:wait()
  while true do
    local message = self:next()
    if message then return message end
    M.poll({ self.fd }, -1)
    if not self:fill() then return nil end
  end
end

function Channel:close()
  if self.fd >= 0 then C.moonshard_close(self.fd) end
  self.fd, self.closed = -1, true
end

return M
