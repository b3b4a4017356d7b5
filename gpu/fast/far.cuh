/* gpu/fast/far.cuh - the part of a diagonal 16 x 16 block that sums over channels in fp32 replace.
 * It is channels in which a row lies more than 2^110 (NEAR) below the block's first as a key. As
 * the row that reads keys the limit is 2^116. Rare: gates that forget a state within 16 tokens, and
 * resets. The gates are made again from the inputs. */
#ifndef DPG_FAR_CUH
#define DPG_FAR_CUH
#include "fast/rows.cuh"

/* Sums of the gate over rows 16 I .. from the block's first on, [16][K] in shared memory, by all
 * threads of the block; log2 units. */
template <int K>
__device__ __forceinline__ void block_gates(float *gam, const Dims &d, const dpg_tensors &t,
                                            const Place &p, int I) {
    float a = expf(param(t.A_log, p.hv, d.A_type));
    for (int ch = threadIdx.x; ch < K; ch += blockDim.x) {
        float bias = param(t.dt_bias, p.hv * K + ch, d.bias_type), run = 0.f;
        for (int i = 0; i < 16; i++) {
            int r = 16 * I + i;
            if (i && r < p.rows && (r & ((1 << p.lr) - 1)) == 0) {
                int64_t at = row_at(p.c.t0, d.HV, p.hv, r >> p.lr, 0) * K + ch;
                run += gate_floor(gate_value(d, ldx(t.g, at, d.g_bf16), a, bias)) * LOG2E;
            }
            gam[i * K + ch] = run;
        }
    }
}
#endif
