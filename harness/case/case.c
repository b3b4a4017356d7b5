/* A case from its text: settings, shapes, inputs, checks, one after the other (case.h). */
#define _GNU_SOURCE
#include "case.h"
#include "case_parts.h"
#include "front.h"
#include "harness/base/home.h"
#include "operations.h"
#include "ref/files/input.h"
#include "ref/vocabulary/recurrence_text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* data: the tensors; NULL: they are generated. tokens: those of data. */
static dp_status make_inputs(const dp_casefile *f, dp_case *c, const dp_tensorfile *data,
                             int64_t tokens, dp_err *e) {
    dp_status s = DP_OK;
    if (data)
        s = dp_case_load_data(f, data, c, tokens, e);
    else
        dp_case_generate(f, c);
    if (!s) dp_case_generate_gradients(f, c);
    if (!s) s = dp_case_override(f, c, e);
    if (!s) s = dp_case_check(f, c, e);
    if (!s && dp_op_of(c)->finish) s = dp_op_of(c)->finish(f, c, e);
    if (!s) dp_case_warn_expanding(c);
    return s;
}

/* The tensors, if they are read already. NULL: those of the file that the case names, if any. */
static dp_status open_tensors(const dp_casefile *f, dp_case *c, int load,
                              const dp_tensorfile *given, dp_err *e) {
    dp_tensorfile d = {0};
    const dp_tensorfile *have = given ? given : load && c->data ? &d : NULL;
    int64_t tokens = 0;
    dp_status s = have == &d ? dp_safetensors_read(c->data, &d, e) : DP_OK;
    if (!s) s = dp_case_shapes(f, have, c, &tokens, e);
    if (!s && load && dp_op_of(c)->inputs) s = make_inputs(f, c, have, tokens, e);
    dp_tensorfile_free(&d);
    return s;
}

static dp_status build(const dp_casefile *f, dp_case *c, int load, const dp_tensorfile *given,
                       dp_err *e) {
    dp_status s = dp_case_settings(f, c, e);
    if (!s) s = open_tensors(f, c, load, given, e);
    c->p.scale = dp_casefile_has(f, "scale") ? f->scale : c->p.K ? 1 / sqrt(c->p.K) : 0;
    return s;
}

static char *stem(const char *path) {
    const char *slash = strrchr(path, '/');
    char *out = dp_strdup(slash ? slash + 1 : path);
    const size_t n = strlen(out);
    if (n > 5 && !strcmp(out + n - 5, ".case")) out[n - 5] = 0;
    return out;
}

dp_status dp_case_parse(const char *text, size_t len, const char *path, int load, dp_case *c,
                        dp_err *e) {
    dp_casefile f;
    memset(c, 0, sizeof *c);
    dp_status s = dp_casefile_parse(text, len, path, &f, e);
    if (s) return s;
    c->path = dp_strdup(path);
    c->text = strndup(text, len);
    c->name = stem(path);
    if (f.data) c->data = dp_case_sibling(path, f.data);
    s = build(&f, c, load, NULL, e);
    dp_casefile_free(&f);
    if (s) dp_case_free(c);
    return s;
}

dp_status dp_case_from_tensors(const char *text, const dp_tensorfile *d, dp_case *c, dp_err *e) {
    dp_casefile f;
    memset(c, 0, sizeof *c);
    dp_status s = dp_casefile_parse(text, strlen(text), d->path, &f, e);
    if (s) return s;
    memset(f.line, 0, sizeof f.line); /* the text is no file that a message could point into */
    f.data = dp_strdup(d->path);
    c->path = dp_strdup(d->path);
    c->name = stem(d->path);
    c->data = dp_strdup(d->path);
    s = build(&f, c, 1, d, e);
    dp_casefile_free(&f);
    if (s) dp_case_free(c);
    return s;
}

dp_status dp_case_open(const char *path, int load, dp_case *c, dp_err *e) {
    memset(c, 0, sizeof *c);
    char *text;
    size_t n;
    dp_status s = dp_input_read(path, DP_CASEFILE_MAX_BYTES, &text, &n, e);
    if (s) return s;
    s = dp_case_parse(text, n, path, load, c, e);
    free(text);
    return s;
}

dp_status dp_case_load(const char *path, dp_case *c, dp_err *e) {
    return dp_case_open(path, 1, c, e);
}

dp_status dp_case_recurrence(const char *path, dp_err *e) {
    dp_user_recurrence y;
    char *text;
    char name[80];
    size_t n;
    snprintf(name, sizeof name, "cases/%.48s.recurrence", path);
    const char *ours = dp_home(name);
    if (!strchr(path, '/') && access(path, F_OK) && !access(ours, F_OK)) path = ours;
    dp_status s = dp_input_read(path, 1 << 16, &text, &n, e);
    if (s) return s;
    s = dp_user_recurrence_parse(text, path, &y, e);
    free(text);
    if (!s) dp_user_recurrence_install(&y);
    return s;
}

void dp_case_free(dp_case *c) {
    for (int i = 0; i < c->nwarn; i++)
        free(c->warn[i]);
    free(c->warn);
    free(c->name);
    free(c->path);
    free(c->text);
    free(c->reason);
    free(c->source);
    free(c->unjudged);
    free(c->data);
    dp_problem_free(&c->p);
    dp_conv_free(&c->conv);
    dp_step_free(c);
    dp_session_free(&c->session);
    memset(c, 0, sizeof *c);
}
