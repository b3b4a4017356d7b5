/* gpu/tests/graph.h - work of a rank captured in a CUDA graph and replayed. */
#ifndef DPG_TESTS_GRAPH_H
#define DPG_TESTS_GRAPH_H
#include "rank.h"

/* What enqueue() puts on the rank's stream, captured and then run once; r.st says whether the
 * capture succeeded. */
template <class F> static void run_as_graph(Rank &r, F enqueue) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal));
    enqueue();
    CUDA(cudaStreamEndCapture(r.stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphLaunch(exec, r.stream));
    CUDA(cudaStreamSynchronize(r.stream));
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
}
#endif
