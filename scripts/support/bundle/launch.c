// SPDX-License-Identifier: MIT
// launch.c -- starts a program of the bundle, wherever the bundle is (scripts/bundle).
//
// It is linked statically, because the machine may have another C library, or none. Run through the link bin/NAME, it
// runs libexec/NAME under the bundle's own loader, which finds the bundle's libraries. It exports no LD_LIBRARY_PATH,
// so other programs load their own libraries. MOONSHARD_LIBC=host: uses the machine's loader and C library instead.
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// The programs that are Lua scripts, which LuaJIT runs.
static const char *const scripts[] = { "busted", NULL };

static char *joined(const char *a, const char *b, const char *c, const char *d)
{
    char *text;
    if (asprintf(&text, "%s%s%s%s", a, b, c, d) < 0) abort();
    return text;
}

// Puts `first` in front of the list in an environment variable, unless the list already begins with `first`. without:
// the rest of the list if the variable is not set.
static void prepend(const char *name, const char *first, const char *separator, const char *without)
{
    const char *before = getenv(name);
    if (before && strncmp(before, first, strlen(first)) == 0) return;
    setenv(name, joined(first, separator, before ? before : without, ""), 1);
}

// Whether PATH has this program.
static bool has(const char *name)
{
    char *list = strdup(getenv("PATH"));
    for (char *folder = list; (folder = strtok(folder, ":")); folder = NULL)
        if (access(joined(folder, "/", name, ""), X_OK) == 0) return true;
    return false;
}

int main(int argc, char **argv)
{
    char root[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", root, sizeof root - 1);  // .../libexec/launch
    if (n < 0) {
        perror("moonshard: /proc/self/exe");
        return 127;
    }
    root[n] = 0;
    for (int k = 0; k < 2; k++) *strrchr(root, '/') = 0;

    const char *slash = strrchr(argv[0], '/'), *name = slash ? slash + 1 : argv[0], *script = NULL;
    for (const char *const *s = scripts; *s; s++)
        if (strcmp(name, *s) == 0) script = joined(root, "/libexec/", name, ".lua");
    char *program = joined(root, "/libexec/", script ? "luajit" : name, ""), *lib = joined(root, "/lib", "", "");

    prepend("PATH", joined(root, "/bin", "", ""), ":", "/usr/local/bin:/usr/bin:/bin");
    prepend("LUA_PATH",
            joined(root, "/lua/?.lua;", joined(root, "/lua/?/init.lua;", root, "/share/lua/5.1/?.lua;"),
                   joined(root, "/share/lua/5.1/?/init.lua", "", "")),
            ";", ";");
    prepend("LUA_CPATH", joined(lib, "/lua/5.1/?.so", "", ""), ";", ";");
    setenv("MOONSHARD_LIB", joined(lib, "/libmoonshard.so", "", ""), 0);
    setenv("OPAL_PREFIX", root, 1);
    setenv("OPAL_LIBDIR", lib, 1);
    setenv("OPAL_PKGLIBDIR", joined(lib, "/openmpi", "", ""), 1);
    setenv("OPAL_PKGDATADIR", joined(root, "/share/openmpi", "", ""), 1);
    setenv("OPAL_SYSCONFDIR", joined(root, "/etc", "", ""), 1);
    // Without ssh, mpirun ends at its start, although it needs no ssh on one host. Without a home folder PMIx crashes.
    // Without /sys hwloc prints a warning. PMIx warns that it cannot compress its messages.
    setenv("HOME", "/tmp", 0);
    setenv("PMIX_MCA_pcompress_base_silence_warning", "1", 0);
    if (!has("ssh") && !has("rsh")) setenv("OMPI_MCA_plm", "isolated", 0);
    if (access("/sys/devices/system/cpu", R_OK) != 0) setenv("HWLOC_HIDE_ERRORS", "2", 0);

    // Keep the user's library path: CUDA's libraries come from the machine, not from the bundle.
    const char *path = getenv("LD_LIBRARY_PATH");
    const char *libc = getenv("MOONSHARD_LIBC");
    bool host = libc && strcmp(libc, "host") == 0;
    char *libraries = host ? lib : joined(lib, ":", lib, "/libc");
    char **args = calloc((size_t)argc + 8, sizeof *args);
    if (!args) return 127;
    int k = 0;
    args[k++] = host ? LOADER : joined(lib, "/libc/loader", "", "");
    args[k++] = "--library-path";
    args[k++] = path && *path ? joined(libraries, ":", path, "") : libraries;
    args[k++] = "--argv0";
    args[k++] = (char *)(script ? "luajit" : name);
    args[k++] = program;
    if (script) args[k++] = (char *)script;
    for (int i = 1; i < argc; i++) args[k++] = argv[i];
    execv(args[0], args);
    fprintf(stderr, "moonshard: cannot run %s with the loader %s: %s\n", program, args[0], strerror(errno));
    return 127;
}
