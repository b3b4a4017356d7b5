/* Error of M of every rank, and how it grows along the prefixes of one rank's chain. */
#include "outputs.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"

#include <math.h>
#include <stdlib.h>

/* M of `chunks` chunks of a rank: got and true [K][K], bound of the error. */
typedef struct {
    int rank, chunks;
    const double *got, *want;
    double bound;
} product;

/* |dM S|_F / |S|_F */
static double effect(const double *dM, const double *S, int K, int V) {
    double *x = dp_doubles((int64_t)K * V);
    dp_mm(DP_FP64, 0, 0, K, V, K, dM, S, x);
    const double e = dp_norm_fro((int64_t)K * V, x), n = dp_norm_fro((int64_t)K * V, S);
    free(x);
    return n > 0 ? e / n : NAN;
}

static void add_point(const dp_sharding *sp, const product *m, dp_run *run) {
    const dp_problem *p = &sp->c->p;
    const int64_t KK = (int64_t)p->K * p->K;
    double *d = dp_doubles(KK);
    for (int64_t i = 0; i < KK; i++)
        d[i] = m->got[i] - m->want[i];
    const double err = dp_norm_fro(KK, d), norm = dp_norm_fro(KK, m->want);
    const dp_truth_rank *t = &sp->at[m->rank * p->HV];
    run->point = dp_realloc(run->point, sizeof *run->point * (size_t)(run->npoint + 1));
    run->point[run->npoint++] =
        (dp_chain_point){.rank = m->rank,
                         .chunks = m->chunks,
                         .rel = norm > 0 ? err / norm : NAN,
                         .abs = err,
                         .norm = norm,
                         .bound = norm > 0 ? m->bound / norm : NAN,
                         .effect = t->has_S_in ? effect(d, t->S_in, p->K, p->V) : NAN};
    free(d);
}

static void add_prefixes(const dp_judging *j, dp_run *run) {
    const dp_sim *s = j->out->sim;
    const dp_sharding *sp = j->sp;
    for (int i = 0; sp->traj && i < s->ntraj; i++) {
        const product m = {s->traj_rank, s->traj_chunks[i], s->traj[i], sp->traj[i],
                           j->bound->traj[i]};
        if (m.want) add_point(sp, &m, run);
    }
}

/* Chunks that M of a rank runs over: simulated ranks count those of the last sub-sequence, the
 * kernels' record those of all its tokens. */
static int chunks_of(const dp_judging *j, int rank) {
    const dp_sim *s = j->out->sim;
    if (!s) return (int)((j->sp->c->p.T / j->sp->N + DP_CHUNK - 1) / DP_CHUNK);
    const int n = s->ctx[rank].nlocal;
    return s->first[rank][n] - s->first[rank][n - 1];
}

static int known(const dp_run *run, int rank, int chunks) {
    int have = 0;
    for (int i = 0; i < run->npoint; i++)
        have |= run->point[i].rank == rank && run->point[i].chunks == chunks;
    return have;
}

void dp_chain_growth(const dp_judging *j, dp_run *run) {
    const dp_sharding *sp = j->sp;
    double *const *M = j->out->rank[DP_RANK_M];
    if (sp->c->p.HV != 1 || !M) return;
    if (j->out->sim) add_prefixes(j, run);
    for (int r = 0; r < sp->N; r++) {
        if (!sp->at[r].has_MH || !M[r]) continue;
        const product m = {r, chunks_of(j, r), M[r], sp->at[r].M, j->bound->M[r]};
        if (!known(run, m.rank, m.chunks)) add_point(sp, &m, run);
    }
}
