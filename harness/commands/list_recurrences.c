/* Formulas from the rows of each recurrence (ref/vocabulary/recurrence.h). */
#include "list_recurrences.h"
#include "ref/vocabulary/recurrence.h"

static const char *const TITLES[DP_NMODELS] = {[DP_GDN] = "Gated DeltaNet",
                                               [DP_KDA] = "Kimi Delta Attention",
                                               [DP_MKDA] = "KDA with R keys a token, which read "
                                                           "one state",
                                               [DP_GDN2] = "Gated DeltaNet-2",
                                               [DP_GLA] = "Gated Linear Attention",
                                               [DP_SSD] = "Mamba-2's state-space duality",
                                               [DP_DELTAPRODUCT] = "Gated DeltaProduct: R keys a "
                                                                   "token, one after the other",
                                               [DP_DPLR] = "diagonal plus low rank, RWKV-7"};

/* The factors of an entry; those with an axis R get the key's index. */
static void put_entry(FILE *f, dp_entry e, int keys) {
    if (e.sign < 0) fputc('-', f);
    for (int i = 0; i < e.n; i++) {
        const int of = dp_factor_input(e.of[i]);
        const int indexed = keys && (of == DP_INPUT_K || of == DP_INPUT_V || of == DP_INPUT_BETA);
        fprintf(f, "%s%s%s", i ? " o " : "", dp_input_fields[of].name, indexed ? "_j" : "");
    }
}

/* " + write' strength (value - read S)"; the sign of an entry that reads alone is turned round. */
static void put_row(FILE *f, const dp_token_row *r, int keys) {
    dp_entry read = r->read;
    put_entry(f, r->write, keys);
    fputs("' ", f);
    if (!dp_entry_is_one(r->strength)) {
        put_entry(f, r->strength, keys);
        fputc(' ', f);
    }
    fputs(read.sign ? "(" : "", f);
    put_entry(f, r->value, keys);
    if (read.sign) {
        if (r->value.sign)
            fputs(" - ", f);
        else
            read.sign = (signed char)-read.sign;
        fputs(read.n > 1 ? "(" : "", f);
        put_entry(f, read, keys);
        fputs(read.n > 1 ? ") S)" : " S)", f);
    }
}

static void put_formula(FILE *f, dp_model m) {
    const dp_recurrence *r = &dp_recurrences[m];
    const int keys = dp_models[m].many_keys;
    fprintf(f, "  S <- %s S", dp_models[m].one_gate ? "exp(g)" : "diag(exp g)");
    if (!r->before) fputs("\n  S <- S + ", f);
    if (keys && !dp_models[m].in_turn) fputs("sum over j = 1 .. R of ", f);
    for (int i = 0; i < r->n; i++) {
        if (i || r->before) fputs(" + ", f);
        put_row(f, &r->row[i], keys);
    }
    fputs(dp_models[m].in_turn ? "   for j = 1 .. R in turn\n" : "\n", f);
    fputs("  o = scale S' q\n", f);
}

static void put_inputs(FILE *f, dp_model m) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_tensor_field *t = &dp_input_fields[i];
        dp_axis axis[DP_MAX_AXES] = {0};
        char axes[40];
        int n = 0;
        if (t->role != DP_ROLE_REQUIRED || !dp_model_has(m, i)) continue;
        for (int a = 0; a < DP_MAX_AXES && t->axis[a]; a++) {
            const int drop = (t->axis[a] == DP_AXIS_R && !dp_models[m].many_keys) ||
                             (t->axis[a] == DP_AXIS_KG && dp_models[m].one_gate);
            if (!drop) axis[n++] = t->axis[a] == DP_AXIS_KG ? DP_AXIS_K : t->axis[a];
        }
        dp_axes_text(axis, axes, sizeof axes);
        fprintf(f, "  %-6s [%s]\n", t->name, axes);
    }
}

void dp_list_recurrences(FILE *f) {
    for (int m = 0; m < DP_NMODELS; m++) {
        fprintf(f, "%s%s: %s\n", m ? "\n" : "", dp_models[m].name, TITLES[m]);
        put_formula(f, (dp_model)m);
        put_inputs(f, (dp_model)m);
    }
}
