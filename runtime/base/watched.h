// SPDX-License-Identifier: MIT
// base/watched.h -- what a build under watch does differently: with a sanitizer, or for valgrind (-D MS_MEMCHECK=ON).
// Our own allocators hide from such tools who uses what has been released, or bytes behind the end of a block. So
// structs are not recycled there, and the pool says which of its bytes somebody owns.
#ifndef MS_WATCHED_H
#define MS_WATCHED_H

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define MS_NOBODYS(p, n) __asan_poison_memory_region((p), (n))
#define MS_OWNED(p, n) __asan_unpoison_memory_region((p), (n))
#elif defined(MS_MEMCHECK)
#include <valgrind/memcheck.h>
#define MS_NOBODYS(p, n) ((void)VALGRIND_MAKE_MEM_NOACCESS((p), (n)))
#define MS_OWNED(p, n) ((void)VALGRIND_MAKE_MEM_UNDEFINED((p), (n)))
#else
#define MS_NOBODYS(p, n) ((void)(p), (void)(n))
#define MS_OWNED(p, n) ((void)(p), (void)(n))
#endif

// What valgrind is to keep account of, it must walk through: a reservation of twice the machine's memory takes it
// minutes.
#if defined(MS_MEMCHECK)
#define MS_ARENA ((size_t)1 << 30)
#else
#define MS_ARENA ((size_t)0)
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(MS_MEMCHECK)
enum { MS_RECYCLE = 0 };
#else
enum { MS_RECYCLE = 1 };
#endif

#endif
