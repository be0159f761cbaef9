// SPDX-License-Identifier: MIT
// cuda/library.h -- finds CUDA's libraries, which are loaded at run time.
#ifndef MS_CUDA_LIBRARY_H
#define MS_CUDA_LIBRARY_H

#include <string>

// Opens a library by its name, else in the toolkit's folders and in those of Python's packages. cuda: the major version
// of the toolkit. Returns NULL if it is not found; *places then lists the folders that were searched, each in a line of
// its own, and the loader's last error.
void *ms__cuda_library(const char *name, int cuda, std::string *places);

#endif
