// SPDX-License-Identifier: MIT
// io/safetensors.h -- parses and writes the headers of safetensors files. read.c and write.c transfer the data.
//
// A file consists of 8 bytes, the length N of the header (little-endian); N bytes of JSON; the data. The JSON is one
// object: "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, and "__metadata__", an object of strings.
//
// Files written here contain checksums of every byte and are still plain safetensors. The first metadata entry is
//   "moonshard.sums": "xxh64 1048576 HEADER BLOCKS"
// HEADER is the XXH64 of the header (its length and text, with these 16 digits as zeros) in 16 hexadecimal digits.
// BLOCKS has 16 digits for every block of 1 MiB of every tensor, in the order of the data; each tensor begins a new
// block. A mark (a sequence of whitespace before the closing brace) also says that the file has checksums, so that a
// damaged metadata name does not disable them. A program that keeps the metadata but writes its own header loses the
// mark; the checksums, which are no longer valid, are then ignored.
#ifndef MS_SAFETENSORS_H
#define MS_SAFETENSORS_H

#include "base/base.h"

enum {
    MS_ST_MAX_HEADER = 100 * 1000 * 1000,
    MS_ST_MAX_ENTRIES = 1000 * 1000,
    MS_ST_MAX_NAME = 1024,
    MS_ST_BLOCK = 1 << 20
};
#define MS_ST_SUMS "moonshard.sums"

typedef struct {
    char *name;       // UTF-8, at most MS_ST_MAX_NAME bytes, contains no NUL
    int dtype, ndim;  // dtype -1: one that tensors lack
    char type[24];    // its name in the file, which may be cut; "" for other dtypes
    int64_t shape[MS_MAX_DIMS];
    uint64_t begin, end;  // byte offsets from the start of the data
    uint64_t block;       // index of its first block among the blocks of all tensors, in the order of the data
} ms_st_entry;

typedef struct {
    char *key, *value;
} ms_st_meta;

typedef struct {
    int n, n_meta;
    ms_st_entry *entries;  // sorted by name
    ms_st_meta *meta;      // sorted by key
    int capacity, meta_capacity;
    char *checksums;  // 16 digits per block; NULL: the file has no checksums
} ms_st_header;

// Parses text (the JSON) of a file with data_bytes of data. verify: first verifies the header's checksum, if it has
// one. On failure nothing needs freeing.
ms_status ms__st_parse(ms_st_header *out, const char *path, const char *text, size_t length, uint64_t data_bytes,
                       bool verify);
void ms__st_clear(ms_st_header *h);

// Writes the header's JSON, padded with blanks so that the data begins at a multiple of 8. The caller frees *text. The
// offsets and blocks of all entries must be set. *checksums receives the address at which the digits of the blocks are
// to be stored; afterwards ms__st_seal adds the header's checksum.
ms_status ms__st_format(const ms_st_header *h, char **text, size_t *length, char **checksums);
void ms__st_seal(char *text, size_t length);
void ms__st_prefix(size_t length, unsigned char *out);  // writes the 8 bytes before the text
const char *ms__st_checksum(const char *text);          // the header's checksum: 16 digits in the text

// ms__st_add adds an entry and sets only its name; returns NULL with the error set on failure. ms__st_add_meta adds a
// metadata pair. Both copy the strings.
ms_st_entry *ms__st_add(ms_st_header *h, const char *who, const char *name, size_t length);
const char *ms__st_sort(ms_st_header *h);  // sorts the entries by name; returns a duplicate name, or NULL
ms_status ms__st_add_meta(ms_st_header *h, const char *who, const char *key, size_t key_length, const char *value,
                          size_t value_length);
ms_st_entry *ms__st_find(const ms_st_header *h, const char *name);  // NULL if there is none

// Computes the number of bytes of an entry's tensor, whose dtype tensors have; returns false on overflow.
bool ms__st_bytes(const ms_st_entry *e, uint64_t *bytes);
uint64_t ms__st_blocks(const ms_st_entry *e);  // number of blocks of the entry's data

#endif
