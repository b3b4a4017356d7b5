/* The named tensors of a convolution as rows of the table of tensors (conv.h). */
#include "conv.h"

#include <stdlib.h>
#include <string.h>

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

/* ---- a rank's tokens ------------------------------------------------------------------------- */

/* Rows of D numbers of the rank's parts: from all of them to own, or back. Returns how many. */
static int64_t own_rows(const dp_conv *c, int N, int rank, double *all, double *own, int back) {
    const int parts = c->own.kind ? dp_own_parts(c->own.kind, c->T, N) : N;
    int64_t rows = 0;
    for (int i = 0; i < parts; i++) {
        const int64_t a = dp_own_cut(c->own.kind, c->T, parts, i);
        const int64_t n = dp_own_cut(c->own.kind, c->T, parts, i + 1) - a;
        if (dp_own_rank(c->own, parts, i) != rank) continue;
        double *x = all + a * c->D, *y = own + rows * c->D;
        memcpy(back ? x : y, back ? y : x, sizeof *x * (size_t)(n * c->D));
        rows += n;
    }
    return rows;
}

dp_conv dp_conv_part(const dp_conv *c, int N, int rank) {
    dp_conv part = *c;
    part.x = dp_doubles(c->T * c->D);
    part.T = own_rows(c, N, rank, c->x, part.x, 0);
    if (!c->dy) return part;
    part.dy = dp_doubles(c->T * c->D);
    own_rows(c, N, rank, c->dy, part.dy, 0);
    return part;
}

void dp_conv_part_free(dp_conv *part) {
    free(part->x);
    free(part->dy);
}

void dp_conv_place(const dp_conv *c, int N, int rank, const double *own, double *all) {
    own_rows(c, N, rank, all, (double *)own, 1);
}
