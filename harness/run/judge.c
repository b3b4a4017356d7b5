/* Files of inputs and outputs judged: settings, truth, verdict, hypotheses (judge.h). */
#include "judge.h"
#include "harness/case/case_inputs.h"
#include "outputs.h"
#include "ref/arithmetic/elementary.h"
#include "ref/chunk/gate.h"
#include "ref/files/safetensors.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/recurrence_text.h"
#include "ref/vocabulary/tensors.h"
#include "ref/vocabulary/text.h"
#include "subjects.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- settings -------------------------------------------------------------------------------- */

/* Each setting comes from its option, else from the metadata of a file, else a complaint names the
 * option to set (judge.h). */

/* A base that files may name: fp16 is base bf16 whose factors and outputs are fp16 (design.h). */
typedef struct {
    const char *name;  /* as it was said */
    const char *base;  /* of the case */
    const char *words; /* of the design that it implies; "": none */
} judge_base;

typedef struct {
    const char *gate, *beta, *l2norm, *claim, *cu; /* as a case file has them; cu NULL: not set */
    judge_base base;
    dp_format gate_dtype;      /* that g is read in; fp64: as IN holds it */
    double scale, lower_bound; /* NAN: not set */
    int ranks, in_vk, out_vk;
    int decays;      /* g is the decay itself, gate log of its logarithm */
    int64_t batch;   /* B of [B,T,..]; 0: there was none */
    int64_t queries; /* query heads a value head, where there are several; else 0 */
    char *folded;    /* cu of either, to be freed */
} judge_settings;

#define JUDGE_GATE_DTYPES "fp32|bf16|fp16"
#define JUDGE_CLAIM "--claim " DP_FORMAT_WORDS " (format of the M chain)"

typedef struct {
    const char *text, *value;
} word;              /* how metadata may say it; value as a case file has it */
#define DECAYS "exp" /* g is exp of the log decay */
#define FORM(ID, WORD, SAID, ...) {WORD, WORD}, {SAID, WORD},
static const word GATES[] = {DP_GATES(FORM){DECAYS, DECAYS}, {0}};
#define NOTHING "none" /* is erased: there is no beta */
static const word BETAS[] = {DP_BETAS(FORM){NOTHING, "plain"}, {0}};
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

/* Is it the name of a recurrence that stands here? */
static int judge_is_recurrence(const char *name) { return model_named(name) >= 0; }

/* Which of these option or metadata `recurrence` name; -1: nobody says, or a user's own. */
static int judge_recurrence(const dp_judge_options *o, const dp_tensorfile *in) {
    if (dp_user_recurrence_installed()) return -1;
    return model_named(o->recurrence ? o->recurrence : dp_tensorfile_meta(in, "recurrence"));
}

/* That of a user's own rows, which say so; NULL: there are none. */
static const char *own_norm(void) {
    const dp_user_recurrence *y = dp_user_recurrence_installed();
    return !y ? NULL : y->rows.normed ? "yes" : "no";
}

/* Is it said, by the option (may be NULL) or by metadata, that nothing is erased? */
static int judge_without_beta(const dp_tensorfile *in, const char *given) {
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

/* Single ones; dflt NULL: required. */
static int judge_rank_count(const dp_tensorfile *out, int given, dp_complaints *all) {
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

static const char *judge_claim(const dp_tensorfile *out, const char *given, const char *option,
                               const char *dflt, dp_complaints *all) {
    const char *formats[DP_NFORMATS];
    for (int i = 0; i < DP_NFORMATS; i++)
        formats[i] = dp_formats[i].name;
    return choose_name(out, given, "claim", option, formats, DP_NFORMATS, dflt, all);
}

static judge_base judge_base_of(const dp_tensorfile *out, const char *given, const char *dflt,
                                dp_complaints *all) {
    static const judge_base bases[] = {{"bf16", "bf16", ""},
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

static int is_list(const dp_tensor *t, const char *list) {
    int64_t i = 0;
    char *end = (char *)list;
    for (; *(list = end + strspn(end, ", ")); i++)
        if (i == t->n || t->data[i] != (double)strtoll(list, &end, 10)) return 0;
    return i == t->n;
}

static const char *sequences(const dp_judge_options *o, const dp_tensorfile *in,
                             dp_complaints *all) {
    const dp_tensor *own = dp_tensor_find(in, "cu_seqlens");
    const char *cu = o->cu_seqlens ? o->cu_seqlens
                     : own         ? NULL
                                   : dp_tensorfile_meta(in, "cu_seqlens");
    if (cu && (!*cu || cu[strspn(cu, "0123456789, ")]))
        dp_complain(all, "%s: '%.80s' is no list of tokens: give --cu-seqlens 0,..,T",
                    o->cu_seqlens ? "--cu-seqlens" : in->path, cu);
    else if (cu && own && !is_list(own, cu))
        dp_complain(all, "--cu-seqlens '%.80s': %s has others in its tensor cu_seqlens", cu,
                    in->path);
    return cu;
}

/* All of them; what is missing or not understood is added to *all. */
static void judge_settings_read(const dp_judge_options *o, const dp_tensorfile *in,
                                const dp_tensorfile *out, judge_settings *s, dp_complaints *all) {
    const char *gate =
        "--gate log|" DECAYS "|" DP_RAW_GATE_WORDS " (and --gate-dtype " JUDGE_GATE_DTYPES
        ", where the kernel reads g in a coarser format than this file holds)";
    s->gate = choose(in, o->gate, "gate", NULL, gate, GATES, NULL, all);
    s->decays = !strcmp(s->gate, DECAYS);
    if (s->decays) s->gate = "log";
    const char *dtype = choose(in, o->gate_dtype, "gate_dtype", NULL,
                               "--gate-dtype " JUDGE_GATE_DTYPES, GATE_DTYPES, "fp64", all);
    s->gate_dtype = *dtype ? (dp_format)dp_format_find_stored(dtype) : DP_FP64;
    /* what stands in place of beta has no forms to say */
    const int own = dp_user_recurrence_installed() != NULL;
    const int said = judge_recurrence(o, in);
    const int no_beta = own || (said >= 0 && dp_models[said].strength != DP_BY_BETA);
    const char *beta = no_beta || dp_case_input_find(in, &dp_input_fields[DP_INPUT_ERASE]) ||
                               dp_case_input_find(in, &dp_input_fields[DP_INPUT_LR_A])
                           ? "plain"
                           : NULL;
    s->beta =
        choose(in, o->beta, "beta", NULL, "--beta " DP_BETA_WORDS "|" NOTHING, BETAS, beta, all);
    s->l2norm = choose(in, o->l2norm, "l2norm", "qk", "--l2norm 0|1", NORMS, own_norm(), all);
    s->lower_bound = lower_bound(o, in, !strcmp(s->gate, "lower_bound"), all);
    s->scale = number(in, o->scale, "scale", "--scale X", all);
    s->cu = sequences(o, in, all);
    s->in_vk = dp_judge_state_vk(in, o->state_layout, all);
    s->out_vk = dp_judge_state_vk(out, o->state_layout, all);
    s->ranks = judge_rank_count(out, o->ranks, all);
    s->base = judge_base_of(out, o->base, NULL, all);
    /* below 3 ranks no M is used and the chain's format is nothing to claim */
    s->claim = judge_claim(out, o->claim, JUDGE_CLAIM, s->ranks < 3 ? "fp32" : NULL, all);
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
    dp_tensorfile_drop(in, (int)(A - in->tensor));
    return 1;
}

/* Mamba's names (judge.h): renames and multiplies, and adds the settings that follow as metadata,
 * if no metadata has them. option: may be NULL. Does nothing where neither it nor IN's metadata
 * says mamba. Adds to *all: an unknown word, missing tensors and tensors that do not fit. Also
 * Mamba's names without the word. */
static void judge_mamba(dp_tensorfile *in, dp_tensorfile *out, const char *given,
                        dp_complaints *all) {
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

/* An input of the file, under its name or its alias, to be changed; NULL: not there. */
static dp_tensor *judge_input(const dp_tensorfile *f, dp_input_id input) {
    return (dp_tensor *)dp_case_input_find(f, &dp_input_fields[input]);
}

/* Axis i of a tensor that is 1 long goes. */
static void drop_axis(dp_tensor *t, int i) {
    t->ndim--;
    memmove(&t->shape[i], &t->shape[i + 1], sizeof *t->shape * (size_t)(t->ndim - i));
}

/* An axis of keys that is 1 long, k [T,H,1,K] and v [T,HV,1,V] beside q [T,H,K]: it goes, from beta
 * and the gradients too. */
static void judge_one_key(dp_tensorfile *in, dp_tensorfile *out) {
    static const struct {
        const char *name;
        int behind; /* axes after that of keys */
    } KEYED[] = {{"k", 1}, {"v", 1}, {"beta", 0}, {"dk", 1}, {"dv", 1}, {"dbeta", 0}};
    const dp_tensor *q = find(in, "q"), *k = find(in, "k");
    if (!q || !q->ndim || !k || k->ndim != q->ndim + 1 || k->shape[k->ndim - 2] != 1) return;
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
    const int raw = judge_input(in, DP_INPUT_A_LOG) || judge_input(in, DP_INPUT_DT_BIAS);
    return !raw && (!said || !strcmp(said, "log"));
}

/* IN has no g, and no setting contradicts log: there is no decay, and g becomes zeros. It has one
 * number a head or, where `said` (dp_judge_recurrence) has gates of channels, K. Returns whether it
 * did. Added to *all: dg in OUT, several keys a token where nobody says how their rows read. */
static int judge_no_gate(dp_tensorfile *in, const dp_tensorfile *out, const char *gate, int said,
                         dp_complaints *all) {
    const dp_tensor *q = judge_input(in, DP_INPUT_Q), *k = judge_input(in, DP_INPUT_K),
                    *v = judge_input(in, DP_INPUT_V);
    int64_t shape[8], n = 1;
    if (judge_input(in, DP_INPUT_G) || !q || !k || !v || !decays_by_nothing(in, gate)) return 0;
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
    DP_OWN double *zeros = dp_doubles(n);
    dp_tensorfile_add(in, dp_input_fields[DP_INPUT_G].name, q->dtype, ndim, shape, zeros);
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

static dp_status fold_batch(dp_tensorfile *in, dp_tensorfile *out, judge_settings *s, dp_err *e) {
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
static void scale_boundaries(judge_settings *s, int64_t n) {
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
 * value, and do not decay. A raw gate is so far below 0 that nothing is left of its exp, whatever
 * A_log of fp32 multiplies it by. */
#define NO_DECAY_RAW (-1e30) /* finite in fp32 and bf16 */
static dp_status unfold_queries(dp_tensorfile *in, dp_tensorfile *out, judge_settings *s,
                                dp_err *e) {
    const dp_tensor *q = judge_input(in, DP_INPUT_Q);
    const int64_t n = query_heads(in, q, judge_input(in, DP_INPUT_V));
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
                           "%s: tensor %s: with several query heads a value head it "
                           "is judged of raw gates alone: leave it out",
                           out->path, name);
    }
    dp_status st = regroup_file(in, at, n, s->decays ? 1 : log ? 0 : NO_DECAY_RAW, e);
    if (!st) st = regroup_file(out, at, n, 0, e);
    dp_tensor *cu = find(in, "cu_seqlens");
    for (int64_t i = 0; cu && i < cu->n; i++)
        cu->data[i] *= (double)n;
    if (!st && s->cu) scale_boundaries(s, n);
    s->queries = n;
    return st;
}

/* A batch of B > 1: q is [B,T,H,K]. The B sequences become packed ones of B*T tokens. Every tensor
 * that begins with [B,T] loses that axis, s->cu has their begins, and s->batch is B. DP_EINPUT:
 * cu_seqlens or several ranks beside a batch; a tensor of tokens that has another B or T.
 *
 * Several query heads a value head: q [T,H n,K], o and do [T,HV n,V] beside k and v of H = HV
 * heads. Query head h n + j of token t becomes head h of token t n + j. Tokens with j > 0 have no
 * key, no value and no decay. The number n goes to s->queries. DP_EINPUT: stages, dg of a log
 * gate. */
static dp_status judge_fold(dp_tensorfile *in, dp_tensorfile *out, judge_settings *s, dp_err *e) {
    const dp_status st = fold_batch(in, out, s, e);
    return st ? st : unfold_queries(in, out, s, e);
}

/* The declaration by base, option and OUT's metadata `design`; nothing: undeclared. */
static dp_status read_design(const dp_judge_options *o, const dp_tensorfile *out,
                             const judge_base *said, dp_base base, dp_design *design,
                             dp_stored_results *g, dp_err *e) {
    const char *meta = dp_tensorfile_meta(out, "design"), *text = o->design ? o->design : meta;
    dp_err why = {0};
    if (!text && !*said->words) return DP_OK;
    g->design = design;
    if (!text) text = "undeclared"; /* a base whose name stands for formats alone */
    const int joined = *said->words && *text;
    DP_OWN char *words = dp_text_new("%s%s%s", said->words, joined ? "," : "", text);
    const dp_status st = dp_design_parse(words, base, design, &why);
    if (!st) return DP_OK;
    return o->design ? dp_fail(e, DP_EINPUT, "--design: %s", why.msg)
                     : dp_fail(e, DP_EINPUT, "%s: metadata: %s", out->path, why.msg);
}

/* Metadata `claim_drop` of OUT. */
static dp_status claimed_drop(const dp_tensorfile *out, int *bits, dp_err *e) {
    const char *text = dp_tensorfile_meta(out, "claim_drop");
    if (!text || (*bits = dp_drop_bits(text))) return DP_OK;
    return dp_fail(
        e, DP_EINPUT,
        "%s: metadata `claim_drop` = '%.80s' is not understood: a number below 1, or bits "
        "from 1 to %d",
        out->path, text, DP_DROP_BITS_MOST);
}

/* ---- inputs ---------------------------------------------------------------------------------- */

static void known_inputs(char *all, size_t size) {
    for (int i = 0; i < DP_NINPUTS; i++)
        if (*dp_input_fields[i].name) dp_case_input_names(all, size, &dp_input_fields[i]);
}

/* Does it have erase or write, of a recurrence without beta? */
static int has_gates(const dp_tensorfile *in) {
    if (dp_user_recurrence_installed()) return 0;
    return dp_case_input_find(in, &dp_input_fields[DP_INPUT_ERASE]) ||
           dp_case_input_find(in, &dp_input_fields[DP_INPUT_WRITE]);
}

/* The recurrence, or one whose tokens have the same inputs: what is said, else what is there. */
static dp_model model_like(const dp_tensorfile *in, const dp_judge_options *o) {
    const int said = judge_recurrence(o, in);
    if (dp_user_recurrence_installed()) return DP_USER;
    if (said >= 0) return (dp_model)said;
    if (dp_case_input_find(in, &dp_input_fields[DP_INPUT_LR_A])) return DP_DPLR;
    if (has_gates(in)) return DP_GDN2;
    return judge_without_beta(in, o->beta) ? DP_GLA : DP_KDA;
}

static dp_input_id query(void) {
    return dp_input_fields[DP_INPUT_DO].said == DP_ROLE_REQUIRED ? DP_INPUT_DO : DP_INPUT_Q;
}

static void check_input(const dp_tensorfile *in, dp_model m, int input, dp_complaints *all) {
    const dp_tensor_field *f = &dp_input_fields[input];
    const int required = f->said == DP_ROLE_REQUIRED && dp_model_has(m, input);
    if (required && !dp_case_input_find(in, f))
        dp_complain(all, "%s: tensor %s is missing", in->path, f->name);
    if (f->alias && dp_tensor_find(in, f->name) && dp_tensor_find(in, f->alias))
        dp_complain(all, "%s: has the same tensor under two names, %s and %s", in->path, f->name,
                    f->alias);
}

/* Has it one head, whatever axes it writes? Then beta has one number a token. */
static int has_one_head(const dp_tensorfile *in) {
    const dp_tensor *q = judge_input(in, query()), *beta = judge_input(in, DP_INPUT_BETA);
    return q && beta && q->ndim && q->ndim < 4 && beta->n && beta->n == q->shape[0];
}

/* A tensor of tokens of several heads has all its axes but R and Kg: [T,H K] would be taken for a
 * single head. */
static void check_axes(const dp_tensorfile *f, dp_complaints *all) {
    for (int i = 0; i < f->ntensor; i++) {
        const dp_tensor *t = &f->tensor[i];
        const int in = dp_input_find(t->name), out = dp_result_find(t->name);
        const dp_tensor_field *field = in >= 0    ? &dp_input_fields[in]
                                       : out >= 0 ? &dp_result_fields[out]
                                                  : NULL;
        dp_axis need[DP_MAX_AXES + 1] = {DP_AXIS_NONE};
        char have[200], want[200];
        int n = 0;
        if (!field || field->kind != DP_OF_TOKENS) continue;
        for (int a = 0; a < DP_MAX_AXES && field->axis[a]; a++)
            if (field->axis[a] != DP_AXIS_R && field->axis[a] != DP_AXIS_KG)
                need[n++] = field->axis[a];
        if (t->ndim >= n) continue;
        dp_case_shape_text(t, have, sizeof have);
        dp_axes_text(need, want, sizeof want);
        dp_complain(all,
                    "%s: tensor %s: shape %s, must be [%s]: axes of length 1 must be there, too",
                    f->path, t->name, have, want);
    }
}

static void check_inputs(const dp_tensorfile *in, const dp_judge_options *o, dp_complaints *all) {
    const char *said = dp_tensorfile_meta(in, "recurrence");
    char known[256] = "";
    if (said && !o->recurrence && !judge_is_recurrence(said))
        dp_complain(all,
                    "%s: metadata `recurrence` = '%.80s' is not understood: give --recurrence "
                    "FILE, or %s",
                    in->path, said, DP_MODEL_WORDS);
    for (int i = 0; i < in->ntensor; i++) {
        const char *name = in->tensor[i].name;
        if (dp_input_find(name) >= 0 || !strcmp(name, "cu_seqlens")) continue;
        if (!*known) known_inputs(known, sizeof known);
        dp_complain(all, "%s: tensor %s is not an input; known:%s cu_seqlens", in->path, name,
                    known);
    }
    for (int i = 0; i < DP_NINPUTS; i++)
        check_input(in, model_like(in, o), i, all);
    if (!has_one_head(in)) check_axes(in, all);
    const dp_tensor *q = judge_input(in, query());
    if (q && q->ndim == 3 && q->shape[0] == 1 && q->shape[1] > 1 && o->tokens != 1)
        dp_complain(all,
                    "%s: tensor %s: shape [1,%lld,%lld] is one token of %lld heads, or %lld tokens "
                    "of one head: write it as [1,T,H,K], or give --tokens 1",
                    in->path, q->name, (long long)q->shape[1], (long long)q->shape[2],
                    (long long)q->shape[1], (long long)q->shape[1]);
}

/* R from k; the model as option or metadata say, else from g. The loader refuses a tensor that
 * does not fit, by name and shape. */
static const char *model(const dp_tensorfile *in, const dp_judge_options *o, int *R) {
    const dp_tensor *q = judge_input(in, DP_INPUT_Q), *k = judge_input(in, DP_INPUT_K),
                    *v = judge_input(in, DP_INPUT_V), *g = judge_input(in, DP_INPUT_G);
    const int64_t K = q->ndim ? q->shape[q->ndim - 1] : 0,
                  H = q->ndim >= 3 ? q->shape[q->ndim - 2] : 1;
    *R = q->n && k->n % q->n == 0 && k->n / q->n >= 1 && k->n / q->n <= 64 ? (int)(k->n / q->n) : 1;
    const dp_strength strength = dp_models[model_like(in, o)].strength;
    if (judge_recurrence(o, in) >= 0) return dp_models[judge_recurrence(o, in)].name;
    if (strength == DP_BY_GATES) return "gdn2";
    if (strength >= DP_BY_FACTORS)
        return "dplr";                           /* of DP_BY_ROWS the case asks what is installed */
    const int own = *R > 1 && k->ndim > q->ndim; /* an axis of keys */
    const int64_t HV = v->ndim >= 3 + own ? v->shape[v->ndim - 2 - own] : 1;
    const int one_gate = K > 1 && H && (__int128)g->n * K * H == (__int128)q->n * HV;
    if (strength == DP_BY_BETA && *R > 1) return one_gate ? "gated-deltaproduct" : "mkda";
    if (strength == DP_BY_NOTHING) return one_gate ? "ssd" : "gla";
    return one_gate ? "gdn" : "kda";
}

/* The gates that the kernel reads. */
static void round_gates(const dp_tensorfile *in, dp_format f) {
    const dp_tensor *g = judge_input(in, DP_INPUT_G);
    for (int64_t i = 0; g && i < g->n; i++)
        g->data[i] = dp_store(f, g->data[i]);
}

/* The logarithm of a gate that is the decay itself. A decay of 0 leaves less than fp64 holds; above
 * 1 a step grows. */
static dp_status take_logs(dp_tensorfile *in, dp_err *e) {
    const dp_tensor *g = judge_input(in, DP_INPUT_G);
    for (int64_t i = 0; g && i < g->n; i++) {
        if (!(g->data[i] >= 0))
            return dp_fail(e, DP_EINPUT,
                           "%s: tensor %s: entry %lld is %g, but with --gate exp it is a decay, at "
                           "least 0",
                           in->path, g->name, (long long)i, g->data[i]);
        g->data[i] = g->data[i] > 0 ? dp_log(g->data[i]) : -1000;
    }
    return DP_OK;
}

/* The gradient of decays becomes that of their logarithms. */
static void take_log_gradient(const dp_tensorfile *in, dp_tensorfile *out) {
    const dp_tensor *g = judge_input(in, DP_INPUT_G),
                    *dg = dp_tensor_find(out, dp_result_fields[DP_RESULT_DG].name);
    for (int64_t i = 0; g && dg && dg->n == g->n && i < g->n; i++)
        dg->data[i] *= dp_exp(g->data[i]);
}

static dp_status load_case(const dp_judge_options *o, dp_tensorfile *in, const judge_settings *s,
                           int backward, dp_case *c, dp_err *e) {
    int R;
    const char *op = model(in, o, &R);
    const dp_tensor *q = judge_input(in, DP_INPUT_Q), *v = judge_input(in, DP_INPUT_V);
    for (int i = 0; s->in_vk && i < DP_NINPUTS; i++) {
        dp_tensor *t = (dp_tensor *)dp_case_input_find(in, &dp_input_fields[i]);
        if (t && dp_input_fields[i].kind == DP_OF_SEQUENCES && q->ndim && v->ndim)
            dp_states_transpose(t, q->shape[q->ndim - 1], v->shape[v->ndim - 1]);
    }
    if (!strcmp(op, dp_models[DP_DELTAPRODUCT].name)) dp_keys_of_tokens(in, q, R);
    round_gates(in, s->gate_dtype);
    if (s->decays && take_logs(in, e)) return DP_EINPUT;
    const size_t size = 1024 + (s->cu ? strlen(s->cu) : 0);
    DP_OWN char *text = dp_calloc(size, 1);
    dp_text_add(
        text, size,
        "reason = Tensors that another program wrote.\nsource = two files\nop = %s\nR = %d\ngate = "
        "%s\nbeta = %s\nl2norm = %s\nranks = %d\nbase = %s\nchain = %s\nbackward = %s\n",
        op, R, s->gate, s->beta, s->l2norm, s->ranks, s->base.base, s->claim,
        backward ? "yes" : "no");
    if (o->tokens)
        dp_text_add(text, size, "T = %lld\n",
                    (long long)(o->tokens * (s->queries ? s->queries : 1)));
    if (!isnan(s->scale))
        dp_text_add(text, size, "scale = %.17g\n", s->scale); /* 17 digits: the same double again */
    if (!isnan(s->lower_bound)) dp_text_add(text, size, "lower_bound = %.17g\n", s->lower_bound);
    if (s->cu) dp_text_add(text, size, "cu_seqlens = %s\n", s->cu);
    const dp_status st = dp_case_from_tensors(text, in, c, e);
    if (!st && s->queries && c->p.model == DP_USER) c->p.lag = (int)s->queries;
    return st;
}

/* ---- judging --------------------------------------------------------------------------------- */

static void name_case(const dp_judge_options *o, dp_case *c) {
    free(c->name);
    free(c->source);
    c->name = dp_strdup(dp_base_name(o->outputs));
    c->source =
        dp_text_new("%s, computed from %s", dp_base_name(o->outputs), dp_base_name(o->inputs));
}

dp_status dp_judge_case(const dp_judge_options *o, dp_case *c, dp_runs *runs, dp_err *e) {
    dp_tensorfile in = {.path = c->path}, out = {0};
    dp_tensor dout = {.name = (char *)"do"};
    dp_stored_results g = {0};
    dp_design design;
    dp_err own = {0};
    int backward = 0;
    if (!e) e = &own;
    if (c->p.dout) {
        in.ntensor = 1;
        in.tensor = &dout;
    }
    judge_base base = {0};
    dp_status st = dp_safetensors_read(o->outputs, &out, e);
    if (!st) {
        dp_complaints all = {0};
        dp_tensors_rename(&out, dp_by_gates(&c->p));
        backward = dp_outputs_check_names(&in, &out, &all);
        const int vk = dp_judge_state_vk(&out, o->state_layout, &all);
        base = judge_base_of(&out, o->base, dp_base_names[c->base[0]], &all);
        const char *chain = judge_claim(&out, o->claim, "--chain FORMAT (of the M chain)",
                                        dp_formats[c->chain[0]].name, &all);
        c->ranks[0] = judge_rank_count(&out, o->ranks, &all);
        if (!(st = dp_complaints_end(&all, e))) {
            for (int i = 0; i < DP_NBASES; i++)
                if (!strcmp(base.base, dp_base_names[i])) c->base[0] = (dp_base)i;
            c->chain[0] = (dp_format)dp_format_find(chain);
            c->nranks = c->nbase = c->nchain = 1;
            c->backward &= backward;
            if (c->p.T % c->ranks[0])
                st = dp_fail(e, DP_EINPUT, "%s: T = %lld is not divisible by %d ranks", c->path,
                             (long long)c->p.T, c->ranks[0]);
        }
        if (!st) st = dp_outputs_load(&in, &out, &c->p, c->ranks[0], vk, &g, e);
    }
    const dp_run_options ro = {.cache = o->cache, .progress = o->progress, .unjudged = o->unjudged};
    if (!st) st = read_design(o, &out, &base, c->base[0], &design, &g, e);
    if (!st) st = dp_run_stored(c, &ro, &g, runs, e);
    dp_tensorfile_free(&out);
    return st;
}

dp_status dp_judge_write_inputs(const dp_case *c, const char *path, dp_err *e) {
    DP_FREED(dp_tensorfile_free) dp_tensorfile f = {0};
    dp_tensorfile_add_meta(&f, "case", c->name);
    dp_inputs_add(&f, &c->p, c->input_dtype, 1);
    return dp_safetensors_write(path, &f, e);
}

static dp_status load_chain(const dp_judge_options *o, dp_tensorfile *in, dp_tensorfile *out,
                            dp_case *c, dp_judge_loaded *l, dp_err *e) {
    const dp_tensor *f = dp_tensor_find(in, "factors"), *m = dp_tensor_find(out, "M");
    dp_complaints all = {0};
    char want[200], have[200] = "none";
    if (in->ntensor != 1)
        return dp_fail(e, DP_EINPUT,
                       "%s: a chain of M has one input, factors, but there are %d tensors",
                       in->path, in->ntensor);
    if (f->ndim != 3 || f->shape[1] != f->shape[2] || f->shape[0] < 1 || f->shape[1] < 1 ||
        f->shape[0] > 1 << 20 || f->shape[1] > 256) {
        dp_case_shape_text(f, have, sizeof have);
        return dp_fail(e, DP_EINPUT,
                       "%s: tensor factors: shape %s, must be [n,K,K] with K up to 256", in->path,
                       have);
    }
    dp_case_shape_text(f, want, sizeof want);
    if (m) dp_case_shape_text(m, have, sizeof have);
    if (!m || out->ntensor != 1 || strcmp(want, have))
        return dp_fail(
            e, DP_EINPUT,
            "%s: must hold one tensor, M %s, the product after each factor; it holds %d, M %s",
            out->path, want, out->ntensor, have);
    for (int64_t i = 0; i < f->n; i++)
        if (!isfinite(f->data[i]))
            return dp_fail(e, DP_EINPUT, "%s: tensor factors: entry %lld is not finite", in->path,
                           (long long)i);
    const char *claim = judge_claim(out, o->claim, JUDGE_CLAIM, NULL, &all);
    if (dp_complaints_end(&all, e)) return DP_EINPUT;
    *c = (dp_case){.op = &dp_operations[DP_OP_CHAIN],
                   .op_name = dp_operations[DP_OP_CHAIN].name,
                   .reason = dp_strdup("A chain of M that another program multiplied."),
                   .path = dp_strdup(o->outputs),
                   .data = dp_strdup(o->inputs)};
    c->ch.n = (int)f->shape[0];
    c->ch.K = (int)f->shape[1];
    name_case(o, c);
    l->factors = f->data;
    l->products = m->data;
    l->claimed = dp_format_find(claim);
    return DP_OK;
}

static void say_batch(const dp_judge_options *o, int64_t B, int64_t T) {
    char text[200];
    snprintf(text, sizeof text,
             "a batch of %lld was judged as packed sequences: token t of batch b is token %lld b + "
             "t of sequence b",
             (long long)B, (long long)T);
    if (o->note) o->note(text);
}

/* n: query heads a value head, where there are several. */
static void warn_of_inputs(dp_case *c, int no_gate, int64_t n) {
    if (no_gate) dp_case_warn(c, "the inputs have no g: every gate is 0, nothing decays");
    if (n)
        dp_case_warn(c,
                     "%lld query heads a value head were judged as tokens that only read: query "
                     "head %lld h + j of token t is head h of token %lld t + j",
                     (long long)n, (long long)n, (long long)n);
}

/* Log decays above 0, which a linear or a raw gate mostly has. */
static void warn_of_growing(dp_case *c) {
    const dp_problem *p = &c->p;
    const int64_t n = dp_input_count(p, DP_INPUT_G), above = dp_gates_above_0(p);
    int decays = 1;
    for (int64_t i = 0; i < n; i++)
        decays &= p->g[i] >= 0 && p->g[i] <= 1;
    if (above)
        dp_case_warn(c, "%lld of %lld log decays g are above 0: there the state grows%s",
                     (long long)above, (long long)n,
                     decays ? "; with --gate exp g is the decay" : "");
}

/* Names that other programs have for those of the recurrences here. */
static void rename_tensors(const dp_judge_options *o, dp_tensorfile *in, dp_tensorfile *out,
                           dp_complaints *all) {
    judge_mamba(in, out, o->layout, all);
    dp_factors_rename(in, out);
    const int by_gates = has_gates(in);
    dp_tensors_rename(in, by_gates);
    dp_tensors_rename(out, by_gates);
    judge_one_key(in, out);
}

/* Zeros in place of a g that is not there; returns whether. */
static int without_gate(const dp_judge_options *o, dp_tensorfile *in, const dp_tensorfile *out,
                        dp_complaints *all) {
    const int named = judge_recurrence(o, in), like = (int)model_like(in, o);
    if (dp_user_recurrence_installed()) return 0;
    const int said = named >= 0 ? named : like == DP_KDA ? -1 : like == DP_GLA ? DP_SSD : like;
    return judge_no_gate(in, out, o->gate, said, all);
}

enum { QUERIES_MOST = 64 }; /* query heads a value head, for which zeros are made */
/* Along the values o needs a do, as q is needed elsewhere: zeros where there is none. */
static void without_gradient(dp_tensorfile *in, dp_complaints *all) {
    const dp_tensor *q = judge_input(in, query()), *k = judge_input(in, DP_INPUT_K);
    const char *name = dp_input_fields[DP_INPUT_Q].name;
    int64_t shape[8];
    if (!q || !k || judge_input(in, DP_INPUT_Q)) return;
    const int has = q->ndim && q->n && k->ndim && k->n;
    const int64_t V = has ? q->shape[q->ndim - 1] : 1, K = has ? k->shape[k->ndim - 1] : 1;
    if (!has || q->n / V > k->n / K * QUERIES_MOST) {
        dp_complain(all, "%s: tensor %s is missing, and %s and %s do not fit", in->path, name,
                    q->name, k->name);
        return;
    }
    memcpy(shape, q->shape, sizeof *shape * (size_t)q->ndim);
    shape[q->ndim - 1] = K;
    DP_OWN double *zeros = dp_doubles(q->n / V * K);
    dp_tensorfile_add(in, name, q->dtype, q->ndim, shape, zeros);
}

/* The case of IN; judged: OUT says whether there are gradients, else IN. */
static dp_status load_inputs(const dp_judge_options *o, dp_tensorfile *in, dp_tensorfile *out,
                             int judged, judge_settings *s, dp_case *c, dp_err *e) {
    dp_complaints all = {0};
    if (!dp_user_recurrence_installed()) rename_tensors(o, in, out, &all);
    if (o->change) o->change(in, out, o->change_arg);
    const int no_gate = without_gate(o, in, out, &all);
    check_inputs(in, o, &all);
    if (!has_one_head(in)) check_axes(out, &all);
    const int backward =
        judged ? dp_outputs_check_names(in, out, &all) : dp_tensor_find(in, "do") != NULL;
    judge_settings_read(o, in, out, s, &all);
    without_gradient(in, &all);
    dp_status st = dp_complaints_end(&all, e);
    if (!st) st = judge_fold(in, out, s, e);
    if (!st) st = load_case(o, in, s, backward, c, e);
    free(s->folded);
    if (st) return st;
    name_case(o, c);
    warn_of_inputs(c, no_gate, s->queries);
    return DP_OK;
}

static dp_status load_files(const dp_judge_options *o, dp_tensorfile *in, dp_tensorfile *out,
                            dp_case *c, dp_judge_loaded *l, dp_err *e) {
    judge_settings s = {0};
    dp_status st = load_inputs(o, in, out, 1, &s, c, e);
    if (st) return st;
    if (s.batch) say_batch(o, s.batch, c->p.T / s.batch);
    if (s.decays)
        take_log_gradient(in, out);
    else
        warn_of_growing(c);
    if (dp_in_turn(&c->p)) dp_keys_of_tokens(out, judge_input(in, DP_INPUT_Q), c->p.R);
    st = dp_outputs_load(in, out, &c->p, s.ranks, s.out_vk, &l->stored, e);
    if (!st) st = read_design(o, out, &s.base, c->base[0], &l->design, &l->stored, e);
    if (st) dp_case_free(c);
    return st;
}

/* The recurrence of this call, where the options name a file of one. */
static dp_status install(const char *path, dp_err *e) {
    return !path || judge_is_recurrence(path) ? DP_OK : dp_case_recurrence(path, NULL, e);
}

dp_status dp_judge_load_inputs(const dp_judge_options *given, dp_case *c, dp_err *e) {
    dp_judge_options o = *given;
    o.outputs = o.inputs;
    o.base = o.claim = "fp32";
    dp_tensorfile in = {0}, none = {.path = (char *)o.inputs};
    judge_settings s = {0};
    memset(c, 0, sizeof *c);
    dp_status st = install(o.recurrence, e);
    if (!st) st = dp_safetensors_read(o.inputs, &in, e);
    if (!st) st = load_inputs(&o, &in, &none, 0, &s, c, e);
    dp_tensorfile_free(&in);
    return st;
}

dp_status dp_judge_load(const dp_judge_options *o, dp_tensorfile *in, dp_tensorfile *out,
                        dp_case *c, dp_judge_loaded *l, dp_err *e) {
    *l = (dp_judge_loaded){.drop = o->drop};
    memset(c, 0, sizeof *c);
    dp_status st = (dp_tensor_find(in, "factors") ? load_chain : load_files)(o, in, out, c, l, e);
    if (!st && !l->drop && (st = claimed_drop(out, &l->drop, e))) dp_case_free(c);
    return st;
}

/* Every name that may be unjudged is that of a tensor: in OUT, or of any result. */
static dp_status check_unjudged(const char *names, const dp_tensorfile *out, dp_err *e) {
    char name[64];
    while ((names = dp_next_name(names, name, sizeof name)))
        if (dp_result_find(name) < 0 && !dp_tensor_find(out, name))
            return dp_fail(e, DP_EINPUT, "--unjudged %s: %s has no tensor of that name", name,
                           out->path);
    return DP_OK;
}

dp_status dp_judge(const dp_judge_options *o, dp_case *c, dp_runs *runs, dp_err *e) {
    DP_FREED(dp_tensorfile_free) dp_tensorfile in = {0}, out = {0};
    dp_judge_loaded l;
    dp_err own = {0};
    dp_run_options ro = {
        .cache = o->cache, .truth = o->truth, .progress = o->progress, .unjudged = o->unjudged};
    if (!e) e = &own;
    memset(c, 0, sizeof *c);
    dp_status st = install(o->recurrence, e);
    if (!st) st = dp_safetensors_read(o->inputs, &in, e);
    if (!st) st = dp_safetensors_read(o->outputs, &out, e);
    if (!st) st = check_unjudged(o->unjudged, &out, e);
    if (!st) st = dp_judge_load(o, &in, &out, c, &l, e);
    if (!st) ro.drop = l.drop;
    if (!st && l.factors)
        dp_run_stored_chain(c, l.factors, l.products, l.claimed, runs);
    else if (!st && (st = dp_run_stored(c, &ro, &l.stored, runs, e)))
        dp_case_free(c);
    return st;
}
