// SPDX-License-Identifier: MIT
// io/direct.c -- direct reading and writing of large files (direct.h). The thread processes one request at a time:
// chunk k of the file uses buffer k % 2.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "base/thread.h"
#include "io/direct.h"

enum { CHUNK = 8 << 20, BLOCK = 4096 };

// ---- the thread ---------------------------------------------------------------------------------

struct ms_direct {
    bool writes, quit, started;
    int fd, direct;          // direct: a descriptor opened with O_DIRECT, or -1
    const char *path, *who;  // path: a copy
    uint64_t at, bytes;      // at: the caller's position; bytes: size of the file that is read
    unsigned char *buffer[2];
    size_t held;  // writer: number of bytes in the current buffer
    int current;  // the buffer that the caller fills or reads
    // The fields below are shared with the thread; protected by lock.
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
    bool busy;  // a request is waiting or being processed
    int which;  // the buffer of the request
    uint64_t from;
    size_t n, got;
    int error;
};

static ssize_t chunk_io(ms_direct *d, unsigned char *p, size_t n, uint64_t at)
{
    size_t done = 0;
    while (done < n) {
        // The position, size and memory of direct requests must be aligned; other parts go through the page cache.
        bool aligned = d->direct >= 0 && (at + done) % BLOCK == 0 && done % BLOCK == 0 &&
                       (d->writes ? (n - done) % BLOCK == 0 : true);
        int fd = aligned ? d->direct : d->fd;
        size_t want = n - done;
        if (!d->writes && aligned)
            want = (want + BLOCK - 1) & ~(size_t)(BLOCK - 1);  // the buffer has room beyond the end of the file
        ssize_t k =
            d->writes ? pwrite(fd, p + done, want, (off_t)(at + done)) : pread(fd, p + done, want, (off_t)(at + done));
        if (k < 0 && errno == EINTR) continue;
        if (k < 0 && aligned && errno == EINVAL) {  // the file system does not support O_DIRECT after all
            close(d->direct);
            d->direct = -1;
            continue;
        }
        if (k < 0) return -1;
        if (k == 0) break;
        done += (size_t)k < n - done ? (size_t)k : n - done;
    }
    return (ssize_t)done;
}

static void *write_in_thread(void *arg)
{
    ms_direct *d = arg;
    pthread_mutex_lock(&d->lock);
    for (;;) {
        while (!d->busy && !d->quit) pthread_cond_wait(&d->change, &d->lock);
        if (!d->busy) break;
        pthread_mutex_unlock(&d->lock);
        ssize_t k = chunk_io(d, d->buffer[d->which], d->n, d->from);
        int error = k < 0 ? errno : 0;
        pthread_mutex_lock(&d->lock);
        d->got = k < 0 ? 0 : (size_t)k;
        if (error) d->error = error;
        d->busy = false;
        pthread_cond_broadcast(&d->change);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

static void ask(ms_direct *d, int which, uint64_t from, size_t n)
{
    pthread_mutex_lock(&d->lock);
    d->which = which;
    d->from = from;
    d->n = n;
    d->busy = true;
    pthread_cond_broadcast(&d->change);
    pthread_mutex_unlock(&d->lock);
}

static ms_status answer(ms_direct *d, size_t *got)
{
    pthread_mutex_lock(&d->lock);
    while (d->busy) pthread_cond_wait(&d->change, &d->lock);
    int error = d->error;
    if (got) *got = d->got;
    pthread_mutex_unlock(&d->lock);
    if (!error) return MS_OK;
    return ms__fail(MS_EIO, "%s: cannot %s '%s': %s", d->who, d->writes ? "write" : "read", d->path, strerror(error));
}

static void direct_free(ms_direct *d)
{
    if (d->started) {
        pthread_mutex_lock(&d->lock);
        d->quit = true;
        pthread_cond_broadcast(&d->change);
        pthread_mutex_unlock(&d->lock);
        pthread_join(d->thread, NULL);
    }
    pthread_mutex_destroy(&d->lock);
    pthread_cond_destroy(&d->change);
    if (d->direct >= 0) close(d->direct);
    free(d->buffer[0]);
    free(d->buffer[1]);
    free((char *)d->path);
    free(d);
}

static ms_status start_direct(ms_direct **out, int fd, const char *path, const char *who, bool writes)
{
    ms_direct *d = calloc(1, sizeof *d);
    if (!d) return ms__no_memory(sizeof *d, who, "'%s'", path);
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->change, NULL);
    d->direct = -1;
    d->fd = fd;
    d->who = who;
    d->writes = writes;
    d->path = strdup(path);
    for (int k = 0; k < 2; k++)
        if (posix_memalign((void **)&d->buffer[k], BLOCK, CHUNK)) d->buffer[k] = NULL;
    if (!d->path || !d->buffer[0] || !d->buffer[1]) {
        direct_free(d);
        return ms__no_memory(2 * (size_t)CHUNK, who, "two buffers of %d bytes", CHUNK);
    }
    // Opens the same file even if its path has been replaced. If that fails (-1), the page cache is used.
    char same[32];
    snprintf(same, sizeof same, "/proc/self/fd/%d", fd);
    d->direct = open(same, (writes ? O_WRONLY : O_RDONLY) | O_DIRECT | O_CLOEXEC);
    int failed = ms__thread_start(&d->thread, write_in_thread, d);
    if (failed) {
        direct_free(d);
        return ms__fail(MS_ENOMEM, "%s: cannot start a thread: %s", who, strerror(failed));
    }
    d->started = true;
    *out = d;
    return MS_OK;
}

// ---- writing and reading ------------------------------------------------------------------------

ms_status ms__direct_writer(ms_direct **out, int fd, const char *path, const char *who)
{
    return start_direct(out, fd, path, who, true);
}

ms_status ms__direct_write(ms_direct *d, const void *data, uint64_t n)
{
    const unsigned char *p = data;
    while (n > 0) {
        size_t m = CHUNK - d->held < n ? CHUNK - d->held : (size_t)n;
        memcpy(d->buffer[d->current] + d->held, p, m);
        d->held += m;
        p += m;
        n -= m;
        if (d->held < CHUNK) break;
        MS_TRY(ms__check_interrupt());
        MS_TRY(answer(d, NULL));  // wait until the other buffer is free
        ask(d, d->current, d->at, CHUNK);
        d->at += CHUNK;
        d->current = !d->current;
        d->held = 0;
    }
    return MS_OK;
}

ms_status ms__direct_reader(ms_direct **out, int fd, const char *path, uint64_t bytes, const char *who)
{
    MS_TRY(start_direct(out, fd, path, who, false));
    ms_direct *d = *out;
    d->bytes = bytes;
    d->current = 1;
    if (bytes) ask(d, 0, 0, bytes < CHUNK ? (size_t)bytes : CHUNK);
    return MS_OK;
}

ms_status ms__direct_read(ms_direct *d, const char **data, uint64_t *n)
{
    *n = 0;
    if (d->at >= d->bytes) return MS_OK;
    size_t got, want = d->bytes - d->at < CHUNK ? (size_t)(d->bytes - d->at) : CHUNK;
    MS_TRY(ms__check_interrupt());
    MS_TRY(answer(d, &got));
    if (got < want) return ms__fail(MS_EIO, "%s: unexpected end of file in '%s'", d->who, d->path);
    d->current = !d->current;
    d->at += got;
    if (d->at < d->bytes) ask(d, !d->current, d->at, d->bytes - d->at < CHUNK ? (size_t)(d->bytes - d->at) : CHUNK);
    *data = (const char *)d->buffer[d->current];
    *n = got;
    return MS_OK;
}

ms_status ms__direct_end(ms_direct *d)
{
    ms_status st = answer(d, NULL);
    if (st == MS_OK && d->writes && d->held) {
        ask(d, d->current, d->at, d->held);
        st = answer(d, NULL);
    }
    direct_free(d);
    return st;
}
