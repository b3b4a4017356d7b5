/* The table of exchanges (exchange.h). */
#include "exchange.h"

#include <stddef.h>

const char *const dp_exchange_names[DP_NEXCHANGES] = {"allgather", "ring",    "scan", "serial",
                                                      "heads",     "windows", "grid"};
const dp_exchange_info dp_exchanges[DP_NEXCHANGES] = {
    [DP_EXCHANGE_ALLGATHER] = {.pairs = 1, .states = 1},
    [DP_EXCHANGE_RING] = {.pairs = 1, .states = 1},
    [DP_EXCHANGE_SCAN] = {.pairs = 1, .states = 1},
    [DP_EXCHANGE_SERIAL] = {.states = 1},
    [DP_EXCHANGE_HEADS] = {0},
    [DP_EXCHANGE_WINDOWS] = {.pairs = 1, .states = 1},
    [DP_EXCHANGE_GRID] = {.pairs = 1, .states = 1},
};

dp_sending dp_sending_of(dp_exchange x, int N) {
    if (N == 1 || x == DP_EXCHANGE_RING) x = DP_EXCHANGE_ALLGATHER;
    return (dp_sending){x};
}

const char *dp_exchange_refuses(dp_exchange x, int N, int HV) {
    if (x != DP_EXCHANGE_HEADS) return NULL;
    if (HV < N) return "heads: more ranks than value heads";
    return HV % N ? "heads: the value heads do not divide among the ranks" : NULL;
}
