/* harness/base/clock.h - a clock that only goes forward. */
#ifndef DP_CLOCK_H
#define DP_CLOCK_H

double dp_now(void); /* seconds since some start */
#endif
