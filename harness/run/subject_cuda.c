/* The CUDA kernels: all ranks on one device, or one a device with NCCL between them. */
#include "harness/device/device_decode.h"
#include "harness/simulated/calls.h"
#include "limits.h"
#include "ref/chunk/gate.h"
#include "subjects.h"

#include <stdio.h>
#include <string.h>

/* ---- what there is to run -------------------------------------------------------------------- */

/* Formats that the kernels have. */
static int has_base(dp_base base) { return base != DP_BASE_FP64; }
static int has_chain(dp_format f) { return dp_formats[f].device; }

int dp_devices_offer(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o, int N) {
    int bases[DP_NBASES], any = 0;
    const int nb = dp_bases_of(c, o, bases);
    (void)N;
    for (int i = 0; i < nb; i++)
        any |= has_base((dp_base)bases[i]);
    return any && !o->fault && dp_case_on(c, k->backend) && dp_options_want(o, k->backend) &&
           !dp_cuda_unavailable(k->backend, 1);
}

/* ---- one run --------------------------------------------------------------------------------- */

/* The format of the kernels' q, k and v: those of a step are outputs of convolutions in the
 * base. */
static int inputs_are_bf16(const dp_case *c, dp_base base) {
    return dp_op_of(c)->has_front ? base == DP_BASE_BF16 : c->input_dtype == DP_BF16;
}

/* gpu/fast: chunks of 64 rows, scores from operands that carry their decay, beta in the inverse.
 * Rows of fp32 are rounded to bf16 as they are read. One of the two directions suffices. gpu/token:
 * no chunks, results in the formats of the base. Neither's exponential is rounded correctly. */
static dp_design design_of_kernels(const dp_case *c, const dp_how *how, const dp_cuda_result *res) {
    dp_design d = dp_design_of(how->base);
    d.sending = how->design.sending;
    /* NOLINTNEXTLINE(*uninitialized.Branch): the run that filled it was DP_OK */
    if (res->tokens) d.chunk = 0;
    d.fast_decays = res->tokens || res->fast;
    if (!res->fast) return d;
    d.gated = DP_SCORES_PAIRED;
    d.fold_beta = 1;
    d.chunk = DP_CHUNK / c->p.R;
    d.stored_inputs = !inputs_are_bf16(c, how->base);
    return d;
}

/* A run's tensors beside the results of its recurrence. */
typedef struct {
    dp_step_run front; /* op step: what its convolutions made */
    dp_drafts drafts;  /* a session: what its windows made */
    dp_pool_seen pool; /* and what happened to slots of its pool, if there is one */
    dp_states_seen far;
    int64_t decoded; /* its calls in the decode kernels */
    int64_t packed;  /* those with states in the session's format */
    int states;      /* 1: those showed the state after every token */
} beside;

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

static dp_status compute_calls(const dp_case *c, const dp_cuda_how *run, beside *b,
                               dp_cuda_result *res, dp_err *why) {
    in_calls x = {.run = run, .all = res, .HV = c->p.HV};
    const dp_caller by = {.run = one_call,
                          .who = &x,
                          .drafts = &b->drafts,
                          .pool = &b->pool,
                          .run_in = call_in,
                          .far = &b->far};
    dp_design d = dp_design_of(run->base);
    d.final_state = run->kept;
    b->far.from = dp_state_far(&d);
    *res = (dp_cuda_result){.N = 1};
    const dp_status st = dp_calls_run(&c->p, &c->session, DP_FAULT_NONE, &by, &res->out, NULL, why);
    b->decoded = x.decoded;
    b->packed = x.packed;
    b->states = x.states;
    if (!st) res->path = path_of_calls(&x);
    return st;
}

/* How the same gradients are computed, and how states get from rank to rank. */
typedef struct {
    dp_cuda_variant variant;
    dp_sending sending;
} one_way;

/* The convolutions of a step, then the recurrence. DP_EINPUT: they do not take this
 * case, *why says so. */
static dp_status compute(const dp_sharding *sp, const dp_how *how, const one_way *way, beside *x,
                         dp_cuda_result *res, dp_err *why) {
    const dp_case *c = sp->c;
    const int step = dp_op_of(c)->has_front;
    const char *no = dp_cuda_unavailable(how->backend, dp_cuda_ranks(&c->p, sp->N));
    dp_status st = DP_OK;
    if (no) return dp_fail(why, DP_EINPUT, "%s", no);
    if (c->p.model == DP_USER)
        return dp_fail(why, DP_EINPUT, "the CUDA kernels have no recurrence of a user's own");
    if (dp_gates_above_0(&c->p))
        return dp_fail(why, DP_EINPUT,
                       "log decays g above 0: the CUDA kernels are built for decays");
    if (step)
        st = dp_step_forward(c, how->backend, sp->N, how->base, DP_FAULT_NONE, &x->front, why);
    if (st) return st;
    const dp_cuda_how run = {.backend = how->backend,
                             .N = sp->N,
                             .base = how->base,
                             .chain = how->chain,
                             .variant = way->variant,
                             .sending = way->sending,
                             .bf16_inputs = inputs_are_bf16(c, how->base),
                             .kept = sp->first_of_call ? c->session.kept : DP_FP64,
                             .backward = sp->truth->backward};
    if (sp->first_of_call) return compute_calls(c, &run, x, res, why);
    return dp_cuda_run(step ? &x->front.p : &c->p, &run, res, why);
}

static void note_run(const dp_cuda_result *res, dp_run *r) {
    r->path = res->path;
    r->segments = res->segments;
    r->saved = res->saved;
    r->kept = res->kept;
}

static void judge(dp_sharding *sp, const dp_cuda_result *res, dp_bound_bases *bases, dp_run *r,
                  double from) {
    const int backward = res->out.dq != NULL;
    dp_outputs outputs = {.results = &res->out};
    for (int i = 0; i < (backward ? DP_RANK_TENSORS : DP_RANK_DS_OUT); i++)
        if (dp_exchange_makes(r->design.sending.exchange, i)) outputs.rank[i] = res->rank[i];
    dp_judge_outputs(sp, bases, &outputs, r, from);
}

static void free_beside(const dp_case *c, beside *x) {
    dp_step_run_free(c, &x->front);
    dp_drafts_free(&x->drafts);
    dp_pool_seen_free(&x->pool);
}

/* One variant of one (base, chain): judged, or skipped with the kernels' own reason. */
static dp_status run_one(dp_sharding *sp, dp_how how, const one_way *way, dp_bound_bases *bases,
                         dp_runs *out, dp_err *e) {
    const dp_case *c = sp->c;
    const dp_run_options *o = sp->std->o;
    const double from = dp_now();
    dp_cuda_result res;
    beside x = {0};
    dp_err why = {0};
    dp_status st = compute(sp, &how, way, &x, &res, &why);
    if (st && st != DP_EINPUT) {
        free_beside(c, &x);
        return dp_fail(e, st, "%s: %s, %d ranks: %s", c->name, dp_backend_names[how.backend], sp->N,
                       why.msg);
    }
    if (st) res = (dp_cuda_result){0};
    how.design = design_of_kernels(c, &how, &res);
    if (x.packed) how.design.final_state = c->session.kept;
    dp_run *r = dp_sharding_record(sp, &how, out);
    r->variant = way->variant;
    r->merge = way->sending.exchange;
    r->payload = way->sending.payload;
    r->has_merge = r->merge || r->payload; /* an ID that says neither is of an all-gather in full */
    r->other_design = x.decoded > 0;
    if (r->rollback && x.states) r->rollback = "states of every token";
    r->id = dp_run_id(r);
    if (st) {
        dp_run_skip(r, why.msg, o);
        st = DP_OK;
    } else {
        note_run(&res, r);
        dp_sharding_note_truth(sp, r);
        sp->step = dp_op_of(c)->has_front ? &x.front : NULL;
        judge(sp, &res, bases, r, from);
        sp->step = NULL;
        st = dp_judge_drafts(sp, &x.drafts, r, e);
        if (x.decoded) dp_judge_pool(sp, &x.pool, r);
        dp_say_far(&x.far, r);
        dp_cuda_result_free(&res, c->p.HV);
        dp_run_done(r, o);
    }
    free_beside(c, &x);
    return st;
}

/* Is anything sent: on a grid one rank sends itself what many would send. */
static int sends(const dp_sharding *sp) {
    return dp_cuda_ranks(&sp->c->p, sp->N) > 1 || sp->c->p.own.kind == DP_OWN_GRID;
}

/* If nothing is sent, one variant is enough for all. */
static dp_ways ways_of(const dp_sharding *sp, int which) {
    const dp_ways one = {.n = 1};
    return sends(sp) ? dp_ways_of(sp->c, sp->std->o, which) : one;
}

/* Which draws it shares with simulated ranks: those of pairs, but from an initial state. */
static dp_sending as_sent(const dp_problem *p, dp_sending x, int N) {
    dp_sending s = dp_cuda_sending(x, N);
    s.begins &= p->s0 || p->dstate;
    return s;
}

/* Every variant of a (base, chain). */
static dp_status run_ways(dp_sharding *sp, const dp_how *how, int which, dp_bound_bases *bases,
                          dp_runs *out, dp_err *e) {
    const dp_run_options *o = sp->std->o;
    const dp_cuda_variant plain = DP_CUDA_PLAIN, *variants = o->nvariant ? o->variant : &plain;
    const int nvariant = o->nvariant ? o->nvariant : 1, sent = sends(sp);
    const dp_ways w = ways_of(sp, which);
    dp_status st = DP_OK;
    for (int i = 0; i < w.n * nvariant && !st; i++) {
        const one_way way = {variants[i % nvariant], w.way[i / nvariant]};
        dp_how one = *how;
        one.design.sending = as_sent(&sp->c->p, way.sending, sent ? sp->N : 1);
        st = run_one(sp, one, &way, bases, out, e);
    }
    return st;
}

/* Every (base, chain) that the kernels have. */
dp_status dp_devices_run(const dp_subject_kind *k, dp_sharding *sp, dp_runs *out, dp_err *e) {
    const dp_run_options *o = sp->std->o;
    int bases[DP_NBASES], chains[DP_NFORMATS];
    const int nb = dp_bases_of(sp->c, o, bases);
    const int nc = dp_case_chains(sp->c, sp->N, o->nchain, (const int *)o->chain, chains);
    dp_status st = DP_OK;
    for (int i = 0; i < nb; i++) {
        dp_bound_bases w = {0};
        for (int j = 0, which = 0; j < nc && !st; j++) {
            const dp_format f = sp->N == 1 ? DP_FP32 : (dp_format)chains[j];
            const dp_how how = {.backend = k->backend, .base = (dp_base)bases[i], .chain = f};
            if (has_base(how.base) && has_chain(f) &&
                (f == DP_FP32 || !dp_cuda_by_tokens(&sp->c->p)))
                st = run_ways(sp, &how, which++, &w, out, e);
        }
        dp_bound_bases_free(&w);
    }
    return st;
}
