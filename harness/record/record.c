#include "record.h"
#include "digest.h"
#include "ref/files/output.h"

#include <cblas.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <mpfr.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef DP_COMMIT
#define DP_COMMIT "unknown"
#endif

extern char *openblas_get_config(void);

static json_t *num(double x) {
    if (isnan(x)) return json_string("nan");
    if (isinf(x)) return json_string(x > 0 ? "inf" : "-inf");
    return json_real(x);
}
static json_t *num_or_null(double x) { return isnan(x) ? json_null() : num(x); }

static json_t *list(const double *x, int n) { /* NAN: there is none */
    json_t *a = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(a, num_or_null(x[i]));
    return a;
}

static void set(json_t *o, const char *k, json_t *v) { json_object_set_new(o, k, v); }
static void set_str(json_t *o, const char *k, const char *v) {
    set(o, k, dp_json_text(v ? v : ""));
}
static void set_hex(json_t *o, const char *k, double x) {
    char b[40];
    if (isfinite(x))
        snprintf(b, sizeof b, "%a", x);
    else
        snprintf(b, sizeof b, "%s", isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
    set_str(o, k, b);
}

void dp_record_totals(const dp_record *r, int n[DP_NVERDICTS]) {
    memset(n, 0, sizeof(int) * DP_NVERDICTS);
    for (int i = 0; i < r->runs->n; i++)
        n[r->runs->run[i].verdict]++;
}

const char *dp_record_verdict(const dp_record *r) {
    int n[DP_NVERDICTS];
    dp_record_totals(r, n);
    return r->errors || !(n[DP_PASS] + n[DP_FAIL]) ? (n[DP_FAIL] ? "fail" : "error")
           : n[DP_FAIL]                            ? "fail"
                                                   : "pass";
}

static json_t *expected_json(const dp_excess *e) {
    json_t *o = json_object();
    set(o, "rel", num(e->expected));
    set(o, "excess", num(e->excess));
    set_str(o, "level", dp_level_names[e->level]);
    for (int l = 0; l < DP_NLEVELS; l++) {
        const dp_level_result *x = &e->at[l];
        json_t *y = json_object();
        if (isnan(x->ratio) && isnan(x->limit)) { /* the tensor has no such level */
            json_decref(y);
            continue;
        }
        set(y, "ratio", num_or_null(x->ratio));
        set(y, "median", num_or_null(x->median));
        set(y, "limit", num(x->limit));
        set(y, "units", json_integer(x->units));
        set(y, "freedom", num(x->freedom));
        set(y, "draw", num_or_null(x->draw));
        set(o, dp_level_names[l], y);
    }
    return o;
}

static void place_json(json_t *o, const dp_row *r) {
    set(o, "rank", json_integer(r->at.rank));
    set(o, "sequence", json_integer(r->at.sequence));
    set(o, "token", json_integer(r->at.token));
    set(o, "head", json_integer(r->at.head));
    set(o, "index", json_integer(r->index));
    set_hex(o, "got", r->got);
    set_hex(o, "want", r->want);
}

static json_t *tensor_json(const dp_judgement *t) {
    json_t *o = json_object(), *w = json_object(), *h = json_array();
    set_str(o, "name", t->name);
    set(o, "rel_fro", num(t->rel_fro));
    set(o, "per_rank", list(t->per_rank, t->N));
    for (int r = 0; r < t->N; r++)
        json_array_append_new(h, list(t->per_head + r * t->heads, t->heads));
    set(o, "per_head", h);
    if (t->worst.at.rank >= 0) {
        place_json(w, &t->worst);
        set(w, "rel", num(t->worst_rel));
        set(o, "worst_token", w);
    } else
        json_decref(w);
    if (t->failed.at.rank >= 0) {
        json_t *x = json_object();
        place_json(x, &t->failed);
        set(x, "error", num(t->failed.err));
        set(x, "bound", num_or_null(t->failed.bound));
        set(x, "size", num(t->failed.size));
        set(x, "scale", num(t->scale));
        set(x, "times", num_or_null(t->times));
        set(x, "marginal", json_boolean(dp_judgement_marginal(t)));
        set(o, "failed", x);
    }
    if (t->nwindow) {
        json_t *win = json_object();
        set(win, "size", json_integer(64));
        set(win, "rel", list(t->window, t->nwindow));
        set(o, "windows", win);
    }
    if (!isnan(t->bound)) {
        set(o, "bound", num(t->bound));
        set(o, "ratio", num_or_null(t->ratio));
        set(o, "per_rank_ratio", list(t->per_rank_ratio, t->N));
    }
    if (!isnan(t->expected.excess)) set(o, "expected", expected_json(&t->expected));
    if (!isnan(t->before.excess)) set(o, "first_draws", expected_json(&t->before));
    if (t->tier && *t->tier) set_str(o, "tier", t->tier);
    set_str(o, "verdict", dp_verdict_names[t->verdict]);
    if (t->why[0]) set_str(o, "why", t->why);
    return o;
}

static json_t *bits_json(const dp_bits *b) {
    json_t *o = json_object();
    for (int m = 0; m < DP_NBITMODELS; m++)
        set(o, dp_bits_models[m], num(b->bits[m]));
    set(o, "truncated", num_or_null(b->truncated));
    set_str(o, "model", dp_bits_models[b->model]);
    set(o, "effective", num(b->effective));
    set(o, "slope", num_or_null(b->slope));
    set(o, "biased", json_boolean(b->biased));
    set(o, "like", b->like < 0 ? json_null() : json_string(dp_formats[b->like].name));
    set(o, "wrong", json_boolean(b->wrong));
    set_str(o, "says", b->says);
    return o;
}

static json_t *run_json(const dp_run *r) {
    json_t *o = json_object(), *p = json_object(), *t = json_object(), *ts = json_array(),
           *ch = json_array();
    set_str(o, "id", r->id);
    set_str(o, "case", r->case_name);
    set_str(o, "op", r->op);
    set(o, "ranks", json_integer(r->ranks));
    set_str(o, "backend", dp_backend_names[r->backend]);
    if (r->path) set_str(o, "path", r->path);
    if (r->outcome) set_str(o, "outcome", r->outcome);
    if (r->segments > 1) set(o, "segments", json_integer(r->segments));
    if (r->kept) {
        set(o, "saved_bytes", json_integer((json_int_t)r->saved));
        set(o, "kept_bytes", json_integer((json_int_t)r->kept));
    }
    if (r->way) set_str(o, "way", dp_cuda_way_names[r->way]);
    if (r->has_base) set_str(p, "base", dp_base_names[r->base]);
    if (r->has_chain) set_str(p, "chain", dp_formats[r->chain].name);
    if (r->undeclared)
        set_str(p, "design", "undeclared");
    else if (r->has_base) {
        char design[DP_DESIGN_TEXT];
        dp_design_text(&r->design, design);
        if (*design) set_str(p, "design", design);
    }
    if (r->has_merge) set_str(p, "merge", dp_merge_names[r->merge]);
    if (r->fault) set_str(p, "fault", dp_faults[r->fault].name);
    set(o, "policy", p);
    if (r->verdict != DP_SKIPPED) {
        set_str(t, "kind", r->truth_kind);
        set(t, "bits", json_integer(r->truth_bits));
        set(t, "radius", num_or_null(r->truth_radius));
        set(t, "cached", json_boolean(r->truth_cached));
        if (r->truth_device) set_str(t, "device", r->truth_device);
        const dp_truth_audit *a = &r->truth_audit;
        if (a->columns) {
            json_t *x = json_object();
            char seed[24];
            snprintf(seed, sizeof seed, "%llu", (unsigned long long)a->seed);
            set(x, "columns", json_integer(a->columns));
            set(x, "tokens", json_integer((json_int_t)a->tokens));
            set_str(x, "seed", seed);
            set(x, "worst", num_or_null(a->worst));
            set(t, "audit", x);
        }
        set(o, "truth", t);
    } else
        json_decref(t);
    for (int i = 0; i < r->ntensor; i++)
        json_array_append_new(ts, tensor_json(&r->tensor[i]));
    set(o, "tensors", ts);
    for (int i = 0; i < r->npoint; i++) {
        const dp_chain_point *c = &r->point[i];
        json_t *x = json_object();
        set(x, "rank", json_integer(c->rank));
        set(x, "chunks", json_integer(c->chunks));
        set(x, "rel", num_or_null(c->rel));
        set(x, "effect", num_or_null(c->effect));
        set(x, "bound", num_or_null(c->bound));
        set(x, "abs", num(c->abs));
        set(x, "norm", num(c->norm));
        json_array_append_new(ch, x);
    }
    set(o, "chain", ch);
    if (!isnan(r->slope)) set(o, "slope", num(r->slope));
    if (r->bits.npoint) set(o, "bits", bits_json(&r->bits));
    if (r->cond.condition > 0)
        set(o, "condition",
            json_pack("{so so so si si sI sb}", "condition", num(r->cond.condition), "inverse",
                      num(r->cond.inverse), "entry", num(r->cond.entry), "rank", r->cond.rank,
                      "head", r->cond.head, "token", (json_int_t)r->cond.token, "ill",
                      dp_ill_conditioned(&r->cond, r->base)));
    if (r->settled) set(o, "settled", json_true());
    set_str(o, "verdict", dp_verdict_names[r->verdict]);
    if (r->verdict == DP_FAIL && r->tier && *r->tier) set_str(o, "tier", r->tier);
    if (r->why[0]) set_str(o, "why", r->why);
    set(o, "seconds", num(r->seconds));
    return o;
}

static json_t *case_json(const dp_case *c) {
    json_t *o = json_object(), *w = json_array();
    set_str(o, "name", c->name);
    set_str(o, "op", c->op_name);
    set_str(o, "reason", c->reason);
    set_str(o, "source", c->source);
    if (c->op == DP_OP_RECURRENCE || c->op == DP_OP_STEP) {
        const dp_problem *p = &c->p;
        set(o, "T", json_integer(p->T));
        set(o, "H", json_integer(p->H));
        set(o, "HV", json_integer(p->HV));
        set(o, "K", json_integer(p->K));
        set(o, "V", json_integer(p->V));
        set(o, "R", json_integer(p->R));
        set(o, "Nseq", json_integer(p->Nseq));
    } else if (c->op == DP_OP_CHAIN) {
        set_str(o, "regime", c->data ? "given" : dp_regime_names[c->ch.regime]);
        set(o, "K", json_integer(c->ch.K));
        set(o, "chunks", json_integer(c->ch.n));
    } else {
        set(o, "T", json_integer(c->conv.T));
        set(o, "D", json_integer(c->conv.D));
        set(o, "W", json_integer(c->conv.W));
        set(o, "Nseq", json_integer(c->conv.Nseq));
    }
    if (c->data) set_str(o, "data", strrchr(c->data, '/') ? strrchr(c->data, '/') + 1 : c->data);
    for (int i = 0; i < c->nwarn; i++)
        json_array_append_new(w, dp_json_text(c->warn[i]));
    set(o, "warnings", w);
    return o;
}

static json_t *record_json(const dp_record *r) {
    json_t *o = json_object(), *p = json_object(), *tot = json_object(), *cs = json_array(),
           *rs = json_array();
    char when[40];
    time_t now = time(NULL);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    int n[DP_NVERDICTS];
    dp_record_totals(r, n);
    set_str(o, "schema", "deltaproof-record");
    set(o, "schema_version", json_integer(1));
    set_str(p, "version", DP_VERSION);
    set_str(p, "commit", DP_COMMIT);
    set_str(p, "compiler", "gcc " __VERSION__);
    set_str(p, "blas", openblas_get_config());
    set_str(p, "mpfr", mpfr_get_version());
    set(p, "cores", json_integer(omp_get_num_procs()));
    set_str(p, "device", dp_cuda_device());
    if (r->command) set_str(p, "command", r->command);
    set(o, "program", p);
    set_str(o, "created", when);
    set(o, "seconds", num(r->seconds));
    for (int i = 0; i < DP_NVERDICTS; i++)
        set(tot, dp_verdict_names[i], json_integer(n[i]));
    const dp_digest d = dp_digest_of(r->runs);
    if (d.runs) set(o, "digest", json_pack("{sssi}", "value", d.hex, "runs", d.runs));
    set(o, "totals", tot);
    set(o, "errors", json_integer(r->errors));
    set_str(o, "verdict", dp_record_verdict(r));
    for (int i = 0; i < r->ncase; i++)
        json_array_append_new(cs, case_json(r->cases[i]));
    for (int i = 0; i < r->runs->n; i++)
        json_array_append_new(rs, run_json(&r->runs->run[i]));
    set(o, "cases", cs);
    set(o, "runs", rs);
    return o;
}

dp_status dp_record_write_json(const dp_record *r, const char *path, dp_err *e) {
    return dp_json_write(record_json(r), path, 17, e);
}

static void xml(FILE *f, const char *s) {
    for (; *s; s++) {
        if (*s == '&')
            fputs("&amp;", f);
        else if (*s == '<')
            fputs("&lt;", f);
        else if (*s == '>')
            fputs("&gt;", f);
        else if (*s == '"')
            fputs("&quot;", f);
        else if ((unsigned char)*s >= 32)
            fputc(*s, f);
    }
}

dp_status dp_record_write_junit(const dp_record *r, const char *path, dp_err *e) {
    dp_output out;
    int n[DP_NVERDICTS];
    dp_status st = dp_output_open(&out, path, e);
    if (st) return st;
    FILE *const f = out.f;
    dp_record_totals(r, n);
    fprintf(f,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"deltaproof\" "
            "tests=\"%d\" failures=\"%d\" errors=\"0\" skipped=\"%d\" time=\"%.3f\">\n",
            r->runs->n, n[DP_FAIL], n[DP_SKIPPED] + n[DP_UNJUDGED], r->seconds);
    for (int i = 0; i < r->runs->n; i++) {
        const dp_run *x = &r->runs->run[i];
        fputs("  <testcase classname=\"", f);
        xml(f, x->case_name);
        fputs("\" name=\"", f);
        xml(f, x->id);
        fprintf(f, "\" time=\"%.3f\"", x->seconds);
        if (x->verdict == DP_PASS) {
            fputs("/>\n", f);
            continue;
        }
        fprintf(f, "><%s", x->verdict == DP_FAIL ? "failure" : "skipped");
        if (x->verdict == DP_FAIL && x->tier && *x->tier) fprintf(f, " type=\"%s\"", x->tier);
        fputs(" message=\"", f);
        if (x->verdict == DP_UNJUDGED) fputs("unjudged: ", f);
        xml(f, x->why);
        fputs("\"/></testcase>\n", f);
    }
    fputs("</testsuite>\n", f);
    return dp_output_close(&out, 0, e);
}
