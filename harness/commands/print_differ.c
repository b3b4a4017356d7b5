/* How two subjects differ, as text and as JSON (cmd_differ.h). */
#include "cmd_differ.h"
#include "harness/base/terminal.h"

#include <math.h>
#include <string.h>

const char *dp_differ_name(const dp_check_subject *s) {
    return s->library ? s->library->name : dp_backend_names[s->backend];
}

static void differ_claim(const dp_check_subject *s, char *out, size_t size) {
    const char *design = s->library ? s->library->design : "";
    snprintf(
        out, size, "base %s, chain %s%s%s%s%s", dp_base_names[s->base], dp_formats[s->chain].name,
        !design   ? ", design not declared: taken as the default of its base"
        : *design ? ", design "
                  : "",
        design ? design : "", s->fault ? ", fault " : "", s->fault ? dp_faults[s->fault].name : "");
}

static void place_text(const dp_place *at, char *out, size_t size) {
    const struct {
        const char *name;
        long long value;
    } part[] = {{"rank", at->rank},
                {"sequence", at->sequence},
                {"chunk", at->chunk},
                {"token", at->token},
                {"head", at->head}};
    int n = 0;
    *out = 0;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        if (part[i].value >= 0)
            n += snprintf(out + n, size - (size_t)n, "%s%s %lld", n ? ", " : "", part[i].name,
                          part[i].value);
}

static void print_tensor(const dp_differ_tensor *t, FILE *f) {
    char at[128];
    if (t->only) {
        fprintf(f, "%-11s %-11s made by %c alone\n", "-", t->name, t->only == 1 ? 'A' : 'B');
        return;
    }
    dp_put(f,
           t->kind == DP_DIFFER_BEYOND      ? DP_BAD
           : t->kind == DP_DIFFER_UNBOUNDED ? DP_DOUBTFUL
                                            : DP_GOOD,
           dp_differ_names[t->kind], -11);
    fprintf(f, " %-11s", t->name);
    if (!t->different) {
        fprintf(f, " %lld entries\n", (long long)t->entries);
        return;
    }
    fprintf(f, " %lld of %lld entries differ", (long long)t->different, (long long)t->entries);
    if (isfinite(t->relative)) fprintf(f, ", by %.2g of the tensor", t->relative);
    if (!isnan(t->share)) {
        place_text(&t->worst, at, sizeof at);
        fprintf(f, "; a row by %.3g, %.2g of what both bounds allow (%s)", t->off, t->share, at);
    }
    place_text(&t->at, at, sizeof at);
    fprintf(f, "\n              largest: %s, entry %lld: A %.9g (%a), B %.9g (%a)\n", at,
            (long long)t->index, t->a, t->a, t->b, t->b);
}

static void print_truth(const dp_differ_answer *a, FILE *f) {
    for (int k = 0; k < 2; k++) {
        const dp_run *r = a->truth[k];
        if (!r) continue;
        fprintf(f, "  %c against the truth: %s%s%s\n", 'A' + k, dp_verdict_names[r->verdict],
                *r->why ? ": " : "", r->why);
    }
    if (*a->no_truth) fprintf(f, "  not held against the truth: %s\n", a->no_truth);
}

static const char *verdict_of(const dp_differ_answer *a) {
    const int kind = a->d->kind;
    if (!a->d->compared) return "NOTHING COMPARED";
    if (kind == DP_DIFFER_SAME) return "SAME BITS";
    if (kind == DP_DIFFER_WITHIN) return "WITHIN BOTH BOUNDS";
    if (kind == DP_DIFFER_BEYOND) return "BEYOND BOTH BOUNDS";
    return a->status == 0   ? "EACH WITHIN ITS OWN LIMITS"
           : a->status == 1 ? "NOT BOTH WITHIN THEIR LIMITS"
                            : "COULD NOT JUDGE";
}

static void print_blame(const dp_differ_answer *a, FILE *f) {
    const int broken[2] = {a->truth[0] && a->truth[0]->verdict == DP_FAIL,
                           a->truth[1] && a->truth[1]->verdict == DP_FAIL};
    if (broken[0] && broken[1])
        fprintf(f, ": both break their own");
    else if (broken[0] || broken[1])
        fprintf(f, ": %s breaks its own", broken[0] ? "A" : "B");
    else if (a->truth[0] && a->d->kind == DP_DIFFER_BEYOND)
        fprintf(f, ": neither breaks its own by itself");
}

void dp_differ_print(const dp_differ_answer *a, FILE *f) {
    const dp_differ *d = a->d;
    char claim[400];
    fprintf(f, "%s: T = %lld, HV = %d, K = %d, V = %d, %d ranks\n", a->case_name,
            (long long)a->p->T, a->p->HV, a->p->K, a->p->V, a->N);
    for (int k = 0; k < 2; k++) {
        differ_claim(&a->s[k], claim, sizeof claim);
        fprintf(f, "  %c: %s, %s (%.2f s)\n", 'A' + k, dp_differ_name(&a->s[k]), claim,
                d->seconds[k]);
    }
    for (int i = 0; i < d->n; i++)
        print_tensor(&d->t[i], f);
    for (int k = 0; k < 2; k++)
        if (*d->unbounded[k]) fprintf(f, "  no bounds of %c: %s\n", 'A' + k, d->unbounded[k]);
    if (d->first >= 0) {
        const int stage = d->t[d->first].stage;
        fprintf(f, "  first beyond: %s%s%s\n", d->t[d->first].name, stage < 0 ? "" : ", made by ",
                stage < 0 ? "" : dp_stage_names[dp_stage_tensors[stage].made_by]);
    }
    print_truth(a, f);
    fprintf(f, "DIFFER: ");
    dp_put(f, a->status == 0 ? DP_GOOD : a->status == 1 ? DP_BAD : DP_DOUBTFUL, verdict_of(a), 0);
    print_blame(a, f);
    fputc('\n', f);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

/* Numbers that JSON lacks are text, as in a record. */
static json_t *real(double x) {
    return isnan(x)   ? json_string("nan")
           : isinf(x) ? json_string(x > 0 ? "inf" : "-inf")
                      : json_real(x);
}

static json_t *place_json(const dp_place *at) {
    return json_pack("{si si si sI si}", "rank", at->rank, "sequence", at->sequence, "chunk",
                     at->chunk, "token", (json_int_t)at->token, "head", at->head);
}

static json_t *tensor_json(const dp_differ_tensor *t) {
    static const char *const made[] = {"both", "A", "B"};
    json_t *x = json_pack("{ss ss ss sI sI}", "name", t->name, "kind",
                          t->stage < 0 ? "result" : "stage", "made_by", made[t->only], "entries",
                          (json_int_t)t->entries, "different", (json_int_t)t->different);
    if (t->only) return x;
    json_object_set_new(x, "verdict", json_string(dp_differ_names[t->kind]));
    if (!t->different) return x;
    json_t *most = place_json(&t->at);
    json_object_set_new(most, "index", json_integer(t->index));
    json_object_set_new(most, "difference", real(t->most));
    json_object_set_new(most, "a", real(t->a));
    json_object_set_new(most, "b", real(t->b));
    json_object_set_new(x, "relative", real(t->relative));
    json_object_set_new(x, "largest", most);
    if (isnan(t->share)) return x;
    json_t *row = place_json(&t->worst);
    json_object_set_new(row, "share", real(t->share));
    json_object_set_new(row, "difference", real(t->off));
    json_object_set_new(row, "allowed", real(t->allowed));
    json_object_set_new(x, "worst_row", row);
    return x;
}

static json_t *side_json(const dp_differ_answer *a, int k) {
    char claim[400];
    differ_claim(&a->s[k], claim, sizeof claim);
    json_t *x = json_pack("{ss ss sf}", "name", dp_differ_name(&a->s[k]), "claim", claim, "seconds",
                          a->d->seconds[k]);
    if (*a->d->unbounded[k]) json_object_set_new(x, "no_bounds", json_string(a->d->unbounded[k]));
    if (a->truth[k]) {
        json_object_set_new(x, "truth", json_string(dp_verdict_names[a->truth[k]->verdict]));
        json_object_set_new(x, "why", json_string(a->truth[k]->why));
    }
    return x;
}

json_t *dp_differ_json(const dp_differ_answer *a) {
    json_t *list = json_array();
    for (int i = 0; i < a->d->n; i++)
        json_array_append_new(list, tensor_json(&a->d->t[i]));
    json_t *x = json_pack("{ss sI si si si si ss si so so so}", "case", a->case_name, "T",
                          (json_int_t)a->p->T, "HV", a->p->HV, "K", a->p->K, "V", a->p->V, "ranks",
                          a->N, "verdict", dp_differ_names[a->d->kind], "status", a->status, "A",
                          side_json(a, 0), "B", side_json(a, 1), "tensors", list);
    if (a->d->first >= 0)
        json_object_set_new(x, "first_beyond", json_string(a->d->t[a->d->first].name));
    if (*a->no_truth) json_object_set_new(x, "no_truth", json_string(a->no_truth));
    return x;
}
