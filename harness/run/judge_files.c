/* Files of other programs in the form of `judge` (judge_files.h). Settings come by tables of the
 * words that files have for them. Names, batches and query heads follow. */
#include "judge_files.h"
#include "harness/case/case_inputs.h"
#include "harness/simulated/stage_tensor.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/recurrence_text.h"
#include "ref/vocabulary/tensors.h"
#include "ref/vocabulary/text.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- settings -------------------------------------------------------------------------------- */

typedef struct {
    const char *text, *value;
} word;              /* how metadata may say it; value as a case file has it */
#define DECAYS "exp" /* g is exp of the log decay */
static const word GATES[] = {{"log", "log"},
                             {DECAYS, DECAYS},
                             {"softplus", "softplus"},
                             {"-exp(A_log)*softplus(g+dt_bias)", "softplus"},
                             {"lower_bound", "lower_bound"},
                             {"lower_bound*sigmoid(exp(A_log)*(g+dt_bias))", "lower_bound"},
                             {0}};
#define NOTHING "none" /* is erased: there is no beta */
static const word BETAS[] = {{"plain", "plain"},       {"beta", "plain"},
                             {"sigmoid", "sigmoid"},   {"sigmoid(beta)", "sigmoid"},
                             {"sigmoid2", "sigmoid2"}, {"2*sigmoid(beta)", "sigmoid2"},
                             {NOTHING, "plain"},       {0}};
static const word NORMS[] = {
    {"0", "no"}, {"1", "yes"}, {"no", "no"}, {"yes", "yes"}, {"l2norm inside kernel", "yes"}, {0}};
/* The format of g as the kernel reads it; "": the file's. */
static const word GATE_DTYPES[] = {{"fp32", "fp32"},    {"bf16", "bf16"},     {"fp16", "fp16"},
                                   {"float32", "fp32"}, {"bfloat16", "bf16"}, {"float16", "fp16"},
                                   {"fp64", "fp64"},    {"float64", "fp64"},  {0}};
static const word LAYOUTS[] = {{"kv", "kv"}, {"vk", "vk"}, {0}};

static int same_text(const char *a, const char *b) { /* blanks do not count */
    for (;; a++, b++) {
        while (isspace((unsigned char)*a))
            a++;
        while (isspace((unsigned char)*b))
            b++;
        if (*a != *b) return 0;
        if (!*a) return 1;
    }
}

/* key, key2 (may be NULL): metadata; option: its name and values, as in the message. dflt NULL:
 * required. */
static const char *choose(const dp_tensorfile *f, const char *given, const char *key,
                          const char *key2, const char *option, const word *words, const char *dflt,
                          dp_complaints *all) {
    const char *meta = dp_tensorfile_meta(f, key), *text = given  ? given
                                                           : meta ? meta
                                                           : key2 ? dp_tensorfile_meta(f, key2)
                                                                  : NULL;
    if (!text && !dflt)
        dp_complain(all, "%s: its metadata does not say `%s`: give %s", f->path, key, option);
    if (!text) return dflt ? dflt : "";
    for (const word *w = words; w->text; w++)
        if (same_text(text, w->text)) return w->value;
    if (given)
        dp_complain(all, "'%.80s' is not known: give %s", text, option);
    else
        dp_complain(all, "%s: metadata `%s` = '%.80s' is not understood: give %s", f->path, key,
                    text, option);
    return "";
}

static int model_named(const char *name) {
    for (int i = 0; name && i < DP_NMODELS; i++)
        if (!strcmp(name, dp_models[i].name)) return i;
    return -1;
}

int dp_judge_is_recurrence(const char *name) { return model_named(name) >= 0; }

int dp_judge_recurrence(const dp_judge_options *o, const dp_tensorfile *in) {
    if (dp_user_recurrence_installed()) return -1;
    return model_named(o->recurrence ? o->recurrence : dp_tensorfile_meta(in, "recurrence"));
}

/* That of a user's own rows, which say so; NULL: there are none. */
static const char *own_norm(void) {
    const dp_user_recurrence *y = dp_user_recurrence_installed();
    return !y ? NULL : y->rows.normed ? "yes" : "no";
}

int dp_judge_without_beta(const dp_tensorfile *in, const char *given) {
    const char *text = given ? given : dp_tensorfile_meta(in, "beta");
    return text && same_text(text, NOTHING);
}

/* One of names. */
static const char *choose_name(const dp_tensorfile *f, const char *given, const char *key,
                               const char *option, const char *const *names, int n,
                               const char *dflt, dp_complaints *all) {
    word w[16] = {{0}};
    for (int i = 0; i < n; i++)
        w[i] = (word){names[i], names[i]};
    return choose(f, given, key, NULL, option, w, dflt, all);
}

int dp_judge_rank_count(const dp_tensorfile *out, int given, dp_complaints *all) {
    const char *text = dp_tensorfile_meta(out, "ranks");
    int64_t n = 1;
    if (given || !text) return given ? given : 1;
    if (dp_number_int(text, 1, 4096, &n) != DP_NUMBER_OK)
        dp_complain(all, "%s: metadata `ranks` = '%.80s' is not understood: give --ranks N",
                    out->path, text);
    return (int)n;
}

int dp_judge_state_vk(const dp_tensorfile *f, const char *given, dp_complaints *all) {
    const char *option = "--state-layout kv|vk";
    return !strcmp(choose(f, given, "state_layout", NULL, option, LAYOUTS, "kv", all), "vk");
}

const char *dp_judge_claim(const dp_tensorfile *out, const char *given, const char *option,
                           const char *dflt, dp_complaints *all) {
    const char *formats[DP_NFORMATS];
    for (int i = 0; i < DP_NFORMATS; i++)
        formats[i] = dp_formats[i].name;
    return choose_name(out, given, "claim", option, formats, DP_NFORMATS, dflt, all);
}

dp_judge_base dp_judge_base_of(const dp_tensorfile *out, const char *given, const char *dflt,
                               dp_complaints *all) {
    static const dp_judge_base bases[] = {{"bf16", "bf16", ""},
                                          {"fp16", "bf16", "factors=fp16,out=fp16"},
                                          {"fp32", "fp32", ""},
                                          {"fp64", "fp64", ""}};
    const int n = sizeof bases / sizeof *bases;
    const char *names[sizeof bases / sizeof *bases];
    for (int i = 0; i < n; i++)
        names[i] = bases[i].name;
    const char *name =
        choose_name(out, given, "base", "--base bf16|fp16|fp32|fp64", names, n, dflt, all);
    for (int i = 0; i < n; i++)
        if (!strcmp(name, bases[i].name)) return bases[i];
    return bases[0]; /* refused */
}

static double number(const dp_tensorfile *f, const char *given, const char *key, const char *option,
                     dp_complaints *all) {
    const char *text = given ? given : dp_tensorfile_meta(f, key);
    double x = NAN;
    if (!text) return NAN;
    const dp_number n = dp_number_real(text, -1e300, 1e300, &x);
    const char *why = n == DP_NUMBER_RANGE ? "is out of range, must be -1e300 to 1e300"
                                           : "is not a finite number";
    if (n && given)
        dp_complain(all, "%s: '%.80s' %s", option, text, why);
    else if (n)
        dp_complain(all, "%s: metadata `%s` = '%.80s' %s: give %s", f->path, key, text, why,
                    option);
    return x;
}

static double lower_bound(const dp_judge_options *o, const dp_tensorfile *in, int wanted,
                          dp_complaints *all) {
    if (wanted && !o->lower_bound && !dp_tensorfile_meta(in, "lower_bound"))
        dp_complain(all, "%s: its metadata does not say `lower_bound`: give --lower-bound X",
                    in->path);
    if (!wanted && o->lower_bound) dp_complain(all, "--lower-bound goes with --gate lower_bound");
    return wanted ? number(in, o->lower_bound, "lower_bound", "--lower-bound X", all) : NAN;
}

static const char *sequences(const dp_judge_options *o, const dp_tensorfile *in,
                             dp_complaints *all) {
    const char *cu = o->cu_seqlens                      ? o->cu_seqlens
                     : dp_tensor_find(in, "cu_seqlens") ? NULL
                                                        : dp_tensorfile_meta(in, "cu_seqlens");
    if (cu && (!*cu || cu[strspn(cu, "0123456789, ")]))
        dp_complain(all, "%s: '%.80s' is no list of tokens: give --cu-seqlens 0,..,T",
                    o->cu_seqlens ? "--cu-seqlens" : in->path, cu);
    return cu;
}

void dp_judge_settings_read(const dp_judge_options *o, const dp_tensorfile *in,
                            const dp_tensorfile *out, dp_judge_settings *s, dp_complaints *all) {
    const char *gate = "--gate log|exp|softplus|lower_bound (and --gate-dtype " DP_JUDGE_GATE_DTYPES
                       ", where the kernel reads g in a coarser format than this file holds)";
    s->gate = choose(in, o->gate, "gate", NULL, gate, GATES, NULL, all);
    s->decays = !strcmp(s->gate, DECAYS);
    if (s->decays) s->gate = "log";
    const char *dtype = choose(in, o->gate_dtype, "gate_dtype", NULL,
                               "--gate-dtype " DP_JUDGE_GATE_DTYPES, GATE_DTYPES, "fp64", all);
    s->gate_dtype = *dtype ? (dp_format)dp_format_find_stored(dtype) : DP_FP64;
    /* what stands in place of beta has no forms to say */
    const int own = dp_user_recurrence_installed() != NULL;
    const int said = dp_judge_recurrence(o, in);
    const int no_beta = own || (said >= 0 && dp_models[said].strength != DP_BY_BETA);
    const char *beta = no_beta || dp_case_input_find(in, &dp_input_fields[DP_INPUT_ERASE]) ||
                               dp_case_input_find(in, &dp_input_fields[DP_INPUT_LR_A])
                           ? "plain"
                           : NULL;
    s->beta =
        choose(in, o->beta, "beta", NULL, "--beta plain|sigmoid|sigmoid2|none", BETAS, beta, all);
    s->l2norm = choose(in, o->l2norm, "l2norm", "qk", "--l2norm 0|1", NORMS, own_norm(), all);
    s->lower_bound = lower_bound(o, in, !strcmp(s->gate, "lower_bound"), all);
    s->scale = number(in, o->scale, "scale", "--scale X", all);
    s->cu = sequences(o, in, all);
    s->in_vk = dp_judge_state_vk(in, o->state_layout, all);
    s->out_vk = dp_judge_state_vk(out, o->state_layout, all);
    s->ranks = dp_judge_rank_count(out, o->ranks, all);
    s->base = dp_judge_base_of(out, o->base, NULL, all);
    /* below 3 ranks no M is used and the chain's format is nothing to claim */
    s->claim = dp_judge_claim(out, o->claim, DP_JUDGE_CLAIM, s->ranks < 3 ? "fp32" : NULL, all);
}

/* ---- Mamba ----------------------------------------------------------------------------------- */

#define OPTION "--layout fla|mamba"

static const struct {
    const char *mamba, *own;
} NAMES[] = {{"x", "v"},
             {"dt", "g"},
             {"B", "k"},
             {"C", "q"},
             {"initial_states", "initial_state"},
             {"dout", "do"},
             {"dfinal_states", "dht"}},
  MADE[] = {{"y", "o"},   {"out", "o"}, {"final_states", "final_state"},
            {"dB", "dk"}, {"dC", "dq"}, {"dinitial_states", "dh0"}};
#define COUNT(X) (sizeof(X) / sizeof *(X))

static dp_tensor *find(dp_tensorfile *f, const char *name) {
    return (dp_tensor *)dp_tensor_find(f, name);
}

static void rename_to(dp_tensorfile *f, const char *from, const char *to) {
    dp_tensor *t = find(f, from);
    if (!t) return;
    free(t->name);
    t->name = dp_strdup(to);
}

static void drop(dp_tensorfile *f, dp_tensor *t) {
    free(t->name);
    free(t->data);
    *t = f->tensor[--f->ntensor];
}

static void say(dp_tensorfile *f, const char *key, const char *value) {
    if (!dp_tensorfile_meta(f, key)) dp_tensorfile_add_meta(f, key, value);
}

/* x becomes x dt, dt becomes A dt. 0: they do not fit. */
static int multiply(dp_tensorfile *in, dp_complaints *all) {
    dp_tensor *x = find(in, "x"), *dt = find(in, "dt"), *A = find(in, "A");
    const int64_t HV = A->n;
    const dp_format made = strcmp(dt->dtype, "F64") ? DP_FP32 : DP_FP64;
    if (!HV || !dt->n || dt->n % HV || x->n % dt->n) {
        dp_complain(all,
                    "%s: tensors x, dt, A of %lld, %lld and %lld numbers: must be [T,HV,V], [T,HV] "
                    "and [HV]",
                    in->path, (long long)x->n, (long long)dt->n, (long long)A->n);
        return 0;
    }
    const int64_t V = x->n / dt->n;
    for (int64_t i = 0; i < x->n; i++)
        x->data[i] = dp_store(made, x->data[i] * dt->data[i / V]);
    for (int64_t i = 0; i < dt->n; i++)
        dt->data[i] = dp_store(made, dt->data[i] * A->data[i % HV]);
    drop(in, A);
    return 1;
}

void dp_judge_mamba(dp_tensorfile *in, dp_tensorfile *out, const char *given, dp_complaints *all) {
    const char *word = given ? given : dp_tensorfile_meta(in, "layout");
    const int named = find(in, "x") && find(in, "dt") && !find(in, "q");
    if (!word && named)
        dp_complain(all, "%s: has x and dt, Mamba's names: give --layout mamba", in->path);
    if (!word || !strcmp(word, "fla")) return;
    if (strcmp(word, "mamba")) {
        dp_complain(all, "layout '%.80s' is not known: give " OPTION, word);
        return;
    }
    int missing = 0;
    static const char *const needed[] = {"x", "dt", "A", "B", "C"};
    for (size_t i = 0; i < COUNT(needed); i++) {
        if (find(in, needed[i])) continue;
        dp_complain(all, "%s: tensor %s is missing", in->path, needed[i]);
        missing++;
    }
    if (missing || !multiply(in, all)) return;
    for (size_t i = 0; i < COUNT(NAMES); i++)
        rename_to(in, NAMES[i].mamba, NAMES[i].own);
    for (size_t i = 0; i < COUNT(MADE); i++)
        rename_to(out, MADE[i].mamba, MADE[i].own);
    say(in, "gate", "log");
    say(in, "beta", "none");
    say(in, "l2norm", "0");
    say(in, "scale", "1");
    say(in, "state_layout", "vk");
    say(out, "state_layout", "vk");
}

/* ---- no gate, one key ------------------------------------------------------------------------ */

dp_tensor *dp_judge_input(const dp_tensorfile *f, dp_input_id input) {
    return (dp_tensor *)dp_case_input_find(f, &dp_input_fields[input]);
}

/* Axis i of a tensor that is 1 long goes. */
static void drop_axis(dp_tensor *t, int i) {
    t->ndim--;
    memmove(&t->shape[i], &t->shape[i + 1], sizeof *t->shape * (size_t)(t->ndim - i));
}

void dp_judge_one_key(dp_tensorfile *in, dp_tensorfile *out) {
    static const struct {
        const char *name;
        int behind; /* axes after that of keys */
    } KEYED[] = {{"k", 1}, {"v", 1}, {"beta", 0}, {"dk", 1}, {"dv", 1}, {"dbeta", 0}};
    const dp_tensor *q = find(in, "q"), *k = find(in, "k");
    if (!q || !k || k->ndim != q->ndim + 1 || k->shape[k->ndim - 2] != 1) return;
    const int axes = q->ndim + 1;
    for (size_t i = 0; i < COUNT(KEYED); i++) {
        dp_tensor *t = find(*KEYED[i].name == 'd' ? out : in, KEYED[i].name);
        const int at = axes - 2; /* beta has it there, too: [..,H,R] beside [..,H,R,K] */
        if (t && t->ndim == at + 1 + KEYED[i].behind && t->shape[at] == 1) drop_axis(t, at);
    }
}

/* Is the gate, where nobody gives one, no decay at all? Not of raw gates, which have parameters. */
static int decays_by_nothing(dp_tensorfile *in, const char *gate) {
    const char *said = gate ? gate : dp_tensorfile_meta(in, "gate");
    const int raw = dp_judge_input(in, DP_INPUT_A_LOG) || dp_judge_input(in, DP_INPUT_DT_BIAS);
    return !raw && (!said || !strcmp(said, "log"));
}

int dp_judge_no_gate(dp_tensorfile *in, const dp_tensorfile *out, const char *gate, int said,
                     dp_complaints *all) {
    const dp_tensor *q = dp_judge_input(in, DP_INPUT_Q), *k = dp_judge_input(in, DP_INPUT_K),
                    *v = dp_judge_input(in, DP_INPUT_V);
    int64_t shape[8], n = 1;
    if (dp_judge_input(in, DP_INPUT_G) || !q || !k || !v || !decays_by_nothing(in, gate)) return 0;
    const int keys = k->ndim == q->ndim + 1, at = v->ndim - 2 - keys; /* the axis of value heads */
    if (q->ndim < 2 || q->ndim > 5 || at < 0) return 0;               /* refused by its shape */
    if (said < 0 && (keys || k->n > q->n)) {
        dp_complain(all,
                    "%s: tensor g is missing, and rows of several keys a token read one state or "
                    "one after another: give --recurrence mkda|gated-deltaproduct",
                    in->path);
        return 0;
    }
    if (dp_tensor_find(out, dp_result_fields[DP_RESULT_DG].name))
        dp_complain(all, "%s: has dg, but %s has no g", out->path, in->path);
    memcpy(shape, q->shape, sizeof *shape * (size_t)q->ndim);
    int ndim = q->ndim - 1; /* [..,T,HV] */
    if (q->ndim > 2) shape[ndim - 1] = v->shape[at];
    if (said >= 0 && !dp_models[said].one_gate) shape[ndim++] = q->shape[q->ndim - 1];
    for (int i = 0; i < ndim; i++)
        n *= shape[i];
    double *zeros = dp_doubles(n);
    dp_tensorfile_add(in, dp_input_fields[DP_INPUT_G].name, q->dtype, ndim, shape, zeros);
    free(zeros);
    say(in, "gate", "log");
    return 1;
}

/* ---- names and batches ----------------------------------------------------------------------- */

/* Does each of its rows belong to a token? */
static int of_tokens(const char *name) {
    const int in = dp_input_find(name), out = dp_result_find(name);
    const int stage = dp_stage_tensor_find(name);
    if (in >= 0) return dp_input_fields[in].kind == DP_OF_TOKENS;
    if (out >= 0) return dp_result_fields[out].kind == DP_OF_TOKENS;
    return stage >= 0 && dp_stage_tensors[stage].axis[0] == DP_AXIS_T;
}

static dp_status fold_file(dp_tensorfile *f, int64_t B, int64_t T, dp_err *e) {
    for (int i = 0; i < f->ntensor; i++) {
        dp_tensor *t = &f->tensor[i];
        if (!of_tokens(t->name)) continue;
        if (t->ndim < 3 || t->shape[0] != B || t->shape[1] != T)
            return dp_fail(e, DP_EINPUT,
                           "%s: tensor %s: q has a batch axis, [%lld,%lld,..], but this does not "
                           "begin so",
                           f->path, t->name, (long long)B, (long long)T);
        t->ndim--;
        t->shape[0] = B * T;
        memmove(&t->shape[1], &t->shape[2], sizeof *t->shape * (size_t)(t->ndim - 1));
    }
    return DP_OK;
}

static char *boundaries(int64_t B, int64_t T) {
    const size_t size = 24 * (size_t)(B + 1);
    char *text = dp_calloc(size, 1);
    size_t n = 0;
    for (int64_t b = 0; b <= B; b++)
        n += (size_t)snprintf(text + n, size - n, "%s%lld", b ? "," : "", (long long)(b * T));
    return text;
}

static dp_status fold_batch(dp_tensorfile *in, dp_tensorfile *out, dp_judge_settings *s,
                            dp_err *e) {
    const dp_tensor *q = dp_tensor_find(in, dp_qkv_name(DP_QKV_Q));
    if (q->ndim != 4 || q->shape[0] < 2) return DP_OK;
    const int64_t B = q->shape[0], T = q->shape[1];
    if (!q->n) /* a file of any size can say so of any B, and B boundaries would be written */
        return dp_fail(e, DP_EINPUT, "%s: tensor q: [%lld,%lld,%lld,%lld] holds no number",
                       in->path, (long long)B, (long long)T, (long long)q->shape[2],
                       (long long)q->shape[3]);
    if (s->cu || dp_tensor_find(in, "cu_seqlens"))
        return dp_fail(e, DP_EINPUT,
                       "%s: tensor q has a batch of %lld: packed sequences (cu_seqlens) need [1,T,"
                       "H,K]",
                       in->path, (long long)B);
    if (s->ranks > 1)
        return dp_fail(e, DP_EINPUT,
                       "%s: tensor q has a batch of %lld: --ranks splits one sequence, [1,T,H,K]: "
                       "judge the batches one by one",
                       in->path, (long long)B);
    dp_status st = fold_file(in, B, T, e);
    if (!st) st = fold_file(out, B, T, e);
    if (st) return st;
    s->batch = B;
    s->cu = s->folded = boundaries(B, T);
    return DP_OK;
}

/* ---- query heads ----------------------------------------------------------------------------- */

/* Row t of T tokens, at axis `at`, as row t n of n T; the others are `fill`. */
static void spread(dp_tensor *t, int at, int64_t n, double fill) {
    const int64_t T = t->shape[at], width = T ? t->n / T : 0;
    double *y = dp_doubles(t->n * n);
    for (int64_t i = 0; i < t->n * n; i++)
        y[i] = i / width % n ? fill : t->data[i / width / n * width + i % width];
    free(t->data);
    t->data = y;
    t->n *= n;
    t->shape[at] *= n;
}

/* [T,H n,W] as [T n,H,W]: query head h n + j of token t is head h of token t n + j. */
static void regroup(dp_tensor *t, int at, int64_t n) {
    const int64_t H = t->shape[at + 1] / n, W = t->shape[at + 2];
    double *y = dp_doubles(t->n);
    for (int64_t i = 0; i < t->n; i++) {
        const int64_t head = i / W % (H * n), token = i / W / (H * n) * n + head % n;
        y[(token * H + head / n) * W + i % W] = t->data[i];
    }
    free(t->data);
    t->data = y;
    t->shape[at] *= n;
    t->shape[at + 1] = H;
}

static int of_queries(const char *name) {
    const int in = dp_input_find(name), out = dp_result_find(name);
    return in == DP_INPUT_Q || in == DP_INPUT_DO || out == DP_RESULT_DQ || out == DP_RESULT_O;
}

static dp_status regroup_file(dp_tensorfile *f, int at, int64_t n, double gate, dp_err *e) {
    for (int i = 0; i < f->ntensor; i++) {
        dp_tensor *t = &f->tensor[i];
        if (!of_tokens(t->name)) continue;
        if (of_queries(t->name) && t->ndim == at + 3 && t->shape[at + 1] % n == 0)
            regroup(t, at, n);
        else if (!of_queries(t->name) && t->ndim > at)
            spread(t, at, n, dp_input_find(t->name) == DP_INPUT_G ? gate : 0);
        else
            return dp_fail(e, DP_EINPUT, "%s: tensor %s: of %lld query heads a value head, as q",
                           f->path, t->name, (long long)n);
    }
    return DP_OK;
}

/* s->cu of n times as many tokens; what is no number stays, and is refused where it is read. */
static void scale_boundaries(dp_judge_settings *s, int64_t n) {
    char *text = dp_calloc(24 * strlen(s->cu) + 24, 1), *to = text;
    for (const char *from = s->cu; *from;) {
        char *end;
        const long long at = strtoll(from, &end, 10);
        if (end == from) {
            *to++ = *from++;
            continue;
        }
        to += sprintf(to, "%lld", (long long)((uint64_t)at * (uint64_t)n));
        from = end;
    }
    free(s->folded);
    s->cu = s->folded = text;
}

/* Several query heads a value head; 1: not, or not of these shapes. */
static int64_t query_heads(const dp_tensorfile *in, const dp_tensor *q, const dp_tensor *v) {
    const dp_tensor *k = dp_case_input_find(in, &dp_input_fields[DP_INPUT_K]);
    const int at = q->ndim - 2; /* the axis of heads */
    if (at < 1 || v->ndim <= at || k->ndim <= at || v->shape[at] < 1) return 1;
    const int64_t n = q->shape[at] / v->shape[at];
    return n > 1 && q->shape[at] % v->shape[at] == 0 && k->shape[at] == v->shape[at] ? n : 1;
}

/* Tokens that only read are the further queries of the token before them: they have neither key nor
 * value, and do not decay. A raw gate is so far below 0 that nothing is left of its exp. */
static dp_status unfold_queries(dp_tensorfile *in, dp_tensorfile *out, dp_judge_settings *s,
                                dp_err *e) {
    const dp_tensor *q = dp_judge_input(in, DP_INPUT_Q);
    const int64_t n = query_heads(in, q, dp_judge_input(in, DP_INPUT_V));
    const int log = !strcmp(s->gate, "log"), at = q->ndim - 3;
    if (n == 1) return DP_OK;
    for (int i = 0; i < out->ntensor; i++) {
        const char *name = out->tensor[i].name;
        if (dp_stage_tensor_find(name) >= 0 && dp_result_find(name) < 0)
            return dp_fail(e, DP_EINPUT,
                           "%s: tensor %s: stages of several query heads a value "
                           "head are not judged",
                           out->path, name);
        if (log && dp_result_find(name) == DP_RESULT_DG)
            return dp_fail(e, DP_EINPUT,
                           "%s: tensor %s: with several query heads a value head dg "
                           "is judged of raw gates alone: leave it out",
                           out->path, name);
    }
    dp_status st = regroup_file(in, at, n, s->decays ? 1 : log ? 0 : -6e4, e);
    if (!st) st = regroup_file(out, at, n, 0, e);
    dp_tensor *cu = find(in, "cu_seqlens");
    for (int64_t i = 0; cu && i < cu->n; i++)
        cu->data[i] *= (double)n;
    if (!st && s->cu) scale_boundaries(s, n);
    s->queries = n;
    return st;
}

dp_status dp_judge_fold(dp_tensorfile *in, dp_tensorfile *out, dp_judge_settings *s, dp_err *e) {
    const dp_status st = fold_batch(in, out, s, e);
    return st ? st : unfold_queries(in, out, s, e);
}
