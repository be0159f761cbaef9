// SPDX-License-Identifier: MIT
// io/direct.h -- sequential reading and writing of large files without the page cache: a thread transfers one aligned
// chunk while the caller fills or empties the other.
#ifndef MS_DIRECT_H
#define MS_DIRECT_H

#include "base/base.h"

typedef struct ms_direct ms_direct;

// Start writing or reading a file. fd: an open descriptor of the file, used for parts that are not aligned; the caller
// closes it. On a file system without O_DIRECT, all data goes through the page cache. who: the function named in
// messages.
ms_status ms__direct_writer(ms_direct **out, int fd, const char *path, const char *who);
ms_status ms__direct_write(ms_direct *d, const void *data, uint64_t n);  // appends
ms_status ms__direct_reader(ms_direct **out, int fd, const char *path, uint64_t bytes, const char *who);
// Returns the next chunk, valid until the next call; *n is 0 at the end of the file.
ms_status ms__direct_read(ms_direct *d, const char **data, uint64_t *n);
ms_status ms__direct_end(ms_direct *d);  // writes buffered data; frees d even on failure

#endif
