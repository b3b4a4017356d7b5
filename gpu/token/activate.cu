/* gpu/token/activate.cu - from inputs to what their tokens do (math.md b, c, i), row by row. One
 * warp a token and value head, no shared memory; what value heads share the first of them writes.
 */
#include "token/rows.cuh"
#include <string.h>

int token_rows(const dpg_problem *p) { return rows_of(p)->n > 1 ? rows_of(p)->n : p->R; }
/* The other paths have S <- D S + k' beta (v - k D S). Forwards of the fast path also take what
 * token_adds says. */
int token_alone(const dpg_problem *p) {
    const dp_recurrence *a = rows_of(p);
    return p->rows || a->in_turn || a->n > 1 || !dp_recurrence_uses(a, DP_INPUT_BETA);
}
int token_adds(const dpg_problem *p) {
    return !p->rows && !memcmp(rows_of(p), &dp_recurrences[DP_GLA], sizeof *rows_of(p));
}

Token token_of(const Call &c) {
    Token a = {};
    a.q = at<float>(c, B_QN);
    a.k = at<float>(c, B_KN);
    a.e = at<float>(c, B_ERASE);
    a.u = at<float>(c, B_VALUE);
    a.b = at<float>(c, B_BETA);
    a.decay = at<float>(c, B_DECAY);
    a.cos_sin = at<float>(c, B_COS_SIN);
    a.n = c.p->d.n / c.p->d.tok;
    a.pairs = c.p->pairs;
    a.rows = c.p->rows;
    a.norm = dp_norms[a.rows.norm];
    a.looks_back = dp_recurrence_looks_back(&a.rows);
    for (const Input *x = inputs_of_tokens; x->id >= 0; x++)
        a.in[x->id] = *(void **)((char *)c.t + x->slot);
    a.in[DP_INPUT_A_LOG] = c.t->A_log;
    a.in[DP_INPUT_DT_BIAS] = c.t->dt_bias;
    if (c.p->halo) set_halo(c, &a);
    return a;
}

/* A thread a pair of channels of a value head, token by token. */
__global__ void k_token_angles(Dims d, Token a) {
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, width = (int64_t)d.HV * a.pairs;
    if (i >= d.nseq * width) return;
    Seq seq = d.seq[i / width];
    Chunk last = d.chunk[seq.c1 - 1];
    int64_t halo = (int64_t)seq.part * a.halo_words + a.halo_at[DP_INPUT_ANGLE] + i % width;
    float phi = seq.starts || !a.halo ? 0.f : a.halo[halo];
    for (int64_t t = d.chunk[seq.c0].t0; t < last.t0 + last.len; t++) {
        int64_t at = t * width + i % width;
        phi += ldx(a.in[DP_INPUT_ANGLE], at, d.g_bf16);
        a.cos_sin[2 * at] = cosf(phi);
        a.cos_sin[2 * at + 1] = sinf(phi);
    }
}

__global__ void k_token_inputs(Dims d, Token a) {
    Place p(d, a, d.HV);
    if (p.t < 0) return;
    int is_first = p.hv % d.G == 0, lane = threadIdx.x % 32;
    for (int x = lane; x < d.Kg; x += 32)
        a.decay[p.head() * d.Kg + x] = expf(p.log_decay(x));
    if (is_first)
        p.rotated(p.unit(DP_INPUT_Q, 0), DP_INPUT_Q).store(a.q + p.query_head() * d.K, d.K);
    for (int j = 0; j < a.n; j++) {
        const dp_token_row &row = p.row(j);
        int r = p.key_of(j);
        if (is_first)
            p.rotated(p.product(row.write, r), p.rotated_key(row.write))
                .store(a.k + (p.query_head() * a.n + j) * d.K, d.K);
        if (a.e) p.product(row.read, r).store(a.e + p.entry(j) * d.K, d.K);
        for (int v = lane; v < d.V; v += 32)
            a.u[p.entry(j) * d.V + v] = p.scalar(row.value, r, v);
        if (!lane) a.b[p.entry(j)] = p.scalar(row.strength, r, 0);
    }
}

dp_status token_inputs(const Call &c) {
    const Dims &d = c.p->d;
    Token a = token_of(c);
    if (a.cos_sin) {
        k_token_angles<<<angles_of(d, a), THREADS, 0, c.s>>>(d, a);
        CK_LAUNCH(c.e, "k_token_angles");
    }
    k_token_inputs<<<places_of(d, d.HV), THREADS, 0, c.s>>>(d, a);
    CK_LAUNCH(c.e, "k_token_inputs");
    return DP_OK;
}
