/* ref/vocabulary/design.h - how a kernel computes, as far as its rounding errors depend on it.
 *
 * A base policy (formats.h) says which formats; a design says where they are used. It is written as
 * words with commas between, each of which changes one setting of the default:
 *
 *   chunk=N            N tokens a chunk, 8 to 512; 64
 *   chunk_backward=N   the same of the pass that makes gradients; as chunk. Not beside recurrent,
 *                      nor chunks=N:N, which asks both passes for one length
 *   recurrent          no chunks: the state goes from token to token
 *   factors=FORMAT     w u kg qg Akk Aqk v_new as stored and as operands: fp32, bf16, fp16; tf32,
 *                      tf32rz (truncated): as operands alone, stored as fp32
 *   state=FORMAT       the state as it is carried from chunk to chunk (recurrent: token to token);
 *                      also a format of states (stored.h), but for scales of a whole tensor
 *   read=computed      o reads the state before it is rounded to state=FORMAT
 *   read=kept          o reads the rounded state (recurrent)
 *   final_state=FORMAT the state as it leaves a call, or lies in a slot behind it; also a format of
 *                      states
 *   dstate=FORMAT      the gradient of the state, carried the other way
 *   out=FORMAT         o and the gradients of inputs as they leave
 *   TENSOR=FORMAT      one of them, after out: o=fp32, dq=bf16 (names: tensors.h)
 *   exp=exact          exp(g) of gates added up as they are, rounded correctly
 *   exp=fast           as fast kernels form it, 2^(g log2 e): gates are rounded and added up in
 *                      log2 units, and the power is off by up to 2^-23, alike for equal gates
 *   inputs=given       q and k as they come in; a normalised row is stored like factors (base bf16)
 *   inputs=stored      q and k are stored like factors before anything else is made of them, and
 *                      the gradients of normalised rows in the format of dq and dk
 *   scores=pairwise    q k' with the decay of every pair by itself
 *   scores=gated       q k' of operands that carry their decay from an anchor, rounded as factors
 *   scores=tf32        the same of fp32 numbers that the products round to tf32 (FLA)
 *   scores=paired      as gated, and a pair of tokens is one product in dg, which cancels
 *   scores=factored    q k' of exp(sum of gates) q and exp(-sum) k over a whole chunk, states as
 *                      F o (S + sum of exp(-sum) k' X): overflows (ref/chunk/chunk_factored.h)
 *   decays=FORMAT      what q and k are multiplied with where they take their decay (qg, w, kg, the
 *                      operands of scores=gated)
 *   keys=raw           kg of k and its decay to the end of the chunk
 *   keys=scored        kg of the operand that carries k into the scores: rounded with the decay
 *                      from an anchor, and once more with that to the end
 *   inverse=solve      w, u by triangular solves
 *   inverse=product    w, u by products with the inverse, rounded as a factor
 *   inverse=merged     the same; the inverse is merged from blocks of 16 rows, by products of
 *                      operands that are rounded as factors
 *   beta=rows          beta times k and v, which are operands of w and u
 *   beta=inverse       beta times the inverse, rounded with it (inverse=product); of keys that are
 *                      nearly parallel that is another error than the one above, often a larger one
 *   exchange=X         how states get from rank to rank (exchange.h): allgather, ring, scan,
 *                      serial, heads
 *   payload=P          what pairs and states are sent as (exchange.h): full, fp32, bf16, bf16x2,
 *                      m-i, svd-1e-4, svd-1e-2
 *   pair=chain         M is the product of its chunks' factors, in the chain's format; H is a
 *                      pass from zero
 *   pair=rows          M and H from the last chunk to the first: P and X = P kg' are rounded as
 *                      factors, P <- P eC - X w, H <- H + X u. The format of the chain is that of
 *                      products of pairs alone
 *   begins=B           what a rank sends in which a sequence begins: its pair, or the state that
 *                      leaves it (all-gathers of a shorter payload, from an initial state)
 *
 *   chunks=16:32:128   it can be asked for these lengths, too (powers of two, 8 to 512); `check`
 *                      asks (harness/search/invariants.h), nothing else does
 *   drop=E             it leaves out what gates have attenuated below E (ref/bound/drop.h): E is a
 *                      number below 1, or a number of bits: 20 is 2^-20
 *   undeclared         it does not say how it computes; beside it only factors, out, TENSOR and
 *                      final_state may stand
 *
 * Defaults (the final_state is not rounded):
 *   base fp64, fp32    every format is the base's; computed, exact, given, pairwise, raw,
 *                      solve, rows; pair=chain
 *   base bf16          as FLA stores tensors: factors and out bf16; state, dstate and decays fp32;
 *                      computed, exact, given, pairwise, raw, product, rows; pair=chain
 */
#pragma once
#include "exchange.h"
#include "formats.h"
#include "problem.h"

/* The words as above, for help texts (F: a format). */
#define DP_DESIGN_WORDS                                                                 \
    "recurrent chunk=N chunk_backward=N factors=F state=F read=computed|kept dstate=F " \
    "final_state=F out=F decays=F "                                                     \
    "exp=exact|fast "                                                                   \
    "inputs=given|stored scores=pairwise|gated|tf32|paired|factored keys=raw|scored "   \
    "inverse=solve|product|merged "                                                     \
    "beta=rows|inverse exchange=" DP_EXCHANGE_WORDS " payload=" DP_PAYLOAD_WORDS        \
    " pair=chain|rows begins=pair|state drop=E chunks=N:N TENSOR=F undeclared"
#define DP_DESIGN_TEXT 384
#define DP_CHUNK_MOST 512
#define DP_INVERSE_MERGED 2
enum {
    DP_SCORES_PAIRWISE,
    DP_SCORES_GATED,
    DP_SCORES_TF32,
    DP_SCORES_PAIRED,
    DP_SCORES_FACTORED,
    DP_NSCORES
};
#define DP_DROP_BITS_MOST 1000

typedef struct {
    dp_base base;
    int chunk;          /* tokens; 0: recurrent */
    int chunk_backward; /* 0: chunk */
    dp_format factors, state, dstate, decays;
    int read_kept;              /* read=kept */
    dp_format final_state;      /* DP_FP64: as it was computed */
    dp_format out[DP_NRESULTS]; /* of o and the gradients of inputs (dp_leaves) */
    int gated;                  /* scores: DP_SCORES_.. */
    int scored;
    int anchor;  /* of gated scores, which no word says (ref/chunk/chunk_gated.h) */
    int late;    /* nor this: X takes the decay to a chunk's end, not the keys (one gate a head) */
    int late_do; /* nor this: do takes the decay from its start, not the queries (the same) */
    int summed;  /* nor this: dbeta is a sum of three (ref/chunk/chunk.c) */
    int product; /* 0: solves; 1: the inverse; DP_INVERSE_MERGED */
    int fast_decays;    /* exp=fast */
    int stored_inputs;  /* inputs=stored */
    int fold_beta;      /* beta=inverse */
    int pair_rows;      /* pair=rows */
    dp_sending sending; /* between ranks */
    int drop;           /* bits; 0: it drops nothing */
    int chunks;         /* the sum of the lengths that it can be asked for; 0: none */
    int undeclared;     /* all but factors and out is not known */
} dp_design;

/* The default of a base: chunks of DP_CHUNK, nothing dropped. */
dp_design dp_design_of(dp_base base);

/* The design of base with the words of text. DP_EINPUT names the word and what may stand there. */
dp_status dp_design_parse(const char *text, dp_base base, dp_design *d, dp_err *e);

/* The default of its base with the factors, out and final_state of `of`, undeclared where that
 * is. */
dp_design dp_design_formats(const dp_design *of);

/* The words by which d differs from dp_design_of(d->base); "" where it does not. */
void dp_design_text(const dp_design *d, char text[DP_DESIGN_TEXT]);

/* The designs that an undeclared kernel may have, in the order of the trials. Chunks of 64 tokens,
 * none, of 16, 32, 128 and 256, each with exact decays and with fast ones. Chunks in base bf16 also
 * have gated operands of stored inputs, those of 64 in tf32 too. In base bf16 also merged inverses
 * of chunks of 64 and 128, and chunks of 16 with decays in bf16. All of its base, factors, out and
 * final_state. Returns their number. */
#define DP_COMMON_DESIGNS 16
int dp_design_common(const dp_design *undeclared, dp_design d[DP_COMMON_DESIGNS]);

/* Is it a result that leaves in a format of its own? The others leave as they were computed. */
static inline int dp_leaves(int result) { return dp_result_fields[result].stored_short; }

/* One pass as a design of its own, with chunks of one length. backward: the pass that makes
 * gradients. */
dp_design dp_design_of_pass(const dp_design *d, int backward);

/* Do they round alike? Their drop= and chunks= do not count. */
int dp_design_same(const dp_design *a, const dp_design *b);

/* Bits of an E as it is written above; 0: not understood. Bits that are no whole number are rounded
 * down, which allows no less than E. */
int dp_drop_bits(const char *text);

/* The format that its factors are stored in. */
dp_format dp_design_kept(const dp_design *d);

/* A number in a format that designs may name, rounded once. */
double dp_store(dp_format f, double x);
void dp_store_all(dp_format f, double *x, int64_t n); /* x NULL: nothing */
