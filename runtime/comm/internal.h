// SPDX-License-Identifier: MIT
// comm/internal.h -- what the comm_*.c files share: the control memory of a node, groups, one collective.
//
// The ranks of a node share one *control memory*: a board (who is where), staging windows, and for every group
// a ring of slots per member. Collective number `seq` of a group uses entry seq % RING of every member. A slot is
// written by its member only: its fingerprint, where its input and output can be found, a small payload; then
// `ready`. A member on another node is mirrored into its slot by the group's leader on this node, so that
// whoever waits reads slots and nothing else.
#ifndef MS_COMM_INTERNAL_H
#define MS_COMM_INTERNAL_H

#include <stdatomic.h>
#include <sys/types.h>
#include "comm/error.h"
#include "comm/request.h"
#include "base/activity.h"
#include "comm/transport/transport.h"
#include "base/env.h"

enum {
    RING = 16,
    PAYLOAD = 512,     // bytes that travel with the ready flag
    WINDOW = 1 << 20,  // staging: as much for input and as much for results
    ARENAS = 64,
    SITE = 120,
    UNIT_NAME = 72,
    PART_OF = 96,
    TEXT = 2048,
    ERRORS = 16,  // texts that are kept of published ones
};

// Sending and receiving are the two sides of one collective. OP_REFUSED: a call that its own checks refused.
enum {
    OP_BARRIER = MS_DIST_BARRIER,
    OP_ALL_REDUCE = MS_DIST_ALL_REDUCE,
    OP_ALL_GATHER = MS_DIST_ALL_GATHER,
    OP_REDUCE_SCATTER = MS_DIST_REDUCE_SCATTER,
    OP_BROADCAST = MS_DIST_BROADCAST,
    OP_REDUCE = MS_DIST_REDUCE,
    OP_GATHER = MS_DIST_GATHER,
    OP_SCATTER = MS_DIST_SCATTER,
    OP_ALL_TO_ALL = MS_DIST_ALL_TO_ALL,
    OP_SEND_RECV = MS_DIST_SEND,
    OP_REFUSED,
    OPS
};

// What one rank asks for. Equal on every rank (but for the script's line), or the collective fails before data moves.
typedef struct {
    uint8_t op, dtype, reduction, text_only;  // text_only: unit and model are not compared
    int32_t root;                             // world rank, -1: none
    uint64_t count;                           // elements
    uint64_t agreed;                          // hash of pieces, scale, a script's shape and the caller's value
    uint64_t part;                            // hash of the part of the unit that is served; 0: the whole unit
    int64_t step;                             // of ms.steps
    char site[SITE], unit[UNIT_NAME];         // site: the script's line, in texts only
    uint32_t model;                           // distinguishes models whose units have equal names
    char part_of[PART_OF];                    // the part in words
    uint8_t shaped;                           // dimensions + 1 of a script's tensor; 0: no shape
    uint32_t shape[MS_MAX_DIMS];              // for texts
} ms_fingerprint;

typedef struct {
    _Atomic uint64_t ready, done;  // words: (epoch << 32) + seq + 1
    uint64_t hash, in_at, out_at;
    uint32_t in_arena, out_arena;  // 0: the control memory itself
    uint32_t flags, bytes;         // SLOT_*; of payload
    uint64_t pad0;
    _Atomic uint64_t commit;  // in the slot of the group's first member here: word * 2, +1 = go, +0 = dropped
    _Atomic uint64_t round;
    uint64_t pad1[6];
    ms_fingerprint fingerprint;
    char pad2[1024 - 128 - sizeof(ms_fingerprint) - PAYLOAD];
    char payload[PAYLOAD];  // small inputs; of parts ms_part_place each
} ms_slot;
_Static_assert(sizeof(ms_slot) == 1024, "slots are aligned");

enum { SLOT_DIRECT = 1, SLOT_INLINE = 2 };

typedef struct {
    uint64_t arena, at, stride;
} ms_part_place;
_Static_assert(MS_PARTS * sizeof(ms_part_place) <= PAYLOAD, "parts' places travel with the ready flag");

typedef struct {              // per member of a group
    _Atomic uint64_t issued;  // word of the latest collective that its script issued
    uint8_t executor[RING];   // stream of each of the latest ones
    char pad[40];
} ms_head;

typedef struct {                        // per group: what its latest mismatch is told as, the same on every rank here
    _Atomic uint64_t claimed, written;  // number of that collective: a rank writes the text; the text is there
    char text[TEXT];
    char pad[48];
} ms_mismatch_text;

typedef struct {               // what one executor (compute thread or stream worker) waits in
    _Atomic uint64_t version;  // odd: waiting
    double group;
    uint64_t word;
    int64_t since;
    ms_fingerprint fingerprint;
} ms_waiting;

typedef enum { RANK_RUNNING, RANK_LEFT, RANK_RAISED } rank_state;

typedef struct {
    _Atomic int state, engine_waits;  // engine_waits: stream kind whose record the engine thread waits for, -1: none
    int pid;
    _Atomic int n_arenas;
    struct {
        uint64_t id, bytes, inode;
        int fd;
    } arena[ARENAS];
    ms_waiting wait[MS_STREAMS];
    ms_waiting last;              // that its script issued; for reports, so a torn read does no harm
    struct ms_text {              // of errors it published; written before the board's entry
        _Atomic uint64_t number;  // 0 while the words are written
        char words[TEXT];
    } text[ERRORS];
} ms_board_rank;

typedef struct {
    uint64_t nonce;
    _Atomic uint64_t epoch;            // number of published errors; see comm/error.c
    _Atomic uint64_t error[ERRORS];    // the latest ones, by number: (number << 16) | rank that raised it
    _Atomic int ending;                // rank + 1 whose failure ends the job
    atomic_bool failing, reported;     // why the job ends is about to be told; has been told
    _Atomic uint64_t failed_backward;  // epoch number in which a rank gave up a backward last
    char pad[4096 - 32 - 8 * ERRORS];
    ms_board_rank rank[];  // of the world; those of other nodes stay empty
} ms_board;

struct ms_group {
    double id;
    int n, me;         // me: -1 when this rank is no member
    int *ranks;        // world ranks, in the group's order
    bool far, single;  // has members on several nodes; one on each
    int leader;        // member: the first one on this node
    ms_slot *slots;
    ms_head *heads;
    ms_mismatch_text *mismatch;
    size_t place, bytes;  // of its slots in the control memory
    bool freed;
    bool held;                        // a unit keeps its address: after dist.free_group, too
    uint64_t seq, epoch;              // engine thread only
    int in_flight;                    // its collectives on queues, until they are retired; engine thread only
    uint64_t issued[RING];            // word that this rank issued last on a ring entry; engine thread only
    _Atomic uint64_t finished[RING];  // and the one that its executor is through with: the next may begin
    uint64_t committed[RING];         // ... and that went on to move data; written before `finished`
    ms_group *next;
};

// How a reduction combines the ranks' values.
typedef struct {
    int dtype;
    ms_reduction reduction;
    int n_ranks;
    double scale;  // multiplies the result before it is rounded
} ms_reducer;

typedef struct {
    ms_storage *storage;  // NULL: this rank does not touch it; retained by the issuer
    char *data;
    size_t bytes;
    double numel;  // for the ledger
} ms_operand;

typedef struct ms_coll {
    ms_group *g;
    uint8_t op;
    ms_reducer reducer;  // its dtype is the collective's, whatever the operation
    ms_stream_kind stream;
    int root;                           // member, -1
    uint64_t seq, word, epoch, before;  // before: what must be finished on this ring entry
    size_t count;                       // elements of a block (all_reduce, broadcast: of the tensor)
    double delay;
    ms_operand in, out;
    int n_pieces;
    ms_piece *pieces;  // all_gather
    int n_parts;
    ms_part *parts;    // reduce_scatter: the input, when it is no single tensor; retained
    const char *unit;  // the whole name, interned; NULL: none
    ms_fingerprint fingerprint;
    uint64_t hash;
    bool inline_;            // the input fits the payload
    ms_tensor *keep[2];      // retained
    atomic_bool raised;      // failed by a published error
    bool mismatched;         // failed on every member by itself
    struct ms_far *far;      // leader: messages of the ready exchange
    struct ms_stage *stage;  // of tensors on a GPU: their bytes on the CPU
} ms_coll;

// ---- comm/job/start.c ----
typedef struct {
    int rank, size, local_rank, local_size, nodes, node;
    int *node_of;     // by world rank
    bool up, mapped;  // mapped: every peer here can map this rank's arenas
    const ms_transport *transport;
    char *ctl;  // control memory
    size_t ctl_bytes;
    ms_board *board;
    double timeout;          // seconds
    _Atomic uint64_t epoch;  // that this rank is in
    int64_t step;
} ms_world;
extern ms_world ms__world;

ms_status ms__comm_start(const char *backend, double timeout);  // timeout 0: as the environment says
void ms__transport_lock(void);
void ms__transport_unlock(void);

#define CONTROL_NAME "moonshard-control-"  // of its file, where there is one; then the process and six letters
void ms__comm_clean(
    bool leaving);  // comm/job/clean.c: what killed jobs left under /dev/shm; leaving: this process's files, too

// ---- comm/job/peer.c: what is to be seen of a peer's process on this node ----
typedef struct {
    uint64_t calls, bytes, run;
    int64_t at;
} ms_progress;  // run: ns on a processor; at: when it was last seen to work
typedef enum { PEER_BUSY, PEER_IDLE, PEER_STOPPED } ms_peer_state;
extern pid_t ms__launcher_pid;  // mpirun or its daemon, when that is the parent; 0
void ms__activity_share(void);
const ms_activity *ms__peer_activity(int pid);  // NULL: the engine is not loaded there
// Busy: inside an engine call, runs a program, or has begun a call, read or written since *before, which is brought up
// to date.
ms_peer_state ms__peer_watch(int pid, const ms_activity *page, ms_progress *before);
size_t ms__peer_file(int pid, const char *name, char *text, size_t n);  // under /proc/PID; "" when it cannot be read
int ms__launched_peers(int parent, int *pids, int room);                // its children
bool ms__launcher_ends_job(void);
void ms__wake_launcher(void);  // it ends the job: cuts its sleeps short

void ms__launcher_to_loopback(void);
void ms__fork_waker(void);  // that nudges mpirun until it has gone, whatever becomes of this rank
_Noreturn void ms__exit_first(
    int code);  // of the first rank to fail: a child nudges once it has gone, for its peers may be stopped

// ---- comm/job/join.c: the start of a job ----
void ms__join_begin(double limit);  // the script has come to dist.init
void ms__join_end(bool through);
bool ms__error_reported_by_peer(uint64_t hash);  // another rank here has said this error; else this one is to
void ms__thread_start(void *(*fn)(void *));      // detached, without signals

// ---- comm/job/say.c: errors of scripts, with the rank ----
void ms__report_errors(void);  // from now on
bool ms__error_reported(void);
int ms__rank_launched(void);  // of the world, as the launcher says: known before the ranks have met

// ---- comm/job/end.c: the end of a job ----
void ms__comm_stop(void);  // polite end: MPI_Finalize
bool ms__comm_stopped(void);
void ms__end_catch(void);               // exits are seen from now on
ms_status ms__end_start(void);          // peers' pids are on the board: watch them
_Noreturn void ms__end_stay(int code);  // a peer failed: nothing to add
// This collective cannot end: an error, and the job's end. culprit: the rank that died, -1: this one reports and is the
// first to fail.
ms_status ms__fail_job(ms_status code, int culprit);
void ms__board_state(int state);
bool ms__rank_dead(int rank);

// ---- comm/job/node.c: control memory, peers, waiting ----
char *ms__window(int world_rank, ms_stream_kind stream);  // WINDOW of input, WINDOW of results
uint64_t ms__ctl_offset(const void *p);
ms_status ms__group_place(ms_group *g);          // slots in the control memory
void ms__group_unplace(ms_group *g, bool used);  // they can be another group's; used: zeroed first
ms_group *ms__pair(int from, int to);            // the two-member group behind send and recv
ms_group *ms__pair_by_id(double id);
bool ms__comm_locate(ms_storage *s, const void *p, uint32_t *arena, uint64_t *at);
char *ms__comm_resolve(int rank, uint32_t arena, uint64_t at);  // NULL with the error set
bool ms__comm_can_map(int rank);                                // tried at the start

typedef struct {
    ms_coll *c;
    int64_t begun, now, last, checked;
    int polls;
    bool committed;
} ms_waiter;
void ms__wait_begin(ms_waiter *w, ms_coll *c);  // on the board
ms_status ms__node_layout(void);                // who is here is known
size_t ms__ctl_size(void);
ms_status ms__node_start(void);         // peers' pids are known: watch them
ms_status ms__wait_poll(ms_waiter *w);  // yields, sleeps, looks for peers' errors, deaths, deadlocks, the limit
void ms__wait_moved(ms_waiter *w);      // what was waited for is there: the next wait begins anew
void ms__wait_end(ms_waiter *w);

// ---- comm/error.c: errors that a script survives ----
ms_status ms__comm_meet_error(void);        // engine thread: the next published error, once; MS_OK when there is none
bool ms__comm_error_since(uint64_t epoch);  // one was published that a rank in that epoch has not met
const char *ms__comm_error_after(uint64_t epoch);  // its text, until this thread's next call
// Engine thread: a failed collective of that epoch was reported, as text (NULL: as published); not again.
void ms__comm_reported(uint64_t epoch, const char *text);
void ms__comm_backward_failed(uint64_t epoch);  // a rank gave one up by the error of that epoch
// Any thread: this rank alone cannot go on with c, for the reason that ms_error() gives. Its peers fail like it,
// without a wait.
ms_status ms__comm_lost(ms_coll *c);
bool ms__comm_publish_as(uint64_t number, const char *text);  // as it is; false when somebody else was first

// ---- comm/request.c ----
enum {
    REDUCES = 1,
    IN_PLACE = 2,        // on one tensor, the output
    CUT = 4,             // the input has a block for each member
    SIZED_BY_INPUT = 8,  // else by the output
    IN_PAYLOAD = 16,     // a small input travels with the ready flag
    IN_BLOCK = 32,       // the smaller tensor may be this rank's block of the larger one
};
typedef enum { NO_RANK, EVERY_RANK, THE_ROOT, THE_OTHERS } ms_side;  // send/recv: the sender is the root
typedef struct {
    const char *name;
    int kind;
    ms_side reads, writes;
    ms_stream_kind stream;
} ms_coll_row;
extern const ms_coll_row ms__coll_rows[OPS];
#define ROW(op) (&ms__coll_rows[op])
static inline bool reduces(int op) { return ROW(op)->kind & REDUCES; }
static inline bool on_side(ms_side side, int member, int root)
{
    return side == EVERY_RANK || (side == THE_ROOT && member == root) || (side == THE_OTHERS && member != root);
}
static inline bool is_rooted(int op) { return ROW(op)->reads == THE_ROOT || ROW(op)->writes == THE_ROOT; }
// The member of g that is the root; of what has none, and when it is no member: -1.
int ms__coll_root(const ms_group *g, int op, int root);
ms_status ms__coll_make(const ms_request *r, ms_coll **out);

// ---- comm.c: issuing ----
ms_coll *ms__coll_new(int op);  // zeroes; NULL with the error set
void ms__coll_drop(ms_coll *c);
// Takes c over, whose storages are borrowed. On the compute stream it is complete on return; work may be NULL.
ms_status ms__coll_issue(ms_coll *c, ms_work **work);
int ms__group_member(const ms_group *g, int rank);  // of a world rank; -1: none

// ---- comm/exchange.c ----
ms_status ms__coll_run(ms_coll *c);
ms_status ms__coll_fail(const ms_coll *c, const char *what);  // names the collective
void ms__group_text(const ms_group *g, char *out, size_t n);
void ms__fingerprint_text(const ms_fingerprint *p, char *out, size_t n);
uint64_t ms__fingerprint_hash(const ms_fingerprint *p, bool with_step);
static inline ms_slot *slot_of(const ms_group *g, int member, uint64_t seq)
{
    return &g->slots[(size_t)member * RING + seq % RING];
}

// ---- comm/move.c ----
ms_status ms__move_inline(ms_coll *c);
ms_status ms__move_direct(ms_coll *c);
ms_status ms__move_staged(ms_waiter *w);
ms_status ms__coll_alone(ms_coll *c);  // in a group of one

// ---- comm/device.c: tensors on a GPU ----
bool ms__coll_on_device(const ms_coll *c);
ms_status ms__coll_stage(ms_coll *c, ms_storage **marked);  // c's storages become the CPU's; marked: the output's
ms_status ms__coll_unstage(ms_coll *c);                     // by whoever ran c
void ms__coll_stage_drop(ms_coll *c);
ms_status ms__coll_alone_there(ms_coll *c, int in_device, int out_device);

// ---- comm/job/far.c: other nodes ----
ms_status ms__far_ready(ms_coll *c);  // leader: one turn of exchanging ready slots
ms_status ms__far_reduce(ms_waiter *w, char *const *windows, char *result, size_t n);
// The members' windows of other nodes land in mirror, `bytes` of each, one behind the other.
ms_status ms__far_gather(ms_waiter *w, char *const *windows, char *mirror, size_t bytes);
// In a group with one member on every node: sends `in` to all other members, and receives theirs: bytes[k] bytes of
// member k land at out + k * stride.
ms_status ms__far_exchange(ms_waiter *w, const char *in, char *out, size_t stride, const size_t *bytes);
// A reduction of two members, of which bytes[k] are made by member k, here to `mine`: each sends what the other lacks,
// both add in the order of ranks. The peer's part comes to `theirs`; NULL: it stays there. source: bytes [at, at + n)
// of what this rank has for a member's part; where they are not in one place, brought together in the room numbered k,
// 0 to 4.
typedef const char *ms_far_source(ms_coll *c, int member, size_t at, size_t n, size_t k);
ms_status ms__far_pair(ms_waiter *w, ms_far_source *source, const size_t *bytes, char *mine, char *theirs);
void ms__far_end(ms_coll *c);
void ms__far_error(uint64_t number, const char *text, bool backward);
void ms__far_poll(void);

// ---- comm/reduce.c ----
int ms__acc_size(int dtype);
void ms__acc_load(void *acc, const void *src, int dtype, size_t n);
void ms__acc_add(const ms_reducer *how, void *acc, const void *src, size_t n);
// The last step: mean, scale, rounding. acc is changed.
void ms__acc_store(const ms_reducer *how, void *dst, void *acc, size_t n);
// Each of dst[0..n_dst) = reduction of src[0..n_ranks) over n elements. A dst may be one of the sources.
void ms__reduce(const ms_reducer *how, const char *const *src, int n_dst, char *const *dst, size_t n);
void ms__comm_copy(void *dst, const void *src, size_t n);

#endif
