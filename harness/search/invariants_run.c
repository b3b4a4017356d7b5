/* Problems made from others, and their runs (invariants_work.h). */
#include "harness/mpi/mpi_ranks.h"
#include "invariants_work.h"

#include <stdlib.h>

/* ---- problems made from others --------------------------------------------------------------- */

dp_problem dp_check_copy(const dp_problem *p, int backward) {
    dp_problem c = *p;
    dp_inputs_copy(&c, p, p->memory ? p->memory->copy : dp_copy);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_fields[i].backward && !backward) {
            dp_free_of(p, *dp_input_at(&c, i));
            *dp_input_at(&c, i) = NULL;
        }
    c.cu = dp_cu_copy(p);
    return c;
}

double *dp_check_own(dp_problem *p, int i) {
    double **x = dp_input_at(p, i);
    if (p->memory) *x = p->memory->own(*x, dp_input_count(p, i));
    return *x;
}

dp_problem dp_check_at_hand(const dp_problem *p) {
    dp_problem c = *p;
    c.memory = NULL;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int64_t n = dp_input_count(p, i);
        double **x = dp_input_at(&c, i);
        if (!*x) continue;
        *x = dp_doubles(n);
        dp_memory_get(p->memory, *x, dp_input_of(p, i), n);
    }
    c.cu = dp_cu_copy(p);
    return c;
}

void dp_check_put_away(dp_problem *p, const dp_memory *memory) {
    p->memory = memory;
    for (int i = 0; i < DP_NINPUTS && memory; i++) {
        const int64_t n = dp_input_count(p, i);
        double **x = dp_input_at(p, i), *host = *x;
        if (!host) continue;
        *x = memory->make(n, 0);
        memory->put(*x, host, n);
        free(host);
    }
}

/* Tokens [a, b), which belong to one sequence: a problem of its own. s0, dstate: NULL, or
 * [HV][K][V]. */
dp_problem dp_check_slice(const dp_problem *p, int64_t a, int64_t b, const double *s0,
                          const double *dstate, int backward) {
    dp_problem c = *p;
    c.T = b - a;
    c.Nseq = 1;
    c.cu = dp_calloc(2, sizeof *c.cu);
    c.cu[1] = c.T;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_tensor_field *f = &dp_input_fields[i];
        const int64_t first = f->kind == DP_OF_TOKENS ? a * dp_input_width(p, i) : 0;
        const double *x = i == DP_INPUT_S0 ? s0 : i == DP_INPUT_DSTATE ? dstate : dp_input_of(p, i);
        *dp_input_at(&c, i) = x && (backward || !f->backward)
                                  ? dp_copy_of(p, x + first, dp_input_count(&c, i))
                                  : NULL;
    }
    return c;
}

int dp_check_sequence_at(const dp_problem *p, int64_t t) {
    int i = 0;
    while (i < p->Nseq - 1 && p->cu[i + 1] <= t)
        i++;
    return i;
}

/* ---- the subject ----------------------------------------------------------------------------- */

void dp_check_outcome_free(dp_check_outcome *o) {
    for (int i = 0; i < o->n; i++) {
        free(o->M ? o->M[i] : NULL);
        free(o->dM ? o->dM[i] : NULL);
    }
    free(o->M);
    free(o->dM);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        free(o->stage[i]);
    dp_result_free(&o->r);
    *o = (dp_check_outcome){0};
}

static dp_status run_sim(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                         dp_check_outcome *o, dp_err *e) {
    dp_sim sim;
    const int64_t KK = (int64_t)p->K * p->K;
    const int peers = dp_backends[s->backend].peers;
    const int shows = s->shows && s->merge != DP_EXCHANGE_HEADS; /* else those of other tokens */
    const dp_status st =
        peers ? dp_mpi_sim_open(&sim, p, s->base, N, e)
              : dp_sim_new_chunks(&sim, p, s->base, s->chunk ? s->chunk : DP_CHUNK, N, s->fault, e);
    if (st) return st;
    sim.payload = s->payload;
    (peers ? dp_mpi_sim_run : dp_sim_run)(&sim, s->chain, s->merge, backward);
    o->n = N * p->HV;
    o->M = dp_calloc((size_t)o->n, sizeof *o->M);
    o->dM = dp_calloc((size_t)o->n, sizeof *o->dM);
    for (int i = 0; i < o->n; i++) {
        o->M[i] = dp_copy(sim.M[i], KK);
        o->dM[i] = dp_copy(sim.dM[i], KK);
    }
    for (int i = 0; shows && i < DP_NSTAGE_TENSORS; i++)
        if ((backward || !dp_stage_tensors[i].backward) && (!s->like || s->like[i]) &&
            (!peers || dp_stage_tensors[i].kind == DP_PER_RANK))
            o->stage[i] = dp_stage_tensor_value(&sim, i);
    o->r = sim.out;
    sim.out = (dp_result){0};
    (peers ? dp_mpi_sim_close : dp_sim_free)(&sim);
    return DP_OK;
}

static dp_status run_cuda(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                          dp_check_outcome *o, dp_err *e) {
    dp_cuda_result c;
    const dp_cuda_how how = {.backend = s->backend,
                             .N = N,
                             .base = s->base,
                             .chain = s->chain,
                             .variant = s->variant,
                             .sending = {s->merge, s->payload},
                             .bf16_inputs = s->input_dtype == DP_BF16,
                             .backward = backward,
                             .results_only = p->own.kind != DP_OWN_EVEN};
    const dp_status st = dp_cuda_run(p, &how, &c, e);
    if (st) return st;
    o->r = c.out;
    o->M = c.rank[DP_RANK_M];
    o->dM = c.rank[DP_RANK_DM];
    o->n = N * p->HV;
    o->segments = c.segments;
    c.out = (dp_result){0};
    c.rank[DP_RANK_M] = c.rank[DP_RANK_DM] = NULL;
    dp_cuda_result_free(&c, p->HV);
    return DP_OK;
}

/* DP_EINPUT: the library refuses this problem; DP_EDEVICE: it did not come to its end. */
static dp_status run_library(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                             dp_check_outcome *o, dp_err *e) {
    dp_subject_result r;
    const dp_subject_call call = {.input_format = dp_formats[s->input_dtype].name,
                                  .N = N,
                                  .base = s->base,
                                  .chain = s->chain,
                                  .backward = backward,
                                  .chunk = s->chunk,
                                  .limit_s = s->limit_s > 0 ? s->limit_s : DP_SUBJECT_LIMIT_S};
    dp_status st = dp_subject_run(s->library, p, &call, &r, e);
    if (st) return st == DP_EINPUT ? st : DP_EIO;
    if (r.outcome == DP_SUBJECT_RETURNED) {
        o->r = r.r;
        r.r = (dp_result){0};
        for (int i = 0; s->shows && i < DP_NSTAGE_TENSORS; i++) {
            o->stage[i] = r.stage[i];
            r.stage[i] = NULL;
        }
    } else
        st = r.outcome == DP_SUBJECT_REFUSED
                 ? dp_fail(e, DP_EINPUT, "%s refuses it: %s", s->library->name, r.why)
                 : dp_fail(e, DP_EDEVICE, "%s", r.why);
    dp_subject_result_free(&r);
    return st;
}

dp_status dp_check_run_problem(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                               dp_check_outcome *o, dp_err *e) {
    *o = (dp_check_outcome){0};
    return (s->library                          ? run_library
            : dp_backends[s->backend].simulated ? run_sim
                                                : run_cuda)(s, p, N, backward && p->dout, o, e);
}
