// SPDX-License-Identifier: MIT
// device/lend.h -- the lifetime of GPU memory that another process has mapped.
//
// The owner of a block listens on an abstract socket whose name contains a hash of the memory's handle; a process that
// maps the memory stays connected until it has unmapped it, or ends. A block that is freed while connections are open
// is not used again before all of them are closed. The kernel closes the connections of a killed process, and no file
// is left.
#ifndef MS_LEND_H
#define MS_LEND_H

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

// Offers b's memory to other processes: listens on a socket whose name contains a hash of handle and offset.
// Further calls with the same handle and offset do nothing.
ms_status ms__lend(const ms_block *b, const uint8_t handle[MS_CUDA_HANDLE], double offset);
// Number of blocks that are offered to other processes, or that other processes have mapped.
extern int ms__lent_blocks;
// Ends the offers of a block that is freed. Returns whether a process still has it mapped.
bool ms__lent(const ms_block *b);

// Connects to the process that shares the memory. MS_ESTATE if that process no longer shares it.
ms_status ms__borrow(const uint8_t handle[MS_CUDA_HANDLE], double offset, const ms_block *b);
// Ends the connection, after the memory was unmapped.
void ms__return(const ms_block *b);

#ifdef __cplusplus
}
#endif
#endif
