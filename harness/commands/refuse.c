/* How a command that cannot do its work ends (commands.h). */
#include "commands.h"

#include <stdio.h>

int dp_refuse(const dp_err *e) {
    fprintf(stderr, "deltaproof: %s\n", e->msg);
    return 2;
}
