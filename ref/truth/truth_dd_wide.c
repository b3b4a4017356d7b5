/* The double-double recurrence as wide as AVX-512 on any CPU (truth_dd.h): for tests of the order
 * of sums, never the choice of a run. */
#include "truth_dd.h"

#include <string.h>

#define VL 8
#define FN static __attribute__((noinline, unused)) /* inlined: half a minute to compile */
#define LANES tr_dd_wide
#define TR_DD_NAME "wide"
#include "truth_dd_lanes.inc"
