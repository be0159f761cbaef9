-- SPDX-License-Identifier: MIT
--- Runs before every busted run (named in .busted). Makes `require "moonshard"` work from the source tree, undoes
--- busted's changes to LuaJIT's ffi, and shares the spec files with runs beside it. A spec that calls os.exit fails; a
--- run without tests fails unless it shares its files with others.
local ffi = require "ffi"
local busted = require "busted"
local lfs = require "lfs"

local source = debug.getinfo(1, "S").source:sub(2)
if source:sub(1, 1) ~= "/" then source = lfs.currentdir() .. "/" .. source end
local root = source:gsub("/%./", "/"):match "^(.*)/spec/support/helper%.lua$"
package.path = ("%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(root, root, root, package.path)

-- Specs of device "cuda" run on the emulated GPU unless MOONSHARD_CUDA is set (scripts/gpu_check sets `real`).
ffi.cdef "int setenv(const char *, const char *, int); int unsetenv(const char *);"
ffi.C.setenv("MOONSHARD_CUDA", "emulated", 0)

-- busted memoizes ffi.typeof by its first argument, so "$ *" would return the type of another "$ *". cdef and metatype
-- stay memoized, because reloaded files repeat their declarations.
local function unpatched(patched)
  for i = 1, 10 do
    local name, value = debug.getupvalue(patched, i)
    if name == "original" then return value end
    if not name then return patched end
  end
end
ffi.typeof = unpatched(ffi.typeof)

-- busted unloads the modules that a spec file loaded, but an engine cannot be loaded twice: moonshard's modules are
-- loaded once. Specs and the modules of spec/support are reloaded, except ranks, which subscribes to busted's events.
local kept = {}
table.insert(package.loaders, 2, function(name)
  if not (name == "moonshard" or name:find "^moonshard%." or name == "spec.support.ranks") then return nil end
  if kept[name] then
    return function() return kept[name] end
  end
  local path, tried = package.searchpath(name, package.path)
  if not path then return tried end
  local chunk, err = loadfile(path)
  if not chunk then error(err, 0) end
  return function(...)
    local value = chunk(...)
    if value == nil then value = package.loaded[name] or true end
    kept[name] = value
    return value
  end
end)

-- Of several simultaneous runs of busted, one may find no file left and run no test: scripts/test counts all tests.
local lanes = os.getenv "MOONSHARD_SPEC_LANES"
if lanes then
  ffi.C.unsetenv "MOONSHARD_SPEC_LANES"        -- runs of busted that specs start have files of their own
  require "spec.support.lane"(lanes)
end

local exit, tests, failed = os.exit, 0, false
os.exit = function(code)                                          -- luacheck: ignore
  error(("os.exit(%s) in a spec would end the whole run without a report"):format(tostring(code)), 2)
end
busted.subscribe({ "test", "end" }, function() tests = tests + 1 return nil, true end)
busted.subscribe({ "suite", "end" }, function()
  if tests == 0 and not lanes then
    busted.publish({ "error" }, { descriptor = "suite", name = "suite" }, nil, "no test ran", {})
  end
  return nil, true
end, { priority = 2 })
for _, kind in ipairs { "error", "failure" } do
  busted.subscribe({ kind }, function() failed = true return nil, true end, { priority = 1 })
end
-- Ends a failed run here, because busted would end it by error(nil), which prints "luajit: nil".
busted.subscribe({ "exit" }, function()
  os.exit = exit                                                  -- luacheck: ignore
  io.stdout:flush()
  if failed then exit(1, true) end
  return nil, true
end)

if lfs.attributes(root .. "/lua/moonshard/init.lua") then
  require "moonshard"
  -- A loop over ms.steps that an error has ended leaves its scopes open, and they would own the next test's tensors.
  local close_all_left = require("moonshard.tensor.scope").close_all_left
  busted.subscribe({ "test", "end" }, function() close_all_left() return nil, true end)
end
if lfs.attributes(root .. "/spec/support/ranks.lua") then
  require "spec.support.ranks"
end

-- With MOONSHARD_PTX_LAUNCHED the file of launches names the tests, too (spec/support/cuda/ptx/mutants.lua).
local launched = os.getenv "MOONSHARD_PTX_LAUNCHED"
if launched then
  local names = {}
  busted.subscribe({ "describe", "start" }, function(element) names[#names + 1] = element.name return nil, true end)
  busted.subscribe({ "describe", "end" }, function() names[#names] = nil return nil, true end)
  busted.subscribe({ "test", "start" }, function(element)
    local f = assert(io.open(launched, "a"))
    f:write(("# %s %s\n"):format(table.concat(names, " "), element.name))
    f:close()
    return nil, true
  end)
end
