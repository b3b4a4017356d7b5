/* A case as a file, its inputs in its text or beside it (shrink.h). */
#define _GNU_SOURCE
#include "ref/files/output.h"
#include "shrink_work.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    const int64_t n = dp_shrink_count(c, t);
    double *x = dp_copy(*t->x, n), best = 0;
    int64_t often = 0;
    qsort(x, (size_t)n, sizeof *x, by_bits);
    for (int64_t i = 0, from = 0; i < n; i++) {
        if (memcmp(&x[i], &x[from], sizeof *x)) from = i;
        if (i - from < often) continue;
        often = i - from + 1;
        best = x[i];
    }
    free(x);
    *others = n - often;
    return best;
}

/* The most frequent value for all of a tensor, then every number that differs. */
static void print_override(FILE *f, const dp_case *c, const dp_shrink_tensor *t, int *any) {
    const double *x = *t->x;
    const int64_t n = dp_shrink_count(c, t);
    int64_t shape[DP_SHRINK_MAX_AXES] = {0}, others;
    int nd = 0;
    for (int i = 0; i < t->nax; i++) {
        const int64_t len = dp_shrink_length(c, t->ax[i]);
        if (t->ax[i] == DP_SHRINK_GROUP)
            shape[nd - 1] *= len;
        else
            shape[nd++] = len;
    }
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
    const int n = dp_shrink_tensors(c, t);
    dp_tensorfile f = {0};
    for (int i = 0; i < n; i++) {
        int64_t shape[DP_SHRINK_MAX_AXES] = {0}, len;
        int nd = 0;
        for (int d = 0; d < t[i].nax; d++) {
            len = dp_shrink_length(c, t[i].ax[d]);
            if (t[i].ax[d] == DP_SHRINK_GROUP)
                shape[nd - 1] *= len;
            else if (t[i].ax[d] != DP_SHRINK_KEY || len > 1)
                shape[nd++] = len; /* one key a token: no axis for it in a file */
        }
        if (*t[i].x)
            dp_tensorfile_add_format(&f, t[i].field->name,
                                     dp_case_input_format(t[i].field, c->input_dtype), nd, shape,
                                     *t[i].x);
    }
    const dp_status st = dp_safetensors_write(path, &f, e);
    dp_tensorfile_free(&f);
    return st;
}

static void print_settings(FILE *f, const dp_case *c) {
    const dp_operation *op = dp_op_of(c);
    if (op->has_ranks) fprintf(f, "T = %lld\n", (long long)dp_shrink_length(c, DP_SHRINK_TOK));
    op->write(c, f);
    if (!op->has_ranks) return;
    const int64_t *cu = *dp_case_packing((dp_case *)c).cu;
    if (dp_shrink_length(c, DP_SHRINK_SEQ) > 1) {
        fprintf(f, "cu_seqlens = 0");
        for (int64_t s = 1; s <= dp_shrink_length(c, DP_SHRINK_SEQ); s++)
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
int dp_shrink_fits_text(const dp_case *c) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const dp_problem *p = &c->p;
    const int n = dp_shrink_tensors((dp_case *)c, t);
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
    if (dp_op_of(c)->has_conv) fprintf(f, "bias = %s\n", c->conv.bias ? "yes" : "no");
    if (c->p.s0) fputs("s0_scale = 1\n", f);
    if (c->p.gate != DP_GATE_LOG) fprintf(f, "gate_params = %s\n", c->p.A_log ? "yes" : "no");
    fputs("override = ", f);
    for (int i = 0; i < n; i++)
        if (*t[i].x) print_override(f, c, &t[i], &any);
    fputc('\n', f);
}

dp_status dp_case_write(const dp_case *c, const char *reason, const char *source, const char *path,
                        dp_err *e) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const int n = dp_shrink_tensors((dp_case *)c, t), in_text = dp_shrink_fits_text(c);
    const size_t len = strlen(path);
    dp_output out;
    char *data;
    if (len < 6 || strcmp(path + len - 5, ".case"))
        return dp_fail(e, DP_EINPUT, "%s: the name of a case file ends in .case", path);
    if (strstr(path, " #"))
        return dp_fail(e, DP_EINPUT, "%s: ' #' would begin a comment where the case names its data",
                       path);
    if (asprintf(&data, "%.*s.safetensors", (int)(len - 5), path) < 0) abort();
    dp_status st = dp_output_open(&out, path, e);
    if (!st) {
        fprintf(out.f, "reason = %s\nsource = %s\nop = %s\nbits = %d\n", reason, source, c->op_name,
                c->bits);
        print_settings(out.f, c);
        if (dp_op_of(c)->inputs && in_text)
            print_tensors(out.f, c, t, n);
        else if (dp_op_of(c)->inputs) {
            const char *base = strrchr(data, '/');
            fprintf(out.f, "data = %s\n", base ? base + 1 : data);
            st = write_tensors((dp_case *)c, data, e);
        }
        const dp_status closed = dp_output_close(&out, st != DP_OK, e);
        if (!st) st = closed;
    }
    free(data);
    return st;
}
