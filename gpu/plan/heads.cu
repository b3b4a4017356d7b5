/* gpu/plan/heads.cu - a plan of the exchange of heads: the plan of one rank for the heads that this
 * rank has. It has the moved tensors, the owners of their rows, and the place of all of that. */
#include "plan/heads.cuh"
#include "plan/parts.cuh"
#include "plan/paths.cuh"
#include <stdlib.h>

const char *heads_refuse(const dpg_problem *p, const dpg_options *o, int N) {
    const char *no = dp_exchange_refuses(DP_EXCHANGE_HEADS, N, p->HV);
    if (no) return no + strlen("heads: ");
    if (p->own.by_part && p->H % N)
        return "of a grid, the query heads do not divide among the ranks, whose sums differ";
    if (p->T > INT32_MAX - N) return "more than 2^31 rows";
    return o->payload > DP_PAYLOAD_FP32 ? "sends tokens, as they are" : NULL;
}

/* ---- what moves ------------------------------------------------------------------------------ */

/* Value heads of a rank are consecutive, HV / N of them, and so are those of a query head, HV / H.
 * The ends of both lie at multiples of their greatest divisor, so that so many consecutive ones
 * share a rank and a query head. A rank's plan has a query head for each such run. */
static int heads_together(const dpg_problem *p, int N) {
    int a = p->HV / N, b = p->HV / p->H;
    while (b) {
        const int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* All but what every rank has as a whole. Sums of copies are made in fp32. */
static void list_tensors(Heads *h, const dpg_problem *p) {
    for (Tensor x : tensors_of(p)) {
        if (x.rows == ONE_ROW) continue;
        if (x.when == BACKWARD_OUT && x.by_query && h->copies > 1) x.type = DPG_F32;
        h->tensor.push_back({x, 0});
    }
}

/* ---- who owns its rows ----------------------------------------------------------------------- */

static std::vector<int> tokens_of(const Parts &parts, int rank) {
    std::vector<int> rows;
    for (int i = 0; i < parts.n(); i++)
        for (int64_t t = parts.cut(i); parts.owner(i) == rank && t < parts.cut(i + 1); t++)
            rows.push_back((int)t);
    return rows;
}

/* Sequences of the rank that has their first token, or the last; those without tokens are
 * nobody's. */
static std::vector<int> sequences_of(const Parts &parts, int rank, RowKind kind) {
    const int64_t *cu = parts.p->cu;
    std::vector<int> rows;
    for (int s = 0; s < parts.p->Nseq; s++) {
        if (cu[s] == cu[s + 1]) continue;
        const int64_t token = kind == STARTS ? cu[s] : cu[s + 1] - 1;
        if (parts.owner(parts.at(token)) == rank) rows.push_back(s);
    }
    return rows;
}

/* The rows of a kind behind those in `all`. */
static void list_rows_of(Heads *h, const Parts &parts, RowKind kind, std::vector<int> *all) {
    HeadRows *x = &h->rows[kind];
    const size_t first = all->size();
    x->from.push_back(0);
    for (int r = 0; r < parts.N; r++) {
        std::vector<int> rows = kind == TOKENS ? tokens_of(parts, r) : sequences_of(parts, r, kind);
        if (kind == TOKENS && r == h->rank) h->own_tokens = (int)rows.size();
        if (kind == TOKENS && rows.size() % 2) rows.push_back(-1);
        all->insert(all->end(), rows.begin(), rows.end());
        x->from.push_back((int)(all->size() - first));
    }
    x->in_order = x->from[parts.N] == (kind == TOKENS ? parts.p->T : parts.p->Nseq);
    for (size_t i = first; i < all->size(); i++)
        x->in_order &= (*all)[i] == (int)(i - first);
}

static dp_status list_rows(Heads *h, const dpg_problem *p, dp_err *e) {
    const Parts parts = {p, h->N};
    std::vector<int> all;
    size_t first[ROW_KINDS];
    for (RowKind kind : {TOKENS, STARTS, ENDS}) {
        first[kind] = all.size();
        list_rows_of(h, parts, kind, &all);
    }
    CK(e, cudaMalloc(&h->tables, all.size() * sizeof(int)));
    CK(e, cudaMemcpy(h->tables, all.data(), all.size() * sizeof(int), cudaMemcpyHostToDevice));
    for (int kind = 0; kind < ROW_KINDS; kind++)
        h->rows[kind].row = (const int *)h->tables + first[kind];
    return DP_OK;
}

/* ---- where it lies --------------------------------------------------------------------------- */

static size_t add(Heads *h, size_t bytes) {
    const size_t at = h->bytes;
    h->bytes += (bytes + 255) / 256 * 256;
    return at;
}

/* After the workspace of `one` come its tensors, then one sent and one received message. They hold
 * all rows of this rank's heads, or this rank's rows of all heads. */
static void layout(Heads *h, const dpg_problem *p, const dpg_options *o) {
    size_t most = 0;
    add(h, dpg_workspace_bytes(h->one));
    for (HeadTensor &x : h->tensor) {
        if (of_backward(x.when) && !o->backward) continue;
        const HeadRows &rows = h->rows[x.rows];
        const size_t run = (size_t)run_bytes(h, x), all = rows.from[h->N] * run,
                     own = (rows.from[h->rank + 1] - rows.from[h->rank]) * run * h->N;
        x.at = add(h, run * (x.rows == TOKENS ? p->T : p->Nseq));
        most = all > most ? all : most;
        most = own > most ? own : most;
    }
    h->sums = add(h, sizeof(float) * h->one->d.HV * (1 + p->Kg));
    h->all_sums = add(h, sizeof(float) * p->HV * (1 + p->Kg));
    h->send = add(h, most);
    h->recv = add(h, most);
}

static dp_status fill(dpg_plan *pl, const dpg_problem *p, const dpg_options *o, dp_err *e) {
    Heads *h = pl->heads;
    OneRank mine(p);
    dpg_options alone = *o;
    mine.p.HV = p->HV / h->N;
    mine.p.H = mine.p.HV / heads_together(p, h->N);
    mine.p.dA_dtype = mine.p.dbias_dtype = DPG_F32;
    alone.exchange = DP_EXCHANGE_ALLGATHER;
    h->copies = h->N * mine.p.H / p->H;
    TRY(create_alone(&h->one, &mine.p, &alone, p->HV, h->copies > 1, e));
    list_tensors(h, p);
    TRY(list_rows(h, p, e));
    layout(h, p, o);
    pl->d = h->one->d;
    pl->d.L = h->own_tokens;
    pl->d.dA_type = p->dA_dtype;
    pl->d.dbias_type = p->dbias_dtype;
    return DP_OK;
}

dp_status heads_create(dpg_plan **out, const dpg_problem *p, const dpg_options *o, int rank, int N,
                       dp_err *e) {
    dpg_plan *pl = (dpg_plan *)calloc(1, sizeof *pl);
    if (!pl) return dpg_fail(e, DP_ENOMEM, "%s:%d: plan", __FILE__, __LINE__);
    pl->opt = *o;
    pl->rank = rank;
    pl->N = N;
    pl->heads = new Heads();
    pl->heads->rank = rank;
    pl->heads->N = N;
    const dp_status st = fill(pl, p, o, e);
    if (st == DP_OK)
        *out = pl;
    else
        dpg_plan_destroy(pl);
    return st;
}

void heads_destroy(Heads *h) {
    if (!h) return;
    dpg_plan_destroy(h->one);
    cudaFree(h->tables);
    delete h;
}

size_t heads_kept_bytes(const Heads *h) {
    size_t sum = dpg_kept_bytes(h->one);
    for (const HeadTensor &x : h->tensor)
        if (saves_all(h->one) && x.when == FORWARD_IN && x.rows == TOKENS)
            sum += (size_t)(h->one->d.L * run_bytes(h, x));
    return sum;
}
