// SPDX-License-Identifier: MIT
// comm/process/link.c -- notices that a rank on another node has died. srun tells the other ranks nothing, and mpirun
// ends them without a reason.
//
// The first rank of each node but node 0 holds a TCP connection to rank 0. The kernel closes it when a process dies. A
// death within a node ends all ranks of the node (comm/process/death.c), so these connections cover every rank. A rank
// sends LEFT when the scripts of its node have ended in order, and ENDED when a rank of its node has reported why the
// job ends. Without a connection (no IPv4 address, a firewall), a dead node is noticed at the time limit of a
// collective.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>
#include "comm/process/process.h"

enum { ADDRESSES = 8, LEFT = 'L', ENDED = 'E' };

// Where rank 0 listens.
typedef struct {
    uint64_t nonce;
    uint16_t port;  // 0: nowhere
    uint16_t n;
    struct in_addr address[ADDRESSES];
} listener;

// What both sides send first.
typedef struct {
    uint64_t nonce;
    int32_t node, pid;
    char host[64];
} greeting;

// A connection: rank 0 has one to each node, the first rank of another node has one to node 0.
typedef struct {
    int fd;  // -1: none
    bool left;
    greeting peer;
} node_link;

static struct {
    listener here;
    node_link *of;         // indexed by node
    pthread_mutex_t lock;  // protects fd of each link
    int n_open;            // number of connections that have been greeted
    int listens;
    atomic_bool ended;  // this rank has sent ENDED
} links = { .lock = PTHREAD_MUTEX_INITIALIZER, .listens = -1 };

static int first_on(int node)
{
    int r = 0;
    while (ms__world.node_of[r] != node) r++;
    return r;
}

// Makes the kernel give up a peer that does not answer within the time limit of collectives.
static void keep_alive(int fd)
{
    double limit = ms__world.timeout;
    int on = 1, quarter = limit < 8 ? 2 : limit < 1200 ? (int)(limit / 4) : 300, probes = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &quarter, sizeof quarter);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &quarter, sizeof quarter);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

static bool exchange_greetings(int fd, node_link *l)
{
    greeting mine = { .nonce = links.here.nonce, .node = ms__world.node, .pid = (int32_t)getpid() };
    gethostname(mine.host, sizeof mine.host - 1);
    struct timeval second = { .tv_sec = 1 };
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
    return send(fd, &mine, sizeof mine, MSG_NOSIGNAL) == sizeof mine &&
           recv(fd, &l->peer, sizeof l->peer, MSG_WAITALL) == sizeof l->peer && l->peer.nonce == links.here.nonce &&
           l->peer.node >= 0 && l->peer.node < ms__world.nodes && l->peer.node != ms__world.node;
}

static void add_link(int node, const node_link *l)
{
    keep_alive(l->fd);
    pthread_mutex_lock(&links.lock);
    links.of[node] = *l;
    pthread_mutex_unlock(&links.lock);
    links.n_open++;
}

// ---- the two ends ---------------------------------------------------------------------------------

// Opens rank 0's socket, and lists the addresses of this host. Those of the loopback device serve only if there are no
// others: then all nodes are simulated on this host.
static void open_listener(void)
{
    struct sockaddr_in any = { .sin_family = AF_INET };
    socklen_t size = sizeof any;
    struct ifaddrs *all = NULL;
    links.listens = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int fd = links.listens;
    if (fd < 0 || bind(fd, (struct sockaddr *)&any, sizeof any) != 0 || listen(fd, 128) != 0 ||
        getsockname(fd, (struct sockaddr *)&any, &size) != 0 || getifaddrs(&all) != 0 ||
        getrandom(&links.here.nonce, sizeof links.here.nonce, 0) != sizeof links.here.nonce)
        return;
    for (int loopback = 0; loopback < 2 && links.here.n == 0; loopback++)
        for (struct ifaddrs *a = all; a && links.here.n < ADDRESSES; a = a->ifa_next)
            if (a->ifa_addr && a->ifa_addr->sa_family == AF_INET && (a->ifa_flags & IFF_UP) &&
                !(a->ifa_flags & IFF_LOOPBACK) == !loopback)
                links.here.address[links.here.n++] = ((struct sockaddr_in *)a->ifa_addr)->sin_addr;
    freeifaddrs(all);
    if (links.here.n > 0) links.here.port = any.sin_port;
}

static void accept_node(void)
{
    node_link l = { .fd = accept4(links.listens, NULL, NULL, SOCK_CLOEXEC) };
    if (l.fd < 0) return;
    if (!exchange_greetings(l.fd, &l) || links.of[l.peer.node].fd >= 0) {
        close(l.fd);
        return;
    }
    add_link(l.peer.node, &l);
}

// Connects to node 0, by the first of its addresses that answers.
static bool connect_to_first(void)
{
    for (int k = 0; k < links.here.n; k++) {
        struct sockaddr_in to = { .sin_family = AF_INET,
                                  .sin_port = links.here.port,
                                  .sin_addr = links.here.address[k] };
        node_link l = { .fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0) };
        struct timeval second = { .tv_sec = 1 };
        if (l.fd < 0) return false;
        setsockopt(l.fd, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);  // also limits connect
        if (connect(l.fd, (struct sockaddr *)&to, sizeof to) == 0 && exchange_greetings(l.fd, &l)) {
            add_link(0, &l);
            return true;
        }
        close(l.fd);
    }
    return false;
}

// ---- watching -------------------------------------------------------------------------------------

// Called when a connection can be read: the peer has sent a byte, has died, or can no longer be reached. Returns as
// ms__link_wait does.
static bool read_link(node_link *l, int *rank, char *text, size_t room)
{
    char c = 0;
    ssize_t n = recv(l->fd, &c, 1, MSG_DONTWAIT);
    int error = n < 0 ? errno : 0;
    if (error == EAGAIN || error == EINTR) return false;
    *rank = -1;
    if (n > 0 && c == ENDED) return true;
    if (n > 0) {
        l->left = true;
        return false;
    }
    pthread_mutex_lock(&links.lock);
    close(l->fd);
    l->fd = -1;
    pthread_mutex_unlock(&links.lock);
    if (l->left || atomic_load(&links.ended)) return false;
    *rank = first_on(l->peer.node);
    if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH)
        snprintf(text, room, "the link to %.60s, where rank %d runs, is lost: %s", l->peer.host, *rank,
                 strerror(error));
    else
        snprintf(text, room, "rank %d (process %d on %.60s) died; " MS_OUT_OF_MEMORY, *rank, (int)l->peer.pid,
                 l->peer.host);
    return true;
}

bool ms__link_wait(int *rank, char *text, size_t room)
{
    int n = ms__world.nodes;
    bool found = false;
    struct pollfd *fds = calloc((size_t)n + 1, sizeof *fds);
    for (bool waits = true; fds && waits && !found;) {
        for (int k = 0; k < n; k++) fds[k] = (struct pollfd) { .fd = links.of[k].fd, .events = POLLIN };
        if (ms__world.rank == 0 && links.n_open == n - 1 && links.listens >= 0) {
            close(links.listens);
            links.listens = -1;
        }
        fds[n] = (struct pollfd) { .fd = links.listens, .events = POLLIN };
        if (poll(fds, (nfds_t)n + 1, -1) <= 0) continue;
        for (int k = 0; k < n && !found; k++)
            if (fds[k].revents) found = read_link(&links.of[k], rank, text, room);
        if (fds[n].revents) accept_node();
        waits = links.listens >= 0;
        for (int k = 0; k < n; k++) waits |= links.of[k].fd >= 0;
    }
    free(fds);
    return found;
}

static void send_to_nodes(char c)
{
    pthread_mutex_lock(&links.lock);
    for (int k = 0; links.of && k < ms__world.nodes; k++)
        if (links.of[k].fd >= 0) (void)send(links.of[k].fd, &c, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    pthread_mutex_unlock(&links.lock);
}

void ms__link_left(void) { send_to_nodes(LEFT); }

void ms__link_ended(void)
{
    if (!atomic_exchange(&links.ended, true)) send_to_nodes(ENDED);
}

ms_status ms__link_open(bool *watches)
{
    ms_world *w = &ms__world;
    listener *all = calloc((size_t)w->size, sizeof *all);
    links.of = calloc((size_t)w->nodes, sizeof *links.of);
    if (!all || !links.of)
        return ms__no_memory((size_t)w->size * sizeof *all, "dist.init", "the addresses of %d ranks", w->size);
    for (int k = 0; k < w->nodes; k++) links.of[k].fd = -1;
    if (w->rank == 0) open_listener();
    if (w->transport->all_gather(&links.here, all, sizeof links.here) != 0)
        return ms__fail(MS_ECOMM, "dist.init: MPI_Allgather failed");
    links.here = all[0];
    free(all);
    *watches = links.here.port && (w->rank == 0 || (w->local_rank == 0 && connect_to_first()));
    if (!*watches && w->local_rank == 0)
        fprintf(stderr, "rank %d: dist: no TCP connection to rank 0; if a node fails, the job ends after %g s\n",
                w->rank, w->timeout);
    return MS_OK;
}

ms_status ms__link_made(void)
{
    listener *all = calloc((size_t)ms__world.size, sizeof *all);
    bool ok = all && ms__world.transport->all_gather(&links.here, all, sizeof links.here) == 0;
    free(all);
    return ok ? MS_OK : ms__fail(MS_ECOMM, "dist.init: MPI_Allgather failed");
}
