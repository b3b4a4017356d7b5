/* ref/vocabulary/tensors.h - the named tensors of a problem as one table. Their differences stand
 * here alone, so that no loop need name them.
 *
 * Two lists of rows of one type: inputs lie in a dp_problem, results in a dp_result. The stages
 * between them have rows of the same axes (ref/chunk/stages.h), and so do the tensors
 * of a convolution (harness/case/case_inputs.c).
 */
#pragma once
#include "linkage.h"
#include <stddef.h>
#include <stdint.h>
DP_C_BEGIN

/* ref/vocabulary/problem.h, which includes this file */
typedef struct dp_problem dp_problem;
typedef struct dp_result dp_result;

typedef enum {
    DP_AXIS_NONE,
    DP_AXIS_T,
    DP_AXIS_NSEQ,
    DP_AXIS_H,
    DP_AXIS_HV,
    DP_AXIS_R,
    DP_AXIS_K,
    DP_AXIS_V,
    DP_AXIS_KG,     /* width of the gate */
    DP_AXIS_RANKS,  /* of a stage that every rank holds */
    DP_AXIS_CHUNKS, /* of a stage that every chunk holds */
    DP_AXIS_KEYS,   /* DP_CHUNK * R: the keys of a chunk */
    DP_AXIS_D,      /* channels of a convolution */
    DP_AXIS_W,      /* its width */
    DP_AXIS_P,      /* pairs of channels that an angle rotates */
    DP_NAXES
} dp_axis;
#define DP_MAX_AXES 4
/* Length of each axis. */
typedef struct {
    int64_t of[DP_NAXES];
} dp_dims;
dp_dims dp_problem_dims(const dp_problem *p); /* ranks, chunks, D and W: 0 */
/* "T,HV,R,V" */
void dp_axes_text(const dp_axis axis[DP_MAX_AXES], char *out, size_t size);

/* The role of a tensor. */
typedef enum {
    DP_ROLE_REQUIRED, /* an input that every problem has whose recurrence has it */
    DP_ROLE_GATE,     /* a parameter of a raw gate */
    DP_ROLE_BIAS,     /* of a convolution */
    DP_ROLE_STATE,    /* the state at the begin of each sequence */
    DP_ROLE_INCOMING, /* the gradient of an output, which comes in */
    DP_ROLE_OUTPUT,
    DP_ROLE_GRADIENT /* the gradient of an input */
} dp_role;

/* A row: what one token holds for one head (and key), one state, one head's sum over all tokens. */
typedef enum { DP_OF_TOKENS, DP_OF_SEQUENCES, DP_OF_HEADS } dp_row_kind;

/* Inputs of a token's rows beside k, v and beta: id, field, FLA's own name if it has another. Each
 * has a gradient. Shapes by kind: a key [T][HV][K], a value [T][HV][V], a number [T][HV], an
 * angle [T][HV][P]. These rows make ids, the tables of tensors, and the arrays of dp_problem,
 * dp_result and the CUDA kernels. The keys and values of recurrence.h follow. A macro stands for
 * each kind. */
#define DP_ROW_INPUTS(A_KEY, A_VALUE, A_NUMBER, AN_ANGLE) \
    A_KEY(ERASE, erase, "b")                              \
    A_VALUE(WRITE, write, "w")                            \
    A_KEY(LR_A, lr_a, "")                                 \
    A_KEY(LR_B, lr_b, "")                                 \
    A_NUMBER(NUMBER, number, "")                          \
    AN_ANGLE(ANGLE, angle, "")                            \
    A_VALUE(VALUE3, value3, "")                           \
    A_VALUE(VALUE4, value4, "")
#define DP_ALL_ROW_INPUTS(X) DP_ROW_INPUTS(X, X, X, X)
#define DP_ROW_KEYS(X) DP_ROW_INPUTS(X, DP_NO_ROW, DP_NO_ROW, DP_NO_ROW)
#define DP_ROW_VALUES(X) DP_ROW_INPUTS(DP_NO_ROW, X, DP_NO_ROW, DP_NO_ROW)
#define DP_NO_ROW(...)

/* All inputs, id and array. */
#define DP_INPUTS(X)                                                                    \
    X(Q, q)                                                                             \
    X(K, k) X(V, v) X(G, g) X(BETA, beta) X(A_LOG, A_log) X(DT_BIAS, dt_bias) X(S0, s0) \
        X(DO, dout) X(DSTATE, dstate) DP_ALL_ROW_INPUTS(X)
/* All results. A macro of its own makes the gradients of row inputs. */
#define DP_RESULTS(X, OF_ROW)                                                           \
    X(O, o)                                                                             \
    X(FINAL_STATE, final_state) X(DQ, dq) X(DK, dk) X(DV, dv) X(DG, dg) X(DBETA, dbeta) \
        X(DA_LOG, dA_log) X(DDT_BIAS, ddt_bias) X(DS0, ds0) DP_ALL_ROW_INPUTS(OF_ROW)

#define DP_ID(ID, ...) DP_INPUT_##ID,
typedef enum { DP_INPUTS(DP_ID) DP_NINPUTS } dp_input_id;
#undef DP_ID

#define DP_ID(ID, ...) DP_RESULT_##ID,
#define DP_ID_OF_ROW(ID, ...) DP_RESULT_D##ID,
typedef enum { DP_RESULTS(DP_ID, DP_ID_OF_ROW) DP_NRESULTS } dp_result_id;
#undef DP_ID
#undef DP_ID_OF_ROW

typedef struct {
    const char *name, *alias; /* FLA's own name where it is another; NULL: the same */
    const char *inner;        /* its name inside FLA's functions, which judge takes, too; or NULL */
    dp_role role;             /* in a problem */
    dp_role said; /* of its name in a formula: another where o reads along values (recurrence.h) */
    dp_row_kind kind;
    dp_axis axis[DP_MAX_AXES]; /* slowest first, DP_AXIS_NONE after the last */
    int backward;              /* 1: only where there are gradients */
    int parameter;             /* an input: 1: fp32 where the others are shorter */
    int stored_short;          /* a result: base bf16 stores it in bf16, else in its arithmetic */
    dp_input_id of;            /* a gradient: the input that it is a gradient of */
} dp_tensor_field;
extern dp_tensor_field dp_input_fields[DP_NINPUTS], dp_result_fields[DP_NRESULTS];

/* Its name as files for other programs have it: FLA's where that is another. */
static inline const char *dp_field_file_name(const dp_tensor_field *f) {
    return f->alias ? f->alias : f->name;
}
/* Does a file's name mean this one? */
int dp_field_is(const dp_tensor_field *f, const char *name);
/* Lengths of its axes, the number of which is returned; unused ones are 0. */
int dp_field_axes(const dp_tensor_field *f, const dp_dims *d, int64_t shape[DP_MAX_AXES]);

/* ---- inputs ---------------------------------------------------------------------------------- */

int dp_input_find(const char *name); /* name or alias; -1 */
/* Has the recurrence of p such an input (whether or not p has it)? */
int dp_input_belongs(const dp_problem *p, int input);
/* Entries of the whole tensor, of a token or a sequence or the whole, as its kind says. */
int64_t dp_input_count(const dp_problem *p, int input);
int64_t dp_input_width(const dp_problem *p, int input);
int dp_input_heads(const dp_problem *p, int input); /* H of query and key heads, else HV */
/* Copies every array that p has to the same place in `to`, by copy: a row of dp_copy's kind. */
void dp_inputs_copy(dp_problem *to, const dp_problem *p,
                    double *(*copy)(const double *x, int64_t n));
/* cu with an array of its own. */
int64_t *dp_cu_copy(const dp_problem *p);

/* ---- results --------------------------------------------------------------------------------- */

/* -1: no result has that name or alias. */
int dp_result_find(const char *name);
/* The gradient of an input; -1: it has none. */
int dp_gradient_of(int input);
/* Does it exist for this problem (dA_log without A_log, dbeta without beta do not)? */
int dp_result_exists(const dp_problem *p, int field);
/* Lengths of its axes, the number of which is returned; unused ones are 0. */
int dp_result_axes(const dp_problem *p, int field, int64_t shape[DP_MAX_AXES]);
/* rows: of the kind above, width: entries per row (the last axis; K*V for states). rows = 0: does
 * not exist here. */
void dp_result_shape(const dp_problem *p, int field, int64_t *rows, int64_t *width);
int64_t dp_result_count(const dp_problem *p, int field); /* rows times width */
/* Heads of its rows: H for gradients of query/key heads, else HV. */
int dp_result_heads(const dp_problem *p, int field);
/* Rows that one token has for one head: R where each key has a row of its own, else 1. */
int dp_result_rows_per_token(const dp_problem *p, int field);

/* q, k and v, each of which a convolution may precede (op step). Lists of three are in this
 * order. */
typedef enum { DP_QKV_Q, DP_QKV_K, DP_QKV_V, DP_NQKV } dp_qkv;
/* Its gradient among the results. */
static inline dp_result_id dp_qkv_gradient(int i) { return (dp_result_id)(DP_RESULT_DQ + i); }
/* Which input it is. */
static inline dp_input_id dp_qkv_input(int i) { return (dp_input_id)(DP_INPUT_Q + i); }
/* Its name among the inputs. */
static inline const char *dp_qkv_name(int i) { return dp_input_fields[dp_qkv_input(i)].name; }
/* Heads of one row of it, for one key a token. */
int dp_qkv_heads(const dp_problem *p, int i);
int dp_qkv_width(const dp_problem *p, int i);

DP_C_END
