/* The double-double recurrence on vectors of 2 doubles, any CPU (truth_dd.h). */
#include "truth_dd.h"

#include <string.h>

#define VL 2
#define LANES tr_dd_plain
#define TR_DD_NAME "plain"
#include "truth_dd_lanes.inc"
