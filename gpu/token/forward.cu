/* gpu/token/forward.cu - the recurrence token by token in fp32 FMA, a warp a few columns of a state
 * (token.cuh). It makes (H, M) of the last local sub-sequence, then o and final_state from the
 * ranks' initial states. */
#include "token/token.cuh"

struct StateArgs {
    /* s0 [Nseq][HV][K][V] by global sequence, sin [parts][HV][K][V]; NULL: zeros */
    const float *s0, *sin;
    float *h, *final_state, *hm; /* each may be NULL; hm: rows of V + K words */
    void *o;
    int seq0, nseq, columns; /* local sub-sequences of the launch; V, or V + K with those of M */
};

template <int LANES, int N>
__global__ void __launch_bounds__(THREADS) k_token_state(Dims d, Token a, StateArgs z) {
    typedef Column<LANES> Part;
    const int groups = z.columns / Part::COUNT;
    int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (i >= (int64_t)z.nseq * d.HV * groups) return;
    int col = i % groups * Part::COUNT + threadIdx.x % 32 / LANES, hv = i / groups % d.HV;
    Seq seq = d.seq[z.seq0 + i / groups / d.HV];
    Walk<LANES, N> w = {d, a, hv, col < d.V ? col : -1};
    Part s = first_column<LANES>(d, seq.starts ? z.s0 : z.sin,
                                 (int64_t)(seq.starts ? seq.gseq : seq.part) * d.HV + hv, col);
    float E[N ? N : DP_MAX_ROWS];
    int64_t last = d.chunk[seq.c1 - 1].t0 + d.chunk[seq.c1 - 1].len - 1;
    Words<LANES, N> next = w.words(d.chunk[seq.c0].t0);
    for (int c = seq.c0; c < seq.c1; c++) {
        Chunk chunk = d.chunk[c];
        if (z.h) s.store(z.h + ((int64_t)c * d.HV + hv) * d.K * d.V + col, d.K, d.V);
        for (int64_t t = chunk.t0; t < chunk.t0 + chunk.len; t++) {
            Words<LANES, N> now = next;
            next = w.words(t < last ? t + 1 : t);
            w.step(now, t, s, E);
            if (!z.o) continue;
            float o = d.scale * now.q.dot(s);
            if (!Part::lane()) stx(z.o, w.head(t) * d.V + col, d.o_bf16, o);
        }
    }
    if (z.final_state && seq.ends)
        s.store(z.final_state + ((int64_t)seq.gseq * d.HV + hv) * d.K * d.V + col, d.K, d.V);
    int64_t link = (int64_t)seq.part * d.HV + hv;
    if (z.hm) s.store(z.hm + link * d.K * (d.V + d.K) + col, d.K, d.V + d.K);
}

static dp_status launch(const Call &c, const StateArgs &z) {
    const Dims &d = c.p->d;
    Token a = token_of(c);
    auto kernel = INSTANCE_OF(k_token_state, c.p, a.n);
    unsigned blocks = blocks_of((int64_t)z.nseq * d.HV * (z.columns / columns_of(c.p)));
    kernel<<<blocks, THREADS, 0, c.s>>>(d, a, z);
    CK_LAUNCH(c.e, "k_token_state");
    return DP_OK;
}

dp_status token_pre(const Call &c) {
    const Dims &d = c.p->d;
    StateArgs z = {};
    z.s0 = c.t->s0;
    z.sin = came(c);
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
