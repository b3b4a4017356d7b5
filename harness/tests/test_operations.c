/* The table of operations: its rows have no gap, its texts are those that `list --keys` prints. A
 * case of each has the fields of its row. */
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
        CHECK((op->backends >> DP_BACKEND_SIM & 1) && op->faults, "%s: backends, faults", op->name);
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
        CHECK(c.op == op, "%s was read as another", op->name);
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

/* Each key has a line of its own form and one of its meaning, with the operations that take it. */
DP_TEST(operations, list_says_what_every_key_and_operation_is) {
    char name[64] = "", line[1024];
    FILE *out = tmpfile();
    REQUIRE(out, "tmpfile");
    dp_case_print_keys(out);
    rewind(out);
    int keys = 0, meanings = 0;
    while (fgets(line, sizeof line, out)) {
        if (*line != ' ') {
            keys += sscanf(line, "%63s", name) == 1 && strstr(line, "; default: ") != NULL;
            continue;
        }
        const char *meaning = line + strspn(line, " "), *ops = strstr(line, " [");
        CHECK(ops && ops > meaning && ops[2] != ' ' && strrchr(line, ']'), "%s: %s", name, line);
        for (int i = 0; !strcmp(name, "op") && i < DP_NOPS; i++)
            CHECK(strstr(meaning, dp_operations[i].what), "the key op does not explain %s: %s",
                  dp_operations[i].name, dp_operations[i].what);
        meanings++;
    }
    CHECK(keys > 30 && keys == meanings, "%d keys, %d meanings", keys, meanings);
    fclose(out);
}
