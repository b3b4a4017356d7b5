/* Connections to the first process (guests.h). */
#include "guests.h"

#include <errno.h>
#include <netdb.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static dp_job *const job = &dp_the_job;

static void drop(dp_guests *h, int i, const char *why) {
    dp_guest *g = &h->guest[i];
    struct sockaddr_storage a;
    socklen_t size = sizeof a;
    char from[64] = "?";
    if (!getpeername(g->fd, (struct sockaddr *)&a, &size))
        getnameinfo((struct sockaddr *)&a, size, from, sizeof from, NULL, 0, NI_NUMERICHOST);
    h->away++;
    snprintf(h->why, sizeof h->why, "%s: %s", from, why);
    close(g->fd);
    *g = h->guest[--h->n];
}

void dp_guests_drop_oldest(dp_guests *h) {
    int at = 0;
    for (int i = 1; i < h->n; i++)
        if (h->guest[i].until < h->guest[at].until) at = i;
    if (h->n) drop(h, at, "silent while others came");
}

void dp_guests_let_in(dp_guests *h, int fd) {
    if (h->n == DP_MOST_GUESTS) dp_guests_drop_oldest(h);
    dp_guest *g = &h->guest[h->n++];
    *g = (dp_guest){.fd = fd, .until = omp_get_wtime() + DP_CONNECTION_S, .own = h->party};
    dp_party_renew(&g->own);
}

/* Everything sent so far fits into any socket's buffer. */
static int say(const dp_guest *g, const void *x, size_t n) {
    return send(g->fd, x, n, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)n;
}

static void welcome(dp_guests *h, int i) {
    dp_guest *g = &h->guest[i];
    const int r = (int)g->hello.rank;
    const uint32_t answer = h->socket_of[r] < 0 ? DP_WELCOME : DP_TAKEN;
    if (!say(g, &answer, sizeof answer) || answer == DP_TAKEN) {
        drop(h, i, "a rank that is there already");
        return;
    }
    job->all[r] = h->party.process; /* build and arguments: the same */
    memcpy(job->all[r].host, g->proof.host, sizeof job->all[r].host);
    job->all[r].pid = g->proof.pid;
    h->socket_of[r] = g->fd;
    h->here++;
    *g = h->guest[--h->n];
}

/* Its hello, or its proof, has come in full. */
static void answer(dp_guests *h, int i) {
    dp_guest *g = &h->guest[i];
    const char *wrong = g->knows ? dp_proof_wrong(&g->own, &g->hello, &g->proof)
                                 : dp_hello_wrong(&g->own, &g->hello);
    struct {
        dp_hello hello;
        dp_proof proof;
    } own = {g->own.hello, {{0}, {0}, 0, 0}};
    if (!g->knows && memcmp(g->hello.magic, own.hello.magic, sizeof own.hello.magic) == 0) {
        if (!wrong) own.proof = dp_proof_make(&g->own, &g->hello);
        if (!say(g, &own, sizeof own) && !wrong) wrong = "gone";
    }
    if (wrong) {
        drop(h, i, wrong);
    } else if (g->knows) {
        welcome(h, i);
    } else {
        g->knows = 1;
        g->have = 0;
    }
}

void dp_guests_hear(dp_guests *h, int i) {
    dp_guest *g = &h->guest[i];
    char *to = g->knows ? (char *)&g->proof : (char *)&g->hello;
    const size_t want = g->knows ? sizeof g->proof : sizeof g->hello;
    const ssize_t k = recv(g->fd, to + g->have, want - g->have, MSG_DONTWAIT);
    if (k < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (k <= 0) {
        drop(h, i, "gone");
        return;
    }
    g->have += (size_t)k;
    if (g->have == want) answer(h, i);
}

void dp_guests_look(dp_guests *h) {
    for (int i = h->n; i-- > 0;) /* whoever leaves is replaced by one behind it */
        if (omp_get_wtime() > h->guest[i].until) drop(h, i, "silent for too long");
}

void dp_guests_close(dp_guests *h) {
    for (int i = h->n; i-- > 0;)
        close(h->guest[i].fd);
    h->n = 0;
}
