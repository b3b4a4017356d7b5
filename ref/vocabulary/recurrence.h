/* ref/vocabulary/recurrence.h - a recurrence as data: the rows of one token.
 *
 *   S <- diag(exp g) S,   then for each row at once (or in turn)   S <- S + write' U,
 *   U = strength (value - read S),   and   o = scale S' q
 *
 * `before`: the rows read the state before its decay. Every entry is a product of at most three of
 * an input, exp(g) and exp(-g), with a sign; write and read have K channels, value has V, strength
 * is a number. Where there is one row and a token has R keys, it stands for each of them. From
 * these rows alone follow the truth, its gradients and its radii (ref/truth). */
#ifndef DP_RECURRENCE_H
#define DP_RECURRENCE_H
#include "problem.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { DP_MAX_FACTORS = 3, DP_MAX_ROWS = 4, DP_MAX_ENTRIES = 2 * DP_MAX_ROWS };
/* Factors that are no inputs, beside dp_input_id. */
enum { DP_FACTOR_DECAY = DP_NINPUTS, DP_FACTOR_GROWTH /* exp(g), exp(-g) */ };

/* sign 0: there is none, a zero; n 0: 1 or -1. */
typedef struct {
    signed char sign;
    unsigned char n, of[DP_MAX_FACTORS];
} dp_entry;
typedef struct {
    dp_entry write, read, value, strength;
} dp_token_row;
typedef struct {
    int before, n;
    dp_token_row row[DP_MAX_ROWS];
} dp_recurrence;
extern dp_recurrence dp_recurrences[DP_NMODELS + 1];

static inline const dp_recurrence *dp_recurrence_of(const dp_problem *p) {
    return &dp_recurrences[p->model];
}
/* Row j of a token, and the key that it takes of those with an axis R. */
static inline const dp_token_row *dp_row_of(const dp_problem *p, int64_t j) {
    const dp_recurrence *r = dp_recurrence_of(p);
    return &r->row[r->n > 1 ? j : 0];
}
static inline int64_t dp_row_key(const dp_problem *p, int64_t j) {
    return dp_recurrence_of(p)->n > 1 ? 0 : j;
}
static inline int dp_entry_same(dp_entry a, dp_entry b) {
    int same = a.sign == b.sign && a.n == b.n;
    for (int i = 0; i < a.n && same; i++)
        same = a.of[i] == b.of[i];
    return same;
}
/* Is it that input as it is? */
static inline int dp_entry_is(dp_entry e, int input) {
    return e.sign > 0 && e.n == 1 && e.of[0] == input;
}
/* Is it 1? */
static inline int dp_entry_is_one(dp_entry e) { return e.sign > 0 && !e.n; }
/* How often it has that factor. */
static inline int dp_entry_has(dp_entry e, int factor) {
    int n = 0;
    for (int i = 0; i < e.n; i++)
        n += e.of[i] == factor;
    return n;
}

/* Does any of its rows have that input? */
static inline int dp_recurrence_uses(const dp_recurrence *a, int input) {
    int n = 0;
    for (int j = 0; j < a->n; j++)
        n += dp_entry_has(a->row[j].write, input) + dp_entry_has(a->row[j].read, input) +
             dp_entry_has(a->row[j].value, input) + dp_entry_has(a->row[j].strength, input);
    return n > 0;
}
/* Has a recurrence such an input: q, g, and what stands in its rows; states, parameters of the gate
 * and gradients that come in may always be there. */
int dp_model_has(dp_model m, int input); /* tensors.c */
/* How often it has exp(g), less exp(-g). */
static inline int dp_entry_gates(dp_entry e) {
    return dp_entry_has(e, DP_FACTOR_DECAY) - dp_entry_has(e, DP_FACTOR_GROWTH);
}
/* Has it an exp(-g), or reads before the decay, which is one in chunk form? */
static inline int dp_has_growth(const dp_problem *p) {
    const dp_recurrence *r = dp_recurrence_of(p);
    int any = r->before;
    for (int j = 0; j < r->n; j++)
        any |= dp_entry_has(r->row[j].write, DP_FACTOR_GROWTH) ||
               dp_entry_has(r->row[j].read, DP_FACTOR_GROWTH);
    return any;
}

#ifdef __cplusplus
}
#endif
#endif
