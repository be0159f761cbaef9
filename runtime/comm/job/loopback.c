// SPDX-License-Identifier: MIT
// comm/job/loopback.c -- a library that scripts/train and the prompt preload into mpirun. If all ranks are on one host,
// no socket of mpirun then listens beyond loopback.
//
// mpirun listens on every address of the host for daemons on other hosts, and no setting changes that. This library
// binds these sockets to the loopback address. It is not loaded into the ranks.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

__attribute__((visibility("default"))) int bind(int fd, const struct sockaddr *address, socklen_t n)
{
    static int (*next)(int, const struct sockaddr *, socklen_t);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "bind");
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    if (address->sa_family == AF_INET && n >= sizeof v4) {
        memcpy(&v4, address, sizeof v4);
        if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) {
            v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            return next(fd, (struct sockaddr *)&v4, sizeof v4);
        }
    } else if (address->sa_family == AF_INET6 && n >= sizeof v6) {
        memcpy(&v6, address, sizeof v6);
        if (memcmp(&v6.sin6_addr, &in6addr_any, sizeof v6.sin6_addr) == 0) {
            v6.sin6_addr = in6addr_loopback;
            return next(fd, (struct sockaddr *)&v6, sizeof v6);
        }
    }
    return next(fd, address, n);
}

// Restores for the ranks the LD_PRELOAD that scripts/train was started with.
__attribute__((constructor)) static void loaded(void)
{
    const char *name = program_invocation_short_name;
    if (strcmp(name, "mpirun") != 0 && strcmp(name, "mpiexec") != 0 && strcmp(name, "orterun") != 0) return;
    const char *before = getenv("LD_PRELOAD_OF_RANKS");
    if (before && *before) setenv("LD_PRELOAD", before, 1);
    else unsetenv("LD_PRELOAD");
    unsetenv("LD_PRELOAD_OF_RANKS");
}
