/* libFuzzer target: the inputs of `judge`. Any safetensors bytes with any of these settings are either refused with a message that names the file, or a
 * consistent problem. The first byte chooses the settings, the rest are the file. */
#include "../case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const char *const op[] = {"kda", "gdn", "mkda", "kda"}, *const gate[] = {"log", "softplus", "lower_bound\nlower_bound = -5", "log"};
    char text[512];
    dp_tensorfile f;
    dp_case c;
    dp_err e = {0};
    if (!size) return 0;
    const int z = *bytes;
    snprintf(text, sizeof text, "reason = r\nsource = s\nop = %s\nR = %d\ngate = %s\nbeta = %s\nl2norm = %s\nranks = %d\nbase = bf16\nchain = fp32\nbackward = %s\n%s", op[z & 3], (z & 3) == 2 ? 2 : 1, gate[z >> 2 & 3],
             z & 16 ? "sigmoid" : "plain", z & 32 ? "yes" : "no", z & 64 ? 2 : 1, z & 128 ? "yes" : "no", z == 7 ? "T = 2\n" : z == 8 ? "cu_seqlens = 0,1,1,2\n" : "");
    if (dp_safetensors_parse(bytes + 1, size - 1, "fuzz", &f, &e)) {
        must(e.code == DP_EINPUT && !strncmp(e.msg, "fuzz: ", 6), "refused without a message");
        return 0;
    }
    if (dp_case_from_tensors(text, &f, &c, &e)) must(e.code && !strncmp(e.msg, "fuzz", 4), e.msg);
    else {
        must(!dp_problem_check(&c.p, 0, &e), e.msg);
        must(c.p.T % c.ranks[0] == 0 && c.p.HV % c.p.H == 0 && c.p.cu[c.p.Nseq] == c.p.T, "inconsistent");
        dp_case_free(&c);
    }
    dp_tensorfile_free(&f);
    return 0;
}
