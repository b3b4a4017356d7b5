/* Case files: every refusal by its message (file, line, key, value), the meaning of the settings,
 * data files, overrides, the project's cases. */
#include "cases.h"
#include "harness/case/operations.h"
#include "ref/files/safetensors.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HEAD "reason = r\nsource = s\n"
#define KDA HEAD "op = kda\nT = 12\nK = 4\n" /* 5 lines: what a test appends starts on line 6 */

static dp_status parse(const char *text, dp_case *c, dp_err *e) {
    char path[512];
    snprintf(path, sizeof path, "%s/x.case", gt_tmpdir());
    *e = (dp_err){0};
    return dp_case_parse(text, strlen(text), path, 1, c, e);
}

static void refuse(int line, const char *text, const char *const *words) {
    dp_case c;
    dp_err e;
    const dp_status s = parse(text, &c, &e);
    CHECK(s == DP_EINPUT, "line %d: status %d", line, s);
    CHECK(strstr(e.msg, "/x.case:"), "line %d: file not named: %s", line, e.msg);
    for (; *words; words++)
        CHECK(strstr(e.msg, *words), "line %d: '%s' not in: %s", line, *words, e.msg);
    CHECK(!c.name && !c.reason && !c.p.q, "line %d: something of a refused case is left", line);
    if (!s) dp_case_free(&c);
}
#define REFUSE(text, ...) refuse(__LINE__, text, (const char *const[]){__VA_ARGS__, NULL})

static int accept(int line, const char *text, dp_case *c) {
    dp_err e;
    const dp_status s = parse(text, c, &e);
    CHECK(!s, "line %d: refused: %s", line, e.msg);
    return !s;
}
#define ACCEPT(text, c) \
    if (!accept(__LINE__, text, c)) return

DP_TEST(case, refuses_what_is_not_a_setting) {
    REFUSE(KDA "\nrnaks = 2\n", "x.case:7: rnaks = 2: unknown key", "ranks");
    REFUSE(KDA "g_sacle = 1\n", "x.case:6:", "g_scale");
    REFUSE(KDA "this_key_is_much_longer_than_any_key_there_is_or_will_ever_be = 1\n",
           "unknown key");
    REFUSE(KDA "[section]\n", "x.case:6: [section]", "no sections");
    REFUSE(KDA "ranks 2\n", "x.case:6: ranks 2", "key = value");
    REFUSE(KDA "T = 13\n", "x.case:6: T = 13", "on line 4");
    REFUSE(KDA "T = 12\n", "x.case:6: T = 12", "on line 4");
    REFUSE(KDA "ranks = \n", "x.case:6: ranks", "value is missing");
    REFUSE(KDA "ranks = # none\n", "x.case:6: ranks", "value is missing");
    REFUSE(KDA " = 3\n", "x.case:6:", "unknown key");
    dp_case c;
    dp_err e = {0};
    CHECK(dp_case_parse("a\0b", 3, "z.case", 1, &c, &e) == DP_EINPUT &&
              strstr(e.msg, "z.case: byte 1 is zero"),
          "%s", e.msg);
    char *big = dp_calloc((1 << 20) + 2, 1);
    memset(big, '\n', (1 << 20) + 1);
    dp_err e2 = {0};
    CHECK(dp_case_parse(big, (1 << 20) + 1, "z.case", 1, &c, &e2) == DP_EINPUT &&
              strstr(e2.msg, "z.case: 1048577 bytes"),
          "%s", e2.msg);
    free(big);
}

DP_TEST(case, refuses_missing_keys) {
    REFUSE("source = s\nop = kda\nT = 4\nK = 4\n", "reason: missing");
    REFUSE("reason = r\nop = kda\nT = 4\nK = 4\n", "source: missing");
    REFUSE(HEAD "T = 4\nK = 4\n", "op: missing", "mkda");
    REFUSE("", "op: missing");
    REFUSE(HEAD "op = kda\nK = 4\n", "T: missing");
    REFUSE(HEAD "op = kda\nT = 4\n", "K: missing");
    REFUSE(HEAD "op = chain\nregime = slow\nK = 4\n", "chunks: missing");
    REFUSE(HEAD "op = chain\nchunks = 4\nK = 4\n", "regime: missing");
    REFUSE(HEAD "op = chain\nchunks = 4\nregime = slow\n", "K: missing");
    REFUSE(HEAD "op = conv\nT = 4\nW = 4\n", "D: missing");
    REFUSE(HEAD "op = conv\nT = 4\nD = 4\n", "W: missing");
    REFUSE(KDA "gate = lower_bound\n", "lower_bound:", "gate = lower_bound needs it");
}

DP_TEST(case, refuses_wrong_types_and_ranges) {
    REFUSE(HEAD "op = kda\nT = 12x\nK = 4\n", "x.case:4: T = 12x", "not an integer");
    REFUSE(HEAD "op = kda\nT = 12.0\nK = 4\n", "x.case:4: T = 12.0", "not an integer");
    REFUSE(HEAD "op = kda\nT = 0\nK = 4\n", "x.case:4: T = 0", "out of range", "1 to 16777216");
    REFUSE(HEAD "op = kda\nT = 99999999999999999999\nK = 4\n", "x.case:4: T = 9999",
           "out of range");
    REFUSE(HEAD "op = kda\nT = -4\nK = 4\n", "x.case:4: T = -4", "out of range");
    REFUSE(HEAD "op = kka\nT = 4\nK = 4\n", "x.case:3: op = kka", "not one of", "gdn|kda|mkda");
    REFUSE(HEAD "op = gdn|kda\nT = 4\nK = 4\n", "x.case:3: op = gdn|kda", "not one of");
    REFUSE(KDA "g_scale = 0.1f\n", "x.case:6: g_scale = 0.1f", "not a finite number");
    REFUSE(KDA "g_scale = nan\n", "x.case:6: g_scale = nan", "not a finite number");
    REFUSE(KDA "scale = inf\n", "x.case:6: scale = inf", "not a finite number");
    REFUSE(KDA "g_scale = -1\n", "x.case:6: g_scale = -1", "out of range");
    REFUSE(KDA "gate = lower_bound\nlower_bound = 5\n", "x.case:7: lower_bound = 5",
           "out of range");
    REFUSE(KDA "smoke = 1\n", "x.case:6: smoke = 1", "no|yes");
    REFUSE(KDA "ranks = 0\n", "x.case:6: ranks = 0", "out of range");
    REFUSE(KDA "ranks = 1,,2\n", "x.case:6: ranks = 1,,2", "'' is not an integer");
    REFUSE(KDA "ranks = 1,2,\n", "x.case:6:", "'' is not an integer");
    REFUSE(KDA "ranks = 1, 2 3\n", "x.case:6:", "'2 3' is not an integer");
    REFUSE(KDA "ranks = 2,2\n", "x.case:6:", "'2' is given twice");
    REFUSE(KDA "ranks = 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17\n", "x.case:6:", "more than 16");
    REFUSE(KDA "chain = fp32,bf17\n", "x.case:6: chain = fp32,bf17", "'bf17' is not one of",
           "tf32rz");
    REFUSE(KDA "bits = 53\n", "x.case:6: bits = 53", "out of range");
    REFUSE(KDA "seed = -1\n", "x.case:6: seed = -1", "out of range");
}

DP_TEST(case, refuses_settings_that_contradict) {
    REFUSE(KDA "ranks = 1,2,5\n", "x.case:6: ranks = 1,2,5", "T = 12 is not divisible by 5");
    REFUSE(KDA "ranks = 24\n", "x.case:6: ranks = 24", "not divisible by 24");
    REFUSE(KDA "H = 2\nHV = 3\n", "x.case:7: HV = 3", "multiple of H = 2");
    REFUSE(KDA "R = 2\n", "x.case:6: R = 2", "only mkda");
    REFUSE(KDA "cu_seqlens = 0,5,4,12\n", "x.case:6: cu_seqlens = 0,5,4,12", "entry 2, 4, is below",
           "5");
    REFUSE(KDA "cu_seqlens = 0,5,11\n", "x.case:6: cu_seqlens = 0,5,11",
           "must end at T = 12, not 11");
    REFUSE(KDA "cu_seqlens = 0,5,13\n", "x.case:6:", "must end at T = 12, not 13");
    REFUSE(KDA "cu_seqlens = 1,12\n", "x.case:6:", "must begin with 0, not 1");
    REFUSE(KDA "cu_seqlens = 0\n", "x.case:6: cu_seqlens = 0", "at least 0,T");
    REFUSE(KDA "lower_bound = -5\n", "x.case:6: lower_bound = -5", "goes with gate = lower_bound");
    REFUSE(HEAD "op = step\nT = 12\nK = 4\nW = 2\nrecurrence = comba\n", "x.case:3: op = step",
           "no bound carries their errors through the rows of comba");
    REFUSE(KDA "gate_params = no\n", "x.case:6: gate_params", "gate = log");
    REFUSE(KDA "beta_lo = 0.5\nbeta_hi = 0.4\n", "x.case:7: beta_hi = 0.4", "below beta_lo");
    REFUSE(KDA "backward = no\ndstate = yes\n", "x.case:7: dstate", "backward");
    REFUSE(KDA "chunks = 3\n", "x.case:6: chunks = 3", "op = kda has no such setting");
    REFUSE(HEAD "op = chain\nregime = slow\nchunks = 4\nK = 4\nranks = 2\n", "x.case:7: ranks = 2",
           "op = chain has no such setting");
    REFUSE(HEAD "op = chain\nregime = slow\nchunks = 65536\nK = 4096\n", "x.case:5: chunks = 65536",
           "numbers");
    REFUSE(HEAD "op = conv\nT = 4\nD = 4\nW = 4\nl2norm = yes\n", "x.case:7: l2norm", "op = conv");
    REFUSE(HEAD "op = kda\nT = 16777216\nHV = 4096\nK = 4096\n", "x.case:4: T = 16777216",
           "numbers");
}

/* As long as a truth can be had for: 5.4e8 numbers. A machine without the memory says so. */
DP_TEST(case, a_million_tokens_of_a_head) {
    static const char text[] = HEAD "op = kda\nT = 1048576\nK = 128\nbackward = no\n";
    dp_case c;
    dp_err e = {0};
    const dp_status st = dp_case_parse(text, sizeof text - 1, "x.case", 0, &c, &e);
    CHECK(st == DP_OK || strstr(e.msg, "of memory here"), "%s", e.msg);
    if (!st) dp_case_free(&c);
}

DP_TEST(case, refuses_bad_overrides) {
    REFUSE(KDA "override = u[0] 1\n", "x.case:6: override = u[0] 1",
           "no tensor of this case at 'u[0] 1'");
    REFUSE(KDA "override = A_log[0] 1\n", "no tensor of this case");
    REFUSE(KDA "override = v 1\n", "expected name[index] value");
    REFUSE(KDA "override = v[0,0,0] 1\n", "v takes 4 indices, at '[0,0,0] 1'");
    REFUSE(KDA "override = v[0,0,0,0,0] 1\n", "takes 4 indices");
    REFUSE(KDA "override = v[1,0\n", "v takes 4 indices, at '[1,0'");
    REFUSE(KDA "override = v[1,0,0,0\n", "v takes 4 indices, at '[1,0,0,0'");
    REFUSE(KDA "override = v[1,\n", "index 1 of v");
    REFUSE(KDA "override = v[12,0,0,0] 1\n", "index 0 of v", "0..11");
    REFUSE(KDA "override = v[-1,0,0,0] 1\n", "index 0 of v");
    REFUSE(KDA "override = v[0,0,0,x] 1\n", "index 3 of v");
    REFUSE(KDA "override = v[0,0,0,99999999999999999999] 1\n", "index 3 of v");
    REFUSE(KDA "override = v[0,0,0,0]\n", "no value after the index");
    REFUSE(KDA "override = v[0,0,0,0] 1 2\n", "trailing '2'");
    REFUSE(KDA "override = v[0,0,0,0] 1,\n", "ends with a comma");
    REFUSE(KDA "override = v[0,0,0,0] 0.1\n", "at 'v[0,0,0,0] 0.1' is not a number of bf16");
    REFUSE(KDA "override = k[0,0,0,0] 0x1p-140\n", "not a number of bf16");
    REFUSE(KDA "override = v[5,0,0,3] nan\n", "v[5,0,0,3] = nan: not finite", "nonfinite = allow");
    REFUSE(KDA "override = beta[7,0,0] -inf\n", "beta[7,0,0] = -inf: not finite");
    REFUSE(KDA "override = g[7,0,0] -inf\n", "a log decay of -1e4 forgets all");
}

DP_TEST(case, overrides_exact_values) {
    dp_case c;
    ACCEPT(KDA "dtype = fp32\nHV = 2\nnonfinite = allow\noverride = v[5,1,0,3] nan, beta[*,1,0] "
               "0,g[9,0,*] -inf , k[3,0,0,1] 0x1p-140\n",
           &c);
    CHECK(isnan(c.p.v[(5 * 2 + 1) * 4 + 3]), "v");
    int nans = 0, zeros = 0, infs = 0;
    for (int i = 0; i < 96; i++) {
        nans += isnan(c.p.v[i]);
        infs += c.p.g[i] == -INFINITY;
    }
    for (int t = 0; t < 12; t++)
        zeros += c.p.beta[t * 2 + 1] == 0 && c.p.beta[t * 2] != 0;
    CHECK(nans == 1 && zeros == 12 && infs == 4 && isinf(c.p.g[9 * 2 * 4 + 3]),
          "%d NaN, %d zero betas, %d infinite gates", nans, zeros, infs);
    CHECK(c.p.k[3 * 4 + 1] == 0x1p-140, "k = %a", c.p.k[13]);
    dp_case_free(&c);
}

DP_TEST(case, settings_reach_the_problem) {
    dp_case c;
    ACCEPT("\xef\xbb\xbf# comment\r\nreason = why # not part\r\nsource = fla#1115\r\nop = "
           "mkda\nsmoke = yes\nT "
           "= 12\nH = 2\nHV = 4\nK = 4\nV = 6\nR = 2\nscale = 0x1.8p-3\n"
           "cu_seqlens = 0,0,5,12\ngate = lower_bound\nlower_bound = -5\nbeta = sigmoid2\nl2norm = "
           "yes\nranks = 1, 3,12\nbase = bf16,fp64\nchain=tf32rz,bf16st\n"
           "merge = ring\nbits = 256\nseed = 77\ns0_scale = 2\ndstate = yes\n",
           &c);
    CHECK(!strcmp(c.reason, "why") && !strcmp(c.source, "fla#1115") && !strcmp(c.name, "x") &&
              !strcmp(c.op_name, "mkda"),
          "%s | %s | %s", c.reason, c.source, c.name);
    CHECK(c.op->is_recurrence && c.p.model == DP_MKDA && c.smoke && c.bits == 256 && c.backward &&
              c.spec.seed == 77,
          "flags");
    CHECK(c.p.T == 12 && c.p.H == 2 && c.p.HV == 4 && c.p.K == 4 && c.p.V == 6 && c.p.R == 2 &&
              c.p.Nseq == 3 && c.p.cu[1] == 0 && c.p.cu[2] == 5,
          "shapes");
    CHECK(c.p.scale == 0.1875 && c.p.gate == DP_GATE_LOWER_BOUND && c.p.lower_bound == -5 &&
              c.p.beta_form == DP_BETA_SIGMOID2 && c.p.l2norm,
          "forms");
    CHECK(c.nranks == 3 && c.ranks[1] == 3 && c.ranks[2] == 12, "ranks");
    CHECK(c.nbase == 2 && c.base[0] == DP_BASE_BF16 && c.base[1] == DP_BASE_FP64, "base");
    CHECK(c.nchain == 2 && c.chain[0] == DP_TF32RZ && c.chain[1] == DP_BF16ST && c.nmerge == 1 &&
              c.merge[0] == DP_EXCHANGE_RING,
          "chain, merge");
    CHECK(c.p.A_log && c.p.dt_bias && c.p.s0 && c.p.dout && c.p.dstate && c.input_dtype == DP_BF16,
          "tensors");
    dp_case_free(&c);
    ACCEPT(KDA "backward = no\n", &c);
    CHECK(!c.p.dout && !c.p.dstate && !c.p.s0 && !c.p.A_log && c.p.HV == 1 && c.p.V == 4 &&
              c.p.Nseq == 1 && c.p.scale == 0.5,
          "defaults");
    CHECK(c.nranks == 1 && c.ranks[0] == 1 && c.nbase == 1 && c.base[0] == DP_BASE_FP32 &&
              c.nchain == 1 && c.chain[0] == DP_FP32 && c.nmerge == 1,
          "defaults of lists");
    dp_case_free(&c);
}

/* Names of a key's choices against the tables that own them: the index in the file's list is the
 * enum. */
DP_TEST(case, choices_are_the_enums) {
    char text[256];
    for (int i = 0; i < DP_NFORMATS + DP_NBASES + DP_NRUN_EXCHANGES + DP_NREGIMES; i++) {
        const int b = i - DP_NFORMATS, m = b - DP_NBASES, r = m - DP_NRUN_EXCHANGES;
        if (b < 0)
            sprintf(text, KDA "chain = %s\n", dp_formats[i].name);
        else if (m < 0)
            sprintf(text, KDA "base = %s\n", dp_base_names[b]);
        else if (r < 0)
            sprintf(text, KDA "merge = %s\n", dp_exchange_names[m]);
        else
            sprintf(text, HEAD "op = chain\nchunks = 4\nK = 4\nregime = %s\n", dp_regime_names[r]);
        dp_case c;
        ACCEPT(text, &c);
        CHECK(b < 0   ? (int)c.chain[0] == i
              : m < 0 ? (int)c.base[0] == b
              : r < 0 ? (int)c.merge[0] == m
                      : (int)c.ch.regime == r,
              "%s", text);
        dp_case_free(&c);
    }
}

DP_TEST(case, chain_and_conv) {
    dp_case c;
    ACCEPT(HEAD "op = chain\nregime = corr\nchunks = 9\nK = 7\nseed = 5\n", &c);
    CHECK(c.op->has_factors && c.ch.regime == DP_REGIME_CORR && c.ch.n == 9 && c.ch.K == 7 &&
              c.spec.seed == 5,
          "chain");
    dp_case_free(&c);
    ACCEPT(HEAD "op = conv\nT = 12\nD = 3\nW = 2\nbias = yes\nactivation = none\nranks = "
                "1,4\ncu_seqlens = 0,4,12\n",
           &c);
    CHECK(c.op->has_conv && c.conv.T == 12 && c.conv.D == 3 && c.conv.W == 2 && c.conv.Nseq == 2 &&
              !c.conv.silu,
          "conv");
    CHECK(c.conv.x && c.conv.w && c.conv.bias && c.conv.dy && c.conv.bias[0] != 0 &&
              c.conv.dy[35] != 0,
          "tensors of conv");
    dp_case_free(&c);
}

DP_TEST(case, warns_of_expanding_steps) {
    dp_case c;
    ACCEPT(HEAD "op = mkda\nT = 12\nK = 4\nR = 3\nbeta = sigmoid\nbeta_lo = 3\nl2norm = yes\n", &c);
    CHECK(c.nwarn == 1 && strstr(c.warn[0], "/x.case: R = 3: sum of beta |k|^2 = 2.9"),
          "%d warnings: %s", c.nwarn, c.nwarn ? c.warn[0] : "");
    dp_case_free(&c);
    ACCEPT(HEAD "op = mkda\nT = 12\nK = 4\nR = 3\nbeta_hi = 0.65\n", &c);
    CHECK(!c.nwarn, "no warning below 2: %s", c.nwarn ? c.warn[0] : "");
    dp_case_free(&c);
    ACCEPT(HEAD "op = mkda\nT = 12\nK = 4\nR = 2\nbeta = sigmoid2\nbeta_lo = 3\n", &c);
    CHECK(!c.nwarn, "no warning for R = 2");
    dp_case_free(&c);
}

/* ---- data files ------------------------------------------------------------------------------ */

static double *ramp(int n, double from, double step) {
    double *x = dp_doubles(n);
    for (int i = 0; i < n; i++)
        x[i] = from + step * i;
    return x;
}

static void add(dp_tensorfile *f, const char *name, const char *dtype, int ndim,
                const int64_t *shape, double from, double step) {
    int n = 1;
    for (int i = 0; i < ndim; i++)
        n *= (int)shape[i];
    double *x = ramp(n, from, step);
    dp_tensorfile_add(f, name, dtype, ndim, shape, x);
    free(x);
}
#define SHAPE(...) \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }

static void save(dp_tensorfile *f, const char *name) {
    char path[512];
    dp_err e = {0};
    snprintf(path, sizeof path, "%s/%s", gt_tmpdir(), name);
    CHECK(!dp_safetensors_write(path, f, &e), "%s", e.msg);
    dp_tensorfile_free(f);
}

/* One head, 8 tokens, K = 4, V = 2. Letters of `what`: 'o' with do, 'a' with A_log, 'n' with a NaN,
 * 'c' with cu_seqlens, 'k' a wrong k, 'f' fp32 v */
static void write_head(const char *name, const char *what) {
    dp_tensorfile f = {0};
    add(&f, "q", "BF16", SHAPE(8, 4), 0, 1);
    add(&f, "k", "BF16", strchr(what, 'k') ? 3 : 2,
        strchr(what, 'k') ? (int64_t[]){8, 2, 4} : (int64_t[]){8, 4}, 1, 1);
    add(&f, "v", strchr(what, 'f') ? "F32" : "BF16", SHAPE(1, 8, 1, 2), strchr(what, 'n') ? NAN : 2,
        1);
    add(&f, "g", "BF16", SHAPE(8, 4), -1, -1);
    if (!strchr(what, 'b')) add(&f, "beta", "BF16", SHAPE(8), 0.5, 0);
    if (strchr(what, 'o')) add(&f, "do", "BF16", SHAPE(8, 2), 3, 1);
    if (strchr(what, 'a')) {
        add(&f, "A_log", "F32", SHAPE(1), 0.25, 0);
        add(&f, "dt_bias", "F32", SHAPE(4), 0.5, 0.25);
    }
    if (strchr(what, 'c')) add(&f, "cu_seqlens", "I64", SHAPE(3), 0, 4);
    if (strchr(what, 'i')) add(&f, "initial_state", "F32", SHAPE(1, 4, 2), 9, 1);
    save(&f, name);
}
#define DATA(file) HEAD "op = kda\ndata = " file "\n"

DP_TEST(case, reads_data) {
    dp_case c;
    write_head("h2.safetensors", "oai");
    ACCEPT(DATA("h2.safetensors") "gate = softplus\nranks = 1,2\n", &c);
    CHECK(c.p.T == 8 && c.p.K == 4 && c.p.V == 2 && c.p.H == 1 && c.p.HV == 1 && c.p.Nseq == 1 &&
              c.input_dtype == DP_BF16 && strstr(c.data, "/h2.safetensors"),
          "shapes");
    CHECK(c.p.q[31] == 31 && c.p.k[0] == 1 && c.p.v[15] == 17 && c.p.dout[15] == 18 &&
              c.p.beta[7] == 0.5 && c.p.A_log[0] == 0.25 && c.p.dt_bias[3] == 1.25,
          "values");
    CHECK(c.p.s0 && c.p.s0[7] == 16, "initial_state is s0");
    dp_case_free(&c);
    ACCEPT(DATA("h2.safetensors") "gate = softplus\nT = 6\nK = 4\nV = 2\nranks = 3\ndstate = "
                                  "yes\ndtype = bf16\n",
           &c);
    CHECK(c.p.T == 6 && c.p.cu[1] == 6 && c.p.q[23] == 23 && c.p.dout[11] == 14 && c.p.dstate &&
              c.p.dstate[0] != 0,
          "prefix");
    dp_case_free(&c);
    write_head("h3.safetensors", "");
    ACCEPT(DATA("h3.safetensors"), &c);
    CHECK(c.p.dout && c.p.dout[0] != 0 && !c.p.A_log && !c.p.s0,
          "do is generated when data has none");
    dp_case_free(&c);
    write_head("h4.safetensors", "c");
    ACCEPT(DATA("h4.safetensors"), &c);
    CHECK(c.p.Nseq == 2 && c.p.cu[1] == 4 && c.p.cu[2] == 8, "cu_seqlens of data");
    dp_case_free(&c);
    REFUSE(DATA("h4.safetensors") "T = 6\n", "cu_seqlens: must end at T = 6, not 8");
    ACCEPT(DATA("h4.safetensors") "T = 6\ncu_seqlens = 0,1,6\n", &c);
    CHECK(c.p.Nseq == 2 && c.p.cu[1] == 1, "cu_seqlens of the case");
    dp_case_free(&c);
    write_head("h5.safetensors", "f");
    ACCEPT(DATA("h5.safetensors"), &c);
    CHECK(c.input_dtype == DP_FP32, "widest dtype");
    dp_case_free(&c);
    REFUSE(DATA("h5.safetensors") "dtype = bf16\n", "x.case:5: dtype = bf16",
           "h5.safetensors has fp32");
}

DP_TEST(case, refuses_data_that_disagrees) {
    write_head("d.safetensors", "o");
    write_head("dk.safetensors", "k");
    write_head("dn.safetensors", "n");
    write_head("db.safetensors", "b");
    write_head("da.safetensors", "a");
    write_head("di.safetensors", "i");
    REFUSE(DATA("d.safetensors") "K = 8\n", "x.case:5: K = 8", "d.safetensors has 4");
    REFUSE(DATA("d.safetensors") "V = 4\n", "x.case:5: V = 4", "d.safetensors has 2");
    REFUSE(DATA("d.safetensors") "H = 2\n", "x.case:5: H = 2", "d.safetensors has 1");
    REFUSE(DATA("d.safetensors") "T = 9\n", "x.case:5: T = 9", "d.safetensors has only 8 tokens");
    REFUSE(DATA("d.safetensors") "ranks = 3\n", "x.case:5: ranks = 3",
           "T = 8 is not divisible by 3");
    REFUSE(DATA("dk.safetensors"), "x.case:4: data = dk.safetensors",
           "tensor k: shape [8,2,4], the case needs [8,1,1,4]");
    REFUSE(DATA("db.safetensors"), "tensor beta is missing");
    REFUSE(DATA("dn.safetensors"), "x.case:4: data = dn.safetensors",
           "v[0,0,0,0] = nan: not finite");
    REFUSE(DATA("da.safetensors"), "A_log or dt_bias", "gate = log");
    REFUSE(DATA("di.safetensors") "cu_seqlens = 0,4,8\n",
           "tensor initial_state: shape [1,4,2], the case needs [2,1,4,2]");
    REFUSE(DATA("d.safetensors") "g_scale = 1\n", "x.case:5: g_scale = 1",
           "says how inputs are generated", "d.safetensors");
    REFUSE(HEAD "op = mkda\nR = 2\ndata = d.safetensors\n",
           "tensor k: shape [8,4], the case needs [8,1,2,4]");
    REFUSE(HEAD "op = gdn\ndata = d.safetensors\n",
           "tensor g: shape [8,4], the case needs [8,1,1]");
    REFUSE(HEAD "op = conv\ndata = d.safetensors\n", "tensors x and w must be there");
    dp_case c;
    dp_err e;
    CHECK(parse(DATA("absent.safetensors"), &c, &e) == DP_EIO &&
              strstr(e.msg, "absent.safetensors"),
          "%s", e.msg);
    dp_tensorfile f = {0};
    add(&f, "q", "F32", 0, NULL, 1, 0);
    add(&f, "v", "F32", 0, NULL, 1, 0);
    save(&f, "scalar.safetensors");
    REFUSE(DATA("scalar.safetensors"), "tensors q and v must be there");
}

DP_TEST(case, reads_conv_data) {
    dp_tensorfile f = {0};
    add(&f, "x", "BF16", SHAPE(6, 2), 0, 1);
    add(&f, "weight", "F32", SHAPE(2, 1, 3), 1, 0.1);
    save(&f, "conv.safetensors");
    dp_case c;
    ACCEPT(HEAD "op = conv\ndata = conv.safetensors\nT = 4\nW = 3\n", &c);
    CHECK(c.conv.T == 4 && c.conv.D == 2 && c.conv.W == 3 && c.conv.x[7] == 7 && c.conv.w[0] == 1 &&
              !c.conv.bias && c.conv.dy && c.input_dtype == DP_BF16,
          "conv data");
    dp_case_free(&c);
    REFUSE(HEAD "op = conv\ndata = conv.safetensors\nW = 4\n", "x.case:5: W = 4",
           "conv.safetensors has 3");
}

DP_TEST(case, opens_without_inputs) {
    char path[512];
    dp_case c;
    dp_err e = {0};
    snprintf(path, sizeof path, "%s/kda-long.case", gt_cases());
    REQUIRE(!dp_case_open(path, 0, &c, &e), "%s", e.msg);
    CHECK(!c.p.q && c.p.T == 2048 && c.p.K == 128 && c.p.scale > 0 && !strcmp(c.name, "kda-long"),
          "settings only");
    dp_case_free(&c);
    CHECK(dp_case_load("/no/such.case", &c, &e) == DP_EIO && strstr(e.msg, "/no/such.case"), "%s",
          e.msg);
}

/* ---- the project's own cases ----------------------------------------------------------------- */

DP_TEST(case, every_case_loads_and_has_a_reason) {
    char **paths;
    int n, smoke = 0;
    dp_err e = {0};
    REQUIRE(!dp_case_find_all(gt_cases(), &paths, &n, &e), "%s", e.msg);
    for (int i = 0; i < n; i++) {
        dp_case c;
        dp_err x = {0};
        CHECK(!dp_case_load(paths[i], &c, &x), "%s", x.msg);
        CHECK(!i || strcmp(paths[i - 1], paths[i]) < 0, "sorted: %s", paths[i]);
        if (!x.code) {
            CHECK(!c.nwarn, "%s", c.nwarn ? c.warn[0] : "");
            CHECK(strlen(c.reason) > 40 && strlen(c.source) > 6, "%s: reason and source", c.name);
            smoke += c.smoke;
            dp_case_free(&c);
        }
    }
    for (int i = 0; i < n; i++)
        free(paths[i]);
    CHECK(n >= 50 && smoke >= 6, "%d cases, %d of them smoke", n, smoke);
    free(paths);
}

DP_TEST(case, find_all_says_when_there_is_nothing) {
    char **paths;
    int n;
    dp_err e = {0}, e2 = {0};
    CHECK(dp_case_find_all("/no/such/folder", &paths, &n, &e) == DP_EIO &&
              strstr(e.msg, "/no/such/folder"),
          "%s", e.msg);
    free(paths);
    char dir[512];
    snprintf(dir, sizeof dir, "%s/empty", gt_tmpdir());
    char cmd[600], out[16];
    snprintf(cmd, sizeof cmd, "mkdir -p %s", dir);
    gt_run(cmd, out, sizeof out);
    CHECK(dp_case_find_all(dir, &paths, &n, &e2) == DP_EINPUT && strstr(e2.msg, "no *.case"), "%s",
          e2.msg);
    free(paths);
}
