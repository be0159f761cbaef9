// SPDX-License-Identifier: MIT
// base/watched.h -- settings of builds for memory checkers: sanitizers, or valgrind (-D MS_MEMCHECK=ON). Our allocators
// would hide uses after release and overruns from these tools. In such builds structs are not recycled, and the pool
// marks the bytes that no block owns.
#ifndef MS_WATCHED_H
#define MS_WATCHED_H

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define MS_POISON(p, n) __asan_poison_memory_region((p), (n))
#define MS_UNPOISON(p, n) __asan_unpoison_memory_region((p), (n))
#elif defined(MS_MEMCHECK)
#include <valgrind/memcheck.h>
#define MS_POISON(p, n) ((void)VALGRIND_MAKE_MEM_NOACCESS((p), (n)))
#define MS_UNPOISON(p, n) ((void)VALGRIND_MAKE_MEM_UNDEFINED((p), (n)))
#else
#define MS_POISON(p, n) ((void)(p), (void)(n))
#define MS_UNPOISON(p, n) ((void)(p), (void)(n))
#endif

// Upper limit of the memory size from which pool.c derives the size of arenas; 0: none. valgrind takes minutes to
// reserve an arena of the usual size, twice the machine's memory.
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
