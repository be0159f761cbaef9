// SPDX-License-Identifier: MIT
// io/direct.h -- large files past the page cache, one way through: written or read in order by a thread of its own, in
// aligned chunks, while the caller fills or empties the other chunk.
#ifndef MS_DIRECT_H
#define MS_DIRECT_H

#include "base/base.h"

typedef struct ms_direct ms_direct;

// fd: the same file, for what cannot go in aligned chunks; stays the caller's. Where the file system has no O_DIRECT,
// chunks go through the page cache. who stands in messages.
ms_status ms__direct_writer(ms_direct **out, int fd, const char *path, const char *who);
ms_status ms__direct_write(ms_direct *d, const void *data, uint64_t n);  // appends
ms_status ms__direct_reader(ms_direct **out, int fd, const char *path, uint64_t bytes, const char *who);
ms_status ms__direct_read(ms_direct *d, const char **data,
                          uint64_t *n);  // the next chunk, valid until the next call; n 0: the end
ms_status ms__direct_end(ms_direct *d);  // writer: everything is handed over. Frees d in any case

#endif
