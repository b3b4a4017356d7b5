/* gpu/fault.cuh - faults of indexing and synchronisation that can be switched on in the kernels, in
 * test builds alone. With -DDP_KERNEL_FAULTS the variable dpg_fault chooses one; the environment
 * sets it (DPG_FAULT=dq-first-key). `deltaproof museum --kernels` switches them on one by one. On
 * the CPU (gpu/tests/cpu) it has those of DPG_FAULTS, in such a build for a device those of
 * DPG_FAST_FAULTS, of the tensor-core kernels. In every other build FAULT(x) is the constant 0. */
#ifndef DPG_FAULT_CUH
#define DPG_FAULT_CUH

/* ID, name, number in the museum's list of bugs (0: none), the first tensors that can show it,
 * description. Tensors "": bits alone show that later data is seen. Tensors "-": no model of the
 * cases shows it, test_gpu_bwd does */
#define DPG_FAULTS(X)                                                                              \
    X(TAIL, "tail-one-more", 21, "H M S_in final_state o",                                         \
      "the gate's cumulative sum of a ragged chunk takes in the token behind its end")             \
    X(GATE_HEAD0, "gate-head0", 1, "H M S_in final_state o",                                       \
      "every value head reads the gate of head 0")                                                 \
    X(LAST_TOKEN, "last-token", 12, "H M S_in final_state o",                                      \
      "the decay to the chunk's end is taken to the token before the last")                        \
    X(OFFSET, "offset-wraps", 19, "H S_in final_state o",                                          \
      "offsets into v wrap at 2^13 entries, which stands for 2^31")                                \
    X(BETA_KEY, "beta-key", 0, "H M S_in final_state o",                                           \
      "all keys of a token read the beta of its first")                                            \
    X(DECAY_FIRST, "decay-before-use", 33, "H S_in final_state o",                                 \
      "the state is decayed before it is used in u - w S")                                         \
    X(NO_SYNC, "no-sync-state", 27, "H S_in final_state o",                                        \
      "no barrier between X = u - w S and its use")                                                \
    X(FIRST_SUBSEQ, "fwd-first-subseq", 32, "H S_in o",                                            \
      "the forward pre-process runs on the first local sub-sequence")                              \
    X(GRID, "grid-cut", 20, "o",                                                                   \
      "the grid ends at 3 tiles, which stands for 65,535: the rest of o is never written")         \
    X(MERGE_NEAREST, "merge-nearest-first", 31, "S_in", "the merge starts at the nearest rank")    \
    X(MERGE_HALF, "merge-half-v", 6, "S_in",                                                       \
      "the upper half of the V columns of the merge is never written")                             \
    X(MERGE_NO_SYNC, "no-sync-merge", 27, "S_in", "no barrier between the products of the merge")  \
    X(LINKS_BY_RANK, "links-by-rank", 0, "S_in dS_out",                                            \
      "links of ranks that own several parts are merged rank by rank, not in the order of tokens") \
    X(LINK_M, "link-neighbour-m", 0, "S_in dS_out",                                                \
      "a link between parts applies M of the part before it")                                      \
    X(LINK_FIRST, "link-first", 0, "o final_state dv dbeta dq dk dg",                              \
      "every part of a rank starts from the state that its first one starts from")                 \
    X(GATHER_SLOT, "gather-slot", 0, "S_in",                                                       \
      "rank 1 puts the words of ranks 0 and 1 into each other's slots")                            \
    X(PAYLOAD_NO_I, "sent-less-i", 0, "S_in dS_out", "M - I, as it was sent, is taken for M")      \
    X(RING_PASSES_ON, "sent-as-it-came", 0, "S_in dS_out",                                         \
      "a rank hands the state on that came to it, without its own M and H")                        \
    X(LEVEL_LOST, "sent-level-lost", 0, "S_in dS_out", "a scan leaves out its last distance")      \
    X(PAIR_SHORT_CHAIN, "sent-short-chain", 0, "S_in dS_out",                                      \
      "a scan multiplies M by M in bf16, whatever the chain's format")                             \
    X(PASS_FROM_ZERO, "sent-from-zero", 0, "S_in dS_out",                                          \
      "a rank's pass for the next one starts from zeros, not from what came")                      \
    X(LINK_PASSES_ON, "sent-for-first-link", 0, "S_in dS_out",                                     \
      "a rank of several parts takes what is handed to any of them for its first one's")           \
    X(PAIRS_TURNED, "sent-links-turned", 0, "S_in dS_out",                                         \
      "what ranks give the parts of a rank in a scan is taken in the order from the last rank on") \
    X(HEADS_NEXT, "sent-next-heads", 0, "o final_state",                                           \
      "a rank gives each rank the heads of the next one")                                          \
    X(HEADS_TURNED, "sent-ranks-turned", 0, "o final_state",                                       \
      "tokens of all ranks are put in the order of ranks from the last on")                        \
    X(HEADS_FIRST, "sent-first-gates", 0, "o final_state",                                         \
      "a rank reads A_log and dt_bias of the first heads, not of its own")                         \
    X(HEADS_SHORT, "sent-sum-short", 0, "dq dk",                                                   \
      "dq and dk of a query head on several ranks leave out what the last of them made")           \
    X(STATE_LOST, "state-lost", 4, "dH dM dS_out dv dbeta dq dk dg",                               \
      "the recomputation of the backward starts from zeros instead of S_in")                       \
    X(BWD_HEAD0, "bwd-gate-head0", 1, "dH dS_out",                                                 \
      "the backward pre-process decays every head as head 0")                                      \
    X(BWD_NEXT_HEAD, "bwd-next-head", 1, "dv dbeta dq dk dg",                                      \
      "the gradients of all ranks but the last read the gates of the next head")                   \
    X(LAST_SUBSEQ, "bwd-last-subseq", 0, "dH dS_out",                                              \
      "the backward pre-process runs on the last local sub-sequence")                              \
    X(BWD_NO_SYNC, "no-sync-bwd", 27, "dH dS_out ds0 dv", "no barrier between dv_new and its use") \
    X(MERGE_BWD_NEAREST, "merge-bwd-nearest", 31, "dS_out",                                        \
      "the backward merge starts at the nearest rank")                                             \
    X(NO_BOUNDARY, "dg-no-boundary", 23, "dg", "the term of dg at the chunk's end is missing")     \
    X(GROUP, "group-one-short", 0, "dq dk", "dq and dk leave out the last value head of a group")  \
    X(HALO_LEAK, "halo-leak", 34, "y",                                                             \
      "the convolution goes on over a sequence's start inside the rank")                           \
    X(HALO_ROW, "halo-row", 0, "y", "rows of the halo are read one row late")                      \
    X(HALO_RANGE, "halo-range", 0, "y",                                                            \
      "the halo of a rank's further part is read from its part before")                            \
    X(DHALO, "halo-bwd-lost", 0, "dx", "the rows of dpre behind the rank are taken for zeros")     \
    X(SLOT_NEIGHBOUR, "slot-neighbour", 46, "final_state o pool",                                  \
      "a decode step reads the slot behind the one that is named")                                 \
    X(SLOT_IN_PLACE, "slot-in-place", 46, "final_state o pool",                                    \
      "a decode step writes the slot that it has read, though another is named")                   \
    X(SLOT_PADDING, "padding-last-slot", 47, "final_state o pool",                                 \
      "the slot -1 of padding is taken for the last one of the pool")                              \
    X(TOKEN_DECAYED, "token-read-decayed", 0, "H M S_in final_state o",                            \
      "what reads the state before its decay (DPLR) reads it decayed")                             \
    X(TOKEN_AT_ONCE, "token-keys-at-once", 0, "H M S_in final_state o",                            \
      "keys of a token that read in turn all read the same state")                                 \
    X(TOKEN_ERASE, "token-erase-key", 0, "H M S_in final_state o",                                 \
      "a key erases along itself, not along erase o k (GDN-2)")                                    \
    X(TOKEN_SIGN, "token-no-sign", 0, "H M S_in final_state o",                                    \
      "entries of rows lose their sign (DPLR)")                                                    \
    X(TOKEN_ROW, "token-first-row", 0, "H M S_in final_state o",                                   \
      "every row of a token has the entries of its first (DPLR)")                                  \
    X(TOKEN_FACTOR, "token-all-factors", 0, "dv dk derase dwrite dlr_a dlr_b dbeta",               \
      "the gradient of a factor is multiplied by that factor, too (GDN-2)")                        \
    X(TOKEN_M_VALUES, "token-m-values", 0, "M S_in", "columns of M are written values, too")       \
    X(TOKEN_CHUNK, "token-first-chunk", 0, "dq dk dg derase dlr_a dbeta",                          \
      "the tokens of every chunk are computed again from the state before the first")              \
    X(TOKEN_ADJOINT, "token-adjoint-decayed", 0, "dH dM dS_out ds0 dv dk dlr_b",                   \
      "the adjoint of what reads the state before its decay decays, too")                          \
    X(TOKEN_COLUMN, "token-column-short", 0, "dq dk dg derase dlr_a dlr_b dbeta",                  \
      "sums over the columns leave out the last one")

/* Faults of fast/. The first three are right within every bound: bits alone show that they look at
 * what comes later. */
#define DPG_FAST_FAULTS(X)                                                                        \
    X(ANCHOR, "anchor-middle", 0, "",                                                             \
      "the rows that a diagonal 16 x 16 block reads are made by way of the next anchor")          \
    X(BLOCK_PAIRS, "pairs-by-block", 0, "",                                                       \
      "a channel is summed pairwise in all of a block as soon as its last row is far below its "  \
      "first")                                                                                    \
    X(GATE_BACK, "gate-from-end", 0, "", "the gate's sums are its total less what follows")       \
    X(KEYS_COUPLED, "keys-coupled", 0, "H M S_in final_state o",                                  \
      "a key reads the earlier keys of its own token")                                            \
    X(KEYS_LATER, "keys-later", 0, "o", "a query reads the first key of its own token alone")     \
    X(DO_KEYS, "do-every-key", 0, "dS_out dH ds0 dv dbeta dq dk dg",                              \
      "do stands in the rows of all keys of a token")                                             \
    X(PAIR_KEYS, "pairs-of-token", 0, "dk dg", "dL keeps the pairs of keys of one token")         \
    X(PAIR_OWN, "pairs-own-twice", 0, "dq dk dg",                                                 \
      "dP and dL keep their diagonal, a token with itself")                                       \
    X(PAIR_SHORT, "pairs-one-short", 0, "dq dk dg", "dP and dL leave out the row before")         \
    X(PAIR_ALL, "pairs-no-mask", 0, "dq dk dg", "dP and dL keep later rows of a diagonal block")  \
    X(OWN_KEY, "own-first-key", 0, "dq dk", "a query meets the first key of its own token alone") \
    X(FAR_SHORT, "far-pair-lost", 0, "dq dk dg",                                                  \
      "the pairwise sums of strong gates leave out the row before")                               \
    X(DG_KEYS, "dg-every-key", 0, "dg dA_log ddt_bias",                                           \
      "dg is written by the rows of all keys of a token")                                         \
    X(DG_TAIL, "dg-one-more", 0, "dg", "a ragged chunk writes dg of the token behind its end")    \
    X(DV_TAIL, "dv-one-more", 0, "dv", "a ragged chunk writes dv of the token behind its end")    \
    X(DQ_KEY, "dq-first-key", 0, "dq",                                                            \
      "dq of a token leaves out the rows of all keys but its first")                              \
    X(GATE_ROW, "dg-row-not-token", 0, "-",                                                       \
      "one gate a head: dg of a token is read at the row of its number")                          \
    X(GATE_HALF, "dg-half-channels", 0, "dg dA_log ddt_bias",                                     \
      "one gate a head: dg leaves out the upper channels of each 64")                             \
    X(BARE_DECAY, "bare-decay-before", 0, "final_state o",                                        \
      "a pass over rows without w and u decays the state by the chunk before's factor")           \
    X(PRE_KGAM, "pre-keys-without-t", 0, "H M S_in final_state o",                                \
      "(M, H) of rows without w and u take Kgam for w = T B Kgam")                                \
    X(WIDE_SHORT, "wide-columns-lost", 0, "dg dbeta dA_log ddt_bias",                             \
      "gradients that columns of wide values share leave out those of the last")                  \
    X(PARTS_TURNED, "parts-turned", 0, "ds0 dv dbeta dq dk dg",                                   \
      "parts of a sequence take the gradients of their states in reverse order")

#ifdef __cplusplus
extern "C" {
#endif
typedef enum {
    DPG_FAULT_NONE,
#define DPG_FAULT_ID(id, name, bug, shows, what) DPG_FAULT_##id,
    DPG_FAULTS(DPG_FAULT_ID) DPG_FIRST_FAST_FAULT,
    DPG_BEFORE_FAST_FAULTS = DPG_FIRST_FAST_FAULT - 1,
    DPG_FAST_FAULTS(DPG_FAULT_ID)
#undef DPG_FAULT_ID
        DPG_NFAULTS
} dpg_fault_id;
typedef struct {
    const char *name;
    int bug;
    const char *shows, *what;
} dpg_fault_info;
extern int dpg_fault; /* only in such test builds */
extern const dpg_fault_info dpg_faults[DPG_NFAULTS];
#ifdef __cplusplus
}
#endif

/* Device code of a file reads its own copy, which FAULT_TO_DEVICE brings on the stream of the
 * kernels that follow. */
#if defined(DP_KERNEL_FAULTS) && defined(__NVCC__)
static __constant__ __attribute__((unused)) int dpg_fault_here;
#define FAULT_TO_DEVICE(e, s)                                                 \
    CK(e, cudaMemcpyToSymbolAsync(dpg_fault_here, &dpg_fault, sizeof(int), 0, \
                                  cudaMemcpyHostToDevice, s))
#else
#define FAULT_TO_DEVICE(e, s) (void)0
#endif
#if defined(DP_KERNEL_FAULTS) && defined(__CUDA_ARCH__)
#define FAULT(id) (dpg_fault_here == DPG_FAULT_##id)
#elif defined(DP_KERNEL_FAULTS)
#define FAULT(id) (dpg_fault == DPG_FAULT_##id)
#else
#define FAULT(id) 0
#endif
#endif
