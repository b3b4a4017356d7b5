/* harness/run/judge_files.h - brings files of other programs into the form of judge.h, before
 * anything is checked: settings, names, batches.
 *
 * Each setting comes from its option, else from the metadata of a file, else a complaint names the
 * option to set (judge.h).
 */
#ifndef DP_JUDGE_FILES_H
#define DP_JUDGE_FILES_H
#include "harness/base/terminal.h"
#include "judge.h"
#include "ref/files/safetensors.h"

/* ---- settings -------------------------------------------------------------------------------- */

/* A base that files may name: fp16 is base bf16 whose factors and outputs are fp16 (design.h). */
typedef struct {
    const char *name;  /* as it was said */
    const char *base;  /* of the case */
    const char *words; /* of the design that it implies; "": none */
} dp_judge_base;

typedef struct {
    const char *gate, *beta, *l2norm, *claim, *cu; /* as a case file has them; cu NULL: not set */
    dp_judge_base base;
    dp_format gate_dtype;      /* that g is read in; fp64: as IN holds it */
    double scale, lower_bound; /* NAN: not set */
    int ranks, in_vk, out_vk;
    int decays;      /* g is the decay itself, gate log of its logarithm */
    int64_t batch;   /* B of [B,T,..]; 0: there was none (judge_files.h) */
    int64_t queries; /* query heads a value head, where there are several (judge_files.h); else 0 */
    char *folded;    /* cu of either, to be freed */
} dp_judge_settings;

/* All of them; what is missing or not understood is added to *all. */
void dp_judge_settings_read(const dp_judge_options *o, const dp_tensorfile *in,
                            const dp_tensorfile *out, dp_judge_settings *s, dp_complaints *all);

#define DP_JUDGE_GATE_DTYPES "fp32|bf16|fp16"
#define DP_JUDGE_CLAIM "--claim " DP_FORMAT_WORDS " (format of the M chain)"

/* Is it said, by the option (may be NULL) or by metadata, that nothing is erased? */
int dp_judge_without_beta(const dp_tensorfile *in, const char *given);

/* Single ones; dflt NULL: required. */
int dp_judge_rank_count(const dp_tensorfile *out, int given, dp_complaints *all);
int dp_judge_state_vk(const dp_tensorfile *f, const char *given, dp_complaints *all);
const char *dp_judge_claim(const dp_tensorfile *out, const char *given, const char *option,
                           const char *dflt, dp_complaints *all);
dp_judge_base dp_judge_base_of(const dp_tensorfile *out, const char *given, const char *dflt,
                               dp_complaints *all);

/* Is it the name of a recurrence that stands here? */
int dp_judge_is_recurrence(const char *name);
/* Which of these option or metadata `recurrence` name; -1: nobody says, or a user's own. */
int dp_judge_recurrence(const dp_judge_options *o, const dp_tensorfile *in);

/* ---- names, batches, query heads ------------------------------------------------------------- */

/* An input of the file, under its name or its alias, to be changed; NULL: not there. */
dp_tensor *dp_judge_input(const dp_tensorfile *f, dp_input_id input);

/* An axis of keys that is 1 long, k [T,H,1,K] and v [T,HV,1,V] beside q [T,H,K]: it goes, from beta
 * and the gradients too. */
void dp_judge_one_key(dp_tensorfile *in, dp_tensorfile *out);

/* IN has no g, and no setting contradicts log: there is no decay, and g becomes zeros. It has one
 * number a head or, where `said` (dp_judge_recurrence) has gates of channels, K. Returns whether it
 * did. Added to *all: dg in OUT, several keys a token where nobody says how their rows read. */
int dp_judge_no_gate(dp_tensorfile *in, const dp_tensorfile *out, const char *gate, int said,
                     dp_complaints *all);

/* Mamba's names (judge.h): renames and multiplies, and adds the settings that follow as metadata,
 * if no metadata has them. option: may be NULL. Does nothing where neither it nor IN's metadata
 * says mamba. Adds to *all: an unknown word, missing tensors and tensors that do not fit. Also
 * Mamba's names without the word. */
void dp_judge_mamba(dp_tensorfile *in, dp_tensorfile *out, const char *given, dp_complaints *all);

/* A batch of B > 1: q is [B,T,H,K]. The B sequences become packed ones of B*T tokens. Every tensor
 * that begins with [B,T] loses that axis, s->cu has their begins, and s->batch is B. DP_EINPUT:
 * cu_seqlens or several ranks beside a batch; a tensor of tokens that has another B or T.
 *
 * Several query heads a value head: q [T,H n,K], o and do [T,HV n,V] beside k and v of H = HV
 * heads. Query head h n + j of token t becomes head h of token t n + j. Tokens with j > 0 have no
 * key, no value and no decay. The number n goes to s->queries. DP_EINPUT: stages, dg of a log
 * gate. */
dp_status dp_judge_fold(dp_tensorfile *in, dp_tensorfile *out, dp_judge_settings *s, dp_err *e);
#endif
