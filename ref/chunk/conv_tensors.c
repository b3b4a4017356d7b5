/* The named tensors of a convolution as rows of the table of tensors (conv.h). */
#include "conv.h"

#define INPUT(FIELD, ROLE) .name = #FIELD, .offset = offsetof(dp_conv, FIELD), .role = ROLE
#define RESULT(FIELD) .name = #FIELD, .offset = offsetof(dp_conv_result, FIELD)
#define TOKENS .kind = DP_OF_TOKENS, .axis = {DP_AXIS_T, DP_AXIS_D}
#define TAPS .kind = DP_OF_HEADS, .axis = {DP_AXIS_D, DP_AXIS_W}
#define CHANNELS .kind = DP_OF_HEADS, .axis = {DP_AXIS_D}

const dp_tensor_field dp_conv_input_fields[DP_CONV_NINPUTS] = {
    [DP_CONV_X] = {INPUT(x, DP_ROLE_REQUIRED), TOKENS},
    [DP_CONV_WEIGHT] = {INPUT(w, DP_ROLE_REQUIRED), TAPS, .parameter = 1, .alias = "weight"},
    [DP_CONV_BIAS] = {INPUT(bias, DP_ROLE_BIAS), CHANNELS, .parameter = 1},
    [DP_CONV_DY] = {INPUT(dy, DP_ROLE_INCOMING), TOKENS, .backward = 1},
};

const dp_tensor_field dp_conv_result_fields[DP_CONV_NRESULTS] = {
    [DP_CONV_Y] = {RESULT(y), .role = DP_ROLE_OUTPUT, TOKENS},
    [DP_CONV_DX] = {RESULT(dx), .role = DP_ROLE_GRADIENT, .backward = 1, TOKENS},
    [DP_CONV_DW] = {RESULT(dw), .role = DP_ROLE_GRADIENT, .backward = 1, TAPS},
    [DP_CONV_DBIAS] = {RESULT(dbias), .role = DP_ROLE_GRADIENT, .backward = 1, CHANNELS},
};

dp_dims dp_conv_dims(const dp_conv *c) {
    return (dp_dims){
        {[DP_AXIS_T] = c->T, [DP_AXIS_NSEQ] = c->Nseq, [DP_AXIS_D] = c->D, [DP_AXIS_W] = c->W}};
}

int64_t dp_conv_count(const dp_conv *c, const dp_tensor_field *f, int64_t L) {
    dp_dims d = dp_conv_dims(c);
    int64_t shape[DP_MAX_AXES], n = 1;
    d.of[DP_AXIS_T] = L;
    for (int i = dp_field_axes(f, &d, shape); i > 0; i--)
        n *= shape[i - 1];
    return n;
}

int dp_conv_result_exists(const dp_conv *c, int result) {
    return result == DP_CONV_Y || (c->dy && (result != DP_CONV_DBIAS || c->bias));
}

void dp_conv_result_shape(const dp_conv *c, int result, int64_t *rows, int *width) {
    const dp_dims d = dp_conv_dims(c);
    int64_t shape[DP_MAX_AXES];
    const int n = dp_field_axes(&dp_conv_result_fields[result], &d, shape);
    *rows = shape[0];
    *width = n > 1 ? (int)shape[1] : 1;
}
