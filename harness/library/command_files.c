/* IN and OUT of a command (command.h). */
#define _GNU_SOURCE
#include "command_parts.h"
#include "harness/case/case.h"
#include "ref/files/input.h"
#include "ref/vocabulary/text.h"
#include "tensor_files.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

dp_status dp_command_write_inputs(const struct dp_command *c, const dp_problem *p,
                                  const dp_subject_call *call, dp_err *e) {
    dp_tensorfile f = {0};
    char ranks[16], chunk[16];
    snprintf(ranks, sizeof ranks, "%d", call->N);
    snprintf(chunk, sizeof chunk, "%d", call->chunk);
    if (call->base < DP_NBASES) dp_tensorfile_add_meta(&f, "base", dp_base_names[call->base]);
    dp_tensorfile_add_meta(&f, "claim", dp_formats[call->chain].name);
    dp_tensorfile_add_meta(&f, "ranks", ranks);
    if (call->chunk) dp_tensorfile_add_meta(&f, "chunk", chunk);
    dp_problem y = *p;
    if (call->pool) {
        y.s0 = NULL;
        dp_pool_add(&f, p, call->pool);
    }
    for (int i = 0; call->front && i < DP_NQKV; i++)
        if (call->front->conv[i]) *dp_qkv_at(&y, i) = NULL;
    if (call->front)
        dp_front_add(&f, p, call->front, call->pool, (dp_format)dp_format_find(call->input_format));
    dp_inputs_add(&f, &y, (dp_format)dp_format_find(call->input_format), call->backward);
    const dp_status st = dp_safetensors_write(c->in, &f, e);
    dp_tensorfile_free(&f);
    return st;
}

/* ---- outputs --------------------------------------------------------------------------------- */

static dp_status check_file(const char *path, dp_err *e) {
    struct stat st;
    if (lstat(path, &st))
        return dp_fail(e, DP_EINPUT, "OUT: %s",
                       errno == ENOENT ? "was not written" : strerror(errno));
    if (S_ISREG(st.st_mode)) return DP_OK;
    return dp_fail(e, DP_EINPUT, "OUT: is a %s, not a regular file",
                   S_ISLNK(st.st_mode)    ? "link"
                   : S_ISDIR(st.st_mode)  ? "folder"
                   : S_ISFIFO(st.st_mode) ? "pipe"
                                          : "device or socket");
}

static dp_status read_file(const char *path, dp_tensorfile *f, dp_err *e) {
    char *bytes;
    size_t n;
    dp_status st = check_file(path, e);
    if (!st) st = dp_input_read(path, dp_input_most(), &bytes, &n, e);
    if (st) return st;
    st = dp_safetensors_parse(bytes, n, "OUT", f, e);
    free(bytes);
    return st;
}

static void check_claim(const dp_tensorfile *f, const char *key, const char *claimed,
                        const char *option, dp_complaints *all) {
    const char *said = dp_tensorfile_meta(f, key);
    if (said && strcmp(said, claimed))
        dp_complain(all, "OUT: metadata `%s` = '%.80s', but it is judged as %s (%s)", key, said,
                    claimed, option);
}

static int is_vk(const dp_tensorfile *f, dp_complaints *all) {
    const char *said = dp_tensorfile_meta(f, "state_layout");
    if (said && strcmp(said, "kv") && strcmp(said, "vk"))
        dp_complain(all, "OUT: metadata `state_layout` = '%.80s' is neither kv nor vk", said);
    return said && !strcmp(said, "vk");
}

static int holds_result(const dp_tensorfile *f, int result) {
    for (int i = 0; i < f->ntensor; i++)
        if (dp_result_find(f->tensor[i].name) == result) return 1;
    return 0;
}

/* Where states lie in a pool, the last ones are in it. */
static int is_called_for(const dp_problem *p, const dp_subject_call *call, int result) {
    return dp_result_exists(p, result) && (call->backward || !dp_result_fields[result].backward) &&
           (!call->pool || result != DP_RESULT_FINAL_STATE);
}

/* A tensor, taken out of the file; an empty one: none is there. */
static dp_tensor take(dp_tensorfile *f, const char *name) {
    dp_tensor taken = {0};
    for (int i = 0; i < f->ntensor && !taken.name; i++)
        if (!strcmp(f->tensor[i].name, name)) {
            taken = f->tensor[i];
            f->tensor[i] = f->tensor[--f->ntensor];
        }
    return taken;
}

/* The data of a tensor that must be there with these axes; NULL: it is not. */
static double *take_data(dp_tensorfile *f, const char *name, int ndim, const int64_t *want,
                         dp_complaints *all) {
    dp_tensor t = take(f, name);
    char have[200], need[200];
    dp_tensor as = {.ndim = ndim};
    memcpy(as.shape, want, sizeof *want * (size_t)ndim);
    if (!t.name) {
        dp_complain(all, "OUT: tensor %s is missing", name);
        return NULL;
    }
    dp_case_shape_text(&t, have, sizeof have);
    dp_case_shape_text(&as, need, sizeof need);
    const int fits = t.dtype[0] != 'I' && dp_case_same_shape(&t, ndim, want, 0);
    if (!fits)
        dp_complain(all, "OUT: tensor %s: %s %s, must be floating %s", name, t.dtype, have, need);
    free(t.name);
    if (fits) return t.data;
    free(t.data);
    return NULL;
}

/* The states that convolution i left in slots, as those of sequences; padding's stay. Slots that
 * the call was not to write must have kept their bits. */
static double *take_conv_pool(dp_tensorfile *f, const dp_problem *p, const dp_subject_call *call,
                              int i, dp_complaints *all) {
    const dp_conv *v = call->front->conv[i];
    const dp_state_pool *pool = call->pool;
    const int64_t n = dp_conv_state_size(v), shape[] = {pool->slots, v->W - 1, v->D};
    char name[24];
    snprintf(name, sizeof name, "conv_pool_%s", dp_qkv_name(i));
    double *is = take_data(f, name, 3, shape, all);
    if (!is) return NULL;
    double *was = dp_conv_pool(pool, p->Nseq, n, call->front->before->of[i]);
    double *states = dp_copy(call->front->before->of[i], p->Nseq * n);
    for (int q = 0; q < p->Nseq; q++)
        if (pool->write[q] >= 0) {
            memcpy(states + q * n, is + pool->write[q] * n, sizeof *is * (size_t)n);
            memcpy(was + pool->write[q] * n, is + pool->write[q] * n, sizeof *is * (size_t)n);
        }
    for (int64_t z = 0; z < pool->slots * n; z++)
        if (is[z] != was[z] && !(isnan(is[z]) && isnan(was[z]))) {
            dp_complain(all,
                        "OUT: %s: slot %lld, which the call is not to write, was overwritten: "
                        "entry %lld was %g, is %g",
                        name, (long long)(z / n), (long long)(z % n), was[z], is[z]);
            break;
        }
    free(was);
    free(is);
    return states;
}

/* Results of convolutions before the recurrence, and the states that they pass on. */
static void take_front(dp_tensorfile *f, const dp_problem *p, const dp_subject_call *call,
                       dp_subject_result *out, dp_complaints *all) {
    for (int i = 0; i < DP_NQKV; i++) {
        const dp_conv *v = call->front->conv[i];
        char name[24];
        if (!v) continue;
        const int64_t y[] = {p->T, dp_qkv_heads(p, i), dp_qkv_width(p, i)},
                      state[] = {p->Nseq, v->W - 1, v->D};
        snprintf(name, sizeof name, "conv_state_%s", dp_qkv_name(i));
        out->y[i] = take_data(f, dp_qkv_name(i), 3, y, all);
        if (v->W > 1)
            out->conv.of[i] =
                call->pool ? take_conv_pool(f, p, call, i, all) : take_data(f, name, 3, state, all);
    }
}

static void check_pool(const dp_tensor *t, const dp_problem *p, const dp_state_pool *pool, int vk,
                       dp_complaints *all) {
    const int64_t want[] = {pool->slots, p->HV, vk ? p->V : p->K, vk ? p->K : p->V};
    char have[200];
    if (!t->name) {
        dp_complain(all, "OUT: tensor pool is missing");
        return;
    }
    dp_case_shape_text(t, have, sizeof have);
    if (t->dtype[0] == 'I' || !dp_case_same_shape(t, 4, want, 0))
        dp_complain(all,
                    "OUT: tensor pool: %s %s, must be the floating [%lld,%lld,%lld,%lld] of IN",
                    t->dtype, have, (long long)want[0], (long long)want[1], (long long)want[2],
                    (long long)want[3]);
}

/* The tensors that it claims to write, and those of its first OUT. */
static void check_there(const struct dp_command *c, const dp_subject *s, const dp_problem *p,
                        const dp_subject_call *call, const dp_tensorfile *f, dp_complaints *all) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if ((s->writes[i] || c->seen[i]) && is_called_for(p, call, i) && !holds_result(f, i))
            dp_complain(all, "OUT: tensor %s is missing%s", dp_result_fields[i].name,
                        s->writes[i] ? "" : ", which the first OUT held");
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (s->writes_stage[i] && (call->backward || !dp_stage_tensors[i].backward) &&
            !dp_tensor_find(f, dp_stage_tensors[i].name))
            dp_complain(all, "OUT: tensor %s is missing", dp_stage_tensors[i].name);
}

static dp_status check_outputs(struct dp_command *c, const dp_subject *s, const dp_problem *p,
                               const dp_subject_call *call, dp_tensorfile *f, dp_tensor *pool,
                               dp_subject_result *out, dp_err *e) {
    dp_tensor dout = {.name = (char *)"do"};
    const dp_tensorfile in = {
        .path = (char *)"IN", .ntensor = call->backward && p->dout, .tensor = &dout};
    dp_complaints all = {0};
    dp_stored_results given = {0};
    dp_tensors_rename(f, dp_by_gates(p));
    if (call->pool) *pool = take(f, DP_SUBJECT_POOL);
    if (call->front) take_front(f, p, call, out, &all);
    dp_outputs_check_names(&in, f, &all);
    check_there(c, s, p, call, f, &all);
    check_claim(f, "base", dp_base_names[call->base], "--base", &all);
    check_claim(f, "claim", dp_formats[call->chain].name, "--chain", &all);
    const int vk = is_vk(f, &all);
    if (call->pool) check_pool(pool, p, call->pool, vk, &all);
    const dp_status st = dp_complaints_end(&all, e);
    if (!st && call->pool && vk) dp_states_transpose(pool, p->K, p->V);
    return st ? st : dp_outputs_load(&in, f, p, call->N, vk, &given, e);
}

/* Its data are those of the result or stage from here on. */
static void move(struct dp_command *c, dp_tensor *t, dp_subject_result *out) {
    const int f = dp_result_find(t->name);
    *(f >= 0 ? dp_result_at(&out->r, f) : &out->stage[dp_stage_tensor_find(t->name)]) = t->data;
    if (f >= 0 && !c->called) c->seen[f] = 1;
    t->data = NULL;
}

dp_status dp_command_read_base(const struct dp_command *c, dp_base *base, dp_err *e) {
    dp_tensorfile f = {0};
    dp_status st = read_file(c->out, &f, e);
    const char *said = st ? NULL : dp_tensorfile_meta(&f, "base");
    *base = DP_NBASES;
    for (dp_base b = 0; said && b < DP_NBASES; b++)
        if (!strcmp(said, dp_base_names[b])) *base = b;
    if (!st && *base == DP_NBASES)
        st = dp_fail(e, DP_EINPUT,
                     said ? "OUT: metadata `base` = '%.80s' is none of " DP_BASE_WORDS
                          : "its OUT has no metadata `base`%s",
                     said ? said : "");
    dp_tensorfile_free(&f);
    return st;
}

void dp_command_read_outputs(struct dp_command *c, const dp_subject *s, const dp_problem *p,
                             const dp_subject_call *call, dp_subject_result *out) {
    dp_tensorfile f = {0};
    dp_tensor pool = {0};
    dp_err e = {0};
    dp_status st = read_file(c->out, &f, &e);
    if (!st) st = check_outputs(c, s, p, call, &f, &pool, out, &e);
    for (int i = 0; i < f.ntensor && !st; i++)
        move(c, &f.tensor[i], out);
    if (!st) {
        c->called = 1;
        out->pool = pool.data;
        pool.data = NULL;
    }
    free(pool.name);
    free(pool.data);
    if (st) {
        for (char *x = e.msg; (x = strchr(x, '\n'));)
            *x = ';';
        out->outcome = DP_SUBJECT_BAD_OUTPUT;
        dp_text_printable(e.msg, out->why, sizeof out->why);
    }
    dp_tensorfile_free(&f);
}
