/* Inputs on which every operation of every stage is exact in every format, bf16 included, so that
 * the expected error is 0.
 *
 * Keys. Channels come in blocks of four. Blocks with an even index have keys +-e_i, the others
 * +-(1/2)(+-1,+-1,+-1,+-1) from the rows of a Hadamard matrix. All keys of a head are thus +- one
 * orthonormal basis: k_s . k_i is 0, 1 or -1. The state is S = sum_a k_a s_a' with one row s_a of V
 * numbers a basis vector. One token of a sequence after another takes the next basis vector, so
 * that each is written once in K / R.
 *
 * Writes. beta = 1 replaces s_a by v, beta = 0 leaves it, beta = 1/2 halves both. No s_a is halved
 * again before it was replaced. With erase and write in place of beta (gdn2) all channels have that
 * beta, but for erase where the key is one channel. The others, which it does not reach, have 0,
 * 1/2, 1 or 2.
 *
 * Rows (recurrence.h). All keys of a token that are vectors are +- one basis vector a. So a row
 * that reads replaces s_a by its value. Other keys and numbers are 1, or 0 at once, values that
 * multiply another +-1, angles 0. Rows that only write add small integers to s_a.
 *
 * Decay. g is 0, or -1024 for a reset: exp is then exactly 1 or (below 2^-1074) exactly 0 in every
 * format. A reset takes the whole head (gdn), one channel of an even block, or two channels of
 * another block. The last leaves halves in four s_a. None of them is halved or reset again before
 * it was replaced. (Power-of-two decays are not exact in a natural-log gate.)
 *
 * Sizes. v: +-1 and +-2 times a power of two of head and sequence. Magnitude 2 in column c (mod 8)
 * says that bit c of the token's number is set; the signs are random. So no two rows of v are
 * multiples of each other. q has two entries +-1. do is zero for most tokens. Each other token has
 * one column of do: +-1 times a power of two of sequence and group. Eight successive tokens use one
 * column. The scale must be a power of two.
 *
 * At the sizes of the exact-*.case files no stored number then needs more than 8 significant bits
 * and no sum more than 24. That is a property of shape and seed, not a theorem:
 * harness/tests/test_exact.c checks it by bitwise equality.
 *
 * Signature. A number read from another head or sequence has another exponent. One from another
 * token has another pattern of magnitudes and signs. So the content of a wrong row names its rank,
 * head, sequence and token (harness/verdict/source.h). */
#include "inputs.h"
#include "ref/vocabulary/recurrence.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define RESET (-1024.0)
enum { ST_EXACT = 64, ST_EXACT_DO, ST_EXACT_DSTATE };

/* Neighbours in a group of value heads differ by one power of two (dq and dk add up over a group),
 * all else by more. */
int dp_inputs_exact_log2(const dp_problem *p, int sequence, int hv) {
    return hv % dp_G(p) + 3 * (hv / dp_G(p) % 3) + 9 * (sequence % 3);
}

/* Sums over a group (dq, dk) already have the factors of v in them: its heads share one. */
int dp_inputs_exact_log2_do(const dp_problem *p, int sequence, int hv) {
    return 3 * (hv / dp_G(p) % 3) + 9 * (sequence % 3);
}

static int rotated(int K, int a) { return a / 4 % 2 == 1 && a / 4 * 4 + 4 <= K; }
static int draw(dp_rng *r, int n) { return (int)(dp_rng_uniform(r) * n); }
static double sign(dp_rng *r) { return draw(r, 2) ? 1 : -1; }

/* Basis vector a: entry x. Row a of the 4 x 4 Hadamard matrix has the signs (-1)^popcount(a & x).
 */
double dp_inputs_exact_basis(int K, int a, int x) {
    if (!rotated(K, a)) return x == a;
    return x / 4 != a / 4 ? 0 : __builtin_parity((unsigned)(a & x & 3)) ? -0.5 : 0.5;
}

/* The basis vector of key j of token t of a sequence in head h. Heads step through the basis by
 * different steps, each prime to K, so that a head visits every vector. */
static int vector_of(const dp_problem *p, int64_t t, int h, int j) {
    static const int step[] = {1, 5, 3, 7};
    int d = step[h % 4];
    while (d > 1 && p->K % d == 0)
        d -= 2;
    return (int)((t * d + h + (int64_t)j * (p->K / p->R)) % p->K);
}

static void fill_keys(dp_problem *p, dp_rng *r, int64_t t, int64_t first) {
    for (int h = 0; h < p->H; h++) {
        double *q = p->q + (t * p->H + h) * p->K;
        for (int i = 0; i < 2; i++)
            q[draw(r, p->K)] = sign(r);
        for (int j = 0; j < p->R; j++) {
            const int a = vector_of(p, t - first, h, j);
            const double s = sign(r);
            for (int x = 0; x < p->K; x++)
                p->k[((t * p->H + h) * p->R + j) * p->K + x] =
                    s * dp_inputs_exact_basis(p->K, a, x);
        }
    }
}

/* dirty [K]: s_a may hold halves. */
static void fill_gate(dp_problem *p, dp_rng *r, int64_t t, int hv, char *dirty) {
    const int Kg = dp_Kg(p), K = p->K, x = draw(r, K), b = x / 4 * 4, roll = draw(r, 48);
    double *g = p->g + (t * p->HV + hv) * Kg;
    if (Kg == 1) {
        if (roll) return;
        g[0] = RESET;
        memset(dirty, 0, (size_t)K);
    } else if (roll < 6 && rotated(K, x)) {
        if (dirty[b] | dirty[b + 1] | dirty[b + 2] | dirty[b + 3]) return;
        const int pair =
            b +
            (x & 2); /* the two channels with this bit: the projector mixes s_a and s_(a^2) only */
        g[pair] = g[pair + 1] = RESET;
        memset(dirty + b, 1, 4);
    } else if (roll < 6) {
        g[x] = RESET;
        dirty[x] = 0;
    }
}

/* erase and write of key a. */
static void fill_gates(dp_problem *p, dp_rng *r, int64_t at, int a, double beta) {
    static const double other[] = {0, 0.5, 1, 2};
    for (int x = 0; x < p->K; x++)
        p->erase[at * p->K + x] = x == a || rotated(p->K, a) ? beta : other[draw(r, 4)];
    for (int x = 0; x < p->V; x++)
        p->write[at * p->V + x] = beta;
}

static void fill_write(dp_problem *p, dp_rng *r, int64_t t, int64_t first, int seq, int hv,
                       char *dirty) {
    const double unit = ldexp(1, dp_inputs_exact_log2(p, seq, hv));
    for (int j = 0; j < p->R; j++) {
        const int a = vector_of(p, t - first, hv / dp_G(p), j), roll = draw(r, 8);
        const int64_t i = (t * p->HV + hv) * p->R + j;
        const double beta = dirty[a] ? 1 : roll == 0 ? 0 : roll <= 2 && !rotated(p->K, a) ? 0.5 : 1;
        if (dp_by_gates(p))
            fill_gates(p, r, i, a, beta);
        else if (p->beta)
            p->beta[i] = beta;
        if (beta > 0) dirty[a] = beta < 1;
        for (int c = 0; c < p->V; c++)
            p->v[i * p->V + c] = sign(r) * unit * (1 + (t >> c % 8 & 1));
    }
}

/* ---- rows ------------------------------------------------------------------------------------ */

static int vectors_of(const dp_key_roles *y, dp_entry e) {
    int n = 0;
    for (int i = 0; i < DP_KEYS_MOST; i++)
        n += y->vector[i] ? dp_entry_has(e, dp_row_keys[i]) +
                                dp_entry_has(e, (int)dp_row_keys[i] | DP_PREVIOUS)
                          : 0;
    return n;
}

/* Does row j replace what it reads, not add to it? */
static int replaces(const dp_key_roles *y, const dp_token_row *r) {
    int sign = r->write.sign * r->read.sign * r->strength.sign;
    for (int i = 0; i < DP_KEYS_MOST; i++) {
        const int n =
            dp_entry_has(r->write, dp_row_keys[i]) + dp_entry_has(r->read, dp_row_keys[i]);
        if (y->vector[i] && n & 1) sign *= y->sign[i];
    }
    return sign > 0;
}

const char *dp_inputs_exact_refuses(const dp_problem *p) {
    const dp_recurrence *a = dp_recurrence_of(p);
    const dp_key_roles y = dp_key_roles_of(a);
    int reads = 0;
    if (!dp_by_rows(p)) return NULL;
    if (p->l2norm) return "norms round";
    for (int j = 0; j < a->n; j++) {
        const dp_token_row *r = &a->row[j];
        if (vectors_of(&y, r->write) != 1 || (r->read.sign && vectors_of(&y, r->read) != 1))
            return "an entry is a product of vectors";
        if (dp_entry_looks_back(r->read) || (r->read.sign && dp_entry_looks_back(r->write)))
            return "a row reads along a key of the token before";
        if (r->read.sign && !replaces(&y, r)) return "a row adds to what it reads";
        reads += r->read.sign != 0;
    }
    return reads > 1 && !dp_in_turn(p) ? "several rows read at once" : NULL;
}

/* Resets as above, but in blocks whose keys are single channels. */
static void fill_row_gate(dp_problem *p, dp_rng *r, int64_t at) {
    const int Kg = dp_Kg(p), x = draw(r, p->K), roll = draw(r, 48);
    if (dp_has_growth(p)) return; /* exp(1024) is no number */
    if (Kg == 1 ? !roll : roll < 6 && !rotated(p->K, x)) p->g[at * Kg + (Kg > 1 ? x : 0)] = RESET;
}

static void fill_row_keys(dp_problem *p, dp_rng *r, int64_t at, int a) {
    static const double other[] = {0, 0.5, 1, 2};
    const dp_key_roles y = dp_key_roles_of(dp_recurrence_of(p));
    const double s = sign(r), on = draw(r, 8) > 0;
    for (int i = 0; i < DP_KEYS_MOST; i++) {
        double *to = *dp_input_at(p, dp_row_keys[i]);
        for (int x = 0; to && x < p->K; x++)
            to[at * p->K + x] = y.vector[i] ? s * y.sign[i] * dp_inputs_exact_basis(p->K, a, x)
                                : x == a || rotated(p->K, a) ? on
                                                             : other[draw(r, 4)];
    }
    for (int i = 0; i < 2; i++) {
        double *to = i ? p->number : p->beta;
        if (to) to[at] = draw(r, 8) > 0;
    }
}

static void fill_row_values(dp_problem *p, dp_rng *r, int64_t at, int64_t t, double unit) {
    static const dp_input_id VALUES[] = {DP_INPUT_V, DP_INPUT_WRITE, DP_INPUT_VALUE3,
                                         DP_INPUT_VALUE4};
    for (int i = 0; i < 4; i++) {
        double *to = *dp_input_at(p, VALUES[i]);
        const int whole = dp_is_whole_value(dp_recurrence_of(p), VALUES[i]) || !i;
        for (int c = 0; to && c < p->V; c++)
            to[at * p->V + c] = sign(r) * (whole ? unit * (1 + (t >> c % 8 & 1)) : 1);
    }
}

/* Token t of a sequence, of one head. */
static void fill_rows(dp_problem *p, dp_rng *r, int64_t t, int64_t first, int seq, int hv) {
    const int64_t at = t * p->HV + hv;
    fill_row_gate(p, r, at);
    fill_row_keys(p, r, at, vector_of(p, t - first, hv, 0));
    fill_row_values(p, r, at, t, ldexp(1, dp_inputs_exact_log2(p, seq, hv)));
}

void dp_inputs_fill_exact(dp_problem *p, const dp_inputs_spec *s) {
    assert(p->gate == DP_GATE_LOG && p->beta_form == DP_BETA_PLAIN && !p->l2norm &&
           p->K % p->R == 0);
    char *dirty = dp_calloc((size_t)p->HV * p->K, 1);
    dp_rng r;
    dp_rng_seed(&r, s->seed, ST_EXACT);
    for (int i = 0; i < p->Nseq; i++) {
        memset(dirty, 0, (size_t)p->HV * p->K);
        for (int64_t x = 0, n = (int64_t)p->HV * p->K * p->V; p->s0 && x < n; x++)
            p->s0[i * n + x] =
                2 * (draw(&r, 3) - 1) *
                ldexp(1, dp_inputs_exact_log2(p, i, (int)(x / ((int64_t)p->K * p->V))));
        for (int64_t t = p->cu[i]; t < p->cu[i + 1]; t++) {
            fill_keys(p, &r, t, p->cu[i]);
            for (int hv = 0; hv < p->HV; hv++) {
                if (dp_by_rows(p)) {
                    fill_rows(p, &r, t, p->cu[i], i, hv);
                    continue;
                }
                fill_gate(p, &r, t, hv, dirty + hv * p->K);
                fill_write(p, &r, t, p->cu[i], i, hv, dirty + hv * p->K);
            }
        }
    }
    free(dirty);
}

void dp_inputs_fill_exact_gradients(dp_problem *p, const dp_inputs_spec *s) {
    dp_rng r;
    dp_rng_seed(&r, s->seed, ST_EXACT_DO);
    for (int64_t i = 0, seq = 0; p->dout && i < p->T * p->HV;
         i++) { /* neighbours share a column: gradients of keys and gates sum over few */
        while (p->cu[seq + 1] <= i / p->HV)
            seq++;
        if (!draw(&r, 9))
            p->dout[i * p->V + (i / p->HV / 8 + 5 * (i % p->HV)) % p->V] =
                sign(&r) * ldexp(1, dp_inputs_exact_log2_do(p, (int)seq, (int)(i % p->HV)));
    }
    dp_rng_seed(&r, s->seed, ST_EXACT_DSTATE);
    for (int64_t i = 0, n = (int64_t)p->K * p->V; p->dstate && i < p->Nseq * p->HV * n; i++)
        p->dstate[i] = draw(&r, 32) ? 0
                                    : 0.5 * sign(&r) *
                                          ldexp(1, dp_inputs_exact_log2_do(p, (int)(i / n / p->HV),
                                                                           (int)(i / n % p->HV)));
}
