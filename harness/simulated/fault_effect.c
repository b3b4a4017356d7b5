/* The deliberate faults (fault.h); a row of ACTS at the end says where each acts. */
#include "ranks_stages.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/low_rank.h"
#include "ref/arithmetic/mm.h"
#include "ref/arithmetic/norms.h"
#include "ref/chunk/gate.h"
#include "ref/chunk/payload.h"
#include "ref/vocabulary/recurrence.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WRAP 16384 /* entries after which offsets of DP_FAULT_OFFSET_WRAPS start again */
#define GRID 2     /* (sequence, head) pairs that DP_FAULT_GRID_AXIS computes */
#define BLOCKS 8   /* (chunk, head) pairs that DP_FAULT_BLOCKS_NAN computes */
#define PADDING 8  /* numbers behind a row of v that DP_FAULT_STRIDE_IGNORED reads */

typedef const dp_sim_place place;

/* The fault acted on that rank and head. */
static void hit(const dp_sim *s, int rank, int hv) { s->hit[rank * s->p->HV + hv] = 1; }
static void hit_rank(const dp_sim *s, int rank) {
    for (int hv = 0; hv < s->p->HV; hv++)
        hit(s, rank, hv);
}
static void hit_all(const dp_sim *s) { memset(s->hit, 1, (size_t)s->N * s->p->HV); }
static void hit_group(const dp_sim *s, int gi, int hv) { hit(s, s->group[gi].rank, hv); }

/* Every fault begins so before a run. Faults that show between runs keep where they acted. */
static void begins(dp_sim *s, DP_UNUSED place *at) {
    if (!s->sharers) s->merge = dp_fault_exchange(s->acts.fault, s->merge);
    s->payload = dp_fault_payload(s->acts.fault, s->payload);
    s->turns = s->acts.fault == DP_FAULT_ORDER_BY_RUN;
    s->have_forward = s->have_backward = 0;
    if (!dp_fault_by_run(s->acts.fault)) memcpy(s->hit, s->hit_kept, (size_t)s->N * s->p->HV);
}

/* Every rank and head to which, or else from which, a state is handed. */
static void each_pair(dp_sim *s, int back, int gets,
                      void (*f)(dp_sim *s, int back, int r, int hv)) {
    const int HV = s->p->HV;
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < s->N * HV; i++)
        if (dp_sim_has(s, i / HV) && dp_sim_gets(s, gets ? back : !back, i / HV))
            f(s, back, i / HV, i % HV);
}

/* ---- inputs and layout ----------------------------------------------------------------------- */

/* Token t of the problem as the zigzag ranks have it: rank r holds pieces r and 2N-1-r of 2N. */
static int64_t zigzag(const dp_sim *s, int64_t t) {
    const int64_t L = s->p->T / s->N, half = L / 2, r = t / L, i = t % L;
    return i < half ? r * half + i : (2 * s->N - 1 - r) * half + i - half;
}

static void permute_tokens(const dp_sim *s, const double *from, int64_t width, int back,
                           double *to) {
    for (int64_t t = 0; t < s->p->T; t++) {
        const int64_t z = zigzag(s, t);
        memcpy(to + (back ? z : t) * width, from + (back ? t : z) * width,
               sizeof(double) * (size_t)width);
    }
}

/* The ranks get inputs of their own, equal to the problem's. */
static void own_inputs(dp_sim *s) {
    const dp_problem *p = s->p;
    s->own = *p;
    dp_inputs_copy(&s->own, p, dp_copy);
    s->own.cu = dp_cu_copy(p);
    s->p = &s->own;
    hit_all(s);
}

static void norm_keys(dp_sim *s, DP_UNUSED place *at) {
    if (dp_is_normed(s->p, DP_INPUT_K)) return;
    own_inputs(s);
    const int K = s->p->K;
    const int64_t rows = s->p->T * s->p->H * s->p->R;
    for (int64_t i = 0; i < rows; i++) {
        double *k = s->own.k + i * K;
        const double norm = dp_norm_fro(K, k);
        for (int c = 0; c < K && norm > 0; c++)
            k[c] /= norm;
    }
}

static void zigzag_inputs(dp_sim *s, DP_UNUSED place *at) {
    const dp_problem *p = s->p;
    if (s->N < 2 || p->T % (2 * s->N)) return;
    own_inputs(s);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_of(p, i) && dp_input_fields[i].kind == DP_OF_TOKENS)
            permute_tokens(s, dp_input_of(p, i), dp_input_width(p, i), 0, s->own.in[i]);
}

static void zigzag_results(dp_sim *s, DP_UNUSED place *at) {
    if (s->p != &s->own) return;
    for (int i = 0; i < DP_NRESULTS; i++) { /* a row a token returns to its own token */
        const int64_t n = dp_result_count(s->p, i);
        double **x = &s->out.out[i];
        if (!*x || !n || dp_result_fields[i].kind != DP_OF_TOKENS) continue;
        double *y = dp_doubles(n);
        permute_tokens(s, *x, n / s->p->T, 1, y);
        dp_sim_replace(x, y);
    }
}

static void divide_cu(dp_sim *s, DP_UNUSED place *at) {
    const dp_problem *p = s->p;
    s->one_by_one = 1;
    if (s->N < 2 || p->Nseq < 2) return;
    for (int r = 0; r < s->N; r++) {
        dp_context *c = &s->ctx[r];
        free(c->local_cu);
        free(c->local_seq);
        c->local_cu = dp_calloc((size_t)p->Nseq + 1, sizeof *c->local_cu);
        c->local_seq = dp_calloc((size_t)p->Nseq, sizeof *c->local_seq);
        c->nlocal = 0;
        for (int i = 0; i < p->Nseq; i++) {
            const int64_t end = p->cu[i + 1] / s->N;
            if (end == c->local_cu[c->nlocal]) continue;
            c->local_seq[c->nlocal++] = i;
            c->local_cu[c->nlocal] = end;
        }
    }
    hit_all(s);
}

/* ---- gate, intra, wy ------------------------------------------------------------------------- */

/* The activated g or beta, stored in bf16. */
static void store_bf16(dp_sim *s, double *x, int64_t n) {
    int changed = 0;
    for (int64_t i = 0; i < n; i++) {
        changed |= x[i] != dp_bf16d(x[i]);
        x[i] = dp_bf16d(x[i]);
    }
    if (changed) hit_all(s);
}

/* erase o k with the mean of erase. */
static void mean_erase(dp_sim *s, DP_UNUSED place *at) {
    const dp_problem *p = s->p;
    if (!dp_by_gates(p)) return;
    for (int64_t i = 0; i < p->T * p->HV; i++) {
        const double *k = s->k + (i / p->HV * p->H + i % p->HV / dp_G(p)) * p->K;
        double mean = 0;
        for (int x = 0; x < p->K; x++)
            mean += p->erase[i * p->K + x] / p->K;
        for (int x = 0; x < p->K; x++)
            s->erasing[i * p->K + x] = dp_round_arith(s->base, mean * k[x]);
    }
    hit_all(s);
}

/* lr_a of the state after its decay. */
static void read_decayed(dp_sim *s, DP_UNUSED place *at) {
    const dp_problem *p = s->p;
    if (!dp_by_rows(p)) return;
    for (int64_t i = 0; i < p->T * p->HV * p->K; i++)
        s->erasing[(i / p->K * 2) * p->K + i % p->K] = -dp_round_arith(s->base, p->lr_a[i]);
    hit_all(s);
}

/* exp(-g) of a channel: a key that much longer reads of the decayed state what the key itself reads
 * of the state before. For gates below DP_FACTORS_GATE it is that of this gate. */
static double undecay(const dp_sim *s, int64_t row, int x) {
    const int Kg = dp_Kg(s->p);
    return dp_exp(-fmax(s->g[row * Kg + (Kg == 1 ? 0 : x)], DP_FACTORS_GATE));
}

/* Keys that read the state before its decay. */
static void read_undecayed(dp_sim *s, DP_UNUSED place *at) {
    const dp_problem *p = s->p;
    const int64_t RK = (int64_t)p->R * p->K;
    if (!dp_has_beta(p)) return;
    s->erasing = dp_doubles(p->T * p->HV * RK);
    for (int64_t i = 0; i < p->T * p->HV; i++)
        for (int64_t x = 0; x < RK; x++)
            s->erasing[i * RK + x] = dp_erasing_at(p, s->k, NULL, i / p->HV, (int)(i % p->HV))[x] *
                                     undecay(s, i, (int)(x % p->K));
    hit_all(s);
}

static int64_t gates(const dp_sim *s) { return s->p->T * s->p->HV * dp_Kg(s->p); }

static void gate_bf16(dp_sim *s, DP_UNUSED place *at) { store_bf16(s, s->g, gates(s)); }
static void beta_bf16(dp_sim *s, DP_UNUSED place *at) {
    store_bf16(s, s->beta, s->p->T * s->p->HV * dp_rows(s->p));
}

static void other_decay(dp_sim *s, DP_UNUSED place *at) {
    for (int64_t i = 0; i < gates(s); i++) {
        double *g = &s->g[i];
        if (s->acts.fault == DP_FAULT_EXP2_GATE)
            *g *= 0.6931471805599453;
        else if (s->acts.fault == DP_FAULT_LINEAR_GATE)
            *g = dp_exp(*g);
        else
            *g = dp_log(dp_bf16d(dp_exp(*g)));
        *g = dp_round_arith(s->base, *g);
    }
    hit_all(s);
}

/* kg of other keys, or with another token as the end of the chunk. */
static void other_kg(dp_chunk *ch, const double *k, int end) {
    const int K = ch->K;
    for (int i = 0; i < ch->n; i++)
        for (int x = 0; x < K; x++)
            ch->kg[(int64_t)i * K + x] = dp_round_store(
                ch->base, k[(int64_t)i * K + x] *
                              dp_exp(ch->gcum[end * K + x] - ch->gcum[(i / ch->R) * K + x]));
}

static void tail_unmasked(dp_sim *s, int gi, int hv) { /* the decay runs on over the next tokens */
    const dp_problem *p = s->p;
    const dp_group *gr = &s->group[gi];
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    const int Kg = dp_Kg(p);
    const int64_t more = p->T - gr->t0 < DP_CHUNK ? p->T - gr->t0 : DP_CHUNK;
    for (int x = 0; x < p->K; x++) {
        double d = 0;
        for (int64_t z = gr->c; z < more; z++)
            d += s->g[((gr->t0 + z) * p->HV + hv) * Kg + (Kg == 1 ? 0 : x)];
        ch->eC[x] *= dp_exp(d);
        for (int i = 0; i < ch->n; i++)
            ch->kg[(int64_t)i * p->K + x] *= dp_exp(d);
    }
}

/* N = B L, so that A = I + N. */
static double *strict_part(const dp_chunk *ch) {
    const int n = ch->n;
    double *N = dp_doubles((int64_t)n * n);
    for (int i = 0; i < n; i++)
        for (int j = 0; dp_chunk_reads(ch, i, j); j++)
            N[(int64_t)i * n + j] = ch->beta[i] * ch->L[(int64_t)i * n + j];
    return N;
}

/* (I + N)^(-1) = sum of (-N)^j, or the product of (I + (-N)^(2^j)): both exact after n terms, both
 * lose what large powers cancel. */
static double *series_inverse(const dp_chunk *ch, int doubling) {
    const int n = ch->n;
    const int64_t nn = (int64_t)n * n;
    DP_OWN double *P = strict_part(ch), *X = dp_doubles(nn), *N = dp_doubles(nn);
    double *T = dp_identity(n);
    for (int64_t i = 0; i < nn; i++)
        N[i] = P[i] = -P[i];
    for (int j = 1; j < n; j = doubling ? 2 * j : j + 1) {
        if (doubling) {
            dp_mm(DP_FP32, 0, 0, n, n, n, P, T, X);
            for (int64_t i = 0; i < nn; i++)
                T[i] = (float)(T[i] + X[i]);
            memcpy(N, P, sizeof(double) * (size_t)nn);
        } else
            for (int64_t i = 0; i < nn; i++)
                T[i] = (float)(T[i] + P[i]);
        dp_mm(DP_FP32, 0, 0, n, n, n, N, P, X);
        memcpy(P, X, sizeof(double) * (size_t)nn);
    }
    return T;
}

/* exp(gam_s - a) exp(a - gam_i) in fp32 in place of exp(gam_s - gam_i), exponents at most top; a =
 * 0, or gam of the chunk's last token. */
static void factored_pairs(dp_chunk *ch, int anchor_end, double top) {
    const int K = ch->K, R = ch->R, n = ch->n;
    for (int s = 0; s < ch->c; s++)
        for (int i = 0; i <= s; i++)
            for (int m = 0; m < R; m++)
                for (int j = -1; j < R; j++) { /* -1: the query */
                    const double *row = j < 0 ? ch->q + (int64_t)s * K
                                              : dp_chunk_erasing(ch) + (int64_t)(s * R + j) * K,
                                 *col = ch->k + (int64_t)(i * R + m) * K;
                    float sum = 0;
                    for (int x = 0; x < K; x++) {
                        const double a = anchor_end ? ch->gcum[(ch->c - 1) * K + x] : 0;
                        const float up = dp_expf((float)fmin(ch->gcum[s * K + x] - a, top)),
                                    down = dp_expf((float)fmin(a - ch->gcum[i * K + x], top));
                        sum += (float)row[x] * up * ((float)col[x] * down);
                    }
                    if (j < 0)
                        ch->Aqk[(int64_t)s * n + i * R + m] =
                            dp_round_store(ch->base, (float)ch->scale * sum);
                    else if (j >= dp_chunk_reader(ch, s, i, m))
                        ch->L[(int64_t)(s * R + j) * n + i * R + m] = sum;
                }
}

/* Is the chunk its whole sub-sequence, and shorter than a chunk? */
static int short_alone(const dp_sim *s, int gi) {
    const dp_group *gr = &s->group[gi];
    const int *first = s->first[gr->rank] + gr->sub;
    return gr->c < DP_CHUNK && first[1] - first[0] == 1;
}

static void lost_scores(dp_sim *s, place *at) {
    const int gi = at->at, hv = at->hv;
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    if (s->acts.fault == DP_FAULT_SHORT_NAN ? !short_alone(s, gi)
                                            : (int64_t)gi * s->p->HV + hv < BLOCKS)
        return;
    for (int64_t i = 0; i < (int64_t)ch->c * ch->n; i++)
        ch->Aqk[i] = NAN;
    hit_group(s, gi, hv);
}

/* Scores between the keys of one token: there where they should not be, gone where they should. */
static void mistake_turns(dp_sim *s, place *at) {
    const int gi = at->at, hv = at->hv;
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    const int R = ch->R, K = ch->K;
    for (int i = 0; i < ch->n; i++)
        for (int j = i / R * R; j < i; j++) {
            float sum = 0;
            for (int x = 0; x < K && !ch->in_turn; x++)
                sum += (float)dp_chunk_erasing(ch)[(int64_t)i * K + x] *
                       (float)ch->k[(int64_t)j * K + x];
            ch->L[(int64_t)i * ch->n + j] = sum;
        }
    if (R > 1) hit_group(s, gi, hv);
}

static void factored(dp_sim *s, place *at) {
    const int gi = at->at, hv = at->hv;
    const int leak = s->acts.fault == DP_FAULT_ANCHOR_LEAK;
    factored_pairs(dp_sim_chunk(s, gi, hv), leak,
                   leak                                             ? 20
                   : s->acts.fault == DP_FAULT_FACTORED_EXP_CLAMPED ? 88
                                                                    : INFINITY);
    hit_group(s, gi, hv);
}

static void by_inverse(dp_sim *s, DP_UNUSED place *at) { s->by_inverse = 1; }

static void invert_by_series(dp_sim *s, place *at) {
    const int gi = at->at, hv = at->hv;
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    free(ch->Akk);
    ch->Akk = series_inverse(ch, s->acts.fault == DP_FAULT_DOUBLING_INVERSE);
    dp_chunk_keep_inverse(ch);
    hit_group(s, gi, hv);
}

/* Number `at` of v, for a kernel that counts otherwise. */
static double wrong_value(const dp_sim *s, int64_t at, int64_t row) {
    const double *v = s->values ? s->values : s->p->v;
    if (s->acts.fault == DP_FAULT_OFFSET_WRAPS) return v[at % WRAP];
    const int64_t x = at % (row + PADDING);
    return x < row ? v[at / (row + PADDING) * row + x] : 0;
}

/* w and u again, of wrong values; what else reads v reads the right ones. */
static void wrong_values(dp_sim *s, place *at) {
    const int gi = at->at, hv = at->hv;
    const dp_problem *p = s->p;
    const dp_group *gr = &s->group[gi];
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    const int64_t row = (int64_t)dp_rows(p) * p->V;
    const int64_t last = ((gr->t0 + gr->c - 1) * p->HV + hv + 1) * row;
    if (s->acts.fault == DP_FAULT_OFFSET_WRAPS && last <= WRAP) return;
    double *v = ch->v;
    ch->v = dp_doubles((int64_t)ch->n * ch->V);
    for (int t = 0; t < gr->c; t++)
        for (int64_t i = 0; i < row; i++)
            ch->v[t * row + i] = wrong_value(s, ((gr->t0 + t) * p->HV + hv) * row + i, row);
    dp_chunk_wy(ch);
    dp_sim_replace(&ch->v, v);
    hit_group(s, gi, hv);
}

static void other_wy(dp_sim *s, place *at) {
    const int gi = at->at, hv = at->hv;
    const dp_group *gr = &s->group[gi];
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    if (s->acts.fault == DP_FAULT_LAST_INDEX && gr->c > 1)
        other_kg(ch, ch->k, ch->c - 2);
    else if (s->acts.fault == DP_FAULT_ERASE_WRITES && dp_by_gates(s->p))
        other_kg(ch, ch->erasing, ch->c - 1);
    else if (s->acts.fault == DP_FAULT_TAIL_UNMASKED && gr->c < DP_CHUNK &&
             gr->t0 + gr->c < s->p->T)
        tail_unmasked(s, gi, hv);
    else
        return;
    hit_group(s, gi, hv);
}

/* ---- forward --------------------------------------------------------------------------------- */

static void other_chain(dp_sim *s, int back, int r, int hv) {
    const dp_format f = s->acts.fault == DP_FAULT_CHAIN_BF16 ? DP_BF16ST : DP_TF32RZ;
    dp_sim_pair(s, back, r, hv, back ? 0 : s->ctx[r].nlocal - 1, f);
    hit(s, r, hv);
}

/* The pair of the wrong sub-sequence. */
static void other_sub(dp_sim *s, int back, int r, int hv) {
    const int i = r * s->p->HV + hv, sub = back ? s->ctx[r].nlocal - 1 : 0;
    if (s->ctx[r].nlocal < 2) return;
    dp_sim_replace(back ? &s->dH[i] : &s->H[i], NULL);
    dp_sim_pair(s, back, r, hv, sub, s->chain);
    hit(s, r, hv);
}

/* x as it is where a fault rounds it before it is sent. */
static double presented(dp_fault f, double x) {
    if (f == DP_FAULT_PAYLOAD_LOW_LOST || f == DP_FAULT_PAYLOAD_TWICE) return dp_bf16d(x);
    const float y = (float)x;
    uint32_t bits;
    memcpy(&bits, &y, sizeof bits);
    return dp_bf16_from_bits((uint16_t)(bits >> 16));
}

static void leave_largest(int K, double *M) {
    double *U, *W, most = -1;
    const int rank = dp_low_rank(M, K, 0, &U, &W);
    int top = 0;
    for (int z = 0; z < rank; z++) {
        double s = 0;
        for (int i = 0; i < K; i++)
            s += U[(int64_t)i * rank + z] * U[(int64_t)i * rank + z];
        if (s > most) {
            most = s;
            top = z;
        }
    }
    for (int64_t i = 0; rank && i < (int64_t)K * K; i++)
        M[i] -= U[i / K * rank + top] * W[(int64_t)top * K + i % K];
    free(U);
    free(W);
}

static void sends(dp_sim *s, place *at) {
    const int64_t K = s->p->K, KV = K * s->p->V;
    double *M = at->M, *H = at->x;
    const dp_fault f = s->acts.fault;
    const int states = f == DP_FAULT_PAYLOAD_TRUNCATED || f == DP_FAULT_PAYLOAD_LOW_LOST,
              products = states || f == DP_FAULT_PAYLOAD_TWICE;
    for (int64_t i = 0; states && i < KV; i++)
        H[i] = presented(f, H[i]);
    for (int64_t i = 0; M && products && i < K * K; i++)
        M[i] = presented(f, M[i]);
    if (M && f == DP_FAULT_RANK_LARGEST) leave_largest((int)K, M);
    for (int j = at->at + at->way->by; (states || M) && j >= 0 && j < s->N; j += at->way->by) {
        if (!dp_sim_gets(s, at->way->back, j)) break;
        hit(s, j, at->hv);
    }
}

/* The state that enters a rank, once it is merged. */
static void other_state(dp_sim *s, DP_UNUSED int back, int r, int hv) {
    double *S = s->S_in[r * s->p->HV + hv];
    const int K = s->p->K, V = s->p->V;
    const int64_t KV = (int64_t)K * V;
    if (s->acts.fault == DP_FAULT_MERGE_HALF_V)
        for (int x = 0; x < K; x++)
            memset(S + (int64_t)x * V + V / 2, 0, sizeof(double) * (V - V / 2));
    else if (s->acts.fault == DP_FAULT_CONTEXT_LOST)
        memset(S, 0, sizeof *S * (size_t)KV);
    else if (s->acts.fault == DP_FAULT_MERGE_SCALED && r == s->N - 1)
        for (int64_t i = 0; i < KV; i++)
            S[i] *= 0.99;
    else if (s->acts.fault == DP_FAULT_STATE_TRANSPOSED) {
        double *t = dp_copy(S, KV); /* the same K*V words read with the other layout */
        for (int x = 0; x < K; x++)
            for (int v = 0; v < V; v++)
                S[(int64_t)x * V + v] = t[((int64_t)v * K + x) % KV];
        free(t);
    } else
        return;
    hit(s, r, hv);
}

/* M from + H in truncated tf32. */
static void merge_short(dp_sim *s, place *at) {
    const int K = s->p->K, V = s->p->V;
    const dp_base b = s->at[DP_STAGE_MERGE_FWD];
    dp_mm_by(s->linear, DP_TF32RZ, (dp_shape){0, 0, K, V, K}, at->M, at->from, at->x);
    for (int64_t i = 0; i < (int64_t)K * V; i++)
        at->x[i] = dp_round_arith(b, at->x[i] + at->H[i]);
    hit(s, at->at, at->hv);
}

/* The owner of part j. */
static int owner(const dp_sim_way *w, int j) { return dp_own_rank(w->s->p->own, w->s->N, j); }

/* A gather that merges in another order, or other M: that of the first part of an owner's. */
static void order_parts(const dp_sim_way *w, int r, int hv, int n, int starts, dp_sim_part *part) {
    const dp_fault f = w->s->acts.fault;
    const int far = n ? part[0].H : 0;
    for (int i = 0; i < n && f == DP_FAULT_PART_FIRST_M; i++)
        for (part[i].M = far; owner(w, part[i].M) != owner(w, part[i].H);)
            part[i].M += w->by;
    for (int i = 1; i < n && f != DP_FAULT_PART_FIRST_M; i++)
        for (int at = i;
             at > 0 && (f == DP_FAULT_MERGE_NEAREST_FIRST ||
                        w->by * owner(w, part[at - 1].H) > w->by * owner(w, part[at].H));
             at--) {
            const dp_sim_part x = part[at];
            part[at] = part[at - 1];
            part[at - 1] = x;
        }
    for (int i = 0; i < n; i++)
        if (part[i].H != far + i * w->by || ((starts || i) && part[i].M != part[i].H))
            hit(w->s, r, hv);
}

/* Numbers that M and H of an element of a scan have. */
static int64_t numbers_of_pair(const dp_sim *s) {
    return (int64_t)s->p->K * s->p->K + (int64_t)s->p->K * s->p->V;
}

static void compose_swapped(const dp_sim_way *w, int d, int r, int hv, double *later,
                            double *earlier) {
    for (int64_t i = 0; i < numbers_of_pair(w->s); i++) {
        double *a = later + DP_SIM_ELEMENT_FLAGS + i, *b = earlier + DP_SIM_ELEMENT_FLAGS + i;
        const double x = *a;
        *a = *b;
        *b = x;
    }
    dp_sim_compose(w, d, r, hv, later, earlier);
    if (!dp_sim_matters(later)) /* a state leaves, of which no M is made: it stays as it was */
        memcpy(later + DP_SIM_ELEMENT_FLAGS, earlier + DP_SIM_ELEMENT_FLAGS,
               sizeof *later * (size_t)w->s->p->K * (size_t)w->s->p->K);
    hit(w->s, r + w->by, hv);
}

static void compose_early(const dp_sim_way *w, int d, int r, int hv, double *later,
                          double *earlier) {
    if (2 * d >= w->s->N)
        hit(w->s, r + w->by, hv);
    else
        dp_sim_compose(w, d, r, hv, later, earlier);
}

/* A rank sends the state that it received, unless the sequence begins there. */
static void hand_on_late(dp_sim *s, int back) {
    const int HV = s->p->HV, by = back ? -1 : 1;
    double **in = back ? s->dS_out : s->S_in;
    const dp_sim_way w = {.s = s, .back = back};
    for (int i = 0; i < s->N; i++) {
        const int r = back ? s->N - 1 - i : i;
        if (!dp_sim_gets(s, !back, r) || dp_sim_begins(&w, r)) continue;
        for (int hv = 0; hv < HV; hv++) {
            double *S = dp_copy(in[r * HV + hv], (int64_t)s->p->K * s->p->V);
            dp_payload_state(s->payload, (int64_t)s->p->K * s->p->V, S);
            dp_sim_replace(&in[(r + by) * HV + hv], S);
            hit(s, r + by, hv);
        }
    }
}

/* The exchange again, with an algorithm that is wrong. The first exchange's messages are counted,
 * not these. */
static void exchange_again(dp_sim *s, int back) {
    const dp_traffic sent = s->sent;
    const int by_scan = s->merge == DP_EXCHANGE_SCAN;
    if (s->acts.fault == DP_FAULT_SCAN_SWAPPED || s->acts.fault == DP_FAULT_SCAN_MISSES_LEVEL) {
        if (by_scan)
            dp_sim_scan(s, back,
                        s->acts.fault == DP_FAULT_SCAN_SWAPPED ? compose_swapped : compose_early);
    } else if (s->acts.fault == DP_FAULT_SERIAL_LATE) {
        if (s->merge == DP_EXCHANGE_SERIAL) hand_on_late(s, back);
    } else if (s->merge == DP_EXCHANGE_ALLGATHER)
        dp_sim_gather(s, back, order_parts);
    s->sent = sent;
}
static void wrong_merge_fwd(dp_sim *s, DP_UNUSED place *at) { exchange_again(s, 0); }
static void wrong_merge_bwd(dp_sim *s, DP_UNUSED place *at) { exchange_again(s, 1); }

#define DROPPED 0x1p-12 /* what is left of a state that is dropped, at most */

/* exp of the largest sum over the chunk's tokens of a channel's gates, or of the sum of the
 * largest. */
static double left_over(const dp_chunk *ch, int of_sums) {
    double largest = -INFINITY, sum = 0;
    for (int t = 0; t < ch->c; t++) {
        double most = -INFINITY;
        for (int x = 0; x < ch->K; x++) {
            const double *g = ch->gcum + (int64_t)t * ch->K + x;
            most = fmax(most, t ? g[0] - g[-ch->K] : g[0]);
            if (t == ch->c - 1) largest = fmax(largest, g[0]);
        }
        sum += most;
    }
    return dp_exp(of_sums ? largest : sum);
}

/* S: as if nothing had come into the chunk. 1: it was dropped. */
static int drop_state(const dp_sim *s, int gi, int hv, double *S) {
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    const int64_t KV = (int64_t)ch->K * ch->V;
    if (left_over(ch, s->acts.fault == DP_FAULT_DROP_CHANNEL_SUM) >= DROPPED) return 0;
    memset(S, 0, sizeof *S * (size_t)KV);
    dp_chunk_state(ch, S, NULL);
    return 1;
}

/* X of the decayed state, which itself still decays once. */
static void decay_before_use(dp_sim *s, place *at) {
    const dp_chunk *ch = dp_sim_chunk(s, at->at, at->hv);
    const int V = ch->V;
    double *S = at->x;
    for (int64_t i = 0; i < (int64_t)ch->K * V; i++)
        S[i] = ch->h[i] * ch->eC[i / V];
    dp_chunk_state(ch, S, ch->v_new);
    for (int64_t i = 0; i < (int64_t)ch->K * V; i++)
        S[i] += (1 - ch->eC[i / V]) * ch->eC[i / V] * ch->h[i];
    dp_sim_round_carried(s, DP_STAGE_STATE_FWD, S);
    hit_group(s, at->at, at->hv);
}

/* v_new = u - bf16(w h) in place of u - w h, and the state that it makes. */
static void short_residual(dp_chunk *ch, double *S) {
    const int n = ch->n, K = ch->K, V = ch->V;
    double *x = ch->v_new;
    memset(x, 0, sizeof *x * (size_t)n * V);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < K; k++)
            for (int v = 0; v < V; v++)
                x[(int64_t)i * V + v] += ch->w[(int64_t)i * K + k] * ch->h[(int64_t)k * V + v];
    for (int64_t i = 0; i < (int64_t)n * V; i++)
        x[i] = dp_store(ch->kept, dp_round_arith(ch->base, ch->u[i] - dp_bf16d(x[i])));
    for (int k = 0; k < K; k++)
        for (int v = 0; v < V; v++) {
            double sum = ch->eC[k] * ch->h[(int64_t)k * V + v];
            for (int i = 0; i < n; i++)
                sum += ch->kg[(int64_t)i * K + k] * x[(int64_t)i * V + v];
            S[(int64_t)k * V + v] = dp_round_arith(ch->base, sum);
        }
}

static void other_pass(dp_sim *s, place *at) {
    const dp_problem *p = s->p;
    const int gi = at->at, hv = at->hv;
    const int drops =
        s->acts.fault == DP_FAULT_DROP_CHANNEL_SUM || s->acts.fault == DP_FAULT_DROP_HORIZON;
    const dp_format kept = s->acts.fault == DP_FAULT_STATE_FP16 ? DP_FP16 : DP_BF16;
    if (drops && !drop_state(s, gi, hv, at->x)) return;
    if (s->acts.fault == DP_FAULT_STATE_BF16 || s->acts.fault == DP_FAULT_STATE_FP16)
        dp_store_all(kept, at->x, (int64_t)p->K * p->V);
    else if (s->acts.fault == DP_FAULT_RESIDUAL_BF16)
        short_residual(dp_sim_chunk(s, gi, hv), at->x);
    else if (s->acts.fault == DP_FAULT_RACE && s->runs % 3 == 2 && gi == s->ngroup - 1 &&
             hv == p->HV - 1) {
        dp_chunk *ch = dp_sim_chunk(s, gi, hv);
        memset(ch->v_new + (int64_t)(ch->n / 2) * ch->V, 0,
               sizeof(double) * (size_t)((ch->n - ch->n / 2) * ch->V));
    } else if (!drops)
        return;
    hit_group(s, gi, hv);
}

/* o of a chunk that is never written, or passes through fp16. */
static void other_output(dp_sim *s, place *at) {
    const int gi = at->at, hv = at->hv;
    const dp_group *gr = &s->group[gi];
    const int short_ = s->acts.fault == DP_FAULT_OUTPUT_FP16;
    if (!short_ && s->ctx[gr->rank].local_seq[gr->sub] * s->p->HV + hv < GRID) return;
    for (int t = 0; t < gr->c; t++)
        for (int v = 0; v < s->p->V; v++) {
            double *o = s->out.o + ((gr->t0 + t) * s->p->HV + hv) * s->p->V + v;
            *o = short_ ? dp_store(DP_FP16, *o) : NAN;
        }
    hit(s, gr->rank, hv);
}

/* Tokens of rank 1: o of the first rank's heads for o of the second one's. */
static void swap_heads(dp_sim *s, place *at) {
    const dp_problem *p = s->p;
    const dp_group *gr = &s->group[at->at];
    const int N = s->sharers, each = N ? p->HV / N : 0, hv = at->hv;
    if (N < 2 || hv >= each) return;
    for (int64_t t = gr->t0; t < gr->t0 + gr->c; t++)
        for (int v = 0; t >= p->T / N && t < 2 * p->T / N && v < p->V; v++) {
            double *a = s->out.o + (t * p->HV + hv) * p->V + v, *b = a + (int64_t)each * p->V;
            const double was = *a;
            *a = *b;
            *b = was;
        }
    hit(s, 0, hv);
    hit(s, 0, hv + each);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* States of ranks where they should be S_in are zeros when the backward computes them again. */
static void lose_states(dp_sim *s, DP_UNUSED place *at) {
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    const int HV = s->p->HV;
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < s->N * HV; i++) {
        const int r = i / HV, n = s->ctx[r].nlocal;
        if (!dp_sim_has(s, r) || n < 1 + (s->acts.fault == DP_FAULT_STATE_LATE)) continue;
        if (dp_sim_starts_here(s, r, 0)) continue;
        DP_OWN double *S = dp_doubles(KV);
        dp_sim_pass(s, 0, r, i % HV, 0, S);
        hit(s, r, i % HV);
    }
}

/* dH of rank r again, with the decays of other chunks. */
static void other_gate(dp_sim *s, int r, int hv) {
    const int first = s->first[r][0], n = s->first[r][1] - first,
              head0 = s->acts.fault == DP_FAULT_GATE_OF_HEAD0;
    DP_OWN double **own = dp_calloc((size_t)n, sizeof *own);
    for (int g = 0; g < n; g++) {
        dp_chunk *ch = dp_sim_chunk(s, first + g, hv);
        own[g] = ch->eC;
        ch->eC = dp_copy(dp_sim_chunk(s, head0 ? first + g : g, head0 ? 0 : hv)->eC, ch->K);
    }
    dp_sim_replace(&s->dH[r * s->p->HV + hv], NULL);
    dp_sim_pair(s, 1, r, hv, 0, s->chain);
    for (int g = 0; g < n; g++)
        dp_sim_replace(&dp_sim_chunk(s, first + g, hv)->eC, own[g]);
    hit(s, r, hv);
}

static void gate_of_other(dp_sim *s, DP_UNUSED place *at) {
    if (!dp_exchanges[s->merge].pairs) return;
    for (int i = 0; i < s->N * s->p->HV; i++) { /* one by one: they read each other's */
        const int r = i / s->p->HV, hv = i % s->p->HV;
        if (!dp_sim_has(s, r) || !dp_sim_gets(s, 0, r)) continue;
        if (s->acts.fault == DP_FAULT_GATE_OF_HEAD0 ? hv != 0 : s->first[r][0] != 0)
            other_gate(s, r, hv);
    }
}

static void no_boundary(const dp_chunk *ch, dp_chunk_grad *x) {
    for (int k = 0; k < ch->K; k++) {
        double z = 0;
        for (int v = 0; v < ch->V; v++)
            z += ch->eC[k] * ch->h[(int64_t)k * ch->V + v] * ch->dh[(int64_t)k * ch->V + v];
        for (int t = 0; t < ch->c; t++)
            x->dg[t * ch->K + k] -= z;
    }
}

/* q_t o (dP_tt k_t) - k_t o (dP_tt q_t) is 0. With the factors of each product rounded to tf32 it
 * is not, and dg adds it up from the end. */
static void diagonal_tf32(const dp_sim *s, int gi, int hv, const dp_chunk *ch, dp_chunk_grad *g) {
    const int c = ch->c, R = ch->R, K = ch->K, V = ch->V;
    DP_OWN double *dout = dp_doubles((int64_t)c * V), *sum = dp_doubles(K);
    dp_sim_gather_do(s, gi, hv, dout);
    for (int t = c - 1; t >= 0; t--)
        for (int j = 0; j < R; j++) {
            double d = 0;
            for (int v = 0; v < V; v++)
                d += dout[(int64_t)t * V + v] * ch->v_new[(int64_t)(t * R + j) * V + v];
            const double dP = dp_tf32((float)(ch->scale * d));
            for (int x = 0; x < K; x++) {
                const double q = ch->q[t * K + x], k = ch->k[(int64_t)(t * R + j) * K + x];
                sum[x] += q * (dP * dp_tf32((float)k)) - k * (dP * dp_tf32((float)q));
                if (j == R - 1)
                    g->dg[t * K + x] = dp_round_arith(ch->base, g->dg[t * K + x] + sum[x]);
            }
        }
}

/* Tokens t >= from take the rows of tokens t - by. */
static void stale_rows(double *x, int64_t width, int c, int from, int by) {
    for (int t = c - 1; t >= from; t--)
        memcpy(x + t * width, x + (t - by) * width, sizeof(double) * (size_t)width);
}

static int no_gate(const dp_problem *p) {
    if (p->gate != DP_GATE_LOG) return 0;
    for (int64_t i = 0; i < p->T * p->HV * dp_Kg(p); i++)
        if (p->g[i] != 0) return 0;
    return 1;
}

static void stale_accumulator(const dp_sim *s, int gi, int hv, dp_chunk_grad *g) {
    const dp_chunk *ch = dp_sim_chunk(s, gi, hv), *old = dp_sim_chunk(s, gi - 1, hv);
    DP_FREED(dp_chunk_grad_free) dp_chunk_grad x;
    DP_OWN double *dout = dp_doubles((int64_t)old->c * old->V);
    dp_sim_gather_do(s, gi - 1, hv, dout);
    dp_chunk_grad_alloc(&x, old);
    dp_chunk_grads(old, dout, &x);
    const int n = old->n < ch->n ? old->n : ch->n;
    for (int64_t i = 0; i < (int64_t)n * ch->K; i++)
        g->dk[i] = dp_round_arith(ch->base, g->dk[i] + x.dk[i]);
    for (int i = 0; i < n; i++)
        g->dbeta[i] = dp_round_arith(ch->base, g->dbeta[i] + x.dbeta[i]);
}

/* From gradients of keys that read undecayed states to those of keys and gates. */
static void undecayed_grads(const dp_sim *s, int gi, int hv, const dp_chunk *ch, dp_chunk_grad *g) {
    const int64_t first = s->group[gi].t0;
    for (int i = 0; i < ch->n; i++)
        for (int x = 0; x < ch->K; x++) {
            const int64_t at = (int64_t)i * ch->K + x;
            const double e = undecay(s, (first + i / ch->R) * s->p->HV + hv, x);
            double *dg = &g->dg[(int64_t)(i / ch->R) * ch->K + x];
            g->dk[at] = dp_round_arith(ch->base, g->dk[at] + e * g->derasing[at]);
            *dg = dp_round_arith(ch->base, *dg - ch->erasing[at] * g->derasing[at]);
        }
}

/* 1: some beta is 0. */
static int divided(const dp_chunk *ch, double *dbeta) {
    int any = 0;
    for (int i = 0; i < ch->n; i++)
        if (ch->beta[i] == 0) {
            any = 1;
            dbeta[i] = 0;
        }
    return any;
}

static void other_grads(dp_sim *s, place *at) {
    const int gi = at->at, hv = at->hv;
    dp_chunk_grad *g = at->grad;
    const dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    const int half = DP_CHUNK / 2, quarter = DP_CHUNK / 4;
    switch (s->acts.fault) {
    case DP_FAULT_DG_NO_BOUNDARY: no_boundary(ch, g); break;
    case DP_FAULT_DIAGONAL_TF32: diagonal_tf32(s, gi, hv, ch, g); break;
    case DP_FAULT_READ_UNDECAYED:
        if (!ch->erasing || !dp_has_beta(s->p)) return;
        undecayed_grads(s, gi, hv, ch, g);
        break;
    case DP_FAULT_STALE_LANES:
        if (ch->c <= DP_CHUNK - quarter) return;
        stale_rows(g->dbeta, ch->R, ch->c, DP_CHUNK - quarter, quarter);
        stale_rows(g->dg, ch->K, ch->c, DP_CHUNK - quarter, quarter);
        break;
    case DP_FAULT_HALF_CHUNK:
        if (ch->c <= half) return;
        stale_rows(g->dk, (int64_t)ch->R * ch->K, ch->c, half, half);
        stale_rows(g->dbeta, ch->R, ch->c, half, half);
        break;
    case DP_FAULT_STALE_ACCUMULATOR:
        if (gi == 0 || !no_gate(s->p)) return;
        stale_accumulator(s, gi, hv, g);
        break;
    case DP_FAULT_DBETA_DIVIDED:
        if (!divided(ch, g->dbeta)) return;
        break;
    default: return;
    }
    hit_group(s, gi, hv);
}

static void round_norms(dp_sim *s, DP_UNUSED place *at) {
    const dp_problem *p = s->p;
    if (!p->l2norm || dp_by_rows(p) || s->base == DP_BASE_BF16) return;
    const int64_t nq = p->T * p->H * p->K, nk = nq * dp_rows(p);
    dp_store_all(DP_BF16, s->norm_q = dp_copy(s->q, nq), nq);
    dp_store_all(DP_BF16, s->norm_k = dp_copy(s->k, nk), nk);
    hit_all(s);
}

static void leave_unerased(dp_sim *s, place *at) {
    const dp_problem *p = s->p;
    const int rank = at->at;
    double *dk = at->x;
    const int64_t first = s->ctx[rank].a * p->HV;
    if (!dp_by_gates(p)) return;
    for (int64_t i = 0; i < s->ctx[rank].L * p->HV; i++)
        for (int x = 0; x < p->K; x++) {
            double *y = dk + (i / p->HV * p->H + i % p->HV / dp_G(p)) * p->K + x;
            *y = dp_round_arith(s->base, *y + (1 - p->erase[(first + i) * p->K + x]) *
                                                  s->derasing[(first + i) * p->K + x]);
        }
    hit_rank(s, rank);
}

/* The derivative of a gate is 0 in fp32 where the gradient of its log is not and that of the raw
 * gate is. */
static void saturate(dp_sim *s, place *at) {
    const dp_problem *p = s->p;
    const int rank = at->at;
    dp_result *part = at->part;
    const int Kg = dp_Kg(p);
    if (p->gate == DP_GATE_LOG) return;
    for (int64_t i = s->ctx[rank].a * p->HV * Kg; i < s->ctx[rank].b * p->HV * Kg; i++) {
        const int hv = (int)(i / Kg % p->HV);
        if (s->dg[i] == 0 || fabs(part->dg[i]) >= 0x1p-126) continue;
        part->dg[i] = NAN;
        if (part->dA_log) part->dA_log[hv] = NAN;
        hit(s, rank, hv);
    }
}

/* Parameters' gradients of the first rank alone. */
static void keep_partial(dp_sim *s, place *at) {
    const int64_t n = dp_sim_numbers_of_sums(s);
    memset(at->x + n, 0, sizeof *at->x * (size_t)((s->N - 1) * n));
    for (int r = 1; r < s->N; r++)
        hit_rank(s, r);
}

static void other_order(dp_sim *s, DP_UNUSED place *at) { hit_all(s); }

/* ---- halos ----------------------------------------------------------------------------------- */

static void first_halo(dp_sim *s, DP_UNUSED place *at) {
    const dp_context *c = s->halos ? s->halos->ctx : NULL;
    for (int r = 2; c && r < s->N; r++) {
        if (s->ctx[1].is_first || s->ctx[r].is_first) continue;
        for (int i = 0; i < DP_NINPUTS; i++) {
            const int64_t n = dp_input_width(s->p, i) * dp_lag(s->p);
            double *x = s->halos->p.in[i];
            if (dp_in_halo(s->p, i)) memcpy(x + c[r].a * n, x + c[1].a * n, sizeof *x * (size_t)n);
        }
        hit_rank(s, r);
    }
}

/* A rank's tokens, one sequence. */
static void packed_halo(dp_sim *s, DP_UNUSED place *at) {
    for (int r = 0, k = 0; s->halos && r < s->N; r++) {
        const dp_context *c = &s->halos->ctx[r];
        for (int i = 1; i < c->nlocal; i++)
            s->halos->p.cu[k + i] = c->a;
        k += c->nlocal;
        if (c->nlocal > 1) hit_rank(s, r);
    }
}

static void lose_halo_grad(dp_sim *s, place *at) {
    int64_t n = 0;
    for (int i = 0; i < DP_NINPUTS; i++)
        n += dp_in_halo(s->p, i) ? dp_input_width(s->p, i) * dp_lag(s->p) : 0;
    memset(at->x, 0, sizeof *at->x * (size_t)n);
    hit_rank(s, at->at);
}

/* The first W-1 tokens of a sequence that starts inside a rank as if the sequence before went on.
 */
static void halo_leak(const dp_conv *c, int N, dp_base pol, dp_conv_result *r) {
    int64_t whole[2] = {0, c->T};
    dp_conv one = *c;
    DP_FREED(dp_conv_result_free) dp_conv_result leak;
    one.cu = whole;
    one.Nseq = 1;
    one.dy = NULL;
    dp_conv_result_alloc(&leak, &one);
    if (!dp_conv_ranks(&one, N, pol, &leak, NULL))
        for (int i = 0; i < c->Nseq; i++)
            for (int64_t t = c->cu[i];
                 c->cu[i] % (c->T / N) && t < c->cu[i + 1] && t < c->cu[i] + c->W - 1; t++)
                memcpy(r->y + t * c->D, leak.y + t * c->D, sizeof(double) * (size_t)c->D);
}

/* dx of the tokens of rank k from the rank's own dy alone: [T][D]. */
static double *own_gradient(const dp_conv *c, int N, dp_base pol, int k) {
    const int64_t n = c->T / N * c->D;
    dp_conv one = *c;
    DP_FREED(dp_conv_result_free) dp_conv_result own;
    one.dy = dp_doubles(c->T * c->D);
    memcpy(one.dy + k * n, c->dy + k * n, sizeof(double) * (size_t)n);
    dp_conv_result_alloc(&own, &one);
    double *dx = dp_conv_ranks(&one, N, pol, &own, NULL) ? NULL : dp_copy(own.dx, c->T * c->D);
    free(one.dy);
    return dx;
}

/* The gradient that a rank's last W-1 tokens get from later ranks: nothing, or that of a token
 * W-1-L before. */
static void spoil_halo(int lost, const dp_conv *c, int N, dp_base pol, dp_conv_result *r) {
    const int64_t L = c->T / N, n = L < c->W - 1 ? L : c->W - 1, D = c->D;
    const int64_t late = lost ? n : c->W - 1 - L;
    for (int k = 0; k < N - 1 && c->dy && late > 0; k++) {
        DP_OWN double *own = own_gradient(c, N, pol, k);
        double *dx = r->dx + (k + 1) * L * D;
        for (int64_t i = -1; own && i >= -n * D; i--) {
            const double *from = own + (k + 1) * L * D, *right = dx + i - late * D;
            dx[i] = from[i] + (i - late * D >= -n * D ? *right - from[i - late * D] : 0);
        }
    }
}

/* Marks every row of the input that is no longer as it was. */
static void hit_rows(dp_sim *s, int input, const double *was, const double *is) {
    const dp_problem *p = s->p;
    const int heads = dp_qkv_heads(p, input), width = dp_qkv_width(p, input), each = p->HV / heads;
    for (int64_t r = 0; was && r < p->T * heads; r++)
        if (memcmp(was + r * width, is + r * width, sizeof(double) * (size_t)width))
            for (int i = 0; i < each; i++)
                hit(s, (int)(r / heads / (p->T / s->N)), (int)(r % heads) * each + i);
}

static void other_halo(dp_sim *s, place *at) {
    const dp_conv *c = at->conv;
    dp_conv_result *r = at->convolved;
    const int64_t n = c->T * c->D;
    DP_OWN double *y = dp_copy(r->y, n), *dx = r->dx ? dp_copy(r->dx, n) : NULL;
    if (s->acts.fault == DP_FAULT_HALO_LEAK)
        halo_leak(c, s->N, s->base, r);
    else
        spoil_halo(s->acts.fault == DP_FAULT_HALO_GRAD_LOST, c, s->N, s->base, r);
    if (!s->p) return;
    hit_rows(s, at->at, y, r->y);
    hit_rows(s, at->at, dx, r->dx);
}

/* ---- who acts where -------------------------------------------------------------------------- */

#define EACH_PAIR(NAME, F, BACK, GETS)                                         \
    static void NAME(dp_sim *s, place *at) {                                   \
        (void)at;                                                              \
        if (dp_exchanges[s->merge].pairs || GETS) each_pair(s, BACK, GETS, F); \
    }
EACH_PAIR(chain_fwd, other_chain, 0, 0)
EACH_PAIR(chain_bwd, other_chain, 1, 0)
EACH_PAIR(first_sub, other_sub, 0, 0)
EACH_PAIR(last_sub, other_sub, 1, 0)
EACH_PAIR(state_in, other_state, 0, 1)

#define F(NAME) DP_FAULT_##NAME
static const struct {
    int where;
    dp_sim_after_fn *f;
    dp_fault of[8];
} ACTS[] = {
    {DP_AFTER_OPENING, zigzag_inputs, {F(ZIGZAG)}},
    {DP_AFTER_RUN, zigzag_results, {F(ZIGZAG)}},
    {DP_AFTER_OPENING, norm_keys, {F(KEYS_NORMED)}},
    {DP_AFTER_OPENING, divide_cu, {F(CU_DIVIDED)}},
    {DP_STAGE_GATE, mean_erase, {F(ERASE_MEAN)}},
    {DP_AFTER_HALOS, first_halo, {F(BEFORE_FIRST)}},
    {DP_AFTER_HALOS, packed_halo, {F(BEFORE_PACKED)}},
    {DP_AFTER_HALO_BWD, lose_halo_grad, {F(BEFORE_GRAD_LOST)}},
    {DP_STAGE_GATE, read_decayed, {F(READ_DECAYED)}},
    {DP_STAGE_GATE, read_undecayed, {F(READ_UNDECAYED)}},
    {DP_AFTER_GRADIENTS,
     other_grads,
     {F(READ_UNDECAYED), F(DG_NO_BOUNDARY), F(DIAGONAL_TF32), F(STALE_LANES), F(HALF_CHUNK),
      F(STALE_ACCUMULATOR), F(DBETA_DIVIDED)}},
    {DP_STAGE_GATE, gate_bf16, {F(GATE_BF16)}},
    {DP_STAGE_GATE, beta_bf16, {F(BETA_BF16)}},
    {DP_STAGE_GATE, other_decay, {F(EXP2_GATE), F(LINEAR_GATE), F(DECAY_BF16)}},
    {DP_STAGE_INTRA, factored, {F(FACTORED_EXP), F(FACTORED_EXP_CLAMPED), F(ANCHOR_LEAK)}},
    {DP_STAGE_INTRA, mistake_turns, {F(TURNS_MISTAKEN)}},
    {DP_STAGE_INTRA, lost_scores, {F(SHORT_NAN), F(BLOCKS_NAN)}},
    {DP_AFTER_OPENING, by_inverse, {F(NEUMANN_INVERSE), F(DOUBLING_INVERSE)}},
    {DP_STAGE_SOLVE, invert_by_series, {F(NEUMANN_INVERSE), F(DOUBLING_INVERSE)}},
    {DP_STAGE_WY, wrong_values, {F(OFFSET_WRAPS), F(STRIDE_IGNORED)}},
    {DP_STAGE_WY, other_wy, {F(LAST_INDEX), F(ERASE_WRITES), F(TAIL_UNMASKED)}},
    {DP_STAGE_PRE_FWD, chain_fwd, {F(CHAIN_BF16), F(CHAIN_TF32RZ)}},
    {DP_STAGE_PRE_BWD, chain_bwd, {F(CHAIN_BF16), F(CHAIN_TF32RZ)}},
    {DP_STAGE_PRE_FWD, first_sub, {F(FWD_FIRST_SUBSEQ)}},
    {DP_AFTER_SENDING,
     sends,
     {F(PAYLOAD_TRUNCATED), F(PAYLOAD_LOW_LOST), F(PAYLOAD_TWICE), F(RANK_LARGEST)}},
    {DP_AFTER_MERGING, merge_short, {F(MERGE_TF32RZ)}},
    {DP_STAGE_MERGE_FWD,
     state_in,
     {F(MERGE_HALF_V), F(CONTEXT_LOST), F(MERGE_SCALED), F(STATE_TRANSPOSED)}},
    {DP_STAGE_MERGE_FWD,
     wrong_merge_fwd,
     {F(MERGE_NEAREST_FIRST), F(PARTS_BY_RANK), F(PART_FIRST_M), F(SCAN_MISSES_LEVEL),
      F(SCAN_SWAPPED), F(SERIAL_LATE)}},
    {DP_STAGE_MERGE_BWD,
     wrong_merge_bwd,
     {F(MERGE_NEAREST_FIRST), F(PARTS_BY_RANK), F(PART_FIRST_M), F(SCAN_MISSES_LEVEL),
      F(SCAN_SWAPPED), F(SERIAL_LATE)}},
    {DP_AFTER_CHUNK, decay_before_use, {F(DECAY_BEFORE_USE)}},
    {DP_AFTER_CHUNK,
     other_pass,
     {F(STATE_BF16), F(STATE_FP16), F(RESIDUAL_BF16), F(DROP_CHANNEL_SUM), F(DROP_HORIZON),
      F(RACE)}},
    {DP_STAGE_OUTPUT, other_output, {F(GRID_AXIS), F(OUTPUT_FP16)}},
    {DP_STAGE_OUTPUT, swap_heads, {F(HEADS_SWAPPED)}},
    {DP_STAGE_RECOMPUTE, lose_states, {F(STATE_LOST), F(STATE_LATE)}},
    {DP_STAGE_PRE_BWD, last_sub, {F(BWD_LAST_SUBSEQ)}},
    {DP_STAGE_PRE_BWD, gate_of_other, {F(GATE_OF_HEAD0), F(GATE_NO_OFFSET)}},
    {DP_AFTER_NORMS, round_norms, {F(L2_ROUNDED)}},
    {DP_AFTER_WRITES, leave_unerased, {F(DK_UNERASED)}},
    {DP_AFTER_ACTIVATIONS, saturate, {F(SATURATED_NAN)}},
    {DP_AFTER_SUMS, keep_partial, {F(GATE_GRAD_PARTIAL)}},
    {DP_AFTER_CONV, other_halo, {F(HALO_LEAK), F(HALO_GRAD_LOST), F(HALO_GRAD_SHIFTED)}},
    {DP_AFTER_GRADIENTS, other_order, {F(ORDER_BY_RUN)}},
    {DP_AFTER_SUMS, other_order, {F(ORDER_BY_RUN)}},
};
#undef F

static dp_sim_acts acts_of(dp_fault fault) {
    dp_sim_acts a = {.fault = fault, .after[DP_AFTER_BEGINNING] = fault ? begins : NULL};
    for (size_t i = 0; i < sizeof ACTS / sizeof *ACTS; i++)
        for (int k = 0; k < 8 && ACTS[i].of[k]; k++)
            if (ACTS[i].of[k] == fault) a.after[ACTS[i].where] = ACTS[i].f;
    return a;
}

void dp_sim_convolved(dp_fault fault, const dp_problem *p, dp_base base, int N, unsigned char *hit,
                      dp_sim_place place) {
    dp_sim s = {.p = p, .base = base, .N = N, .acts = acts_of(fault), .hit = hit};
    dp_sim_after(&s, DP_AFTER_CONV, place);
}

dp_status dp_sim_new_chunks(dp_sim *s, const dp_problem *p, dp_base base, int chunk, int N,
                            dp_fault fault, dp_err *e) {
    const dp_sim_acts acts = acts_of(fault);
    const dp_sim_options o = {.acts = &acts};
    dp_design design = dp_design_of(base);
    design.chunk = chunk;
    return dp_sim_open(s, p, &design, N, &o, e);
}

dp_status dp_sim_new(dp_sim *s, const dp_problem *p, dp_base base, int N, dp_fault fault,
                     dp_err *e) {
    return dp_sim_new_chunks(s, p, base, DP_CHUNK, N, fault, e);
}
