# SPDX-License-Identifier: MIT
# Debian packages, by `cmake --build build --target package`, into build/packages. They contain what has been built:
#   moonshard         to train: engine, transports, Lua modules, the command `moonshard`
#   libmoonshard-dev  to build C programs
#   moonshard-cuda    the CUDA plugin, if it has been built
set(CMAKE_SKIP_PACKAGE_ALL_DEPENDENCY ON)
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/packages)
set(CPACK_PACKAGE_NAME moonshard)
set(CPACK_PACKAGE_VENDOR "the Moonshard authors")
string(REPLACE - ~ CPACK_PACKAGE_VERSION ${MS_RELEASE})        # 1.1.0~dev: older than 1.1.0
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEB_COMPONENT_INSTALL ON)

set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_DEBIAN_MOONSHARD_PACKAGE_NAME moonshard)
set(CPACK_DEBIAN_MOONSHARD_PACKAGE_SECTION science)
set(CPACK_DEBIAN_MOONSHARD_PACKAGE_DEPENDS "luajit, lua-cjson, lua-argparse, lua-filesystem, openmpi-bin")
set(CPACK_DEBIAN_MOONSHARD_PACKAGE_CONTROL_EXTRA ${CMAKE_BINARY_DIR}/triggers)
file(WRITE ${CMAKE_BINARY_DIR}/triggers "activate-noawait ldconfig\n")
set(CPACK_COMPONENT_MOONSHARD_DESCRIPTION "training runtime in C and LuaJIT, sharded over MPI ranks
Moonshard trains neural networks from LuaJIT scripts, with parameters,
gradients and optimizer state sharded over MPI ranks, as PyTorch's fully_shard
and FSDP do, under the same names.")

set(CPACK_DEBIAN_DEV_PACKAGE_NAME libmoonshard-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_COMPONENT_DEV_DESCRIPTION "training runtime in C and LuaJIT, for C programs
The header, the pkg-config file and the library's name for the linker, with
which C programs embed Moonshard's engine.")

set(CPACK_DEBIAN_CUDA_PACKAGE_NAME moonshard-cuda)
set(CPACK_DEBIAN_CUDA_PACKAGE_SECTION contrib/science)
set(CPACK_DEBIAN_CUDA_PACKAGE_RECOMMENDS libcuda1)
set(CPACK_COMPONENT_CUDA_DESCRIPTION "training runtime in C and LuaJIT, on GPUs
The plugin with which Moonshard computes on NVIDIA GPUs. It needs NVIDIA's
driver.")

set(MS_SAME "moonshard (= ${CPACK_PACKAGE_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})")
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS ${MS_SAME})
set(CPACK_DEBIAN_CUDA_PACKAGE_DEPENDS ${MS_SAME})

set(CPACK_PROJECT_CONFIG_FILE ${CMAKE_SOURCE_DIR}/cmake/package_parts.cmake)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_SOURCE_DIR}/cmake/package_files.cmake)
set(CPACK_MS_SOURCE ${CMAKE_SOURCE_DIR})
set(CPACK_MS_CUDA ${CMAKE_BINARY_DIR}/libmoonshard_cuda.so)
include(CPack)
