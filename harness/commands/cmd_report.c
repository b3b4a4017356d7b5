/* deltaproof report DIR: the page and figures of a record, again. deltaproof index FOLDER:
 * FOLDER/index.html over all records below it (reports/index.py). Exit status 0 made, 2 not. */
#include "commands.h"
#include "harness/base/home.h"
#include "options.h"

#include <argp.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_WORDS = 400 };

int dp_script_become(const char *script, char *const *words) {
    const char *argv[MOST_WORDS] = {dp_python(), DP_PYTHON_ISOLATED,
                                    *script == '/' ? script : dp_home(script)};
    for (int n = 4; *words && n < MOST_WORDS - 1; n++)
        argv[n] = *words++;
    fflush(stdout);
    execvp(argv[0], (char *const *)argv);
    fprintf(stderr, "deltaproof: cannot start %s: %s\n", argv[0], strerror(errno));
    return 2;
}

int dp_script_with_self(const char *script, char *const *argv) {
    char self[PATH_MAX], *words[MOST_WORDS] = {self};
    if (!realpath("/proc/self/exe", self)) return 2;
    for (int i = 1; argv[i] && i < MOST_WORDS - 1; i++)
        words[i] = argv[i];
    return dp_script_become(script, words);
}

/* The child ends with this program, also where that has ended before it was asked to. Ctrl-C is
 * this program's: an interpreter that starts, or imports, would answer it with a traceback. */
int dp_script_run(const char *script, char *const *words) {
    fflush(stdout);
    const pid_t self = getpid(), pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (getppid() != self) _exit(2);
        signal(SIGINT, SIG_IGN);
        _exit(dp_script_become(script, words));
    }
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) < 0) return 2;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 2;
}

int dp_report_page(const char *folder) {
    const char *own = getenv("DP_REPORT");
    DP_OWN char *path = realpath(folder, NULL);
    if (!path) {
        fprintf(stderr, "deltaproof: %s: %s\n", folder, strerror(errno));
        return 2;
    }
    return dp_script_run(own && *own ? own : "reports/report.py", (char *[]){path, NULL});
}

/* The folder that a command names; NULL after a message. */
static const char *folder_of(int argc, char **argv, const char *args, const char *doc,
                             const char *wants) {
    static const struct argp_option none[] = {{0}};
    dp_options o = dp_options_new(1, 1);
    const struct argp a = {
        .options = none, .parser = dp_option_alone, .args_doc = args, .doc = doc};
    dp_parse(&a, argc, argv, &o);
    if (o.nname == 1) return o.name[0];
    fprintf(stderr, "deltaproof: %s\n", wants);
    return NULL;
}

int dp_cmd_report(int argc, char **argv) {
    const char *folder =
        folder_of(argc, argv, "DIR", "Make DIR/report.html and figures from DIR/results.json.",
                  "report: name the folder of one record");
    if (!folder || dp_report_page(folder)) return 2;
    printf("report: %s/report.html\n", folder);
    return 0;
}

int dp_cmd_index(int argc, char **argv) {
    const char *folder =
        folder_of(argc, argv, "FOLDER",
                  "Make FOLDER/index.html, a page over every results.json below "
                  "FOLDER: by kernel and machine, with verdicts, trends and links.",
                  "index: name one folder");
    if (!folder) return 2;
    return dp_script_become("reports/index.py", (char *[]){(char *)"--", (char *)folder, NULL});
}
