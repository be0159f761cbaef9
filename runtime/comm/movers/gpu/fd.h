// SPDX-License-Identifier: MIT
// comm/movers/gpu/fd.h -- file descriptors of GPU memory.
#ifndef MS_COMM_MOVERS_GPU_FD_H
#define MS_COMM_MOVERS_GPU_FD_H

#include "base/base.h"

// Starts to send descriptors to peers, and says so on stderr; later calls do nothing. base returns the address of an
// arena; another thread calls it.
ms_status ms__gpu_fd_serve(char *(*base)(uint32_t arena));
ms_status ms__gpu_fd_fetch(int rank, uint32_t arena, int *fd);  // any thread; the caller closes *fd

#endif
