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
#include "inputs_exact.h"
#include "inputs.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ST_EXACT = 64, ST_EXACT_DO, ST_EXACT_DSTATE };

int dp_inputs_exact_log2(const dp_problem *p, int sequence, int hv) {
    return dp_exact_log2(dp_G(p), sequence, hv);
}

/* Sums over a group (dq, dk) already have the factors of v in them: its heads share one. */
int dp_inputs_exact_log2_do(const dp_problem *p, int sequence, int hv) {
    return 3 * (hv / dp_G(p) % 3) + 9 * (sequence % 3);
}

double dp_inputs_exact_basis(int K, int a, int x) { return dp_exact_basis(K, a, x); }

/* ---- the pass over tokens in their order ----------------------------------------------------- */

static void skip(dp_rng *r, int n) {
    while (n-- > 0)
        dp_rng_next(r);
}

/* dirty [K]: s_a may hold halves. Returns the bits of dp_exact_old. */
static int pass_gate(const dp_exact *x, dp_rng *r, char *dirty) {
    const int channel = dp_exact_draw(r, x->K), b = channel / 4 * 4, roll = dp_exact_draw(r, 48);
    const dp_exact_gate kind = dp_exact_gate_of(x, channel, roll);
    if (kind == DP_EXACT_HEAD) memset(dirty, 0, (size_t)x->K);
    if (kind == DP_EXACT_CHANNEL) dirty[channel] = 0;
    if (kind != DP_EXACT_PAIR) return 0;
    if (dirty[b] | dirty[b + 1] | dirty[b + 2] | dirty[b + 3]) return DP_EXACT_NO_RESET;
    memset(dirty + b, 1, 4);
    return 0;
}

static int pass_write(const dp_exact *x, dp_rng *r, int64_t at, int hv, char *dirty) {
    int old = 0;
    for (int j = 0; j < x->R; j++) {
        const int a = dp_exact_vector(x, at, hv / (x->HV / x->H), j), roll = dp_exact_draw(r, 8),
                  rotated = dp_exact_rotated(x->K, a);
        const double beta = dp_exact_beta(dirty[a], roll, rotated);
        if (dirty[a]) old |= DP_EXACT_HALVES << j;
        if (beta > 0) dirty[a] = beta < 1;
        skip(r, x->V + (x->erase && !rotated ? x->K - 1 : 0));
    }
    return old;
}

/* Draws of initial states stand before those of a sequence's tokens. */
static void draw_state(const dp_problem *p, dp_rng *r, int seq, double *s0) {
    const int64_t n = (int64_t)p->K * p->V;
    for (int64_t i = 0; i < p->HV * n; i++)
        s0[i] =
            2 * (dp_exact_draw(r, 3) - 1) * ldexp(1, dp_inputs_exact_log2(p, seq, (int)(i / n)));
}

/* Fills token, old and s0 [Nseq][HV][K][V] (NULL: none). */
static void pass(const dp_problem *p, const dp_inputs_spec *s, const dp_exact *x,
                 dp_exact_token *token, uint16_t *old, double *s0) {
    DP_OWN char *dirty = dp_calloc((size_t)p->HV * p->K, 1);
    dp_rng r;
    dp_rng_seed(&r, s->seed, ST_EXACT);
    for (int i = 0; i < p->Nseq; i++) {
        memset(dirty, 0, (size_t)p->HV * p->K);
        if (s0) draw_state(p, &r, i, s0 + (int64_t)i * p->HV * p->K * p->V);
        for (int64_t t = p->cu[i]; t < p->cu[i + 1]; t++) {
            token[t] = (dp_exact_token){r, t - p->cu[i], i % 3};
            skip(&r, p->H * (4 + p->R));
            for (int hv = 0; hv < p->HV; hv++) {
                int bits = pass_gate(x, &r, dirty + hv * p->K);
                bits |= pass_write(x, &r, t - p->cu[i], hv, dirty + hv * p->K);
                old[t * p->HV + hv] = (uint16_t)bits;
            }
        }
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
    const int Kg = dp_Kg(p), x = dp_exact_draw(r, p->K), roll = dp_exact_draw(r, 48);
    if (dp_has_growth(p)) return; /* exp(1024) is no number */
    if (Kg == 1 ? !roll : roll < 6 && !dp_exact_rotated(p->K, x))
        p->g[at * Kg + (Kg > 1 ? x : 0)] = DP_EXACT_RESET;
}

static void fill_row_keys(dp_problem *p, dp_rng *r, int64_t at, int a) {
    static const double other[] = {0, 0.5, 1, 2};
    const dp_key_roles y = dp_key_roles_of(dp_recurrence_of(p));
    const double s = dp_exact_sign(r), on = dp_exact_draw(r, 8) > 0;
    for (int i = 0; i < DP_KEYS_MOST; i++) {
        double *to = p->in[dp_row_keys[i]];
        for (int x = 0; to && x < p->K; x++)
            to[at * p->K + x] = y.vector[i] ? s * y.sign[i] * dp_exact_basis(p->K, a, x)
                                : x == a || dp_exact_rotated(p->K, a) ? on
                                                                      : other[dp_exact_draw(r, 4)];
    }
    for (int i = 0; i < 2; i++) {
        double *to = i ? p->number : p->beta;
        if (to) to[at] = dp_exact_draw(r, 8) > 0;
    }
}

static void fill_row_values(dp_problem *p, dp_rng *r, int64_t at, int64_t t, double unit) {
    for (int i = 0; i < DP_VALUES_MOST; i++) {
        double *to = p->in[dp_row_values[i]];
        const int whole = dp_is_whole_value(dp_recurrence_of(p), dp_row_values[i]) || !i;
        for (int c = 0; to && c < p->V; c++)
            to[at * p->V + c] = dp_exact_sign(r) * (whole ? unit * (1 + (t >> c % 8 & 1)) : 1);
    }
}

/* All tokens, one after another. Where p's arrays are a device's they are made here. */
static void fill_rows(const dp_problem *p, const dp_inputs_spec *s, dp_exact x, double *s0) {
    dp_problem here = *p;
    dp_rng r;
    for (int i = 0; i < DP_NINPUTS && p->memory; i++)
        if (dp_input_of(p, i)) here.in[i] = dp_doubles(dp_input_count(p, i));
    x.q = here.q;
    x.k = here.k;
    dp_rng_seed(&r, s->seed, ST_EXACT);
    for (int i = 0; i < p->Nseq; i++) {
        if (s0) draw_state(p, &r, i, s0 + (int64_t)i * p->HV * p->K * p->V);
        for (int64_t t = p->cu[i]; t < p->cu[i + 1]; t++) {
            dp_exact_keys(&x, &r, t, t - p->cu[i]);
            for (int hv = 0; hv < p->HV; hv++) {
                const int64_t at = t * p->HV + hv;
                fill_row_gate(&here, &r, at);
                fill_row_keys(&here, &r, at, dp_exact_vector(&x, t - p->cu[i], hv, 0));
                fill_row_values(&here, &r, at, t, ldexp(1, dp_inputs_exact_log2(p, i, hv)));
            }
        }
    }
    for (int i = 0; i < DP_NINPUTS && p->memory; i++) {
        DP_OWN double *host = here.in[i];
        if (host) p->memory->put(p->in[i], host, dp_input_count(p, i));
    }
}

void dp_inputs_fill_exact(dp_problem *p, const dp_inputs_spec *s) {
    assert(p->gate == DP_GATE_LOG && p->beta_form == DP_BETA_PLAIN && !p->l2norm &&
           p->K % p->R == 0 && p->R < 15);
    DP_OWN dp_exact_token *token = dp_calloc((size_t)p->T, sizeof *token);
    DP_OWN uint16_t *old = dp_calloc((size_t)(p->T * p->HV), sizeof *old);
    const int64_t states = p->s0 ? dp_input_count(p, DP_INPUT_S0) : 0;
    DP_OWN double *s0 = states ? dp_doubles(states) : NULL;
    const dp_exact x = {.T = p->T,
                        .H = p->H,
                        .HV = p->HV,
                        .K = p->K,
                        .V = p->V,
                        .R = p->R,
                        .Kg = dp_Kg(p),
                        .token = token,
                        .old = old,
                        .q = p->q,
                        .k = p->k,
                        .v = p->v,
                        .g = p->g,
                        .beta = p->beta,
                        .erase = dp_by_gates(p) ? p->erase : NULL,
                        .write = p->write};
    const int by_rows = dp_by_rows(p);
    if (by_rows)
        fill_rows(p, s, x, s0);
    else
        pass(p, s, &x, token, old, s0);
    if (!by_rows && p->memory) p->memory->exact(&x);
#pragma omp parallel for if (p->T * p->HV > 1 << 12)
    for (int64_t t = 0; t < (by_rows || p->memory ? 0 : p->T); t++)
        dp_exact_make(&x, t);
    if (states) dp_memory_put(p->memory, p->s0, s0, states);
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* Few entries of an array of zeros. */
typedef struct {
    int64_t *at, n;
    double *value;
} few;
static void add(few *x, int64_t at, double value) {
    if (!(x->n & (x->n - 1))) { /* full at each power of two */
        const size_t most = x->n ? 2 * (size_t)x->n : 1;
        x->at = dp_realloc(x->at, most * sizeof *x->at);
        x->value = dp_realloc(x->value, most * sizeof *x->value);
    }
    x->at[x->n] = at;
    x->value[x->n++] = value;
}
static void set(const dp_problem *p, double *to, few *x) {
    if (p->memory) p->memory->set(to, x->at, x->value, x->n);
    for (int64_t i = 0; i < x->n && !p->memory; i++)
        to[x->at[i]] = x->value[i];
    free(x->at);
    free(x->value);
}

static void draw_do(const dp_problem *p, dp_rng *r) {
    few x = {0};
    for (int64_t i = 0, seq = 0; i < p->T * p->HV; i++) {
        /* neighbours share a column: gradients of keys and gates sum over few */
        while (p->cu[seq + 1] <= i / p->HV)
            seq++;
        const int64_t column = (i / p->HV / 8 + 5 * (i % p->HV)) % p->V;
        if (!dp_exact_draw(r, 9))
            add(&x, i * p->V + column,
                dp_exact_sign(r) *
                    ldexp(1, dp_inputs_exact_log2_do(p, (int)seq, (int)(i % p->HV))));
    }
    set(p, p->dout, &x);
}

static void draw_dstate(const dp_problem *p, dp_rng *r) {
    few x = {0};
    for (int64_t i = 0, n = (int64_t)p->K * p->V; i < p->Nseq * p->HV * n; i++) {
        const int unit = dp_inputs_exact_log2_do(p, (int)(i / n / p->HV), (int)(i / n % p->HV));
        if (!dp_exact_draw(r, 32)) add(&x, i, 0.5 * dp_exact_sign(r) * ldexp(1, unit));
    }
    set(p, p->dstate, &x);
}

void dp_inputs_fill_exact_gradients(dp_problem *p, const dp_inputs_spec *s) {
    dp_rng r;
    dp_rng_seed(&r, s->seed, ST_EXACT_DO);
    if (p->dout) draw_do(p, &r);
    dp_rng_seed(&r, s->seed, ST_EXACT_DSTATE);
    if (p->dstate) draw_dstate(p, &r);
}
