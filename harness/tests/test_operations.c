/* The table of operations: its rows have no gap, its texts are those that `list --keys` prints and
 * cases/README.md repeats, and a case of each has what its row says. */
#include "cases.h"
#include "gt.h"
#include "harness/case/operations.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The smallest case of each. */
static const char *const SMALL[DP_NOPS] = {
    [DP_OP_RECURRENCE] = "op = kda\nT = 12\nK = 4\nHV = 2\n",
    [DP_OP_CHAIN] = "op = chain\nregime = corr\nchunks = 9\nK = 7\n",
    [DP_OP_CONV] = "op = conv\nT = 12\nD = 3\nW = 2\n",
    [DP_OP_STEP] = "op = step\nT = 12\nK = 4\nHV = 2\nW = 2\n",
    [DP_OP_SESSION] = "op = kda\nT = 12\nK = 4\nHV = 2\nsession = 8,4-1\n",
    [DP_OP_STEP_SESSION] = "op = step\nT = 12\nK = 4\nHV = 2\nW = 2\nsession = 8,4-1\n"};

DP_TEST(operations, rows_have_no_gap) {
    int bits = 0;
    for (int i = 0; i < DP_NOPS; i++) {
        const dp_operation *op = &dp_operations[i];
        const int many = op->has_problem + op->has_conv + op->has_factors;
        CHECK(op->name && op->what && op->dims && op->shape && op->describe && op->write,
              "row %d has a gap", i);
        CHECK(op->bit && !(bits & op->bit) && (op->keys & op->bit), "%s: keys", op->name);
        CHECK(many == 1, "%s: %d parts of a case are its own", op->name, many);
        CHECK(!op->inputs == !op->ninputs && !op->inputs == !op->fill &&
                  !op->inputs == !op->fill_gradients && !op->inputs == !op->has_ranks,
              "%s: inputs", op->name);
        CHECK(dp_op_on(op, DP_BACKEND_SIM) && op->faults, "%s: backends, faults", op->name);
        CHECK(!op->has_front || (op->has_problem && op->finish), "%s: front", op->name);
        CHECK(!op->is_recurrence || (op->has_problem && !op->has_front), "%s", op->name);
        bits |= op->bit;
    }
}

DP_TEST(operations, the_key_op_names_the_models_of_the_first_then_the_others) {
    char all[200] = DP_MODEL_WORDS;
    for (int i = 1; i < DP_OP_SESSION; i++) {
        strcat(all, "|");
        strcat(all, dp_operations[i].name);
    }
    CHECK(!strcmp(all, DP_OPERATION_WORDS), "%s, but case files say %s", all, DP_OPERATION_WORDS);
}

/* Its tensors lie in the case where its row says, and so do its tokens. */
DP_TEST(operations, a_case_of_each_has_what_its_row_says) {
    for (int i = 0; i < DP_NOPS; i++) {
        const dp_operation *op = &dp_operations[i];
        char text[200], words[128];
        dp_case c;
        snprintf(text, sizeof text, "reason = r\nsource = s\n%s", SMALL[i]);
        if (!gt_parse_case(text, &c)) continue;
        const dp_packing at = dp_case_packing(&c);
        CHECK((int)c.op == i && dp_op_of(&c) == op, "%s was read as another", op->name);
        CHECK(op->has_ranks ? at.T == (op->has_conv ? &c.conv.T : &c.p.T) : !at.T, "%s: T",
              op->name);
        CHECK(!at.T || (*at.Nseq == 1 && (*at.cu)[0] == 0 && (*at.cu)[1] == *at.T), "%s: sequences",
              op->name);
        CHECK(dp_case_tokens(&c) == (op->has_factors ? 9 * DP_CHUNK : 12), "%s: %lld tokens",
              op->name, (long long)dp_case_tokens(&c));
        CHECK(!op->has_problem || !dp_problem_check(&c.p, 0, NULL), "%s: no problem", op->name);
        CHECK(op->has_front == c.step.on[0], "%s: convolutions", op->name);
        op->describe(&c, 3, words, sizeof words);
        CHECK(strstr(words, op->has_factors ? "9 factors, K 7" : "T 12 on 3 ranks"), "%s: %s",
              op->name, words);
        dp_case_free(&c);
    }
}

/* " recurrence conv; not with data" as the README's column: "rec conv, not with `data`". */
static void column(char *ops, char *out, size_t size) {
    char *data = strstr(ops, "; not with data");
    if (data) *data = 0;
    *out = 0;
    if (!strcmp(ops, " recurrence chain conv"))
        snprintf(out, size, " all");
    else
        for (char *w = strtok(ops, " "); w; w = strtok(NULL, " "))
            snprintf(out + strlen(out), size - strlen(out), " %s",
                     strcmp(w, "recurrence") ? w : "rec");
    if (data) snprintf(out + strlen(out), size - strlen(out), ", not with `data`");
}

/* Which operations take a key, and what it means. */
DP_TEST(operations, readme_says_of_every_key_what_list_says) {
    char *text = gt_readme_of_cases(), name[64] = "", line[1024], cell[128], want[1200], row[80];
    FILE *out = tmpfile();
    REQUIRE(out, "tmpfile");
    dp_case_print_keys(out);
    rewind(out);
    int keys = 0;
    while (fgets(line, sizeof line, out)) {
        char *ops = strstr(line, " [ "), *meaning = line + strspn(line, " ");
        if (*line != ' ') {
            sscanf(line, "%63s", name);
            continue;
        }
        REQUIRE(ops && strrchr(line, ']'), "%s: %s", name, line);
        *ops = *strrchr(ops + 1, ']') = 0;
        column(ops + 2, cell, sizeof cell);
        snprintf(row, sizeof row, "\n| `%s` | ", name);
        snprintf(want, sizeof want, "|%s | %s |\n", cell, meaning);
        const char *at = strstr(text, row), *end = at ? strchr(at + 1, '\n') : NULL;
        const char *found = at ? strstr(at, want) : NULL;
        CHECK(found && end && found < end, "cases/README.md, %s: not as list --keys: %s", name,
              want);
        for (int i = 0; !strcmp(name, "op") && i < DP_NOPS; i++)
            CHECK(strstr(meaning, dp_operations[i].what), "the key op does not explain %s: %s",
                  dp_operations[i].name, dp_operations[i].what);
        keys++;
    }
    CHECK(keys > 30, "%d keys", keys);
    fclose(out);
    free(text);
}
