/* The plug-in: one of the designs, with or without one of the faults (see adversary.h). */
#include "adversary.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

const deltaproof_subject_info *deltaproof_subject_about(void) {
    static deltaproof_subject_info info;
    static char name[64];
    design d;
    char why[256];
    if (design_parse(getenv("ADVERSARY_DESIGN"), &d, why)) {
        fprintf(stderr, "adversary: %s\n", why);
        return NULL;
    }
    snprintf(name, sizeof name, "adversary-%.50s", d.name);
    info =
        (deltaproof_subject_info){.abi = DP_SUBJECT_ABI,
                                  .kind = DP_SUBJECT_WHOLE,
                                  .max_ranks = 64,
                                  .name = name,
                                  .base = d.base,
                                  .chain = "fp32",
                                  .writes = "o final_state dq dk dv dg dbeta dA_log ddt_bias ds0 "
                                            "derase dwrite dlr_a dlr_b"};
    return &info;
}

const char *deltaproof_subject_recurrences(void) {
    return "gdn kda mkda gdn2 gla ssd gated-deltaproduct dplr";
}

const char *deltaproof_subject_design(void) {
    static char text[128];
    const char *declared = getenv("ADVERSARY_DECLARED");
    design d;
    char why[256];
    if (declared && !strcmp(declared, "0")) return NULL;
    if (design_parse(getenv("ADVERSARY_DESIGN"), &d, why)) return NULL;
    return design_declares(&d, text, sizeof text) ? text : NULL;
}

/* One computation of all tensors, in fp32. */
typedef struct {
    const design *d;
    const fault *f;
    const problem *p;
    tensor t[TENSORS];
    float *dA; /* [tokens][HV]: what each token adds to dA_log */
} result;

static tensor tensor_new(int which, int64_t groups, int heads, int64_t width, int kind) {
    tensor t = {
        .which = which, .rows = groups * heads, .width = width, .heads = heads, .kind = kind};
    t.x = floats(t.rows * width);
    return t;
}

static result result_new(const design *d, const fault *f, const problem *p) {
    const int64_t T = p->T, K = p->K, V = p->V, R = p->R, N = p->Nseq;
    const int H = p->H, HV = p->HV;
    result r = {.d = d, .f = f, .p = p, .dA = floats(T * HV)};
    r.t[T_O] = tensor_new(T_O, T, HV, V, OF_TOKENS);
    r.t[T_FINAL] = tensor_new(T_FINAL, N, HV, K * V, OF_STATES);
    r.t[T_DQ] = tensor_new(T_DQ, T, H, K, OF_TOKENS);
    r.t[T_DK] = tensor_new(T_DK, T, H, R * K, OF_TOKENS);
    r.t[T_DV] = tensor_new(T_DV, T, HV, R * V, OF_TOKENS);
    r.t[T_DG] = tensor_new(T_DG, T, HV, p->Kg, OF_TOKENS);
    r.t[T_DBETA] = tensor_new(T_DBETA, T, HV, R, OF_TOKENS);
    r.t[T_DA] = tensor_new(T_DA, 1, HV, 1, OF_HEADS);
    r.t[T_DBIAS] = tensor_new(T_DBIAS, 1, HV, p->Kg, OF_HEADS);
    r.t[T_DS0] = tensor_new(T_DS0, N, HV, K * V, OF_STATES);
    r.t[T_DERASE] = tensor_new(T_DERASE, p->erase ? T : 0, HV, K, OF_TOKENS);
    r.t[T_DWRITE] = tensor_new(T_DWRITE, p->write ? T : 0, HV, V, OF_TOKENS);
    r.t[T_DLR_A] = tensor_new(T_DLR_A, p->lr_a ? T : 0, HV, K, OF_TOKENS);
    r.t[T_DLR_B] = tensor_new(T_DLR_B, p->lr_b ? T : 0, HV, K, OF_TOKENS);
    return r;
}

static void result_free(result *r) {
    for (int i = 0; i < TENSORS; i++)
        free(r->t[i].x);
    free(r->dA);
}

static head_out head_out_new(const head_in *in) {
    const int64_t T = in->T, K = in->K, V = in->V, R = in->R;
    return (head_out){.o = floats(T * V),
                      .state = floats(K * V),
                      .dq = floats(T * K),
                      .dk = floats(T * R * K),
                      .de = floats(T * R * K),
                      .dv = floats(T * R * V),
                      .dg = floats(T * K),
                      .dbeta = floats(T * R),
                      .ds0 = floats(K * V)};
}

static void head_free(head_in *in, head_out *out) {
    float *all[] = {in->q,    in->k,      in->v,      in->g,      in->beta, in->s0,
                    in->dout, in->dstate, out->o,     out->state, out->dq,  out->dk,
                    out->dv,  out->dg,    out->dbeta, out->ds0,   out->de};
    if (in->e != in->k) free(in->e);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

/* Adds the head's dq or dk to those of its group. */
static void add_to_group(const result *r, int64_t t0, int hv, int64_t T, const float *x,
                         tensor *to) {
    const int G = r->p->HV / r->p->H;
    const float gain = G > 1 && hv % G == G - 1 ? knob.last_head_gain : 1;
    for (int64_t t = 0; t < T; t++) {
        float *row = to->x + ((t0 + t) * to->heads + hv / G) * to->width;
        for (int64_t i = 0; i < to->width; i++)
            row[i] += gain * x[t * to->width + i];
    }
}

static void copy_rows(int64_t t0, int hv, int64_t T, const float *x, tensor *to) {
    for (int64_t t = 0; t < T; t++)
        memcpy(to->x + ((t0 + t) * to->heads + hv) * to->width, x + t * to->width,
               sizeof *x * (size_t)to->width);
}

static void collect_head(result *r, int seq, int hv, const head_in *in, const head_out *out) {
    const problem *p = r->p;
    const int64_t t0 = p->cu[seq], T = p->cu[seq + 1] - t0;
    last_keys(in, T, p->V, out->o);
    copy_rows(t0, hv, T, out->o, &r->t[T_O]);
    copy_rows(seq, hv, 1, out->state, &r->t[T_FINAL]);
    if (!p->backward) return;
    raw_gradients raw = {r->t[T_DG].x, r->t[T_DBETA].x, r->dA};
    key_gradients keys = {floats(T * p->R * (p->K + p->V)),
                          NULL,
                          r->t[T_DERASE].x,
                          r->t[T_DWRITE].x,
                          r->t[T_DLR_A].x,
                          r->t[T_DLR_B].x};
    keys.dv = keys.dk + T * p->R * p->K;
    activate_back(p, seq, hv, in, out, &raw);
    keys_back(p, seq, hv, in, out, &keys);
    last_keys(in, T, p->K, out->dq);
    copy_rows(seq, hv, 1, out->ds0, &r->t[T_DS0]);
    copy_rows(t0, hv, T, keys.dv, &r->t[T_DV]);
    add_to_group(r, t0, hv, T, out->dq, &r->t[T_DQ]);
    add_to_group(r, t0, hv, T, keys.dk, &r->t[T_DK]);
    free(keys.dk);
}

static void run_head(result *r, int seq, int hv) {
    head_in in;
    activate_head(r->d, r->p, seq, hv, &in);
    const int64_t KV = (int64_t)in.K * in.V;
    const int64_t before = ((int64_t)(seq - 1) * r->p->HV + hv) * KV;
    for (int64_t i = 0; knob.leak != 0 && seq > 0 && i < KV; i++)
        in.s0[i] += knob.leak * r->t[T_FINAL].x[before + i];
    head_out out = head_out_new(&in);
    state_begin(r->f->seed + (uint64_t)(seq * r->p->HV + hv) * 1000003u);
    if (r->d->chunk)
        chunk_head(r->d, &in, &out);
    else
        recurrent_head(r->d, &in, &out);
    collect_head(r, seq, hv, &in, &out);
    head_free(&in, &out);
}

/* Sum over tokens of column `at` of x [T][stride], by chunks of 64. */
static float token_sum(const result *r, int which, const float *x, int64_t stride, int64_t at) {
    const int64_t T = r->p->T, count = (T + 63) / 64;
    float *parts = floats(count + 64), *terms = parts + count;
    for (int64_t c = 0; c < count; c++) {
        const int64_t n = T - c * 64 < 64 ? T - c * 64 : 64;
        for (int64_t i = 0; i < n; i++)
            terms[i] =
                fault_skips_token(r->f, which, T, c * 64 + i) ? 0 : x[(c * 64 + i) * stride + at];
        parts[c] = sum_of(r->d->sums, n, terms);
    }
    const float sum = sum_of(r->d->sums, count, parts);
    free(parts);
    return sum;
}

static void finish_gradients(result *r) {
    const problem *p = r->p;
    const int64_t gates = (int64_t)p->HV * p->Kg;
    for (int hv = 0; hv < p->HV; hv++)
        r->t[T_DA].x[hv] = token_sum(r, T_DA, r->dA, p->HV, hv);
    for (int64_t i = 0; i < gates; i++)
        r->t[T_DBIAS].x[i] = token_sum(r, T_DBIAS, r->t[T_DG].x, gates, i);
    for (int64_t i = 0; p->l2norm && i < p->T * p->H; i++)
        norm_back(r->d, p->q + i * p->K, p->K, r->t[T_DQ].x + i * p->K);
    for (int64_t i = 0; p->l2norm && i < p->T * p->H * p->R; i++)
        norm_back(r->d, p->k + i * p->K, p->K, r->t[T_DK].x + i * p->K);
}

/* Tensors of tokens have the format of the design where the inputs are bf16. */
static format format_of(const result *r, int which) {
    const int bf16_inputs = !strcmp(r->p->input_format, "bf16");
    return r->t[which].kind == OF_TOKENS && bf16_inputs ? r->d->output : FP32;
}

static void finish(result *r, const reference *ref) {
    for (int i = 0; i < TENSORS; i++) {
        fault_before_rounding(r->f, r->p, r->d->output, ref ? ref->x[i] : NULL, &r->t[i]);
        fault_round(r->f, format_of(r, i), r->d->output, &r->t[i]);
    }
}

static void run_heads(result *r) {
    for (int seq = 0; seq < r->p->Nseq; seq++)
        for (int hv = 0; hv < r->p->HV; hv++)
            run_head(r, seq, hv);
}

static void finish_all(result *r, const reference *ref) {
    if (r->p->backward) finish_gradients(r);
    finish(r, ref);
}

/* The result of the same kernel without the fault: heads again where the fault acts in their
 * arithmetic, else a copy of theirs. */
static result without_fault(const result *r, const fault *none) {
    result clean = result_new(r->d, none, r->p);
    knobs_set(none);
    if (r->f->tensor < 0) {
        run_heads(&clean);
        return clean;
    }
    for (int i = 0; i < TENSORS; i++) {
        const size_t bytes = sizeof(float) * (size_t)(r->t[i].rows * r->t[i].width);
        memcpy(clean.t[i].x, r->t[i].x, bytes);
    }
    memcpy(clean.dA, r->dA, sizeof(float) * (size_t)(r->p->T * r->p->HV));
    return clean;
}

static reference reference_new(const result *r) {
    reference ref;
    for (int i = 0; i < TENSORS; i++)
        ref.x[i] = doubles_of(r->t[i].rows * r->t[i].width);
    return ref;
}

/* Are all wanted tensors the same bits? */
static int same_results(const result *a, const result *b, const deltaproof_subject_call *c) {
    for (int i = 0; i < TENSORS; i++) {
        const size_t bytes = sizeof(float) * (size_t)(a->t[i].rows * a->t[i].width);
        if (!deltaproof_subject_find(c, tensor_names[i])) continue;
        if (memcmp(a->t[i].x, b->t[i].x, bytes)) return 0;
    }
    return 1;
}

/* The result with its fault, if there is one. 1: it is the same without. */
static int compute(result *r, const reference *ref, const deltaproof_subject_call *c) {
    const fault none = {.row = -1, .tensor = -1, .seed = r->f->seed};
    knobs_set(r->f);
    run_heads(r);
    if (r->f->row < 0) {
        finish_all(r, NULL);
        return 0;
    }
    result clean = without_fault(r, &none);
    finish_all(&clean, NULL);
    knobs_set(r->f);
    finish_all(r, ref);
    const int same = same_results(r, &clean, c);
    result_free(&clean);
    return same;
}

static void write_all(const result *r, const deltaproof_subject_call *c) {
    for (int i = 0; i < TENSORS; i++) {
        double *to = deltaproof_subject_find(c, tensor_names[i]);
        for (int64_t z = 0; to && z < r->t[i].rows * r->t[i].width; z++)
            to[z] = r->t[i].x[z];
    }
}

int deltaproof_subject_run(const problem *p, const deltaproof_subject_call *c) {
    design d;
    fault f;
    reference ref;
    if (design_parse(getenv("ADVERSARY_DESIGN"), &d, c->why)) return 1;
    if (fault_from_environment(&f, c->why)) return 1;
    if (p->K > MAX_K) {
        snprintf(c->why, 256, "K = %d is above %d", p->K, MAX_K);
        return DP_SUBJECT_UNSUPPORTED;
    }
    powers_grown = 0;
    result r = result_new(&d, &f, p);
    const int exact = fault_needs_reference(&f);
    if (exact) ref = reference_new(&r);
    if (exact) reference_run(p, &ref);
    const int nowhere = compute(&r, exact ? &ref : NULL, c);
    if (nowhere)
        strcpy(c->why, "the fault acts nowhere here");
    else
        write_all(&r, c);
    if (powers_grown > 0) fprintf(stderr, "adversary: powers grown=%.3g\n", powers_grown);
    for (int i = 0; exact && i < TENSORS; i++)
        free(ref.x[i]);
    result_free(&r);
    return nowhere ? DP_SUBJECT_UNSUPPORTED : DP_SUBJECT_OK;
}
