/* ref/truth/truth_impl.h - internal header of the truth; no other folder includes it.
 *
 *   truth.c        the run: blocks, batches of heads, the order of the passes, snapshots
 *   truth_gate.c   activations and their chain rule in MPFR
 *   truth_step.c   the recurrence and its adjoint on a block of state columns
 *   truth_bound.c  the error radii
 *   truth_rows.c   the entries of a token's rows (recurrence.h), and the chain rule through them
 *   truth_dd.c     the run in double-double: its arrays, activations, rows and chain rule;
 *                  truth_dd_lanes.inc: its arithmetic on vectors, one file a width of them
 *   truth_audit.c  random columns again in MPFR
 *   truth_rank.c   states and maps of a rank
 *   truth_cache.c  the file cache
 *
 * Columns of the state do not meet in either direction, so a task owns (value head, up to TR_W
 * columns) for all tokens. Sums over columns (dq, dk, dg, dbeta) are formed per task and added in
 * task order. The bits do not depend on the number of threads.
 */
#pragma once
#include "ref/arithmetic/mp.h"
#include "ref/vocabulary/recurrence.h"
#include "truth.h"
#include "truth_dd.h"

#define TR_W 16        /* state columns per task */
#define TR_MIN_BITS 64 /* doubles and their chain of error terms need u <= 2^-64 */
#define TR_MAX_BITS 65536

/* Bounds are binary128 on every machine, rounded to nearest, range 2^-16494 .. 2^16384. The type
 * long double has 64 bits on x86 and 113 on aarch64, so no literal is a long double. */
#if __LDBL_MANT_DIG__ == 113
typedef long double ld;
#else
typedef __float128 ld;
#endif
#define TR_LD_U 0x1p-113

/* |x|; NaN stays NaN. */
static inline ld tr_abs(ld x) { return x < 0 ? -x : x; }
ld tr_two_to(int n); /* 2^n, -16000 <= n <= 16000 */
ld tr_sqrt(ld x);    /* within 2^-104, relative; x < 0 and NaN: NaN */
/* >= |x|_2, above it by less than (n + 8) 2^-52; an infinity or a NaN: that */
double tr_norm_up(const double *x, int64_t n);
double tr_largest(const double *x, int64_t n); /* magnitude; NaN: infinity */

/* Tokens t0..t1-1 of one sequence, at most run->len of them, never across a mark. cut: -1 when
 * there is none. */
typedef struct {
    int64_t t0, t1;
    int seq, first_of_seq, last_of_seq;
    int cut; /* index of the cut at t0 */
} tr_block;

/* The entries with K channels of a recurrence's rows, each once, so that an entry that reads and
 * writes has one gradient. Row j reads along entry read[j] and writes along write[j]; -1: none.
 * uses[e]: how often entry e stands there. */
typedef struct {
    int n, read[DP_MAX_ROWS], write[DP_MAX_ROWS], uses[DP_MAX_ENTRIES];
    dp_entry of[DP_MAX_ENTRIES];
} tr_rows;

/* Relative errors for the whole run: of activated q and k rows, rstd, beta and dbeta/db, and of a
 * rotation (relative to the row's 2-norm). */
typedef struct {
    ld qk, rstd, beta, db, turn;
} tr_rel;

typedef struct {
    const dp_problem *p;
    tr_rows rows;
    tr_rel rel;
    dp_truth *t;
    mpfr_prec_t prec;
    /* relative error of one operation: 2^-prec (MPFR; 2^-16000 beyond), TR_DD_U (double-double) */
    ld u;
    ld tiny; /* error of a step through underflow */
    int threads, progress, want_M;
    const dp_truth_device *device;
    dp_status status; /* of the device */
    dp_err err;
    int ncb;     /* column blocks of V */
    int64_t len; /* longest block */
    int nblock;
    tr_block *block;
    double done, total, shown; /* progress, in token-columns */
} tr_run;

/* Upper bounds for the error analysis, a token each. Every value bounds both the exact and the
 * computed quantity. */
typedef struct {
    ld d, d_err;                 /* max over channels of exp(g); of its error */
    ld x, x_err;                 /* the same of dg/dx */
    ld a, a_err;                 /* 2-norm over channels of dg/dA_log; of its error */
    ld rel, factor[DP_NFACTORS]; /* relative error of exp(g); max of each factor of the gate */
} tr_gate_norms;

/* One q/k head: activated q [T][K], k [T][R][K], rstd [T], [T][R]; norms of q [T] and of the key
 * rows [T][R]. */
typedef struct {
    mp_array q, k, rstd_q, rstd_k, cos, sin;     /* [T][P]; mem NULL: no rotation */
    ld *q_norm, *k_norm, *rstd_q_up, *rstd_k_up; /* rstd: NULL without l2norm */
} tr_qk;

/* One value head, n rows a token (recurrence.h):
 *   d = exp(g), dx = dg/dx, dA = dg/dA_log   [T][Kg]
 *   beta, db = dbeta/db                      [T][R]
 *   entry      [T][R][K], mem NULL where the entry is the key itself
 *   values     [T][n][V], mem NULL where each value is v or nothing
 *   unit       of a key but k with a norm: [T][K], rstd [T], bound of rstd [T]; else mem NULL
 *   strength   [T][n] */
typedef struct {
    mp_array d, dx, dA, beta, db, entry[DP_MAX_ENTRIES], values, strength;
    mp_array factor[DP_NFACTORS]; /* of the gate [T][Kg]; mem NULL: no row has it, or it is d */
    struct {
        mp_array y, rstd;
        ld *rstd_up;
    } unit[DP_NINPUTS];
    mp_array sum_dt, sum_A; /* [Kg], [1] accumulators of ddt_bias and dA_log */
    mp_array sum_angle;     /* [P] of dangle; mem NULL: no rotation */
    tr_gate_norms *norms;   /* [T] */
    ld *beta_up, *db_up;    /* [T][R] |beta|, |dbeta/db| */
    /* >= the norm of a token's step: [T]; of keys one after another [T][n] of each key. If a K x K
     * matrix was needed the norm includes the decay (tr_step_has_decay) */
    ld *nu;
    ld *v_norm, *do_norm;           /* [T][n] >= |value|, [T] >= |do| (NULL: forward only) */
    ld *entry_norm[DP_MAX_ENTRIES]; /* [T][R] >= |entry|; NULL: the keys' norms */
    ld *strength_up;                /* [T][n]; NULL: beta_up */
    /* [T], of keys one after another [T][n]: >= |computed state after them|, |computed adjoint
     * before them|; NULL: not measured */
    ld *S_up, *G_up;
} tr_head;

/* r->rel of this run's arithmetic; all are proven upper bounds. */
tr_rel tr_rel_errors(const tr_run *r);
ld tr_gamma(const tr_run *r, ld n); /* n u / (1 - n u); inf when n u >= 1/2 */

/* One task: value head hv (index in the problem), columns v0 .. v0+w-1. All per-token arrays are
 * [token][..][w] or [token][..]. */
typedef struct {
    const tr_run *run;
    const tr_qk *qk;
    const tr_head *head;
    int hv, v0, w;
    int is_M;           /* v = 0 and no output: the columns of M */
    mp_array S;         /* [K][w] state, later the adjoint G */
    mp_array ckpt;      /* [nblock][K][w] state entering each block */
    mp_array E;         /* [T][n][w], or [n][w] when no backward pass follows; n rows a token */
    mp_array tape;      /* [len G + 1][K][w] states of one block, before each of G groups of rows */
    mp_array U, dU, dE; /* [n][w] */
    mp_array later;     /* [lag][n][w] dE of the tokens after; mem NULL: no value looks back */
    mp_array row;       /* [w] scaled do, or o */
    mp_array tmp;       /* [4] */
    /* Sums over the task's columns: [len][K], [len][R][K], [len][Kg], [len][R], [len][n],
     * [len][R][K]. The entries' sums give dk and dbeta. At the end of dstrength and dentry are sums
     * of the lag tokens after the block. Rotations of a token have dphi [len][P]. */
    mp_array dq, dk, dg, dbeta, dstrength, dentry[DP_MAX_ENTRIES], dphi;
} tr_task;

/* ---- rows (truth_rows.c) --------------------------------------------------------------------- */

tr_rows tr_rows_of(const dp_problem *p);
static inline int tr_read_of(const tr_run *r, int64_t j) {
    return r->rows.read[r->p->R > 1 ? 0 : j];
}
static inline int tr_write_of(const tr_run *r, int64_t j) {
    return r->rows.write[r->p->R > 1 ? 0 : j];
}
/* [T][R][K] of entry e; [T][R] bounds of it. */
static inline mp_array tr_entry_rows(DP_UNUSED const tr_run *r, const tr_qk *qk, const tr_head *a,
                                     int e) {
    return a->entry[e].mem ? a->entry[e] : qk->k;
}
static inline const ld *tr_entry_norms(const tr_qk *qk, const tr_head *a, int e) {
    return a->entry_norm[e] ? a->entry_norm[e] : qk->k_norm;
}
/* >= the strength of row j of token t */
static inline ld tr_strength_up(const tr_run *r, const tr_head *a, int64_t t, int64_t j) {
    return a->strength_up ? a->strength_up[t * dp_rows(r->p) + j]
                          : a->beta_up[t * r->p->R + dp_row_key(r->p, j)];
}
/* Relative error at token t of a product without its factor number `but` (-1: with all). */
ld tr_entry_rel(const tr_run *r, const tr_head *a, dp_entry x, int but, int64_t t);
/* Does a value of its rows look back? Is one not v itself? */
int tr_values_look_back(const dp_problem *p);
int tr_has_products(const dp_problem *p);
/* A factor of the value of row j of token `now` at column v. */
double tr_value_of(const dp_problem *p, int hv, int64_t now, int64_t j, int of, int64_t v);
/* Rotates a row of K numbers by the angles of token t, or back. tmp: 2 numbers */
void tr_turn(const tr_run *r, const tr_qk *qk, int64_t t, int back, mp_array row, mp_array tmp);
/* dphi += the gradient of the angles by which row x was turned, from d, that of x. */
void tr_add_turning(const tr_run *r, mp_array x, mp_array d, mp_array dphi, mp_array tmp);
/* >= the factor of the gradient of x on its path to the factor m. That is the product of the
 * others, in the largest entry or (norm) in 2-norm. */
ld tr_others_up(const tr_run *r, int hv, const tr_qk *qk, const tr_head *a, dp_entry x, int m,
                int64_t t, int64_t key, int norm);
/* Arrays of entries, values and strengths of all tokens; bounds beside them where they are not
 * those of the keys. */
void tr_rows_alloc(const tr_run *r, tr_head *a);
/* Keys but k of token t over their norms; before tr_rows_token of any token. */
void tr_rows_units(const tr_run *r, int hv, int64_t t, tr_head *a, mpfr_ptr tmp);
/* The rows of token t, activated before; tmp: 2 numbers. */
void tr_rows_token(const tr_run *r, int hv, int64_t t, const tr_qk *qk, tr_head *a, mp_array tmp);
/* The rows of a token, each number rounded to double: entries [R] of K numbers, ld apart, strengths
 * [n], decays [K]. */
typedef struct {
    const double *entry[DP_MAX_ENTRIES], *strength, *d;
    int64_t ld;
} tr_step;
/* nu of token t from them; room: tr_step_room doubles */
void tr_step_norms(const tr_run *r, int64_t t, const tr_qk *qk, tr_head *a, const tr_step *s,
                   double *room);
int64_t tr_step_room(const tr_run *r);
/* The same of rows in MPFR; room: tr_rows_room doubles */
void tr_rows_step_norm(const tr_run *r, int64_t t, const tr_qk *qk, tr_head *a, double *room);
int64_t tr_rows_room(const tr_run *r);
/* Is the input one of K channels without an activation? */
int tr_is_given(int input);
/* Does any row have that factor of the gate, and is it not d itself? */
static inline int tr_has_factor(const dp_problem *p, int f) {
    return DP_FACTOR_RATE(DP_NINPUTS + f) != 1 &&
           dp_recurrence_has(dp_recurrence_of(p), DP_NINPUTS + f);
}
/* Relative error of factor `of` of the gate, where exp(g) has rel: d^rate. */
static inline ld tr_factor_rel(const tr_run *r, int of, ld rel) {
    const ld rate = tr_abs(DP_FACTOR_RATE(of));
    return DP_FACTOR_RATE(of) == 1 ? rel : 2 * (rate > 1 ? rate : 1) * rel + 2 * r->u;
}
/* Does nu include the decay? If not, rows read the decayed state. */
int tr_step_has_decay(const dp_problem *p);
/* From gradients of entries and strengths (row i of a block) to dk, dbeta, dg, dphi and further
 * results. */
void tr_rows_chain(const tr_run *r, int hv, const tr_qk *qk, const tr_head *a, tr_task *c,
                   int64_t t, int64_t i, mp_array tmp);

/* ---- activations ----------------------------------------------------------------------------- */

/* y [K] = x rstd, rstd = 1/norm, where `normed`, else x. Returns >= |y|. tmp: 1 number */
ld tr_activate_row(const tr_run *r, const double *x, int normed, mp_array y, mpfr_ptr rstd,
                   mpfr_ptr tmp);
/* dy becomes dx = rstd (dy - w <y, dy>), w of recurrence.h. tmp: 2 numbers */
void tr_chain_norm(const dp_problem *p, mp_array y, mpfr_srcptr rstd, mp_array dy, mp_array tmp);
/* >= the exact and the computed rstd */
ld tr_rstd_up(const tr_run *r, mpfr_srcptr rstd);
/* Allocates and fills *a for query head h. */
void tr_activate_qk(const tr_run *r, int h, tr_qk *a);
/* The same for value head hv; qk: of its query head. */
void tr_activate_head(const tr_run *r, int hv, const tr_qk *qk, tr_head *a);
/* Frees what tr_activate_qk allocated. */
void tr_free_qk(tr_qk *a);
/* Frees what tr_activate_head allocated. */
void tr_free_head(tr_head *a);
/* the bounds of either; the other NULL */
void tr_norms_alloc(const tr_run *r, tr_qk *qk, tr_head *a);
void tr_row_norms(const tr_run *r, int hv, int64_t t, tr_head *a); /* v_norm, do_norm of token t */
/* cos and sin of the sums of a head's angles, in *a or (a NULL) in double-double [T][P][4]. A
 * sequence begins at 0. */
void tr_sum_angles(const tr_run *r, int h, tr_qk *a, double *dd);
/* >= the exact value when the computed one is x with relative error rel */
ld tr_exact_up(ld x, ld rel);
ld tr_rho(ld x); /* x / (1 - x) >= exp(x) - 1 */

/* Arrays of zeros for c->run, c->w and c->is_M; backward: tape and gradients, too. */
void tr_task_alloc(tr_task *c, int backward);
/* Frees what tr_task_alloc allocated. */
void tr_task_free(tr_task *c);
/* Runs the tokens of block b; c->S is the state before them on entry, after them on return. */
void tr_forward_block(tr_task *c, int b, int backward);
/* Runs block b forward again from its checkpoint, then the adjoint in c->S backward. */
void tr_backward_block(tr_task *c, int b);
/* Columns of M over the tokens between marks seg and seg + 1, into the truth. */
void tr_M_segment(tr_task *c, int seg);

/* Rows of token t (i = t - block start) from the per-task sums of one q/k head's tasks [G][ncb];
 * tmp: 6 + K numbers. */
void tr_chain_token(const tr_run *r, int h, const tr_qk *qk, const tr_head *heads, tr_task *tasks,
                    int64_t t, int64_t i, mp_array tmp);
/* Before it, of all tokens of the block: the sums over a head's tasks, in the first of them. */
void tr_sum_tasks(const tr_run *r, tr_task *tasks, int64_t i);
/* Adds the block's tokens, last to first, to the head's ddt_bias and dA_log, and stores dangle.
 * task: the head's first (holds the summed dg). */
void tr_accumulate_gate(const tr_run *r, const tr_head *head, const tr_task *task,
                        const tr_block *b);

/* Radii of everything that belongs to q/k head h and its G value heads. */
void tr_bound_group(const tr_run *r, int h, const tr_qk *qk, const tr_head *heads);
void tr_ball_finish(dp_ball *b); /* adds the rounding to hi + lo; inf when an entry is not finite */
double tr_up(ld x);              /* bound -> double, rounded up; NaN becomes inf */

/* hi = nearest double, lo = nearest double to the rest; tmp is overwritten. */
void tr_store(dp_ball *b, int64_t i, mpfr_srcptr x, mpfr_ptr tmp);
/* The same of row `row` of K numbers. */
void tr_store_row(int K, mp_array x, dp_ball *out, int64_t row, mpfr_ptr tmp);

void tr_run_dd(tr_run *r); /* fills r->t but for what dp_truth_run adds */
/* Adds to the finished work, and shows it on a terminal; any thread may call it. */
void tr_progress(tr_run *r, double token_columns);

/* Shapes, marks and arrays of *t for (p, request), as dp_truth_run fills them. */
dp_status tr_truth_alloc(const dp_problem *p, const dp_truth_request *rq, dp_truth *t, dp_err *e);
