/* Names and batches of other programs' files (judge_files.h). */
#include "judge_files.h"
#include "harness/simulated/stage_tensor.h"
#include "ref/vocabulary/tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

dp_status dp_judge_fold(dp_tensorfile *in, dp_tensorfile *out, dp_judge_settings *s, dp_err *e) {
    const dp_tensor *q = dp_tensor_find(in, "q");
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
