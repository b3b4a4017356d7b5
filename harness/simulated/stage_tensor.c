/* The table of stage tensors, their shapes, and their values in a run (stage_tensor.h). */
#include "stage_tensor.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const dp_stage_tensor_info dp_stage_tensors[DP_NSTAGE_TENSORS] = {
    [DP_GCUM] = {"gcum",
                 {"g_cumsum", "gk_cumsum"},
                 DP_PER_TOKEN,
                 0,
                 "[T,HV,K] GDN [T,HV]",
                 "sum of the log decay from the chunk's first token, natural logarithm"},
    [DP_AKK] = {"Akk", {"A_inv"}, DP_PER_TOKEN, 0, "[T,HV,(R,)64R]", "(I + B L)^-1"},
    [DP_AQK] = {"Aqk",
                {NULL},
                DP_PER_TOKEN,
                0,
                "[T,HV,64R]",
                "q against keys of its chunk, scale and decay included"},
    [DP_W] = {"w", {NULL}, DP_PER_TOKEN, 0, "[T,HV,(R,)K]", "Akk (beta exp(gcum) k)"},
    [DP_U] = {"u", {NULL}, DP_PER_TOKEN, 0, "[T,HV,(R,)V]", "Akk (beta v)"},
    [DP_KG] = {"kg", {NULL}, DP_PER_TOKEN, 0, "[T,HV,(R,)K]", "k decayed to the chunk's end"},
    [DP_QG] = {"qg", {NULL}, DP_PER_TOKEN, 0, "[T,HV,K]", "q exp(gcum), without scale"},
    [DP_M] =
        {"M", {NULL}, DP_PER_RANK, 0, "[N,HV,K,K]", "transition over the rank's last sub-sequence"},
    [DP_H] = {"H", {NULL}, DP_PER_RANK, 0, "[N,HV,K,V]", "its state from zeros"},
    [DP_S_IN] = {"S_in", {NULL}, DP_PER_RANK, 0, "[N,HV,K,V]", "state that enters the rank"},
    [DP_STATE] = {"h", {NULL}, DP_PER_CHUNK, 0, "[chunks,HV,K,V]", "state before each chunk"},
    [DP_V_NEW] = {"v_new", {NULL}, DP_PER_TOKEN, 0, "[T,HV,(R,)V]", "u - w h"},
    [DP_DV_LOCAL] = {"dv_local", {"dAv"}, DP_PER_TOKEN, 1, "[T,HV,(R,)V]", "Aqk' do"},
    [DP_DS_OUT] = {"dS_out",
                   {NULL},
                   DP_PER_RANK,
                   1,
                   "[N,HV,K,V]",
                   "gradient of the state that leaves the rank"},
    [DP_DM] = {"dM",
               {NULL},
               DP_PER_RANK,
               1,
               "[N,HV,K,K]",
               "adjoint transition over the rank's first sub-sequence"},
    [DP_DH] = {"dH", {NULL}, DP_PER_RANK, 1, "[N,HV,K,V]", "its gradient from zeros"},
    [DP_DSTATE] = {"dh",
                   {NULL},
                   DP_PER_CHUNK,
                   1,
                   "[chunks,HV,K,V]",
                   "gradient of the state after each chunk"},
    [DP_DV_NEW] = {"dv_new", {"du", "dv2"}, DP_PER_TOKEN, 1, "[T,HV,(R,)V]", "dv_local + kg dh"},
};

int dp_stage_tensor_find(const char *name) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!strcmp(name, dp_stage_tensors[i].name)) return i;
        for (int j = 0; j < 3 && dp_stage_tensors[i].alias[j]; j++)
            if (!strcmp(name, dp_stage_tensors[i].alias[j])) return i;
    }
    return -1;
}

/* ---- shapes ---------------------------------------------------------------------------------- */

int dp_stage_tensor_chunks(const dp_problem *p, int N, int rank) {
    int64_t n = 0;
    const int64_t L = p->T / N;
    for (int r = rank < 0 ? 0 : rank; r < (rank < 0 ? N : rank + 1); r++)
        for (int i = 0; i < p->Nseq; i++) {
            const int64_t a = p->cu[i] > r * L ? p->cu[i] : r * L,
                          b = p->cu[i + 1] < (r + 1) * L ? p->cu[i + 1] : (r + 1) * L;
            if (b > a) n += (b - a + DP_CHUNK - 1) / DP_CHUNK;
        }
    return (int)n;
}

/* Rows of a token and head, and their width. */
void dp_stage_tensor_token_row(const dp_problem *p, int stage, int *per, int64_t *width) {
    const int keyed = stage == DP_AKK || stage == DP_W || stage == DP_U || stage == DP_KG ||
                      stage == DP_V_NEW || stage == DP_DV_LOCAL || stage == DP_DV_NEW;
    *per = keyed ? p->R : 1;
    *width = stage == DP_GCUM                                    ? dp_Kg(p)
             : stage == DP_AKK || stage == DP_AQK                ? (int64_t)DP_CHUNK * p->R
             : stage == DP_W || stage == DP_KG || stage == DP_QG ? p->K
                                                                 : p->V;
}

static int64_t last_axis(const dp_problem *p, int stage) {
    return stage == DP_M || stage == DP_DM ? p->K : p->V;
}

int dp_stage_tensor_shape(const dp_problem *p, int N, int stage, int64_t s[5]) {
    int per, n = 0;
    int64_t width;
    if (dp_stage_tensors[stage].kind == DP_PER_TOKEN) {
        dp_stage_tensor_token_row(p, stage, &per, &width);
        s[n++] = p->T;
        s[n++] = p->HV;
        if (per > 1) s[n++] = per;
        s[n++] = width;
        return n;
    }
    s[0] = dp_stage_tensors[stage].kind == DP_PER_RANK ? N : dp_stage_tensor_chunks(p, N, -1);
    s[1] = p->HV;
    s[2] = p->K;
    s[3] = last_axis(p, stage);
    return 4;
}

int64_t dp_stage_tensor_size(const dp_problem *p, int N, int stage) {
    int64_t s[5], n = 1;
    for (int i = dp_stage_tensor_shape(p, N, stage, s); i > 0; i--)
        n *= s[i - 1];
    return n;
}

void dp_stage_tensor_rows(const dp_problem *p, int N, int stage, int64_t *rows, int64_t *width) {
    int per;
    if (dp_stage_tensors[stage].kind == DP_PER_TOKEN) {
        dp_stage_tensor_token_row(p, stage, &per, width);
        *rows = p->T * p->HV * per;
    } else {
        *width = (int64_t)p->K * last_axis(p, stage);
        *rows = dp_stage_tensor_size(p, N, stage) / *width;
    }
}

/* ---- values ---------------------------------------------------------------------------------- */

const double *dp_stage_tensor_in_chunk(const dp_chunk *ch, int stage) {
    switch (stage) {
    case DP_GCUM: return ch->gcum;
    case DP_AKK: return ch->Akk;
    case DP_AQK: return ch->Aqk;
    case DP_W: return ch->w;
    case DP_U: return ch->u;
    case DP_KG: return ch->kg;
    case DP_QG: return ch->qg;
    case DP_STATE: return ch->h;
    case DP_V_NEW: return ch->v_new;
    case DP_DV_LOCAL: return ch->dvl;
    case DP_DSTATE: return ch->dh;
    case DP_DV_NEW: return ch->dX;
    default: return NULL;
    }
}

/* Columns of row (token s of the chunk) in the chunk's own array, and how many of them count: up to
 * the block diagonal. */
void dp_stage_tensor_columns(const dp_chunk *ch, int stage, int s, int64_t width, int64_t *stride,
                             int64_t *used) {
    const int square = stage == DP_AKK || stage == DP_AQK;
    *stride = square ? ch->n : stage == DP_GCUM ? ch->K : width;
    *used = square ? (int64_t)(s + 1) * ch->R : width;
}

/* The chunk solver raises steps below its floor (exp is 0 there all the same), which gcum itself
 * must not show: rows behind one are summed again. */
static void sum_again(const dp_sim *s, int g, int hv, int t, int Kg, double *row) {
    for (int x = 0; x < Kg; x++) {
        double sum = 0, lowest = 0;
        for (int i = 0; i <= t; i++) {
            const double step = s->g[((s->group[g].t0 + i) * s->p->HV + hv) * Kg + x];
            sum = dp_round_arith(s->base, sum + step);
            lowest = fmin(lowest, step);
        }
        if (lowest < dp_gate_floor(s->base)) row[x] = sum;
    }
}

static double *per_token(const dp_sim *s, int stage) {
    const dp_problem *p = s->p;
    int per;
    int64_t width, stride, used;
    dp_stage_tensor_token_row(p, stage, &per, &width);
    double *x = dp_doubles(p->T * p->HV * per * width);
    for (int g = 0; g < s->ngroup; g++)
        for (int hv = 0; hv < p->HV; hv++) {
            dp_chunk *ch = dp_sim_chunk(s, g, hv);
            if (stage == DP_AKK) dp_chunk_inverse(ch);
            for (int t = 0; t < ch->c; t++)
                for (int j = 0; j < per; j++) {
                    dp_stage_tensor_columns(ch, stage, t, width, &stride, &used);
                    double *row = x + (((s->group[g].t0 + t) * p->HV + hv) * per + j) * width;
                    memcpy(row, dp_stage_tensor_in_chunk(ch, stage) + (t * per + j) * stride,
                           sizeof(double) * (size_t)used);
                    if (stage == DP_GCUM) sum_again(s, g, hv, t, (int)width, row);
                }
        }
    return x;
}

double *dp_stage_tensor_value(const dp_sim *s, int stage) {
    const dp_problem *p = s->p;
    int64_t rows, width;
    if (dp_stage_tensors[stage].kind == DP_PER_TOKEN) return per_token(s, stage);
    dp_stage_tensor_rows(p, s->N, stage, &rows, &width);
    double *x = dp_doubles(rows * width), **list = stage == DP_M        ? s->M
                                                   : stage == DP_H      ? s->H
                                                   : stage == DP_S_IN   ? s->S_in
                                                   : stage == DP_DS_OUT ? s->dS_out
                                                   : stage == DP_DM     ? s->dM
                                                                        : s->dH;
    for (int64_t i = 0; i < rows; i++) {
        const double *from = dp_stage_tensors[stage].kind == DP_PER_CHUNK
                                 ? dp_stage_tensor_in_chunk(&s->ch[i], stage)
                                 : list[i];
        if (from)
            memcpy(x + i * width, from, sizeof(double) * (size_t)width);
        else
            for (int64_t z = 0; z < width; z++)
                x[i * width + z] = NAN;
    }
    return x;
}
