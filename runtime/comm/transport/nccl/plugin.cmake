# SPDX-License-Identifier: MIT
# NCCL itself is loaded at run time. Ranks meet over MPI, so without that plugin this one would be of no use.
find_package(MPI COMPONENTS C)
if(MPI_C_FOUND)
  set(NEEDS ${CMAKE_DL_LIBS})
else()
  set(NEEDS MPI-NOTFOUND)
endif()
