/* Starts the script that makes report.html and the figures (report_page.h). */
#include "report_page.h"
#include "harness/base/home.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* In the child: becomes the script, which ends with this program, also where that has ended before
 * it was asked to. Ctrl-C is this program's: an interpreter that starts, or imports, would answer
 * it with a traceback. */
static void become_script(const char *python, const char *script, const char *folder,
                          pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(2);
    signal(SIGINT, SIG_IGN);
    execlp(python, python, DP_PYTHON_ISOLATED, script, folder, (char *)NULL);
    fprintf(stderr, "deltaproof: cannot start %s: %s\n", python, strerror(errno));
    _exit(2);
}

int dp_report_page(const char *folder) {
    const char *python = dp_python(), *own = getenv("DP_REPORT");
    const char *script = own && *own ? own : dp_home("reports/report.py");
    char *path = realpath(folder, NULL);
    if (!path) {
        fprintf(stderr, "deltaproof: %s: %s\n", folder, strerror(errno));
        return 2;
    }
    fflush(stdout);
    const pid_t self = getpid(), pid = fork();
    if (pid == 0) become_script(python, script, path, self);
    int status = 0;
    free(path);
    if (pid < 0 || waitpid(pid, &status, 0) < 0) return 2;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 2;
}
