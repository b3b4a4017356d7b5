/* A clock that only goes forward (clock.h). */
#include "clock.h"

#include <time.h>

double dp_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
