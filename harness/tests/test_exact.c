/* Exact cases (ref/inputs/inputs_exact.c): every tensor of every run equals the truth bit for bit,
 * and faults of indexing or order cannot hide. */
#include "cases.h"
#include "harness/case/case.h"
#include "harness/record/run.h"
#include "harness/simulated/ranks.h"
#include "ref/truth/truth.h"
#include "sanitized.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const CASES[] = {"exact-kda", "exact-gdn", "exact-mkda2", "exact-gdn2",
                                    "exact-packed"};
enum { NCASES = 5, MOST_RANKS = 8 };

typedef struct {
    dp_case c;
    dp_truth t;
    dp_truth_rank *at[MOST_RANKS + 1]; /* by number of ranks: of rank r, head h at r HV + h */
} exact_case;

static int open_case(const char *name, exact_case *x) {
    dp_err e = {0};
    int ncut;
    *x = (exact_case){0};
    if (!gt_open_case(name, &x->c)) return 0;
    int64_t *cut = dp_case_cuts(&x->c, &ncut);
    const dp_truth_request rq = {
        .bits = x->c.bits, .backward = 1, .ncut = ncut, .cut = cut, .want_M = 1};
    const dp_status st = dp_truth_cached(&x->c.p, &rq, gt_cache(), &x->t, NULL, &e);
    free(cut);
    if (st) {
        gt_fail(__FILE__, __LINE__, name, "%s", e.msg);
        dp_case_free(&x->c);
    }
    return !st;
}

static void close_case(exact_case *x) {
    for (int N = 1; N <= MOST_RANKS; N++) {
        for (int i = 0; x->at[N] && i < N * x->c.p.HV; i++)
            dp_truth_rank_free(&x->at[N][i]);
        free(x->at[N]);
    }
    dp_truth_free(&x->t);
    dp_case_free(&x->c);
}

/* The truth of each rank, made once, with contexts that no fault of the subject changes. */
static const dp_truth_rank *at_ranks(exact_case *x, int N) {
    const dp_problem *p = &x->c.p;
    if (x->at[N]) return x->at[N];
    x->at[N] = dp_calloc((size_t)(N * p->HV), sizeof *x->at[N]);
    for (int r = 0; r < N; r++) {
        dp_context ctx;
        if (dp_context_build(p->cu, p->Nseq, N, r, &ctx, NULL)) abort();
        for (int h = 0; h < p->HV; h++)
            dp_truth_at_rank(&x->t, p, &ctx, h, &x->at[N][r * p->HV + h]);
        dp_context_free(&ctx);
    }
    return x->at[N];
}

typedef struct {
    int tensors, wrong;
    char first[160];
} outcome;

/* Equal as numbers; NaN equals nothing. */
static void compare(const char *name, int rank, int head, const double *got, const double *want,
                    int64_t n, outcome *o) {
    o->tensors++;
    for (int64_t i = 0; i < n; i++)
        if (!(got && got[i] == want[i])) {
            if (!o->wrong++)
                snprintf(o->first, sizeof o->first,
                         "%s rank %d head %d entry %lld: got %a, want %a", name, rank, head,
                         (long long)i, got ? got[i] : NAN, want[i]);
            return;
        }
}

static outcome check(exact_case *x, dp_sim *s) {
    const dp_problem *p = &x->c.p;
    const dp_truth_rank *at = at_ranks(x, s->N);
    const int pairs = dp_exchanges[s->merge].pairs, states = dp_exchanges[s->merge].states;
    outcome o = {0};
    for (int i = 0; i < s->N * p->HV; i++) {
        const int r = i / p->HV, h = i % p->HV;
        const dp_truth_rank *w = &at[i];
        for (int z = 0; z < DP_RANK_TENSORS; z++)
            if (w->of[z].there && (dp_rank_is_state(z) ? states : pairs))
                compare(dp_rank_name(z), r, h, s->rank[z][i], w->of[z].x, dp_rank_width(p, z), &o);
    }
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_ball *b = &x->t.field[i];
        if (b->rows)
            compare(dp_result_fields[i].name, -1, -1, s->out.out[i], b->hi, b->rows * b->width, &o);
    }
    return o;
}

DP_TEST(exact, every_run_has_error_zero_in_every_tensor) {
    for (int k = GT_SANITIZED; k < NCASES; k += GT_SANITIZED ? 2 : 1) {
        exact_case x;
        int runs = 0, tensors = 0;
        const int threads = omp_get_max_threads();
        if (!open_case(CASES[k], &x)) return;
        omp_set_num_threads(1); /* hundreds of loops of microseconds each */
        CHECK(x.c.nranks == 5 && x.c.nbase == DP_NBASES && x.c.nchain == DP_NFORMATS &&
                  x.c.nmerge == DP_EXCHANGE_HEADS, /* which rounds nothing of its own */
              "%s does not run everything", CASES[k]);
        for (int n = 0; n < x.c.nranks; n++)
            for (int b = 0; b < DP_NBASES; b++) {
                dp_sim s;
                dp_err e = {0};
                REQUIRE(!dp_sim_new(&s, &x.c.p, (dp_base)b, x.c.ranks[n], DP_FAULT_NONE, &e), "%s",
                        e.msg);
                /* Under sanitizers one of them with each number of ranks and each base. */
                const int all = DP_NFORMATS * DP_NRUN_EXCHANGES;
                for (int f = GT_SANITIZED * (3 * n + b) % all; f < all;
                     f += GT_SANITIZED ? all : 1) {
                    dp_sim_run(&s, (dp_format)(f / DP_NRUN_EXCHANGES),
                               (dp_exchange)(f % DP_NRUN_EXCHANGES), 1);
                    const outcome o = check(&x, &s);
                    CHECK(!o.wrong,
                          "%s, %d ranks, base %s, chain %s, %s: %d of %d tensors wrong: %s",
                          CASES[k], s.N, dp_base_names[b], dp_formats[f / DP_NRUN_EXCHANGES].name,
                          dp_exchange_names[f % DP_NRUN_EXCHANGES], o.wrong, o.tensors, o.first);
                    runs++;
                    tensors += o.tensors;
                }
                dp_sim_free(&s);
            }
        printf("%s: %d runs, %d tensors, every entry equal to the truth\n", CASES[k], runs,
               tensors);
        omp_set_num_threads(threads);
        close_case(&x);
    }
}

static int significant(double x) {
    int n = 0;
    for (x = fabs(frexp(x, &(int){0})); x > 0; x = 2 * x - floor(2 * x))
        n++;
    return n;
}

/* Not trivially so: gradients, states and M are neither zero nor one value, resets and half writes
 * occur, and 8 bits are needed. */
DP_TEST(exact, the_inputs_are_not_trivial) {
    for (int k = 0; k < NCASES; k++) {
        exact_case x;
        int half = 0, none = 0, reset = 0, widest = 0;
        if (!open_case(CASES[k], &x)) return;
        const dp_problem *p = &x.c.p;
        for (int64_t i = 0; i < p->T * p->HV * p->R; i++) {
            const double strength = p->beta ? p->beta[i] : p->write[i * p->V];
            half += strength == 0.5;
            none += strength == 0;
        }
        for (int64_t i = 0; i < p->T * p->HV * dp_Kg(p); i++)
            reset += p->g[i] != 0;
        CHECK(half > 50 && none > 50 && reset > 10, "%s: %d halves, %d skipped writes, %d resets",
              CASES[k], half, none, reset);
        for (int i = 0; i < DP_NRESULTS; i++) {
            const dp_ball *b = &x.t.field[i];
            int64_t nonzero = 0;
            int bits = 0;
            for (int64_t z = 0; z < b->rows * b->width; z++) {
                nonzero += b->hi[z] != 0;
                if (significant(b->hi[z]) > bits) bits = significant(b->hi[z]);
            }
            CHECK(bits <= 8, "%s: %s needs %d significant bits, bf16 has 8", CASES[k],
                  dp_result_fields[i].name, bits);
            if (bits > widest) widest = bits;
            if (b->rows)
                CHECK(nonzero * 400 > b->rows * b->width,
                      "%s: %s: %lld of %lld entries are not zero", CASES[k],
                      dp_result_fields[i].name, (long long)nonzero,
                      (long long)(b->rows * b->width));
        }
        CHECK(widest >= 5, "%s: widest result has %d significant bits", CASES[k], widest);
        printf("%s: %d half writes, %d skipped, %d resets, widest result %d bits\n", CASES[k], half,
               none, reset, widest);
        close_case(&x);
    }
}

/* Halves are replaced before they are halved again: what keeps numbers narrow at any length. Seen
 * on the one-hot channels (blocks of even number). */
DP_TEST(exact, no_row_is_halved_twice) {
    for (int k = 0; k < NCASES; k++) {
        exact_case x;
        if (!open_case(CASES[k], &x)) return;
        const dp_problem *p = &x.c.p;
        const int Kg = dp_Kg(p);
        for (int hv = 0; hv < p->HV; hv++)
            for (int ch = 0; ch < p->K; ch++) {
                if (ch / 4 % 2) continue;
                for (int64_t t = 0, seq = 0, halved = 0; t < p->T; t++) {
                    while (seq < p->Nseq && p->cu[seq] <= t) {
                        seq++;
                        halved = 0;
                    }
                    if (p->g[(t * p->HV + hv) * Kg + (Kg == 1 ? 0 : ch)] != 0) halved = 0;
                    for (int j = 0; j < p->R; j++) {
                        const int64_t row = (t * p->HV + hv) * p->R + j;
                        const double b = p->beta ? p->beta[row] : p->erase[row * p->K + ch];
                        if (p->k[((t * p->H + hv / dp_G(p)) * p->R + j) * p->K + ch] == 0 || b == 0)
                            continue;
                        CHECK(!(b < 1 && halved),
                              "%s: head %d, channel %d is halved again at token %lld", CASES[k], hv,
                              ch, (long long)t);
                        halved = b < 1;
                    }
                }
            }
        close_case(&x);
    }
}

/* The exponent of v says whose it is. */
DP_TEST(exact, heads_and_sequences_have_exponents_of_their_own) {
    exact_case x;
    if (!open_case("exact-packed", &x)) return;
    const dp_problem *p = &x.c.p;
    for (int i = 0; i < p->Nseq; i++)
        for (int hv = 0; hv < p->HV; hv++) {
            for (int64_t t = p->cu[i]; t < p->cu[i + 1]; t++) {
                const double a =
                    fabs(p->v[(t * p->HV + hv) * p->V]) / ldexp(1, dp_inputs_exact_log2(p, i, hv));
                CHECK(a == 1 + (t & 1), "sequence %d, head %d, token %lld: %g", i, hv, (long long)t,
                      a);
            }
            for (int o = 0; o < hv; o++)
                CHECK(dp_inputs_exact_log2(p, i, hv) != dp_inputs_exact_log2(p, i, o),
                      "sequence %d: heads %d and %d", i, hv, o);
            if (i)
                CHECK(dp_inputs_exact_log2(p, i, hv) != dp_inputs_exact_log2(p, i - 1, hv),
                      "head %d: sequences %d and %d", hv, i - 1, i);
        }
    close_case(&x);
}

/* Faults that exact inputs cannot show, and why. */
static const struct {
    dp_fault fault;
    const char *why;
} BLIND[] = {
    {DP_FAULT_CHAIN_BF16, "changes the format of the chain, and every format is exact here"},
    {DP_FAULT_CHAIN_TF32RZ, "changes the format of the chain, and every format is exact here"},
    {DP_FAULT_EXP2_GATE, "e and 2 to the power 0 are both 1, to a reset both 0"},
    {DP_FAULT_GATE_GRAD_PARTIAL, "a log gate has no A_log and no dt_bias"},
    {DP_FAULT_MERGE_TF32RZ, "changes the format of the merge, and every format is exact here"},
    {DP_FAULT_NEUMANN_INVERSE,
     "keys are one orthonormal basis: large powers are exact zeros or ones"},
    {DP_FAULT_DOUBLING_INVERSE,
     "keys are one orthonormal basis: large powers are exact zeros or ones"},
    {DP_FAULT_BEFORE_FIRST, "no row looks back"},
    {DP_FAULT_BEFORE_PACKED, "no row looks back"},
    {DP_FAULT_BEFORE_GRAD_LOST, "no row looks back"},
    {DP_FAULT_STALE_ACCUMULATOR, "needs a problem without any gate"},
    {DP_FAULT_DIAGONAL_TF32, "tf32 is exact here"},
    {DP_FAULT_L2_ROUNDED, "there is no L2 norm"},
    {DP_FAULT_DECAY_BF16, "decays are 0 and 1"},
    {DP_FAULT_STATE_BF16, "bf16 is exact here"},
    {DP_FAULT_DROP_CHANNEL_SUM, "gates are 0 or wipe all that is dropped"},
    {DP_FAULT_DROP_HORIZON, "gates are 0 or wipe all that is dropped"},
    {DP_FAULT_RACE, "every third run only"},
    {DP_FAULT_ORDER_BY_RUN, "sums are exact in any order"},
    {DP_FAULT_KEYS_NORMED, "keys are of norm 1"},
    {DP_FAULT_GATE_BF16, "gates are exact in bf16"},
    {DP_FAULT_BETA_BF16, "beta has no sigmoid"},
    {DP_FAULT_RESIDUAL_BF16, "what a key reads is exact in bf16; exact-residual has what is not"},
    {DP_FAULT_SATURATED_NAN, "a log gate is never saturated"},
    {DP_FAULT_TURNS_MISTAKEN, "keys of a token are orthogonal: none sees another"},
    {DP_FAULT_SCAN_MISSES_LEVEL, "what has passed more than one whole rank is reset by then"},
    {DP_FAULT_PAYLOAD_TRUNCATED, "upper halves of fp32 are exact here"},
    {DP_FAULT_PAYLOAD_LOW_LOST, "one bf16 holds what two would"},
    {DP_FAULT_PAYLOAD_TWICE, "M is exact in bf16"},
    {DP_FAULT_READ_DECAYED, "dplr has no exact inputs"},
    {DP_FAULT_HALO_LEAK, "a fault of the convolution"},
    {DP_FAULT_HALO_GRAD_LOST, "a fault of the convolution"},
    {DP_FAULT_HALO_GRAD_SHIFTED, "a fault of the convolution"},
};

DP_TEST(exact, every_fault_of_indexing_or_order_shows) {
    static const int RANKS[] = {1, 2, 3, 4, 8};
    const int threads = omp_get_max_threads();
    exact_case x[NCASES];
    for (int k = 0; k < NCASES; k++)
        if (!open_case(CASES[k], &x[k])) return;
    omp_set_num_threads(1);
    for (int f = 1; f < DP_NFAULTS; f++) {
        const char *why = NULL;
        int seen = 0, of = 0;
        char first[256] = "";
        for (size_t i = 0; i < sizeof BLIND / sizeof *BLIND; i++)
            if ((int)BLIND[i].fault == f) why = BLIND[i].why;
        const int elsewhere =
            dp_fault_of_calls((dp_fault)f) || dp_fault_kind((dp_fault)f) == DP_FAULTS_OF_CONV;
        if (dp_fault_of_calls((dp_fault)f)) why = "a fault of the calls of a session";
        if (dp_faults[f].own)
            why = "a fault of parts of any length, and every rank owns T / N tokens";
        for (int k = 0; k < NCASES; k++)
            for (size_t n = 0; n < sizeof RANKS / sizeof *RANKS && !seen; n++) {
                if (GT_SANITIZED && (k < NCASES - 1 || RANKS[n] != 3))
                    continue;                             /* once each: packed, 3 ranks */
                if (elsewhere && RANKS[n] != 3) continue; /* no stage of these runs reads it */
                if (why && (RANKS[n] == 2 || RANKS[n] == 4)) continue; /* 1, 3, 8 are enough */
                dp_sim s;
                dp_err e = {0};
                REQUIRE(!dp_sim_new(&s, &x[k].c.p, DP_BASE_FP32, RANKS[n], (dp_fault)f, &e), "%s",
                        e.msg);
                dp_sim_run(&s, DP_FP32, DP_EXCHANGE_ALLGATHER, 1);
                const outcome o = check(&x[k], &s);
                if (o.wrong && !seen)
                    snprintf(first, sizeof first, "%s, %d ranks, %d tensors: %s", CASES[k], s.N,
                             o.wrong, o.first);
                seen += o.wrong > 0;
                of++;
                dp_sim_free(&s);
            }
        printf("%-20s %s after %d runs  %s\n", dp_faults[f].name, seen ? "seen" : "not seen", of,
               seen  ? first
               : why ? why
                     : "");
        CHECK(GT_SANITIZED || (seen > 0) == !why, "%s: %s in %d runs, expected %s",
              dp_faults[f].name, seen ? "a difference" : "none", of, why ? why : "a difference");
    }
    omp_set_num_threads(threads);
    for (int k = 0; k < NCASES; k++)
        close_case(&x[k]);
}

/* The verdict of a run: error 0 passes even where bounds prove nothing, a fault fails far below its
 * bound. */
DP_TEST(exact, runs_are_judged_with_tolerance_zero) {
    char path[512];
    dp_case c;
    dp_err e = {0};
    const int ranks[] = {8};
    const dp_base base[] = {DP_BASE_BF16};
    const dp_format chain[] = {DP_BF16ST};
    snprintf(path, sizeof path, "%s/exact-packed.case", gt_cases());
    REQUIRE(!dp_case_load(path, &c, &e), "%s", e.msg);
    for (int bad = 0; bad < 2; bad++) {
        dp_runs r = {0};
        const dp_run_options o = {.only = {[DP_ID_RANKS] = {1, {ranks[0]}},
                                           [DP_ID_BASE] = {1, {(int)base[0]}},
                                           [DP_ID_CHAIN] = {1, {(int)chain[0]}},
                                           [DP_ID_BACKEND] = {1, {DP_BACKEND_SIM}}},
                                  .fault = bad ? DP_FAULT_MERGE_SCALED : DP_FAULT_NONE,
                                  .cache = gt_cache()};
        REQUIRE(!dp_case_run(&c, &o, &r, &e) && r.n > 0, "%s", e.msg);
        for (int i = 0; i < r.n; i++) {
            int fails = 0, others = 0, below = 0;
            for (int k = 0; k < r.run[i].ntensor; k++) {
                const dp_judgement *t = &r.run[i].tensor[k];
                fails += t->verdict == DP_FAIL;
                others += t->verdict != DP_FAIL && t->verdict != DP_PASS;
                below += t->verdict == DP_FAIL && t->ratio <= 1;
            }
            CHECK(!others && (fails > 0) == bad && (r.run[i].verdict == DP_FAIL) == bad,
                  "%s: %d fail, %d neither: %s", r.run[i].id, fails, others, r.run[i].why);
            if (bad)
                CHECK(below > 0 && strstr(r.run[i].why, "nothing rounds"),
                      "%s: %d fail below their bound: %s", r.run[i].id, below, r.run[i].why);
        }
        dp_runs_free(&r);
    }
    dp_case_free(&c);
}

/* A wrong row says whose data it holds (harness/verdict/source.h). from: what the sentence must
 * name, from the fault's own definition in fault_effect.c and ranks.c. */
static const struct {
    dp_fault fault;
    const char *case_name;
    int ranks;
    const char *tensor, *says, *from;
} SOURCES[] = {
    {DP_FAULT_MERGE_NEAREST_FIRST, "exact-kda", 4, "S_in", "S_in of rank 2, head 0 holds what",
     "rank 1, head 0 should"}, /* H of rank 0 as if it were last */
    {DP_FAULT_FWD_FIRST_SUBSEQ, "exact-packed", 2, "H", "H of rank 0, head 0 holds values of",
     "sequence 0"}, /* rank 0 holds sequences 0, 1 and 3 */
    {DP_FAULT_BWD_LAST_SUBSEQ, "exact-packed", 2, "dH", "dH of rank 1, head 3 holds numbers of",
     "sequence 5"}, /* rank 1 holds sequences 3, 4 and 5 */
    {DP_FAULT_GATE_OF_HEAD0, "exact-kda", 2, "dH",
     "dH of rank 1, head 2 was made with the decays of rank 1, head 0", ""},
    {DP_FAULT_GATE_NO_OFFSET, "exact-kda", 2, "dH",
     "dH of rank 1, head 2 was made with the decays of rank 0, head 2", ""},
    {DP_FAULT_CU_DIVIDED, "exact-packed", 2, "final_state",
     "final_state of rank 0, head 0, sequence 0 holds values of", "rank 1, head 0"},
    {DP_FAULT_ZIGZAG, "exact-kda", 2, "H", "H of rank 0, head 0 holds values of",
     "rank 1, head 0"}, /* the second half of rank 0 is the last quarter */
    {DP_FAULT_OFFSET_WRAPS, "exact-kda", 4, "H", "H of rank 1, head 0 holds values of",
     "rank 0, head 2 (token 11) where rank 1, head 0 (token 97)"}, /* 97*4*48 - 2^14 lies there */
    {DP_FAULT_STALE_LANES, "exact-kda", 2, "dg", "dg of rank 0, head 0 holds what",
     "(token 59: that of 43;"},
    {DP_FAULT_HALF_CHUNK, "exact-packed", 4, "dk", "dk of rank 0, head 0, sequence 1 holds what",
     "(token 52: that of 20;"},
    {DP_FAULT_MERGE_HALF_V, "exact-gdn", 2, "S_in",
     "every wrong entry in S_in of rank 1, head 0 is zero", "columns 24 to 47"},
    {DP_FAULT_GRID_AXIS, "exact-kda", 4, "o", "every wrong entry in o of rank 0, head 2 is NaN",
     ""},
    {DP_FAULT_MERGE_SCALED, "exact-kda", 4, NULL, NULL, NULL}, /* nobody else's data */
    {DP_FAULT_DG_NO_BOUNDARY, "exact-kda", 4, NULL, NULL, NULL},
};

DP_TEST(exact, a_wrong_row_says_whose_data_it_holds) {
    const dp_base base[] = {DP_BASE_FP32, DP_BASE_BF16};
    const dp_format chain[] = {DP_BF16};
    const dp_exchange merge[] = {DP_EXCHANGE_ALLGATHER};
    for (size_t i = 0; i < sizeof SOURCES / sizeof *SOURCES; i += GT_SANITIZED ? 4 : 1) {
        char path[512];
        dp_case c;
        dp_err e = {0};
        dp_runs r = {0};
        const dp_run_options o = {.only = {[DP_ID_RANKS] = {1, {SOURCES[i].ranks}},
                                           [DP_ID_BASE] = {2, {(int)base[0], (int)base[1]}},
                                           [DP_ID_CHAIN] = {1, {(int)chain[0]}},
                                           [DP_ID_MERGE] = {1, {(int)merge[0]}},
                                           [DP_ID_BACKEND] = {1, {DP_BACKEND_SIM}}},
                                  .fault = SOURCES[i].fault,
                                  .cache = gt_cache()};
        snprintf(path, sizeof path, "%s/%s.case", gt_cases(), SOURCES[i].case_name);
        REQUIRE(!dp_case_load(path, &c, &e) && !dp_case_run(&c, &o, &r, &e) && r.n == 2, "%s: %s",
                SOURCES[i].case_name, e.msg);
        for (int k = 0; k < r.n; k++)
            for (int t = 0, seen = 0; t <= r.run[k].ntensor; t++) {
                const dp_judgement *j = &r.run[k].tensor[t];
                if (t == r.run[k].ntensor)
                    CHECK(seen || !SOURCES[i].tensor, "%s: %s did not fail", r.run[k].id,
                          SOURCES[i].tensor);
                else if (!SOURCES[i].tensor)
                    CHECK(!*j->source, "%s: %s", r.run[k].id, j->source);
                else if (!strcmp(j->name, SOURCES[i].tensor)) {
                    const char *at = strstr(j->source, SOURCES[i].says);
                    seen = j->verdict == DP_FAIL;
                    CHECK(at && strstr(at + strlen(SOURCES[i].says), SOURCES[i].from), "%s: %s: %s",
                          r.run[k].id, j->name, j->source);
                    CHECK(strstr(j->why, j->source) && strstr(r.run[k].why, "; "), "%s: %s",
                          r.run[k].id, r.run[k].why);
                }
            }
        dp_runs_free(&r);
        dp_case_free(&c);
    }
}

/* A record without any error has nothing to draw over tokens, and is a page all the same. */
DP_TEST(exact, a_record_of_zeros_gives_a_page) {
    char cmd[2048], out[8192];
    snprintf(cmd, sizeof cmd,
             "%s run exact-gdn --cases %s --cache %s --ranks 1,4 --base fp32 --out %s/zeros && "
             "grep -c 'exact-gdn: every entry of' %s/zeros/report.html",
             gt_program(), gt_cases(), gt_cache(), gt_tmpdir(), gt_tmpdir());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 || strstr(out, "No module named"), "exit status %d: %s", rc, out);
    snprintf(cmd, sizeof cmd,
             "%s run exact-kda --cases %s --cache %s --ranks 4 --base fp32 --chain fp32 --merge "
             "allgather --fault merge-nearest-first --out %s/wrong; grep -c 'holds what "
             "rank 1, head 0 should' %s/wrong/report.html",
             gt_program(), gt_cases(), gt_cache(), gt_tmpdir(), gt_tmpdir());
    CHECK(gt_run(cmd, out, sizeof out) == 0 || strstr(out, "No module named"), "%s", out);
}

DP_TEST(exact, settings_that_would_round_are_refused) {
    static const char *const extra[] = {"gate = softplus", "beta = sigmoid", "l2norm = yes",
                                        "R = 3",           "g_scale = 0.1",  "beta_hi = 1"};
    for (size_t i = 0; i < sizeof extra / sizeof *extra; i++) {
        char text[256];
        dp_case c;
        dp_err e = {0};
        const int n = snprintf(
            text, sizeof text,
            "reason = r\nsource = s\nop = mkda\nT = 64\nK = 16\nkeys = exact\n%s\n", extra[i]);
        const dp_status st = dp_case_parse(text, (size_t)n, "x.case", 1, &c, &e);
        CHECK(st == DP_EINPUT && strstr(e.msg, "keys = exact"), "%s: %s", extra[i], e.msg);
        if (!st) dp_case_free(&c);
    }
}
