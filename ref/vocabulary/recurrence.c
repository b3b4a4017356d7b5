/* The rows of each recurrence (recurrence.h). */
#include "recurrence.h"

#define ENTRY(SIGN, N, ...)      \
    {                            \
        SIGN, N, { __VA_ARGS__ } \
    }
#define ONE ENTRY(1, 0, 0)
#define NONE ENTRY(0, 0, 0)
#define OF(A) ENTRY(1, 1, DP_INPUT_##A)
#define MINUS(A) ENTRY(-1, 1, DP_INPUT_##A)
#define TIMES(A, B) ENTRY(1, 2, DP_INPUT_##A, DP_INPUT_##B)

/* S <- S + k' beta (v - k S);   S <- S + k' v */
#define DELTA .n = 1, .row = {{OF(K), OF(K), OF(V), OF(BETA)}}
#define NOTHING .n = 1, .row = {{OF(K), NONE, OF(V), ONE}}

dp_recurrence dp_recurrences[DP_NMODELS + 1] = {
    [DP_GDN] = {DELTA},
    [DP_KDA] = {DELTA},
    [DP_MKDA] = {DELTA},
    [DP_DELTAPRODUCT] = {.in_turn = 1, DELTA},
    [DP_GLA] = {NOTHING},
    [DP_SSD] = {NOTHING},
    /* S <- S + k' (write o v - (erase o k) S) */
    [DP_GDN2] = {.n = 1, .row = {{OF(K), TIMES(ERASE, K), TIMES(WRITE, V), ONE}}},
    /* S <- diag(exp g) S + lr_b' (lr_a S) + k' v */
    [DP_DPLR] = {.before = 1,
                 .n = 2,
                 .row = {{OF(LR_B), MINUS(LR_A), NONE, ONE}, {OF(K), NONE, OF(V), ONE}}},
};

int dp_in_turn(const dp_problem *p) { return dp_recurrence_of(p)->in_turn; }
