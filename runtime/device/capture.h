// SPDX-License-Identifier: MIT
// device/capture.h -- captured steps: the work of a training step, recorded while the step runs once and repeated
// without the script.
//
// A captured step is a list of pieces of work, each a function and an argument block whose pointers are final. The
// files that do the work also record it: ops/captured.c calls of operators, fills and copies; comm/issue/captured.c
// collectives; train/pass.c, clip.c, unscale.c and scaler.c their work. autograd/captured.c notes what the step did
// to the grads of leaves, and train/captured.c has the public functions.
//
// Memory that is allocated during the recording is pinned (ms_pins in pool.h): nothing else gets it before the step is
// freed, so the list can repeat the recorded order of uses.
//
// The first repetition makes CUDA graphs of sequences of fixed work on a GPU (ms__capture_fixed); it and all later
// ones launch them. What changes between the repetitions of fixed work, such as the offset of random numbers and the
// factors of an optimizer, lies in memory of the device, into which the host copies it before it launches the graph.
// All other work is queued piece by piece.
#ifndef MS_CAPTURE_H
#define MS_CAPTURE_H

#include "device/capturing.h"
#include "device/pool.h"
#include "device/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

// Repeats a piece of work. arg: the work's argument block, which the function may change.
typedef ms_status (*ms_repeat_fn)(void *arg, ms_captured *c);

typedef struct ms_captured_work ms_captured_work;
typedef struct ms_captured_chunk ms_captured_chunk;

// How a piece of work becomes part of a CUDA graph. Its *numbers* are `bytes` bytes that change between repetitions.
typedef struct ms_fixed {
    // Queues the launches of the work, while they are recorded as part of the graph. At each launch of the graph the
    // numbers are at `there`, on the device. NULL: the work's repeat function does it.
    ms_status (*queue)(void *arg, ms_captured *c, void *there);
    // Before each launch of the graph: writes the numbers to `here`, and does what a repetition of the work does on the
    // host. The pieces of a graph advance in their order. NULL: nothing changes.
    ms_status (*advance)(void *arg, ms_captured *c, void *here);
    size_t bytes;
} ms_fixed;

struct ms_captured {
    ms_captured_work *first, *last;
    ms_captured_chunk *chunks;
    int n_work, n_graphs, n_graphed;  // n_graphed: pieces of work that are parts of graphs
    ms_pins *pins;
    ms_pins *room;  // memory of graphs: temporary memory of their kernels, what changes between launches; or NULL
    bool graphed;   // graphs have been made, or are not possible
    int gpu;        // the device of the graph that was made last; MS_CPU: there is none
    char *refusal;  // why the step cannot be captured; NULL: so far it can
    // Events of queued work, by number from 1. A piece of work that queues something sets its event; a later piece
    // waits for that event.
    ms_pending **events;
    int n_events, cap_events;
    // The random generator when the recording began, and when the current repetition began.
    uint64_t seed, offset, seed_now, offset_now;
    uint64_t draws;              // how many offsets of the random generator the step uses
    uint64_t first_node;         // nodes of the tape with a lower sequence number are older than the step
    bool sends;                  // the step has collectives of several ranks
    struct ms_choices *choices;  // train/scaler.c: optimizer passes, and what gradient scalers decide; NULL: none
    bool left;                   // ms_capture_leave was called: the recording is discarded
    ms_captured_work *next;      // in a repetition, the work that follows the current one
    struct ms_seen *seen;        // ops/captured.c: the tensors and storages that the work uses
    struct ms_noted *noted;      // autograd/captured.c: the leaves whose grads the step uses or sets
    struct ms_ends *ends;        // train/captured.c: the step's inputs and results
};

// Appends work with an argument block of `bytes` bytes, which the caller fills. drop releases what the block refers to;
// NULL: nothing. Returns NULL if there is no memory: the work goes on, and the step is refused when its recording ends.
void *ms__capture_work(ms_captured *c, ms_repeat_fn repeat, void (*drop)(void *arg), size_t bytes);
// States that the work that was added last only queues the same launches on the compute stream of a GPU in every
// repetition, with the same arguments, apart from what `how` does (NULL: nothing).
void ms__capture_fixed(ms_captured *c, int device, const ms_fixed *how);
// As ms__capture_fixed, for any piece of work w, before the first repetition. Replaces what was stated about w earlier.
void ms__capture_fixed_at(ms_captured *c, ms_captured_work *w, int device, const ms_fixed *how);
// For the repeat function of fixed work with how->bytes > 0: does once, without a graph, what a launch of a graph does.
ms_status ms__fixed_repeat(void *arg, ms_captured *c, int device, const ms_fixed *how);
// Adds a piece of work that does nothing, and returns it. NULL: no memory.
ms_captured_work *ms__capture_mark(ms_captured *c);
// In a repetition, called by a piece of work: the work between it and the mark is not repeated.
void ms__capture_skip_to(ms_captured *c, ms_captured_work *mark);
// Called with a new tensor of values that the script gave, while a step is recorded. *t is replaced by a copy, to
// which repetitions copy the values again, or released on failure. Set by ops/captured.c when the library is loaded.
struct ms_tensor;
extern ms_status (*ms__capture_constant)(struct ms_tensor **t);

int ms__capture_event(ms_captured *c, ms_pending *e);  // gives an event of queued work its number; 0: no memory
// In a repetition: e is now the event of this number.
void ms__capture_queued(ms_captured *c, int number, ms_pending *e);

ms_captured *ms__captured_new(void);
// Runs all work, in order. On return no collective of the step is in flight.
ms_status ms__captured_repeat(ms_captured *c);
void ms__captured_drop(ms_captured *c);  // frees the list, its memory and c

#ifdef __cplusplus
}
#endif

#endif
