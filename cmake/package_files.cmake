# SPDX-License-Identifier: MIT
# Run by cpack when the files of all packages are in place: adds the licence and the changelogs that Debian's policy
# requires in a package, and moves files that Debian keeps in other folders.
string(TIMESTAMP NOW "%a, %d %b %Y %H:%M:%S +0000" UTC)        # the time in SOURCE_DATE_EPOCH, if it is set
string(TOUPPER "${CPACK_COMPONENTS_ALL}" PARTS)
foreach(PART ${PARTS})
  set(PACKAGE ${CPACK_DEBIAN_${PART}_PACKAGE_NAME})
  string(TOLOWER ${PART} FOLDER)
  set(SHARE ${CPACK_TEMPORARY_DIRECTORY}/${FOLDER}/usr/share)
  set(DOC ${SHARE}/doc/${PACKAGE})
  file(READ ${CPACK_MS_SOURCE}/LICENSE COPYRIGHT)
  if(PART STREQUAL CUDA)
    string(APPEND COPYRIGHT "\nlibmoonshard_cuda.so contains NVIDIA's CUDA runtime, which is under the NVIDIA CUDA Toolkit EULA.\n")
  endif()
  file(WRITE ${DOC}/copyright "${COPYRIGHT}")
  file(WRITE ${DOC}/changelog.Debian
"${PACKAGE} (${CPACK_PACKAGE_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE}) unstable; urgency=low

  * Package of this version, built from its source tree.

 -- ${CPACK_DEBIAN_PACKAGE_MAINTAINER}  ${NOW}
")
  configure_file(${CPACK_MS_SOURCE}/CHANGELOG.md ${DOC}/changelog COPYONLY)
  execute_process(COMMAND gzip -9n ${DOC}/changelog ${DOC}/changelog.Debian COMMAND_ERROR_IS_FATAL ANY)
endforeach()
set(SHARE ${CPACK_TEMPORARY_DIRECTORY}/moonshard/usr/share)
file(REMOVE ${SHARE}/doc/moonshard/LICENSE ${SHARE}/doc/moonshard/CHANGELOG.md)
file(RENAME ${SHARE}/zsh/site-functions ${SHARE}/zsh/vendor-completions)
