/* Names and batches of other programs' files (judge_files.h). */
#include "judge_files.h"
#include "harness/case/case_inputs.h"
#include "harness/simulated/stage_tensor.h"
#include "judge_mamba.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
