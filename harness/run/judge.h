/* harness/run/judge.h - judge tensors that another program wrote: inputs and outputs as two
 * safetensors files, nothing is run.
 *
 * IN.safetensors   q k v g beta, and where there are any A_log dt_bias initial_state (s0) do dht
 *                  (dstate) cu_seqlens; any other name is refused.
 * OUT.safetensors  any of o final_state (ht) dq dk dv dg dbeta dA_log ddt_bias ds0 (dh0), and of
 *                  the stages of stages.h: gcum Akk Aqk w u kg qg M H S_in h v_new dv_local
 *                  dS_out dM dH dh dv_new; any other name is refused. Gradients need `do` in IN.
 *                  Also FLA's inner names: h0 db dA dbias.
 * Layouts are FLA's:
 *   q dq [T,H,K]  k dk [T,H,K] or [T,H,R,K]  v dv [T,HV,V] or [T,HV,R,V]  o do [T,HV,V]
 *   g dg [T,HV,K], GDN [T,HV]
 *   beta dbeta [T,HV] or [T,HV,R]  A_log dA_log [HV]  dt_bias ddt_bias [HV,K] or flat
 *   states [Nseq,HV,K,V], or [Nseq,HV,V,K] by option alone (K = V hides the difference).
 *   A file without g (and without A_log, dt_bias) has no gate: g is zeros, which a warning of the
 *   record says.
 *   Axes of length 1 may be added, [1,T,H,K], that of keys too, [T,H,1,K]. Axes of heads may be
 *   left out, [T,K], where beta has one number a token; else that is refused, as [T,H K] would be
 *   taken for a single head. A batch [B,T,..] is judged as B packed sequences: token t of batch b
 *   is token b T + t of sequence b.
 *   Several query heads a value head, q [T,HV n,K] and o [T,HV n,V] beside k [T,HV,K], as ONNX's
 *   LinearAttention has them, are judged as tokens that only read (judge.c).
 * Stages: shapes in stages.h; states h, dh, S_in, dS_out follow the layout of states, M, H,
 *   dM, dH are [N,HV,K,..] always. Each is judged against what the inputs of IN make of it, by the
 *   bound of all stages up to it.
 * --recurrence NAME (metadata `recurrence`) says which of the eight it is. Where nobody says, the
 *   model follows from the shapes: R keys a token: mkda, with a gate of one number a head
 *   gated-deltaproduct; one key and one gate a head: gdn; else kda. FLA's layout of
 *   gated-deltaproduct, keys as tokens, is known by its length: k dk [T R,H,K], v dv [T R,HV,V],
 *   beta dbeta [T R,HV].
 *
 * A chain of M alone: IN has one tensor, `factors` [n,K,K] (`deltaproof truth CASE` writes it for a
 *   case of op = chain), OUT one, `M` [n,K,K]: the product factors[j] .. factors[0] after each
 *   factor, as the kernel makes it in the format that --claim names. Judged at 1, 2, 4, .. n
 *   factors; where nothing is forgotten (regime reflect) its effective bits and bias are read and
 *   held against the claim (bits.h).
 *
 * --base fp16 (metadata `fp16`) is base bf16 with the design words factors=fp16,out=fp16 before its
 * own. No bound is derived for it; the draws of that design decide alone (verdict/expected.h).
 *
 * --gate exp: g is the factor of the state, exp of the log decay (mlx): 0 or more. dg is then the
 * gradient of that.
 *
 * --recurrence FILE: a recurrence of one's own, rows as text with names of its inputs
 * (ref/vocabulary/recurrence_text.h). IN and OUT have these names; gradients are d and the name.
 * beta is plain, l2norm 0.
 *
 * --layout mamba (metadata `layout`): the names of Mamba-2's state space duality, as the recurrence
 * that `judge` knows as SSD:
 *
 *   IN   x [T,HV,V]  dt [T,HV]  A [HV]  B C [T,H,K]  initial_states [Nseq,HV,V,K]   dout as do
 *   OUT  y or out [T,HV,V]  final_states [Nseq,HV,V,K]   dB dC [T,H,K]  dinitial_states
 *   q = C, k = B, v = x dt, g = A dt, nothing is erased, scale 1, no norm, states [V,K].
 *
 * The factor dt of x is after its bias and softplus; H groups serve HV heads. Unless dt is fp64, v
 * and g are rounded to fp32 once, as kernels form them. A batch axis may come first. Other tensors
 * (D, z, dx, ddt, dA) are refused by their names: they are not part of the recurrence.
 *
 * --gate-dtype (metadata `gate_dtype`) is the format in which the kernel reads g, if that is
 * coarser than IN's. The problem then has g rounded to this format.
 *
 * A setting comes from its option, else from metadata. IN has gate, gate_dtype, beta, qk or l2norm,
 * lower_bound, scale, cu_seqlens, state_layout; OUT has ranks, base, claim, design, claim_drop,
 * state_layout. All missing or wrong settings are refused in one message, with the options to set.
 * Defaults: scale K^-1/2, ranks 1, layout kv. The run's ID is
 * `judge:OUT.safetensors:ranks=4,base=bf16,chain=tf32rz`, its backend `file`. A tensor that its
 * file holds in a coarser format than the base stores it in gets that one rounding on top of its
 * bound.
 */
#pragma once
#include "harness/base/terminal.h"
#include "harness/library/tensor_files.h"
#include "harness/record/run.h"
#include "ref/files/safetensors.h"

typedef struct {
    const char *inputs, *outputs; /* paths */
    const char *gate, *gate_dtype, *beta, *l2norm, *state_layout, *cu_seqlens, *scale, *lower_bound,
        *base, *claim, *design, *layout; /* as the caller set it; NULL: not set */
    int drop;                            /* bits of the claimed drop; 0: not set */
    /* name of a known recurrence, or file of the user's own (ref/vocabulary/recurrence_text.h),
     * whose names the tensors of both files have. NULL: as metadata or shapes say */
    const char *recurrence;
    const char *unjudged;       /* names of tensors that may be, with commas; NULL: none */
    int ranks;                  /* 0: not set */
    int64_t tokens;             /* 0: all; else the problem is the first so many tokens of IN */
    const char *cache;          /* folder of truths and bounds; NULL: none */
    const dp_truth_pick *truth; /* NULL: auto */
    int progress;
    void (*note)(const char *text); /* gets notes for the reader of the verdict; may be NULL */
    /* changes the files' tensors before they are judged; NULL: no change */
    void (*change)(dp_tensorfile *in, dp_tensorfile *out, void *arg);
    void *change_arg;
} dp_judge_options;

/* One run is appended to *out, and *c is the case it belongs to (named after OUT's file, to be
 * freed). DP_EINPUT: the message names file, tensor and both shapes, or the setting and its option;
 * then *c needs no freeing. */
dp_status dp_judge(const dp_judge_options *o, dp_case *c, dp_runs *out, dp_err *e);

/* The inputs of a file alone, with the settings of options and its metadata, as a case with one
 * rank, base fp32 and chain fp32. DP_EINPUT as above; then *c needs no freeing. */
dp_status dp_judge_load_inputs(const dp_judge_options *o, dp_case *c, dp_err *e);

/* dp_judge with the inputs and settings of a case. Options o that count: outputs, ranks, base,
 * claim and state_layout. Defaults are the case's first base and chain, one rank, kv. *c gets that
 * one base, chain and rank count. */
dp_status dp_judge_case(const dp_judge_options *o, dp_case *c, dp_runs *out, dp_err *e);
/* The inputs of a case as judge reads them: tensors, and the forms of gate and beta, l2norm, scale,
 * cu_seqlens as metadata. Op recurrence. */
dp_status dp_judge_write_inputs(const dp_case *c, const char *path, dp_err *e);

/* Op chain: products [n][K][K] of factors [n][K][K], c->ch.n and K set. */
void dp_run_stored_chain(const dp_case *c, const double *factors, const double *products,
                         dp_format claimed, dp_runs *out);
/* Judges the results that g->r points to, by the bounds of the case's first base and chain over its
 * first rank count. Adds one run of backend `file`. */
dp_status dp_run_stored(const dp_case *c, const dp_run_options *o, const dp_stored_results *g,
                        dp_runs *out, dp_err *e);

/* The first part of dp_judge: makes the case from IN and the options, and finds OUT's tensors,
 * which are not copied. With factors NULL, `stored` is for dp_run_stored; otherwise the case is a
 * chain. On failure *c needs no freeing. The struct *l must stay at its address. */
typedef struct {
    dp_stored_results stored;
    dp_design design; /* what stored.design points to */
    const double *factors, *products;
    dp_format claimed;
    int drop; /* bits of what is claimed to be dropped; 0: nothing is */
} dp_judge_loaded;
/* DP_EINPUT names the file, and all settings that are missing. */
dp_status dp_judge_load(const dp_judge_options *o, dp_tensorfile *in, dp_tensorfile *out,
                        dp_case *c, dp_judge_loaded *l, dp_err *e);

/* Are the states of a file laid out [V,K], by its option or metadata? */
int dp_judge_state_vk(const dp_tensorfile *f, const char *given, dp_complaints *all);
