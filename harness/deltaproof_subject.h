/* deltaproof_subject.h - the C interface of a kernel in a shared library that deltaproof judges.
 * This file needs no other file of deltaproof.
 *
 *     cc -O2 -fPIC -shared -Iharness mine.c -o libmine.so
 *         (a complete example to copy: harness/subject/example_subject.c)
 *     build/deltaproof run smoke-kda --subject ./libmine.so
 *     build/deltaproof bisect stage smoke-kda --subject ./libmine.so
 *         (names the wrong stage and its place; `shrink` finds the smallest input that fails)
 *
 * The library exports two functions, deltaproof_subject_about and deltaproof_subject_run. Every run
 * loads it into a new process. Crashes, hangs, writes outside of an array and unwritten entries are
 * reported as such. Each call and the loading are limited (--limit SECONDS), as is the library's
 * private memory (--memory GIB). All processes that it starts end with the run.
 *
 * Arrays hold doubles, row-major, last index fastest, whatever formats the kernel computes in.
 * Inputs are exactly the numbers of the case (a bf16 input is a double that bf16 represents).
 * Outputs are the kernel's results, widened. The caller owns all memory. The library must not write
 * to inputs, must write every entry of the outputs, and must keep no pointer after the return.
 *
 *   T tokens   H query/key heads
 *   HV value heads, a multiple of H; value head hv uses query/key head hv / (HV / H)
 *   K key width   V value width   R keys a token (1 but for MKDA and Gated DeltaProduct)
 *   Kg gate width: K, or 1 (GDN, Gated DeltaProduct, SSD)   Nseq packed sequences
 *
 * One token and one value head update the state S [K][V] as follows (ref/math.md b). The formulas
 * use g, beta, q, k after the activations that gate_form, beta_form and l2norm name:
 *   S <- diag(exp g) S;   E = v - k S;   S <- S + k' diag(beta) E;   o = scale S' q
 *   k [R][K], v and E [R][V], beta [R]
 * Gated DeltaProduct (in_turn) decays once and processes the keys of a token one after the other:
 *   S <- diag(exp g) S;   for j = 1 .. R:  S <- S + k_j' beta_j (v_j - k_j S);   o = scale S' q
 * GDN-2 has two tensors instead of beta, erase [K] and write [V], which have no activation:
 *   S <- diag(exp g) S;   E = write o v - (erase o k) S;   S <- S + k' E
 * DPLR (RWKV-7) has lr_a and lr_b [K] instead of beta, which read the state before its decay:
 *   S <- diag(exp g) S + lr_b' (lr_a S) + k' v
 * GLA and SSD have none of these and erase nothing: S <- diag(exp g) S + k' v. Gradients are those
 * of the raw inputs: of the raw gate, the raw beta, the q and k before their norm.
 *
 * With ranks == 1 or DP_SUBJECT_WHOLE one call gets the whole problem; a library may split the work
 * over `ranks` ranks itself. With DP_SUBJECT_PER_RANK every rank is a process of its own:
 *   - It reads tokens [first, first + tokens) of q k v g beta do, and writes the same tokens of
 *     o dq dk dv dg dbeta.
 *   - Arrays of states hold all sequences on every rank. A rank reads initial_state and writes ds0
 *     of the sequences that start on it. It reads dfinal_state and writes final_state of the
 *     sequences that end on it.
 *   - The library sums dA_log and ddt_bias over ranks; the harness reads them from rank 0.
 *   - Empty sequences belong to no rank. With one rank it copies their initial state to final_state
 *     (dfinal_state to ds0).
 *   - all_gather of the communicator is the only exchange between ranks.
 */
#ifndef DELTAPROOF_SUBJECT_H
#define DELTAPROOF_SUBJECT_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __cplusplus
extern "C" {
#endif

/* raised when an existing field changes; fields are only ever added at the end of a struct */
#define DP_SUBJECT_ABI 1

enum { DP_SUBJECT_WHOLE = 0, DP_SUBJECT_PER_RANK = 1 };
/* return values of run; UNSUPPORTED: the run is skipped; any other value: failure */
enum { DP_SUBJECT_OK = 0, DP_SUBJECT_UNSUPPORTED = -1 };
enum {
    DP_SUBJECT_GATE_LOG = 0,      /* g is the natural logarithm of one step's decay */
    DP_SUBJECT_GATE_SOFTPLUS = 1, /* g = -exp(A_log) softplus(g + dt_bias) */
    /* g = lower_bound sigmoid(exp(A_log) (g + dt_bias)) */
    DP_SUBJECT_GATE_LOWER_BOUND = 2
};
/* beta; sigmoid(beta); 2 sigmoid(beta) */
enum { DP_SUBJECT_BETA_PLAIN = 0, DP_SUBJECT_BETA_SIGMOID = 1, DP_SUBJECT_BETA_SIGMOID2 = 2 };

/* The name of the library and its claims. Bounds are those of the claimed formats, unless --base or
 * --chain name others. */
typedef struct {
    int32_t abi;       /* DP_SUBJECT_ABI */
    int32_t kind;      /* DP_SUBJECT_WHOLE or DP_SUBJECT_PER_RANK */
    int32_t max_ranks; /* runs of a case with more ranks are left out; at most 64 */
    const char *name;  /* a word for the record */
    const char *base;  /* everything but the chain of M: "fp64", "fp32" or "bf16" */
    const char *chain; /* the chain of M: "fp32" "tf32x3" "tf32" "tf32rz" "bf16" "bf16st" */
    /* names of the tensors that it writes, with blanks between: outputs and stages listed below */
    const char *writes;
} deltaproof_subject_info;

typedef struct deltaproof_subject_problem {
    int32_t abi, size; /* DP_SUBJECT_ABI; bytes of this struct in the calling program */
    int32_t H, HV, K, V, R, Kg, Nseq;
    /* l2norm 1: q and each row of k are divided by sqrt(sum of squares + 1e-6) first */
    int32_t gate_form, beta_form, l2norm;
    int32_t backward; /* 1: gradients are wanted */
    int32_t rank, ranks;
    int64_t T;             /* of the whole problem */
    int64_t first, tokens; /* this call's: 0 and T but for DP_SUBJECT_PER_RANK */
    double scale, lower_bound;
    const char *input_format; /* "bf16", "fp32", "fp64": the widest that q k v g beta do need */
    /* formats of this run, for a library that offers several; other libraries may ignore them */
    const char *base, *chain;
    /* [Nseq+1] sequence i is tokens cu[i] .. cu[i+1]-1 of the whole problem; may be empty */
    const int64_t *cu;
    const double *q, *k;           /* [tokens][H][K], [tokens][H][R][K] */
    const double *v, *g, *beta;    /* [tokens][HV][R][V], [tokens][HV][Kg], [tokens][HV][R] */
    const double *A_log, *dt_bias; /* [HV], [HV][Kg]; NULL: zeros, and no gradient of them */
    const double *initial_state;   /* [Nseq][HV][K][V]; NULL: zeros */
    /* gradients of o and of final_state, if backward; NULL: zeros */
    const double *dout, *dfinal_state;
    int32_t chunk; /* requested tokens a chunk, one of the lengths that its design names (chunks=);
                      0: the library chooses */
    /* States in a pool (key session_slots of a case), for a library that writes `pool`: number of
     * slots. 0, or a size too small for this field: no pool. With a pool initial_state is NULL, and
     * final_state is not wanted. Sequence i begins from slot read_slot[i] of the array `pool` and
     * leaves its state in write_slot[i]. No slot is written by two sequences, nor read by one and
     * written by another. Both -1: the sequence is padding. Then no state may be written, and its
     * rows of o are not checked. All slots that write_slot does not name must keep their bits. */
    int32_t nslot;
    const int64_t *read_slot, *write_slot; /* [Nseq] */
    /* GDN-2: [tokens][HV][K], [tokens][HV][V], and beta is NULL; else NULL. GLA, SSD: all three are
     * NULL, nothing is erased */
    const double *erase, *write;
    /* 1: each key of a token reads the state after the keys before it (Gated DeltaProduct); 0: all
     * keys read one state */
    int32_t in_turn;
    const double *lr_a, *lr_b; /* DPLR: [tokens][HV][K] each, and beta is NULL; else NULL */
    /* "gdn", "kda", "mkda", "gdn2", "gla", "ssd", "gated-deltaproduct" or "dplr": shapes do not
     * determine it (for K = 1, Kg is 1 in all). Missing if size is too small for this field. */
    const char *recurrence;
    /* For a library that writes `drafts` beside `pool`: it rolls back by itself. Number of slots
     * that a sequence has for drafted tokens, in every call. 0: only read_slot and write_slot.
     * Sequence i begins from slot draft_slot[i*drafts + accepted[i] - 1]: accepted[i] tokens of its
     * last call count. A call of at most `drafts` tokens writes the state after token j to
     * draft_slot[i*drafts + j]. A longer call writes the last state to draft_slot[i*drafts]. Slot
     * -1 with accepted 0: padding. */
    int32_t drafts;
    const int64_t *draft_slot; /* [Nseq][drafts] */
    const int64_t *accepted;   /* [Nseq] */
    /* For a library that writes `trees`, too: [tokens], the token whose state each token continues
     * from, as a place within its sequence. The value -1 is the state that the sequence begins
     * from. NULL: every token continues from the one before it. `accepted` then counts up to the
     * place of the last accepted token. */
    const int64_t *parent;
    /* A user's own recurrence may have a second number [tokens][HV], and steps of an angle
     * [tokens][HV][P]; else NULL. */
    const double *number, *angle;
    int32_t P;
    /* For a library that writes `ring` beside `pool` (key session_ring): most calls write no state,
     * and the library replays tokens. NULL: no rings.
     *   ring_slot [Nseq]     slot of each sequence's ring; the library chooses its contents. An
     *                        empty ring is NaN. -1: padding
     *   ring_tokens [Nseq]   number of tokens in the ring: those since the state in read_slot
     * If write_slot is -1 beside a read_slot, the state stays, and the call's tokens go to the
     * ring. Otherwise the state after the call is written. */
    const int64_t *ring_slot, *ring_tokens;
    const double *value3, *value4; /* further values [tokens][HV][V] of a user's own one, or NULL */
    /* A call of a session, for rows that look back (prev(NAME)) or rotate: inputs of the token
     * before the call, [Nseq] in place of [tokens]. Its keys, values and numbers have those that
     * rows look back to, its angle the sum of angles up to that token. Zeros: the sequence begins.
     * NULL: all do. */
    const struct deltaproof_subject_problem *previous;
} deltaproof_subject_problem;

/* An array to write. Names, with the shapes of a call (axes R are there for R = 1 too, tokens as
 * above):
 *   o [tokens][HV][V]   final_state ds0 (gradient of initial_state) [Nseq][HV][K][V]
 *   dq dk dv dg dbeta dA_log ddt_bias derase dwrite dlr_a dlr_b dnumber dangle
 *   dvalue3 dvalue4 in the shapes of their inputs
 *       where initial_state is NULL, ds0 is not judged and need not be written
 *   states [tokens][HV][K][V], the state after every token: wanted if a session rejects tokens
 *       (key session of a case); for a library without it the accepted tokens are run again
 *   pool [nslot][HV][K][V], read and written in place: for a session that keeps states in slots; a
 *       library without it gets the states of its slots as initial_state
 *   drafts, trees, ring: no arrays; beside pool they announce the fields drafts, parent, ring_slot
 * stages, judged where written (ref/chunk/stages.h; C = 64 R):
 *   gcum [tokens][HV][Kg]   Akk [tokens][HV][R][C]   Aqk [tokens][HV][C]
 *   w kg [tokens][HV][R][K]   qg [tokens][HV][K]   u v_new dv_local dv_new [tokens][HV][R][V]
 *   h dh [chunks][HV][K][V]: chunks of 64 tokens, which restart at every sequence and rank
 *   M dM [HV][K][K]  H S_in dH dS_out [HV][K][V]: of the rank;
 *       with DP_SUBJECT_WHOLE an axis [ranks] comes first */
typedef struct {
    const char *name;
    int32_t ndim;
    int64_t shape[6];
    double *data;
} deltaproof_subject_tensor;

/* The communicator, NULL with one rank. all_gather fills recv [ranks][bytes] in rank order. All
 * ranks call it equally often, with equal numbers of bytes. */
typedef struct deltaproof_subject_comm deltaproof_subject_comm;
struct deltaproof_subject_comm {
    int32_t rank, ranks;
    void (*all_gather)(deltaproof_subject_comm *comm, const void *send, void *recv, int64_t bytes);
};

typedef struct {
    int32_t count;
    /* the tensors that about()->writes names and that this problem has */
    const deltaproof_subject_tensor *tensor;
    deltaproof_subject_comm *comm;
    char *why; /* [256] a message for any other return than DP_SUBJECT_OK */
} deltaproof_subject_call;

const deltaproof_subject_info *deltaproof_subject_about(void);

/* Optional. The design of the kernel, that is, where it rounds: words with commas between
 * (ref/vocabulary/design.h; `deltaproof run --help`). The default of its base is the text "":
 * chunks of 64 tokens; base bf16: operands and stored factors bf16, state fp32. Words name the
 * differences:
 *   chunk=128, recurrent, state=bf16, factors=fp16, out=fp32, dq=bf16 (one tensor, after out),
 *   decays=bf16       lengths and formats
 *   exp=fast          decays are 2^(g log2 e), as GPUs form them
 *   inputs=stored     q and k are rounded like factors first
 *   scores=gated      q k' from rounded operands that carry their decay
 *   keys=scored       the key that writes the state is made of the rounded one of the scores
 *   inverse=product   w and u are products with the inverse, rounded as a factor
 *   beta=inverse      the inverse is multiplied by beta before it is rounded
 *   drop=20           states that gates have attenuated below 2^-20 are dropped, by the sum over
 *                     tokens of each token's largest channel gate (ref/bound/drop.h)
 *   chunks=16:32      the library takes `chunk` of a problem; `check` compares the results of these
 *                     lengths within both bounds
 * The limits are multiples of the errors that this design makes on the inputs. A library without
 * this function may have any of the common designs, and its limits are twice as large. */
const char *deltaproof_subject_design(void);

/* Optional. The recurrences that the library computes, with blanks between: "gdn", "kda", "mkda",
 * "gdn2", "gla", "ssd", "gated-deltaproduct", "dplr", "own". The last is any recurrence of a user
 * (--recurrence FILE). Its keys lie in k, erase, lr_a, lr_b, its values in v, write, value3,
 * value4, its numbers in beta, number. Along the values its query lies in dout, do in q, and o has
 * K columns. A library without this function computes gdn, kda and mkda; runs of others are
 * skipped. */
const char *deltaproof_subject_recurrences(void);
/* Computes one call. Returns DP_SUBJECT_OK, DP_SUBJECT_UNSUPPORTED, or any other value for a
 * failure; c->why may then hold a message. */
int deltaproof_subject_run(const deltaproof_subject_problem *p, const deltaproof_subject_call *c);

/* Are states in a pool in this call? Safe if the calling program is older than this header. */
static inline int deltaproof_subject_pooled(const deltaproof_subject_problem *p) {
    const size_t known = offsetof(deltaproof_subject_problem, write_slot) + sizeof p->write_slot;
    return p->size >= (int32_t)known && p->nslot > 0;
}

/* Slots of drafted tokens that each sequence has; 0: none, or a program that is older. */
static inline int32_t deltaproof_subject_drafts(const deltaproof_subject_problem *p) {
    const size_t known = offsetof(deltaproof_subject_problem, parent) + sizeof p->parent;
    return p->size >= (int32_t)known ? p->drafts : 0;
}

/* The tokens before the call; NULL: there are none, or a program that is older. */
static inline const deltaproof_subject_problem *
deltaproof_subject_previous(const deltaproof_subject_problem *p) {
    const size_t known = offsetof(deltaproof_subject_problem, previous) + sizeof p->previous;
    return p->size >= (int32_t)known ? p->previous : NULL;
}

/* 1: sequences have rings; 0: none, or a program that is older. */
static inline int deltaproof_subject_rings(const deltaproof_subject_problem *p) {
    const size_t known = offsetof(deltaproof_subject_problem, ring_tokens) + sizeof p->ring_tokens;
    return p->size >= (int32_t)known && p->ring_tokens;
}

/* The array to write, or NULL: not wanted in this call. */
static inline double *deltaproof_subject_find(const deltaproof_subject_call *c, const char *name) {
    for (int32_t i = 0; i < c->count; i++)
        if (!strcmp(c->tensor[i].name, name)) return c->tensor[i].data;
    return 0;
}

#ifdef __cplusplus
}
#endif
#endif
