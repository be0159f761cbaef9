// SPDX-License-Identifier: MIT
// device/lend.c -- lends GPU memory to other processes, and borrows theirs (device/lend.h).
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "device/lend.h"

// Kinds of sockets: one that offers a block; the owner's end of a connection; a borrower's end.
enum { LISTENS, BORROWER, BORROWED };
typedef struct {
    const ms_block *block;
    int kind, fd;
    uint64_t name;  // LISTENS: hash of the memory's handle and offset; part of the socket's name
} lending;
static struct {
    lending *list;
    int n, cap;
} lendings;
int ms__lent_blocks;

static uint64_t name_of_loan(const uint8_t *handle, double offset)
{
    return ms__hash_bytes(ms__hash_bytes(MS_HASH_START, handle, MS_CUDA_HANDLE), &offset, sizeof offset);
}

static socklen_t address(struct sockaddr_un *a, uint64_t name)
{
    *a = (struct sockaddr_un) { .sun_family = AF_UNIX };
    int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "moonshard-%016llx", (unsigned long long)name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

// Takes ownership of l.fd, also on failure.
static ms_status add_loan(lending l)
{
    ms_status st =
        ms__grow(&lendings.list, &lendings.cap, lendings.n, sizeof *lendings.list, "cuda_share", "shared blocks");
    if (st) close(l.fd);
    else lendings.list[lendings.n++] = l;
    return st;
}
static void drop_loan(int k)
{
    close(lendings.list[k].fd);
    lendings.list[k] = lendings.list[--lendings.n];
}

ms_status ms__lend(const ms_block *b, const uint8_t handle[MS_CUDA_HANDLE], double offset)
{
    uint64_t name = name_of_loan(handle, offset);
    bool first = true;
    for (int k = 0; k < lendings.n; k++) {
        if (lendings.list[k].block != b || lendings.list[k].kind != LISTENS) continue;
        if (lendings.list[k].name == name) return MS_OK;
        first = false;
    }
    struct sockaddr_un a;
    socklen_t n = address(&a, name);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, n) || listen(fd, 1024)) {
        int e = errno;
        if (fd >= 0) close(fd);
        return ms__fail(MS_ESTATE, "cuda_share: the memory cannot be offered to other processes: %s", strerror(e));
    }
    MS_TRY(add_loan((lending) { .block = b, .kind = LISTENS, .fd = fd, .name = name }));
    ms__lent_blocks += first;
    return MS_OK;
}

// Accepts all pending connections to list[at]. Returns false if accepting failed for lack of memory or descriptors.
static bool accept_all(int at)
{
    for (;;) {
        if (ms__grow(&lendings.list, &lendings.cap, lendings.n, sizeof *lendings.list, "cuda_share", "shared blocks"))
            return false;
        int fd = accept4(lendings.list[at].fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) return errno == EAGAIN || errno == EINVAL;
        lendings.list[lendings.n++] = (lending) { .block = lendings.list[at].block, .kind = BORROWER, .fd = fd };
    }
}

bool ms__lent(const ms_block *b)
{
    bool known = false, used = false;
    for (int k = 0; k < lendings.n; k++) {
        if (lendings.list[k].block != b || lendings.list[k].kind != LISTENS) continue;
        known = true;
        shutdown(lendings.list[k].fd, SHUT_RD);  // no process can connect from now on
        if (accept_all(k)) drop_loan(k--);
        else used = true;
    }
    for (int k = 0; k < lendings.n; k++) {
        if (lendings.list[k].block != b || lendings.list[k].kind != BORROWER) continue;
        known = true;
        char byte;
        if (recv(lendings.list[k].fd, &byte, 1, MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EINTR)) used = true;
        else drop_loan(k--);
    }
    if (known && !used) ms__lent_blocks--;
    return used;
}

ms_status ms__borrow(const uint8_t handle[MS_CUDA_HANDLE], double offset, const ms_block *b)
{
    struct sockaddr_un a;
    socklen_t n = address(&a, name_of_loan(handle, offset));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&a, n)) {
        int e = errno;
        if (fd >= 0) close(fd);
        if (e == ECONNREFUSED)
            return ms__fail(MS_ESTATE, "cuda_open: no process of this network namespace shares this memory any more");
        return ms__fail(MS_ESTATE, "cuda_open: the process that shares this memory cannot be reached: %s", strerror(e));
    }
    return add_loan((lending) { .block = b, .kind = BORROWED, .fd = fd });
}

void ms__return(const ms_block *b)
{
    for (int k = 0; k < lendings.n; k++)
        if (lendings.list[k].block == b && lendings.list[k].kind == BORROWED) drop_loan(k--);
}
