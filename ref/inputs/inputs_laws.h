/* ref/inputs/inputs_laws.h - structure laid over generated inputs, where kernels have been wrong
 * and random numbers look right. Each law acts on its own; the order is that of the fields.
 */
#pragma once
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/recurrence.h"
DP_C_BEGIN

typedef struct {
    double qk_decades; /* > 0: each row of q and k is multiplied by 10^-u, u uniform in [0, this) */
    double k_scale;    /* > 0: each row of k is multiplied by u, uniform in [0, this) */
    double v_scale;    /* > 0: v, s0, do and dstate are drawn times this */
    double beta_decades; /* > 0: each plain beta likewise */
    double v_from_k; /* > 0: v = its token's key + this * v: states nearly symmetric where K = V */
    int g_hold;      /* > 1: a token's gates are those of the first of so many tokens */
    int repeat;      /* > 1: a token's k and v are those of the first of so many tokens */
    int v_ties;      /* 1: every v lies midway between two numbers of bf16 */
    int has_A_log;   /* 1: A_log of every head is this */
    double A_log;
} dp_inputs_laws;

/* dtype: format of the inputs, to which what changes is rounded again. Random numbers follow from
 * seed alone, the same bits on every machine. */
void dp_inputs_apply_laws(dp_problem *p, const dp_inputs_laws *laws, dp_format dtype,
                          uint64_t seed);

/* ---- keys of rows (recurrence.h) ------------------------------------------------------------- */

/* Keys that stand alone in an entry are vectors, the others numbers that multiply one. Vectors that
 * one row writes and reads along have one direction, `like`, so that a step that erases contracts.
 * Some point backwards. */
typedef struct {
    int vector[DP_KEYS_MOST], like[DP_KEYS_MOST], sign[DP_KEYS_MOST];
} dp_key_roles;
dp_key_roles dp_key_roles_of(const dp_recurrence *a);
/* Is it the only factor of some value? */
int dp_is_whole_value(const dp_recurrence *a, int input);

DP_C_END
