// SPDX-License-Identifier: MIT
// comm/movers/far.c -- groups over several nodes: their leaders exchange messages with non-blocking calls and poll.
//
// A leader sends the ready slots of its node's members to the other leaders and copies theirs to this node. A reduction
// is a chain over the nodes in rank order with unrounded partial results, so it gives the same bits as on one node. All
// other collectives exchange windows among leaders. If no node has two members of the group, all-gathers of
// contiguous blocks, and reductions of two members, use messages alone (ms__far_exchange, ms__far_pair).
#include <pthread.h>
#include "comm/movers/far.h"
#include "comm/movers/bytes.h"
#include "comm/world/message.h"

enum { KIND_READY, KIND_CHAIN, KIND_RESULT, KIND_WINDOW, MESSAGE = 4 << 20 };

typedef struct {
    double group;
    uint64_t number, hash;
    int64_t arrived;
    uint32_t member, bytes;
    ms_fingerprint fingerprint;
    char payload[PAYLOAD];
} far_ready;

typedef struct ms_far {
    struct ms_far *next;  // links the list of entries with messages in flight
    int n_in, n_out, n_here;
    far_ready *in, *out;
    void **in_req, **out_req;
    bool *sent;               // sent[k]: the slot of member k was sent
    int *leaders, n_leaders;  // world ranks of the other nodes' leaders
} ms_far;

// The tag of a message: its group, epoch, number and kind. A message of a failed collective that was not received must
// not match a later collective: the tags of an epoch are reused after 4096 errors. Within an epoch at most RING
// collectives of a group are in flight.
static int tag_of(const ms_coll *c, int kind)
{
    uint32_t id = (uint32_t)(int64_t)(c->g->id < 0 ? -c->g->id * 7 + 128 : c->g->id);
    return (int)((id & 0xff) << 22 | (uint32_t)(c->epoch & 0xfff) << 10 | (uint32_t)(c->number & 0x7f) << 3 |
                 (uint32_t)kind << 1);
}

static int leader_on(const ms_group *g, int node)
{
    for (int k = 0; k < g->n; k++)
        if (ms__world.node_of[g->ranks[k]] == node) return g->ranks[k];
    return -1;
}

static int is_here(const ms_group *g, int k) { return ms__world.node_of[g->ranks[k]] == ms__world.node; }

// The world rank that sends the slot of the i-th (from 0) of the members on other nodes.
static int sender_of(const ms_group *g, int i)
{
    int k = 0;
    while (is_here(g, k) || i-- > 0) k++;
    return leader_on(g, ms__world.node_of[g->ranks[k]]);
}

static struct {
    pthread_mutex_t lock;  // collectives run on several streams
    ms_far *lingering;     // ended collectives with messages in flight
    // Buffers for data from other nodes, one for each stream, whose collectives run one after the other.
    char *rooms[MS_STREAMS];
} messages = { .lock = PTHREAD_MUTEX_INITIALIZER };

static ms_status no_message_memory(ms_coll *c, size_t bytes, const char *what)
{
    return ms__no_memory(bytes, ROW(c->op)->name, "%s", what);
}

// ---- ready slots ----------------------------------------------------------------------------------

static void far_free(ms_far *f)
{
    free(f->leaders);
    free(f->in);
    free(f->out);
    free(f->in_req);
    free(f->out_req);
    free(f->sent);
    free(f);
}

static ms_status far_new(ms_coll *c)
{
    ms_group *g = c->g;
    ms_far *f = calloc(1, sizeof *f);
    if (!f) return no_message_memory(c, sizeof *f, "messages to other nodes");
    f->leaders = malloc((size_t)ms__world.nodes * sizeof *f->leaders);
    for (int node = 0; node < ms__world.nodes && f->leaders; node++) {
        int r = node == ms__world.node ? -1 : leader_on(g, node);
        if (r >= 0) f->leaders[f->n_leaders++] = r;
    }
    for (int k = 0; k < g->n; k++) f->n_here += is_here(g, k);
    f->n_in = g->n - f->n_here;
    f->in = calloc((size_t)f->n_in + 1, sizeof *f->in);
    f->out = calloc((size_t)f->n_here + 1, sizeof *f->out);
    f->in_req = calloc((size_t)f->n_in + 1, sizeof *f->in_req);
    f->out_req = calloc((size_t)f->n_here * (size_t)f->n_leaders + 1, sizeof *f->out_req);
    f->sent = calloc((size_t)g->n, sizeof *f->sent);
    if (!f->leaders || !f->in || !f->out || !f->in_req || !f->out_req || !f->sent) {
        far_free(f);
        return no_message_memory(c, ((size_t)g->n + 2) * sizeof *f->in, "messages to other nodes");
    }
    c->far = f;  // ms__far_end completes or cancels the messages
    for (int i = 0; i < f->n_in; i++)
        if (!(f->in_req[i] = ms__message_receive(&f->in[i], sizeof f->in[i], sender_of(g, i), tag_of(c, KIND_READY))))
            return ms__coll_fail(c, "MPI could not start to receive");
    return MS_OK;
}

ms_status ms__far_ready(ms_coll *c)
{
    ms_group *g = c->g;
    if (!c->far) MS_TRY(far_new(c));
    ms_far *f = c->far;
    for (int k = 0, i = 0; k < g->n; k++) {
        if (!is_here(g, k)) continue;
        ms_slot *s = member_slot(g, k, c->seq);
        if (!f->sent[k] && atomic_load_explicit(&s->ready, memory_order_acquire) == c->number) {
            far_ready *m = &f->out[i];
            m->group = g->id;
            m->number = c->number;
            m->hash = s->hash;
            m->arrived = s->arrived;
            m->member = (uint32_t)k;
            m->bytes = s->bytes;
            m->fingerprint = s->fingerprint;
            memcpy(m->payload, s->payload, m->bytes < PAYLOAD ? m->bytes : PAYLOAD);
            // A member that has left c may use its slot for a later call; then the group is broken.
            atomic_thread_fence(memory_order_acquire);
            if (atomic_load_explicit(&s->ready, memory_order_relaxed) != c->number) {
                i++;
                continue;
            }
            for (int l = 0; l < f->n_leaders; l++)
                if (!(f->out_req[f->n_out++] = ms__message_send(m, sizeof *m, f->leaders[l], tag_of(c, KIND_READY))))
                    return ms__coll_fail(c, "MPI could not start to send");
            f->sent[k] = true;
        }
        i++;
    }
    for (int i = 0; i < f->n_in; i++) {
        if (!f->in_req[i]) continue;
        int rc = ms__message_test(&f->in_req[i]);
        if (rc < 0) return ms__coll_fail(c, "MPI failed to receive from another node");
        if (rc == 0) continue;
        far_ready *m = &f->in[i];
        if (m->number < c->number || m->group != g->id) {  // a message of an earlier call that failed here
            f->in_req[i] = ms__message_receive(m, sizeof *m, sender_of(g, i), tag_of(c, KIND_READY));
            if (!f->in_req[i]) return ms__coll_fail(c, "MPI could not start to receive");
            continue;
        }
        if (m->number != c->number || m->member >= (uint32_t)g->n)
            return ms__coll_fail(c, "another node is at a different collective");
        ms_slot *s = member_slot(g, (int)m->member, c->seq);
        ms__slot_open(s);  // members of this node may still read what it held for a collective that failed
        s->hash = m->hash;
        s->arrived = m->arrived;
        s->fingerprint = m->fingerprint;
        s->flags = 0;
        s->bytes = m->bytes;
        memcpy(s->payload, m->payload, m->bytes);
        atomic_store_explicit(&s->ready, m->number, memory_order_release);
    }
    return MS_OK;
}

static bool messages_complete(ms_far *f)
{
    bool all = true;
    for (int i = 0; i < f->n_in; i++) all = ms__message_test(&f->in_req[i]) != 0 && all;
    for (int i = 0; i < f->n_out; i++) all = ms__message_test(&f->out_req[i]) != 0 && all;
    return all;
}

// Ends c's exchange of slots: cancels its open receives. A slot is small, so sending it usually completes at once;
// sends still in flight, and receives whose peer will never send, keep their memory until MPI has completed them.
void ms__far_end(ms_coll *c)
{
    ms_far *f = c->far;
    if (!f) return;
    c->far = NULL;
    for (int i = 0; i < f->n_in; i++)
        if (f->in_req[i]) ms__message_cancel(f->in_req[i]);
    pthread_mutex_lock(&messages.lock);
    f->next = messages.lingering;
    messages.lingering = f;
    for (ms_far **at = &messages.lingering; *at;) {
        ms_far *one = *at;
        if (!messages_complete(one)) {
            at = &one->next;
            continue;
        }
        *at = one->next;
        far_free(one);
    }
    pthread_mutex_unlock(&messages.lock);
}

// ---- data -----------------------------------------------------------------------------------------

static ms_status finish_message(ms_waiter *w, void **req)
{
    if (!*req) return ms__coll_fail(w->c, "MPI could not start a transfer");
    for (;;) {
        int rc = ms__message_test(req);
        if (rc == 1) {
            ms__wait_moved(w);
            return MS_OK;
        }
        if (rc < 0) return ms__coll_fail(w->c, "MPI failed to transfer data between nodes");
        MS_TRY(ms__wait_poll(w));
    }
}

// Abandons a message of a failed collective. Cancels a receive, so that it does not match a later message.
static void abandon_message(void *req, bool receives)
{
    if (req && receives) ms__message_cancel(req);
    ms__message_keep(req);
}

static ms_status send_whole(ms_waiter *w, const void *p, size_t n, int to, int tag)
{
    void *r = ms__message_send(p, n, to, tag);
    ms_status status = finish_message(w, &r);
    if (status != MS_OK) abandon_message(r, false);
    return status;
}

static ms_status receive_whole(ms_waiter *w, void *p, size_t n, int from, int tag)
{
    void *r = ms__message_receive(p, n, from, tag);
    ms_status status = finish_message(w, &r);
    if (status != MS_OK) abandon_message(r, true);
    return status;
}

static ms_status reduce_chain(ms_waiter *w, char *const *windows, char *acc, char *result, size_t n)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    size_t bytes = n * (size_t)ms__acc_size(c->reducer.dtype), out = n * (size_t)ms__dtype_size(c->reducer.dtype);
    int last_node = ms__world.node_of[g->ranks[g->n - 1]];
    for (int k = 0; k < g->n;) {
        int node = ms__world.node_of[g->ranks[k]], end = k;
        while (end < g->n && ms__world.node_of[g->ranks[end]] == node) end++;
        if (node == ms__world.node) {
            if (k == 0) ms__acc_load(acc, windows[0], c->reducer.dtype, n);
            else {
                MS_TRY(receive_whole(w, acc, bytes, leader_on(g, ms__world.node_of[g->ranks[k - 1]]),
                                     tag_of(c, KIND_CHAIN)));
                ms__acc_add(&c->reducer, acc, windows[k], n);
            }
            for (int j = k + 1; j < end; j++) ms__acc_add(&c->reducer, acc, windows[j], n);
            if (end < g->n)
                MS_TRY(
                    send_whole(w, acc, bytes, leader_on(g, ms__world.node_of[g->ranks[end]]), tag_of(c, KIND_CHAIN)));
        }
        k = end;
    }
    if (last_node != ms__world.node)
        return receive_whole(w, result, out, leader_on(g, last_node), tag_of(c, KIND_RESULT));
    ms__acc_store(&c->reducer, result, acc, n);
    for (int node = 0; node < ms__world.nodes; node++) {
        int to = node == ms__world.node ? -1 : leader_on(g, node);
        if (to >= 0) MS_TRY(send_whole(w, result, out, to, tag_of(c, KIND_RESULT)));
    }
    return MS_OK;
}

enum { ROOM = 4 * WINDOW };

static char *accumulator_of(const ms_coll *c)
{
    return messages.rooms[c->stream] ? messages.rooms[c->stream] : (messages.rooms[c->stream] = malloc(ROOM));
}

// Called when a collective has ended with `status`. After a failure MPI may still write to the buffer, so the
// stream's next collective gets a new buffer.
static void room_back(const ms_coll *c, char *room, ms_status status)
{
    if (status == MS_OK) return;
    messages.rooms[c->stream] = NULL;
    ms__message_keep(room);
}

ms_status ms__far_reduce(ms_waiter *w, char *const *windows, char *result, size_t n)
{
    ms_coll *c = w->c;
    char *acc = accumulator_of(c);
    if (!acc) return no_message_memory(c, ROOM, "partial results");
    ms_status status = reduce_chain(w, windows, acc, result, n);
    room_back(c, acc, status);
    return status;
}

// Messages in flight, as a ring. If a message fills the ring, `launch` waits for the oldest one.
enum { FLIGHT = 32 };
typedef struct {
    void *req[FLIGHT];
    bool receives[FLIGHT];
    int first, n;
} flight;

static void abandon_flight(flight *f)
{
    for (; f->n > 0; f->n--, f->first = (f->first + 1) % FLIGHT)
        abandon_message(f->req[f->first], f->receives[f->first]);
}

static ms_status land_oldest(ms_waiter *w, flight *f)
{
    int k = f->first;
    f->first = (f->first + 1) % FLIGHT;
    f->n--;
    ms_status status = finish_message(w, &f->req[k]);
    if (status == MS_OK) return MS_OK;
    abandon_message(f->req[k], f->receives[k]);
    abandon_flight(f);
    return status;
}

static ms_status launch_message(ms_waiter *w, flight *f, void *req, bool receives)
{
    int k = (f->first + f->n++) % FLIGHT;
    f->req[k] = req;
    f->receives[k] = receives;
    return f->n == FLIGHT ? land_oldest(w, f) : MS_OK;
}

static ms_status land_flight(ms_waiter *w, flight *f)
{
    while (f->n > 0) MS_TRY(land_oldest(w, f));
    return MS_OK;
}

ms_status ms__far_gather(ms_waiter *w, char *const *windows, char *mirror, size_t bytes)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    flight f = { 0 };
    int tag = tag_of(c, KIND_WINDOW);
    for (int k = 0; k < g->n; k++) {
        int node = ms__world.node_of[g->ranks[k]];
        if (!on_side(ROW(c->op)->reads, k, c->root)) continue;
        if (node != ms__world.node) {
            MS_TRY(launch_message(w, &f,
                                  ms__message_receive(mirror + (size_t)k * bytes, bytes, leader_on(g, node), tag),
                                  true));
            continue;
        }
        for (int other = 0; other < ms__world.nodes; other++) {
            int to = other == ms__world.node ? -1 : leader_on(g, other);
            if (to >= 0) MS_TRY(launch_message(w, &f, ms__message_send(windows[k], bytes, to, tag), false));
        }
    }
    return land_flight(w, &f);
}

// The number of bytes in [at, bytes), but at most `part`.
static size_t part_left(size_t bytes, size_t at, size_t part)
{
    return at >= bytes ? 0 : bytes - at < part ? bytes - at : part;
}

// ---- one member on every node: tensors are sent and received in place -------------------------------

// Removes the oldest message from the ring if it is complete; does not wait.
static ms_status land_complete(ms_waiter *w, flight *f)
{
    int rc = f->n > 0 ? ms__message_test(&f->req[f->first]) : 0;
    if (rc == 0) return MS_OK;
    if (rc < 0) {
        abandon_flight(f);
        return ms__coll_fail(w->c, "MPI failed to transfer data between nodes");
    }
    f->first = (f->first + 1) % FLIGHT;
    f->n--;
    return MS_OK;
}

// Copies this rank's own part of the result while messages are in flight. Tests a message after each slice, because MPI
// makes progress only inside its calls.
static ms_status copy_own(ms_waiter *w, flight *f, char *to, const char *from, size_t bytes)
{
    enum { SLICE = 512 << 10 };
    for (size_t at = 0; at < bytes && to != from; at += SLICE) {
        memcpy(to + at, from + at, part_left(bytes, at, SLICE));
        MS_TRY(land_complete(w, f));
    }
    return MS_OK;
}

ms_status ms__far_exchange(ms_waiter *w, const char *in, char *out, size_t stride, const size_t *bytes)
{
    ms_group *g = w->c->g;
    flight f = { 0 };
    int tag = tag_of(w->c, KIND_WINDOW);
    size_t most = 0;
    for (int k = 0; k < g->n; k++)
        if (bytes[k] > most) most = bytes[k];
    for (size_t at = 0; at < most; at += MESSAGE)
        // Step j: send to the rank j places ahead, receive from the rank j places behind. All links are used at once.
        for (int j = 1; j < g->n; j++) {
            int to = (g->me + j) % g->n, from = (g->me + g->n - j) % g->n;
            size_t theirs = part_left(bytes[from], at, MESSAGE), ours = part_left(bytes[g->me], at, MESSAGE);
            if (theirs)
                MS_TRY(launch_message(
                    w, &f, ms__message_receive(out + (size_t)from * stride + at, theirs, g->ranks[from], tag), true));
            if (ours) MS_TRY(launch_message(w, &f, ms__message_send(in + at, ours, g->ranks[to], tag), false));
        }
    MS_TRY(copy_own(w, &f, out + (size_t)g->me * stride, in, bytes[g->me]));
    return land_flight(w, &f);
}

ms_status ms__far_pair(ms_waiter *w, ms_far_source *source, const size_t *bytes, char *mine, char *theirs)
{
    ms_coll *c = w->c;
    enum { PARTS = 4 };
    const size_t part = c->n_parts ? WINDOW / 2 : ROOM / PARTS;
    int me = c->g->me, other = 1 - me, tag = tag_of(c, KIND_CHAIN), rank = c->g->ranks[other];
    size_t here = bytes[me], there = bytes[other], most = here > there ? here : there;
    char *room = accumulator_of(c);
    if (!room) return no_message_memory(c, ROOM, "partial results");
    void *sent[PARTS] = { NULL }, *got[PARTS] = { NULL };
    flight results = { 0 };
    ms_status status = MS_OK;
    for (size_t at = 0, begun = 0; at < most && status == MS_OK; at += part) {
        for (; begun < most && begun < at + PARTS * part && status == MS_OK; begun += part) {
            size_t k = begun / part % PARTS;
            if (begun < here &&
                !(got[k] = ms__message_receive(room + k * part, part_left(here, begun, part), rank, tag)))
                status = ms__coll_fail(c, "MPI could not start to receive");
            if (status == MS_OK && begun < there) {
                size_t n = part_left(there, begun, part);
                if (!(sent[k] = ms__message_send(source(c, other, begun, n, k), n, rank, tag)))
                    status = ms__coll_fail(c, "MPI could not start to send");
            }
        }
        size_t k = at / part % PARTS, n = part_left(here, at, part), m = part_left(there, at, part);
        if (status == MS_OK && n) status = finish_message(w, &got[k]);
        if (status == MS_OK && n) {
            const char *src[2] = { room + k * part, room + k * part };
            src[me] = source(c, me, at, n, PARTS);
            char *dst = mine + at;
            ms__reduce(&c->reducer, src, 1, &dst, n / (size_t)ms__dtype_size(c->reducer.dtype));
            if (theirs)
                status = launch_message(w, &results, ms__message_send(dst, n, rank, tag_of(c, KIND_RESULT)), false);
        }
        // The peer's result may be received into the memory from which the message sent[k] is sent.
        if (status == MS_OK && m) status = finish_message(w, &sent[k]);
        if (status == MS_OK && m && theirs)
            status =
                launch_message(w, &results, ms__message_receive(theirs + at, m, rank, tag_of(c, KIND_RESULT)), true);
    }
    if (status == MS_OK) status = land_flight(w, &results);
    else abandon_flight(&results);
    for (int k = 0; k < PARTS && status != MS_OK; k++) {
        abandon_message(got[k], true);
        abandon_message(sent[k], false);
    }
    room_back(c, room, status);
    return status;
}
