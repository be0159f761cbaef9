# SPDX-License-Identifier: MIT
find_package(MPI COMPONENTS C)
if(MPI_C_FOUND)
  set(NEEDS MPI::MPI_C)
else()
  set(NEEDS MPI-NOTFOUND)
endif()
