/* The layout of harness/deltaproof_subject.h, which libraries are built against. Within one
 * DP_SUBJECT_ABI a field of an interface never moves, and new ones stand at the end. */
#include "gt.h"
#include "harness/deltaproof_subject.h"

#define AT(S, FIELD, OFFSET) \
    { #S "." #FIELD, offsetof(deltaproof_subject_##S, FIELD), OFFSET }

/* For x86-64 and aarch64 alike, in the order of the header. */
static const struct {
    const char *name;
    size_t is, was;
} FIELDS[] = {
    AT(info, abi, 0),
    AT(info, kind, 4),
    AT(info, max_ranks, 8),
    AT(info, name, 16),
    AT(info, base, 24),
    AT(info, chain, 32),
    AT(info, writes, 40),
    AT(problem, abi, 0),
    AT(problem, size, 4),
    AT(problem, H, 8),
    AT(problem, HV, 12),
    AT(problem, K, 16),
    AT(problem, V, 20),
    AT(problem, R, 24),
    AT(problem, Kg, 28),
    AT(problem, Nseq, 32),
    AT(problem, gate_form, 36),
    AT(problem, beta_form, 40),
    AT(problem, l2norm, 44),
    AT(problem, backward, 48),
    AT(problem, rank, 52),
    AT(problem, ranks, 56),
    AT(problem, T, 64),
    AT(problem, first, 72),
    AT(problem, tokens, 80),
    AT(problem, scale, 88),
    AT(problem, lower_bound, 96),
    AT(problem, input_format, 104),
    AT(problem, base, 112),
    AT(problem, chain, 120),
    AT(problem, cu, 128),
    AT(problem, q, 136),
    AT(problem, k, 144),
    AT(problem, v, 152),
    AT(problem, g, 160),
    AT(problem, beta, 168),
    AT(problem, A_log, 176),
    AT(problem, dt_bias, 184),
    AT(problem, initial_state, 192),
    AT(problem, dout, 200),
    AT(problem, dfinal_state, 208),
    AT(problem, chunk, 216),
    AT(problem, nslot, 220),
    AT(problem, read_slot, 224),
    AT(problem, write_slot, 232),
    AT(problem, erase, 240),
    AT(problem, write, 248),
    AT(problem, in_turn, 256),
    AT(problem, lr_a, 264),
    AT(problem, lr_b, 272),
    AT(problem, recurrence, 280),
    AT(problem, drafts, 288),
    AT(problem, draft_slot, 296),
    AT(problem, accepted, 304),
    AT(problem, parent, 312),
    AT(problem, number, 320),
    AT(problem, angle, 328),
    AT(problem, P, 336),
    AT(problem, ring_slot, 344),
    AT(problem, ring_tokens, 352),
    AT(problem, value3, 360),
    AT(problem, value4, 368),
    AT(problem, previous, 376),
    AT(tensor, name, 0),
    AT(tensor, ndim, 8),
    AT(tensor, shape, 16),
    AT(tensor, data, 64),
    AT(comm, rank, 0),
    AT(comm, ranks, 4),
    AT(comm, all_gather, 8),
    AT(call, count, 0),
    AT(call, tensor, 8),
    AT(call, comm, 16),
    AT(call, why, 24),
};

DP_TEST(abi, no_field_of_a_library_s_interface_moves) {
    CHECK(DP_SUBJECT_ABI == 1, "a new interface has a table of its own: FIELDS is of 1");
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++)
        CHECK(FIELDS[i].is == FIELDS[i].was, "%s is at %zu, libraries have it at %zu",
              FIELDS[i].name, FIELDS[i].is, FIELDS[i].was);
    /* fields after the last one do not disturb an older library; a field here needs a row */
    CHECK(sizeof(deltaproof_subject_info) == 48 && sizeof(deltaproof_subject_problem) == 384 &&
              sizeof(deltaproof_subject_tensor) == 72 && sizeof(deltaproof_subject_call) == 32,
          "a struct has grown: add its new fields");
}

DP_TEST(abi, no_number_of_a_library_s_interface_changes) {
    CHECK(DP_SUBJECT_WHOLE == 0 && DP_SUBJECT_PER_RANK == 1, "kind");
    CHECK(DP_SUBJECT_OK == 0 && DP_SUBJECT_UNSUPPORTED == -1, "what run returns");
    CHECK(DP_SUBJECT_GATE_LOG == 0 && DP_SUBJECT_GATE_SOFTPLUS == 1 &&
              DP_SUBJECT_GATE_LOWER_BOUND == 2,
          "gate_form");
    CHECK(DP_SUBJECT_BETA_PLAIN == 0 && DP_SUBJECT_BETA_SIGMOID == 1 &&
              DP_SUBJECT_BETA_SIGMOID2 == 2,
          "beta_form");
}
