/* Settings of `judge`, by tables of the words that files have for them (judge_settings.h). */
#define _GNU_SOURCE
#include "judge_settings.h"
#include "harness/case/case_inputs.h"
#include "ref/vocabulary/number.h"
#include "ref/vocabulary/recurrence_text.h"

#include <ctype.h>
#include <math.h>
#include <string.h>

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
    s->l2norm =
        choose(in, o->l2norm, "l2norm", "qk", "--l2norm 0|1", NORMS, own ? "no" : NULL, all);
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
