/* The CUDA kernels: all ranks on one device, or one a device with NCCL between them. */
#include "harness/device/device_run.h"
#include "harness/simulated/calls.h"
#include "outputs.h"
#include "ref/chunk/gate.h"
#include "subjects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what there is to run -------------------------------------------------------------------- */

/* Formats that the kernels have. */
static int has_base(dp_base base) { return base != DP_BASE_FP64; }
static int has_chain(dp_format f) { return dp_formats[f].device; }

/* Is anything sent: on a grid one rank sends itself what many would send. */
static int sends(const dp_case *c, int N) {
    return dp_cuda_ranks(&c->p, N) > 1 || c->p.own.kind == DP_OWN_GRID;
}

/* Which draws it shares with simulated ranks: those of pairs, but from an initial state. */
static dp_sending as_sent(const dp_problem *p, dp_sending x, int N) {
    dp_sending s = dp_cuda_sending(x, N);
    s.begins &= p->s0 || p->dstate;
    return s;
}

/* Appends every exchange and variant; where nothing is sent, one exchange. */
static void add_ways(const dp_subject_kind *k, const dp_asked *a, dp_base base, dp_format chain,
                     int which, dp_plan *to) {
    const dp_case *c = a->c;
    const dp_run_options *o = a->o;
    const int N = a->N;
    const dp_values *only = &o->only[DP_ID_VARIANT]; /* none: plain, which is 0 */
    const int nvariant = only->n ? only->n : 1, sent = sends(c, N);
    const dp_ways one = {.n = 1}, w = sent ? dp_ways_of(c, o, which) : one;
    for (int i = 0; i < w.n * nvariant; i++) {
        dp_planned *x = dp_plan_add(to, k, N, base, chain);
        x->variant = (dp_cuda_variant)only->of[i % nvariant];
        x->way = w.way[i / nvariant];
        x->says_way = x->way.exchange || x->way.payload; /* else an all-gather in full */
        x->design.sending = as_sent(&c->p, x->way, sent ? N : 1);
    }
}

/* Every base and chain that the kernels have. */
static dp_status plan(const dp_subject_kind *k, const dp_asked *a, dp_plan *to,
                      DP_UNUSED dp_err *e) {
    for (int i = 0; i < a->nbase; i++)
        for (int j = 0, which = 0; j < a->few; j++) {
            const dp_format f = a->N == 1 ? DP_FP32 : a->chain[j];
            if (has_base(a->base[i]) && has_chain(f) &&
                (f == DP_FP32 || !dp_cuda_by_tokens(&a->c->p)))
                add_ways(k, a, a->base[i], f, which++, to);
        }
    return DP_OK;
}

/* ---- one run --------------------------------------------------------------------------------- */

/* The format of the kernels' q, k and v: those of a step are outputs of convolutions in the
 * base. */
static int inputs_are_bf16(const dp_case *c, dp_base base) {
    return c->op->has_front ? base == DP_BASE_BF16 : c->input_dtype == DP_BF16;
}

/* gpu/fast: chunks of 64 rows, scores from operands that carry their decay, beta in the inverse.
 * Where one kernel is all of a forward, its chunks have 32. Rows of fp32 are rounded to bf16 as
 * they are read. One of the two directions suffices. gpu/token: no chunks, results in the formats
 * of the base. Neither's exponential is rounded correctly. */
static dp_design design_of_kernels(const dp_case *c, const dp_planned *x,
                                   const dp_cuda_result *res) {
    dp_design d = x->design;
    /* NOLINTNEXTLINE(*uninitialized.Branch): the run that filled it was DP_OK */
    if (res->tokens) d.chunk = 0;
    d.fast_decays = res->tokens || res->fast;
    if (!res->fast) return d;
    d.pair_rows = res->pair_rows;
    d.gated = DP_SCORES_PAIRED;
    d.fold_beta = 1;
    d.chunk = res->chunk;
    const int backward = DP_CHUNK / c->p.R;
    if (res->out.dq && res->chunk != backward) d.chunk_backward = backward;
    d.stored_inputs = !inputs_are_bf16(c, x->base);
    return d;
}

typedef struct {
    dp_cuda_result res;
    dp_step_run front; /* op step: what its convolutions made */
    int64_t decoded;   /* a session: its calls in the decode kernels */
    int64_t packed;    /* those with states in the session's format */
    int states;        /* 1: those showed the state after every token */
} answer;

/* The calls of a session: those that the decode kernels take in them, the others in the same
 * kernels all. */
typedef struct {
    const dp_cuda_how *run;
    dp_cuda_result *all; /* of the session: path, fast and segments of its calls */
    int HV;
    int64_t decoded, packed; /* calls in the decode kernels; with states in the session's format */
    int states;              /* 1: some call showed those of every token */
} in_calls;

/* pool: NULL, or where the states lie; kernels of whole sequences take none, and get and return
 * states. */
static dp_status call_in(void *who, const dp_problem *call, const dp_state_pool *pool, int states,
                         dp_call_result *out, dp_err *e) {
    in_calls *x = who;
    dp_cuda_result res;
    if (dp_cuda_decodes(call, x->run, pool)) {
        x->decoded++;
        x->packed += dp_cuda_keeps(call, x->run, pool, states);
        x->states |= states;
        return dp_cuda_decode(call, x->run, pool, &out->out, states ? &out->states : NULL, e);
    }
    const dp_status st = dp_cuda_run(call, x->run, &res, e);
    if (st) return st;
    const int other = x->all->path && strcmp(x->all->path, res.path);
    if (other)
        dp_fail(e, DP_EINPUT, "a call runs in the kernels \"%s\", those before it in \"%s\"",
                res.path, x->all->path);
    x->all->path = res.path;
    x->all->fast |= res.fast;
    x->all->tokens |= res.tokens;
    if (res.segments > x->all->segments) x->all->segments = res.segments;
    if (!x->all->chunk || res.chunk < x->all->chunk) x->all->chunk = res.chunk;
    out->out = res.out;
    res.out = (dp_result){0};
    if (other) dp_result_free(&out->out);
    dp_cuda_result_free(&res, x->HV);
    return other ? DP_EINPUT : DP_OK;
}

static dp_status one_call(void *who, const dp_problem *call, int states, dp_call_result *out,
                          dp_err *e) {
    return call_in(who, call, NULL, states, out, e);
}

/* Which kernels ran, of all calls; a session has no backward. */
static const char *path_of_calls(const in_calls *x) {
    if (!x->decoded) return x->all->path;
    if (x->packed)
        return !x->all->path  ? "decode, packed states"
               : x->all->fast ? "fast, decode, packed states"
                              : "simple, decode, packed states";
    return !x->all->path ? "decode" : x->all->fast ? "fast, decode" : "simple, decode";
}

static dp_status compute_calls(const dp_case *c, const dp_cuda_how *run, dp_calls_seen *seen,
                               answer *y, dp_err *why) {
    in_calls x = {.run = run, .all = &y->res, .HV = c->p.HV};
    const dp_caller by = {.run = one_call,
                          .who = &x,
                          .drafts = &seen->drafts,
                          .pool = &seen->pool,
                          .run_in = call_in,
                          .far = &seen->far};
    dp_design d = dp_design_of(run->base);
    d.final_state = run->kept;
    seen->far.from = dp_state_far(&d);
    y->res = (dp_cuda_result){.N = 1};
    const dp_status st =
        dp_calls_run(&c->p, &c->session, DP_FAULT_NONE, &by, &y->res.out, NULL, why);
    y->decoded = x.decoded;
    y->packed = x.packed;
    y->states = x.states;
    if (!st) y->res.path = path_of_calls(&x);
    if (!x.decoded) { /* no pool was used */
        dp_pool_seen_free(&seen->pool);
        seen->pool = (dp_pool_seen){0};
    }
    return st;
}

/* The convolutions of a step, then the recurrence. DP_EINPUT: they do not take this
 * case, *why says so. */
static dp_status run_kernels(const dp_planned *x, const dp_sharding *sp, dp_calls_seen *seen,
                             answer *y, dp_err *why) {
    const dp_case *c = sp->c;
    const dp_backend be = x->kind->backend;
    const int step = c->op->has_front;
    const char *no = dp_cuda_unavailable(be, dp_cuda_ranks(&c->p, x->N));
    dp_status st = DP_OK;
    if (no) return dp_fail(why, DP_EINPUT, "%s", no);
    if (sp->first_of_call && dp_has_halo(&c->p))
        return dp_fail(why, DP_EINPUT,
                       "the CUDA kernels take no inputs of the token before a call, which the rows "
                       "of %s need",
                       dp_model_of(&c->p)->name);
    if (dp_gates_above_0(&c->p))
        return dp_fail(why, DP_EINPUT,
                       "log decays g above 0: the CUDA kernels are built for decays");
    if (step) st = dp_step_forward(c, be, x->N, x->base, DP_FAULT_NONE, &y->front, why);
    if (st) return st;
    const dp_cuda_how run = {.backend = be,
                             .N = x->N,
                             .base = x->base,
                             .chain = x->chain,
                             .variant = x->variant,
                             .sending = x->way,
                             .bf16_inputs = inputs_are_bf16(c, x->base),
                             .kept = sp->first_of_call ? c->session.kept : DP_FP64,
                             .backward = sp->truth->backward};
    if (sp->first_of_call) return compute_calls(c, &run, seen, y, why);
    st = dp_cuda_run(step ? &y->front.p : &c->p, &run, &y->res, why);
    if (st || !step || !run.backward) return st;
    return dp_step_backward(c, &y->res.out, &y->front, why);
}

static void note_outputs(const dp_sharding *sp, answer *y, dp_made *m) {
    const int backward = y->res.out.dq != NULL;
    m->out.results = &y->res.out;
    m->front = sp->c->op->has_front ? &y->front : NULL;
    for (int i = 0; i < (backward ? DP_RANK_TENSORS : DP_RANK_DS_OUT); i++)
        if (dp_exchange_makes(m->design.sending.exchange, i)) m->out.rank[i] = y->res.rank[i];
}

/* Skipped with the kernels' own reason where they do not take it. */
static dp_status compute(const dp_planned *x, dp_sharding *sp, DP_UNUSED void **kept, dp_made *m,
                         dp_err *e) {
    const dp_case *c = sp->c;
    answer *y = m->own = dp_calloc(1, sizeof *y);
    dp_err why = {0};
    const dp_status st = run_kernels(x, sp, &m->seen, y, &why);
    if (st) y->res = (dp_cuda_result){0};
    if (st && st != DP_EINPUT)
        return dp_fail(e, st, "%s: %s, %d ranks: %s", c->name, dp_backend_names[x->kind->backend],
                       x->N, why.msg);
    m->design = design_of_kernels(c, x, &y->res);
    if (y->packed) m->design.final_state = c->session.kept;
    if (y->decoded) m->design.fast_decays = 1;
    note_outputs(sp, y, m);
    m->verdict = DP_SKIPPED;
    if (st) snprintf(m->why, sizeof m->why, "%.639s", why.msg);
    return DP_OK;
}

static void note(DP_UNUSED const dp_sharding *sp, const dp_made *m, dp_run *r) {
    const answer *y = m->own;
    r->other_design = y->decoded > 0;
    if (r->rollback && y->states) r->rollback = "states of every token";
    r->path = y->res.path;
    r->segments = y->res.segments;
    r->saved = y->res.saved;
    r->kept = y->res.kept;
}

static void free_answer(const dp_case *c, dp_made *m) {
    answer *y = m->own;
    dp_step_run_free(c, &y->front);
    dp_cuda_result_free(&y->res, c->p.HV);
    free(y);
}

#define KERNELS(BACKEND)                                                                          \
    .backend = BACKEND, .absent = dp_unavailable, .plan = plan, .compute = compute, .note = note, \
    .free = free_answer
const dp_subject_kind dp_on_cuda = {KERNELS(DP_BACKEND_CUDA), .truth = dp_cuda_truth};
const dp_subject_kind dp_on_nccl = {KERNELS(DP_BACKEND_NCCL)};
