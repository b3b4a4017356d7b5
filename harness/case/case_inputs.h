/* harness/case/case_inputs.h - the input tensors of a case, with their shapes and their places in
 * the case. They are the rows of the table that its op has (ref/vocabulary/tensors.h, of a
 * convolution ref/chunk/conv.h). */
#pragma once
#include "case.h"

typedef struct {
    const dp_tensor_field *field;
    double **where; /* the array in dp_problem or dp_conv; NULL there: the case has none */
    int ndim;
    int64_t shape[DP_MAX_AXES];
} dp_case_input;

#define DP_CASE_MAX_INPUTS DP_NINPUTS

/* Fills s [DP_CASE_MAX_INPUTS], returns the count. */
int dp_case_inputs(dp_case *c, dp_case_input *s);
/* The same of a convolution that is no case of its own. */
int dp_conv_inputs(dp_conv *c, dp_case_input *s);

/* Numbers in it: the product of its axes, 1 for none. */
int64_t dp_case_input_count(const dp_case_input *s);
/* "[5,0,0,3]" for entry i. */
void dp_case_input_index(const dp_case_input *s, int64_t i, char *out, size_t size);
/* Adds " name (or alias)". */
void dp_case_input_names(char *out, size_t size, const dp_tensor_field *f);
/* Under its name or its alias; NULL: not there. */
const dp_tensor *dp_case_input_find(const dp_tensorfile *d, const dp_tensor_field *f);
/* Format of an input in the files of a case whose others have `dtype`. */
dp_format dp_case_input_format(const dp_tensor_field *f, dp_format dtype);
