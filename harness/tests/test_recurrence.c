/* harness/tests/test_recurrence.c - recurrences of a user's own (ref/vocabulary/recurrence_text.h).
 * Known ones, written as text, have the same truth bit for bit. Random ones agree, forward and
 * backward, with a complex step in quadruple precision inside their radius (DP_RECURRENCES of them,
 * default 8). So does double-double with MPFR. Errors in a text are named with line and word.
 *
 * The oracle writes the token of recurrence_text.h as it stands, from the raw inputs to one scalar,
 * and shares no formula with the truth. At 64 bits the radii are 10^8 times its error. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "complex_step.h"
#include "gt.h"
#include "harness/simulated/ranks.h"
#include "ref/truth/truth.h"
#include "ref/truth/truth_dd.h"
#include "ref/vocabulary/recurrence_text.h"

static uint64_t state;
static double uniform(double lo, double hi) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return lo + (hi - lo) * (double)(state >> 11) * 0x1p-53;
}
static int below(int n) { return (int)uniform(0, n) % n; }

static void install(const char *text) {
    dp_user_recurrence y;
    dp_err e = {0};
    REQUIRE(!dp_user_recurrence_parse(text, "mine", &y, &e), "%s\n%s", e.msg, text);
    dp_user_recurrence_install(&y);
}

/* ---- problems -------------------------------------------------------------------------------- */

static void fill(double *x, int64_t n, double lo, double hi) {
    for (int64_t i = 0; x && i < n; i++)
        x[i] = uniform(lo, hi);
}

static void with(dp_problem *p, int input, double lo, double hi) {
    p->in[input] = dp_doubles(dp_input_count(p, input));
    fill(p->in[input], dp_input_count(p, input), lo, hi);
}

/* p->model, shapes and forms set. */
static void fill_problem(dp_problem *p, int Nseq, const int64_t *cu) {
    const double key = 0.9 / sqrt(p->K);
    p->Nseq = Nseq;
    p->cu = dp_calloc((size_t)Nseq + 1, sizeof *p->cu);
    memcpy(p->cu, cu, sizeof *cu * (size_t)(Nseq + 1));
    p->T = cu[Nseq];
    dp_problem_alloc(p);
    for (int i = 0; i < DP_NINPUTS; i++)
        fill(p->in[i], dp_input_of(p, i) ? dp_input_count(p, i) : 0, -key, key);
    fill(p->v, dp_input_count(p, DP_INPUT_V), -1, 1);
    fill(p->g, dp_input_count(p, DP_INPUT_G), p->gate ? -2 : -1, p->gate ? 1 : 0.5);
    fill(p->angle, dp_input_of(p, DP_INPUT_ANGLE) ? dp_input_count(p, DP_INPUT_ANGLE) : 0, -3, 3);
    if (p->beta) fill(p->beta, dp_input_count(p, DP_INPUT_BETA), 0, 1);
    with(p, DP_INPUT_DO, -1, 1);
    with(p, DP_INPUT_S0, -1, 1);
    with(p, DP_INPUT_DSTATE, -1, 1);
    if (!p->gate) return;
    with(p, DP_INPUT_A_LOG, -1, 0.5);
    with(p, DP_INPUT_DT_BIAS, -1, 1);
}

/* Zeros of queries and keys, where |x| has no slope (0 here), and rows of nothing else. */
static void some_zeros(dp_problem *p) {
    double *const x[] = {p->q, p->k, p->erase, p->lr_a, p->lr_b};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        for (int64_t z = 0; x[i] && z < p->T * p->HV * p->K; z++)
            if (z % 5 == (int64_t)i || z / p->K % 7 == (int64_t)i) x[i][z] = z % 2 ? 0 : -0.0;
}

static dp_truth truth_at(const dp_problem *p, int bits) {
    dp_truth t = {0};
    dp_err e = {0};
    const int64_t cut[] = {1};
    const dp_truth_request rq = {
        .bits = bits, .backward = 1, .ncut = p->T > 1, .cut = cut, .want_M = 1};
    if (dp_problem_check(p, 0, &e) || dp_truth_run(p, &rq, &t, &e))
        gt_fail(__FILE__, __LINE__, "truth", "%s", e.msg);
    return t;
}

/* ---- recurrences that stand here ------------------------------------------------------------- */

#define NAMES "query q\ngate g per "
static const struct {
    dp_model model;
    const char *text;
} SAME[] = {
    {DP_KDA, "recurrence a\n" NAMES "channel\nkeys k\nvalues v\nnumber beta\n"
             "row write=k read=k value=v strength=beta\n"},
    {DP_GDN, "recurrence a\n" NAMES "head\nkeys k\nvalues v\nnumber beta\n"
             "row write=k read=k value=v strength=beta\n"},
    {DP_GDN2, "recurrence a\n" NAMES "channel\nkeys k b\nvalues v w\n"
              "row write=k read=b*k value=w*v # b erases\n"},
    {DP_GLA, "recurrence a\n" NAMES "channel\nkeys k\nvalues v\nrow write=k value=v\n"},
    {DP_SSD, "recurrence a\n" NAMES "head\nkeys k\nvalues v\nrow write=k value=v strength=1\n"}};
/* Its inputs lie elsewhere: k, a, b where lr_a, lr_b are k, erase, lr_a. */
static const char DPLR[] = "recurrence a\n" NAMES "channel\nkeys k a b\nvalues v\nreads undecayed\n"
                           "row write=b read=-a\nrow write=k value=v\n";

static void same_truth(const dp_problem *here, const dp_problem *own, const char *name) {
    dp_truth a = truth_at(here, 64), b = truth_at(own, 64);
    const int moved[DP_NRESULTS] = {
        [DP_RESULT_DLR_A] = DP_RESULT_DERASE, [DP_RESULT_DLR_B] = DP_RESULT_DLR_A};
    for (int i = 0; i < DP_NRESULTS; i++) {
        const int j = here->model == DP_DPLR && moved[i] ? moved[i] : i;
        const dp_ball *x = &a.field[i], *y = &b.field[j];
        if (!x->rows) continue;
        const size_t n = sizeof(double) * (size_t)(x->rows * x->width);
        CHECK(y->rows == x->rows && !memcmp(x->hi, y->hi, n) && !memcmp(x->lo, y->lo, n),
              "%s: field %d: other bits", name, i);
        for (int64_t r = 0; r < x->rows; r++)
            CHECK(y->rad[r] <= 1.01 * x->rad[r], "%s: field %d, row %lld: radius %g, here %g", name,
                  i, (long long)r, y->rad[r], x->rad[r]);
    }
    CHECK(!memcmp(a.M_seg.hi, b.M_seg.hi, sizeof(double) * (size_t)(a.M_seg.rows * a.M_seg.width)),
          "%s: M: other bits", name);
    dp_truth_free(&a);
    dp_truth_free(&b);
}

DP_TEST(recurrence, those_that_stand_here_written_as_text_have_the_same_truth) {
    static const int64_t CU[] = {0, 3, 3, 11};
    for (size_t i = 0; i <= sizeof SAME / sizeof *SAME; i++) {
        const int dplr = i == sizeof SAME / sizeof *SAME;
        for (int gate = 0; gate < 3; gate++) {
            dp_problem p = {.model = dplr ? DP_DPLR : SAME[i].model,
                            .H = 2,
                            .HV = 2,
                            .K = 4,
                            .V = 18,
                            .R = 1,
                            .scale = 0.5,
                            .gate = (dp_gate)gate,
                            .lower_bound = -2};
            state = 77 + i;
            fill_problem(&p, 3, CU);
            install(dplr ? DPLR : SAME[i].text);
            dp_problem own = p;
            own.model = DP_USER;
            if (dplr) {
                own.erase = p.lr_a;
                own.lr_a = p.lr_b;
                own.lr_b = NULL;
            }
            same_truth(&p, &own, dp_models[p.model].name);
            dp_user_recurrence_install(NULL);
            dp_problem_free(&p);
        }
    }
}

/* ---- random recurrences ---------------------------------------------------------------------- */

static void add(char *text, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void add(char *text, size_t size, const char *format, ...) {
    const size_t n = strlen(text);
    va_list ap;
    va_start(ap, format);
    vsnprintf(text + n, size - n, format, ap);
    va_end(ap);
}

/* The law of random products. rotated: the first key is; back: inputs may look back. */
typedef struct {
    int keys, values, number, rotated, back;
} product_law;

static void add_input(char *text, size_t size, const product_law *y, const char *name, int i) {
    add(text, size, y->back && below(3) == 0 ? "prev(%s%d)" : "%s%d", name, i);
}

/* keys: with one at least; else values. A rotated key has numbers beside it alone. */
static void add_product(char *text, size_t size, const char *what, int keys, const product_law *y) {
    const int n = 1 + below(3), at = below(n),
              turned = y->rotated && *what == 'w' && (y->keys == 1 || below(2));
    add(text, size, " %s=%s", what, below(3) ? "" : "-");
    for (int i = 0; i < n && (!turned || i < 1 + y->number); i++) {
        const int kind = i == at || turned ? 0 : below(5);
        if (i) add(text, size, "*");
        if (turned && i)
            add_input(text, size, y, "n", 0);
        else if (!keys)
            add_input(text, size, y, "v", below(y->values));
        else if (kind < 2)
            add_input(text, size, y, "k", turned ? 0 : y->rotated + below(y->keys - y->rotated));
        else if (kind == 2 && y->number)
            add_input(text, size, y, "n", 0);
        else
            add(text, size, kind == 3 ? "exp(g)" : "exp(-g)");
    }
}

/* A norm of a random subset of q and keys, its eps. */
static void add_norms(char *text, size_t size, int nkeys) {
    static const char *const EPS[] = {"", " eps 1e-6", " eps 0.01", " eps 0.5"}, *const WORD[] = {
                                                                                     "", " l2",
                                                                                     " rms", " l1"};
    const int which = below(2 << nkeys);
    if (which) add(text, size, "norm%s", WORD[which % 4]);
    for (int i = 0; i <= nkeys; i++)
        if (which >> i & 1) add(text, size, i ? " k%d" : " q", i - 1);
    if (which) add(text, size, "%s\n", EPS[below(4)]);
}

static void random_text(char *text, size_t size) {
    const int nkeys = 1 + below(4), nvalues = 1 + below(2), number = below(2), rows = 1 + below(4);
    const int before = below(3) == 0, turns = below(2);
    const product_law law = {nkeys, nvalues, number, below(3) == 0, below(2)};
    *text = 0;
    add(text, size, "recurrence any\nquery q\ngate g per %s\nkeys", below(2) ? "head" : "channel");
    for (int i = 0; i < nkeys; i++)
        add(text, size, " k%d", i);
    add(text, size, "\nvalues");
    for (int i = 0; i < nvalues; i++)
        add(text, size, " v%d", i);
    add(text, size, "\n%s%s", number ? "number n0\n" : "",
        law.rotated ? (nvalues > 1 ? "angle phi turns k0 halves\n" : "angle phi turns k0\n") : "");
    add_norms(text, size, nkeys);
    add(text, size, "%s%s", before ? "reads undecayed\n" : "", turns ? "rows in turn\n" : "");
    for (int j = 0; j < rows; j++) {
        const int what = law.rotated && nkeys == 1 ? 1 : below(3); /* a read, a value, both */
        add(text, size, "row");
        add_product(text, size, "write", 1, &law);
        if (what != 1) add_product(text, size, "read", 1, &law);
        if (what) add_product(text, size, "value", 0, &law);
        if (number && below(2)) {
            add(text, size, " strength=%s", below(2) ? "-" : "");
            add_input(text, size, &law, "n", 0);
        }
        add(text, size, "\n");
    }
}

/* ---- the oracle ------------------------------------------------------------------------------ */

static int64_t first_of(const dp_problem *p, int64_t t) {
    int64_t first = 0;
    for (int i = 0; i < p->Nseq; i++)
        if (p->cu[i] <= t) first = p->cu[i];
    return first;
}

/* A query or a key at channel x, over its norm where it has one. */
static c128 vector_at(const dp_problem *p, const bump *b, int of, int64_t row, int x) {
    const dp_recurrence *a = dp_recurrence_of(p);
    const double *at = dp_input_of(p, of) + row * p->K;
    const f128 eps = a->eps > 0 ? (f128)a->eps : (f128)1e-6;
    c128 squares = 0, sizes = 0;
    if (!p->l2norm || !(a->normed >> of & 1)) return in(b, &at[x]);
    for (int k = 0; k < p->K; k++) {
        const c128 square = in(b, &at[k]) * in(b, &at[k]);
        squares += square;
        sizes += csqrtq(square);
    }
    return in(b, &at[x]) / (a->norm == DP_NORM_L1    ? sizes + eps
                            : a->norm == DP_NORM_RMS ? csqrtq(squares / p->K + eps)
                                                     : csqrtq(squares + eps));
}

/* The same, turned by the sum of the angles so far. */
static c128 turned_at(const dp_problem *p, const bump *b, int of, int64_t row, int x) {
    const int64_t P = p->K / 2, t = row / p->HV;
    const c128 y = vector_at(p, b, of, row, x);
    c128 phi = 0;
    if (!p->angle || x >= 2 * P) return y;
    const int halves = dp_recurrence_of(p)->rotation == DP_ROTATE_HALVES,
              second = halves ? x >= P : x & 1, pair = (int)(halves ? x % P : x / 2);
    for (int64_t s = first_of(p, t); s <= t; s++)
        phi += in(b, &p->angle[(s * p->HV + row % p->HV) * P + pair]);
    const c128 other = vector_at(p, b, of, row, (int)(halves ? (x + P) % (2 * P) : x ^ 1));
    return y * ccosq(phi) + (second ? other : -other) * csinq(phi);
}

static c128 factor_of(const dp_problem *p, const bump *b, int factor, int64_t row, int x) {
    const int of = factor & ~DP_PREVIOUS;
    if (of == DP_FACTOR_DECAY) return cexpq(c_gate(p, b, row, x));
    if (of == DP_FACTOR_GROWTH) return cexpq(-c_gate(p, b, row, x));
    if (of != factor && row / p->HV == first_of(p, row / p->HV)) return 0;
    if (of != factor) row -= p->HV;
    if (of == DP_INPUT_BETA) return in(b, &p->beta[row]);
    if (of == DP_INPUT_V || of == DP_INPUT_WRITE) return in(b, &dp_input_of(p, of)[row * p->V + x]);
    return (dp_recurrence_of(p)->rotated >> of & 1 ? turned_at : vector_at)(p, b, of, row, x);
}

static c128 entry_of(const dp_problem *p, const bump *b, dp_entry e, int64_t row, int x) {
    c128 y = (f128)e.sign;
    for (int m = 0; m < e.n; m++)
        y *= factor_of(p, b, e.of[m], row, x);
    return y;
}

/* U of row j of the state S */
static void strength_of(const dp_problem *p, const bump *b, int64_t row, int j, const c128 *S,
                        c128 *U) {
    const dp_token_row *a = dp_row_of(p, j);
    for (int v = 0; v < p->V; v++) {
        U[v] = a->value.sign ? entry_of(p, b, a->value, row, v) : 0;
        for (int k = 0; k < p->K && a->read.sign; k++)
            U[v] -= entry_of(p, b, a->read, row, k) * S[k * p->V + v];
        U[v] *= entry_of(p, b, a->strength, row, 0);
    }
}

static void token_of(const dp_problem *p, const bump *b, int64_t row, c128 *S, c128 *o) {
    const int K = p->K, V = p->V, n = dp_rows(p);
    c128 before[K * V], U[n][V];
    memcpy(before, S, sizeof before);
    for (int i = 0; i < K * V; i++)
        S[i] *= cexpq(c_gate(p, b, row, i / V));
    for (int j = 0; j < n && !dp_in_turn(p); j++)
        strength_of(p, b, row, j, dp_recurrence_of(p)->before ? before : S, U[j]);
    for (int j = 0; j < n; j++) {
        if (dp_in_turn(p))
            strength_of(p, b, row, j, dp_recurrence_of(p)->before && !j ? before : S, U[j]);
        for (int i = 0; i < K * V; i++)
            S[i] += entry_of(p, b, dp_row_of(p, j)->write, row, i / V) * U[j][i % V];
    }
    for (int i = 0; i < K * V && dp_reads_along(p); i++) /* the query lies in dout */
        o[i / V] =
            (i % V ? o[i / V] : 0) + (f128)p->scale * in(b, &p->dout[row * V + i % V]) * S[i];
    for (int v = 0; v < V && !dp_reads_along(p); v++) {
        o[v] = 0;
        for (int k = 0; k < K; k++)
            o[v] += (f128)p->scale * turned_at(p, b, DP_INPUT_Q, row, k) * S[k * V + v];
    }
}

/* o and final_state (either may be NULL) and the loss. */
static c128 run(const dp_problem *p, const bump *b, c128 *o_out, c128 *S_out) {
    const int KV = p->K * p->V, n = dp_reads_along(p) ? p->K : p->V;
    const double *dout = dp_reads_along(p) ? p->q : p->dout;
    c128 S[KV], o[n], loss = 0;
    for (int64_t r = 0; r < (int64_t)p->Nseq * p->HV; r++) {
        for (int i = 0; i < KV; i++)
            S[i] = in(b, &p->s0[r * KV + i]);
        for (int64_t t = p->cu[r / p->HV]; t < p->cu[r / p->HV + 1]; t++) {
            const int64_t row = t * p->HV + r % p->HV;
            token_of(p, b, row, S, o);
            for (int i = 0; i < n; i++) {
                loss += (f128)dout[row * n + i] * o[i];
                if (o_out) o_out[row * n + i] = o[i];
            }
        }
        for (int i = 0; i < KV; i++) {
            loss += (f128)p->dstate[r * KV + i] * S[i];
            if (S_out) S_out[r * KV + i] = S[i];
        }
    }
    return loss;
}

/* Largest error of a row over its radius, and what of the radius is above 1e-10 of the field. */
static double over_radius(const dp_problem *p, int field, const dp_ball *y) {
    const int64_t n = y->rows * y->width;
    const int is_o = field == (dp_reads_along(p) ? DP_RESULT_DQ : DP_RESULT_O),
              is_S = field == DP_RESULT_FINAL_STATE;
    const double *x = field == DP_RESULT_O ? p->dout : dp_input_of(p, dp_result_fields[field].of);
    c128 *z = dp_calloc((size_t)n, sizeof *z);
    f128 worst = 0, size = 0;
    const bump none = {NULL, 0};
    if (is_o || is_S)
        run(p, &none, is_o ? z : NULL, is_S ? z : NULL);
    else
        for (int64_t i = 0; i < n; i++) {
            const bump b = {x + i, 1e-40Q};
            z[i] = cimagq(run(p, &b, NULL, NULL)) / b.h;
        }
    for (int64_t i = 0; i < n; i++)
        size += crealq(z[i]) * crealq(z[i]);
    for (int64_t r = 0; r < y->rows; r++) {
        f128 d2 = 0;
        for (int64_t i = r * y->width; i < (r + 1) * y->width; i++) {
            const f128 d = (f128)y->hi[i] + y->lo[i] - crealq(z[i]);
            d2 += d * d;
        }
        const f128 over = sqrtq(d2) / (y->rad[r] + 1e-28Q * sqrtq(size) + 1e-300Q);
        if (!(over <= worst)) worst = over;
    }
    free(z);
    return (double)worst;
}

static dp_user_recurrence random_rows(int seed, char text[1000]) {
    dp_user_recurrence y;
    dp_err e;
    state = 0x5eed + (uint64_t)seed * 7919;
    do { /* an input that no row uses is refused */
        random_text(text, 1000);
        e = (dp_err){0};
    } while (dp_user_recurrence_parse(text, "random", &y, &e));
    return y;
}

/* p: of the installed rows, shapes and forms set. */
static void problem_agrees(dp_problem *p, int seed, const char *text) {
    static const int64_t CU[] = {0, 2, 2, 4};
    fill_problem(p, 3, CU);
    dp_truth t = truth_at(p, 64), fine = truth_at(p, 192);
    for (int f = 0; f < DP_NRESULTS; f++) {
        if (!t.field[f].rows) continue;
        const double over = over_radius(p, f, &t.field[f]);
        CHECK(over <= 1, "seed %d: %s: error %g of the radius\n%s", seed, dp_result_fields[f].name,
              over, text);
        for (int64_t r = 0; r < t.field[f].rows; r++)
            CHECK(t.field[f].rad[r] < 1e-9 && fine.field[f].rad[r] < 1e-25,
                  "seed %d: %s: radius %g at 64 bits, %g at 192\n%s", seed,
                  dp_result_fields[f].name, t.field[f].rad[r], fine.field[f].rad[r], text);
    }
    dp_truth_free(&t);
    dp_truth_free(&fine);
    dp_problem_free(p);
    dp_user_recurrence_install(NULL);
}

static void agree_inside_their_radius(int seed, int along) {
    char text[1000];
    dp_user_recurrence y = random_rows(seed, text);
    y.rows.along = along;
    if (along && (y.rows.rotated || y.rows.normed >> DP_INPUT_Q & 1)) return;
    dp_user_recurrence_install(&y);
    dp_problem p = {.model = DP_USER,
                    .H = 1 + seed % 2,
                    .HV = 1 + seed % 2,
                    .K = 1 + below(4),
                    .V = 1 + below(3),
                    .R = 1,
                    .scale = 0.7,
                    .gate = (dp_gate)(seed % 3),
                    .lower_bound = -1,
                    .l2norm = y.rows.normed != 0};
    if (y.rows.rotated) p.K += p.K == 1;
    if (seed % 16 == 1) p.V = 17; /* two blocks of columns */
    problem_agrees(&p, seed, text);
}

/* Three pairs, and a channel without: partners and signs are those of no other rotation. */
DP_TEST(recurrence, each_rotation_of_seven_channels_agrees_with_complex_steps) {
    static const char *const WORD[DP_NROTATIONS] = {
        [DP_ROTATE_PAIRS] = "", [DP_ROTATE_HALVES] = "halves"};
    for (int i = 0; i < DP_NROTATIONS; i++) {
        char text[400] = "";
        add(text, sizeof text,
            "recurrence a\n" NAMES "head\nkeys k b\nvalues v\nangle w turns k %s\nnorm l1 q k\n"
            "row write=k*exp(g) read=b\nrow write=prev(k) value=v\n",
            WORD[i]);
        install(text);
        state = 7;
        dp_problem p = {.model = DP_USER, .H = 1, .HV = 1, .K = 7, .V = 2, .R = 1, .scale = 0.7};
        p.l2norm = 1;
        problem_agrees(&p, i, text);
    }
}

DP_TEST(recurrence, random_rows_agree_with_complex_steps_inside_their_radius) {
    const char *many = getenv("DP_RECURRENCES");
    for (int i = 0; i < (many ? atoi(many) : 8); i++)
        agree_inside_their_radius(i, 0);
}

/* ---- double-double --------------------------------------------------------------------------- */

/* Rows of double-double inside both radii, and near enough that no low word is lost. */
static void near_enough(const char *name, const dp_ball *a, const dp_ball *b, int seed,
                        int cancel) {
    f128 all = 0, size = 0;
    for (int64_t r = 0; r < a->rows; r++) {
        f128 d2 = 0;
        for (int64_t i = r * a->width; i < (r + 1) * a->width; i++) {
            const f128 d = ((f128)a->hi[i] - b->hi[i]) + ((f128)a->lo[i] - b->lo[i]);
            d2 += d * d;
            size += (f128)b->hi[i] * b->hi[i];
        }
        all += d2;
        CHECK(sqrtq(d2) <= 0.05 * ((f128)a->rad[r] + b->rad[r]), "seed %d: %s row %lld: %g of %g",
              seed, name, (long long)r, (double)sqrtq(d2), a->rad[r] + b->rad[r]);
    }
    CHECK(cancel || all <= 1e-56Q * size, "seed %d: %s: off by %g of it", seed, name,
          (double)sqrtq(all / size));
}

/* Rows that look back across blocks of tokens and sequences. Plain vectors make the same bits. */
static void both_arithmetics(int seed) {
    static const int64_t CU[] = {0, 70, 70, 200}, CUT[] = {30, 64, 150};
    static const char *const MORE[] = {"S_cut", "dS_cut", "M"};
    char text[1000];
    const dp_user_recurrence y = random_rows(seed, text);
    dp_user_recurrence_install(&y);
    dp_problem p = {.model = DP_USER, .H = 2, .HV = 2, .K = 5, .V = 9, .R = 1, .scale = 0.7};
    p.l2norm = y.rows.normed != 0;
    p.lag = 1 + seed % 2;
    fill_problem(&p, 3, CU);
    fill(p.g, dp_input_count(&p, DP_INPUT_G), -0.9, -0.4);
    if (seed % 3 == 0) some_zeros(&p);
    dp_truth t[3];
    for (int i = 0; i < 3; i++) {
        const dp_truth_request rq = {.kind = i ? DP_TRUTH_DD : DP_TRUTH_MPFR,
                                     .bits = 192,
                                     .backward = 1,
                                     .ncut = 3,
                                     .cut = CUT,
                                     .want_M = 1};
        tr_dd_only = i == 2 ? "plain" : NULL;
        REQUIRE(!dp_truth_run(&p, &rq, &t[i], NULL), "seed %d", seed);
    }
    tr_dd_only = NULL;
    for (int f = 0; f < DP_NRESULTS + 3; f++) {
        const dp_ball *of[3];
        for (int i = 0; i < 3; i++)
            of[i] = f < DP_NRESULTS        ? &t[i].field[f]
                    : f == DP_NRESULTS     ? &t[i].S_cut
                    : f == DP_NRESULTS + 1 ? &t[i].dS_cut
                                           : &t[i].M_seg;
        const size_t n = sizeof(double) * (size_t)(of[1]->rows * of[1]->width);
        near_enough(f < DP_NRESULTS ? dp_result_fields[f].name : MORE[f - DP_NRESULTS], of[1],
                    of[0], seed, dp_rows_cancel(&y.rows));
        CHECK(!n || (!memcmp(of[1]->hi, of[2]->hi, n) && !memcmp(of[1]->lo, of[2]->lo, n)),
              "seed %d: other bits on plain vectors", seed);
    }
    for (int i = 0; i < 3; i++)
        dp_truth_free(&t[i]);
    dp_problem_free(&p);
    dp_user_recurrence_install(NULL);
}

DP_TEST(recurrence, double_double_is_inside_its_radius_of_mpfr) {
    const char *many = getenv("DP_RECURRENCES");
    for (int i = 0; i < (many ? atoi(many) : 24); i++)
        both_arithmetics(i);
}

DP_TEST(recurrence, rows_read_along_the_values_agree_with_complex_steps) {
    const char *many = getenv("DP_RECURRENCES");
    for (int i = 0; i < (many ? atoi(many) : 16); i++)
        agree_inside_their_radius(i, 1);
}

/* ---- ranks ----------------------------------------------------------------------------------- */

/* The distance of two results, over the norm of b. */
static double distance(const dp_problem *p, int field, const double *a, const double *b) {
    int64_t rows, width;
    double off = 0, all = 0;
    dp_result_shape(p, field, &rows, &width);
    for (int64_t i = 0; i < rows * width; i++) {
        off += (a[i] - b[i]) * (a[i] - b[i]);
        all += b[i] * b[i];
    }
    return off > 0 || isnan(off) ? sqrt(off / all) : 0;
}

/* The rows of a seed on ranks: inputs of the token before, and sums of angles, cross to the next
 * one, their gradients come back. */
static void same_on_ranks(int seed, int N, dp_own own, int *halos) {
    static const int64_t CU[] = {0,  9,  9,
                                 12, 31, 36}; /* begin at a rank's first token, and inside */
    char text[1000];
    const dp_user_recurrence y = random_rows(seed, text);
    dp_user_recurrence_install(&y);
    dp_problem p = {.model = DP_USER, .H = 2, .HV = 2, .K = 4, .V = 3, .R = 1, .scale = 0.7};
    dp_sim one, all;
    dp_err e = {0};
    p.l2norm = y.rows.normed != 0;
    fill_problem(&p, 5, CU);
    if (seed % 3 == 0) some_zeros(&p);
    *halos += dp_has_halo(&p);
    REQUIRE(!dp_sim_new(&one, &p, DP_BASE_FP64, 1, DP_FAULT_NONE, &e), "%s", e.msg);
    if (own) p.own = (dp_owners){own, N};
    const int parts = own ? dp_own_parts(own, p.T, N) : N;
    REQUIRE(!dp_sim_new(&all, &p, DP_BASE_FP64, parts, DP_FAULT_NONE, &e), "%s", e.msg);
    dp_sim_run(&one, DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
    dp_sim_run(&all, DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
    dp_truth t = truth_at(&p, 64);
    for (int f = 0; f < DP_NRESULTS; f++) {
        const double *a = all.out.out[f], *b = one.out.out[f];
        const double off = b ? distance(&p, f, a, b) : 0,
                     wrong = b ? distance(&p, f, b, t.field[f].hi) : 0;
        CHECK((off < 1e-11 && wrong < 1e-9) || dp_rows_cancel(&y.rows),
              "seed %d, %d ranks, %s: %s is off by %g, of the truth by %g\n%s", seed, N,
              dp_own_names[own], dp_result_fields[f].name, off, wrong, text);
    }
    dp_truth_free(&t);
    dp_sim_free(&one);
    dp_sim_free(&all);
    dp_problem_free(&p);
    dp_user_recurrence_install(NULL);
}

DP_TEST(recurrence, ranks_hand_on_what_random_rows_look_back_to) {
    int halos = 0;
    for (int i = 0; i < 40; i++)
        same_on_ranks(i, 2 + i % 3, (dp_own)(i % DP_OWN_CYCLIC), &halos);
    CHECK(halos >= 16, "%d of 40 look back or rotate", halos);
}

/* Under L1 a gradient has the sign of its entry, however small that is. */
DP_TEST(recurrence, signs_of_subnormal_entries_stay_under_norms_by_sizes) {
    static const int64_t CU[] = {0, 9};
    dp_problem p = {.model = DP_USER, .H = 1, .HV = 1, .K = 4, .V = 3, .R = 1, .scale = 0.7};
    dp_sim of[2];
    dp_err e = {0};
    install("recurrence a\n" NAMES "head\nkeys k b\nvalues v\nnorm l1 q k b\n"
            "row write=k read=b value=v\n");
    p.l2norm = 1;
    state = 3;
    fill_problem(&p, 1, CU);
    for (int i = 0; i < 9 * p.K; i++) { /* norms above 2: a small entry over them is 0 in fp32 */
        p.q[i] += p.q[i] < 0 ? -4 : 4;
        p.k[i] += p.k[i] < 0 ? -4 : 4;
        p.erase[i] += p.erase[i] < 0 ? -4 : 4;
    }
    for (int i = 0; i < 9; i++)
        p.q[i * p.K + i % p.K] = p.k[i * p.K + i % 3] = p.erase[i * p.K] =
            i % 2 ? 0x1p-149 : -0x1p-149;
    for (int i = 0; i < 2; i++) {
        REQUIRE(!dp_sim_new(&of[i], &p, i ? DP_BASE_FP64 : DP_BASE_FP32, 1, DP_FAULT_NONE, &e),
                "%s", e.msg);
        dp_sim_run(&of[i], DP_FP32, DP_EXCHANGE_ALLGATHER, 1);
    }
    for (int f = 0; f < DP_NRESULTS; f++) {
        const double *a = of[0].out.out[f], *b = of[1].out.out[f];
        CHECK(!b || distance(&p, f, a, b) < 1e-5, "%s is off by %g", dp_result_fields[f].name,
              distance(&p, f, a, b));
    }
    dp_sim_free(&of[0]);
    dp_sim_free(&of[1]);
    dp_problem_free(&p);
    dp_user_recurrence_install(NULL);
}

/* ---- what is wrong in a text ----------------------------------------------------------------- */

#define HEAD "recurrence a\nquery q\ngate g per head\nkeys k b\nvalues v\n"
#define ALONG "recurrence a\nquery q along values\ngate g per head\nkeys k\nvalues v\n"
DP_TEST(recurrence, errors_name_line_and_word) {
    static const struct {
        const char *text, *says;
    } WRONG[] = {
        {"recurrences a\n", "mine:1: 'recurrences' is no statement: recurrence query gate keys"},
        {"recurrence a\nrecurrence b\n", "mine:2: 'recurrence' stands in line 1 already"},
        {"recurrence 3d\n", "mine:1: 'recurrence' must have one name"},
        {HEAD "row write=k read=c\n", "mine:6: 'read=c' has 'c', which is no factor; known: k v "
                                      "exp(g) exp(-g) b"},
        {HEAD "row write=k read=v\n", "mine:6: 'read=v' has 'v', which is not of keys, number and"},
        {HEAD "row write=k value=k\n", "mine:6: 'value=k' has 'k', which is not of values"},
        {HEAD "row write=exp(g) value=v\n", "mine:6: 'write=exp(g)' has no key"},
        {HEAD "row write=k*k*b*k value=v\n", "mine:6: 'write=k*k*b*k' has more than 3 factors"},
        {HEAD "row write= k value=v\n", "mine:6: 'write=' has '', which is no factor"},
        {HEAD "row write=k value=v strength=b\n", "mine:6: 'strength=b' has 'b', which is not of"},
        {HEAD "row read=k\n", "mine:6: 'row' has no write="},
        {HEAD "row write=k strength=1\n", "mine:6: 'row' has no read= and no value="},
        {HEAD "row write=k value=v\n", "mine: input 'b' stands in no row"},
        {HEAD, "mine: has no line 'row ..'"},
        {"recurrence a\nquery q\ngate g\n", "mine:3: '' must be per channel or per head"},
        {"recurrence a\nquery q\nkeys a a\n", "mine:3: 'a' is there already"},
        {"recurrence a\nquery do\n", "mine:2: 'do' is the name of something else in files"},
        {"recurrence a\nquery previous_q\n", "mine:2: 'previous_q' is the name of something"},
        {"recurrence a\nkeys a b c d e\n", "mine:2: 'keys' names 5 inputs, must be 1 to 4"},
        {HEAD "norm c\n", "mine:6: 'c' is none of query and keys, which a line before must name"},
        {HEAD "norm k eps 0\n", "mine:6: '0' is no eps: a number from 1e-30 to 1"},
        {"recurrence a\nquery q along rows\n",
         "mine:2: 'along rows' must be along keys or along values"},
        {ALONG "norm q\nrow write=k value=v\n",
         "mine: 'q' reads along values, so it may not have a norm"},
        {ALONG "angle w turns k\nrow write=k value=v\n",
         "mine: 'q' reads along values, so it may not turn by an angle"},
        {HEAD "norm l3 k\n", "mine:6: 'l3' is none of query and keys, which a line before must"},
        {HEAD "norm l1\n", "mine:6: 'l1' is none of query and keys"},
        {HEAD "norm l1 eps 0.1\n", "mine:6: 'l1' is of no NAME"},
        {HEAD "norm l1 k\nnorm rms b\n", "mine:7: 'norm' stands in line 6 already"},
        {HEAD "norm k q k\n", "mine:6: 'k' stands twice in this line"},
        {HEAD "norm l1 rms k\n", "mine:6: 'rms' is none of query and keys"},
        {HEAD "angle w turns k b k halves\n", "mine:6: 'k' stands twice in this line"},
        {HEAD "angle w turns k halves halves\n", "mine:6: 'halves' is none of keys"},
        {HEAD "angle w turns halves\n", "mine:6: 'halves' is none of keys"},
        {HEAD "norm\n", "mine:6: 'norm' must be 'norm NAME ..' or 'norm NAME .. eps X'"},
    };
    for (size_t i = 0; i < sizeof WRONG / sizeof *WRONG; i++) {
        dp_user_recurrence y;
        dp_err e = {0};
        CHECK(dp_user_recurrence_parse(WRONG[i].text, "mine", &y, &e) == DP_EINPUT &&
                  strstr(e.msg, WRONG[i].says),
              "%s\nsays: %s\nnot: %s", WRONG[i].text, e.msg, WRONG[i].says);
    }
}
