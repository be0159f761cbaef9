-- SPDX-License-Identifier: MIT
-- Lets `require "moonshard"` work from the source tree: `luajit -i -e 'require "moonshard"'` in its root.
local here = debug.getinfo(1, "S").source:match "^@(.*/)" or "./"
package.path = here .. "lua/?.lua;" .. here .. "lua/?/init.lua;" .. package.path
return dofile(here .. "lua/moonshard/init.lua")
