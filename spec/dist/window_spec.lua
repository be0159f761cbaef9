-- SPDX-License-Identifier: MIT
--- The slices in which a staged collective goes through the windows (runtime/comm/memory/window.h), for more members
--- than a spec can run.
local ffi = require "ffi"
local process = require "spec.support.process"

describe("a slice of a staged collective", function()
  local folder, slice

  lazy_setup(function()
    folder = process.temp_folder()
    process.write(folder .. "/slice.c", '#include "comm/memory/window.h"\n'
      .. "void slice(double *out, double window, int blocks, int members)\n"
      .. "{ ms_slice s = ms__slice((size_t)window, blocks, members); out[0] = (double)s.bytes; out[1] = s.blocks; }\n")
    assert.are.equal(0, os.execute(("cc -shared -fPIC -I%s/runtime -o %s/slice.so %s/slice.c"):format(process.root,
      folder, folder)))
    local library, out = ffi.load(folder .. "/slice.so"), ffi.new "double[2]"
    ffi.cdef "void slice(double *out, double window, int blocks, int members);"
    function slice(window, blocks, members)
      library.slice(out, window, blocks, members)
      return out[0], out[1]
    end
  end)
  lazy_teardown(function() process.remove_folder(folder) end)

  local WINDOW = 2 ^ 20

  it("fits in the window for every number of members and blocks, and moves something", function()
    for n = 1, 1024 do
      for _, case in ipairs { { n, n }, { n, 1 }, { 1, n } } do
        local blocks, members = case[1], case[2]
        local bytes, moved = slice(WINDOW, blocks, members)
        local fits = bytes >= 64 and bytes % 64 == 0 and moved >= 1 and moved <= blocks
          and bytes * moved * members <= WINDOW
        if not fits then error(("%d blocks of %d members: %d bytes of %d"):format(blocks, members, bytes, moved)) end
      end
    end
  end)

  it("has all blocks where they fit, as for reductions, and otherwise as many as do", function()
    assert.are.same({ 65536, 4 }, { slice(WINDOW, 4, 4) })
    assert.are.same({ 64, 128 }, { slice(WINDOW, 128, 128) })
    assert.are.same({ 64, 127 }, { slice(WINDOW, 129, 129) })
    assert.are.same({ 64, 16 }, { slice(WINDOW, 1024, 1024) })
    assert.are.same({ 1024, 1024 }, { slice(WINDOW, 1024, 1) })
  end)
end)
