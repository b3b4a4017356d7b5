/* harness/fuzz/fuzz_meeting.c - libFuzzer target: what strangers and ranks say to the first of four
 * processes, over real sockets. The first byte of an input chooses.
 *
 * Bit 7 is 0: the meeting (guests.h). Bit 0: there is a secret; bit 1: the others have another one.
 * Then steps: a byte whose bits 0-1 are one of four connections and 2-4 what happens there:
 *   0  it is opened; bit 5: by one whose host is no text
 *   1  n, and n bytes: they are sent
 *   2  rank, place, change: the right hello, of which the byte at that place is changed (xor)
 *   3  place, change: the right proof for what was answered
 *   4  it is closed
 * Nobody is there who did not say both unchanged, with the right secret.
 *
 * Bit 7 is 1: messages (by_tcp.c). The rest is rank 1's messages. Messages of any length and of 8
 * bytes are read alternately. A message has its right length, or the job ends. */
#include "harness/mpi/by_tcp.h"
#include "harness/mpi/guests.h"
#include "mutate.h"
#include "ref/vocabulary/problem.h"
#include "ref/vocabulary/text.h"

#include <setjmp.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SIZE = 4, LINES = 4, MOST_STEPS = 24, UNKNOWN = -1 };

/* Random numbers that are the same each time. */
static uint64_t drawn;
static const char *name(void) { return "counted"; }
static uint32_t draw(void) { return (uint32_t)((drawn = drawn * 6364136223846793005u + 1) >> 32); }
static void fill(void *const x, const size_t n) {
    for (size_t i = 0; i < n; i++)
        ((unsigned char *)x)[i] = (unsigned char)draw();
}
static randombytes_implementation counted = {name, draw, NULL, NULL, fill, NULL};

static const dp_process here = {"host", "0123456789abcdef0123456789abcdef", 1, 17};

/* ---- the meeting ----------------------------------------------------------------------------- */

typedef struct {
    int fd, rank; /* rank: as which it has said its hello, unchanged and alone; else UNKNOWN */
    int fresh;    /* nothing has been sent yet */
    int bad;      /* its host is no text */
    dp_party own;
    dp_hello first;
} stranger;

typedef struct {
    dp_guests guests;
    stranger line[LINES];
    int *socket_of, proved[SIZE], same; /* same: the others have the right secret */
    const uint8_t *at, *end;
} meeting;

static int next(meeting *m) { return m->at < m->end ? *m->at++ : 0; }

static int say(stranger *s, const void *x, size_t n) {
    return send(s->fd, x, n, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)n;
}

/* Changes a byte where the input says so; 1: it is another than before. */
static int change(meeting *m, void *x, size_t n) {
    const size_t at = (size_t)next(m);
    const int by = next(m);
    if (at >= n || !by) return 0;
    ((unsigned char *)x)[at] ^= (unsigned char)by;
    return 1;
}

static void open_line(meeting *m, stranger *s, int bad) {
    int fd[2];
    if (s->fd >= 0) return;
    must(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fd), "socketpair", "");
    *s = (stranger){.fd = fd[0], .rank = UNKNOWN, .fresh = 1, .bad = bad};
    dp_guests_let_in(&m->guests, fd[1]);
}

static void close_line(stranger *s) {
    if (s->fd >= 0) close(s->fd);
    s->fd = -1;
}

static void say_bytes(meeting *m, stranger *s) {
    size_t n = (size_t)next(m);
    if (n > (size_t)(m->end - m->at)) n = (size_t)(m->end - m->at);
    if (n) s->rank = UNKNOWN;
    if (n) s->fresh = 0;
    say(s, m->at, n);
    m->at += n;
}

static void say_hello(meeting *m, stranger *s) {
    const int rank = next(m) % (SIZE + 1), secret = m->guests.party.hello.secret;
    must(dp_party_make(&s->own, &here, rank, SIZE, m->same ? "the secret of all" : "another one",
                       secret ? 11 : 0),
         "no party", "");
    if (s->bad) s->own.process.host[0] = '\33';
    dp_hello h = s->own.hello;
    const int changed =
        change(m, &h, offsetof(dp_hello, nonce)) | (rank == 0) | (rank >= SIZE) | !s->fresh;
    s->rank = say(s, &h, sizeof h) && !changed ? rank : UNKNOWN;
    s->fresh = 0;
}

/* Reads the answer to a hello, which must be right, and says a proof. */
static void say_proof(meeting *m, stranger *s) {
    struct {
        dp_hello hello;
        dp_proof proof;
    } its;
    const int whole = recv(s->fd, &its, sizeof its, MSG_DONTWAIT) == sizeof its;
    const int rank = whole ? s->rank : UNKNOWN;
    if (rank != UNKNOWN) {
        const char *wrong = dp_hello_wrong(&s->own, &its.hello);
        must(!wrong, "a hello of the first is wrong", wrong);
        wrong = dp_proof_wrong(&s->own, &its.hello, &its.proof);
        must((wrong == NULL) == m->same, "a proof of the first", wrong ? wrong : "is right");
    }
    if (!whole) memset(&its, 0, sizeof its);
    dp_proof p = dp_proof_make(&s->own, &its.hello);
    must(rank == UNKNOWN || dp_proof_wrong(&s->own, &its.hello, &p), "its own proof", "is taken");
    const int changed = change(m, &p, sizeof p);
    const int right = !changed && rank != UNKNOWN && m->same && !s->bad;
    if (say(s, &p, sizeof p) && right) m->proved[rank] = 1;
    s->rank = UNKNOWN;
}

static void check(const meeting *m) {
    int there = 1;
    for (int r = 1; r < SIZE; r++) {
        if (m->socket_of[r] < 0) continue;
        const char *host = dp_the_job.all[r].host;
        there++;
        must(m->proved[r], "somebody is there without a proof", "");
        must(!strcmp(host, here.host) && dp_the_job.all[r].pid == here.pid, "another host", host);
    }
    must(there == m->guests.here, "not as many as are there", "");
}

static void meet(const uint8_t *bytes, size_t size) {
    static meeting all; /* guests that are not there are not looked at */
    meeting *const m = &all;
    const int secret = bytes[0] & 1;
    m->same = !secret || !(bytes[0] & 2);
    m->at = bytes + 1;
    m->end = bytes + size;
    m->socket_of = dp_calloc(SIZE, sizeof *m->socket_of); /* by itself: its ends are watched */
    memset(m->proved, 0, sizeof m->proved);
    m->guests.n = m->guests.away = 0;
    m->guests.here = 1;
    m->guests.socket_of = m->socket_of;
    for (int i = 0; i < LINES; i++)
        m->line[i].fd = m->socket_of[i] = -1;
    dp_party_make(&m->guests.party, &here, 0, SIZE, "the secret of all", secret ? 11 : 0);
    for (int steps = 0; steps < MOST_STEPS && m->at < m->end; steps++) {
        const int step = *m->at++;
        stranger *s = &m->line[step & 3];
        switch (s->fd < 0 ? 0 : step >> 2 & 7) {
        case 0: open_line(m, s, step >> 5 & 1); break;
        case 1: say_bytes(m, s); break;
        case 2: say_hello(m, s); break;
        case 3: say_proof(m, s); break;
        case 4: close_line(s); break;
        default: dp_guests_look(&m->guests);
        }
        for (int turn = 0; turn < 3; turn++)
            for (int i = m->guests.n; i-- > 0;)
                dp_guests_hear(&m->guests, i);
        check(m);
    }
    dp_guests_close(&m->guests);
    for (int i = 0; i < LINES; i++) {
        close_line(&m->line[i]);
        if (m->socket_of[i] >= 0) close(m->socket_of[i]);
    }
    free(m->socket_of);
}

/* ---- messages -------------------------------------------------------------------------------- */

static jmp_buf ended;
static void end(void) { longjmp(ended, 1); }

static void listen_to(const uint8_t *bytes, size_t size) {
    static FILE *nowhere;
    static const char rest[2048]; /* the end comes between two messages, so that none is lost */
    FILE *const said = stderr;
    int fd[2], from;
    char eight[8], *volatile x = NULL;
    size_t n;
    if (!nowhere) nowhere = fopen("/dev/null", "w");
    must(!socketpair(AF_UNIX, SOCK_STREAM, 0, fd), "socketpair", "");
    must(send(fd[0], bytes, size, MSG_DONTWAIT) == (ssize_t)size &&
             send(fd[0], rest, sizeof rest, MSG_DONTWAIT) == sizeof rest,
         "no room", "");
    shutdown(fd[0], SHUT_WR);
    dp_tcp_take(1, fd[1]);
    stderr = nowhere;
    if (!setjmp(ended))
        for (;;) {
            x = dp_by_tcp.receive_any(DP_MPI_CASE, 16, 1024, &from, &n);
            if (from != 1 || n < 16 || n > 1024) abort();
            free(x);
            dp_by_tcp.receive(1, DP_MPI_JOB, eight, sizeof eight, "eight bytes");
        }
    stderr = said;
    dp_tcp_take(1, -1);
    close(fd[0]);
    close(fd[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    dp_job *const job = &dp_the_job;
    if (!job->end) {
        randombytes_set_implementation(&counted);
        *job = (dp_job){.size = SIZE, .limit = 5, .end = end};
        dp_tcp_open(&here);
    }
    drawn = 1;
    if (!size) return 0;
    if (bytes[0] & 128)
        listen_to(bytes + 1, size - 1);
    else
        meet(bytes, size);
    return 0;
}

/* A step more or less, or what libFuzzer does; heads of messages that are nearly right. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    rng r = rng_new(seed);
    if (!size || below(&r, 3) == 0) return LLVMFuzzerMutate(data, size, most);
    if (data[0] & 128) {
        const dp_head h = {DP_MPI_JOB + below(&r, 4), below(&r, 40)};
        if (size + sizeof h + h.bytes > most) return LLVMFuzzerMutate(data, size, most);
        memcpy(data + size, &h, sizeof h);
        memset(data + size + sizeof h, 7, h.bytes);
        return size + sizeof h + h.bytes;
    }
    const unsigned line = below(&r, LINES), open = line | below(&r, 2) << 5;
    const uint8_t step[] = {
        (uint8_t)open,           (uint8_t)(line | 2 << 2), (uint8_t)below(&r, SIZE + 1),
        (uint8_t)below(&r, 256), (uint8_t)below(&r, 2),    (uint8_t)(line | below(&r, 8) << 2),
        (uint8_t)below(&r, 256), (uint8_t)below(&r, 2)};
    const size_t n = 1 + below(&r, sizeof step);
    if (size + n > most || size > 8 * MOST_STEPS) return LLVMFuzzerMutate(data, size, most);
    memcpy(data + size, step, n);
    return size + n;
}
