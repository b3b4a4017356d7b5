/* harness/run/hypotheses.h - of tensors that failed: which single, common mistake would explain
 * them.
 *
 * Each hypothesis is a setting, an input or an output changed by that mistake. The files are judged
 * again by the same truth, bounds and draws. It fits when all tensors that it concerns pass.
 * Settings: another layout of states, another form of gate, beta or norm, another scale, a coarser
 * base, gates read in a shorter format. Inputs: another eps of the norm, gates in base 2 or kept in
 * bf16 after their activation. Also gates or betas of the token before, and a rank that starts from
 * zero. Outputs: one tensor by a common factor, one token late. If none of these fits, but for a
 * coarser base: products of operands in tf32.
 *
 * A table has a row for each misreading of inputs. Inputs become those that such a kernel reads.
 * Truth, bounds and gradients are then those of its problem. Before a truth is paid for, fp64 of
 * the changed problem must be nearer to what failed than a tenth of the failure.
 *
 * A hypothesis fits only where its tensors pass: what no limit sees is unjudged. One that explains
 * all failures is said alone; where several do, that several would fit; where none does, each
 * failed tensor's own.
 */
#pragma once
#include "judge.h"
#include "ref/files/safetensors.h"

typedef struct {
    int tried, fit;
    int left; /* not tried: the time was over */
} dp_hypotheses_count;

/* failed: the run of these options on case c. Calls fits with a sentence that goes behind "fits: ",
 * once, or for tensors of different mistakes once each. Ends after `seconds`, but for the one that
 * is being tried. */
dp_hypotheses_count dp_hypotheses(const dp_judge_options *o, const dp_case *c, const dp_run *failed,
                                  double seconds, void (*fits)(const char *text, void *arg),
                                  void *arg);

/* passed: the run of these options. Returns 1 if an error is below a thousandth of its claim's
 * expectation, and a claim that sees smaller errors would also pass. The text names that claim. */
int dp_tighter_claim(const dp_judge_options *o, const dp_run *passed, char *text, size_t size);
