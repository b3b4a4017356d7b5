/* gpu/token/forward.cu - the recurrence token by token in fp32 FMA, a warp a column of a state
 * (token.cuh): (H, M) of the last local sub-sequence, then o and final_state from the states that
 * ranks start from. */
#include "token/token.cuh"

struct StateArgs {
    /* s0 [Nseq][HV][K][V] by global sequence, sin [links][HV][K][V]; NULL: zeros */
    const float *s0, *sin;
    float *h, *final_state, *hm; /* each may be NULL; hm: rows of V + K words */
    void *o;
    int seq0, nseq, columns; /* local sub-sequences of the launch; V, or V + K with those of M */
};

/* What column `col` starts from. */
__device__ __forceinline__ Column first_state(const Dims &d, const StateArgs &z, const Seq &seq,
                                              int hv, int col) {
    Column s = {};
    if (col >= d.V) {
        rows_of_lane(d.K, [&](int i, int row) { s.x[i] = row == col - d.V; });
        return s;
    }
    const float *from = seq.starts ? z.s0 : z.sin;
    int64_t state = (int64_t)(seq.starts ? seq.gseq : seq.part) * d.HV + hv;
    return from ? column(from + state * d.K * d.V + col, d.K, d.V) : s;
}

__global__ void k_token_state(Dims d, Token a, StateArgs z) {
    int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (i >= (int64_t)z.nseq * d.HV * z.columns) return;
    int col = i % z.columns, hv = i / z.columns % d.HV;
    Seq seq = d.seq[z.seq0 + i / z.columns / d.HV];
    Walk w = {d, a, hv, col < d.V ? col : -1};
    Column s = first_state(d, z, seq, hv, col);
    float E[MOST_KEYS];
    for (int c = seq.c0; c < seq.c1; c++) {
        Chunk chunk = d.chunk[c];
        if (z.h) store(s, z.h + ((int64_t)c * d.HV + hv) * d.K * d.V + col, d.K, d.V);
        for (int64_t t = chunk.t0; t < chunk.t0 + chunk.len; t++) {
            w.step(t, s, E);
            if (!z.o) continue;
            float o = d.scale * dot(w.query(t), s);
            if (threadIdx.x % 32 == 0) stx(z.o, w.head(t) * d.V + col, d.o_bf16, o);
        }
    }
    if (z.final_state && seq.ends)
        store(s, z.final_state + ((int64_t)seq.gseq * d.HV + hv) * d.K * d.V + col, d.K, d.V);
    int64_t link = (int64_t)seq.part * d.HV + hv;
    if (z.hm) store(s, z.hm + link * d.K * (d.V + d.K) + col, d.K, d.V + d.K);
}

static dp_status launch(const Call &c, const StateArgs &z) {
    const Dims &d = c.p->d;
    unsigned blocks = blocks_of((int64_t)z.nseq * d.HV * z.columns);
    k_token_state<<<blocks, THREADS, 0, c.s>>>(d, token_of(c), z);
    CK_LAUNCH(c.e, "k_token_state");
    return DP_OK;
}

dp_status token_pre(const Call &c) {
    const Dims &d = c.p->d;
    StateArgs z = {};
    z.s0 = c.t->s0;
    z.hm = at<float>(c, B_HM);
    z.seq0 = c.p->pre0;
    z.nseq = c.p->npre;
    z.columns = d.V + (c.p->needs_m ? d.K : 0);
    return launch(c, z);
}

dp_status token_state(const Call &c) {
    StateArgs z = {};
    z.s0 = c.t->s0;
    z.sin = at<float>(c, B_SIN);
    z.h = at<float>(c, B_H);
    z.final_state = c.p->is_bwd ? NULL : c.t->final_state;
    z.o = c.p->is_bwd ? NULL : c.t->o;
    z.nseq = c.p->d.nseq;
    z.columns = c.p->d.V;
    return launch(c, z);
}
