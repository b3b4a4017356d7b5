/* A session, call by call (calls.h). */
#include "calls.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/recurrence.h"
#include "ref/vocabulary/stored.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- convolutions in the calls of a session -------------------------------------------------- */

static size_t bytes_of(int64_t n) { return sizeof(double) * (size_t)n; }

void dp_conv_states_free(dp_conv_states *s) {
    for (int i = 0; i < DP_NQKV; i++)
        free(s->of[i]);
    *s = (dp_conv_states){{NULL}};
}

int64_t dp_conv_state_size(const dp_conv *c) { return (int64_t)(c->W - 1) * c->D; }
static int64_t all_of(const dp_conv *v) { return v->Nseq * dp_conv_state_size(v); }

/* Room for y; states before the first token. */
static void conv_begin(dp_conv_calls *c, dp_conv_states *first) {
    *first = (dp_conv_states){{NULL}};
    for (int i = 0; i < DP_NQKV; i++) {
        const dp_conv *v = c->conv[i];
        if (!v) continue;
        c->y[i] = dp_doubles(v->T * v->D);
        first->of[i] = dp_doubles(all_of(v));
    }
}

/* The state of one sequence behind its token `at`, which may lie before its first. */
static void true_state(const dp_conv *v, int seq, int64_t at, double *to) {
    for (int j = 0; j < v->W - 1; j++, to += v->D) {
        const int64_t t = at - (v->W - 1) + j;
        if (t >= v->cu[seq])
            memcpy(to, v->x + t * v->D, bytes_of(v->D));
        else
            memset(to, 0, bytes_of(v->D));
    }
}

/* The true states where sequence i has tokens up to at[i]. */
static void conv_states_true(const dp_conv_calls *c, const int64_t *at, dp_conv_states *s) {
    for (int i = 0; i < DP_NQKV; i++)
        for (int q = 0; c->conv[i] && q < c->conv[i]->Nseq; q++)
            true_state(c->conv[i], q, at[q], s->of[i] + q * dp_conv_state_size(c->conv[i]));
}

static int spoil_one(const dp_conv *v, dp_fault fault, const int64_t *at, double *before) {
    const int64_t n = dp_conv_state_size(v);
    DP_OWN double *was = dp_copy(before, all_of(v));
    for (int q = 0; q < v->Nseq; q++) {
        double *own = before + q * n;
        if (fault == DP_FAULT_CONV_OF_OTHER) memcpy(own, was + (q + 1) % v->Nseq * n, bytes_of(n));
        if (fault == DP_FAULT_CONV_ZEROED) memset(own, 0, bytes_of(n));
        if (fault == DP_FAULT_CONV_LATE) true_state(v, q, at[q] - 1, own);
    }
    return n && memcmp(was, before, bytes_of(all_of(v))) != 0;
}

/* The states that a call gets instead of `before`; 1: they differ. at: as above. */
static int conv_spoil(const dp_conv_calls *c, dp_fault fault, const int64_t *at,
                      dp_conv_states *before) {
    int any = 0;
    for (int i = 0; i < DP_NQKV; i++)
        if (c->conv[i]) any |= spoil_one(c->conv[i], fault, at, before->of[i]);
    return any;
}

/* States after a call whose sequences have tokens up to at[i]. */
static void conv_look(dp_conv_calls *c, const int64_t *at, int64_t call,
                      const dp_conv_states *after) {
    int wrong = 0;
    for (int i = 0; i < DP_NQKV; i++) {
        const dp_conv *v = c->conv[i];
        if (!v || c->wrong) continue;
        if (!c->got.of[i]) c->got.of[i] = dp_doubles(all_of(v));
        if (!c->want.of[i]) c->want.of[i] = dp_doubles(all_of(v));
        if (all_of(v)) memcpy(c->got.of[i], after->of[i], bytes_of(all_of(v)));
    }
    if (!c->wrong) conv_states_true(c, at, &c->want);
    for (int i = 0; i < DP_NQKV && !c->wrong; i++)
        wrong |= c->conv[i] && all_of(c->conv[i]) &&
                 memcmp(c->got.of[i], c->want.of[i], bytes_of(all_of(c->conv[i])));
    if (wrong) c->call = call;
    c->wrong += wrong;
}

void dp_conv_states_run(const dp_conv *shape, dp_base policy, const double *x, const int64_t *cu,
                        const double *before, double **y, double **after) {
    const int Nseq = shape->Nseq, m = shape->W - 1;
    const int64_t D = shape->D, n = dp_conv_state_size(shape);
    dp_conv v = *shape;
    DP_FREED(dp_conv_result_free) dp_conv_result r;
    v.T = cu[Nseq] + (int64_t)Nseq * m;
    v.dy = NULL;
    v.x = dp_doubles(v.T * D);
    v.cu = dp_calloc((size_t)Nseq + 1, sizeof *v.cu);
    *y = dp_doubles(cu[Nseq] * D);
    *after = dp_doubles(Nseq * n);
    for (int q = 0; q < Nseq; q++) {
        v.cu[q + 1] = cu[q + 1] + (int64_t)(q + 1) * m;
        if (n) memcpy(v.x + v.cu[q] * D, before + q * n, bytes_of(n));
        memcpy(v.x + (v.cu[q] + m) * D, x + cu[q] * D, bytes_of((cu[q + 1] - cu[q]) * D));
        if (n) memcpy(*after + q * n, v.x + (v.cu[q + 1] - m) * D, bytes_of(n));
    }
    dp_conv_result_alloc(&r, &v);
    dp_must(dp_conv_ranks(&v, 1, policy, &r, NULL)); /* one rank splits anything */
    for (int q = 0; q < Nseq; q++)
        memcpy(*y + cu[q] * D, r.y + (v.cu[q] + m) * D, bytes_of((cu[q + 1] - cu[q]) * D));
    free(v.x);
    free(v.cu);
}

/* Tokens of a sequence in one call: n accepted ones from token `from` on, then m rejected ones. */
typedef struct {
    int64_t from, n, m;
} slice;

enum { NONE = -1 }; /* no slot */

/* The pool of slots (dp_state_pool). */
typedef struct {
    int Nseq;
    int64_t slots, width, state; /* entries of a head's state, of all heads of a slot */
    int64_t *own;                /* [Nseq] */
    int64_t *planned;            /* [Nseq]: who is to write what in the present call */
    int64_t *read, *write;       /* [Nseq] in the present run of it */
    int64_t *right;              /* [Nseq]: what write should be */
    int64_t drafts;              /* slots of each sequence; 0: as planned above */
    int64_t *draft, *listed;     /* [Nseq][drafts]: those it owns, those it is told in the call */
    int64_t *accepted, *passed;  /* [Nseq]: kept, and told in the call */
    int64_t ring;                /* tokens of a ring; 0: none */
    int64_t *rings;              /* [Nseq] slots */
    int64_t *held, *told;        /* [Nseq] tokens in a ring after the call, and before it */
    int64_t prefix;
    int calls;
    double *slot, *before; /* [slots] states */
    unsigned char *taken;  /* [slots] */
} pool;

typedef struct {
    const dp_problem *p;
    const dp_session *s;
    dp_fault fault;
    const dp_caller *by;
    dp_result *out;
    unsigned char *hit;
    int64_t state;       /* entries of the states of one sequence */
    double *S;           /* [Nseq][HV][K][V]; NULL: zeros, before the first call */
    int64_t *at;         /* [Nseq]: the next token */
    slice *take;         /* [Nseq]: of the present call */
    int64_t done;        /* calls */
    int after_rollback;  /* the call before rejected tokens */
    int waiting;         /* all but the first sequence wait for the end of the prefix */
    int continued;       /* the next call is the first behind it */
    pool *pool;          /* NULL: no pool */
    int64_t drafts;      /* slots of a sequence's window, of a caller that rolls back by himself */
    int64_t *parent;     /* [tokens of the call] of a tree; NULL: chains */
    int rings;           /* states are written in some calls alone */
    dp_conv_states conv; /* of the convolutions, if any */
} walk;

/* ---- inputs of a call ------------------------------------------------------------------------ */

/* Is it an input of tokens that p has? */
static int of_tokens(const dp_problem *p, int input) {
    const dp_tensor_field *f = &dp_input_fields[input];
    return f->kind == DP_OF_TOKENS && !f->backward && dp_input_of(p, input);
}

static const double *row_of(const dp_problem *p, int input, int64_t t) {
    return dp_input_of(p, input) + t * dp_input_width(p, input);
}

/* Does token t, its values negated, write what the token at `right` writes? */
static int drafts_the_same(const dp_problem *p, int64_t t, int64_t right) {
    const int64_t n = dp_input_width(p, DP_INPUT_V);
    const double *v = row_of(p, DP_INPUT_V, t), *other = row_of(p, DP_INPUT_V, right);
    int same = !memcmp(row_of(p, DP_INPUT_K, t), row_of(p, DP_INPUT_K, right),
                       sizeof(double) * (size_t)dp_input_width(p, DP_INPUT_K));
    for (int64_t z = 0; z < n && same; z++)
        same = -v[z] == other[z];
    return same;
}

/* The token that stands for a rejected one at `right`, which may lie behind the end. */
static int64_t draft(const dp_problem *p, int64_t right) {
    for (int64_t k = 0; k < p->T; k++) {
        const int64_t t = (right + p->T / 2 + k) % p->T;
        if (right >= p->T || (t != right && !drafts_the_same(p, t, right))) return t;
    }
    return right % p->T;
}

static void put_token(const dp_problem *p, dp_problem *y, int64_t at, int64_t t, int rejected) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int64_t n = dp_input_width(p, i);
        double *to = of_tokens(p, i) ? y->in[i] + at * n : NULL;
        if (!to) continue;
        memcpy(to, row_of(p, i, t), sizeof *to * (size_t)n);
        for (int64_t z = 0; z < n && rejected && i == DP_INPUT_V; z++)
            to[z] = -to[z];
    }
}

/* ---- windows as trees ------------------------------------------------------------------------
 * A rejected token and the accepted one at its place have one parent; the rejected one comes first.
 * The remaining tokens of either kind follow in a chain. */

static int64_t pairs_of(slice x) { return x.n < x.m ? x.n : x.m; }

/* The place in its window of token j of a slice: accepted ones first. */
static int64_t place(const walk *w, slice x, int64_t j) {
    const int64_t pairs = pairs_of(x), i = j < x.n ? j : j - x.n;
    if (!w->by->trees || !x.m) return j;
    return i >= pairs ? pairs + i : 2 * i + (j < x.n);
}

static int64_t parent_of(const walk *w, slice x, int64_t j) {
    const int64_t i = j < x.n ? j : j - x.n;
    if (!w->by->trees || !x.m) return j - 1;
    if (j >= x.n && i >= pairs_of(x)) return place(w, x, j - 1);
    return i ? place(w, x, i - 1) : -1;
}

static double *copy_states(const walk *w) {
    return w->S ? dp_copy(w->S, w->p->Nseq * w->state) : NULL;
}

/* A problem of sequences cu [Nseq + 1] from states s0, which become its own: zeros for the inputs
 * of tokens, those of heads copied. To be freed. */
static dp_problem problem_new(const dp_problem *p, int Nseq, int64_t *cu, double *s0) {
    dp_problem y = *p;
    y.Nseq = Nseq;
    y.cu = cu;
    y.T = cu[Nseq];
    y.dout = y.dstate = NULL;
    y.s0 = s0;
    for (int i = 0; i < DP_NINPUTS; i++)
        if (of_tokens(p, i))
            y.in[i] = dp_doubles(dp_input_count(&y, i));
        else if (dp_input_fields[i].kind == DP_OF_HEADS)
            y.in[i] = dp_copy(dp_input_of(p, i), dp_input_count(p, i));
    return y;
}

/* The tokens before a call, one a sequence. An angle is the sum of all so far. */
static dp_problem *tokens_before(const dp_problem *p, const slice *take) {
    dp_problem *y = dp_calloc(1, sizeof *y);
    int64_t *cu = dp_calloc((size_t)p->Nseq + 1, sizeof *cu);
    const int64_t n = p->angle ? dp_input_width(p, DP_INPUT_ANGLE) : 0;
    for (int i = 0; i < p->Nseq; i++)
        cu[i + 1] = i + 1;
    *y = problem_new(p, p->Nseq, cu, NULL);
    for (int i = 0; i < p->Nseq; i++) {
        if (take[i].from <= p->cu[i]) continue; /* it begins, or is padding */
        put_token(p, y, i, take[i].from - 1, 0);
        for (int64_t t = p->cu[i]; t < take[i].from - 1; t++)
            for (int64_t z = 0; z < n; z++)
                y->angle[i * n + z] += row_of(p, DP_INPUT_ANGLE, t)[z];
    }
    return y;
}

/* A call's problem that begins with the tokens before it, to be freed. */
static dp_problem with_halo(const dp_problem *call, unsigned char **halo) {
    int64_t *cu = dp_calloc((size_t)call->Nseq + 1, sizeof *cu);
    for (int i = 0; i < call->Nseq; i++) {
        const int64_t n = call->cu[i + 1] - call->cu[i];
        cu[i + 1] = cu[i] + n + (n > 0);
    }
    dp_problem y =
        problem_new(call, call->Nseq, cu, dp_copy(call->s0, dp_input_count(call, DP_INPUT_S0)));
    y.halo = *halo = dp_calloc((size_t)y.T + 1, 1);
    y.before = NULL;
    for (int i = 0; i < call->Nseq; i++) {
        const int64_t n = call->cu[i + 1] - call->cu[i];
        if (n) put_token(call->before, &y, cu[i], i, 0);
        (*halo)[cu[i]] = n > 0;
        for (int64_t t = 0; t < n; t++)
            put_token(call, &y, cu[i] + 1 + t, call->cu[i] + t, 0);
    }
    return y;
}

/* The problem of one call, to be freed. */
static dp_problem problem_of(const walk *w, const slice *take) {
    const dp_problem *p = w->p;
    int64_t at = 0, *cu = dp_calloc((size_t)p->Nseq + 1, sizeof *cu);
    for (int i = 0; i < p->Nseq; i++)
        cu[i + 1] = cu[i] + take[i].n + take[i].m;
    dp_problem y = problem_new(p, p->Nseq, cu, copy_states(w));
    for (int i = 0; i < p->Nseq; i++, at = y.cu[i])
        for (int64_t j = 0; j < take[i].n + take[i].m; j++) {
            const int64_t t = take[i].from + j;
            put_token(p, &y, at + place(w, take[i], j), j < take[i].n ? t : draft(p, t),
                      j >= take[i].n);
        }
    if (dp_has_halo(p)) y.before = tokens_before(p, take);
    return y;
}

static void free_call(dp_problem *y) {
    dp_problem *before = (dp_problem *)y->before;
    if (before) dp_problem_free(before);
    free(before);
    dp_problem_free(y);
}

/* ---- faults ---------------------------------------------------------------------------------- */

static void hit_all(const walk *w) {
    if (w->hit) memset(w->hit, 1, (size_t)w->p->HV);
}

DP_NOT_SO("-Wanalyzer-null-argument") /* a walk has states */
DP_NOT_SO("-Wanalyzer-null-dereference")
static void hit_where(const walk *w, const double *a, const double *b) {
    const int64_t KV = (int64_t)w->p->K * w->p->V;
    for (int hv = 0; w->hit && hv < w->p->HV; hv++)
        w->hit[hv] |= memcmp(a + hv * KV, b + hv * KV, sizeof *a * (size_t)KV) != 0;
}

static int ended(const walk *w, int i) { return w->at[i] == w->p->cu[i + 1]; }
static int64_t call_of(const walk *w, int i) { return w->done - i * w->s->stagger; }

/* Does it bring no token of its own to the present call? */
static int idle(const walk *w, int i) {
    return ended(w, i) || (i && w->waiting) || call_of(w, i) < 0;
}

static int any_window(const walk *w) {
    int any = 0;
    for (int i = 0; i < w->p->Nseq; i++)
        any |= w->take[i].m > 0;
    return any;
}

/* Sequences that go on read the state of the next one. */
static void of_other_slot(const walk *w, double *s0) {
    for (int i = 0; i < w->p->Nseq; i++) {
        double *own = s0 + i * w->state;
        const double *other = w->S + (i + 1) % w->p->Nseq * w->state;
        if (ended(w, i)) continue;
        hit_where(w, own, other);
        memcpy(own, other, sizeof *own * (size_t)w->state);
    }
}

static void transpose(const walk *w, double *s0) {
    const int K = w->p->K;
    if (K != w->p->V) return;
    for (int64_t z = 0; z < (int64_t)w->p->Nseq * w->p->HV; z++) {
        const int64_t at = z * K * K;
        for (int a = 0; a < K && !ended(w, (int)(z / w->p->HV)); a++)
            for (int b = 0; b < K; b++)
                s0[at + (int64_t)a * K + b] = w->S[at + (int64_t)b * K + a];
        if (w->hit)
            w->hit[z % w->p->HV] |= memcmp(s0 + at, w->S + at, sizeof *s0 * (size_t)(K * K)) != 0;
    }
}

/* The first token of a later call decays by the gates of the token before it. */
static void gates_of_before(const walk *w, dp_problem *y) {
    const int64_t n = dp_input_width(w->p, DP_INPUT_G);
    for (int i = 0; i < w->p->Nseq; i++) {
        const int64_t t = w->take[i].from;
        double *first = y->g + y->cu[i] * n;
        const double *before = row_of(w->p, DP_INPUT_G, t - 1);
        if (!w->take[i].n || t == w->p->cu[i]) continue;
        for (int64_t z = 0; w->hit && z < n; z++)
            w->hit[z * w->p->HV / n] |= first[z] != before[z];
        memcpy(first, before, sizeof *first * (size_t)n);
    }
}

/* Rejected tokens decay by the gates of the last accepted one, or of the first. */
static void gates_of_drafts(const walk *w, dp_problem *y) {
    const int64_t n = dp_input_width(w->p, DP_INPUT_G);
    for (int i = 0; i < w->p->Nseq; i++) {
        const slice x = w->take[i];
        const int64_t last = y->cu[i] + (x.n ? x.n - 1 : 0);
        for (int64_t t = last + 1; x.m && t < y->cu[i + 1]; t++)
            memcpy(y->g + t * n, y->g + last * n, sizeof *y->g * (size_t)n);
        if (x.m && y->cu[i + 1] > last + 1) hit_all(w);
    }
}

/* The call gets other data than it should. */
static void spoil_inputs(const walk *w, dp_problem *y) {
    if (w->fault == DP_FAULT_DRAFT_GATE) gates_of_drafts(w, y);
    if (!w->done) return;
    if (w->fault == DP_FAULT_SLOT_OF_OTHER) of_other_slot(w, y->s0);
    if (w->fault == DP_FAULT_SLOT_TRANSPOSED) transpose(w, y->s0);
    if (w->fault == DP_FAULT_CALL_GATE) gates_of_before(w, y);
}

/* Sequences that have ended bring a token of padding: their first one once more. In a pool all that
 * bring none do, and whoever has no token brings the first one of all. */
static void pad(const walk *w, slice *take) {
    for (int i = 0; i < w->p->Nseq; i++) {
        const int own = ended(w, i) && w->p->cu[i + 1] > w->p->cu[i];
        if (w->pool && idle(w, i))
            take[i] = (slice){w->p->cu[i] % w->p->T, 1, 0};
        else if (w->fault == DP_FAULT_PADDING_WRITES && own) {
            take[i] = (slice){w->p->cu[i], 1, 0};
            hit_all(w);
        }
    }
}

/* The tokens behind which the state of a sequence is taken, instead of those accepted. */
static slice spoil_slice(const walk *w, slice x) {
    const slice right = x;
    if (w->fault == DP_FAULT_ROLLBACK_EARLY && x.m && x.n) x.n--;
    if (w->fault == DP_FAULT_ROLLBACK_LATE && x.m)
        x = (slice){x.from, x.n, 1};
    else if (w->fault != DP_FAULT_REJECTED_STAY)
        x.m = 0;
    if (w->fault == DP_FAULT_ROLLBACK_SKIPS && w->after_rollback && x.n) {
        x.from++;
        x.n--;
    }
    if (x.n != right.n || x.m) hit_all(w);
    return x;
}

/* The states are kept in a format that nobody asked for. */
static void spoil_kept(const walk *w) {
    const int V = w->p->V;
    const int64_t rows = w->p->Nseq * w->state / V;
    if (!w->done || (w->fault != DP_FAULT_KEPT_BF16 && w->fault != DP_FAULT_KEPT_INT8)) return;
    DP_OWN double *before = copy_states(w);
    for (int64_t x = 0; x < rows; x++) {
        double *row = w->S + x * V, most = 0;
        for (int v = 0; v < V; v++)
            most = fmax(most, fabs(row[v]));
        for (int v = 0; v < V && most > 0; v++)
            row[v] = w->fault == DP_FAULT_KEPT_BF16 ? dp_store(DP_BF16, row[v])
                                                    : most / 127 * nearbyint(row[v] / (most / 127));
    }
    for (int i = 0; i < w->p->Nseq; i++)
        hit_where(w, w->S + i * w->state, before + i * w->state);
}

/* The last of the sequences that go on, where there are several, keeps the state before the call.
 */
static void leave_unwritten(const walk *w, const double *before) {
    int last = -1, going = 0;
    for (int i = 0; i < w->p->Nseq; i++)
        if (!ended(w, i)) {
            last = i;
            going++;
        }
    if (w->fault != DP_FAULT_SLOT_UNWRITTEN || going < 2) return;
    double *own = w->S + last * w->state;
    DP_OWN double *old =
        before ? dp_copy(before + last * w->state, w->state) : dp_doubles(w->state);
    hit_where(w, own, old);
    memcpy(own, old, sizeof *own * (size_t)w->state);
}

/* ---- the pool -------------------------------------------------------------------------------- */

static double *slot(const pool *s, int64_t i) { return s->slot + i * s->state; }
static size_t bytes(const pool *s) { return sizeof(double) * (size_t)s->state; }

static int64_t *indices(int n) {
    int64_t *x = dp_calloc((size_t)n, sizeof *x);
    for (int i = 0; i < n; i++)
        x[i] = NONE;
    return x;
}

/* Token j of sequence i lies as many slots before those of token 0 as there are sequences. */
static void own_drafts(pool *s) {
    for (int i = 0; i < s->Nseq; i++)
        for (int64_t j = 0; j < s->drafts; j++)
            s->draft[i * s->drafts + j] = s->slots - 1 - i - j * s->Nseq;
    for (int i = 0; i < s->Nseq; i++)
        s->accepted[i] = 1;
}

/* NULL: the session has no pool. */
static pool *pool_new(const walk *w) {
    if (!w->s->slots) return NULL;
    pool *s = dp_calloc(1, sizeof *s);
    const int n = s->Nseq = w->p->Nseq;
    s->ring = w->rings ? w->s->ring : 0;
    s->slots = w->s->slots + (s->ring ? n : 0);
    s->width = (int64_t)w->p->K * w->p->V;
    s->state = w->state;
    s->prefix = NONE;
    s->drafts = w->drafts;
    int64_t **const each[] = {&s->own,   &s->planned,  &s->read,   &s->write,
                              &s->right, &s->accepted, &s->passed, &s->rings};
    for (size_t i = 0; i < sizeof each / sizeof *each; i++)
        *each[i] = indices(n);
    s->draft = indices(n * (int)(s->drafts + 1));
    s->listed = indices(n * (int)(s->drafts + 1));
    own_drafts(s);
    s->held = dp_calloc((size_t)n, sizeof *s->held);
    s->told = dp_calloc((size_t)n, sizeof *s->told);
    s->taken = dp_calloc((size_t)s->slots, 1);
    s->slot = dp_doubles(s->slots * s->state);
    s->before = dp_doubles(s->slots * s->state);
    for (int i = 0; i < (w->s->prefix ? 1 : n); i++)
        s->own[i] = w->s->slots - 1 - i;
    return s;
}

static void pool_free(pool *s) {
    if (!s) return;
    DP_FREE(s->own, s->planned, s->read, s->write, s->right, s->draft, s->listed, s->rings, s->held,
            s->told, s->accepted, s->passed, s->taken, s->slot, s->before);
    free(s);
}

/* The next slot behind `from` that nobody owns or is to write; `from` where there is none. */
static int64_t next_free(const pool *s, int64_t from) {
    for (int64_t k = 1; k < s->slots; k++)
        if (!s->taken[(from + k) % s->slots]) return (from + k) % s->slots;
    return from;
}

static int64_t ring_of(const pool *s, int i) { return s->slots - s->Nseq + i; }

static void mark_owned(const pool *s) {
    memset(s->taken, 0, (size_t)s->slots);
    for (int i = 0; i < s->Nseq && s->ring; i++)
        s->taken[ring_of(s, i)] = s->held[i] > 0;
    if (s->prefix != NONE) s->taken[s->prefix] = 1;
    for (int i = 0; i < s->Nseq; i++)
        if (s->own[i] != NONE) s->taken[s->own[i]] = 1;
}

/* Every format holds NaN. */
static void empty_unowned(const pool *s) {
    for (int64_t i = 0; i < s->slots; i++)
        for (int64_t z = 0; z < s->state && !s->taken[i]; z++)
            slot(s, i)[z] = NAN;
}

/* The slots that each sequence is told; without a window its state goes to the first. */
static void list_drafts(const walk *w) {
    pool *s = w->pool;
    for (int i = 0; i < s->Nseq; i++) {
        const int padding = idle(w, i);
        s->planned[i] = padding ? NONE : s->draft[i * s->drafts];
        s->passed[i] = padding ? 0 : s->accepted[i];
        for (int64_t j = 0; j < s->drafts; j++)
            s->listed[i * s->drafts + j] = padding ? NONE : s->draft[i * s->drafts + j];
        if (!padding) s->accepted[i] = 1;
    }
}

/* The next run of the call reads and writes what is planned. */
static void as_planned(const pool *s) {
    for (int i = 0; i < s->Nseq; i++) {
        s->read[i] = s->planned[i] == NONE ? NONE : s->own[i];
        s->write[i] = s->right[i] = s->planned[i];
    }
}

/* In the next run of the call, sequence i neither reads nor writes. */
static void leave_out(const pool *s, int i) { s->read[i] = s->write[i] = s->right[i] = NONE; }

/* Which slots the call reads and writes. window: it rejects tokens. */
static void plan_slots(const walk *w, int window) {
    pool *s = w->pool;
    for (int i = 0; i < s->Nseq; i++)
        if (s->own[i] != NONE) memcpy(slot(s, s->own[i]), w->S + i * s->state, bytes(s));
    mark_owned(s);
    empty_unowned(s);
    if (s->drafts) list_drafts(w);
    for (int i = 0; i < s->Nseq && s->ring; i++)
        s->taken[ring_of(s, i)] = 1; /* empty or not, nobody's state goes there */
    for (int i = 0; i < s->Nseq && !s->drafts; i++) {
        const int shared = s->prefix != NONE && s->own[i] == s->prefix;
        const int moves = shared || window || (s->calls + i) % 2;
        s->planned[i] = idle(w, i) ? NONE : moves ? next_free(s, s->own[i]) : s->own[i];
        if (!idle(w, i)) s->taken[s->planned[i]] = 1;
    }
    s->calls++;
    as_planned(s);
}

/* Has each token of the sequence's call a slot, where the caller rolls back by himself? */
static int has_slots(const walk *w, int i) {
    return !idle(w, i) && w->take[i].n + w->take[i].m <= w->drafts;
}

/* Tokens of sequence i in the call: all, and those that have slots. */
static int64_t tokens_of(const walk *w, int i) { return w->take[i].n + w->take[i].m; }
static int64_t slots_of(const walk *w, int i) { return has_slots(w, i) ? tokens_of(w, i) : 0; }

/* The slots of the tokens of calls in which each has one. */
static void plan_drafts(walk *w) {
    const pool *s = w->pool;
    int64_t all = 0;
    for (int i = 0; i < w->p->Nseq; i++)
        all += tokens_of(w, i);
    free(w->parent);
    w->parent = w->by->trees ? dp_calloc((size_t)all + 1, sizeof *w->parent) : NULL;
    for (int64_t i = 0, at = 0; i < w->p->Nseq && w->parent; at += tokens_of(w, (int)i++))
        for (int64_t j = 0; j < tokens_of(w, (int)i); j++)
            w->parent[at + place(w, w->take[i], j)] = parent_of(w, w->take[i], j);
    for (int i = 0; i < s->Nseq; i++)
        if (slots_of(w, i))
            s->write[i] = s->right[i] = s->planned[i] =
                s->draft[i * s->drafts + slots_of(w, i) - 1];
}

/* Which sequences write their states, and which leave their tokens in rings. The state of a prefix
 * is written. */
static void plan_rings(const walk *w) {
    const pool *s = w->pool;
    for (int i = 0; i < s->Nseq; i++) {
        const int padding = s->planned[i] == NONE;
        const int64_t end = w->waiting ? w->p->cu[i] + w->s->prefix : w->p->cu[i + 1];
        const int64_t n = w->take[i].n, all = s->held[i] + n;
        s->rings[i] = padding ? NONE : ring_of(s, i);
        s->told[i] = padding ? 0 : s->held[i];
        if (padding) continue;
        s->held[i] = w->at[i] + n >= end || all > s->ring ? 0 : all;
        if (!s->held[i]) continue;
        s->planned[i] = s->own[i]; /* where it stays */
        s->write[i] = s->right[i] = NONE;
    }
}

/* Applies a fault to the planned slots; returns 1 if it changed them. */
static int spoil_slots(const pool *s, dp_fault fault) {
    int acted = 0;
    for (int i = 0; i < s->Nseq; i++) {
        const int padding = s->planned[i] == NONE;
        const int64_t read = s->read[i], write = s->write[i];
        if (padding && fault == DP_FAULT_PADDING_WRITES)
            s->read[i] = s->write[i] = s->own[i];
        else if (padding && fault == DP_FAULT_PADDING_LAST_SLOT)
            s->read[i] = s->write[i] = s->slots - 1;
        else if (!padding && fault == DP_FAULT_SLOT_NEIGHBOUR)
            s->read[i] = (read + 1) % s->slots;
        else if (!padding && fault == DP_FAULT_SLOT_IN_PLACE)
            s->write[i] = read;
        acted |= s->read[i] != read || s->write[i] != write;
    }
    return acted;
}

int dp_pool_lists(const dp_state_pool *pool, const dp_problem *p, dp_pool_list out[DP_POOL_LISTS]) {
    const dp_pool_list all[DP_POOL_LISTS] = {{"read_slot", pool->read, {p->Nseq, 0}},
                                             {"write_slot", pool->write, {p->Nseq, 0}},
                                             {"draft_slot", pool->draft, {p->Nseq, pool->drafts}},
                                             {"accepted", pool->accepted, {p->Nseq, 0}},
                                             {"parent", pool->parent, {p->T, 0}},
                                             {"ring_slot", pool->ring, {p->Nseq, 0}},
                                             {"ring_tokens", pool->held, {p->Nseq, 0}}};
    int n = 0;
    for (int i = 0; i < DP_POOL_LISTS; i++)
        if (all[i].x) out[n++] = all[i];
    return n;
}

/* Begins one run of the call: keeps a copy of the pool and returns the pool. */
static dp_state_pool begin_run(const walk *w) {
    const pool *s = w->pool;
    memcpy(s->before, s->slot, bytes(s) * (size_t)s->slots);
    dp_state_pool p = {.slots = s->slots,
                       .read = s->read,
                       .write = s->write,
                       .state = s->slot,
                       .drafts = s->drafts,
                       .parent = w->parent};
    if (s->ring) p.ring = s->rings;
    if (s->ring) p.held = s->told;
    if (s->drafts) p.draft = s->listed;
    if (s->drafts) p.accepted = s->passed;
    return p;
}

/* [Nseq] states from those slots; 0 where there is none. */
static void gather(const pool *s, const int64_t *from, double *states) {
    for (int i = 0; i < s->Nseq; i++)
        if (from[i] == NONE)
            memset(states + i * s->state, 0, bytes(s));
        else
            memcpy(states + i * s->state, slot(s, from[i]), bytes(s));
}

/* Writes final_state to the planned slots. NULL: allocates final_state, and reads the slots. */
static void end_run(const pool *s, double **final_state) {
    if (!*final_state) {
        *final_state = dp_doubles(s->Nseq * s->state);
        gather(s, s->write, *final_state);
        return;
    }
    for (int i = 0; i < s->Nseq; i++)
        if (s->write[i] != NONE)
            memcpy(slot(s, s->write[i]), *final_state + i * s->state, bytes(s));
}

static int is_written(const walk *w, int64_t slot) {
    const pool *s = w->pool;
    int any = 0;
    for (int i = 0; i < s->Nseq; i++) {
        any |= s->right[i] == slot || (s->ring && s->rings[i] == slot);
        for (int64_t j = 0; j < slots_of(w, i); j++)
            any |= s->draft[i * s->drafts + j] == slot;
    }
    return any;
}

static int owner_of(const pool *s, int64_t slot) {
    if (slot == s->prefix) return DP_SLOT_OF_PREFIX;
    for (int i = 0; i < s->Nseq; i++)
        if (s->own[i] == slot) return i;
    return DP_SLOT_FREE;
}

/* Adds wrong writes of the run. */
static void look_at_pool(const walk *w) {
    const pool *s = w->pool;
    dp_pool_seen *seen = w->by->pool;
    if (!seen) return;
    if (!seen->was)
        *seen = (dp_pool_seen){.slots = s->slots,
                               .width = s->width,
                               .slot = NONE,
                               .was = dp_copy(s->before, s->slots * s->state),
                               .is = dp_copy(s->before, s->slots * s->state)};
    for (int64_t i = 0; i < s->slots; i++) {
        const double *was = s->before + i * s->state;
        double *known = seen->was + i * s->state;
        if (is_written(w, i) || !memcmp(was, slot(s, i), bytes(s))) continue;
        if (memcmp(known, seen->is + i * s->state, bytes(s))) continue; /* it is known already */
        memcpy(known, was, bytes(s));
        memcpy(seen->is + i * s->state, slot(s, i), bytes(s));
        if (seen->overwritten++) continue;
        seen->slot = i;
        seen->call = w->done;
        seen->owner = owner_of(s, i);
    }
}

void dp_pool_seen_free(dp_pool_seen *s) {
    free(s->was);
    free(s->is);
    *s = (dp_pool_seen){0};
}

/* The states after all tokens of the call, 0 where a token has no slot, to be freed. NULL: no token
 * has a slot. */
static double *drafted_states(const walk *w) {
    const pool *s = w->pool;
    int64_t all = 0, windows = 0, at = 0;
    for (int i = 0; i < s->Nseq; i++) {
        all += tokens_of(w, i);
        windows += slots_of(w, i);
    }
    double *states = windows ? dp_doubles(all * s->state) : NULL;
    for (int i = 0; i < s->Nseq && windows; at += tokens_of(w, i++))
        for (int64_t j = 0; j < slots_of(w, i); j++)
            memcpy(states + (at + j) * s->state, slot(s, s->draft[i * s->drafts + j]), bytes(s));
    return states;
}

/* Accepts the states that a call left in the slots of its tokens: nothing is run again. */
static void accept_drafts(const walk *w) {
    const pool *s = w->pool;
    for (int i = 0; i < s->Nseq; i++) {
        if (!has_slots(w, i)) continue;
        const int64_t last = place(w, w->take[i], w->take[i].n - 1);
        s->planned[i] = s->draft[i * s->drafts + last];
        s->accepted[i] = last + 1;
    }
}

/* The state of sequence i as what the call has written. */
static void put_state(const walk *w, int i) {
    const pool *s = w->pool;
    if (s->planned[i] != NONE) memcpy(slot(s, s->planned[i]), w->S + i * s->state, bytes(s));
}

/* After a call: every sequence owns the slot that it wrote. */
static void take_states(const walk *w) {
    const pool *s = w->pool;
    for (int i = 0; i < s->Nseq; i++) {
        if (s->planned[i] != NONE) s->own[i] = s->planned[i];
        if (s->own[i] != NONE) memcpy(w->S + i * s->state, slot(s, s->own[i]), bytes(s));
    }
}

/* The slot of the first sequence becomes the prefix's, from which all sequences continue. */
static void share_slot(pool *s) {
    s->prefix = s->own[0];
    for (int i = 0; i < s->Nseq; i++)
        s->own[i] = s->prefix;
}

/* ---- windows of a session as problems of their own ------------------------------------------- */

#define MOST_STEPS 1e6 /* entries of states that the truth of a set passes through: 0.5 s in MPFR */
#define MOST_CHUNKS 64 /* of all heads, each a bound: 1 s where K = V = 32 */

/* n more numbers behind the first `have`; from NULL: zeros. */
static void append_numbers(double **x, int64_t have, const double *from, int64_t n) {
    *x = dp_realloc(*x, sizeof **x * (size_t)(have + n));
    if (from)
        memcpy(*x + have, from, sizeof **x * (size_t)n);
    else
        memset(*x + have, 0, sizeof **x * (size_t)n);
}

/* Shapes, forms and parameters of a call; no tokens yet. */
static void begin_set(dp_draft_set *s, const dp_problem *call) {
    s->p = *call;
    s->p.T = 0;
    s->p.Nseq = 0;
    s->p.cu = dp_calloc(1, sizeof *s->p.cu);
    for (int i = 0; i < DP_NINPUTS; i++)
        s->p.in[i] = dp_input_fields[i].kind == DP_OF_HEADS
                         ? dp_copy(dp_input_of(call, i), dp_input_count(call, i))
                         : NULL;
}

/* Sequences of n tokens in all. */
static int affordable(const dp_draft_set *s, const dp_problem *call, int64_t sequences, int64_t n) {
    const double most = MOST_STEPS / ((double)call->HV * call->K * call->V);
    if (!s->p.Nseq) return 1;
    return (double)(s->p.T + n) <= most && (s->p.Nseq + sequences) * call->HV <= MOST_CHUNKS;
}

/* The first n tokens of sequence i of a call, the state after them, and o where it is there. */
static void add_window(dp_draft_set *s, const dp_problem *call, int i, int64_t n, const double *o,
                       const double *state, const dp_draft_place *at) {
    const int64_t S = (int64_t)call->HV * call->K * call->V, rows = (int64_t)call->HV * call->V;
    if (!s->p.cu) begin_set(s, call);
    dp_problem *p = &s->p;
    for (int f = 0; f < DP_NINPUTS; f++) {
        const int64_t w = of_tokens(call, f) ? dp_input_width(call, f) : 0;
        if (w) append_numbers(&p->in[f], p->T * w, dp_input_of(call, f) + call->cu[i] * w, n * w);
    }
    append_numbers(&p->s0, p->Nseq * S, call->s0 ? call->s0 + i * S : NULL, S);
    append_numbers(&s->out.final_state, p->Nseq * S, state, S);
    if (o) append_numbers(&s->out.o, p->T * rows, o + call->cu[i] * rows, n * rows);
    s->place = dp_realloc(s->place, sizeof *s->place * ((size_t)p->Nseq + 1));
    p->cu = dp_realloc(p->cu, sizeof *p->cu * ((size_t)p->Nseq + 2));
    s->place[p->Nseq] = *at;
    s->place[p->Nseq++].tokens = n;
    p->T += n;
    p->cu[p->Nseq] = p->T;
}

/* A subject's state may be anything; a problem has finite numbers. */
static int all_finite(const double *x, int64_t n) {
    int all = 1;
    for (int64_t z = 0; x && z < n; z++)
        all &= isfinite(x[z]) != 0;
    return all;
}

/* Adds sequence i of a call to `window` and, with states [T][HV][K][V], to `within`. The problem
 * `call` has the right states. If o or states is NULL, it must be NULL in every call. */
static void drafts_take(dp_drafts *d, const dp_problem *call, int i, const dp_draft_place *at,
                        const dp_result *made, const double *states) {
    const int64_t S = (int64_t)call->HV * call->K * call->V, n = call->cu[i + 1] - call->cu[i];
    d->windows++;
    if (!all_finite(call->s0 ? call->s0 + i * S : NULL, S)) return;
    if (!affordable(&d->window, call, 1, n)) return;
    add_window(&d->window, call, i, n, made->o, made->final_state + i * S, at);
    if (!states) return;
    /* the last of them is judged already where it is the final state */
    const double *last = states + (call->cu[i + 1] - 1) * S, *final = made->final_state + i * S;
    const int64_t m = memcmp(last, final, sizeof *last * (size_t)S) ? n : n - 1;
    if (!affordable(&d->within, call, m, m * (m + 1) / 2)) return;
    for (int64_t j = 1; j <= m; j++)
        add_window(&d->within, call, i, j, NULL, states + (call->cu[i] + j - 1) * S, at);
}

static void free_set(dp_draft_set *s) {
    dp_problem_free(&s->p);
    dp_result_free(&s->out);
    free(s->place);
}

void dp_calls_seen_free(dp_calls_seen *seen) {
    free_set(&seen->drafts.window);
    free_set(&seen->drafts.within);
    dp_pool_seen_free(&seen->pool);
    for (int i = 0; i < DP_NQKV; i++)
        free(seen->front.y[i]);
    dp_conv_states_free(&seen->front.got);
    dp_conv_states_free(&seen->front.want);
    *seen = (dp_calls_seen){0};
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Rows of the first tokens, and the states behind them, of all convolutions. */
static void share_conv(const walk *w) {
    for (int i = 0; w->by->front && i < DP_NQKV; i++) {
        const dp_conv *v = w->by->front->conv[i];
        const int64_t n = v ? dp_conv_state_size(v) : 0;
        double *y = w->by->front->y[i];
        for (int q = 1; v && q < v->Nseq; q++) {
            memcpy(y + v->cu[q] * v->D, y + v->cu[0] * v->D,
                   sizeof *y * (size_t)(w->s->prefix * v->D));
            if (n) memcpy(w->conv.of[i] + q * n, w->conv.of[i], sizeof *y * (size_t)n);
        }
    }
}

/* The end of the prefix: its state and its rows of o become those of all sequences. */
static void share_prefix(walk *w) {
    const int64_t n = (int64_t)w->p->HV * w->p->V, *cu = w->p->cu;
    if (!w->waiting || w->at[0] - cu[0] < w->s->prefix) return;
    for (int i = 1; i < w->p->Nseq; i++) {
        memcpy(w->S + i * w->state, w->S, sizeof *w->S * (size_t)w->state);
        if (w->out->o)
            memcpy(w->out->o + cu[i] * n, w->out->o + cu[0] * n,
                   sizeof *w->S * (size_t)(w->s->prefix * n));
        w->at[i] += w->s->prefix;
    }
    share_conv(w);
    if (w->pool) share_slot(w->pool);
    w->waiting = 0;
    w->continued = 1;
}

static void keep_short(const walk *w) {
    spoil_kept(w);
    if (!w->done || w->s->kept == DP_FP64) return;
    for (int i = 0; i < w->p->Nseq; i++)
        dp_store_state(w->s->kept, w->p->HV, w->p->K, w->p->V, w->S + i * w->state);
}

/* Every call but the first of a sequence; before its first token there are zeros anyway. */
static dp_conv_states conv_before(const walk *w) {
    dp_conv_states s = {{NULL}};
    for (int i = 0; i < DP_NQKV; i++) {
        const dp_conv *v = w->by->front->conv[i];
        if (v) s.of[i] = dp_copy(w->conv.of[i], v->Nseq * dp_conv_state_size(v));
    }
    if (w->done && conv_spoil(w->by->front, w->fault, w->at, &s)) hit_all(w);
    return s;
}

static dp_status run_step(const walk *w, const dp_problem *y, const dp_state_pool *pool,
                          dp_call_result *r, dp_err *e) {
    DP_FREED(dp_conv_states_free) dp_conv_states before = conv_before(w);
    return w->by->run_step(w->by->who, y, pool, &before, r, e);
}

/* The rows of a call's own tokens, which x has behind those before it. */
static void drop_halo(const dp_problem *call, int64_t n, double *x) {
    double *to = x;
    for (int i = 0; x && i < call->Nseq; i++) {
        const int64_t tokens = call->cu[i + 1] - call->cu[i];
        x += tokens ? n : 0;
        memmove(to, x, sizeof *x * (size_t)(tokens * n));
        to += tokens * n;
        x += tokens * n;
    }
}

static dp_status run_with_halo(const walk *w, const dp_problem *call, dp_call_result *r,
                               dp_err *e) {
    DP_OWN unsigned char *halo;
    DP_FREED(dp_problem_free) dp_problem y = with_halo(call, &halo);
    const dp_status st = w->by->run(w->by->who, &y, 0, r, e);
    if (!st) drop_halo(call, (int64_t)y.HV * y.V, r->out.o);
    return st;
}

static dp_status run(const walk *w, const dp_problem *y, const dp_state_pool *pool, int states,
                     dp_call_result *r, dp_err *e) {
    if (y->before && !w->by->halos) return run_with_halo(w, y, r, e);
    if (w->by->front) return run_step(w, y, pool, r, e);
    if (pool && w->by->run_in) return w->by->run_in(w->by->who, y, pool, states, r, e);
    return w->by->run(w->by->who, y, states, r, e);
}

/* The call where states lie in a pool. */
static dp_status run_in_pool(const walk *w, dp_problem *y, int states, dp_call_result *r,
                             dp_err *e) {
    const dp_state_pool pool = begin_run(w);
    gather(w->pool, w->pool->read, y->s0);
    spoil_inputs(w, y);
    const dp_status st = run(w, y, &pool, states, r, e);
    if (st) return st;
    end_run(w->pool, &r->out.final_state);
    look_at_pool(w);
    return DP_OK;
}

static double off_by(const double *x, const double *y, int64_t n) {
    double off = 0, all = 0;
    for (int64_t i = 0; i < n; i++) {
        off += (x[i] - y[i]) * (x[i] - y[i]);
        all += y[i] * y[i];
    }
    return off > 0 ? sqrt(off / all) : isnan(off) ? INFINITY : 0;
}

/* Behind convolutions: q, k, v of y as those gave them. */
static void behind_front(const walk *w, const dp_call_result *r, dp_problem *y) {
    for (int i = 0; w->by->front && i < DP_NQKV; i++)
        if (w->by->front->conv[i])
            memcpy(y->in[dp_qkv_input(i)], r->y[i],
                   sizeof *y->in[dp_qkv_input(i)] * (size_t)(y->T * w->by->front->conv[i]->D));
}

/* Looks for wrong states: y is the call's problem, whose q, k, v become the outputs of its
 * convolutions. */
static void compare_states(const walk *w, const dp_problem *y, const dp_call_result *r) {
    const int64_t KV = (int64_t)w->p->K * w->p->V;
    dp_states_seen *far = w->by->far;
    DP_FREED(dp_sim_free) dp_sim s;
    dp_err e = {0};
    if (dp_sim_reference(&s, y, DP_CHUNK, 1, NULL, 0, &e)) return;
    for (int z = 0; z < w->p->Nseq * w->p->HV && !far->off; z++) {
        const int i = z / w->p->HV;
        const double off = w->pool && idle(w, i) ? 0
                                                 : off_by(r->out.final_state + z * KV,
                                                          s.out.final_state + z * KV, KV);
        if (off > far->from) *far = (dp_states_seen){far->from, off, w->done, i, z % w->p->HV};
    }
}

static void look_at_states(const walk *w, dp_problem *y, const dp_call_result *r) {
    const dp_states_seen *far = w->by->far;
    unsigned char *halo = NULL;
    if (!far || far->off > 0 || !r->out.final_state || w->rings || (w->parent && any_window(w)))
        return;
    behind_front(w, r, y);
    dp_problem more = y->before ? with_halo(y, &halo) : (dp_problem){0};
    compare_states(w, halo ? &more : y, r);
    if (halo) dp_problem_free(&more);
    free(halo);
}

static dp_status call(const walk *w, const slice *take, int states, dp_call_result *r, dp_err *e) {
    dp_problem y = problem_of(w, take);
    *r = (dp_call_result){0};
    if (!w->pool) spoil_inputs(w, &y);
    const dp_status st =
        w->pool ? run_in_pool(w, &y, states, r, e) : run(w, &y, NULL, states, r, e);
    if (!st) look_at_states(w, &y, r);
    free_call(&y);
    return st;
}

static void end_call(dp_call_result *r) {
    dp_result_free(&r->out);
    free(r->states);
    for (int i = 0; i < DP_NQKV; i++)
        free(r->y[i]);
    dp_conv_states_free(&r->conv);
}

static void keep_states(walk *w, dp_result *r) {
    if (w->pool) return; /* they are there */
    free(w->S);
    w->S = r->final_state;
    r->final_state = NULL;
}

/* o of the accepted tokens. */
static void keep_o(const walk *w, const slice *take, const double *o) {
    const int64_t n = (int64_t)w->p->HV * w->p->V;
    if (!o) {
        free(w->out->o);
        w->out->o = NULL;
    }
    for (int i = 0; o && i < w->p->Nseq; i++) {
        for (int64_t j = 0; j < take[i].n && !idle(w, i); j++)
            memcpy(w->out->o + (take[i].from + j) * n, o + place(w, take[i], j) * n,
                   sizeof *o * (size_t)n);
        o += (take[i].n + take[i].m) * n;
    }
}

/* The rows that the convolutions gave accepted tokens. */
static void keep_y(const walk *w, const dp_call_result *r) {
    for (int i = 0; w->by->front && i < DP_NQKV; i++) {
        const dp_conv *v = w->by->front->conv[i];
        const double *y = r->y[i];
        for (int q = 0; v && q < v->Nseq; q++) {
            const slice x = w->take[q];
            if (!idle(w, q))
                memcpy(w->by->front->y[i] + x.from * v->D, y, sizeof *y * (size_t)(x.n * v->D));
            y += (x.n + x.m) * v->D;
        }
    }
}

/* Stores the states of the convolutions after the call, for sequences that brought tokens. */
static void keep_conv(const walk *w, const slice *take, const dp_call_result *r) {
    for (int i = 0; w->by->front && i < DP_NQKV; i++) {
        const dp_conv *v = w->by->front->conv[i];
        const int64_t n = v ? dp_conv_state_size(v) : 0;
        for (int q = 0; n && q < v->Nseq; q++)
            if (!idle(w, q) && take[q].n + take[q].m)
                /* NOLINTNEXTLINE(*NonNullParamChecker): as there are convolutions */
                memcpy(w->conv.of[i] + q * n, r->conv.of[i] + q * n, sizeof(double) * (size_t)n);
    }
}

/* The states behind the accepted tokens, from those behind every token of the call. */
static void pick_states(walk *w, const double *states) {
    if (!w->S) w->S = dp_doubles(w->p->Nseq * w->state); /* the first call: zeros before */
    for (int i = 0; i < w->p->Nseq; i++) {
        if (w->take[i].n && !(w->pool && idle(w, i)))
            memcpy(w->S + i * w->state, states + (w->take[i].n - 1) * w->state,
                   sizeof *states * (size_t)w->state);
        if (w->pool) put_state(w, i);
        states += (w->take[i].n + w->take[i].m) * w->state;
    }
}

/* In a pool: who accepted nothing keeps the state that he had, and the others alone run. */
static void put_again(const walk *w, const slice *take) {
    const pool *s = w->pool;
    for (int i = 0; i < s->Nseq; i++)
        if (s->planned[i] != NONE) memcpy(slot(s, s->own[i]), w->S + i * s->state, bytes(s));
    for (int i = 0; i < s->Nseq; i++) {
        if (take[i].n + take[i].m) continue;
        put_state(w, i);
        leave_out(s, i);
    }
}

/* The states behind the accepted tokens, by running them again. */
static dp_status run_again(walk *w, const slice *take, dp_err *e) {
    int64_t n = 0;
    if (w->pool) put_again(w, take);
    for (int i = 0; i < w->p->Nseq; i++)
        n += w->pool && idle(w, i) ? 0 : take[i].n + take[i].m;
    dp_call_result r;
    const dp_status st = n ? call(w, take, 0, &r, e) : DP_OK;
    if (n && !st) {
        keep_states(w, &r.out);
        keep_conv(w, take, &r);
        end_call(&r);
    }
    return st;
}

/* The slices behind which states are taken; 1: they are those of the call itself. */
static int states_at(const walk *w, slice *kept) {
    int same = 1;
    for (int i = 0; i < w->p->Nseq; i++) {
        const slice x = w->take[i];
        kept[i] = idle(w, i) ? x : spoil_slice(w, x);
        same &= kept[i].from == x.from && kept[i].n == x.n && kept[i].m == x.m;
    }
    return same;
}

/* Keeps all results of a window beside its problem. With convolutions the problem has their outputs
 * as q, k, v. */
static void keep_drafts(const walk *w, const dp_call_result *r) {
    DP_FREED(dp_problem_free) dp_problem y = problem_of(w, w->take);
    behind_front(w, r, &y);
    for (int i = 0; i < w->p->Nseq; i++) {
        const slice x = w->take[i];
        const dp_draft_place at = {i, w->done, x.from, x.n + x.m, x.n};
        if (x.m) drafts_take(w->by->drafts, &y, i, &at, &r->out, r->states);
    }
}

/* The token of the problem that stands for token j of a slice. */
static int64_t token_of(const walk *w, slice x, int64_t j) {
    return j < x.n ? x.from + j : draft(w->p, x.from + j);
}

/* The path to token j of a tree, as places of its window from the first on; returns its length. */
static int64_t way_to(const walk *w, slice x, int64_t first, int64_t j, int64_t *way) {
    int64_t n = 0;
    for (int64_t at = place(w, x, j); at >= 0; at = w->parent[first + at])
        way[n++] = at;
    for (int64_t a = 0; a < n / 2; a++) {
        const int64_t t = way[a];
        way[a] = way[n - 1 - a];
        way[n - 1 - a] = t;
    }
    return n;
}

/* Keeps the results on the path to a rejected token of a tree as a window. */
static void keep_way(const walk *w, const dp_call_result *r, int i, int64_t first, int64_t j) {
    const dp_problem *p = w->p;
    const slice x = w->take[i];
    const int64_t rows = (int64_t)p->HV * p->V;
    DP_OWN int64_t *way = dp_calloc((size_t)(x.n + x.m), sizeof *way);
    const int64_t n = way_to(w, x, first, j, way);
    DP_FREED(dp_result_free) dp_result made = {.o = r->out.o ? dp_doubles(n * rows) : NULL};
    int64_t *cu = dp_calloc(2, sizeof *cu);
    cu[1] = n;
    DP_FREED(dp_problem_free)
    dp_problem y = problem_new(p, 1, cu, w->S ? dp_copy(w->S + i * w->state, w->state) : NULL);
    for (int64_t t = 0; t < x.n + x.m; t++)
        for (int64_t a = 0; a < n; a++)
            if (place(w, x, t) == way[a]) put_token(p, &y, a, token_of(w, x, t), t >= x.n);
    for (int64_t a = 0; a < n && made.o; a++)
        memcpy(made.o + a * rows, r->out.o + (first + way[a]) * rows,
               sizeof *made.o * (size_t)rows);
    made.final_state = dp_copy(r->states + (first + way[n - 1]) * w->state, w->state);
    const dp_draft_place at = {i, w->done, x.from, n, x.n};
    drafts_take(w->by->drafts, &y, 0, &at, &made, NULL);
}

/* The same of every rejected token of the call: states have slots of their own. */
static void keep_trees(const walk *w, const dp_call_result *r) {
    int64_t first = 0;
    for (int i = 0; i < w->p->Nseq; i++) {
        const slice x = w->take[i];
        for (int64_t j = x.n; j < x.n + x.m && has_slots(w, i) && r->states; j++)
            keep_way(w, r, i, first, j);
        first += x.n + x.m;
    }
}

static slice next_tokens(const walk *w, int i) {
    const int64_t left = w->p->cu[i + 1] - w->at[i];
    if ((i && w->waiting) || call_of(w, i) < 0) return (slice){w->at[i], 0, 0};
    const dp_session_call c = dp_session_at(w->s, call_of(w, i));
    return (slice){w->at[i], left < c.accepted ? left : c.accepted,
                   left ? c.drafted - c.accepted : 0};
}

/* In a pool: the first sequence alone runs, in the slot of the prefix. */
static void alone_in_place(const walk *w) {
    spoil_slots(w->pool, DP_FAULT_SLOT_IN_PLACE);
    for (int i = 1; i < w->p->Nseq; i++)
        leave_out(w->pool, i);
}

/* The state of the prefix is the one that its first continuation leaves: the others begin there. */
static dp_status overwrite_prefix(walk *w, dp_err *e) {
    slice *first;
    dp_call_result r;
    if (w->fault != DP_FAULT_PREFIX_OVERWRITTEN || !w->continued) return DP_OK;
    first = dp_calloc((size_t)w->p->Nseq, sizeof *first);
    first[0] = (slice){w->take[0].from, w->take[0].n, 0};
    if (w->pool) alone_in_place(w);
    const dp_status st = call(w, first, 0, &r, e);
    if (w->pool) as_planned(w->pool);
    for (int i = 1; !st && i < w->p->Nseq; i++) {
        hit_where(w, w->S + i * w->state, r.out.final_state);
        memcpy(w->S + i * w->state, r.out.final_state, sizeof *w->S * (size_t)w->state);
    }
    if (!st) end_call(&r);
    free(first);
    return st;
}

/* After the call: the states behind the accepted tokens. */
static dp_status go_back(walk *w, const slice *kept, int same, dp_call_result *r, dp_err *e) {
    if (w->drafts) {
        accept_drafts(w);
    } else if (same) {
        keep_states(w, &r->out);
        keep_conv(w, w->take, r);
    } else if (r->states && w->fault == DP_FAULT_NONE) {
        pick_states(w, r->states);
    } else {
        return run_again(w, kept, e);
    }
    return DP_OK;
}

static dp_status one_call(walk *w, dp_err *e) {
    DP_OWN slice *kept = dp_calloc((size_t)w->p->Nseq, sizeof *kept);
    DP_OWN double *before = copy_states(w);
    dp_call_result r;
    for (int i = 0; i < w->p->Nseq; i++)
        w->take[i] = next_tokens(w, i);
    const int window = any_window(w);
    pad(w, w->take);
    if (w->pool) plan_slots(w, window);
    if (w->drafts) plan_drafts(w);
    if (w->rings) plan_rings(w);
    const int same = states_at(w, kept);
    dp_status st = overwrite_prefix(w, e);
    if (w->pool && spoil_slots(w->pool, w->fault)) hit_all(w);
    if (!st) st = call(w, w->take, !same && !w->drafts, &r, e);
    if (!st) {
        if (w->drafts && !r.states) r.states = drafted_states(w);
        if (w->by->drafts && window) (w->parent ? keep_trees : keep_drafts)(w, &r);
        keep_o(w, w->take, r.out.o);
        keep_y(w, &r);
        st = go_back(w, kept, same, &r, e);
        end_call(&r);
    }
    if (!w->S) w->S = dp_doubles(w->p->Nseq * w->state); /* nothing accepted yet */
    if (w->pool) take_states(w);
    leave_unwritten(w, before);
    for (int i = 0; i < w->p->Nseq; i++)
        if (!idle(w, i)) w->at[i] += w->take[i].n;
    if (w->by->front) conv_look(w->by->front, w->at, w->done, &w->conv);
    w->after_rollback = window;
    w->continued = 0;
    w->done++;
    return st;
}

/* Does no sequence bring a token: those that have begun have ended, others begin later? */
static int nothing_to_do(const walk *w) {
    int all = 1;
    for (int i = 0; i < w->p->Nseq; i++)
        all &= idle(w, i);
    return all;
}

static int all_ended(const walk *w) {
    int all = 1;
    for (int i = 0; i < w->p->Nseq; i++)
        all &= ended(w, i);
    return all;
}

dp_status dp_calls_run(const dp_problem *p, const dp_session *s, dp_fault fault,
                       const dp_caller *by, dp_result *out, unsigned char *hit, dp_err *e) {
    walk w = {.p = p, .s = s, .fault = fault, .by = by, .out = out, .hit = hit};
    w.waiting = s->prefix > 0;
    dp_status st = DP_OK;
    *out = (dp_result){0};
    w.state = (int64_t)p->HV * p->K * p->V;
    w.S = dp_copy(p->s0, p->Nseq * w.state);
    w.drafts = by->drafts_in ? dp_session_drafts(s, p->Nseq, NULL, 0) : 0;
    w.rings = s->ring && by->replays;
    w.pool = pool_new(&w);
    if (by->front) conv_begin(by->front, &w.conv);
    if (w.pool && !w.S) w.S = dp_doubles(p->Nseq * w.state);
    w.at = dp_calloc((size_t)p->Nseq, sizeof *w.at);
    w.take = dp_calloc((size_t)p->Nseq, sizeof *w.take);
    memcpy(w.at, p->cu, sizeof *w.at * (size_t)p->Nseq);
    dp_result_alloc(out, p, 0);
    free(out->final_state);
    while (!st && !all_ended(&w)) {
        if (w.s->stagger && nothing_to_do(&w)) { /* nobody is called */
            w.done++;
            continue;
        }
        keep_short(&w);
        share_prefix(&w);
        st = one_call(&w, e);
    }
    out->final_state = w.S;
    pool_free(w.pool);
    free(w.parent);
    dp_conv_states_free(&w.conv);
    free(w.at);
    free(w.take);
    if (st) dp_result_free(out);
    return st;
}

void dp_calls_of_sim(dp_sim *s, dp_call_result *out) {
    dp_sim_run(s, DP_FP32, DP_EXCHANGE_ALLGATHER, 0); /* one rank forms no M and merges nothing */
    out->out = s->out;
    s->out = (dp_result){0};
    dp_sim_free(s);
}
