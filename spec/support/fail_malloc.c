// fail_malloc.c -- for specs, preloaded: makes malloc, calloc and realloc fail where libmoonshard.so calls them, from the
// n-th call on. Everybody else (Lua, MPI, libgomp, the C library) is served: what they do without memory is not ours.
#define _GNU_SOURCE
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

static uintptr_t first, last;           // of the library's code
static atomic_long left;                // calls until the first failure; 0: off

static int find(struct dl_phdr_info *info, size_t size, void *arg)
{
    (void)size;
    (void)arg;
    if (!info->dlpi_name || !strstr(info->dlpi_name, "/libmoonshard.so")) return 0;
    for (int k = 0; k < info->dlpi_phnum; k++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[k];
        if (p->p_type != PT_LOAD || !(p->p_flags & PF_X)) continue;
        first = info->dlpi_addr + p->p_vaddr;
        last = first + p->p_memsz;
    }
    return 1;
}

// How many calls were left when it is armed anew.
__attribute__((visibility("default"))) long fail_malloc(long nth)
{
    if (!first) dl_iterate_phdr(find, NULL);
    return atomic_exchange(&left, nth);
}

static int fails(void *caller)
{
    uintptr_t at = (uintptr_t)caller;
    if (at < first || at >= last || atomic_load(&left) == 0) return 0;
    long now = atomic_fetch_sub(&left, 1);
    if (now > 1) return 0;
    atomic_store(&left, 1);             // and all after it
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t n) { return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(n); }
void *calloc(size_t k, size_t n) { return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(k, n); }
void *realloc(void *p, size_t n) { return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(p, n); }
