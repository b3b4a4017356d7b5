/* gpu/plan/tensors.cuh - which tensors a problem has, a row each: what its rows are, how wide they
 * are, of which type, and where its pointer stands. */
#ifndef DPG_TENSORS_CUH
#define DPG_TENSORS_CUH
#include "dp_gpu.h"
#include <cuda_runtime.h>
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
    int id; /* dp_input_id, of an output dp_result_id */
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

/* Inputs whose rows have K channels, or V; that have a row for each query head, or for each of R
 * keys. The others are numbers, gates and angles. */
#define INPUT_BIT(ID) (1u << DP_INPUT_##ID)
#define OR_BIT(ID, ...) | INPUT_BIT(ID)
enum {
    KEYS = INPUT_BIT(Q) | INPUT_BIT(K) DP_ROW_KEYS(OR_BIT),
    VALUES = INPUT_BIT(V) DP_ROW_VALUES(OR_BIT),
    BY_QUERY = INPUT_BIT(Q) | INPUT_BIT(K) | INPUT_BIT(LR_B),
    BY_KEY = INPUT_BIT(K) | INPUT_BIT(V) | INPUT_BIT(BETA)
};
static inline __host__ __device__ int is_in(unsigned set, int input) { return set >> input & 1; }

/* An input of one row a token, and its gradient: their slots in dpg_tensors and dpg_grads. */
struct Input {
    dp_input_id id; /* -1: the list ends */
    dp_result_id result;
    const char *name, *gradient;
    size_t slot, grad_slot;
};
extern const Input inputs_of_tokens[];
/* The rows of a problem's tokens. */
const dp_recurrence *rows_of(const dpg_problem *p);

/* All that the recurrences have, inputs first. */
std::vector<Tensor> tensors_of(const dpg_problem *p);
#endif
