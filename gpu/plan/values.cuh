/* gpu/plan/values.cuh - values of inputs inside kernels: types, rounding, activated gate and beta
 * (math.md c), and the gradients through them. */
#ifndef DPG_VALUES_CUH
#define DPG_VALUES_CUH
#include "plan/plan.cuh"

#ifdef __CUDACC__
__device__ __forceinline__ float rbf(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
__device__ __forceinline__ float rif(float x, int rb) { return rb ? rbf(x) : x; }
/* A pair of bf16, and back. */
__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
    __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *(uint32_t *)&x;
}
__device__ __forceinline__ float2 unpack2(uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ __forceinline__ float ldx(const void *p, int64_t i, int is_bf16) {
    return is_bf16 ? __bfloat162float(((const bf16 *)p)[i]) : ((const float *)p)[i];
}
__device__ __forceinline__ void stx(void *p, int64_t i, int is_bf16, float x) {
    if (is_bf16)
        ((bf16 *)p)[i] = __float2bfloat16_rn(x);
    else
        ((float *)p)[i] = x;
}

/* exp of less than this is 0 in fp32 (below half of 2^-149). Raising a step to it changes no
 * product, but keeps the cumulative sum and its differences finite after a reset, g = -inf. A
 * comparison, not fmaxf: NaN stays NaN. */
#define GATE_FLOOR -104.f
__device__ __forceinline__ float gate_floor(float g) { return g < GATE_FLOOR ? GATE_FLOOR : g; }

/* Log decay of one step from the raw gate, natural log; a = exp(A_log). log1p: softplus through
 * log(1 + e^x) loses slow gates. */
__device__ __forceinline__ float gate_value(const Dims &d, float graw, float a, float bias) {
    if (d.gate == DP_GATE_LOG) return graw;
    float x = graw + bias;
    if (d.gate == DP_GATE_SOFTPLUS) return -a * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
    return d.lower_bound / (1.f + expf(-a * x));
}

/* Gradient of the raw gate from that of the log gate, and its terms of dA_log and ddt_bias. */
struct GateGrad {
    float raw, dA_log, ddt_bias;
};
__device__ __forceinline__ GateGrad gate_grad(const Dims &d, float dg, float graw, float a,
                                              float bias) {
    GateGrad y = {dg, 0.f, 0.f};
    float x = graw + bias;
    if (d.gate == DP_GATE_SOFTPLUS) {
        float e = expf(-fabsf(x));
        y.raw = -dg * (a * (x < 0 ? e / (1.f + e) : 1.f / (1.f + e)));
        y.dA_log = dg * -(a * (fmaxf(x, 0.f) + log1pf(e)));
    } else if (d.gate == DP_GATE_LOWER_BOUND) {
        float e = expf(-fabsf(a * x));
        y.raw = dg * (d.lower_bound * (e / (1.f + e) / (1.f + e)) * a);
        y.dA_log = y.raw * x;
    }
    if (d.gate != DP_GATE_LOG) y.ddt_bias = y.raw;
    return y;
}

/* Raw gates of a tile's tokens from dg(s, k), that of the log gate at token s and channel k. Their
 * sums for dA_log and ddt_bias go to part [2][Kg], in fp64 so that only the last rounding shows. */
template <class F>
__device__ __forceinline__ void gate_grads_of_tile(const Dims &d, const dpg_tensors &t,
                                                   const dpg_grads &g, int64_t tile, float *part,
                                                   F dg) {
    int hv = tile % d.HV;
    Chunk c = d.chunk[tile / d.HV];
    float A = t.A_log ? expf(t.A_log[hv]) : 1.f;
    for (int k = threadIdx.x; k < d.Kg; k += blockDim.x) {
        float bias = t.dt_bias ? t.dt_bias[hv * d.Kg + k] : 0.f;
        double sum_a = 0, sum_b = 0;
        for (int s = 0; s < c.len; s++) {
            int64_t at = ((c.t0 + s) * d.HV + hv) * d.Kg + k;
            GateGrad y = gate_grad(d, dg(s, k), ldx(t.g, at, d.g_bf16), A, bias);
            sum_a += y.dA_log;
            sum_b += y.ddt_bias;
            stx(g.dg, at, d.dg_bf16, y.raw);
        }
        part[tile * 2 * d.Kg + k] = (float)sum_a;
        part[tile * 2 * d.Kg + d.Kg + k] = (float)sum_b;
    }
}

__device__ __forceinline__ float beta_value(const Dims &d, float b) {
    if (d.beta_form == DP_BETA_PLAIN) return b;
    return (d.beta_form == DP_BETA_SIGMOID ? 1.f : 2.f) / (1.f + expf(-b));
}
/* d beta / d raw beta. */
__device__ __forceinline__ float beta_slope(const Dims &d, float b) {
    if (d.beta_form == DP_BETA_PLAIN) return 1.f;
    float e = expf(-fabsf(b));
    return (d.beta_form == DP_BETA_SIGMOID ? 1.f : 2.f) * (e / (1.f + e) / (1.f + e));
}
#endif
#endif
