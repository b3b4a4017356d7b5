/* harness/case/case_inputs.h - the input tensors of a case as a table: names, shapes, what each is
 * for, and where it lies in the case. */
#ifndef DP_CASE_INPUTS_H
#define DP_CASE_INPUTS_H
#include "case.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    DP_INPUT_REQUIRED,
    DP_INPUT_GATE,    /* parameter of a raw gate */
    DP_INPUT_BIAS,    /* of a convolution */
    DP_INPUT_STATE,   /* at the begin of each sequence */
    DP_INPUT_GRADIENT /* of an output */
} dp_input_role;

typedef struct {
    const char *name, *alias; /* alias: FLA's name, NULL: the same */
    dp_input_role role;
    double **where; /* the array in dp_problem or dp_conv; NULL there: the case has none */
    int tokens;     /* 1: the first axis is T */
    int param;      /* 1: fp32 whatever the dtype (A_log, states, weights) */
    int ndim;
    int64_t shape[4];
} dp_case_input;

#define DP_CASE_MAX_INPUTS 10

/* Fills s [DP_CASE_MAX_INPUTS], returns the count. */
int dp_case_inputs(dp_case *c, dp_case_input *s);
int dp_conv_inputs(dp_conv *c, dp_case_input *s);

int64_t dp_case_input_count(const dp_case_input *s);
/* "[5,0,0,3]" for entry i. */
void dp_case_input_index(const dp_case_input *s, int64_t i, char *out, size_t size);
/* Under its name or its alias; NULL: not there. */
const dp_tensor *dp_case_input_find(const dp_tensorfile *d, const dp_case_input *s);

#ifdef __cplusplus
}
#endif
#endif
