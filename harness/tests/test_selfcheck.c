/* The alterations that a wrong kernel passes with: right simulated ranks, changed and judged like
 * files. Rows of the table are changes, columns tensors; printed is how many pass of how many that
 * differ from the truth. DP_SELFCHECK=0/1 (make selfcheck): every case of a recurrence; 3/16: those
 * of the fourth of sixteen parts. */
#include "harness/run/judge.h"
#include "harness/simulated/ranks.h"
#include "ref/files/safetensors.h"
#include "runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum {
    AS_IT_IS,
    ZEROS,
    LARGER,
    SHUFFLED,
    ONE_HEAD,
    ONE_WINDOW,
    CHANNEL,
    FIRST,
    NCHANGES
} change;
static const char *const NAMES[NCHANGES] = {
    "as it is",        "zeros",         "times 1.5",        "rows shuffled",
    "one head x 1.05", "a window is 0", "a channel 2% off", "first tokens 1% off"};

typedef struct {
    int pass[NCHANGES][DP_NRESULTS], unjudged[NCHANGES][DP_NRESULTS], of[NCHANGES][DP_NRESULTS];
} table;

/* ---- changes --------------------------------------------------------------------------------- */

/* One tensor [rows][width], whose rows are tokens' by heads, or states or heads. */
typedef struct {
    const dp_problem *p;
    int field, heads, per;
    int64_t rows, width;
    dp_row_kind kind;
} shape;

static shape shape_of(const dp_problem *p, int field) {
    shape s = {.p = p, .field = field, .kind = dp_result_fields[field].kind};
    dp_result_shape(p, field, &s.rows, &s.width);
    s.heads = dp_result_heads(p, field);
    s.per = s.kind == DP_OF_TOKENS ? dp_result_rows_per_token(p, field) : 1;
    return s;
}

static int head_of(const shape *s, int64_t row) { return (int)(row / s->per % s->heads); }
static int64_t token_of(const shape *s, int64_t row) { return row / s->per / s->heads; }

/* The token's place in its sequence. */
static int64_t place_of(const shape *s, int64_t row) {
    int n = 0;
    while (s->p->cu[n + 1] <= token_of(s, row))
        n++;
    return token_of(s, row) - s->p->cu[n];
}

/* The factor of an entry; tensors of states have their columns as channels. */
static double factor_of(const shape *s, change c, int64_t row, int64_t i) {
    const int tokens = s->kind == DP_OF_TOKENS;
    switch (c) {
    case ZEROS: return 0;
    case LARGER: return 1.5;
    case ONE_HEAD: return head_of(s, row) == s->heads - 1 ? 1.05 : 1;
    case ONE_WINDOW: return tokens && token_of(s, row) < 64 ? 0 : 1;
    case CHANNEL: return s->width > 1 && i % (tokens ? s->width : s->p->V) == 1 ? 1.02 : 1;
    case FIRST: return tokens && place_of(s, row) % 64 == 0 ? 1.01 : 1;
    default: return 1;
    }
}

static void change_tensor(const shape *s, change c, const double *right, double *x) {
    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t from = c == SHUFFLED ? s->rows - 1 - r : r;
        for (int64_t i = 0; i < s->width; i++)
            x[r * s->width + i] = factor_of(s, c, r, i) * right[from * s->width + i];
    }
}

/* ---- judging --------------------------------------------------------------------------------- */

/* One kernel: its formats, whether it declares them, and the format of its files. */
typedef struct {
    dp_base base;
    const char *words;
    int declared;
    dp_format file;
} kernel;

static void store_as(dp_format f, double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        x[i] = dp_store(f, x[i]);
}

static void count(const dp_run *r, const int differs[DP_NRESULTS], change c, table *t) {
    for (int i = 0; i < r->ntensor; i++) {
        const int field = dp_result_find(r->tensor[i].name);
        if (field < 0 || !differs[field]) continue;
        t->of[c][field]++;
        t->pass[c][field] += r->tensor[i].verdict == DP_PASS;
        t->unjudged[c][field] += r->tensor[i].verdict == DP_UNJUDGED;
    }
}

static void judge_change(const dp_case *x, const kernel *k, dp_result *right, change c, table *t) {
    dp_design design;
    dp_err e = {0};
    dp_stored_results g = {0};
    dp_runs runs = {0};
    int differs[DP_NRESULTS] = {0};
    REQUIRE(!dp_design_parse(k->words, k->base, &design, &e), "%s", e.msg);
    design.undeclared = !k->declared;
    g.design = &design;
    for (int i = 0; i < DP_NRESULTS; i++) {
        const double *from = right->out[i];
        const shape s = shape_of(&x->p, i);
        const int64_t n = s.rows * s.width;
        if (!from || !n) continue;
        double *to = g.r.out[i] = dp_doubles(n);
        change_tensor(&s, c, from, to);
        differs[i] = c == AS_IT_IS || memcmp(to, from, sizeof *to * (size_t)n) != 0;
        store_as(k->file, to, n);
        g.u[i] = ldexp(1, -(int)dp_formats[k->file].bits);
        g.tiny[i] = k->file == DP_FP16 ? 0x1p-25 : 0; /* half of its least spacing */
    }
    const dp_run_options o = {.cache = gt_tmpdir()};
    const dp_status st = dp_run_stored(x, &o, &g, &runs, &e);
    CHECK(!st, "%s: %s", x->name, e.msg);
    if (!st) count(&runs.run[0], differs, c, t);
    if (!st && c == AS_IT_IS)
        CHECK(runs.run[0].verdict != DP_FAIL, "%s, base %s %s: %s", x->name, dp_base_names[k->base],
              k->declared ? "declared" : "undeclared", runs.run[0].why);
    dp_runs_free(&runs);
    dp_result_free(&g.r);
}

/* A kernel in fp16 overflows in some cases. */
static int all_finite(const dp_problem *p, dp_result *r) {
    int finite = 1;
    for (int i = 0; i < DP_NRESULTS; i++) {
        const shape s = shape_of(p, i);
        const double *x = r->out[i];
        for (int64_t z = 0; x && z < s.rows * s.width; z++)
            finite &= isfinite(x[z]) != 0;
    }
    return finite;
}

static void judge_kernel(dp_case *x, const kernel *k, table *t) {
    dp_design design;
    dp_err e = {0};
    dp_sim s;
    x->nranks = x->nbase = x->nchain = 1;
    x->ranks[0] = 1;
    x->base[0] = k->base;
    x->chain[0] = DP_FP32;
    REQUIRE(!dp_design_parse(k->words, k->base, &design, &e), "%s", e.msg);
    REQUIRE(!dp_sim_open(&s, &x->p, &design, 1, NULL, &e), "%s", e.msg);
    dp_sim_run(&s, DP_FP32, DP_EXCHANGE_ALLGATHER, x->backward);
    for (int c = 0; c < NCHANGES && all_finite(&x->p, &s.out); c++)
        judge_change(x, k, &s.out, (change)c, t);
    dp_sim_free(&s);
}

/* ---- the table ------------------------------------------------------------------------------- */

static void print(const table *t) {
    printf("%-20s passed (unjudged) of those that differ\n%-20s", "", "");
    for (int i = 0; i < DP_NRESULTS; i++)
        if (t->of[ZEROS][i]) printf(" %13s", dp_result_fields[i].name);
    for (int c = 0; c < NCHANGES; c++) {
        printf("\n%-20s", NAMES[c]);
        for (int i = 0; i < DP_NRESULTS; i++)
            if (t->of[ZEROS][i])
                printf(" %4d (%d) %4d", t->pass[c][i], t->unjudged[c][i], t->of[c][i]);
    }
    printf("\n");
}

static const char *const WHOLE[] = {"o", "dq", "dk", "dv", "final_state", "ds0"};

static void check(const table *t) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        const char *name = dp_result_fields[i].name;
        CHECK(!t->pass[ZEROS][i], "%d tensors %s of zeros pass", t->pass[ZEROS][i], name);
        for (size_t k = 0; k < sizeof WHOLE / sizeof *WHOLE; k++)
            CHECK(strcmp(name, WHOLE[k]) || !t->pass[LARGER][i], "%d tensors %s times 1.5 pass",
                  t->pass[LARGER][i], name);
    }
}

static const kernel KERNELS[] = {
    {DP_BASE_BF16, "", 0, DP_BF16}, {DP_BASE_BF16, "", 1, DP_FP32},
    {DP_BASE_FP32, "", 0, DP_FP32}, {DP_BASE_FP32, "", 1, DP_BF16},
    {DP_BASE_FP32, "", 1, DP_FP64}, {DP_BASE_BF16, "factors=fp16,out=fp16", 0, DP_FP16}};
enum { NKERNELS = sizeof KERNELS / sizeof *KERNELS };

static void judge_case(const char *path, int kernels, table *t) {
    dp_case c;
    dp_err e = {0};
    REQUIRE(!dp_case_load(path, &c, &e), "%s", e.msg);
    if (c.op == &dp_operations[DP_OP_RECURRENCE] && !dp_case_is_exact(&c) && !c.allow_nonfinite)
        for (int k = 0; k < kernels; k++)
            judge_kernel(&c, &KERNELS[k], t);
    dp_case_free(&c);
}

/* A recurrence each, in the first formats. */
DP_TEST(selfcheck, no_tensor_of_zeros_passes) {
    static const char *const cases[] = {"smoke-gdn",  "smoke-kda",          "smoke-mkda2",
                                        "smoke-gdn2", "smoke-dplr",         "smoke-gla",
                                        "smoke-ssd",  "smoke-deltaproduct", "ill-conditioned"};
    static table t;
    char path[600];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(path, sizeof path, "%s/%s.case", gt_cases(), cases[i]);
        judge_case(path, 3, &t);
    }
    print(&t);
    check(&t);
}

DP_TEST(selfcheck, all_cases_in_all_formats) {
    static table t;
    char **paths;
    int n, part, parts;
    dp_err e = {0};
    const char *which = getenv("DP_SELFCHECK");
    if (!which || sscanf(which, "%d/%d", &part, &parts) != 2) SKIP("takes long: make selfcheck");
    REQUIRE(!dp_case_find_all(gt_cases(), &paths, &n, &e), "%s", e.msg);
    for (int i = 0; i < n; i++) {
        if (i % parts == part) judge_case(paths[i], NKERNELS, &t);
        free(paths[i]);
    }
    free(paths);
    print(&t);
    check(&t);
}
