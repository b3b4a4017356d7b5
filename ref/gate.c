#include "gate.h"
#include "elementary.h"

#include <math.h>

#define REAL double
#define F(name) name
#define EXP dp_exp
#define LOG1P dp_log1p
#define SQRT sqrt
#include "gate_fp.inc"
#undef REAL
#undef F
#undef EXP
#undef LOG1P
#undef SQRT

#define REAL float
#define F(name) name##_f32
#define EXP dp_expf
#define LOG1P dp_log1pf
#define SQRT sqrtf
#include "gate_fp.inc"
