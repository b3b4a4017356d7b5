/* harness/simulated/fault_effect.h - what each deliberate fault (fault.h) does to the simulated
 * ranks. ranks.c calls these at the end of the stage that a fault belongs to; each returns at once
 * unless its own fault is on. Where a fault acts, s->hit is set for that rank and head: what a
 * localisation is compared with is recorded, not asserted. */
#ifndef DP_FAULT_EFFECT_H
#define DP_FAULT_EFFECT_H
#include "ranks.h"
#include "ref/chunk/conv.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Notes that the fault acted on that rank and head. */
static inline void dp_effect_hit(const dp_sim *s, int rank, int hv) {
    s->hit[rank * s->p->HV + hv] = 1;
}

const dp_problem *
dp_effect_inputs(dp_sim *s, const dp_problem *p); /* p, or a copy with other inputs that s owns */
/* Before a run: who owns which tokens. */
void dp_effect_contexts(dp_sim *s);
/* After the activation. */
void dp_effect_gate(dp_sim *s);
int dp_effect_by_inverse(
    const dp_sim *s); /* 1: w and u are products with the inverse, whatever the base */
/* After intra of one chunk and head. */
void dp_effect_intra(dp_sim *s, int group, int hv);
/* After its triangular inverse. */
void dp_effect_solve(dp_sim *s, int group, int hv);
double *dp_effect_values(dp_sim *s, int group,
                         int hv); /* NULL, or ch->v as it was before wrong values took its place */
/* After its w and u. */
void dp_effect_wy(dp_sim *s, int group, int hv);
void dp_effect_state_in(const dp_sim *s, int rank, int hv, double *S); /* S_in after the merge */
/* A pair, or with M NULL a state, before it is sent; 1: the fault acted. */
int dp_effect_sent(const dp_sim *s, double *M, double *H);
void dp_effect_state(const dp_sim *s, int group, int hv,
                     double *S);                          /* after one chunk of state_fwd */
int dp_effect_output(const dp_sim *s, int group, int hv); /* 1: o of this chunk is never written */
/* After o of all chunks. */
void dp_effect_outputs(const dp_sim *s);
/* Its o, as it is stored. */
void dp_effect_stored(const dp_sim *s, int group, int hv, double *o);
/* After its gradients, in *g. */
void dp_effect_grads(dp_sim *s, int group, int hv, dp_chunk_grad *g);
/* eC of another chunk that the backward pre-process reads instead, or NULL. */
const double *dp_effect_decay(const dp_sim *s, int group, int hv);
/* The format that the M chain really runs in. */
dp_format dp_effect_chain(const dp_sim *s, int rank, int hv);
double *
dp_effect_normalised(const dp_sim *s, const double *x,
                     int64_t n); /* rounded copy of q or k for the L2 norm's backward, or NULL */
/* After the way back from erase o k of one rank; dk of its tokens, [.][H][K]. */
void dp_effect_unerased(const dp_sim *s, int rank, double *dk);
/* After the activations' gradients of one rank, its part of dA_log in part. */
void dp_effect_activated(const dp_sim *s, int rank, dp_result *part);
int dp_effect_order(const dp_sim *s, int i, int n); /* which of n heads or ranks is added i-th */
void dp_effect_results(dp_sim *s);                  /* after a run */
void dp_effect_conv(dp_fault fault, const dp_conv *c, int N, dp_conv_policy pol,
                    dp_conv_result *r); /* after a run of the convolution */

#ifdef __cplusplus
}
#endif
#endif
