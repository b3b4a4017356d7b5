/* Messages by a socket between each process and the first, which torchrun's environment names
 * (carrier.h): RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. The launcher itself listens at
 * MASTER_PORT; the first process takes the next one, or DELTAPROOF_PORT. Whoever does not prove
 * that it belongs is refused (meet.h). Once a second each process says that it is alive, between
 * messages. */
#include "by_tcp.h"
#include "meet.h"
#include "ref/vocabulary/problem.h"
#include "ref/vocabulary/text.h"

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static dp_job *const job = &dp_the_job;
static int *socket_of; /* [size] of the first; of the others that of rank 0 alone */

enum { ALIVE = DP_MPI_NKINDS }; /* a head without bytes */
/* A rank's reader and writer of messages, and arrived pieces. */
typedef struct {
    pthread_mutex_t reading, writing;
    _Atomic unsigned moved;
    unsigned seen; /* moved, at the last tick */
} line;
static line *line_of;

/* ---- bytes ----------------------------------------------------------------------------------- */

static void lost(int rank) {
    char who[160];
    if (job->ending) _exit(0);
    if (!job->rank) dp_mpi_say_gone();
    dp_process_name(rank, who, sizeof who);
    if (job->rank) fprintf(stderr, "deltaproof: %s has ended\n", who);
    dp_job_end();
}

static void move_all(int rank, void *x, size_t n, int out, double limit, const char *what) {
    int late;
    if (dp_socket_move(socket_of[rank], x, n, out, limit, &line_of[rank].moved, &late)) return;
    if (late) dp_job_too_late(rank, what);
    lost(rank);
}

/* ---- messages -------------------------------------------------------------------------------- */

static void send_bytes(int to, int kind, const void *x, size_t bytes) {
    dp_head h = {(uint64_t)kind, bytes};
    pthread_mutex_lock(&line_of[to].writing);
    move_all(to, &h, sizeof h, 1, job->limit, "room for a message");
    move_all(to, (void *)x, bytes, 1, job->limit, "room for a message");
    pthread_mutex_unlock(&line_of[to].writing);
}

/* The next head that is no sign of life, of this kind; limit: for all of that. */
static dp_head receive_head(int from, int kind, const char *what) {
    dp_head h = {ALIVE, 0};
    for (const double t0 = omp_get_wtime(); h.kind == ALIVE;)
        move_all(from, &h, sizeof h, 0, job->limit - (omp_get_wtime() - t0), what);
    if (h.kind == (uint64_t)kind) return h;
    fprintf(stderr, "deltaproof: rank %d sends something else than %s\n", from, what);
    dp_job_end();
    return h;
}

static void receive_bytes(int from, int kind, void *x, size_t bytes, const char *what) {
    pthread_mutex_lock(&line_of[from].reading);
    const dp_head h = receive_head(from, kind, what);
    if (h.bytes != bytes) dp_job_wrong_length(from, what, (size_t)h.bytes, bytes);
    move_all(from, x, bytes, 0, job->limit, what);
    pthread_mutex_unlock(&line_of[from].reading);
}

/* Takes signs of life away. 1: something else stands behind them, or the end; its reader is the
 * caller. */
static int has_message(int rank) {
    dp_head h;
    for (;;) {
        const ssize_t n = recv(socket_of[rank], &h, sizeof h, MSG_PEEK | MSG_DONTWAIT);
        if (n < 0) return errno != EAGAIN && errno != EINTR;
        if (n < (ssize_t)sizeof h || h.kind != ALIVE) return 1;
        if (recv(socket_of[rank], &h, sizeof h, MSG_DONTWAIT) != sizeof h) return 1;
        line_of[rank].moved++;
    }
}

/* The first that has something to say, which the caller reads. */
static int ready(void) {
    for (;;)
        for (int r = 0; r < job->size; r++) {
            struct pollfd f = {.fd = socket_of[r], .events = POLLIN};
            if (f.fd < 0 || poll(&f, 1, job->rank ? 200 : 1) <= 0) continue;
            pthread_mutex_lock(&line_of[r].reading);
            if (has_message(r)) return r;
            pthread_mutex_unlock(&line_of[r].reading);
        }
}

static void *receive_any(int kind, size_t least, size_t most, int *from, size_t *bytes) {
    *from = ready();
    const dp_head h = receive_head(*from, kind, "a message");
    dp_job_not_between(*from, h.bytes, least, most);
    char *x = dp_alloc(h.bytes + 1, 1);
    move_all(*from, x, h.bytes, 0, job->limit, "a message");
    pthread_mutex_unlock(&line_of[*from].reading);
    *bytes = h.bytes;
    return x;
}

/* ---- signs of life --------------------------------------------------------------------------- */

/* Where all that was sent before has arrived, so that it goes as one piece. */
static void say_alive(int rank) {
    const dp_head h = {ALIVE, 0};
    int waiting;
    if (pthread_mutex_trylock(&line_of[rank].writing)) return;
    if (!ioctl(socket_of[rank], SIOCOUTQ, &waiting) && !waiting)
        if (send(socket_of[rank], &h, sizeof h, MSG_NOSIGNAL | MSG_DONTWAIT) > 0) {
        }
    pthread_mutex_unlock(&line_of[rank].writing);
}

/* Has something come since the last tick, or is there something that nobody has read yet? */
static int is_heard(int rank) {
    line *l = &line_of[rank];
    int unread = 0;
    if (!pthread_mutex_trylock(&l->reading)) {
        unread = has_message(rank);
        pthread_mutex_unlock(&l->reading);
    }
    const int heard = unread || l->moved != l->seen;
    l->seen = l->moved;
    return heard;
}

static void tick(int whole) {
    for (int r = 0; r < job->size; r++) {
        if (socket_of[r] < 0 || !whole) continue;
        say_alive(r);
        job->quiet[r] = is_heard(r) ? 0 : job->quiet[r] + 1;
    }
}

/* ---- begin and end --------------------------------------------------------------------------- */

void dp_tcp_open(const dp_process *own) {
    job->all = dp_calloc((size_t)job->size, sizeof *job->all);
    job->gone = dp_calloc((size_t)job->size, sizeof *job->gone);
    job->quiet = dp_calloc((size_t)job->size, sizeof *job->quiet);
    socket_of = dp_calloc((size_t)job->size, sizeof *socket_of);
    line_of = dp_calloc((size_t)job->size, sizeof *line_of);
    for (int r = 0; r < job->size; r++) {
        dp_tcp_take(r, -1);
        job->all[r] = *own;
    }
}

void dp_tcp_take(int rank, int fd) {
    line_of[rank].reading = line_of[rank].writing = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    socket_of[rank] = fd;
    job->gone[rank] = (struct pollfd){.fd = fd, .events = POLLRDHUP};
}

/* A dead host sends no word: it is asked every five seconds. */
static void keep(int rank) {
    const int fd = socket_of[rank], on = 1, idle = 10, each = 5, times = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &each, sizeof each);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
    dp_tcp_take(rank, fd);
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
    dp_tcp_open(own);
    dp_meet(own, host, port, socket_of);
    for (int r = 0; r < job->size; r++)
        if (socket_of[r] >= 0) keep(r);
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
    .tick = tick,
    .finish = finish,
    .no_peers = "ranks of --backend mpi need mpirun: torchrun's processes reach rank 0 alone"};
