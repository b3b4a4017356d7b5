/* gpu/plan/heads.cu - a plan of the exchange of heads: the plan of one rank for the heads that this
 * rank has, which tensors move, who owns their rows, and where all of that lies. */
#include "plan/heads.cuh"
#include "plan/parts.cuh"
#include "plan/paths.cuh"
#include <stdlib.h>

const char *heads_refuse(const dpg_problem *p, const dpg_options *o, int N) {
    const char *no = dp_exchange_refuses(DP_EXCHANGE_HEADS, N, p->HV);
    if (no) return no + strlen("heads: ");
    if (p->own.by_part) return "of a grid, whose sums are those of its parts";
    if (p->T > INT32_MAX - N) return "more than 2^31 rows";
    return o->payload > DP_PAYLOAD_FP32 ? "sends tokens, as they are" : NULL;
}

/* ---- what moves ------------------------------------------------------------------------------ */

/* Value heads of a rank stay together, HV / N in a row, and those of a query head do, HV / H: the
 * ends of both lie at multiples of their greatest divisor, so that so many in a row share a rank
 * and a query head. A rank's plan has a query head for each such run. */
static int heads_together(const dpg_problem *p, int N) {
    int a = p->HV / N, b = p->HV / p->H;
    while (b) {
        const int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

#define IN_FORWARD(name) offsetof(dpg_tensors, name)
#define IN_BACKWARD(name) offsetof(dpg_grads, name)

static void list_tensors(Heads *h, const dpg_problem *p) {
    const int K = p->K, V = p->V, gates = p->model == DP_GDN2, factors = p->model == DP_DPLR;
    const int beta = gates || factors || !token_erases(p->model) ? 0 : p->R;
    const int keys = p->R * K, values = p->R * V, state = K * V;
    const dpg_dtype in = p->dtype, g = p->gdtype, dd = p->ddtype, dg = p->dgdtype,
                    dqk = h->copies > 1 ? DPG_F32 : dd;
    h->tensor = {{FORWARD_IN, TOKENS, 1, K, in, IN_FORWARD(q)},
                 {FORWARD_IN, TOKENS, 1, keys, in, IN_FORWARD(k)},
                 {FORWARD_IN, TOKENS, 0, values, in, IN_FORWARD(v)},
                 {FORWARD_IN, TOKENS, 0, p->Kg, g, IN_FORWARD(g)},
                 {FORWARD_IN, TOKENS, 0, beta, g, IN_FORWARD(beta)},
                 {FORWARD_IN, TOKENS, 0, gates ? K : 0, in, IN_FORWARD(erase)},
                 {FORWARD_IN, TOKENS, 0, gates ? V : 0, in, IN_FORWARD(write)},
                 {FORWARD_IN, TOKENS, 0, factors ? K : 0, in, IN_FORWARD(lr_a)},
                 {FORWARD_IN, TOKENS, 1, factors ? K : 0, in, IN_FORWARD(lr_b)},
                 {FORWARD_IN, STARTS, 0, state, DPG_F32, IN_FORWARD(s0)},
                 {FORWARD_OUT, TOKENS, 0, V, p->odtype, IN_FORWARD(o)},
                 {FORWARD_OUT, ENDS, 0, state, DPG_F32, IN_FORWARD(final_state)},
                 {BACKWARD_IN, TOKENS, 0, V, dd, IN_BACKWARD(dout)},
                 {BACKWARD_IN, ENDS, 0, state, DPG_F32, IN_BACKWARD(dfinal_state)},
                 {BACKWARD_OUT, TOKENS, 1, K, dqk, IN_BACKWARD(dq)},
                 {BACKWARD_OUT, TOKENS, 1, keys, dqk, IN_BACKWARD(dk)},
                 {BACKWARD_OUT, TOKENS, 0, values, dd, IN_BACKWARD(dv)},
                 {BACKWARD_OUT, TOKENS, 0, p->Kg, dg, IN_BACKWARD(dg)},
                 {BACKWARD_OUT, TOKENS, 0, beta, dg, IN_BACKWARD(dbeta)},
                 {BACKWARD_OUT, TOKENS, 0, gates ? K : 0, dd, IN_BACKWARD(derase)},
                 {BACKWARD_OUT, TOKENS, 0, gates ? V : 0, dd, IN_BACKWARD(dwrite)},
                 {BACKWARD_OUT, TOKENS, 0, factors ? K : 0, dd, IN_BACKWARD(dlr_a)},
                 {BACKWARD_OUT, TOKENS, 1, factors ? K : 0, dqk, IN_BACKWARD(dlr_b)},
                 {BACKWARD_OUT, STARTS, 0, state, DPG_F32, IN_BACKWARD(ds0)}};
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

/* Behind the workspace of `one` what it works on, then one message that goes and one that comes: of
 * all rows of this rank's heads, or of this rank's rows of all heads. */
static void layout(Heads *h, const dpg_problem *p, const dpg_options *o) {
    size_t most = 0;
    add(h, dpg_workspace_bytes(h->one));
    for (HeadTensor &x : h->tensor) {
        if (x.when >= BACKWARD_IN && !o->backward) continue;
        const HeadRows &rows = h->rows[x.rows];
        const size_t run = (size_t)run_bytes(h, x), all = rows.from[h->N] * run,
                     own = (rows.from[h->rank + 1] - rows.from[h->rank]) * run * h->N;
        x.at = add(h, run * (x.rows == TOKENS ? p->T : p->Nseq));
        most = all > most ? all : most;
        most = own > most ? own : most;
    }
    h->sums = add(h, sizeof(float) * h->one->d.HV * (1 + p->Kg));
    h->send = add(h, most);
    h->recv = add(h, most);
}

static dp_status fill(dpg_plan *pl, const dpg_problem *p, const dpg_options *o, dp_err *e) {
    Heads *h = pl->heads;
    dpg_problem mine = *p;
    dpg_options alone = *o;
    mine.HV = p->HV / h->N;
    mine.H = mine.HV / heads_together(p, h->N);
    mine.own = {};
    alone.exchange = DP_EXCHANGE_ALLGATHER;
    h->copies = h->N * mine.H / p->H;
    TRY(create_alone(&h->one, &mine, &alone, p->HV, h->copies > 1, e));
    list_tensors(h, p);
    TRY(list_rows(h, p, e));
    layout(h, p, o);
    pl->d = h->one->d;
    pl->d.L = h->own_tokens;
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
