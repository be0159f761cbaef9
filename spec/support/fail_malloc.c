// SPDX-License-Identifier: MIT
// fail_malloc.c -- preloaded by specs: makes malloc, calloc and realloc fail in calls by libmoonshard.so or its MPI
// plugin: the n-th call and all after it, or the n-th call only. Calls by others (Lua, MPI, libgomp, the C library)
// succeed.
#define _GNU_SOURCE
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

enum { LIBRARIES = 2 };
static struct {
    uintptr_t first, last;
} code[LIBRARIES];
static int n_code;
static atomic_long left;  // calls until the first failure; 0: off
static atomic_int once;   // 1: only the call that counts `left` down to 0 fails; 0: it and all later ones

static int find(struct dl_phdr_info *info, size_t size, void *arg)
{
    (void)size;
    (void)arg;
    const char *name = info->dlpi_name;
    if (!name || !(strstr(name, "/libmoonshard.so") || strstr(name, "/libmoonshard_mpi.so"))) return 0;
    for (int k = 0; k < info->dlpi_phnum && n_code < LIBRARIES; k++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[k];
        if (p->p_type != PT_LOAD || !(p->p_flags & PF_X)) continue;
        code[n_code].first = info->dlpi_addr + p->p_vaddr;
        code[n_code].last = code[n_code].first + p->p_memsz;
        n_code++;
    }
    return 0;
}

// nth > 0: makes the nth call from now fail; nth < 0: call number -nth and all after it; 0: none. Returns the
// number of calls that were left until the failure requested before, the failing call included; once that call has
// failed 0, or 1 if all later calls fail, too.
__attribute__((visibility("default"))) long fail_malloc(long nth)
{
    long before = atomic_exchange(&left, 0);
    n_code = 0;
    dl_iterate_phdr(find, NULL);  // search again: the plugin is loaded later than the engine
    atomic_store(&once, nth > 0);
    atomic_store(&left, nth < 0 ? -nth : nth);
    return before;
}

static int fails(void *caller)
{
    if (atomic_load(&left) == 0) return 0;
    uintptr_t at = (uintptr_t)caller;
    int ours = 0;
    for (int k = 0; k < n_code; k++) ours |= at >= code[k].first && at < code[k].last;
    if (!ours) return 0;
    long now = atomic_fetch_sub(&left, 1);
    if (now > 1) return 0;
    if (now <= 0 && atomic_load(&once)) {  // another thread's call, after the call that failed
        atomic_store(&left, 0);
        return 0;
    }
    atomic_store(&left, atomic_load(&once) ? 0 : 1);
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t n) { return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(n); }
void *calloc(size_t k, size_t n) { return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(k, n); }
void *realloc(void *p, size_t n) { return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(p, n); }
