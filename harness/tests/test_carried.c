/* States that are kept in short formats between calls: the bounds hold, and each format errs as its
 * rounding says. */
#include "cases.h"
#include "ref/bound/carried.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char out[1 << 15];

static int format_of(const char *name) {
    for (int i = 0; i < DP_NCARRIED; i++)
        if (!strcmp(dp_carried_formats[i].name, name)) return i;
    return -1;
}

static int carry(const dp_case *c, int head, const char *format, int64_t steps, int every,
                 dp_carried *r) {
    dp_err e = {0};
    const dp_carried_options o = {.steps = steps, .every = every, .need = 0.01};
    if (!dp_carried_run(&c->p, head, format_of(format), &o, r, &e)) return 1;
    gt_fail(__FILE__, __LINE__, format, "%s", e.msg);
    return 0;
}

DP_TEST(carried, no_error_is_beyond_its_sound_bound) {
    static const char *const names[] = {"smoke-kda", "smoke-gdn",   "smoke-mkda2",
                                        "no-decay",  "lower-bound", "negative-eigenvalues"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        dp_case c;
        if (!gt_open_case(names[i], &c)) continue;
        for (int f = 0; f < DP_NCARRIED; f++) {
            dp_carried r;
            const char *format = dp_carried_formats[f].name;
            if (!carry(&c, c.p.HV - 1, format, 2000, 1 + f % 3, &r)) continue;
            CHECK(r.of_sound <= 1, "%s, %s: %.3g times its sound bound", c.name, format,
                  r.of_sound);
            CHECK(r.n > 20 && r.step[r.n - 1] == 2000 && r.error[r.n - 1] > 0,
                  "%s, %s: %d points, error %g", c.name, format, r.n, r.n ? r.error[r.n - 1] : NAN);
        }
        dp_case_free(&c);
    }
}

/* Keys k = (1, 0) and e = (2, x): the norm of I - k e' is half of x + sqrt(4 + x^2). */
DP_TEST(carried, steps_of_nearly_parallel_keys_grow) {
    for (double x = 1; x > 1e-12; x /= 8) {
        double k[] = {1, 0}, erasing[] = {2, x}, beta = 1;
        dp_problem p = {.model = DP_GDN2, .T = 1, .H = 1, .HV = 1, .R = 1, .K = 2, .V = 1};
        const dp_activated in = {.k = k, .erasing = erasing, .beta = &beta};
        const double grows = dp_step_norms_of(&p, &in, 0, 0).grows,
                     right = (x + sqrt(4 + x * x)) / 2;
        CHECK(grows >= right && grows <= right * (1 + 0x1p-39), "%g: 1 + %g for 1 + %g", x,
              grows - 1, right - 1);
        beta = -1;
        const double w = sqrt(4 + x * x), other = dp_step_norms_of(&p, &in, 0, 0).grows,
                     sum = (w + sqrt(w * w + 12)) / 2;
        CHECK(fabs(other / sum - 1) < 0x1p-39, "%g: %.17g for %.17g", x, other, sum);
    }
}

/* The sound bound would be worth nothing if errors were far below it. */
DP_TEST(carried, formats_err_as_they_round) {
    dp_case c;
    dp_carried fp32, bf16, fp16, rz, sr, fp8;
    if (!gt_open_case("long-memory", &c)) return;
    if (!carry(&c, 0, "fp32", 6000, 1, &fp32) || !carry(&c, 0, "bf16", 6000, 1, &bf16) ||
        !carry(&c, 0, "fp16", 6000, 1, &fp16) || !carry(&c, 0, "bf16rz", 6000, 1, &rz) ||
        !carry(&c, 0, "bf16sr", 6000, 1, &sr) || !carry(&c, 0, "fp8", 6000, 1, &fp8))
        return;
    const double last = bf16.error[bf16.n - 1];
    CHECK(bf16.of_sound > 0.1 && rz.of_sound > 0.1, "bounds: %g, %g", bf16.of_sound, rz.of_sound);
    CHECK(fp32.error[fp32.n - 1] < last / 10000 && fp16.error[fp16.n - 1] < last / 4 &&
              rz.error[rz.n - 1] > 3 * last && fp8.error[fp8.n - 1] > 10 * last,
          "errors: fp32 %g, fp16 %g, bf16 %g, bf16rz %g, fp8 %g", fp32.error[fp32.n - 1],
          fp16.error[fp16.n - 1], last, rz.error[rz.n - 1], fp8.error[fp8.n - 1]);
    CHECK(bf16.slope > 0.3 && bf16.slope < 0.7, "slope of random errors: %g", bf16.slope);
    CHECK(rz.bias < -0.9 && fabs(bf16.bias) < 0.3 && fabs(sr.bias) < 0.3, "bias: %g, %g, %g",
          rz.bias, bf16.bias, sr.bias);
    CHECK(rz.of_probable > 1 && bf16.of_probable < 0.2, "of what chance makes: %g, %g",
          rz.of_probable, bf16.of_probable);
    CHECK(rz.exceeded < bf16.exceeded && !fp32.exceeded, "o is off from %lld, %lld, %lld on",
          (long long)rz.exceeded, (long long)bf16.exceeded, (long long)fp32.exceeded);
    dp_case_free(&c);
}

/* The erased part of each key is below half a spacing (2^-9 of the state). Rounding to nearest
 * loses every one, stochastic rounding none on the average. */
DP_TEST(carried, a_state_that_hardly_moves_is_lost_to_nearest_and_kept_by_chance) {
    dp_case c;
    dp_carried near, chance;
    if (!gt_parse_case("reason = r\nsource = s\nop = kda\nT = 64\nH = 1\nHV = 1\nK = 1\nV = 64\n"
                       "g_scale = 0\nbeta_lo = 0.0017\nbeta_hi = 0.0018\ns0_scale = 1\n"
                       "dtype = fp32\noverride = v[*,*,*,*] 0\n",
                       &c))
        return;
    if (!carry(&c, 0, "bf16", 600, 1, &near) || !carry(&c, 0, "bf16sr", 600, 1, &chance)) return;
    CHECK(near.of_probable > 1 && chance.of_probable < 0.3, "of what chance makes: %g, %g",
          near.of_probable, chance.of_probable);
    CHECK(near.error[near.n - 1] > 3 * chance.error[chance.n - 1], "errors: %g, %g",
          near.error[near.n - 1], chance.error[chance.n - 1]);
    dp_case_free(&c);
}

DP_TEST(carried, fewer_stores_err_less) {
    dp_case c;
    dp_carried each, seldom;
    if (!gt_open_case("no-decay", &c)) return;
    if (!carry(&c, 0, "bf16", 2048, 1, &each) || !carry(&c, 0, "bf16", 2048, 64, &seldom)) return;
    CHECK(seldom.error[seldom.n - 1] < each.error[each.n - 1] / 2, "%g, %g",
          seldom.error[seldom.n - 1], each.error[each.n - 1]);
    dp_case_free(&c);
}

DP_TEST(carried, the_program_says_how_long_or_why_not) {
    static const struct {
        const char *arguments;
        int status;
        const char *says;
    } rows[] = {
        {"smoke-kda --steps 500", 0, "\nbf16rz   2.00 "},
        {"smoke-kda --steps 500 --need 1", 0, "all 500"},
        {"smoke-kda --steps 500 --head 2", 2, "HV = 2: there is no --head 2"},
        {"smoke-conv --steps 5", 2, "op = conv: only a recurrence carries a state"},
        {"nan --steps 5", 2, "nonfinite = allow"},
        {"smoke-kda --need 0", 2, "--need 0: must be above 0"},
        {"smoke-kda --steps 0", 2, "--steps 0"},
        {"", 2, "name a case"},
        {"smoke-kda --steps 5 --json /nowhere/x.json", 2, "/nowhere/x.json"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char cmd[1200];
        snprintf(cmd, sizeof cmd, "'%s' carry --cases '%s' %s", gt_program(), gt_cases(),
                 rows[i].arguments);
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == rows[i].status && strstr(out, rows[i].says), "%s: status %d: %s",
              rows[i].arguments, rc, out);
    }
}

DP_TEST(carried, the_figure_is_drawn_from_what_the_program_wrote) {
    const char *given = getenv("DP_PYTHON"), *py = given && *given ? given : "python3";
    char cmd[2400];
    snprintf(cmd, sizeof cmd, "'%s' -c 'import matplotlib'", py);
    if (gt_run(cmd, out, sizeof out)) SKIP("%s has no matplotlib", py);
    snprintf(
        cmd, sizeof cmd,
        "cd '%s' && '%s' carry --cases '%s' smoke-kda t1 --steps 300 --json c.json >/dev/null "
        "&& '%s' -I '%s/../reports/carry.py' c.json c.svg && grep -c 'int8ef\\|smoke-kda' c.svg",
        gt_tmpdir(), gt_program(), gt_cases(), py, gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && atoi(out) >= 3, "%s", out);
    snprintf(cmd, sizeof cmd,
             "cd '%s' && echo '[{}]' >b.json && '%s' -I '%s/../reports/carry.py' b.json b.svg",
             gt_tmpdir(), py, gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 &&
              strstr(out, "carry.py: b.json: carry[0].case: missing"),
          "%s", out);
}

/* The page of a record whose folder has a carry.json: the steps that the program printed. A file
 * that it did not write is refused by its field. */
DP_TEST(carried, the_page_of_a_record_says_how_long) {
    static const struct {
        const char *change;
        int status;
        const char *says;
    } ROWS[] = {{"cat", 0, "smoke-kda: o stays within 0.01 for all 300 steps"},
                {"sed 's/\"steps\": [0-9]*/\"steps\": -1/'", 2,
                 "carry.json: carry[0].steps: expected an integer >= 1"},
                {"sed 's/\"error\": \\[/\"error\": [0.5, /'", 2, "have other lengths"}};
    const char *given = getenv("DP_PYTHON"), *py = given && *given ? given : "python3";
    char cmd[2400];
    snprintf(cmd, sizeof cmd, "'%s' -c 'import matplotlib, jinja2'", py);
    if (gt_run(cmd, out, sizeof out)) SKIP("%s has no matplotlib or no Jinja2", py);
    snprintf(cmd, sizeof cmd,
             "mkdir -p '%s/page' && cp harness/tests/data/record-small.json "
             "'%s/page/results.json' && '%s' carry --cases '%s' smoke-kda --steps 300 --json "
             "'%s/c.json'",
             gt_tmpdir(), gt_tmpdir(), gt_program(), gt_cases(), gt_tmpdir());
    REQUIRE(!gt_run(cmd, out, sizeof out), "%s", out);
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        snprintf(cmd, sizeof cmd,
                 "cd '%s' && %s c.json >page/carry.json && '%s' report page 2>&1 && cat "
                 "page/report.html | tr '\\n' ' ' | grep -o 'How long a session.*All again'",
                 gt_tmpdir(), ROWS[i].change, gt_program());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == ROWS[i].status && strstr(out, ROWS[i].says), "%s: status %d: %.800s",
              ROWS[i].change, rc, out);
    }
}
