/* harness/run/judge_mamba.h - files under the names of Mamba-2's state space duality, `--layout
 * mamba` (metadata `layout`), as the recurrence that `judge` knows as SSD:
 *
 *   IN   x [T,HV,V]  dt [T,HV]  A [HV]  B C [T,H,K]  initial_states [Nseq,HV,V,K]   dout as do
 *   OUT  y or out [T,HV,V]  final_states [Nseq,HV,V,K]   dB dC [T,H,K]  dinitial_states
 *   q = C, k = B, v = x dt, g = A dt, nothing is erased, scale 1, no norm, states [V,K].
 *
 * The factor dt of x is after its bias and softplus; H groups serve HV heads. Unless dt is fp64, v
 * and g are rounded to fp32 once, as kernels form them. A batch axis may come first. Other tensors
 * (D, z, dx, ddt, dA) are refused by their names: they are not part of the recurrence. */
#ifndef DP_JUDGE_MAMBA_H
#define DP_JUDGE_MAMBA_H
#include "harness/base/complaints.h"
#include "judge.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Renames and multiplies, and adds the settings that follow as metadata, if no metadata has them.
 * option: may be NULL. Does nothing where neither it nor IN's metadata says mamba. Adds to *all: an
 * unknown word, missing tensors and those that do not fit, and Mamba's names without the word. */
void dp_judge_mamba(dp_tensorfile *in, dp_tensorfile *out, const char *given, dp_complaints *all);

#ifdef __cplusplus
}
#endif
#endif
