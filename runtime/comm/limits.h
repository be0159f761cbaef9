// SPDX-License-Identifier: MIT
// comm/limits.h -- the sizes and numbers that limit collectives, and sizes of texts.
#ifndef MS_COMM_LIMITS_H
#define MS_COMM_LIMITS_H

enum {
    RANKS = 1024,      // at most so many ranks in a job
    RING = 16,         // slots of a member of a group: at most so many of its collectives are in flight
    SLOT = 1152,       // bytes of a slot: a multiple of a cache line
    PAYLOAD = 512,     // bytes sent with the ready flag
    WINDOW = 1 << 20,  // bytes of a staging buffer: each rank has one for input and one for results per stream
    ARENAS = 64,       // arenas of a rank that peers can map
    // Bytes of texts: of a request's line, unit and part; of the error that breaks a group; about a lost node; about
    // one request; about the ranks of a group; about what a rank does; of a library's error; of why a rank is missing.
    SITE = 120,
    UNIT_NAME = 72,
    PART_OF = 96,
    TEXT = 2048,
    LOST = 204,
    WHAT = 400,
    MEMBERS = 200,
    WHERE = 600,
    WHY = 1000,
    CAUSE = 300,
};

#endif
