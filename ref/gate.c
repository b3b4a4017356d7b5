#include "gate.h"

#include <math.h>

#define REAL double
#define F(name) name
#define M(name) name
#include "gate_fp.inc"
#undef REAL
#undef F
#undef M

#define REAL float
#define F(name) name##_f32
#define M(name) name##f
#include "gate_fp.inc"
