// SPDX-License-Identifier: MIT
// base/utf8.h -- validation of UTF-8, for names in JSON files.
#ifndef MS_UTF8_H
#define MS_UTF8_H

#include <stddef.h>

// Returns the first byte in [s, end) that is not valid UTF-8, or NULL. Overlong forms, surrogates and code points above
// U+10FFFF are invalid (Unicode 15, table 3-7).
static inline const unsigned char *ms__utf8_error(const unsigned char *s, const unsigned char *end)
{
    while (s < end) {
        unsigned char c = *s;
        int more = c < 0x80                 ? 0
                   : c >= 0xc2 && c <= 0xdf ? 1
                   : c >= 0xe0 && c <= 0xef ? 2
                   : c >= 0xf0 && c <= 0xf4 ? 3
                                            : -1;
        if (more < 0 || end - s <= more) return s;
        unsigned char low = c == 0xe0   ? 0xa0
                            : c == 0xf0 ? 0x90
                                        : 0x80,
                      high = c == 0xed   ? 0x9f
                             : c == 0xf4 ? 0x8f
                                         : 0xbf;
        for (int k = 1; k <= more; k++) {
            if (s[k] < low || s[k] > high) return s;
            low = 0x80;
            high = 0xbf;
        }
        s += more + 1;
    }
    return NULL;
}

#endif
