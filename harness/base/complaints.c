/* Messages joined line by line (complaints.h). */
#include "complaints.h"
#include "ref/vocabulary/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void dp_complain(dp_complaints *all, const char *fmt, ...) {
    char text[sizeof all->text], plain[sizeof all->text];
    const size_t used = strlen(all->text);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    dp_text_printable(text, plain, sizeof plain);
    snprintf(all->text + used, sizeof all->text - used, "%s%s", used ? "\n  " : "", plain);
    all->n++;
}

dp_status dp_complaints_end(const dp_complaints *all, dp_err *e) {
    if (!all->n) return DP_OK;
    if (all->n == 1) return dp_fail(e, DP_EINPUT, "%s", all->text);
    if (dp_fail(e, DP_EINPUT, "%d things are missing or wrong:", all->n) && e) {
        const size_t used = strlen(e->msg);
        snprintf(e->msg + used, sizeof e->msg - used, "\n  %s", all->text);
    }
    return DP_EINPUT;
}
