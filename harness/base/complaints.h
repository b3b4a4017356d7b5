/* harness/base/complaints.h - everything that is wrong with an input, gathered into one message, so
 * that it need not be learned attempt by attempt. */
#ifndef DP_COMPLAINTS_H
#define DP_COMPLAINTS_H
#include "ref/vocabulary/problem.h"

typedef struct {
    int n;
    char text[sizeof((dp_err *)0)->msg]; /* one a line */
} dp_complaints;

/* Adds a printf message; control characters in it are made printable. */
void dp_complain(dp_complaints *all, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* DP_OK without complaints; else DP_EINPUT: one complaint is the message, several are its lines. */
dp_status dp_complaints_end(const dp_complaints *all, dp_err *e);
#endif
