/* Files of inputs and outputs judged: settings, truth, verdict, hypotheses (judge.h). */
#include "judge.h"
#include "harness/case/case_inputs.h"
#include "judge_files.h"
#include "outputs.h"
#include "ref/arithmetic/elementary.h"
#include "ref/chunk/gate.h"
#include "ref/files/input.h"
#include "ref/files/safetensors.h"
#include "ref/vocabulary/recurrence_text.h"
#include "ref/vocabulary/text.h"
#include "subjects.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The declaration by base, option and OUT's metadata `design`; nothing: undeclared. */
static dp_status read_design(const dp_judge_options *o, const dp_tensorfile *out,
                             const dp_judge_base *said, dp_base base, dp_design *design,
                             dp_stored_results *g, dp_err *e) {
    const char *meta = dp_tensorfile_meta(out, "design"), *text = o->design ? o->design : meta;
    char *words;
    dp_err why = {0};
    if (!text && !*said->words) return DP_OK;
    g->design = design;
    if (!text) text = "undeclared"; /* a base whose name stands for formats alone */
    const int joined = *said->words && *text;
    if (asprintf(&words, "%s%s%s", said->words, joined ? "," : "", text) < 0) abort();
    const dp_status st = dp_design_parse(words, base, design, &why);
    free(words);
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
    int n = 0;
    for (int i = 0; i < DP_NINPUTS; i++)
        if (*dp_input_fields[i].name)
            n += dp_case_input_names(all + n, size - (size_t)n, &dp_input_fields[i]);
}

/* Does it have erase or write, of a recurrence without beta? */
static int has_gates(const dp_tensorfile *in) {
    if (dp_user_recurrence_installed()) return 0;
    return dp_case_input_find(in, &dp_input_fields[DP_INPUT_ERASE]) ||
           dp_case_input_find(in, &dp_input_fields[DP_INPUT_WRITE]);
}

/* The recurrence, or one whose tokens have the same inputs: what is said, else what is there. */
static dp_model model_like(const dp_tensorfile *in, const dp_judge_options *o) {
    const int said = dp_judge_recurrence(o, in);
    if (dp_user_recurrence_installed()) return DP_USER;
    if (said >= 0) return (dp_model)said;
    if (dp_case_input_find(in, &dp_input_fields[DP_INPUT_LR_A])) return DP_DPLR;
    if (has_gates(in)) return DP_GDN2;
    return dp_judge_without_beta(in, o->beta) ? DP_GLA : DP_KDA;
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
    const dp_tensor *q = dp_judge_input(in, query()), *beta = dp_judge_input(in, DP_INPUT_BETA);
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
    if (said && !o->recurrence && !dp_judge_is_recurrence(said))
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
    const dp_tensor *q = dp_judge_input(in, query());
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
    const dp_tensor *q = dp_judge_input(in, DP_INPUT_Q), *k = dp_judge_input(in, DP_INPUT_K),
                    *v = dp_judge_input(in, DP_INPUT_V), *g = dp_judge_input(in, DP_INPUT_G);
    const int64_t K = q->ndim ? q->shape[q->ndim - 1] : 0,
                  H = q->ndim >= 3 ? q->shape[q->ndim - 2] : 1;
    *R = q->n && k->n % q->n == 0 && k->n / q->n >= 1 && k->n / q->n <= 64 ? (int)(k->n / q->n) : 1;
    const dp_strength strength = dp_models[model_like(in, o)].strength;
    if (dp_judge_recurrence(o, in) >= 0) return dp_models[dp_judge_recurrence(o, in)].name;
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
    const dp_tensor *g = dp_judge_input(in, DP_INPUT_G);
    for (int64_t i = 0; g && i < g->n; i++)
        g->data[i] = dp_store(f, g->data[i]);
}

/* The logarithm of a gate that is the decay itself. A decay of 0 leaves less than fp64 holds; above
 * 1 a step grows. */
static dp_status take_logs(dp_tensorfile *in, dp_err *e) {
    const dp_tensor *g = dp_judge_input(in, DP_INPUT_G);
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
    const dp_tensor *g = dp_judge_input(in, DP_INPUT_G),
                    *dg = dp_tensor_find(out, dp_result_fields[DP_RESULT_DG].name);
    for (int64_t i = 0; g && dg && dg->n == g->n && i < g->n; i++)
        dg->data[i] *= dp_exp(g->data[i]);
}

static dp_status load_case(const dp_judge_options *o, dp_tensorfile *in, const dp_judge_settings *s,
                           int backward, dp_case *c, dp_err *e) {
    int R, n;
    const char *op = model(in, o, &R);
    const dp_tensor *q = dp_judge_input(in, DP_INPUT_Q), *v = dp_judge_input(in, DP_INPUT_V);
    for (int i = 0; s->in_vk && i < DP_NINPUTS; i++) {
        dp_tensor *t = (dp_tensor *)dp_case_input_find(in, &dp_input_fields[i]);
        if (t && dp_input_fields[i].kind == DP_OF_SEQUENCES && q->ndim && v->ndim)
            dp_states_transpose(t, q->shape[q->ndim - 1], v->shape[v->ndim - 1]);
    }
    if (!strcmp(op, dp_models[DP_DELTAPRODUCT].name)) dp_keys_of_tokens(in, q, R);
    round_gates(in, s->gate_dtype);
    if (s->decays && take_logs(in, e)) return DP_EINPUT;
    const size_t size = 1024 + (s->cu ? strlen(s->cu) : 0);
    char *text = dp_calloc(size, 1);
    n = snprintf(
        text, size,
        "reason = Tensors that another program wrote.\nsource = two files\nop = %s\nR = %d\ngate = "
        "%s\nbeta = %s\nl2norm = %s\nranks = %d\nbase = %s\nchain = %s\nbackward = %s\n",
        op, R, s->gate, s->beta, s->l2norm, s->ranks, s->base.base, s->claim,
        backward ? "yes" : "no");
    if (o->tokens)
        n += snprintf(text + n, size - (size_t)n, "T = %lld\n",
                      (long long)(o->tokens * (s->queries ? s->queries : 1)));
    if (!isnan(s->scale))
        n += snprintf(text + n, size - (size_t)n, "scale = %.17g\n",
                      s->scale); /* 17 digits give the same double again */
    if (!isnan(s->lower_bound))
        n += snprintf(text + n, size - (size_t)n, "lower_bound = %.17g\n", s->lower_bound);
    if (s->cu) snprintf(text + n, size - (size_t)n, "cu_seqlens = %s\n", s->cu);
    const dp_status st = dp_case_from_tensors(text, in, c, e);
    if (!st && s->queries && c->p.model == DP_USER) c->p.lag = (int)s->queries;
    free(text);
    return st;
}

/* ---- judging --------------------------------------------------------------------------------- */

static const char *base_name(const char *path) {
    return strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
}

static void name_case(const dp_judge_options *o, dp_case *c) {
    free(c->name);
    free(c->source);
    c->name = dp_strdup(base_name(o->outputs));
    if (asprintf(&c->source, "%s, computed from %s", base_name(o->outputs), base_name(o->inputs)) <
        0)
        abort();
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
    dp_judge_base base = {0};
    dp_status st = dp_safetensors_read(o->outputs, &out, e);
    if (!st) {
        dp_complaints all = {0};
        dp_tensors_rename(&out, dp_by_gates(&c->p));
        backward = dp_outputs_check_names(&in, &out, &all);
        const int vk = dp_judge_state_vk(&out, o->state_layout, &all);
        base = dp_judge_base_of(&out, o->base, dp_base_names[c->base[0]], &all);
        const char *chain = dp_judge_claim(&out, o->claim, "--chain FORMAT (of the M chain)",
                                           dp_formats[c->chain[0]].name, &all);
        c->ranks[0] = dp_judge_rank_count(&out, o->ranks, &all);
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
    dp_tensorfile f = {0};
    dp_tensorfile_add_meta(&f, "case", c->name);
    dp_inputs_add(&f, &c->p, c->input_dtype, 1);
    const dp_status st = dp_safetensors_write(path, &f, e);
    dp_tensorfile_free(&f);
    return st;
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
    const char *claim = dp_judge_claim(out, o->claim, DP_JUDGE_CLAIM, NULL, &all);
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
    dp_judge_mamba(in, out, o->layout, all);
    dp_factors_rename(in, out);
    const int by_gates = has_gates(in);
    dp_tensors_rename(in, by_gates);
    dp_tensors_rename(out, by_gates);
    dp_judge_one_key(in, out);
}

/* Zeros in place of a g that is not there; returns whether. */
static int without_gate(const dp_judge_options *o, dp_tensorfile *in, const dp_tensorfile *out,
                        dp_complaints *all) {
    const int named = dp_judge_recurrence(o, in), like = (int)model_like(in, o);
    if (dp_user_recurrence_installed()) return 0;
    const int said = named >= 0 ? named : like == DP_KDA ? -1 : like == DP_GLA ? DP_SSD : like;
    return dp_judge_no_gate(in, out, o->gate, said, all);
}

enum { QUERIES_MOST = 64 }; /* query heads a value head, for which zeros are made */
/* Along the values o needs a do, as q is needed elsewhere: zeros where there is none. */
static void without_gradient(dp_tensorfile *in, dp_complaints *all) {
    const dp_tensor *q = dp_judge_input(in, query()), *k = dp_judge_input(in, DP_INPUT_K);
    const char *name = dp_input_fields[DP_INPUT_Q].name;
    int64_t shape[8];
    if (!q || !k || dp_judge_input(in, DP_INPUT_Q)) return;
    const int has = q->ndim && q->n && k->ndim && k->n;
    const int64_t V = has ? q->shape[q->ndim - 1] : 1, K = has ? k->shape[k->ndim - 1] : 1;
    if (!has || q->n / V > k->n / K * QUERIES_MOST) {
        dp_complain(all, "%s: tensor %s is missing, and %s and %s do not fit", in->path, name,
                    q->name, k->name);
        return;
    }
    memcpy(shape, q->shape, sizeof *shape * (size_t)q->ndim);
    shape[q->ndim - 1] = K;
    double *zeros = dp_doubles(q->n / V * K);
    dp_tensorfile_add(in, name, q->dtype, q->ndim, shape, zeros);
    free(zeros);
}

/* The case of IN; judged: OUT says whether there are gradients, else IN. */
static dp_status load_inputs(const dp_judge_options *o, dp_tensorfile *in, dp_tensorfile *out,
                             int judged, dp_judge_settings *s, dp_case *c, dp_err *e) {
    dp_complaints all = {0};
    if (!dp_user_recurrence_installed()) rename_tensors(o, in, out, &all);
    if (o->change) o->change(in, out, o->change_arg);
    const int no_gate = without_gate(o, in, out, &all);
    check_inputs(in, o, &all);
    if (!has_one_head(in)) check_axes(out, &all);
    const int backward =
        judged ? dp_outputs_check_names(in, out, &all) : dp_tensor_find(in, "do") != NULL;
    dp_judge_settings_read(o, in, out, s, &all);
    without_gradient(in, &all);
    dp_status st = dp_complaints_end(&all, e);
    if (!st) st = dp_judge_fold(in, out, s, e);
    if (!st) st = load_case(o, in, s, backward, c, e);
    free(s->folded);
    if (st) return st;
    name_case(o, c);
    warn_of_inputs(c, no_gate, s->queries);
    return DP_OK;
}

static dp_status load_files(const dp_judge_options *o, dp_tensorfile *in, dp_tensorfile *out,
                            dp_case *c, dp_judge_loaded *l, dp_err *e) {
    dp_judge_settings s = {0};
    dp_status st = load_inputs(o, in, out, 1, &s, c, e);
    if (st) return st;
    if (s.batch) say_batch(o, s.batch, c->p.T / s.batch);
    if (s.decays)
        take_log_gradient(in, out);
    else
        warn_of_growing(c);
    if (dp_in_turn(&c->p)) dp_keys_of_tokens(out, dp_judge_input(in, DP_INPUT_Q), c->p.R);
    st = dp_outputs_load(in, out, &c->p, s.ranks, s.out_vk, &l->stored, e);
    if (!st) st = read_design(o, out, &s.base, c->base[0], &l->design, &l->stored, e);
    if (st) dp_case_free(c);
    return st;
}

/* The recurrence of this call, where the options name a file of one. */
static dp_status install(const char *path, dp_err *e) {
    return !path || dp_judge_is_recurrence(path) ? DP_OK : dp_case_recurrence(path, NULL, e);
}

dp_status dp_judge_load_inputs(const dp_judge_options *given, dp_case *c, dp_err *e) {
    dp_judge_options o = *given;
    o.outputs = o.inputs;
    o.base = o.claim = "fp32";
    dp_tensorfile in = {0}, none = {.path = (char *)o.inputs};
    dp_judge_settings s = {0};
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
    dp_tensorfile in = {0}, out = {0};
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
    dp_tensorfile_free(&in);
    dp_tensorfile_free(&out);
    return st;
}
