/* Exchanges: each of them makes the states that a merge of the ranks' pairs makes. The sent data
 * are those of the table of prices. A shorter payload changes only its own numbers. */
#include "cases.h"
#include "harness/simulated/ranks.h"
#include "harness/verdict/expected.h"
#include "oracle.h"
#include "ref/arithmetic/low_rank.h"
#include "ref/arithmetic/norms.h"
#include "ref/chunk/exchange_price.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 9 };

/* N ranks of one sequence, so many tokens each. With 2 tokens M forgets next to nothing, so that a
 * pair too many or too few shows; with 16 it has small singular values. */
static void problem_of(dp_problem *p, int N, int tokens) {
    const oracle_spec spec = {.model = DP_KDA,
                              .T = tokens * N,
                              .H = 1,
                              .HV = 1,
                              .K = 8,
                              .V = 6,
                              .R = 1,
                              .gate = DP_GATE_LOG,
                              .beta = DP_BETA_PLAIN,
                              .l2norm = 1,
                              .backward = 1,
                              .g_scale = 0.02,
                              .seed = 75};
    oracle_problem(p, &spec);
}

/* Distance of the states that enter the ranks, backward of their gradients, over their length. */
static double distance(const dp_sim *a, const dp_sim *b, int backward) {
    double s = 0, length = 0;
    for (int r = 0; r < a->N; r++) {
        const double *x = (backward ? a->dS_out : a->S_in)[r],
                     *y = (backward ? b->dS_out : b->S_in)[r];
        for (int64_t i = 0; x && i < (int64_t)a->p->K * a->p->V; i++) {
            s += (x[i] - y[i]) * (x[i] - y[i]);
            length += y[i] * y[i];
        }
    }
    return length > 0 ? sqrt(s / length) : 0;
}

/* The sent data, and the states made of them. */
static void check_way(dp_sim *s, const dp_sim *want, dp_exchange x, dp_payload p) {
    static const double off[DP_NRUN_PAYLOADS] = {0x1p-50, 0x1p-23, 0x1p-7, 0x1p-15,
                                                 0x1p-7,  1e-3,    1e-1};
    const dp_exchange_machine m = {1e-6, 1e11, 1e14};
    const dp_exchange_size size = {.N = s->N, .HV = 1, .K = 8, .V = 6, .L = 2, .payload = p};
    const dp_exchange_price price = dp_exchange_price_of(x, &size, &m);
    const char *who = dp_exchange_names[x], *as = dp_payload_names[p];
    s->payload = p;
    dp_sim_run(s, DP_FP64, x, 0);
    if (dp_payloads[p].tolerance == 0 || !dp_exchanges[x].pairs)
        CHECK((double)s->sent.messages == price.messages && (double)s->sent.bytes == price.bytes,
              "%s, %s, %d ranks: %lld messages of %lld bytes, predicted %g of %g", who, as, s->N,
              (long long)s->sent.messages, (long long)s->sent.bytes, price.messages, price.bytes);
    const double e = distance(s, want, 0);
    CHECK(e <= off[p] * s->N, "%s, %s, %d ranks: %.2e", who, as, s->N, e);
    CHECK(s->N < 3 || !p || e > 0, "%s, %s, %d ranks: nothing was rounded", who, as, s->N);
    dp_sim_run(s, DP_FP64, x, 1);
    const double back = distance(s, want, 1);
    CHECK(back <= off[p] * s->N, "%s, %s, %d ranks, backward: %.2e", who, as, s->N, back);
}

DP_TEST(exchange, each_makes_the_states_and_sends_what_its_price_says) {
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1); /* thousands of loops of microseconds each */
    for (int N = 1; N <= MOST; N++) {
        dp_problem p;
        dp_sim s, want;
        problem_of(&p, N, 2);
        REQUIRE(!dp_sim_new(&s, &p, DP_BASE_FP64, N, DP_FAULT_NONE, NULL) &&
                    !dp_sim_new(&want, &p, DP_BASE_FP64, N, DP_FAULT_NONE, NULL),
                "%d ranks", N);
        dp_sim_run(&want, DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
        for (int x = 0; x < DP_EXCHANGE_HEADS; x++)
            for (int k = 0; k < DP_NRUN_PAYLOADS; k++)
                check_way(&s, &want, (dp_exchange)x, (dp_payload)k);
        dp_sim_free(&s);
        dp_sim_free(&want);
        dp_problem_free(&p);
    }
    omp_set_num_threads(threads);
}

/* Ranks that share heads: one rank's bits, whatever ran before. */
DP_TEST(exchange, heads_have_the_bits_of_one_rank) {
    dp_case c;
    dp_sim one, s;
    if (!gt_open_case("exchange-packed", &c)) return;
    REQUIRE(!dp_sim_new(&one, &c.p, DP_BASE_BF16, 1, DP_FAULT_NONE, NULL) &&
                !dp_sim_new(&s, &c.p, DP_BASE_BF16, 3, DP_FAULT_NONE, NULL),
            "ranks");
    dp_sim_run(&one, DP_FP32, DP_EXCHANGE_ALLGATHER, 1);
    for (int run = 0; run < 2; run++) {
        dp_sim_run(&s, DP_FP32, DP_EXCHANGE_RING, 1);
        dp_sim_run(&s, DP_FP32, DP_EXCHANGE_HEADS, 1);
        for (int i = 0; i < DP_NRESULTS; i++) {
            int64_t rows, width;
            dp_result_shape(&c.p, i, &rows, &width);
            const double *a = one.out.out[i], *b = s.out.out[i];
            CHECK(!a == !b && (!a || !memcmp(a, b, sizeof *a * (size_t)(rows * width))),
                  "%s, run %d", dp_result_fields[i].name, run);
        }
        CHECK(!s.S_in[2] && !s.M[0], "ranks of heads have states");
    }
    dp_sim_free(&one);
    dp_sim_free(&s);
    dp_case_free(&c);
}

/* M as it arrives, for every tolerance between all singular values and none. */
DP_TEST(exchange, low_rank_keeps_to_its_tolerance) {
    enum { K = 8, N = 6 };
    dp_problem p;
    dp_sim s;
    int fewest = K;
    problem_of(&p, N, 16);
    REQUIRE(!dp_sim_new(&s, &p, DP_BASE_FP64, N, DP_FAULT_NONE, NULL), "ranks");
    dp_sim_run(&s, DP_FP64, DP_EXCHANGE_ALLGATHER, 0);
    for (double tolerance = 1e-6; tolerance < 1; tolerance *= 10)
        for (int r = 0; r + 1 < N; r++) {
            double *U, *W, off[K * K];
            const int rank = dp_low_rank(s.M[r], K, tolerance, &U, &W);
            fewest = rank < fewest ? rank : fewest;
            for (int i = 0; i < K * K; i++) {
                off[i] = s.M[r][i];
                for (int z = 0; z < rank; z++)
                    off[i] -= U[i / K * rank + z] * W[z * K + i % K];
            }
            const double most = dp_norm2_up(K, K, off);
            CHECK(most <= tolerance * (1 + 1e-6) + 1e-12, "rank %d: left out %.3g, tolerance %.3g",
                  r, most, tolerance);
            free(U);
            free(W);
        }
    CHECK(fewest < K, "no tolerance left anything out");
    dp_sim_free(&s);
    dp_problem_free(&p);
}

/* The formulas at the ends: two ranks, one rank, more ranks than heads. */
DP_TEST(exchange, prices_at_the_ends) {
    const dp_exchange_machine m = {5e-6, 1e11, 1e14};
    dp_exchange_size s = {.N = 1, .HV = 4, .K = 128, .V = 128, .L = 8192};
    for (int x = 0; x < DP_NEXCHANGES; x++) {
        const dp_exchange_price p = dp_exchange_price_of((dp_exchange)x, &s, &m);
        CHECK(p.messages == 0 && p.bytes == 0, "%s, one rank: %g messages", dp_exchange_names[x],
              p.messages);
    }
    s.N = 8;
    CHECK(!dp_exchange_price_of(DP_EXCHANGE_HEADS, &s, &m).possible, "8 ranks of 4 heads");
    const dp_exchange_price scan = dp_exchange_price_of(DP_EXCHANGE_SCAN, &s, &m),
                            ring = dp_exchange_price_of(DP_EXCHANGE_RING, &s, &m),
                            grid = dp_exchange_price_of(DP_EXCHANGE_GRID, &s, &m);
    CHECK(scan.messages == 7 + 6 + 4 + 7, "scan: %g messages", scan.messages); /* math.md g.3 */
    CHECK(scan.bytes == 4.0 * 4 * 671744, "scan: %g bytes", scan.bytes);
    CHECK(ring.messages == grid.messages && ring.bytes == grid.bytes && ring.path_s < grid.path_s,
          "a grid sends what a ring sends and folds more");
    s.payload = DP_PAYLOAD_DIAGONAL;
    CHECK(dp_exchange_price_of(DP_EXCHANGE_ALLGATHER, &s, &m).bytes ==
              8 * 7 * 4.0 * 4 * (128 + 128 * 128),
          "K numbers in place of K x K");
}

/* Ranks of a recurrent design in fp32 receive the states of simulated ranks in fp64, except bf16
 * numbers that round in the other direction. An initial state meets its pair on arrival, or
 * (begins) has gone through its rank. */
static void check_drawn(const dp_problem *p, int begins, int N) {
    dp_drawn_run drawn = {0};
    dp_design design = dp_design_of(DP_BASE_FP64);
    dp_sim s;
    design.sending = (dp_sending){DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_BF16, begins};
    REQUIRE(!dp_sim_open(&s, p, &design, N, NULL, NULL), "simulated ranks");
    s.payload = DP_PAYLOAD_BF16;
    dp_sim_run(&s, DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
    dp_design by_token;
    REQUIRE(!dp_design_parse("recurrent", DP_BASE_FP32, &by_token, NULL), "design");
    by_token.sending = design.sending;
    dp_drawn_open(&drawn, &by_token, p, (dp_conv[3]){0}, NULL, N, 1);
    dp_drawn_all(&drawn, DP_FP32);
    static const int of[] = {DP_RANK_S_IN, DP_RANK_DS_OUT};
    for (int back = 0; back < 2; back++) {
        double off = 0, length = 0;
        for (int64_t z = 0; z < (int64_t)N * p->HV; z++) {
            const double *x = dp_drawn_rank_value(&drawn, of[back], z),
                         *y = (back ? s.dS_out : s.S_in)[z];
            for (int64_t i = 0; x && y && i < (int64_t)p->K * p->V; i++) {
                off += (x[i] - y[i]) * (x[i] - y[i]);
                length += y[i] * y[i];
            }
        }
        CHECK(length > 0 && sqrt(off / length) < 1e-4, "%d ranks, begins %d, back %d: %.2e", N,
              begins, back, sqrt(off / length));
    }
    dp_drawn_close(&drawn);
    dp_sim_free(&s);
}

DP_TEST(exchange, draws_of_a_recurrent_design_send_pairs_or_states_as_it_says) {
    const int64_t packed[] = {0, 7, 7, 40, 48}, whole[] = {0, 48};
    for (int i = 0; i < 2; i++)
        for (int begins = 0; begins < 2; begins++)
            for (int N = 3; N <= 4; N++) {
                oracle_spec spec = oracle_packed(DP_KDA, 16, packed, 76);
                dp_problem p;
                if (!i) spec.cu = whole;
                if (!i) spec.Nseq = 1;
                oracle_problem(&p, &spec);
                check_drawn(&p, begins, N);
                dp_problem_free(&p);
            }
}

/* The documents' own number: N (K K + K V) 4 bytes of a head, K = 128, V = 256, 8 ranks. */
DP_TEST(exchange, the_program_prices_any_sizes_and_tokens_against_heads) {
    char cmd[600], out[16384];
    snprintf(
        cmd, sizeof cmd,
        "'%s' list --exchanges --heads 1 --V 256 --ranks 8 && '%s' list --exchanges --heads 16 "
        "--V 256 --ranks 8 | tail -8",
        gt_program(), gt_program());
    REQUIRE(!gt_run(cmd, out, sizeof out), "%s", out);
    CHECK(strstr(out, "8  allgather  fp32             56        11.01      1.573"), "%s", out);
    CHECK(strstr(out, "\n   2 x 4 ") && strstr(out, "\n   1 x 8 "), "%s", out);
    const dp_exchange_machine m = {5e-6, 2e11, 4e14};
    const dp_exchange_size s = {
        .N = 8, .HV = 16, .K = 128, .V = 256, .L = 8192, .payload = DP_PAYLOAD_FP32};
    const dp_exchange_price alone = dp_exchange_price_of(DP_EXCHANGE_ALLGATHER, &s, &m);
    const dp_mesh_price cp = dp_mesh_price_of(8, 1, 65536, &s, &m),
                        both = dp_mesh_price_of(2, 4, 65536, &s, &m);
    CHECK(cp.tp_bytes == 0 && cp.exchange_s + cp.compute_s == alone.path_s, "cp8 alone");
    CHECK(both.states_bytes == 4. * 4 * 128 * 384, "one pair of 4 heads goes to one rank");
    CHECK(both.tp_bytes == 2. * 3 / 4 * 2 * 32768 * 16 * 256, "an all-reduce of 4 ranks");
    dp_exchange_size f = s;
    f.payload = DP_PAYLOAD_FP32;
    const double one = dp_exchange_pipeline_s(&f, 1, &m), many = dp_exchange_pipeline_s(&f, 65, &m);
    CHECK(one == dp_exchange_price_of(DP_EXCHANGE_SERIAL, &f, &m).path_s, "one micro-batch");
    CHECK(many - one < 64 * one / 8 && many - one > 64 * one / 16, "%g behind %g", many, one);
    CHECK(!dp_mesh_price_of(2, 3, 65536, &s, &m).possible, "16 heads among 3");
    CHECK(dp_exchange_saved_of(&s).entering == 4 * 16 * 128 * 256, "S_in in fp32");
}
