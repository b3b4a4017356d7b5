/* Arrays of a run: laid out before, checked and collected behind it (subject_parts.h). */
#include "subject_parts.h"

#include <stdio.h>
#include <string.h>

/* ---- one run --------------------------------------------------------------------------------- */

static dp_subject_array array_of(const dp_problem *p, const dp_tensor_field *f, const char *name) {
    const dp_dims d = dp_problem_dims(p);
    dp_subject_array a = {.name = name, .per_token = f->kind == DP_OF_TOKENS};
    a.ndim = dp_field_axes(f, &d, a.shape);
    return a;
}

int dp_subject_input_arrays(const dp_problem *p, int backward, dp_subject_array *a) {
    int n = 0;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_tensor_field *f = &dp_input_fields[i];
        if (!dp_input_of(p, i) || (f->backward && !backward)) continue;
        a[n] = array_of(p, f, dp_subject_inputs[i].name);
        a[n++].x = dp_input_of(p, i);
    }
    return n;
}

static const int64_t *local_shape(const dp_subject_array *a, int processes, int64_t *s) {
    memcpy(s, a->shape, sizeof a->shape);
    if (a->per_token) s[0] /= processes;
    return s;
}

/* Shape of a stage in one call: axes R kept, the axis of ranks left out where a rank is a process.
 */
static int stage_shape(const dp_problem *p, const dp_subject *s, int N, int process, int stage,
                       int64_t *out) {
    int64_t w[DP_MAX_AXES];
    const int ndim = dp_stage_tensor_shape(p, N, stage, w), kind = dp_stage_tensors[stage].kind,
              split = s->per_rank && N > 1;
    int n = 0;
    if (kind == DP_PER_RANK && split) {
        memcpy(out, w + 1, sizeof *w * 3);
        return 3;
    }
    if (kind == DP_PER_CHUNK) w[0] = dp_stage_tensor_chunks(p, N, split ? process : -1);
    if (kind == DP_PER_TOKEN && split) w[0] /= N;
    for (int i = 0; i < ndim; i++) {
        if (i == 2 && dp_stage_tensor_keyed(stage) && ndim == 3) out[n++] = 1;
        out[n++] = w[i];
    }
    return n;
}

/* Where the call's states lie in a pool. */
static void lay_out_pool(dp_subject_memory *m, const dp_problem *p) {
    const int64_t Nseq = p->Nseq, all[] = {m->pool->slots, p->HV, p->K, p->V};
    dp_subject_add_array(m, 0, "read_slot", 1, 1, &Nseq);
    dp_subject_add_array(m, 0, "write_slot", 1, 1, &Nseq);
    if (m->pool->drafts) {
        const int64_t drafts[] = {Nseq, m->pool->drafts};
        dp_subject_add_array(m, 0, "draft_slot", 1, 2, drafts);
        dp_subject_add_array(m, 0, "accepted", 1, 1, &Nseq);
    }
    if (m->pool->ring) {
        dp_subject_add_array(m, 0, "ring_slot", 1, 1, &Nseq);
        dp_subject_add_array(m, 0, "ring_tokens", 1, 1, &Nseq);
    }
    if (m->pool->parent) dp_subject_add_array(m, 0, "parent", 1, 1, &p->T);
    dp_subject_add_array(m, 0, DP_SUBJECT_POOL, 0, 4, all);
}

void dp_subject_lay_out(dp_subject_memory *m, const dp_subject *s, const dp_problem *p,
                        const dp_subject_call *call) {
    const int N = call->N, backward = call->backward;
    dp_subject_array a[DP_NINPUTS] = {0};
    int64_t shape[6] = {0};
    const int64_t states[] = {p->T, p->HV, p->K, p->V};
    const int np = m->c->processes, n = dp_subject_input_arrays(p, backward, a);
    const int64_t ncu = p->Nseq + 1;
    for (int r = 0; r < np; r++) {
        for (int i = 0; i < n; i++)
            if (!m->pool || a[i].x != p->s0)
                dp_subject_add_array(m, r, a[i].name, 1, a[i].ndim, local_shape(&a[i], np, shape));
        dp_subject_add_array(m, r, "cu", 1, 1, &ncu);
        for (int i = 0; i < DP_NRESULTS; i++) {
            const dp_tensor_field *f = &dp_result_fields[i];
            const dp_subject_array x = array_of(p, f, f->name);
            if (m->pool && i == DP_RESULT_FINAL_STATE) continue;
            if (s->writes[i] && (backward || !f->backward) && dp_result_exists(p, i))
                dp_subject_add_array(m, r, f->name, 0, x.ndim, local_shape(&x, np, shape));
        }
        for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
            if (!s->writes_stage[i] || (dp_stage_tensors[i].backward && !backward)) continue;
            const int ndim = stage_shape(p, s, N, r, i, shape);
            dp_subject_add_array(m, r, dp_stage_tensors[i].name, 0, ndim, shape);
        }
        if (s->writes_states && call->states)
            dp_subject_add_array(m, r, DP_SUBJECT_STATES, 0, 4, states);
    }
    if (m->pool) lay_out_pool(m, p);
}

void dp_subject_describe(dp_subject_control *c, const dp_problem *p, const dp_subject_call *call) {
    c->p = (deltaproof_subject_problem){.abi = DP_SUBJECT_ABI,
                                        .size = sizeof c->p,
                                        .H = p->H,
                                        .HV = p->HV,
                                        .K = p->K,
                                        .V = p->V,
                                        .R = p->R,
                                        .Kg = dp_Kg(p),
                                        .P = dp_pairs(p),
                                        .in_turn = dp_in_turn(p),
                                        .Nseq = p->Nseq,
                                        .gate_form = p->gate,
                                        .beta_form = p->beta_form,
                                        .l2norm = p->l2norm,
                                        .backward = call->backward,
                                        .ranks = call->N,
                                        .T = p->T,
                                        .tokens = p->T,
                                        .scale = p->scale,
                                        .lower_bound = p->lower_bound,
                                        .chunk = call->chunk,
                                        .nslot = call->pool ? (int32_t)call->pool->slots : 0,
                                        .drafts = call->pool ? (int32_t)call->pool->drafts : 0};
    snprintf(c->input_format, sizeof c->input_format, "%s", call->input_format);
    snprintf(c->base, sizeof c->base, "%s", dp_base_names[call->base]);
    snprintf(c->chain, sizeof c->chain, "%s", dp_formats[call->chain].name);
    snprintf(c->recurrence, sizeof c->recurrence, "%s", dp_models[p->model].name);
}

/* The rest of the pages around each output must be unchanged (inputs cannot be written at all).
 */
void dp_subject_check_patterns(const dp_subject_memory *m, dp_subject_result *out) {
    for (int r = 0; r < m->c->processes; r++)
        for (int i = 0; i < m->c->nregion; i++) {
            const dp_subject_region *x = &m->c->region[r][i];
            if (x->input) continue;
            const unsigned char *b = (const unsigned char *)dp_subject_bytes_of(m, x);
            const int64_t from = dp_subject_begin(x), to = from + x->n * 8;
            int64_t before = 0, after = 0;
            for (int64_t z = 0; z < from; z++)
                before += b[z] != DP_SUBJECT_CANARY;
            for (int64_t z = to; z < x->span; z++)
                after += b[z] != DP_SUBJECT_CANARY;
            if (!before && !after) continue;
            char who[24];
            dp_subject_on_rank(m, r, who, sizeof who);
            out->outcome = DP_SUBJECT_OUT_OF_BOUNDS;
            snprintf(out->why, sizeof out->why, "%swrote %s of %s: %lld bytes there are changed",
                     who, after ? "past the end" : "before the beginning", x->name,
                     (long long)(after ? after : before));
            return;
        }
}

/* The rank whose final_state (or ds0) of sequence i counts: -1 for an empty one. */
static int owner(const dp_problem *p, int np, int i, int at_end) {
    const int64_t L = p->T / np;
    return p->cu[i + 1] == p->cu[i] ? -1 : (int)((at_end ? p->cu[i + 1] - 1 : p->cu[i]) / L);
}

static void collect_states(const dp_subject_memory *m, const dp_problem *p, int field, double *x) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    for (int i = 0; i < p->Nseq; i++) {
        const int r =
            m->c->processes == 1
                ? 0
                : owner(p, m->c->processes, i,
                        field ==
                            DP_RESULT_FINAL_STATE); /* one process owns all, empty sequences too */
        const double *own =
            field == DP_RESULT_FINAL_STATE ? p->s0 : p->dstate; /* empty: what enters leaves */
        if (r >= 0)
            memcpy(
                x + i * n,
                dp_subject_data_of(m, dp_subject_find_array(m, r, dp_result_fields[field].name)) +
                    i * n,
                sizeof *x * (size_t)n);
        else
            for (int64_t z = 0; z < n; z++)
                x[i * n + z] = own ? own[i * n + z] : 0;
    }
}

/* The gradient of a state that the call does not have: may be left as it is, by all processes. */
static int left_out(const dp_subject_memory *m, const dp_problem *p, int field) {
    if (field != DP_RESULT_DS0 || p->s0) return 0;
    for (int r = 0; r < m->c->processes; r++) {
        const dp_subject_region *g = dp_subject_find_array(m, r, dp_result_fields[field].name);
        for (int64_t z = 0; z < g->n; z++)
            if (!dp_subject_unwritten(dp_subject_data_of(m, g)[z])) return 0;
    }
    return 1;
}

void dp_subject_collect(const dp_subject_memory *m, const dp_problem *p, int N,
                        dp_subject_result *out) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!dp_subject_find_array(m, 0, dp_result_fields[i].name) || left_out(m, p, i)) continue;
        double *x = *dp_result_at(&out->r, i) = dp_doubles(rows * width);
        if (dp_result_fields[i].kind == DP_OF_SEQUENCES)
            collect_states(m, p, i, x);
        else
            for (int r = 0; r < (dp_result_fields[i].kind == DP_OF_HEADS ? 1 : m->c->processes);
                 r++) {
                const dp_subject_region *g = dp_subject_find_array(m, r, dp_result_fields[i].name);
                memcpy(x + r * g->n, dp_subject_data_of(m, g), sizeof *x * (size_t)g->n);
            }
    }
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!dp_subject_find_array(m, 0, dp_stage_tensors[i].name)) continue;
        double *x = out->stage[i] = dp_doubles(dp_stage_tensor_size(p, N, i));
        for (int r = 0; r < m->c->processes; r++) {
            const dp_subject_region *g = dp_subject_find_array(m, r, dp_stage_tensors[i].name);
            memcpy(x, dp_subject_data_of(m, g), sizeof *x * (size_t)g->n);
            x += g->n;
        }
    }
    const dp_subject_region *states = dp_subject_find_array(m, 0, DP_SUBJECT_STATES);
    if (states) out->states = dp_copy(dp_subject_data_of(m, states), states->n);
    const dp_subject_region *pool = m->pool ? dp_subject_find_array(m, 0, DP_SUBJECT_POOL) : NULL;
    if (pool) out->pool = dp_copy(dp_subject_data_of(m, pool), pool->n);
}
