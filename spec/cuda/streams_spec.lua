-- SPDX-License-Identifier: MIT
--- Order between streams: copies that overlap with computation, and which stream waits for which.
local ms = require "moonshard"
local F = require "moonshard.core.ffi"
local tensor = require "moonshard.tensor"
local ffi, lib = F.ffi, F.lib

local function copy(dst, src)
  assert.are.equal(0, tonumber(lib.ms_copy_async(tensor.id_of(dst), tensor.id_of(src))), ffi.string(lib.ms_error()))
end

for _, device in ipairs { "cpu", "cuda" } do
  describe("copies on the copy stream, from and to " .. device, function()
    local function it_there(name, fn)
      it(name, function()
        if device == "cuda" and not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
        ms.scope(fn)
      end)
    end

    it_there("copy the results of work queued before them, and not of later work", function()
      for round = 1, 20 do
        local x = ms.full({ 40000 }, round, { device = device })
        local host = ms.zeros(40000)
        for _ = 1, 10 do x:mul_(2) end
        copy(host, x)
        x:fill_(-1)                                             -- waits for the copy, which still reads
        assert.are.equal(round * 1024 * 40000, host:sum():item())
        assert.are.equal(-40000, x:sum():item())
      end
    end)

    it_there("are waited for by the next operator on the destination", function()
      for round = 1, 20 do
        local host = ms.full({ 40000 }, round)
        local x = ms.zeros(40000, { device = device })
        copy(x, host)
        local y = x + 1
        host:fill_(0)
        assert.are.equal((round + 1) * 40000, y:sum():item())
      end
    end)

    it_there("keep what they move alive after its last reference", function()
      local host = ms.zeros(40000)
      for round = 1, 20 do
        local x = ms.full({ 40000 }, round, { device = device })
        copy(host, x)
        x:release()
        local other = ms.full({ 40000 }, 99, { device = device })   -- must not get memory that the copy still reads
        assert.are.equal(round * 40000, host:sum():item())
        other:release()
      end
    end)

    it_there("run in order in a chain", function()
      local a, b, c = ms.full({ 30000 }, 3), ms.zeros(30000, { device = device }), ms.zeros(30000)
      copy(b, a)
      copy(c, b)
      copy(a, c)
      assert.are.equal(90000, a:sum():item())
    end)

    it_there("refuse another size, dtype, layout or device meta", function()
      local x = ms.zeros(4, 6, { device = device })
      for _, src in ipairs { ms.zeros(5), ms.zeros(4, 6, { dtype = "float64" }), ms.zeros(6, 4):t(),
        ms.zeros(4, 6, { device = "meta" }) } do
        assert.are_not.equal(0, tonumber(lib.ms_copy_async(tensor.id_of(x), tensor.id_of(src))))
        assert.matches("^copy_async: ", ffi.string(lib.ms_error()))
      end
    end)
  end)
end
