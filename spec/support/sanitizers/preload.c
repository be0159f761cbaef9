// SPDX-License-Identifier: MIT
// preload.c -- preloaded before the runtime of AddressSanitizer by scripts/test --sanitize.
//
// Libraries stay loaded until the process ends, when leaks are detected: a leak of unloaded code has no name that a
// suppression could match. Only luajit is checked for leaks; compilers and shells that a spec starts leave their memory
// to the system.
//
// UndefinedBehaviorSanitizer, as a library beside AddressSanitizer, writes to stderr and ignores log_path: this
// library also writes its reports to files in the folder MOONSHARD_REPORTS.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern void __lsan_disable(void) __attribute__((weak));

extern void __ubsan_get_current_report_data(const char **kind, const char **text, const char **file, unsigned *line,
                                            unsigned *column, char **address) __attribute__((weak));

int dlclose(void *library);
void __ubsan_on_report(void);

__attribute__((visibility("default"))) int dlclose(void *library)
{
    (void)library;
    return 0;
}

__attribute__((constructor)) static void only_luajit(void)
{
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    const char *name = strrchr(path, '/');
    if (__lsan_disable && strncmp(name ? name + 1 : path, "luajit", 6) != 0) __lsan_disable();
}

__attribute__((visibility("default"))) void __ubsan_on_report(void)
{
    const char *kind, *text, *file, *folder = getenv("MOONSHARD_REPORTS");
    char path[4096], *address;
    unsigned line, column;
    if (!folder || !__ubsan_get_current_report_data) return;
    __ubsan_get_current_report_data(&kind, &text, &file, &line, &column, &address);
    snprintf(path, sizeof path, "%s/ubsan.%d", folder, (int)getpid());
    FILE *f = fopen(path, "ae");
    if (!f) return;
    fprintf(f, "%s:%u:%u: %s: %s\n", file, line, column, kind, text);
    fclose(f);
}
