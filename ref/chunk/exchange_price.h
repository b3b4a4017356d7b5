/* ref/chunk/exchange_price.h - what each exchange of states costs: its messages, its words and its
 * critical path, as formulas (math.md g.3; ref/vocabulary/exchange.h says what they are).
 */
#ifndef DP_EXCHANGE_PRICE_H
#define DP_EXCHANGE_PRICE_H
#include "ref/vocabulary/exchange.h"
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

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

/* Of a link and a card. */
typedef struct {
    double latency_s, bytes_per_s, flops_per_s;
} dp_exchange_machine;

typedef struct {
    int possible;           /* 0: heads that do not divide among the ranks */
    double messages, bytes; /* of all ranks together */
    double path_s,
        compute_s; /* the longest chain, and what of it is no exchange: pre-scan and pass */
} dp_exchange_price;
dp_exchange_price dp_exchange_price_of(dp_exchange x, const dp_exchange_size *s,
                                       const dp_exchange_machine *m);

#ifdef __cplusplus
}
#endif
#endif
