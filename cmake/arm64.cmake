# SPDX-License-Identifier: MIT
# Toolchain of `scripts/setup --arm64`: Debian's cross compiler, with the libraries of the arm64 Debian in the folder
# MS_ARM64_ROOT.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER CMAKE_CXX_COMPILER-NOTFOUND)  # only the emulated GPU needs it, which is not built
set(CMAKE_SYSROOT ${MS_ARM64_ROOT})
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES MS_ARM64_ROOT)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
# The root's mpicc, which would tell these, is an arm64 program; pkg-config knows this machine's MPI.
set(ENV{PKG_CONFIG_LIBDIR} none)
set(MPI_SKIP_COMPILER_WRAPPER ON)
set(MPI_ASSUME_NO_BUILTIN_MPI ON)
set(MPI_C_LIB_NAMES mpi CACHE STRING "")
set(MPI_C_HEADER_DIR ${MS_ARM64_ROOT}/usr/lib/aarch64-linux-gnu/openmpi/include CACHE PATH "")
set(MPI_mpi_LIBRARY ${MS_ARM64_ROOT}/usr/lib/aarch64-linux-gnu/openmpi/lib/libmpi.so CACHE FILEPATH "")
