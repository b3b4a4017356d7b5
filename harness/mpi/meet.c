/* Processes meet by sockets (meet.h). */
#include "meet.h"
#include "guests.h"
#include "ref/files/input.h"
#include "ref/vocabulary/problem.h"
#include "ref/vocabulary/text.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <omp.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- introductions --------------------------------------------------------------------------- */

#define MAGIC "deltaproof job 2"
_Static_assert(sizeof(dp_hello) == 120 && sizeof(dp_proof) == 104, "all of it is sent");
_Static_assert(sizeof((dp_proof *)0)->code == crypto_auth_BYTES &&
                   sizeof((dp_party *)0)->key == crypto_auth_KEYBYTES,
               "as libsodium has them");

int dp_party_make(dp_party *p, const dp_process *own, int rank, int size, const void *secret,
                  size_t n) {
    if (sodium_init() < 0) return 0;
    memset(p, 0, sizeof *p);
    memcpy(p->hello.magic, MAGIC, sizeof p->hello.magic);
    strncpy(p->hello.version, DP_VERSION, sizeof p->hello.version - 1);
    memcpy(p->hello.build, own->build, sizeof p->hello.build);
    p->hello.secret = n > 0;
    p->hello.rank = (uint32_t)rank;
    p->hello.size = (uint32_t)size;
    p->hello.arguments = own->arguments;
    p->process = *own;
    crypto_generichash(p->key, sizeof p->key, secret, n, NULL, 0);
    dp_party_renew(p);
    return 1;
}

void dp_party_renew(dp_party *p) { randombytes_buf(p->hello.nonce, sizeof p->hello.nonce); }

const char *dp_hello_wrong(const dp_party *own, const dp_hello *other) {
    const dp_hello *h = &own->hello;
    const uint32_t least = h->rank ? 0 : 1, most = h->rank ? 0 : h->size - 1;
    if (memcmp(h->magic, other->magic, sizeof h->magic)) return "another program";
    if (memcmp(h->version, other->version, sizeof h->version)) return "another version";
    if (memcmp(h->build, other->build, sizeof h->build)) return "another build";
    if (h->secret && !other->secret) return "no secret";
    if (h->secret != other->secret) return "a secret (DELTAPROOF_SECRET)";
    if (h->size != other->size) return "another number of processes";
    if (other->rank < least || other->rank > most || other->none) return "a rank that does not fit";
    if (h->arguments != other->arguments) return "other arguments";
    return NULL;
}

/* The code of the speaker, of both hellos, and of host and process. */
static void code_of(const dp_party *own, const dp_hello *speaker, const dp_hello *listener,
                    const dp_proof *proof, unsigned char code[crypto_auth_BYTES]) {
    struct {
        dp_hello speaker, listener;
        dp_proof who;
    } all;
    memset(&all, 0, sizeof all);
    all.speaker = *speaker;
    all.listener = *listener;
    all.who = *proof;
    memset(all.who.code, 0, sizeof all.who.code);
    crypto_auth(code, (const unsigned char *)&all, sizeof all, own->key);
}

dp_proof dp_proof_make(const dp_party *own, const dp_hello *other) {
    dp_proof p;
    memset(&p, 0, sizeof p);
    memcpy(p.host, own->process.host, sizeof p.host);
    p.pid = own->process.pid;
    code_of(own, &own->hello, other, &p, p.code);
    return p;
}

const char *dp_proof_wrong(const dp_party *own, const dp_hello *other, const dp_proof *proof) {
    unsigned char code[crypto_auth_BYTES];
    code_of(own, other, &own->hello, proof, code);
    if (sodium_memcmp(code, proof->code, sizeof code))
        return own->hello.secret ? "another secret" : "a proof that does not fit";
    const size_t n = strnlen(proof->host, sizeof proof->host);
    if (n == sizeof proof->host || dp_text_good(proof->host, n, 0) != n || proof->pid < 1)
        return "a host or process that is none";
    return NULL;
}

static dp_job *const job = &dp_the_job;

static void refuse(const char *what, const char *why) {
    fprintf(stderr, "deltaproof: rank %d of %d, %s: %s\n", job->rank, job->size, what, why);
    _exit(2);
}

int dp_socket_move(int fd, void *x, size_t n, int out, double limit, _Atomic unsigned *pieces,
                   int *late) {
    char *at = x;
    for (double since = omp_get_wtime(); n;) {
        struct pollfd f = {.fd = fd, .events = out ? POLLOUT : POLLIN};
        *late = omp_get_wtime() - since > limit;
        if (*late) return 0;
        if (poll(&f, 1, 200) <= 0) continue;
        const ssize_t k =
            out ? send(fd, at, n, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, at, n, MSG_DONTWAIT);
        if (k < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (k <= 0) return 0;
        at += k;
        n -= (size_t)k;
        if (!pieces) continue;
        since = omp_get_wtime();
        ++*pieces;
    }
    *late = 0;
    return 1;
}

/* ---- the secret ------------------------------------------------------------------------------ */

/* Taken out of the environment, which kernels and programs under judgement inherit. */
static char *secret_of_environment(size_t *n) {
    char *given = getenv("DELTAPROOF_SECRET"), *own;
    *n = given ? strlen(given) : 0;
    own = dp_calloc(*n + 1, 1);
    if (given) memcpy(own, given, *n);
    if (given) explicit_bzero(given, *n);
    unsetenv("DELTAPROOF_SECRET");
    return own;
}

/* *n = 0: there is none. */
static char *secret_of(size_t *n) {
    const char *path = getenv("DELTAPROOF_SECRET_FILE");
    const char *const name = path ? "DELTAPROOF_SECRET_FILE" : "DELTAPROOF_SECRET";
    char *own = secret_of_environment(n);
    dp_err e = {0};
    if (path) {
        free(own);
        if (dp_input_read(path, DP_SECRET_MOST, &own, n, &e)) refuse(name, e.msg);
        while (*n && strchr(" \r\n\t", own[*n - 1]))
            --*n;
    }
    if ((path || *n) && *n < DP_SECRET_LEAST)
        refuse(name, "shorter than 16 characters (openssl rand -hex 32)");
    return own;
}

static dp_party party_of(const dp_process *own) {
    dp_party p;
    size_t n;
    DP_OWN char *secret = secret_of(&n);
    if (!dp_party_make(&p, own, job->rank, job->size, secret, n))
        refuse("libsodium", "has no random numbers here");
    explicit_bzero(secret, n);
    return p;
}

/* ---- the first process: where it listens ----------------------------------------------------- */

static struct addrinfo *resolve(const char *host, const char *port) {
    struct addrinfo *found = NULL;
    const struct addrinfo want = {.ai_socktype = SOCK_STREAM};
    const int rc = getaddrinfo(host, port, &want, &found);
    if (rc) refuse(host, gai_strerror(rc));
    return found;
}

static int is_numeric(const char *host) {
    struct addrinfo *found = NULL;
    const struct addrinfo want = {.ai_flags = AI_NUMERICHOST};
    const int rc = getaddrinfo(host, NULL, &want, &found);
    if (!rc) freeaddrinfo(found);
    return !rc;
}

static uint32_t ipv4(const struct sockaddr *a) {
    return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr);
}
static const struct in6_addr *ipv6(const struct sockaddr *a) {
    return &((const struct sockaddr_in6 *)a)->sin6_addr;
}
static int is_every_interface(const struct sockaddr *a) {
    return a->sa_family == AF_INET ? ipv4(a) == INADDR_ANY : IN6_IS_ADDR_UNSPECIFIED(ipv6(a));
}
static int is_loopback(const struct sockaddr *a) {
    return a->sa_family == AF_INET ? ipv4(a) >> 24 == 127 : IN6_IS_ADDR_LOOPBACK(ipv6(a));
}

static int open_listener(const struct addrinfo *a, int *error) {
    const int on = 1, off = 0, fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (!bind(fd, a->ai_addr, a->ai_addrlen) && !listen(fd, 1024)) return fd;
    if (errno != EADDRNOTAVAIL) *error = errno;
    close(fd);
    return -1;
}

/* Listens at an address of this host that `host` names; with every, at an address of all
 * interfaces. Returns -1 if it names no such address, or if the address is not available (*error
 * has the reason). */
static int try_listen(const char *host, const char *port, int every, int loopback, int *error) {
    struct addrinfo *all = resolve(host, port);
    int fd = -1;
    *error = 0;
    for (const struct addrinfo *a = all; a && fd < 0; a = a->ai_next)
        if (is_every_interface(a->ai_addr) == every && (loopback || !is_loopback(a->ai_addr)))
            fd = open_listener(a, error);
    freeaddrinfo(all);
    return fd;
}

static int listen_at(const char *host, const char *port, int secret) {
    /* a name of this host that leads to itself alone (127.0.1.1 in /etc/hosts) is no address of it
     * for others */
    const int loopback = !secret || is_numeric(host) || !strcmp(host, "localhost");
    int error, fd = try_listen(host, port, 0, loopback, &error);
    if (fd < 0 && !error && secret) fd = try_listen("::", port, 1, 1, &error);
    if (fd < 0 && !error && secret) fd = try_listen("0.0.0.0", port, 1, 1, &error);
    if (fd < 0 && !error) fd = try_listen("127.0.0.1", port, 0, 1, &error);
    if (fd < 0) {
        char what[80];
        snprintf(what, sizeof what, "port %s (MASTER_PORT + 1, or DELTAPROOF_PORT)", port);
        refuse(what, strerror(error));
    }
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* ---- the first process: who comes ------------------------------------------------------------ */

static void open_door(dp_guests *h, int fd) {
    for (int i = 0; i < DP_MOST_GUESTS; i++) {
        const int new = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (new < 0 && (errno == EMFILE || errno == ENFILE)) dp_guests_drop_oldest(h);
        if (new < 0) return;
        dp_guests_let_in(h, new);
    }
}

/* Waits for a while. */
static void look_around(dp_guests *h, int door) {
    struct pollfd f[1 + DP_MOST_GUESTS] = {{.fd = door, .events = POLLIN}};
    for (int i = 0; i < h->n; i++)
        f[i + 1] = (struct pollfd){.fd = h->guest[i].fd, .events = POLLIN};
    if (poll(f, (nfds_t)h->n + 1, 200) > 0) {
        for (int i = h->n; i > 0; i--) /* whoever leaves is replaced by one behind it */
            if (f[i].revents) dp_guests_hear(h, i - 1);
        if (f[0].revents) open_door(h, door);
    }
    dp_guests_look(h);
}

static void too_late(const dp_guests *h) {
    char what[400], who[120] = "";
    int r = 1;
    while (h->socket_of[r] >= 0)
        r++;
    snprintf(who, sizeof who, "%d of %d have come, rank %d has not", h->here, job->size, r);
    snprintf(what, sizeof what, "%s%s%s%s", who, h->away ? " (sent away, the last one: " : "",
             h->away ? h->why : "", h->away ? ")" : "");
    refuse("the other processes", what);
}

/* One that has gone by now is found when it is asked for something. */
static void begin(int fd) {
    uint32_t word = DP_BEGIN;
    int late;
    (void)dp_socket_move(fd, &word, sizeof word, 1, DP_CONNECTION_S, NULL, &late);
}

static void wait_for_others(const dp_party *party, const char *where, const char *port,
                            int *socket_of) {
    if (job->size == 1) return;
    DP_OWN dp_guests *h = dp_calloc(1, sizeof *h);
    const int door = listen_at(where, port, (int)party->hello.secret);
    h->party = *party;
    h->here = 1;
    h->socket_of = socket_of;
    for (const double t0 = omp_get_wtime(); h->here < job->size;) {
        if (omp_get_wtime() - t0 > DP_START_S) too_late(h);
        look_around(h, door);
    }
    close(door);
    for (int r = 1; r < job->size; r++)
        begin(socket_of[r]);
    dp_guests_close(h);
    explicit_bzero(h, sizeof *h);
}

/* ---- another process ------------------------------------------------------------------------- */

static int connected(int fd, const struct addrinfo *a) {
    int error = 0;
    socklen_t size = sizeof error;
    struct pollfd f = {.fd = fd, .events = POLLOUT};
    if (!connect(fd, a->ai_addr, a->ai_addrlen)) return 1;
    return errno == EINPROGRESS && poll(&f, 1, DP_CONNECTION_S * 1000) > 0 &&
           !getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) && !error;
}

static int try_connect(const char *where, const char *port) {
    struct addrinfo *all = resolve(where, port);
    int fd = -1;
    for (const struct addrinfo *a = all; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd >= 0 && !connected(fd, a)) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(all);
    return fd;
}

/* 1: it is the first process, and takes this one. 0: not now, *why. -1: never, *why. */
static int introduce(int fd, dp_party *own, dp_process *first, const char **why) {
    struct {
        dp_hello hello;
        dp_proof proof;
    } its;
    int late;
    uint32_t answer;
    *why = "rank 0 ends the connection, or is silent";
    if (!dp_socket_move(fd, &own->hello, sizeof own->hello, 1, DP_CONNECTION_S, NULL, &late) ||
        !dp_socket_move(fd, &its, sizeof its, 0, DP_CONNECTION_S, NULL, &late))
        return 0;
    const char *wrong = dp_hello_wrong(own, &its.hello);
    if (!wrong) wrong = dp_proof_wrong(own, &its.hello, &its.proof);
    if (wrong) return *why = wrong, -1;
    dp_proof proof = dp_proof_make(own, &its.hello);
    if (!dp_socket_move(fd, &proof, sizeof proof, 1, DP_CONNECTION_S, NULL, &late) ||
        !dp_socket_move(fd, &answer, sizeof answer, 0, DP_CONNECTION_S, NULL, &late))
        return 0;
    if (answer != DP_WELCOME) return *why = "this rank already", -1;
    *first = own->process;
    memcpy(first->host, its.proof.host, sizeof first->host);
    first->pid = its.proof.pid;
    return 1;
}

/* The first one may still wait for others. */
static int wait_for_begin(int fd, const char *where) {
    uint32_t word = 0;
    int late;
    if (dp_socket_move(fd, &word, sizeof word, 0, DP_START_S + DP_CONNECTION_S, NULL, &late) &&
        word == DP_BEGIN)
        return fd;
    refuse(where, late ? "rank 0 does not begin: it is stopped, or others have not come"
                       : "rank 0 has ended before all others came");
    return -1;
}

static int join_first(dp_party *own, const char *where, const char *port) {
    const char *why = "";
    char what[300];
    int got = 0;
    for (const double t0 = omp_get_wtime();; usleep(50000)) {
        const int fd = try_connect(where, port);
        got = fd >= 0 ? introduce(fd, own, &job->all[0], &why) : 0;
        if (got > 0) return wait_for_begin(fd, where);
        if (fd >= 0) close(fd);
        dp_party_renew(own);
        if (got < 0 || omp_get_wtime() - t0 > DP_START_S) break;
    }
    snprintf(what, sizeof what, "%s%s", got < 0 ? "rank 0 has " : "",
             *why ? why : "rank 0 does not listen there");
    refuse(where, what);
    return -1;
}

void dp_meet(const dp_process *own, const char *host, const char *port, int *socket_of) {
    dp_party party = party_of(own);
    if (job->rank)
        socket_of[0] = join_first(&party, host, port);
    else
        wait_for_others(&party, host, port, socket_of);
    job->all[job->rank] = *own;
    explicit_bzero(&party, sizeof party);
}
