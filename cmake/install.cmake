# SPDX-License-Identifier: MIT
# Installation: `cmake --install build [--prefix DIR]`, and the target `uninstall`. The parts are the Debian packages of
# package.cmake:
#   moonshard  engine, transports, Lua modules, the command `moonshard` with its manual page and completion
#   dev        what C programs need to build with the engine
#   cuda       the CUDA plugin
# Lua modules are installed where a plain luajit looks under /usr and /usr/local. Paths between installed files are
# relative, so the prefix can be moved.
set(MS_LUADIR ${CMAKE_INSTALL_DATADIR}/lua/5.1)
set(MS_PLUGINDIR ${CMAKE_INSTALL_LIBDIR}/moonshard)            # runtime/base/plugin.c looks there
set(MS_COMPLETIONS_BASH ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
set(MS_COMPLETIONS_ZSH ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
set(MS_COMPLETIONS_FISH ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)

# Records the folders that the installation will make. The target `uninstall` removes those of them that are empty.
set(MS_FOLDERS ${CMAKE_INSTALL_BINDIR} ${CMAKE_INSTALL_LIBDIR}/pkgconfig ${MS_PLUGINDIR} ${CMAKE_INSTALL_INCLUDEDIR}
  ${MS_LUADIR} ${CMAKE_INSTALL_MANDIR}/man1 ${CMAKE_INSTALL_DOCDIR} ${MS_COMPLETIONS_BASH} ${MS_COMPLETIONS_ZSH}
  ${MS_COMPLETIONS_FISH})
install(CODE "
  set(folders \"\")
  foreach(folder ${MS_FOLDERS})
    if(NOT IS_ABSOLUTE \${folder})
      set(folder \${CMAKE_INSTALL_PREFIX}/\${folder})
    endif()
    while(NOT EXISTS \$ENV{DESTDIR}\${folder} AND NOT folder MATCHES \"^/?$\")
      list(APPEND folders \${folder})
      get_filename_component(folder \${folder} DIRECTORY)
    endwhile()
  endforeach()
  list(JOIN folders \"\\n\" folders)
  file(APPEND ${CMAKE_BINARY_DIR}/install_folders.txt \"\${folders}\\n\")")
add_custom_target(uninstall VERBATIM
  COMMAND ${CMAKE_COMMAND} -D BUILD=${CMAKE_BINARY_DIR} -P ${CMAKE_SOURCE_DIR}/cmake/uninstall.cmake)

# Installed folders are readable for all users, whatever the umask.
set(CMAKE_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
  WORLD_READ WORLD_EXECUTE)
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME moonshard)

# ---- the engine ----
set_target_properties(moonshard PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
install(TARGETS moonshard LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_COMPONENT dev)
install(TARGETS moonshard_mpirun ${TRANSPORTS} LIBRARY DESTINATION ${MS_PLUGINDIR})
if(TARGET moonshard_cuda)                           # optional: scripts/train and `setup --engine` do not build it
  install(TARGETS moonshard_cuda LIBRARY DESTINATION ${MS_PLUGINDIR} COMPONENT cuda OPTIONAL)
endif()

# ---- C programs ----
install(FILES runtime/moonshard.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev)
file(RELATIVE_PATH MS_PREFIX_FROM_PC /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
file(WRITE ${CMAKE_BINARY_DIR}/moonshard.pc
"prefix=\${pcfiledir}/${MS_PREFIX_FROM_PC}
libdir=\${prefix}/${CMAKE_INSTALL_LIBDIR}
includedir=\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}

Name: moonshard
Description: training runtime: tensors, autograd, sharded modules, collectives
Version: ${PROJECT_VERSION}
Libs: -L\${libdir} -lmoonshard
Cflags: -I\${includedir}
")
install(FILES ${CMAKE_BINARY_DIR}/moonshard.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)

# ---- Lua ----
install(DIRECTORY lua/moonshard DESTINATION ${MS_LUADIR} FILES_MATCHING PATTERN "*.lua" PATTERN "*.html")
file(RELATIVE_PATH MS_LIB_FROM_LUA /${MS_LUADIR}/moonshard
  /${CMAKE_INSTALL_LIBDIR}/libmoonshard.so.${PROJECT_VERSION_MAJOR})
file(WRITE ${CMAKE_BINARY_DIR}/installed.lua "return \"${MS_LIB_FROM_LUA}\"\n")
install(FILES ${CMAKE_BINARY_DIR}/moonshard_cdef.h ${CMAKE_BINARY_DIR}/installed.lua
  DESTINATION ${MS_LUADIR}/moonshard)

# ---- the command `moonshard` ----
install(PROGRAMS scripts/moonshard DESTINATION ${CMAKE_INSTALL_BINDIR})
install(PROGRAMS scripts/train scripts/train.lua scripts/finetune scripts/finetune.lua scripts/generate.lua scripts/repl
  scripts/compare scripts/doctor
  DESTINATION ${MS_LUADIR}/moonshard/scripts)
install(FILES scripts/support/doctor.lua scripts/support/usage.lua DESTINATION ${MS_LUADIR}/moonshard/scripts/support)
install(FILES scripts/packaging/completion.bash DESTINATION ${MS_COMPLETIONS_BASH} RENAME moonshard)
install(FILES scripts/packaging/completion.zsh DESTINATION ${MS_COMPLETIONS_ZSH} RENAME _moonshard)
install(FILES scripts/packaging/completion.fish DESTINATION ${MS_COMPLETIONS_FISH} RENAME moonshard.fish)
# The manual page is made of the installed command's usage texts. Without LuaJIT it is left out.
set(MS_MANUAL ${CMAKE_BINARY_DIR}/moonshard.1.gz)
install(CODE "
  file(REMOVE ${MS_MANUAL})
  execute_process(COMMAND luajit ${CMAKE_SOURCE_DIR}/scripts/support/usage.lua manual
    \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}/moonshard ${MS_RELEASE}
    COMMAND gzip -9n OUTPUT_FILE ${MS_MANUAL} RESULTS_VARIABLE failed)
  if(NOT failed STREQUAL \"0;0\")
    message(WARNING \"install: no manual page: luajit and gzip ended with \${failed}\")
    file(REMOVE ${MS_MANUAL})
  endif()")
install(FILES ${MS_MANUAL} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 OPTIONAL)

# ---- documents ----
install(FILES README.md CHANGELOG.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs scripts/examples DESTINATION ${CMAKE_INSTALL_DOCDIR})
