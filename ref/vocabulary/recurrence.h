/* ref/vocabulary/recurrence.h - a recurrence as data: the rows of one token.
 *
 *   S <- diag(exp g) S,   then for each row at once (or in turn)   S <- S + write' U,
 *   U = strength (value - read S),   and   o = scale S' q
 *
 * DP_READINGS says which state rows read; of rows one after another the first alone has a
 * choice. Every entry is a signed product of at most three factors: inputs, exp(g), exp(-g). Write
 * and read have K channels, value has V, strength is a number. If a recurrence has one row and a
 * token has R keys, the row applies to each key. These rows determine the truth, its gradients and
 * its radii (ref/truth).
 *
 * A factor may be the previous token's input, zeros at the first token of a sequence. The query and
 * some keys are rotated by phi, the sum of a head's angles over its sequence so far. Pair i of
 * channels (dp_pair_of) has phi_i: (x, y) -> (x cos - y sin, x sin + y cos). A previous key has its
 * own token's phi. Rotated keys occur in writes only, with numbers and a head's gate, which commute
 * with the rotation.
 *
 * Along the values the query has V channels, o has K, and o = scale S query'. With a = do, b =
 * query, the loss do o is a (scale S b'), which is (scale S' a') b. That is the loss of a problem
 * of the other reading, with query a and gradient b. So both have equal gradients of keys, values,
 * gates and states, and its dq = scale S b' is o. A problem along the values is stored as the
 * other one: q, dout, dq, o are its do, query, o, dquery (dp_user_recurrence_install). Truth,
 * radii, bounds, draws and ranks follow. They need the backward pass. */
#pragma once
#include "problem.h"

#include <math.h>

enum { DP_MAX_FACTORS = 3, DP_ALL_FACTORS = 5, DP_MAX_ROWS = 8, DP_MAX_ENTRIES = 2 * DP_MAX_ROWS };
/* Factors that are no inputs, exp(rate g): id, rate, the text before and after the gate's name. All
 * that a factor of a gate is stands in this table. */
#define DP_GATE_FACTORS(X, A)               \
    X(A, DP_FACTOR_DECAY, 1.f, "exp(", ")") \
    X(A, DP_FACTOR_GROWTH, -1.f, "exp(-", ")")
enum { /* beside dp_input_id */
       DP_FACTORS = DP_NINPUTS - 1,
#define DP_ID(A, ID, ...) ID,
       DP_GATE_FACTORS(DP_ID, )
#undef DP_ID
           DP_FACTORS_END,
       DP_NFACTORS = DP_FACTORS_END - DP_NINPUTS
};
/* The rate of a factor; 0: it is an input. */
#define DP_RATE_IF(A, ID, RATE, ...) (A) == (ID) ? (RATE):
#define DP_FACTOR_RATE(A) (DP_GATE_FACTORS(DP_RATE_IF, A) 0.f)
/* The state that rows read: id, word, 1 for the state before the decay, a factor, the state's name
 * in messages. Each read is multiplied by the factor, which is one of the gate (0: none). */
#define DP_READINGS(X)                                               \
    X(DP_READ_DECAYED, "decayed", 0, 0, "the state after its decay") \
    X(DP_READ_UNDECAYED, "undecayed", 1, 0, "the state before its decay")
#define DP_ID(ID, ...) ID,
typedef enum { DP_READINGS(DP_ID) DP_NREADINGS } dp_reading;
#undef DP_ID
typedef struct {
    const char *word;
    int before, factor;
    const char *state;
} dp_reading_info;
extern const dp_reading_info dp_readings[DP_NREADINGS];
/* Norms of rows: id, word, power p, mean.
 *     N^p = eps + sum |x|^p / m,  y = x / N;    m: n numbers if mean, else 1
 *     dx  = (dy - w <y, dy>) / N,  w = dN/dx = y / m for p = 2, sign(y) / m for p = 1
 * Each arithmetic computes these from the row, and bounds follow. */
#define DP_NORMS(X)             \
    X(DP_NORM_L2, "l2", 2, 0)   \
    X(DP_NORM_RMS, "rms", 2, 1) \
    X(DP_NORM_L1, "l1", 1, 0)
#define DP_ID(ID, ...) ID,
typedef enum { DP_NORMS(DP_ID) DP_NNORMS } dp_norm;
#undef DP_ID
typedef struct {
    const char *word;
    int power, mean;
} dp_norm_info;
extern const dp_norm_info dp_norms[DP_NNORMS];
/* Rotations: id, word, first channel of pair i of P, distance of the second one, pair of channel x.
 */
#define DP_ROTATIONS(X)                          \
    X(DP_ROTATE_PAIRS, "pairs", 2 * i, 1, x / 2) \
    X(DP_ROTATE_HALVES, "halves", i, P, x % P)
#define DP_ID(ID, ...) ID,
typedef enum { DP_ROTATIONS(DP_ID) DP_NROTATIONS } dp_rotation;
#undef DP_ID
typedef struct {
    int i, first, second;
} dp_pair;
#ifdef __CUDACC__
#include <cuda_runtime.h>
#define DP_ANYWHERE __host__ __device__
#else
#define DP_ANYWHERE
#endif
/* Pair i; that of channel x where i is -1. */
DP_ANYWHERE static inline dp_pair dp_pair_of(int rotation, int P, int i, int x) {
    dp_pair y = {i, 0, 0};
#define DP_PAIR(ID, WORD, FIRST, APART, OF)     \
    if (rotation == ID) {                       \
        y.i = i = i < 0 ? OF : i;               \
        y.second = (y.first = FIRST) + (APART); \
    }
    DP_ROTATIONS(DP_PAIR)
#undef DP_PAIR
    return y;
}
/* Added to an input: the previous token's. */
enum { DP_PREVIOUS = 64 };

/* A signed product of n factors. sign = 0: the entry is 0; n = 0: it is 1 or -1. Text has up to
 * DP_MAX_FACTORS; a reading and the chunk form add one each. */
typedef struct {
    signed char sign;
    unsigned char n, of[DP_ALL_FACTORS];
} dp_entry;
typedef struct {
    dp_entry write, read, value, strength;
} dp_token_row;
typedef struct dp_recurrence {
    int before;                          /* of its reading (dp_recurrence_reads) */
    signed char reading, norm, rotation; /* dp_reading, dp_norm, dp_rotation */
    short n;
    int in_turn;      /* 1: each row reads the state that the rows before it have written */
    int along;        /* 1: o reads along the values */
    unsigned rotated; /* bit i: keys of input i are */
    unsigned normed;  /* bit i: rows of input i, the query or keys, with dp_problem.l2norm */
    double eps;       /* of that norm; 0: DP_L2_EPS */
    dp_token_row row[DP_MAX_ROWS];
} dp_recurrence;
extern dp_recurrence dp_recurrences[DP_NMODELS + 1];

static inline const dp_recurrence *dp_recurrence_of(const dp_problem *p) {
    return p->user ? p->user->of_token : &dp_recurrences[p->model];
}
static inline int dp_reads_along(const dp_problem *p) { return dp_recurrence_of(p)->along; }
/* Pair i of channels, and that of channel x < 2 dp_pairs. */
static inline dp_pair dp_pair_at(const dp_problem *p, int64_t i) {
    return dp_pair_of(dp_recurrence_of(p)->rotation, dp_pairs(p), (int)i, 0);
}
static inline dp_pair dp_pair_with(const dp_problem *p, int64_t x) {
    return dp_pair_of(dp_recurrence_of(p)->rotation, dp_pairs(p), -1, (int)x);
}
/* The usual scale: (channels of the query)^-1/2. */
static inline double dp_usual_scale(const dp_problem *p) {
    const int n = dp_reads_along(p) ? p->V : p->K;
    return n ? 1 / sqrt(n) : 0;
}
/* Row j of a token, and the index of its key on the axis R. */
static inline const dp_token_row *dp_row_of(const dp_problem *p, int64_t j) {
    const dp_recurrence *r = dp_recurrence_of(p);
    return &r->row[r->n > 1 ? j : 0];
}
static inline int64_t dp_row_key(const dp_problem *p, int64_t j) {
    return dp_recurrence_of(p)->n > 1 ? 0 : j;
}
/* Does row j of a token read the state before its decay? */
DP_ANYWHERE static inline int dp_row_undecayed(const dp_recurrence *a, int64_t j) {
    return a->before && !(a->in_turn && j);
}
/* The read entry of row j in chunk form, where all rows read the decayed state. */
static inline dp_entry dp_chunk_read(const dp_problem *p, int64_t j) {
    dp_entry e = dp_row_of(p, j)->read;
    if (e.sign && dp_row_undecayed(dp_recurrence_of(p), j)) e.of[e.n++] = DP_FACTOR_GROWTH;
    return e;
}
/* Gives the rows another reading than they have. */
void dp_recurrence_reads(dp_recurrence *a, dp_reading to);
/* Are rows of that input divided by their norm before anything else? */
static inline int dp_is_normed(const dp_problem *p, int input) {
    return p->l2norm && dp_recurrence_of(p)->normed >> input & 1;
}
static inline const dp_norm_info *dp_norm_of(const dp_problem *p) {
    return &dp_norms[dp_recurrence_of(p)->norm];
}
/* The number m of that norm. */
static inline int dp_norm_mean(const dp_problem *p) { return dp_norm_of(p)->mean ? p->K : 1; }
/* >= |y|_2; >= |w|_2 |y|_2 and |I - w y'|_2, which is a projection where p is 2. */
static inline double dp_norm_most(const dp_problem *p) {
    const double m = dp_norm_mean(p);
    return (dp_norm_of(p)->power == 2 ? sqrt(m) : m) * (1 + 0x1p-50 * (m > 1));
}
static inline double dp_norm_across(const dp_problem *p) {
    return dp_norm_of(p)->power == 2 ? 1 : (1 + sqrt(p->K)) * (1 + 0x1p-50);
}
static inline double dp_norm_eps(const dp_problem *p) {
    return dp_recurrence_of(p)->eps > 0 ? dp_recurrence_of(p)->eps : DP_L2_EPS;
}
/* The number of factors of the entry that have a norm. */
static inline int dp_entry_normed(const dp_problem *p, dp_entry e) {
    int n = 0;
    for (int i = 0; i < e.n; i++)
        n += dp_is_normed(p, e.of[i] & ~DP_PREVIOUS);
    return n;
}
static inline int dp_entry_same(dp_entry a, dp_entry b) {
    int same = a.sign == b.sign && a.n == b.n;
    for (int i = 0; i < a.n && same; i++)
        same = a.of[i] == b.of[i];
    return same;
}
/* Is the entry that input, without sign or further factors? */
static inline int dp_entry_is(dp_entry e, int input) {
    return e.sign > 0 && e.n == 1 && e.of[0] == input;
}
/* Is the entry 1? */
static inline int dp_entry_is_one(dp_entry e) { return e.sign > 0 && !e.n; }
/* The number of times that the entry has that factor. */
static inline int dp_entry_has(dp_entry e, int factor) {
    int n = 0;
    for (int i = 0; i < e.n; i++)
        n += e.of[i] == factor;
    return n;
}

/* Inputs of a token's rows with K channels, and with V. */
#define DP_ONE_MORE(...) +1
enum { DP_KEYS_MOST = 1 DP_ROW_KEYS(DP_ONE_MORE), DP_VALUES_MOST = 1 DP_ROW_VALUES(DP_ONE_MORE) };
#undef DP_ONE_MORE
extern const dp_input_id dp_row_keys[DP_KEYS_MOST], dp_row_values[DP_VALUES_MOST];
/* Has the input V columns? */
static inline int dp_is_value(int input) {
#define DP_OR_IT(ID, ...) || input == DP_INPUT_##ID
    return input == DP_INPUT_V DP_ROW_VALUES(DP_OR_IT);
#undef DP_OR_IT
}
/* The input of a factor, of this token or the previous one. */
static inline int dp_factor_input(int of) { return of & ~DP_PREVIOUS; }
/* The token of a factor in an entry of token t; -1: there is none. */
static inline int64_t dp_factor_token(const dp_problem *p, int of, int64_t t) {
    return of & DP_PREVIOUS ? dp_token_before(p, t) : t;
}
/* Has the entry an input of the previous token? */
static inline int dp_entry_looks_back(dp_entry e) {
    int any = 0;
    for (int i = 0; i < e.n; i++)
        any |= e.of[i] & DP_PREVIOUS;
    return any != 0;
}
/* The rotated key of an entry, as a factor; -1: none. */
static inline int dp_entry_rotated(const dp_recurrence *a, dp_entry e) {
    for (int i = 0; i < e.n; i++)
        if (a->rotated >> dp_factor_input(e.of[i]) & 1) return e.of[i];
    return -1;
}

/* Which entries of a row. */
typedef enum {
    DP_ENTRY_WRITE,
    DP_ENTRY_READ,
    DP_ENTRY_VALUE,
    DP_ENTRY_STRENGTH,
    DP_NENTRIES
} dp_entry_kind;
static inline dp_entry dp_entry_of(const dp_token_row *r, int kind) {
    return kind == DP_ENTRY_WRITE   ? r->write
           : kind == DP_ENTRY_READ  ? r->read
           : kind == DP_ENTRY_VALUE ? r->value
                                    : r->strength;
}
/* Does any row of the recurrence have that factor? */
static inline int dp_recurrence_has(const dp_recurrence *a, int factor) {
    int n = 0;
    for (int i = 0; i < a->n * DP_NENTRIES; i++)
        n += dp_entry_has(dp_entry_of(&a->row[i / DP_NENTRIES], i % DP_NENTRIES), factor);
    return n > 0;
}
/* Does the recurrence use that input, of this token or the previous one? */
static inline int dp_recurrence_uses(const dp_recurrence *a, int input) {
    return dp_recurrence_has(a, input) || dp_recurrence_has(a, input | DP_PREVIOUS) ||
           (input == DP_INPUT_ANGLE && a->rotated);
}
/* Does any row use an input of the previous token? */
static inline int dp_recurrence_looks_back(const dp_recurrence *a) {
    int any = 0;
    for (int i = 0; i < a->n * DP_NENTRIES; i++)
        any |= dp_entry_looks_back(dp_entry_of(&a->row[i / DP_NENTRIES], i % DP_NENTRIES));
    return any;
}
/* Does a recurrence have such an input: q, g, and the inputs of its rows? States, parameters of the
 * gate and incoming gradients are always allowed. */
int dp_model_has(dp_model m, int input); /* tensors.c */
/* The exponent of exp(g) in the entry; the factors that have one. */
static inline double dp_entry_gates(dp_entry e) {
    double sum = 0;
    for (int i = 0; i < e.n; i++)
        sum += DP_FACTOR_RATE(e.of[i]);
    return sum;
}
static inline double dp_entry_gate_sizes(dp_entry e) { /* sum of |rate| */
    double sum = 0;
    for (int i = 0; i < e.n; i++)
        sum += fabs(DP_FACTOR_RATE(e.of[i]));
    return sum;
}
static inline int dp_entry_gate_factors(dp_entry e) {
    int n = 0;
    for (int i = 0; i < e.n; i++)
        n += DP_FACTOR_RATE(e.of[i]) != 0;
    return n;
}
/* Does any row have a factor of the gate? */
static inline int dp_recurrence_has_gates(const dp_recurrence *a) {
    int n = 0;
    for (int f = DP_NINPUTS; f < DP_FACTORS_END; f++)
        n += dp_recurrence_has(a, f);
    return n > 0;
}
/* Does a token need more of earlier tokens than the state: the previous token's inputs, or the sum
 * of angles? */
static inline int dp_has_halo(const dp_problem *p) {
    const dp_recurrence *a = dp_recurrence_of(p);
    return a->rotated || dp_recurrence_looks_back(a);
}
/* Is that input one that it needs? The sum of angles is. */
static inline int dp_in_halo(const dp_problem *p, int input) {
    const dp_recurrence *a = dp_recurrence_of(p);
    return dp_recurrence_has(a, input | DP_PREVIOUS) || (input == DP_INPUT_ANGLE && a->rotated);
}
/* An input of the token before a call that goes on; NULL: the call needs no such. */
static inline const double *dp_halo_of(const dp_problem *p, int input) {
    return p->before && dp_in_halo(p, input) ? dp_input_of(p->before, input) : NULL;
}
/* Do two rows add products of equal factors with opposite signs, of this or the previous token? */
int dp_rows_cancel(const dp_recurrence *a);
/* Has the recurrence an exp(-g), or reads before the decay, which are an exp(-g) in chunk form? */
static inline int dp_has_growth(const dp_problem *p) {
    const dp_recurrence *r = dp_recurrence_of(p);
    int any = r->before;
    for (int f = DP_NINPUTS; f < DP_FACTORS_END; f++)
        any |= DP_FACTOR_RATE(f) < 0 && dp_recurrence_has(r, f);
    return any;
}
