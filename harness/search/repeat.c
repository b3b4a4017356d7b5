/* Runs compared bit for bit with the run before (bisect.h). */
#include "bisect.h"
#include "harness/simulated/ranks_stages.h"

#include <stdlib.h>
#include <xxhash.h>

static void mix(uint64_t *h, const double *x, int64_t n) {
    if (x && n > 0) *h = XXH3_64bits_withSeed(x, sizeof(double) * (size_t)n, *h);
}

/* Rows of tokens [a, b) of one head of a [T][heads][width] array. */
static void mix_tokens(uint64_t *h, const double *x, int64_t a, int64_t b, int heads, int head,
                       int64_t width) {
    for (int64_t t = a; x && t < b; t++)
        mix(h, x + (t * heads + head) * width, width);
}

static void chunk_stages(const dp_sim *s, int g, int hv, uint64_t *h, int64_t step) {
    const dp_chunk *c = dp_sim_chunk(s, g, hv);
    mix(&h[DP_STAGE_INTRA * step], c->L, (int64_t)c->n * c->n);
    mix(&h[DP_STAGE_WY * step], c->eC, c->K);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        const dp_stage_tensor_info *x = &dp_stage_tensors[i];
        if (x->kind == DP_PER_RANK) continue;
        mix(&h[x->made_by * step], c->array[x->array], dp_chunk_numbers(c, x->array));
    }
}

static void token_stages(const dp_sim *s, int r, int hv, uint64_t *h, int64_t step) {
    const dp_problem *p = s->p;
    const int64_t a = s->ctx[r].a, b = s->ctx[r].b;
    const int q = hv / dp_G(p);
    for (int i = 0; i < DP_NSIM_ARRAYS; i++) {
        const dp_sim_array_info *x = &dp_sim_arrays[i];
        const int query = x->heads == DP_AXIS_H;
        mix_tokens(&h[x->made_by * step], *dp_sim_array(s, i), a, b, query ? p->H : p->HV,
                   query ? q : hv, dp_sim_array_width(s, i));
    }
    for (int i = 0; i < DP_NRESULTS; i++) {
        const int heads = dp_result_heads(p, i);
        const double *x = s->out.out[i];
        if (!x || dp_result_fields[i].kind != DP_OF_TOKENS) continue;
        const dp_stage by = i == DP_RESULT_O                  ? DP_STAGE_OUTPUT
                            : i == DP_RESULT_DV && !s->values ? DP_STAGE_WY_BWD
                                                              : DP_STAGE_GATE_BWD;
        mix_tokens(&h[by * step], x, a, b, heads, heads == p->H ? q : hv,
                   dp_result_count(p, i) / p->T / heads);
    }
}

/* Hashes of what each stage leaves behind, [DP_NSTAGES][N][HV]; dA_log and ddt_bias belong to rank
 * 0. recompute, which repeats state_fwd, has none. */
static uint64_t *fingerprint(const dp_sim *s) {
    const dp_problem *p = s->p;
    const int HV = p->HV, Kg = dp_Kg(p);
    const int64_t step = (int64_t)s->N * HV;
    uint64_t *h = dp_calloc((size_t)(DP_NSTAGES * step), sizeof *h);
    for (int64_t i = 0; i < step; i++) {
        const int hv = (int)(i % HV);
        token_stages(s, (int)(i / HV), hv, h + i, step);
        for (int x = 0; x < DP_RANK_TENSORS; x++)
            mix(&h[dp_stage_tensors[dp_rank_stages[x]].made_by * step + i], s->rank[x][i],
                dp_rank_width(p, x));
        if (i < HV && s->out.dA_log) mix(&h[DP_STAGE_GATE_BWD * step + i], s->out.dA_log + hv, 1);
        if (i < HV && s->out.ddt_bias)
            mix(&h[DP_STAGE_GATE_BWD * step + i], s->out.ddt_bias + hv * Kg, Kg);
    }
    for (int g = 0; g < s->ngroup; g++)
        for (int hv = 0; hv < HV; hv++)
            chunk_stages(s, g, hv, h + s->group[g].rank * HV + hv, step);
    return h;
}

dp_status dp_repeat_sim(const dp_problem *p, const dp_sim_policy *how, int runs, dp_repeat *out,
                        dp_err *e) {
    DP_FREED(dp_sim_free) dp_sim s;
    DP_OWN uint64_t *first = NULL;
    const int64_t step = (int64_t)how->N * p->HV;
    *out = (dp_repeat){.runs = runs, .stage = DP_NSTAGES, .rank = -1, .head = -1};
    const dp_status st = dp_sim_new(&s, p, how->base, how->N, how->fault, e);
    if (st) return st;
    s.payload = how->payload;
    for (int run = 0; run < runs; run++) {
        s.have_forward = s.have_backward = 0; /* nothing kept from the run before */
        dp_sim_run(&s, how->chain, how->merge, how->backward);
        uint64_t *h = fingerprint(&s);
        int64_t at = 0;
        while (first && at < DP_NSTAGES * step && h[at] == first[at])
            at++;
        if (first && at < DP_NSTAGES * step) {
            if (!out->differ++ || at < out->stage * step) {
                out->stage = (dp_stage)(at / step);
                out->rank = (int)(at % step / p->HV);
                out->head = (int)(at % p->HV);
            }
        }
        if (first)
            free(h);
        else
            first = h;
    }
    out->hit = s.hit;
    s.hit = NULL;
    return DP_OK;
}
