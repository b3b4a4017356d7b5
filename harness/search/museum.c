/* Every deliberate fault against every case that could show it (museum.h). */
#include "museum.h"
#include "bisect.h"
#include "harness/record/run_id.h"
#include "harness/run/blame.h"
#include "harness/run/step.h"
#include "ref/files/output.h"
#include "ref/vocabulary/text.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef DP_COMMIT
#define DP_COMMIT "unknown"
#endif
#define REPEATS 4

int dp_fla_sees(const char *name, double rel) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_tensor_field *f = &dp_result_fields[i];
        const int of_gate =
            f->backward && (f->of == DP_INPUT_G || dp_input_fields[f->of].role == DP_ROLE_GATE);
        if (!strcmp(f->name, name)) return !(rel <= (!f->backward ? 5e-3 : of_gate ? 2e-2 : 8e-3));
    }
    return 0;
}

static int fla_red(const dp_run *r) {
    int red = 0;
    for (int i = 0; i < r->ntensor; i++)
        red |= dp_fla_sees(r->tensor[i].name, r->tensor[i].rel_fro);
    return red;
}

/* ---- localisation ---------------------------------------------------------------------------- */

/* The first tensor in the order of the pipeline that fails: all that a verdict alone can say about
 * the stage. */
static dp_museum_place by_verdict(const dp_run *r) {
    static const char *const beside[][2] = {{"y", "conv_fwd"},         {"dx", "conv_bwd"},
                                            {"dw", "conv_bwd"},        {"dbias", "conv_bwd"},
                                            {"o_drafted", "calls"},    {"state_drafted", "calls"},
                                            {"state_within", "calls"}, {"pool", "calls"}};
    dp_museum_place at = {.by = "verdict"};
    const char *stage;
    const dp_judgement *t = dp_first_failing(r, &stage);
    if (!t) return at;
    if (*stage) at.stage = stage;
    for (size_t i = 0; i < sizeof beside / sizeof *beside && !*stage; i++)
        if (!strcmp(t->name, beside[i][0])) at.stage = beside[i][1];
    at.rank = dp_judgement_row(t)->at.rank;
    at.head = dp_judgement_row(t)->at.head;
    return at;
}

int dp_fault_acted(const dp_problem *p, const unsigned char *hit, int N, int rank, int head,
                   const char *tensor) {
    static const char *const of_query_heads[] = {"q",    "k",    "dq",   "dk",      "dx_q",
                                                 "dx_k", "dw_q", "dw_k", "dbias_q", "dbias_k"};
    const int query_heads = dp_find_name(tensor, of_query_heads, 10) >= 0;
    for (int i = 0; i < N * p->HV; i++) {
        const int hv = i % p->HV, mine = query_heads ? hv / dp_G(p) : hv;
        if (hit[i] && (rank < 0 || rank == i / p->HV) && (head < 0 || head == mine)) return 1;
    }
    return 0;
}

static dp_sim_policy policy_of(const dp_case *c, const dp_run *r, dp_fault f) {
    return (dp_sim_policy){r->ranks, r->base, r->chain, r->merge, f, c->backward, r->payload};
}

/* hit: NULL where none is recorded. */
static dp_museum_place locate(const dp_case *c, const dp_sim_policy *how,
                              const unsigned char *hit) {
    const dp_fault f = how->fault;
    dp_museum_place at = {.by = "bisect stage", .rank = -1, .head = -1};
    DP_FREED(dp_bisect_free) dp_bisect b = {0};
    if (dp_step_bisect(c, how, dp_fault_by_run(f) ? REPEATS : 1, 0, &b, NULL)) return at;
    if (!dp_bisect_first(&b, &at.stage) && !dp_fault_by_run(f))
        dp_bisect_expected(&c->p, how, c->input_dtype, &b, NULL);
    const dp_bisect_row *x = dp_bisect_first(&b, &at.stage);
    if (x) {
        at.rank = x->first.at.rank;
        at.head = x->first.at.head;
        snprintf(at.tensor, sizeof at.tensor, "%s", x->tensor);
        at.right = dp_fault_lives_in(f, at.stage) &&
                   (!hit || dp_fault_acted(&c->p, hit, how->N, at.rank, at.head, x->tensor));
    }
    return at;
}

static dp_museum_place locate_run(const dp_case *c, const dp_run *r) {
    dp_sim_policy how = policy_of(c, r, r->fault);
    dp_case owned = *c;
    owned.p = dp_bisect_owned(&c->p, r->own, r->ranks, &how.N);
    if (c->op->has_stages) return locate(&owned, &how, r->hit);
    dp_museum_place at = by_verdict(r); /* one stage, no ranks that matter to it */
    if (dp_case_session(c) && at.stage) at.stage = "calls";
    at.right = dp_fault_lives_in(r->fault, at.stage);
    return at;
}

/* ---- one fault on one case ------------------------------------------------------------------- */

static int acted(const dp_run *r) {
    int any = !r->hit;
    for (int i = 0; r->hit && i < r->nhit; i++)
        any |= r->hit[i];
    return any;
}

static int smaller(const dp_museum_row *row, const dp_case *c) {
    return !row->id[0] || dp_case_tokens(c) < row->T;
}

static void note(dp_museum_row *row, const dp_case *c, const char *id, const char *tensor,
                 const char *tier, double ratio) {
    row->T = dp_case_tokens(c);
    row->ratio = ratio;
    row->tier = tier;
    snprintf(row->id, sizeof row->id, "%.511s", id);
    snprintf(row->tensor, sizeof row->tensor, "%.23s", tensor);
}

static const char *tier_of(const dp_run *r) {
    return r->tier && *r->tier ? r->tier : r->exact ? "exact" : "bound";
}

static const dp_judgement *reddest(const dp_run *r) {
    const dp_judgement *bad = NULL;
    for (int i = 0; i < r->ntensor; i++)
        if (r->tensor[i].verdict == DP_FAIL && dp_judgement_says_more(bad, &r->tensor[i]))
            bad = &r->tensor[i];
    return bad;
}

static const dp_run *same_without(const dp_runs *clean, const dp_run *r) {
    for (int i = 0; i < clean->n; i++) {
        const dp_run *x = &clean->run[i];
        if (x->own == r->own && x->ranks == r->ranks && x->base == r->base &&
            x->chain == r->chain && x->merge == r->merge)
            return x;
    }
    return NULL;
}

static void count_place(dp_museum_row *row, const dp_museum_place *at, const char *id) {
    row->located++;
    row->right += at->right;
    if (!at->right && !row->astray[0])
        snprintf(row->astray, sizeof row->astray, "%.150s: %s, %s, rank %d, head %d", id,
                 at->stage ? at->stage : "no stage", at->tensor, at->rank, at->head);
}

/* Counts the runs of one case, and localises the red run with the most ranks. */
static void judge_runs(const dp_case *c, const dp_runs *runs, const dp_runs *clean, int locations,
                       dp_museum_row *row) {
    const dp_run *most = NULL, *first = NULL;
    for (int i = 0; i < runs->n; i++) {
        const dp_run *r = &runs->run[i], *without = same_without(clean, r);
        if (r->verdict == DP_SKIPPED) continue;
        row->runs++;
        row->acted += acted(r);
        if (r->verdict != DP_FAIL) continue;
        row->red++;
        if (!first) first = r;
        if (!most || r->ranks > most->ranks) most = r;
        if (!row->ranks || r->ranks < row->ranks) row->ranks = r->ranks;
        if (c->op->is_recurrence && without && !fla_red(without)) {
            row->fla_of++;
            row->fla_red += fla_red(r);
        }
    }
    if (!first) return;
    if (row->located < locations || locations < 0) {
        const dp_museum_place at = locate_run(c, most);
        count_place(row, &at, most->id);
        if (!row->place.stage || (at.right && !row->place.right && smaller(row, c)))
            row->place = at;
    }
    if (smaller(row, c)) {
        const dp_judgement *t = reddest(first);
        note(row, c, first->id, t ? t->name : first->op, t ? tier_of(first) : "bits",
             t ? (t)->times : NAN);
    }
}

static dp_status repeat_case(const dp_case *c, const dp_runs *clean, int locations,
                             dp_museum_row *row, dp_err *e) {
    for (int i = 0; i < clean->n; i++) {
        const dp_run *r = &clean->run[i];
        dp_repeat x;
        char id[512];
        if (!dp_backends[r->backend].simulated || r->verdict == DP_SKIPPED) continue;
        dp_sim_policy how = policy_of(c, r, row->fault);
        dp_case owned = *c;
        owned.p = dp_bisect_owned(&c->p, r->own, r->ranks, &how.N);
        const dp_status st = dp_repeat_sim(&owned.p, &how, REPEATS, &x, e);
        if (st) return st;
        row->runs++;
        row->acted++;
        row->red += x.differ > 0;
        if (!x.differ) {
            free(x.hit);
            continue;
        }
        if (!row->ranks || r->ranks < row->ranks) row->ranks = r->ranks;
        if (row->located < locations || locations < 0) {
            const dp_museum_place at = locate(&owned, &how, x.hit);
            count_place(row, &at, r->id);
            if (!row->place.stage) row->place = at;
        }
        free(x.hit);
        if (!smaller(row, c)) continue;
        snprintf(id, sizeof id, "%s,fault=%s", r->id, dp_faults[row->fault].name);
        note(row, c, id, dp_stage_names[x.stage], "repeat", INFINITY);
    }
    return DP_OK;
}

/* ---- all cases ------------------------------------------------------------------------------- */

/* Small enough for a look of minutes: generated, no long sequence, no chain of thousands of
 * factors. */
static int small(const dp_case *c) {
    return !c->data && dp_case_tokens(c) <= (c->op->has_factors ? 64 * DP_CHUNK : 8192);
}

static dp_status one_case(const dp_case *c, const dp_museum_options *o, dp_museum *m, dp_err *e) {
    const dp_backend sim[] = {DP_BACKEND_SIM};
    const dp_base bases[] = {DP_BASE_FP32, DP_BASE_BF16};
    const dp_format chain[] = {DP_FP32};
    const dp_exchange merge[] = {DP_EXCHANGE_ALLGATHER};
    dp_run_options ro = {.nbackend = 1, .backend = sim, .cache = o->cache};
    if (!o->all) {
        ro.nbase = 2;
        ro.base = bases;
        ro.nchain = 1;
        ro.chain = chain;
        ro.nmerge = 1;
        ro.merge = merge;
    }
    DP_FREED(dp_runs_free) dp_runs clean = {0};
    dp_status st = dp_case_run(
        c, &ro, &clean, e); /* fills the cache, too: the runs with faults then only read it */
    for (int i = 0; i < clean.n; i++) {
        m->clean_runs++;
        if (clean.run[i].verdict != DP_FAIL) continue;
        if (!m->clean_red++)
            snprintf(m->clean_why, sizeof m->clean_why, "%.120s: %.120s", clean.run[i].id,
                     clean.run[i].why);
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (int f = 1; f < DP_NFAULTS; f++) {
        dp_err fe = {0};
        dp_runs runs = {0};
        dp_run_options fo = ro;
        fo.fault = (dp_fault)f;
        if (st || !clean.n || (o->only && (int)o->only != f) ||
            !dp_fault_shows((dp_fault)f, c->op->faults))
            continue;
        dp_status fs = dp_fault_by_run((dp_fault)f)
                           ? repeat_case(c, &clean, o->nlocate, &m->row[f], &fe)
                           : dp_case_run(c, &fo, &runs, &fe);
        if (!fs && !dp_fault_by_run((dp_fault)f))
            judge_runs(c, &runs, &clean, o->nlocate, &m->row[f]);
        if (fs) {
#pragma omp critical
            st = dp_fail(e, fs, "%s", fe.msg);
        }
        dp_runs_free(&runs);
    }
    return st;
}

dp_status dp_museum_run(char *const *path, int npath, const dp_museum_options *o, dp_museum *m,
                        dp_err *e) {
    dp_status st = DP_OK;
    const double t0 = omp_get_wtime();
    *m = (dp_museum){0};
    for (int f = 0; f < DP_NFAULTS; f++)
        m->row[f].fault = (dp_fault)f;
    for (int i = 0; i < npath && !st; i++) {
        dp_case c;
        if ((st = dp_case_load(path[i], &c, e))) break;
        if (o->all || small(&c)) {
            const double t1 = omp_get_wtime();
            m->ncase++;
            st = one_case(&c, o, m, e);
            if (!o->quiet) fprintf(stderr, "%-24s %6.1f s\n", c.name, omp_get_wtime() - t1);
        }
        dp_case_free(&c);
    }
    m->seconds = omp_get_wtime() - t0;
    return st;
}

/* ---- table and record ------------------------------------------------------------------------ */

void dp_museum_print(const dp_museum *m, const dp_museum_options *o, FILE *f) {
    int shown = 0, red = 0, located = 0, right = 0;
    fprintf(f, "%-21s %3s  %-11s %-46s %-12s %-7s %-34s %-5s %5s %2s %s\n", "fault", "bug",
            "red/acted", "smallest problem that shows it", "worst tensor", "tier", "located at",
            "right", "T", "N", "FLA");
    for (int i = 1; i < DP_NFAULTS; i++) {
        const dp_museum_row *r = &m->row[i];
        char bug[8] = "", of[16], place[64] = "", right_of[16] = "", fla[16] = "", id[512],
             T[16] = "", N[8] = "";
        if (o->only && (int)o->only != i) continue;
        shown++;
        red += r->red > 0;
        located += r->located;
        right += r->right;
        if (dp_faults[i].bug) snprintf(bug, sizeof bug, "%d", dp_faults[i].bug);
        snprintf(of, sizeof of, "%d/%d", r->red, r->acted);
        snprintf(id, sizeof id, "%s", r->id);
        dp_id_cut(id, DP_ID_FAULT, "");
        dp_id_cut(id, DP_ID_MERGE, dp_exchange_names[DP_EXCHANGE_ALLGATHER]);
        if (r->place.stage)
            snprintf(place, sizeof place, "%s, rank %d, head %d", r->place.stage, r->place.rank,
                     r->place.head);
        if (r->located) snprintf(right_of, sizeof right_of, "%d/%d", r->right, r->located);
        if (r->fla_of) snprintf(fla, sizeof fla, "%d/%d", r->fla_red, r->fla_of);
        if (r->red) {
            snprintf(T, sizeof T, "%lld", (long long)r->T);
            snprintf(N, sizeof N, "%d", r->ranks);
        }
        fprintf(f, "%-21s %3s  %-11s %-46s %-12s %-7s %-34s %-5s %5s %2s %s\n", dp_faults[i].name,
                bug, of, r->red ? id : "NOT SEEN", r->tensor, r->tier ? r->tier : "", place,
                right_of, T, N, fla);
    }
    for (int i = 1; i < DP_NFAULTS; i++)
        if (m->row[i].astray[0])
            fprintf(f, "located wrongly: %s: %s\n", dp_faults[i].name, m->row[i].astray);
    for (int b = 1; b <= DP_NBUGS && !o->only; b++) {
        int n = 0;
        for (int i = 1; i < DP_NFAULTS; i++)
            n += dp_faults[i].bug == b;
        if (!n) fprintf(f, "bug %d (%s): %s\n", b, dp_bugs[b].what, dp_bugs[b].note);
    }
    fprintf(
        f, "red/acted: runs whose verdict fails, of those where the fault changed anything; right: "
           "located at the fault's own stage, where it acted; T, N: smallest problem and number\n"
           "of ranks that show it; FLA: red runs above the thresholds of FLA's tests, of those "
           "below them without the fault\n");
    fprintf(f, "%d cases, %d runs without a fault: %d red%s%s\n", m->ncase, m->clean_runs,
            m->clean_red, m->clean_red ? ": " : "", m->clean_why);
    fprintf(f,
            "MUSEUM: %d of %d faults seen, %d of %d red runs located at the right stage, rank and "
            "head (%.0f s)\n",
            red, shown, right, located, m->seconds);
}

static void put(json_t *o, const char *k, json_t *v) { json_object_set_new(o, k, v); }

static json_t *fault_json(const dp_museum_row *r) {
    const dp_fault_info *i = &dp_faults[r->fault];
    json_t *o = json_pack("{ss si ss ss ss si si si}", "name", i->name, "bug", i->bug, "stage",
                          i->stage, "what", i->what, "source", i->source, "runs", r->runs, "acted",
                          r->acted, "red", r->red);
    put(o, "seen",
        r->red ? json_pack("{so sI ss ss so}", "id", dp_json_text(r->id), "T", (json_int_t)r->T,
                           "tensor", r->tensor, "tier", r->tier, "ratio", dp_json_number(r->ratio))
               : json_null());
    put(o, "ranks", r->red ? json_integer(r->ranks) : json_null());
    put(o, "located",
        r->place.stage ? json_pack("{ss ss ss si si sb}", "by", r->place.by, "stage",
                                   r->place.stage, "tensor", r->place.tensor, "rank", r->place.rank,
                                   "head", r->place.head, "right", r->place.right)
                       : json_null());
    put(o, "locations",
        json_pack("{si si so}", "right", r->right, "of", r->located, "astray",
                  dp_json_text(r->astray)));
    put(o, "fla", json_pack("{si si}", "red", r->fla_red, "of", r->fla_of));
    return o;
}

dp_status dp_museum_write(const dp_museum *m, const char *path, dp_err *e) {
    json_t *o = json_object(), *fs = json_array(), *bs = json_array();
    put(o, "schema", json_string("deltaproof-museum"));
    put(o, "schema_version", json_integer(1));
    put(o, "commit", json_string(DP_COMMIT));
    put(o, "seconds", dp_json_number(m->seconds));
    put(o, "cases", json_integer(m->ncase));
    put(o, "clean", json_pack("{si si}", "runs", m->clean_runs, "red", m->clean_red));
    for (int i = 1; i < DP_NFAULTS; i++)
        json_array_append_new(fs, fault_json(&m->row[i]));
    for (int b = 1; b <= DP_NBUGS; b++) {
        json_t *names = json_array();
        for (int i = 1; i < DP_NFAULTS; i++)
            if (dp_faults[i].bug == b) json_array_append_new(names, json_string(dp_faults[i].name));
        json_array_append_new(bs, json_pack("{si ss ss so}", "number", b, "what", dp_bugs[b].what,
                                            "note", dp_bugs[b].note, "faults", names));
    }
    put(o, "faults", fs);
    put(o, "bugs", bs);
    return dp_json_write(o, path, 6, e);
}
