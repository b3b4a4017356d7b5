/* harness/case/casefile.h - the text of a *.case file as typed settings. The table in casefile.c is
 * the only list of keys. */
#pragma once
#include "ref/vocabulary/problem.h"
#include <stdio.h>

#define DP_CASEFILE_MAX_KEYS 72
#define DP_CASEFILE_MAX_BYTES (1 << 20)

enum {
    DP_CF_REC = 1,
    DP_CF_CHAIN = 2,
    DP_CF_CONV = 4,
    DP_CF_ALL = 7,
    DP_CF_STEP = 16,
    DP_CF_SESSION = 32,
    DP_CF_STEP_SESSION = 64
}; /* which operations take a key (operations.h); step and sessions take those of REC too */

/* The operations of a case: a row each in operations.c. The key op names a model of the first, or
 * one of the others. The last two are the first and a step with the key session. */
typedef enum {
    DP_OP_RECURRENCE,
    DP_OP_CHAIN,
    DP_OP_CONV,
    DP_OP_STEP,
    DP_OP_SESSION,
    DP_OP_STEP_SESSION,
    DP_NOPS
} dp_op;
#define DP_OPERATION_WORDS DP_MODEL_WORDS "|chain|conv|step"

typedef struct {
    int n;
    int64_t *v;
} dp_ints;
typedef struct {
    char *path;
    char *text[DP_CASEFILE_MAX_KEYS]; /* value as written, by row of the table; NULL: not in the
                                         file */
    int line[DP_CASEFILE_MAX_KEYS];
    /* choices are indices into their list of names, in the order of the enum they stand for */
    char *reason, *source, *unjudged, *data, *override, *conv_data, *session, *recurrence;
    int64_t op, smoke, seed, T, H, HV, K, V, R, gate, beta, l2norm, dtype, backward, dstate, bits,
        truth, keys, gate_params, nonfinite, pair;
    int64_t regime, chunks, D, W, activation, bias;
    double scale, lower_bound, g_scale, g_mean, g_least, g_uniform, g_head_spread, g_channel_spread,
        beta_lo, beta_hi, s0_scale, qk_decades, k_scale, v_scale, beta_decades, v_from_k, A_log;
    int64_t g_hold, repeat, v_ties, session_state, session_prefix, session_slots, session_stagger,
        session_ring;
    dp_ints cu_seqlens, ranks, base, chain, chain_ranks, merge, payload, own, conv;
} dp_casefile;

/* Parses and checks each key by itself: known, once, allowed for the op, of its type and in range,
 * required ones present.
 * Defaults that the table gives in parentheses are left to the caller (dp_casefile_has). On failure
 * nothing needs freeing. */
dp_status dp_casefile_parse(const char *text, size_t len, const char *path, dp_casefile *f,
                            dp_err *e);
void dp_casefile_free(dp_casefile *f);
/* Does the file set the key? */
int dp_casefile_has(const dp_casefile *f, const char *key);
/* Which row of dp_operations it asks for. */
dp_op dp_casefile_op(const dp_casefile *f);
/* Its word, as the file has it. */
const char *dp_casefile_op_name(const dp_casefile *f);

/* "path:line: key = value: <message>"; without the line where line[] is 0, without line and value
 * where the file does not set the key. */
dp_status dp_casefile_refuse(const dp_casefile *f, const char *key, dp_err *e, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
