// SPDX-License-Identifier: MIT
// jumps.c -- preloaded before the runtime of ThreadSanitizer by scripts/test --tsan.
//
// In a program that is not instrumented, GCC 12's preloaded runtime jumps to address 0 at the first _setjmp, which
// crashes shells. Moonshard does not use setjmp, so all programs get the C library's own.
#include <dlfcn.h>

#ifdef __x86_64__

__attribute__((visibility("hidden"))) void *real_setjmp, *real_underscore, *real_signals;

__attribute__((constructor)) static void find(void)
{
    void *libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    real_setjmp = dlsym(libc, "setjmp");
    real_underscore = dlsym(libc, "_setjmp");
    real_signals = dlsym(libc, "__sigsetjmp");
}

__asm__(".text\n"
        ".globl setjmp, _setjmp, __sigsetjmp\n"
        "setjmp: jmp *real_setjmp(%rip)\n"
        "_setjmp: jmp *real_underscore(%rip)\n"
        "__sigsetjmp: jmp *real_signals(%rip)\n");

#endif
