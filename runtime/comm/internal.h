// SPDX-License-Identifier: MIT
// comm/internal.h -- definitions shared by the files of comm: the control memory of a node, groups, collectives.
//
// The ranks of a node share a *control memory*: a board (the state of every rank), staging windows, and for every group
// a ring of slots per member. The collectives of a group are counted by `seq`, from 0 in each epoch; each uses entry
// seq % RING of every member's ring. Only the member itself writes its slot, apart from `commit`: a fingerprint, the
// places of its input and output, a small payload, and finally `ready`. The group's leader on this node copies the
// slots of members on other nodes into their slots here, so waiting ranks read local slots only.
//
// The epoch is the number of recoveries (comm/broken.c). A collective's `number` is (epoch << 32) + seq + 1: it
// increases with every collective of the group, also across epochs. Messages show the lower 32 bits.
#ifndef MS_COMM_INTERNAL_H
#define MS_COMM_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include "comm/broken.h"
#include "comm/request.h"
#include "base/activity.h"
#include "comm/transport/transport.h"
#include "base/env.h"
#include "device/device.h"

enum {
    RING = 16,
    SLOT = 1152,       // bytes of a slot: a multiple of a cache line
    PAYLOAD = 512,     // bytes sent with the ready flag
    WINDOW = 1 << 20,  // bytes of a staging buffer: each rank has one for input and one for results per stream
    ARENAS = 64,
    SITE = 120,
    UNIT_NAME = 72,
    PART_OF = 96,
    TEXT = 2048,
    LOST = 204,  // bytes of the text about a lost node
};

// A send and its receive are one collective. OP_REFUSED stands for a call whose argument checks failed.
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

// What one rank requests. The fields that ms__fingerprint_hash reads must be equal on all members; otherwise the
// collective fails before data moves.
typedef struct {
    uint8_t op, dtype, reduction, pad;  // pad: 0
    int32_t root;                       // world rank, or -1
    uint64_t refused;                   // number of calls of the group that the rank has refused in this epoch
    uint64_t count;                     // number of elements
    uint64_t agreed;  // hash of ms_request.agreed, `native`, pieces or parts, scale, the script's shape
    uint64_t part;    // hash of the part of the unit that is communicated; 0: the whole unit
    int64_t step;     // number of the step of ms.steps; -1: none
    char site[SITE], unit[UNIT_NAME];  // site: the script's line, used only in messages
    uint32_t model;                    // distinguishes models whose units have equal names
    char part_of[PART_OF];             // description of the part
    uint8_t native;                    // moved between GPUs by the transport's library; used in messages
    uint8_t alias;                     // index in ms__coll_aliases; used in messages
    uint8_t shaped;                    // number of dimensions + 1 of the script's tensor; 0: no shape
    uint32_t shape[MS_MAX_DIMS];       // used in messages
} ms_fingerprint;

typedef struct {
    _Atomic uint64_t ready, done;  // numbers of the collectives that the member is ready for and has completed
    uint64_t hash, in_at, out_at;
    uint32_t in_arena, out_arena;  // arenas of input and output, from 1; 0: the control memory. *_at: offsets in them
    uint32_t flags, bytes;         // SLOT_*; size of the payload
    int64_t arrived;               // when the member made the call, in ns of the job's clock; 0: it records no profile
    _Atomic uint64_t commit;       // in the leader's slot: 2 * number + 1: committed, 2 * number: abandoned
    _Atomic uint64_t round;        // staged moves: the round that the member has reached
    // For tensors that stay on a GPU (comm/gpu.c): numbers of collectives. left: the latest for whose events the member
    // will queue no more waits. refused: the latest in which it could not map a peer's memory. failed: the latest in
    // which it could not queue its part.
    _Atomic uint64_t left, refused, failed;
    uint32_t begin, end;       // the member's events. begin: its tensors are ready; end: it has accessed all tensors
    _Atomic uint64_t reached;  // comm/native.c: number of the latest collective that the member's GPU has reached
    uint64_t pad1[1];
    ms_fingerprint fingerprint;
    char pad2[SLOT - 128 - sizeof(ms_fingerprint) - PAYLOAD];
    char payload[PAYLOAD];  // a small input, or an ms_part_place per part
} ms_slot;
_Static_assert(sizeof(ms_slot) == SLOT && SLOT % 128 == 0, "slots are aligned");

// DIRECT: peers can map the member's tensors. INLINE: the input is in the payload. GPU: all tensors are in memory of a
// GPU that peers can map; UNTRIED: not all peers have tried to map it.
enum { SLOT_DIRECT = 1, SLOT_INLINE = 2, SLOT_GPU = 4, SLOT_UNTRIED = 8 };

typedef struct {  // where a part's tensor is: arena, offset in it, bytes from one member's block to the next
    uint64_t arena, at, stride;
} ms_part_place;
_Static_assert(MS_PARTS * sizeof(ms_part_place) <= PAYLOAD, "the places of all parts fit into the payload");

typedef struct {              // one per member of a group
    _Atomic uint64_t issued;  // number of the latest collective issued by the member's script
    uint8_t executor[RING];   // for each of the latest collectives, the stream that runs it
    char pad[40];
} ms_head;

typedef struct {  // whether and why a group is broken, the same on every rank of this node
    // 1 + the epoch in which the group was broken. claimed: set by the rank that writes the text; written: set when the
    // text is complete.
    _Atomic uint64_t claimed, written;
    char text[TEXT];
    char pad[48];
} ms_broken;

typedef struct {               // the collective that an executor (the engine thread or a stream's worker) waits in
    _Atomic uint64_t version;  // odd while the executor waits
    double group;
    uint64_t number;
    int64_t since;
    ms_fingerprint fingerprint;
} ms_waiting;

typedef enum { RANK_RUNNING, RANK_LEFT, RANK_RAISED } rank_state;

typedef struct {
    _Atomic int state, engine_waits;  // engine_waits: the stream that the engine thread waits for; -1: none
    int pid;
    _Atomic int n_arenas;
    // Where this rank's directory of GPU memory is (comm/gpu_memory.c): an arena, 0: none; gpu_at: the offset in it
    _Atomic uint32_t gpu_arena;
    uint64_t gpu_at;
    _Atomic int64_t lines;  // number of lines of the prompt that the rank has ended
    // Of a rank on another node: the latest number in the group of dist.recover at which it was waiting for this node
    _Atomic uint64_t recovers;
    struct {
        uint64_t id, bytes, inode;
        int fd;
    } arena[ARENAS];
    ms_waiting wait[MS_STREAMS];
    ms_waiting last;  // the latest collective issued; read only by reports, so an inconsistent read does no harm
} ms_board_rank;

typedef struct {
    uint64_t nonce;
    _Atomic int ending;  // 1 + the rank whose failure ends the job; 0: none
    // failing: a rank of this node will report why the job ends; reported: a rank has begun to report it
    atomic_bool failing, reported;
    // The latest comparison of clocks, in ns: when, and by how much rank 0's clock was ahead of this node's
    int64_t clock_at, clock_ahead;
    _Atomic int lost;      // 1 + the first rank of a node that has died or cannot be reached (comm/job/link.c); 0: none
    char lost_text[LOST];  // what to say about it; written before `lost`
    _Alignas(128) ms_board_rank rank[];  // indexed by world rank; entries of other nodes are unused
} ms_board;

struct ms_group {
    double id;
    int n, me;         // me: this rank's member number; -1 if it is not a member
    int *ranks;        // world ranks, in the order of the group
    bool far, single;  // far: has members on other nodes; single: has at most one on each node
    int leader;        // the first member on this node
    ms_slot *slots;
    ms_head *heads;
    ms_broken *broken;
    size_t place, bytes;  // where the group's slots are in the control memory
    bool freed;
    // Number of holders (ms__group_hold): the group's address stays valid for them, also after dist.free_group
    int holders;
    uint64_t seq, epoch;  // number of collectives issued in `epoch`; engine thread only
    uint64_t refused;     // number of refused calls in `epoch`; engine thread only
    uint64_t told;        // 1 + the epoch of the latest break that the script has received; engine thread only
    int in_flight;        // number of the group's queued collectives that are not retired yet; engine thread only
    // For each entry of the ring of slots: number of the latest collective that this rank issued; engine thread only.
    uint64_t issued[RING];
    // For each entry of the ring: number of the latest collective that this rank has finished; the entry may then be
    // reused.
    _Atomic uint64_t finished[RING];
    // For each entry of the ring: number of the latest collective that was committed; written before `finished`.
    uint64_t committed[RING];
    ms_gpu_group *gpu;  // the group's communicator in the transport's library (NCCL); NULL: none
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
    ms_storage *storage;  // NULL: this rank does not access the tensor; retained by the issuer
    char *data;
    size_t bytes;
    double numel;  // number of elements, for ms_dist_record_get
} ms_operand;

typedef struct ms_native ms_native;
typedef struct {             // tensors on a GPU
    struct ms_stage *stage;  // set if they are copied to CPU memory
    ms_native *native;       // set if the transport's library moves them
    struct ms_there *there;  // set if they stay on the GPU: comm/gpu.c
} ms_coll_gpu;

typedef struct ms_coll {
    ms_group *g;
    uint8_t op;
    ms_reducer reducer;  // reducer.dtype: the collective's dtype, also if it reduces nothing
    ms_stream_kind stream;
    int root;  // member number, or -1
    uint64_t seq, number, epoch;
    uint64_t before;  // number of the earlier collective that used the same slots (seq % RING); it must have finished
    size_t count;     // elements of a block (all_reduce, reduce, broadcast, send/recv: of the tensor)
    double delay;     // seconds by which a spec delays this collective (ms_dist_set_delay)
    int64_t lines;    // lines of the prompt that this rank had ended when it issued the collective
    ms_operand in, out;
    int n_pieces;
    ms_piece *pieces;  // used by all_gather
    int n_parts;
    ms_part *parts;    // for reduce_scatter, if the input consists of several tensors; retained
    const char *unit;  // the full name, interned; NULL: none
    ms_fingerprint fingerprint;
    uint64_t hash;
    bool inline_;        // the input is sent in the slot's payload
    ms_tensor *keep[2];  // the request's input and output, retained
    atomic_bool raised;  // failed because the group is broken
    struct ms_far *far;  // set on the leader: messages that exchange ready slots with other nodes
    ms_coll_gpu gpu;
} ms_coll;

// ---- comm/job/start.c ----
typedef struct {
    int rank, size, local_rank, local_size, nodes, node;
    int *node_of;     // the node of each rank, indexed by world rank
    int *local_of;    // rank within this node, indexed by world rank; -1: on another node
    bool up, mapped;  // up: dist.init has succeeded; mapped: every rank of the node can map the others' arenas
    const ms_transport *transport;
    char *ctl;  // the control memory
    size_t ctl_bytes;
    ms_board *board;
    double timeout;          // in seconds
    _Atomic uint64_t epoch;  // number of recoveries
    int64_t step;
} ms_world;
extern ms_world ms__world;

ms_status ms__clock_measure(void);  // comm/job/clock.c
void ms__clock_take(void);
ms_status ms__comm_start(const char *backend, double timeout);  // timeout 0: use the environment's setting
void ms__transport_lock(void);
void ms__transport_unlock(void);

#define CONTROL_NAME "moonshard-control-"  // a control memory's file name; the process id and six letters follow
// comm/job/clean.c: removes files left by killed jobs; leaving: also removes this process's files.
void ms__comm_clean(bool leaving);

// ---- comm/job/peer.c: processes of peers on this node, observed from outside ----
typedef struct {
    uint64_t calls, bytes, run;
    int64_t at;
} ms_progress;  // engine calls begun, bytes read and written, ns run on a processor, time of the last progress
typedef enum { PEER_BUSY, PEER_IDLE, PEER_STOPPED } ms_peer_state;
extern pid_t ms__launcher_pid;  // mpirun or its daemon if that is the parent process, otherwise 0
void ms__activity_share(void);
const ms_activity *ms__peer_activity(int pid);  // NULL: that process has not loaded the engine
// What a peer does. PEER_BUSY: it is inside an engine call, runs another program, has begun an engine call, read or
// written since *before, or waits for a processor or a disk. Updates *before if it is busy, unless it only waits.
ms_peer_state ms__peer_watch(int pid, const ms_activity *page, ms_progress *before);
// Reads a file under /proc/PID as a string; "" if it cannot be read. Returns the length.
size_t ms__peer_file(int pid, const char *name, char *text, size_t n);
int ms__launched_peers(int parent, int *pids, int room);  // lists at most `room` children of the launcher
bool ms__launcher_ends_job(void);                         // whether mpirun is ending the job
void ms__wake_launcher(void);  // to be called repeatedly while mpirun ends the job: interrupts its sleeps

void ms__launcher_to_loopback(void);
// Starts a child process that wakes mpirun until mpirun has exited, for at most 1.5 s, even if this rank is killed. If
// mpirun has not exited many seconds later, the child kills it.
void ms__fork_waker(void);
// Called by the first rank to fail. A child process keeps waking mpirun, because the peers may be stopped.
_Noreturn void ms__exit_first(int code);

// ---- comm/job/join.c: the start of a job ----
void ms__join_begin(double limit);               // called when the script calls dist.init
void ms__join_end(bool through);                 // through: dist.init has succeeded
bool ms__error_reported_by_peer(uint64_t hash);  // whether a peer reports the error with this hash
int ms__rank_launched(void);                     // world rank from the launcher's variables, known before dist.init
// Starts a detached thread that receives no signals. False: no thread could start; a failed job then ends later.
bool ms__comm_thread(void *(*fn)(void *));

// ---- comm/job/report.c: uncaught errors of scripts, with the rank ----
void ms__report_errors(void);  // starts reporting errors
bool ms__error_reported(void);

// ---- comm/job/end.c: the end of a job ----
void ms__comm_stop(void);  // orderly end, with MPI_Finalize
bool ms__comm_stopped(void);
void ms__end_catch(void);               // registers the exit handler
ms_status ms__end_start(void);          // starts watching the peers whose pids are on the board
_Noreturn void ms__end_stay(int code);  // called when a peer has failed and reported why
// To be called before a rank exits that has just printed why: srun loses what a task prints in its last 50 ms if
// another task was killed (13 of 30 times).
void ms__end_settle(void);
// To be called when a collective cannot complete: returns code, whose error is set, and ends the job soon. culprit: the
// rank that died; -1: this rank is the first to fail and reports.
ms_status ms__fail_job(ms_status code, int culprit);
bool ms__rank_dead(int rank);                        // on another node: whether its node is lost
void ms__death_text(int rank, char *out, size_t n);  // writes that a dead rank has died, and of what as far as is known
#define MS_OUT_OF_MEMORY "if by SIGKILL, memory may have run out"
// Ends the job because the node of which `rank` is the first is lost, for the reason in `text`.
_Noreturn void ms__end_node(int rank, const char *text);

// ---- comm/job/link.c: deaths on other nodes ----
ms_status ms__link_start(void);
void ms__link_left(void);   // tells the other nodes that the scripts of this node have ended
void ms__link_ended(void);  // tells them that a rank of this node has reported why the job ends

// ---- comm/job/signals.c ----
void ms__signals_start(void);  // in a rank of a launcher: from now on signals that end it are reported

// ---- comm/job/node.c: the control memory ----
ms_status ms__node_layout(void);  // needs ms__world.node_of
ms_status ms__node_start(void);   // watches peers; needs their process ids on the board
size_t ms__ctl_size(void);
uint64_t ms__ctl_offset(const void *p);
char *ms__window(int world_rank, ms_stream_kind stream);  // WINDOW bytes for input, then WINDOW bytes for results
ms_status ms__group_place(ms_group *g);                   // allocates the group's slots in the control memory
void ms__group_unplace(ms_group *g, bool used);           // frees the slots for other groups; used: zero them first
extern pthread_mutex_t ms__groups_lock;                   // protects the list of groups, which other threads read, too
ms_group *ms__group_listed(double id);                    // also finds groups without this rank; NULL: no such group
ms_group *ms__pair(int from, int to);                     // the two-member group used by send and recv
ms_group *ms__pair_by_id(double id);
extern ms_group *ms__meeting;                 // the group of all ranks in which dist.recover meets; never broken
void ms__each_group(void (*fn)(ms_group *));  // calls fn for all groups and pairs with this rank; engine thread

// ---- comm/job/arena.c: the memory of peers ----
ms_status ms__arenas_start(void);
bool ms__comm_locate(ms_storage *s, const void *p, uint32_t *arena, uint64_t *at);
char *ms__comm_resolve(int rank, uint32_t arena, uint64_t at);  // the address in this process; NULL with the error set
bool ms__comm_can_map(int rank);  // tries to map that rank's arena, at the start of the job

// ---- comm/job/wait.c ----
typedef struct {
    ms_coll *c;
    // In ns (ms__now_ns). begun: start of the wait, 0: not begun; now, last: the current and the previous poll;
    // checked: the latest check of the peers, 0: none.
    int64_t begun, now, last, checked;
    int polls;
    bool committed;
    bool told;       // ms__far_recovers was called
    uint64_t round;  // staged moves: the round that this rank has reached
} ms_waiter;
void ms__wait_begin(ms_waiter *w, ms_coll *c);
// Yields or sleeps. From time to time checks for broken groups, dead peers, deadlocks and the timeout.
ms_status ms__wait_poll(ms_waiter *w);
void ms__rank_text(int rank, char *out, size_t n);  // writes what a rank does, as far as this node knows
void ms__wait_moved(ms_waiter *w);  // to be called when a wait has succeeded: resets the waiter for the next wait
void ms__wait_end(ms_waiter *w);
// Both fail with MS_ECOMM and a text that names the collective.
ms_status ms__coll_fail(const ms_coll *c, const char *what);
ms_status ms__request_fail(const ms_group *g, uint64_t number, const ms_fingerprint *p, const char *what);
void ms__group_text(const ms_group *g, char *out, size_t n);

// ---- comm/job/deadlock.c ----
ms_status ms__wait_deadlock(ms_waiter *w);  // breaks the groups of a deadlock that w's wait is part of, and fails

// ---- comm/broken.c: broken groups ----
// Breaks g in that epoch, unless it is broken already: `text` then is the error of all its collectives. Any thread.
void ms__break(ms_group *g, uint64_t epoch, const char *text);
void ms__break_by_me(ms_group *g, uint64_t epoch, const char *why);  // as ms__break, by an error of this rank
bool ms__break_here(ms_group *g, uint64_t epoch, const char *text);  // on this node only; true: was not broken
static inline bool ms__is_broken(const ms_group *g, uint64_t epoch)
{
    return atomic_load_explicit(&g->broken->claimed, memory_order_acquire) > epoch;
}
void ms__broken_reason(const ms_group *g, uint64_t epoch, char *text);  // copies TEXT bytes: why g is broken
ms_status ms__broken_fail(ms_coll *c);  // fails c, whose group is broken, with the reason
// Breaks the group of c, which has failed on this rank with `status` and the text in ms_error().
void ms__coll_failed(ms_coll *c, ms_status status);
// Engine thread: fails if g is broken. call: its name, for the message.
ms_status ms__group_whole(ms_group *g, const char *call);
void ms__group_received(ms_group *g);  // engine thread: the script receives ms_error(), of a collective of g
// Whether a collective of g that has begun cannot complete: g is broken, and the job is ending.
bool ms__comm_is_lost(const ms_group *g, uint64_t epoch);

// ---- comm/request.c ----
enum {
    REDUCES = 1,
    IN_PLACE = 2,        // the output is the input tensor
    CUT = 4,             // the input has one block per member
    SIZED_BY_INPUT = 8,  // the request's size is the input's; without this flag, the output's
    IN_PAYLOAD = 16,     // a small input is put into the slot's payload
    IN_BLOCK = 32,       // the smaller tensor may be this rank's block within the larger one
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

// Other names of operations, by the MS_DIST_* of the name less MS_DIST_RECV; 0: none.
enum { ALIASES = MS_DIST_ALL_TO_ALL_SINGLE - MS_DIST_RECV + 1 };
typedef struct {
    int op;
    const char *name;
} ms_coll_alias;
enum { RECOVER = ALIASES };  // the meeting of dist.recover
extern const ms_coll_alias ms__coll_aliases[ALIASES + 1];
const char *ms__request_name(const ms_fingerprint *p);  // as which the script called it
static inline bool reduces(int op) { return ROW(op)->kind & REDUCES; }
static inline bool on_side(ms_side side, int member, int root)
{
    return side == EVERY_RANK || (side == THE_ROOT && member == root) || (side == THE_OTHERS && member != root);
}
static inline bool is_rooted(int op) { return ROW(op)->reads == THE_ROOT || ROW(op)->writes == THE_ROOT; }
// The root's member number in g; -1 if the operation has no root or the root is not a member.
int ms__coll_root(const ms_group *g, int op, int root);
ms_status ms__coll_make(const ms_request *r, ms_coll **out);
void ms__coll_not_inline(ms_coll *c);  // clears c->inline_: the input is not sent in the slot's payload after all

// ---- comm.c: issuing ----
extern uint64_t ms__comm_issued;  // number of collectives that this rank has issued; engine thread only
ms_coll *ms__coll_new(int op);    // zeroed; NULL with the error set
void ms__coll_drop(ms_coll *c);
// Takes ownership of c, but not of its storages. On the compute stream c is complete on return. work may be NULL.
ms_status ms__coll_issue(ms_coll *c, ms_work **work);
ms_pending *ms__work_event(const ms_work *w);       // borrowed; NULL if w is NULL
int ms__group_member(const ms_group *g, int rank);  // member number of a world rank; -1: not a member

// ---- comm/captured.c ----
// Issues a collective, and adds it to the captured step that is being recorded.
ms_status ms__capture_collective(const ms_request *r, ms_work **work);

// ---- comm/recording.c ----
ms_status ms__record_collective(const ms_coll *c);

// ---- comm/exchange.c ----
ms_status ms__coll_run(ms_coll *c);
static inline ms_slot *slot_of(const ms_group *g, int member, uint64_t seq)
{
    return &g->slots[(size_t)member * RING + seq % RING];
}
// To be called before a slot is written that others may read: a reader that finds the same number in `ready` before and
// after reading has read one request.
static inline void ms__slot_open(ms_slot *s)
{
    atomic_store_explicit(&s->ready, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
}

// ---- comm/mismatch.c ----
void ms__fingerprint_text(const ms_fingerprint *p, char *out, size_t n);
uint64_t ms__fingerprint_hash(const ms_fingerprint *p, bool with_step);
bool ms__is_refused(const ms_coll *c);  // whether a member has refused this call, or a later one
ms_status ms__mismatch(ms_waiter *w);   // breaks the group with the requests of all members that have arrived

// ---- comm/move.c ----
ms_status ms__wait_round(ms_waiter *w, uint64_t round);  // waits until every member on this node has reached the round
ms_status ms__move_inline(ms_coll *c);
ms_status ms__move_direct(ms_coll *c);
ms_status ms__move_staged(ms_waiter *w);
ms_status ms__coll_alone(ms_coll *c);  // runs c in a group of one rank

// ---- comm/device.c: tensors on a GPU ----
bool ms__coll_on_device(const ms_coll *c);
// Replaces c's storages by copies on the CPU. *kept: the output's original storage, which carries the collective's
// event.
ms_status ms__coll_stage(ms_coll *c, ms_storage **kept);
ms_status ms__coll_unstage(ms_coll *c);  // copies the output back; called on the thread that ran c
void ms__coll_stage_drop(ms_coll *c);
ms_status ms__coll_alone_there(ms_coll *c, int in_device, int out_device);

// ---- comm/native.c: tensors on GPUs that the transport's library moves ----
ms_status ms__native_open(const ms_launch *launch);  // called before MPI connects the ranks: fails if there is no GPU
// ms__native_start makes the communicator of all ranks, ms__native_split the communicator of a new group;
// ms__native_leave leaves a group's communicator. All ranks of the communicator must make these calls, which block.
ms_status ms__native_start(ms_group *world);
ms_status ms__native_split(ms_group *g);
ms_status ms__native_leave(ms_group *g);
bool ms__native_serves(const ms_request *r);
// Lists the library's calls for c, whose tensors must be set. narrow: half types are added in their own dtype, not in
// float32.
ms_status ms__native_make(ms_coll *c, bool narrow);
ms_status ms__native_issue(ms_coll *c);  // engine thread; all work that c's tensors wait for must have been queued
// Engine thread: appends c, whose number must be set, to the list of collectives that the GPU has not been given yet.
void ms__native_line_up(ms_coll *c);
// Removes c from that list: the GPU has been given it, or it has failed.
void ms__native_step_out(ms_coll *c);
ms_status ms__native_move(ms_waiter *w);  // queues the collective, and waits until the GPU has completed it
void ms__native_drop(ms_coll *c);

// ---- comm/job/far.c: members on other nodes ----
ms_status ms__far_ready(ms_coll *c);  // on the leader: sends and receives the ready slots that have become available
ms_status ms__far_reduce(ms_waiter *w, char *const *windows, char *result, size_t n);
// Receives the windows of the members on other nodes into mirror, `bytes` bytes each, one after the other.
ms_status ms__far_gather(ms_waiter *w, char *const *windows, char *mirror, size_t bytes);
// For a group without two members on one node: sends `in` to all other members and receives theirs; the bytes[k] bytes
// of member k, this rank's own included, are stored at out + k * stride. `in` may be this rank's place in `out`.
ms_status ms__far_exchange(ms_waiter *w, const char *in, char *out, size_t stride, const size_t *bytes);
// A reduction of two members. Member k reduces bytes[k] bytes; this rank stores its part in `mine`. Each member sends
// the other its values for the other's part, and both add in rank order. The peer's result is stored at `theirs` unless
// that is NULL. source returns bytes [at, at + n) of this rank's values for a member's part; if they are not
// contiguous, it packs them into its buffer k, 0 to 4.
typedef const char *ms_far_source(ms_coll *c, int member, size_t at, size_t n, size_t k);
ms_status ms__far_pair(ms_waiter *w, ms_far_source *source, const size_t *bytes, char *mine, char *theirs);
void ms__far_end(ms_coll *c);

// ---- comm/job/far_error.c: errors and waits of ranks on other nodes ----
void ms__far_break(const ms_group *g, uint64_t epoch, const char *text);  // tells the members on other nodes
void ms__far_recovers(const ms_coll *c);  // tells missing members on other nodes that this rank waits in dist.recover
void ms__far_poll(void);
// Asks a rank on another node what it waits for. That rank answers only while it waits in a collective.
void ms__far_ask(int rank);
int ms__far_answered(char *out, size_t n);  // writes an answer to out, returns its sender; -1: none has arrived

// ---- comm/reduce.c ----
// Accumulators: float32 for half types, otherwise the type itself. ms__acc_load starts one, ms__acc_add combines it
// with another rank's values.
int ms__acc_size(int dtype);
void ms__acc_load(void *acc, const void *src, int dtype, size_t n);
void ms__acc_add(const ms_reducer *how, void *acc, const void *src, size_t n);
// The last step: applies mean and scale, and rounds. Changes acc.
void ms__acc_store(const ms_reducer *how, void *dst, void *acc, size_t n);
// Reduces n elements of src[0..n_ranks) and stores the result in each of dst[0..n_dst). A dst may be one of the
// sources.
void ms__reduce(const ms_reducer *how, const char *const *src, int n_dst, char *const *dst, size_t n);
void ms__comm_copy(void *dst, const void *src, size_t n);

#include "comm/gpus.h"

#endif
