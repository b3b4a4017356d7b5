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

const char *const dp_payload_names[DP_NPAYLOADS] = {"full", "fp32",     "bf16",     "bf16x2",
                                                    "m-i",  "svd-1e-4", "svd-1e-2", "diagonal"};
const dp_payload_info dp_payloads[DP_NPAYLOADS] = {
    [DP_PAYLOAD_FULL] = {0, 4},
    [DP_PAYLOAD_FP32] = {0x1p-24, 4, .state = DP_PAYLOAD_FP32},
    [DP_PAYLOAD_BF16] = {0x1p-8, 2, .state = DP_PAYLOAD_BF16},
    [DP_PAYLOAD_BF16X2] = {0x1p-16, 4, .state = DP_PAYLOAD_BF16X2},
    [DP_PAYLOAD_LESS_I] = {0x1p-8, 2, .less_i = 1, .state = DP_PAYLOAD_BF16},
    [DP_PAYLOAD_LOW_RANK] = {0x1p-24, 4, .tolerance = 1e-4, .state = DP_PAYLOAD_FP32},
    [DP_PAYLOAD_LOWER_RANK] = {0x1p-24, 4, .tolerance = 1e-2, .state = DP_PAYLOAD_FP32},
    [DP_PAYLOAD_DIAGONAL] = {0x1p-24, 4, .state = DP_PAYLOAD_FP32},
};

dp_sending dp_sending_of(dp_exchange x, dp_payload p, int N) {
    if (N == 1) return (dp_sending){0};
    if (!dp_exchanges[x].states) p = DP_PAYLOAD_FULL;
    if (x == DP_EXCHANGE_RING || x == DP_EXCHANGE_SERIAL) p = dp_payloads[p].state;
    if (x == DP_EXCHANGE_RING && !p) x = DP_EXCHANGE_ALLGATHER;
    return (dp_sending){.exchange = x, .payload = p};
}

const char *dp_exchange_refuses(dp_exchange x, int N, int HV) {
    if (x != DP_EXCHANGE_HEADS) return NULL;
    if (HV < N) return "heads: more ranks than value heads";
    return HV % N ? "heads: the value heads do not divide among the ranks" : NULL;
}
