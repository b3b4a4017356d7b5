/* harness/run/mistakes.h - common misreadings of inputs, each as a change of the files. Inputs
 * become those that such a kernel reads, so that truth, bounds and gradients are those of its
 * problem. The rows are tried by hypotheses.c.
 */
#ifndef DP_MISTAKES_H
#define DP_MISTAKES_H
#include "ref/files/safetensors.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *text;                    /* what goes behind "fits: " */
    int forward;                         /* concerns o and final_state alone */
    int activated;                       /* judged with gate = log: `change` activates g */
    int plain_beta;                      /* with beta = plain: `change` activates beta */
    int one_sequence;                    /* with cu_seqlens = 0,T */
    const char *explains;                /* a result that it explains whatever it is; or NULL */
    int (*applies)(const dp_problem *p); /* can it show in this problem? */
    const char *input;                   /* each number of it goes through `map` */
    double (*map)(double x);
    double (*divisor)(double sum, int K); /* q and k are normalised so; judged with l2norm = 0 */
    void (*change)(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p); /* or NULL */
} dp_mistake;

extern const dp_mistake dp_mistakes[];
extern const int dp_nmistakes;

/* Changes the files as the row says. */
void dp_mistake_change(const dp_mistake *m, dp_tensorfile *in, dp_tensorfile *out,
                       const dp_problem *p);

/* The input under its name or alias, NULL: absent; and taken out of the file. */
dp_tensor *dp_file_input(dp_tensorfile *f, const char *name);
void dp_file_drop(dp_tensorfile *f, int tensor);

#ifdef __cplusplus
}
#endif
#endif
