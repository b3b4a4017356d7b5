/* Messages by a socket between each process and the first, which torchrun's environment names
 * (carrier.h): RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. torchrun itself listens at MASTER_PORT;
 * the first process takes the next one, or DELTAPROOF_PORT. Whoever has other arguments or another
 * program is refused. */
#define _GNU_SOURCE
#include "carrier.h"
#include "harness/base/clock.h"
#include "ref/vocabulary/number.h"
#include "ref/vocabulary/problem.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static dp_job *const job = &dp_the_job;
static int *socket_of; /* [size] of the first; of the others that of rank 0 alone */

/* ---- bytes ----------------------------------------------------------------------------------- */

static void lost(int rank) {
    char who[160];
    if (job->ending) _exit(0);
    if (!job->rank) dp_mpi_say_gone();
    dp_process_name(rank, who, sizeof who);
    if (job->rank) fprintf(stderr, "deltaproof: %s has ended\n", who);
    dp_job_end();
}

/* Moves them all; 0: the other has gone, or has moved none for so long. */
static int move(int fd, void *x, size_t n, int out, double limit, int *late) {
    char *at = x;
    for (double since = dp_now(); n;) {
        struct pollfd f = {.fd = fd, .events = out ? POLLOUT : POLLIN};
        *late = dp_now() - since > limit;
        if (*late) return 0;
        if (poll(&f, 1, 200) <= 0) continue;
        const ssize_t k = out ? send(fd, at, n, MSG_NOSIGNAL) : recv(fd, at, n, 0);
        if (k < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (k <= 0) return 0;
        at += k;
        n -= (size_t)k;
        since = dp_now();
    }
    return 1;
}

static void move_all(int rank, void *x, size_t n, int out, const char *what) {
    int late;
    if (move(socket_of[rank], x, n, out, job->limit, &late)) return;
    if (late) dp_job_too_late(rank, what, NULL);
    lost(rank);
}

/* ---- messages -------------------------------------------------------------------------------- */

typedef struct {
    uint64_t kind, bytes;
} head;

static void send_bytes(int to, int kind, const void *x, size_t bytes) {
    head h = {(uint64_t)kind, bytes};
    move_all(to, &h, sizeof h, 1, "room for a message");
    move_all(to, (void *)x, bytes, 1, "room for a message");
}

static head receive_head(int from, int kind, const char *what) {
    head h;
    move_all(from, &h, sizeof h, 0, what);
    if (h.kind == (uint64_t)kind) return h;
    fprintf(stderr, "deltaproof: rank %d sends something else than %s\n", from, what);
    dp_job_end();
    return h;
}

static void receive_bytes(int from, int kind, void *x, size_t bytes, const char *what) {
    const head h = receive_head(from, kind, what);
    if (h.bytes != bytes) dp_job_wrong_length(from, what, (size_t)h.bytes, bytes);
    move_all(from, x, bytes, 0, what);
}

/* The first that has something to say. */
static int ready(void) {
    for (;;)
        for (int r = 0; r < job->size; r++) {
            struct pollfd f = {.fd = socket_of[r], .events = POLLIN};
            if (f.fd >= 0 && poll(&f, 1, job->rank ? 200 : 1) > 0) return r;
        }
}

static void *receive_any(int kind, size_t least, size_t most, int *from, size_t *bytes) {
    *from = ready();
    const head h = receive_head(*from, kind, "a message");
    dp_job_not_between(*from, h.bytes, least, most);
    char *x = dp_alloc(h.bytes + 1, 1);
    move_all(*from, x, h.bytes, 0, "a message");
    *bytes = h.bytes;
    return x;
}

/* ---- the meeting ----------------------------------------------------------------------------- */

typedef struct {
    char magic[16];
    int rank, size;
    dp_process process;
} hello;
#define MAGIC "deltaproof job 1"

static void refuse(const char *what, const char *why) {
    fprintf(stderr, "deltaproof: rank %d of %d, %s: %s\n", job->rank, job->size, what, why);
    _exit(2);
}

/* A dead host sends no word: it is asked every five seconds. */
static void keep(int fd, int rank) {
    const int on = 1, idle = 10, each = 5, times = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &each, sizeof each);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
    socket_of[rank] = fd;
    job->gone[rank] = (struct pollfd){.fd = fd, .events = POLLRDHUP};
}

static struct addrinfo *resolve(const char *host, const char *port) {
    struct addrinfo *found = NULL;
    const struct addrinfo want = {.ai_socktype = SOCK_STREAM};
    const int rc = getaddrinfo(host, port, &want, &found);
    if (rc) refuse(host, gai_strerror(rc));
    return found;
}

static int is_every_interface(const struct sockaddr *a) {
    return a->sa_family == AF_INET
               ? ((const struct sockaddr_in *)a)->sin_addr.s_addr == htonl(INADDR_ANY)
               : IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

/* A socket that listens at an address of this host that `host` names; -1: it names none, or, why
 * in *error, the address cannot be had. */
static int try_listen(const char *host, const char *port, int *error) {
    struct addrinfo *all = resolve(host, port);
    int fd = -1;
    const int on = 1;
    *error = 0;
    for (const struct addrinfo *a = all; a && fd < 0; a = a->ai_next) {
        if (is_every_interface(a->ai_addr)) continue;
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0) continue;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (!bind(fd, a->ai_addr, a->ai_addrlen) && !listen(fd, 128)) continue;
        if (errno != EADDRNOTAVAIL) *error = errno;
        close(fd);
        fd = -1;
    }
    freeaddrinfo(all);
    return fd;
}

/* Nobody but this host is heard where MASTER_ADDR is another one's. */
static int listen_at(const char *host, const char *port) {
    int error, fd = try_listen(host, port, &error);
    if (fd < 0 && !error) fd = try_listen("127.0.0.1", port, &error);
    if (fd < 0) {
        char what[80];
        snprintf(what, sizeof what, "port %s (MASTER_PORT + 1, or DELTAPROOF_PORT)", port);
        refuse(what, strerror(error));
    }
    return fd;
}

/* One more process, or a stranger, who is sent away. */
static int welcome(int fd, const dp_process *own) {
    hello h, answer = {.size = job->size, .process = *own};
    int late;
    memcpy(answer.magic, MAGIC, sizeof answer.magic);
    const int ok = move(fd, &h, sizeof h, 0, 5, &late) && !memcmp(h.magic, MAGIC, sizeof h.magic) &&
                   h.size == job->size && h.rank > 0 && h.rank < job->size &&
                   socket_of[h.rank] < 0 && h.process.arguments == own->arguments &&
                   move(fd, &answer, sizeof answer, 1, 5, &late);
    if (!ok) {
        close(fd);
        return 0;
    }
    job->all[h.rank] = h.process;
    keep(fd, h.rank);
    return 1;
}

static void wait_for_others(const dp_process *own, const char *host, const char *port) {
    const int fd = listen_at(host, port);
    const double t0 = dp_now();
    for (int here = 1; here < job->size;) {
        struct pollfd f = {.fd = fd, .events = POLLIN};
        if (dp_now() - t0 > DP_START_S) {
            char who[64];
            int r = 1;
            while (socket_of[r] >= 0)
                r++;
            snprintf(who, sizeof who, "%d of %d have come, rank %d has not", here, job->size, r);
            refuse("the other processes", who);
        }
        if (poll(&f, 1, 200) > 0) here += welcome(accept4(fd, NULL, NULL, SOCK_CLOEXEC), own);
    }
    close(fd);
}

static int try_connect(const char *host, const char *port) {
    struct addrinfo *all = resolve(host, port);
    int fd = -1;
    for (const struct addrinfo *a = all; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen)) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(all);
    return fd;
}

static void join_first(const dp_process *own, const char *host, const char *port) {
    hello h = {.rank = job->rank, .size = job->size, .process = *own};
    int fd = -1, late;
    memcpy(h.magic, MAGIC, sizeof h.magic);
    for (const double t0 = dp_now(); fd < 0; usleep(50000)) {
        fd = try_connect(host, port);
        if (fd < 0 && dp_now() - t0 > DP_START_S) refuse(host, "rank 0 does not listen there");
    }
    if (!move(fd, &h, sizeof h, 1, 5, &late) || !move(fd, &h, sizeof h, 0, DP_START_S, &late))
        refuse(host, "rank 0 sends it away: another program or other arguments, a number of "
                     "processes or a rank that does not fit");
    job->all[0] = h.process;
    keep(fd, 0);
}

static int number(const char *name, int64_t least, int64_t most) {
    int64_t n;
    const char *text = getenv(name);
    if (dp_number_int(text ? text : "", least, most, &n) == DP_NUMBER_OK) return (int)n;
    fprintf(stderr, "deltaproof: %s=%s: must be %lld to %lld\n", name, text ? text : "",
            (long long)least, (long long)most);
    _exit(2);
}

static int start(const dp_process *own) {
    const char *host = getenv("MASTER_ADDR");
    char port[16];
    if (!host || !getenv("RANK") || !getenv("WORLD_SIZE") || !getenv("MASTER_PORT")) return 0;
    job->size = number("WORLD_SIZE", 1, 4096);
    job->rank = number("RANK", 0, job->size - 1);
    snprintf(port, sizeof port, "%d",
             getenv("DELTAPROOF_PORT") ? number("DELTAPROOF_PORT", 1, 65535)
                                       : number("MASTER_PORT", 1, 65534) + 1);
    job->all = dp_calloc((size_t)job->size, sizeof *job->all);
    job->gone = dp_calloc((size_t)job->size, sizeof *job->gone);
    socket_of = dp_calloc((size_t)job->size, sizeof *socket_of);
    for (int r = 0; r < job->size; r++) {
        socket_of[r] = job->gone[r].fd = -1;
        job->all[r].arguments = own->arguments;
    }
    if (job->rank)
        join_first(own, host, port);
    else
        wait_for_others(own, host, port);
    job->all[job->rank] = *own;
    return 1;
}

static void finish(void) {
    for (int r = 0; r < job->size; r++)
        if (socket_of[r] >= 0) close(socket_of[r]);
}

const dp_carrier dp_by_tcp = {
    .start = start,
    .send = send_bytes,
    .receive = receive_bytes,
    .receive_any = receive_any,
    .finish = finish,
    .no_peers = "ranks of --backend mpi need mpirun: torchrun's processes reach rank 0 alone"};
