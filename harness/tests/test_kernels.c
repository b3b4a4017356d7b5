/* The CUDA kernels, translated to run on the CPU (gpu/tests/cpu), judged by the harness like a
 * device: every gradient, ranks, variants, formats. */
#include "gt.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *program(void) {
    const char *p = getenv("DP_KERNELS");
    return p && *p ? p : NULL;
}

/* Runs cases with options; the record, or NULL (failed, with a message). */
static json_t *judged(const char *args, int want) {
    char cmd[4096], out[8192];
    json_error_t je;
    snprintf(cmd, sizeof cmd,
             "'%s' run %s --cases '%s' --cache '%s' --backend cuda --json '%s/kernels.json'",
             program(), args, gt_cases(), gt_cache(), gt_tmpdir());
    const int rc = gt_run(cmd, out, sizeof out);
    if (rc != want) {
        gt_fail(__FILE__, __LINE__, "exit status", "%s: %d, want %d: %.3000s", args, rc, want, out);
        return NULL;
    }
    snprintf(cmd, sizeof cmd, "%s/kernels.json", gt_tmpdir());
    json_t *j = json_load_file(cmd, 0, &je);
    if (!j) gt_fail(__FILE__, __LINE__, "record", "%s: %s", cmd, je.text);
    return j;
}

static json_t *tensor(json_t *run, const char *name) {
    json_t *t;
    size_t i;
    json_array_foreach(
        json_object_get(run, "tensors"), i,
        t) if (!strcmp(json_string_value(json_object_get(t, "name")), name)) return t;
    return NULL;
}

/* Every run passed and judged these tensors; at least n runs. */
static void all_judged(json_t *j, size_t n, const char *const *names) {
    json_t *runs = json_object_get(j, "runs"), *r;
    size_t i;
    CHECK(json_array_size(runs) >= n, "%zu runs, want %zu", json_array_size(runs), n);
    json_array_foreach(runs, i, r) {
        const char *id = json_string_value(json_object_get(r, "id"));
        CHECK(!strcmp(json_string_value(json_object_get(r, "verdict")), "pass"), "%s: %s", id,
              json_string_value(json_object_get(r, "verdict")));
        for (int x = 0; names[x]; x++)
            CHECK(tensor(r, names[x]), "%s: %s was not judged", id, names[x]);
    }
}

/* The same of the runs that these arguments ask for. */
static void judges(const char *args, size_t n, const char *const *names) {
    json_t *j = judged(args, 0);
    if (j) all_judged(j, n, names);
    json_decref(j);
}

static const char *folder(void) {
    static char d[2048];
    snprintf(d, sizeof d, "%s", program());
    *strrchr(d, '/') = 0;
    return d;
}

/* A test program of the kernels, with its words, and with these variables set. */
static void passes(const char *variables, const char *test) {
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd, "%s '%s'/%s", variables, folder(), test);
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(!rc && strstr(out, ", 0 failed"), "%s %s: %d: %s", variables, test, rc, out);
}

#define NEEDS_KERNELS \
    if (!program()) SKIP("the kernels on the CPU are not built under SAN=1")

/* ---- gates of any steepness ------------------------------------------------------------------ */

static unsigned drawn(unsigned *seed, unsigned n) {
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 16) % n;
}

/* A problem whose tokens write nothing but for a few, and decay by little, by much, or completely.
 * The rest of a row has come through that. */
static void write_steep(const char *path, unsigned *seed) {
    static const char *const GATE[] = {"0",       "-0.0078125", "-0.5", "-1",  "-3",
                                       "-5.0625", "-7.5",       "-12",  "-16", "-40",
                                       "-76",     "-88",        "-104", "-200"},
                             *const ALL[] = {"0", "-0.0078125", "-1", "-5.0625", "-6.5"};
    static const int TOKENS[] = {20, 32, 48, 64, 80};
    const int T = TOKENS[drawn(seed, 5)], gates = 2 + (int)drawn(seed, 10);
    FILE *f = fopen(path, "w");
    fprintf(f,
            "reason = r\nsource = s\nop = kda\nseed = %u\nT = %d\nH = 1\nHV = 2\nK = %d\nV = "
            "64\nl2norm = yes\ns0_scale = %u\nranks = 1\nbase = bf16\noverride = g[*,*,*] %s",
            1 + drawn(seed, 9999), T, drawn(seed, 3) ? 64 : 128, drawn(seed, 2),
            ALL[drawn(seed, 5)]);
    for (int i = 0; i < gates; i++) {
        const unsigned t = drawn(seed, (unsigned)T), channel = drawn(seed, 4);
        fprintf(f, ", g[%u,*,%s] %s", t, channel ? "*" : "17", GATE[drawn(seed, 14)]);
    }
    fprintf(f, ", beta[*,*,0] 0");
    for (int i = 0; i < 3; i++)
        fprintf(f, ", beta[%u,*,0] 1", drawn(seed, (unsigned)T));
    fprintf(f, "\n");
    fclose(f);
}

DP_TEST(kernels, what_comes_through_steep_gates_is_there) {
    NEEDS_KERNELS;
    unsigned seed = 1;
    char cmd[4096], out[16384];
    snprintf(cmd, sizeof cmd, "mkdir -p '%s/steep'", gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    for (int i = 0; i < 8; i++) {
        snprintf(cmd, sizeof cmd, "%s/steep/s%d.case", gt_tmpdir(), i);
        write_steep(cmd, &seed);
    }
    for (int sms = 1; sms < 133; sms += 131) { /* both kernels of a chunk */
        snprintf(cmd, sizeof cmd,
                 "cd '%s/steep' && DP_CPU_CAPABILITY=90 DP_CPU_MULTIPROCESSORS=%d '%s' run *.case "
                 "--backend cuda --base bf16 --unjudged dg,final_state --cache ../cache-of-steep | "
                 "grep -v ^pass",
                 gt_tmpdir(), sms, program());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 0 && strstr(out, "PASS (8 passed, 0 failed, 0 skipped, 0 unjudged"),
              "%d multiprocessors: %.3000s", sms, out);
    }
}

/* A backward of many heads, whose passes solve the triangles (gpu/fast/state_kept.cu): few
 * multiprocessors make few heads many. Gates a channel and a head, steep ones, parts of a chunk,
 * all widths, and where the forward saves all. */
DP_TEST(kernels, gradients_of_passes_that_solve_the_triangles) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o",  "final_state", "dq",  "dk", "dv",
                                        "dg", "dbeta",       "ds0", NULL};
    setenv("DP_CPU_CAPABILITY", "90", 1);
    setenv("DP_CPU_MULTIPROCESSORS", "1", 1);
    judges("gdn-wide strong-wide k128-v64 k64-v128 --base bf16 --ranks 1 --way plain,save-all", 8,
           names);
    unsetenv("DP_CPU_MULTIPROCESSORS");
    unsetenv("DP_CPU_CAPABILITY");
}

/* They add gates up in units in which those of the case are not exact, others in some in which they
 * are. */
DP_TEST(kernels, sums_of_short_gates_in_other_units_are_no_fault) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "final_state", "dq", "dk", "dv", "dg", "ds0", NULL};
    judges("short-gates", 6, names);
}

DP_TEST(kernels, every_gradient_on_ranks_in_every_way) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o",  "final_state", "dq",  "dk", "dv",
                                        "dg", "dbeta",       "ds0", NULL};
    judges("smoke-kda smoke-mkda2 --chain fp32,tf32x3 --way plain,dh-only,pair-dg,save-all", 56,
           names);
}

DP_TEST(kernels, sequences_across_ranks_and_initial_states) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "dq", "dk", "dv", "dg", "dbeta", "ds0", NULL};
    json_t *j = judged("packed-across initial-state --base fp32 --chain fp32 --ranks 4", 0), *r;
    size_t i;
    if (j) {
        all_judged(j, 2, names);
        json_array_foreach(json_object_get(j, "runs"), i, r)
            CHECK(tensor(r, "S_in") && tensor(r, "dS_out") &&
                      json_integer_value(json_object_get(r, "saved_bytes")) > 0,
                  "%s", json_string_value(json_object_get(r, "id")));
    }
    json_decref(j);
}

/* Parts of any length, several of a rank or none: each is an element of the chain of all. */
DP_TEST(kernels, ranks_that_own_parts_of_any_length) {
    NEEDS_KERNELS;
    static const char *const names[] = {"S_in", "dS_out", "o", "dq", "dk", "dv", "dg", "ds0", NULL};
    static const char *const conv[] = {"y", "dx", "dw", "dbias", NULL};
    judges("packed-across --base fp32 --chain fp32 --ranks 3 --own uneven,empty "
           "--way plain,dh-only,save-all --exchange allgather",
           6, names);
    judges("exact-packed --chain bf16 --ranks 3 --own balanced,cyclic "
           "--exchange allgather,scan --payload m-i",
           4, names);
    judges("exact-packed --chain bf16 --ranks 1,3 --own grid --exchange scan,serial "
           "--payload full,bf16",
           6, names);
    judges("packed-across --base fp32 --chain fp32 --ranks 3 --own zigzag,cyclic "
           "--exchange ring,scan,serial",
           6, names);
    judges("owned-conv", 36, conv);
}

/* Exchanges and payloads: words that are fewer, states from rank to rank; the rest says why not. */
DP_TEST(kernels, exchanges_and_payloads_that_they_have) {
    NEEDS_KERNELS;
    static const char *const names[] = {"S_in", "dS_out", "o", "dq", "dk", "dv", "dg", "ds0", NULL};
    json_t *j = judged("weak-heads --base fp32 --ranks 4 --chain fp32 --exchange "
                       "allgather,ring --payload fp32,bf16x2,m-i",
                       0),
           *s = judged("exchange-packed --base bf16 --ranks 3 --exchange ring --payload full,bf16 "
                       "--way plain,save-all",
                       0),
           *c = judged("exchange-slow --base fp32 --ranks 4 --exchange scan,serial --payload "
                       "full,m-i",
                       0),
           *k = judged("exchange-slow --base fp32 --ranks 4 --exchange allgather,heads --payload "
                       "full,svd-1e-4",
                       0),
           *m = judged("kda-slow --base fp32 --ranks 8 --exchange scan --chain "
                       "tf32x3,tf32rz,bf16",
                       0);
    if (j) all_judged(j, 6, names);
    if (s) all_judged(s, 4, names);
    if (c) all_judged(c, 4, names);
    if (m) all_judged(m, 3, names);
    static const char *const says[] = {"", "payload svd-1e-4: the kernels make no",
                                       "exchange heads:"};
    for (size_t i = 0; k && i < 3; i++) {
        json_t *r = json_array_get(json_object_get(k, "runs"), i), *why = json_object_get(r, "why");
        const char *v = json_string_value(json_object_get(r, "verdict"));
        CHECK(v && !strcmp(v, i ? "skipped" : "pass") &&
                  (!i || strstr(json_string_value(why), says[i])),
              "run %zu: %s: %s", i, v ? v : "none", json_string_value(why));
    }
    json_decref(j);
    json_decref(s);
    json_decref(c);
    json_decref(k);
    json_decref(m);
}

/* Ranks that exchange heads: two of every model; 2, 3 and 4 of packed sequences and states. On
 * tensor cores in segments, too, and with parts owned by any table. */
DP_TEST(kernels, exchange_of_heads) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "final_state", "dq", "dk", "dv", "dg", "ds0", NULL};
    judges("smoke-kda exact-mkda2 gdn-raw smoke-dplr --ranks 2 --base bf16 --chain fp32 "
           "--exchange heads",
           4, names);
    judges("exchange-heads --exchange heads --way save-all", 6, names);
    judges("exchange-heads --exchange heads --base fp32 --ranks 3 --own zigzag,empty", 2, names);
    setenv("DP_CPU_CAPABILITY", "90", 1);
    judges("exchange-heads-wide --exchange heads --way segments-save-all", 2, names);
    unsetenv("DP_CPU_CAPABILITY");
}

/* Value heads of one query head on several ranks, on every path: dq and dk are sums over these
 * ranks. */
DP_TEST(kernels, exchange_of_heads_that_share_query_heads) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "final_state", "dq", "dk", "dv", "dg", "ds0", NULL};
    judges("initial-state exchange-packed --ranks 2,6 --base bf16 --chain fp32 "
           "--exchange heads --way plain,save-all",
           4, names);
    judges("gdn2-weak --ranks 4 --base fp32,bf16 --exchange heads", 2, names);
    judges("exchange-packed --ranks 3 --base fp32 --exchange heads --own "
           "zigzag,empty,cyclic,uneven",
           4, names);
    setenv("DP_CPU_CAPABILITY", "90", 1);
    judges("gdn-wide --ranks 2 --exchange heads --way plain", 1, names);
    judges("mkda2-wide --ranks 2 --exchange heads --way segments", 1, names);
    unsetenv("DP_CPU_CAPABILITY");
}

/* Where heads do not divide the run says why not; where they do, they have the bits of one rank. */
DP_TEST(kernels, exchange_of_heads_that_is_refused_or_one_ranks) {
    NEEDS_KERNELS;
    static const struct {
        const char *args, *why;
    } rows[] = {
        {"exchange-slow --ranks 4", "exchange heads: more ranks than value heads"},
        {"smoke-gdn --ranks 3", "exchange heads: the value heads do not divide"},
        {"weak-heads --ranks 2 --exact-cp", "exchange heads: of a grid, the query heads do not"},
        {"exchange-heads --ranks 2 --way dh-only", "exchange heads: sends no pair of which"}};
    char args[256], cmd[4096], out[8192];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(args, sizeof args, "%s --base fp32 --exchange heads", rows[i].args);
        json_t *j = judged(args, 2), *r = j ? json_array_get(json_object_get(j, "runs"), 0) : NULL;
        const char *why = r ? json_string_value(json_object_get(r, "why")) : "no run";
        CHECK(why && strstr(why, rows[i].why), "%s: %s", args, why ? why : "none");
        json_decref(j);
    }
    snprintf(cmd, sizeof cmd,
             "'%s' check exchange-heads --cases '%s' --backend cuda --base fp32 --ranks 3 "
             "--exchange heads --only ranks-bound",
             program(), gt_cases());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "largest difference 0 of"), "%d: %.3000s", rc, out);
}

/* A check between ranks and one, whose bounds know what is sent. */
DP_TEST(kernels, checks_and_differ_take_exchanges_and_payloads) {
    NEEDS_KERNELS;
    static const char *const how[] = {"--exchange allgather --payload m-i",
                                      "--exchange ring --payload bf16 --only ranks-bound",
                                      "--exchange serial --only ranks-bound"};
    char cmd[4096], out[8192];
    for (int i = 0; i < 3; i++) {
        snprintf(cmd, sizeof cmd,
                 "'%s' check weak-heads --cases '%s' --backend cuda --base fp32 --ranks 4 "
                 "%s",
                 program(), gt_cases(), how[i]);
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 0 && strstr(out, "pass     ranks-bound") &&
                  (i || strstr(out, "pass     exact-cp")),
              "%s: %d: %.3000s", how[i], rc, out);
    }
    snprintf(cmd, sizeof cmd,
             "'%s' differ weak-heads --cases '%s' --ranks 4 --bitwise --backend cuda --base fp32 "
             "--exchange allgather --backend cuda --base fp32 --exchange ring",
             program(), gt_cases());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "DIFFER: SAME BITS"), "%d: %.3000s", rc, out);
}

/* The kernels' messages and results, bit for bit against ref/chunk/payload.h; heads of every
 * path. */
DP_TEST(kernels, what_is_sent_is_what_the_payload_says) {
    NEEDS_KERNELS;
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd, "DP_CPU_CAPABILITY=90 DP_CPU_MULTIPROCESSORS=16 '%s/test_send' small",
             folder());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(!rc && strstr(out, "10 ways compared bit for bit") &&
              strstr(out, "exchange heads have the bits of one rank") &&
              strstr(out, "multiplies M by M in 5 formats") &&
              strstr(out, "micro-batches behind each other have the bits of each") &&
              strstr(out, ", 0 failed"),
          "%d: %s", rc, out);
}

/* The error of a tensor of a convolution over N ranks that own runs of a grid. */
static double grid_error(int N, const char *name) {
    char args[128];
    snprintf(args, sizeof args, "owned-conv --exact-cp --base fp32 --ranks %d", N);
    json_t *j = judged(args, 0);
    const double e =
        j ? json_number_value(json_object_get(
                tensor(json_array_get(json_object_get(j, "runs"), 0), name), "rel_fro"))
          : -1;
    json_decref(j);
    return e;
}

static void check_grid(const char *on, int capability, int N, const char *how) {
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd,
             "DP_CPU_CAPABILITY=%d '%s' check %s --cases '%s' --backend cuda --only exact-cp "
             "--ranks %d --exchange %s",
             capability, program(), on, gt_cases(), N, how);
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "pass     exact-cp") && strstr(out, "0 did not, 0 skip"),
          "%s: %d: %.3000s", cmd, rc, out);
}

/* Results and gradients of recurrences are compared bit by bit, whatever is sent, those of a
 * convolution by their largest errors. */
DP_TEST(kernels, on_a_grid_no_bit_depends_on_the_number_of_ranks) {
    NEEDS_KERNELS;
    static const char *const on[] = {"weak-heads --tokens 600 --base fp32", "segments --base bf16"};
    static const int capability[] = {75, 90};
    static const char *const how[] = {
        "allgather", "allgather --payload m-i", "ring",   "ring --payload bf16",
        "scan",      "scan --payload bf16x2",   "serial", "serial --payload bf16"};
    for (int i = 0; i < 2; i++)
        for (int x = i; x < 8; x += 2)
            check_grid(on[i], capability[i], 2 + x % 3, how[x]);
    check_grid("exchange-heads --base fp32", 75, 3, "heads");
    check_grid("exchange-heads-wide --base bf16", 90, 2, "heads");
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "dw" : "dbias";
        const double two = grid_error(2, name), three = grid_error(3, name);
        CHECK(two > 0 && two == three, "%s: %a on two ranks, %a on three", name, two, three);
    }
}

/* The true error is 0 in every format: any wrong index shows. */
DP_TEST(kernels, exact_cases_without_error) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "dq", "dk", "dv", "dg", "dbeta", "ds0", NULL};
    judges("exact-packed exact-mkda2 --chain bf16 --ranks 4 --exchange allgather,ring "
           "--payload full,bf16",
           16, names);
}

DP_TEST(kernels, gates_of_gdn_and_the_convolution) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "dg", "dA_log", "ddt_bias", NULL}, *const conv[] = {
                                                                                    "y", "dx", "dw",
                                                                                    NULL};
    json_t *j = judged("gdn-raw --base fp32 --chain fp32 --ranks 1,4", 0),
           *k = judged("smoke-conv", 0);
    if (j) all_judged(j, 2, names);
    if (k) all_judged(k, 8, conv);
    json_decref(j);
    json_decref(k);
}

/* Runs in which this tensor was judged. */
static size_t runs_with(json_t *j, const char *name) {
    json_t *r;
    size_t i, n = 0;
    json_array_foreach(json_object_get(j, "runs"), i, r) n += tensor(r, name) != NULL;
    return n;
}

/* Recurrences that the chunk kernels lack. M and dM, too, are judged by draws of the declared
 * design, which tells them from runs that nobody declared. */
DP_TEST(kernels, every_recurrence_token_by_token) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "final_state", "dq", "dk", "dv", "dg", "ds0", NULL};
    static const char *const some[] = {"M", "dM", "dbeta", "derase", "dwrite", "dlr_a", "dlr_b"};
    json_t *j = judged("smoke-gdn2 smoke-gla smoke-ssd smoke-deltaproduct smoke-dplr --base fp32 "
                       "--ranks 4 --exchange allgather,ring",
                       0),
           *r;
    size_t i;
    if (j) all_judged(j, 10, names);
    for (i = 0; i < sizeof some / sizeof *some; i++)
        CHECK(runs_with(j, some[i]) == (i < 2 ? 10 : 2), "%s in %zu runs", some[i],
              runs_with(j, some[i]));
    json_array_foreach(json_object_get(j, "runs"), i, r) {
        const json_t *policy = json_object_get(r, "policy");
        CHECK(!strcmp(json_string_value(json_object_get(policy, "design")), "recurrent,exp=fast"),
              "%s", json_string_value(json_object_get(r, "id")));
    }
    json_decref(j);
}

/* Forwards of GLA and SSD by kernels of a chunk, which store w or not, and in one kernel. */
DP_TEST(kernels, nothing_is_erased_by_tensor_cores) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "final_state", NULL}, *const on[][2] = {{"90", "1"},
                                                                                     {"90", "132"},
                                                                                     {"80", "16"}};
    for (size_t at = 0; at < sizeof on / sizeof *on; at++) {
        setenv("DP_CPU_CAPABILITY", on[at][0], 1);
        setenv("DP_CPU_MULTIPROCESSORS", on[at][1], 1);
        json_t *j = judged("ssd-wide gla-wide", 0), *r;
        size_t i;
        if (j) all_judged(j, 4, names);
        json_array_foreach(json_object_get(j, "runs"), i, r) {
            const json_t *design = json_object_get(json_object_get(r, "policy"), "design");
            CHECK(strstr(json_string_value(design), "beta=inverse"), "%s",
                  json_string_value(design));
        }
        json_decref(j);
    }
    unsetenv("DP_CPU_CAPABILITY");
    unsetenv("DP_CPU_MULTIPROCESSORS");
}

/* Three keys a token on three ranks; gradients alone between ranks; what the forward left. */
DP_TEST(kernels, recurrences_token_by_token_in_every_way) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "dq", "dk", "dv", "dg", "S_in", "dS_out", NULL};
    judges("deltaproduct-weak --base fp32 --chain fp32 --ranks 3", 1, names);
    judges("smoke-ssd --base bf16 --chain fp32 --ranks 4 --way dh-only,save-all "
           "--exchange allgather",
           2, names);
}

/* Ranks of a recurrent design send fewer words, also of pairs that a scan composes. Its draws and
 * bounds have that. */
DP_TEST(kernels, recurrences_token_by_token_send_payloads) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "dq", "dk", "dg", "S_in", "dS_out", NULL};
    judges("gdn2-weak --base fp32 --chain fp32 --ranks 4 --exchange ring --payload bf16,m-i", 2,
           names);
    judges("smoke-deltaproduct --base bf16 --chain fp32 --ranks 2 --own zigzag "
           "--exchange scan,serial --payload bf16",
           2, names);
    judges("smoke-dplr deltaproduct-weak --base fp32 --chain fp32 --ranks 4 "
           "--exchange scan --payload bf16x2,m-i",
           4, names);
}

/* Norms; rows one after the other, with both factors of the gate and the token before. */
static const char TWO[] =
    "recurrence two\nquery q\ngate g per channel\nkeys a b\nvalues v u\nnumber c m\n"
    "norm q a eps 0.01\nreads undecayed\nrows in turn\nrow write=a*m read=a*exp(-g) value=v "
    "strength=-c\n"
    "row write=-b*exp(g) read=a*b value=u*v\n"
    "row write=prev(b) value=prev(v)*u strength=prev(c)\n";
/* Halves of channels, below norms that do not commute with rotations. */
static const char TURNED[] =
    "recurrence turned\nquery q\ngate g per channel\nkeys a b\nvalues v\nangle w turns a halves\n"
    "norm l1 q a\nrow write=a read=b value=v\n";

static void write_rows(const char *recurrence, const char *text, const char *problem) {
    FILE *f = fopen(recurrence, "w");
    fputs(text, f);
    fclose(f);
    f = fopen(problem, "w");
    fprintf(f, "reason = r\nsource = s\nop = dplr\nT = 90\nH = 2\nK = 16\nV = 24\nl2norm = yes\n"
               "gate = softplus\ns0_scale = 1\ndstate = yes\ncu_seqlens = 0,37,37,90\n"
               "ranks = 1,2,3\nbase = fp32,bf16\nchain = fp32\n");
    fclose(f);
}

/* Recurrences of a user's own: packed, from initial states, on ranks, forward and backward. Parts
 * of ranks get the halo of the part before them, whoever owns it. */
DP_TEST(kernels, recurrences_of_ones_own) {
    NEEDS_KERNELS;
    static const struct {
        const char *args;
        size_t n;
        const char *names[10];
    } rows[] = {
        {"dplr-weak --recurrence rwkv7 --base fp32,bf16 --ranks 3 --way dh-only",
         2,
         {"o", "dr", "dw", "dk", "dkk", "da", "dv", "S_in", "dS_out"}},
        {"smoke-dplr --recurrence comba --base fp32,bf16 --ranks 4",
         2,
         {"o", "dq", "dg", "dk", "dp", "dv", "dbeta", "M", "ds0"}},
        {"smoke-dplr --recurrence oja --base fp32 --ranks 1,2 --exchange ring",
         2,
         {"o", "dq", "dgv", "dv", "dk", "dbeta", "final_state"}},
        {"smoke-dplr --recurrence mamba3 --base fp32,bf16 --ranks 1 --way save-all",
         2,
         {"o", "dC", "dg", "dB", "dx", "dgamma", "dbeta", "dtheta", "ds0"}},
        {"smoke-dplr --recurrence mamba3 --base fp32 --ranks 2 --exchange heads,serial",
         2,
         {"o", "dC", "dg", "dB", "dx", "dgamma", "dbeta", "dtheta"}},
        {"smoke-dplr --recurrence mamba3 --base fp32,bf16 --ranks 4",
         2,
         {"o", "dC", "dg", "dB", "dx", "dgamma", "dbeta", "dtheta", "S_in"}},
        {"smoke-dplr --recurrence mamba3 --base fp32 --ranks 2 --own zigzag,grid",
         2,
         {"o", "dC", "dg", "dB", "dx", "dgamma", "dbeta", "dtheta"}},
        {"museum/halo --base fp32 --ranks 1,4 --own cyclic --exchange allgather,scan",
         3,
         {"o", "dq", "dg", "dk", "dv", "dbeta", "dnumber", "dangle"}},
        {NULL, 6, {"o", "dq", "dg", "da", "db", "dv", "du", "dc", "dm"}},
    };
    char path[2][600], own[1400];
    for (int i = 0; i < 2; i++)
        snprintf(path[i], sizeof path[i], "%s/%s", gt_tmpdir(), i ? "two.case" : "two.recurrence");
    snprintf(own, sizeof own, "%s --recurrence %s --ranks 1,2,3", path[1], path[0]);
    write_rows(path[0], TWO, path[1]);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        judges(rows[i].args ? rows[i].args : own, rows[i].n, rows[i].names);
    static const char *const turned[] = {"o", "dq", "dg", "da", "db", "dv", "dw", NULL};
    write_rows(path[0], TURNED, path[1]);
    snprintf(own, sizeof own, "%s --recurrence %s --base fp32 --ranks 1,3", path[1], path[0]);
    judges(own, 2, turned);
}

/* Ranks, and parts of a grid, get what they look back to. */
DP_TEST(kernels, checks_of_rows_that_look_back_run_on_ranks) {
    NEEDS_KERNELS;
    char cmd[4096], out[16384];
    snprintf(cmd, sizeof cmd,
             "'%s' check smoke-dplr --recurrence mamba3 --backend cuda --base fp32 --forward",
             program());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(!rc && strstr(out, "\npass     repeat") && strstr(out, "\npass     exact-cp ") &&
              strstr(out, "\npass     ranks ") && strstr(out, "\npass     ranks-bound"),
          "%d: %s", rc, out);
}

/* Convolutions of q, k and v in one message, the layer, and back through both. */
DP_TEST(kernels, a_training_step) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o",    "q",    "k",       "v",       "dq",      "dk",
                                        "dv",   "dg",   "dx_q",    "dx_k",    "dx_v",    "dw_q",
                                        "dw_k", "dw_v", "dbias_q", "dbias_k", "dbias_v", NULL};
    judges("smoke-step --base fp32 --ranks 1,3", 2, names);
}

/* Forward and backward of the fast path share a workspace, and nothing is recomputed. */
DP_TEST(kernels, what_a_forward_left_gives_the_bits_of_what_is_recomputed) {
    NEEDS_KERNELS;
    passes("DP_CPU_CAPABILITY=80", "test_fast_bwd kept");
    passes("DP_CPU_CAPABILITY=90", "test_fast_bwd kept");
}

/* Where a pass leaves multiprocessors free, gradients of its last chunks start beside it. */
DP_TEST(kernels, gradients_beside_a_pass_have_the_bits_of_those_behind_it) {
    NEEDS_KERNELS;
    passes("DP_CPU_CAPABILITY=90 DP_CPU_MULTIPROCESSORS=8", "test_fast_bwd beside");
}

/* Chunks from which nothing reaches a segment's end are not read, unless they are not finite. */
DP_TEST(kernels, what_is_forgotten_within_a_segment_is_not_read) {
    NEEDS_KERNELS;
    /* on one multiprocessor also of plans without w and u */
    passes("DP_CPU_CAPABILITY=90 DP_CPU_MULTIPROCESSORS=1", "test_fast_bwd forgets");
    passes("DP_CPU_CAPABILITY=90 DP_CPU_MULTIPROCESSORS=132", "test_fast_bwd forgets");
}

/* Partial chunks leave the rows after them alone, whichever of their blocks runs first. On one
 * multiprocessor plans without w and u do so: whole chunks by tiles, or with one gate a head one
 * kernel. */
DP_TEST(kernels, packed_sequences_keep_to_themselves) {
    NEEDS_KERNELS;
    char variables[128];
    for (int sms = 1; sms <= 132; sms += 131)
        for (int reverse = 0; reverse < 2; reverse++) {
            snprintf(variables, sizeof variables,
                     "DP_CPU_ORDER=%s DP_CPU_CAPABILITY=90 DP_CPU_MULTIPROCESSORS=%d",
                     reverse ? "reverse" : "forward", sms);
            passes(variables, "test_fast_bwd packed");
        }
}

/* A case of the test below; every third has a backward. Gates 2 and 3 are so strong that pairs are
 * summed one by one. */
static void write_short(int i, const char *op, int gate) {
    static const char *const gates[] = {"softplus", "log", "lower_bound\nlower_bound = -30",
                                        "log\ng_mean = -9\ng_scale = 9"};
    char path[1024];
    snprintf(path, sizeof path, "%s/short/%s-%d.case", gt_tmpdir(), op, i);
    FILE *f = fopen(path, "w");
    fprintf(f,
            "reason = r\nsource = s\nop = %s\nT = 247\nHV = 3\nH = %d\nK = %d\nV = %d\n"
            "gate = %s\nbeta = sigmoid\nl2norm = %s\ns0_scale = %s\n"
            "cu_seqlens = 0,1,17,17,49,66,97,161,166,182,214,247\nbase = bf16\nchain = fp32\n"
            "backward = %s\n",
            op, i & 1 ? 3 : 1, i & 1 ? 64 : 128, i & 2 ? 64 : 128, gates[gate],
            i & 2 ? "no" : "yes", i == 1 ? "0" : "0.3", i % 3 ? "no" : "yes");
    fclose(f);
}

/* Lengths around steps of 16 and 32 tokens, all widths. On one multiprocessor one kernel makes o
 * and the last states, more heads than a warp has lanes. So it does on 16, whose blocks go from the
 * last sequence to the first: what one writes behind its end stays. On 96 a head of one gate is two
 * blocks, and with a gate a channel two kernels do it. */
DP_TEST(kernels, short_sequences_in_one_kernel) {
    NEEDS_KERNELS;
    static const struct {
        const char *on, *cases;
        int n;
    } runs[] = {{"1", "*", 8}, {"16 DP_CPU_ORDER=reverse", "*-3", 2}, {"96", "*-0", 2}};
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd, "mkdir -p '%s/short'", gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    for (int i = 0; i < 4; i++)
        write_short(i, "gdn", i & 1);
    for (int i = 0; i < 4; i++)
        write_short(i, "kda", i);
    for (int i = 0; i < 3; i++) {
        snprintf(cmd, sizeof cmd,
                 "cd '%s/short' && DP_CPU_CAPABILITY=90 DP_CPU_MULTIPROCESSORS=%s '%s' run "
                 "%s.case --backend cuda --ranks 1 --cache ../cache-of-short | grep -v ^pass",
                 gt_tmpdir(), runs[i].on, program(), runs[i].cases);
        const int rc = gt_run(cmd, out, sizeof out);
        snprintf(cmd, sizeof cmd, "PASS (%d passed, 0 failed, 0 skipped, 0 unjudged", runs[i].n);
        CHECK(rc == 0 && strstr(out, cmd), "%.3000s", out);
    }
}

/* Four value heads of a key head in one block of the chunk kernel. */
DP_TEST(kernels, value_heads_share_products_of_their_key_head) {
    NEEDS_KERNELS;
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd,
             "mkdir -p '%s/shared' && cd '%s/shared' && printf 'reason = r\nsource = s\nop = gdn\n"
             "seed = 3\nT = 1540\nH = 1\nHV = 4\nK = 64\nV = 64\ngate = log\nbeta = plain\n"
             "backward = no\nbase = bf16\nchain = fp32\nl2norm = yes\n' >x.case && "
             "DP_CPU_CAPABILITY=90 DP_CPU_MULTIPROCESSORS=8 '%s' run x.case --backend cuda "
             "--ranks 1 --cache none",
             gt_tmpdir(), gt_tmpdir(), program());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "PASS (1 passed, 0 failed, 0 skipped"), "%.3000s", out);
}

/* Keys that are nearly parallel, erased by betas near 2: chunks of 64 make other errors than 32.
 * With a backward, o and the last state are held against 32, gradients against 64. */
DP_TEST(kernels, a_forward_in_one_kernel_says_its_chunks) {
    NEEDS_KERNELS;
    static const char *const says[2][2] = {{"chunk=32,exp", "chunk=32,chunk_backward=64,exp"},
                                           {"\"exp=fast,scores=paired,beta", NULL}};
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd,
             "mkdir -p '%s/near' && cd '%s/near' && printf 'reason = r\\nsource = s\\nop = kda\\n"
             "seed = 3049\\nT = 120\\nH = 1\\nK = 128\\nV = 128\\ngate = softplus\\ng_mean = -4\\n"
             "backward = no\\nbase = bf16\\ncu_seqlens = 0,40,80,120\\nbeta = sigmoid2\\n"
             "keys = correlated\\nbeta_lo = 4\\nbeta_hi = 2\\ns0_scale = 0.3\\n' >near.case && "
             "grep -v backward near.case >both.case",
             gt_tmpdir(), gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    for (int two = 0; two < 2; two++) {
        snprintf(
            cmd, sizeof cmd,
            "cd '%s/near' && DP_CPU_CAPABILITY=90 DP_CPU_MULTIPROCESSORS=%d '%s' run near.case %s "
            "--backend cuda --cache none --json r.json && grep design r.json",
            gt_tmpdir(), two ? 132 : 1, program(), two ? "" : "both.case");
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(!rc && strstr(out, says[two][0]) && (two || strstr(out, says[two][1])), "%.3000s",
              out);
    }
}

/* Sequences of a batch that are cut in segments: each as it is alone, and what is judged. */
DP_TEST(kernels, sequences_of_a_batch_cut_in_segments) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o",     "final_state", "dq",       "dk",  "dv", "dg",
                                        "dbeta", "dA_log",      "ddt_bias", "ds0", NULL};
    passes("DP_CPU_CAPABILITY=90", "test_fast_bwd batches");
    setenv("DP_CPU_CAPABILITY", "90", 1);
    json_t *j = judged("segments-batch --way segments,segments-save-all", 0);
    unsetenv("DP_CPU_CAPABILITY");
    if (j) all_judged(j, 2, names);
    json_decref(j);
    passes("", "test_split");
}

/* M and H of ranks with the rounding of a pass (design pair=rows), with w and u and, on one
 * multiprocessor, without. */
DP_TEST(kernels, pairs_of_ranks_in_the_rounding_of_a_pass) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "S_in", "dq", NULL};
    setenv("DP_CPU_CAPABILITY", "90", 1);
    for (int many = 0; many < 2; many++) {
        setenv("DP_CPU_MULTIPROCESSORS", many ? "132" : "1", 1);
        json_t *j = judged("pair-rows gdn-wide --ranks 3 --chain bf16 --merge allgather "
                           "--way segments",
                           0);
        if (j) all_judged(j, 2, names);
        for (size_t i = 0; j && i < 2; i++) {
            json_t *run = json_array_get(json_object_get(j, "runs"), i);
            const char *design =
                json_string_value(json_object_get(json_object_get(run, "policy"), "design"));
            CHECK(design && strstr(design, "pair=rows"), "design %s", design ? design : "none");
        }
        json_decref(j);
    }
    unsetenv("DP_CPU_MULTIPROCESSORS");
    unsetenv("DP_CPU_CAPABILITY");
}

/* The error of the final state on a device of so many multiprocessors. */
static double state_error(const char *run, const char *capability, const char *multiprocessors) {
    static const char *const names[] = {"o", "final_state", "dq", NULL};
    setenv("DP_CPU_CAPABILITY", capability, 1);
    setenv("DP_CPU_MULTIPROCESSORS", multiprocessors, 1);
    json_t *j = judged(run, 0);
    unsetenv("DP_CPU_CAPABILITY");
    unsetenv("DP_CPU_MULTIPROCESSORS");
    if (j) all_judged(j, 1, names);
    const double e =
        j ? json_number_value(json_object_get(
                tensor(json_array_get(json_object_get(j, "runs"), 0), "final_state"), "rel_fro"))
          : 0;
    json_decref(j);
    return e;
}

/* With one gate a head, enough heads and products of warpgroups, states meet the raw rows: one
 * rounding less, which the error shows. On one multiprocessor one kernel does it, on six two. */
DP_TEST(kernels, one_gate_a_head_from_rows_as_given) {
    NEEDS_KERNELS;
    char run[1024];
    snprintf(run, sizeof run, "%s/long-gdn.case", gt_tmpdir());
    FILE *f = fopen(run, "w");
    fputs("reason = r\nsource = s\nop = gdn\nT = 640\nH = 1\nHV = 2\nK = 64\nV = 64\n"
          "gate = softplus\nbeta = sigmoid\nl2norm = yes\nbase = bf16\n",
          f);
    fclose(f);
    const double given = state_error(run, "90", "1"), made = state_error(run, "90", "132");
    const double two = state_error(run, "90", "6");
    CHECK(given > 0 && given < made, "%.3g, with w u kg qg %.3g", given, made);
    CHECK(two > 0 && two < made && two != given, "two kernels %.3g, one %.3g", two, given);
    CHECK(state_error(run, "80", "1") > 0, "without warpgroups");
}

/* The same with a gate a channel: no w and u are rounded. Gates so strong that pairs are summed one
 * by one are judged alike. */
DP_TEST(kernels, a_gate_a_channel_without_w_and_u) {
    NEEDS_KERNELS;
    const char *run = "k64-v128 --base bf16 --ranks 1";
    const double bare = state_error(run, "90", "1"), made = state_error(run, "90", "132");
    CHECK(bare > 0 && bare < made, "%.3g, with w and u %.3g", bare, made);
    CHECK(state_error("strong-wide --base bf16 --ranks 1", "90", "1") > 0, "pairs");
}

/* A rank's sequence cut in segments, as the fast path does: dM is a chain over all of them. */
DP_TEST(kernels, chains_of_a_rank_cut_in_segments) {
    NEEDS_KERNELS;
    char cmd[4096], out[1024];
    snprintf(cmd, sizeof cmd, "\"$(dirname '%s')/test_segments\"", program());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(!rc, "%d: %s", rc, out);
}

/* Values of 192 and 256 columns are heads of 64 and 128 to the fast path, and have their bits. */
DP_TEST(kernels, values_wider_than_the_kernels) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o",     "final_state", "dq",       "dk",  "dv", "dg",
                                        "dbeta", "dA_log",      "ddt_bias", "ds0", NULL};
    char cmd[4096], mkda[2048];
    snprintf(mkda, sizeof mkda, "%s/wide-mkda.case", gt_tmpdir());
    FILE *f = fopen(mkda, "w");
    fputs("reason = r\nsource = s\nop = mkda\nR = 2\nT = 200\nH = 1\nHV = 2\nK = 64\nV = 192\n"
          "gate = softplus\ng_mean = -4\nbeta = sigmoid\nl2norm = yes\ns0_scale = 0.3\ndstate = "
          "yes\ncu_seqlens = 0,12,30,200\nranks = 1,2\nbase = bf16\nchain = fp32\n",
          f);
    fclose(f);
    setenv("DP_CPU_CAPABILITY", "90", 1);
    judges("wide-values --ranks 3 --way segments-dh-only,windows", 2, names);
    judges("wide-values-gdn --ranks 2 --exchange heads --way segments-save-all", 1, names);
    snprintf(cmd, sizeof cmd, "'%s' --ranks 2 --own cyclic --exchange scan", mkda);
    judges(cmd, 1, names);
    json_t *j = judged("wide-values --ranks 1 --way pair-dg", 0);
    const char *path =
        json_string_value(json_object_get(json_array_get(json_object_get(j, "runs"), 0), "path"));
    CHECK(path && !strcmp(path, "fast/simple"), "%s", path ? path : "none");
    json_decref(j);
    setenv("DP_CPU_MULTIPROCESSORS", "1", 1);
    judges("wide-values wide-values-gdn --ranks 1", 2, names);
    unsetenv("DP_CPU_MULTIPROCESSORS");
    unsetenv("DP_CPU_CAPABILITY");
    passes("DP_CPU_CAPABILITY=90", "test_fast_bwd wide");
}

/* K and V of a case of each op; the fast path takes K of 64 and V filled up to 64. */
static void write_narrow(const char *op, int K, int V, const char *more) {
    char path[1024];
    const int keys = !strcmp(op, "mkda") || !strcmp(op, "gated-deltaproduct");
    snprintf(path, sizeof path, "%s/narrow/%s-%d.case", gt_tmpdir(), op, V);
    FILE *f = fopen(path, "w");
    fprintf(f,
            "reason = r\nsource = s\nop = %s\nT = 70\nHV = 2\nH = %d\nK = %d\nV = %d\nR = %d\n"
            "cu_seqlens = 0,20,20,70\ng_scale = 0.02\ns0_scale = 0.5\nbase = fp32,bf16\n"
            "chain = fp32\n%s",
            op, strcmp(op, "dplr") ? 1 : 2, K, V, keys ? 2 : 1, more);
    fclose(f);
}

/* V that 8 does not divide: every recurrence and path with gradients and on ranks, two exchanges,
 * calls from slots. */
DP_TEST(kernels, values_of_any_width) {
    NEEDS_KERNELS;
    static const char *const ops[] = {
        "kda", "gdn", "mkda", "gdn2", "gla", "ssd", "gated-deltaproduct", "dplr"};
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd, "mkdir -p '%s/narrow'", gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    for (int i = 0; i < 8; i++) {
        write_narrow(ops[i], 24, i % 2 ? 3 : 20, "dstate = yes\nranks = 1,2\n");
        if (i < 3) write_narrow(ops[i], 64, 60, "dstate = yes\nranks = 1,2\n");
    }
    write_narrow("gdn", 64, 12, "dstate = yes\nranks = 2\nmerge = ring,heads\n");
    write_narrow("kda", 64, 12, "session = 30,4-2,1\nsession_slots = 5\n");
    static const struct {
        const char *on, *base, *cases;
        int n;
    } runs[] = {{"75", "fp32", "*.case", 25}, {"90", "bf16", "*-60.case *-12.case", 9}};
    for (int i = 0; i < 2; i++) {
        snprintf(cmd, sizeof cmd,
                 "cd '%s/narrow' && DP_CPU_CAPABILITY=%s '%s' run %s --backend cuda --base %s "
                 "--cache ../cache-of-narrow | grep -v ^pass",
                 gt_tmpdir(), runs[i].on, program(), runs[i].cases, runs[i].base);
        const int rc = gt_run(cmd, out, sizeof out);
        snprintf(cmd, sizeof cmd, "PASS (%d passed, 0 failed, 0 skipped, 0 unjudged", runs[i].n);
        CHECK(rc == 0 && strstr(out, cmd), "%s: %.3000s", runs[i].on, out);
    }
}

/* Ranks with a device each wait for M of later ranks, whose hosts must not wait for them. */
DP_TEST(kernels, windows_whose_backward_keeps_m) {
    NEEDS_KERNELS;
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd,
             "DP_CPU_CAPABILITY=90 timeout 600 '%s' run k64-v128 --cases '%s' --backend cuda --way "
             "windows,windows-dh-only --ranks 3,4",
             program(), gt_cases());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(!rc && strstr(out, "(4 passed, 0 failed, 0 skipped"), "%d: %s", rc, out);
}

/* Steps of serving on states in slots: windows, accepted tokens, padding, both layouts. */
DP_TEST(kernels, decode_steps_are_within_the_worst_that_fp32_makes) {
    NEEDS_KERNELS;
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd,
             "DP_CPU_CAPABILITY=90 DP_CPU_MULTIPROCESSORS=3 \"$(dirname '%s')/test_decode\" small",
             program());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(!rc && strstr(out, ", 0 failed"), "%d: %s", rc, out);
}

/* States of 8 and 16 bits a number: the codes, scales and rests of the simulated formats. */
DP_TEST(kernels, decode_steps_keep_states_as_the_simulated_formats_do) {
    NEEDS_KERNELS;
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd,
             "cd \"$(dirname '%s')\" && export DP_CPU_CAPABILITY=90 DP_CPU_MULTIPROCESSORS=3 && "
             "./test_packed small && ./test_packed drift 1000",
             program());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(!rc && strstr(out, ", 0 failed") && strstr(out, "int8ef"), "%d: %s", rc, out);
}

/* A gather of NCCL waits for all ranks on a device; here for all host threads. */
DP_TEST(kernels, a_rank_that_dies_or_hangs_ends_all_and_is_named) {
    NEEDS_KERNELS;
    char cmd[8192], out[8192];
    static const char *const how[] = {"shared 0.3 few", "nccl 0.6 few ring"};
    for (int i = 0; i < 2; i++) {
        snprintf(cmd, sizeof cmd, "LD_LIBRARY_PATH='%s' timeout 600 '%s/test_kill' 3 %s", folder(),
                 folder(), how[i]);
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 0 && strstr(out, i ? "did not reach ncclSend" : "did not reach"), "%d: %s", rc,
              out);
    }
}

/* A machine that stands still for longer than the limit: nobody was late. */
DP_TEST(kernels, a_pause_of_all_ranks_is_no_rank_s_fault) {
    NEEDS_KERNELS;
    char cmd[4096], out[4096];
    snprintf(cmd, sizeof cmd, "timeout 600 '%s/test_procs' pause 3 0.5", folder());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(!rc && strstr(out, ", 0 failed"), "%d: %s", rc, out);
}

/* A process per rank: the bits of ranks that share a device, and a killed one is named by the
 * others before any limit. */
DP_TEST(kernels, ranks_that_are_processes) {
    NEEDS_KERNELS;
    char cmd[16384], out[8192];
    snprintf(cmd, sizeof cmd,
             "LD_LIBRARY_PATH='%s' timeout 600 '%s/test_procs' bits 3 2 32 && LD_LIBRARY_PATH='%s' "
             "timeout 600 '%s/test_procs' kill 3 1 few",
             folder(), folder(), folder(), folder());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "the process of rank 1 has ended"), "%d: %s", rc, out);
}

DP_TEST(kernels, ranks_over_nccl_are_judged) {
    NEEDS_KERNELS;
    char cmd[16384], out[8192];
    snprintf(cmd, sizeof cmd,
             "LD_LIBRARY_PATH='%s' '%s' run smoke-kda --cases '%s' --cache '%s' --backend nccl "
             "--ranks 4 --chain fp32 --exchange allgather,ring --payload full,m-i",
             folder(), program(), gt_cases(), gt_cache());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "backend=nccl,ranks=4") && strstr(out, "merge=ring,payload=m-i") &&
              strstr(out, " 0 skipped"),
          "%d: %s", rc, out);
}

/* More than there can be processes: said of every run. */
DP_TEST(kernels, ranks_over_nccl_that_are_too_many_are_skipped_with_the_reason) {
    NEEDS_KERNELS;
    char cmd[8192], out[8192], path[512];
    snprintf(path, sizeof path, "%s/many.case", gt_tmpdir());
    FILE *f = fopen(path, "w");
    fprintf(f, "reason = test\nsource = test\nop = kda\nT = 66\nK = 16\nranks = 66\nbase = "
               "fp32\nchain = fp32\n");
    fclose(f);
    snprintf(cmd, sizeof cmd,
             "DP_CPU_DEVICES=2 LD_LIBRARY_PATH='%s' '%s' run '%s' --cache none --backend nccl",
             folder(), program(), path);
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 2 && strstr(out, "skipped  many:backend=nccl,ranks=66,base=fp32,chain=fp32  (66 "
                                 "ranks over NCCL: 2 devices"),
          "%d: %s", rc, out);
}

static int count(const char *text, const char *what) {
    int n = 0;
    while ((text = strstr(text, what))) {
        n++;
        text++;
    }
    return n;
}

/* Runs of as many ranks share them, whatever the kernels do not take in between, and the
 * convolutions of a step too. */
DP_TEST(kernels, communicators_of_nccl_are_made_once) {
    NEEDS_KERNELS;
    char cmd[4096], out[16384];
    snprintf(
        cmd, sizeof cmd,
        "LD_LIBRARY_PATH='%s' NCCL_DEBUG=INFO '%s' run smoke-kda smoke-step smoke-conv --cases "
        "'%s' --cache '%s' --backend nccl --ranks 2,3 --base fp32 --way plain,segments,dh-only",
        folder(), program(), gt_cases(), gt_cache());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "backend=nccl,ranks=3") && strstr(out, "way=segments"), "%d: %s",
          rc, out);
    CHECK(count(out, "ncclCommInitAll of") == 2 && count(out, "ncclCommInitAll of 2 ranks") == 1,
          "%s", out);
}

/* More ranks than devices are processes: the same bits as host threads, one communicator for all
 * runs of as many. */
DP_TEST(kernels, ranks_over_nccl_that_share_devices_are_judged) {
    NEEDS_KERNELS;
    char cmd[8192], out[16384];
    snprintf(cmd, sizeof cmd,
             "run() { DP_CPU_DEVICES=$1 LD_LIBRARY_PATH='%s' NCCL_DEBUG=INFO '%s' run smoke-kda "
             "smoke-step smoke-conv packed-across smoke-chain --cases '%s' --cache '%s' --backend "
             "nccl --ranks 3,4 --base fp32 "
             "--chain fp32; }; a=$(run 2 2>&1) && b=$(run 16 2>&1); echo \"$a\"; [ \"$(echo \"$a\" "
             "| grep ^pass)\" = \"$(echo \"$b\" | grep ^pass)\" ]",
             folder(), program(), gt_cases(), gt_cache());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "smoke-step:backend=nccl,ranks=3") &&
              strstr(out, "packed-across:backend=nccl,ranks=4") &&
              strstr(out, "smoke-conv:backend=nccl,ranks=3"),
          "%d: %s", rc, out);
    CHECK(strstr(out, "skipped  smoke-chain:backend=nccl  (op = chain"), "%s", out);
    CHECK(count(out, "ncclCommInitRank of") == 2 && count(out, "ncclCommInitRank of 3 ranks") == 1,
          "%s", out);
}

/* A case ends with the rank's name, the next one gets new processes. 9: killed, 19: stopped within
 * a gather, which then ends nowhere. */
DP_TEST(kernels, a_killed_process_ends_its_case_alone) {
    NEEDS_KERNELS;
    char cmd[8192], out[16384];
    for (int with = 9; with <= 19; with += 10) {
        snprintf(
            cmd, sizeof cmd,
            "DP_CPU_DEVICES=2 DP_CPU_NCCL_DIES='1 4 %d' LD_LIBRARY_PATH='%s' timeout 600 '%s' run "
            "smoke-kda smoke-conv --cases '%s' --cache none --backend nccl --ranks 3,4 --base fp32 "
            "--chain fp32,tf32 --limit 3",
            with, folder(), program(), gt_cases());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 2 && strstr(out, "smoke-kda: nccl, 4 ranks") &&
                  strstr(out, with == 9 ? "the process of rank 1 has ended"
                                        : "the process of rank 1 has not run for") &&
                  strstr(out, "pass     smoke-conv:backend=nccl,ranks=3"),
              "signal %d: %d: %s", with, rc, out);
    }
}

/* The recurrence of the double-double truth, one thread a lane: the file that it leads to is that
 * of the CPU, bit for bit. */
DP_TEST(kernels, truth_on_a_device_is_that_of_the_cpu) {
    NEEDS_KERNELS;
    static const char *const shape[] = {
        "op = kda\nT = 90\nH = 1\nHV = 2\nK = 30\nV = 10\ns0_scale = 1\ncu_seqlens = "
        "0,40,40,90\nranks = 2\n",
        "op = mkda\nT = 66\nR = 3\nK = 64\nV = 5\nbeta_hi = 0.4\ngate = softplus\nl2norm = yes\n",
        "op = gdn\nT = 70\nK = 128\nV = 6\n",
        "op = gdn2\nT = 70\nH = 1\nHV = 2\nK = 16\nV = 6\n",
        "op = dplr\nT = 70\nK = 16\nV = 6\nranks = 2\n",
        "op = gated-deltaproduct\nT = 70\nR = 3\nK = 24\nV = 6\nranks = 2\n"};
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        char cmd[4096], out[4096], path[512];
        snprintf(path, sizeof path, "%s/device.case", gt_tmpdir());
        FILE *f = fopen(path, "w");
        fprintf(f, "reason = test\nsource = test\n%sbackward = no\ntruth = dd\n", shape[i]);
        fclose(f);
        snprintf(cmd, sizeof cmd,
                 "cd '%s' && '%s' truth '%s' --cache none -o 1.st && '%s' truth '%s' --cache none "
                 "-o 2.st && cmp 1.st 2.st",
                 gt_tmpdir(), program(), path, gt_program(), path);
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(!rc && strstr(out, "on CPU in place of a device"), "shape %zu: %d: %s", i, rc, out);
    }
}

/* Faults of indexing and synchronisation switched on in the kernels (gpu/fault.cuh): each is red,
 * first at a tensor that can show it. */
DP_TEST(kernels, faults_of_the_kernels_are_seen) {
    NEEDS_KERNELS;
    static const struct {
        const char *fault, *seen;
    } F[] = {{"no-sync-state", "final_state"},
             {"fwd-first-subseq", "exact-packed"},
             {"links-by-rank", "own=zigzag"},
             {"token-read-decayed", "smoke-dplr"},
             {"token-first-row", "smoke-dplr"},
             {"token-column-short", "dq"},
             {"slot-neighbour", "session-slots"},
             {"sent-less-i", "payload=m-i"},
             {"sent-level-lost", "merge=scan"},
             {"sent-from-zero", "merge=serial"},
             {"sent-links-turned", "merge=scan,own=zigzag"},
             {"sent-next-heads", "merge=heads"},
             {"sent-sum-short", "dq"},
             {"halo-leak", "smoke-conv"}};
    char cmd[4096], out[32768], names[1024] = "";
    const int n = (int)(sizeof F / sizeof *F);
    for (int i = 0; i < n; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? "," : "",
                 F[i].fault);
    snprintf(cmd, sizeof cmd,
             "mkdir -p %s/kernels && env -u OMP_WAIT_POLICY '%s' museum --kernels --fault %s "
             "--cases '%s' --cache '%s' "
             "--out %s/kernels",
             gt_tmpdir(), program(), names, gt_cases(), gt_cache(), gt_tmpdir());
    const int rc = gt_run(cmd, out, sizeof out);
    snprintf(names, sizeof names,
             "%d of %d faults seen, %d at the right tensor; without a fault 0 of ", n, n, n);
    CHECK(rc == 0 && strstr(out, names) && !strstr(out, "0 of 0 runs"), "%d: %.3000s", rc, out);
    for (int i = 0; i < n; i++) {
        char start[64];
        snprintf(start, sizeof start, "\n%s ", F[i].fault);
        char *line = strstr(out, start);
        const char *at = line ? strstr(line, F[i].seen) : NULL;
        CHECK(at && at < line + 1 + strcspn(line + 1, "\n"), "%s: %.3000s", F[i].fault,
              line ? line : out);
    }
    CHECK(strstr(out, "holds values of rank 0, head 0, sequence 0"), "%.3000s", out);
    snprintf(
        cmd, sizeof cmd,
        "cp harness/tests/data/record-small.json %s/kernels/results.json && %s report %s/kernels "
        "&& grep -c 'Faults of the CUDA kernels' %s/kernels/report.html",
        gt_tmpdir(), gt_program(), gt_tmpdir(), gt_tmpdir());
    int page = gt_run(cmd, out, sizeof out);
    CHECK(page == 0 || strstr(out, "No module named"), "exit status %d: %.3000s", page, out);
    snprintf(
        cmd, sizeof cmd,
        "sed -i 's/\"what\": .*,$/\"what\": 5,/' %s/kernels/kernels.json && %s report %s/kernels",
        gt_tmpdir(), gt_program(), gt_tmpdir());
    page = gt_run(cmd, out, sizeof out);
    CHECK((page == 2 && strstr(out, "kernels.json: faults[0].what")) ||
              strstr(out, "No module named"),
          "exit status %d: %.3000s", page, out);
    snprintf(cmd, sizeof cmd, "'%s' museum --kernels --cases '%s'", gt_program(), gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "no faults to switch on"), "%.300s",
          out);
    snprintf(cmd, sizeof cmd, "'%s' museum --kernels --fault halo-leak,none-such --cases '%s'",
             program(), gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "--fault 'none-such'"), "%.300s", out);
}

/* Calls of a few tokens run in the decode kernels, and windows show the states of all tokens. A
 * state stays in the session's format where they have it. A width that they do not have leaves the
 * session to the others. */
DP_TEST(kernels, sessions_decode) {
    NEEDS_KERNELS;
    static const char *const names[] = {"o", "final_state", NULL};
    static const char *const within[] = {"o_drafted", "state_drafted", "state_within", NULL};
    static const char *const pool[] = {"pool", NULL};
    static const struct {
        const char *cases, *path, *rollback;
    } ROWS[] = {{"session-verify", "simple, decode", "states of every token"},
                {"session-decode", "simple, decode, packed states", NULL},
                {"session-slots", "simple, decode", "states of every token"},
                {"'%s/narrow.case'", "simple", "accepted tokens run again"},
                {"'%s/steps.case'", "decode", "states of every token"},
                {"'%s/e4m3.case'", "simple, decode, packed states", NULL},
                {"'%s/e5m2.case'", "simple, decode, packed states", NULL},
                {"'%s/int8.case'", "simple, decode, packed states", NULL},
                {"'%s/fp16.case'", "decode, packed states", NULL},
                {"'%s/half.case'", "decode, packed states", NULL},
                {"session-prefill", "simple, decode", NULL}};
#define KEPT(NAME, op, session, state)                                                       \
    NAME ".case\nop = " op "\nT = 40\nH = 1\nHV = 2\nK = 32\nV = 64\ncu_seqlens = 0,24,40\n" \
         "session = " session "\nsession_state = " state "\nbase = fp32,bf16\n"
    const char *const texts[] = {
        KEPT("e4m3", "gdn", "12,1", "e4m3-block"),
        KEPT("e5m2", "kda", "12,3,1", "e5m2-block"),
        KEPT("int8", "mkda\nR = 2\nbeta_hi = 0.5", "12,1", "int8-block"),
        KEPT("fp16", "gdn", "8,1", "fp16sr"),
        KEPT("half", "kda", "8,1", "fp16"),
        "narrow.case\nop = kda\nT = 20\nK = 16\nsession = 12,4-2\nbase = fp32\n",
        "steps.case\nop = mkda\nR = 2\nbeta_hi = 0.5\nT = 20\nK = 32\nsession = 2,1,8-3,4-1\n"
        "base = fp32\n"};
    char path[2048];
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        const size_t n = strcspn(texts[i], "\n");
        snprintf(path, sizeof path, "%s/%.*s", gt_tmpdir(), (int)n, texts[i]);
        FILE *f = fopen(path, "w");
        REQUIRE(f, "%s", path);
        fprintf(f, "reason = r\nsource = s%s", texts[i] + n);
        fclose(f);
    }
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        char ask[2048];
        json_t *r;
        size_t n;
        snprintf(ask, sizeof ask, ROWS[i].cases, gt_tmpdir());
        json_t *j = judged(ask, 0);
        if (!j) return;
        all_judged(j, 1, names);
        if (ROWS[i].rollback && strstr(ROWS[i].path, "decode")) all_judged(j, 1, within);
        if (i == 2) all_judged(j, 1, pool);
        json_array_foreach(json_object_get(j, "runs"), n, r) {
            const char *ran = json_string_value(json_object_get(r, "path"));
            const char *back = json_string_value(json_object_get(r, "rollback"));
            CHECK(ran && !strcmp(ran, ROWS[i].path), "%s: %s", ask, ran);
            CHECK(!back == !ROWS[i].rollback && (!back || !strcmp(back, ROWS[i].rollback)),
                  "%s: %s", ask, back);
        }
        json_decref(j);
    }
}

/* The pool is handed over, not emulated: what a kernel does to its slots is seen. */
DP_TEST(kernels, what_decode_steps_do_to_slots_is_judged) {
    NEEDS_KERNELS;
    static const char *const F[][2] = {
        {"slot-neighbour", "is the first that leaves a wrong state: sequence "},
        {"slot-in-place", "pool: slot 4, which sequence 2 owns, was overwritten in call 2"},
        {"padding-last-slot", "pool: slot 6, which sequence 0 owns, was overwritten in call 2"}};
    for (size_t i = 0; i < sizeof F / sizeof *F; i++) {
        char cmd[4096], out[8192];
        snprintf(cmd, sizeof cmd,
                 "DPG_FAULT=%s '%s' run session-slots --cases '%s' --cache '%s' --base fp32 "
                 "--backend cuda 2>&1",
                 F[i][0], program(), gt_cases(), gt_tmpdir());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 1 && strstr(out, F[i][1]), "%s: exit status %d: %.3000s", F[i][0], rc, out);
    }
}

DP_TEST(kernels, checks_without_truth_take_a_way) {
    NEEDS_KERNELS;
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd,
             "'%s' check smoke-kda --cases '%s' --backend cuda --only transpose --way plain",
             program(), gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && strstr(out, "pass     transpose"), "%s", out);
    snprintf(cmd, sizeof cmd,
             "'%s' check smoke-kda --cases '%s' --backend cuda --only transpose --way dh-only",
             program(), gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "variant dh-only") &&
              strstr(out, "gives no M and dM") && strstr(out, "NOTHING CHECKED"),
          "%s", out);
    snprintf(cmd, sizeof cmd, "'%s' check smoke-kda --cases '%s' --way dh-only", program(),
             gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "--variant dh-only"), "%s", out);
}

/* ---- checks whose arrays stay on the device -------------------------------------------------- */

DP_TEST(kernels, arrays_on_a_device_have_the_bits_of_the_host) {
    NEEDS_KERNELS;
    char cmd[4096], out[8192];
    snprintf(cmd, sizeof cmd, "'%s/test_arrays'", folder());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(!rc && strstr(out, ", 0 failed"), "%d: %s", rc, out);
}

/* The checks of a larger problem on so many devices: with one, its arrays are there. */
static json_t *checked(const char *on, const char *args, int devices, int want) {
    char cmd[4096], out[16384];
    snprintf(cmd, sizeof cmd,
             "DP_CPU_DEVICES=%d '%s' check %s --cases '%s' --backend cuda --ranks 2 --json "
             "'%s/checks.json'",
             devices, on, args, gt_cases(), gt_tmpdir());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == want && !strstr(out, "arrays on the device") == (devices > 1), "%s: %d: %.3000s",
          args, rc, out);
    snprintf(cmd, sizeof cmd, "%s/checks.json", gt_tmpdir());
    json_t *checks = json_load_file(cmd, 0, NULL), *c;
    size_t i;
    json_array_foreach(checks, i, c) json_object_del(c, "seconds");
    return checks;
}

/* Names, verdicts, numbers of entries, reasons and first differences. */
static void both_say(const char *on, const char *args, int want, size_t n) {
    json_t *there = checked(on, args, 1, want), *here = checked(on, args, 2, want);
    CHECK(json_array_size(there) >= n && json_equal(there, here), "%s", args);
    json_decref(there);
    json_decref(here);
}

DP_TEST(kernels, checks_on_a_device_say_what_those_of_the_host_say) {
    NEEDS_KERNELS;
    both_say(program(), "smoke-kda --tokens 136 --heads 3 --every", 0, 20);
    both_say(program(), "smoke-dplr --tokens 72 --heads 3 --block 2", 0, 20);
}

DP_TEST(kernels, checks_on_a_device_name_faults_as_those_of_the_host_do) {
    NEEDS_KERNELS;
    static const char *const F[][2] = {
        {"gate-head0", "--only heads"},         {"gate-head0", "--only head-order"},
        {"offset-wraps", "--only packed"},      {"offset-wraps", "--only sequence-order"},
        {"offset-wraps", "--only exact-cp"},    {"decay-before-use", "--only ranks"},
        {"bwd-next-head", "--only ranks-bound"}};
    char args[128];
    for (size_t i = 0; i < sizeof F / sizeof *F; i++) {
        setenv("DPG_FAULT", F[i][0], 1);
        snprintf(args, sizeof args, "smoke-kda --tokens 200 --heads 3 %s", F[i][1]);
        both_say(program(), args, 1, 1);
        unsetenv("DPG_FAULT");
    }
}
