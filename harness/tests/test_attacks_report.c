/* Attacks through what a page shows: names of cases and tensors, texts of a record. */
#include "attack.h"
#include "sanitized.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void check_page(const char *dir, const char *page) {
    const int s =
        at_sh(dir, 20, "${DP_PYTHON:-python3} -I '%s/../harness/tests/data/check_page.py' %s",
              gt_cases(), page);
    EXPECT(s, 0);
}

/* Texts that mean something in HTML, in an attribute, in mathtext, in a path. */
static const char *const HOSTILE[] = {"<img src=x onerror=alert(1)>",
                                      "x\\\" onmouseover=\\\"alert(1)",
                                      "</title></style><script>alert(1)</script>",
                                      "'><svg onload=alert(1)>",
                                      "$\\\\frac$ $_{$ \\\\",
                                      "../../../../tmp/x {{ 7*7 }}{% for %}",
                                      "javascript:alert(1)"};
#define NHOSTILE (sizeof HOSTILE / sizeof *HOSTILE)

DP_TEST(attacks_report, texts_of_a_record_stay_text) {
    static const char *const field[] = {"CREATED", "COMMIT", "COMPILER", "BLAS",
                                        "REASON",  "POLICY", "TENSOR",   "WHY"};
    const char *dir = strdup(at_dir("record-html"));
    for (size_t turn = 0; turn < (GT_SANITIZED ? 1 : 3); turn++) {
        char *text = strdup(AT_RECORD);
        for (size_t i = 0; i < sizeof field / sizeof *field; i++) {
            const char *hostile = HOSTILE[(i + turn * 3) % NHOSTILE];
            char *at = strstr(text, field[i]), *more = malloc(strlen(text) + strlen(hostile) + 1);
            sprintf(more, "%.*s%s%s", (int)(at - text), text, hostile, at + strlen(field[i]));
            free(text);
            text = more;
        }
        at_write(at_text("%s/results.json", dir), text);
        free(text);
        EXPECT(at_sh(dir, 60, "$P report ."), 0, "report: ./report.html");
        check_page(dir, "report.html");
    }
    at_write(at_text("%s/b.json", dir), AT_RECORD);
    EXPECT(at_sh(dir, 60,
                 "sed 's/0.5, \"bound/0.75, \"bound/' results.json >a.json; $P compare --history "
                 "h.html results.json a.json b.json"),
           0, "3 records");
    check_page(dir, "h.html");
    free((char *)dir);
}

DP_TEST(attacks_report, names_of_cases_stay_text) {
    const char *dir = strdup(at_dir("case-html"));
    const char *text = "reason = <script>alert(1)</script>\nsource = <b onclick=alert(1)>\nop = "
                       "kda\nT = 6\nK = 4\nranks = 3\nbase = bf16\nbackward = no\n";
    static const char *const names[] = {"<img src=x onerror=alert(1)> $\\frac{1}$ $",
                                        "x\" onmouseover=\"alert(1)"};
    for (int i = 0; i < 2; i++)
        at_write(at_text("%s/%s.case", dir, names[i]), text);
    EXPECT(at_sh(dir, 100, "$P run --all --cases . --cache none --backend sim --out out"), 0,
           "report: out/report.html");
    check_page(dir, "out/report.html");
    EXPECT(at_sh(dir, 20,
                 "${DP_PYTHON:-python3} -c 'import xml.dom.minidom as m; "
                 "m.parse(\"out/junit.xml\")'; ls -A . out out/figures"),
           0, "report.html");
    free((char *)dir);
}

/* Changed records by the thousand, and four faults of the reader that must be found first. */
DP_TEST(attacks_report, changed_records_are_refused_or_become_a_page) {
    const char *dir = at_dir("changed-records");
    EXPECT(at_sh(dir, 100,
                 "\"${DP_PYTHON:-python3}\" -B '%s/../harness/fuzz/bulk_report.py' 2000 --jobs 1 "
                 "--seeds '' --keep kept",
                 gt_cases()),
           0, "4 of 4 faults found, 0 findings");
}

/* Whatever a signal meets while figures are drawn: the program ends, and nothing of it stays that
 * would hold its stderr. Told by a variable in the environment of all that it starts. */
DP_TEST(attacks_report, nothing_stays_of_a_page_that_was_interrupted) {
    static const char *const kill[] = {"-INT -$p", "-INT $p", "-TERM $p", "-KILL $p"};
    static const char *const after[] = {"0.6", "0.9", "1.2"};
    const char *dir = strdup(at_dir("interrupted"));
    at_write(at_text("%s/results.json", dir), AT_RECORD);
    for (int i = 0; i < 4; i++)
        EXPECT(
            at_sh(dir, 20,
                  "export AT_MARK=%d-%d; setsid $P report . >out 2>&1 & p=$!; sleep %s; "
                  "kill %s 2>/dev/null; wait $p 2>/dev/null; grep -c Traceback out; "
                  "for n in 1 2 3 4 5 6 7 8 9; do left=$(for f in $(grep -lsz ^AT_MARK=$AT_MARK$ "
                  "/proc/[0-9]*/environ); do cat ${f%%environ}cmdline 2>/dev/null | tr '\\0' ' ' "
                  "| grep 'report \\|report.py'; done); [ -z \"$left\" ] && break; sleep 0.2; "
                  "done; echo $left done",
                  (int)getpid(), i, after[i % 3], kill[i % 4]),
            0, "0\ndone\n");
    free((char *)dir);
}
