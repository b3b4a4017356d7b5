/* harness/commands/print_run.h - a judged run as lines for people. */
#pragma once
#include "harness/record/run.h"

/* One line: verdict, ID, error of the first tensor, the tensor closest to its bound, why. */
void dp_print_run(const dp_run *r, FILE *f);
/* One line: verdict, error, bound, expected error, ranks, the row that decides, why. */
void dp_print_tensor(const dp_judgement *t, FILE *f);
