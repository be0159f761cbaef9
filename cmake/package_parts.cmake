# SPDX-License-Identifier: MIT
# Read by cpack before it makes packages: sets the list of packages, and their maintainer. The maintainer is the person
# who builds them, named by DEBFULLNAME and DEBEMAIL as for Debian's own tools.
if("$ENV{DEBEMAIL}" STREQUAL "")
  message(WARNING "package: DEBEMAIL is not set, so the packages' maintainer has no address")
  set(ENV{DEBEMAIL} nobody@localhost)
endif()
if("$ENV{DEBFULLNAME}" STREQUAL "")
  set(ENV{DEBFULLNAME} Moonshard)
endif()
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "$ENV{DEBFULLNAME} <$ENV{DEBEMAIL}>")
set(CPACK_COMPONENTS_ALL moonshard dev)
if(EXISTS ${CPACK_MS_CUDA})
  list(APPEND CPACK_COMPONENTS_ALL cuda)
endif()
