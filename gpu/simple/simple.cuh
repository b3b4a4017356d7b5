/* gpu/simple/simple.cuh - what the files of the simple path share: its steps, the arguments of its
 * backward, and a product of tiles. */
#ifndef DPG_SIMPLE_CUH
#define DPG_SIMPLE_CUH
#include "plan/paths.cuh"

#define THREADS 256

/* forward.cu */
dp_status simple_chunks(const Call &c);
dp_status simple_pre_h(const Call &c);
dp_status simple_states(const Call &c); /* h, v_new, final_state */
dp_status simple_state(const Call &c);  /* and o */
/* activations.cu */
dp_status simple_sums(const Call &c);
dp_status simple_norm(const Call &c);

struct BwdArgs {
    const float *gcum, *beta, *qn, *kn, *L, *T, *Aqk, *w, *kg, *qg, *eC, *h, *v_new;
    float *dv_local, *dv_new, *dh, *dZ, *E, *dP, *dL, *dq, *dk, *dkw, *dg, *dbeta, *part;
};
/* Where the plan keeps what the backward reads and writes. */
BwdArgs bwd_args(const Call &c);

#ifdef __CUDACC__
__device__ __forceinline__ float warp_sum(float x) {
    for (int m = 16; m; m /= 2)
        x += __shfl_xor_sync(~0u, x, m);
    return x;
}
#endif
#endif
