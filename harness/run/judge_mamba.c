/* Mamba's names and products as those of SSD (judge_mamba.h). */
#include "judge_mamba.h"
#include "ref/vocabulary/design.h"

#include <stdlib.h>
#include <string.h>

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
    t->name = strdup(to);
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
