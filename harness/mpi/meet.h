/* harness/mpi/meet.h - the processes of a job meet by sockets: each other one connects to the
 * first, and both prove who they are (dp_hello).
 *
 * The first listens at MASTER_ADDR if this is an address of this host. Else, or where a name means
 * this host's loopback alone, it listens at 127.0.0.1. With a secret (DELTAPROOF_SECRET, or the
 * file DELTAPROOF_SECRET_FILE) it listens at every interface. Connections are heard side by side
 * (guests.h): each has DP_CONNECTION_S, all have DP_START_S.
 */
#pragma once
#include "carrier.h"

/* Fills all of the job, and socket_of [size]: the first's of the others, else that of the first.
 * Ends the process, with the reason, where they do not meet. */
void dp_meet(const dp_process *own, const char *host, const char *port, int *socket_of);

/* Moves them all, out or in. 0: the other has gone, or it took longer than `limit` seconds (*late).
 * The limit holds for each piece that moves, if they are counted, else for all of them. */
int dp_socket_move(int fd, void *x, size_t n, int out, double limit, _Atomic unsigned *pieces,
                   int *late);

/* The words of two processes that meet by a socket, as bytes.
 *
 *     rank to first   hello: magic, version, build, a nonce, whether it has a secret, rank, number
 *                     of processes, hash of the arguments
 *     first to rank   its hello and its proof
 *     rank to first   its proof: a code (HMAC-SHA-512-256) of both hellos, of who it is, and of
 *                     host and process, under the secret
 *     first to rank   4 bytes: DP_WELCOME, or DP_TAKEN where that rank is there already
 *     first to rank   4 bytes: DP_BEGIN, when all have come
 *
 * Without a secret the key is known to all: then only addresses of MASTER_ADDR and loopback are
 * listened at. Nothing is secret but the secret: what follows is neither coded nor signed.
 */

typedef struct {
    char magic[16], version[16], build[32];
    unsigned char nonce[32];
    uint32_t secret, rank, size, none; /* secret: 1, there is one; none: 0 */
    uint64_t arguments;
} dp_hello;

typedef struct {
    unsigned char code[32];
    char host[64];
    int32_t pid, none;
} dp_proof;

enum { DP_WELCOME = 1, DP_TAKEN, DP_BEGIN, DP_SECRET_LEAST = 16, DP_SECRET_MOST = 4096 };

/* A process's introduction, each time with another nonce. n = 0: there is no secret. */
typedef struct {
    dp_hello hello;
    dp_process process;
    unsigned char key[32];
} dp_party;
/* 0: libsodium has no random numbers here. */
int dp_party_make(dp_party *p, const dp_process *own, int rank, int size, const void *secret,
                  size_t n);
void dp_party_renew(dp_party *p);

/* Why this hello, or proof, is not one to go on with, version and build first; NULL: it is. */
const char *dp_hello_wrong(const dp_party *own, const dp_hello *other);
const char *dp_proof_wrong(const dp_party *own, const dp_hello *other, const dp_proof *proof);
dp_proof dp_proof_make(const dp_party *own, const dp_hello *other);

/* The head of each later message. */
typedef struct {
    uint64_t kind, bytes;
} dp_head;
