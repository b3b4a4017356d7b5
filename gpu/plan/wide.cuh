/* gpu/plan/wide.cuh - values wider than the fast path's kernels. Columns of V are independent in
 * these recurrences: a value head of V columns is `cols` value heads of V / cols. They share q, k,
 * the gate and beta. A plan of such a problem holds one of the narrower problem, and
 * moves what does not lie in memory as that one reads it. */
#ifndef DPG_WIDE_CUH
#define DPG_WIDE_CUH
#include "plan/plan.cuh"
#include "plan/tensors.cuh"

/* A tensor of the narrower problem that is not the caller's as it lies. */
struct WideTensor : Tensor {
    int runs; /* number of words that lie `cols` times in a head of the caller's: pieces of a row.
               * 0: all heads share the row, and gradients of it are added */
    dpg_dtype theirs; /* the caller's type */
    size_t at;        /* into the workspace */
};

struct Wide {
    dpg_plan *one;
    int cols;
    std::vector<WideTensor> tensor;
    size_t bytes; /* workspace, of `one` and these tensors */
};

/* Columns of a value head on the fast path: those that its kernels take of V; 0: they do not. */
static inline int fast_columns_of(int V) { return V % 128 == 0 ? 128 : V % 64 == 0 ? 64 : 0; }

/* The narrower problem. Parts of summed gradients stay in fp32 until they are added up. */
static inline dpg_problem narrower(const dpg_problem *p) {
    dpg_problem n = *p;
    n.V = fast_columns_of(p->V);
    n.HV = p->HV * (p->V / n.V);
    n.dgdtype = n.dA_dtype = n.dbias_dtype = DPG_F32;
    return n;
}
#endif
