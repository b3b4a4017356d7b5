/* The rows of each recurrence (recurrence.h). */
#include "recurrence.h"

#include <string.h>

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
#define NORMED .normed = 1U << DP_INPUT_Q | 1U << DP_INPUT_K
#define DELTA NORMED, .n = 1, .row = {{OF(K), OF(K), OF(V), OF(BETA)}}
#define NOTHING NORMED, .n = 1, .row = {{OF(K), NONE, OF(V), ONE}}

dp_recurrence dp_recurrences[DP_NMODELS + 1] = {
    [DP_GDN] = {DELTA},
    [DP_KDA] = {DELTA},
    [DP_MKDA] = {DELTA},
    [DP_DELTAPRODUCT] = {.in_turn = 1, DELTA},
    [DP_GLA] = {NOTHING},
    [DP_SSD] = {NOTHING},
    /* S <- S + k' (write o v - (erase o k) S) */
    [DP_GDN2] = {NORMED, .n = 1, .row = {{OF(K), TIMES(ERASE, K), TIMES(WRITE, V), ONE}}},
    /* S <- diag(exp g) S + lr_b' (lr_a S) + k' v */
    [DP_DPLR] = {.before = 1,
                 .reading = DP_READ_UNDECAYED,
                 .n = 2,
                 .row = {{OF(LR_B), MINUS(LR_A), NONE, ONE}, {OF(K), NONE, OF(V), ONE}}},
};

#define ID_OF(ID, ...) DP_INPUT_##ID,
const dp_input_id dp_row_keys[] = {DP_INPUT_K, DP_ROW_KEYS(ID_OF)},
                  dp_row_values[] = {DP_INPUT_V, DP_ROW_VALUES(ID_OF)};

const dp_reading_info dp_readings[DP_NREADINGS] = {
#define READING(ID, ...) [ID] = {__VA_ARGS__},
    DP_READINGS(READING)
#undef READING
};

void dp_recurrence_reads(dp_recurrence *a, dp_reading to) {
    const dp_reading_info *is = &dp_readings[a->reading], *now = &dp_readings[to];
    for (int j = 0; j < (a->in_turn ? 1 : a->n); j++) {
        dp_entry *e = &a->row[j].read;
        if (e->sign && is->factor) e->n--;
        if (e->sign && now->factor) e->of[e->n++] = (unsigned char)now->factor;
    }
    a->reading = (signed char)to;
    a->before = now->before;
}

const dp_norm_info dp_norms[DP_NNORMS] = {
#define NORM(ID, WORD, POWER, MEAN) [ID] = {WORD, POWER, MEAN},
    DP_NORMS(NORM)
#undef NORM
};

int dp_in_turn(const dp_problem *p) { return dp_recurrence_of(p)->in_turn; }

/* The product that a row adds by its value or its read: its sign, and in n its factors. */
static int product_of(const dp_token_row *r, dp_entry with, int n[DP_PREVIOUS]) {
    const dp_entry e[] = {r->write, r->strength, with};
    int sign = 1;
    for (int i = 0; i < 3; i++) {
        sign *= e[i].sign;
        for (int m = 0; m < e[i].n; m++)
            n[dp_factor_input(e[i].of[m])]++;
    }
    return sign;
}

static int are_opposite(const dp_token_row *a, const dp_token_row *b, int kind) {
    int n[2][DP_PREVIOUS] = {{0}};
    const int sign =
        product_of(a, dp_entry_of(a, kind), n[0]) * product_of(b, dp_entry_of(b, kind), n[1]);
    return sign < 0 && !memcmp(n[0], n[1], sizeof n[0]);
}

int dp_rows_cancel(const dp_recurrence *a) {
    for (int i = 0; i < a->n * a->n; i++)
        if (are_opposite(&a->row[i / a->n], &a->row[i % a->n], DP_ENTRY_VALUE) ||
            are_opposite(&a->row[i / a->n], &a->row[i % a->n], DP_ENTRY_READ))
            return 1;
    return 0;
}
