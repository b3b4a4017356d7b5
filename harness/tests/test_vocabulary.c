/* Lists of tensors that other languages hold, against the table (ref/vocabulary/tensors.c): names,
 * and axes where they are said. */
#include "gt.h"
#include "harness/case/operations.h"
#include "ref/chunk/stages.h"
#include "ref/vocabulary/problem.h"
#include "ref/vocabulary/recurrence.h"
#include "ref/vocabulary/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64 };
typedef struct {
    int n;
    char word[MOST][40];
} words;

/* The quoted words between `begin` and the first of `end` behind it, in a file of the tree. */
static int quoted(const char *file, const char *begin, const char *end, words *w) {
    char path[600], *text = calloc(1, 1 << 18);
    snprintf(path, sizeof path, "%s/../%s", gt_cases(), file);
    FILE *in = fopen(path, "r");
    w->n = 0;
    if (in && fread(text, 1, (1 << 18) - 1, in) > 0) {
        char *at = strstr(text, begin), *stop = at ? strstr(at + strlen(begin), end) : NULL;
        if (stop) *stop = 0;
        for (char *p = stop ? at + strlen(begin) : NULL; p && (p = strchr(p, '"')) && w->n < MOST;
             p++) {
            const size_t len = strcspn(++p, "\"");
            snprintf(w->word[w->n++], sizeof w->word[0], "%.*s", (int)len, p);
            p += len;
        }
    }
    if (in) fclose(in);
    free(text);
    return w->n;
}

static void expect(const char *what, const words *got, const words *want) {
    CHECK(got->n == want->n, "%s: %d words, the table has %d", what, got->n, want->n);
    for (int i = 0; i < got->n && i < want->n; i++)
        CHECK(!strcmp(got->word[i], want->word[i]), "%s: '%s', the table has '%s'", what,
              got->word[i], want->word[i]);
}

static void add(words *w, const char *word) {
    snprintf(w->word[w->n++], sizeof w->word[0], "%s", word);
}

static void add_axes(words *w, const dp_tensor_field *f) {
    char axes[40];
    dp_axes_text(f->axis, axes, sizeof axes);
    add(w, axes);
}

DP_TEST(vocabulary, python_has_the_tensors_and_axes_of_the_table) {
    words got, inputs = {0}, results = {0}, stages = {0};
    for (int i = 0; i < DP_NINPUTS; i++) {
        add(&inputs, dp_field_file_name(&dp_input_fields[i]));
        add_axes(&inputs, &dp_input_fields[i]);
    }
    for (int i = 0; i < DP_NRESULTS; i++) {
        add(&results, dp_result_fields[i].name);
        add_axes(&results, &dp_result_fields[i]);
    }
    REQUIRE(quoted("python/deltaproof/vocabulary.py", "\nINPUTS = {", "}", &got), "no INPUTS");
    expect("INPUTS", &got, &inputs);
    REQUIRE(quoted("python/deltaproof/vocabulary.py", "\nRESULTS = {", "}", &got), "no RESULTS");
    expect("RESULTS", &got, &results);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        add(&stages, dp_stage_tensors[i].name);
    REQUIRE(quoted("python/deltaproof/vocabulary.py", "\nSTAGES = (", "\n)", &got), "no STAGES");
    expect("STAGES", &got, &stages);
}

/* Facts that it derives from the names: the input of each gradient. */
DP_TEST(vocabulary, python_derives_what_the_table_says) {
    char cmd[2000], out[2000] = "";
    snprintf(cmd, sizeof cmd,
             "PYTHONDONTWRITEBYTECODE=1 python3 -c \"\n"
             "import runpy\n"
             "v = runpy.run_path('%s/../python/deltaproof/vocabulary.py')\n"
             "print(*(f'{d}={n}' for d, n in v['GRADIENT_OF'].items()))\n"
             "print(*v['TOKENS']); print(*v['INCOMING'])\"",
             gt_cases());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    char want[2000] = "";
    size_t at = 0;
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_tensor_field *f = &dp_result_fields[i];
        if (f->role == DP_ROLE_GRADIENT)
            at += (size_t)snprintf(want + at, sizeof want - at, "%s%s=%s", at ? " " : "", f->name,
                                   dp_field_file_name(&dp_input_fields[f->of]));
    }
    const char *gap = "\n";
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_fields[i].kind == DP_OF_TOKENS) {
            at += (size_t)snprintf(want + at, sizeof want - at, "%s%s", gap,
                                   dp_field_file_name(&dp_input_fields[i]));
            gap = " ";
        }
    gap = "\n";
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_fields[i].role == DP_ROLE_INCOMING) {
            at += (size_t)snprintf(want + at, sizeof want - at, "%s%s", gap,
                                   dp_field_file_name(&dp_input_fields[i]));
            gap = " ";
        }
    snprintf(want + at, sizeof want - at, "\n");
    CHECK(!strcmp(out, want), "Python has\n%sthe table\n%s", out, want);
}

/* Is it a result of a recurrence with a beta? */
static int of_beta(const dp_tensor_field *f) {
    return f->role != DP_ROLE_GRADIENT || dp_model_has(DP_KDA, f->of);
}

/* Programs that share no code with this one, and scripts that read records of the recurrences with
 * a beta. */
DP_TEST(vocabulary, scripts_name_the_results_of_the_table) {
    words got, results = {0}, gradients = {0}, inputs = {0};
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_tensor_field *f = &dp_result_fields[i];
        int listed = f->role != DP_ROLE_GRADIENT; /* not of a user's own rows alone */
        for (int m = 0; m < DP_NMODELS && !listed; m++)
            listed = dp_model_has((dp_model)m, (int)f->of);
        if (listed) add(&results, f->name);
        if (of_beta(f) && f->role == DP_ROLE_GRADIENT) add(&gradients, f->name);
    }
    for (int i = 0; i <= DP_INPUT_DSTATE; i++) /* after those: DP_ROW_INPUTS, there too */
        add(&inputs, dp_field_file_name(&dp_input_fields[i]));
    quoted("scripts/campaigns/adversary/fault.c", "tensor_names[TENSORS] = {", "}", &got);
    expect("scripts/campaigns/adversary/fault.c", &got, &results);
    quoted("scripts/campaigns/adversary/plugin.py", "\nTENSORS = [", "]", &got);
    expect("scripts/campaigns/adversary/plugin.py", &got, &results);
    quoted("scripts/campaigns/peers/field/judge.py", "\nGRADIENTS = (", ")", &got);
    expect("scripts/campaigns/peers/field/judge.py", &got, &gradients);
    quoted("python/bridge.c", "const array all[] = {", "};", &got);
    expect("python/bridge.c", &got, &inputs);
}

/* Which operations the report knows to have no stages, or no ranks. */
DP_TEST(vocabulary, the_report_has_the_operations_of_the_table) {
    words got, stages = {0}, ranks = {0};
    for (int i = 0; i < DP_NOPS; i++) {
        if (!dp_operations[i].has_stages) add(&stages, dp_operations[i].name);
        if (!dp_operations[i].has_ranks) add(&ranks, dp_operations[i].name);
    }
    quoted("reports/read/record.py", "\nNO_STAGES = (", ")", &got);
    expect("NO_STAGES", &got, &stages);
    quoted("reports/read/record.py", "\nNO_RANKS = (", ")", &got);
    expect("NO_RANKS", &got, &ranks);
}

/* ---- lists as text --------------------------------------------------------------------------- */

DP_TEST(vocabulary, a_word_is_listed_whole) {
    static const struct {
        const char *word, *list;
        char between;
        int listed;
    } F[] = {{"dv", "dv", ' ', 1},
             {"dv", "dq dv dk", ' ', 1},
             {"dk", "dq dv dk", ' ', 1},
             {"dq", "dq dv dk", ' ', 1},
             {"d", "dq dv dk", ' ', 0},
             {"v", "dq dv dk", ' ', 0},
             {"dv dk", "dq dv", ' ', 0},
             {"intra", "intra_bwd/gate", '/', 0},
             {"gate", "intra/gate", '/', 1},
             {"", "", ' ', 0},
             {"", "a,b", ',', 0},
             {"a", "", ',', 0}};
    for (size_t i = 0; i < sizeof F / sizeof *F; i++)
        CHECK(dp_is_listed(F[i].word, F[i].list, F[i].between) == F[i].listed, "'%s' in '%s'",
              F[i].word, F[i].list);
}

DP_TEST(vocabulary, names_end_at_a_colon) {
    char name[4], all[64] = "";
    for (const char *at = ", dq  do,,state: dv"; (at = dp_next_name(at, name, sizeof name));)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s|", name);
    CHECK(!strcmp(all, "dq|do|sta|"), "%s", all);
    CHECK(!dp_next_name(NULL, name, sizeof name) && !*name, "%s", name);
}
