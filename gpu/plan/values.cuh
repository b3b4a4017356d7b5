/* gpu/plan/values.cuh - values of inputs inside kernels: types, rounding, activated gate and beta
 * (math.md c), and the gradients through them. */
#ifndef DPG_VALUES_CUH
#define DPG_VALUES_CUH
#include "instructions.cuh"
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

/* Parameters, NULL: zeros. A word as it stands in memory, so that nothing waits for it; its value.
 */
__device__ __forceinline__ uint32_t param_word(const void *p, int64_t i, int type) {
    return !p ? 0 : type == DPG_F32 ? ((const uint32_t *)p)[i] : ((const uint16_t *)p)[i];
}
__device__ __forceinline__ float fp16_value(uint32_t code) {
    const float size = (code & 0x7fff) < 0x7c00
                           ? __uint_as_float((code & 0x7fff) << 13) * 0x1p112f
                           : __uint_as_float(0x7f800000 | (code & 0x3ff) << 13);
    return code & 0x8000 ? -size : size;
}
__device__ __forceinline__ float param_value(uint32_t word, int type) {
    return type == DPG_F32    ? __uint_as_float(word)
           : type == DPG_BF16 ? __uint_as_float(word << 16)
                              : fp16_value(word);
}
__device__ __forceinline__ float param(const void *p, int64_t i, int type) {
    return param_value(param_word(p, i, type), type);
}
/* Two neighbours, the first at an even place. */
struct ParamPair {
    uint2 words;
    __device__ __forceinline__ void load(const void *p, int64_t i, int type) {
        words = make_uint2(0, 0);
        if (p && type == DPG_F32)
            words = *(const uint2 *)((const uint32_t *)p + i);
        else if (p)
            words.x = *(const uint32_t *)((const uint16_t *)p + i);
    }
    __device__ __forceinline__ float2 get(int type) const {
        if (type == DPG_F32) return make_float2(__uint_as_float(words.x), __uint_as_float(words.y));
        return make_float2(param_value(words.x & 0xffff, type), param_value(words.x >> 16, type));
    }
};
/* To the nearest, ties to even. */
__device__ __forceinline__ uint32_t fp16_nearest(float x) {
    const uint32_t bits = __float_as_uint(x), sign = bits >> 31 << 15;
    const float size = fabsf(x);
    if (!(size < 65520.f)) return sign | (size > 65519.f ? 0x7c00 : 0x7e00);
    if (size < 0x1p-14f) return sign | (uint32_t)rintf(size * 0x1p24f);
    return sign | ((((bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10));
}
__device__ __forceinline__ void put_param(void *p, int64_t i, int type, float x) {
    if (type == DPG_F16)
        ((uint16_t *)p)[i] = (uint16_t)fp16_nearest(x);
    else
        stx(p, i, type == DPG_BF16, x);
}

/* exp of less than this is 0 in fp32 (below half of 2^-149). Raising a step to it changes no
 * product, but keeps the cumulative sum and its differences finite after a reset, g = -inf. A
 * comparison, not fmaxf: NaN stays NaN. */
#define GATE_FLOOR -104.f
__device__ __forceinline__ float gate_floor(float g) { return g < GATE_FLOOR ? GATE_FLOOR : g; }

/* Operations of ref/vocabulary/activations.h, and its functions. */
__device__ __forceinline__ float inverse_1p(float e) { return 1.f / (1.f + e); }
__device__ __forceinline__ float small_exp(float x) { return expf(-fabsf(x)); }
#define DP_SIGMOID(x) ((x) < 0 ? small_exp(x) * inverse_1p(small_exp(x)) : inverse_1p(small_exp(x)))
#define DP_DSIGMOID(x) (small_exp(x) * inverse_1p(small_exp(x)) * inverse_1p(small_exp(x)))
#define DP_SOFTPLUS(x) (fmaxf(x, 0.f) + log1pf(small_exp(x)))
__device__ __forceinline__ float curve_at(dp_curve curve, float x) {
#define VALUE(ID, F, ...) \
    if (curve == ID) return F;
    DP_CURVES(VALUE)
#undef VALUE
    return x;
}
__device__ __forceinline__ float curve_slope(dp_curve curve, float x) {
#define SLOPE(ID, F, SLOPE, ...) \
    if (curve == ID) return SLOPE;
    DP_CURVES(SLOPE)
#undef SLOPE
    return x;
}
/* Forms up to these have code of their own below, and on the fast path. */
static const int OWN_GATES = DP_GATE_LOWER_BOUND, OWN_BETAS = DP_BETA_SIGMOID2;

/* Log decay of one step from the raw gate, natural log; a = exp(A_log). log1p: softplus through
 * log(1 + e^x) loses slow gates. */
__device__ __forceinline__ float gate_value(const Dims &d, float graw, float a, float bias) {
    if (d.gate == DP_GATE_LOG) return graw;
    float x = graw + bias;
    if (d.gate == DP_GATE_SOFTPLUS) return -a * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
#define FORM(ID, WORD, SAID, CURVE, INSIDE, ...) \
    if (ID > OWN_GATES && d.gate == ID)          \
        return INSIDE ? d.lower_bound * curve_at(CURVE, a * x) : -a * curve_at(CURVE, x);
    DP_GATES(FORM)
#undef FORM
    return d.lower_bound / (1.f + expf(-a * x));
}

#define LOG2E 1.4426950408889634f
/* log2(1 + e) / e on [0, 1], degree 8, relative error 3.1e-8: softplus of slow gates keeps its
 * digits (math.md c, fp32 notes). */
__device__ __forceinline__ float log2_1p_over(float e) {
    float p = 7.579137511e-03f;
    p = fmaf(p, e, -4.268719288e-02f);
    p = fmaf(p, e, 1.130519898e-01f);
    p = fmaf(p, e, -1.972852245e-01f);
    p = fmaf(p, e, 2.757196684e-01f);
    p = fmaf(p, e, -3.584284923e-01f);
    p = fmaf(p, e, 4.806954753e-01f);
    p = fmaf(p, e, -7.213403289e-01f);
    return fmaf(p, e, 1.442694998e+00f);
}
/* log2(1 + 2^y). */
__device__ __forceinline__ float softplus2(float y) {
    float e = ex2(-fabsf(y));
    return fmaf(e, log2_1p_over(e), fmaxf(y, 0.f));
}

/* gate_value with ex2 and gate_floor, in log2 units. a: exp(A_log); bias, lower: the bias, the
 * lower bound times log2(e). */
template <int GATE>
__device__ __forceinline__ float gate_fast(float graw, float a, float bias, float lower) {
    float g;
    if (GATE == DP_GATE_LOG)
        g = graw * LOG2E;
    else if (GATE == DP_GATE_SOFTPLUS)
        g = -a * softplus2(fmaf(graw, LOG2E, bias));
    else
        g = lower * rcp(1.f + ex2(fmaf(graw, -a * LOG2E, -a * bias)));
    return max_or_nan(g, GATE_FLOOR * LOG2E);
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
#define FORM(ID, WORD, SAID, CURVE, INSIDE, ...)                                                   \
    if (ID > OWN_GATES && d.gate == ID) {                                                          \
        y.raw = dg * a * (INSIDE ? d.lower_bound : -1.f) * curve_slope(CURVE, INSIDE ? a * x : x); \
        y.dA_log = INSIDE ? y.raw * x : -dg * a * curve_at(CURVE, x);                              \
    }
    DP_GATES(FORM)
#undef FORM
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
    float A = expf(param(t.A_log, hv, d.A_type));
    for (int k = threadIdx.x; k < d.Kg; k += blockDim.x) {
        float bias = param(t.dt_bias, hv * d.Kg + k, d.bias_type);
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
#define FORM(ID, WORD, SAID, CURVE, TIMES) \
    if (ID > OWN_BETAS && d.beta_form == ID) return TIMES * curve_at(CURVE, b);
    DP_BETAS(FORM)
#undef FORM
    return (d.beta_form == DP_BETA_SIGMOID ? 1.f : 2.f) / (1.f + expf(-b));
}
/* d beta / d raw beta. */
__device__ __forceinline__ float beta_slope(const Dims &d, float b) {
    if (d.beta_form == DP_BETA_PLAIN) return 1.f;
#define FORM(ID, WORD, SAID, CURVE, TIMES) \
    if (ID > OWN_BETAS && d.beta_form == ID) return TIMES * curve_slope(CURVE, b);
    DP_BETAS(FORM)
#undef FORM
    float e = expf(-fabsf(b));
    return (d.beta_form == DP_BETA_SIGMOID ? 1.f : 2.f) * (e / (1.f + e) / (1.f + e));
}
#endif
#endif
