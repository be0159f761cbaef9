-- SPDX-License-Identifier: MIT
-- In the root of the source tree: luarocks --lua-version 5.1 make scripts/packaging/moonshard-1.1.0-1.rockspec
-- The version is that of CMakeLists.txt.
rockspec_format = "3.0"
package = "moonshard"
version = "1.1.0-1"
source = { url = "." }          -- not fetched: `luarocks make` uses the source tree at hand
description = {
  summary = "Train neural networks from LuaJIT, sharded over MPI ranks.",
  detailed = "A training runtime: a C11 engine with tensors, autograd, sharded modules, collectives and optimizers, and a LuaJIT front end under PyTorch's names.",
  license = "MIT",
}
supported_platforms = { "linux" }
dependencies = { "lua == 5.1", "lua-cjson", "luafilesystem", "argparse" }
build = {
  type = "command",
  build_command = "scripts/setup --no-install --engine",
  -- LuaRocks moves lua/ and lib/ to share/lua/5.1 and lib/lua/5.1 of its tree, beside bin/.
  install_command = [[
    cmake --install build --component moonshard --prefix "$(PREFIX)" &&
    mv "$(PREFIX)/share/lua/5.1/moonshard" "$(LUADIR)/" &&
    sed -i 's#".*/#"../../../../lib/lua/5.1/#' "$(LUADIR)/moonshard/installed.lua"]],
}
