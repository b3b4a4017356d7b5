/* ggml_pack FILE FACTOR: a truth pack by ggml_gated_delta_net, its result times FACTOR; 0 green,
 * 1 red. Without REAL the function is written again from the text of ggml.h. */
#include "deltaproof_ggml.h"
#ifdef REAL
#include "ggml-cpu.h"
#include "ggml.h"
#endif

typedef struct {
    const char *name;
    int64_t ne[4];
    float *x;
} tensor;

#ifdef REAL
static float *compute(tensor *in) {
    struct ggml_init_params params = {.mem_size = 64 << 20};
    struct ggml_context *ctx = ggml_init(params);
    struct ggml_tensor *t[6];
    for (int i = 0; i < 6; i++) {
        t[i] = ggml_new_tensor(ctx, GGML_TYPE_F32, 4, in[i].ne);
        memcpy(t[i]->data, in[i].x, ggml_nbytes(t[i]));
    }
    struct ggml_tensor *out = ggml_gated_delta_net(ctx, t[0], t[1], t[2], t[3], t[4], t[5], 1);
    struct ggml_cgraph *graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_graph_compute_with_ctx(ctx, graph, 1);
    return out->data;
}
#else
/* One token of one head: S [V][K]; q, k, v, o [S]. */
static void step(int64_t n, float *S, const float *q, const float *k, const float *v,
                 const float *g, int64_t gates, float beta, float *o) {
    for (int64_t j = 0; j < n; j++) {
        float read = 0;
        for (int64_t i = 0; i < n; i++)
            read += (S[j * n + i] *= expf(g[gates > 1 ? i : 0])) * k[i];
        o[j] = 0;
        for (int64_t i = 0; i < n; i++)
            o[j] += (S[j * n + i] += k[i] * beta * (v[j] - read)) * q[i] / sqrtf((float)n);
    }
}

static float *compute(tensor *in) {
    const int64_t n = in[2].ne[0], HV = in[2].ne[1], T = in[2].ne[2], N = in[2].ne[3];
    const int64_t H = in[0].ne[1], gates = in[3].ne[0], all = n * HV * T * N;
    float *out = malloc((size_t)(all + n * n * HV * N) * sizeof *out), *S = out + all;
    memcpy(S, in[5].x, (size_t)(n * n * HV * N) * sizeof *S);
    for (int64_t s = 0; s < N; s++)
        for (int64_t t = s * T; t < (s + 1) * T; t++)
            for (int64_t h = 0; h < HV; h++) {
                const int64_t key = (t * H + h % H) * n, at = t * HV + h;
                step(n, S + (s * HV + h) * n * n, in[0].x + key, in[1].x + key, in[2].x + at * n,
                     in[3].x + at * gates, gates, in[4].x[at], out + at * n);
            }
    return out;
}
#endif

int main(int argc, char **argv) {
    dp_pack p;
    char why[200] = "";
    if (argc != 3 || dp_pack_read(&p, argv[1])) return 2;
    const dp_ggml_sizes s = dp_ggml_sizes_of(&p);
    const int64_t T = s.T / s.N, gates = dp_ggml_input(&p, "g", NULL) / (s.T * s.HV);
    tensor in[6] = {{"q", {s.K, s.H, T, s.N}, 0},   {"k", {s.K, s.H, T, s.N}, 0},
                    {"v", {s.K, s.HV, T, s.N}, 0},  {"g", {gates, s.HV, T, s.N}, 0},
                    {"beta", {1, s.HV, T, s.N}, 0}, {"state", {s.K, s.K, s.HV, s.N}, 0}};
    for (int i = 0; i < 6; i++) {
        const int64_t n = in[i].ne[0] * in[i].ne[1] * in[i].ne[2] * in[i].ne[3];
        in[i].x = malloc((size_t)n * sizeof(float));
        if (dp_ggml_input(&p, in[i].name, in[i].x) != n) return 3;
    }
    float *out = compute(in);
    for (int64_t i = 0; i < s.K * s.HV * (s.T + s.K * s.N); i++)
        out[i] *= (float)atof(argv[2]);
    const int red = dp_ggml_check(&p, out, why, sizeof why);
    printf("%s\n", red ? why : "green");
    return red;
}
