/* harness/run/subjects.h - who computes a case: simulated ranks, in one process or several, a
 * library, the chunk solver over LAPACKE, CUDA devices. One row of dp_subjects and one file each;
 * files of results that another program wrote are judged by dp_run_stored (judge.h).
 */
#ifndef DP_SUBJECTS_H
#define DP_SUBJECTS_H
#include "outputs.h"

#define DP_MAX_RANK_COUNTS 16
#define DP_MAX_CLAIMS ((DP_NBASES + 1) * DP_NFORMATS * DP_NRUN_EXCHANGES * DP_NRUN_PAYLOADS)

/* Claims that are held against draws: asked for at once, so that every draw is made once. */
typedef struct {
    int n;
    dp_claim claim[DP_MAX_RANK_COUNTS * DP_MAX_CLAIMS];
} dp_claims;
/* A claim replaces one that differs from it only by its stages. On one rank it replaces one that
 * differs by the format of the chain, which does not exist there. The same draws serve both. */
void dp_claims_add(dp_claims *list, const dp_claim *claim);

typedef struct dp_subject_kind dp_subject_kind;
struct dp_subject_kind {
    dp_backend backend;
    /* Has it anything to run on N ranks? */
    int (*offers)(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o, int N);
    /* Its claims there, if they are known before; NULL: it asks run by run. */
    void (*claims)(const dp_case *c, const dp_run_options *o, int N, dp_claims *list);
    /* Every run that case and options ask for, judged; called where it offers something. */
    dp_status (*run)(const dp_subject_kind *k, dp_sharding *sp, dp_runs *out, dp_err *e);
    /* Once a case: a row that says why it cannot run here; NULL: it always can. */
    void (*absent)(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o,
                   dp_runs *out);
};
enum { DP_NSUBJECTS = 6 };
extern const dp_subject_kind dp_subjects[DP_NSUBJECTS]; /* in the order in which they run */

/* subject_simulated.c: simulated ranks, in this process or each in one of its own */
int dp_simulated_offers(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o, int N);
void dp_simulated_claims(const dp_case *c, const dp_run_options *o, int N, dp_claims *list);
dp_status dp_simulated_run(const dp_subject_kind *k, dp_sharding *sp, dp_runs *out, dp_err *e);
/* subject_lapack.c */
int dp_lapack_offers(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o, int N);
void dp_lapack_claims(const dp_case *c, const dp_run_options *o, int N, dp_claims *list);
dp_status dp_lapack_run(const dp_subject_kind *k, dp_sharding *sp, dp_runs *out, dp_err *e);
/* subject_library.c */
int dp_library_offers(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o, int N);
dp_status dp_library_run(const dp_subject_kind *k, dp_sharding *sp, dp_runs *out, dp_err *e);
/* Asks the subject for its runs on these numbers of ranks, before there is a truth, until it serves
 * one, whose answer *std keeps. 1: it serves none, the rows that say why are in *out, and there is
 * nothing to judge. */
int dp_library_refuses(dp_standard *std, int n, const int *ranks, dp_runs *out, dp_status *st,
                       dp_err *e);
void dp_library_forget(dp_standard *std); /* frees an answer that was not taken */
/* A row that says why the backend cannot run here, where it is asked for and cannot. */
void dp_subject_absent(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o,
                       dp_runs *out);
/* subject_cuda.c: one device a rank set, or NCCL between devices */
int dp_devices_offer(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o, int N);
dp_status dp_devices_run(const dp_subject_kind *k, dp_sharding *sp, dp_runs *out, dp_err *e);

/* The exchanges and payloads that run with the which-th format of the chain: those of the options,
 * else of the case. Without M one format is enough, without a sent state one payload. */
typedef struct {
    int n;
    dp_sending way[DP_NRUN_EXCHANGES * DP_NRUN_PAYLOADS];
} dp_ways;
dp_ways dp_ways_of(const dp_case *c, const dp_run_options *o, int which);

/* The bases of a case that the options leave; returns their number. */
int dp_bases_of(const dp_case *c, const dp_run_options *o, int bases[DP_NBASES]);
/* Which rank owns which tokens: what is asked for, whatever the case says, else what it says. */
int dp_owns_of(const dp_case *c, const dp_run_options *o, int own[DP_NOWNS]);
/* A row that says why nothing runs where ranks own their tokens so. */
void dp_skip_owned(const dp_case *c, const dp_run_options *o, dp_own kind, const char *why,
                   dp_runs *out);
#define DP_FAULT_IS_EVEN "this fault is of ranks that own T / N tokens each" /* fault_info.even */
/* Can T tokens not be cut so? Adds a row that says it. */
int dp_owns_nothing(const dp_case *c, const dp_run_options *o, dp_own kind, int64_t T, int ranks,
                    dp_runs *out);
int dp_ranks_of(const dp_case *c, const dp_run_options *o, int ranks[DP_MAX_RANK_COUNTS]);

/* ---- a call made again (subject_library.c) ---- */

/* With the same inputs its results must have the same bits; with others, results that follow from
 * the first. The other inputs need no truth of their own. Each value head takes the place of the
 * next of its group, with the query and key head that it reads. The tensors q, k, v and do change
 * sign. Then o, dq, dk and dv change sign, all else stays, and every result moves with its head.
 */

/* Runs of a command that are called again, the first that its subject serves; those that fail are,
 * too. */
#define DP_RUNS_CALLED_AGAIN 2

/* To be freed by dp_problem_free. */
dp_problem dp_other_values(const dp_problem *p);
/* Results of dp_other_values(p) become what p's must be. */
void dp_other_values_undo(const dp_problem *p, dp_result *r);
/* In how many results do numbers differ (NaN is NaN)? text: how many entries of the first of those,
 * and where. */
int dp_results_differ(const dp_problem *p, const dp_result *a, const dp_result *b, char *text,
                      size_t size);

#endif
