/* ref/chunk/exchange_price.h - what each exchange of states costs: its messages, its words and its
 * critical path, as formulas (math.md g.3; ref/vocabulary/exchange.h says what they are).
 */
#pragma once
#include "ref/vocabulary/exchange.h"
#include <stdint.h>

/* Bytes of M [K][K], of which a payload of low rank keeps `rank` singular values; of H [K][V]. */
int64_t dp_payload_M_bytes(dp_payload p, int K, int rank);
int64_t dp_payload_H_bytes(dp_payload p, int K, int V);

/* One sequence over N ranks with L tokens each, in one direction; chunks of 64 tokens. */
typedef struct {
    int N, HV, K, V;
    int64_t L;
    dp_payload payload;
    int rank; /* singular values that a payload of low rank keeps */
} dp_exchange_size;

/* A connection and a card. */
typedef struct {
    double latency_s, bytes_per_s, flops_per_s;
} dp_exchange_machine;
extern const dp_exchange_machine dp_exchange_usual; /* 5 us, 200 GB/s, 400 Tflop/s */

typedef struct {
    int possible;           /* 0: heads that do not divide among the ranks */
    double messages, bytes; /* of all ranks together */
    double path_s,
        compute_s; /* the longest chain, and what of it is no exchange: pre-scan and pass */
} dp_exchange_price;
dp_exchange_price dp_exchange_price_of(dp_exchange x, const dp_exchange_size *s,
                                       const dp_exchange_machine *m);

/* Bytes of a rank's send and receive buffers:
 *   allgather   N pairs (M, H)
 *   windows     one pair
 *   scan        two pairs
 *   heads       the sent and the received tokens
 *   others      two states */
double dp_exchange_buffer_bytes(dp_exchange x, const dp_exchange_size *s);

/* Bytes that a rank keeps for its backward: the state that enters it (fp32), and, where it
 * recomputes nothing, the state before each chunk (bf16). */
typedef struct {
    int64_t entering, chunks;
} dp_exchange_saved;
dp_exchange_saved dp_exchange_saved_of(const dp_exchange_size *s);

/* Seconds of `serial` over so many micro-batches, each of L tokens a rank. A rank sends the next
 * one while others wait for its state. 1: the path of serial. */
double dp_exchange_pipeline_s(const dp_exchange_size *s, int micro, const dp_exchange_machine *m);

/* N = cp tp ranks: tp of them divide the heads and cp the T tokens. It counts the exchange of
 * states among cp. It also counts the all-reduce that tp adds in each layer and direction: [T /
 * cp][HV V] in bf16. As a ring it has 2 (tp - 1) messages of a tp-th. The exchange is an
 * all-gather. */
typedef struct {
    int possible;                  /* 0: HV does not divide among tp */
    double states_bytes, tp_bytes; /* that a rank sends */
    double exchange_s, reduce_s, compute_s;
} dp_mesh_price;
dp_mesh_price dp_mesh_price_of(int cp, int tp, int64_t T, const dp_exchange_size *s,
                               const dp_exchange_machine *m);
