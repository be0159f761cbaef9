-- SPDX-License-Identifier: MIT
--- Loads the engine: libmoonshard.so and its cdef, which the build generates from runtime/moonshard.h. They are found
--- relative to this file: in build/ of the source tree, or where installed.lua says (`cmake --install` writes it).
--- MOONSHARD_LIB names another library, whose cdef is in the same folder.
local ffi = require "ffi"

-- Spec runners load modules again for every file, but C types and the engine may be loaded only once per process, so
-- Lua's registry keeps the first copy of this module.
local registry = debug.getregistry()
if registry["moonshard.core.ffi"] then return registry["moonshard.core.ffi"] end

local function stop(text)
  error("moonshard: " .. text, 0)
end

local function beside(path) return path:match "^(.*/)" or "./" end

-- Returns the path of the library and the folder of its cdef.
local function find()
  local env = os.getenv "MOONSHARD_LIB"
  if env and env ~= "" then return env, beside(env) end
  local here = debug.getinfo(1, "S").source:match "^@(.*/)" or "./"
  local installed = loadfile(here .. "../installed.lua")
  if installed then return here .. "../" .. installed(), here .. "../" end
  return here .. "../../../build/libmoonshard.so", here .. "../../../build/"
end

local path, folder = find()

-- The reason why the library cannot be used; begins with MOONSHARD_LIB if that variable chose the library.
local function because(text)
  return os.getenv "MOONSHARD_LIB" ~= path and text
    or ("MOONSHARD_LIB is '%s', expected the path of libmoonshard.so, with moonshard_cdef.h beside it: %s"):format(path, text)
end

local function read_cdef()
  local name = folder .. "moonshard_cdef.h"
  local file = io.open(name, "r")
  if not file then
    stop(because(("no %s: build the engine first (scripts/setup, or: cmake -S . -B build -G Ninja && ninja -C build)")
      :format(name)))
  end
  local text = file:read "*a"
  file:close()
  return text
end

if not pcall(ffi.typeof, "ms_id") then ffi.cdef(read_cdef()) end

-- Idle threads of oneDNN's libgomp spin, which takes cores from other processes: with two threads per rank and busy
-- processes on the machine a training step took 7 times as long. libgomp reads GOMP_SPINCOUNT when it is loaded.
ffi.cdef "int setenv(const char *, const char *, int);"
if not os.getenv "OMP_WAIT_POLICY" then ffi.C.setenv("GOMP_SPINCOUNT", "1000", 0) end

local loaded, lib = pcall(ffi.load, path)
if not loaded then stop(because(("cannot load the engine: %s"):format(tostring(lib)))) end
if lib.ms_version() ~= ffi.C.MS_VERSION then
  stop(because(("%s has interface version %d, its cdef has %d: build again"):format(path, lib.ms_version(),
    ffi.C.MS_VERSION)))
end
if lib.ms_init() ~= 0 then stop(ffi.string(lib.ms_error())) end

local args = ffi.new "ms_args"

---@class moonshard.ffi
---@field lib table      the engine's functions (runtime/moonshard.h)
---@field state table    the engine's ms_state, whose fields are read without a call
---@field args table     one ms_args shared by all operator calls: filled and read at once, never kept
local M = {
  ffi = ffi, lib = lib, path = path, folder = folder,
  state = lib.ms_get_state(),
  args = args, a_in = args["in"], a_out = args.out, a_i = args.i, a_f = args.f,
  info = ffi.new "ms_info",
  MAX_DIMS = ffi.C.MS_MAX_DIMS, MAX_IN = ffi.C.MS_MAX_IN,
}

--- The number of the operator with this name.
---@param name string  such as "matmul"
---@return integer  -1 if this build lacks it; a call of -1 fails
function M.op(name) return lib.ms_op_find(name) end

registry["moonshard.core.ffi"] = M
return M
