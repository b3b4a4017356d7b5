/* harness/commands/large_problem.h - the problem of a case at another size, with its law of inputs:
 * for what needs no truth. */
#pragma once
#include "harness/case/case.h"

/* One sequence of so many tokens (0: as many as the case) with so many value and key heads and no
 * initial state. It has do where backward and the case has it. Its arrays lie in `memory` (NULL:
 * memory of this process), with the same bits for any memory and number of threads. To be freed by
 * dp_problem_free. */
dp_problem dp_large_problem(const dp_case *c, int64_t tokens, int heads, int backward,
                            uint64_t seed, const dp_memory *memory);
