/* The source of decays: M, H, dM and dH formed anew with the decays of other ranks and heads. */
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/vocabulary/context.h"
#include "source_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int K, V, c;
    double *F, *e, *H, *dH;
} factors; /* of c chunks: F [c][K][K], e [c][K] decay to the chunk's end, what it adds to S and dS
              [c][K][V] */

/* X [K][n] <- X minus k' (erase o k) X, one key a token; back: its transpose. */
static void project_gated(const dp_problem *p, int64_t t, int hv, int n, int back, double *X) {
    const int K = p->K;
    const double *k = p->k + (t * p->H + hv / dp_G(p)) * K,
                 *erase = p->erase + (t * p->HV + hv) * K;
    for (int j = 0; j < n; j++) {
        double y = 0;
        for (int x = 0; x < K; x++)
            y += k[x] * (back ? 1 : erase[x]) * X[(int64_t)x * n + j];
        for (int x = 0; x < K; x++)
            X[(int64_t)x * n + j] -= k[x] * (back ? erase[x] : 1) * y;
    }
}

/* The value v that a token writes, as a factor. */
static double written(const dp_problem *p, int64_t t, int hv, int r, int v) {
    if (!dp_erases(p)) return 1;
    return p->beta ? p->beta[(t * p->HV + hv) * p->R + r] : p->write[(t * p->HV + hv) * p->V + v];
}

/* X [K][n] <- X minus the part along keys first .. end-1 of a token, times beta; they do not see
 * each other. */
static void project(const dp_problem *p, int64_t t, int hv, int first, int end, int n, int back,
                    double *X) {
    const int K = p->K, R = p->R;
    if (!dp_erases(p)) return;
    if (!p->beta) {
        project_gated(p, t, hv, n, back, X);
        return;
    }
    double *D = dp_doubles((int64_t)K * n), *y = dp_doubles(n);
    for (int r = first; r < end; r++) {
        const double *k = p->k + ((t * p->H + hv / dp_G(p)) * R + r) * K,
                     beta = p->beta[(t * p->HV + hv) * R + r];
        memset(y, 0, sizeof *y * (size_t)n);
        for (int x = 0; x < K; x++)
            for (int j = 0; j < n && k[x] != 0; j++)
                y[j] += k[x] * X[(int64_t)x * n + j];
        for (int x = 0; x < K; x++)
            for (int j = 0; j < n && k[x] != 0; j++)
                D[(int64_t)x * n + j] += beta * k[x] * y[j];
    }
    for (int64_t z = 0; z < (int64_t)K * n; z++)
        X[z] -= D[z];
    free(D);
    free(y);
}

static double decay(const dp_problem *p, int64_t t, int hv, int x) {
    return dp_exp(p->g[(t * p->HV + hv) * dp_Kg(p) + (dp_Kg(p) == 1 ? 0 : x)]);
}

static void scale_rows(const dp_problem *p, int64_t t, int hv, int n, double *X) {
    for (int x = 0; x < p->K; x++)
        for (int j = 0; j < n; j++)
            X[(int64_t)x * n + j] *= decay(p, t, hv, x);
}

/* H [K][V] += what keys first .. end-1 of a token write. */
static void write_keys(const dp_problem *p, int64_t t, int hv, int first, int end, double *H) {
    const int K = p->K, V = p->V, R = p->R;
    for (int r = first; r < end; r++)
        for (int x = 0; x < K; x++)
            for (int v = 0; v < V; v++)
                H[(int64_t)x * V + v] += written(p, t, hv, r, v) *
                                         p->k[((t * p->H + hv / dp_G(p)) * R + r) * K + x] *
                                         p->v[((t * p->HV + hv) * R + r) * V + v];
}

static void one_chunk(const dp_problem *p, int64_t t0, int64_t t1, int hv, double *F, double *e,
                      double *H, double *dH) {
    const int K = p->K, V = p->V, R = p->R;
    for (int x = 0; x < K; x++)
        F[(int64_t)x * K + x] = e[x] = 1;
    for (int64_t t = t0; t < t1; t++) {
        for (int x = 0; x < K; x++)
            e[x] *= decay(p, t, hv, x);
        scale_rows(p, t, hv, K, F);
        scale_rows(p, t, hv, V, H);
        for (int r = 0, n = dp_keys_at_once(p); r < R; r += n) {
            project(p, t, hv, r, r + n, K, 0, F);
            project(p, t, hv, r, r + n, V, 0, H);
            write_keys(p, t, hv, r, r + n, H);
        }
    }
    for (int64_t t = t1 - 1; t >= t0 && p->dout; t--) {
        for (int x = 0; x < K; x++)
            for (int v = 0; v < V; v++)
                dH[(int64_t)x * V + v] += p->scale * p->q[(t * p->H + hv / dp_G(p)) * K + x] *
                                          p->dout[(t * p->HV + hv) * V + v];
        for (int n = dp_keys_at_once(p), r = R - n; r >= 0; r -= n)
            project(p, t, hv, r, r + n, V, 1, dH);
        scale_rows(p, t, hv, V, dH);
    }
}

/* Chunks of a rank's local sub-sequences sub0 .. sub1-1, from the step recurrence; every operation
 * is exact here. */
static factors chunk_factors(const dp_problem *p, const dp_context *c, int sub0, int sub1, int hv) {
    factors f = {.K = p->K, .V = p->V};
    int i = 0;
    for (int s = sub0; s < sub1; s++)
        f.c += (int)((c->local_cu[s + 1] - c->local_cu[s] + DP_CHUNK - 1) / DP_CHUNK);
    const int64_t KK = (int64_t)p->K * p->K, KV = (int64_t)p->K * p->V;
    f.F = dp_doubles(f.c * KK);
    f.e = dp_doubles((int64_t)f.c * p->K);
    f.H = dp_doubles(f.c * KV);
    f.dH = dp_doubles(f.c * KV);
    for (int s = sub0; s < sub1; s++)
        for (int64_t t = c->a + c->local_cu[s], end = c->a + c->local_cu[s + 1]; t < end;
             t += DP_CHUNK, i++)
            one_chunk(p, t, t + DP_CHUNK < end ? t + DP_CHUNK : end, hv, f.F + i * KK,
                      f.e + (int64_t)i * p->K, f.H + i * KV, f.dH + i * KV);
    return f;
}

static void factors_free(factors *f) {
    free(f->F);
    free(f->e);
    free(f->H);
    free(f->dH);
}

/* M (state 0) or H (state 1), back: dM, dH, when the factors have other decays on their diagonals.
 */
static void product(const factors *f, const double *e, int back, int state, double *X) {
    const int K = f->K, n = state ? f->V : K;
    const int64_t KK = (int64_t)K * K, Kn = (int64_t)K * n;
    double *F = dp_doubles(KK), *P = dp_doubles(Kn);
    memset(X, 0, sizeof *X * (size_t)Kn);
    for (int x = 0; x < K && !state; x++)
        X[(int64_t)x * K + x] = 1;
    for (int z = 0; z < f->c; z++) {
        const int i = back ? f->c - 1 - z : z;
        memcpy(F, f->F + i * KK, sizeof *F * (size_t)KK);
        for (int x = 0; x < K; x++)
            F[(int64_t)x * K + x] += e[(int64_t)i * K + x] - f->e[(int64_t)i * K + x];
        dp_mm(DP_FP64, back, 0, K, n, K, F, X, P);
        memcpy(X, P, sizeof *X * (size_t)Kn);
        for (int64_t y = 0; y < Kn && state; y++)
            X[y] += (back ? f->dH : f->H)[i * Kn + y];
    }
    free(F);
    free(P);
}

int dp_source_whose_decays(const dp_wrong_rows *x, int back, int state, int limit) {
    const dp_problem *p = x->p;
    const dp_compare_in *in = x->in;
    const dp_source_place at = dp_source_place_at(in, x->row[0]);
    dp_context c, d;
    dp_source_place from = {-1, -1, -1, -1};
    char also[128] = "";
    int found = 0, n = 0;
    if (dp_context_of(p, in->N, at.rank, &c, NULL)) return 0;
    factors own = chunk_factors(p, &c, back ? 0 : c.nlocal - 1, back ? 1 : c.nlocal, at.head);
    double *X = dp_doubles((int64_t)p->K * (state ? p->V : p->K));
    for (int step = 0; step < 3;
         step++) /* heads of this rank, this head of other ranks, the others */
        for (int i = 0; i < in->N * p->HV; i++) {
            const int r = i / p->HV, h = i % p->HV;
            if ((r == at.rank && h == at.head) ||
                step != (r == at.rank   ? 0
                         : h == at.head ? 1
                                        : 2) ||
                dp_context_of(p, in->N, r, &d, NULL))
                continue;
            factors other = chunk_factors(p, &d, back ? 0 : d.nlocal - 1, d.nlocal, h);
            if (other.c >= own.c) {
                product(&own, other.e, back, state, X);
                if (dp_source_equal(X, in->got + x->row[0] * in->width, in->width) &&
                    found++ < limit) {
                    if (found == 1) from = (dp_source_place){r, h, -1, -1};
                    n += snprintf(also + n, sizeof also - (size_t)n, "%srank %d, head %d",
                                  found == 1 ? "" : ", or of ", r, h);
                }
            }
            factors_free(&other);
            dp_context_free(&d);
        }
    dp_context_free(&c);
    factors_free(&own);
    free(X);
    if (found < 1 || found > limit) return 0;
    x->out->at = at;
    x->out->from = from;
    x->out->rows = x->out->of = 1;
    snprintf(x->out->says, sizeof x->out->says,
             "%s of rank %d, head %d was made with the decays of %s", in->name, at.rank, at.head,
             also);
    return 1;
}
