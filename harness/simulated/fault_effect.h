/* harness/simulated/fault_effect.h - what deliberate faults (fault.h) do to a convolution. Effects
 * on simulated ranks are in fault_effect.c, too: functions that dp_sim_new adds to the simulation,
 * which calls them after its stages (ranks.h: DP_AFTER_..). Where one acts, s->hit is set for that
 * rank and head: what a localisation is compared with is recorded, not asserted. */
#ifndef DP_FAULT_EFFECT_H
#define DP_FAULT_EFFECT_H
#include "fault.h"
#include "ref/chunk/conv.h"

/* After a run of the convolution. */
void dp_effect_conv(dp_fault fault, const dp_conv *c, int N, dp_base pol, dp_conv_result *r);
#endif
