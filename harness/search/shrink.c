/* Shrinks a failing case for as long as it fails for the same reason (shrink.h). Its laws come
 * first, then axes, ranks and optional parts, then numbers. */
#include "shrink.h"
#include "bisect.h"
#include "harness/case/case_inputs.h"
#include "ref/files/output.h"
#include "ref/vocabulary/recurrence.h"
#include "ref/vocabulary/text.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <omp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DP_SHRINK_TOK,
    DP_SHRINK_SEQ,
    DP_SHRINK_HEAD,
    DP_SHRINK_GROUP,
    DP_SHRINK_KEY,
    DP_SHRINK_CHAN,
    DP_SHRINK_COL,
    DP_SHRINK_DIM,
    DP_SHRINK_TAP,
    DP_SHRINK_PAIR,
    DP_SHRINK_RANK,
    DP_SHRINK_LOCAL,
    DP_SHRINK_NONE = -1
}; /* value head = HEAD * G + GROUP; RANK and LOCAL are cuts of TOK */

#define DP_SHRINK_MAX_AXES 5
typedef struct {
    const dp_tensor_field *field;
    double **x;
    int nax, ax[DP_SHRINK_MAX_AXES];
} dp_shrink_tensor;

/* ---- the inputs of a case as a table of tensors over named axes ------------------------------ */

/* Its length is that of an axis of the case; a plain one is a setting of its own. */
static const struct {
    const char *name;
    dp_axis axis;
    size_t setting; /* an int of dp_case; 0: none */
} AXES[] = {[DP_SHRINK_TOK] = {"chunks", DP_AXIS_T, 0},
            [DP_SHRINK_SEQ] = {"sequences", DP_AXIS_NSEQ, 0},
            [DP_SHRINK_HEAD] = {"key heads", DP_AXIS_H, 0},
            [DP_SHRINK_GROUP] = {"value heads a key head", DP_AXIS_NONE, 0},
            [DP_SHRINK_KEY] = {"keys a token", DP_AXIS_R, offsetof(dp_case, p.R)},
            [DP_SHRINK_CHAN] = {"K", DP_AXIS_K, offsetof(dp_case, p.K)},
            [DP_SHRINK_COL] = {"V", DP_AXIS_V, offsetof(dp_case, p.V)},
            [DP_SHRINK_DIM] = {"D", DP_AXIS_D, offsetof(dp_case, conv.D)},
            [DP_SHRINK_TAP] = {"W", DP_AXIS_W, offsetof(dp_case, conv.W)},
            [DP_SHRINK_PAIR] = {"pairs of channels", DP_AXIS_P, 0}, /* as K and the rows say */
            [DP_SHRINK_RANK] = {"ranks", DP_AXIS_NONE, 0},
            [DP_SHRINK_LOCAL] = {"tokens a rank", DP_AXIS_NONE, 0}};

/* The axes here of one of the table: value heads are those of the groups. */
static void add_axis(dp_shrink_tensor *t, dp_axis axis, int one_gate) {
    const dp_axis as = axis == DP_AXIS_HV ? DP_AXIS_H : axis == DP_AXIS_KG ? DP_AXIS_K : axis;
    int ax = DP_SHRINK_TOK;
    while (AXES[ax].axis != as)
        ax++;
    t->ax[t->nax++] = axis == DP_AXIS_KG && one_gate ? DP_SHRINK_NONE : ax;
    if (axis == DP_AXIS_HV) t->ax[t->nax++] = DP_SHRINK_GROUP;
}

/* t [DP_CASE_MAX_INPUTS]; returns the count. */
static int shrink_tensors(dp_case *c, dp_shrink_tensor *t) {
    dp_case_input s[DP_CASE_MAX_INPUTS];
    const int n = dp_case_inputs(c, s);
    for (int i = 0; i < n; i++) {
        t[i] = (dp_shrink_tensor){.field = s[i].field, .x = s[i].where};
        for (int d = 0; d < s[i].ndim; d++)
            add_axis(&t[i], s[i].field->axis[d], dp_model_of(&c->p)->one_gate);
    }
    return n;
}

/* Length of an axis. */
static int64_t shrink_length(const dp_case *c, int ax) {
    const int ranks = c->op->has_ranks;
    const dp_dims d = c->op->dims(c);
    const int64_t H = d.of[DP_AXIS_H];
    int64_t n = 1;
    switch (ax) {
    case DP_SHRINK_TOK: return d.of[ranks ? DP_AXIS_T : DP_AXIS_CHUNKS];
    case DP_SHRINK_GROUP: n = H ? d.of[DP_AXIS_HV] / H : 1; break;
    case DP_SHRINK_RANK: n = ranks ? c->ranks[0] : 1; break;
    case DP_SHRINK_LOCAL: n = ranks ? d.of[DP_AXIS_T] / c->ranks[0] : 1; break;
    case DP_SHRINK_NONE: break;
    default: n = d.of[AXES[ax].axis];
    }
    return n ? n : 1;
}

/* Entries of a tensor. */
static int64_t shrink_count(const dp_case *c, const dp_shrink_tensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->nax; i++)
        n *= shrink_length(c, t->ax[i]);
    return n;
}

int64_t dp_case_numbers(const dp_case *c, int64_t *nonzero) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const int n = shrink_tensors((dp_case *)c, t);
    int64_t all = 0, some = 0;
    for (int i = 0; i < n; i++) {
        const int64_t m = *t[i].x ? shrink_count(c, &t[i]) : 0;
        all += m;
        for (int64_t j = 0; j < m; j++)
            some += (*t[i].x)[j] != 0;
    }
    if (c->op->has_factors) all = some = (int64_t)c->ch.n * c->ch.K * c->ch.K;
    if (nonzero) *nonzero = some;
    return all;
}

/* Arrays and cu are the copy's own, names the original's. */
static dp_case shrink_copy(const dp_case *from) {
    dp_case c = *from;
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const int n = shrink_tensors(&c, t);
    for (int i = 0; i < n; i++)
        *t[i].x = dp_copy(*t[i].x, shrink_count(from, &t[i]));
    int64_t **cu = dp_case_packing(&c).cu;
    if (cu && *cu) {
        int64_t *own = dp_calloc((size_t)shrink_length(from, DP_SHRINK_SEQ) + 1, sizeof *own);
        memcpy(own, *cu, sizeof *own * (size_t)(shrink_length(from, DP_SHRINK_SEQ) + 1));
        *cu = own;
    }
    return c;
}

/* Frees such a copy. */
static void shrink_copy_free(dp_case *c) { dp_problem_free(&c->p), dp_conv_free(&c->conv); }

/* ---- taking away ----------------------------------------------------------------------------- */

static void gather(dp_case *c, int ax, const unsigned char *gone) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const int n = shrink_tensors(c, t);
    const int64_t len = shrink_length(c, ax);
    for (int i = 0; i < n; i++) {
        int64_t outer = 1, inner = 1, m = 0;
        int at = -1;
        for (int d = 0; d < t[i].nax; d++) {
            if (t[i].ax[d] == ax)
                at = d;
            else
                *(at < 0 ? &outer : &inner) *= shrink_length(c, t[i].ax[d]);
        }
        if (!*t[i].x || at < 0) continue;
        for (int64_t o = 0; o < outer; o++)
            for (int64_t j = 0; j < len; j++)
                if (!gone[j]) {
                    memmove(*t[i].x + m, *t[i].x + (o * len + j) * inner,
                            sizeof(double) * (size_t)inner);
                    m += inner;
                }
    }
}

static void set_length(dp_case *c, int ax, int64_t n) {
    switch (ax) {
    case DP_SHRINK_TOK: *dp_case_packing(c).T = n; break;
    case DP_SHRINK_SEQ: *dp_case_packing(c).Nseq = (int)n; break;
    case DP_SHRINK_HEAD:
        c->p.HV = (int)(n * dp_G(&c->p));
        c->p.H = (int)n;
        break;
    case DP_SHRINK_GROUP: c->p.HV = (int)(c->p.H * n); break;
    default: assert(AXES[ax].setting); *(int *)((char *)c + AXES[ax].setting) = (int)n;
    }
}

static void drop_tokens(dp_case *c, const unsigned char *gone) {
    int64_t *cu = *dp_case_packing(c).cu, T = shrink_length(c, DP_SHRINK_TOK), kept = 0;
    const int64_t nseq = shrink_length(c, DP_SHRINK_SEQ);
    gather(c, DP_SHRINK_TOK, gone);
    for (int64_t t = 0, s = 0; t <= T; t++) {
        while (s <= nseq && cu[s] == t)
            cu[s++] = kept;
        kept += t < T && !gone[t];
    }
    set_length(c, DP_SHRINK_TOK, kept);
}

/* Tokens of a sequence that goes belong to the one before it, those of the first to the next. */
static void drop_sequences(dp_case *c, const unsigned char *gone) {
    int64_t *cu = *dp_case_packing(c).cu, n = shrink_length(c, DP_SHRINK_SEQ), kept = 0;
    const int64_t T = cu[n];
    gather(c, DP_SHRINK_SEQ, gone);
    for (int64_t s = 0; s < n; s++)
        if (!gone[s]) {
            cu[kept] = kept ? cu[s] : 0;
            kept++;
        }
    cu[kept] = T;
    set_length(c, DP_SHRINK_SEQ, kept);
}

/* Takes indices [at, at + len) of an axis away. */
static void shrink_drop(dp_case *c, int ax, int64_t at, int64_t len) {
    const int64_t n = shrink_length(c, ax), T = shrink_length(c, DP_SHRINK_TOK),
                  L = c->op->has_ranks ? T / c->ranks[0] : T;
    if (c->op->has_factors) {
        *(ax == DP_SHRINK_TOK ? &c->ch.n : &c->ch.K) -= (int)len;
        return;
    }
    DP_OWN unsigned char *gone = dp_calloc((size_t)(T > n ? T : n), 1);
    if (ax == DP_SHRINK_RANK || ax == DP_SHRINK_LOCAL) {
        for (int64_t t = 0; t < T; t++) {
            const int64_t i = ax == DP_SHRINK_RANK ? t / L : t % L;
            gone[t] = i >= at && i < at + len;
        }
        drop_tokens(c, gone);
        if (ax == DP_SHRINK_RANK) c->ranks[0] -= (int)len;
    } else {
        memset(gone + at, 1, (size_t)len);
        if (ax == DP_SHRINK_SEQ)
            drop_sequences(c, gone);
        else {
            gather(c, ax, gone);
            set_length(c, ax, n - len);
        }
    }
}

/* ---- the case as a file ---------------------------------------------------------------------- */

#define TEXT_NUMBERS 600

static void print_number(FILE *f, double x) {
    char b[40];
    snprintf(b, sizeof b, "%.9g", x);
    if (strtod(b, NULL) == x || isnan(x))
        fputs(b, f);
    else
        fprintf(f, "%a", x);
}

static int by_bits(const void *a, const void *b) { return memcmp(a, b, sizeof(double)); }

/* The most frequent value of a tensor; *others: how many entries have another. */
static double most_frequent(const dp_case *c, const dp_shrink_tensor *t, int64_t *others) {
    const int64_t n = shrink_count(c, t);
    DP_OWN double *x = dp_copy(*t->x, n);
    double best = 0;
    int64_t often = 0;
    qsort(x, (size_t)n, sizeof *x, by_bits);
    for (int64_t i = 0, from = 0; i < n; i++) {
        if (memcmp(&x[i], &x[from], sizeof *x)) from = i;
        if (i - from < often) continue;
        often = i - from + 1;
        best = x[i];
    }
    *others = n - often;
    return best;
}

/* Its axes in a file; keyed: with one of keys, however few they are. Returns their number. */
static int shape_of(const dp_case *c, const dp_shrink_tensor *t, int keyed, int64_t *shape) {
    int n = 0;
    for (int i = 0; i < t->nax; i++) {
        const int64_t len = shrink_length(c, t->ax[i]);
        if (t->ax[i] == DP_SHRINK_GROUP)
            shape[n - 1] *= len;
        else if (keyed || t->ax[i] != DP_SHRINK_KEY || len > 1)
            shape[n++] = len;
    }
    return n;
}

/* The most frequent value for all of a tensor, then every number that differs. */
static void print_override(FILE *f, const dp_case *c, const dp_shrink_tensor *t, int *any) {
    const double *x = *t->x;
    const int64_t n = shrink_count(c, t);
    int64_t shape[DP_SHRINK_MAX_AXES] = {0}, others;
    const int nd = shape_of(c, t, 1, shape);
    const double best = most_frequent(c, t, &others);
    fprintf(f, "%s%s[", (*any)++ ? ", " : "", t->field->name);
    for (int d = 0; d < nd; d++)
        fputs(d ? ",*" : "*", f);
    fputs("] ", f);
    print_number(f, best);
    for (int64_t i = 0; i < n; i++) {
        if (!memcmp(&x[i], &best, sizeof *x)) continue;
        int64_t rest = n, at = i;
        fprintf(f, ", %s[", t->field->name);
        for (int d = 0; d < nd; d++) {
            rest /= shape[d];
            fprintf(f, "%s%lld", d ? "," : "", (long long)(at / rest));
            at %= rest;
        }
        fputs("] ", f);
        print_number(f, x[i]);
    }
}

static dp_status write_tensors(dp_case *c, const char *path, dp_err *e) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const int n = shrink_tensors(c, t);
    DP_FREED(dp_tensorfile_free) dp_tensorfile f = {0};
    for (int i = 0; i < n; i++) {
        int64_t shape[DP_SHRINK_MAX_AXES] = {0};
        const int nd = shape_of(c, &t[i], 0, shape);
        if (*t[i].x)
            dp_tensorfile_add_format(&f, t[i].field->name,
                                     dp_case_input_format(t[i].field, c->input_dtype), nd, shape,
                                     *t[i].x);
    }
    return dp_safetensors_write(path, &f, e);
}

static void print_settings(FILE *f, const dp_case *c) {
    const dp_operation *op = c->op;
    if (op->has_ranks) fprintf(f, "T = %lld\n", (long long)shrink_length(c, DP_SHRINK_TOK));
    op->write(c, f);
    if (!op->has_ranks) return;
    const int64_t *cu = *dp_case_packing((dp_case *)c).cu;
    if (shrink_length(c, DP_SHRINK_SEQ) > 1) {
        fprintf(f, "cu_seqlens = 0");
        for (int64_t s = 1; s <= shrink_length(c, DP_SHRINK_SEQ); s++)
            fprintf(f, ",%lld", (long long)cu[s]);
        fputc('\n', f);
    }
    fprintf(f, "backward = %s\nranks = %d\nbase = %s\n", c->backward ? "yes" : "no", c->ranks[0],
            dp_base_names[c->base[0]]);
    if (c->allow_nonfinite) fputs("nonfinite = allow\n", f);
    if (c->truth) fprintf(f, "truth = %s\n", dp_truth_pick_names[c->truth]);
}

/* Does the generator make these tensors from a case's text, so that overrides can replace their
 * values? */
static int shrink_fits_text(const dp_case *c) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const dp_problem *p = &c->p;
    const int n = shrink_tensors((dp_case *)c, t);
    int64_t differ = 0, others;
    for (int i = 0; i < n; i++) {
        if (!*t[i].x) continue;
        most_frequent(c, &t[i], &others);
        differ += others + 1;
    }
    return differ <= TEXT_NUMBERS && !p->A_log == !p->dt_bias;
}

static void print_tensors(FILE *f, const dp_case *c, dp_shrink_tensor *t, int n) {
    int any = 0;
    fprintf(f, "dtype = %s\n", dp_formats[c->input_dtype].name);
    if (c->op->has_conv) fprintf(f, "bias = %s\n", c->conv.bias ? "yes" : "no");
    if (c->p.s0) fputs("s0_scale = 1\n", f);
    const char *params = !c->p.A_log ? "no" : c->p.dt_bias ? "yes" : "rates";
    if (c->p.gate != DP_GATE_LOG) fprintf(f, "gate_params = %s\n", params);
    fputs("override = ", f);
    for (int i = 0; i < n; i++)
        if (*t[i].x) print_override(f, c, &t[i], &any);
    fputc('\n', f);
}

dp_status dp_case_write(const dp_case *c, const char *reason, const char *source, const char *path,
                        dp_err *e) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const int n = shrink_tensors((dp_case *)c, t), in_text = shrink_fits_text(c);
    const size_t len = strlen(path);
    dp_output out;
    if (len < 6 || strcmp(path + len - 5, ".case"))
        return dp_fail(e, DP_EINPUT, "%s: the name of a case file ends in .case", path);
    if (strstr(path, " #"))
        return dp_fail(e, DP_EINPUT, "%s: ' #' would begin a comment where the case names its data",
                       path);
    DP_OWN char *data = dp_text_new("%.*s.safetensors", (int)(len - 5), path);
    dp_status st = dp_output_open(&out, path, e);
    if (!st) {
        fprintf(out.f, "reason = %s\nsource = %s\nop = %s\nbits = %d\n", reason, source,
                c->rows ? dp_models[DP_DPLR].name : c->op_name, c->bits);
        if (c->rows) fprintf(out.f, "recurrence = %s\n", c->op_name);
        print_settings(out.f, c);
        if (c->op->inputs && in_text)
            print_tensors(out.f, c, t, n);
        else if (c->op->inputs) {
            fprintf(out.f, "data = %s\n", dp_base_name(data));
            st = write_tensors((dp_case *)c, data, e);
        }
        const dp_status closed = dp_output_close(&out, st != DP_OK, e);
        if (!st) st = closed;
    }
    return st;
}

/* ---- shrinking ------------------------------------------------------------------------------- */

typedef struct {
    const dp_shrink_options *o;
    dp_shrink_options small; /* without the cache: every candidate is another problem */
    dp_case *c;
    const dp_failure *want;
    int runs, tries;
    double start; /* omp_get_wtime */
    char *laws;   /* text of a case file that makes c, as it was before its values were touched;
                     NULL: there is none */
    dp_err *e;
    dp_status st;
} work;

/* ---- trying ---------------------------------------------------------------------------------- */

/* Is there an error, or no try left? */
static int spent(const work *w) {
    return w->st || (w->o->max_tries && w->tries >= w->o->max_tries) ||
           (w->o->max_s && omp_get_wtime() - w->start >= w->o->max_s);
}

/* Does it fail for the same reason, and not without the fault? */
static int fails_alike(work *w, const dp_case *c) {
    dp_failure f;
    dp_err e = {0};
    w->tries++;
    if (c->op->has_problem && dp_problem_check(&c->p, c->allow_nonfinite, &e)) return 0;
    if (dp_failure_of(c, &w->small, w->runs, 0, &f, &e))
        return 0; /* a library may leave a run out: no failure */
    if (w->want->red && !f.red && c->op->has_stages && !w->o->subject) {
        dp_failure g = f;
        g.red = 1;
        if (!dp_failure_same(w->want, &g) || dp_failure_of(c, &w->small, w->runs, 1, &f, &e))
            return 0;
    }
    if (!dp_failure_same(w->want, &f)) return 0;
    if (!w->o->run.fault || !c->op->has_stages) return 1;
    dp_failure clean = {.stage = ""};
    const dp_shrink_options none = {0};
    return !dp_failure_of(c, &none, 1, 0, &clean, &e) && !clean.kind;
}

/* Tells the caller what was taken, as printf. */
static __attribute__((format(printf, 2, 3))) void report(const work *w, const char *fmt, ...) {
    char what[200];
    va_list ap;
    if (!w->o->step) return;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    w->o->step(what, w->c, w->c->ranks[0], dp_case_numbers(w->c, NULL), w->tries, w->o->arg);
}

/* The candidate is taken in place of the problem, or freed. */
static int offer(work *w, dp_case *cand) {
    const int yes = fails_alike(w, cand);
    shrink_copy_free(yes ? w->c : cand);
    if (yes) *w->c = *cand;
    return yes;
}

/* ---- parts that a case may do without -------------------------------------------------------- */

/* A part that a case may do without. */
typedef struct {
    int (*has)(const dp_case *c);
    void (*leave_out)(dp_case *c); /* of its arrays; NULL: its axis is shortened instead */
    const char *key, *value;       /* of its text: the setting without; value NULL: the default */
    const char *what;              /* is said to have been done */
} part;

static void release(double **x) { free(*x), *x = NULL; }

static int packed(const dp_case *c) { return dp_case_packing((dp_case *)c).Nseq[0] > 1; }

static int has_dstate(const dp_case *c) { return c->p.dstate != NULL; }
static void no_dstate(dp_case *c) { release(&c->p.dstate); }

static int has_backward(const dp_case *c) { return c->backward && !dp_reads_along(&c->p); }
static void no_backward(dp_case *c) {
    c->backward = 0;
    release(&c->p.dout);
    release(&c->p.dstate);
    release(&c->conv.dy);
}

static int has_s0(const dp_case *c) { return c->p.s0 != NULL; }
static void no_s0(dp_case *c) { release(&c->p.s0); }

static int has_norm(const dp_case *c) { return c->p.l2norm; }
static void no_norm(dp_case *c) { c->p.l2norm = 0; }

static int has_params(const dp_case *c) { return c->p.A_log || c->p.dt_bias; }
static void no_params(dp_case *c) { release(&c->p.A_log), release(&c->p.dt_bias); }

static int has_scale(const dp_case *c) { return c->op->has_problem && c->p.scale != 1; }
static void unit_scale(dp_case *c) { c->p.scale = 1; }

static int has_bias(const dp_case *c) { return c->conv.bias != NULL; }
static void no_bias(dp_case *c) { release(&c->conv.bias); }

/* The first are removed first: without its gradients a case still says `dstate`. */
static const part PARTS[] = {
    {packed, NULL, "cu_seqlens", NULL, "one sequence"},
    {has_dstate, no_dstate, "dstate", NULL, "no gradient of the final state"},
    {has_backward, no_backward, "backward", "no", "forward alone"},
    {has_s0, no_s0, "s0_scale", NULL, "no initial state"},
    {has_norm, no_norm, "l2norm", NULL, "no L2 norm"},
    {has_params, no_params, "gate_params", "no", "no A_log, dt_bias"},
    {has_scale, unit_scale, "scale", "1", "scale = 1"},
    {has_bias, no_bias, "bias", NULL, "no bias"},
};
enum { NPARTS = sizeof PARTS / sizeof *PARTS };

/* ---- a text with other settings -------------------------------------------------------------- */

/* Does the line set the key? */
static int sets(const char *line, const char *key) {
    while (*line == ' ' || *line == '\t')
        line++;
    const size_t n = strlen(key);
    if (strncmp(line, key, n)) return 0;
    line += n;
    while (*line == ' ' || *line == '\t')
        line++;
    return *line == '=';
}

static char *with(const char *text, const char *key, const char *value) {
    char *out;
    size_t size;
    FILE *f = open_memstream(&out, &size);
    if (!f) abort();
    for (const char *at = text; *at;) {
        const size_t len = strcspn(at, "\n");
        if (!sets(at, key)) fprintf(f, "%.*s\n", (int)len, at);
        at += len + (at[len] == '\n');
    }
    if (value) fprintf(f, "%s = %s\n", key, value);
    fclose(f);
    return out;
}

static void set(char **text, const char *key, const char *value) {
    DP_OWN char *was = *text;
    *text = with(was, key, value);
}

static void set_number(char **text, const char *key, int64_t value) {
    char b[24];
    snprintf(b, sizeof b, "%" PRId64, value);
    set(text, key, b);
}

/* The settings of the one run that fails, in place of the case's lists. */
static void set_run(char **text, const dp_case *c) {
    set_number(text, "ranks", c->ranks[0]);
    set(text, "base", dp_base_names[c->base[0]]);
    if (c->op->has_problem) {
        set(text, "chain", dp_formats[c->chain[0]].name);
        set(text, "merge", dp_exchange_names[c->merge[0]]);
        set(text, "payload", c->payload[0] ? dp_payload_names[c->payload[0]] : NULL);
        set(text, "chain_ranks", NULL);
        set(text, "own", NULL);
    }
    set(text, "smoke", NULL);
}

/* ---- trying ---------------------------------------------------------------------------------- */

/* The case of a text with the names and lists of another; 0: the text is refused. */
static int case_of(const dp_case *like, const char *text, dp_case *out) {
    DP_FREED(dp_case_free) dp_case full;
    if (dp_case_parse(text, strlen(text), like->path, 1, &full, NULL)) return 0;
    dp_case c = *like;
    c.p = full.p;
    c.conv = full.conv;
    c.backward = full.backward;
    c.ranks[0] = full.ranks[0];
    *out = shrink_copy(&c);
    return 1;
}

/* Takes the text in place of the laws where its case fails alike, else frees it. */
static int offer_text(work *w, char *text) {
    dp_case cand;
    const int yes = !spent(w) && case_of(w->c, text, &cand) && offer(w, &cand);
    free(yes ? w->laws : text);
    if (yes) w->laws = text;
    return yes;
}

/* ---- what is tried --------------------------------------------------------------------------- */

static int plainer(work *w) {
    int n = 0;
    for (int i = 0; i < NPARTS && !spent(w); i++) {
        const part *part = &PARTS[i];
        if (!part->has(w->c) || !offer_text(w, with(w->laws, part->key, part->value))) continue;
        report(w, "%s", part->what);
        n++;
    }
    return n;
}

/* The text with so many tokens; sequences that begin behind them go. */
static char *with_tokens(const work *w, int64_t T) {
    const int64_t *cu = *dp_case_packing(w->c).cu;
    char *text = dp_strdup(w->laws);
    set_number(&text, "T", T);
    if (shrink_length(w->c, DP_SHRINK_SEQ) == 1) return text;
    DP_OWN char *list;
    size_t size;
    FILE *f = open_memstream(&list, &size);
    if (!f) abort();
    for (int64_t s = 0; cu[s] < T; s++)
        fprintf(f, "%" PRId64 ",", cu[s]);
    fprintf(f, "%" PRId64, T);
    fclose(f);
    set(&text, "cu_seqlens", list);
    return text;
}

static char *with_length(const work *w, const char *key, int ax, int64_t n) {
    if (ax == DP_SHRINK_TOK) return with_tokens(w, n);
    char *text = dp_strdup(w->laws);
    set_number(&text, key, n);
    return text;
}

/* An axis shortened by half of itself, a quarter, .., down to `unit` at a time. */
static int shorter(work *w, const char *key, int ax, int64_t unit) {
    const int64_t before = shrink_length(w->c, ax);
    for (int64_t step = before / 2 / unit * unit; step >= unit && !spent(w);) {
        const int64_t n = shrink_length(w->c, ax) - step;
        if (n < 1 || !offer_text(w, with_length(w, key, ax, n))) step = step / 2 / unit * unit;
    }
    const int64_t now = shrink_length(w->c, ax);
    if (now < before) report(w, "%s %" PRId64 " -> %" PRId64 ", by its laws", key, before, now);
    return now < before;
}

/* One key head, or as many as there are value heads: then heads go together. */
static int fewer_heads(work *w) {
    const int before = w->c->p.HV;
    for (int64_t hv = 1; hv < before && w->c->p.HV == before && !spent(w); hv *= 2) {
        char *text = dp_strdup(w->laws);
        set_number(&text, "H", 1);
        set_number(&text, "HV", hv);
        offer_text(w, text);
    }
    if (w->c->p.HV < before) report(w, "HV %d -> %d, by its laws", before, w->c->p.HV);
    return w->c->p.HV < before;
}

/* Fewer tokens, heads, channels, settings of the case's text, whose laws draw the inputs anew, for
 * as long as it fails alike. Returns whether any was removed. */
static int shrink_by_laws(work *w) {
    if (!w->laws) return 0;
    set_run(&w->laws, w->c);
    dp_case same;
    if (!case_of(w->c, w->laws, &same)) { /* its ranks do not divide its tokens, say */
        free(w->laws);
        w->laws = NULL;
        return 0;
    }
    shrink_copy_free(&same);
    int changed = 0;
    for (int more = 1; more && !spent(w); changed |= more) {
        more = shorter(w, "T", DP_SHRINK_TOK, w->c->ranks[0]);
        if (!w->c->op->has_problem) {
            more |= shorter(w, "D", DP_SHRINK_DIM, 1);
            continue;
        }
        more |= fewer_heads(w) | plainer(w);
        more |= shorter(w, "V", DP_SHRINK_COL, 1) | shorter(w, "K", DP_SHRINK_CHAN, 1) |
                shorter(w, "R", DP_SHRINK_KEY, 1);
    }
    return changed;
}

/* Writes such a text as a case file with a reason and a source of its own. */
static dp_status write_laws(const char *laws, const char *reason, const char *source,
                            const char *path, dp_err *e) {
    dp_output out;
    dp_status st = dp_output_open(&out, path, e);
    if (st) return st;
    fprintf(out.f, "reason = %s\nsource = %s\n", reason, source);
    for (const char *at = laws; *at;) {
        const size_t len = strcspn(at, "\n");
        if (len && *at != '#' && !sets(at, "reason") && !sets(at, "source"))
            fprintf(out.f, "%.*s\n", (int)len, at);
        at += len + (at[len] == '\n');
    }
    return dp_output_close(&out, 0, e);
}

/* ---- its shape ------------------------------------------------------------------------------- */

static int shrink_axis(work *w, int ax) {
    const int64_t before = shrink_length(w->c, ax),
                  least = w->c->op->has_factors && ax == DP_SHRINK_TOK ? 2 : 1;
    const int blind = w->c->op->has_factors; /* indices of what is drawn are all alike */
    if (ax == DP_SHRINK_CHAN && w->c->p.angle) return 0; /* its pairs of channels go together */
    for (int64_t size = before / 2; size >= 1 && !spent(w); size /= 2)
        for (int64_t at = 0; at < shrink_length(w->c, ax) && !spent(w);) {
            const int64_t n = shrink_length(w->c, ax), len = size < n - at ? size : n - at;
            if (n - len < least) break;
            dp_case cand = shrink_copy(w->c);
            shrink_drop(&cand, ax, at, len);
            if (!offer(w, &cand)) {
                if (blind) break;
                at += len;
            }
        }
    const int64_t now = shrink_length(w->c, ax);
    if (now < before)
        report(w, "%s %lld -> %lld", AXES[ax].name, (long long)before, (long long)now);
    return now < before;
}

/* The same tokens over fewer ranks. */
static int fewer_ranks(work *w) {
    const int before = w->c->ranks[0];
    for (int n = 1; n < before && w->c->op->has_ranks && w->c->ranks[0] == before && !spent(w);
         n++) {
        if (shrink_length(w->c, DP_SHRINK_TOK) % n) continue;
        dp_case cand = shrink_copy(w->c);
        cand.ranks[0] = n;
        offer(w, &cand);
    }
    if (w->c->ranks[0] < before)
        report(w, "the same tokens on %d ranks instead of %d", w->c->ranks[0], before);
    return w->c->ranks[0] < before;
}

static int optional_parts(work *w) {
    int n = 0;
    if (!w->c->op->inputs) return 0;
    for (int i = 0; i < NPARTS && !spent(w); i++) {
        const part *part = &PARTS[i];
        if (!part->leave_out || !part->has(w->c)) continue;
        dp_case cand = shrink_copy(w->c);
        part->leave_out(&cand);
        if (!offer(w, &cand)) continue;
        report(w, "%s", part->what);
        n++;
    }
    return n;
}

/* Shortens axes for as long as the case fails alike; returns whether any became shorter. */
static int shrink_shape(work *w) {
    static const int order[] = {DP_SHRINK_HEAD, DP_SHRINK_GROUP, DP_SHRINK_COL, DP_SHRINK_CHAN,
                                DP_SHRINK_RANK, DP_SHRINK_LOCAL, DP_SHRINK_SEQ, DP_SHRINK_KEY,
                                DP_SHRINK_DIM,  DP_SHRINK_TAP};
    int changed = optional_parts(w);
    if (!w->c->op->has_ranks) {
        changed |= shrink_axis(w, DP_SHRINK_TOK);
        return changed;
    }
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        changed |= shrink_axis(w, order[i]);
    return changed | fewer_ranks(w);
}

/* ---- values ---------------------------------------------------------------------------------- */

static double to_zero(double x) { return x * 0; }
static double to_one(double x) { return x == 0 ? x : copysign(1, x); }

/* The power of two that is nearest on a logarithmic scale. */
static double to_power(double x) {
    int e;
    const double m = frexp(fabs(x), &e);
    return x == 0 || !isfinite(x) ? x : copysign(ldexp(1, m < 0x1.6a09e667f3bcdp-1 ? e - 1 : e), x);
}

/* Sets index list[from .. from+len) of a tensor; what is not finite stays. Nothing changes: 0. */
static int try_values(work *w, int which, const int64_t *list, int64_t from, int64_t len,
                      double (*f)(double)) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    dp_case cand = shrink_copy(w->c);
    int changed = 0;
    shrink_tensors(&cand, t);
    for (int64_t i = from; i < from + len; i++) {
        double *x = &(*t[which].x)[list[i]];
        if (isfinite(*x) && f(*x) != *x) {
            *x = f(*x) + 0.0;
            changed = 1;
        }
    }
    if (changed) return offer(w, &cand);
    shrink_copy_free(&cand);
    return 0;
}

/* One tensor: all of it, then halves of it, down to single numbers as long as those are few. */
static int64_t simplify(work *w, int which, double (*f)(double)) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    shrink_tensors(w->c, t);
    if (!*t[which].x) return 0;
    const int64_t n = shrink_count(w->c, &t[which]);
    DP_OWN int64_t *list = dp_calloc((size_t)n, sizeof *list);
    int64_t m = 0, taken = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite((*t[which].x)[i]) && f((*t[which].x)[i]) != (*t[which].x)[i]) list[m++] = i;
    for (int64_t size = m; size >= 1 && m > 0 && m / size <= 512 && !spent(w);
         size = size > 1 ? (size + 1) / 2 : 0)
        for (int64_t at = 0; at < m && !spent(w);) {
            const int64_t len = size < m - at ? size : m - at;
            if (try_values(w, which, list, at, len, f)) {
                taken += len;
                memmove(list + at, list + at + len, sizeof *list * (size_t)(m - at - len));
                m -= len;
            } else
                at += len;
        }
    return taken;
}

/* Makes values simpler for as long as the case fails alike; returns whether any did. */
static int simplify_all(work *w) {
    static const struct {
        double (*f)(double);
        const char *what;
    } how[] = {
        {to_zero, "set to zero"}, {to_one, "set to 1 or -1"}, {to_power, "set to powers of two"}};
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const int n = shrink_tensors(w->c, t);
    int changed = 0;
    for (size_t h = 0; h < sizeof how / sizeof *how; h++)
        for (int i = 0; i < n; i++) {
            if (spent(w)) return changed;
            const int64_t k = simplify(w, i, how[h].f);
            if (k) {
                report(w, "%lld numbers of %s %s", (long long)k, t[i].field->name, how[h].what);
                changed = 1;
            }
        }
    return changed;
}

/* ---- all of it ------------------------------------------------------------------------------- */

dp_status dp_shrink(const dp_case *c, const dp_shrink_options *o, dp_shrunk *out, dp_err *e) {
    if (!c->op->shrinks)
        return dp_fail(e, DP_EINPUT,
                       "%s: op = %s cannot be shrunk: shrink the recurrence or the convolution "
                       "that fails in it",
                       c->name, c->op->name);
    *out = (dp_shrunk){.c = shrink_copy(c), .numbers_before = dp_case_numbers(c, NULL)};
    dp_case *s = &out->c;
    dp_case_only(s, &o->run);
    work w = {.o = o,
              .small = *o,
              .c = s,
              .want = &out->before,
              .runs = DP_BISECT_RUNS,
              .start = omp_get_wtime(),
              .e = e};
    w.small.cache = NULL;
    w.st = dp_failure_of(s, o, DP_BISECT_RUNS, 1, &out->before, e);
    if (!w.st && !out->before.kind && out->before.why[0])
        w.st = dp_fail(e, DP_EINPUT, "%s: not run with %d ranks, base %s, chain %s: %s", c->name,
                       o->run.N, dp_base_names[o->run.base], dp_formats[o->run.chain].name,
                       out->before.why);
    else if (!w.st && !out->before.kind)
        w.st = dp_fail(
            e, DP_EINPUT, "%s: %s with %d ranks, base %s, chain %s: there is nothing to shrink",
            c->name, c->op->has_stages && !o->subject ? "no stage is wrong" : "nothing fails",
            o->run.N, dp_base_names[o->run.base], dp_formats[o->run.chain].name);
    if (out->before.kind != DP_FAILS_UNSTEADY) w.runs = 1;
    if (!w.st && c->op->has_ranks && !c->data && c->text) w.laws = dp_strdup(c->text);
    shrink_by_laws(&w);
    out->laws = w.laws;
    out->law_numbers = dp_case_numbers(s, NULL);
    for (int more = 1; more && !spent(&w);) {
        more = shrink_shape(&w);
        if (dp_case_numbers(s, NULL) <= 1 << 16) more |= simplify_all(&w);
    }
    out->numbers = dp_case_numbers(s, &out->nonzero);
    out->tries = w.tries;
    if (!w.st) w.st = dp_failure_of(s, &w.small, w.runs, 1, &out->after, e);
    if (w.st) dp_shrink_free(out);
    return w.st;
}

void dp_shrink_free(dp_shrunk *s) {
    shrink_copy_free(&s->c);
    free(s->laws);
    s->laws = NULL;
}

int dp_shrunk_by_laws(const dp_shrunk *s) { return s->laws && !shrink_fits_text(&s->c); }

dp_status dp_shrunk_write(const dp_shrunk *s, const char *reason, const char *source,
                          const char *path, dp_err *e) {
    return dp_shrunk_by_laws(s) ? write_laws(s->laws, reason, source, path, e)
                                : dp_case_write(&s->c, reason, source, path, e);
}
