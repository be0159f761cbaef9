// SPDX-License-Identifier: MIT
// comm/movers/gpu/fd.c -- file descriptors of GPU memory, which peers fetch over a local socket.
//
// A driver's descriptor cannot be opened again by its name under /proc, so the owner sends it (SCM_RIGHTS). A thread of
// the owner answers for the whole life of the process, because a peer maps an arena in the first collective that uses
// it, whatever the owner's script does then.
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>
#include "comm/movers/gpu/fd.h"
#include "device/device.h"
#include "comm/process/process.h"

static int listener = -1;
static char *(*base_of)(uint32_t arena);

typedef union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
} rights;

static socklen_t socket_address(struct sockaddr_un *a, int rank)
{
    *a = (struct sockaddr_un) { .sun_family = AF_UNIX };
    int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "moonshard-gpu-%016llx-%d",
                     (unsigned long long)ms__world.board->nonce, rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static void limit_wait(int fd, double seconds)
{
    struct timeval t = { (time_t)seconds, 0 };
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
}

// Sends the descriptor of an arena, or no descriptor if it cannot be exported.
static void send_descriptor(int peer)
{
    uint32_t arena;
    struct ucred who;
    socklen_t n = sizeof who;
    size_t bytes;
    int fd = -1;
    // Any process of the network namespace can connect; only this user's processes may have the memory.
    if (getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &who, &n) || who.uid != geteuid()) return;
    limit_wait(peer, 1);
    if (recv(peer, &arena, sizeof arena, MSG_WAITALL) != (ssize_t)sizeof arena) return;
    char *base = base_of(arena);
    if (base && ms__cuda()->ranks.to_fd(base, &fd, &bytes)) fd = -1;
    char byte = 0;
    struct iovec one = { &byte, 1 };
    rights r = { 0 };
    struct msghdr m = { .msg_iov = &one, .msg_iovlen = 1 };
    if (fd >= 0) {
        m.msg_control = r.bytes;
        m.msg_controllen = sizeof r.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        *c = (struct cmsghdr) { .cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    (void)!sendmsg(peer, &m, MSG_NOSIGNAL);
    if (fd >= 0) close(fd);
}

static void *serve_descriptors(void *unused)
{
    (void)unused;
    for (;;) {
        int peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (peer < 0) {
            ms__nap(1000 * 1000);  // no descriptor or no memory is free at the moment
            continue;
        }
        send_descriptor(peer);
        close(peer);
    }
    return NULL;
}

ms_status ms__gpu_fd_serve(char *(*base)(uint32_t arena))
{
    if (listener >= 0) return MS_OK;
    struct sockaddr_un a;
    socklen_t n = socket_address(&a, ms__world.rank);
    base_of = base;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, n) || listen(fd, 1024)) {
        int e = errno;
        if (fd >= 0) close(fd);
        return ms__fail(MS_ESTATE, "dist: GPU memory cannot be offered to other processes: %s", strerror(e));
    }
    listener = fd;
    if (!ms__comm_thread(serve_descriptors)) {
        close(fd);
        listener = -1;
        return ms__fail(MS_ENOMEM, "dist: cannot start the thread that offers GPU memory to other processes");
    }
    fprintf(stderr,
            "moonshard: rank %d: peers map this rank's GPU memory by file descriptors instead of CUDA IPC handles"
            "\n",
            ms__world.rank);
    return MS_OK;
}

ms_status ms__gpu_fd_fetch(int rank, uint32_t arena, int *fd)
{
    struct sockaddr_un a;
    socklen_t n = socket_address(&a, rank);
    char byte;
    struct iovec one = { &byte, 1 };
    rights r = { 0 };
    struct msghdr m = { .msg_iov = &one, .msg_iovlen = 1, .msg_control = r.bytes, .msg_controllen = sizeof r.bytes };
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s >= 0) limit_wait(s, ms__world.timeout < 10 ? 1 : 10);
    if (s >= 0) errno = 0;
    bool got = s >= 0 && connect(s, (struct sockaddr *)&a, n) == 0 &&
               send(s, &arena, sizeof arena, MSG_NOSIGNAL) == (ssize_t)sizeof arena &&
               recvmsg(s, &m, MSG_CMSG_CLOEXEC) == 1;
    int e = got || errno ? errno : ECONNRESET;  // errno is still 0: the owner closed the connection
    if (s >= 0) close(s);
    if (!got) return ms__fail(MS_ECOMM, "dist: cannot map rank %d's GPU memory: %s", rank, strerror(e));
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (!c || c->cmsg_type != SCM_RIGHTS)
        return ms__fail(MS_ECOMM, "dist: cannot map rank %d's GPU memory: that rank cannot export it", rank);
    memcpy(fd, CMSG_DATA(c), sizeof *fd);
    return MS_OK;
}
