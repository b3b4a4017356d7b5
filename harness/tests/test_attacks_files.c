/* Attacks through files: code in the present folder, symlinks, pipes and devices, kills while
 * files are written, names that are no text. */
#include "attack.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TINY "reason = r\nsource = s\nop = kda\nT = 3\nK = 2\nV = 2\n"

/* ---- item 1 ---------------------------------------------------------------------------------- */

/* A folder that looks like the source tree and like a place to import from. */
static void plant(const char *dir) {
    static const char *const modules[] = {"record", "page",   "figures", "matplotlib",
                                          "numpy",  "jinja2", "json",    "museum"};
    const char *code = at_text("open('%s/ran', 'w').write('x')\n", dir);
    gt_run(at_text("mkdir -p '%s/cases' '%s/reports' '%s/build'", dir, dir, dir), NULL, 0);
    at_write(at_text("%s/cases/README.md", dir), "");
    at_write(at_text("%s/cases/planted.case", dir), TINY);
    at_write(at_text("%s/reports/report.py", dir), code);
    at_write(at_text("%s/reports/history.py", dir), code);
    for (int i = 0; i < 8; i++)
        at_write(at_text("%s/%s.py", dir, modules[i]), code);
    at_write(at_text("%s/matplotlibrc", dir), "text.usetex: True\nsavefig.dpi: 3\n");
    at_write(at_text("%s/build/python", dir), at_text("%s/evil\n", dir));
    at_write(at_text("%s/evil", dir), at_text("#!/bin/sh\ntouch '%s/ran'\n", dir));
    gt_run(at_text("chmod +x '%s/evil'", dir), NULL, 0);
}

DP_TEST(attacks_files, code_of_the_present_folder_never_runs) {
    const char *dir = strdup(at_dir("planted"));
    plant(dir);
    int s = at_sh(dir, 60, "$P run t1 --cases $C --ranks 1 --base fp32 --cache none --out out");
    EXPECT(s, 0, "report: out/report.html");
    CHECK(!at_exists(at_text("%s/ran", dir)), "run --out ran code of the present folder");
    s = at_sh(dir, 60, "PYTHONPATH=. PYTHONSTARTUP=evil $P report out");
    EXPECT(s, 0, "report: out/report.html");
    CHECK(!at_exists(at_text("%s/ran", dir)), "report ran code of the present folder");
    s = at_sh(dir, 60, "$P compare --history h.html out out");
    EXPECT(s, 0, "2 records");
    CHECK(!at_exists(at_text("%s/ran", dir)), "compare --history ran code of the present folder");
    EXPECT(at_sh(dir, 20, "$P list"), 0, "smoke-kda");
    CHECK(!strstr(at_out, "planted"), "the cases of the present folder: %s", at_out);
    free((char *)dir);
}

DP_TEST(attacks_files, a_tree_that_is_gone_or_open_to_all_is_not_used) {
    const char *tree = strdup(at_dir("tree")),
               *probe = strdup(at_text("%s/probe", at_dir("moved")));
    const char *own = getenv("DP_CASES");
    plant(tree);
    gt_run(at_text("chmod 755 %s %s/*", tree, tree), NULL, 0);
    int s = at_sh("/", 60,
                  "cc -DDP_TREE='\"%s\"' -DDP_BUILD='\"build\"' -I%s/.. "
                  "%s/../harness/base/home.c %s/../harness/tests/data/home_probe.c -o %s",
                  tree, own, own, own, probe);
    EXPECT(s, 0, "");
    EXPECT(at_sh("/", 20, "%s", probe), 0, at_text("cases: %s/cases", tree));
    EXPECT(at_sh("/", 20, "chmod 777 %s/reports; %s", tree, probe), 0, "was moved away",
           "cases: /dev/null/");
    EXPECT(at_sh("/", 20, "rm -r %s; %s", tree, probe), 0, "was moved away", "cases: /dev/null/");
    EXPECT(at_sh("/", 20, "%s --cases given", probe), 0, "cache: ");
    CHECK(!strstr(at_out, "moved away"), "cases were given: %s", at_out);
    free((char *)tree);
    free((char *)probe);
}

/* ---- item 6 ---------------------------------------------------------------------------------- */

DP_TEST(attacks_files, a_planted_link_is_not_written_through) {
    const char *dir = strdup(at_dir("links"));
    at_write(at_text("%s/precious", dir), "precious\n");
    at_write(at_text("%s/tiny.case", dir), TINY);
    /* Every name that a process number could give: the shell's own number is that of the program.
     */
    int s = at_sh(dir, 20,
                  "ln -s precious x.safetensors.$$.tmp; exec $P inputs tiny.case -o "
                  "x.safetensors");
    EXPECT(s, 0);
    s = at_sh(dir, 20,
              "ln -s precious r.json.$$.tmp; ln -s precious link.json; "
              "exec $P run tiny.case --cache none --json r.json");
    EXPECT(s, 0);
    EXPECT(at_sh(dir, 20, "$P run tiny.case --cache none --json link.json"), 0);
    char *text = at_read(at_text("%s/precious", dir));
    CHECK(!strcmp(text, "precious\n"), "overwritten through a link: %.100s", text);
    free(text);
    s = at_sh(dir, 60,
              "mkdir -p o/figures; ln -s ../precious o/report.html.part; "
              "ln -s ../../precious o/figures/chain-k8.png");
    at_write(at_text("%s/o/results.json", dir), AT_RECORD);
    EXPECT(at_sh(dir, 60, "$P report o && cat precious"), 0, "precious\n");
    free((char *)dir);
}

/* A symlink that names itself is refused and stays. */
DP_TEST(attacks_files, a_link_to_itself_is_refused) {
    const char *dir = strdup(at_dir("loop"));
    at_write(at_text("%s/tiny.case", dir), TINY);
    gt_run(at_text("cd '%s' && ln -s loop loop && mkdir o && ln -s report.html o/report.html", dir),
           NULL, 0);
    at_write(at_text("%s/o/results.json", dir), AT_RECORD);
    const char *const lines[] = {"$P run tiny.case --cache none --json loop",
                                 "$P inputs tiny.case -o loop", "$P compare o o --json loop",
                                 "$P report o"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        EXPECT(
            at_sh(dir, 20, "%s; s=$?; test -L loop && test -L o/report.html && exit $s", lines[i]),
            2, "symbolic links");
    free((char *)dir);
}

DP_TEST(attacks_files, dev_stdout_stays_what_it_is) {
    const char *dir = strdup(at_dir("stdout"));
    at_write(at_text("%s/tiny.case", dir), TINY);
    gt_run(at_text("ln -s /proc/self/fd/1 '%s/link'", dir), NULL, 0);
    const int s = at_sh(dir, 20,
                        "$P run tiny.case --cache none --json /dev/fd/1 > all; grep -c "
                        "deltaproof-record all; ls");
    EXPECT(s, 0, "1\n");
    free((char *)dir);
}

/* Files of others in a folder called figures are not this program's to remove. */
DP_TEST(attacks_files, a_report_removes_its_own_figures_alone) {
    const char *dir = strdup(at_dir("figures"));
    gt_run(at_text("mkdir -p '%s/o/figures'; cd '%s/o/figures'; echo mine > mine.png; echo old > "
                   "old-one.png; echo x > ../../../figures-x",
                   dir, dir),
           NULL, 0);
    at_write(at_text("%s/o/report.html", dir),
             "<title>deltaproof report: PASS</title><a href=\"figures/old-one.png\">PNG</a> <a "
             "href=\"figures/../../x.png\">");
    at_write(at_text("%s/o/results.json", dir), AT_RECORD);
    EXPECT(at_sh(dir, 60, "$P report o && ls o/figures && cat o/figures/mine.png"), 0,
           "chain-k8.png\n", "mine\n");
    CHECK(!strstr(at_out, "old-one.png"), "a figure of the record before: %s", at_out);
    free((char *)dir);
}

/* Whatever ends a command, no verdict of an earlier one is where its own would be; what is not this
 * program's stays. */
DP_TEST(attacks_files, a_command_that_ends_early_leaves_no_older_verdict) {
    static const struct {
        const char *command;
        int status;
    } row[] = {{"$P run tiny.case --cache none --out o --bases bf16", 2},
               {"$P run tiny.case --cache none --base bf17 --out=o", 2},
               {"$P run --ou=o", 2},
               {"$P run nothing --out o", 2},
               {"$P run tiny.case --subject ./none.so --out o", 2},
               {"$P judge --inputs in --out o", 2},
               {"$P judge --inputs in --outputs out --out o", 2},
               {"echo { >o/results.json; $P report o", 2},
               {"$P compare --history o/report.html o/none", 2},
               {"mv o/report.html o/index.html; rm o/results.json; $P index o", 2}};
    const char *dir = strdup(at_dir("older"));
    at_write(at_text("%s/tiny.case", dir), TINY);
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        gt_run(at_text("rm -rf '%s/o'; mkdir -p '%s/o/figures'; cd '%s/o'; echo mine | tee notes "
                       "figures/mine.png >figures/old.png",
                       dir, dir, dir),
               NULL, 0);
        at_write(at_text("%s/o/report.html", dir),
                 "<title>deltaproof report: OLDER</title><a href=\"figures/old.png\">PNG</a>");
        at_write(at_text("%s/o/results.json", dir), i == 8 ? "{}" : "OLDER"); /* read, not made */
        EXPECT(at_sh(dir, 60, row[i].command), row[i].status);
        EXPECT(at_sh(dir, 10, "find o -type f | sort | tr '\\n' ' '; grep -r OLDER o; true"), 0,
               "o/figures/mine.png ", "o/notes ");
        CHECK(!strstr(at_out, "OLDER") && (i >= 8 || !strstr(at_out, "old.png")), "%s: %s",
              row[i].command, at_out);
    }
    EXPECT(at_sh(dir, 60, "echo '<title>mine</title>' >o/index.html; $P index o; cat o/index.html"),
           0, "mine");
    EXPECT(at_sh(dir, 60, "$P run --out o --help >help && cat o/notes && grep -c -- --again help"),
           0, "mine");
    free((char *)dir);
}

/* The same of --json: a record or a list goes, any other file stays or becomes a record. */
DP_TEST(attacks_files, a_command_that_ends_early_leaves_no_older_results) {
    static const char *const command[] = {
        "$P run tiny.case --cache none --design chnk=1 --json j",
        "$P run nothing --js j --foo",
        "$P judge --inputs none --outputs none --base bf16 --json j",
        "$P check nothing --json j",
        "$P check tiny.case --only none --json j",
        "$P check tiny.case --subject ./none.so --json j",
        "$P carry tiny.case --steps none --json j",
        "$P differ tiny.case --subject ./none.so --backend sim --json j",
        "$P differ tiny.case --base bf17 --json j",
        "$P differ nothing --backend sim --base fp32 --backend sim --base fp32 --json j"};
    static const char *const old[] = {"{\"schema\":\"deltaproof-record\",\"OLDER\":1}",
                                      "[\n {\n  \"case\": \"OLDER\"\n }\n]\n", "mine"};
    const char *dir = strdup(at_dir("results"));
    at_write(at_text("%s/tiny.case", dir), TINY);
    for (size_t i = 0; i < sizeof command / sizeof *command; i++)
        for (size_t k = 0; k < sizeof old / sizeof *old; k++) {
            at_write(at_text("%s/j", dir), old[k]);
            CHECK(at_sh(dir, 60, command[i]) != 0, "%s: %s", command[i], at_out);
            char *is = at_exists(at_text("%s/j", dir)) ? at_read(at_text("%s/j", dir)) : NULL;
            CHECK(is ? !strstr(is, "OLDER") : k < 2, "%s: %s", command[i], is ? is : "lost");
            free(is);
        }
    free((char *)dir);
}

/* Killed at each of its calls that change the folder, and run again: whole files, and nothing else.
 */
DP_TEST(attacks_files, kills_leave_whole_files_and_the_next_run_removes_the_rest) {
#ifdef __SANITIZE_ADDRESS__
    SKIP("a preloaded library and the address sanitizer do not go together");
#endif
    const char *dir = strdup(at_dir("kills")), *lib = strdup(at_library("die_at", ""));
    at_write(at_text("%s/tiny.case", dir), TINY);
    int died = 0, torn = 0;
    for (int i = 1; i < 40; i++) {
        const int s = at_sh(dir, 20,
                            "DIE_AT=%d LD_PRELOAD='%s' $P truth tiny.case --cache c -o "
                            "t.safetensors; s=$?; test ! -e t.safetensors || test $(stat "
                            "-c %%s t.safetensors) -gt 900 || echo TORN; exit $s",
                            i, lib);
        died += s == AT_HUNG || s >= 128;
        torn += strstr(at_out, "TORN") != NULL;
        if (s == 0) break;
    }
    CHECK(died >= 4 && !torn, "killed %d times, %d torn files", died, torn);
    EXPECT(at_sh(dir, 20, "rm -rf c/*.truth; $P truth tiny.case --cache c -o t.safetensors"), 0);
    EXPECT(at_sh(dir, 20, "ls -A . c; ls -A | wc -l; ls -A c | wc -l"), 0, "\n3\n1\n");
    free((char *)lib);
    free((char *)dir);
}

/* ---- item 8 ---------------------------------------------------------------------------------- */

static void never_hangs(const char *dir, const char *command) {
    const int s = at_sh(dir, 10, "%s", command);
    CHECK(s == 2 && !strstr(at_out, "Traceback"), "%s: status %d: %.300s", command, s, at_out);
}

DP_TEST(attacks_files, pipes_devices_and_proc_are_refused_wherever_a_file_is_read) {
    static const char *const odd[] = {"pipe", "/dev/zero", "/proc/self/mem", "sock"};
    const char *dir = strdup(at_dir("odd")),
               *mkfifo = "mkfifo pipe pipe.case rec/results.json; "
                         "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\"";
    at_write(at_text("%s/tiny.case", dir), TINY);
    gt_run(at_text("cd '%s' && mkdir rec cache && %s && '%s' inputs tiny.case -o in.safetensors",
                   dir, mkfifo, gt_program()),
           NULL, 0);
    for (int i = 0; i < 4; i++) {
        at_write(at_text("%s/data.case", dir),
                 at_text("reason = r\nsource = s\nop = kda\ndata = %s\n", odd[i]));
        at_write(
            at_text("%s/conv.case", dir),
            at_text("reason = r\nsource = s\nop = step\nT = 4\nK = 2\nconv = q\nconv_data = %s\n",
                    odd[i]));
        never_hangs(dir, at_text("$P judge --inputs %s --outputs in.safetensors", odd[i]));
        never_hangs(dir, at_text("$P judge --inputs in.safetensors --outputs %s", odd[i]));
        never_hangs(dir, "$P run data.case --cache none");
        never_hangs(dir, "$P run conv.case --cache none");
        never_hangs(dir, at_text("$P run tiny.case --cache none --subject %s", odd[i]));
        never_hangs(dir, at_text("$P compare %s %s", odd[i], odd[i]));
    }
    never_hangs(dir, "$P compare rec rec");
    never_hangs(dir, "$P report rec");
    never_hangs(dir, "$P run $PWD/pipe.case --cache none");
    never_hangs(dir, "$P list --cases .");
    never_hangs(dir, "$P compare --history h.html rec rec");
    free((char *)dir);
}

DP_TEST(attacks_files, a_cache_entry_that_is_a_pipe_is_computed_again) {
    const char *dir = strdup(at_dir("cache-pipe"));
    at_write(at_text("%s/tiny.case", dir), TINY);
    EXPECT(at_sh(dir, 20,
                 "$P truth tiny.case --cache c -o t.safetensors && cd c && for f in *; do rm $f && "
                 "mkfifo $f; done"),
           0);
    EXPECT(at_sh(dir, 10,
                 "$P truth tiny.case --cache c -o u.safetensors && cmp t.safetensors u.safetensors "
                 "&& find c -type p | wc -l"),
           0, "not a regular file", "0\n");
    free((char *)dir);
}

/* ---- item 10 --------------------------------------------------------------------------------- */

DP_TEST(attacks_files, names_that_are_no_text_are_refused_before_anything_is_run) {
    const char *dir = strdup(at_dir("names"));
    static const char *const name[] = {"x\\xff",          "\\xc0\\xaf",
                                       "\\xed\\xa0\\x80", "a\\nVERDICT: PASS",
                                       "\\x1b[2J",        "\\xef\\xbf\\xbf"};
    at_write(at_text("%s/tiny.case", dir), TINY);
    for (int i = 0; i < 6; i++) {
        int s = at_sh(dir, 10,
                      "n=$(printf '%s'); cp tiny.case \"$n.case\"; $P run \"$PWD/$n.case\" --cache "
                      "none --json r.json",
                      name[i]);
        EXPECT(s, 2, "is not UTF-8 text");
        s = at_sh(dir, 10,
                  "mkdir -p d && n=$(printf '%s') && mv \"$n.case\" d/ && $P list --cases d; s=$?; "
                  "rm d/*; exit $s",
                  name[i]);
        EXPECT(s, 2, "the name is not UTF-8 text");
        at_write(at_text("%s/gen.sh", dir),
                 at_text("printf 'reason = %s\\nsource = s\\nop = kda\\nT = 2\\nK = 2\\n' > b.case",
                         i == 3 ? "\\x07" : name[i]));
        EXPECT(at_sh(dir, 10, "bash gen.sh; $P run $PWD/b.case --cache none"), 2,
               "b.case:1: byte 0x");
    }
    CHECK(!at_exists(at_text("%s/r.json", dir)), "a record of a run that was refused");
    free((char *)dir);
}

/* A name that fits into no buffer of old: the run's ID keeps it whole. */
DP_TEST(attacks_files, the_longest_names_are_kept_whole) {
    const char *dir = strdup(at_dir("long"));
    at_write(at_text("%s/chain.case", dir),
             "reason = r\nsource = s\nop = chain\nregime = mild\nchunks = 4\nK = 4\n");
    const int s =
        at_sh(dir, 20,
              "n=$(printf 'é%%.0s' $(seq 125)); cp chain.case $n.case; $P run $PWD/$n.case --cache "
              "none --fault chain-bf16 --json r.json; s=$?; "
              "grep -c \"\\\"id\\\":\\\"$n:chain=fp32,fault=chain-bf16\\\"\" r.json; exit $s");
    EXPECT(s, 1, "\n1\n");
    free((char *)dir);
}
