// comm_far.c -- what a group's leaders do for the other nodes, over MPI: non-blocking calls, polled.
//
// Ready slots of the members here go to the other leaders, theirs are mirrored into the slots here. Reductions
// run as a chain in rank order over runs of neighbouring ranks of one node, with unrounded partial results, so
// that their bits are those of one node. Everything else is an exchange of windows among leaders.
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include "comm_internal.h"

enum { KIND_READY, KIND_CHAIN, KIND_RESULT, KIND_WINDOW, TAG_ERROR = 1 };

typedef struct {
    double   group;
    uint64_t word, hash;
    uint32_t member, bytes;
    ms_print print;
    char     payload[PAYLOAD];
} far_ready;

typedef struct ms_far {
    struct ms_far *next;                // among those that linger
    int        n_in, n_out, n_here;
    far_ready *in, *out;
    void     **in_req, **out_req;
    bool      *sent;                    // by member
    int       *leaders, n_leaders;      // world ranks of the other nodes' leaders
} ms_far;

static int tag_of(const ms_coll *c, int kind)
{
    uint32_t id = (uint32_t)(int64_t)(c->g->id < 0 ? -c->g->id * 7 + 128 : c->g->id);
    return (int)((id & 0xff) << 22 | (uint32_t)(c->epoch & 15) << 18 | (uint32_t)(c->word & 0x3fff) << 4 | (uint32_t)kind << 1);
}

static int leader_on(const ms_group *g, int node)
{
    for (int k = 0; k < g->n; k++) if (ms__world.node_of[g->ranks[k]] == node) return g->ranks[k];
    return -1;
}

static int is_here(const ms_group *g, int k) { return ms__world.node_of[g->ranks[k]] == ms__world.node; }

// Who sends the slot of the i-th member that is not here.
static int sender(const ms_group *g, int i)
{
    int k = 0;
    while (is_here(g, k) || i-- > 0) k++;
    return leader_on(g, ms__world.node_of[g->ranks[k]]);
}

static void *isend(const void *p, size_t n, int to, int tag)
{
    ms__mpi_lock();
    void *r = ms__world.mpi->isend(p, n, to, tag);
    ms__mpi_unlock();
    return r;
}

static void *irecv(void *p, size_t n, int from, int tag)
{
    ms__mpi_lock();
    void *r = ms__world.mpi->irecv(p, n, from, tag);
    ms__mpi_unlock();
    return r;
}

static int test(void **r)
{
    ms__mpi_lock();
    int rc = ms__world.mpi->test(r);
    ms__mpi_unlock();
    return rc;
}

// What a collective that failed leaves with MPI: it may still be written or read, so it stays, and is listed to be accounted for.
typedef struct kept { struct kept *next; void *memory; } kept;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;        // collectives run on several streams
static kept   *left_with_mpi;
static ms_far *lingering;

static void keep(void *memory)
{
    kept *k = memory ? malloc(sizeof *k) : NULL;
    if (!k) return;
    pthread_mutex_lock(&lock);
    *k = (kept){ left_with_mpi, memory };
    left_with_mpi = k;
    pthread_mutex_unlock(&lock);
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

static ms_far *far_new(ms_coll *c)
{
    ms_group *g = c->g;
    ms_far *f = calloc(1, sizeof *f);
    if (!f) return NULL;
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
        return NULL;
    }
    for (int i = 0; i < f->n_in; i++)
        if (!(f->in_req[i] = irecv(&f->in[i], sizeof f->in[i], sender(g, i), tag_of(c, KIND_READY)))) {
            keep(f);
            return NULL;
        }
    return f;
}

ms_status ms__far_ready(ms_coll *c, ms_waiter *w, bool first)
{
    (void)w;
    (void)first;
    ms_group *g = c->g;
    if (!c->far && !(c->far = far_new(c))) return ms__coll_fail(c, "no memory, or MPI refused a message");
    ms_far *f = c->far;
    for (int k = 0, i = 0; k < g->n; k++) {
        if (!is_here(g, k)) continue;
        ms_slot *s = slot_of(g, k, c->seq);
        if (!f->sent[k] && atomic_load_explicit(&s->ready, memory_order_acquire) == c->word) {
            far_ready *m = &f->out[i];
            m->group = g->id;
            m->word = c->word;
            m->hash = s->hash;
            m->member = (uint32_t)k;
            m->bytes = s->bytes;
            m->print = s->print;
            memcpy(m->payload, s->payload, s->bytes);
            for (int l = 0; l < f->n_leaders; l++)
                if (!(f->out_req[f->n_out++] = isend(m, sizeof *m, f->leaders[l], tag_of(c, KIND_READY))))
                    return ms__coll_fail(c, "MPI refused to send");
            f->sent[k] = true;
        }
        i++;
    }
    for (int i = 0; i < f->n_in; i++) {
        if (!f->in_req[i]) continue;
        int rc = test(&f->in_req[i]);
        if (rc < 0) return ms__coll_fail(c, "MPI failed to receive from another node");
        if (rc == 0) continue;
        far_ready *m = &f->in[i];
        if (m->word < c->word || m->group != g->id) {   // of a call that ended here without its peers
            f->in_req[i] = irecv(m, sizeof *m, sender(g, i), tag_of(c, KIND_READY));
            if (!f->in_req[i]) return ms__coll_fail(c, "MPI refused a message");
            continue;
        }
        if (m->word != c->word || m->member >= (uint32_t)g->n) return ms__coll_fail(c, "another node is at a different collective");
        ms_slot *s = slot_of(g, (int)m->member, c->seq);
        s->hash = m->hash;
        s->print = m->print;
        s->flags = 0;
        s->bytes = m->bytes;
        memcpy(s->payload, m->payload, m->bytes);
        atomic_store_explicit(&s->ready, m->word, memory_order_release);
    }
    return MS_OK;
}

static bool through(ms_far *f)
{
    bool all = true;
    for (int i = 0; i < f->n_in; i++) all = test(&f->in_req[i]) != 0 && all;
    for (int i = 0; i < f->n_out; i++) all = test(&f->out_req[i]) != 0 && all;
    return all;
}

// Messages of this size leave at once, so by now most have. Those that have not, and receptions that nobody serves any more,
// keep their memory until MPI is through with them.
void ms__far_end(ms_coll *c)
{
    ms_far *f = c->far;
    if (!f) return;
    c->far = NULL;
    for (int i = 0; i < f->n_in; i++)
        if (f->in_req[i]) {
            ms__mpi_lock();
            ms__world.mpi->cancel(f->in_req[i]);
            ms__mpi_unlock();
        }
    pthread_mutex_lock(&lock);
    f->next = lingering;
    lingering = f;
    for (ms_far **at = &lingering; *at;) {
        ms_far *one = *at;
        if (!through(one)) {
            at = &one->next;
            continue;
        }
        *at = one->next;
        far_free(one);
    }
    pthread_mutex_unlock(&lock);
}

// ---- data -----------------------------------------------------------------------------------------

static ms_status finish(ms_waiter *w, void **req)
{
    if (!*req) return ms__coll_fail(w->c, "MPI refused a message");
    for (;;) {
        int rc = test(req);
        if (rc == 1) return MS_OK;
        if (rc < 0) return ms__coll_fail(w->c, "MPI failed between nodes");
        MS_TRY(ms__wait_poll(w));
    }
}

static ms_status send_all(ms_waiter *w, const void *p, size_t n, int to, int tag)
{
    void *r = isend(p, n, to, tag);
    ms_status status = finish(w, &r);
    keep(r);
    return status;
}

static ms_status recv_all(ms_waiter *w, void *p, size_t n, int from, int tag)
{
    void *r = irecv(p, n, from, tag);
    ms_status status = finish(w, &r);
    keep(r);
    return status;
}

static ms_status chain(ms_coll *c, ms_waiter *w, char *const *windows, char *acc, char *result, size_t n)
{
    ms_group *g = c->g;
    size_t bytes = n * (size_t)ms__acc_size(c->dtype), out = n * (size_t)ms__dtype_size(c->dtype);
    int last_node = ms__world.node_of[g->ranks[g->n - 1]];
    for (int k = 0; k < g->n;) {
        int node = ms__world.node_of[g->ranks[k]], end = k;
        while (end < g->n && ms__world.node_of[g->ranks[end]] == node) end++;
        if (node == ms__world.node) {
            if (k == 0) ms__acc_load(acc, windows[0], c->dtype, n);
            else {
                MS_TRY(recv_all(w, acc, bytes, leader_on(g, ms__world.node_of[g->ranks[k - 1]]), tag_of(c, KIND_CHAIN)));
                ms__acc_add(acc, windows[k], c->dtype, c->red, n);
            }
            for (int j = k + 1; j < end; j++) ms__acc_add(acc, windows[j], c->dtype, c->red, n);
            if (end < g->n) MS_TRY(send_all(w, acc, bytes, leader_on(g, ms__world.node_of[g->ranks[end]]), tag_of(c, KIND_CHAIN)));
        }
        k = end;
    }
    if (last_node != ms__world.node) return recv_all(w, result, out, leader_on(g, last_node), tag_of(c, KIND_RESULT));
    ms__acc_store(result, acc, c->dtype, c->red, c->scale, g->n, n);
    for (int node = 0; node < ms__world.nodes; node++) {
        int to = node == ms__world.node ? -1 : leader_on(g, node);
        if (to >= 0) MS_TRY(send_all(w, result, out, to, tag_of(c, KIND_RESULT)));
    }
    return MS_OK;
}

ms_status ms__far_reduce(ms_coll *c, ms_waiter *w, char *const *windows, char *result, size_t n)
{
    char *acc = malloc(n * 8);
    if (!acc) return ms__no_memory(n * 8, ms__coll_names[c->op], "a partial result");
    ms_status status = chain(c, w, windows, acc, result, n);
    if (status == MS_OK) free(acc);
    else keep(acc);
    return status;
}

ms_status ms__far_gather(ms_coll *c, ms_waiter *w, char *const *windows, char *mirror, size_t stride, size_t bytes)
{
    ms_group *g = c->g;
    void **req = calloc((size_t)g->n * (size_t)ms__world.nodes, sizeof *req);
    if (!req) return ms__no_memory((size_t)g->n * (size_t)ms__world.nodes * sizeof *req, ms__coll_names[c->op], "requests");
    int n = 0;
    ms_status status = MS_OK;
    for (int k = 0; k < g->n; k++) {
        if (!ms__coll_gives(c, k)) continue;
        int node = ms__world.node_of[g->ranks[k]];
        if (node != ms__world.node) {
            if (!(req[n++] = irecv(mirror + (size_t)k * stride, bytes, leader_on(g, node), tag_of(c, KIND_WINDOW)))) status = MS_ECOMM;
            continue;
        }
        for (int other = 0; other < ms__world.nodes; other++) {
            int to = other == ms__world.node ? -1 : leader_on(g, other);
            if (to >= 0 && !(req[n++] = isend(windows[k], bytes, to, tag_of(c, KIND_WINDOW)))) status = MS_ECOMM;
        }
    }
    if (status != MS_OK) ms__coll_fail(c, "MPI refused a message");
    for (int i = 0; i < n && status == MS_OK; i++) status = finish(w, &req[i]);
    if (status == MS_OK) free(req);
    else keep(req);
    return status;
}

// ---- errors ---------------------------------------------------------------------------------------

typedef struct { uint64_t number, backward; char text[TEXT]; } far_error;

static int first_on(int node)
{
    for (int r = 0; r < ms__world.size; r++) if (ms__world.node_of[r] == node) return r;
    return -1;
}

void ms__far_error(uint64_t number, const char *text, bool backward)
{
    for (int node = 0; node < ms__world.nodes; node++) {
        far_error *m = node == ms__world.node ? NULL : calloc(1, sizeof *m);
        if (!m) continue;
        m->number = number;
        m->backward = backward;
        snprintf(m->text, sizeof m->text, "%s", text);
        keep(isend(m, sizeof *m, first_on(node), TAG_ERROR));   // until the job ends: errors are few
        keep(m);
    }
}

void ms__far_poll(void)
{
    if (first_on(ms__world.node) != ms__world.rank) return;
    int from;
    size_t n;
    ms__mpi_lock();
    int there = ms__world.mpi->probe(TAG_ERROR, &from, &n);
    ms__mpi_unlock();
    if (!there || n != sizeof(far_error)) return;
    far_error *m = malloc(sizeof *m);
    void *r = m ? irecv(m, sizeof *m, from, TAG_ERROR) : NULL;
    while (r && test(&r) == 0) sched_yield();
    if (!m) return;
    if (m->backward) ms__comm_backward_failed(m->number);
    ms__comm_publish_as(m->number, m->text);
    free(m);
}
