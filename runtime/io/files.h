// SPDX-License-Identifier: MIT
// io/files.h -- helpers for reading and writing files and folders: resolved paths, complete reads and writes, XXH64.
#ifndef MS_FILES_H
#define MS_FILES_H

#include "base/base.h"

// ---- places: a name in an open folder -----------------------------------------------------------

// A resolved path. Symbolic links are resolved once; all later operations use the open folder, even if the path leads
// elsewhere by then.
typedef struct {
    int folder;         // open descriptor; -1: none
    char *path, *name;  // the whole path without symbolic links; its last part (inside path)
} ms_place;

// Resolves path and opens its folder. On failure nothing needs freeing. A link without a target is an error.
ms_status ms__place(ms_place *out, const char *path, const char *who);
void ms__place_clear(ms_place *p);
ms_status ms__place_sync(const ms_place *p);  // makes the folder's entries durable

// A temporary name for a place: NAME.tmp-RANDOM-HOST-PID-START, of 16 random digits, 16 digits for the boot and the PID
// namespace, and the PID and start time of the process that makes it. The name alone identifies the process that made a
// temporary file or folder, and no other file has such a name. out has MS_TEMPORARY bytes.
enum { MS_TEMPORARY = 256 };
ms_status ms__temporary_name(const char *name, char *out);
void ms__set_temporary_kind(char *temporary, const char *kind);  // "tmp", or "old": a folder that was replaced
bool ms__is_temporary_suffix(const char *text);
// Removes those temporary files of a place that were made by processes that have ended.
void ms__place_sweep(const ms_place *p);

// ---- bytes --------------------------------------------------------------------------------------

// Fails with "who: cannot DOING 'path': " and the text of errno.
ms_status ms__io_failed(const char *who, const char *doing, const char *path);
// Write and read `bytes` bytes, beginning at byte `at` of the file. path and who: for messages.
ms_status ms__file_write(int fd, const char *path, const void *data, uint64_t bytes, uint64_t at);
ms_status ms__file_read(int fd, const char *path, void *data, uint64_t bytes, uint64_t at, const char *who);
// Fails if a path does not name a file, because it is empty or ends in '/'.
ms_status ms__file_path(const char *path, const char *who);
// Opens a regular file for reading. Fails at once for anything else, including a pipe without a writer.
ms_status ms__file_open(int *fd, uint64_t *size, const char *path, const char *who);
ms_status ms__folder_sync(int fd, const char *path);

// ---- XXH64, seed 0 ------------------------------------------------------------------------------

typedef struct {
    uint64_t lane[4], total;
    unsigned char rest[32];
    int n_rest;
} ms_hash;

void ms__hash_begin(ms_hash *h);
void ms__hash_add(ms_hash *h, const void *data, size_t n);
uint64_t ms__hash_end(const ms_hash *h);
void ms__hash_text(uint64_t hash, char *out);  // writes 16 hexadecimal digits, without a terminating 0

#endif
