/* ref/vocabulary/recurrence_text.h - a user's own recurrence as text: the rows of a token, over
 * inputs with names of their own. One statement a line, words with blanks between, '#' starts a
 * comment:
 *
 *     recurrence NAME
 *     query  NAME [along values]      [T,H,K]; along the values [T,H,V], and o [T,HV,K] is
 *                                     scale S query'
 *     gate   NAME per head|channel    [T,HV] or [T,HV,K]: the log of a step's decay, or raw
 *     keys   NAME ..                  [T,HV,K] each, 1 to 4
 *     values NAME ..                  [T,HV,V] each, 1 to 4
 *     number NAME ..                  [T,HV] each, 1 or 2, where there are some
 *     angle  NAME turns NAME .. [halves]
 *                                     [T,HV,P], P up to K / 2, where there is one: the query and
 *                                     these keys turn by its sum over the sequence so far, pairs
 *                                     of channels (2 i, 2 i + 1) by angle i; halves: (i, i + P)
 *     norm   [l2|rms|l1] NAME .. [eps X]
 *                                     rows x of the query or of keys become x / sqrt(sum x^2 + X),
 *                                     x / sqrt(mean x^2 + X) or x / (sum |x| + X) before anything
 *                                     else; X: 1e-6. Gradients are those of x, with the slope 0
 *                                     of |x| at 0
 *     reads  decayed|undecayed        the state that rows read; default: decayed
 *     rows   together|in turn         of several rows; in turn each reads what those before it
 *                                     left: the undecayed state is for the first one
 *     row    write=PRODUCT read=PRODUCT value=PRODUCT strength=PRODUCT
 *
 *     S <- diag(exp gate) S;   for each row   S <- S + write' strength (value - read S);
 *     o = scale S' query
 *
 * 1 to 8 rows. A PRODUCT is at most three factors with * between, '-' before the first. Write and
 * read are of keys (at least one), numbers, exp(GATE) and exp(-GATE); value is of values, strength
 * of numbers. In place of NAME, prev(NAME) is the previous token's input, zeros at the first of a
 * sequence. A rotated key stands in write alone, beside numbers and the gate of a head. An entry
 * that a row does not name is 0, strength 1; it names write, and read or value. A query along the
 * values has no norm and no angle. Outside is FLA's momentum rule: it has two states, of which
 * one decays into the other. Gradients are named d and the input's name. As many query heads as
 * value heads; judge takes several a value head, too (harness/run/judge.c).
 *
 * A query that reads the state before its token's writes is the same with rows of the token before:
 * `reads undecayed`, `row write=prev(k)*exp(g) read=prev(k) value=prev(v) strength=prev(beta)`.
 * There final_state lacks the last token's writes.
 *
 * The inputs take the place of other recurrences' inputs in a problem, in this order. Query and
 * gate: q, g; keys: k, erase, lr_a, lr_b; values: v, write, value3, value4; numbers: beta, number;
 * angle: angle. */
#pragma once
#include "recurrence.h"

enum { DP_NAME_MOST = 24 };
typedef struct {
    char name[DP_NAME_MOST + 1];
    char input[DP_NINPUTS][DP_NAME_MOST + 1]; /* "": it has no such */
    int one_gate;
    dp_recurrence rows;
    dp_model_info model; /* dp_user_recurrence_set */
} dp_user_recurrence;

/* DP_EINPUT: the message names path, line and word. */
dp_status dp_user_recurrence_parse(const char *text, const char *path, dp_user_recurrence *y,
                                   dp_err *e);
/* DP_USER becomes y: its row of dp_models and dp_recurrences, and in the table of tensors the names
 * of its inputs and gradients. Along the values q is named do, dout the query, dq o, and o the
 * query's gradient (recurrence.h). NULL: everything as it was. A program has one at a time, and
 * installs it before anything runs. */
void dp_user_recurrence_install(const dp_user_recurrence *y);
/* p becomes a problem of y, which lives as long. Its inputs have the names of their places. */
void dp_user_recurrence_set(dp_user_recurrence *y, dp_problem *p);
/* The recurrence of p, by the names of places. */
dp_user_recurrence dp_user_recurrence_of(const dp_problem *p);
/* NULL: none is. */
const dp_user_recurrence *dp_user_recurrence_installed(void);
static inline int dp_user_reads_along(void) {
    const dp_user_recurrence *y = dp_user_recurrence_installed();
    return y && y->rows.along;
}
