// SPDX-License-Identifier: MIT
// io/safetensors.h -- parsing and writing the header of a safetensors file. read.c and write.c transfer the data.
//
// A file is: 8 bytes, the header's length N (little-endian); N bytes of JSON; the data. The JSON is one
// object: "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, and "__metadata__", an
// object of strings.
//
// Files written here have checksums of every byte. They stay plain safetensors: the first metadata entry is
//   "moonshard.sums": "xxh64 1048576 HEADER BLOCKS"
// with 16 hexadecimal digits of XXH64 for the header (its length and text, with these 16 digits as zeros), and 16 for
// every block of 1 MiB of every tensor, in the order of the data; each tensor begins a block. A mark of blanks in front
// of the closing brace also says that the file has checksums, so that a damaged metadata name does not disable them. A
// program that keeps metadata but writes a header of its own loses the mark; the checksums, which no longer hold, are
// then ignored.
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
    char *name;  // UTF-8, at most MS_ST_MAX_NAME bytes, no NUL inside
    int dtype, ndim;
    int64_t shape[MS_MAX_DIMS];
    uint64_t begin, end;  // bytes from the start of the data
    uint64_t block;       // the number of its first block among those of all tensors, in the data's order
} ms_st_entry;

typedef struct {
    char *key, *value;
} ms_st_meta;

typedef struct {
    int n, n_meta;
    ms_st_entry *entries;  // sorted by name
    ms_st_meta *meta;      // sorted by key
    int capacity, meta_capacity;
    char *checksums;  // 16 digits per block; NULL: the file has none
} ms_st_header;

// Parses text (the JSON) of a file with data_bytes of data. With verify, the header's checksum, if any, is verified
// first. On failure nothing needs freeing.
ms_status ms__st_parse(ms_st_header *out, const char *path, const char *text, size_t length, uint64_t data_bytes,
                       bool verify);
void ms__st_clear(ms_st_header *h);

// The header's JSON, padded with blanks so that the data begins at a multiple of 8. The caller frees *text. Entries
// must have their offsets and blocks. *checksums is the place for the digits of the blocks; when they are there,
// st_seal adds the header's checksum.
ms_status ms__st_format(const ms_st_header *h, char **text, size_t *length, char **checksums);
void ms__st_seal(char *text, size_t length);
void ms__st_prefix(size_t length, unsigned char *out);  // the 8 bytes in front of the text
const char *ms__st_checksum(const char *text);          // the 16 digits of a sealed text

// Adds an entry with only its name set, or a metadata pair; copies the strings. On failure: NULL, error set.
ms_st_entry *ms__st_add(ms_st_header *h, const char *who, const char *name, size_t length);
const char *ms__st_sort(ms_st_header *h);  // sorts the entries by name; returns a name that occurs twice, or NULL
ms_status ms__st_add_meta(ms_st_header *h, const char *who, const char *key, size_t key_length, const char *value,
                          size_t value_length);
ms_st_entry *ms__st_find(const ms_st_header *h, const char *name);  // NULL if there is none

// Bytes of an entry's tensor; false when they overflow.
bool ms__st_bytes(const ms_st_entry *e, uint64_t *bytes);
uint64_t ms__st_blocks(const ms_st_entry *e);  // number of blocks of its data

#endif
