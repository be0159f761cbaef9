-- SPDX-License-Identifier: MIT
--- The board of a gang of ranks: a small file that the ranks and the busted process all map, in which each rank records
--- its progress. It does not use the engine's communication: a spec must not depend on what it tests, a test may leave
--- MPI in any state, and a file also shows which ranks have ended.
local ffi = require "ffi"

ffi.cdef [[
typedef struct {
    int32_t pid;
    int32_t begun, done, failed;    // the latest test that the rank has begun, finished, failed in; 0: none
    double  since;                  // when the test `begun` began
} spec_board_rank;
// parent: busted's process; stop: busted sets it to 1 to end the gang
typedef struct { int32_t parent, stop; spec_board_rank rank[64]; } spec_board;
int   spec_open(const char *, int, ...) __asm__("open");
int   spec_close(int) __asm__("close");
int   spec_ftruncate(int, long) __asm__("ftruncate");
void *spec_mmap(void *, size_t, int, int, int, long) __asm__("mmap");
int   spec_munmap(void *, size_t) __asm__("munmap");
]]
local C = ffi.C

local board = { max = 64 }

--- Maps the board in `path`; creates it if needed.
function board.open(path)
  local fd = C.spec_open(path, 0x42, ffi.cast("int", 0x180))        -- O_RDWR | O_CREAT, 0600
  if fd < 0 then error(("board: cannot open '%s'"):format(path)) end
  local bytes = ffi.sizeof "spec_board"
  C.spec_ftruncate(fd, bytes)
  local p = C.spec_mmap(nil, bytes, 3, 1, fd, 0)                    -- PROT_READ | PROT_WRITE, MAP_SHARED
  C.spec_close(fd)
  if ffi.cast("intptr_t", p) == -1 then error(("board: cannot map '%s'"):format(path)) end
  return ffi.cast("spec_board *", p)
end

function board.close(b)
  C.spec_munmap(b, ffi.sizeof "spec_board")
end

return board
