// SPDX-License-Identifier: MIT
// comm/process/report.c -- prints an uncaught error of a script once, with its rank.
//
// luajit prints the message and its traceback to the C library's stderr in the pieces "luajit", ":", " ", text,
// newline, and exits with status 1. Under a launcher this file replaces that stream: it prefixes the text with the
// rank, or omits the text if another rank of this node has reported the same error or is about to.
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <unistd.h>
#include "comm/process/process.h"

typedef enum { OTHER, PROGRAM, COLON, BLANK, NEWLINE } piece;
static struct {
    piece next;
    bool reported;
} stream;

bool ms__error_reported(void) { return stream.reported; }

// Hashes only the first line, because tracebacks end with an address.
static uint64_t hash_of(const char *text, size_t n)
{
    const char *end = memchr(text, '\n', n);
    uint64_t h = ms__hash_bytes(MS_HASH_START, text, end ? (size_t)(end - text) : n);
    return h ? h : 1;
}

// Whether the text contains the error of a peer on this node that has failed or dies within 0.2 s: the peer reports it.
static bool is_peers(const char *text, size_t n)
{
    ms_world *w = &ms__world;
    for (int r = 0; w->board && r < w->size; r++) {
        char prefix[40];
        snprintf(prefix, sizeof prefix, "rank %d failed: ", r);
        if (r == w->rank || w->node_of[r] != w->node || !memmem(text, n, prefix, strlen(prefix))) continue;
        for (int k = 0; k < 100; k++) {
            if (atomic_load(&w->board->rank[r].state) == RANK_RAISED || ms__rank_dead(r)) return true;
            ms__nap(2000000);
        }
    }
    return false;
}

static void write_whole(const char *text, size_t n)
{
    while (n > 0) {
        ssize_t done = write(STDERR_FILENO, text, n);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return;
        text += done;
        n -= (size_t)done;
    }
}

static void report_error(const char *text, size_t n)
{
    stream.reported = true;
    if (ms__error_reported_by_peer(hash_of(text, n)) || is_peers(text, n)) return;
    // A single write, so that the errors of several ranks do not interleave.
    char *whole = malloc(n + 40);
    if (!whole) {
        write_whole(text, n);
        return;
    }
    int at = snprintf(whole, 40, "rank %d: ", ms__launched.rank);
    memcpy(whole + at, text, n);
    whole[(size_t)at + n] = '\n';
    write_whole(whole, (size_t)at + n + 1);
    free(whole);
}

static ssize_t write_stream(void *unused, const char *text, size_t n)
{
    (void)unused;
    const char *name = program_invocation_name;
    if (stream.next == OTHER && n == strlen(name) && memcmp(text, name, n) == 0) stream.next = PROGRAM;
    else if (stream.next == PROGRAM && n == 1 && *text == ':') stream.next = COLON;
    else if (stream.next == COLON && n == 1 && *text == ' ') stream.next = BLANK;
    else if (stream.next == BLANK) {
        report_error(text, n);
        stream.next = NEWLINE;
    } else {
        if (stream.next == PROGRAM || stream.next == COLON) write_whole(name, strlen(name));
        if (stream.next == COLON) write_whole(":", 1);
        if (stream.next != NEWLINE || n != 1 || *text != '\n') write_whole(text, n);
        stream.next = OTHER;
    }
    return (ssize_t)n;
}

void ms__report_errors(void)
{
    if (strncmp(program_invocation_short_name, "luajit", 6) != 0) return;
    FILE *f = fopencookie(NULL, "w", (cookie_io_functions_t) { .write = write_stream });
    if (!f) return;
    setvbuf(f, NULL, _IONBF, 0);
    stderr = f;
}
