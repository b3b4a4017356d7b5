/* The pairwise parts of the chunk form (ref/chunk/chunk_pair.h). */
#include "chunk_pair.h"
#include "ref/arithmetic/elementary_core.h"
#include "ref/arithmetic/isa.h"

#include <stdlib.h>
#include <string.h>

#define LANE_SUMS 16

/* Decays of all pairs of a chunk in fp32. They are kept for the other direction and for the other
 * formats of the chain, while all of them together stay below KEEP. They belong to the gcum that
 * lies beside them. */
#define KEEP ((int64_t)512 << 20)
static int64_t kept;

static int64_t decay_bytes(const dp_chunk *ch) {
    return (int64_t)sizeof(float) * ch->K * (ch->c + (int64_t)ch->c * (ch->c + 1) / 2);
}

void dp_pair_forget(dp_chunk *ch) {
    if (!ch->decay) return;
#pragma omp atomic
    kept -= decay_bytes(ch);
    free(ch->decay);
    ch->decay = NULL;
}

/* Room for them, or NULL. */
static float *decay_room(dp_chunk *ch) {
    int64_t now;
    if (ch->decay) return ch->decay;
#pragma omp atomic capture
    now = kept += decay_bytes(ch);
    if (now <= KEEP) ch->decay = malloc((size_t)decay_bytes(ch));
    if (!ch->decay) {
#pragma omp atomic
        kept -= decay_bytes(ch);
    }
    return ch->decay;
}

#define DP_ISA_BODY "ref/chunk/chunk_pair_body.inc"
#include "ref/arithmetic/isa_each.inc"

void dp_pair_fwd(dp_chunk *ch) {
    (ch->base == DP_BASE_FP64 ? DP_ISA_OF(pair_fwd_f64) : DP_ISA_OF(pair_fwd_f32))(ch);
}

void dp_pair_bwd(const dp_chunk *ch, const dp_pair_adjoint *a) {
    (ch->base == DP_BASE_FP64 ? DP_ISA_OF(pair_bwd_f64) : DP_ISA_OF(pair_bwd_f32))(ch, a);
}
