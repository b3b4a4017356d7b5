/* Any program as a subject (harness/library/command.h). The example passes under run, check, bisect
 * and shrink in both forms; a wrong kernel fails at its fault. Every misbehaviour of a program is
 * reported with its status, and no process that it started is left. */
#include "attack.h"
#include "gt.h"
#include "harness/search/shrink.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SMALL                                                                           \
    "reason = r\nsource = s\nop = kda\nT = 96\nH = 1\nHV = 2\nK = 8\nV = 4\ng_scale = " \
    "0.02\ns0_scale = 1\nranks = 1,4\nbase = fp32\nchain = fp32\n"
#define PACKED                                                                                 \
    "reason = r\nsource = s\nop = kda\nT = 100\nHV = 2\nK = 8\nV = 4\ncu_seqlens = 0,30,100\n" \
    "g_scale = 0.02\nbase = fp32\n"

static char dir[512];

/* $A: the example, $B: the bad one. 0: numpy is not there. */
static int set_up(const char *name) {
    snprintf(dir, sizeof dir, "%s", at_dir(name));
    at_write(at_text("%s/small.case", dir), SMALL);
    at_write(at_text("%s/packed.case", dir), PACKED);
    if (!getenv("DP_PYTHON")) setenv("DP_PYTHON", "python3", 1);
    return at_sh(dir, 30, "\"$DP_PYTHON\" -c 'import numpy'") == 0;
}

#define NEEDS_NUMPY(name) \
    if (!set_up(name)) SKIP("numpy is not installed")

static int sh(int seconds, const char *bad, const char *line) {
    return at_sh(dir, seconds,
                 "S=$(realpath $C/../harness); export BAD='%s' EXAMPLE=$S/subject NOTED=$PWD/noted "
                 "TMPDIR=$PWD; "
                 "A=\"$DP_PYTHON $S/subject/example_program.py\" "
                 "B=\"$DP_PYTHON $S/tests/data/bad_program.py\" O='--cache ../cache-of-commands'; "
                 "%s",
                 bad, line);
}

/* Folders of files that are left. */
static int left(void) { return at_sh(dir, 10, "ls -d deltaproof-run-* 2>/dev/null") == 0; }

#define EXPECT_SAYS(status, want, says)               \
    do {                                              \
        const int got_ = (status);                    \
        CHECK(got_ == (want) && strstr(at_out, says), \
              "status %d, not %d with '%s': "         \
              "%.900s",                               \
              got_, want, says, at_out);              \
    } while (0)

DP_TEST(command, the_example_passes_in_both_forms_on_every_form_of_gate_and_beta) {
    NEEDS_NUMPY("command");
    EXPECT_SAYS(sh(120, "",
                   "$P run smoke-kda smoke-gdn lower-bound packed-empty --cases $C $O --base fp32 "
                   "--run \"$A IN OUT\""),
                0, "VERDICT: PASS (4 passed, 0 failed");
    EXPECT_SAYS(
        sh(120, "",
           "$P run smoke-kda smoke-gdn lower-bound packed-empty smoke-mkda2 smoke-conv "
           "--cases $C $O --base fp32 --serve \"$A\" --json r.json && grep '\"path\"' r.json"),
        0, "VERDICT: PASS (4 passed, 0 failed, 2 skipped");
    CHECK(strstr(at_out, "takes one key a token") && strstr(at_out, "example_program.py"), "%s",
          at_out);
    CHECK(!left(), "%s", at_out);
}

DP_TEST(command, check_holds_for_the_example_and_a_wrong_kernel_fails_the_right_check) {
    NEEDS_NUMPY("command-check");
    EXPECT_SAYS(sh(120, "", "$P check small.case --base fp32 --bitwise --run \"$B\""), 0,
                "CHECK: PASS (12 held, 0 did not, 8 skipped)");
    EXPECT_SAYS(sh(60, "", "$P check beta-zero --cases $C --base fp32 --serve \"$A\""), 0,
                " 0 did not, 8 skipped"); /* zeros of a head are right */
    EXPECT_SAYS(sh(60, "", "$P check packed.case --base fp32 --bitwise --serve \"$B\""), 0,
                "CHECK: PASS (13 held, 0 did not, 7 skipped)");
    EXPECT_SAYS(sh(60, "",
                   "$P check packed.case --tokens 512 --heads 2 --base fp32 --bitwise "
                   "--serve \"$B\""),
                0, "T = 512, heads 0 to 1 of 2");
    EXPECT_SAYS(sh(60, "leak", "$P check small.case --base fp32 --serve \"$B\""), 1,
                "fail     causality-chunk");
    CHECK(strstr(at_out, "pass     heads") && strstr(at_out, "pass     sign-q") &&
              strstr(at_out, "both bounds allow"),
          "%s", at_out);
    EXPECT_SAYS(sh(60, "unsteady", "$P check small.case --base fp32 --serve \"$B\" --only repeat"),
                0, "within bounds, at most");
    EXPECT_SAYS(sh(60, "unsteady",
                   "$P check small.case --base fp32 --bitwise --serve \"$B\" --only repeat"),
                1, "fail     repeat");
    EXPECT_SAYS(sh(60, "chunk",
                   "$P check small.case --base fp32 --design chunks=16:64:128 --serve \"$B\" "
                   "--only chunk-size"),
                1, "o: rank 0, head 0, token 1: chunks of 16 and of 64 differ by");
    EXPECT_SAYS(sh(60, "no-state", "$P check small.case --base fp32 --serve \"$B\" --only prefix"),
                2, "it does not write final_state");
}

DP_TEST(command, bisect_and_shrink_take_a_program) {
    NEEDS_NUMPY("command-shrink");
    EXPECT_SAYS(sh(60, "late", "$P bisect stage small.case $O --base fp32 --run \"$B\""), 1,
                "WRONG STAGE: one of");
    EXPECT_SAYS(sh(60, "late",
                   "$P shrink small.case $O --base fp32 --serve \"$B\" --limit 5 && cat "
                   "small.min.case"),
                0, "T 6 on 1 ranks");
    CHECK(strstr(at_out, "o over its bound") && strstr(at_out, " --serve '"), "%s", at_out);
    EXPECT_SAYS(sh(60, "late", "$P run small.case packed.case $O --base fp32 --run \"$B\""), 1,
                "again:   deltaproof run --id 'small:backend=subject,ranks=1,base=fp32,chain=fp32' "
                "--run '");
    EXPECT_SAYS(sh(60, "late",
                   "$P explain smoke-kda:backend=subject,ranks=1,base=fp32,chain=fp32 --run \"$B\" "
                   "--design recurrent 2>&1"),
                0, "design recurrent");
    EXPECT_SAYS(sh(60, "raise", "$P shrink small.case $O --base fp32 --serve \"$B\" --tries 60"), 0,
                "failed: ValueError; the run fails");
}

DP_TEST(command, what_goes_wrong_is_reported_as_what_it_is) {
    static const struct {
        const char *bad;
        int status;
        const char *says;
    } rows[] = {
        {"crash", 1, "crashed: SIGSEGV: about to crash"},
        {"killed", 1, "crashed: SIGKILL (from outside: the machine may have run out of memory)"},
        {"raise", 1, "ended with exit status 1: "},
        {"raise", 1, "ValueError: no luck\\x1b[2J"},
        {"exit", 1, "ended with exit status 5: first line | second line"},
        {"exit0", 1, "OUT: was not written"},
        {"no-file", 1, "OUT: was not written"},
        {"garbage", 1, "OUT: header length"},
        {"short", 1, "(truncated file?)"},
        {"pipe", 1, "OUT: is a pipe, not a regular file"},
        {"folder", 1, "OUT: is a folder, not a regular file"},
        {"link", 1, "OUT: is a link, not a regular file"},
        {"shape", 1, "OUT: tensor o: shape [95,2,4], but IN calls for [96,2,4]"},
        {"name", 1, "OUT: tensor out is not known; known: o final_state"},
        {"no-o", 1, "OUT: tensor o is missing"},
        {"gradient", 1, "OUT: tensor dq is a gradient, but IN has no tensor do"},
        {"inner", 1, "OUT: tensor dbeta is a gradient, but IN has no tensor do"},
        {"alias", 0, "VERDICT: PASS"},
        {"twice-named", 1, "OUT: tensor final_state is there twice, under another name too"},
        {"vk", 0, "VERDICT: PASS"},
        {"vk-unsaid", 1, "shape [1,2,4,8], but IN calls for [1,2,8,4]"},
        {"layout", 1, "OUT: metadata `state_layout` = 'diagonal' is neither kv nor vk"},
        {"agrees", 0, "VERDICT: PASS"},
        {"claims", 1, "OUT: metadata `base` = 'bf16', but it is judged as fp32 (--base)"},
        {"claims", 1, "OUT: metadata `claim` = 'tf32', but it is judged as fp32 (--chain)"},
        {"late", 1, "(rank 0, sequence 0, token "},
        {"unsupported", 2, "not on a Monday"},
        {"talks", 0, "VERDICT: PASS"},
    };
    NEEDS_NUMPY("command-wrong");
    at_write(at_text("%s/small.case", dir), SMALL "backward = no\n");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        EXPECT_SAYS(sh(60, rows[i].bad, "$P run small.case $O --base fp32 --run \"$B IN OUT\""),
                    rows[i].status, rows[i].says);
        CHECK(!left(), "%s: %s", rows[i].bad, at_out);
    }
    EXPECT_SAYS(
        sh(60, "no-state", "$P run small.case $O --base fp32 --writes o,final_state --run \"$B\""),
        1, "OUT: tensor final_state is missing");
    EXPECT_SAYS(sh(60, "forgets", "$P check small.case --base fp32 --run \"$B\" --only repeat"), 1,
                "OUT: tensor final_state is missing, which the first OUT held");
}

DP_TEST(command, what_serve_answers_wrongly_is_said_and_the_next_call_starts_it_again) {
    static const struct {
        const char *bad;
        int status;
        const char *says;
    } rows[] = {
        {"chatty", 1,
         "answered 'loading the model', which is none of: ok, unsupported WHY, failed"},
        {"twice", 1, "answered 'ok\\x0aok"},
        {"endless", 1, "answered 'xxxx"},
        {"crash", 1, "crashed: SIGSEGV: about to crash"},
        {"exit", 1, "ended with exit status 5 before it answered: first line | second line"},
        {"raise", 1, "failed: ValueError: no luck\\x1b[2J"},
        {"mute", 1, "did not answer within 2 s"},
        {"deaf", 1, "did not answer within 2 s"},
        {"unsupported", 2, "not on a Monday"},
    };
    NEEDS_NUMPY("command-serve");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        EXPECT_SAYS(
            sh(30, rows[i].bad, "$P run small.case $O --base fp32 --limit 2 --serve \"$B\""),
            rows[i].status, rows[i].says);
    EXPECT_SAYS(
        sh(60, "ahead", "$P run small.case packed.case $O --again 0 --base fp32 --serve \"$B\""), 1,
        "(1 passed, 1 failed");
    CHECK(strstr(at_out, "answered 'ok\\x0a") || strstr(at_out, "OUT: was not written"), "%s",
          at_out); /* as the answer comes before the next call, or within it */
    EXPECT_SAYS(
        sh(60, "crash", "$P run small.case packed.case $O --again 0 --base fp32 --serve \"$B\""), 1,
        "VERDICT: FAIL (0 passed, 2 failed");
}

DP_TEST(command, nothing_that_it_started_outlives_its_call_its_limits_or_the_program) {
    int noted;
    NEEDS_NUMPY("command-ends");
    EXPECT_SAYS(sh(30, "child", "$P run small.case $O --again 0 --base fp32 --run \"$B\""), 0,
                "VERDICT: PASS");
    int alive = at_survivors(dir, "noted", &noted);
    CHECK(noted == 1 && !alive, "%d of %d processes are still there", alive, noted);
    EXPECT_SAYS(sh(30, "child", "$P run small.case $O --again 0 --base fp32 --serve \"$B\""), 0,
                "VERDICT: PASS");
    alive = at_survivors(dir, "noted", &noted);
    CHECK(noted == 1 && !alive, "%d of %d processes are still there", alive, noted);
    EXPECT_SAYS(sh(30, "hang", "$P run small.case $O --base fp32 --run \"$B\" --limit 2"), 1,
                "did not end within 2 s: still busy");
    EXPECT_SAYS(sh(30, "eat", "$P run small.case $O --base fp32 --run \"$B\" --memory 0.7"), 1,
                "MemoryError: Unable to allocate 2.00 GiB");
    for (int i = 0; i < 2; i++) {
        static const char *const sig[] = {"TERM", "KILL"};
        char line[400];
        snprintf(line, sizeof line,
                 "(BAD=linger $P run small.case $O --base fp32 --run \"$B\" >out 2>&1; echo status "
                 "$? >>out) & "
                 "until test -s noted; do sleep 0.1; done; pkill -%s -P $! deltaproof; "
                 "wait; " AT_WAIT_FOR("noted") "; cat out",
                 sig[i]);
        sh(30, "linger", line);
        alive = at_survivors(dir, "noted", &noted);
        CHECK(noted == 1 && !alive, "SIG%s: %d of %d processes are still there: %.300s", sig[i],
              alive, noted, at_out);
    }
    EXPECT_SAYS(sh(30, "",
                   "touch -d '2 minutes ago' deltaproof-run-*; "
                   "$P run small.case $O --base fp32 --run \"$B\""),
                0, "VERDICT: PASS");
    CHECK(!left(), "the next program left folders of those that were killed: %s", at_out);
}

DP_TEST(command, bad_use_ends_with_2_before_anything_is_started) {
    static const struct {
        const char *options, *says;
    } rows[] = {
        {"--base fp32 --run ''", "--run: names no program"},
        {"--base fp32 --run \"touch 'noted\"", "a quote or a backslash has no end"},
        {"--base fp32 --run 'touch noted IN'", "--run: has the word IN, but not OUT"},
        {"--base fp32 --run 'touch noted --out=OUT'", "--run: has the word OUT, but not IN"},
        {"--base fp32 --run nosuchprogram", "nosuchprogram: no program of that name in PATH"},
        {"--base fp32 --run './small.case IN OUT'", "no program of that name is there"},
        {"--base fp32 --serve 'touch noted IN OUT'", "leave the words out"},
        {"--base fp32 --run 'touch noted' --serve 'touch noted'", "exclude each other"},
        {"--base fp32 --run 'touch noted' --subject x.so", "exclude each other"},
        {"--base fp32 --run 'touch noted' --writes o,p", "writes 'p', which is no output"},
        {"--base fp32 --run 'touch noted' --writes ''", "says that it writes nothing"},
        {"--base fp32 --run 'touch noted' --design chunk=0.5", "chunk"},
        {"--base fp32 --run 'touch noted' --fault merge-scaled", "--fault"},
        {"--writes o", "--writes goes with --run and --serve"},
    };
    static const char *const command[] = {"run", "check", "shrink", "bisect stage"};
    char line[400];
    snprintf(dir, sizeof dir, "%s", at_dir("command-use"));
    at_write(at_text("%s/small.case", dir), SMALL);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int k = 0; k < 4; k++) {
            snprintf(line, sizeof line, "$P %s small.case %s", command[k], rows[i].options);
            EXPECT_SAYS(sh(20, "", line), 2, rows[i].says);
        }
    CHECK(!at_exists(at_text("%s/noted", dir)), "a program was started");
}

/* No shell: quotes and backslashes keep words, and nothing is expanded. */
/* Without --base: what OUT's metadata says of a small problem, or why that is not known. */
DP_TEST(command, a_program_that_states_its_base_needs_no_option) {
    NEEDS_NUMPY("command-base");
    static const char *const command[] = {
        "$P run small.case $O --ranks 1", "$P check small.case --only heads",
        "$P shrink small.case $O --tries 5", "$P bisect stage small.case $O"};
    static const int want[] = {0, 0, 2, 0}; /* nothing fails: shrink has nothing to do */
    char line[600];
    for (int k = 0; k < 4; k++) {
        snprintf(line, sizeof line, "%s %s \"$B\"", command[k], k % 2 ? "--serve" : "--run");
        EXPECT_SAYS(sh(60, "agrees", line), want[k], k == 0 ? "base=fp32" : "");
    }
    static const struct {
        const char *bad, *says;
    } ROWS[] = {{"", "give --base, the formats that the program claims (fp64|fp32|bf16); asked for "
                     "it with a small problem: its OUT has no metadata `base`"},
                {"raise", "asked for it with a small problem: ended with exit status 1"},
                {"claims", "is judged as fp32 (--chain)"}};
    for (int i = 0; i < 3; i++)
        EXPECT_SAYS(sh(60, ROWS[i].bad, "$P run small.case $O --ranks 1 --run \"$B\""), 2 - i / 2,
                    ROWS[i].says);
}

/* A program that dies of one error from 8 tokens on and of another below: what is left has the
 * first. Digits of a message do not make another error. */
DP_TEST(command, shrink_keeps_the_error_that_the_program_names) {
    char name[64];
    snprintf(dir, sizeof dir, "%s", at_dir("command-error"));
    at_write(at_text("%s/small.case", dir), SMALL);
    if (!getenv("DP_PYTHON")) setenv("DP_PYTHON", "python3", 1);
    at_write(at_text("%s/two.py", dir),
             "import json, sys\n"
             "b = open(sys.argv[1], 'rb').read()\n"
             "t = json.loads(b[8:8 + int.from_bytes(b[:8], 'little')])['q']['shape'][0]\n"
             "raise (ValueError if t >= 8 else KeyError)(f'{t} tokens')\n");
    EXPECT_SAYS(
        sh(60, "", "$P shrink small.case $O --base fp32 --run \"$DP_PYTHON two.py\" --tries 60"), 0,
        "exited: ValueError; the run fails");
    CHECK(strstr(at_out, "\nT 8 on 1 ranks"), "%s", at_out);
    dp_failure_error("ended with exit status 1: x | ValueError: tile of 7", name, sizeof name);
    CHECK(!strcmp(name, "ValueError"), "%s", name);
    dp_failure_error("crashed: SIGSEGV", name, sizeof name);
    CHECK(!strcmp(name, "SIGSEGV"), "%s", name);
    dp_failure_error("did not end within 5 s", name, sizeof name);
    CHECK(!*name, "%s", name);
}

DP_TEST(command, words_are_split_without_a_shell) {
    snprintf(dir, sizeof dir, "%s", at_dir("command-words"));
    at_write(at_text("%s/small.case", dir), SMALL);
    at_write(at_text("%s/say", dir), "#!/bin/sh\nfor x; do echo \"<$x>\"; done >&2\nexit 3\n");
    REQUIRE(at_sh(dir, 5, "chmod +x say") == 0, "%s", at_out);
    EXPECT_SAYS(sh(20, "",
                   "$P run small.case $O --base fp32 --run "
                   "\"./say 'a  b' \\\"c;\\$HOME\\\" d\\\\ e*\""),
                1, "exit status 3: <d e*> | <");
    EXPECT_SAYS(sh(20, "", "$P run small.case $O --base fp32 --run './say OUT --in=IN x;y $HOME'"),
                1, "/in.safetensors> | <x;y> | <$HOME>");
    EXPECT_SAYS(sh(20, "",
                   "$P run small.case $O --base fp32 --run "
                   "'sh -c \"echo $0 $DELTAPROOF_OUT >&2; false\"'"),
                1, "/in.safetensors ");
    CHECK(strstr(at_out, "/out.safetensors)"), "%s", at_out);
}
