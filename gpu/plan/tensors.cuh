/* gpu/plan/tensors.cuh - which tensors a problem has, a row each: what its rows are, how wide they
 * are, of which type, and where its pointer stands. */
#ifndef DPG_TENSORS_CUH
#define DPG_TENSORS_CUH
#include "dp_gpu.h"
#include <vector>

/* When a tensor is read or written, and where its pointer stands: of the forward in dpg_tensors, of
 * the backward in dpg_grads. */
enum When { FORWARD_IN, FORWARD_OUT, BACKWARD_IN, BACKWARD_OUT };
static inline int of_backward(When when) { return when >= BACKWARD_IN; }
static inline int is_input(When when) { return when == FORWARD_IN || when == BACKWARD_IN; }

/* Rows of a tensor: tokens; sequences, of the rank where they start, or end; or one row, the same
 * on every rank. */
enum RowKind { TOKENS, STARTS, ENDS, ROW_KINDS, ONE_ROW = ROW_KINDS };

/* A tensor [rows][heads][width]. */
struct Tensor {
    const char *name;
    When when;
    RowKind rows;
    int by_query; /* its heads are those of q, not of v */
    int width;    /* numbers of one head; 0: not of this recurrence */
    dpg_dtype type;
    size_t slot; /* bytes into dpg_tensors or dpg_grads */
};

static inline int bytes_of(dpg_dtype type) { return type == DPG_F32 ? 4 : 2; }

/* Where its pointer stands. */
static inline void **slot_of(const Tensor &x, const dpg_tensors *t, const dpg_grads *g) {
    return (void **)((of_backward(x.when) ? (char *)g : (char *)t) + x.slot);
}

/* All that the recurrences have, inputs first. */
std::vector<Tensor> tensors_of(const dpg_problem *p);
#endif
