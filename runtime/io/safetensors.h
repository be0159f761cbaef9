// SPDX-License-Identifier: MIT
// io/safetensors.h -- the header of a safetensors file: parsed with every check before anything is sized by
// it, and written. files.c does the reading and writing of bytes.
//
// A file is: 8 bytes, the header's length N (little-endian); N bytes of JSON; the data. The JSON is one
// object: "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, and "__metadata__", an
// object of strings.
//
// Files written here have sums, so that no damaged byte goes unnoticed. They stay plain safetensors: the first metadata
// is
//   "moonshard.sums": "xxh64 1048576 HEADER BLOCKS"
// with 16 hexadecimal digits of XXH64 for the header (its length and text, these 16 digits taken as zeros), and 16 for
// every block of 1 MiB of every tensor, in the order of the data; each tensor begins a block. A mark of blanks in front
// of the closing brace says that sums are there: a damaged name of the metadata does not make the file one without
// them. A program that keeps metadata but writes a header of its own loses the mark, and the sums, which no longer
// hold, are passed over.
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
    char *sums;  // 16 digits a block; NULL: the file has none
} ms_st_header;

// Parses text (the JSON) of a file whose data is data_bytes long. who and path stand in messages. Where the file has
// sums and verify is set, the header's own is compared first. On failure nothing needs freeing.
ms_status ms__st_parse(ms_st_header *out, const char *who, const char *path, const char *text, size_t length,
                       uint64_t data_bytes, bool verify);
void ms__st_clear(ms_st_header *h);

// The header's JSON, padded with blanks so that the data begins at a multiple of 8: malloced. Entries have their
// offsets and blocks; sums: where the digits of the blocks go. st_seal fills in the header's own sum when they are
// there.
ms_status ms__st_format(const ms_st_header *h, const char *who, char **text, size_t *length, char **sums);
void ms__st_seal(char *text, size_t length);
void ms__st_prefix(size_t length, unsigned char *out);  // the 8 bytes in front of the text
const char *ms__st_sum(const char *text);               // of a sealed text: 16 digits

// Adds an entry (offsets 0) or a metadata pair; copies the strings.
ms_status ms__st_add(ms_st_header *h, const char *who, const char *name, size_t name_length, int dtype, int ndim,
                     const int64_t *shape);
ms_status ms__st_add_meta(ms_st_header *h, const char *who, const char *key, size_t key_length, const char *value,
                          size_t value_length);
ms_st_entry *ms__st_find(const ms_st_header *h, const char *name);  // NULL if there is none

// Bytes of an entry's tensor; false when they overflow.
bool ms__st_bytes(const ms_st_entry *e, uint64_t *bytes);
uint64_t ms__st_blocks(const ms_st_entry *e);  // how many blocks its data has

#endif
