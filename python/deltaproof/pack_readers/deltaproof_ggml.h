/* A truth pack in the layout of ggml_gated_delta_net, and its result checked. Copy me beside
 * deltaproof_pack.h; ggml itself is not needed. All sequences are equally long, K = V. There value
 * head i H + h reads key head h (of H); here it is head h (HV / H) + i. States are [V][K].
 *   in initialize_tensors:   n = dp_ggml_input(&p, ggml_get_name(t), x);  set t to x[n]
 *   when it was computed:    if (dp_ggml_check(&p, out, why, sizeof why)) red */
#ifndef DELTAPROOF_GGML_H
#define DELTAPROOF_GGML_H
#include "deltaproof_pack.h"
typedef struct {
    int64_t T, N, H, HV, K; /* tokens of all N sequences, heads, width */
} dp_ggml_sizes;
static dp_ggml_sizes dp_ggml_sizes_of(const dp_pack *p) {
    int64_t q, v, beta, state, cu;
    dp_pack_array(p, "in", "q", "", &q);
    dp_pack_array(p, "in", "v", "", &v);
    dp_pack_array(p, "in", "beta", "", &beta);
    dp_pack_array(p, "truth", "final_state", "", &state);
    dp_pack_array(p, "in", "cu_seqlens", "", &cu);
    dp_ggml_sizes s = {.N = cu ? cu - 1 : 1, .K = v / beta};
    s.HV = state / (s.N * s.K * s.K);
    s.T = beta / s.HV;
    s.H = q / (s.T * s.K);
    return s;
}
/* x[rows][HV][width] of ggml from y of a pack; back: y from x; flip: each [K][K] is transposed. */
static void dp_ggml_heads(const dp_ggml_sizes *s, int64_t rows, int64_t width, int flip, int back,
                          float *x, double *y) {
    for (int64_t i = 0; i < rows * s->HV * width; i++) {
        const int64_t at = i % width, head = i / width % s->HV, row = i / width / s->HV;
        const int64_t own = head % s->H * (s->HV / s->H) + head / s->H;
        const int64_t j = flip ? at % s->K * s->K + at / s->K : at;
        double *of = &y[(row * s->HV + own) * width + j];
        if (back)
            *of = x[i];
        else
            x[i] = (float)*of;
    }
}
/* Fills x with the tensor "q" "k" "v" "g" "beta" or "state"; returns how many numbers. NULL: none
 * are written. A pack without a state has one of zeros. */
static int64_t dp_ggml_input(const dp_pack *p, const char *name, float *x) {
    const dp_ggml_sizes s = dp_ggml_sizes_of(p);
    const int state = strcmp(name, "state") == 0, key = strchr("qk", name[0]) != NULL;
    int64_t n;
    double *y = (double *)dp_pack_array(p, "in", state ? "initial_state" : name, "", &n);
    const int64_t rows = state ? s.N : s.T, all = state ? s.N * s.HV * s.K * s.K : n;
    for (int64_t i = 0; x && i < all && (key || !y); i++)
        x[i] = y ? (float)y[i] : 0;
    if (x && y && !key) dp_ggml_heads(&s, rows, all / (rows * s.HV), state, 0, x, y);
    return all;
}
/* out: the results of all tokens, then the final state. 0: within every limit. */
static int dp_ggml_check(const dp_pack *p, const float *out, char *why, size_t size) {
    const dp_ggml_sizes s = dp_ggml_sizes_of(p);
    const int64_t m = s.K * s.K, n[2] = {s.T * s.HV * s.K, s.N * s.HV * m};
    static const char *const NAME[2] = {"o", "final_state"};
    int red = 0;
    for (int i = 0; i < 2 && !red; i++) {
        double *y = malloc((size_t)n[i] * sizeof *y);
        if (!y) return 1;
        float *x = (float *)out + (i ? n[0] : 0);
        dp_ggml_heads(&s, i ? s.N : s.T, i ? m : s.K, i, 1, x, y);
        red = dp_pack_check(p, NAME[i], y, n[i], why, size);
        free(y);
    }
    return red;
}
#endif
