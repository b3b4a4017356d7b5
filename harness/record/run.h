/* harness/record/run.h - runs of a case and their record. A run is one combination of backend, rank
 * count, base policy, chain format, exchange and payload, judged.
 *
 * case -> truth (cached) and fp64 reference -> subject -> compare with bounds -> run record. The ID
 * of a run reproduces it bit for bit (run_id.h).
 */
#pragma once
#include "harness/case/operations.h"
#include "harness/device/device_run.h"
#include "harness/library/subject.h"
#include "harness/simulated/ranks.h"
#include "harness/verdict/bits.h"
#include "harness/verdict/compare.h"
#include "ref/chunk/condition.h"
#include "ref/chunk/exchange_price.h"
#include "ref/truth/truth.h"
#include "ref/vocabulary/design.h"

/* Error of M of a rank after so many chunks; NAN: none. */
typedef struct {
    int rank, chunks;
    double rel, effect, bound, abs, norm;
} dp_chain_point;

/* One run and its judgement. run_pack.c walks all its pointers. */
typedef struct {
    char *id, *case_name;
    const char *op;
    dp_backend backend;
    const char *path; /* cuda, nccl: which kernels ran; lapack: which the BLAS chose for this CPU;
                         subject: the library's own name; NULL otherwise */
    const char *outcome;     /* subject: one of dp_subject_outcomes; NULL otherwise */
    dp_cuda_variant variant; /* cuda, nccl */
    int segments;            /* cuda, nccl: device_run.h; 0: not run */
    size_t saved, kept;      /* cuda, nccl: bytes that a rank keeps between forward and backward
                            (device_run.h); 0: no backward */
    int ranks;
    dp_exchange_size sized; /* a recurrence: heads, widths and tokens; K 0: none */
    dp_own own;
    int parts; /* parts of the tokens, unless each rank owns one (own.h); then 0 */
    dp_base base;
    int has_chain, has_base, has_merge;
    dp_format chain;
    dp_exchange merge;
    dp_payload payload;
    dp_fault fault;
    unsigned char *hit; /* [nhit = ranks*HV]: where the fault acted (sim); NULL: not known */
    int nhit;
    dp_design design;    /* the design of the subject, in `base` */
    int undeclared;      /* subject, file: declares no design */
    dp_design explained; /* undeclared: the common design that its verdict is by */
    int other_design;    /* subject, file: its design cannot be drawn */
    int set,
        settled; /* set of draws of its verdict; settled 1: set 0 was marginal, set 1 decided */
    const char *rollback;        /* a session that rolls back: the origin of the state; else NULL */
    int windows, windows_judged; /* of such a session; judged with their rejected tokens */
    int exact;                   /* keys = exact: every error must be 0, regardless of bounds */
    const char *truth_kind;
    int truth_bits, truth_cached;
    const char *truth_device; /* the device that computed it; NULL: the CPU, or the cache */
    dp_truth_audit truth_audit;
    double truth_radius; /* largest radius relative to its tensor's norm */
    int ntensor;
    dp_judgement *tensor;
    int npoint;
    dp_chain_point *point;
    double slope;             /* NAN: none */
    dp_bits bits;             /* op chain, regimes that forget nothing; npoint = 0: none */
    dp_condition cond;        /* of the chunks' triangular systems; condition 0: none */
    const char *may_unjudged; /* names of tensors that its case lets be unjudged; NULL: none */
    const char *let_unjudged; /* names of tensors that the caller lets be unjudged; NULL: none */
    dp_verdict verdict;
    int speaks;       /* a failed run: the tensor that `why` is about; -1: none of them */
    const char *tier; /* of the failed tensor: the tier that decided; NULL or "" otherwise */
    char why[640];
    double seconds;
} dp_run;

/* The parts of an ID, which tell the runs of a case apart (run_id.h). */
typedef enum {
    DP_ID_BACKEND,
    DP_ID_RANKS,
    DP_ID_BASE,
    DP_ID_CHAIN,
    DP_ID_MERGE,
    DP_ID_PAYLOAD,
    DP_ID_OWN,
    DP_ID_VARIANT,
    DP_ID_FAULT,
    DP_NID_KEYS
} dp_id_key;

/* Values of one of them that are asked for. n 0: all of the case. Backends: sim, lapack, and cuda
 * where there is a device. Variants: plain. */
enum { DP_MOST_VALUES = 16 };
typedef struct {
    int n, of[DP_MOST_VALUES];
} dp_values;
dp_values dp_values_of(int n, const void *x); /* x [n]: ints or an enum's values */

/* Selects the runs. */
typedef struct {
    dp_values only[DP_ID_FAULT]; /* by key */
    dp_fault fault;
    const char *design; /* of the subject, overrides its declaration; NULL: as declared */
    int drop;           /* bits of the claimed drop, overrides the declaration; 0: as declared */
    const dp_subject *subject;  /* judged, too; its name must outlive the record; NULL: none */
    double limit_s;             /* seconds of a run of the subject */
    int *again;                 /* [2] its runs still to be repeated, of one sequence and of packed
                   ones, counted down (run/subjects.h); NULL: none, nor those that fail */
    const char *unjudged;       /* names of tensors that may be unjudged, with commas; or NULL */
    const char *cache;          /* folder of truths; NULL: none */
    const dp_truth_pick *truth; /* NULL: as the case says */
    int progress;
    void (*done)(const dp_run *r, void *arg); /* called after each run, may be NULL */
    void *arg;
} dp_run_options;

/* The reason why this backend cannot run N ranks here; NULL: it can. */
const char *dp_unavailable(dp_backend b, int N);

typedef struct {
    int n, cap;
    dp_run *run;
} dp_runs;
/* Its lists shall hold this run alone. */
void dp_case_only(dp_case *c, const dp_sim_policy *run);
dp_status dp_case_run(const dp_case *c, const dp_run_options *o, dp_runs *out,
                      dp_err *e); /* appends */
/* Appends all runs of `from` to `to`, and empties `from`. */
void dp_runs_move(dp_runs *to, dp_runs *from);
void dp_runs_free(dp_runs *r);
/* Is keys = exact: does nothing round in a format of bf16's range? */
int dp_case_is_exact(const dp_case *c);
/* Appends a run of the case, not judged yet; the pointer is valid until the next is added. */
dp_run *dp_runs_add(dp_runs *r, const dp_case *c);
/* The run's ID (run_id.h), from its settings, which must be set; to be freed. */
char *dp_run_id(const dp_run *r);

/* Tokens at which the truth keeps states for a case: all rank boundaries, and powers of two of
 * chunks inside one rank of each split. */
int64_t *dp_case_cuts(const dp_case *c, int *n);

/* The truth of a case by the arithmetic of `pick`, with its audit if that is double-double. The
 * function sets rq.kind and rq.device. Where radii are too large, MPFR of more bits follows, unless
 * `pick` is double-double or it would take minutes. */
typedef struct {
    int cached;
    const char *device;
    dp_truth_audit audit;
} dp_truth_note;
dp_status dp_case_truth(const dp_case *c, dp_truth_request rq, dp_truth_pick pick,
                        const char *cache, dp_truth *t, dp_truth_note *note, dp_err *e);
/* Bits that bring all radii to `ulp` of their row and a typical one, or to `least`. 0: they are
 * there. DP_BITS_LACKING: that or more. Sums over tokens count T roundings, of any sign. Rows with
 * entries that are not finite do not count. */
#define DP_BITS_LACKING 1000
int dp_truth_lacks_bits(const dp_problem *p, const dp_truth *t, double ulp, double least);

/* Is half of the digits of this base gone? */
int dp_ill_conditioned(const dp_condition *c, dp_base b);
/* Is failed tensor b more informative than failed tensor a (may be NULL)? Unwritten or non-finite
 * entries come first, then errors above a bound, then errors above the expected ones. */
int dp_judgement_says_more(const dp_judgement *a, const dp_judgement *b);
/* Sets the verdict of the run from its tensors. It fails if one fails, is unjudged if one is
 * unjudged that may not be, and passes otherwise. */
void dp_run_close(dp_run *r);
