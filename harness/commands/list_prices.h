/* harness/commands/list_prices.h - `deltaproof list --exchanges` and `--pieces`: prices by
 * formulas, as tables or JSON. */
#ifndef DP_LIST_PRICES_H
#define DP_LIST_PRICES_H
#include "ref/vocabulary/problem.h"

#define DP_DEVICE_WORDS "a100 h100 h200 b200 gb200"

typedef struct {
    int HV, K, V, one_gate;
    int64_t tokens;   /* of a rank */
    const int *ranks; /* [nranks]; nranks 0: 2, 4, 8, 64, 1,024 */
    int nranks;
    const char *lengths; /* tokens of sequences, commas between */
    const char *device;  /* a name, or multiprocessors */
    const char *json;    /* in place of tables; NULL: tables */
} dp_priced;

dp_status dp_list_exchanges(const dp_priced *x, dp_err *e);
dp_status dp_list_pieces(const dp_priced *x, dp_err *e);
#endif
