/* ref/vocabulary/problem.h - the common vocabulary: status, shapes, layouts, one problem, its
 * results.
 *
 * Names and shapes (math.md a). All arrays are row-major, last index fastest, and hold doubles.
 * Their values are exactly the subject's inputs: a bf16 input is a double that bf16 represents.
 *
 *   T tokens   H query/key heads   HV value heads, HV = G*H
 *   K key width   V value width   R keys per token
 *   Kg gate width: 1 (GDN) or K
 *
 *   q  [T][H][K]        k    [T][H][R][K]     v   [T][HV][R][V]
 *   g  [T][HV][Kg]   natural-log decay of ONE step, or raw
 *   o  [T][HV][V]       beta [T][HV][R]       A_log [HV]            dt_bias [HV][Kg]
 *   erase [T][HV][K]    write [T][HV][V]      instead of beta (GDN-2)
 *   lr_a lr_b [T][HV][K]                      instead of beta (DPLR, RWKV-7)
 *   number [T][HV]   angle [T][HV][P]   value3 value4 [T][HV][V]   only in a user's own rows
 *   s0, final_state [Nseq][HV][K][V]
 *   cu [Nseq+1]: sequence i is tokens cu[i] .. cu[i+1]-1 (may be empty)
 * Value head hv uses query/key head hv / G. A gradient has the shape of its tensor.
 */
#pragma once

#include "own.h"

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "activations.h"
#include "memory.h"
#include "tensors.h" /* the table of these tensors */
DP_C_BEGIN

#define DP_VERSION "0.2.0"
#define DP_CHUNK 64 /* C, tokens per chunk */

/* Environment and input errors. Programmer errors are asserts, numerical outcomes are data in a
 * verdict. */
typedef enum {
    DP_OK = 0,
    DP_EINPUT, /* bad input: message names file, field and value; exit status 2 */
    DP_EIO,    /* a file or a process failed; exit status 2 */
    DP_ENOMEM,
    DP_EDEVICE /* CUDA or NCCL */
} dp_status;

typedef struct {
    dp_status code;
    char msg[2048];
} dp_err;

/* Sets *e (may be NULL) with a printf message and returns code, so that `return dp_fail(e,
 * DP_EINPUT, ...)` reads well.
 * The first error wins: a second call on the same *e does not overwrite it. */
dp_status dp_fail(dp_err *e, dp_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* A parameter that a function has for its type alone. */
#define DP_UNUSED __attribute__((unused))

/* Around a call that cannot fail where it stands. */
static inline void dp_must(DP_UNUSED dp_status st) { assert(!st); }

/* Silences a false report of gcc -fanalyzer in the rest of a file; the reason stands beside it. */
#if defined __GNUC__ && __GNUC__ >= 12 && !defined __clang__ && !defined __cplusplus
#define DP_PRAGMA(X) _Pragma(#X)
#define DP_NOT_SO(WARNING) DP_PRAGMA(GCC diagnostic ignored WARNING)
#else
#define DP_NOT_SO(WARNING)
#endif

/* A function NAME_free frees what its struct holds. The struct itself is the caller's. */

/* Before the declaration of pointers: each is freed where its block ends, by return too. */
#define DP_OWN __attribute__((cleanup(dp_free_at)))
static inline void dp_free_at(const void *pointer) {
    void *x;
    memcpy(&x, pointer, sizeof x);
    free(x);
}

/* Likewise a struct, by its function NAME_free. */
#define DP_FREED(BY) __attribute__((cleanup(BY)))

/* calloc that never returns NULL for n = 0 and ends the program with a message and exit status 2
 * when memory is out. */
void *dp_calloc(size_t n, size_t size);
int64_t dp_memory_bytes(void);          /* of this machine */
void *dp_alloc(size_t n, size_t size);  /* the same, holding anything */
char *dp_strdup(const char *s);         /* likewise */
char *dp_text_new(const char *fmt, ...) /* likewise, as printf */
    __attribute__((format(printf, 1, 2)));
/* Adds to the text that stands in to [size], cut to fit. */
void dp_text_add(char *to, size_t size, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void *dp_realloc(void *x, size_t bytes);       /* likewise */
double *dp_doubles(int64_t n);                 /* n zeros */
double *dp_copy(const double *x, int64_t n);   /* NULL for NULL */
double *dp_identity(int n);                    /* [n][n] */
double dp_squares(const double *x, int64_t n); /* their sum */
void dp_swap(double **a, double **b);
/* Copies n arrays of a size, NULL where one is, to be freed with dp_free_list. */
double **dp_copy_list(double *const *a, int64_t n, int64_t size);
/* Do two lists have the same bits, NULL at the same places? A list may be NULL, too. */
int dp_same_list(double *const *a, double *const *b, int64_t n, int64_t size);
/* Frees each of these pointers. */
#define DP_FREE(...) \
    dp_free_each((const void *const[]){__VA_ARGS__}, sizeof((const void *[]){__VA_ARGS__}))
void dp_free_each(const void *const *pointers, size_t bytes);
void dp_free_list(void *list, int64_t n); /* n pointers, and the list of them; NULL: nothing */
/* The same where a problem has its arrays (memory.h). */
double *dp_doubles_of(const dp_problem *p, int64_t n);
double *dp_copy_of(const dp_problem *p, const double *x, int64_t n);
void dp_free_of(const dp_problem *p, double *x);

/* The recurrences. Other properties are those of their rows (recurrence.h).
 *   one_gate    1: one gate a head, 0: one a channel
 *   many_keys   1: R keys a token, 0: one */
#define DP_RECURRENCES(X) /* X(id, name, one_gate, many_keys, strength) */ \
    X(DP_GDN, "gdn", 1, 0, DP_BY_BETA)                                     \
    X(DP_KDA, "kda", 0, 0, DP_BY_BETA)                                     \
    X(DP_MKDA, "mkda", 0, 1, DP_BY_BETA)                                   \
    X(DP_GDN2, "gdn2", 0, 0, DP_BY_GATES)                                  \
    X(DP_GLA, "gla", 0, 0, DP_BY_NOTHING)                                  \
    X(DP_SSD, "ssd", 1, 0, DP_BY_NOTHING)                                  \
    X(DP_DELTAPRODUCT, "gated-deltaproduct", 1, 1, DP_BY_BETA)             \
    X(DP_DPLR, "dplr", 0, 0, DP_BY_FACTORS)
typedef enum {
#define DP_ID(ID, ...) ID,
    DP_RECURRENCES(DP_ID)
#undef DP_ID
        DP_NMODELS,
    DP_USER = DP_NMODELS /* of a user's own rows (recurrence_text.h), which no list has */
} dp_model;
/* their names, in their order, for case files */
#define DP_MODEL_WORDS "gdn|kda|mkda|gdn2|gla|ssd|gated-deltaproduct|dplr"
/* How strongly a token erases and writes: S <- S + k' (diag(w) v - (b o k) S). */
typedef enum {
    DP_BY_BETA,    /* b = w = beta, a number a key */
    DP_BY_GATES,   /* b = erase, a number a channel of the key, w = write, one a channel of v */
    DP_BY_NOTHING, /* b = 0, w = 1: nothing is erased, so a step decays alone and M is diagonal */
    DP_BY_FACTORS, /* its own: S <- diag(exp g) S + lr_b' (lr_a S) + k' v, S before its decay */
    DP_BY_ROWS     /* of DP_USER: as its rows say */
} dp_strength;
extern const char *const dp_strengths[]; /* what a token has for it */
typedef struct {
    const char *name;
    int one_gate, many_keys;
    dp_strength strength;
    int rows; /* that a token has beside one for each of its R keys (recurrence.h); 0: these */
    const struct dp_recurrence *of_token; /* of DP_USER: its rows */
} dp_model_info;
extern dp_model_info dp_models[DP_NMODELS + 1];

#define DP_ARRAY(ID, FIELD, ...) double *FIELD;
#define DP_ARRAY_OF_ROW(ID, FIELD, ...) double *d##FIELD;
struct dp_problem {
    dp_model model;
    const dp_model_info *user; /* of DP_USER, a case's; NULL: dp_models has it */
    int64_t T;
    int H, HV, K, V, R, Nseq;
    int64_t *cu; /* [Nseq+1], cu[0] = 0, not decreasing, cu[Nseq] = T */
    /* who owns its tokens: a number of ranks N is one of parts of this kind (own.h) */
    dp_owners own;
    double scale; /* multiplies q in the output; K^(-1/2) by default */
    dp_gate gate;
    double lower_bound; /* below 0; of gates that have F inside (activations.h) */
    dp_beta beta_form;
    int l2norm; /* 1: q and each key row are divided by sqrt(sum x^2 + 1e-6) first (math.md c) */
    int rounded_slopes; /* 1: slopes of sigmoids are s (1 - s), which cancels where s is near 1, as
                         * in most kernels; draws alone have it (gate.h) */
    int pairs;          /* pairs of channels that angle rotates; 0: K / 2 */
    int lag; /* n: only every n-th token writes, so that the previous token is n back; 0: one
                * (harness/run/judge.c) */
    /* Inputs by id, and by name. NULL: the recurrence has none. beta belongs to DP_BY_BETA, erase
     * and write to DP_BY_GATES, lr_a and lr_b to DP_BY_FACTORS, any row input to DP_BY_ROWS.
     * Without A_log and dt_bias these are 0 and have no gradient. Without s0 and dstate, the
     * gradient of final_state, there are zeros. Without dout, do [T][HV][V], there is a forward
     * only. */
    union {
        double *in[DP_NINPUTS];
        struct {
            DP_INPUTS(DP_ARRAY)
        };
    };
    /* bound of the error of each row (last axis) of q, k and v, relative to its 2-norm; 0: they are
     * exact */
    double input_error;
    const dp_memory *memory; /* where its arrays lie; NULL: memory of this process */
    /* of a call that goes on (dp_has_halo): one token a sequence, the last before the call. Its
     * angles are their sums so far; zeros where a sequence begins. Elsewhere NULL */
    const dp_problem *before;
    const unsigned char *halo; /* [T] 1: of a token before the call, which neither decays nor
                                * writes; NULL: of none. Only ref/chunk/gate.h knows it */
};

#define DP_L2_EPS 1e-6

/* Value heads that share a query head. */
static inline int dp_G(const dp_problem *p) { return p->HV / p->H; }
static inline const dp_model_info *dp_model_of(const dp_problem *p) {
    return p->user ? p->user : &dp_models[p->model];
}
/* Width of the gate: 1 where a head has one gate, else K. */
static inline int dp_Kg(const dp_problem *p) { return dp_model_of(p)->one_gate ? 1 : p->K; }

/* The number of pairs of channels that an angle rotates (dp_pair_of). */
static inline int dp_pairs(const dp_problem *p) { return p->pairs ? p->pairs : p->K / 2; }
static inline int dp_lag(const dp_problem *p) { return p->lag ? p->lag : 1; }
/* The token before t in its sequence, and the one after it; -1: there is none. */
int64_t dp_token_before(const dp_problem *p, int64_t t);
int64_t dp_token_after(const dp_problem *p, int64_t t);

/* Is the gate lower_bound F(a x)? If not, it is -a F(x), or g itself. */
static inline int dp_gate_inside(const dp_problem *p) { return dp_gate_has_inside(p->gate); }
static inline int dp_has_beta(const dp_problem *p) {
    return dp_model_of(p)->strength == DP_BY_BETA;
}

/* Does each key of a token read the state after the keys before it? */
int dp_in_turn(const dp_problem *p); /* recurrence.c */

/* Does the recurrence have erase and write instead of beta? */
static inline int dp_by_gates(const dp_problem *p) {
    return dp_model_of(p)->strength == DP_BY_GATES;
}

/* Has a token other rows than its keys (recurrence.h; DPLR: two rows)? */
static inline int dp_by_rows(const dp_problem *p) {
    return dp_model_of(p)->strength >= DP_BY_FACTORS;
}

/* Number of rows of a token in the pipeline: its R keys, or more (recurrence.h). */
static inline int dp_rows(const dp_problem *p) {
    return dp_model_of(p)->rows ? dp_model_of(p)->rows : p->R;
}
/* Number of keys of a token that read one state before they write to it: all, or one. */
static inline int dp_keys_at_once(const dp_problem *p) { return dp_in_turn(p) ? 1 : dp_rows(p); }

/* Does a token erase? If not, M of any tokens is the diagonal matrix of their decays. */
static inline int dp_erases(const dp_problem *p) {
    return dp_model_of(p)->strength != DP_BY_NOTHING;
}

/* Allocates q, k, v, g, beta or erase and write (zeros) and cu (one sequence) for the shapes
 * already set. */
void dp_problem_alloc(dp_problem *p);
void dp_problem_free(dp_problem *p); /* frees every array; p itself is the caller's */

/* Checks shapes, cu, and that every number is finite (unless allow_nonfinite). DP_EINPUT with the
 * field and value. */
dp_status dp_problem_check(const dp_problem *p, int allow_nonfinite, dp_err *e);

/* Results of one run. Arrays that were not computed are NULL. Gradients are of the raw inputs: q
 * and k before their norm, the raw gate, the raw beta. The gradient of the initial state is ds0. */
struct dp_result {
    union {
        double *out[DP_NRESULTS];
        struct {
            DP_RESULTS(DP_ARRAY, DP_ARRAY_OF_ROW)
        };
    };
    const dp_memory *memory; /* that of its problem */
};
#undef DP_ARRAY
#undef DP_ARRAY_OF_ROW
/* The input's array; NULL: the problem has none. */
static inline const double *dp_input_of(const dp_problem *p, int input) { return p->in[input]; }
/* NaN-filled, so that unwritten entries show */
void dp_result_alloc(dp_result *r, const dp_problem *p, int backward);
void dp_result_free(dp_result *r);

DP_C_END
