/* The search for the cheapest policy that meets a need (precision.h). */
#include "precision.h"
#include "harness/bound/error_bound.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- cost ------------------------------------------------------------------------------------ */

/* Flops of all chunks, and numbers written in the stage's storage format (short) or in its
 * accumulator format (wide). A product of [m,k] by [k,n] is
 * 2 m k n; pair terms fill half of their square. */
typedef struct {
    double flops, shorts, wides;
} volume;

/* Factors of the chains of all ranks. */
static int chain_factors(const dp_sim *s, int backward) {
    int n = 0;
    for (int r = 0; r < s->N; r++) {
        const dp_context *c = &s->ctx[r];
        if (!c->is_last) n += s->first[r][c->nlocal] - s->first[r][c->nlocal - 1];
        if (!c->is_first && backward) n += s->first[r][1] - s->first[r][0];
    }
    return n;
}

/* Adds chunk g of one head. */
static void add_chunk(const dp_sim *s, int stage, int g, volume *v) {
    const dp_group *gr = &s->group[g];
    const dp_context *ctx = &s->ctx[gr->rank];
    const double K = s->p->K, V = s->p->V, Kg = dp_Kg(s->p), c = gr->c, n = c * dp_rows(s->p),
                 pre_f = !ctx->is_last && gr->sub == ctx->nlocal - 1,
                 pre_b = !ctx->is_first && gr->sub == 0;
    const int inverse = s->by_inverse;
    switch (stage) {
#define ROW(ID, NAME, SENDS, JUDGED, FLOPS, SHORTS, WIDES) \
    case DP_STAGE_##ID:                                    \
        v->flops += FLOPS;                                 \
        v->shorts += SHORTS;                               \
        v->wides += WIDES;                                 \
        break;
#include "ref/chunk/stages.inc"
    default: break;
    }
}

/* Exchanges of a stage, and its work once a rank, outside the chunks. */
static void add_ranks(const dp_sim *s, int stage, int backward, volume *v) {
    const dp_problem *p = s->p;
    const double K = p->K, V = p->V, R = p->R, HV = p->HV, T = (double)p->T, Kg = dp_Kg(p);
    if (stage == DP_STAGE_GATE) {
        v->wides = T * HV * (Kg + R);
        v->shorts = p->l2norm ? T * p->H * K * (1 + R) : 0;
    }
    if (stage == DP_STAGE_GATE_BWD) v->shorts = T * (p->H * K * (1 + R) + HV * (Kg + R));
    if (stage == DP_STAGE_PRE_FWD || stage == DP_STAGE_PRE_BWD) v->wides = (s->N - 1) * HV * K * V;
    if (stage == DP_STAGE_MERGE_FWD || stage == DP_STAGE_MERGE_BWD)
        for (int r = 0; r < s->N; r++) {
            const int far =
                stage == DP_STAGE_MERGE_FWD ? s->ctx[r].pre_num_ranks : s->ctx[r].post_num_ranks;
            v->flops += far > 0 ? 2 * K * K * V * HV * (far - 1) : 0;
            v->wides += far > 0 ? K * V * HV : 0;
        }
    if (stage == DP_NSTAGES) {
        v->flops = 2 * K * K * K * HV * chain_factors(s, backward);
        v->wides = K * K * HV * (s->N - 1) * (backward ? 2 : 1);
    }
}

static volume volume_of(const dp_sim *s, int stage, int backward) {
    const double HV = s->p->HV;
    volume v = {0};
    for (int g = 0; g < s->ngroup; g++)
        add_chunk(s, stage, g, &v);
    v.flops *= HV;
    v.shorts *= HV;
    v.wides *= HV;
    add_ranks(s, stage, backward, &v);
    return v;
}

static dp_cost cost_of(const volume *v, int chain, int format) {
    const double shorts = chain                    ? 4
                          : format == DP_BASE_BF16 ? 2
                          : format == DP_BASE_FP32 ? 4
                                                   : 8,
                 wides = format == (chain ? (int)DP_FP64 : (int)DP_BASE_FP64) ? 8 : 4;
    const dp_format f = chain                    ? (dp_format)format
                        : format == DP_BASE_BF16 ? DP_BF16
                        : format == DP_BASE_FP32 ? DP_FP32
                                                 : DP_FP64;
    dp_cost c = {.flops = v->flops,
                 .bytes =
                     2 * (v->shorts * shorts + v->wides * (chain && dp_formats[format].bytes < 4
                                                               ? dp_formats[format].bytes
                                                               : wides))};
    c.seconds = c.flops / dp_formats[f].rate + c.bytes / 4.8e12;
    return c;
}

/* ---- asking one policy ----------------------------------------------------------------------- */

typedef struct {
    dp_policy p;
    int pass;
} asked;
typedef struct {
    const dp_precision_request *rq;
    dp_precision *out;
    dp_sim ref;
    dp_error_bound bound;
    int nasked;
    asked *list;
    double error[DP_NRESULTS]; /* of the policy asked last */
} search;

static int judge(search *q, dp_sim *s) {
    const dp_problem *p = q->rq->p;
    int pass = 1;
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        const double *got = s->out.out[i], *want = q->ref.out.out[i];
        q->error[i] = NAN;
        if (!rows || !got || !want) continue;
        DP_OWN double *d = dp_doubles(rows * width);
        for (int64_t x = 0; x < rows * width; x++)
            d[x] = isfinite(want[x]) ? got[x] - want[x] : 0;
        const double norm = dp_norm_fro(rows * width, want);
        q->error[i] = norm > 0 ? dp_norm_fro(rows * width, d) / norm : dp_norm_fro(rows * width, d);
        if (!q->rq->by_verdict)
            pass &= isnan(q->rq->need[i]) || q->error[i] <= q->rq->need[i];
        else
            for (int64_t r = 0; q->bound.row[i] && r < rows && pass; r++)
                pass = dp_norm_fro(width, d + r * width) <= q->bound.row[i][r];
    }
    return pass;
}

static int ask(search *q, const dp_policy *pol) {
    const dp_precision *o = q->out;
    const dp_precision_request *rq = q->rq;
    dp_base at[DP_NSTAGES];
    dp_format chain = rq->chain_from;
    DP_FREED(dp_sim_free) dp_sim s;
    for (int i = 0; i < DP_NSTAGES; i++)
        at[i] = rq->from;
    for (int u = 0; u < o->nunit; u++) {
        const int f = o->unit[u].format[pol->level[u]];
        if (o->unit[u].stage == DP_NSTAGES)
            chain = f;
        else
            at[o->unit[u].stage] = f;
    }
    at[DP_STAGE_RECOMPUTE] = at[DP_STAGE_STATE_FWD];
    const dp_design design = dp_design_of(at[0]);
    const dp_sim_options stages = {.at = at};
    dp_must(dp_sim_open(&s, rq->p, &design, rq->N, &stages, NULL));
    dp_sim_run(&s, chain, rq->merge, rq->backward);
    const int pass = judge(q, &s);
    q->list = dp_realloc(q->list, sizeof *q->list * (size_t)(q->nasked + 1));
    q->list[q->nasked++] = (asked){*pol, pass};
    if (rq->progress) {
        fprintf(stderr, "\rpolicies tried: %d ", q->nasked);
        fflush(stderr);
    }
    return pass;
}

static int below(const search *q, const dp_policy *a, const dp_policy *b) { /* a <= b everywhere */
    for (int u = 0; u < q->out->nunit; u++)
        if (a->level[u] > b->level[u]) return 0;
    return 1;
}

/* Known answers: 1 passes, 0 fails, -1 open. */
static int known(const search *q, const dp_policy *p) {
    for (int i = 0; i < q->nasked; i++) {
        if (q->list[i].pass && below(q, &q->list[i].p, p) && below(q, p, &q->list[i].p)) return 1;
        if (!q->list[i].pass && below(q, p, &q->list[i].p)) return 0;
    }
    return -1;
}

/* ---- search ---------------------------------------------------------------------------------- */

static dp_cost cost(const dp_precision *o, const dp_policy *p) {
    dp_cost c = {0};
    for (int u = 0; u < o->nunit; u++) {
        const dp_cost *x = &o->unit[u].cost[p->level[u]];
        c.flops += x->flops;
        c.bytes += x->bytes;
        c.seconds += x->seconds;
    }
    return c;
}

static int raised(const dp_precision *o, const dp_policy *p) {
    int n = 0;
    for (int u = 0; u < o->nunit; u++)
        n += p->level[u] > 0;
    return n;
}

/* Order of the search: fewest units raised, then seconds; or seconds alone. */
static double key(const dp_precision *o, const dp_policy *p, int by_size, double top) {
    return (by_size ? raised(o, p) : 0) + cost(o, p).seconds / (2 * top);
}

typedef struct {
    double key;
    uint32_t code;
} candidate;
static int compare(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    return x->key != y->key ? (x->key > y->key) - (x->key < y->key)
                            : (x->code > y->code) - (x->code < y->code);
}

static dp_policy decode(const dp_precision *o, uint32_t code) {
    dp_policy p = {{0}};
    for (int u = 0; u < o->nunit; u++) {
        p.level[u] = (int)(code % (uint32_t)o->unit[u].nlevel);
        code /= (uint32_t)o->unit[u].nlevel;
    }
    return p;
}

static void finish(search *q, const dp_policy *p, int proven, dp_choice *out) {
    ask(q, p);
    *out = (dp_choice){.found = 1,
                       .proven = proven,
                       .raised = raised(q->out, p),
                       .policy = *p,
                       .cost = cost(q->out, p),
                       .tries = q->nasked};
    memcpy(out->error, q->error, sizeof out->error);
}

/* First a policy from which no unit can be lowered (delta debugging from all raised). Then every
 * open policy before it in that order. */
/* Seconds between a unit at its most precise level and at its cheapest. */
static double saving(const dp_unit *u) {
    return u->cost[u->nlevel - 1].seconds - u->cost[0].seconds;
}

/* Indices of the units, dearest step first. */
static void by_saving(const dp_precision *o, int *order) {
    for (int u = 0; u < o->nunit; u++)
        order[u] = u;
    for (int i = 1; i < o->nunit; i++)
        for (int j = i; j > 0; j--) {
            const int swap = order[j];
            if (saving(&o->unit[swap]) <= saving(&o->unit[order[j - 1]])) break;
            order[j] = order[j - 1];
            order[j - 1] = swap;
        }
}

/* Lowers one unit after the other for as long as a lower level passes. */
static void lower_all(search *q, dp_policy *p) {
    const dp_precision *o = q->out;
    for (int lowered = 1; lowered;) {
        int order[DP_MAX_UNITS];
        lowered = 0;
        by_saving(o, order);
        for (int i = 0; i < o->nunit; i++)
            for (int to = 0; to < p->level[order[i]]; to++) {
                dp_policy lower = *p;
                lower.level[order[i]] = to;
                const int k = known(q, &lower);
                if (k == 0 || (k < 0 && !ask(q, &lower))) continue;
                *p = lower;
                lowered = 1;
                break;
            }
    }
}

/* Puts the best policy better than p that passes into p; returns 0 when the tries ended first. */
static int prove(search *q, const candidate *c, uint32_t n, dp_policy *p) {
    for (uint32_t i = 0; i < n; i++) {
        const dp_policy x = decode(q->out, c[i].code);
        int k = known(q, &x);
        if (k < 0) {
            if (q->nasked >= q->rq->max_tries) return 0;
            k = ask(q, &x);
        }
        if (k) {
            *p = x;
            return 1;
        }
    }
    return 1;
}

static void best(search *q, int by_size, dp_choice *out) {
    dp_precision *o = q->out;
    dp_policy p = {{0}};
    uint32_t total = 1;
    for (int u = 0; u < o->nunit; u++) {
        p.level[u] = o->unit[u].nlevel - 1;
        total *= (uint32_t)o->unit[u].nlevel;
    }
    const double top = cost(o, &p).seconds;
    lower_all(q, &p);
    DP_OWN candidate *c = dp_calloc(total, sizeof *c);
    uint32_t n = 0;
    const double limit = key(o, &p, by_size, top);
    for (uint32_t code = 0; code < total; code++) {
        const dp_policy x = decode(o, code);
        const double k = key(o, &x, by_size, top);
        if (k < limit) c[n++] = (candidate){k, code};
    }
    qsort(c, n, sizeof *c, compare);
    const int proven = prove(q, c, n, &p);
    finish(q, &p, proven, out);
}

/* ---- units ----------------------------------------------------------------------------------- */

static int between(int x, int from, int to) {
    return from < to ? x >= from && x <= to : x <= from && x >= to;
}

static void add_unit(search *q, const char *name, int stage) {
    const dp_precision_request *rq = q->rq;
    dp_unit *u = &q->out->unit[q->out->nunit];
    const int chain = stage == DP_NSTAGES;
    *u = (dp_unit){.name = name, .stage = stage};
    if (chain) {
        for (int f = DP_NFORMATS - 1; f >= 0; f--) { /* from coarse to fine */
            const int from = (int)rq->chain_from, to = (int)rq->chain_to;
            if (f <= from && f >= to && (f == from || f == to || dp_formats[f].step) &&
                u->nlevel < DP_MAX_LEVELS)
                u->format[u->nlevel++] = f;
        }
    } else
        for (int b = DP_BASE_BF16; b >= DP_BASE_FP64; b--)
            if (between(b, rq->from, rq->to)) u->format[u->nlevel++] = b;
    if (u->nlevel < 2) return;
    const volume v = volume_of(&q->ref, stage, rq->backward);
    for (int i = 0; i < u->nlevel; i++)
        u->cost[i] = cost_of(&v, chain, u->format[i]);
    q->out->nunit++;
}

static void units(search *q) {
    for (int s = 0; s < dp_stages_of(q->rq->backward); s++)
        if (s != DP_STAGE_RECOMPUTE && (q->rq->N > 1 || !dp_stage_sends[s]))
            add_unit(q, dp_stage_names[s], s);
    if (q->rq->N >= 3) add_unit(q, "M chain", DP_NSTAGES);
}

dp_status dp_precision_search(const dp_precision_request *rq, dp_precision *out, dp_err *e) {
    search q = {.rq = rq, .out = out};
    *out = (dp_precision){0};
    const dp_status st = dp_sim_new(&q.ref, rq->p, DP_BASE_FP64, rq->N, DP_FAULT_NONE, e);
    if (st) return st;
    q.ref.by_inverse = 1; /* for the volumes: kernels of base bf16 store Akk */
    units(&q);
    q.ref.by_inverse = 0;
    dp_sim_run(&q.ref, DP_FP64, DP_EXCHANGE_ALLGATHER, rq->backward);
    const dp_design design = dp_design_of(rq->to);
    if (rq->by_verdict)
        dp_error_bounds_once(&q.ref, &design, rq->chain_to, rq->backward, NULL, &q.bound);
    dp_policy low = {{0}}, high = {{0}};
    for (int u = 0; u < out->nunit; u++)
        high.level[u] = out->unit[u].nlevel - 1;
    out->from_passes = ask(&q, &low);
    memcpy(out->from_error, q.error, sizeof q.error);
    out->to_passes = ask(&q, &high);
    memcpy(out->to_error, q.error, sizeof q.error);
    out->from_cost = cost(out, &low);
    out->to_cost = cost(out, &high);
    for (int u = 0; u < out->nunit; u++) {
        dp_policy one = high;
        one.level[u] = 0;
        ask(&q, &one);
        memcpy(out->unit[u].alone, q.error, sizeof q.error);
    }
    if (out->to_passes && !out->from_passes) {
        best(&q, 1, &out->smallest);
        best(&q, 0, &out->cheapest);
    }
    out->tries = q.nasked;
    if (rq->progress) fprintf(stderr, "\r\033[K");
    if (rq->by_verdict) dp_error_bound_free(&q.bound);
    free(q.list);
    dp_sim_free(&q.ref);
    return DP_OK;
}
